//! Graphs of recipes: agreement with their ONNX reference graphs, and with the goldens of `transformers`.

use std::path::Path;

use half::f16;
use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_exec::GraphId;
use qhx_forge::recipe::{Precision, Recipe, RecipeOptions, Task};
use qhx_forge::registry::recipe;
use qhx_graph::graph::Graph;
use qhx_graph::weight::{Storage, Weight};
use qhx_paths::fixture;
use qhx_qnn::{Library, Target};
use qhx_tiers::tier;
use qhx_types::{MASK_VALUE, Port};
use serde_json::Value;

use crate::support::{Compiled, inputs, reference};
use crate::tier::opened;

/// Runs the compiled graphs of a recipe as their host-op does.
struct Driver {
    compiled: Compiled,
    embed: Vec<f32>,
    hidden: usize,
    position: usize,
    max_ctx: usize,
    rotary: usize,
    theta: f64,
}

impl Driver {
    fn new(library: &Library, target: Target, recipe: &Recipe) -> Self {
        let contexts: Vec<&[Graph]> = recipe.contexts.iter().map(|c| &c.graphs[..]).collect();
        let table = Weight::new(recipe.embed.clone().unwrap(), Storage::Float);
        let number = |key: &str| recipe.params[key].as_f64().unwrap();
        Self {
            compiled: Compiled::new(library, target, &contexts),
            embed: table.to_f16().unwrap().into_iter().map(f16::to_f32).collect(),
            hidden: number("hidden") as usize,
            position: 0,
            max_ctx: number("max_ctx") as usize,
            rotary: number("rotary_dim") as usize,
            theta: number("rope_theta"),
        }
    }

    fn reset(&mut self) {
        self.position = 0;
        for graph in 0..self.compiled.workspace.graph_count() as u32 {
            let info = self.compiled.info(graph);
            for (index, tensor) in info.inputs.iter().enumerate() {
                self.compiled.write(graph, index, &vec![0.0; tensor.elements()]);
            }
        }
    }

    /// Logits after `token`.
    fn step(&mut self, token: usize) -> Vec<f32> {
        let (position, half) = (self.position, self.rotary / 2);
        let mut x = self.embed[token * self.hidden..][..self.hidden].to_vec();
        let angle =
            |i: usize| position as f64 * self.theta.powf(-2.0 * i as f64 / self.rotary as f64);
        let table = |f: fn(f64) -> f64| (0..half).map(|i| f(angle(i)) as f32).collect::<Vec<f32>>();
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let mask: Vec<f32> = (0..=self.max_ctx)
            .map(|i| if i < position || i == self.max_ctx { 0.0 } else { MASK_VALUE })
            .collect();
        let mut logits = Vec::new();
        for graph in 0..self.compiled.workspace.graph_count() as u32 {
            let info = self.compiled.info(graph);
            for (index, tensor) in info.inputs.iter().enumerate() {
                match tensor.name.as_str() {
                    "x" => self.compiled.write(graph, index, &x),
                    "cos" => self.compiled.write(graph, index, &cos),
                    "sin" => self.compiled.write(graph, index, &sin),
                    "cmask" => self.compiled.write(graph, index, &mask),
                    _ => {}
                }
            }
            self.compiled.workspace.execute(GraphId(graph)).unwrap();
            for (index, tensor) in info.outputs.iter().enumerate() {
                let value = self.compiled.read(graph, index);
                let past = |role: &str| {
                    let name = format!("past_{role}");
                    info.inputs.iter().position(|t| t.name == name).unwrap()
                };
                if let Some(role) = tensor.name.strip_prefix("present_") {
                    self.compiled.write(graph, past(role), &value);
                } else if let Some(role) = tensor.name.strip_prefix("new_") {
                    let input = past(role);
                    let [heads, ctx, width] = info.inputs[input].shape[..] else {
                        panic!("a cache [heads, ctx, width]")
                    };
                    let buffer = self.compiled.buffers[&(graph, Port::Input(input))];
                    let cache = self.compiled.workspace.bytes_mut(buffer).unwrap();
                    for head in 0..heads {
                        for i in 0..width {
                            let at = 2 * ((head * ctx + position) * width + i);
                            let v = f16::from_f32(value[head * width + i]);
                            cache[at..at + 2].copy_from_slice(&v.to_le_bytes());
                        }
                    }
                } else if tensor.name == "logits" {
                    logits = value;
                } else {
                    x = value;
                }
            }
        }
        self.position += 1;
        logits
    }
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

fn ids(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

/// Greedy agreement over the first `cases` goldens, teacher-forced.
#[expect(clippy::print_stderr, reason = "a test says what it measured")]
fn greedy(
    library: &Library,
    target: Target,
    (name, precision, shards, cases): (&str, Precision, usize, usize),
) -> (usize, usize) {
    let dir = fixture(name);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let prefill = Some(Vec::new());
    let options =
        RecipeOptions { precision, shards, prefill, max_ctx: 200, ..RecipeOptions::default() };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let goldens: Value =
        serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    let mut driver = Driver::new(library, target, &recipe);
    // The usual run leaves the rest of each answer to the whole matrix.
    let tokens = if full() { usize::MAX } else { 10 };
    let (mut same, mut total) = (0, 0);
    for case in goldens["cases"].as_array().unwrap().iter().take(cases) {
        driver.reset();
        let mut logits = Vec::new();
        for token in ids(&case["prompt_ids"]) {
            logits = driver.step(token);
        }
        for token in ids(&case["output_ids"]).into_iter().take(tokens) {
            total += 1;
            same += usize::from(argmax(&logits) == token);
            logits = driver.step(token);
        }
    }
    eprintln!("{name} {precision:?} {target}: greedy {same}/{total}");
    (same, total)
}

/// Prefixes of tiny models whose graphs are compared elsewhere: those of recipes outside the workspace, and those with
/// towers for images or audio, which run whole against their goldens in the tests of their families.
const ELSEWHERE: [&str; 11] = [
    "gemma3-",
    "gemma4-",
    "kokoro-",
    "lfm2-",
    "parakeet-",
    "qwen25vl-",
    "qwen35-vision",
    "qwen3vl-",
    "siglip-",
    "smolvlm-",
    "whisper-",
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
#[test]
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
#[test]
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
#[test]
fn the_tied_model_decodes_as_transformers_does() {
    let library = opened();
    let (same, total) = greedy(&library, Target::V81, ("qwen35-tied", Precision::Fp16, 1, 4));
    assert_eq!(same, total);
}

#[tier(qnn)]
#[test]
fn the_untied_model_in_shards_decodes_on_older_targets() {
    let library = opened();
    for target in [Target::V75, Target::V79] {
        let (same, total) = greedy(&library, target, ("qwen35-untied", Precision::Fp16, 3, 2));
        assert_eq!(same, total, "{target}");
    }
}

#[tier(qnn)]
#[test]
fn int8_weights_keep_the_greedy_tokens() {
    let library = opened();
    let (same, total) = greedy(&library, Target::V81, ("qwen35-tied", Precision::W8A16, 1, 2));
    assert!(same * 100 >= total * 95, "greedy {same}/{total}");
}

#[tier(qnn)]
#[test]
fn four_bit_weights_keep_the_greedy_tokens() {
    let library = opened();
    let (same, total) = greedy(&library, Target::V81, ("qwen35-blocks", Precision::W4A16, 1, 1));
    assert_eq!(same, total);
}
