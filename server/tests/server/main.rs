//! A server over tiny models on the CPU, asked over a loopback socket.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod access;
mod bundles;
mod calls;
mod catalog;
mod chat;
mod client;
mod completions;
mod embeddings;
mod faulty;
mod hostile;
mod kept;
mod lost;
mod media;
mod messages;
mod models;
mod ollama;
mod realtime;
mod rerank;
mod responses;
#[path = "../../../tests/src/restarting.rs"]
#[expect(dead_code, reason = "other tests count what is opened and executed")]
mod restarting;
mod serving;
mod speech;
mod stored;
mod wyoming;

// The host-ops of the tiny models, linked in.
use qhx_ops_gemma4 as _;
use qhx_ops_llama as _;
use qhx_ops_qwen3vl as _;
use qhx_ops_qwen35 as _;
use qhx_ops_speech as _;
