//! `forge` on the fixtures: what the folder holds, that it is the same every time, and what is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Arc;

use qhx_base::{ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_core::manifest::{ChatStyle, Manifest};
use qhx_forge::recipe::{Recipe, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Precision, Progress, Report, Silent, forge, forge_with};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, Origin, UnaryOp};
use qhx_graph::quantize::{Bits, QuantizedForm};
use qhx_graph::weight::Storage;
use qhx_paths::fixture;
use qhx_types::DType;
use serde_json::json;

mod common;

use common::{Log, StandIn, copy, edit_json, says};

/// All files below a folder with their bytes, sorted.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(dir) = folders.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                found.push((name, std::fs::read(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_cpu_bundle_is_whole_readable_and_the_same_every_time() {
    let dir = tempfile::tempdir().unwrap();
    let make = |out: &str| {
        let options = ForgeOptions::new(dir.path().join(out));
        let report = forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap();
        assert_eq!(report.dsp_arch, None);
        contents(&dir.path().join(out))
    };
    let (first, second) = (make("a"), make("b"));
    assert!(first == second, "two runs differ");
    let names: Vec<_> = first.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "onnx/decode.onnx",
            "onnx/decode.onnx_data",
            "onnx/lmhead.onnx",
            "onnx/lmhead.onnx_data",
            "onnx/prefill128.onnx",
            "onnx/prefill16.onnx",
            "onnx/prefill32.onnx",
            "onnx/prefill64.onnx",
            "qwen35-tied.json",
            "qwen35-tied_embed_f16.bin",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    );
    // The prefill graphs have the weights of decode, which lie there once.
    let alone =
        ForgeOptions { prefill: Some(vec![]), ..ForgeOptions::new(dir.path().join("alone")) };
    forge(&fixture("qwen35-tied"), &alone, &mut Silent).unwrap();
    let bytes = |folder: &str| {
        std::fs::metadata(dir.path().join(folder).join("onnx/decode.onnx_data")).unwrap().len()
    };
    let [with, without] = ["a", "alone"].map(bytes);
    assert!(with < 2 * without, "{with} bytes for three graphs, {without} for one");
    let manifest = Manifest::load(&dir.path().join("a")).unwrap();
    assert_eq!(manifest.host_op().unwrap(), "qwen3_5_generate");
    assert_eq!(manifest.model.dsp_arch, None);
    assert_eq!(manifest.params.max_ctx, Some(256));
    assert_eq!(manifest.params.eos_token_id, [430, 428]);
    assert_eq!(manifest.params.rest["rotary_dim"], 16);
    assert_eq!(manifest.artifacts.embed.as_ref().unwrap().dtype, DType::F16);
    assert_eq!(manifest.chat.as_ref().unwrap().style, ChatStyle::Auto);
    // Every file but the manifest itself is listed with its length.
    assert_eq!(manifest.artifacts.files.len(), names.len() - 1);
    for (name, bytes) in first.iter().filter(|(name, _)| !name.ends_with("tied.json")) {
        assert_eq!(manifest.artifacts.files[name].bytes, Some(bytes.len() as u64), "{name}");
    }
    let artifacts = manifest.open_artifacts();
    let source = manifest.context_source(&artifacts, "decode").unwrap();
    assert!(source.binary.is_none());
    assert_eq!(source.onnx.len(), 5);
}

/// Binaries of a model that is called "tiny": the report, the manifest, and the graphs that were compiled.
fn tiny(model: &str, edit: impl FnOnce(&mut ForgeOptions)) -> (Report, Manifest, Vec<Graph>) {
    let dir = tempfile::tempdir().unwrap();
    let compiler = Arc::new(StandIn::default());
    let mut options = ForgeOptions::new(dir.path().join("v81"));
    options.name = Some("tiny".to_owned());
    options.compiler = Some(compiler.clone());
    edit(&mut options);
    let report = forge(&fixture(model), &options, &mut Silent).unwrap();
    let manifest = Manifest::load(&report.manifest).unwrap();
    let graphs = compiler.graphs.lock().unwrap().clone();
    (report, manifest, graphs)
}

fn bins(manifest: &Manifest) -> Vec<&str> {
    manifest.artifacts.contexts.iter().map(|c| c.bin.as_deref().unwrap()).collect()
}

#[test]
fn shards_and_int8_reach_the_compiler_under_the_contracts_names() {
    let (_, manifest, graphs) = tiny("qwen35-untied", |options| {
        (options.precision, options.head) = (Precision::W8A16, Some(Precision::Fp16));
        (options.shards, options.max_ctx, options.prefill) = (3, Some(50), Some(Vec::new()));
    });
    assert_eq!(manifest.model.dsp_arch, Some(81));
    assert_eq!(
        bins(&manifest),
        [
            "tiny_decode_p0_w8.bin",
            "tiny_decode_p1_w8.bin",
            "tiny_decode_p2_w8.bin",
            "tiny_lmhead_f16.bin"
        ]
    );
    assert_eq!(manifest.plan.params["decode"], json!(["decode_p0", "decode_p1", "decode_p2"]));
    // Layers F L | F L | L L F of seven: shard 1 has layers 2 and 3.
    let info = graphs[1].info(Elem::qnn);
    let ports: Vec<_> = info.inputs.iter().chain(&info.outputs).map(ToString::to_string).collect();
    assert_eq!(
        ports,
        [
            "x f16[1, 120]",
            "cos f16[1, 6]",
            "sin f16[1, 6]",
            "cmask f16[1, 51]",
            "past_k_2 f16[1, 50, 48]",
            "past_v_2 f16[1, 50, 48]",
            "past_ssm_3 f32[9, 16, 12]",
            "past_conv_3 f16[3, 204]",
            "new_k_2 f16[1, 1, 48]",
            "new_v_2 f16[1, 1, 48]",
            "present_conv_3 f16[3, 204]",
            "present_ssm_3 f32[9, 16, 12]",
            "y f16[1, 120]",
        ],
    );
    let int8 = |graph: &Graph| {
        graph
            .tensors()
            .iter()
            .filter(|t| matches!(&t.origin, Origin::Weight(w) if w.storage() == Storage::Int8))
            .count()
    };
    // 7 attention and MLP weights in layer 2, and 6 large ones in layer 3.
    assert_eq!(int8(&graphs[1]), 7 + 6);
    assert_eq!(int8(&graphs[3]), 0);
}

/// In a tiny model whose layers have 120 inputs, and other numbers of them.
#[test]
fn every_weight_of_four_bits_has_the_form_that_its_inputs_allow() {
    let (report, manifest, graphs) = tiny("qwen35-untied", |options| {
        options.precision = Precision::W4A16;
        (options.max_ctx, options.prefill) = (Some(50), Some(Vec::new()));
    });
    // The head is int8 unless something else is asked for.
    assert_eq!(bins(&manifest), ["tiny_decode_w4.bin", "tiny_lmhead_w8.bin"]);
    let mut fallbacks = Vec::new();
    for tensor in graphs[0].tensors() {
        let Origin::Weight(weight) = &tensor.origin else { continue };
        let (name, cols, storage) = (weight.source().name(), weight.cols(), weight.storage());
        // Few outputs on which the state depends.
        let exact = name.contains("in_proj_a.") || name.contains("in_proj_b.");
        // What 4 bits harm most for its size.
        let outer = ["layers.0.mlp.down_proj", "layers.6.mlp.down_proj"];
        let wider = name.contains(".v_proj") || outer.iter().any(|outer| name.contains(outer));
        let symmetric = QuantizedForm::symmetric(Bits::Four, 32);
        let expected = match cols {
            _ if exact => Storage::Float,
            _ if cols % 32 == 0 && wider => {
                Storage::Blocks(QuantizedForm { bits: Bits::Eight, ..symmetric })
            }
            _ if cols % 32 == 0 => Storage::Blocks(QuantizedForm { offsets: true, ..symmetric }),
            _ if cols % 4 == 0 && wider => Storage::Int8,
            _ if cols % 8 == 0 => Storage::Blocks(QuantizedForm::symmetric(Bits::Four, cols)),
            _ if cols % 4 == 0 => Storage::Int8,
            _ => Storage::Float,
        };
        assert_eq!(storage, expected, "{name} with {cols} inputs");
        if !exact && cols % 32 != 0 && !(wider && cols % 8 == 0) {
            fallbacks.push((name.to_owned(), storage));
        }
    }
    // These are reported, each once.
    assert!(!fallbacks.is_empty());
    assert_eq!(report.contexts[0].wider_weights, fallbacks);
    assert_eq!(report.contexts[1].wider_weights, []);
}

#[test]
fn the_head_has_the_precision_that_is_asked_for() {
    for (precision, head, suffix) in [
        (Precision::Fp16, Some(Precision::W8A16), "w8"),
        (Precision::W8A16, None, "w8"),
        (Precision::W8A16, Some(Precision::Fp16), "f16"),
        (Precision::W4A16, None, "w8"),
        (Precision::W4A16, Some(Precision::Fp16), "f16"),
    ] {
        for model in ["llama3-tiny", "qwen35-tied", "phimoe-6", "gemma4-tiny"] {
            let (_, manifest, _) =
                tiny(model, |options| (options.precision, options.head) = (precision, head));
            let contexts = manifest.artifacts.contexts;
            let of_head = contexts.iter().find(|c| c.key.starts_with("lmhead")).unwrap();
            let file = format!("tiny_{}_{suffix}.bin", of_head.key);
            assert_eq!(of_head.bin.as_deref(), Some(file.as_str()), "{model}");
        }
    }
}

/// Beside a quantized head the table has 8 bits, with a scale for each 32 values.
#[test]
fn a_table_has_eight_bits_beside_a_quantized_head() {
    const BLOCK: usize = 32;
    let dir = tempfile::tempdir().unwrap();
    let table = |model: &str, precision: Precision| {
        let out = dir.path().join(format!("{model}-{}", precision.name()));
        let (max_ctx, prefill) = (Some(32), Some(vec![]));
        let options = ForgeOptions { precision, max_ctx, prefill, ..ForgeOptions::new(out) };
        let report = forge(&fixture(model), &options, &mut Silent).unwrap();
        let manifest = Manifest::load(&report.manifest).unwrap();
        let embed = manifest.artifacts.embed.unwrap();
        (embed.dtype, std::fs::read(manifest.root.join(embed.path)).unwrap())
    };
    let (dtype, wide) = table("llama3-blocks", Precision::Fp16);
    assert_eq!(dtype, DType::F16);
    let values = wide.len() / 2;
    for precision in [Precision::W8A16, Precision::W4A16] {
        let (dtype, bytes) = table("llama3-blocks", precision);
        assert_eq!((dtype, bytes.len()), (DType::I8, values + values / BLOCK * 2));
        let (integers, scales) = bytes.split_at(values);
        for (at, (pair, integer)) in wide.chunks_exact(2).zip(integers).enumerate() {
            let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            let (scale, expected) = (half(&scales[at / BLOCK * 2..]), half(pair));
            let found = f32::from(integer.cast_signed()) * scale;
            // Half an integer, and the rounded scale; one at the end that has no −128.
            assert!((found - expected).abs() <= 1.1 * scale.abs(), "{at}: {found}, {expected}");
        }
    }
    // Not tied.
    assert_eq!(table("qwen35-blocks", Precision::W8A16).0, DType::I8);
    // Rows that are no multiple of a block.
    assert_eq!(table("llama3-tiny", Precision::W8A16).0, DType::F16);
}

#[test]
fn contradictory_options_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let base = || ForgeOptions::new(&out);
    for (options, words) in [
        (ForgeOptions { shards: 6, ..base() }, "6 shards, expected 1 to 5"),
        (ForgeOptions { max_ctx: Some(257), ..base() }, "expected 1 to 256"),
        (ForgeOptions { max_ctx: Some(0), ..base() }, "a context of 0 tokens"),
        (ForgeOptions { name: Some("../up".to_owned()), ..base() }, "\"../up\""),
        (ForgeOptions { name: Some("tokenizer".to_owned()), ..base() }, "\"tokenizer\""),
    ] {
        let made = forge(&fixture("qwen35-tied"), &options, &mut Silent);
        assert_eq!(says(made, words).kind(), ErrorKind::Usage);
        assert_eq!(contents(dir.path()), []);
    }
}

/// A bundle of this recipe is refused, and nothing is left of it.
#[track_caller]
fn refused(
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    kind: ErrorKind,
    words: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let options = ForgeOptions::new(dir.path().join("out"));
    let made = forge_with(&fixture("qwen35-tied"), recipe, &options, &mut Silent);
    assert_eq!(says(made, words).kind(), kind);
    assert_eq!(contents(dir.path()), []);
}

#[test]
fn two_graphs_of_one_name_are_refused_with_their_contexts() {
    for name in ["decode", "Decode"] {
        let twice = |checkpoint: &Checkpoint, options: &RecipeOptions| {
            let mut built = recipe(checkpoint, options)?;
            let mut b = GraphBuilder::new(name);
            let x = b.input("x", Elem::Activation, &[1, 4])?;
            let y = b.unary(UnaryOp::Neg, x)?;
            b.output("y", y)?;
            built.contexts[1].graphs.push(b.finish()?);
            Ok(built)
        };
        refused(twice, ErrorKind::Graph, "graph \"decode\" of context \"decode\"");
        refused(twice, ErrorKind::Graph, &format!("graph {name:?} of context \"lmhead\""));
    }
}

#[test]
fn graphs_that_do_not_chain_are_refused() {
    for (elem, width, words) in [
        (Elem::F32, 136, "writes y f32[1, 136], and graph \"lmhead\" after it reads x act"),
        (Elem::Activation, 32, "graph \"decode\" writes y activation[1, 32], and graph \"lmhead\""),
    ] {
        let broken = |checkpoint: &Checkpoint, options: &RecipeOptions| {
            let mut built = recipe(checkpoint, options)?;
            let mut b = GraphBuilder::new("decode");
            let x = b.input("x", Elem::Activation, &[1, 136])?;
            let y = b.slice(x, 1, 0, width)?;
            let y = b.unary(UnaryOp::Neg, y)?;
            let y = b.cast(y, elem)?;
            b.output("y", y)?;
            built.contexts[0].graphs = vec![b.finish()?];
            Ok(built)
        };
        refused(broken, ErrorKind::Graph, words);
    }
}

#[test]
fn names_of_graphs_that_no_context_has_are_refused() {
    for (key, value, missing) in [
        ("vision", json!("visoin"), "\"visoin\""),
        ("decode", json!(["decode", "decode_p1"]), "\"decode_p1\""),
        ("ffn", json!("f*"), "\"f*\""),
        ("own", json!(["lmhead", "tail"]), "\"tail\""),
    ] {
        let broken = |checkpoint: &Checkpoint, options: &RecipeOptions| {
            let mut built = recipe(checkpoint, options)?;
            built.plan_params.insert(key.to_owned(), value.clone());
            built.plan_params.insert("note".to_owned(), json!("no graph"));
            Ok(built)
        };
        refused(broken, ErrorKind::Graph, &format!("plan.params.{key} names {missing}"));
    }
}

#[test]
fn a_manifest_that_qhx_could_not_read_is_an_error() {
    let recipe = |checkpoint: &Checkpoint, options: &RecipeOptions| {
        let mut made = recipe(checkpoint, options)?;
        made.host_op = "../op".to_owned();
        Ok(made)
    };
    refused(recipe, ErrorKind::Manifest, "the bundle that was made cannot be opened");
    refused(recipe, ErrorKind::Manifest, "\"../op\"");
}

#[test]
fn tokens_beyond_the_model_are_noted() {
    let checkpoint = copy("qwen35-tied");
    // Fewer tokens than the model has rows, one of them with a number behind these.
    edit_json(&checkpoint.path().join("tokenizer.json"), |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let last = vocab.iter().max_by_key(|(_, id)| id.as_u64()).unwrap().0.clone();
        vocab[&last] = 70_000.into();
        let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
        merges.retain(|merge| !merge.to_string().contains(&last));
    });
    let (dir, mut log) = (tempfile::tempdir().unwrap(), Log::default());
    let options = ForgeOptions { max_ctx: Some(64), ..ForgeOptions::new(dir.path().join("out")) };
    forge(checkpoint.path(), &options, &mut log).unwrap();
    let words = "tokenizer.json has 1 tokens beyond the ";
    assert!(log.notes.iter().any(|note| note.contains(words)), "{:?}", log.notes);
}

#[test]
fn a_cancelled_forge_leaves_nothing() {
    struct Stop;
    impl Progress for Stop {
        fn stage(&mut self, _what: &str, _total: u64) {}
        fn advance(&mut self, _done: u64) {}
        fn note(&mut self, _message: &str) {}
        fn cancelled(&self) -> bool {
            true
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let options = ForgeOptions::new(dir.path().join("out"));
    let error = forge(&fixture("qwen35-tied"), &options, &mut Stop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
