//! Host-ops of the Qwen3.5 hybrid family.
//!
//! [`Generate`] is `qwen3_5_generate`: decoding over graphs in which most layers are a gated
//! delta rule with a convolution FIFO and a recurrent state, and the others are softmax attention
//! with a KV cache. Where the bundle has a vision graph, prompts may hold images and videos.

mod generate;
#[cfg(test)]
mod tests;

pub use generate::Generate;

qhx_op::register_ops!(Generate);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
