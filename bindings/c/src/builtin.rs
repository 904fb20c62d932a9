//! Links host-ops into the library.
//!
//! An op registers itself when its crate is linked. From a static library, a linker takes only what something names.

/// Names what registers the ops.
pub(crate) fn link() {
    qhx_ops_gemma4::linked();
    qhx_ops_llama::linked();
    qhx_ops_phimoe::linked();
    qhx_ops_qwen35::linked();
    qhx_ops_qwen3vl::linked();
    qhx_ops_speech::linked();
}
