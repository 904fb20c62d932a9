//! The recipes' graphs on the CPU.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use qhx_checkpoint::Checkpoint;
use qhx_exec::GraphId;
use qhx_forge::Silent;
use qhx_forge::Task;
use qhx_forge::kit::{Attend, AttendInputs, Heads, mix, rope};
use qhx_forge::recipe::{Caches, Precision, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{BinaryOp, Conv2d, Elem, Graph, Op};
use qhx_graph::onnx;
use qhx_paths::fixture;
use qhx_types::{DType, MASK_VALUE, TensorInfo};

mod common;

use common::graphs::{Compiled, Onnx, error};
use common::recipe_options;

/// Checkpoints, and options of their recipes.
const FIXTURES: [(&str, &[(&str, &str)]); 29] = [
    ("embed-bert-tiny", &[]),
    ("embed-mistral-tiny", &[]),
    ("embeddinggemma-tiny", &[]),
    ("gemma4-tiny", &[]),
    ("gemma4-tiny", &[("audio", "w8a16"), ("vision", "w8a16")]),
    ("gemma4-unseen", &[]),
    ("llama3-blocks", &[]),
    ("llama3-tiny", &[]),
    ("mistral-tiny", &[]),
    ("phimoe-16", &[]),
    ("phimoe-6", &[("experts", "w8a16")]),
    ("phimoe-blocks", &[]),
    ("qwen2-tiny", &[]),
    ("qwen3-moe", &[]),
    ("qwen3-tiny", &[]),
    ("qwen35-blocks", &[]),
    ("qwen35-moe", &[]),
    ("qwen35-untied", &[]),
    ("qwen35-vision", &[]),
    ("qwen3vl-tiny", &[("image-size", "48"), ("vision", "w8a16")]),
    ("qwen3vl-tiny", &[("image-patches", "48,24")]),
    ("quantised/awq", &[]),
    ("quantised/compressed-mixed", &[]),
    ("quantised/gptq-act", &[]),
    ("rerank-bert-tiny", &[]),
    ("rerank-llama-tiny", &[]),
    ("rerank-qwen3-tiny", &[]),
    ("rerank-xlmr-tiny", &[]),
    ("whisper-tiny", &[]),
];

fn task(name: &str) -> Task {
    match name.split('-').next() {
        Some("embed" | "embeddinggemma") => Task::Embed,
        Some("rerank") => Task::Score,
        Some("whisper") => Task::Transcribe,
        _ => Task::Generate,
    }
}

/// Numbers for inputs.
fn arbitrary(inputs: &[TensorInfo]) -> Vec<Vec<f32>> {
    let inputs = inputs.iter().enumerate().map(|(port, tensor)| {
        let value = |at: usize| match tensor.dtype {
            DType::I32 => 0.0,
            DType::I8 => f32::from((at * 5 % 255) as u8 as i8),
            _ => ((at * 37 + port * 11) % 101) as f32 / 100.0 - 0.5,
        };
        (0..tensor.elements()).map(value).collect()
    });
    inputs.collect()
}

/// Bytes of the largest mask that a graph adds to scores, in f16.
fn largest_mask(graph: &Graph) -> usize {
    let adds = graph.nodes().iter().filter(|node| node.op == Op::Binary(BinaryOp::Add));
    let masks = adds.flat_map(|node| {
        let out = graph.tensors()[node.output.index()].elements();
        let inputs = node.inputs.iter().map(|id| &graph.tensors()[id.index()]);
        inputs.filter(move |t| match t.shape[..] {
            [.., rows, width] if rows > 1 => t.elements() == rows * width && t.elements() < out,
            _ => false,
        })
    });
    masks.map(|mask| 2 * mask.elements()).max().unwrap_or(0)
}

/// Runs a graph on the CPU and its ONNX form by rten, over the same numbers, and returns the largest difference as a
/// part of the largest number of an output.
fn difference(graph: &Graph, folder: &Path) -> f64 {
    let path = folder.join(format!("{}.onnx", graph.name()));
    let reference = Onnx::load(graph, &path);
    let inputs = arbitrary(&reference.info.inputs);
    let found = Compiled::of_onnx(graph.name(), path).run(0, &inputs);
    let pairs = found.iter().zip(reference.run(&inputs));
    pairs.map(|(found, expected)| error(found, &expected)).fold(0.0, f64::max)
}

/// The CPU backend reads the graph of a file, rten its ONNX operators.
#[test]
fn every_graph_of_a_recipe_agrees_with_its_onnx() {
    let (mut wrong, mut operators) = (Vec::new(), BTreeSet::new());
    for (name, choices) in FIXTURES {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        for precision in Precision::ALL {
            let options = RecipeOptions {
                precision,
                task: task(name),
                prefill: Some(vec![16]),
                ..recipe_options(64, choices)
            };
            let recipe = recipe(&checkpoint, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
            for context in &recipe.contexts {
                let folder = tempfile::tempdir().unwrap();
                let graphs: Vec<&Graph> = context.graphs.iter().collect();
                onnx::write_all(&graphs, folder.path(), &mut Silent).unwrap();
                for graph in graphs {
                    operators.extend(graph.nodes().iter().map(|node| node.op.name()));
                    // Sums differ in their order, which depends on the machine's vectors: by 1.03e-4 at most.
                    let most = if precision == Precision::Fp16 { 2e-4 } else { 1e-2 };
                    let found = difference(graph, folder.path());
                    if found > most {
                        wrong.push(format!("{name}, {precision:?}, {}: {found}", graph.name()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // The towers' convolutions are among them.
    for name in [Op::Conv2d(Conv2d::new([1, 1])).name(), "attention"] {
        assert!(operators.contains(name), "{operators:?}");
    }
}

/// Super-blocks of Q4_K, on the CPU backend and as another program would read them.
#[test]
fn super_blocks_are_multiplied_to_the_weights_of_their_file() {
    let [kinds, folder] = ["quantised/kinds.gguf", "quantised/awq"].map(fixture);
    let checkpoint = Checkpoint::open_gguf(&kinds, Some(&folder)).unwrap();
    let source = checkpoint.matrix("layers.4.mlp.up_proj.weight", [3, 256]).unwrap();
    let mut w = vec![0f32; 3 * 256];
    source.read_f32(0, &mut w).unwrap();
    for rows in [1, 40] {
        let mut b = GraphBuilder::new(format!("rows_{rows}"));
        let x = b.input("x", Elem::Activation, &[rows, 256]).unwrap();
        let weight = Precision::W4A16.weight(Arc::clone(&source));
        let y = b.linear("matmul", x, weight, None).unwrap();
        b.output("y", y).unwrap();
        let graph = b.finish().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let onnx = Onnx::new(&graph, folder.path());
        let x = arbitrary(&onnx.info.inputs);
        let expected: Vec<f32> = x[0]
            .chunks(256)
            .flat_map(|x| w.chunks(256).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>()))
            .collect();
        let path = folder.path().join(format!("rows_{rows}.onnx"));
        let found = Compiled::of_onnx(graph.name(), path).run(0, &x);
        for found in [&onnx.run(&x)[0], &found[0]] {
            assert!(error(found, &expected) < 2e-5, "{rows}: {found:?}, {expected:?}");
        }
    }
}

/// The form in which the NPU gets attention computes what the graph does, and adds no mask of more bytes than asked.
#[test]
fn attention_head_by_head_computes_the_same() {
    const MAX_MASK: usize = 512;
    let (mut wrong, mut split, mut masked) = (Vec::new(), 0, 0);
    for (name, choices) in FIXTURES {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        for caches in [Caches::F16, Caches::Int8] {
            let options = RecipeOptions {
                caches,
                task: task(name),
                prefill: Some(vec![16]),
                ..recipe_options(64, choices)
            };
            let Ok(recipe) = recipe(&checkpoint, &options) else { continue };
            for graph in recipe.contexts.iter().flat_map(|context| &context.graphs) {
                let whole = graph.decomposed().unwrap();
                masked += usize::from(largest_mask(&whole) > MAX_MASK);
                let Cow::Owned(heads) = whole.by_heads(MAX_MASK).unwrap() else { continue };
                split += 1;
                assert_eq!(heads.info(Elem::qnn), graph.info(Elem::qnn));
                assert!(largest_mask(&heads) <= MAX_MASK, "{name}, {}", graph.name());
                let heads = GraphBuilder::extend(heads).finish().unwrap();
                let [expected, found] = [graph, &heads].map(|graph| {
                    let folder = tempfile::tempdir().unwrap();
                    Onnx::new(graph, folder.path())
                });
                let inputs = arbitrary(&expected.info.inputs);
                let pairs = found.run(&inputs).into_iter().zip(expected.run(&inputs));
                let most =
                    pairs.map(|(found, expected)| error(&found, &expected)).fold(0.0, f64::max);
                if most > 1e-4 {
                    wrong.push(format!("{name}, {caches:?}, {}: {most}", graph.name()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(split > 30 && masked > 10, "{split} split, {masked} with masks");
}

/// Attention over a cache that the kit builds does not read what the mask hides, where the matmuls and the softmax that
/// its ONNX form has would make NaN of all of it.
#[test]
fn cached_attention_reads_nothing_that_is_masked() {
    const CAPACITY: usize = 8;
    const CACHES: [Caches; 2] = [Caches::F16, Caches::Int8];
    let heads = Heads { query: 4, groups: 2, dim: 4 };
    for (rows, caches) in [1, 3].into_iter().flat_map(|n| CACHES.map(|caches| (n, caches))) {
        let mut b = GraphBuilder::new(format!("rows_{rows}"));
        let inputs = AttendInputs { caches, ..AttendInputs::new(heads.dim, rows, CAPACITY) };
        let attend = Attend::inputs(&mut b, &inputs).unwrap();
        let past = attend.past(&mut b, 0, heads).unwrap();
        let mut of = |name: &str, heads| {
            b.input(name, Elem::Activation, &[rows, heads, inputs.rotary]).unwrap()
        };
        let [q, k, v] = [of("q", heads.query), of("k", heads.groups), of("v", heads.groups)];
        let q = rope(&mut b, q, &attend).unwrap();
        let mixed = mix(&mut b, [q, k, v], past, heads, &attend).unwrap();
        b.output("y", mixed.out).unwrap();
        let graph = b.finish().unwrap();
        let mut compiled = Compiled::on_cpu(&graph);
        let info = compiled.info(0);
        for (port, tensor) in info.inputs.iter().enumerate() {
            let int8 = caches == Caches::Int8 && tensor.name.starts_with("past_");
            assert_eq!(tensor.dtype, if int8 { DType::I8 } else { DType::F32 });
            let hidden = |at: usize| match tensor.name.as_str() {
                "cmask" if at % (CAPACITY + rows) == 5 => MASK_VALUE,
                "past_k_0" | "past_v_0" if at / heads.dim % CAPACITY == 5 => f32::NAN,
                "scale_k_0" | "scale_v_0" if at % CAPACITY == 5 => f32::NAN,
                "cmask" => 0.0,
                _ => (at % 7) as f32 * 0.25 - 0.5,
            };
            let int = |at: usize| f32::from((at * 5 % 256) as u8 as i8);
            let values = (0..tensor.elements()).map(|at| if int8 { int(at) } else { hidden(at) });
            compiled.write(0, port, &values.collect::<Vec<_>>());
        }
        compiled.workspace.execute(GraphId(0)).unwrap();
        let found = compiled.read(0, 0);
        assert!(found.iter().all(|y| y.is_finite()), "{rows} rows, {caches:?}: {found:?}");
    }
}
