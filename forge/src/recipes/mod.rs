//! The recipes of this crate, one module a family. Each registers itself, as those of other crates do.

mod bert;
mod canary;
mod choices;
mod encoder;
mod fastconformer;
mod gemma3;
mod gemma4;
mod kokoro;
mod lfm2;
mod llama;
mod moonshine;
mod parakeet;
mod phimoe;
mod qwen35;
mod qwen3asr;
mod qwen3vl;
mod siglip;
mod vision;
mod whisper;
