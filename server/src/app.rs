//! What requests share.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use crate::metrics::Metrics;
use crate::options::Options;
use crate::queue::Queue;
use crate::registry::Registry;

/// What requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub options: Options,
    pub registry: Registry,
    pub queue: Queue,
    pub metrics: Metrics,
    pub stopping: AtomicBool,
    keys: Vec<[u8; 32]>,
}

pub(crate) type Shared = Arc<App>;

/// Where a connection comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub SocketAddr);

impl App {
    pub(crate) fn new(options: Options, registry: Registry) -> Self {
        Self {
            queue: Queue::new(options.queue),
            metrics: Metrics::default(),
            stopping: AtomicBool::new(false),
            keys: options.api_keys.iter().map(|key| digest(key)).collect(),
            registry,
            options,
        }
    }

    /// Whether a request needs a key.
    pub(crate) fn asks_for_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Whether a key is one of those that are asked for. How long that takes says nothing about them.
    pub(crate) fn knows(&self, key: &str) -> bool {
        let key = digest(key);
        let any = |found: Choice, known: &[u8; 32]| found | known.ct_eq(&key);
        self.keys.iter().fold(Choice::from(0), any).into()
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}
