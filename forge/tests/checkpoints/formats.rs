//! Quantized safetensors of other programs: values are those that each program reads from its own files, graphs keep
//! what they can hold, and damaged files are refused.

use std::path::Path;

use qhx_base::ErrorKind;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::Precision;
use qhx_forge::{ForgeOptions, forge};
use qhx_graph::graph::Op;
use qhx_graph::quantize::{Bits, QuantizedForm};
use qhx_graph::weight::{Storage, Weight};
use qhx_paths::fixture;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::quantized::{close, graphs_of_four_bits, same, stays_quantized, weights};
use crate::common::{Log, copy, edit_header, edit_tensor, read_json, says, set_json};

/// The programs' own values, by folder.
fn formats() -> serde_json::Map<String, Value> {
    let read = read_json(&fixture("quantised/formats.json"));
    read.as_object().unwrap().clone()
}

fn opened(folder: &str) -> Checkpoint {
    Checkpoint::open(&fixture(&format!("quantised/{folder}"))).unwrap()
}

/// A form of integers, of the folder or of one of its layers.
const fn form(bits: Bits, block: usize, offsets: bool) -> Option<QuantizedForm> {
    Some(QuantizedForm { bits, block, offsets })
}

/// Form that a bundle of integers keeps of a layer: by folder and, after a space, the end of a name.
fn kept(folder: &str, layer: &str) -> Option<QuantizedForm> {
    match (folder, layer) {
        ("gptq-2" | "gptq-3" | "compressed" | "awq-gemv", _) => form(Bits::Four, 32, true),
        ("gptq-8", _) => form(Bits::Eight, 32, true),
        ("awq-marlin", _) => form(Bits::Four, 32, false),
        ("awq-marlin-rows", _) => form(Bits::Four, 96, false),
        ("mxfp4", _) => form(Bits::Eight, 32, false),
        ("fp4-int8", "down_proj") => form(Bits::Eight, 96, false),
        ("compressed-mixed", "q_proj") => form(Bits::Four, 64, false),
        ("compressed-mixed", "k_proj" | "v_proj") => form(Bits::Eight, 64, true),
        ("compressed-mixed", "o_proj") => form(Bits::Eight, 64, false),
        _ => None,
    }
}

/// Form that a bundle of integers rounds a layer to if it cannot keep it; none where that is any floating point's form.
fn rounded(folder: &str, layer: &str) -> Option<QuantizedForm> {
    match (folder, layer) {
        ("nf4", "down_proj") | ("gptq-act" | "compressed-mixed", "down_proj") => {
            form(Bits::Eight, 32, false)
        }
        ("nf4" | "fp4-int8", _) => form(Bits::Eight, 64, false),
        ("gptq-act", _) => form(Bits::Eight, 32, false),
        _ => None,
    }
}

#[test]
fn values_are_those_that_each_program_reads() {
    let mut seen = 0;
    for (folder, record) in formats() {
        let checkpoint = opened(&folder);
        for (name, expected) in record["tensors"].as_object().unwrap() {
            let what = format!("{folder}: {name}");
            let sizes: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
            let source = match *sizes {
                [rows, cols] => checkpoint.matrix(name, [rows, cols]).unwrap(),
                [stack, rows, cols] => checkpoint.stack(name, [stack, rows, cols]).unwrap(),
                _ => panic!("{what}: {sizes:?}"),
            };
            let weight = Weight::new(source, Storage::Float);
            let found = weight.to_f32().unwrap();
            if expected["exact"] == json!(true) || !name.contains("down_proj") {
                same(&found, &expected["real"], &what);
            } else {
                // Two factors in another order: one step of f32.
                for (found, value) in
                    found.iter().zip(expected["real"]["first"].as_array().unwrap())
                {
                    let value = value.as_f64().unwrap() as f32;
                    assert!((found - value).abs() <= value.abs() * f32::EPSILON, "{what}");
                }
            }
            let layer = name.trim_end_matches(".weight").rsplit('.').next().unwrap();
            let source = weight.source();
            assert_eq!(source.block_form(), kept(&folder, layer), "{what}");
            if let Some(form) = source.block_form() {
                close(&weight, form, 0.0, &what);
            } else {
                assert_eq!(source.nearest_form(), rounded(&folder, layer), "{what}");
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 7 * 7 + 1 + 4 * 3, "tensors");
}

/// Each layer of a whole model is one weight of its graph, stored in the form of its own or the nearest.
#[test]
fn four_bit_bundles_keep_what_graphs_can_hold() {
    for folder in ["awq-gemv", "compressed", "compressed-mixed", "mxfp4", "nf4", "fp8-block"] {
        let checkpoint = opened(folder);
        checkpoint.leave_out("layers.0.mlp.experts");
        for graph in graphs_of_four_bits(&checkpoint) {
            for weight in weights(&graph).filter(|weight| weight.source().name().contains("_proj"))
            {
                let layer =
                    weight.source().name().trim_end_matches(".weight").rsplit('.').next().unwrap();
                let form = kept(folder, layer).or(rounded(folder, layer));
                let rows = form == form_of_rows(weight);
                match form {
                    // int8 with a scale for each output keeps scales of f32.
                    Some(_) if rows => {
                        assert_eq!(weight.storage(), Storage::Int8, "{folder}: {layer}")
                    }
                    Some(form) => {
                        assert_eq!(weight.storage(), Storage::Blocks(form), "{folder}: {layer}")
                    }
                    None => {
                        let usual = Precision::W4A16.weight(
                            opened("fp8-block")
                                .matrix("model.layers.0.mlp.up_proj.weight", [96, 64])
                                .unwrap(),
                        );
                        assert_eq!(weight.storage(), usual.storage(), "{folder}: {layer}");
                    }
                }
            }
            stays_quantized(&graph, &format!("{folder}, {}", graph.name()));
        }
    }
}

fn form_of_rows(weight: &Weight) -> Option<QuantizedForm> {
    form(Bits::Eight, weight.cols(), false)
}

/// Inputs in an order of their own: integers are kept, and what they are multiplied by follows. Between the projections
/// of an MLP nothing has to: the outputs before take the order.
#[test]
fn inputs_ordered_by_activation_keep_their_integers() {
    let checkpoint = opened("gptq-act");
    let graphs = graphs_of_four_bits(&checkpoint);
    for graph in graphs.iter().filter(|graph| graph.name() != "lmhead") {
        let mut seen = 0;
        for weight in weights(graph).filter(|weight| weight.source().name().contains("_proj")) {
            let form = QuantizedForm { bits: Bits::Four, block: 32, offsets: true };
            assert_eq!(weight.storage(), Storage::Blocks(form), "{}", weight.source().name());
            assert_eq!(weight.source().block_form(), Some(form));
            seen += 1;
        }
        let gathers = graph.nodes().iter().filter(|node| node.op == Op::Gather).count();
        assert_eq!(
            (seen, gathers),
            (7, 6),
            "{}: q, k, v, o, gate and up, and not down",
            graph.name()
        );
    }
}

#[test]
fn one_order_of_inputs_is_brought_about_once() {
    let dir = copy("quantised/gptq-act");
    // As GPTQ writes them: projections of the same rows have the same order.
    let mut order = Vec::new();
    edit_tensor(dir.path(), "self_attn.q_proj.g_idx", |_, bytes| order = bytes.to_vec());
    for other in ["self_attn.k_proj.g_idx", "self_attn.v_proj.g_idx"] {
        edit_tensor(dir.path(), other, |_, bytes| bytes.copy_from_slice(&order));
    }
    let graphs = graphs_of_four_bits(&Checkpoint::open(dir.path()).unwrap());
    for graph in graphs.iter().filter(|graph| graph.name() != "lmhead") {
        let gathers = graph.nodes().iter().filter(|node| node.op == Op::Gather).count();
        assert_eq!(gathers, 4, "{}: q with k and v, o, gate, up", graph.name());
    }
}

#[track_caller]
fn refused(dir: &Path, words: &str) {
    assert_eq!(says(Checkpoint::open(dir), words).kind(), ErrorKind::Artifact);
}

#[test]
fn configurations_that_cannot_be_read_say_why() {
    for (folder, cases) in [
        (
            "gptq-sym",
            &[
                ("quant_method", json!("quip"), "is \"quip\", expected \"gptq\", \"awq\""),
                ("bits", json!(5), "bits is 5, expected 2, 3, 4 or 8"),
                ("group_size", json!(48), "group_size is 48, expected a multiple of 32"),
                ("group_size", json!(64), "96 inputs in groups of 64"),
                ("group_size", json!(-1), "down_proj.qzeros has the shape [3, 8], expected [1, 8]"),
                ("bits", json!(8), "48 inputs in groups of 32"),
                ("checkpoint_format", json!("marlin"), "\"marlin\", expected \"gptq\""),
                ("dynamic", json!({"+:.*down.*": {"bits": 8}}), "gives layers (+:.*down.*)"),
            ][..],
        ),
        (
            "awq",
            &[
                ("version", json!("gemv_fast"), "version is \"gemv_fast\", expected"),
                ("bits", json!(3), "bits is 3, expected 4"),
                ("version", json!("marlin"), "expected a multiple of 64, and no"),
            ],
        ),
        (
            "compressed",
            &[
                ("format", json!("marlin-24"), "format is \"marlin-24\", expected one of"),
                ("sparsity_config", json!({"format": "sparse-24-bitmask"}), "sparsity_config is"),
                ("transform_config", json!({"config_groups": {"R4": {}}}), "weights are rotated"),
                ("ignore", json!(["re:.*down_proj"]), "quantization_config ignores it: re:.*down"),
                ("ignore", json!(["re:(*"]), "\"re:(*\" is no regular expression"),
                ("config_groups.group_0.targets", json!(["lm_head"]), "it is no target of the"),
                ("config_groups.group_0.weights.num_bits", json!(9), "is 9, expected 1 to 8"),
                ("config_groups.group_0.weights.num_bits", json!(3), "words a row, expected"),
                ("config_groups.group_0.weights.group_size", json!(40), "of 40, expected a multi"),
            ],
        ),
        ("fp8-block", &[("weight_block_size", json!([128]), "is [128], expected two numbers")]),
    ] {
        for (keys, value, words) in cases {
            let dir = copy(&format!("quantised/{folder}"));
            let keys = format!("quantization_config.{keys}");
            set_json(&dir.path().join("config.json"), &keys, value.clone());
            refused(dir.path(), words);
        }
    }
}

#[test]
fn tensors_that_do_not_fit_say_why() {
    // A tensor of down_proj, and another name or shape of it.
    for (folder, tensor, change, words) in [
        ("gptq-sym", "scales", json!("scale"), "down_proj.qweight is there without"),
        ("gptq-3", "g_idx", json!([48, 2]), "is I32 of the shape [48, 2], expected I32 of [96]"),
        ("awq-gemv", "qzeros", json!([128, 2]), "qzeros has the shape [128, 2], expected [64"),
        ("compressed", "weight_shape", json!("weight_shapes"), "is there without"),
        ("compressed", "weight_scale", json!("weight_scales"), "is there without"),
        ("compressed", "weight_zero_point", json!("weight_global_scale"), "NVFP4 is not read"),
        ("compressed", "weight_zero_point", json!([3, 8]), "expected I8 of [64, 3], or I32"),
        ("fp8-block", "weight_scale_inv", json!([2, 1]), "expected [1, 2]: blocks of 64 by 64"),
        ("fp8-scale", "weight_scale", json!("weights_scale"), "stored as F8_E4M3"),
        ("nf4", "weight.quant_map", json!("weight.map"), "is there without"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", json!("weight.state"), "is there without"),
        ("nf4", "weight.absmax", json!([48, 2]), "absmax has the shape [48, 2], expected [96]"),
        ("fp4-int8", "SCB", json!([32, 2]), "SCB has the shape [32, 2], expected [64]"),
        ("mxfp4", "weight_scales", json!([96, 2]), "[96, 2], expected [64, 3]"),
    ] {
        let dir = copy(&format!("quantised/{folder}"));
        edit_header(&dir.path().join("model.safetensors"), |header| {
            let header = header.as_object_mut().unwrap();
            let end = format!("down_proj.{tensor}");
            let name = header.keys().find(|name| name.ends_with(&end)).unwrap().clone();
            if let Some(new) = change.as_str() {
                let removed = header.remove(&name).unwrap();
                header.insert(name.replace(tensor, new), removed);
            } else {
                header[&name]["shape"] = change;
            }
        });
        // Of this one the file is read, and the tensor is not.
        if words.starts_with("stored as") {
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            says(checkpoint.matrix("layers.0.mlp.down_proj.weight", [64, 96]), words);
            continue;
        }
        refused(dir.path(), words);
    }
}

/// The bytes of a tensor whose name ends so are made those that `edit` makes of them.
fn edited(folder: &str, end: &str, edit: impl FnOnce(&mut [u8])) -> TempDir {
    let dir = copy(&format!("quantised/{folder}"));
    edit_tensor(dir.path(), end, |_, bytes| edit(bytes));
    dir
}

#[test]
fn orders_that_are_no_permutation_are_refused() {
    let order = |edit: fn(&mut [u8])| edited("gptq-act", "down_proj.g_idx", edit);
    refused(
        order(|bytes| bytes[..4].copy_from_slice(&7i32.to_le_bytes())).path(),
        "input 0 is of group 7, expected 0 to 2",
    );
    refused(
        order(|bytes| bytes[..4].copy_from_slice(&(-1i32).to_le_bytes())).path(),
        "input 0 is of group -1",
    );
    refused(
        order(|bytes| bytes.fill(0)).path(),
        "group 0 has 96 inputs, expected 32: this is no permutation",
    );
    // All -1: no order was written.
    let dir = order(|bytes| bytes.fill(0xff));
    let source = Checkpoint::open(dir.path())
        .unwrap()
        .matrix("layers.0.mlp.down_proj.weight", [64, 96])
        .unwrap();
    assert!(source.block_form().is_some() && source.reordered().is_none());
}

#[test]
fn numbers_that_are_none_are_refused_by_name() {
    let nan = |bytes: &mut [u8]| bytes[..4].copy_from_slice(&[0xff; 4]);
    for (folder, end) in [
        ("gptq-3", "down_proj.scales"),
        ("compressed", "down_proj.weight_scale"),
        ("fp8-block", "down_proj.weight_scale_inv"),
        ("fp8-block", "down_proj.weight"),
        ("nf4", "down_proj.weight.nested_absmax"),
        ("nf4", "down_proj.weight.quant_map"),
        ("mxfp4", "down_proj.weight_scales"),
    ] {
        let name = "model.layers.0.mlp.down_proj.weight";
        let dir = edited(folder, end, nan);
        let source = Checkpoint::open(dir.path()).unwrap().matrix(name, [64, 96]).unwrap();
        let weight = Precision::W4A16.weight(source);
        says(weight.to_int8(), name);
        let error = says(weight.to_f32(), "down_proj.weight: element");
        assert_eq!(error.kind(), ErrorKind::Artifact, "{folder}: {error}");
    }
}

/// Cut short anywhere, or with any byte of the header changed: an answer, and no panic.
#[test]
fn damaged_files_are_no_panic() {
    for folder in ["compressed-mixed", "fp4-int8", "gptq-3", "awq-gemv", "mxfp4"] {
        let dir = copy(&format!("quantised/{folder}"));
        let path = dir.path().join("model.safetensors");
        let whole = std::fs::read(&path).unwrap();
        for length in (0..whole.len()).step_by(whole.len() / 9) {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(Checkpoint::open(dir.path()).is_err(), "{folder}: {length} bytes");
        }
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        for at in (8..8 + header).step_by(11) {
            let mut bytes = whole.clone();
            bytes[at] = bytes[at].wrapping_add(1);
            std::fs::write(&path, bytes).unwrap();
            let Ok(checkpoint) = Checkpoint::open(dir.path()) else { continue };
            if let Ok(source) = checkpoint.matrix("layers.0.mlp.down_proj.weight", [64, 96]) {
                let _ = Precision::W4A16.weight(source).to_f32();
            }
        }
    }
}

#[test]
fn the_forge_says_what_it_rounds() {
    let notes = |folder: &str, precision| {
        let dir = copy(&format!("quantised/{folder}"));
        std::fs::copy(fixture("quantised/tokenizer.json"), dir.path().join("tokenizer.json"))
            .unwrap();
        let options = ForgeOptions {
            max_ctx: Some(16),
            prefill: Some(vec![]),
            precision,
            ..ForgeOptions::new(dir.path().join("bundle"))
        };
        let mut log = Log::default();
        forge(dir.path(), &options, &mut log).unwrap();
        log.notes.join("\n")
    };
    for (folder, words) in [
        ("nf4", "NF4 to int8 (6), NF4 to int8 in blocks of 32 (1); all others keep"),
        (
            "compressed-mixed",
            "FP8 e4m3 to int8 in blocks of 32 (2), compressed-tensors to int8 in blocks of 32 (1)",
        ),
        ("fp8-block", "FP8 e4m3 to int8 in blocks of 32 (7)"),
    ] {
        let found = notes(folder, Precision::W8A16);
        assert!(found.contains(words), "{folder}: {found:?} does not say {words:?}");
    }
    assert!(!notes("gptq-act", Precision::W8A16).contains("rounded"));
    assert!(notes("gptq-act", Precision::Fp16).contains("dequantized to f16"));
}
