//! Where plugins are looked for, in order:
//!
//! 1. files named with `--plugin`;
//! 2. folders named with `--plugin-dir`;
//! 3. ops linked into the program;
//! 4. folders in `QHX_PLUGIN_PATH`;
//! 5. the user's data folder, `qhx/plugins` in it;
//! 6. beside the executable, and `plugins` there.
//!
//! Never the working directory and never the bundle: a bundle is data that somebody downloaded.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Which plugins to consider.
#[derive(Debug, Clone, Default)]
pub struct PluginOptions {
    /// Files that must load.
    pub files: Vec<PathBuf>,
    /// Folders to search first.
    pub dirs: Vec<PathBuf>,
    /// Consider nothing but `files`, `dirs` and what is linked in.
    pub only_named: bool,
}

/// Variable with folders to search, separated like `PATH`.
pub const PATH_VARIABLE: &str = "QHX_PLUGIN_PATH";

/// A place that is searched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The folder.
    pub dir: PathBuf,
    /// Why it is searched, for people.
    pub why: &'static str,
    /// Only files named like a host-op plugin count: the folder holds other libraries, too.
    pub by_name: bool,
}

/// The folder for plugins in the user's data folder, when there is one.
pub fn user_dir() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = if cfg!(windows) {
        set("APPDATA")?
    } else if let Some(data) = set("XDG_DATA_HOME").filter(|p| p.is_absolute()) {
        data
    } else if cfg!(target_os = "macos") {
        set("HOME")?.join("Library/Application Support")
    } else {
        set("HOME")?.join(".local/share")
    };
    Some(base.join("qhx/plugins"))
}

/// Folders that are searched after what is linked in.
pub fn default_places() -> Vec<Place> {
    let mut places = Vec::new();
    if let Some(value) = env::var_os(PATH_VARIABLE) {
        places.extend(env::split_paths(&value).filter(|dir| dir.is_absolute()).map(|dir| Place {
            dir,
            why: PATH_VARIABLE,
            by_name: false,
        }));
    }
    if let Some(dir) = user_dir() {
        places.push(Place { dir, why: "the user's data folder", by_name: false });
    }
    if let Some(dir) = env::current_exe()
        .ok()
        .and_then(|exe| exe.canonicalize().ok())
        .and_then(|exe| exe.parent().map(Path::to_path_buf))
    {
        let plugins = dir.join("plugins");
        places.push(Place { dir, why: "beside the executable", by_name: true });
        places.push(Place { dir: plugins, why: "beside the executable", by_name: false });
    }
    places
}

/// Plugin files in a folder, sorted by name. A folder that cannot be read has none.
pub fn files_in(place: &Place) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(&place.dir) else { return Vec::new() };
    let mut files: Vec<_> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new(env::consts::DLL_EXTENSION)))
        .filter(|path| {
            let prefix = format!("{}qhx_ops_", env::consts::DLL_PREFIX);
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            !place.by_name || name.starts_with(&prefix)
        })
        .collect();
    files.sort();
    files
}
