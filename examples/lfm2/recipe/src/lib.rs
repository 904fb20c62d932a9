//! The recipe for `Lfm2ForCausalLM`: LFM2 and LFM2.5 checkpoints to graphs.
//!
//! Arithmetic: `transformers`, `models/lfm2/modeling_lfm2.py`. One context with two graphs:
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[1, hidden]` | residual in, normalised row out |
//! | `cos`, `sin` | `[1, head_dim / 2]` | half tables |
//! | `cmask` | `[1, max_ctx + 1]` | added to scores; the last slot is the current token |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, 1, head_dim]` | attention layers; keys after norm and rope |
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, hidden]` | convolution layers; rows oldest first |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

mod config;

use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::builder::GraphBuilder;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::graph::{Elem, Graph, ReduceOp, TensorId};
use qhx_forge::recipes::{ContextPlan, Precision, Recipe, RecipeOptions};
use qhx_forge::weight::{Storage, Weight};
use serde_json::{Map, Value, json};

use config::Config;

/// The graphs of a checkpoint, and the plan that runs them with `lfm2_generate`.
pub fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    if options.shards != 1 {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("{} shards, expected 1: lfm2_generate runs one decode graph", options.shards),
        ));
    }
    let config = Config::read(checkpoint)?;
    let longest = config.max_positions.unwrap_or(usize::MAX);
    if !(1..=longest).contains(&options.max_ctx) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a context of {} tokens, expected 1 to {longest} (max_position_embeddings)",
                options.max_ctx
            ),
        ));
    }
    let embed = checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?;
    let head = match config.tied {
        true => embed.clone(),
        false => checkpoint.matrix("lm_head.weight", [config.vocab, config.hidden])?,
    };
    let layers = Layers { checkpoint, config: &config, precision: options.precision };
    let graphs = vec![layers.decode(options.max_ctx)?, lmhead(&config, head)?];
    Ok(Recipe {
        family: "lfm2",
        host_op: "lfm2_generate",
        contexts: vec![ContextPlan {
            key: "decode".to_owned(),
            precision: options.precision,
            graphs,
            optional: None,
        }],
        embed,
        params: object(json!({
            "hidden": config.hidden,
            "vocab": config.vocab,
            "n_layers": config.attention.len(),
            "max_ctx": options.max_ctx,
            "n_heads": config.heads,
            "n_kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "kv_dim": config.kv_heads * config.head_dim,
            "rope_theta": config.rope_theta,
        })),
        plan_params: object(json!({"decode": "decode", "lmhead": "lmhead"})),
        tables: Vec::new(),
    })
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Inputs that all attention layers share.
struct Attend {
    cos: TensorId,
    sin: TensorId,
    mask: TensorId,
    max_ctx: usize,
}

/// Builds layers from the tensors of a checkpoint.
struct Layers<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    precision: Precision,
}

impl Layers<'_> {
    /// One token through all layers.
    fn decode(&self, max_ctx: usize) -> Result<Graph> {
        let c = self.config;
        let mut b = GraphBuilder::new("decode");
        let mut h = b.input("x", Elem::Activation, &[1, c.hidden])?;
        let attend = if c.attention.contains(&true) {
            let half = [1, c.head_dim / 2];
            let cos = b.input("cos", Elem::Activation, &half)?;
            let sin = b.input("sin", Elem::Activation, &half)?;
            let mask = b.input("cmask", Elem::Activation, &[1, max_ctx + 1])?;
            let mask = b.reshape(mask, &[1, 1, max_ctx + 1])?;
            Some(Attend { cos, sin, mask, max_ctx })
        } else {
            None
        };
        for (i, &attention) in c.attention.iter().enumerate() {
            b.scope(format!("l{i}"));
            let normed = self.norm(&mut b, h, &format!("layers.{i}.operator_norm"))?;
            let mixed = match &attend {
                Some(attend) if attention => self.attention(&mut b, normed, i, attend)?,
                _ => self.short_conv(&mut b, normed, i)?,
            };
            h = b.add(h, mixed)?;
            b.scope(format!("l{i}_mlp"));
            let normed = self.norm(&mut b, h, &format!("layers.{i}.ffn_norm"))?;
            let out = self.mlp(&mut b, normed, i)?;
            h = b.add(h, out)?;
        }
        b.scope("final");
        let y = self.norm(&mut b, h, "embedding_norm")?;
        b.output("y", y)?;
        b.finish()
    }

    fn norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let weight = self.checkpoint.values(&format!("{name}.weight"), &[self.config.hidden])?;
        let weight = b.row("norm", weight)?;
        b.rms_norm(x, self.config.eps, weight)
    }

    /// `Lfm2MLP`.
    fn mlp(&self, b: &mut GraphBuilder, x: TensorId, layer: usize) -> Result<TensorId> {
        let (hidden, wide) = (self.config.hidden, self.config.intermediate);
        let part = |name: &str| format!("layers.{layer}.feed_forward.{name}");
        let gate = self.linear(b, x, &part("w1"), [wide, hidden], false)?;
        let up = self.linear(b, x, &part("w3"), [wide, hidden], false)?;
        let gate = b.silu(gate)?;
        let product = b.mul(gate, up)?;
        self.linear(b, product, &part("w2"), [hidden, wide], false)
    }

    /// `Lfm2ShortConv`: `C · conv(B · x)`, a causal depthwise convolution between two gates.
    fn short_conv(&self, b: &mut GraphBuilder, x: TensorId, layer: usize) -> Result<TensorId> {
        let (hidden, kernel) = (self.config.hidden, self.config.kernel);
        let bias = self.config.conv_bias;
        let part = |name: &str| format!("layers.{layer}.conv.{name}");
        let past =
            b.input(&format!("past_conv_{layer}"), Elem::Activation, &[kernel - 1, hidden])?;
        let all = self.linear(b, x, &part("in_proj"), [3 * hidden, hidden], bias)?;
        let before = b.slice(all, 1, 0, hidden)?;
        let after = b.slice(all, 1, hidden, 2 * hidden)?;
        let value = b.slice(all, 1, 2 * hidden, 3 * hidden)?;
        let column = b.mul(before, value)?;

        // Time is the first dimension of the FIFO: a new column is a row as it comes.
        let window = b.concat(&[past, column], 0)?;
        let present = b.slice(window, 0, 1, kernel)?;
        let stored = self.checkpoint.values(&part("conv.weight"), &[hidden, 1, kernel])?;
        let taps = (0..kernel * hidden).map(|i| stored[(i % hidden) * kernel + i / hidden]);
        let taps = b.constant("taps", Elem::Activation, &[kernel, hidden], taps.collect())?;
        let products = b.mul(window, taps)?;
        let mut mixed = b.reduce(ReduceOp::Sum, products, 0)?;
        if bias {
            let bias = self.checkpoint.values(&part("conv.bias"), &[hidden])?;
            let bias = b.row("bias", bias)?;
            mixed = b.add(mixed, bias)?;
        }
        let gated = b.mul(after, mixed)?;
        let out = self.linear(b, gated, &part("out_proj"), [hidden, hidden], bias)?;
        b.output(&format!("present_conv_{layer}"), present)?;
        Ok(out)
    }

    /// `Lfm2Attention`: grouped queries with RMSNorm on queries and keys. Scores of the cache and
    /// of the new token are separate products, so that the cache is read where it lies.
    fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        attend: &Attend,
    ) -> Result<TensorId> {
        let c = self.config;
        let (heads, groups, d, ctx) = (c.heads, c.kv_heads, c.head_dim, attend.max_ctx);
        let part = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let past_k = b.input(&format!("past_k_{layer}"), Elem::Activation, &[groups, ctx, d])?;
        let past_v = b.input(&format!("past_v_{layer}"), Elem::Activation, &[groups, ctx, d])?;
        let q = self.linear(b, x, &part("q_proj"), [heads * d, c.hidden], false)?;
        let k = self.linear(b, x, &part("k_proj"), [groups * d, c.hidden], false)?;
        let v = self.linear(b, x, &part("v_proj"), [groups * d, c.hidden], false)?;

        // The factor 1 / √d of the scores stands in the norm's weight: what follows is linear in q.
        let scale = 1.0 / (d as f32).sqrt();
        let mut head = |x: TensorId, rows: usize, name: &str, scale: f32| {
            let mut weight = self.checkpoint.values(&part(&format!("{name}.weight")), &[d])?;
            weight.iter_mut().for_each(|w| *w *= scale);
            let weight = b.row(name, weight)?;
            let x = b.reshape(x, &[rows, d])?;
            let x = b.rms_norm(x, c.eps, weight)?;
            b.rope(x, attend.cos, attend.sin)
        };
        let q = head(q, heads, "q_layernorm", scale)?;
        let k = head(k, groups, "k_layernorm", 1.0)?;
        // Query head a uses kv head a / (heads / groups): consecutive heads share one product.
        let q = b.reshape(q, &[groups, heads / groups, d])?;
        let k = b.reshape(k, &[groups, 1, d])?;
        let v = b.reshape(v, &[groups, 1, d])?;

        let past = b.matmul(q, past_k, true)?;
        let own = b.matmul(q, k, true)?;
        let scores = b.concat(&[past, own], 2)?;
        let scores = b.add(scores, attend.mask)?;
        let weights = b.softmax(scores)?;
        let past = b.slice(weights, 2, 0, ctx)?;
        let own = b.slice(weights, 2, ctx, ctx + 1)?;
        let past = b.matmul(past, past_v, false)?;
        let own = b.mul(own, v)?;
        let mixed = b.add(past, own)?;
        let mixed = b.reshape(mixed, &[1, heads * d])?;
        let out = self.linear(b, mixed, &part("out_proj"), [c.hidden, heads * d], false)?;
        b.output(&format!("new_k_{layer}"), k)?;
        b.output(&format!("new_v_{layer}"), v)?;
        Ok(out)
    }

    fn linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        [rows, cols]: [usize; 2],
        bias: bool,
    ) -> Result<TensorId> {
        let source = self.checkpoint.matrix(&format!("{name}.weight"), [rows, cols])?;
        let bias = bias.then(|| self.checkpoint.values(&format!("{name}.bias"), &[rows]));
        let short = name.rsplit('.').next().unwrap_or(name);
        let storage = self.precision.storage(rows, cols);
        b.linear(short, x, Weight::new(source, storage), bias.transpose()?)
    }
}

/// Normalised row to logits; its weight stays f16.
fn lmhead(
    config: &Config,
    weight: std::sync::Arc<dyn qhx_forge::weight::RowSource>,
) -> Result<Graph> {
    let mut b = GraphBuilder::new("lmhead");
    let x = b.input("x", Elem::Activation, &[1, config.hidden])?;
    let logits = b.linear("head", x, Weight::new(weight, Storage::Float), None)?;
    b.output("logits", logits)?;
    b.finish()
}
