//! What compiles the graphs of a bundle.

use std::sync::Arc;

use qhx::libraries::Libraries;
use qhx_core::Result;
use qhx_core::qnn::Target;

use crate::compile::Compiler;
use crate::qnn::QnnCompiler;

/// A compiler for `target` over libraries.
///
/// # Errors
/// When the libraries cannot be opened.
pub fn compiler(
    libraries: &Libraries,
    target: Target,
    share_weights: bool,
) -> Result<Arc<dyn Compiler>> {
    let compiler = QnnCompiler::new(libraries.open()?, target);
    Ok(Arc::new(compiler.share_weights(share_weights)))
}
