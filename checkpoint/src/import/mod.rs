//! Checkpoints that another program quantized: GGUF files of llama.cpp, and safetensors of GPTQ, AWQ,
//! compressed-tensors, bitsandbytes, FP8 and MXFP4; and files of `torch.save` ([`torch`]), `numpy.savez`
//! ([`npz`]) and of ONNX ([`onnx`]), which are as they are.
//!
//! A tensor gets the name that the unquantized checkpoint has for it, so that recipes need not know of any of this.
//! Quantized weights reach the graphs as they are stored: see [`RowSource::read_blocks`].

pub(crate) mod gguf;
pub(crate) mod nemo;
pub(crate) mod npz;
pub(crate) mod onnx;
pub(crate) mod packed;
pub(crate) mod torch;

use std::fmt;
use std::sync::Arc;

use qhx_base::Result;
use qhx_graph::weight::RowSource;

/// A tensor in a form of its own.
pub(crate) trait Imported: fmt::Debug + Send + Sync {
    /// Sizes, outputs first.
    fn shape(&self) -> &[usize];

    /// The form, for messages and for the identity of a checkpoint.
    fn form(&self) -> &'static str;

    /// True where graphs can hold its quantized weights.
    fn has_quantized_weights(&self) -> bool;

    /// The tensor `name` seen as a matrix `shape` of as many elements.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>>;
}
