//! Checkpoints: named tensors in, rows out.
//!
//! [`Checkpoint`] maps a folder of Hugging Face (safetensors, or files of `torch.save`) or a GGUF file, and reads on
//! demand. Quantized tensors of GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8, MXFP4 and llama.cpp keep their form
//! ([`qhx_graph::weight::RowSource::read_blocks`]). [`Adapter`]s of PEFT are merged as rows are read. A synthetic
//! checkpoint draws its weights from a seed.
//!
//! No recipe and no bundle is known here.

mod adapter;
mod checkpoint;
mod floats;
mod import;
mod json;
mod synthetic;

pub use adapter::{Adapter, TEXT_FILES};
pub use checkpoint::{Checkpoint, covers, is_plain, summary, tokenizer};
pub use import::gguf::Inside;
pub use json::{MAX_JSON, read_json, read_json_value};

use std::fmt;
use std::path::Path;

use qhx_base::{Error, ErrorKind};

/// The error of a file or folder that is not as it has to be.
fn artifact(path: &Path, what: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
}
