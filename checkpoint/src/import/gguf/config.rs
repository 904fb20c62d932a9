//! A `config.json` from the metadata of a GGUF file.

use qhx_base::artifacts::Mapped;
use serde_json::{Map, Value as Json, json};

use super::file::{File, Info, layers, shortest};
use super::form::Form;
use super::hybrid;
use super::names::Architecture;
use super::tokenizer;

/// Sizes that every configuration has; further keys by architecture are in [`own`].
const SIZES: [(&str, &str); 4] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
];

/// The number of a key, or the largest of its list, which has one for each layer.
pub(super) fn largest(file: &File, map: &Mapped, key: &str) -> Option<usize> {
    let list = || file.numbers(map, key).unwrap_or_default();
    let largest = || list().into_iter().fold(0f64, f64::max);
    file.size(key).or_else(|| Some(largest() as usize).filter(|largest| *largest > 0))
}

/// The configuration; else what the metadata lacks.
pub(super) fn of(file: &File, map: &Mapped, architecture: Architecture) -> Result<Json, String> {
    let Some(class) = architecture.class() else {
        return Err(format!(
            "its metadata does not say all of a model of {}: no config.json",
            architecture.name()
        ));
    };
    let has = |name: &str| file.tensors.iter().any(|tensor| tensor.name == name);
    let key = |key: &str| architecture.key(key);
    let experts = file.size(&key("expert_count")).filter(|experts| *experts > 0);
    let sparse = matches!(
        architecture,
        Architecture::PhiMoe
            | Architecture::Qwen3Moe
            | Architecture::Lfm2Moe
            | Architecture::GptOss
            | Architecture::GraniteHybrid
            | Architecture::NemotronHMoe
            | Architecture::Qwen3Next
    );
    if experts.is_some() && !sparse {
        return Err("a model of experts: no config.json".to_owned());
    }
    let mut config = Map::new();
    let class = match architecture {
        Architecture::Olmo2 if file.size(&key("attention.sliding_window")).is_some() => {
            "Olmo3ForCausalLM"
        }
        // Mistral Small 3.1, whose queries do not grow with the position.
        Architecture::Mistral3 if file.number(&key("attention.temperature_scale")).is_none() => {
            "LlamaForCausalLM"
        }
        _ => class,
    };
    config.insert("architectures".to_owned(), json!([class]));
    config.insert("hidden_act".to_owned(), json!("silu"));
    if file.size(&key("block_count")).is_none() {
        return Err(format!("its metadata has no number {}", key("block_count")));
    }
    config.insert("num_hidden_layers".to_owned(), json!(layers(file, architecture)));
    for (theirs, ours) in SIZES {
        let Some(size) = largest(file, map, &key(theirs)) else {
            return Err(format!("its metadata has no number {}", key(theirs)));
        };
        config.insert(ours.to_owned(), json!(size));
    }
    let groups = key("attention.head_count_kv");
    let of_layers = file.numbers(map, &groups).unwrap_or_default();
    let groups = largest(file, map, &groups);
    let groups = groups.or_else(|| file.size(&key("attention.head_count")));
    config.insert("num_key_value_heads".to_owned(), json!(groups));
    let dim = file.size(&key("attention.key_length"));
    if let Some(dim) = dim.or_else(|| file.size(&key("rope.dimension_count"))) {
        config.insert("head_dim".to_owned(), json!(dim));
    }
    let Some(epsilon) = file.number(&key("attention.layer_norm_rms_epsilon")) else {
        return Err(format!(
            "its metadata has no number {}",
            key("attention.layer_norm_rms_epsilon")
        ));
    };
    let name = match architecture {
        Architecture::NemotronH | Architecture::NemotronHMoe => "layer_norm_epsilon",
        _ if architecture.is_lfm2() => "norm_eps",
        _ => "rms_norm_eps",
    };
    config.insert(name.to_owned(), json!(shortest(epsilon)));
    let theta = file.number(&key("rope.freq_base")).unwrap_or(10_000.0);
    config.insert("rope_theta".to_owned(), json!(shortest(theta)));
    if let Some(scaling) = scaling(file, map, architecture)? {
        config.insert("rope_scaling".to_owned(), scaling);
    }
    let embedding = file.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
    let Some(vocab) = embedding.and_then(|tensor| tensor.shape.first()) else {
        return Err("it has no tensor token_embd.weight".to_owned());
    };
    config.insert("vocab_size".to_owned(), json!(vocab));
    config.insert("tie_word_embeddings".to_owned(), json!(!has("output.weight")));
    config.insert("attention_bias".to_owned(), json!(has("blk.0.attn_q.bias")));
    let number = |key: &str| file.number(&architecture.key(key)).map(shortest);
    let inner = file.numbers(map, &key("feed_forward_length")).unwrap_or_default();
    config.extend(match architecture {
        Architecture::GraniteHybrid
        | Architecture::FalconH1
        | Architecture::NemotronH
        | Architecture::NemotronHMoe => hybrid::own(file, architecture, [&of_layers, &inner])?,
        _ => own(file, architecture, &number, &of_layers)?,
    });
    if architecture == Architecture::GptOss
        && let Some(rope) = config.get_mut("rope_scaling").and_then(Json::as_object_mut)
    {
        // How the class has it, and no file says.
        rope.insert("truncate".to_owned(), json!(false));
    }
    let slides = file.numbers(map, &key("attention.sliding_window_pattern"));
    let listed = [Architecture::Olmo2, Architecture::Exaone4].contains(&architecture);
    if let Some(slides) = slides.filter(|_| listed) {
        let kind =
            |slides: &f64| if *slides == 0.0 { "full_attention" } else { "sliding_attention" };
        config.insert("layer_types".to_owned(), json!(slides.iter().map(kind).collect::<Vec<_>>()));
    }
    if file.flag(&key("attention.causal")) == Some(false) {
        config.insert("is_causal".to_owned(), json!(false));
    }
    if let Some(experts) = experts {
        config.insert("num_local_experts".to_owned(), json!(experts));
        config
            .insert("num_experts_per_tok".to_owned(), json!(file.size(&key("expert_used_count"))));
        config.insert("lm_head_bias".to_owned(), json!(has("output.bias")));
    }
    if architecture == Architecture::Qwen3Moe {
        let dense = |layer: &usize| !has(&format!("blk.{layer}.ffn_gate_inp.weight"));
        let dense: Vec<_> = (0..layers(file, architecture)).filter(dense).collect();
        config.insert("mlp_only_layers".to_owned(), json!(dense));
    }
    match *tokenizer::ends(file, map) {
        [] => None,
        [end] => config.insert("eos_token_id".to_owned(), json!(end)),
        ref ends => config.insert("eos_token_id".to_owned(), json!(ends)),
    };
    if let Some(token) = file.size("tokenizer.ggml.bos_token_id") {
        config.insert("bos_token_id".to_owned(), json!(token));
    }
    // What the file does not say is the class's default, which a null would not be. Only without a window do all layers
    // of EXAONE 4 turn queries and keys.
    let windowless = architecture == Architecture::Exaone4;
    config.retain(|key, value| !value.is_null() || windowless && key == "sliding_window");
    Ok(Json::Object(config))
}

/// The way to pool that the file declares (`llama_pooling_type`), by its name in `config.json`; none where it declares
/// none. Errors say what cannot be pooled.
pub(super) fn pooling(
    file: &File,
    architecture: Architecture,
) -> Result<Option<&'static str>, String> {
    let key = architecture.key("pooling_type");
    match file.number(&key).map(|kind| kind as i64) {
        None | Some(-1 | 0) => Ok(None),
        Some(1) => Ok(Some("mean")),
        Some(2) => Ok(Some("cls")),
        Some(3) => Ok(Some("last")),
        Some(4) => Err(format!("{key} is 4: the model ranks documents, and gives no vectors")),
        Some(other) => Err(format!("{key} is {other}, expected 0 to 3")),
    }
}

/// Scaling of the rotary embedding; none if it is not scaled.
fn scaling(file: &File, map: &Mapped, architecture: Architecture) -> Result<Option<Json>, String> {
    let number = |key: &str| file.number(&architecture.key(key)).map(shortest);
    let factors = |name: &str| {
        let Some(tensor) = file.tensors.iter().find(|tensor| tensor.name == name) else {
            return Ok(None);
        };
        let mut factors = vec![0f32; tensor.shape.iter().product()];
        let bytes = map.bytes().get(tensor.bytes.clone()).filter(|_| tensor.form == Form::F32);
        let Some(bytes) = bytes.filter(|bytes| bytes.len() == 4 * factors.len()) else {
            return Err(format!("its tensor {name} is no list of f32 in its first part"));
        };
        tensor.form.floats(bytes, &mut factors);
        Ok(Some(factors.into_iter().map(|factor| shortest(factor.into())).collect::<Vec<_>>()))
    };
    let [all, long, short] =
        ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"].map(factors);
    let original = number("rope.scaling.original_context_length");
    let original = original.or(number("context_length"));
    let longrope = |long: Vec<f64>, short: Vec<f64>, attention: f64| {
        Ok(Some(json!({
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": attention,
            "original_max_position_embeddings": original,
        })))
    };
    // Factors of Llama 3's rope type, made by the converter.
    if let Some(all) = all? {
        return longrope(all.clone(), all, 1.0);
    }
    if let (Some(long), Some(short)) = (long?, short?) {
        return longrope(long, short, number("rope.scaling.attn_factor").unwrap_or(1.0));
    }
    // The first files have the factor by itself, under one of two names.
    let factor = number("rope.scaling.factor").or(number("rope.scale_linear"));
    let linear = factor.filter(|factor| ![0.0, 1.0].contains(factor)).map(|_| "linear");
    let kind = file.text(&architecture.key("rope.scaling.type")).or(linear);
    let Some(kind) = kind.filter(|kind| *kind != "none") else { return Ok(None) };
    let mut scaling = Map::new();
    scaling.insert("rope_type".to_owned(), json!(kind));
    let mut set = |key: &str, value: Option<f64>| {
        if let Some(value) = value {
            scaling.insert(key.to_owned(), json!(value));
        }
    };
    set("factor", factor);
    if kind == "yarn" {
        set("original_max_position_embeddings", original);
        set("beta_fast", number("rope.scaling.yarn_beta_fast"));
        set("beta_slow", number("rope.scaling.yarn_beta_slow"));
        set("attention_factor", number("rope.scaling.yarn_attn_factor"));
        let log_mul = number("rope.scaling.yarn_log_multiplier").filter(|n| *n != 0.0);
        set("mscale", log_mul.map(|_| 1.0));
        set("mscale_all_dim", log_mul);
        set("llama_4_scaling_beta", number("attention.temperature_scale"));
    }
    Ok(Some(Json::Object(scaling)))
}

/// Settings that only one architecture has. `of_layers` has the key-value heads of each layer, where they differ.
fn own(
    file: &File,
    architecture: Architecture,
    number: &dyn Fn(&str) -> Option<f64>,
    of_layers: &[f64],
) -> Result<Map<String, Json>, String> {
    let size = |key: &str| {
        let key = architecture.key(key);
        file.size(&key).ok_or_else(|| format!("its metadata has no number {key}"))
    };
    let found = match architecture {
        Architecture::Qwen2Vl | Architecture::Qwen3Vl => {
            let sections = file.list(&architecture.key("rope.dimension_sections"));
            json!({"rope_scaling": {
                "rope_type": "default",
                "mrope_section": sections.iter().take(3).map(|n| *n as u64).collect::<Vec<_>>(),
            }})
        }
        Architecture::Qwen35 | Architecture::Qwen3Next => {
            let heads = size("ssm.time_step_rank")?;
            let dim = size("attention.key_length")?;
            let sections = file.list(&architecture.key("rope.dimension_sections"));
            let sections = sections.iter().take(3).map(|n| *n as u64).collect::<Vec<_>>();
            let mut rope = json!({
                "rope_type": "default",
                "rope_theta": number("rope.freq_base").unwrap_or(10_000.0),
                "partial_rotary_factor": size("rope.dimension_count")? as f64 / dim.max(1) as f64,
            });
            if sections.len() == 3
                && let Some(rope) = rope.as_object_mut()
            {
                rope.insert("mrope_interleaved".to_owned(), json!(true));
                rope.insert("mrope_section".to_owned(), json!(sections));
            }
            let mut own = json!({
                "linear_num_key_heads": size("ssm.group_count")?,
                "linear_num_value_heads": heads,
                "linear_key_head_dim": size("ssm.state_size")?,
                "linear_value_head_dim": size("ssm.inner_size")? / heads.max(1),
                "linear_conv_kernel_dim": size("ssm.conv_kernel")?,
                "full_attention_interval": number("full_attention_interval").unwrap_or(4.0) as u64,
                "rope_parameters": rope,
            });
            if architecture == Architecture::Qwen3Next {
                own["moe_intermediate_size"] = json!(size("expert_feed_forward_length")?);
                let shared = size("expert_shared_feed_forward_length")?;
                own["shared_expert_intermediate_size"] = json!(shared);
            }
            own
        }
        Architecture::Gemma2 | Architecture::Gemma3 => {
            let dim = size("attention.key_length")?;
            // Of the published models only those of 27B have other ones, and only their hidden states are as wide.
            let hidden = size("embedding_length")?;
            let scalar = match (hidden, size("attention.head_count")?) {
                (4608 | 5376, heads) => hidden / heads.max(1),
                _ => dim,
            };
            let mut own = json!({
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": scalar,
                // Neither llama.cpp nor transformers rounds the factor of a GGUF file's embeddings to bfloat16.
                "torch_dtype": "float32",
            });
            // The first files of Gemma 2 have neither caps nor a window: llama.cpp takes the class's defaults.
            own["final_logit_softcapping"] = json!(number("final_logit_softcapping"));
            if architecture == Architecture::Gemma2 {
                own["attn_logit_softcapping"] = json!(number("attn_logit_softcapping"));
                own["sliding_window"] = json!(number("attention.sliding_window").map(|n| n as u64));
            } else {
                own["sliding_window"] = json!(size("attention.sliding_window")?);
                let theta = number("rope.freq_base_swa").unwrap_or(10_000.0);
                own["rope_local_base_freq"] = json!(theta);
            }
            own
        }
        // The factor of the embeddings is not rounded, as below.
        Architecture::Gemma => json!({
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": size("attention.key_length")?,
            "torch_dtype": "float32",
        }),
        Architecture::Olmo2 | Architecture::Exaone4 => {
            let window = number("attention.sliding_window").filter(|window| *window > 0.0);
            json!({"sliding_window": window.map(|window| window as u64)})
        }
        Architecture::Lfm2 | Architecture::Lfm2Moe => {
            let kind = |groups: &f64| if *groups == 0.0 { "conv" } else { "full_attention" };
            if of_layers.len() != layers(file, architecture) {
                return Err(format!(
                    "its metadata has no list {} of as many numbers as layers",
                    architecture.key("attention.head_count_kv")
                ));
            }
            let mut own = json!({
                "layer_types": of_layers.iter().map(kind).collect::<Vec<_>>(),
                "conv_L_cache": size("shortconv.l_cache")?,
                "block_auto_adjust_ff_dim": false,
                "head_dim": null,
            });
            if architecture == Architecture::Lfm2Moe {
                own["moe_intermediate_size"] = json!(size("expert_feed_forward_length")?);
                own["num_dense_layers"] = json!(size("leading_dense_block_count")?);
                let bias = |t: &Info| t.name.ends_with(".exp_probs_b.bias");
                own["use_expert_bias"] = json!(file.tensors.iter().any(bias));
            }
            own
        }
        Architecture::Ernie45 => {
            let bias = |t: &Info| t.name == "blk.0.attn_q.bias";
            json!({"use_bias": file.tensors.iter().any(bias)})
        }
        Architecture::GptOss => json!({
            "intermediate_size": size("expert_feed_forward_length")?,
            "sliding_window": size("attention.sliding_window")?,
        }),
        // llama.cpp always brings the weights of a token's experts to a sum of one.
        Architecture::Qwen3Moe => json!({
            "moe_intermediate_size": size("expert_feed_forward_length")?,
            "norm_topk_prob": true,
        }),
        Architecture::Granite => json!({
            "attention_multiplier": number("attention.scale"),
            "embedding_multiplier": number("embedding_scale"),
            "residual_multiplier": number("residual_scale"),
            "logits_scaling": number("logit_scale"),
        }),
        Architecture::Phi3 | Architecture::PhiMoe => {
            let window = number("attention.sliding_window").filter(|window| *window > 0.0);
            let mut own = json!({"sliding_window": window.map(|window| window as u64)});
            if architecture == Architecture::Phi3 {
                let dim = size("embedding_length")? / size("attention.head_count")?.max(1);
                let rotary = number("rope.dimension_count").unwrap_or(dim as f64);
                own["head_dim"] = json!(dim);
                own["partial_rotary_factor"] = json!(rotary / dim.max(1) as f64);
            }
            own
        }
        _ => json!({}),
    };
    Ok(found.as_object().cloned().unwrap_or_default())
}
