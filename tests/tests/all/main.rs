//! End-to-end tests in one program, a module for each subject: linking it takes longer than compiling most of them.
//!
//! `child`, `plugins_misbehaving` and `targets` are programs of their own: the first installs a helper for the whole
//! process, the second measures the memory of the process, and the emulator mixes chips of different memory badly.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]
#![allow(clippy::print_stderr, reason = "a test says what it measured")]

mod backend;
mod bad_bundles;
mod calibration;
mod contexts;
mod ctc;
mod drawn;
mod embed;
mod encoders;
mod experts;
mod gemma3;
mod gemma4;
mod gemma4_draft;
mod golden;
mod guide;
mod hand_over;
mod headroom;
mod hybrids;
mod kept;
mod lfm2;
mod llama;
mod mtp;
mod multimodal;
mod phimoe;
mod plugins;
mod plugins_compat;
mod plugins_services;
mod plugins_trust;
mod poisoned;
mod published;
mod quantized;
mod qwen35;
mod qwen3vl;
mod real;
mod seeing;
mod sessions;
mod siglip;
mod small_caches;
mod smolvlm;
/// The family of `ops-speech`.
mod speech {
    mod canary;
    mod canary_qwen;
    mod espeak;
    mod kokoro;
    mod moonshine;
    mod nemotron;
    mod parakeet;
    mod qwen3asr;
    mod recogniser;
    mod vits;
    mod whisper;
}
mod states;
mod switches;
mod tiles;
