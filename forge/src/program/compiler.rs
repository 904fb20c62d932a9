//! Compiler of a bundle's graphs.

use qhx::libraries::Libraries;
use qhx_base::Result;
use qhx_qnn::Target;

use crate::qnn::QnnCompiler;

/// A compiler for `target` over libraries.
///
/// # Errors
/// When the libraries cannot be opened.
pub fn compiler(libraries: &Libraries, target: Target) -> Result<QnnCompiler> {
    Ok(QnnCompiler::new(libraries.open()?, target))
}
