//! Adapters of PEFT merged into a checkpoint: weights are those of `merge_and_unload`, and adapters that are damaged or
//! for another model are refused.

use std::path::Path;

use qhx_base::{Error, ErrorKind};
use qhx_checkpoint::Adapter;
use qhx_checkpoint::Checkpoint;
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Silent, forge_checkpoint};
use qhx_graph::weight::{Storage, Weight};
use qhx_paths::fixture;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::quantized::graphs_of_four_bits;
use crate::common::{Log, copy, edit_header, read_json, recipe_options, says, set_json};

/// Elements between two that the goldens have.
const STEP: usize = 97;

fn base() -> Checkpoint {
    Checkpoint::open(&fixture("lora/base")).unwrap()
}

fn adapter(name: &str, weight: f32) -> Adapter {
    Adapter { folder: fixture(&format!("lora/{name}")), weight }
}

fn values(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Vec<f32> {
    match *shape {
        [rows, cols] => {
            let source = checkpoint.matrix(name, [rows, cols]).unwrap();
            Weight::new(source, Storage::Float).to_f32().unwrap()
        }
        _ => checkpoint.values(name, shape).unwrap(),
    }
}

#[test]
fn merged_weights_are_those_of_peft() {
    let merged = read_json(&fixture("lora/merged.json"));
    let mut seen = 0;
    for (name, tensors) in merged.as_object().unwrap() {
        let adapters: Vec<Adapter> = name.split(' ').map(|one| one.parse().unwrap()).collect();
        let adapters: Vec<_> =
            adapters.iter().map(|one| adapter(one.folder.to_str().unwrap(), one.weight)).collect();
        let checkpoint = base().with_adapters(&adapters).unwrap();
        for (tensor, expected) in tensors.as_object().unwrap() {
            let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
            let expected: Vec<f32> = serde_json::from_value(expected["values"].clone()).unwrap();
            let found: Vec<f32> =
                values(&checkpoint, tensor, &shape).into_iter().step_by(STEP).collect();
            let peak = expected.iter().fold(0f32, |peak, value| peak.max(value.abs()));
            assert_eq!(found.len(), expected.len(), "{name}: {tensor}");
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() <= 1e-6 * peak,
                    "{name}: {tensor} has {found}, PEFT {expected}"
                );
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 3 + 7 + 3 + 2 + 5 + 7, "tensors that change");
}

/// Weights that no adapter names stay, and a merge with the weight 0 changes nothing.
#[test]
fn other_weights_stay_as_they_are() {
    let plain = base();
    let none = base().with_adapters(&[adapter("stabilised", 0.0)]).unwrap();
    let some = base().with_adapters(&[adapter("dora", 1.0)]).unwrap();
    let of = |checkpoint: &Checkpoint, name: &str, shape: [usize; 2]| {
        values(checkpoint, &format!("model.layers.0.{name}.weight"), &shape)
    };
    assert_eq!(of(&plain, "mlp.up_proj", [96, 64]), of(&none, "mlp.up_proj", [96, 64]));
    assert_eq!(of(&plain, "mlp.up_proj", [96, 64]), of(&some, "mlp.up_proj", [96, 64]));
    assert_ne!(of(&plain, "mlp.gate_proj", [96, 64]), of(&some, "mlp.gate_proj", [96, 64]));
}

/// Merging comes first: a weight that was integers is dequantized, changed, and quantized by the precision asked for.
#[test]
fn quantized_weights_are_merged_before_they_are_quantized_again() {
    let open = || Checkpoint::open(&fixture("quantised/gptq-asym")).unwrap();
    let name = "model.layers.0.self_attn.q_proj.weight";
    let merged = open().with_adapters(&[adapter("plain", 1.0)]).unwrap();
    let before = values(&open(), name, &[64, 64]);
    let after = values(&merged, name, &[64, 64]);
    let change = values(&base().with_adapters(&[adapter("plain", 1.0)]).unwrap(), name, &[64, 64]);
    let plain = values(&base(), name, &[64, 64]);
    for at in 0..64 * 64 {
        let (found, expected) = (after[at] - before[at], change[at] - plain[at]);
        assert!((found - expected).abs() < 1e-6, "element {at}: {found}, {expected}");
    }
    let source = merged.matrix(name, [64, 64]).unwrap();
    assert!(source.block_form().is_none());
    let stays = merged.matrix("model.layers.0.mlp.up_proj.weight", [96, 64]).unwrap();
    assert!(stays.block_form().is_some());
    assert!(!graphs_of_four_bits(&merged).is_empty());
}

/// A bundle of another adapter, or of the same with another weight, is another one, which no attempt goes on with.
#[test]
fn a_bundle_has_the_merged_weights() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("quantised/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("lora/base").join(file), dir.path().join(file)).unwrap();
    }
    let mut tables = Vec::new();
    for weight in [0.0, 1.0, 2.0] {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let checkpoint = checkpoint.with_adapters(&[adapter("stabilised", weight)]).unwrap();
        let out = dir.path().join(format!("bundle-{weight}"));
        let options =
            ForgeOptions { max_ctx: Some(16), prefill: Some(vec![]), ..ForgeOptions::new(&out) };
        forge_checkpoint(&checkpoint, recipe, &options, &mut Silent).unwrap();
        let data = std::fs::read_dir(out.join("onnx")).unwrap().map(|file| file.unwrap().path());
        let decode = data.filter(|path| path.extension().is_some_and(|e| e == "onnx_data"));
        let bytes: Vec<u8> = decode.flat_map(|path| std::fs::read(path).unwrap()).collect();
        tables.push(bytes);
    }
    assert!(tables[0] != tables[1] && tables[1] != tables[2]);
}

/// A copy of an adapter, and what is said of it when `edit` has damaged it.
fn refused(name: &str, words: &str, edit: impl FnOnce(&Path)) {
    let dir: TempDir = copy(&format!("lora/{name}"));
    edit(dir.path());
    let one = Adapter { folder: dir.path().to_owned(), weight: 1.0 };
    said(base().with_adapters(&[one]), words);
}

#[track_caller]
fn said(result: Result<Checkpoint, Error>, words: &str) {
    let error = says(result, words);
    assert!(matches!(error.kind(), ErrorKind::Artifact | ErrorKind::Usage), "{error}");
}

#[test]
fn adapters_that_cannot_be_merged_say_why() {
    for (keys, value, words) in [
        ("peft_type", json!("IA3"), "peft_type is \"IA3\", expected \"LORA\""),
        ("r", json!(0), "r is 0, expected a rank"),
        ("r", json!(5), "expected [5, 64]: rank 5 on a weight [64, 64]"),
        ("lora_alpha", json!("x"), "lora_alpha is \"x\", expected a number"),
        ("rank_pattern", json!({"(": 2}), "rank_pattern is"),
        ("lora_bias", json!(true), "lora_bias is true, expected none"),
        ("layer_replication", json!([[0, 1]]), "layer_replication is [[0,1]], expected none"),
        ("init_lora_weights", json!("pissa_niter_4"), "init_lora_weights is \"pissa_niter_4\""),
        ("use_dora", json!(true), "lora_magnitude_vector is missing"),
        ("use_hira", json!(true), "the key use_hira (true) is not known"),
    ] {
        refused("plain", words, |dir| set_json(&dir.join("adapter_config.json"), keys, value));
    }
    // A key that nobody knows and that has no value changes nothing.
    let dir = copy("lora/plain");
    set_json(&dir.path().join("adapter_config.json"), "use_hira", Value::Null);
    let one = Adapter { folder: dir.path().to_owned(), weight: 1.0 };
    base().with_adapters(&[one]).unwrap();
}

/// A tokenizer of words: three special tokens, and `w3`, `w4`, … up to `count`.
fn words(count: usize, end: &str) -> Value {
    let special = ["<unk>", "<s>", end];
    let token = |id: usize| special.get(id).map_or(format!("w{id}"), |t| (*t).to_owned());
    let vocab: serde_json::Map<_, _> = (0..count).map(|id| (token(id), json!(id))).collect();
    let added = (0..3).map(|id| {
        json!({"id": id, "content": token(id), "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": vocab},
    })
}

/// Writes a tokenizer and its configuration.
fn add_texts(dir: &Path, tokenizer: &Value, config: &Value) {
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

#[test]
fn an_adapter_s_tokenizer_and_template_are_taken() {
    let (model, tuned, out) = (copy("lora/base"), copy("lora/plain"), tempfile::tempdir().unwrap());
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let config = json!({"eos_token": "</s>", "chat_template": template});
    add_texts(model.path(), &words(48, "</s>"), &config);
    let made = |name: &str| {
        let adapters = [Adapter { folder: tuned.path().to_owned(), weight: 1.0 }];
        let checkpoint = Checkpoint::open(model.path()).unwrap().with_adapters(&adapters).unwrap();
        let options =
            ForgeOptions { max_ctx: Some(16), ..ForgeOptions::new(out.path().join(name)) };
        let mut log = Log::default();
        let report = forge_checkpoint(&checkpoint, recipe, &options, &mut log).unwrap();
        let folder = out.path().join(name);
        let files = ["tokenizer.json", "tokenizer_config.json"].map(|f| read_json(&folder.join(f)));
        (files, read_json(&report.manifest)["params"]["eos_token_id"].clone(), log.notes.join("\n"))
    };
    let ([_, config], end, said) = made("base");
    assert_eq!((&config["chat_template"], end), (&json!(template), json!(2)));
    assert!(!said.contains("of the adapter"), "{said}");
    // Trainers give a reserved token another text, and end turns with another token than the base ends texts.
    let other = format!("{template}w3");
    let own = json!({"eos_token": {"content": "w5"}, "added_tokens_decoder": {}});
    add_texts(tuned.path(), &words(48, "<|im_end|>"), &own);
    std::fs::write(tuned.path().join("chat_template.jinja"), &other).unwrap();
    let ([tokenizer, config], end, said) = made("tuned");
    assert_eq!(tokenizer["added_tokens"][2]["content"], "<|im_end|>");
    assert_eq!((&config["chat_template"], end), (&json!(other), json!([2, 5])));
    assert!(said.contains("chat_template.jinja of the adapter"), "{said}");
    // A template that the adapter lacks is the model's.
    std::fs::remove_file(tuned.path().join("chat_template.jinja")).unwrap();
    assert_eq!(made("partly").0[1]["chat_template"], template);
}

#[test]
fn an_adapter_trained_with_added_tokens_is_refused() {
    let hint = "merge the adapter with PEFT (merge_and_unload), and forge that folder";
    let trained = |count: usize| {
        let (model, tuned) = (copy("lora/base"), copy("lora/plain"));
        add_texts(model.path(), &words(40, "</s>"), &json!({}));
        add_texts(tuned.path(), &words(count, "</s>"), &json!({}));
        let adapters = [Adapter { folder: tuned.path().to_owned(), weight: 1.0 }];
        Checkpoint::open(model.path()).unwrap().with_adapters(&adapters)
    };
    // The table has 48 rows: some to spare.
    trained(48).unwrap();
    let error = says(trained(50), "trained with 2 added tokens: 50, and the table");
    assert_eq!(error.hint_text(), Some(hint));
    // A whole table that was made larger says the same.
    let dir = copy("lora/whole");
    let zeros = vec![0; 50 * 64 * 4];
    let head = TensorView::new(Dtype::F32, vec![50, 64], &zeros).unwrap();
    let file = safetensors::serialize([("base_model.model.lm_head.weight", head)], None).unwrap();
    std::fs::write(dir.path().join("adapter_model.safetensors"), file).unwrap();
    let one = Adapter { folder: dir.path().to_owned(), weight: 1.0 };
    let error = says(base().with_adapters(&[one]), "trained with 2 added tokens");
    assert!(error.report().to_string().contains(hint), "{error:?}");
    // Another model's vocabulary.
    let (model, tuned) = (copy("lora/base"), copy("lora/plain"));
    add_texts(model.path(), &words(48, "</s>"), &json!({}));
    let mut other = words(48, "</s>");
    other["model"]["vocab"]["w7"] = json!(8);
    other["model"]["vocab"]["w8"] = json!(7);
    add_texts(tuned.path(), &other, &json!({}));
    let adapters = [Adapter { folder: tuned.path().to_owned(), weight: 1.0 }];
    said(
        Checkpoint::open(model.path()).unwrap().with_adapters(&adapters),
        "token 7 is \"w8\", that of",
    );
}

#[test]
fn an_adapter_in_the_place_of_a_checkpoint_names_its_base() {
    let dir = copy("lora/plain");
    let (base, key) = (json!("meta-llama/Llama-3.2-1B"), "base_model_name_or_path");
    set_json(&dir.path().join("adapter_config.json"), key, base);
    let error = says(Checkpoint::open(dir.path()), "an adapter (adapter_config.json)");
    let command = format!("qhx forge meta-llama/Llama-3.2-1B --lora {}", dir.path().display());
    assert!(error.hint_text().unwrap().contains(&command), "{error:?}");
}

#[test]
fn adapters_of_other_models_are_refused() {
    let tensors = "adapter_model.safetensors";
    let renamed = |from: &'static str, to: &'static str| {
        move |dir: &Path| {
            edit_header(&dir.join(tensors), |header| {
                let header = header.as_object_mut().unwrap();
                let keys: Vec<_> =
                    header.keys().filter(|key| key.contains(from)).cloned().collect();
                for key in keys {
                    let tensor = header.remove(&key).unwrap();
                    header.insert(key.replace(from, to), tensor);
                }
            });
        }
    };
    refused(
        "plain",
        "model.layers.7.self_attn.q_proj is no layer of",
        renamed("0.self_attn.q_proj", "7.self_attn.q_proj"),
    );
    refused("plain", "lora_A or lora_B is missing", renamed("q_proj.lora_A", "q_proj.lora_C"));
    refused("biases", "bias is none of", renamed("o_proj.bias", "other_proj.bias"));
    refused("plain", "holds no adapter_config.json and adapter_model.safetensors", |dir| {
        std::fs::remove_file(dir.join(tensors)).unwrap();
    });
    refused("plain", "not a whole safetensors file", |dir| {
        let bytes = std::fs::read(dir.join(tensors)).unwrap();
        std::fs::write(dir.join(tensors), &bytes[..bytes.len() - 5]).unwrap();
    });
    refused("plain", "lora_B.weight: element", |dir| {
        let mut bytes = std::fs::read(dir.join(tensors)).unwrap();
        let end = bytes.len();
        bytes[end - 4..].fill(0xff);
        std::fs::write(dir.join(tensors), bytes).unwrap();
    });
    // Whole tensors have no weight, and one place.
    said(base().with_adapters(&[adapter("whole", 0.5)]), "the adapter has the weight 0.5");
    said(
        base().with_adapters(&[adapter("biases", 1.0), adapter("biases", 1.0)]),
        "changed by another adapter",
    );
    let drawn = Checkpoint::synthetic(&fixture("lora/base/config.json"), 1).unwrap();
    said(drawn.with_adapters(&[adapter("plain", 1.0)]), "a synthetic model has no weights");
    says("folder=x".parse::<Adapter>(), "the weight is \"x\", expected a number");
    // Nothing is read that is not there.
    let merged = base().with_adapters(&[adapter("whole", 1.0)]).unwrap();
    assert_eq!(recipe(&merged, &recipe_options(16, &[])).unwrap().family, "llama");
}
