//! The keys of `config.json` that shape the graphs, checked. Both spellings are read: that of published
//! checkpoints (`rope_theta`, `rope_local_base_freq`, `sliding_window_pattern`), and the one that `transformers` 5
//! writes (`rope_parameters` and `layer_types`).

use half::{bf16, f16};
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::kit::{Heads, Reader};

/// Sizes and constants of a model; where a key is absent, those of `Gemma3TextConfig`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    /// For each layer whether it slides; the others see all positions.
    pub sliding: Vec<bool>,
    /// Positions before and after its own that a token of a sliding layer sees.
    pub reach: usize,
    pub heads: Heads,
    /// Multiplies the scores.
    pub scale: f32,
    /// Multiplies the rows of the embedding table.
    pub embed_scale: f32,
    /// Bases of the rotary embedding of full and of sliding layers.
    pub thetas: [f64; 2],
    pub attention_bias: bool,
    pub eps: f32,
    pub max_positions: usize,
}

impl Config {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
        if !reader.flag("use_bidirectional_attention")? {
            return Err(reader.fault(
                "use_bidirectional_attention is not true: Gemma3TextModel is taken as an encoder only"
                    .to_owned(),
            ));
        }
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            reader.only(key, &Value::Null)?;
        }
        let hidden = reader.size_or("hidden_size", 2304)?;
        let scalar = reader.positive(&["query_pre_attn_scalar"])?.unwrap_or(256.0);
        Ok(Self {
            hidden,
            vocab: reader.size_or("vocab_size", 262_208)?,
            intermediate: reader.size_or("intermediate_size", 9216)?,
            sliding: sliding(&reader)?,
            // `Gemma3TextConfig` makes it w / 2 + 1, of which the token itself is one.
            reach: reader.size_or("sliding_window", 4096)? / 2,
            heads: reader.heads(hidden, Some(4), Some(256))?,
            scale: (1.0 / scalar.sqrt()) as f32,
            embed_scale: embed_scale(&reader, hidden)?,
            thetas: [
                theta(&reader, "full_attention", "rope_theta", 1e6)?,
                theta(&reader, "sliding_attention", "rope_local_base_freq", 1e4)?,
            ],
            attention_bias: reader.flag("attention_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            max_positions: reader.size_or("max_position_embeddings", 131_072)?,
        })
    }
}

/// √hidden in the type that the model runs in: `Gemma3TextScaledWordEmbedding` rounds it to that of the weights.
fn embed_scale(reader: &Reader<'_>, hidden: usize) -> Result<f32> {
    let exact = (hidden as f64).sqrt() as f32;
    let Some((key, value)) = reader.first(&["dtype", "torch_dtype"]) else { return Ok(exact) };
    match value.as_str() {
        Some("bfloat16") => Ok(bf16::from_f32(exact).to_f32()),
        Some("float16") => Ok(f16::from_f32(exact).to_f32()),
        Some("float32") => Ok(exact),
        _ => Err(reader.bad(key, value, "\"bfloat16\", \"float16\" or \"float32\"")),
    }
}

/// `layer_types`, or else every layer but each `sliding_window_pattern`-th slides.
fn sliding(reader: &Reader<'_>) -> Result<Vec<bool>> {
    let layers = reader.layers()?;
    let names = [("sliding_attention", true), ("full_attention", false)];
    if let Some(kinds) = reader.kinds("layer_types", layers, &names)? {
        return Ok(kinds);
    }
    let pattern = reader.size_or("sliding_window_pattern", 6)?;
    Ok((1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect())
}

/// The base of one kind of layers, whose frequencies are not scaled.
fn theta(reader: &Reader<'_>, kind: &str, old: &str, default: f64) -> Result<f64> {
    let new = format!("rope_parameters.{kind}");
    for key in ["rope_scaling.rope_type", "rope_scaling.type", &format!("{new}.rope_type")] {
        reader.only(key, &json!("default"))?;
    }
    Ok(reader.positive(&[&format!("{new}.rope_theta"), old])?.unwrap_or(default))
}
