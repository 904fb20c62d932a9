//! Decoders of published shapes.

use std::path::Path;

use qhx_base::Result;
use qhx_core::op::HostOp;
use qhx_plugins::Plugins;
use qhx_types::{DType, GraphInfo, TensorInfo};
use serde_json::{Value, json};

use crate::null::{NullModel, sparse};

/// Name of the embedding table in a folder.
pub const EMBED: &str = "embed_f16.bin";

/// Sizes of a decoder.
#[derive(Debug, Clone, Copy)]
pub struct Decoder {
    /// Width of the hidden state.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Rows of the KV cache.
    pub max_ctx: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotated elements of a head.
    pub rotary: usize,
    /// Number of tokens.
    pub vocab: usize,
}

/// Qwen3.5-0.8B: 18.9 MB of recurrent state.
pub const QWEN35_08B: Decoder = Decoder {
    hidden: 1024,
    layers: 24,
    max_ctx: 1024,
    kv_heads: 2,
    head_dim: 256,
    rotary: 64,
    vocab: 248_320,
};

/// An f16 tensor.
pub fn tensor(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> TensorInfo {
    TensorInfo::new(name, DType::F16, shape)
}

impl Decoder {
    /// Graph of these layers for `rows` tokens, over caches.
    pub fn graph(
        &self,
        name: impl Into<String>,
        rows: usize,
        layers: impl IntoIterator<Item = usize>,
    ) -> GraphInfo {
        let mut inputs = vec![
            tensor("x", [rows, self.hidden]),
            tensor("cos", [rows, self.rotary / 2]),
            tensor("sin", [rows, self.rotary / 2]),
            tensor("cmask", [rows, self.max_ctx + rows]),
        ];
        let mut outputs = vec![tensor("y", [rows, self.hidden])];
        for layer in layers {
            for kind in ["k", "v"] {
                let past = [self.kv_heads, self.max_ctx, self.head_dim];
                inputs.push(tensor(format!("past_{kind}_{layer}"), past));
                let new = [self.kv_heads, rows, self.head_dim];
                outputs.push(tensor(format!("new_{kind}_{layer}"), new));
            }
        }
        GraphInfo::new(name, inputs, outputs)
    }

    /// The head.
    pub fn head(&self, name: &str) -> GraphInfo {
        GraphInfo::new(name, [tensor("x", [1, self.hidden])], [tensor("logits", [1, self.vocab])])
    }

    /// Bytes of the embedding table.
    pub const fn embed_bytes(&self) -> usize {
        self.vocab * self.hidden * 2
    }

    /// `params` of the manifest.
    pub fn params(&self, rope_theta: f64) -> Value {
        json!({
            "hidden": self.hidden, "vocab": self.vocab, "n_layers": self.layers,
            "max_ctx": self.max_ctx, "head_dim": self.head_dim, "rotary_dim": self.rotary,
            "rope_theta": rope_theta, "eos_token_id": 0
        })
    }
}

/// Opens `qwen3_5_generate` over graphs of these shapes: every fourth layer is softmax attention, the others have the
/// states of Qwen3.5-0.8B. The embedding table is made unless it is in the folder.
///
/// # Errors
/// When the files, the plugin or the graphs do not fit.
pub fn open_qwen35(folder: &Path, plugins: &Plugins, shapes: Decoder) -> Result<Box<dyn HostOp>> {
    const HEADS: usize = 16;
    const WIDTH: usize = 128;
    const KERNEL: usize = 4;
    sparse(folder, &[(EMBED, shapes.embed_bytes())])?;
    let is_attention = |layer: &usize| layer % 4 == 3;
    let mut decode = shapes.graph("decode", 1, (0..shapes.layers).filter(is_attention));
    for layer in (0..shapes.layers).filter(|layer| !is_attention(layer)) {
        let fifo = [3 * HEADS * WIDTH, KERNEL - 1];
        let state = |end: &str| {
            let name = format!("{end}_ssm_{layer}");
            TensorInfo::new(name, DType::F32, [HEADS, WIDTH, WIDTH])
        };
        decode.inputs.extend([tensor(format!("past_conv_{layer}"), fifo), state("past")]);
        decode.outputs.extend([tensor(format!("present_conv_{layer}"), fifo), state("present")]);
    }
    let model = NullModel {
        op: "qwen3_5_generate",
        params: shapes.params(1e7),
        plan: json!({"decode": "decode", "lmhead": "lmhead"}),
        artifacts: json!({"embed": EMBED}),
        contexts: vec![
            ("decode".to_owned(), vec![decode]),
            ("lmhead".to_owned(), vec![shapes.head("lmhead")]),
        ],
        threads: 1,
    };
    model.open(folder, plugins)
}
