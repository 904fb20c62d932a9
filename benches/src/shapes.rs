//! Graph shapes of published models, for the backend that executes nothing.

use qhx_core::{DType, GraphInfo, TensorInfo};

/// Sizes of a Qwen3.5 hybrid decoder.
#[derive(Debug, Clone, Copy)]
pub struct Hybrid {
    /// Width of the hidden state.
    pub hidden: usize,
    /// Layers; every fourth is softmax attention.
    pub layers: usize,
    /// Rows of the KV cache.
    pub max_ctx: usize,
    /// Key/value heads of softmax attention.
    pub kv_heads: usize,
    /// Width of a softmax attention head.
    pub head_dim: usize,
    /// Rotated elements of a head.
    pub rotary_dim: usize,
    /// Key heads of the delta rule.
    pub key_heads: usize,
    /// Value heads of the delta rule.
    pub value_heads: usize,
    /// Width of a key and of a value head of the delta rule.
    pub state_dim: usize,
    /// Kernel of the causal convolution.
    pub kernel: usize,
    /// Number of tokens.
    pub vocab: usize,
}

/// Qwen3.5-0.8B: 24 layers, 18.9 MB of recurrent state, 248,320 tokens.
pub const QWEN35_08B: Hybrid = Hybrid {
    hidden: 1024,
    layers: 24,
    max_ctx: 1024,
    kv_heads: 2,
    head_dim: 256,
    rotary_dim: 64,
    key_heads: 16,
    value_heads: 16,
    state_dim: 128,
    kernel: 4,
    vocab: 248_320,
};

impl Hybrid {
    /// The decode graph, in half precision with a single-precision recurrent state.
    pub fn decode(&self) -> GraphInfo {
        let f16 = |name: &str, shape: Vec<usize>| TensorInfo::new(name, DType::F16, shape);
        let mut inputs = vec![
            f16("x", vec![1, self.hidden]),
            f16("cos", vec![1, self.rotary_dim / 2]),
            f16("sin", vec![1, self.rotary_dim / 2]),
            f16("cmask", vec![1, self.max_ctx + 1]),
        ];
        let mut outputs = vec![f16("y", vec![1, self.hidden])];
        let conv = (2 * self.key_heads + self.value_heads) * self.state_dim;
        for i in 0..self.layers {
            if i % 4 == 3 {
                for kind in ["k", "v"] {
                    let past = vec![self.kv_heads, self.max_ctx, self.head_dim];
                    inputs.push(f16(&format!("past_{kind}_{i}"), past));
                    let new = vec![self.kv_heads, 1, self.head_dim];
                    outputs.push(f16(&format!("new_{kind}_{i}"), new));
                }
            } else {
                let fifo = vec![conv, self.kernel - 1];
                inputs.push(f16(&format!("past_conv_{i}"), fifo.clone()));
                outputs.push(f16(&format!("present_conv_{i}"), fifo));
                let state = vec![self.value_heads, self.state_dim, self.state_dim];
                let f32 = |name: String| TensorInfo::new(name, DType::F32, state.clone());
                inputs.push(f32(format!("past_ssm_{i}")));
                outputs.push(f32(format!("present_ssm_{i}")));
            }
        }
        GraphInfo { name: "decode".to_owned(), inputs, outputs }
    }

    /// The lm-head graph.
    pub fn lmhead(&self) -> GraphInfo {
        GraphInfo {
            name: "lmhead".to_owned(),
            inputs: vec![TensorInfo::new("x", DType::F16, vec![1, self.hidden])],
            outputs: vec![TensorInfo::new("logits", DType::F16, vec![1, self.vocab])],
        }
    }

    /// Bytes of the recurrent states, without convolution FIFOs and KV caches.
    pub fn state_bytes(&self) -> usize {
        (0..self.layers).filter(|i| i % 4 != 3).count()
            * self.value_heads
            * self.state_dim
            * self.state_dim
            * 4
    }
}
