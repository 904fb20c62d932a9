//! The keys of `config.json` that shape the graphs, checked.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::kit::{Experts, Heads, Reader};
use crate::recipes::vision::{Vision, section};

/// `mrope_section` where no key says it (`Qwen3_5TextRotaryEmbedding`).
const SECTION: [usize; 3] = [11, 11, 10];

/// Class of Qwen3-Next.
pub(super) const NEXT: &str = "Qwen3NextForCausalLM";

/// Token mixer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerKind {
    /// GatedDeltaNet.
    Linear,
    /// Gated softmax attention.
    Full,
}

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    /// Inner width of the MLP, or of the expert that every token goes to.
    pub intermediate: usize,
    /// Experts of each layer, for classes that have them.
    pub experts: Option<Experts>,
    /// Multipliers of a token's experts sum to 1.
    pub normalize: bool,
    pub layers: Vec<LayerKind>,
    pub heads: Heads,
    pub rotary_dim: usize,
    pub rope_theta: f64,
    pub attention_bias: bool,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub kernel: usize,
    /// Projections of linear attention are fused by key heads (Qwen3-Next).
    pub fused: bool,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: Option<usize>,
    /// Vision tower, for checkpoints that have one.
    pub vision: Option<Images>,
}

/// The vision tower of a checkpoint, and the rotary sections that go with it.
#[derive(Debug, Clone)]
pub(super) struct Images {
    pub tower: Vision,
    /// Pairs of a head that turn by time, row and column; interleaved.
    pub section: [usize; 3],
}

impl Config {
    /// Channels of the convolution: queries, keys and values of the delta rule.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        let hidden = reader.size("hidden_size")?;
        let groups = reader.size("num_key_value_heads")?;
        let heads = reader.heads(hidden, Some(groups), Some(256))?;
        // Older checkpoints have the key at top level.
        let place = reader.rope_key();
        let factor = reader
            .positive(&[&format!("{place}.partial_rotary_factor"), "partial_rotary_factor"])?
            .unwrap_or(0.25);
        let rotary_dim = (heads.dim as f64 * factor) as usize;
        if factor > 1.0 || rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
            return Err(reader.fault(format!(
                "partial_rotary_factor {factor} of head_dim {0} turns {rotary_dim} elements, expected an even \
                 number of 2 to {0}",
                heads.dim
            )));
        }
        let vocab = reader.size("vocab_size")?;
        let class = checkpoint.architecture().unwrap_or_default();
        let fused = class == NEXT;
        let with_experts = fused || class.contains("Moe");
        if fused {
            reader.only("decoder_sparse_step", &json!(1))?;
            reader.only("mlp_only_layers", &json!([]))?;
        }
        let config = Self {
            hidden,
            vocab,
            intermediate: match with_experts {
                true => reader.size("shared_expert_intermediate_size")?,
                false => reader.size("intermediate_size")?,
            },
            experts: with_experts.then(|| Experts::read(&reader, hidden)).transpose()?,
            normalize: !fused || reader.flag_or("norm_topk_prob", true)?,
            layers: layers(&reader)?,
            heads,
            rotary_dim,
            rope_theta: reader.rope_theta(1e4)?,
            attention_bias: reader.flag("attention_bias")?,
            key_heads: reader.size_or("linear_num_key_heads", 16)?,
            value_heads: reader.size_or("linear_num_value_heads", 32)?,
            key_dim: reader.size_or("linear_key_head_dim", 128)?,
            value_dim: reader.size_or("linear_value_head_dim", 128)?,
            kernel: reader.size_or("linear_conv_kernel_dim", 4)?,
            fused,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            // `PretrainedConfig` of the class has `tie_word_embeddings = False`.
            tied: reader.tied(false)?,
            max_positions: reader.maybe_size("max_position_embeddings")?,
            vision: images(checkpoint, &reader, [hidden, vocab], rotary_dim)?,
        };
        if !config.value_heads.is_multiple_of(config.key_heads) {
            return Err(reader.fault(format!(
                "linear_num_value_heads and linear_num_key_heads are {} and {}, expected a multiple and its \
                 divisor",
                config.value_heads, config.key_heads
            )));
        }
        if config.kernel < 2 {
            return Err(reader.fault("linear_conv_kernel_dim is 1, expected at least 2".to_owned()));
        }
        Ok(config)
    }
}

fn layers(reader: &Reader<'_>) -> Result<Vec<LayerKind>> {
    let count = reader.layers()?;
    let names = [("linear_attention", LayerKind::Linear), ("full_attention", LayerKind::Full)];
    if let Some(kinds) = reader.kinds("layer_types", count, &names)? {
        return Ok(kinds);
    }
    let interval = reader.size_or("full_attention_interval", 4)?;
    let kind = |i: usize| {
        if (i + 1).is_multiple_of(interval) { LayerKind::Full } else { LayerKind::Linear }
    };
    Ok((0..count).map(kind).collect())
}

/// The tower, where the configuration describes it and the checkpoint holds it: some keep the configuration and are
/// text alone.
fn images(
    checkpoint: &Checkpoint,
    reader: &Reader<'_>,
    [hidden, vocab]: [usize; 2],
    rotary_dim: usize,
) -> Result<Option<Images>> {
    let described = checkpoint.config().get("vision_config").is_some_and(Value::is_object);
    let drawn = checkpoint.seed().is_some();
    if !(described && (drawn || checkpoint.has("visual.patch_embed.proj.weight"))) {
        return Ok(None);
    }
    // No rows for the decoder's layers: this tower has no deepstack mergers.
    let tower = Vision::read(checkpoint, [hidden, 0, vocab])?;
    Ok(Some(Images { tower, section: section(reader, rotary_dim / 2, Some(SECTION))? }))
}
