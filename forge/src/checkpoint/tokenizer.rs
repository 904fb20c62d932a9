//! The tokenizer of a checkpoint: a file of its folder, or in a GGUF file.

use std::path::PathBuf;

use qhx_core::text::Tokenizer;
use qhx_core::{Error, ErrorKind, Result, files};
use serde_json::Value;

use super::Checkpoint;
use crate::import::gguf::Embedded;

/// Longest file that is read; tokenizers of large vocabularies are tens of megabytes.
pub(crate) const MAX_BYTES: u64 = 256 << 20;
/// The name of a tokenizer's file.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

impl Checkpoint {
    /// The tokenizer: the `tokenizer.json` of [`Checkpoint::dir`], or that within a GGUF file.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let source = source(self)?;
        Tokenizer::from_bytes(&source.path, &source.bytes)
    }
}

/// A tokenizer that a bundle is made with.
pub(crate) struct Source {
    /// Where it is, for messages.
    pub path: PathBuf,
    /// `tokenizer.json`.
    pub bytes: Vec<u8>,
    /// `tokenizer_config.json`, where the tokenizer is not of the folder.
    pub config: Option<Value>,
}

/// The checkpoint's tokenizer: that of the folder, or else that within a GGUF file.
pub(crate) fn source(checkpoint: &Checkpoint) -> Result<Source> {
    let path = checkpoint.dir().join(TOKENIZER);
    if path.exists() {
        let bytes = files::read(ErrorKind::Artifact, &path, MAX_BYTES)?;
        return Ok(Source { path, bytes, config: None });
    }
    if let Some(inside) = checkpoint.inside()
        && let Some(Embedded { tokenizer, config }) = inside.tokenizer()?
    {
        let path = inside.path().to_owned();
        return Ok(Source { path, bytes: tokenizer, config: Some(config) });
    }
    let hint = match checkpoint.inside() {
        Some(_) => {
            "the GGUF file has no tokenizer: put the tokenizer.json of the model's Hugging Face checkpoint beside it, \
             or name its folder (`--tokenizer`)"
        }
        None => {
            "save the tokenizer with transformers' AutoTokenizer (the fast one) beside the checkpoint"
        }
    };
    Err(Error::new(ErrorKind::Artifact, format!("{}: missing", path.display())).hint(hint))
}
