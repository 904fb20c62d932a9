//! Graph shapes of published models, for the backend that executes nothing.

use qhx_types::{DType, GraphInfo, TensorInfo};

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
        GraphInfo::new("decode", inputs, outputs)
    }

    /// The lm-head graph.
    pub fn lmhead(&self) -> GraphInfo {
        GraphInfo::new(
            "lmhead",
            [TensorInfo::new("x", DType::F16, vec![1, self.hidden])],
            [TensorInfo::new("logits", DType::F16, vec![1, self.vocab])],
        )
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

/// Sizes of a decoder whose experts stay on the host.
#[derive(Debug, Clone, Copy)]
pub struct Experts {
    /// Width of the hidden state.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Rows of the KV cache.
    pub max_ctx: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Width of an expert.
    pub width: usize,
    /// Tokens of the prefill graphs.
    pub window: usize,
    /// Number of tokens.
    pub vocab: usize,
}

/// Phi-tiny-MoE: 32 layers of 16 experts, 2.8 GB of int8 weights.
pub const PHI_TINY_MOE: Experts = Experts {
    hidden: 4096,
    layers: 32,
    max_ctx: 2048,
    kv_heads: 4,
    head_dim: 128,
    experts: 16,
    width: 448,
    window: 576,
    vocab: 32_064,
};

impl Experts {
    /// Attention and router of a layer over `rows` tokens: over a cache for one, else over a prompt.
    pub fn layer(&self, name: &str, layer: usize, rows: usize) -> GraphInfo {
        let f16 = |name: &str, shape: Vec<usize>| TensorInfo::new(name, DType::F16, shape);
        let mask = if rows == 1 { self.max_ctx + 1 } else { rows };
        let mut inputs = vec![
            f16("x", vec![rows, self.hidden]),
            f16("cos", vec![rows, self.head_dim / 2]),
            f16("sin", vec![rows, self.head_dim / 2]),
            f16("cmask", vec![rows, mask]),
        ];
        let mut outputs = vec![
            f16("y", vec![rows, self.hidden]),
            f16("z", vec![rows, self.hidden]),
            f16("router", vec![rows, self.experts]),
        ];
        for kind in ["k", "v"] {
            if rows == 1 {
                let past = vec![self.kv_heads, self.max_ctx, self.head_dim];
                inputs.push(f16(&format!("past_{kind}_{layer}"), past));
            }
            let new = vec![self.kv_heads, rows, self.head_dim];
            outputs.push(f16(&format!("new_{kind}_{layer}"), new));
        }
        GraphInfo::new(format!("{name}{layer}"), inputs, outputs)
    }

    /// One or two experts over `rows` tokens, with int8 or f16 weights as inputs.
    pub fn ffn(&self, name: &str, prefixes: &[&str], rows: usize, int8: bool) -> GraphInfo {
        let f16 = |name: &str, shape: Vec<usize>| TensorInfo::new(name, DType::F16, shape);
        let mut inputs = vec![f16("x", vec![rows, self.hidden])];
        if prefixes.len() == 2 {
            inputs.push(f16("residual", vec![rows, self.hidden]));
            inputs.extend(["m1", "m2"].map(|m| f16(m, vec![1, 1])));
        }
        let dtype = if int8 { DType::SFixed8 } else { DType::F16 };
        for prefix in prefixes {
            for (matrix, shape) in [
                ("gate", [self.width, self.hidden]),
                ("up", [self.width, self.hidden]),
                ("down", [self.hidden, self.width]),
            ] {
                inputs.push(TensorInfo::new(format!("{prefix}{matrix}"), dtype, shape));
                if int8 {
                    inputs.push(f16(&format!("{prefix}{matrix}_scale"), vec![1, shape[0]]));
                }
            }
        }
        let outputs = vec![f16("y", vec![rows, self.hidden])];
        GraphInfo::new(name, inputs, outputs)
    }

    /// The head.
    pub fn lmhead(&self) -> GraphInfo {
        GraphInfo::new(
            "lmhead_ar1",
            [TensorInfo::new("x", DType::F16, vec![1, self.hidden])],
            [TensorInfo::new("logits", DType::F16, vec![1, self.vocab])],
        )
    }

    /// Bytes of one expert's int8 weights.
    pub fn expert_bytes(&self) -> usize {
        3 * self.hidden * self.width
    }

    /// Bytes of all experts' int8 weights.
    pub fn table_bytes(&self) -> usize {
        self.layers * self.experts * self.expert_bytes()
    }

    /// Bytes of all experts' scales.
    pub fn scale_bytes(&self) -> usize {
        4 * self.layers * self.experts * (2 * self.width + self.hidden)
    }
}
