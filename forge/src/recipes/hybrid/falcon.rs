//! Falcon-H1, `FalconH1ForCausalLM`: attention and Mamba-2 side by side in each layer, and multipliers of all parts.
//!
//! Arithmetic: `transformers`, `models/falcon_h1/modeling_falcon_h1.py`.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::{Factors, Form, Inner, Kind, Model, Part, mamba_sizes};
use crate::kit::{GateNorm, Mamba2, Reader};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["FalconH1ForCausalLM"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    super::recipe(checkpoint, options, &read(&Reader::new(checkpoint))?)
}

fn read(reader: &Reader<'_>) -> Result<Model> {
    reader.only("hidden_act", &json!("silu"))?;
    reader.only("mamba_use_mlp", &json!(true))?;
    let hidden = reader.size("hidden_size")?;
    let heads = reader.heads(hidden, Some(8), None)?;
    let number = |key: &str| reader.positive(&[key]).map(|found| found.unwrap_or(1.0) as f32);
    let norm = match reader.flag("mamba_rms_norm")? {
        false => GateNorm::None,
        true if reader.flag_or("mamba_norm_before_gate", true)? => GateNorm::Before,
        true => GateNorm::After,
    };
    let inner = match reader.maybe_size("mamba_d_ssm")? {
        Some(inner) => inner,
        None if reader.has("mamba_d_ssm") => reader.size_or("mamba_expand", 2)? * hidden,
        None => 1024,
    };
    let mamba = Mamba2 {
        out_bias: reader.flag("projectors_bias")?,
        norm,
        in_factor: number("ssm_in_multiplier")?,
        factors: list(reader, "ssm_multipliers")?,
        ..mamba_sizes(reader, inner)?
    };
    let inner = Inner {
        name: "feed_forward",
        form: Form::Gated(["gate_proj", "up_proj", "down_proj"]),
        width: reader.size("intermediate_size")?,
        bias: reader.flag("mlp_bias")?,
    };
    let layer = vec![
        Part { norm: "input_layernorm", kind: Kind::Both(["self_attn", "mamba"]) },
        Part { norm: "pre_ff_layernorm", kind: Kind::Inner(inner) },
    ];
    Ok(Model {
        family: "falcon_h1",
        eps: reader.epsilon(&["rms_norm_eps"], 1e-5)?,
        layers: vec![layer; reader.layers()?],
        rope_theta: Some(reader.rope_theta(1e4)?),
        attention_bias: reader.flag("attention_bias")?,
        mamba: Some(mamba),
        factors: Factors {
            embeddings: number("embedding_multiplier")?,
            logits: number("lm_head_multiplier")?,
            // Keys are a factor of each score.
            scores: heads.scale() * number("key_multiplier")?,
            attention_in: number("attention_in_multiplier")?,
            attention_out: number("attention_out_multiplier")?,
            mamba_out: number("ssm_out_multiplier")?,
            mlp: list(reader, "mlp_multipliers")?,
            ..Factors::of(heads)
        },
        norm: "final_layernorm",
        ..Model::of(reader, heads)?
    })
}

/// Multipliers of several parts under one key, all 1 by default.
fn list<const N: usize>(reader: &Reader<'_>, key: &str) -> Result<[f32; N]> {
    let Some(value) = reader.get(key) else { return Ok([1.0; N]) };
    let number = |value: &serde_json::Value| {
        value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
    };
    let found: Option<Vec<f32>> =
        value.as_array().and_then(|list| list.iter().map(number).collect());
    found
        .and_then(|found| found.try_into().ok())
        .ok_or_else(|| reader.bad(key, value, &format!("{N} numbers")))
}
