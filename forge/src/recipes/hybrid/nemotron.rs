//! Nemotron-H and Nemotron Nano, `NemotronHForCausalLM`: layers of one kind each, Mamba-2, attention without positions,
//! a squared ReLU, or experts of such.
//!
//! Arithmetic: `transformers`, `models/nemotron_h/modeling_nemotron_h.py`. That limits time steps from below by
//! `time_step_min` in prompts and nowhere else; here, as in the code that checkpoints were published with, they have
//! the limits `time_step_limit`.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use super::{Form, Inner, Kind, Model, Part, Sparse, kind_names};
use crate::kit::{EXPERTS, ExpertNames, Experts, GateNorm, Heads, Mamba2, Reader};
use crate::recipe::{Recipe, RecipeOptions};
use crate::register_recipe;
use crate::registry::RecipeEntry;

/// Names of the tensors of a layer.
const MIXER: &str = "mixer";

register_recipe!(
    RecipeEntry::new(&["NemotronHForCausalLM"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .options(&[EXPERTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    checkpoint.leave_out("mtp");
    super::recipe(checkpoint, options, &read(&Reader::new(checkpoint))?)
}

/// Published checkpoints have the prefix `backbone.`, GGUF files an embedding table of the usual name.
fn names(name: &str) -> Vec<String> {
    let own = name.replace("embed_tokens.", "embeddings.");
    vec![format!("backbone.{own}"), format!("model.{own}"), own, format!("model.{name}")]
}

fn read(reader: &Reader<'_>) -> Result<Model> {
    for (key, expected) in [
        ("mlp_hidden_act", json!("relu2")),
        ("mamba_hidden_act", json!("silu")),
        ("sliding_window", json!(null)),
        ("moe_latent_size", json!(null)),
        ("n_group", json!(1)),
    ] {
        reader.only(key, &expected)?;
    }
    let hidden = reader.size("hidden_size")?;
    // The first checkpoints have the width of a head under another key.
    let dim = reader.maybe_size("attention_head_dim")?.unwrap_or(128);
    let heads: Heads = reader.heads(hidden, Some(8), Some(dim))?;
    let bias = reader.flag("use_bias")?;
    let inner = Inner {
        name: MIXER,
        form: Form::Squared,
        width: reader.size_or("intermediate_size", 21_504)?,
        bias: reader.flag("mlp_bias")?,
    };
    let shared = reader.size_or("moe_shared_expert_intermediate_size", 7688)?;
    let shared = Inner { name: "mixer.shared_experts", width: shared, ..inner };
    let kinds = kinds(reader, inner, shared)?;
    let experts = kinds.iter().any(|kind| matches!(kind, Kind::Experts(_)));
    let experts = experts.then(|| experts_of(reader, hidden)).transpose()?;
    let layers: Vec<_> = kinds.into_iter().map(|kind| vec![Part { norm: "norm", kind }]).collect();
    let size = |keys: [&str; 2], default| match reader.first(&keys) {
        Some((key, _)) => reader.size(key),
        None => Ok(default),
    };
    let mamba = Mamba2 {
        heads: reader.size_or("mamba_num_heads", 128)?,
        dim: reader.size_or("mamba_head_dim", 64)?,
        groups: size(["n_groups", "mamba_n_groups"], 8)?,
        state: reader.size_or("ssm_state_size", 128)?,
        kernel: size(["conv_kernel", "mamba_d_conv"], 4)?,
        conv_bias: reader.flag_or("use_conv_bias", true)?,
        in_bias: bias,
        out_bias: bias,
        norm: GateNorm::After,
        limits: Mamba2::limits(reader, "time_step_limit")?,
        in_factor: 1.0,
        factors: [1.0; 5],
    };
    Ok(Model {
        family: "nemotron_h",
        eps: reader.epsilon(&["layer_norm_epsilon"], 1e-5)?,
        layers,
        mamba: Some(mamba.check(reader)?),
        sparse: experts,
        norm: "norm_f",
        ..Model::of(reader, heads)?
    })
}

/// The kinds of layers: a letter each in `hybrid_override_pattern`, or names in a list.
fn kinds(reader: &Reader<'_>, inner: Inner, shared: Inner) -> Result<Vec<Kind>> {
    let (mamba, attention, mlp) = (Kind::Mamba(MIXER), Kind::Attention(MIXER), Kind::Inner(inner));
    let moe = Kind::Experts(shared);
    let names = [&kind_names(mamba, attention)[..], &[("mlp", mlp), ("moe", moe)]].concat();
    let lists = ["layers_block_type", "layer_types"];
    let key = "hybrid_override_pattern";
    if let Some((list, value)) = reader.first(&lists) {
        let count = value.as_array().map_or(0, Vec::len).max(1);
        if let Some(kinds) = reader.kinds(list, count, &names)? {
            return Ok(kinds);
        }
    }
    let Some(value) = reader.get(key) else {
        return Err(reader.fault(format!("{key} is missing, expected a letter for each layer")));
    };
    let letters = [('M', mamba), ('*', attention), ('-', mlp), ('E', moe)];
    let kind = |letter| letters.iter().find(|known| known.0 == letter).map(|known| known.1);
    let kinds: Option<Vec<_>> = value.as_str().and_then(|all| all.chars().map(kind).collect());
    let kinds = kinds.ok_or_else(|| reader.bad(key, value, "letters of M, *, - and E"))?;
    let layers = reader.layers_or(kinds.len())?;
    if layers != kinds.len() {
        return Err(reader.fault(format!(
            "{key} has {} letters, expected {layers} (num_hidden_layers)",
            kinds.len()
        )));
    }
    Ok(kinds)
}

/// Experts beside one that every token goes to, chosen by sigmoids and a bias (`NemotronHTopkRouter`).
fn experts_of(reader: &Reader<'_>, hidden: usize) -> Result<Sparse> {
    let experts = Experts::of(reader, hidden, ["n_routed_experts", "moe_intermediate_size"])?;
    let scale = reader.positive(&["routed_scaling_factor"])?.unwrap_or(1.0);
    let normalize = reader.flag_or("norm_topk_prob", true)?;
    Ok(Sparse {
        experts: Experts { gated: false, ..experts },
        router: json!({
            "rule": "sigmoid",
            "normalize": normalize,
            "scale": scale,
            "epsilon": 1e-20,
        }),
        names: |layer| {
            let bias = Some(format!("{layer}.mixer.gate.e_score_correction_bias"));
            ExpertNames { bias, ..ExpertNames::new(format!("{layer}.mixer.experts")) }
        },
        gate: "mixer.gate",
    })
}
