//! Switches of Llama-like classes that cannot be, and the contexts that rope types allow.

use qhx_core::ErrorKind;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::recipe::RecipeOptions;
use qhx_forge::registry::recipe;
use serde_json::{Value, json};

use super::{copy, edit_json, refused};

#[test]
fn switches_that_cannot_be_are_refused_by_key() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit, &str); 13] = [
        (
            "phi3",
            |c| c["rope_scaling"]["short_factor"] = json!([1, 2]),
            "rope_scaling.long_factor is a list of 3, expected 2",
        ),
        ("phi3", |c| c["rope_scaling"]["long_factor"] = json!([1, 0, 2]), "positive numbers"),
        ("phi3", |c| c["rope_scaling"]["long_factor"] = Value::Null, "long_factor is missing"),
        ("phi3", |c| c["partial_rotary_factor"] = json!(0.1), "partial_rotary_factor is 0.1"),
        ("granite", |c| c["partial_rotary_factor"] = json!(0.5), "turns whole heads"),
        ("granite", |c| c["rope_scaling"]["type"] = json!("ntk"), "rope type \"ntk\", expected"),
        ("granite", |c| c["residual_multiplier"] = json!("1"), "residual_multiplier is \"1\""),
        ("granite", |c| c["sliding_window"] = json!(8), "sliding_window is 8"),
        ("olmo2", |c| c["rope_parameters"]["factor"] = json!(-1), "rope_parameters.factor is -1"),
        ("smollm3", |c| c["no_rope_layers"] = json!([1, 0, 1]), "no_rope_layers has 3 entries"),
        ("smollm3", |c| c["no_rope_layers"] = json!([1, 0, 1, 2]), "no_rope_layers is 2"),
        (
            "smollm3",
            |c| c["use_sliding_window"] = json!(false),
            "layer_types has sliding_attention, but use_sliding_window",
        ),
        ("gemma2", |c| c["attn_logit_softcapping"] = json!(0), "attn_logit_softcapping is 0"),
    ];
    for (model, edit, words) in edits {
        let dir = copy(&format!("switches/{model}"));
        edit_json(&dir.path().join("config.json"), edit);
        if words.contains("expected 2") {
            edit_json(&dir.path().join("config.json"), |c| c["partial_rotary_factor"] = json!(0.5));
        }
        refused(dir.path(), words);
    }
}

/// What scales with the context reaches as far as it was made for, and no further.
#[test]
fn contexts_end_where_scaling_ends() {
    for (model, max) in [("phi3", 96), ("smollm3", 64), ("granite", 64), ("olmo2", 64)] {
        let checkpoint =
            Checkpoint::open(&qhx_paths::fixture(&format!("switches/{model}"))).unwrap();
        let made = |max_ctx| {
            let options = RecipeOptions { shards: 1, max_ctx, ..RecipeOptions::default() };
            recipe(&checkpoint, &options)
        };
        made(max).unwrap();
        let error = made(max + 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{model}");
        assert!(error.message().contains(&format!("expected 1 to {max}")), "{model}: {error}");
    }
}

/// Keys that are checked elsewhere, have no wrong values, or count only beside others.
const APART: [&str; 8] = [
    "architectures",
    "dtype",
    "is_causal",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "max_window_layers",
];

#[test]
fn keys_are_used_refused_or_without_influence() {
    let lists: Value = serde_json::from_str(include_str!("../../src/keys.json")).unwrap();
    let models = [
        ("LlamaForCausalLM", "llama3-tiny"),
        ("MistralForCausalLM", "mistral-tiny"),
        ("Qwen2ForCausalLM", "qwen2-tiny"),
        ("Qwen3ForCausalLM", "qwen3-tiny"),
        ("Phi3ForCausalLM", "switches/phi3"),
        ("SmolLM3ForCausalLM", "switches/smollm3"),
        ("GraniteForCausalLM", "switches/granite"),
        ("Olmo2ForCausalLM", "switches/olmo2"),
        ("Gemma2ForCausalLM", "switches/gemma2"),
        ("PhimoeForCausalLM", "phimoe-6"),
    ];
    assert_eq!(lists.as_object().unwrap().len(), models.len() + 2);
    for (class, model) in models {
        let dir = copy(model);
        let path = dir.path().join("config.json");
        let whole = std::fs::read(&path).unwrap();
        let with = |key: &str| {
            std::fs::write(&path, &whole).unwrap();
            edit_json(&path, |config| config[key] = json!({"no": "value"}));
            super::open(dir.path())
        };
        let keys = |kind: &str| {
            let of = |list: &Value| match &list[kind] {
                Value::Object(keys) => keys.keys().cloned().collect(),
                Value::Array(keys) => {
                    keys.iter().map(|key| key.as_str().unwrap().to_owned()).collect()
                }
                _ => Vec::new(),
            };
            [of(&lists["*"]), of(&lists[class])].concat()
        };
        for key in [keys("used"), keys("refused")].concat() {
            if APART.contains(&&*key) {
                continue;
            }
            let error = with(&key).expect_err(&format!("{class} does not look at {key}"));
            assert!(error.message().contains(&key), "{class}: {error}");
        }
        for key in keys("neutral").iter().map(String::as_str).chain(["key_that_nobody_knows"]) {
            with(key).unwrap_or_else(|e| panic!("{class}: {e}"));
        }
    }
}

/// Files that the `gguf` package wrote, without a config.json.
#[test]
fn tensors_and_keys_of_gguf_files_are_the_checkpoints() {
    for model in ["phi3", "smollm3", "granite", "olmo2", "gemma2"] {
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
            let aside = ["query_pre_attn_scalar", "rope_scaling", "torch_dtype", "sliding_window"];
            if aside.contains(&&**key) && model != "phi3" || key == "rope_scaling" {
                continue;
            }
            let own = config.get(key).filter(|own| !own.is_null());
            if let Some(own) = own.filter(|_| key != "torch_dtype") {
                assert_eq!(value.as_f64(), own.as_f64(), "{model}: {key}");
                assert!(value.is_number() || value == own, "{model}: {key}: {value}, not {own}");
            }
        }
        recipe(&found, &RecipeOptions { shards: 1, max_ctx: 16, ..RecipeOptions::default() })
            .unwrap();
    }
}
