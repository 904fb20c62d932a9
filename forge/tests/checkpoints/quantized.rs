//! Checkpoints that other programs quantized: the graphs get their quantized values, and damaged files are refused.

use std::sync::Arc;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_exec::backend::{Backend as _, ContextSource};
use qhx_forge::recipe::{Precision, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Silent, forge, forge_checkpoint, forge_with};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, Origin};
use qhx_graph::onnx;
use qhx_graph::quantize::{Bits, Quantized, QuantizedForm};
use qhx_graph::weight::{Storage, Weight};
use qhx_paths::fixture;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use crate::common::graphs::Stored;
use crate::common::{says, set_json};
use crate::{copy, read_json, recipe_options};

/// Asserts that numbers have the hash that the other program's have.
#[track_caller]
pub(super) fn same<T: bytemuck::NoUninit + Into<f64> + Copy>(
    found: &[T],
    expected: &Value,
    what: &str,
) {
    for (index, value) in expected["first"].as_array().unwrap().iter().enumerate() {
        assert_eq!(found[index].into(), value.as_f64().unwrap(), "{what}: element {index}");
    }
    let hash: String =
        Sha256::digest(bytemuck::cast_slice(found)).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(expected["sha256"], json!(hash), "{what}: {} elements", found.len());
}

/// Asserts that a weight's quantized values are the other program's, and returns them.
#[track_caller]
fn same_blocks(weight: &Weight, form: QuantizedForm, expected: &Value, what: &str) -> Quantized {
    let blocks = weight.to_blocks(form).unwrap();
    same(&blocks.values, &expected["values"], what);
    same(&blocks.scales, &expected["scales"], what);
    assert_eq!(form.offsets, expected.get("offsets").is_some(), "{what}");
    if form.offsets {
        same(&blocks.offsets, &expected["offsets"], what);
    }
    blocks
}

/// Values that the other programs read from their files, by the names of file and tensor.
fn expected() -> serde_json::Map<String, Value> {
    let [mut all, packed] = ["expected.json", "packed.json"]
        .map(|name| read_json(&fixture(&format!("quantised/{name}"))).as_object().unwrap().clone());
    all.extend(packed);
    all
}

/// Sizes of a matrix of the fixtures.
fn shape(name: &str) -> [usize; 2] {
    let end = name.rsplit('.').nth(1).unwrap();
    match end {
        "q_proj" | "o_proj" => [64, 64],
        "k_proj" | "v_proj" => [32, 64],
        "down_proj" => [64, 96],
        "embed_tokens" => [8, 256],
        _ => [96, 64],
    }
}

fn sizes(file: &str, name: &str) -> [usize; 2] {
    if file == "kinds.gguf" { [3, 256] } else { shape(name) }
}

/// Asserts that integers, scales and offsets stand for the values, up to a part of the largest of the matrix.
#[track_caller]
pub(super) fn close(weight: &Weight, form: QuantizedForm, part: f32, what: &str) {
    let values = weight.to_f32().unwrap();
    let mut found = vec![0f32; values.len()];
    weight.to_blocks(form).unwrap().as_ref().dequantize(&mut found);
    for (row, (values, found)) in values.chunks(256).zip(found.chunks(256)).enumerate() {
        let peak = values.iter().fold(0f32, |peak, v| peak.max(v.abs()));
        for (value, found) in values.iter().zip(found) {
            assert!((value - found).abs() <= part * peak, "{what}, row {row}: {value}, {found}");
        }
    }
}

#[test]
fn imported_quantized_weights_reach_the_graphs_unchanged() {
    let expected = expected();
    let mut seen = 0;
    for (file, tensors) in &expected {
        let path = fixture(&format!("quantised/{file}"));
        // Two files have not all that a model needs, and are opened beside a configuration that is not read.
        let checkpoint = match file.as_str() {
            "q6_k.gguf" | "kinds.gguf" => {
                Checkpoint::open_gguf(&path, Some(&fixture("quantised/awq")))
            }
            _ => Checkpoint::open(&path),
        };
        let checkpoint = checkpoint.unwrap();
        for (name, expected) in tensors.as_object().unwrap() {
            let what = format!("{file}: {name}");
            let source = checkpoint.matrix(name, sizes(file, name)).unwrap();
            let form = source.block_form();
            let weight = Weight::new(source, Storage::Float);
            same(&weight.to_f32().unwrap(), &expected["real"], &what);
            let Some(form) = form else {
                assert!(expected.get("values").is_none(), "{what}");
                // Rounded to 8 bits, and not to 4.
                let nearest = weight.source().nearest_form().unwrap();
                assert_eq!(nearest, QuantizedForm::symmetric(Bits::Eight, 32), "{what}");
                assert_eq!(
                    Precision::W4A16.weight(weight.source().clone()).storage(),
                    Storage::Blocks(nearest)
                );
                close(&weight, nearest, 1.0 / 128.0, &what);
                continue;
            };
            // The offset of a block is rounded to f32, and so are its steps of nothing beside it.
            close(&weight, form, if form.offsets { 1e-6 } else { 0.0 }, &what);
            if expected.get("values").is_none() {
                continue;
            }
            same_blocks(&weight, form, expected, &what);
            seen += 1;
        }
    }
    assert_eq!(seen, 3 * 7 + 2, "quantized tensors");
}

/// The graphs of a bundle with 4-bit weights.
pub(super) fn graphs_of_four_bits(checkpoint: &Checkpoint) -> Vec<Graph> {
    let (precision, prefill) = (Precision::W4A16, Some(vec![16]));
    let options = RecipeOptions { precision, prefill, ..recipe_options(64, &[]) };
    let contexts = recipe(checkpoint, &options).unwrap().contexts;
    contexts.into_iter().flat_map(|context| context.graphs).collect()
}

pub(super) fn weights(graph: &Graph) -> impl Iterator<Item = &Weight> {
    graph.tensors().iter().filter_map(|tensor| match &tensor.origin {
        Origin::Weight(weight) => Some(weight),
        _ => None,
    })
}

/// Nothing is quantized again: graphs for the NPU have the values that the other program wrote, as have their reference
/// graphs.
#[test]
fn four_bit_bundles_keep_imported_quantized_weights() {
    let expected = expected();
    for file in ["mixed.gguf", "gptq-asym", "awq"] {
        let checkpoint = Checkpoint::open(&fixture(&format!("quantised/{file}"))).unwrap();
        let tensors = expected[file].as_object().unwrap();
        for graph in graphs_of_four_bits(&checkpoint) {
            let folder = tempfile::tempdir().unwrap();
            let reference = onnx::write(&graph, folder.path(), &mut Silent).unwrap().data.unwrap();
            let reference = std::fs::read(reference).unwrap();
            let mut seen = 0;
            for weight in weights(&graph) {
                let Some(expected) = tensors.get(weight.source().name()) else { continue };
                let what = format!("{file}, {}: {}", graph.name(), weight.source().name());
                let Storage::Blocks(form) = weight.storage() else {
                    panic!("{what} is stored as {:?}", weight.storage())
                };
                let blocks = same_blocks(weight, form, expected, &what);
                let bytes: Vec<u8> = match form.bits {
                    Bits::Eight => bytemuck::cast_slice(&blocks.values).to_vec(),
                    // Two in a byte, from 0 to 15, the first one low.
                    Bits::Four => {
                        let pairs = blocks.values.as_chunks::<2>().0.iter();
                        pairs.map(|[low, high]| (low + 8) as u8 | ((high + 8) as u8) << 4).collect()
                    }
                };
                assert!(
                    reference.windows(bytes.len()).any(|part| part == bytes),
                    "{what}: the reference graph"
                );
                seen += 1;
            }
            let layers = if graph.name() == "lmhead" { 0 } else { 7 };
            assert_eq!(seen, layers, "{file}, {}", graph.name());
        }
    }
}

/// The CPU reads what the NPU would, give or take scales of f32, and a byte for each weight of 4 bits in rows that are
/// no multiple of 32: as f32 weights were 4 bytes each and more, as int8 with a scale for each 32 1.125.
#[track_caller]
pub(super) fn stays_quantized(graph: &Graph, what: &str) {
    let folder = tempfile::tempdir().unwrap();
    onnx::write(graph, folder.path(), &mut Silent).unwrap();
    let path = folder.path().join(format!("{}.onnx", graph.name()));
    let onnx = vec![(graph.name().to_owned(), path)];
    let source = ContextSource { key: "quantized".to_owned(), onnx, ..ContextSource::default() };
    let backend = qhx_cpu::CpuBackend::new(qhx_cpu::CpuOptions::exact()).unwrap();
    let found = backend.open_context(&source).unwrap().resident_bytes();
    let bytes = |weight: &Weight| match weight.cols().is_multiple_of(32) {
        true => weight.qnn_bytes(),
        false => weight.qnn_bytes().max((weight.rows() * weight.cols()) as u64),
    };
    let stored: u64 = weights(graph).map(bytes).sum();
    assert!(found <= stored + stored / 2 + 4096, "{what}: {found} bytes, and {stored} are stored");
}

#[test]
fn the_cpu_reads_every_form_of_weights_as_it_is_stored() {
    // The others do not have all that a model needs.
    for file in ["mixed.gguf", "gptq-asym", "awq"] {
        let checkpoint = Checkpoint::open(&fixture(&format!("quantised/{file}"))).unwrap();
        for graph in graphs_of_four_bits(&checkpoint) {
            stays_quantized(&graph, &format!("{file}, {}", graph.name()));
        }
    }
    let blocks = |bits, block, offsets| Some(QuantizedForm { bits, block, offsets });
    let mut cases: Vec<(usize, Precision, Option<QuantizedForm>)> = vec![
        (128, Precision::W4A16, blocks(Bits::Four, 32, false)),
        (128, Precision::W4A16, blocks(Bits::Four, 32, true)),
        (128, Precision::W8A16, blocks(Bits::Four, 64, true)),
        (128, Precision::W4A16, blocks(Bits::Four, 128, false)),
        (128, Precision::W8A16, blocks(Bits::Eight, 32, false)),
        (128, Precision::W4A16, blocks(Bits::Eight, 64, false)),
    ];
    for inputs in [128, 72, 68, 33] {
        cases.extend(Precision::ALL.map(|precision| (inputs, precision, None)));
    }
    for (inputs, precision, form) in cases {
        for rows in [1, 20] {
            let shape = [512, inputs];
            let mut b = GraphBuilder::new("quantized");
            let x = b.input("x", Elem::Activation, &[rows, inputs]).unwrap();
            let weight = precision.weight(Arc::new(Stored { shape, form }));
            let y = b.linear("held", x, weight, None).unwrap();
            b.output("y", y).unwrap();
            let what = format!("{inputs} inputs in {precision:?}, stored as {form:?}, {rows} rows");
            stays_quantized(&b.finish().unwrap(), &what);
        }
    }
}

/// A copy of a tiny model whose linear layers are stored as GPTQ stores them, with arbitrary values, and the names of
/// these layers.
pub(super) fn as_gptq(model: &str) -> (TempDir, Vec<(String, [usize; 2])>) {
    let dir = copy(model);
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let (mut layers, mut stored) = (Vec::new(), Vec::new());
    let mut state = 1u32;
    let mut words = |count: usize| -> Vec<u8> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.rotate_left(13).to_le_bytes()
        };
        (0..count).flat_map(|_| next()).collect()
    };
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        // Projections of few outputs, which the forge keeps in f16, cannot be packed either.
        let packs =
            name.contains("_proj") && !name.contains("in_proj_a") && !name.contains("in_proj_b");
        match (name.strip_suffix(".weight").filter(|_| packs), view.shape()) {
            (Some(layer), &[outputs, inputs]) => {
                let groups = inputs / 32;
                let scales =
                    (0..groups * outputs).flat_map(|i| [0, 0x20 + (i % 7) as u8]).collect();
                for (end, dtype, shape, data) in [
                    ("qweight", Dtype::I32, vec![inputs / 8, outputs], words(inputs / 8 * outputs)),
                    ("qzeros", Dtype::I32, vec![groups, outputs / 8], words(groups * outputs / 8)),
                    ("scales", Dtype::F16, vec![groups, outputs], scales),
                ] {
                    stored.push((format!("{layer}.{end}"), dtype, shape, data));
                }
                layers.push((name, [outputs, inputs]));
            }
            _ => stored.push((name, view.dtype(), view.shape().to_vec(), view.data().to_vec())),
        }
    }
    let views = stored.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    let form = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"});
    set_json(&dir.path().join("config.json"), "quantization_config", form);
    (dir, layers)
}

/// In each family whose tiny model has inputs for it, whatever its recipe does with the rows of a layer.
#[test]
fn every_recipe_keeps_imported_quantized_weights() {
    for model in ["llama3-blocks", "qwen35-blocks", "phimoe-blocks"] {
        let (dir, layers) = as_gptq(model);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let graphs = graphs_of_four_bits(&checkpoint);
        for (name, shape) in layers {
            let source = checkpoint.matrix(&name, shape).unwrap();
            let form = source.block_form().unwrap();
            let stored = Weight::new(source, Storage::Blocks(form)).to_blocks(form).unwrap();
            let stored: Vec<_> = stored.values.chunks_exact(shape[1]).collect();
            let mut rows = 0;
            for weight in graphs.iter().flat_map(weights).filter(|w| w.source().name() == name) {
                assert_eq!(weight.storage(), Storage::Blocks(form), "{model}: {name}");
                let kept = weight.to_blocks(form).unwrap();
                for row in kept.values.chunks_exact(shape[1]) {
                    assert!(stored.contains(&row), "{model}: {name} was quantized again");
                    rows += 1;
                }
            }
            assert!(rows >= shape[0], "{model}: {name}, {rows} rows");
        }
    }
}

/// A GGUF file in a folder of its own, with a tokenizer.
fn file() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("quantised/mixed.gguf"), dir.path().join("model.gguf")).unwrap();
    std::fs::copy(fixture("llama3-tiny/tokenizer.json"), dir.path().join("tokenizer.json"))
        .unwrap();
    dir
}

#[test]
fn a_gguf_file_says_of_itself_what_a_recipe_needs() {
    let dir = file();
    let checkpoint = Checkpoint::open(&dir.path().join("model.gguf")).unwrap();
    let mut derived = checkpoint.config().clone();
    // Of the same weights, and with a configuration beside them.
    let folder = Checkpoint::open(&fixture("quantised/gptq-asym")).unwrap();
    let mut written = folder.config().clone();
    for key in ["head_dim", "attention_bias", "quantization_config"] {
        derived.as_object_mut().unwrap().remove(key);
        written.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(derived, written);
    assert_eq!(checkpoint.config()["head_dim"], json!(16));
    assert_eq!(recipe(&checkpoint, &recipe_options(64, &[])).unwrap().family, "llama");
}

#[test]
fn a_gguf_file_becomes_a_bundle_of_its_name() {
    let dir = file();
    let path = dir.path().join("model.gguf");
    let out = dir.path().join("bundle");
    let options = ForgeOptions { max_ctx: Some(32), ..ForgeOptions::new(&out) };
    let report = forge(&path, &options, &mut Silent).unwrap();
    assert_eq!(report.manifest, out.join("model.json"));
    // A bundle beside the file is not taken for a part of a checkpoint.
    let options = ForgeOptions { overwrite: true, ..options };
    forge(&path, &options, &mut Silent).unwrap();

    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    says(forge(&path, &options, &mut Silent), "--tokenizer");
    let beside = Checkpoint::open_gguf(&path, Some(&fixture("quantised/gptq-asym"))).unwrap();
    let made = forge_checkpoint(&beside, recipe, &options, &mut Silent);
    let error = says(made, "tokenizer.json: missing");
    // The folder was named already.
    let hint = error.hint_text().unwrap();
    assert!(hint.contains("quantised/gptq-asym") && !hint.contains("--tokenizer"), "{hint}");
}

#[test]
fn a_q8_0_embedding_table_is_f16_in_the_bundle() {
    let dir = file();
    let path = dir.path().join("model.gguf");
    // Its f16 bytes read as blocks of Q8_0: whatever they are, each begins with a scale that is a weight.
    let bytes =
        edited("token_embd.weight", |entry| entry[20..24].copy_from_slice(&8u32.to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
    let out = dir.path().join("bundle");
    let options = ForgeOptions { max_ctx: Some(32), ..ForgeOptions::new(&out) };
    let report = forge(&path, &options, &mut Silent).unwrap();
    let manifest = read_json(&report.manifest);
    let table = manifest["artifacts"]["embed"].as_str().expect("a table of f16");
    assert_eq!(std::fs::metadata(out.join(table)).unwrap().len(), 48 * 64 * 2);
}

#[test]
fn quantized_embedding_tables_are_f16_in_the_bundle() {
    let of = |folder: &str| {
        let checkpoint = Checkpoint::open(&fixture(&format!("quantised/{folder}"))).unwrap();
        checkpoint.matrix("layers.0.mlp.gate_proj.weight", [96, 64]).unwrap()
    };
    let kinds = fixture("quantised/kinds.gguf");
    let kinds = Checkpoint::open_gguf(&kinds, Some(&fixture("quantised/awq"))).unwrap();
    let tables = [
        ("awq", of("awq")),
        ("fp8", of("fp8-block")),
        ("compressed-tensors", of("compressed")),
        ("Q4_K", kinds.matrix("layers.4.mlp.up_proj.weight", [3, 256]).unwrap()),
    ];
    let dir = file();
    for (form, table) in tables {
        let out = dir.path().join(form);
        let options = ForgeOptions {
            max_ctx: Some(32),
            ignore_tensors: vec!["embed_tokens".to_owned()],
            ..ForgeOptions::new(&out)
        };
        let [rows, cols] = table.shape();
        let with = |checkpoint: &Checkpoint, wanted: &RecipeOptions| {
            Ok(recipe(checkpoint, wanted)?.embed(Arc::clone(&table)))
        };
        let report =
            forge_with(&dir.path().join("model.gguf"), with, &options, &mut Silent).unwrap();
        let manifest = read_json(&report.manifest);
        let path = manifest["artifacts"]["embed"].as_str().expect(form);
        let bytes = std::fs::read(out.join(path)).unwrap();
        let mut values = vec![0f32; rows * cols];
        table.read_f32(0, &mut values).unwrap();
        let expected: Vec<u8> =
            values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
        assert!(bytes == expected, "{form}");
    }
}

/// Bytes of a GGUF file of which the tensor `name` has another entry: `edit` gets its number of dimensions, the sizes,
/// type and offset.
fn edited(name: &str, edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = std::fs::read(fixture("quantised/mixed.gguf")).unwrap();
    let name = name.as_bytes();
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    edit(&mut bytes[at..at + 4 + 16 + 4 + 8]);
    bytes
}

fn opened(bytes: &[u8]) -> Result<Checkpoint, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path)
}

#[test]
fn gguf_files_that_cannot_be_read_say_why() {
    let down = "blk.0.ffn_down.weight";
    let kind = |kind: u32| edited(down, |e| e[20..24].copy_from_slice(&kind.to_le_bytes()));
    let size = |n: u64| edited(down, |e| e[4..12].copy_from_slice(&n.to_le_bytes()));
    let whole = std::fs::read(fixture("quantised/mixed.gguf")).unwrap();
    let header = |at: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    let named = |from: &str, to: &str| {
        let mut bytes = whole.clone();
        let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    let large = u64::MAX - 63;
    for (bytes, words) in [
        (kind(16), "blk.0.ffn_down.weight is stored as IQ2_XXS, expected F32, F16"),
        (kind(16), "llama-quantize"),
        (kind(12), "rows of 96, expected a multiple of 256"),
        (kind(99), "ggml's type 99"),
        (size(95), "rows of 95, expected a multiple of 32"),
        (size(1 << 39), "lies beyond its end"),
        (size(u64::MAX), "a dimension of 18446744073709551615"),
        (edited(down, |e| e[24..].copy_from_slice(&large.to_le_bytes())), "lies beyond its end"),
        (edited(down, |e| e[..4].copy_from_slice(&9u32.to_le_bytes())), "has 9 dimensions"),
        (header(8, u64::MAX), "18446744073709551615 tensors"),
        (header(16, 1 << 40), "1099511627776 keys"),
        (header(24, u64::MAX), "ends within its table"),
        (named("ffn_gate", "ffn_down"), "is there twice"),
        (named("llama.block_count", "llama.block_numbr"), "no number llama.block_count"),
        (named("llama.block_count", "llama.block_numbr"), "--tokenizer"),
        (named("GGUF", "GGML"), "does not begin with"),
        (vec![], "ends within its table"),
        (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "Git LFS pointer"),
    ] {
        assert_eq!(says(opened(&bytes), words).kind(), ErrorKind::Artifact);
    }
    // Truncated anywhere in its tables, or with any byte of them changed: an answer, and no panic.
    let tables = 1900;
    for length in (0..tables).step_by(7) {
        assert!(opened(&whole[..length]).is_err(), "the first {length} bytes are no file");
    }
    for at in (0..tables).step_by(5) {
        let mut bytes = whole.clone();
        bytes[at] = bytes[at].wrapping_add(0x81);
        let _ = opened(&bytes);
    }
}

#[test]
fn gguf_files_of_other_models_name_what_is_read() {
    let mut bytes = std::fs::read(fixture("quantised/mixed.gguf")).unwrap();
    let key = b"general.architecture";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 12;
    bytes[at..at + 5].copy_from_slice(b"mamba");
    says(opened(&bytes), "\"mamba\" are not read, expected llama, qwen2");
}
