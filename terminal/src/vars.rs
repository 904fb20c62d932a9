//! Environment variables that every program reads.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

/// libQnnHtp, where `--htp` is not given.
pub const HTP: &str = "QHX_QNN_HTP";
/// libQnnSystem, where `--system` is not given.
pub const SYSTEM: &str = "QHX_QNN_SYSTEM";
/// Folder for what qhx downloads and makes.
pub const CACHE_DIR: &str = "QHX_CACHE_DIR";
/// What is logged, where `--log` is not given.
pub const LOG: &str = "QHX_LOG";
/// The user's cache folder, of the XDG base directory specification.
pub const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";

/// The value of a variable that is set and not empty.
pub fn get(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// As [`get`], for a path.
pub fn path(name: &str) -> Option<PathBuf> {
    get(name).map(PathBuf::from)
}
