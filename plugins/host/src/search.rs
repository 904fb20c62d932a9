//! Places that are searched for plugins, in order:
//!
//! 1. files named with `--plugin`;
//! 2. folders named with `--plugin-dir`;
//! 3. ops linked into the program;
//! 4. folders in `QHX_PLUGIN_PATH`;
//! 5. the user's data folder, `qhx/plugins` in it, for installed plugins;
//! 6. beside the executable, and `plugins` there.
//!
//! Never the working directory and never the bundle: a bundle is data that somebody downloaded.
//! A program that runs with more rights than its user (set-user-id) skips 4 and 5, and loads of 6 only what a
//! `plugins.lock` there lists.
//!
//! A folder with a `plugins.lock` loads what the lock lists and nothing else. A folder without one
//! loads what lies in it, except the user's data folder, which loads installed plugins only. Beside the executable and
//! in `plugins` there only files named like a host-op plugin (`libqhx_ops_*`) count. So a plugin that was just built
//! works beside the executable, with `--plugin` and `--plugin-dir`, without being installed.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use etcetera::{BaseStrategy, choose_base_strategy};
use qhx_base::rights::runs_with_extra_rights;
use qhx_base::setters;

use crate::probe::Prober;

/// Which plugins to consider.
///
/// ```
/// let linked_in_only = qhx_plugins::PluginOptions::default().no_plugins(true);
/// # let _ = linked_in_only;
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct PluginOptions {
    /// Files that must load.
    pub files: Vec<PathBuf>,
    /// Folders to search first.
    pub dirs: Vec<PathBuf>,
    /// Consider nothing but `files`, `dirs` and what is linked in.
    pub only_named: bool,
    /// Consider nothing but what is linked in.
    pub no_plugins: bool,
    /// Do not ask who could change a file. Ignored when the program runs with more rights than its
    /// user.
    pub allow_untrusted: bool,
    /// Tries every plugin that is not installed in a child process before it is loaded.
    pub prober: Option<Prober>,
}

impl PluginOptions {
    setters! {
        /// Files that must load.
        files(files: impl IntoIterator<Item = PathBuf>) => files = files.into_iter().collect(),
        /// Folders to search first.
        dirs(dirs: impl IntoIterator<Item = PathBuf>) => dirs = dirs.into_iter().collect(),
        /// If true, only `files`, `dirs` and the ops linked in are considered.
        only_named: bool,
        /// If true, only the ops linked in are considered.
        no_plugins: bool,
        /// If true, the check of who could change a file is skipped.
        allow_untrusted: bool,
        /// Tries every plugin that is not installed in a child process before it is loaded.
        prober(prober: impl Into<Option<Prober>>) => prober = prober.into(),
    }
}

/// Variable with folders to search, separated like `PATH`.
pub const PATH_VARIABLE: &str = "QHX_PLUGIN_PATH";

/// A path that is searched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The folder.
    pub dir: PathBuf,
    /// Why it is searched, for people.
    pub why: &'static str,
    /// Only files named like a host-op plugin count: the folder may hold other libraries.
    pub by_name: bool,
    /// Only what the folder's lock lists counts, also when there is no lock.
    pub installed_only: bool,
}

/// A folder of the user's. One that is not absolute is passed over, as the XDG base directory specification demands: it
/// would depend on the working directory, which may be anybody's.
fn users(folder: impl Fn(&dyn BaseStrategy) -> PathBuf) -> Option<PathBuf> {
    let strategy = choose_base_strategy().ok()?;
    Some(folder(&strategy)).filter(|folder| folder.is_absolute())
}

/// The folder for plugins in the user's data folder, when there is one.
pub fn user_dir() -> Option<PathBuf> {
    users(|folders| folders.data_dir()).map(|data| data.join("qhx/plugins"))
}

/// The file that remembers what came of trying plugins, in the user's cache folder. None when the
/// program runs with more rights than its user.
pub fn memory_file() -> Option<PathBuf> {
    if runs_with_extra_rights() {
        return None;
    }
    users(|folders| folders.cache_dir()).map(|cache| cache.join("qhx/plugins-tried.json"))
}

/// Folders that are searched after what is linked in.
pub fn default_places() -> Vec<Place> {
    places(runs_with_extra_rights())
}

fn places(extra_rights: bool) -> Vec<Place> {
    let place = |dir, why| Place { dir, why, by_name: false, installed_only: false };
    let mut places = Vec::new();
    if let Some(value) = env::var_os(PATH_VARIABLE).filter(|_| !extra_rights) {
        let dirs = env::split_paths(&value).filter(|dir| dir.is_absolute());
        places.extend(dirs.map(|dir| place(dir, PATH_VARIABLE)));
    }
    if let Some(dir) = user_dir().filter(|_| !extra_rights) {
        places.push(Place { installed_only: true, ..place(dir, "the user's data folder") });
    }
    if let Some(dir) = env::current_exe()
        .ok()
        .and_then(|exe| dunce::canonicalize(exe).ok())
        .and_then(|exe| exe.parent().map(Path::to_path_buf))
    {
        for dir in [dir.join("plugins"), dir].into_iter().rev() {
            let place = place(dir, "beside the executable");
            places.push(Place { by_name: true, installed_only: extra_rights, ..place });
        }
    }
    places
}

/// Plugin files in a folder, sorted by name. A folder that cannot be read has none.
pub fn files_in(place: &Place) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(&place.dir) else { return Vec::new() };
    let prefix = format!("{}qhx_ops_", env::consts::DLL_PREFIX);
    let mut files: Vec<_> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new(env::consts::DLL_EXTENSION)))
        .filter(|path| {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            !name.starts_with('.') && (!place.by_name || name.starts_with(&prefix))
        })
        .collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setuid_program_searches_the_executables_folders_only() {
        let all = places(false);
        assert!(all.iter().any(|p| p.installed_only) || user_dir().is_none());
        let few = places(true);
        assert!(!few.is_empty());
        assert!(few.iter().all(|p| p.why == "beside the executable"), "{few:?}");
        assert!(few.iter().all(|p| p.installed_only), "{few:?}");
    }

    #[test]
    fn a_library_of_another_name_beside_the_program_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let (prefix, extension) = (env::consts::DLL_PREFIX, env::consts::DLL_EXTENSION);
        let names = ["qhx_ops_mine", "other"].map(|name| format!("{prefix}{name}.{extension}"));
        for name in &names {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let places = places(false);
        let beside: Vec<_> = places.iter().filter(|p| p.why == "beside the executable").collect();
        assert_eq!(beside.len(), 2);
        for place in beside {
            let place = Place { dir: folder.path().to_owned(), ..place.clone() };
            assert_eq!(files_in(&place), [folder.path().join(&names[0])]);
        }
    }
}
