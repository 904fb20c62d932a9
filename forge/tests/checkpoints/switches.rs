//! Switches of Llama-like classes that cannot be, and the contexts that rope types allow.

use std::collections::BTreeMap;

use qhx_base::ErrorKind;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::RecipeOptions;
use qhx_forge::registry::{recipe, task};
use serde_json::{Value, json};

use super::{copy, copy_all, edit_json, recipe_options, refused, says, set_json};

#[test]
fn switches_that_cannot_be_are_refused_by_key() {
    for (model, keys, value, words) in [
        ("phi3", "rope_scaling.short_factor", json!([1, 2]), "is a list of 3, expected 2"),
        ("phi3", "rope_scaling.long_factor", json!([1, 0, 2]), "positive numbers"),
        ("phi3", "rope_scaling.long_factor", Value::Null, "long_factor is missing"),
        ("phi3", "partial_rotary_factor", json!(0.1), "partial_rotary_factor is 0.1"),
        ("granite", "partial_rotary_factor", json!(0.5), "turns whole heads"),
        ("granite", "rope_scaling.type", json!("ntk"), "rope type \"ntk\", expected"),
        ("granite", "residual_multiplier", json!("1"), "residual_multiplier is \"1\""),
        ("granite", "sliding_window", json!(8), "sliding_window is 8"),
        ("olmo2", "rope_parameters.factor", json!(-1), "rope_parameters.factor is -1"),
        ("smollm3", "no_rope_layers", json!([1, 0, 1]), "no_rope_layers has 3 entries"),
        ("smollm3", "no_rope_layers", json!([1, 0, 1, 2]), "no_rope_layers is 2"),
        ("smollm3", "use_sliding_window", json!(false), "sliding_attention, but use_sliding"),
        ("gemma2", "attn_logit_softcapping", json!(0), "attn_logit_softcapping is 0"),
        ("gemma", "hidden_act", json!("silu"), "hidden_act is \"silu\""),
        (
            "gemma",
            "use_bidirectional_attention",
            json!(true),
            "use_bidirectional_attention is true",
        ),
        ("olmo3", "rope_parameters", json!({"rope_type": "yarn"}), "rope_parameters.rope_type is"),
        ("olmo3", "rope_scaling.factor", json!(0), "rope_scaling.factor is 0"),
        ("olmo3", "sliding_window", Value::Null, "layer_types has sliding_attention, but"),
        ("exaone4", "layer_types", json!(["full_attention"]), "layer_types has 1 entries"),
        ("exaone4", "sliding_window", json!(0), "sliding_window is 0"),
        ("ministral3", "rope_parameters", Value::Null, "llama_4_scaling_beta is missing"),
        ("ministral3", "rope_parameters.llama_4_scaling_beta", json!(-1), "scaling_beta is -1"),
        ("mistral3", "text_config.model_type", json!("mistral4"), "model_type is \"mistral4\""),
    ] {
        let dir = copy(&format!("switches/{model}"));
        let config = dir.path().join("config.json");
        set_json(&config, keys, value);
        if words.contains("expected 2") {
            set_json(&config, "partial_rotary_factor", json!(0.5));
        }
        refused(dir.path(), words);
    }
}

/// Contexts reach as far as their scaling was made for, and no further.
#[test]
fn contexts_end_where_scaling_ends() {
    for (model, max) in [
        ("phi3", 96),
        ("smollm3", 64),
        ("granite", 64),
        ("olmo2", 64),
        ("olmo3", 60),
        ("ministral3", 60),
    ] {
        let checkpoint =
            Checkpoint::open(&qhx_paths::fixture(&format!("switches/{model}"))).unwrap();
        let made = |max_ctx| recipe(&checkpoint, &recipe_options(max_ctx, &[]));
        made(max).unwrap();
        let error = says(made(max + 1), &format!("expected 1 to {max}"));
        assert_eq!(error.kind(), ErrorKind::Usage, "{model}");
    }
}

/// Keys that are checked elsewhere, have no wrong values, or count only beside others.
const APART: [&str; 12] = [
    "architectures",
    "dtype",
    "is_causal",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "max_window_layers",
    "sliding_window_pattern",
    "full_attn_idxs",
    "decoder_start_token_id",
    "duration_predictor_filter_channels",
    "mamba_expand",
];

/// A checkpoint for each list, by the first of its classes.
const LISTED: &[(&str, &str)] = &[
    ("LlamaForCausalLM", "llama3-tiny"),
    ("MistralForCausalLM", "mistral-tiny"),
    ("Qwen2ForCausalLM", "qwen2-tiny"),
    ("Qwen3ForCausalLM", "qwen3-tiny"),
    ("Qwen3MoeForCausalLM", "qwen3-moe"),
    ("Phi3ForCausalLM", "switches/phi3"),
    ("SmolLM3ForCausalLM", "switches/smollm3"),
    ("GraniteForCausalLM", "switches/granite"),
    ("Olmo2ForCausalLM", "switches/olmo2"),
    ("Gemma2ForCausalLM", "switches/gemma2"),
    ("GemmaForCausalLM", "switches/gemma"),
    ("Olmo3ForCausalLM", "switches/olmo3"),
    ("Exaone4ForCausalLM", "switches/exaone4"),
    ("Ministral3ForCausalLM", "switches/ministral3"),
    ("GptOssForCausalLM", "gpt-oss"),
    ("Ernie4_5ForCausalLM", "switches/ernie4_5"),
    ("HunYuanDenseV1ForCausalLM", "switches/hunyuan"),
    ("PhimoeForCausalLM", "phimoe-6"),
    ("Qwen3_5ForCausalLM", "qwen35-untied"),
    ("Qwen3_5ForConditionalGeneration", "qwen35-vision"),
    ("Qwen3_5MoeForCausalLM", "qwen35-moe"),
    ("Qwen3VLForConditionalGeneration", "qwen3vl-unseen"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen25vl-unseen"),
    ("Qwen2VLForConditionalGeneration", "vision/qwen2vl"),
    ("PaddleOCRVLForConditionalGeneration", "vision/paddleocr"),
    ("PaliGemmaForConditionalGeneration", "vision/paligemma"),
    ("Mistral3ForConditionalGeneration", "vision/mistral3"),
    ("Gemma4ForConditionalGeneration", "gemma4-unseen"),
    ("Gemma3ForCausalLM", "gemma3-tiny"),
    ("Gemma3ForConditionalGeneration", "gemma3-vision"),
    ("SmolVLMForConditionalGeneration", "smolvlm-tiny"),
    ("InternVLForConditionalGeneration", "vision/internvl"),
    ("InternVLChatModel", "vision/internvl-code"),
    ("Lfm2VlForConditionalGeneration", "vision/lfm2vl"),
    ("Lfm2ForCausalLM", "lfm2-tiny"),
    ("Lfm2MoeForCausalLM", "lfm2-moe"),
    ("Gemma3TextModel", "embeddinggemma-tiny"),
    ("BertModel", "embed-bert-tiny"),
    ("XLMRobertaModel", "rerank-xlmr-tiny"),
    ("Qwen3Model", "rerank-qwen3-tiny"),
    ("SiglipModel", "siglip-fixed"),
    ("Siglip2Model", "siglip-naflex"),
    ("WhisperForConditionalGeneration", "whisper-tiny"),
    ("ParakeetForCTC", "parakeet-ctc-tiny"),
    ("ParakeetForTDT", "parakeet-tdt-tiny"),
    ("NemotronAsrStreamingForRNNT", "nemotron-tiny"),
    ("Nemotron3_5AsrForRNNT", "nemotron35-tiny"),
    ("ParakeetForRNNT", "parakeet-unseen"),
    ("MoonshineForConditionalGeneration", "moonshine-tiny"),
    ("CanaryForConditionalGeneration", "canary-tiny"),
    ("Qwen3ASRForConditionalGeneration", "qwen3asr-tiny"),
    ("VitsModel", "vits-tiny"),
    ("MistralModel", "embed-mistral-tiny"),
    ("LlamaModel", "rerank-llama-tiny"),
    ("Ministral3BidirectionalModel", "encoders/ministral3"),
    ("MPNetModel", "encoders/mpnet"),
    ("DistilBertModel", "encoders/distilbert"),
    ("NomicBertModel", "encoders/nomic"),
    ("NewModel", "encoders/gte"),
    ("ModernBertModel", "encoders/modernbert-reranker"),
    ("CLIPModel", "encoders/clip"),
    ("Cosmos3EdgeForConditionalGeneration", "drawn/cosmos3"),
    ("Gemma3nForConditionalGeneration", "drawn/gemma3n"),
    ("Qwen3NextForCausalLM", "hybrid/qwen3-next"),
    ("GraniteMoeHybridForCausalLM", "hybrid/granite-moe"),
    ("FalconH1ForCausalLM", "hybrid/falcon-norm"),
    ("NemotronHForCausalLM", "hybrid/nemotron-moe"),
];

/// The keys of `list` and of those that it goes with, the nearest first: how each is listed.
fn listed(lists: &Value, list: &str, keys: &mut BTreeMap<String, &'static str>) {
    for kind in ["used", "refused", "neutral"] {
        let names = match &lists[list][kind] {
            Value::Object(keys) => keys.keys().cloned().collect(),
            Value::Array(keys) => keys.iter().map(|key| key.as_str().unwrap().to_owned()).collect(),
            _ => Vec::new(),
        };
        for name in names {
            keys.entry(name).or_insert(kind);
        }
    }
    for other in lists[list]["with"].as_array().into_iter().flatten() {
        listed(lists, other.as_str().unwrap(), keys);
    }
}

#[test]
fn keys_are_used_refused_or_without_influence() {
    let lists: Value = serde_json::from_str(include_str!("../../src/keys.json")).unwrap();
    let mut wrong = Vec::new();
    for &(class, model) in LISTED {
        let dir = copy_all(model);
        let path = dir.path().join("config.json");
        let original = Checkpoint::open(dir.path()).unwrap();
        // Without Python's Infinity, which is no JSON.
        let whole = original.config().to_string();
        let task = task(&original, None).unwrap();
        let size = [("image-size", "12")];
        let sized = class.contains("VLFor") && !class.starts_with("Intern");
        let choices = if sized { &size[..] } else { &[] };
        // One of its graphs takes an image and a text whole.
        let max_ctx = if class.starts_with("PaliGemma") { 32 } else { 16 };
        let options = RecipeOptions { task, ..recipe_options(max_ctx, choices) };
        let parts = lists.as_object().unwrap().keys().filter_map(|name| {
            let (classes, part) = name.split_once('.').unwrap_or((name, ""));
            (classes.split(' ').next() == Some(class)).then_some((name, part))
        });
        for (list, part) in parts {
            let mut keys = BTreeMap::from([("key_that_nobody_knows".to_owned(), "unknown")]);
            listed(&lists, list, &mut keys);
            listed(&lists, "*", &mut keys);
            for (key, kind) in keys {
                let either = key == "use_bidirectional_attention" && kind == "used";
                if APART.contains(&&*key) || either {
                    continue;
                }
                std::fs::write(&path, &whole).unwrap();
                edit_json(&path, |config| {
                    // In the oldest spelling the decoder's keys are those of the whole.
                    let original = part == "text_config" && config.get("llm_config").is_some();
                    let part = if original { "llm_config" } else { part };
                    let whole = part.is_empty() || config.get(part).is_none();
                    let part = if whole { config } else { &mut config[part] };
                    part[&key] = json!({"no": "value"});
                });
                let made = Checkpoint::open(dir.path()).and_then(|found| recipe(&found, &options));
                let taken = matches!(kind, "neutral" | "unknown");
                match made {
                    Ok(_) if taken => {}
                    Err(e) if !taken && e.message().contains(&key) => {}
                    Ok(_) => wrong.push(format!("{list}: {key} is {kind}, and taken")),
                    Err(e) => wrong.push(format!("{list}: {key} is {kind}: {e}")),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files that the `gguf` package wrote, without a config.json.
#[test]
fn tensors_and_keys_of_gguf_files_are_the_checkpoints() {
    for model in [
        "phi3",
        "smollm3",
        "granite",
        "olmo2",
        "gemma2",
        "gemma",
        "olmo3",
        "exaone4",
        "exaone4-full",
        "ministral3",
        "ernie4_5",
        "hunyuan",
    ] {
        let folder = qhx_paths::fixture(&format!("switches/{model}"));
        let found = Checkpoint::open(&folder.with_extension("gguf")).unwrap();
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let own = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in own.tensors() {
            let name = name.trim_start_matches("model.");
            let values = found.rows(name, view.shape()).map(|rows| {
                let mut values = vec![0f32; view.data().len() / 2];
                rows.read_f32(0, &mut values).map(|()| values)
            });
            let values = values.unwrap().unwrap();
            for (value, own) in values.iter().zip(view.data().as_chunks().0) {
                let own = half::f16::from_le_bytes(*own).to_f32();
                assert!((value - own).abs() <= 1e-6, "{model}: {name}: {value}, not {own}");
            }
        }
        let config = super::read_json(&folder.join("config.json"));
        for (key, value) in found.config().as_object().unwrap() {
            // What the metadata has no place for, other spellings, and what follows from other keys.
            let aside = [
                "hidden_act",
                "query_pre_attn_scalar",
                "rope_scaling",
                "torch_dtype",
                "sliding_window",
            ];
            // The base of HunYuan's rope is scaled by alpha already.
            let scaled = key == "rope_theta" && model == "hunyuan";
            if aside.contains(&&**key) && model != "phi3" || key == "rope_scaling" || scaled {
                continue;
            }
            let own = config.get(key).filter(|own| !own.is_null());
            if let Some(own) = own.filter(|_| key != "torch_dtype") {
                assert_eq!(value.as_f64(), own.as_f64(), "{model}: {key}");
                assert!(value.is_number() || value == own, "{model}: {key}: {value}, not {own}");
            }
        }
        recipe(&found, &recipe_options(16, &[])).unwrap();
    }
}
