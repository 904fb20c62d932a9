//! Every environment variable that qhx reads. `docs/cli.md` describes them; `qhx doctor` shows them.

pub(crate) use qhx_terminal::vars::{CACHE_DIR, HTP, LOG, SYSTEM, XDG_CACHE_HOME, get};

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
