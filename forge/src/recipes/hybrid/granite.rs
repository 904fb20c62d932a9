//! Granite 4, `GraniteMoeHybridForCausalLM`: Mamba-2 among layers of attention, each with an MLP, some with experts.
//!
//! Arithmetic: `transformers`, `models/granitemoehybrid/modeling_granitemoehybrid.py`.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::{Factors, Form, Inner, Kind, Model, Part, Sparse, kind_names, mamba_sizes};
use crate::kit::{EXPERTS, ExpertNames, Experts, Reader};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

register_recipe!(
    RecipeEntry::new(&["GraniteMoeHybridForCausalLM"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[EXPERTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    // GGUF files have the two projections apart.
    let apart = checkpoint.has("layers.0.shared_mlp.gate_proj.weight");
    let form = match apart {
        true => Form::Gated(["gate_proj", "up_proj", "output_linear"]),
        false => Form::Joined(["input_linear", "output_linear"]),
    };
    super::recipe(checkpoint, options, &read(&Reader::new(checkpoint), form)?)
}

/// Published checkpoints have two stacks of an expert's matrices under other names than `transformers` 5.
fn names(name: &str) -> Vec<String> {
    let published = name
        .replace(".experts.gate_up_proj", ".input_linear.weight")
        .replace(".experts.down_proj", ".output_linear.weight")
        .replace(".router.weight", ".router.layer.weight");
    [name, &published]
        .into_iter()
        .flat_map(|name| [format!("model.{name}"), name.to_owned()])
        .collect()
}

fn read(reader: &Reader<'_>, form: Form) -> Result<Model> {
    reader.only("hidden_act", &json!("silu"))?;
    let hidden = reader.size("hidden_size")?;
    let heads = reader.heads(hidden, None, None)?;
    let number = |key: &str| reader.positive(&[key]).map(|found| found.unwrap_or(1.0) as f32);
    let added = number("residual_multiplier")?;
    let experts = reader.get("num_local_experts").is_none_or(|count| *count != 0);
    let experts =
        experts.then(|| Experts::of(reader, hidden, ["num_local_experts", "intermediate_size"]));
    let experts = experts.transpose()?;
    let inner = Inner {
        name: "shared_mlp",
        form,
        width: reader.size_or("shared_intermediate_size", 1024)?,
        bias: false,
    };
    let second = if experts.is_some() { Kind::Experts(inner) } else { Kind::Inner(inner) };
    let layers = kinds(reader)?.into_iter().map(|first| {
        vec![
            Part { norm: "input_layernorm", kind: first },
            Part { norm: "post_attention_layernorm", kind: second },
        ]
    });
    let layers: Vec<_> = layers.collect();
    let mamba = super::any(&layers, Kind::has_mamba);
    let key = "position_embedding_type";
    let rope_theta = match reader.get(key) {
        Some(kind) if *kind == "rope" => Some(reader.rope_theta(1e4)?),
        Some(kind) if *kind != "nope" => {
            return Err(reader.bad(key, kind, "\"rope\", \"nope\" or null"));
        }
        _ => None,
    };
    Ok(Model {
        family: "granite",
        eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
        layers,
        rope_theta,
        attention_bias: reader.flag("attention_bias")?,
        mamba: match mamba {
            true => Some(mamba_sizes(reader, reader.size_or("mamba_expand", 2)? * hidden)?),
            false => None,
        },
        sparse: experts.map(|experts| Sparse {
            experts,
            router: json!({"rule": "softmax", "normalize": true, "scale": added}),
            names: |layer| ExpertNames::new(format!("{layer}.block_sparse_moe.experts")),
            gate: "block_sparse_moe.router",
        }),
        factors: Factors {
            embeddings: number("embedding_multiplier")?,
            logits: 1.0 / number("logits_scaling")?,
            added,
            scores: number("attention_multiplier")?,
            ..Factors::of(heads)
        },
        ..Model::of(reader, heads)?
    })
}

fn kinds(reader: &Reader<'_>) -> Result<Vec<Kind>> {
    let count = reader.layers()?;
    let mamba = Kind::Mamba("mamba");
    let names = kind_names(mamba, Kind::Attention("self_attn"));
    let key =
        ["layer_types", "layers_block_type"].into_iter().find(|key| reader.get(key).is_some());
    let kinds = reader.kinds(key.unwrap_or("layer_types"), count, &names)?;
    Ok(kinds.unwrap_or_else(|| vec![mamba; count]))
}
