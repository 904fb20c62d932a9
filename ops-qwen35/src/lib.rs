//! Host-ops of the Qwen3.5 hybrid family.
//!
//! [`Generate`] is `qwen3_5_generate`: text decoding over graphs in which most layers are a gated
//! delta rule with a convolution FIFO and a recurrent state, and the others are softmax attention
//! with a KV cache.

mod generate;

pub use generate::Generate;

qhx_op::register_ops!(Generate);
