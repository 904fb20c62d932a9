//! Hostile checkpoints of every family: keys with impossible values, a layer too few, tensors of other shapes, weights
//! that are no numbers. Each is an error that names file, key or tensor; never a panic, and never an allocation as
//! large as the file asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use qhx_base::{ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_forge::plan::plan;
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Silent, forge};
use qhx_graph::graph::Origin;
use qhx_paths::fixture;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::{copy_all, edit_header, edit_tensor, read_json, set_json};

type Family = (&'static str, &'static [(&'static str, &'static str)]);

/// A checkpoint of each family, and options of its recipe.
const FAMILIES: &[Family] = &[
    ("llama3-tiny", &[]),
    ("qwen2-tiny", &[]),
    ("qwen3-tiny", &[]),
    ("gemma3-tiny", &[]),
    ("lfm2-tiny", &[]),
    ("phimoe-6", &[]),
    ("qwen35-untied", &[]),
    ("qwen35-moe", &[]),
    ("qwen35-vision", &[("image-patches", "144")]),
    ("qwen25vl-unseen", &[("image-patches", "144")]),
    ("gemma4-unseen", &[("towers", "all")]),
    ("switches/phi3", &[]),
    ("switches/smollm3", &[]),
    ("switches/granite", &[]),
    ("switches/olmo2", &[]),
    ("switches/olmo3", &[]),
    ("switches/gemma", &[]),
    ("switches/gemma2", &[]),
    ("switches/exaone4", &[]),
    ("switches/ernie4_5", &[]),
    ("switches/hunyuan", &[]),
    ("switches/ministral3", &[]),
    ("gpt-oss-plain", &[]),
    ("gpt-oss", &[]),
    ("qwen3-moe", &[]),
    ("lfm2-moe", &[]),
    ("drawn/cosmos3", &[]),
    ("drawn/gemma3n", &[]),
    ("hybrid/granite-h", &[]),
    ("hybrid/granite-moe", &[]),
    ("hybrid/falcon-h1", &[]),
    ("hybrid/nemotron-h", &[]),
    ("hybrid/nemotron-moe", &[]),
    ("hybrid/qwen3-next", &[]),
    ("encoders/modernbert", &[]),
    ("encoders/modernbert-reranker", &[]),
    ("encoders/mpnet", &[]),
    ("encoders/nomic", &[]),
    ("encoders/gte", &[]),
    ("encoders/jina", &[("adapter", "retrieval.passage")]),
    ("encoders/distilbert", &[]),
    ("encoders/bge-m3", &[]),
    ("encoders/clip", &[]),
    ("embed-bert-tiny", &[]),
    ("siglip-fixed", &[]),
    ("siglip-naflex", &[("image-patches", "24")]),
    ("smolvlm-tiny", &[]),
    ("gemma3-vision", &[]),
    ("qwen3vl-unseen", &[("image-patches", "144")]),
    ("vision/qwen2vl", &[("image-patches", "144")]),
    ("vision/docling", &[]),
    ("vision/internvl", &[]),
    ("vision/lfm2vl", &[]),
    ("vision/mistral3", &[("image-patches", "48")]),
    ("vision/paddleocr", &[("image-patches", "48")]),
    ("vision/paligemma", &[]),
    ("whisper-tiny", &[]),
    ("moonshine-tiny", &[]),
    ("canary-tiny", &[]),
    (NEMO, &[]),
    ("qwen3asr-tiny", &[]),
    ("parakeet-ctc-tiny", &[]),
    ("parakeet-unseen", &[]),
    ("nemotron35-tiny", &[]),
    ("vits-tiny", &[]),
    ("kokoro-tiny", &[]),
];

/// Keys of the number of layers.
const LAYERS: [&str; 8] = [
    "num_hidden_layers",
    "depth",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
];

/// The family whose configuration and names of tensors are read as those of `transformers`, which its files do not have.
const NEMO: &str = "canary-qwen-tiny";

/// Max time of a plan of a tiny checkpoint, on a busy machine.
const LONGEST: Duration = Duration::from_secs(5);

/// Numbers that a bundle does not depend on, or that a later step reads, by family and the beginning of their path.
const FREE: &[(&str, &str)] = &[
    ("", "bos_token_id"),
    ("", "eos_token_id"),
    ("", "pad_token_id"),
    ("", "text_config.bos_token_id"),
    ("", "text_config.eos_token_id"),
    ("", "text_config.pad_token_id"),
    ("", "_pad_token_id"),
    ("", "image_mean"),
    ("", "max_window_layers"),
    ("qwen35-untied", "rope_parameters.mrope_section"),
    ("gemma4-unseen", "video_token_id"),
    ("gemma4-unseen", "vision_config.max_position_embeddings"),
    ("gemma4-unseen", "image_processor.image_"),
    // These follow from others.
    ("gemma4-unseen", "feature_extractor.fft_length"),
    ("gemma4-unseen", "feature_extractor.frame_length"),
    ("gemma4-unseen", "feature_extractor.hop_length"),
    ("switches/phi3", "rope_scaling.short_factor"),
    ("switches/exaone4", "sliding_window_pattern"),
    ("switches/hunyuan", "rope_scaling.beta_"),
    ("switches/hunyuan", "rope_scaling.factor"),
    ("switches/hunyuan", "rope_scaling.mscale"),
    ("gpt-oss", "experts_per_token"),
    ("gpt-oss", "initial_context_length"),
    ("drawn/cosmos3", "image_token_id"),
    ("drawn/cosmos3", "projector_hidden_size"),
    ("drawn/cosmos3", "text_config.rope_parameters.mrope_section"),
    ("drawn/cosmos3", "vi"),
    ("drawn/gemma3n", "image_token_id"),
    ("drawn/gemma3n", "audio_token_id"),
    ("hybrid/granite", "rope_theta"),
    ("hybrid/granite-h", "intermediate_size"),
    ("hybrid/granite-h", "num_experts_per_tok"),
    ("hybrid/qwen3-next", "intermediate_size"),
    ("hybrid/falcon-h1", "mamba_expand"),
    ("hybrid/falcon-h1", "mlp_multipliers"),
    ("hybrid/falcon-h1", "ssm_multipliers"),
    ("hybrid/nemotron-h", "moe_intermediate_size"),
    ("hybrid/nemotron-h", "n_routed_experts"),
    ("hybrid/nemotron-h", "num_experts_per_tok"),
    ("hybrid/nemotron-h", "routed_scaling_factor"),
    ("encoders/jina", "lora_dropout_p"),
    ("encoders/jina", "matryoshka_dimensions"),
    ("encoders/clip", "text_config.projection_dim"),
    ("encoders/clip", "vision_config.projection_dim"),
    ("siglip-naflex", "max_num_patches"),
    ("gemma3-vision", "text_config._sliding_window_pattern"),
    ("vision/internvl", "text_config.max_window_layers"),
    ("vision/internvl", "vision_feature_layer"),
    ("vision/mistral3", "vision_feature_layer"),
    ("vision/mistral3", "vision_config.image_size"),
    ("vision/mistral3", "patch_size"),
    ("vision/lfm2vl", "max_pixels_tolerance"),
    ("vision/paddleocr", "temporal_patch_size"),
    ("vision/paddleocr", "vision_config.temporal_patch_size"),
    ("vision/paddleocr", "vision_config.tokens_per_second"),
    ("vision/paligemma", "hidden_size"),
    ("vision/paligemma", "ignore_index"),
    ("vision/paligemma", "projection_dim"),
    ("vision/paligemma", "text_config.num_image_tokens"),
    ("vision/paligemma", "vision_config.num_image_tokens"),
    ("vision/paligemma", "vocab_size"),
    ("whisper-tiny", "n_samples"),
    ("whisper-tiny", "nb_max_frames"),
    ("qwen3asr-tiny", "feature_extractor.chunk_length"),
    ("qwen3asr-tiny", "feature_extractor.n_samples"),
    ("qwen3asr-tiny", "feature_extractor.nb_max_frames"),
    ("qwen3asr-tiny", "text_config.max_window_layers"),
    ("canary-tiny", "decoder_config.bos_token_id"),
    ("canary-tiny", "decoder_config.eos_token_id"),
    ("canary-tiny", "decoder_config.pad_token_id"),
    ("canary-tiny", "decoder_start_token_id"),
    ("canary-tiny", "encoder_config.max_position_embeddings"),
    ("parakeet", "encoder_config.max_position_embeddings"),
    ("nemotron", "encoder_config.max_position_embeddings"),
    (NEMO, "lora.lora_alpha"),
    (NEMO, "lora.lora_dropout"),
    (NEMO, "perception.encoder.att_context_size"),
    (NEMO, "perception.encoder.dropout"),
    (NEMO, "perception.encoder.feat_out"),
    (NEMO, "perception.encoder.pos_emb_max_len"),
    (NEMO, "perception.encoder.reduction_factor"),
    (NEMO, "perception.encoder.subsampling_conv_channels"),
    (NEMO, "perception.preprocessor.dither"),
    (NEMO, "perception.preprocessor.pad_to"),
    ("vits-tiny", "duration_predictor_filter_channels"),
    ("kokoro-tiny", "n_mels"),
    // All of them are one key to the forge.
    ("kokoro-tiny", "vocab."),
];

/// Beginnings of the names of tensors that no bundle has.
const UNREAD: [&str; 13] = [
    "model.projector.",
    "model.visual.",
    "pooler.dense.",
    "roberta.pooler.dense.",
    "logit_",
    "visual.vision_model.embeddings.packing_position_embedding.",
    "visual.vision_model.head.",
    // Of a layer that has the keys and values of another one.
    "model.language_model.layers.6.self_attn.k_",
    "model.language_model.layers.6.self_attn.v_",
    "perception.preprocessor.",
    "posterior_encoder.",
    "duration_predictor.flows.1.",
    "duration_predictor.post_",
];

/// Keys that are without influence wherever they are listed.
fn neutral() -> BTreeSet<String> {
    let lists: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../src/keys.json")).unwrap();
    let of = |kind: &str| -> BTreeSet<String> {
        let keys = lists.values().filter_map(|list| list[kind].as_array());
        keys.flatten().map(|key| key.as_str().unwrap().to_owned()).collect()
    };
    &of("neutral") - &of("used")
}

/// Plans a bundle, and reads the weights whose names contain `read`.
fn planned(checkpoint: &Checkpoint, choices: &[(&str, &str)], read: Option<&str>) -> Result<()> {
    let mut options = ForgeOptions::new("out");
    for (key, value) in choices {
        options.recipe_options.insert((*key).to_owned(), (*value).to_owned());
    }
    let (_, made) = plan(checkpoint, recipe, &options, false)?;
    let Some(read) = read else { return Ok(()) };
    let mut found = false;
    for graph in made.contexts.iter().flat_map(|context| &context.graphs) {
        for tensor in graph.tensors() {
            if let Origin::Weight(weight) = &tensor.origin
                && weight.source().name().contains(read)
            {
                found = true;
                weight.to_f32()?;
            }
        }
    }
    // Of an embedding table, experts and other files.
    if found { Ok(()) } else { made_of(checkpoint.path(), options) }
}

/// Makes the bundle of a checkpoint, with a tokenizer of another one if it has none.
fn made_of(dir: &Path, options: ForgeOptions) -> Result<()> {
    let tokenizer = dir.join("tokenizer.json");
    if !tokenizer.exists() {
        std::fs::copy(fixture("quantised/tokenizer.json"), tokenizer).unwrap();
    }
    let out = tempfile::tempdir().unwrap();
    forge(dir, &ForgeOptions { out: out.path().join("b"), ..options }, &mut Silent).map(drop)
}

/// The report of a refusal; none where the bundle is made. An error of this function is a fault.
fn refusal(
    dir: &Path,
    choices: &[(&str, &str)],
    read: Option<&str>,
) -> std::result::Result<Option<String>, String> {
    let start = Instant::now();
    let plan = || planned(&Checkpoint::open(dir)?, choices, read);
    let found = catch_unwind(AssertUnwindSafe(plan)).map_err(|_| "a panic".to_owned())?;
    let took = start.elapsed();
    if took > LONGEST {
        return Err(format!("{took:?}"));
    }
    let Err(error) = found else { return Ok(None) };
    let report = error.report().to_string();
    let known = [ErrorKind::Artifact, ErrorKind::Usage, ErrorKind::Graph, ErrorKind::Manifest];
    match known.contains(&error.kind()) {
        true => Ok(Some(report)),
        false => Err(format!("{:?}: {report}", error.kind())),
    }
}

/// Runs `check` for each family, over two threads; all faults are named.
fn each(check: impl Fn(Family, &mut Vec<String>) + Sync) {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(family) = FAMILIES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut found = Vec::new();
                    check(*family, &mut found);
                    wrong.lock().unwrap().append(&mut found);
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} faults:\n{}", wrong.len(), wrong.join("\n"));
}

/// The configuration of a checkpoint as the forge reads it, since Python writes infinite numbers, or as it is.
fn config(family: &str, dir: &Path) -> Value {
    match family {
        NEMO => read_json(&dir.join("config.json")),
        _ => Checkpoint::open(dir).unwrap().config().clone(),
    }
}

/// Paths of the numbers of a configuration; of a list, of its first one.
fn numbers(value: &Value, place: &str, out: &mut Vec<String>) {
    let entries: Vec<(String, &Value)> = match value {
        Value::Object(object) => object.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => {
            list.first().map(|first| ("0".to_owned(), first)).into_iter().collect()
        }
        Value::Number(_) => return out.push(place.to_owned()),
        _ => Vec::new(),
    };
    for (key, value) in entries {
        let path = if place.is_empty() { key } else { format!("{place}.{key}") };
        numbers(value, &path, out);
    }
}

/// The last key of a path that is no place in a list.
fn named(path: &str) -> &str {
    path.rsplit('.').find(|part| part.parse::<usize>().is_err()).unwrap()
}

#[test]
fn impossible_numbers_are_refused_by_key() {
    let neutral = neutral();
    each(|(name, choices), wrong| {
        let dir = copy_all(name);
        for file in ["config.json", "preprocessor_config.json", "processor_config.json"] {
            let path = dir.path().join(file);
            if !path.exists() {
                continue;
            }
            let base = match file {
                "config.json" => config(name, dir.path()),
                _ => read_json(&path),
            };
            let mut all = Vec::new();
            numbers(&base, "", &mut all);
            all.retain(|key| {
                let free = FREE
                    .iter()
                    .any(|(family, start)| name.starts_with(family) && key.starts_with(start));
                // What is written beside its parts concerns callers of `transformers`.
                let beside = file == "processor_config.json" && !key.contains("or.");
                !free && !beside && !neutral.contains(named(key)) && !key.contains("label")
            });
            let whole = serde_json::to_vec(&base).unwrap();
            for key in &all {
                for value in [json!(-1), json!(1u64 << 60), json!(1e300)] {
                    std::fs::write(&path, &whole).unwrap();
                    set_json(&path, key, value.clone());
                    let label = || format!("{name}: {file}: {key} = {value}");
                    match refusal(dir.path(), choices, None) {
                        Ok(Some(report))
                            if report.contains(named(key)) && report.contains(".json") => {}
                        // Large numbers may be factors.
                        Ok(None) if value == json!(1u64 << 60) => {}
                        Ok(found) => wrong.push(format!("{}: {found:?}", label())),
                        Err(how) => wrong.push(format!("{}: {how}", label())),
                    }
                }
            }
            std::fs::write(&path, &whole).unwrap();
        }
    });
}

/// The safetensors file of a checkpoint that holds each tensor, its type and its shape; of tensors whose names differ in
/// numbers alone, the last one.
fn tensors(dir: &Path) -> Vec<(PathBuf, String, Dtype, Vec<usize>)> {
    let mut kinds = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "safetensors")
            || path.ends_with("goldens.safetensors")
            || path.ends_with("turns.safetensors")
        {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let numbered = |part: &str| part.parse::<usize>().is_ok();
            let kind: Vec<&str> =
                name.split('.').map(|part| if numbered(part) { "*" } else { part }).collect();
            let one = (path.clone(), name.clone(), view.dtype(), view.shape().to_vec());
            kinds.insert(kind.join("."), one);
        }
    }
    kinds.retain(|_, (_, name, ..)| {
        let cosmos = dir.join("config.json");
        let cosmos = std::fs::read_to_string(cosmos).unwrap().contains("Cosmos3");
        let reads = name.starts_with("model.visual.") && !cosmos;
        let counts = name.ends_with(".num_batches_tracked");
        reads || !counts && !UNREAD.iter().any(|unread| name.starts_with(unread))
    });
    kinds.into_values().collect()
}

/// The part of a tensor's name that an error has: low-rank factors are read with what they are added to, and names of
/// NeMo's are those of `transformers`.
fn known(tensor: &str) -> &str {
    match tensor.starts_with("llm.") || tensor.starts_with("perception.") {
        true => tensor.rsplit('.').next().unwrap().trim_start_matches("pos_"),
        false => tensor.split(".parametrizations").next().unwrap(),
    }
}

#[test]
fn tensors_of_other_shapes_are_refused_by_name() {
    each(|(name, choices), wrong| {
        let dir = copy_all(name);
        for (path, tensor, _, shape) in tensors(dir.path()) {
            let other = match &shape[..] {
                [] => vec![1],
                [n] => vec![1, *n],
                [rows, columns] if rows != columns => vec![*columns, *rows],
                all => vec![all.iter().product()],
            };
            let whole = std::fs::read(&path).unwrap();
            edit_header(&path, |header| header[&tensor]["shape"] = json!(other));
            match refusal(dir.path(), choices, Some(&tensor)) {
                Ok(Some(report))
                    if report.contains(known(&tensor))
                        && ["hape", "expected"].iter().any(|w| report.contains(w)) => {}
                found => wrong.push(format!("{name}: {tensor} {shape:?} as {other:?}: {found:?}")),
            }
            std::fs::write(&path, whole).unwrap();
        }
    });
}

#[test]
fn weights_that_are_no_numbers_are_refused_in_every_family() {
    each(|(name, choices), wrong| {
        let dir = copy_all(name);
        for (path, tensor, dtype, shape) in tensors(dir.path()) {
            let (nan, infinite) = match dtype {
                Dtype::F32 => {
                    (f32::NAN.to_le_bytes().to_vec(), f32::INFINITY.to_le_bytes().to_vec())
                }
                Dtype::F16 => {
                    (f16::NAN.to_le_bytes().to_vec(), f16::INFINITY.to_le_bytes().to_vec())
                }
                Dtype::BF16 => {
                    (bf16::NAN.to_le_bytes().to_vec(), bf16::INFINITY.to_le_bytes().to_vec())
                }
                _ => continue,
            };
            let whole = std::fs::read(&path).unwrap();
            let values = [nan, infinite];
            // One of both, over all elements: low-rank factors of one task count.
            let value = &values[shape.iter().sum::<usize>() % 2];
            edit_tensor(dir.path(), &tensor, |_, bytes| {
                bytes.chunks_exact_mut(value.len()).for_each(|bytes| bytes.copy_from_slice(value));
            });
            match refusal(dir.path(), choices, Some(&tensor)) {
                Ok(Some(report)) if report.contains(known(&tensor)) => {}
                found => wrong.push(format!("{name}: {tensor}: {found:?}")),
            }
            std::fs::write(&path, whole).unwrap();
        }
    });
}

#[test]
fn a_layer_too_few_or_too_many_is_refused_in_every_family() {
    each(|(name, choices), wrong| {
        let dir = copy_all(name);
        let path = dir.path().join("config.json");
        let base = config(name, dir.path());
        let (whole, mut all) = (serde_json::to_vec(&base).unwrap(), Vec::new());
        numbers(&base, "", &mut all);
        all.retain(|key| {
            LAYERS.contains(&named(key))
                && !(name == "drawn/cosmos3" && key.starts_with("vision"))
                && !(name == "whisper-tiny" && key == "num_hidden_layers")
                // One layer, as often as it says.
                && key != "plbert.num_hidden_layers"
        });
        assert!(!all.is_empty(), "{name}");
        for key in &all {
            let pointer = format!("/{}", key.replace('.', "/"));
            let layers = base.pointer(&pointer).unwrap().as_u64().unwrap();
            for other in [layers - 1, layers + 1] {
                std::fs::write(&path, &whole).unwrap();
                set_json(&path, key, json!(other));
                match refusal(dir.path(), choices, None) {
                    Ok(Some(report))
                        if ["tensor", "layer", "blocks"]
                            .iter()
                            .any(|word| report.contains(word)) => {}
                    found => wrong.push(format!("{name}: {key} = {other}: {found:?}")),
                }
            }
        }
    });
}
