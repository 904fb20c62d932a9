//! Graphs of recipes: agreement with their ONNX reference graphs, and with the goldens of `transformers`.

use std::path::Path;

use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{Precision, RecipeOptions, Task};
use qhx_forge::registry::{recipe, task};
use qhx_graph::graph::Graph;
use qhx_paths::fixture;
use qhx_qnn::{Library, Target};
use qhx_tiers::tier;

use crate::common::read_json;
use crate::support::{Compiled, Driver, inputs, reference};
use crate::tier::opened;

/// Greedy agreement over the first `cases` goldens, teacher-forced.
#[expect(clippy::print_stderr, reason = "a test says what it measured")]
fn greedy(
    library: &Library,
    target: Target,
    (name, precision, shards, cases): (&str, Precision, usize, usize),
) -> [usize; 2] {
    let dir = fixture(name);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let prefill = Some(Vec::new());
    let options =
        RecipeOptions { precision, shards, prefill, max_ctx: 200, ..RecipeOptions::default() };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let contexts: Vec<&[Graph]> = recipe.contexts.iter().map(|c| &c.graphs[..]).collect();
    let mut driver = Driver::new(&recipe, Compiled::new(library, target, &contexts));
    // The usual run leaves the rest of each answer to the whole matrix.
    let tokens = if full() { usize::MAX } else { 10 };
    let goldens = read_json(&dir.join("goldens.json"));
    let cases = goldens["cases"].as_array().unwrap().iter().take(cases);
    let found = cases.map(|case| driver.greedy(case, tokens, |_, _| {}));
    let found = found.fold([0, 0], |all, one| [all[0] + one[0], all[1] + one[1]]);
    eprintln!("{name} {precision:?} {target}: greedy {found:?}");
    found
}

/// Prefixes of tiny models whose graphs are compared elsewhere, as those of speech are: they run whole against their
/// goldens in the tests of their families, on the NPU as well.
const ELSEWHERE: [&str; 8] = [
    "gemma3-",
    "gemma4-",
    "lfm2-",
    "qwen25vl-",
    "qwen35-vision",
    "qwen3vl-",
    "siglip-",
    "smolvlm-",
];

/// Tiny models whose layers have inputs for 4-bit blocks.
const BLOCKS: [&str; 3] = ["llama3-blocks", "phimoe-blocks", "qwen35-blocks"];

/// The min cosine of an output on the NPU to the same output of the reference graph: only rounding to f16 lies between.
const MIN_COSINE: f64 = 0.999_9;

/// Compiles the graphs of a tiny model, runs them and their reference graphs on the same inputs, and adds what differs
/// to `wrong`.
#[expect(clippy::print_stderr, reason = "a test says what it measured")]
fn compare_with_references(
    library: &Library,
    folder: &Path,
    (precision, target): (Precision, Target),
    wrong: &mut Vec<String>,
) {
    let name = folder.file_name().unwrap().to_string_lossy();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let task = match name.split('-').next() {
        Some("embed" | "embeddinggemma") => Task::Embed,
        Some("rerank") => Task::Score,
        _ => Task::Generate,
    };
    // One prefill graph: a second width would be the same nodes again.
    let prefill = Some(vec![64]);
    let defaults = RecipeOptions::default();
    let options = RecipeOptions { precision, shards: 2, max_ctx: 64, task, prefill, ..defaults };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let mut min = 1f64;
    for context in &recipe.contexts {
        let mut compiled = Compiled::new(library, target, &[&context.graphs]);
        for (id, graph) in (0..).zip(&context.graphs) {
            let inputs = inputs(graph);
            let (found, expected) = (compiled.run(id, &inputs), reference(graph, &inputs));
            for ((tensor, a), b) in compiled.info(id).outputs.iter().zip(&found).zip(&expected) {
                let distance = Distance::of(a, b);
                let cosine = distance.as_ref().map_or(-1.0, |distance| distance.cosine);
                min = min.min(cosine);
                if cosine < MIN_COSINE {
                    let graph = graph.name();
                    wrong.push(format!(
                        "{name} {precision:?} {target} {graph} {tensor}: {distance:?}"
                    ));
                }
            }
        }
    }
    eprintln!("{name} {precision:?} {target}: min cosine to the reference graph {min:.6}");
}

#[tier(qnn)]
fn every_graph_of_every_recipe_agrees_with_its_reference() {
    let library = opened();
    let mut folders: Vec<_> = std::fs::read_dir(fixture("."))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").exists())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            !ELSEWHERE.iter().any(|part| name.starts_with(part))
        })
        .filter(|path| !BLOCKS.iter().any(|name| path.ends_with(name)))
        .filter(|path| {
            let task = task(&Checkpoint::open(path).unwrap(), None).unwrap();
            !matches!(task, Task::Transcribe | Task::Speak)
        })
        .collect();
    folders.sort();
    assert!(folders.len() > 1);
    let mut wrong = Vec::new();
    for (index, folder) in folders.iter().enumerate() {
        // Each with another target than the last time.
        let precision = Precision::ALL[(index + index / 3) % Precision::ALL.len()];
        let target = Target::ALL[index % Target::ALL.len()];
        compare_with_references(&library, folder, (precision, target), &mut wrong);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn full() -> bool {
    std::env::var_os("QHX_FULL").is_some_and(|value| value == "1")
}

/// Tiny models whose layers all have 4-bit weights in blocks of 32.
#[tier(qnn)]
fn four_bit_blocks_agree_with_their_references() {
    let library = opened();
    let mut wrong = Vec::new();
    for name in BLOCKS {
        for target in
            [Target::V81, Target::V79, Target::V75].into_iter().take(if full() { 3 } else { 1 })
        {
            let folder = fixture(name);
            compare_with_references(&library, &folder, (Precision::W4A16, target), &mut wrong);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tier(qnn)]
fn decoders_keep_the_greedy_tokens_of_transformers() {
    let library = opened();
    for (target, model, precision, shards, cases) in [
        (Target::V81, "qwen35-tied", Precision::Fp16, 1, 4),
        (Target::V75, "qwen35-untied", Precision::Fp16, 3, 2),
        (Target::V79, "qwen35-untied", Precision::Fp16, 3, 2),
        (Target::V81, "qwen35-tied", Precision::W8A16, 1, 2),
        (Target::V81, "qwen35-blocks", Precision::W4A16, 1, 1),
    ] {
        let [same, total] = greedy(&library, target, (model, precision, shards, cases));
        let least = if precision == Precision::W8A16 { total * 95 } else { total * 100 };
        assert!(same * 100 >= least, "{model} {precision:?} {target}: greedy {same}/{total}");
    }
}
