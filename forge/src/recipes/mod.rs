//! The recipes of this crate, one module a family. Each registers itself, as those of other crates do.

mod bert;
mod canary;
mod choices;
mod clip;
mod cosmos3;
mod encoder;
mod fastconformer;
mod gemma3;
mod gemma4;
mod hybrid;
mod internvl;
mod kokoro;
mod lfm2;
mod llama;
mod mistral3;
mod modernbert;
mod moonshine;
mod paligemma;
mod parakeet;
mod phimoe;
mod qwen35;
mod qwen3asr;
mod qwen3vl;
mod siglip;
mod vision;
mod whisper;
