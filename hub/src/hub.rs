//! Asks a hub.

use std::time::Duration;

use qhx_base::{CancelToken, Error, ErrorKind, Result, error, files};

use crate::cache::Cache;
use crate::choose::{CheckpointFiles, Selection, module_folders, split};
use crate::http::{Client, Failure, encoded};
use crate::listing::{Listing, MAX_BYTES};
use crate::name::Name;
use crate::options::HubOptions;
use crate::wait::{interruptible, pause};

/// Longest `modules.json` that is read.
const MAX_MODULES: u64 = 1 << 20;
/// Attempts to get a list of files.
const ATTEMPTS: u32 = 3;

/// A hub, and the cache of what was fetched from it.
///
/// ```no_run
/// use qhx_base::CancelToken;
/// use qhx_hub::{Hub, HubOptions, Want};
///
/// let hub = Hub::new(HubOptions::from_environment()?);
/// let cancel = CancelToken::new();
/// let listing = hub.resolve(&"owner/name@main".parse()?, &cancel)?;
/// let want = Want { archs: vec![81], ..Want::default() };
/// let selection = want.select(&listing, |name| name.ends_with(".json"))?;
/// let pulled = hub.download(&selection, &|progress| drop(progress), &cancel)?;
/// println!("{}", pulled.path.display());
/// # Ok::<(), qhx_base::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Hub {
    options: HubOptions,
    cache: Cache,
}

impl Hub {
    /// A hub. Nothing is asked yet.
    pub fn new(options: HubOptions) -> Self {
        Self { cache: Cache::new(&options.cache), options }
    }

    /// Options that it was made with.
    pub fn options(&self) -> &HubOptions {
        &self.options
    }

    /// Cache of fetched files.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Asks which commit a name leads to, and for the files of it.
    ///
    /// # Errors
    /// When the hub cannot be reached, does not know the name or refuses it, and when it is cancelled.
    pub fn resolve(&self, name: &Name, cancel: &CancelToken) -> Result<Listing> {
        if self.options.offline {
            return Err(offline(name));
        }
        let client = Client::new(&self.options)?;
        let revision = encoded(name.revision_or_main());
        let path = format!("api/models/{}/revision/{revision}?blobs=true", name.repository());
        let url = client.url(&path);
        let bytes = interruptible(client.agent(), cancel, || self.list(&client, &url, cancel))?;
        Listing::parse(name, &bytes)
    }

    /// The files of the checkpoint that a name leads to, or of one GGUF file. The folders of further modules are those
    /// that its `modules.json` names, which is downloaded first.
    ///
    /// # Errors
    /// When there is no checkpoint, or GGUF files are several and none is named; and as [`Hub::download`].
    pub fn checkpoint(
        &self,
        listing: &Listing,
        wanted: CheckpointFiles,
        cancel: &CancelToken,
    ) -> Result<Selection> {
        let modules = match Selection::modules(listing)? {
            None => Vec::new(),
            Some(list) => {
                let pulled = self.download(&list, &|_| {}, cancel)?;
                let name = list.files.first().map(|file| split(&file.path).1).unwrap_or_default();
                let path = pulled.path.join(name);
                module_folders(&files::read(ErrorKind::Artifact, &path, MAX_MODULES)?)
            }
        };
        Selection::checkpoint(listing, wanted, &modules)
    }

    fn list(&self, client: &Client, url: &str, cancel: &CancelToken) -> Result<Vec<u8>> {
        let mut failures = 0;
        loop {
            cancel.check()?;
            let failure = match list_once(client, url) {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => failure,
            };
            failures += 1;
            let wait = match &failure {
                Failure::Passing(_, wait)
                    if failures < ATTEMPTS.min(self.options.attempts.max(1)) =>
                {
                    *wait
                }
                _ => return Err(failure.into_error()),
            };
            let doubled = self.options.backoff.saturating_mul(failures);
            pause(wait.unwrap_or(doubled.min(Duration::from_secs(10))), cancel)?;
        }
    }
}

fn list_once(client: &Client, url: &str) -> Result<Vec<u8>, Failure> {
    let response = client.get(url, None)?;
    let body = response.into_body().into_with_config().limit(MAX_BYTES).read_to_vec();
    body.map_err(|e| Failure::Passing(Error::caused(ErrorKind::Io, "the list of files", e), None))
}

/// The error of whoever would have to ask a network.
pub(crate) fn offline(name: &Name) -> Error {
    error!(Io, "{name}: it is not there, and nothing is fetched offline")
        .hint("unset HF_HUB_OFFLINE to fetch it")
}
