//! The classes of vision towers: names of their tensors, and the switches in which their arithmetic differs.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::TensorId;
use qhx_kit::vision::AxialOrder;

/// Epsilon of most norms.
pub(super) const EPS: f32 = 1e-6;
/// Factor within the sigmoid of [`quick_gelu`].
const QUICK: f32 = 1.702;

/// Method of the builder that is an activation.
pub(in crate::recipes) type Act = fn(&mut GraphBuilder, TensorId) -> Result<TensorId>;

/// Feed-forward of a block, with the names of its projections.
#[derive(Debug, Clone, Copy)]
pub(super) enum FeedForward {
    /// Gate, up and down, of the feed-forward of this name.
    Gated(&'static str, [&'static str; 3]),
    /// Two projections, with what stands between them.
    Plain([&'static str; 2], Act),
}

/// Names and switches of a class.
#[derive(Debug, Clone, Copy)]
pub(in crate::recipes) struct Form {
    /// Patch embedding, and whether it has a bias.
    pub patch: (&'static str, bool),
    /// Table of learned positions.
    pub positions: Option<&'static str>,
    /// The corners of that table are those of an image; else its entries are areas of it.
    pub aligned: bool,
    /// Norm in front of the first block.
    pub before: Option<&'static str>,
    /// Axes of the rotary tables.
    pub rope: AxialOrder,
    /// Prefix of the blocks.
    pub blocks: &'static str,
    /// Norms before attention and before the feed-forward.
    pub norms: [&'static str; 2],
    /// The norms are RMSNorm, not LayerNorm.
    pub rms: bool,
    /// Attention, and its projection back.
    pub attention: [&'static str; 2],
    /// Queries, keys and values are the rows of `qkv`, and not of `q_proj`, `k_proj` and `v_proj`.
    pub joined: bool,
    pub(super) mlp: FeedForward,
    /// The projections of blocks have biases.
    pub bias: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Norm behind the last block.
    pub after: Option<&'static str>,
    /// Prefix of the merger.
    pub merger: &'static str,
    /// Norm and projections of a merger.
    pub merging: [&'static str; 3],
    /// The projection, without a bias, to a patch's width of a square's values, channel by channel, in front of these.
    pub joining: Option<&'static str>,
    /// Videos are taken, whose frames the processor of images does not have.
    pub videos: bool,
    /// Images one of whose sides is less than a token's grow before anything else.
    pub grows: bool,
    /// Patches of the vision graphs by default; none where images are stretched to a square.
    pub shapes: &'static [usize],
}

/// Qwen3-VL and Qwen3.5.
pub(super) const QWEN3: Form = Form {
    patch: ("visual.patch_embed.proj", true),
    positions: Some("visual.pos_embed"),
    aligned: true,
    before: None,
    rope: AxialOrder::RowsColumns,
    blocks: "visual.blocks",
    norms: ["norm1", "norm2"],
    rms: false,
    attention: ["attn", "proj"],
    joined: true,
    mlp: FeedForward::Plain(["mlp.linear_fc1", "mlp.linear_fc2"], GraphBuilder::gelu_tanh),
    bias: true,
    eps: EPS,
    after: None,
    merger: "visual.merger",
    merging: ["norm", "linear_fc1", "linear_fc2"],
    joining: None,
    videos: true,
    grows: false,
    shapes: &[],
};

/// Qwen2.5-VL.
pub(super) const QWEN2_5: Form = Form { rms: true, mlp: FeedForward::Gated("mlp", GATED), ..QWEN2 };

/// Qwen2-VL.
pub(super) const QWEN2: Form = Form {
    patch: ("visual.patch_embed.proj", false),
    positions: None,
    mlp: FeedForward::Plain(["mlp.fc1", "mlp.fc2"], quick_gelu),
    merging: ["ln_q", "mlp.0", "mlp.2"],
    ..QWEN3
};

/// PaddleOCR-VL: SigLIP's blocks with rotary positions beside the learned ones.
pub(super) const PADDLE: Form = Form {
    patch: ("visual.vision_model.embeddings.patch_embedding", true),
    positions: Some("visual.vision_model.embeddings.position_embedding"),
    aligned: false,
    blocks: "visual.vision_model.encoder.layers",
    norms: ["layer_norm1", "layer_norm2"],
    attention: ["self_attn", "out_proj"],
    joined: false,
    mlp: FeedForward::Plain(["mlp.fc1", "mlp.fc2"], GraphBuilder::gelu_tanh),
    after: Some("visual.vision_model.post_layernorm"),
    merger: "mlp_AR",
    merging: ["pre_norm", "linear_1", "linear_2"],
    videos: false,
    grows: true,
    // A text that is stretched is not read. 2048 patches are some 630 × 630 pixels.
    shapes: &[512, 1024, 2048],
    ..QWEN3
};

/// Pixtral's tower, with the projector of Mistral 3.
pub(super) const PIXTRAL: Form = Form {
    patch: ("vision_tower.patch_conv", false),
    positions: None,
    before: Some("vision_tower.ln_pre"),
    rope: AxialOrder::RowsColumnsBetween,
    blocks: "vision_tower.transformer.layers",
    norms: ["attention_norm", "ffn_norm"],
    rms: true,
    attention: ["attention", "o_proj"],
    joined: false,
    mlp: FeedForward::Gated("feed_forward", GATED),
    bias: false,
    eps: 1e-5,
    merger: "multi_modal_projector",
    merging: ["norm", "linear_1", "linear_2"],
    joining: Some("multi_modal_projector.patch_merger.merging_layer"),
    videos: false,
    shapes: PADDLE.shapes,
    ..QWEN3
};

/// Projections of a gated feed-forward.
const GATED: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// `x · σ(1.702 · x)`, `QuickGELUActivation` of `transformers`.
fn quick_gelu(b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
    let x = b.scale(x, QUICK)?;
    let x = b.silu(x)?;
    b.scale(x, 1.0 / QUICK)
}
