//! Bundles and checkpoints of a hub: fetched by name, and found by it wherever a bundle's path is taken.
//!
//! ```no_run
//! use qhx::hub::{Hub, HubOptions, Want, pull};
//!
//! let hub = Hub::new(HubOptions::from_environment()?);
//! let want = Want { archs: qhx::hub::that_run_on(81), ..Want::default() };
//! pull(&hub, &"owner/name".parse()?, &want, &|progress| drop(progress), &qhx::CancelToken::new())?;
//! let model = qhx::Bundle::open("owner/name")?.model()?;
//! # Ok::<(), qhx::Error>(())
//! ```
//!
//! The names of what qhx and the hub's own tools fetched lead to its folder, without a network. A path that is there
//! comes first, so that no name hides a folder.

use std::path::{Path, PathBuf};

use qhx_base::rights::runs_with_extra_rights;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::manifest::is_candidate;
use qhx_qnn::runs_on;

use crate::models;

pub use qhx_hub::index;
pub use qhx_hub::{
    Cache, CheckpointFiles, DownloadProgress, FileCheck, Found, Hub, HubOptions, Kind, Listing,
    Local, LocalFile, Name, Publication, Published, Pulled, Removed, Selection, Unfinished,
    UploadProgress, VARIABLES, Want,
};

/// The newest architecture that a name may say.
const NEWEST: u32 = 99;
/// The oldest.
const OLDEST: u32 = 60;

/// Architectures of bundles that a device of the architecture `arch` runs: its own, then the newest ones.
pub fn that_run_on(arch: u32) -> Vec<u32> {
    (OLDEST..=arch.min(NEWEST)).rev().filter(|made| runs_on(*made, arch)).collect()
}

/// Fetches the bundle, or the checkpoint, that a name leads to. A commit that is there whole is not asked for again.
///
/// # Errors
/// When the hub cannot be reached or refuses; when there is no bundle or checkpoint, or `want` leaves open which; and
/// as [`Hub::download`].
pub fn pull(
    hub: &Hub,
    name: &Name,
    want: &Want,
    progress: &(dyn Fn(DownloadProgress<'_>) + Sync),
    cancel: &CancelToken,
) -> Result<Pulled> {
    pull_checked(hub, name, want, &|_| Ok(()), progress, cancel)
}

/// Same as [`pull`]; `check` sees the hub's list of files before anything is fetched.
///
/// # Errors
/// Errors of [`pull`] and of `check`.
pub fn pull_checked(
    hub: &Hub,
    name: &Name,
    want: &Want,
    check: &dyn Fn(&Listing) -> Result<()>,
    progress: &(dyn Fn(DownloadProgress<'_>) + Sync),
    cancel: &CancelToken,
) -> Result<Pulled> {
    let mut want = want.clone();
    want.folder = name.folder.clone().or(want.folder);
    if let Some(there) = already(hub, name, &want, cancel)? {
        return Ok(there);
    }
    let listing = hub.resolve(name, cancel)?;
    check(&listing)?;
    let bundles = qhx_hub::bundles(listing.paths(), is_candidate);
    let checkpoint = || hub.checkpoint(&listing, CheckpointFiles::All, cancel);
    let selection = match want.select(&listing, is_candidate) {
        // Of a repository without bundles it may be a checkpoint.
        Err(e) if bundles.is_empty() => checkpoint().map_err(|_| e)?,
        selection => selection?,
    };
    hub.download(&selection, progress, cancel)
}

/// Fetches the checkpoint, or the GGUF file, that a name leads to.
///
/// # Errors
/// Errors of [`pull`].
pub fn pull_checkpoint(
    hub: &Hub,
    name: &Name,
    files: CheckpointFiles,
    progress: &(dyn Fn(DownloadProgress<'_>) + Sync),
    cancel: &CancelToken,
) -> Result<Pulled> {
    pull_checkpoint_checked(hub, name, files, &|_| Ok(()), progress, cancel)
}

/// Same as [`pull_checkpoint`]; `check` sees the hub's list of files before anything is fetched.
///
/// # Errors
/// Errors of [`pull`] and of `check`.
pub fn pull_checkpoint_checked(
    hub: &Hub,
    name: &Name,
    files: CheckpointFiles,
    check: &dyn Fn(&Listing) -> Result<()>,
    progress: &(dyn Fn(DownloadProgress<'_>) + Sync),
    cancel: &CancelToken,
) -> Result<Pulled> {
    if let Some(there) = already(hub, name, &Want::default(), cancel)? {
        return Ok(there);
    }
    let listing = hub.resolve(name, cancel)?;
    check(&listing)?;
    hub.download(&hub.checkpoint(&listing, files, cancel)?, progress, cancel)
}

/// Files that need no request to the hub: a commit that was fetched before, or any local copy if offline.
fn already(hub: &Hub, name: &Name, want: &Want, cancel: &CancelToken) -> Result<Option<Pulled>> {
    let offline = hub.options().offline;
    let narrowed = !want.include.is_empty() || want.manifest.is_some();
    if narrowed || !(name.is_pinned() || offline) {
        return Ok(None);
    }
    // What is damaged or not clear here is, after the hub was asked.
    let found = hub.already(name, want, cancel);
    let found = if offline { found? } else { found.unwrap_or_default() };
    let best = |found: &Pulled| {
        let said = |arch: &u32| found.folder.split('/').any(|part| part == format!("v{arch}"));
        offline || name.folder.is_some() || want.archs.first().is_none_or(said)
    };
    Ok(found.filter(best))
}

/// The path of what `path` means: itself where something is there, or what was fetched from a hub by this name. Of
/// several bundles it is the newest.
///
/// # Errors
/// When a file of what was fetched is gone or damaged.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    resolve_for(path, || None)
}

/// Same as [`resolve`], for a device of the architecture `arch`, which is asked for only if it matters.
pub fn resolve_for(path: &Path, arch: impl FnOnce() -> Option<u32>) -> Result<PathBuf> {
    // What a user put there is not for who has more rights.
    if runs_with_extra_rights() {
        return Ok(path.to_owned());
    }
    let mut arch = Some(arch);
    let mut device = None;
    let mut path = path.to_owned();
    if let Some(name) = models::name_of(&path) {
        device = arch.take().and_then(|arch| arch());
        let Some((record, found)) = models::find(&name, device) else { return Ok(path) };
        if record.repository.is_none() {
            tracing::info!(name, path = %found.display(), "made on this machine");
            return Ok(found);
        }
        path = found;
    }
    let arch = || arch.map_or(device, |arch| arch());
    let Some(name) = name_of(&path) else { return Ok(path) };
    let Ok(options) = HubOptions::from_environment() else { return Ok(path) };
    let cache = Cache::new(options.cache);
    let cancel = CancelToken::new();
    let find = |want: &Want| cache.find(&name, want, is_candidate, &cancel);
    let found = match find(&Want::default()) {
        Err(e) if e.kind() == ErrorKind::Usage => {
            let archs = arch().map_or_else(|| (OLDEST..=NEWEST).rev().collect(), that_run_on);
            find(&Want { archs, ..Want::default() })
        }
        found => found,
    };
    let Some(found) = found? else { return Ok(path) };
    tracing::info!(name = %name, path = %found.path.display(), "fetched from a hub");
    Ok(found.path)
}

/// The name that a path is, where nothing is there.
fn name_of(path: &Path) -> Option<Name> {
    let mut file = path.file_name()?.to_owned();
    file.push(".json");
    if path.exists() || path.with_file_name(file).is_file() {
        return None;
    }
    path.to_str()?.parse().ok()
}

/// The error of a path at which nothing is there, with how to fetch what has that name.
pub fn how_to_fetch(path: &Path, error: Error) -> Error {
    let named = models::name_of(path);
    let Some(name) = named.or_else(|| name_of(path).map(|name| name.to_string())) else {
        return error;
    };
    let hint = error.hint_text().map(|hint| format!("{hint}; "));
    let hint = hint.unwrap_or_default();
    error.hint(format!("{hint}if it is a name, fetch it: qhx pull {name}"))
}

#[cfg(test)]
mod tests {
    use qhx_base::error;

    use super::*;

    #[test]
    fn a_device_is_given_its_own_or_the_newest_that_it_runs() {
        assert_eq!(that_run_on(75), [75, 74, 73]);
        assert_eq!(that_run_on(69)[..3], [69, 68, 67]);
    }

    #[test]
    fn a_path_that_is_there_is_no_name() {
        assert!(name_of(Path::new("owner/name")).is_some());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m.json"), "{}").unwrap();
        for path in [dir.path().to_owned(), dir.path().join("m"), PathBuf::from("src")] {
            assert_eq!(name_of(&path), None, "{}", path.display());
        }
        let error = how_to_fetch(Path::new("o/n"), error!(Manifest, "x").hint("y"));
        assert_eq!(error.hint_text(), Some("y; if it is a name, fetch it: qhx pull o/n"));
    }
}
