//! Checkpoints that another program quantized: GGUF files of llama.cpp, and safetensors of GPTQ, AWQ,
//! compressed-tensors, bitsandbytes, FP8 and MXFP4; and files of `torch.save` ([`torch`]), which are as they are.
//!
//! A tensor gets the name that the unquantized checkpoint has for it, so that recipes need not know of any of this.
//! Quantized weights reach the graphs as they are stored: see [`RowSource::read_blocks`].

pub(crate) mod gguf;
pub(crate) mod packed;
pub(crate) mod torch;

use std::sync::Arc;

use qhx_base::Result;
use qhx_graph::weight::RowSource;

/// A tensor in a form of its own.
#[derive(Debug, Clone)]
pub(crate) enum Imported {
    Gguf(gguf::Tensor),
    Joined(gguf::Joined),
    Packed(packed::Tensor),
}

impl Imported {
    /// Sizes, outputs first.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Gguf(tensor) => tensor.shape(),
            Self::Joined(tensor) => tensor.shape(),
            Self::Packed(tensor) => tensor.shape(),
        }
    }

    /// The form, for messages and for the identity of a checkpoint.
    pub fn form(&self) -> &'static str {
        match self {
            Self::Gguf(tensor) => tensor.form(),
            Self::Joined(tensor) => tensor.form(),
            Self::Packed(tensor) => tensor.form(),
        }
    }

    /// True where graphs can hold its quantized weights.
    pub fn has_quantized_weights(&self) -> bool {
        match self {
            Self::Gguf(tensor) => tensor.has_quantized_weights(),
            Self::Joined(_) => false,
            Self::Packed(tensor) => tensor.has_integers(),
        }
    }

    /// The tensor `name` seen as a matrix `shape` of as many elements.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        match self {
            Self::Gguf(tensor) => tensor.matrix(name, shape),
            Self::Joined(tensor) => tensor.matrix(name, shape),
            Self::Packed(tensor) => tensor.matrix(name, shape),
        }
    }
}
