//! GGUF files of every architecture that is read: tensors under the names of llama.cpp's own tables, changed as its
//! converter changes them, are those of the checkpoint that they were made of.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use half::{bf16, f16};
use qhx_base::Error;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{RecipeOptions, Task};
use qhx_forge::registry::{recipe, task};
use qhx_forge::{ForgeOptions, Silent, forge_checkpoint};
use qhx_graph::graph::{Graph, Origin};
use qhx_paths::fixture;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{read_json, recipe_options, says};

/// A tensor of f32: name, sizes, values.
type Tensor = (String, Vec<usize>, Vec<f32>);

/// A file of version 3. Of numbers the whole ones are u32 or lists of i32, the others f32; lists may be of texts.
fn file(metadata: &Value, tensors: &[Tensor]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let metadata = metadata.as_object().unwrap();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(&mut bytes, key);
        match value {
            Value::String(value) => {
                bytes.extend(8u32.to_le_bytes());
                text(&mut bytes, value);
            }
            Value::Bool(flag) => {
                bytes.extend(7u32.to_le_bytes());
                bytes.push(u8::from(*flag));
            }
            Value::Array(list) if list.iter().any(Value::is_string) => {
                bytes.extend([9u32, 8].iter().flat_map(|n| n.to_le_bytes()));
                bytes.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|entry| text(&mut bytes, entry.as_str().unwrap()));
            }
            Value::Array(list) => {
                bytes.extend([9u32, 5].iter().flat_map(|n| n.to_le_bytes()));
                bytes.extend((list.len() as u64).to_le_bytes());
                let numbers = list.iter().map(|n| n.as_i64().unwrap() as i32);
                bytes.extend(numbers.flat_map(i32::to_le_bytes));
            }
            value if value.is_u64() => {
                bytes.extend(4u32.to_le_bytes());
                bytes.extend((value.as_u64().unwrap() as u32).to_le_bytes());
            }
            value => {
                bytes.extend(6u32.to_le_bytes());
                bytes.extend((value.as_f64().unwrap() as f32).to_le_bytes());
            }
        }
    }
    let mut offset = 0u64;
    for (name, sizes, values) in tensors {
        text(&mut bytes, name);
        bytes.extend((sizes.len() as u32).to_le_bytes());
        bytes.extend(sizes.iter().rev().flat_map(|size| (*size as u64).to_le_bytes()));
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += (values.len() as u64 * 4).next_multiple_of(32);
    }
    for (_, _, values) in tensors {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    bytes
}

/// The rows of `values` in the order that `place` gives: where each row of the checkpoint goes.
fn ordered(values: &[f32], rows: usize, place: impl Fn(usize) -> usize) -> Vec<f32> {
    let cols = values.len() / rows;
    let mut out = vec![0.0; values.len()];
    for (row, values) in values.chunks_exact(cols).enumerate() {
        out[place(row) * cols..][..cols].copy_from_slice(values);
    }
    out
}

/// `LlamaModel.permute` of the converter: `reshape(heads, 2, dim / 2).swapaxes(1, 2)`.
fn permuted(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let dim = rows / heads;
    ordered(values, rows, |row| {
        let (head, half, within) = (row / dim, row % dim / (dim / 2), row % (dim / 2));
        head * dim + within * 2 + half
    })
}

/// `_reorder_v_heads`: `reshape(groups, each, dim).swapaxes(0, 1)`, of the rows from `first` on.
fn tiled(values: &[f32], rows: usize, first: usize, [groups, each]: [usize; 2]) -> Vec<f32> {
    let dim = (rows - first) / groups / each;
    ordered(values, rows, |row| match row.checked_sub(first) {
        None => row,
        Some(row) => {
            let (group, nth, within) = (row / dim / each, row / dim % each, row % dim);
            first + (nth * groups + group) * dim + within
        }
    })
}

fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let cols = values.len() / rows;
    (0..values.len()).map(|at| values[at % rows * cols + at / rows]).collect()
}

/// Applies `modify_tensors` of the converter to a tensor of the tiny model of `config`.
fn converted(
    architecture: &str,
    name: &str,
    config: &Value,
    mut shape: Vec<usize>,
    mut values: Vec<f32>,
) -> (Vec<usize>, Vec<f32>) {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let rows = shape.first().copied().unwrap_or(1);
    let ends = |end: &str| name.ends_with(end);
    match architecture {
        "llama" if ends("q_proj.weight") => {
            values = permuted(&values, rows, size("num_attention_heads"));
        }
        "llama" if ends("k_proj.weight") => {
            values = permuted(&values, rows, size("num_key_value_heads"));
        }
        "gemma3" if ends("norm.weight") => values.iter_mut().for_each(|value| *value += 1.0),
        "qwen35" if name.contains("linear_attn") => {
            let groups = size("linear_num_key_heads");
            let heads = [groups, size("linear_num_value_heads") / groups];
            let keys = 2 * groups * size("linear_key_head_dim");
            if ends("in_proj_qkv.weight") || ends("conv1d.weight") {
                values = tiled(&values, rows, keys, heads);
            } else if ends("out_proj.weight") {
                let cols = values.len() / rows;
                values = transposed(&tiled(&transposed(&values, rows), cols, 0, heads), cols);
            } else if !ends("norm.weight") {
                values = tiled(&values, rows, 0, heads);
            }
            if ends("A_log") {
                values.iter_mut().for_each(|value| *value = -value.exp());
            }
        }
        "qwen35" if ends("norm.weight") => values.iter_mut().for_each(|value| *value += 1.0),
        _ => {}
    }
    if ends("conv1d.weight") || ends("conv.conv.weight") {
        shape.remove(1);
    }
    (shape, values)
}

/// The tensors of a tiny model, by their names.
fn stored(folder: &str) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let floats = |dtype: Dtype, data: &[u8]| -> Vec<f32> {
        match dtype {
            Dtype::BF16 => {
                data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
            }
            Dtype::F16 => {
                data.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
            }
            _ => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        }
    };
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(fixture(folder)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                found.insert(name, (view.shape().to_vec(), floats(view.dtype(), view.data())));
            }
        }
    }
    found
}

/// `layers.7` as `layers.N`, and the number.
fn numbered(name: &str, part: &str) -> (String, String) {
    let Some((before, rest)) = name.split_once(&format!("{part}.")) else {
        return (name.to_owned(), String::new());
    };
    let (number, after) = rest.split_once('.').unwrap();
    (format!("{before}{part}.N.{after}"), number.to_owned())
}

/// The tiny model in `folder` as the converter writes it, by the package's names.
fn tensors(folder: &str) -> (String, Vec<Tensor>) {
    let all = read_json(&fixture("gguf/names.json"));
    let architecture = all[folder]["architecture"].as_str().unwrap();
    let names = all[folder]["names"].as_object().unwrap();
    let config = read_json(&fixture(&format!("{folder}/config.json")));
    let config = config.get("text_config").unwrap_or(&config);
    let mut found: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (name, (shape, values)) in stored(folder) {
        let (pattern, layer) = numbered(&name, "layers");
        let (pattern, expert) = numbered(&pattern, "experts");
        let Some(theirs) = names.get(&pattern).and_then(Value::as_str) else { continue };
        let theirs = theirs.replace("blk.N", &format!("blk.{layer}"));
        let (shape, values) = converted(architecture, &name, config, shape, values);
        // Experts are one tensor, and come in the order of their numbers.
        let entry = found.entry(theirs).or_default();
        match expert.is_empty() {
            true => entry.0 = shape,
            false => entry.0 = [&[entry.0.first().unwrap_or(&0) + 1], &shape[..]].concat(),
        }
        entry.1.extend(values);
    }
    let list = found.into_iter().map(|(name, (shape, values))| (name, shape, values));
    (architecture.to_owned(), list.collect())
}

fn write(dir: &TempDir, name: &str, metadata: &Value, tensors: &[Tensor]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, file(metadata, tensors)).unwrap();
    path
}

/// The metadata that llama.cpp writes for the tiny model in `folder`.
fn metadata(folder: &str, architecture: &str) -> Value {
    let config = read_json(&fixture(&format!("{folder}/config.json")));
    let config = config.get("text_config").unwrap_or(&config);
    let mut found = json!({"general.architecture": architecture});
    let mut set = |key: &str, value: Value| {
        if !value.is_null() {
            found[format!("{architecture}.{key}")] = value;
        }
    };
    for (theirs, ours) in [
        ("block_count", "num_hidden_layers"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("context_length", "max_position_embeddings"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attention.sliding_window", "sliding_window"),
        ("expert_count", "num_local_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("ssm.group_count", "linear_num_key_heads"),
        ("ssm.time_step_rank", "linear_num_value_heads"),
        ("ssm.state_size", "linear_key_head_dim"),
        ("ssm.conv_kernel", "linear_conv_kernel_dim"),
        ("shortconv.l_cache", "conv_L_cache"),
    ] {
        set(theirs, config[ours].clone());
    }
    let rope = &config["rope_parameters"];
    set("rope.freq_base", json!(rope["rope_theta"].as_f64().or(config["rope_theta"].as_f64())));
    if architecture == "qwen35" {
        let size = |key: &str| config[key].as_u64().unwrap();
        set(
            "ssm.inner_size",
            json!(size("linear_num_value_heads") * size("linear_value_head_dim")),
        );
        let turned = size("head_dim") as f64 * rope["partial_rotary_factor"].as_f64().unwrap();
        set("rope.dimension_count", json!(turned as u64));
        set("rope.dimension_sections", json!([3, 3, 2, 0]));
        set("full_attention_interval", json!(2));
    }
    if architecture.starts_with("lfm2") {
        let groups = |kind: &Value| if kind == "conv" { 0 } else { 2 };
        let kinds = config["layer_types"].as_array().unwrap().iter().map(groups);
        set("attention.head_count_kv", json!(kinds.collect::<Vec<_>>()));
        set("attention.layer_norm_rms_epsilon", config["norm_eps"].clone());
        let width = if architecture == "lfm2" { &json!(168) } else { &config["intermediate_size"] };
        set("feed_forward_length", width.clone());
        set("leading_dense_block_count", config["num_dense_layers"].clone());
        set("expert_count", config["num_experts"].clone());
    }
    found
}

#[test]
fn tensors_of_every_architecture_are_the_checkpoints() {
    let names = read_json(&fixture("gguf/names.json"));
    let dir = tempfile::tempdir().unwrap();
    for folder in names.as_object().unwrap().keys() {
        let (architecture, tensors) = tensors(folder);
        let path = write(&dir, "model.gguf", &metadata(folder, &architecture), &tensors);
        let own = fixture(folder);
        let checkpoint = Checkpoint::open_gguf(&path, Some(&own)).unwrap();
        let mut seen = 0;
        for (name, (shape, values)) in stored(folder) {
            let (pattern, _) = numbered(&numbered(&name, "layers").0, "experts");
            if names[folder]["names"].get(&pattern).is_none() {
                continue;
            }
            let asked = name.trim_start_matches("model.").trim_start_matches("language_model.");
            let mut found = vec![0f32; values.len()];
            checkpoint.rows(asked, &shape).unwrap().read_f32(0, &mut found).unwrap();
            for (at, (found, value)) in found.iter().zip(&values).enumerate() {
                let exact = !name.ends_with("A_log") && !name.ends_with("norm.weight");
                let part = if exact { 0.0 } else { 1e-6 };
                let close = (found - value).abs() <= part * value.abs().max(1.0);
                assert!(close, "{architecture}: {name}, value {at} is {found}, not {value}");
            }
            seen += 1;
        }
        assert!(seen > 20, "{architecture}: {seen} tensors");
    }
}

#[test]
fn sampling_of_gguf_files_is_a_generation_config() {
    let dir = TempDir::new().unwrap();
    let (architecture, tensors) = tensors("qwen3-tiny");
    let mut metadata = metadata("qwen3-tiny", &architecture);
    let open = |metadata: &Value| {
        let path = write(&dir, "model.gguf", metadata, &tensors);
        Checkpoint::open(&path).unwrap().generation_config().clone()
    };
    assert_eq!(open(&metadata), Value::Null);
    metadata["general.sampling.temp"] = json!(0.6);
    metadata["general.sampling.top_k"] = json!(20);
    metadata["general.sampling.top_p"] = json!(0.95);
    assert_eq!(open(&metadata), json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95}));
}

/// Without a config.json: every key that the file gives has the value that it has in the model's own, and nothing of
/// the file is left over.
#[test]
fn configurations_of_gguf_files_are_the_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    for folder in [
        "qwen2-tiny",
        "qwen3-tiny",
        "qwen3-moe",
        "qwen35-blocks",
        "gemma3-tiny",
        "lfm2-tiny",
        "lfm2-moe",
        "phimoe-blocks",
    ] {
        let (architecture, tensors) = tensors(folder);
        let path = write(&dir, "model.gguf", &metadata(folder, &architecture), &tensors);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let own = read_json(&fixture(&format!("{folder}/config.json")));
        let aside = |key: &str| match key {
            // Others' spellings, defaults, and sizes that follow from other keys.
            "rope_theta"
            | "hidden_act"
            | "query_pre_attn_scalar"
            | "attention_bias"
            | "torch_dtype" => true,
            "block_auto_adjust_ff_dim" | "intermediate_size" => folder == "lfm2-tiny",
            _ => false,
        };
        for (key, found) in checkpoint.config().as_object().unwrap() {
            if let Some(own) = own.get(key).filter(|_| !aside(key)) {
                assert_eq!(found, own, "{folder}: {key}");
            }
        }
        let made = recipe(&checkpoint, &recipe_options(64, &[])).unwrap();
        let family = made.family;
        if folder == "gemma3-tiny" {
            assert_eq!(
                made.params["embed_scale"],
                json!(120f64.sqrt() as f32),
                "not rounded to bfloat16"
            );
        }
        assert!(folder.starts_with(&family.replace("3_5", "35")), "{folder}: {family}");
    }
}

/// The checkpoint of a tiny model as a GGUF file without a config.json, with more metadata.
fn described(dir: &TempDir, folder: &str, more: &Value) -> Result<Checkpoint, Error> {
    let (architecture, tensors) = tensors(folder);
    let mut metadata = metadata(folder, &architecture);
    for (key, value) in more.as_object().unwrap() {
        metadata[key] = value.clone();
    }
    Checkpoint::open(&write(dir, "model.gguf", &metadata, &tensors))
}

#[test]
fn vectors_of_gguf_files_are_pooled_as_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let made = |kind: Option<u32>, asked: Option<&str>| {
        let more = kind.map_or(json!({}), |kind| json!({"qwen3.pooling_type": kind}));
        let checkpoint = described(&dir, "qwen3-tiny", &more).unwrap();
        let choices: Vec<_> = asked.map(|way| ("pooling", way)).into_iter().collect();
        let options = RecipeOptions { task: Task::Embed, ..recipe_options(64, &choices) };
        let made = recipe(&checkpoint, &options);
        (task(&checkpoint, None).unwrap(), made.map(|made| made.plan_params["pooling"].clone()))
    };
    for (kind, way) in [(1, "mean"), (2, "cls"), (3, "last")] {
        let (task, found) = made(Some(kind), None);
        assert_eq!((task, found.unwrap()), (Task::Embed, json!(way)));
    }
    for kind in [None, Some(0)] {
        let (task, found) = made(kind, None);
        assert_eq!(task, Task::Generate);
        assert!(found.unwrap_err().hint_text().unwrap().contains("pooling=last"));
    }
    assert_eq!(made(None, Some("last")).1.unwrap(), "last");
    says(made(Some(4), None).1, "pooling_type is 4: the model ranks documents");
}

#[test]
fn keys_that_gguf_files_lack_are_not_null() {
    let dir = tempfile::tempdir().unwrap();
    let names = read_json(&fixture("gguf/names.json"));
    for folder in names.as_object().unwrap().keys() {
        let Ok(checkpoint) = described(&dir, folder, &json!({})) else { continue };
        for (key, value) in checkpoint.config().as_object().unwrap() {
            assert!(!value.is_null(), "{folder}: {key}");
        }
    }
    // The first files of Gemma 2 have neither caps nor a window.
    let first = json!({
        "general.architecture": "gemma2", "gemma2.block_count": 1, "gemma2.embedding_length": 8,
        "gemma2.feed_forward_length": 8, "gemma2.attention.head_count": 1, "gemma2.context_length": 64,
        "gemma2.attention.key_length": 8, "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
    });
    let embedding = [("token_embd.weight".to_owned(), vec![4, 8], vec![0.0; 32])];
    let checkpoint = Checkpoint::open(&write(&dir, "first.gguf", &first, &embedding)).unwrap();
    for key in ["attn_logit_softcapping", "final_logit_softcapping", "sliding_window"] {
        assert_eq!(checkpoint.config().get(key), None, "{key}");
    }
}

#[test]
fn linear_and_yarn_scaling_have_what_gguf_files_say() {
    let dir = tempfile::tempdir().unwrap();
    let scaling = |more: Value| {
        let found = described(&dir, "qwen3-tiny", &more).unwrap();
        found.config().get("rope_scaling").cloned().unwrap_or_default()
    };
    assert_eq!(scaling(json!({})), Value::Null);
    let linear = json!({"rope_type": "linear", "factor": 2.5});
    assert_eq!(scaling(json!({"qwen3.rope.scale_linear": 2.5})), linear);
    let yarn = scaling(json!({
        "qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.5,
        "qwen3.rope.scaling.original_context_length": 64, "qwen3.rope.scaling.yarn_beta_fast": 16.5,
    }));
    assert_eq!((&yarn["factor"], &yarn["beta_fast"]), (&json!(4.5), &json!(16.5)));
    assert_eq!(yarn.get("beta_slow"), None);
}

#[test]
fn a_gguf_model_is_shown_by_its_general_name() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = fixture("qwen3-tiny/tokenizer.json");
    std::fs::copy(tokenizer, dir.path().join("tokenizer.json")).unwrap();
    for (more, shown) in [
        (json!({"general.name": "Tiny Qwen 0.1B"}), "Tiny-Qwen-0.1B"),
        (json!({"general.basename": "Qwen", "general.size_label": "1B"}), "Qwen-1B"),
        (json!({"general.name": "hf"}), "model"),
    ] {
        let checkpoint = described(&dir, "qwen3-tiny", &more).unwrap();
        let out = dir.path().join("out");
        let options = ForgeOptions {
            max_ctx: Some(32),
            prefill: Some(Vec::new()),
            overwrite: true,
            ..ForgeOptions::new(&out)
        };
        let report = forge_checkpoint(&checkpoint, recipe, &options, &mut Silent).unwrap();
        assert_eq!(report.manifest, out.join("model.json"), "files are called after the file");
        assert_eq!(read_json(&report.manifest)["model"]["name"], shown);
    }
}

/// A tokenizer's metadata: texts of tokens and their types.
fn tokens(model: &str, tokens: &[(&str, u32)]) -> Value {
    let (texts, types): (Vec<_>, Vec<_>) = tokens.iter().copied().unzip();
    json!({
        "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": vec![0; tokens.len()], "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": false, "tokenizer.ggml.add_space_prefix": false,
    })
}

#[test]
fn control_tokens_that_end_answers_are_ends() {
    let dir = tempfile::tempdir().unwrap();
    let ends = |list: &[(&str, u32)]| {
        let found = described(&dir, "qwen3-tiny", &tokens("gpt2", list)).unwrap();
        found.config()["eos_token_id"].clone()
    };
    let (normal, control) = (1, 3);
    let end = ("<|im_end|>", control);
    assert_eq!(ends(&[end, ("a", normal), ("<|endoftext|>", control)]), json!([0, 2]));
    assert_eq!(ends(&[end, ("<|end_of_text|>", control), ("</s>", control)]), json!([0, 1, 2]));
    // A tag of HTML is a word, where no token is of that type.
    assert_eq!(ends(&[end, ("</s>", normal), ("<EOT>", normal)]), json!(0));
    // Where messages end within an answer.
    let harmony = [("<|return|>", control), ("<|end|>", control), ("<|call|>", control)];
    assert_eq!(ends(&harmony), json!([0, 2]));
    assert_eq!(ends(&[end, ("<|end|>", control)]), json!([0, 1]));
}

#[test]
fn special_tokens_of_phi_3_take_white_space_along() {
    let dir = tempfile::tempdir().unwrap();
    let (unknown, control, user, byte) = (2, 3, 4, 6);
    let list = [
        ("<unk>", unknown),
        ("<s>", control),
        ("</s>", user),
        ("<0x0A>", byte),
        ("h", 1),
        ("<|endoftext|>", control),
        ("<|user|>", control),
    ];
    let mut metadata = tokens("llama", &list);
    let mut encoded = |architecture: &str, text: &str| {
        metadata["general.architecture"] = json!(architecture);
        let path = write(&dir, "tokens.gguf", &metadata, &[]);
        // Its tokenizer alone is asked for, beside another model's configuration.
        let model = Checkpoint::open_gguf(&path, Some(&fixture("quantised/awq"))).unwrap();
        model.tokenizer().unwrap().encode(text, false).unwrap()
    };
    assert_eq!(encoded("phi3", "<|user|>\nh"), [6, 4]);
    assert_eq!(encoded("phi3", "</s>\nh"), [2, 4]);
    assert_eq!(encoded("phi3", "<|endoftext|>\nh"), [5, 3, 4]);
    assert_eq!(encoded("llama", "<|user|>\nh"), [6, 3, 4]);
}

/// The same graphs, weights and experts give the same tokens.
#[test]
fn a_gguf_of_qwen3_moe_becomes_the_bundle_of_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (architecture, tensors) = tensors("qwen3-moe");
    let path = write(&dir, "model.gguf", &metadata("qwen3-moe", &architecture), &tensors);
    let options = recipe_options(64, &[]);
    let parts = |checkpoint: &Checkpoint| {
        let made = recipe(checkpoint, &options).unwrap();
        let graphs = made.contexts.iter().flat_map(|context| &context.graphs);
        let tensors = graphs.clone().flat_map(Graph::tensors);
        let weights = tensors.filter_map(|tensor| match &tensor.origin {
            Origin::Weight(weight) => Some(weight),
            _ => None,
        });
        let weights = weights.map(|weight| {
            let mut values = vec![0f32; weight.rows() * weight.cols()];
            weight.source().read_f32(0, &mut values).unwrap();
            (weight.source().name().to_owned(), values)
        });
        let nodes: Vec<_> = graphs.clone().map(|graph| graph.nodes().len()).collect();
        let mut files = vec![Vec::new(); 2];
        let mut outs: Vec<&mut dyn Write> =
            files.iter_mut().map(|file| file as &mut dyn Write).collect();
        made.tables[0].source.write(&mut outs, &mut Silent).unwrap();
        (nodes, weights.collect::<Vec<_>>(), made.params, made.plan_params, files)
    };
    let own = Checkpoint::open(&fixture("qwen3-moe")).unwrap();
    assert!(parts(&Checkpoint::open(&path).unwrap()) == parts(&own));
}

/// A model in two files, as `llama-gguf-split` makes it.
fn split(dir: &TempDir) -> [PathBuf; 2] {
    let (architecture, tensors) = tensors("qwen3-tiny");
    let (first, second) = tensors.split_at(20);
    let part = |number: usize, metadata: &Value, part: &[Tensor]| {
        let mut metadata = metadata.clone();
        metadata["split.no"] = json!(number);
        metadata["split.count"] = json!(2);
        metadata["split.tensors.count"] = json!(tensors.len());
        let name = format!("m-0000{}-of-00002.gguf", number + 1);
        write(dir, &name, &metadata, part)
    };
    [part(0, &metadata("qwen3-tiny", &architecture), first), part(1, &json!({}), second)]
}

#[test]
fn a_gguf_model_in_parts_is_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let parts = split(&dir);
    let own = Checkpoint::open(&fixture("qwen3-tiny")).unwrap();
    let shape = [own.config()["vocab_size"].as_u64().unwrap() as usize, 96];
    for path in &parts {
        let checkpoint = Checkpoint::open(path).unwrap();
        let hidden = checkpoint.config()["hidden_size"].as_u64().unwrap() as usize;
        let values = |checkpoint: &Checkpoint| {
            let mut values = vec![0f32; shape[0] * hidden];
            let source = checkpoint.matrix("embed_tokens.weight", [shape[0], hidden]).unwrap();
            source.read_f32(0, &mut values).unwrap();
            values
        };
        assert_eq!(values(&checkpoint), values(&own));
        assert_eq!(recipe(&checkpoint, &recipe_options(64, &[])).unwrap().family, "qwen3");
    }
}

#[test]
fn parts_and_heads_that_do_not_fit_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = split(&dir);
    let alone = dir.path().join("other.gguf");
    std::fs::copy(&first, &alone).unwrap();
    says(Checkpoint::open(&alone), "one of 2 parts, expected a name that ends with");
    std::fs::copy(&first, &second).unwrap();
    says(Checkpoint::open(&first), "split.no is Some(0), expected 1");
    std::fs::remove_file(&second).unwrap();
    says(Checkpoint::open(&first), "m-00002-of-00002.gguf: missing");
    let broken = |folder: &str, key: &str, value: u64| {
        let (architecture, tensors) = tensors(folder);
        let mut metadata = metadata(folder, &architecture);
        metadata[format!("{architecture}.{key}")] = json!(value);
        Checkpoint::open(&write(&dir, "model.gguf", &metadata, &tensors))
    };
    says(broken("qwen35-blocks", "ssm.group_count", 3), "heads of 32 over 3 groups (qwen35.ssm.*)");
    says(broken("qwen35-blocks", "ssm.state_size", u32::MAX.into()), "of keys and 4 heads");
    says(broken("llama3-tiny", "attention.head_count", 7), "pairs for each of 7 heads");
    let (_, mut tensors) = tensors("qwen3-tiny");
    tensors.push(("blk.0.attn_sinks.weight".to_owned(), vec![4], vec![1.0; 4]));
    let path = write(&dir, "model.gguf", &metadata("qwen3-tiny", "qwen3"), &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let options = qhx_forge::ForgeOptions::new(dir.path().join("bundle"));
    let made = qhx_forge::plan::plan(&checkpoint, recipe, &options, false);
    says(made, "blk.*.attn_sinks.weight");
    let clip = write(&dir, "mmproj.gguf", &json!({"general.architecture": "clip"}), &[]);
    says(Checkpoint::open(&clip), "name the file of its decoder");
}
