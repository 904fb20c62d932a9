//! Links host-ops into the program.
//!
//! An op registers itself when its crate is linked, and a crate that nothing names is not linked.

use qhx_ops_gemma4 as _;
use qhx_ops_llama as _;
use qhx_ops_phimoe as _;
use qhx_ops_qwen3vl as _;
use qhx_ops_qwen35 as _;
use qhx_ops_speech as _;
