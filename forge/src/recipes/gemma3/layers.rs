//! Gemma 3: the keys of its configuration, and the graphs of its layers, over caches or of an encoder.
//!
//! Arithmetic: `transformers`, `models/gemma3/modeling_gemma3.py`. Both spellings of the configuration are read: that of
//! published checkpoints (`rope_theta`, `rope_local_base_freq`, `sliding_window_pattern`), and the one that
//! `transformers` 5 writes (`rope_parameters` and `layer_types`).

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use serde_json::{Value, json};

use crate::kit::{Attend, AttendInputs, Attention, Heads, Layers, Mlp, Reader};
use crate::recipe::RecipeOptions;

/// The hidden states between layers are those of the reference times this. In published checkpoints the sums there
/// exceed the largest f16, 65,504. Each layer normalises what it reads and what it adds, so the factor stands in the
/// weights of the norms, and the result is the same.
const RESIDUAL: f32 = 1.0 / 64.0;
/// Names of the rotary tables and the mask of sliding layers.
const LOCAL: [&str; 3] = ["cos_local", "sin_local", "cmask_local"];

/// Sizes and constants of a model; where a key is absent, those of `Gemma3TextConfig`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    /// Elements of a hidden state.
    pub(super) hidden: usize,
    /// Number of tokens of the vocabulary.
    pub(super) vocab: usize,
    /// Elements of the inner rows of an MLP.
    pub(super) intermediate: usize,
    /// For each layer whether it slides; the others see all positions.
    pub(super) sliding: Vec<bool>,
    /// Positions that a sliding layer sees, the current one included.
    pub(super) window: usize,
    /// Heads of attention.
    pub(super) heads: Heads,
    /// Multiplies the scores.
    pub(super) scale: f32,
    /// Multiplies the rows of the embedding table.
    pub(super) embed_scale: f32,
    /// Rotary embedding of layers that see all positions.
    pub(super) full: Rope,
    /// Rotary embedding of sliding layers.
    pub(super) local: Rope,
    /// The projections of attention have biases.
    pub(super) attention_bias: bool,
    /// Epsilon of the norms.
    pub(super) eps: f32,
    /// The head is the embedding table.
    pub(super) tied: bool,
    /// Longest context.
    pub(super) max_positions: usize,
}

/// Rotary embedding of one kind of layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rope {
    /// Base of the frequencies.
    pub(super) theta: f64,
    /// Divides the frequencies, where they are scaled.
    pub(super) factor: Option<f64>,
}

impl Config {
    /// Reads and checks the configuration of a decoder, or of an encoder, whose tokens see those behind them.
    ///
    /// # Errors
    /// When a key is malformed, or the model is of the other kind.
    pub(super) fn read(checkpoint: &Checkpoint, encoder: bool) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
        match encoder {
            false => reader.only("use_bidirectional_attention", &json!(false))?,
            true if reader.flag("use_bidirectional_attention")? => {}
            true => {
                return Err(reader.fault(
                    "use_bidirectional_attention is not true: Gemma3TextModel is taken as an encoder only".to_owned(),
                ));
            }
        }
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            reader.only(key, &Value::Null)?;
        }
        let hidden = reader.size_or("hidden_size", 2304)?;
        let scalar = reader.positive(&["query_pre_attn_scalar"])?.unwrap_or(256.0);
        let dtype = if encoder { "float32" } else { "bfloat16" };
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
            embed_scale: reader.in_model_type((hidden as f64).sqrt() as f32, dtype)?,
            full: rope(&reader, "full_attention", "rope_theta", 1e6)?,
            local: rope(&reader, "sliding_attention", "rope_local_base_freq", 1e4)?,
            attention_bias: reader.flag("attention_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(true)?,
            max_positions: reader.size_or("max_position_embeddings", 131_072)?,
        })
    }
}

/// `layer_types`, or else every layer but each `sliding_window_pattern`-th slides.
fn sliding(reader: &Reader<'_>) -> Result<Vec<bool>> {
    let layers = reader.layers_or(26)?;
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
            let missing = || reader.fault(format!("{key} is missing, expected a number"));
            Some(reader.positive(&[&key])?.ok_or_else(missing)?)
        }
        Some((key, value)) => return Err(reader.bad(key, value, "\"default\" or \"linear\"")),
    };
    Ok(Rope { theta, factor })
}

/// Makes the graphs of the layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model<'a> {
    /// Projections and norms.
    pub(super) parts: Layers<'a>,
    /// Sizes and constants.
    pub(super) config: &'a Config,
}

impl<'a> Model<'a> {
    /// The layers of a checkpoint, in the precisions of the options.
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        options: &RecipeOptions,
        config: &'a Config,
    ) -> Self {
        let parts = Layers { norm_offset: 1.0, ..Layers::decoder(checkpoint, options, config.eps) };
        Self { parts, config }
    }

    /// Tokens through the layers of `range`, with the inputs `full` of layers that see all positions. Caches of sliding
    /// layers have `ring` rows; 0 without caches.
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape.
    pub(super) fn graph(
        &self,
        name: &str,
        range: Range<usize>,
        full: AttendInputs<'_>,
        ring: usize,
    ) -> Result<Graph> {
        let (config, rows) = (self.config, full.rows);
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
        let kinds = &config.sliding[range.clone()];
        let local = AttendInputs { names: LOCAL, mask_rows: rows, capacity: ring, ..full };
        // Each kind of layers has inputs where the range has such a layer.
        let mut attend = |slides: bool, inputs| -> Result<Option<Attend>> {
            let used = kinds.contains(&slides);
            used.then(|| Attend::inputs(&mut b, &inputs)).transpose()
        };
        let (full, local) = (attend(false, full)?, attend(true, local)?);
        if range.start == 0 {
            h = b.scale(h, RESIDUAL)?;
        }
        for layer in range.clone() {
            if let Some(attend) = if config.sliding[layer] { &local } else { &full } {
                h = self.layer(&mut b, h, layer, attend)?;
            }
        }
        if range.end == config.sliding.len() {
            b.scope("final");
            h = self.residual().norm(&mut b, h, "norm")?;
        }
        b.output("y", h)?;
        b.finish()
    }

    /// Norms of the hidden states between layers: as of the reference, their epsilon beside a mean of squares.
    fn residual(&self) -> Layers<'_> {
        Layers { eps: self.parts.eps * RESIDUAL * RESIDUAL, ..self.parts }
    }

    /// `Gemma3DecoderLayer` on rows `[rows, hidden]`: attention and a GELU-gated MLP, each between two norms.
    fn layer(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let (config, parts) = (self.config, &self.parts);
        let tensor = |part: &str| format!("layers.{layer}.{part}");
        b.scope(format!("l{layer}_attn"));
        let normed = self.residual().norm(b, h, &tensor("input_layernorm"))?;
        let attention = Attention {
            scale: config.scale,
            norms: Some(["q_norm", "k_norm"]),
            bias: [config.attention_bias; 3],
            out_bias: config.attention_bias,
            cached: attend.capacity > 0,
            ..Attention::new(tensor("self_attn"), layer, config.heads)
        };
        let mixed = parts.attention(b, normed, &attention, attend)?;
        let mixed = parts.scaled_norm(b, mixed, &tensor("post_attention_layernorm"), RESIDUAL)?;
        let h = b.add(h, mixed)?;
        b.scope(format!("l{layer}_mlp"));
        let normed = self.residual().norm(b, h, &tensor("pre_feedforward_layernorm"))?;
        let mlp = Mlp::new(tensor("mlp"), config.intermediate);
        let out = parts.mlp(b, normed, &mlp, GraphBuilder::gelu_tanh)?;
        let out = parts.scaled_norm(b, out, &tensor("post_feedforward_layernorm"), RESIDUAL)?;
        b.add(h, out)
    }
}
