//! A `config.json` from the metadata of a GGUF file.

use qhx_core::artifacts::Mapped;
use serde_json::{Map, Value as Json, json};

use super::file::File;
use super::names::Architecture;
use super::tokenizer;

/// The configuration; else what the metadata lacks.
pub(super) fn of(file: &File, map: &Mapped, architecture: Architecture) -> Result<Json, String> {
    let class = match architecture {
        Architecture::Llama => "LlamaForCausalLM",
        Architecture::Qwen2 => "Qwen2ForCausalLM",
        Architecture::Qwen3 => "Qwen3ForCausalLM",
        Architecture::Gemma3 => {
            return Err(
                "its metadata does not say all of a Gemma 3 model: no config.json".to_owned()
            );
        }
    };
    if file.tensors.iter().any(|tensor| tensor.name == "rope_freqs.weight") {
        return Err(
            "it scales the rotary embedding by factors (rope_freqs.weight), which a config.json has no place for"
                .to_owned(),
        );
    }
    let key = |key: &str| architecture.key(key);
    if file.size(&key("expert_count")).is_some_and(|experts| experts > 0) {
        return Err("a model of experts: no config.json".to_owned());
    }
    let mut config = Map::new();
    config.insert("architectures".to_owned(), json!([class]));
    config.insert("hidden_act".to_owned(), json!("silu"));
    for (theirs, ours) in [
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("block_count", "num_hidden_layers"),
        ("attention.head_count", "num_attention_heads"),
        ("context_length", "max_position_embeddings"),
    ] {
        let Some(size) = file.size(&key(theirs)) else {
            return Err(format!("its metadata has no number {}", key(theirs)));
        };
        config.insert(ours.to_owned(), json!(size));
    }
    let heads = file.size(&key("attention.head_count"));
    let groups = file.size(&key("attention.head_count_kv")).or(heads);
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
    config.insert("rms_norm_eps".to_owned(), json!(shortest(epsilon)));
    let theta = file.number(&key("rope.freq_base")).unwrap_or(10_000.0);
    config.insert("rope_theta".to_owned(), json!(shortest(theta)));
    if let Some(kind) = file.text(&key("rope.scaling.type")).filter(|kind| *kind != "none") {
        let factor = file.number(&key("rope.scaling.factor")).map(shortest);
        config.insert("rope_scaling".to_owned(), json!({"rope_type": kind, "factor": factor}));
    }
    let has = |name: &str| file.tensors.iter().any(|tensor| tensor.name == name);
    let embedding = file.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
    let Some(vocab) = embedding.and_then(|tensor| tensor.shape.first()) else {
        return Err("it has no tensor token_embd.weight".to_owned());
    };
    config.insert("vocab_size".to_owned(), json!(vocab));
    config.insert("tie_word_embeddings".to_owned(), json!(!has("output.weight")));
    config.insert("attention_bias".to_owned(), json!(has("blk.0.attn_q.bias")));
    match *tokenizer::ends(file, map) {
        [] => None,
        [end] => config.insert("eos_token_id".to_owned(), json!(end)),
        ref ends => config.insert("eos_token_id".to_owned(), json!(ends)),
    };
    if let Some(token) = file.size("tokenizer.ggml.bos_token_id") {
        config.insert("bos_token_id".to_owned(), json!(token));
    }
    Ok(Json::Object(config))
}

/// The f64 that an f32 of the metadata was written for: 1e-5 and not 9.99999974e-6.
fn shortest(number: f64) -> f64 {
    (number as f32).to_string().parse().unwrap_or(number)
}
