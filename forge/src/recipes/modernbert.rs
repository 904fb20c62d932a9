//! ModernBERT (`ModernBertModel`), and rerankers that are one with a head of one value.
//!
//! Arithmetic: `transformers`, `models/modernbert` (Warner et al. 2024, arXiv 2412.13663). Graphs `enc` take S tokens,
//! a text or a pair of texts with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | embedding rows in; normalised rows out |
//! | `cos`, `sin`; `cos_local`, `sin_local` | `[S, head_dim / 2]` | half tables of full and of sliding layers |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 | added to scores; hides padding, and texts from each other |
//! | `cmask_local` | `[S, S]` | as `cmask`, and hides positions further than `params.local.reach` |

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use serde_json::{Value, json};

use super::encoder::{self, ACTIVATIONS, Dense, Encoder, Norm, activate, max_text};
use crate::kit::{
    Attend, AttendInputs, Attention, DecoderParams, Heads, Layers, Mlp, Reader, check_shape, object,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["ModernBertModel", "ModernBertForMaskedLM"], recipe)
        .tasks(&[Task::Embed])
        .prefill_graphs()
        .longest(|checkpoint, _| max_text(checkpoint).ok()?)
        .options(&encoder::OPTIONS)
);
register_recipe!(
    RecipeEntry::new(&["ModernBertForSequenceClassification"], recipe)
        .tasks(&[Task::Score])
        .prefill_graphs()
        .longest(|checkpoint, _| max_text(checkpoint).ok()?)
);

/// Names of the inputs of sliding layers.
const LOCAL: [&str; 3] = ["cos_local", "sin_local", "cmask_local"];

/// Sizes and constants; where a key is absent, those of `ModernBertConfig`.
struct Config {
    hidden: usize,
    vocab: usize,
    intermediate: usize,
    heads: Heads,
    eps: f32,
    positions: usize,
    /// Which layers slide.
    sliding: Vec<bool>,
    /// Positions on either side that a token sees in a layer that slides.
    reach: usize,
    /// Bases of the frequencies of full layers and of those that slide.
    thetas: [f64; 2],
    activation: String,
    attention_bias: bool,
    mlp_bias: bool,
    norm_bias: bool,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        let hidden = reader.size_or("hidden_size", 768)?;
        let layers = reader.layers_or(22)?;
        let kinds = [("full_attention", false), ("sliding_attention", true)];
        let every = reader.size_or("global_attn_every_n_layers", 3)?;
        let sliding = reader.kinds("layer_types", layers, &kinds)?;
        Ok(Self {
            hidden,
            vocab: reader.size_or("vocab_size", 50_368)?,
            intermediate: reader.size_or("intermediate_size", 1152)?,
            heads: reader.heads(hidden, None, None)?,
            eps: reader.epsilon(&["norm_eps"], 1e-5)?,
            positions: reader.size_or("max_position_embeddings", 8192)?,
            sliding: sliding
                .unwrap_or_else(|| (0..layers).map(|layer| layer % every != 0).collect()),
            reach: reader.size_or("local_attention", 128)? / 2,
            thetas: [
                theta(&reader, "full_attention", "global_rope_theta", 160_000.0)?,
                theta(&reader, "sliding_attention", "local_rope_theta", 10_000.0)?,
            ],
            activation: activation(&reader, "hidden_activation")?,
            attention_bias: reader.flag("attention_bias")?,
            mlp_bias: reader.flag("mlp_bias")?,
            norm_bias: reader.flag("norm_bias")?,
        })
    }
}

/// An activation, GELU where the key is absent.
fn activation(reader: &Reader<'_>, key: &str) -> Result<String> {
    let Some(value) = reader.get(key) else { return Ok("gelu".to_owned()) };
    let known = value.as_str().filter(|name| ACTIVATIONS.contains(name));
    known.map(str::to_owned).ok_or_else(|| reader.bad(key, value, &ACTIVATIONS.join(", ")))
}

/// Base of the frequencies of layers of a kind, in the spelling of `transformers` 5 or in that of published files.
fn theta(reader: &Reader<'_>, kind: &str, old: &str, default: f64) -> Result<f64> {
    reader.only("rope_scaling", &Value::Null)?;
    reader.only(&format!("rope_parameters.{kind}.rope_type"), &json!("default"))?;
    let new = format!("rope_parameters.{kind}.rope_theta");
    Ok(reader.positive(&[&new, old])?.unwrap_or(default))
}

/// `ModernBertPredictionHead` and a classifier, behind the rows that `classifier_pooling` takes.
fn reranker(checkpoint: &Checkpoint, config: &Config) -> Result<Encoder> {
    let reader = Reader::new(checkpoint);
    let pooling = match reader.get("classifier_pooling").map(|way| (way, way.as_str())) {
        None | Some((_, Some("cls"))) => "cls",
        Some((_, Some("mean"))) => "mean",
        Some((way, _)) => return Err(reader.bad("classifier_pooling", way, "\"cls\" or \"mean\"")),
    };
    let activation = activation(&reader, "classifier_activation")?;
    let own = match activation.as_str() {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => "gelu_tanh",
        "swish" => "silu",
        own => own,
    };
    let hidden = config.hidden;
    let norm = Norm { name: "head.norm", bias: config.norm_bias, eps: config.eps };
    let head = [
        Dense {
            name: "head.dense",
            shape: [hidden, hidden],
            bias: reader.flag("classifier_bias")?,
            activation: own,
            temperature: 1.0,
            norm: Some(norm),
        },
        Dense {
            name: "classifier",
            shape: [1, hidden],
            bias: true,
            activation: "identity",
            temperature: 1.0,
            norm: None,
        },
    ];
    Encoder::scoring(checkpoint, false, pooling, &head, None)
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let Config { hidden, vocab, heads, reach, thetas, .. } = config;
    let layers = config.sliding.len();
    check_shape(options, layers, Some(config.positions))?;
    let encoder = match options.task {
        Task::Score => reranker(checkpoint, &config)?,
        _ => Encoder::read(checkpoint, options, hidden, false)?,
    };
    if options.task != Task::Score {
        // The head for masked tokens.
        checkpoint.leave_out("head");
    }
    checkpoint.leave_out("decoder");
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta: thetas[0] }.map(options.max_ctx);
    params.extend(object(json!({
        "local": {"reach": reach, "head_dim": heads.dim, "rope_theta": thetas[1]},
    })));
    let parts = Layers::decoder(checkpoint, options, config.eps);
    let embed = checkpoint.matrix("embeddings.tok_embeddings.weight", [vocab, hidden])?;
    encoder.recipe(
        "modernbert",
        options,
        (layers, embed),
        params,
        |name, range, rows, mask_rows| graph(&parts, &config, name, range, rows, mask_rows),
    )
}

/// `rows` tokens through the layers of `range`.
fn graph(
    parts: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    rows: usize,
    mask_rows: usize,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let inputs = AttendInputs { mask_rows, ..AttendInputs::new(config.heads.dim, rows, 0) };
    let of = |sliding: bool| config.sliding[range.clone()].contains(&sliding);
    // Only what a layer of the part reads is an input.
    let full = of(false).then(|| Attend::inputs(&mut b, &inputs)).transpose()?;
    let local = AttendInputs { names: LOCAL, mask_rows: rows, ..inputs };
    let local = of(true).then(|| Attend::inputs(&mut b, &local)).transpose()?;
    let norm =
        |b: &mut GraphBuilder, x, name: &str| parts.layer_norm_of(b, x, name, config.norm_bias);
    if range.start == 0 {
        b.scope("embeddings");
        h = norm(&mut b, h, "embeddings.norm")?;
    }
    for index in range.clone() {
        let Some(attend) = (if config.sliding[index] { &local } else { &full }) else { continue };
        h = layer(parts, config, &mut b, h, index, attend)?;
    }
    if range.end == config.sliding.len() {
        b.scope("final");
        h = norm(&mut b, h, "final_norm")?;
    }
    b.output("y", h)?;
    b.finish()
}

/// `ModernBertEncoderLayer` on rows `[rows, hidden]`.
fn layer(
    parts: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    h: TensorId,
    layer: usize,
    attend: &Attend,
) -> Result<TensorId> {
    let tensor = |part: &str| format!("layers.{layer}.{part}");
    let norm = |b: &mut GraphBuilder, x, part: &str| {
        parts.layer_norm_of(b, x, &tensor(part), config.norm_bias)
    };
    b.scope(format!("l{layer}_attn"));
    // What comes in at the first layer is normalised.
    let normed = if layer == 0 { h } else { norm(b, h, "attn_norm")? };
    let attention = Attention {
        joined: Some("Wqkv"),
        bias: [config.attention_bias; 3],
        out: "Wo",
        out_bias: config.attention_bias,
        cached: false,
        ..Attention::new(tensor("attn"), layer, config.heads)
    };
    let mixed = parts.attention(b, normed, &attention, attend)?;
    let h = b.add(h, mixed)?;
    b.scope(format!("l{layer}_mlp"));
    let normed = norm(b, h, "mlp_norm")?;
    let mlp = Mlp {
        parts: ["gate", "up", "Wo"],
        joined: Some("Wi"),
        bias: config.mlp_bias,
        down_bias: config.mlp_bias,
        ..Mlp::new(tensor("mlp"), config.intermediate)
    };
    let out = parts.mlp(b, normed, &mlp, |b, x| activate(b, x, &config.activation))?;
    b.add(h, out)
}
