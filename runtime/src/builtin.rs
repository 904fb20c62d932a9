//! Links host-ops into the program.
//!
//! An op registers itself when its crate is linked, and a crate that nothing names is not linked.

#[cfg(feature = "ops-gemma4")]
use qhx_ops_gemma4 as _;
#[cfg(feature = "ops-llama")]
use qhx_ops_llama as _;
#[cfg(feature = "ops-phimoe")]
use qhx_ops_phimoe as _;
#[cfg(feature = "ops-qwen3vl")]
use qhx_ops_qwen3vl as _;
#[cfg(feature = "ops-qwen35")]
use qhx_ops_qwen35 as _;
#[cfg(feature = "ops-speech")]
use qhx_ops_speech as _;

/// The families whose host-ops are linked in, as the features `ops-…` name them.
pub const FAMILIES: &[&str] = &[
    #[cfg(feature = "ops-gemma4")]
    "gemma4",
    #[cfg(feature = "ops-llama")]
    "llama",
    #[cfg(feature = "ops-phimoe")]
    "phimoe",
    #[cfg(feature = "ops-qwen35")]
    "qwen35",
    #[cfg(feature = "ops-qwen3vl")]
    "qwen3vl",
    #[cfg(feature = "ops-speech")]
    "speech",
];
