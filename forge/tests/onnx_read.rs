//! Graphs in the metadata of ONNX files: what is read back, and what is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};

use qhx_checkpoint::Checkpoint;
use qhx_forge::Silent;
use qhx_forge::recipe::{Precision, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, Origin, TensorId};
use qhx_graph::onnx::{read, write, write_all};
use qhx_graph::weight::{Storage, Weight};
use qhx_paths::fixture;

/// Everything that a compiler reads of a weight.
fn numbers(weight: &Weight) -> String {
    let numbers = match weight.storage() {
        Storage::Float => format!("{:?}", weight.to_f16().unwrap()),
        Storage::Int8 => format!("{:?}", weight.to_int8().unwrap()),
        Storage::Blocks(form) => format!("{:?}", weight.to_blocks(form).unwrap()),
    };
    format!("{:?} {numbers}", weight.storage())
}

fn assert_same(found: &Graph, expected: &Graph) {
    assert_eq!(found.name(), expected.name());
    for (found, expected) in found.tensors().iter().zip(expected.tensors()) {
        assert_eq!(found.to_string(), expected.to_string());
        match (&found.origin, &expected.origin) {
            (Origin::Weight(found), Origin::Weight(expected)) => {
                assert!(numbers(found) == numbers(expected), "{}", expected.source().name());
            }
            (found, expected) => assert_eq!(format!("{found:?}"), format!("{expected:?}")),
        }
    }
    let list = |graph: &Graph| {
        let ids = |ids: &[TensorId]| -> Vec<_> { ids.iter().map(|id| id.index()).collect() };
        let nodes = graph.nodes().iter().map(|node| {
            (node.name.clone(), node.op.clone(), ids(&node.inputs), node.output.index())
        });
        let ends = (ids(graph.inputs()), ids(graph.outputs()), graph.tensors().len());
        (nodes.collect::<Vec<_>>(), ends)
    };
    assert_eq!(list(found), list(expected));
}

#[test]
fn graphs_are_read_back_with_the_very_numbers() {
    for (name, precision) in [
        ("qwen35-tied", Precision::Fp16),
        ("qwen35-tied", Precision::W8A16),
        ("qwen35-tied", Precision::W4A16),
        ("quantised/gptq-asym", Precision::W4A16),
        ("phimoe-6", Precision::W8A16),
        ("gemma4-tiny", Precision::Fp16),
        ("qwen3vl-tiny", Precision::Fp16),
    ] {
        let path = fixture(name);
        let images = (name == "qwen3vl-tiny").then(|| ("image-size".to_owned(), "48".to_owned()));
        let choices = images.into_iter().collect();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options =
            RecipeOptions { precision, shards: 1, max_ctx: 32, choices, ..Default::default() };
        let recipe = recipe(&checkpoint, &options).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for context in &recipe.contexts {
            let graphs: Vec<&Graph> = context.graphs.iter().collect();
            write_all(&graphs, folder.path(), &mut Silent).unwrap();
            for graph in graphs {
                let file = folder.path().join(format!("{}.onnx", graph.name()));
                assert_same(&read(&file, folder.path()).unwrap(), graph);
            }
        }
    }
}

#[test]
fn scales_of_blocks_take_as_few_bytes_as_lose_nothing() {
    let awq = fixture("quantised/awq");
    let kinds = Checkpoint::open_gguf(&fixture("quantised/kinds.gguf"), Some(&awq)).unwrap();
    let awq = Checkpoint::open(&awq).unwrap();
    // Those of GGUF's Q4_K are multiples, which have more bits than f16.
    for (checkpoint, name, shape, suffixes) in [
        (awq, "layers.0.mlp.gate_proj.weight", [96, 64], [".scale.f16", ".offset.f16"]),
        (kinds, "layers.4.mlp.up_proj.weight", [3, 256], [".units", ".multiples"]),
    ] {
        let weight = Precision::W4A16.weight(checkpoint.matrix(name, shape).unwrap());
        assert!(matches!(weight.storage(), Storage::Blocks(_)), "{weight:?}");
        let mut b = GraphBuilder::new("scales");
        let x = b.input("x", Elem::Activation, &[1, shape[1]]).unwrap();
        let y = b.linear("matmul", x, weight, None).unwrap();
        b.output("y", y).unwrap();
        let graph = b.finish().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let model = write(&graph, folder.path(), &mut Silent).unwrap().model;
        let bytes = std::fs::read(&model).unwrap();
        for suffix in suffixes.map(str::as_bytes) {
            assert!(bytes.windows(suffix.len()).any(|part| part == suffix), "{name}");
        }
        assert_same(&read(&model, folder.path()).unwrap(), &graph);
    }
}

/// A small model in `folder`.
fn model(folder: &Path) -> PathBuf {
    let mut b = GraphBuilder::new("small");
    let x = b.input("x", Elem::Activation, &[2, 4]).unwrap();
    let bias = b.constant("c", Elem::Activation, &[1, 4], vec![1.0, 2.0, 3.0, 4.0]).unwrap();
    let y = b.add(x, bias).unwrap();
    let y = b.clamp(y, f32::NEG_INFINITY, 0.1).unwrap();
    b.output("y", y).unwrap();
    write(&b.finish().unwrap(), folder, &mut Silent).unwrap().model
}

#[test]
fn a_changed_graph_is_refused_with_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let file = model(folder.path());
    read(&file, folder.path()).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    // Of equal length, so that the messages around stay whole.
    for (from, to, words) in [
        (r#""version":2"#, r#""version":9"#, "has version 9, expected 2"),
        (r#""inputs":[0,1]"#, r#""inputs":[0,9]"#, "tensor 9 is read before it is written"),
        (r#""inputs":[0,1]"#, r#""inputs":[0,2]"#, "tensor 2 is read before it is written"),
        (r#""inputs":[0,1]"#, r#""inputs":[ 0 ]"#, "another number of inputs"),
        (r#""shape":[2,4]"#, r#""shape":[2,5]"#, "expected"),
        (r#""shape":[1,4]"#, r#""shape":[1,3]"#, "16 bytes, expected 3 times 4"),
        (r#""outputs":[3]"#, r#""outputs":[1]"#, "expected the output of a node"),
        (r#""outputs":[3]"#, r#""outputs":[7]"#, "tensor 7"),
        (r#""name":"x""#, r#""name":"y""#, "the name is taken"),
        (r#""min":"-inf""#, r#""min":"+NaN""#, "not a number"),
        (r#""elem":"act"#, r#""elem":"acx"#, "unknown variant"),
        ("qhx.graph", "qhx.grapj", "without a graph of qhx"),
    ] {
        let changed = String::from_utf8_lossy(&bytes);
        assert!(changed.contains(from), "{from} in {changed}");
        let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
        let mut changed = bytes.clone();
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
        let path = folder.path().join("changed.onnx");
        std::fs::write(&path, changed).unwrap();
        let error = read(&path, folder.path()).unwrap_err();
        assert!(error.message().contains(words), "{to}: {error}");
        assert!(error.message().contains("changed.onnx"), "{error}");
    }
}

#[test]
fn a_damaged_file_is_an_error_wherever_it_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(model(folder.path())).unwrap();
    let path = folder.path().join("damaged.onnx");
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(read(&path, folder.path()).is_err(), "{length} bytes");
    }
    // Whatever becomes of it: no panic, and no end of memory.
    for at in 0..bytes.len() {
        for value in [0, 0x7f, 0xff] {
            let mut changed = bytes.clone();
            changed[at] = value;
            std::fs::write(&path, changed).unwrap();
            let _ = read(&path, folder.path());
        }
    }
}
