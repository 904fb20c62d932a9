//! Shared parts of the end-to-end tests.

#![expect(clippy::panic, reason = "a test helper that fails says so by panicking")]

#[cfg(feature = "builtin-ops")]
use qhx_ops_gemma4 as _;
#[cfg(feature = "builtin-ops")]
use qhx_ops_llama as _;
#[cfg(feature = "builtin-ops")]
use qhx_ops_phimoe as _;
#[cfg(feature = "builtin-ops")]
use qhx_ops_qwen3vl as _;
#[cfg(feature = "builtin-ops")]
use qhx_ops_qwen35 as _;
#[cfg(feature = "builtin-ops")]
use qhx_ops_speech as _;

pub mod backends;
#[cfg(target_os = "linux")]
pub mod faults;
pub mod images;
pub mod letters;
pub mod log;
pub mod multimodal;
pub mod null_model;
pub mod outside;
pub mod plugin_files;
pub mod poison;
pub mod registered;
pub mod replay;
pub mod rescaled;
pub mod restarting;
pub mod suite;
pub mod tiny;
pub mod variants;
