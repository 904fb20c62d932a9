//! The keys of a `config.json` of decoders with Mamba-2 from the metadata of a GGUF file.

use serde_json::{Map, Value as Json, json};

use super::file::{File, layers, shortest};
use super::names::Architecture;

/// Settings of one architecture. The lists have the key-value heads and the width of the feed-forward of each layer,
/// where they differ. Errors say what the metadata lacks.
pub(super) fn own(
    file: &File,
    architecture: Architecture,
    [groups, inner]: [&[f64]; 2],
) -> Result<Map<String, Json>, String> {
    let optional = |key: &str| file.size(&architecture.key(key));
    let size = |key: &str| {
        optional(key).ok_or_else(|| format!("its metadata has no number {}", architecture.key(key)))
    };
    let number = |key: &str| file.number(&architecture.key(key)).map(shortest);
    let ends_with = |end: &str| file.tensors.iter().any(|tensor| tensor.name.ends_with(end));
    let (heads, width) = (size("ssm.time_step_rank")?, size("ssm.inner_size")?);
    let (state, kernel) = (size("ssm.state_size")?, size("ssm.conv_kernel")?);
    let of_groups = size("ssm.group_count")?;
    let (dim, conv_bias) = (width / heads.max(1), ends_with("ssm_conv1d.bias"));
    let hidden = size("embedding_length")?;
    let count = layers(file, architecture);
    let each = |list: &[f64], key: &str| match list.len() == count {
        true => Ok(list.iter().map(|number| *number > 0.0).collect::<Vec<_>>()),
        false => Err(format!(
            "its metadata has no list {} of as many numbers as layers",
            architecture.key(key)
        )),
    };
    let mamba = json!({
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_d_state": state,
        "mamba_n_groups": of_groups,
        "mamba_d_conv": kernel,
        "mamba_conv_bias": conv_bias,
        "mamba_proj_bias": ends_with("ssm_in.bias"),
    });
    let found = match architecture {
        Architecture::GraniteHybrid => {
            let attention = each(groups, "attention.head_count_kv")?;
            let kind = |attention: &bool| if *attention { "attention" } else { "mamba" };
            // Attention turns where no context was ever declared to be scaled.
            let turned = file.flag(&architecture.key("rope.scaling.finetuned")) == Some(true);
            let shared = match optional("expert_shared_feed_forward_length") {
                Some(shared) => shared,
                None => size("feed_forward_length")?,
            };
            json!({
                "layer_types": attention.iter().map(kind).collect::<Vec<_>>(),
                "position_embedding_type": if turned { "rope" } else { "nope" },
                "attention_multiplier": number("attention.scale"),
                "embedding_multiplier": number("embedding_scale"),
                "residual_multiplier": number("residual_scale"),
                "logits_scaling": number("logit_scale"),
                "shared_intermediate_size": shared,
                "num_local_experts": 0,
                "mamba_expand": width / hidden.max(1),
            })
        }
        // The converter has multiplied weights by the multipliers.
        Architecture::FalconH1 => json!({
            "mamba_d_ssm": width,
            "mamba_rms_norm": ends_with("ssm_norm.weight"),
            "mamba_norm_before_gate": false,
            "projectors_bias": ends_with("ssm_out.bias"),
            "mlp_bias": ends_with("ffn_up.bias"),
        }),
        _ => {
            let attention = each(groups, "attention.head_count_kv")?;
            let inner = each(inner, "feed_forward_length")?;
            let experts = architecture == Architecture::NemotronHMoe;
            let letter = |(attention, inner): (&bool, &bool)| match (attention, inner) {
                (true, _) => '*',
                (_, true) if experts => 'E',
                (_, true) => '-',
                _ => 'M',
            };
            let pattern: String = attention.iter().zip(&inner).map(letter).collect();
            json!({
                "hybrid_override_pattern": pattern,
                "mamba_num_heads": heads,
                "mamba_head_dim": dim,
                "ssm_state_size": state,
                "n_groups": of_groups,
                "conv_kernel": kernel,
                "use_conv_bias": conv_bias,
                "use_bias": ends_with("ssm_in.bias"),
                "mlp_bias": ends_with("ffn_up.bias"),
                "n_routed_experts": optional("expert_count"),
                "n_group": optional("expert_group_count").filter(|groups| *groups > 0),
                "moe_latent_size": optional("moe_latent_size"),
                "moe_intermediate_size": optional("expert_feed_forward_length"),
                "moe_shared_expert_intermediate_size": optional("expert_shared_feed_forward_length"),
                "norm_topk_prob": file.flag(&architecture.key("expert_weights_norm")),
                "routed_scaling_factor": number("expert_weights_scale"),
            })
        }
    };
    let parts = [mamba, found].into_iter().filter_map(|part| part.as_object().cloned());
    Ok(parts.flatten().collect())
}
