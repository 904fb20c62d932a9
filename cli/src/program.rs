//! The file of the program itself, which is started again for work in a process of its own.

use std::env;
use std::path::PathBuf;

/// `qhx` itself, or the one beside `qhx_generate`: what tries plugins and compiles parts of bundles.
/// Without one plugins are loaded untried.
pub(crate) fn this_program() -> Option<PathBuf> {
    let exe = env::current_exe().ok()?;
    let qhx = exe.with_file_name(format!("qhx{}", env::consts::EXE_SUFFIX));
    qhx.is_file().then_some(qhx)
}
