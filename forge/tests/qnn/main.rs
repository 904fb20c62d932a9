//! The QNN lowering against the real compiler: every op agrees with its ONNX reference graph, and the compiled
//! Qwen3.5 graphs decode the goldens of `transformers`.
//!
//! `QHX_QNN_HTP` names libQnnHtp.so and `QHX_QNN_SYSTEM` libQnnSystem.so (by default the one beside
//! it). Without them the tests are ignored with that reason; `QHX_REQUIRE_TIERS=1` makes that a failure.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../../../core/qnn/tests/qnn/tier.rs"]
mod tier;

#[path = "../common/mod.rs"]
mod common;

mod bundle;
mod compiler;
mod conv;
mod decode;
mod exact;
mod int8;
mod norms;
mod ops;

use common::graphs as support;
