//! Shared parts of the end-to-end tests.

#![expect(clippy::panic, reason = "a test helper that fails says so by panicking")]
#![expect(clippy::print_stderr, reason = "a test says what it measured")]

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

use qhx_base::{Error, ErrorKind};

pub mod backends;
#[cfg(target_os = "linux")]
pub mod faults;
pub mod files;
pub mod forged;
pub mod images;
pub mod letters;
pub mod log;
pub mod multimodal;
pub mod null_model;
pub mod outside;
pub mod plugin_files;
pub mod poison;
pub mod real;
pub mod registered;
pub mod replay;
pub mod rescaled;
pub mod restarting;
pub mod suite;
pub mod tiny;
pub mod variants;

/// Asserts the kind of an error, and that its report has each of these parts.
#[track_caller]
pub fn says(error: &Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    has(&error.report().to_string(), parts);
}

/// Asserts that a text has each of these parts.
#[track_caller]
pub fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}
