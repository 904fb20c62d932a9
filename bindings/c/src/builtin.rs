//! Links host-ops into the library.
//!
//! An op registers itself when its crate is linked. From a static library, a linker takes only what something names.

/// Names what registers the ops.
pub(crate) fn link() {
    #[cfg(feature = "ops-gemma4")]
    qhx_ops_gemma4::linked();
    #[cfg(feature = "ops-llama")]
    qhx_ops_llama::linked();
    #[cfg(feature = "ops-phimoe")]
    qhx_ops_phimoe::linked();
    #[cfg(feature = "ops-qwen35")]
    qhx_ops_qwen35::linked();
    #[cfg(feature = "ops-qwen3vl")]
    qhx_ops_qwen3vl::linked();
    #[cfg(feature = "ops-speech")]
    qhx_ops_speech::linked();
}
