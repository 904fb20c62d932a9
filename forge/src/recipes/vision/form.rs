//! The classes of vision towers: names of their tensors, and the switches in which their arithmetic differs.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::TensorId;

/// Factor within the sigmoid of [`quick_gelu`].
const QUICK: f32 = 1.702;

/// Feed-forward of a block, with the names of its projections.
#[derive(Debug, Clone, Copy)]
pub(super) enum FeedForward {
    /// Gate, up and down, with SiLU.
    Gated([&'static str; 3]),
    /// Two projections, with what stands between them.
    Plain([&'static str; 2], fn(&mut GraphBuilder, TensorId) -> Result<TensorId>),
}

/// Names and switches of a class.
#[derive(Debug, Clone, Copy)]
pub(in crate::recipes) struct Form {
    /// Patch embedding, and whether it has a bias.
    pub patch: (&'static str, bool),
    /// Table of learned positions.
    pub positions: Option<&'static str>,
    /// Prefix of the blocks.
    pub blocks: &'static str,
    /// Norms before attention and before the feed-forward.
    pub norms: [&'static str; 2],
    /// The norms are RMSNorm, not LayerNorm.
    pub rms: bool,
    /// Attention, whose queries, keys and values are the rows of `qkv`, and its projection back.
    pub attention: [&'static str; 2],
    pub(super) mlp: FeedForward,
    /// Prefix of the merger.
    pub merger: &'static str,
    /// Norm and projections of a merger.
    pub merging: [&'static str; 3],
}

/// Qwen3-VL and Qwen3.5.
pub(super) const QWEN3: Form = Form {
    patch: ("visual.patch_embed.proj", true),
    positions: Some("visual.pos_embed"),
    blocks: "visual.blocks",
    norms: ["norm1", "norm2"],
    rms: false,
    attention: ["attn", "proj"],
    mlp: FeedForward::Plain(["mlp.linear_fc1", "mlp.linear_fc2"], GraphBuilder::gelu_tanh),
    merger: "visual.merger",
    merging: ["norm", "linear_fc1", "linear_fc2"],
};

/// Qwen2.5-VL.
pub(super) const QWEN2_5: Form =
    Form { rms: true, mlp: FeedForward::Gated(["gate_proj", "up_proj", "down_proj"]), ..QWEN2 };

/// Qwen2-VL.
pub(super) const QWEN2: Form = Form {
    patch: ("visual.patch_embed.proj", false),
    positions: None,
    mlp: FeedForward::Plain(["mlp.fc1", "mlp.fc2"], quick_gelu),
    merging: ["ln_q", "mlp.0", "mlp.2"],
    ..QWEN3
};

/// `x · σ(1.702 · x)`, `QuickGELUActivation` of `transformers`.
fn quick_gelu(b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
    let x = b.scale(x, QUICK)?;
    let x = b.silu(x)?;
    b.scale(x, 1.0 / QUICK)
}
