//! Progress of a download.

use std::time::Duration;

use qhx_base::Error;

/// Progress of a download. Called from several threads.
#[derive(Debug)]
#[non_exhaustive]
pub enum DownloadProgress<'a> {
    /// So much is wanted, of which some may be there.
    Begin {
        /// Number of files.
        files: usize,
        /// Bytes of files, each content once.
        bytes: u64,
    },
    /// This number of further bytes was there before.
    Kept(u64),
    /// This number of further bytes was fetched.
    Fetched(u64),
    /// This number of bytes that were there or fetched is discarded, and fetched again.
    Lost(u64),
    /// Another process fetches this file, and is waited for.
    Waiting {
        /// Path in the repository.
        path: &'a str,
    },
    /// An attempt failed, and there will be another one.
    Retry {
        /// Path in the repository.
        path: &'a str,
        /// Why it failed.
        error: &'a Error,
        /// The pause before the next one.
        wait: Duration,
    },
}
