//! State that requests share.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout_at};

use crate::activity::Activity;
use crate::connections::{Connections, Crowded};
use crate::hosts::Hosts;
use crate::memory::Budget;
use crate::metrics::Metrics;
use crate::options::ServerOptions;
use crate::pulls::Pulls;
use crate::queue::Queue;
use crate::registry::Registry;
use crate::stored_responses::StoredResponses;

/// Texts that are tokenized at a time beside the queue.
const TOKENIZING: usize = 2;

/// Sessions in which audio comes piece by piece, at a time. Each may hold a message that no memory was taken for.
const SESSIONS: usize = 64;

/// Time without a request after which memory goes back.
const QUIET: Duration = Duration::from_millis(500);

/// State that requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub options: ServerOptions,
    pub registry: Registry,
    pub pulls: Pulls,
    /// The place for a check of the machine, of which there is one at a time.
    pub checking: Semaphore,
    pub queue: Queue,
    pub metrics: Metrics,
    /// True once the server takes no further request. Those that go on for long, such as sessions, hold a receiver: the
    /// server ends when there is none any more.
    pub stopping: watch::Sender<bool>,
    /// Sessions of `/v1/realtime` and connections of the Wyoming protocol.
    pub sessions: Arc<Connections>,
    pub hosts: Hosts,
    /// Memory of all requests.
    pub memory: Budget,
    /// Places for texts that are tokenized beside the queue.
    pub tokenizing: Arc<Semaphore>,
    pub activity: Activity,
    /// Responses that later ones go on from.
    pub stored: StoredResponses,
    keys: Vec<[u8; 32]>,
}

pub(crate) type Shared = Arc<App>;

/// Origin of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub address: SocketAddr,
    /// Set where the connection is beyond the limits.
    pub crowded: Option<Crowded>,
}

impl App {
    /// True once the server takes no further request.
    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    pub(crate) fn new(options: ServerOptions, registry: Registry) -> Self {
        Self {
            pulls: Pulls::default(),
            checking: Semaphore::new(1),
            queue: Queue::new(options.queue),
            metrics: Metrics::default(),
            stopping: watch::Sender::new(false),
            sessions: Connections::new(SESSIONS.min(options.max_connections)),
            hosts: Hosts::new(&options.allowed_hosts),
            memory: Budget::new(options.request_memory),
            tokenizing: Arc::new(Semaphore::new(TOKENIZING)),
            activity: Activity::default(),
            stored: StoredResponses::new(options.api_keys.len()),
            keys: options.api_keys.iter().map(|key| digest(key)).collect(),
            registry,
            options,
        }
    }

    /// True if requests need a key.
    pub(crate) fn asks_for_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Number of a key among those that are asked for, counted from 1. How long that takes says nothing about them.
    pub(crate) fn number_of(&self, key: &str) -> Option<u64> {
        let key = digest(key);
        let mut found = 0;
        for (number, known) in (1..).zip(&self.keys) {
            found.conditional_assign(&number, known.ct_eq(&key));
        }
        (found > 0).then_some(found)
    }
}

/// Tidies up whenever no request is under way, and wakes for nothing else: sessions that nobody has used for a while
/// are closed, and memory that was freed goes back to the system.
pub(crate) async fn tidy(shared: Shared) {
    let activity = &shared.activity;
    loop {
        let settled = activity.settled();
        match shared.registry.next_release(shared.options.session_idle) {
            Some(at) => {
                let _ = timeout_at(Instant::from_std(at), settled).await;
            }
            None => settled.await,
        }
        let of = Arc::clone(&shared);
        let released = tokio::task::spawn_blocking(move || {
            of.registry.expire() + of.registry.release(of.options.session_idle)
        });
        if released.await.unwrap_or_default() > 0 {
            activity.takes_much();
        }
        if activity.is_idle() && activity.took_much() {
            sleep(QUIET).await;
            if activity.is_idle() && activity.forget_much() {
                let trimmed = tokio::task::spawn_blocking(qhx_base::memory::give_back);
                let _ = trimmed.await;
            }
        }
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}
