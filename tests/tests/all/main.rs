//! End-to-end tests in one program, a module for each subject: linking it takes longer than compiling most of them.
//!
//! `child` and `plugins_misbehaving` are programs of their own: the one installs a helper for the whole process, the
//! other measures the memory of the process.

mod backend;
mod bad_bundles;
mod embed;
mod gemma3;
mod gemma4;
mod guide;
mod lfm2;
mod llama;
mod multimodal;
mod phimoe;
mod plugins;
mod plugins_compat;
mod plugins_services;
mod plugins_trust;
mod poisoned;
mod qwen35;
mod qwen3vl;
mod sessions;
mod targets;
