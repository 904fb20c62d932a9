//! What executes the graphs of the recipes on the CPU: instructions, each of them.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::path::Path;

use qhx_core::backend::{Backend, ContextSource};
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_forge::Task;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::graph::{Graph, Op};
use qhx_forge::recipe::{Precision, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_forge::{Silent, onnx};
use qhx_paths::fixture;

/// Checkpoints, and options of their recipes.
const FIXTURES: [(&str, &[(&str, &str)]); 18] = [
    ("embed-mistral-tiny", &[]),
    ("gemma4-tiny", &[]),
    (
        "gemma4-tiny",
        &[("audio", "int8"), ("vision", "int8"), ("down-split", "2"), ("hand-over", "f32")],
    ),
    ("gemma4-unseen", &[]),
    ("llama3-blocks", &[]),
    ("llama3-tiny", &[]),
    ("mistral-tiny", &[]),
    ("phimoe-16", &[]),
    ("phimoe-6", &[("experts", "int8")]),
    ("phimoe-blocks", &[]),
    ("qwen2-tiny", &[]),
    ("qwen3-tiny", &[]),
    ("qwen35-blocks", &[]),
    ("qwen35-untied", &[]),
    ("qwen35-vision", &[]),
    ("qwen3vl-tiny", &[("image-size", "48"), ("vision", "int8")]),
    ("qwen3vl-tiny", &[("image-patches", "48,24")]),
    ("quantised/awq", &[]),
];

/// What executes each graph of a context on the CPU.
fn executors(graphs: &[Graph], folder: &Path) -> Vec<String> {
    let graphs: Vec<&Graph> = graphs.iter().collect();
    onnx::write_all(&graphs, folder, &mut Silent).unwrap();
    let file =
        |graph: &&Graph| (graph.name().to_owned(), folder.join(format!("{}.onnx", graph.name())));
    let onnx = graphs.iter().map(file).collect();
    let source = ContextSource { key: "c".to_owned(), onnx, ..ContextSource::default() };
    let backend = CpuBackend::new(CpuOptions::default()).unwrap();
    let context = backend.open_context(&source).unwrap();
    context.executors().iter().map(|executor| executor.to_string()).collect()
}

#[test]
fn every_graph_of_a_recipe_is_instructions() {
    let (mut wrong, mut operators) = (Vec::new(), BTreeSet::new());
    for (name, choices) in FIXTURES {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        for precision in Precision::ALL {
            let options = RecipeOptions {
                precision,
                shards: 1,
                max_ctx: 128,
                task: if name.starts_with("embed") { Task::Embed } else { Task::Generate },
                prefill: Some(vec![16]),
                share_weights: true,
                choices: choices.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
                ..RecipeOptions::default()
            };
            let recipe = recipe(&checkpoint, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
            for context in &recipe.contexts {
                let folder = tempfile::tempdir().unwrap();
                let nodes = context.graphs.iter().flat_map(Graph::nodes);
                operators.extend(nodes.map(|node| node.op.name()));
                for (graph, found) in
                    context.graphs.iter().zip(executors(&context.graphs, folder.path()))
                {
                    if found != "instructions" {
                        wrong.push(format!("{name}, {precision:?}, {}: {found}", graph.name()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // The towers' convolutions are among them.
    assert!(
        operators.contains(Op::Conv2d(qhx_forge::graph::Conv2d::new([1, 1])).name()),
        "{operators:?}"
    );
}
