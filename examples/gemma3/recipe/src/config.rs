//! The keys of `config.json` that shape the graphs, checked. Both spellings are read: that of published
//! checkpoints (`rope_theta`, `rope_local_base_freq`, `sliding_window_pattern`), and the one that `transformers` 5
//! writes (`rope_parameters` and `layer_types`).

use half::{bf16, f16};
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_forge::kit::{Heads, Reader};
use serde_json::{Value, json};

/// Sizes and constants of a model; where a key is absent, those of `Gemma3TextConfig`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    /// For each layer whether it slides over the last positions; the others see all of them.
    pub sliding: Vec<bool>,
    /// Positions that a sliding layer sees, the current one included.
    pub window: usize,
    pub heads: Heads,
    /// Multiplies the scores.
    pub scale: f32,
    /// Multiplies the rows of the embedding table.
    pub embed_scale: f32,
    pub full: Rope,
    pub local: Rope,
    pub attention_bias: bool,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: usize,
}

/// Rotary embedding of one kind of layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rope {
    pub theta: f64,
    /// Divides the frequencies.
    pub factor: f64,
}

impl Config {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
        reader.only("use_bidirectional_attention", &json!(false))?;
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
            window: reader.size_or("sliding_window", 4096)?,
            heads: match reader.get("num_attention_heads") {
                Some(_) => reader.heads(hidden, Some(4), Some(256))?,
                None => Heads { query: 8, groups: 4, dim: 256 },
            },
            scale: (1.0 / scalar.sqrt()) as f32,
            embed_scale: embed_scale(&reader, checkpoint, hidden)?,
            full: rope(&reader, "full_attention", "rope_theta", 1e6)?,
            local: rope(&reader, "sliding_attention", "rope_local_base_freq", 1e4)?,
            attention_bias: reader.flag("attention_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(true),
            max_positions: reader.size_or("max_position_embeddings", 131_072)?,
        })
    }
}

/// √hidden in the type that the model runs in: `Gemma3TextScaledWordEmbedding` rounds it to that of the weights.
fn embed_scale(reader: &Reader<'_>, checkpoint: &Checkpoint, hidden: usize) -> Result<f32> {
    let exact = (hidden as f64).sqrt() as f32;
    // Of a multimodal checkpoint the top level says it.
    let top = checkpoint.config();
    let said = reader.first(&["dtype", "torch_dtype"]).map(|(_, value)| value);
    match said.or(top.get("dtype")).or(top.get("torch_dtype")).and_then(Value::as_str) {
        None | Some("bfloat16") => Ok(bf16::from_f32(exact).to_f32()),
        Some("float16") => Ok(f16::from_f32(exact).to_f32()),
        Some("float32") => Ok(exact),
        Some(other) => Err(reader.fault(format!(
            "dtype is {other:?}, expected \"bfloat16\", \"float16\" or \"float32\""
        ))),
    }
}

/// `layer_types`, or else every layer but each `sliding_window_pattern`-th slides.
fn sliding(reader: &Reader<'_>) -> Result<Vec<bool>> {
    let layers = match reader.get("num_hidden_layers") {
        Some(_) => reader.layers()?,
        None => 26,
    };
    let names = [("sliding_attention", true), ("full_attention", false)];
    if let Some(kinds) = reader.kinds("layer_types", layers, &names)? {
        return Ok(kinds);
    }
    let pattern = reader.size_or("sliding_window_pattern", 6)?;
    Ok((1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect())
}

/// The new spelling has an object for each kind of layers; of the older one `rope_scaling` is for full layers alone.
fn rope(reader: &Reader<'_>, kind: &str, old_theta: &str, theta: f64) -> Result<Rope> {
    let new = format!("rope_parameters.{kind}");
    let place = match kind {
        "full_attention" if reader.get("rope_scaling").is_some() => "rope_scaling",
        _ => &*new,
    };
    let theta = reader.positive(&[&format!("{new}.rope_theta"), old_theta])?.unwrap_or(theta);
    let keys = ["rope_type", "type"].map(|key| format!("{place}.{key}"));
    let factor = match reader.first(&keys.each_ref().map(String::as_str)) {
        None => None,
        Some((_, value)) if value == "default" => None,
        Some((_, value)) if value == "linear" => {
            let key = format!("{place}.factor");
            let factor = reader.positive(&[&key])?;
            Some(
                factor
                    .ok_or_else(|| reader.fault(format!("{key} is missing, expected a number")))?,
            )
        }
        Some((key, value)) => return Err(reader.bad(key, value, "\"default\" or \"linear\"")),
    };
    Ok(Rope { theta, factor: factor.unwrap_or(1.0) })
}
