//! Options of a hub: its address, and the folder for fetched files.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qhx_base::setters;

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

    setters! {
        /// Scheme and host of the hub.
        endpoint(endpoint: impl Into<String>) => endpoint = endpoint.into().trim_end_matches('/').to_owned(),
        /// Token by which the hub knows the user.
        token(token: impl Into<Option<String>>) => token = token.into(),
        /// Nothing is asked of a network.
        offline: bool,
        /// A file of certificates in PEM: the authorities that are trusted, instead of those that are built in.
        authorities(file: impl Into<Option<PathBuf>>) => authorities = file.into(),
        /// Longest silence of a connection.
        idle: Duration,
        /// Function that returns the free bytes in the file system of a folder; the system's by default.
        free_space: fn(&Path) -> io::Result<u64>,
    }

    /// Failures in a row that a file may have without a byte more of it, and the pause before the second attempt.
    #[must_use]
    pub fn retries(mut self, attempts: u32, backoff: Duration) -> Self {
        (self.attempts, self.backoff) = (attempts, backoff);
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
