//! Options of a hub: its address, and the folder for fetched files.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The hub that is asked where no other is named.
pub const ENDPOINT: &str = "https://huggingface.co";

/// Options of a hub: its address, the folder for fetched files, and the limits of downloads.
#[derive(Clone)]
#[non_exhaustive]
pub struct HubOptions {
    /// Scheme and host, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Sent to the endpoint's host and to no other, over TLS or loopback only.
    pub token: Option<String>,
    /// The folder of `models--OWNER--NAME`.
    pub cache: PathBuf,
    /// Nothing is asked of a network.
    pub offline: bool,
    /// URL of a proxy for all requests.
    pub proxy: Option<String>,
    /// Hosts that are reached without the proxy, separated by commas.
    pub no_proxy: Option<String>,
    /// A file of certificates in PEM: the authorities that are trusted, instead of those that are built in.
    pub authorities: Option<PathBuf>,
    /// Files that are fetched at once.
    pub connections: usize,
    /// Failures in a row that a file may have without a byte more of it.
    pub attempts: u32,
    /// Pause before the second attempt; it doubles with each.
    pub backoff: Duration,
    /// Longest silence of a connection.
    pub idle: Duration,
    /// Function that returns the free bytes in the file system of a folder.
    pub free_space: fn(&Path) -> io::Result<u64>,
}

impl HubOptions {
    /// The public hub, without a token, and this folder.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: ENDPOINT.to_owned(),
            token: None,
            cache: cache.into(),
            offline: false,
            proxy: None,
            no_proxy: None,
            authorities: None,
            connections: 4,
            attempts: 5,
            backoff: Duration::from_secs(1),
            idle: Duration::from_secs(30),
            free_space: |folder| fs4::available_space(folder),
        }
    }

    /// Scheme and host of the hub.
    #[must_use]
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = endpoint.into().trim_end_matches('/').to_owned();
        self
    }

    /// Token by which the hub knows the user.
    #[must_use]
    pub fn token(mut self, token: impl Into<Option<String>>) -> Self {
        self.token = token.into();
        self
    }

    /// Nothing is asked of a network.
    #[must_use]
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// A file of certificates in PEM: the authorities that are trusted, instead of those that are built in.
    #[must_use]
    pub fn authorities(mut self, file: impl Into<Option<PathBuf>>) -> Self {
        self.authorities = file.into();
        self
    }

    /// Failures in a row that a file may have without a byte more of it, and the pause before the second attempt.
    #[must_use]
    pub fn retries(mut self, attempts: u32, backoff: Duration) -> Self {
        (self.attempts, self.backoff) = (attempts, backoff);
        self
    }

    /// Longest silence of a connection.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Self {
        self.idle = idle;
        self
    }

    /// Function that returns the free bytes in the file system of a folder; the system's by default.
    #[must_use]
    pub fn free_space(mut self, free_space: fn(&Path) -> io::Result<u64>) -> Self {
        self.free_space = free_space;
        self
    }
}

impl std::fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "(given)"))
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}
