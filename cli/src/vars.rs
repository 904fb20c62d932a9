//! Every environment variable that qhx reads. `docs/cli.md` describes them; `qhx doctor` shows them.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

/// libQnnHtp, where `--htp` is not given.
pub(crate) const HTP: &str = "QHX_QNN_HTP";
/// libQnnSystem, where `--system` is not given.
pub(crate) const SYSTEM: &str = "QHX_QNN_SYSTEM";
/// Folder for what qhx downloads and makes.
pub(crate) const CACHE_DIR: &str = "QHX_CACHE_DIR";
/// What is logged, where `--log` is not given.
pub(crate) const LOG: &str = "QHX_LOG";
/// The user's cache folder, of the XDG base directory specification.
pub(crate) const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";

/// Put before queries by `qhx_embed`, instead of the bundle's prefix.
pub(crate) const QUERY_PREFIX: &str = "QHX_EMB_QUERY_PREFIX";
/// Put before documents by `qhx_embed`, instead of the bundle's prefix.
pub(crate) const DOC_PREFIX: &str = "QHX_EMB_DOC_PREFIX";

/// All of them, with what they are for.
pub(crate) const ALL: [(&str, &str); 10] = [
    (HTP, "path of libQnnHtp"),
    (SYSTEM, "path of libQnnSystem"),
    (CACHE_DIR, "folder of the QNN runtime and the demo's bundles"),
    (qhx_plugins::search::PATH_VARIABLE, "folders that are searched for plugins"),
    (LOG, "what is logged"),
    (QUERY_PREFIX, "put before queries by qhx_embed"),
    (DOC_PREFIX, "put before documents by qhx_embed"),
    (XDG_CACHE_HOME, "the user's cache folder, where QHX_CACHE_DIR is not set"),
    ("LD_LIBRARY_PATH", "folders of the dynamic loader"),
    ("ADSP_LIBRARY_PATH", "folders in which the DSP looks for its libraries"),
];

/// The value of a variable that is set and not empty.
pub(crate) fn get(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// As [`get`], for a path.
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    get(name).map(PathBuf::from)
}
