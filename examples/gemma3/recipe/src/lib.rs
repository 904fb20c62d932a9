//! The recipe for Gemma 3 text (`Gemma3ForCausalLM`, and the decoder of `Gemma3ForConditionalGeneration`).
//!
//! Arithmetic: `transformers`, `models/gemma3/modeling_gemma3.py`. Graphs `decode` take one token, graphs
//! `prefill<P>` take P tokens of a prompt over the same caches; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | embedding rows times `params.embed_scale` in; normalised rows out |
//! | `cos`, `sin`; `cos_local`, `sin_local` | `[P, head_dim / 2]` | half tables of full and of sliding layers |
//! | `cmask`; `cmask_local` | `[P, rows + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, rows, head_dim]` → `[kv_heads, P, head_dim]` | keys after norm and rope |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! `rows` is `max_ctx` for full layers. For sliding ones it is the window, and the host keeps the cache as a ring.

mod config;

use std::ops::Range;

use qhx_core::Result;
use qhx_forge::builder::GraphBuilder;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::graph::{Elem, Graph, TensorId};
use qhx_forge::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, Layers, check_shape, decoder,
    prompt_rows,
};
use qhx_forge::recipe::{Recipe, RecipeOptions};
use serde_json::json;

use config::{Config, Rope};

/// Tokens that a prompt graph takes when nothing is said.
const DEFAULT_PREFILL: usize = 128;

/// The hidden rows between layers are those of the reference times this. Published checkpoints have values there
/// beyond the largest f16, 65,504. Each layer normalises what it reads and what it adds, so the factor stands in the
/// weights of the norms, and the result is the same.
const RESIDUAL: f32 = 1.0 / 64.0;

/// The graphs of a checkpoint, and the plan that runs them with `gemma3_generate`.
pub fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint)?;
    let (layers, max_ctx) = (config.sliding.len(), options.max_ctx);
    check_shape(options, layers, Some(config.max_positions))?;
    let parts = Layers {
        norm_offset: 1.0,
        ..Layers::new(checkpoint, options.precision, config.eps)
    };
    let Decoder { contexts, plan_params } = decoder(
        options,
        layers,
        &prompt_rows(options, DEFAULT_PREFILL)?,
        |name, range, rows| run(&parts, &config, name, range, rows, max_ctx),
        parts.lmhead(config.hidden, config.vocab, config.tied)?,
    )?;
    let mut params = DecoderParams {
        hidden: config.hidden,
        vocab: config.vocab,
        layers,
        heads: config.heads,
        rope_theta: config.full.theta,
    }
    .map(max_ctx);
    let scaling = |rope: Rope| json!({"rope_type": "linear", "factor": rope.factor});
    params.insert("rope_scaling".to_owned(), scaling(config.full));
    params.insert(
        "local".to_owned(),
        json!({
            "head_dim": config.heads.dim,
            "rope_theta": config.local.theta,
            "rope_scaling": scaling(config.local),
            "window": config.window,
        }),
    );
    params.insert("embed_scale".to_owned(), json!(config.embed_scale));
    Ok(Recipe {
        family: "gemma3".to_owned(),
        host_op: "gemma3_generate".to_owned(),
        contexts,
        embed: checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?,
        params,
        plan_params,
        tables: Vec::new(),
    })
}

/// `rows` tokens through the layers of `range`, over caches.
fn run(
    parts: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    rows: usize,
    max_ctx: usize,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let (first, last) = (range.start == 0, range.end == config.sliding.len());
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let mut attend = |names, capacity| {
        let inputs = AttendInputs { names, ..AttendInputs::new(config.heads.dim, rows, capacity) };
        Attend::inputs(&mut b, &inputs)
    };
    let kinds = &config.sliding[range.clone()];
    let full = kinds.contains(&false).then(|| attend(AttendInputs::NAMES, max_ctx)).transpose()?;
    let local = ["cos_local", "sin_local", "cmask_local"];
    let ring = config.window.min(max_ctx);
    let local = kinds.contains(&true).then(|| attend(local, ring)).transpose()?;
    if first {
        h = b.scale(h, RESIDUAL)?;
    }
    for layer in range {
        let attend = if config.sliding[layer] { &local } else { &full };
        if let Some(attend) = attend {
            h = self::layer(parts, config, &mut b, h, layer, attend)?;
        }
    }
    if last {
        b.scope("final");
        h = parts.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}

/// `Gemma3DecoderLayer` on rows `[rows, hidden]`: attention and a GELU-gated MLP, each between two norms.
fn layer(
    parts: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    h: TensorId,
    layer: usize,
    attend: &Attend,
) -> Result<TensorId> {
    let tensor = |part: &str| format!("layers.{layer}.{part}");
    b.scope(format!("l{layer}_attn"));
    let normed = parts.norm(b, h, &tensor("input_layernorm"))?;
    let attention = Attention {
        scale: config.scale,
        norms: Some(["q_norm", "k_norm"]),
        qkv_bias: config.attention_bias,
        out_bias: config.attention_bias,
        ..Attention::new(&tensor("self_attn"), layer, config.heads)
    };
    let mixed = parts.attention(b, normed, &attention, attend)?;
    let mixed = parts.scaled_norm(b, mixed, &tensor("post_attention_layernorm"), RESIDUAL)?;
    let h = b.add(h, mixed)?;
    b.scope(format!("l{layer}_mlp"));
    let normed = parts.norm(b, h, &tensor("pre_feedforward_layernorm"))?;
    let names = ["gate_proj", "up_proj", "down_proj"].map(|name| tensor(&format!("mlp.{name}")));
    let [gate, up, down] = names.each_ref().map(String::as_str);
    let gelu = GraphBuilder::gelu_tanh;
    let out = parts.mlp(b, normed, [gate, up, down], config.intermediate, gelu, false)?;
    let out = parts.scaled_norm(b, out, &tensor("post_feedforward_layernorm"), RESIDUAL)?;
    b.add(h, out)
}
