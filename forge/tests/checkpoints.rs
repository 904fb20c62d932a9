//! Checkpoints that are damaged, incomplete or hostile: an error that says so, never a panic.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use qhx_base::{Error, ErrorKind};
use qhx_checkpoint::Checkpoint;

mod common;

#[path = "checkpoints/adapters.rs"]
mod adapters;
#[path = "checkpoints/catalogue.rs"]
mod catalogue;
#[path = "checkpoints/contexts.rs"]
mod contexts;
#[path = "checkpoints/encoders.rs"]
mod encoders;
#[path = "checkpoints/formats.rs"]
mod formats;
#[path = "checkpoints/gguf.rs"]
mod gguf;
#[path = "checkpoints/hostile.rs"]
mod hostile;
#[path = "checkpoints/mmproj.rs"]
mod mmproj;
#[path = "checkpoints/models.rs"]
mod models;
#[path = "checkpoints/nemo.rs"]
mod nemo;
#[path = "checkpoints/processors.rs"]
mod processors;
#[path = "checkpoints/published.rs"]
mod published;
#[path = "checkpoints/quantized.rs"]
mod quantized;
#[path = "checkpoints/switches.rs"]
mod switches;
#[path = "checkpoints/tokenizers.rs"]
mod tokenizers;
#[path = "checkpoints/torch.rs"]
mod torch;
#[path = "checkpoints/unread.rs"]
mod unread;

use std::path::Path;
use std::sync::Arc;

use common::{
    StandIn, configured, copy, copy_all, copy_files, edit_header, edit_json, edit_tensor,
    read_json, recipe_options, says, set_json,
};
use half::{bf16, f16};
use qhx_forge::plan::plan;
use qhx_forge::recipe::Precision;
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Silent, forge};
use qhx_paths::fixture;
use serde_json::{Value, json};
// As in the program, its recipe is one of the forge's.
use smolvlm_forge as _;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn open(dir: &Path) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(dir)?;
    recipe(&checkpoint, &recipe_options(64, &[])).map(drop)
}

#[track_caller]
fn refused(dir: &Path, words: &str) {
    assert_eq!(says(open(dir), words).kind(), ErrorKind::Artifact);
}

#[test]
fn files_that_are_missing_are_named() {
    let dir = copy("qwen35-untied");
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    refused(dir.path(), "model-00002-of-00003.safetensors: missing");
    std::fs::remove_file(dir.path().join(INDEX)).unwrap();
    refused(dir.path(), "holds neither model.safetensors nor");
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    refused(dir.path(), "config.json");
    refused(&dir.path().join("nowhere"), "not a folder");
}

#[test]
fn truncated_and_foreign_files_are_refused() {
    let dir = copy("qwen35-tied");
    let path = dir.path().join(SINGLE);
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        refused(dir.path(), "not a whole safetensors file");
    }
    std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    refused(dir.path(), "Git LFS pointer");
    let mut longer = whole;
    longer.push(0);
    std::fs::write(&path, longer).unwrap();
    refused(dir.path(), "not a whole safetensors file");
}

#[test]
fn hostile_headers_are_refused() {
    let dir = copy("qwen35-tied");
    let path = dir.path().join(SINGLE);
    let whole = std::fs::read(&path).unwrap();
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, (whole.len() as u64) - 7] {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        refused(dir.path(), "not a whole safetensors file");
    }
    type Edit = fn(&mut Value);
    let edits: [(Edit, &str); 6] = [
        (|t| t["shape"] = json!([u64::MAX, 2]), "not a whole"),
        (|t| t["data_offsets"] = json!([8, 4]), "not a whole"),
        (|t| t["data_offsets"] = json!([0, u64::MAX]), "not a whole"),
        (|t| t["dtype"] = json!("Q4"), "not a whole"),
        (|t| t["shape"] = json!([137, 439]), "not a whole"),
        (|t| t["shape"] = json!([136, 439]), "config.json asks for [439, 136]"),
    ];
    for (edit, words) in edits {
        std::fs::write(&path, &whole).unwrap();
        edit_header(&path, |header| edit(&mut header["model.embed_tokens.weight"]));
        refused(dir.path(), words);
    }
}

#[test]
fn tensors_that_are_missing_or_of_another_type_are_named() {
    let dir = copy("qwen35-tied");
    let path = dir.path().join(SINGLE);
    let whole = std::fs::read(&path).unwrap();
    edit_header(&path, |header| {
        let header = header.as_object_mut().unwrap();
        let tensor = header.remove("model.layers.2.self_attn.k_norm.weight").unwrap();
        header.insert("model.layers.2.self_attn.other".to_owned(), tensor);
    });
    refused(
        dir.path(),
        "or model.layers.2.self_attn.k_norm.weight or layers.2.self_attn.k_norm.weight among",
    );
    std::fs::write(&path, &whole).unwrap();
    edit_header(&path, |header| header["model.norm.weight"]["dtype"] = json!("I16"));
    refused(dir.path(), "tensor model.norm.weight is stored as I16");
    std::fs::write(&path, &whole).unwrap();
    edit_header(&path, |header| {
        let header = header.as_object_mut().unwrap();
        let tensor = header.remove("model.embed_tokens.weight").unwrap();
        header.insert("embed.weight".to_owned(), tensor);
    });
    refused(
        dir.path(),
        "no tensor model.language_model.embed_tokens.weight or model.embed_tokens.weight or embed",
    );
}

#[test]
fn a_recipe_may_say_under_which_names_tensors_are_looked_for() {
    let dir = copy("qwen35-tied");
    let plain = Checkpoint::open(dir.path()).unwrap();
    let name = "layers.0.input_layernorm.weight";
    let expected = plain.values(name, &[136]).unwrap();
    edit_header(&dir.path().join(SINGLE), |header| {
        let tensors = header.as_object_mut().unwrap();
        let renamed = |key: String| key.replace("model.", "decoder.inner.");
        *tensors = std::mem::take(tensors).into_iter().map(|(k, v)| (renamed(k), v)).collect();
    });
    let moved = Checkpoint::open(dir.path()).unwrap();
    says(moved.values(name, &[136]), "model.layers.0.input_layernorm.weight or layers.0");
    let inner = moved.renamed(|name| vec![format!("decoder.inner.{name}"), name.to_owned()]);
    assert_eq!(inner.values(name, &[136]).unwrap(), expected);
    assert!(inner.has(name) && !moved.has(name));
    let words = "no tensor decoder.inner.layers.0.other.weight or layers.0.other.weight among";
    says(inner.values("layers.0.other.weight", &[136]), words);
}

#[test]
fn an_index_may_not_leave_its_folder_or_lie() {
    let dir = copy("qwen35-untied");
    let path = dir.path().join(INDEX);
    for file in [json!("../model.safetensors"), json!("/etc/passwd"), json!(""), json!(7)] {
        edit_json(&path, |index| index["weight_map"]["model.norm.weight"] = file.clone());
        refused(dir.path(), "the name of a file beside it");
    }
    edit_json(&path, |index| {
        index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00003.safetensors");
    });
    refused(dir.path(), "tensor model.norm.weight, which model.safetensors.index.json puts there");
    edit_json(&path, |index| index["weight_map"] = json!([]));
    refused(dir.path(), "no object \"weight_map\"");
}

#[test]
fn an_inconsistent_config_is_refused() {
    let dir = copy("qwen35-tied");
    let path = dir.path().join("config.json");
    let whole = std::fs::read(&path).unwrap();
    for (key, value, words) in [
        ("hidden_size", json!(0), "hidden_size is 0"),
        ("hidden_size", json!(-1), "hidden_size is -1"),
        ("hidden_size", json!(u64::MAX), "hidden_size is"),
        ("hidden_size", json!("136"), "hidden_size is \"136\""),
        ("hidden_size", Value::Null, "hidden_size is missing"),
        ("num_hidden_layers", json!(1_000_000), "expected at most"),
        ("num_hidden_layers", json!(6), "layer_types has 5 entries"),
        ("layer_types", json!(["full_attention", 1, 2, 3, 4]), "layer_types is 1"),
        ("num_key_value_heads", json!(4), "a multiple and its divisor"),
        ("linear_num_key_heads", json!(5), "a multiple and its divisor"),
        ("linear_conv_kernel_dim", json!(1), "expected at least 2"),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps"),
        ("rope_parameters", json!({"partial_rotary_factor": 2.0}), "partial_rotary_factor 2"),
        ("rope_parameters", json!({"rope_theta": -1}), "rope_theta is -1"),
        ("rope_parameters", json!({"rope_type": "yarn"}), "rope_type is \"yarn\""),
        ("vocab_size", json!(440), "config.json asks for [440, 136]"),
        ("architectures", json!(["GPT2LMHeadModel"]), "no recipe for architectures[0]"),
        ("architectures", json!(["GPT2LMHeadModel"]), "docs/adding-a-family.md has the steps"),
    ] {
        std::fs::write(&path, &whole).unwrap();
        set_json(&path, key, value);
        refused(dir.path(), words);
    }
    std::fs::write(&path, "[]").unwrap();
    refused(dir.path(), "expected a JSON object");
    std::fs::write(&path, "{").unwrap();
    refused(dir.path(), "not JSON");
}

/// A configuration alone is enough for a plan, and may ask for anything.
#[test]
fn sizes_beyond_all_bytes_are_planned_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let huge = 1 << 24;
    let (heads, mlp) = ("num_attention_heads", "intermediate_size");
    for (model, sizes) in [
        ("qwen2-tiny", &[(heads, huge), ("head_dim", huge), ("num_key_value_heads", huge)][..]),
        ("mistral-tiny", &[(heads, 1 << 21), ("head_dim", 1 << 20), ("hidden_size", 1 << 20)]),
        ("mistral-tiny", &[(mlp, huge), ("vocab_size", huge), ("hidden_size", 1 << 20)]),
        ("phimoe-16", &[(mlp, huge), ("hidden_size", 1 << 20), ("num_local_experts", 4096)]),
        ("qwen35-tied", &[("hidden_size", huge), (mlp, huge)]),
    ] {
        std::fs::copy(fixture(model).join("config.json"), &path).unwrap();
        edit_json(&path, |config| {
            for (key, size) in sizes {
                config[*key] = json!(size);
            }
            config["num_hidden_layers"] =
                json!(config["num_hidden_layers"].as_u64().unwrap().min(4));
        });
        let checkpoint = Checkpoint::synthetic(&path, 1).unwrap();
        for compiled in [false, true] {
            let options =
                ForgeOptions { prefill: Some(vec![]), ..ForgeOptions::new(dir.path().join("b")) };
            match plan(&checkpoint, recipe, &options, compiled) {
                Ok((plan, _)) => {
                    assert!(plan.bytes() > 1 << 40, "{model} {sizes:?}: {}", plan.bytes())
                }
                Err(error) => {
                    let kinds = [ErrorKind::Artifact, ErrorKind::Graph, ErrorKind::Usage];
                    assert!(kinds.contains(&error.kind()), "{model} {sizes:?}: {error}");
                }
            }
        }
    }
}

#[test]
fn more_shards_than_contexts_allow_is_what_the_error_says() {
    let checkpoint = configured("qwen3-vl-2b.json");
    let refused = |precision| {
        let options =
            ForgeOptions { precision, context_budget: 700_000_000, ..ForgeOptions::new("out") };
        plan(&checkpoint, recipe, &options, true).unwrap_err().report().to_string()
    };
    let error = refused(Precision::Fp16);
    assert!(error.contains("contexts, expected at most 8"), "{error}");
    assert!(!error.contains("cannot be split further"), "{error}");
    assert!(error.contains("w8a16 halves the layers"), "{error}");
    // The tower, which stays f16, is what is too large.
    let error = refused(Precision::W8A16);
    assert!(!error.contains("w8a16 halves"), "{error}");
}

#[cfg(unix)]
#[test]
fn pipes_in_the_place_of_files_are_refused_and_not_waited_for() {
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        let dir = copy("qwen35-tied");
        let path = dir.path().join(name);
        if path.exists() {
            std::fs::remove_file(&path).unwrap();
        }
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(
            forge_says(dir.path(), |_| {}, &[name, "expected a regular file"]),
            ErrorKind::Artifact
        );
    }
}

/// Writes a value over an element of a tensor, as the tensor's type has it.
fn set_element(dir: &Path, tensor: &str, index: usize, value: f32) {
    edit_tensor(dir, tensor, |dtype, bytes| {
        let stored = match dtype {
            "BF16" => bf16::from_f32(value).to_le_bytes().to_vec(),
            "F16" => f16::from_f32(value).to_le_bytes().to_vec(),
            "F32" => value.to_le_bytes().to_vec(),
            other => unreachable!("{other}"),
        };
        bytes[index * stored.len()..][..stored.len()].copy_from_slice(&stored);
    });
}

/// Kind of the error of a forge that fails on a checkpoint, says all words, and leaves nothing behind.
#[track_caller]
fn forge_says(dir: &Path, edit: impl FnOnce(&mut ForgeOptions), words: &[&str]) -> ErrorKind {
    let out = tempfile::tempdir().unwrap();
    let mut options = ForgeOptions::new(out.path().join("b"));
    edit(&mut options);
    let error = forge(dir, &options, &mut Silent).unwrap_err();
    for words in words {
        says(Err::<(), _>(error.clone()), words);
    }
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "{error}");
    error.kind()
}

#[test]
fn weights_that_are_not_numbers_are_refused() {
    for (model, tensor, index) in [
        // bf16, f16 and f32; small values, weights of graphs, embedding tables, heads, experts.
        ("qwen35-tied", "model.norm.weight", 0),
        ("qwen35-tied", "model.layers.0.linear_attn.A_log", 5),
        ("qwen35-tied", "model.layers.2.mlp.down_proj.weight", 1234),
        ("qwen35-tied", "model.embed_tokens.weight", 77),
        ("qwen35-untied", "model.layers.0.self_attn.q_proj.weight", 3),
        ("qwen35-untied", "model.embed_tokens.weight", 0),
        ("qwen35-untied", "lm_head.weight", 500),
        ("mistral-tiny", "model.embed_tokens.weight", 99),
        ("mistral-tiny", "model.layers.0.mlp.up_proj.weight", 9),
        ("phimoe-16", "model.layers.1.block_sparse_moe.experts.3.w2.weight", 11),
    ] {
        for (value, word) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
            let dir = copy(model);
            set_element(dir.path(), tensor, index, value);
            let words = format!("tensor {tensor}: element {index} is {word}; 1 of ");
            assert_eq!(forge_says(dir.path(), |_| {}, &[&words]), ErrorKind::Artifact);
        }
    }
}

#[test]
fn weights_of_absurd_size_are_refused() {
    for (tensor, value) in [
        ("model.layers.0.mlp.up_proj.weight", 1e30),
        ("model.norm.weight", -3e38),
        ("model.embed_tokens.weight", 2e12),
    ] {
        let dir = copy("qwen35-tied");
        set_element(dir.path(), tensor, 7, value);
        let element = format!("tensor {tensor}: element 7");
        assert_eq!(forge_says(dir.path(), |_| {}, &[&element, "beyond 1e12"]), ErrorKind::Artifact);
    }
}

#[test]
fn an_embedding_beyond_f16_is_for_the_cpu_only() {
    let dir = copy("mistral-tiny");
    set_element(dir.path(), "model.embed_tokens.weight", 99, -70_000.0);
    for onnx in [true, false] {
        let compiled = |options: &mut ForgeOptions| {
            options.compiler = Some(Arc::new(StandIn::default()));
            options.onnx = onnx;
        };
        let beyond = "element 99 is -70000, and f16 holds at most 65504";
        let words = ["tensor model.embed_tokens.weight: ", beyond];
        assert_eq!(forge_says(dir.path(), compiled, &words), ErrorKind::Artifact);
    }
    let out = tempfile::tempdir().unwrap();
    forge(dir.path(), &ForgeOptions::new(out.path().join("b")), &mut Silent).unwrap();
}

#[test]
fn token_ids_that_the_bundle_could_not_use_are_refused() {
    for (file, key, value, words) in [
        ("generation_config.json", "eos_token_id", json!(100_000), "eos_token_id is 100000"),
        ("generation_config.json", "eos_token_id", json!([1, -3]), "eos_token_id is [1,-3]"),
        ("generation_config.json", "bos_token_id", json!("<s>"), "bos_token_id is \"<s>\""),
        ("generation_config.json", "bos_token_id", json!([1]), "bos_token_id is [1]"),
        ("config.json", "bos_token_id", json!(1.5), "bos_token_id is 1.5"),
    ] {
        let dir = copy("qwen35-tied");
        edit_json(&dir.path().join("generation_config.json"), |config| {
            config.as_object_mut().unwrap().remove("bos_token_id");
        });
        set_json(&dir.path().join(file), key, value);
        assert_eq!(forge_says(dir.path(), |_| {}, &[words, file]), ErrorKind::Artifact);
    }
}

#[test]
fn sampling_of_the_checkpoint_is_that_of_the_bundle() {
    let made = |change: Value| {
        let dir = copy("llama3-tiny");
        edit_json(&dir.path().join("generation_config.json"), |config| {
            let config = config.as_object_mut().unwrap();
            config.remove("do_sample");
            config.extend(change.as_object().unwrap().clone());
        });
        let options = ForgeOptions::new(dir.path().join("out/b"));
        let report = forge(dir.path(), &options, &mut Silent)?;
        Ok::<_, Error>(read_json(&report.manifest)["params"]["sampling"].clone())
    };
    let qwen3 = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95});
    assert_eq!(made(qwen3).unwrap(), json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95}));
    let gemma3 = json!({"do_sample": true, "top_k": 64, "top_p": 0.95, "temperature": null});
    assert_eq!(made(gemma3).unwrap(), json!({"temperature": 1.0, "top_k": 64, "top_p": 0.95}));
    // As Qwen2.5-VL has it.
    let greedy = json!({"do_sample": true, "temperature": 1e-6, "repetition_penalty": 1.05});
    assert_eq!(made(greedy).unwrap(), json!({"temperature": 0.0, "repetition_penalty": 1.05}));
    for silent in [
        json!({}),
        json!({"do_sample": false, "temperature": 0.6, "top_k": 20}),
        json!({"repetition_penalty": 1.1}),
    ] {
        assert_eq!(made(silent).unwrap(), Value::Null);
    }
    let words = "generation_config.json: option top_p: expected";
    assert_eq!(says(made(json!({"top_p": 1.5})), words).kind(), ErrorKind::Artifact);
}

#[test]
fn text_files_that_qhx_refuses_are_refused() {
    // A tokenizer that is JSON and no tokenizer; templates that do not parse, in either place.
    let tokenizer = |dir: &Path| edit_json(&dir.join("tokenizer.json"), |t| t["model"] = json!({}));
    let config = |dir: &Path| {
        edit_json(&dir.join("tokenizer_config.json"), |c| c["chat_template"] = json!("{% if %}"));
    };
    let beside = |dir: &Path| std::fs::write(dir.join("chat_template.jinja"), "{{ a").unwrap();
    let list = |dir: &Path| std::fs::write(dir.join("tokenizer_config.json"), "[]").unwrap();
    // A file that is too long to be one.
    let long = |dir: &Path| {
        std::fs::File::create(dir.join("tokenizer_config.json"))
            .unwrap()
            .set_len(65 << 20)
            .unwrap();
    };
    type Damage<'d> = &'d dyn Fn(&Path);
    let cases: [(Damage<'_>, &str); 5] = [
        (&long, "tokenizer_config.json: larger than 64 MiB"),
        (&tokenizer, "tokenizer.json"),
        (&config, "tokenizer_config.json: chat template"),
        (&beside, "chat template"),
        (&list, "tokenizer_config.json"),
    ];
    for (damage, words) in cases {
        let dir = copy("qwen35-tied");
        damage(dir.path());
        forge_says(dir.path(), |_| {}, &[words, &dir.path().display().to_string()]);
    }
}

#[test]
fn a_byte_order_mark_is_named() {
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        for (mark, name) in [(&b"\xef\xbb\xbf"[..], "UTF-8"), (b"\xff\xfe", "UTF-16")] {
            let dir = copy("qwen35-tied");
            let path = dir.path().join(file);
            std::fs::write(&path, [mark, &std::fs::read(&path).unwrap()].concat()).unwrap();
            let what = format!("{file}: begins with a byte order mark (BOM) of {name}");
            forge_says(dir.path(), |_| {}, &[&what, "hint: save it as UTF-8"]);
        }
    }
}

/// The folders of a forge that has its checkpoint and its bundle in one place, or nearly so.
#[test]
fn a_bundle_never_replaces_what_it_is_made_from() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let replace = |checkpoint: &Path, out: &Path| {
        let options =
            ForgeOptions { overwrite: true, name: Some("m".to_owned()), ..ForgeOptions::new(out) };
        forge(checkpoint, &options, &mut Silent)
    };
    replace(&fixture("qwen35-tied"), &out).unwrap();
    let checkpoint = copy("qwen35-tied");
    // Inside the bundle, by its own path and by a link; a manifest that lists it makes no difference.
    let inside = out.join("checkpoint");
    std::fs::rename(checkpoint.keep(), &inside).unwrap();
    edit_json(&out.join("m.json"), |manifest| {
        for entry in std::fs::read_dir(&inside).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            manifest["artifacts"]["files"][format!("checkpoint/{name}")] = json!({});
        }
    });
    let whole = files(&inside);
    let refused = |checkpoint: &Path, out: &Path| {
        assert_eq!(says(replace(checkpoint, out), "checkpoint").kind(), ErrorKind::Usage);
        assert_eq!(files(&inside), whole);
    };
    refused(&inside, &out);
    refused(&inside, &inside);
    refused(&inside, &dir.path().join("out/../out"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        let link = dir.path().join("link");
        symlink(&inside, &link).unwrap();
        refused(&link, &out);
        // A folder of links into the bundle, as download caches make them.
        let links = dir.path().join("links");
        std::fs::create_dir(&links).unwrap();
        for name in &whole {
            symlink(inside.join(name), links.join(name)).unwrap();
        }
        refused(&links, &out);
    }
    // The bundle inside the checkpoint: made there, and not replaced there.
    let outside = dir.path().join("moved");
    std::fs::rename(&inside, &outside).unwrap();
    let bundle = outside.join("v81");
    replace(&outside, &bundle).unwrap();
    says(replace(&outside, &bundle), "lies in the checkpoint's folder");
    // A file with two names, one of them in the bundle, keeps the other.
    let apart = copy("qwen35-tied");
    let shared = apart.path().join("tokenizer.json");
    std::fs::remove_file(out.join("tokenizer.json")).unwrap();
    std::fs::hard_link(&shared, out.join("tokenizer.json")).unwrap();
    let bytes = std::fs::read(&shared).unwrap();
    replace(apart.path(), &out).unwrap();
    assert_eq!(std::fs::read(&shared).unwrap(), bytes);
}

/// Names of a folder's files, sorted.
fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The ONNX reference graphs of a checkpoint, as bytes.
fn reference_graphs(dir: &Path) -> Vec<Vec<u8>> {
    let out = tempfile::tempdir().unwrap();
    let options =
        ForgeOptions { name: Some("m".to_owned()), ..ForgeOptions::new(out.path().join("b")) };
    forge(dir, &options, &mut Silent).unwrap();
    let files = ["onnx/decode.onnx", "onnx/decode.onnx_data", "onnx/lmhead.onnx_data"];
    files.iter().map(|file| std::fs::read(out.path().join("b").join(file)).unwrap()).collect()
}

#[test]
fn the_multimodal_nesting_gives_the_same_graphs() {
    let dir = copy("qwen35-tied");
    edit_json(&dir.path().join("config.json"), |config| {
        let text = config.clone();
        *config = json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": true,
            "text_config": text,
            "vision_config": {"hidden_size": 7},
        });
    });
    edit_header(&dir.path().join(SINGLE), |header| {
        let names = header.as_object_mut().unwrap();
        *names = std::mem::take(names)
            .into_iter()
            .map(|(name, info)| (name.replacen("model.", "model.language_model.", 1), info))
            .collect();
    });
    assert!(
        reference_graphs(dir.path()) == reference_graphs(&fixture("qwen35-tied")),
        "the graphs differ"
    );
}

#[test]
fn separate_templates_and_tokens_go_into_the_config() {
    let dir = copy("qwen35-tied");
    let path = dir.path().join("tokenizer_config.json");
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let template = |edit: &dyn Fn()| {
        edit();
        let out = tempfile::tempdir().unwrap();
        forge(dir.path(), &ForgeOptions::new(out.path().join("b")), &mut Silent).unwrap();
        let config = read_json(&out.path().join("b/tokenizer_config.json"));
        assert_eq!(config["chat_template"], "{{ messages }}");
        config
    };
    // In place of the one that is there, as transformers has it; where there is none; without a file.
    assert_eq!(template(&|| ())["eos_token"], "<|im_end|>");
    let remove = || {
        edit_json(&path, |config| drop(config.as_object_mut().unwrap().remove("chat_template")));
    };
    assert_eq!(template(&remove)["eos_token"], "<|im_end|>");
    let without_file = template(&|| std::fs::remove_file(&path).unwrap());
    // The older form: special tokens in a file of their own.
    assert_eq!(without_file["eos_token"]["content"], "<|im_end|>");
    let older = || std::fs::write(&path, r#"{"model_max_length": 256}"#).unwrap();
    assert_eq!(template(&older)["eos_token"]["content"], "<|im_end|>");
    let newer = || std::fs::write(&path, r#"{"added_tokens_decoder": {}}"#).unwrap();
    assert_eq!(template(&newer)["eos_token"], Value::Null);
    // Of two in files of their own, transformers has the one that it reads last.
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    for (name, text) in
        [("chat_template", "{{ unused }}"), ("additional_chat_templates/default", "{{ messages }}")]
    {
        std::fs::write(dir.path().join(format!("{name}.jinja")), text).unwrap();
    }
    template(&|| ());
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    forge_says(dir.path(), |_| {}, &["tokenizer.json"]);
}
