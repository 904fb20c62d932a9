//! The Qwen3.5 recipe against `transformers`: the ONNX reference graphs of the decode and head graphs, run token by
//! token, give the logits and greedy tokens of the goldens.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::HashMap;
use std::path::Path;

use half::f16;
use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{Precision, Recipe, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::progress::Silent;
use qhx_graph::weight::{Storage, Weight, fits_f16};
use qhx_paths::fixture;
use qhx_tiers::tier;
use qhx_types::MASK_VALUE;
use rten::{Model, ValueOrView};
use rten_tensor::Tensor;
use rten_tensor::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;

/// Runs the graphs of a recipe as their host-op does.
struct Driver {
    graphs: Vec<(Graph, Model)>,
    state: HashMap<String, Tensor<f32>>,
    embed: Vec<f32>,
    hidden: usize,
    position: usize,
    max_ctx: usize,
    rotary: usize,
    theta: f64,
}

impl Driver {
    fn new(recipe: &Recipe, dir: &Path) -> Self {
        let mut graphs = Vec::new();
        let mut state = HashMap::new();
        for graph in recipe.contexts.iter().flat_map(|c| &c.graphs) {
            let written = qhx_graph::onnx::write(graph, dir, &mut Silent).unwrap();
            let info = graph.info(Elem::onnx);
            for input in info.inputs.iter().filter(|t| t.name.starts_with("past_")) {
                state.insert(input.name.clone(), Tensor::zeros(&input.shape));
            }
            graphs.push((graph.clone(), Model::load_file(&written.model).unwrap()));
        }
        // The table as the bundle has it: f16, or f32 for a checkpoint whose values f16 would round.
        let table = Weight::new(recipe.embed.clone().unwrap(), Storage::Float);
        let embed = if fits_f16(&**recipe.embed.as_ref().unwrap()).unwrap() {
            table.to_f16().unwrap().into_iter().map(f16::to_f32).collect()
        } else {
            table.to_f32().unwrap()
        };
        let number = |key: &str| recipe.params[key].as_f64().unwrap();
        Self {
            graphs,
            state,
            embed,
            hidden: number("hidden") as usize,
            position: 0,
            max_ctx: number("max_ctx") as usize,
            rotary: number("rotary_dim") as usize,
            theta: number("rope_theta"),
        }
    }

    /// Logits after `token`.
    fn step(&mut self, token: usize) -> Vec<f32> {
        let (position, half) = (self.position, self.rotary / 2);
        let row = self.embed[token * self.hidden..][..self.hidden].to_vec();
        let mut x = Tensor::from_data(&[1, self.hidden], row);
        let angle =
            |i: usize| position as f64 * self.theta.powf(-2.0 * i as f64 / self.rotary as f64);
        let table = |f: fn(f64) -> f64| {
            Tensor::from_data(&[1, half], (0..half).map(|i| f(angle(i)) as f32).collect::<Vec<_>>())
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let mask = (0..=self.max_ctx)
            .map(|i| if i < position || i == self.max_ctx { 0.0 } else { MASK_VALUE })
            .collect::<Vec<f32>>();
        let mask = Tensor::from_data(&[1, self.max_ctx + 1], mask);
        let mut logits = Vec::new();
        for (graph, model) in &self.graphs {
            let info = graph.info(Elem::onnx);
            let inputs: Vec<(_, ValueOrView<'_>)> = info
                .inputs
                .iter()
                .map(|t| {
                    let value = match t.name.as_str() {
                        "x" => &x,
                        "cos" => &cos,
                        "sin" => &sin,
                        "cmask" => &mask,
                        name => &self.state[name],
                    };
                    (model.node_id(&t.name).unwrap(), value.view().into())
                })
                .collect();
            let ids: Vec<_> =
                info.outputs.iter().map(|t| model.node_id(&t.name).unwrap()).collect();
            let outputs = model.run(inputs, &ids, None).unwrap();
            for (tensor, value) in info.outputs.iter().zip(outputs) {
                let value: Tensor<f32> = value.try_into().unwrap();
                assert_eq!(value.shape(), tensor.shape, "{}", tensor.name);
                if let Some(role) = tensor.name.strip_prefix("present_") {
                    self.state.insert(format!("past_{role}"), value);
                } else if let Some(role) = tensor.name.strip_prefix("new_") {
                    let cache = self.state.get_mut(&format!("past_{role}")).unwrap();
                    cache.slice_mut((.., position)).copy_from(&value.slice((.., 0)));
                } else if tensor.name == "logits" {
                    logits = value.to_vec();
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

/// Greedy agreement and the largest difference of recorded logits, over all cases.
fn compare(dir: &Path, precision: Precision, shards: usize) -> (f64, usize, usize) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let prefill = Some(Vec::new());
    let options =
        RecipeOptions { precision, shards, prefill, max_ctx: 200, ..RecipeOptions::default() };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let out = tempfile::tempdir().unwrap();
    let goldens: Value =
        serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    let recorded = std::fs::read(dir.join("goldens.safetensors")).unwrap();
    let recorded = SafeTensors::deserialize(&recorded).unwrap();
    let (mut worst, mut same, mut total) = (0f64, 0, 0);
    let mut driver = Driver::new(&recipe, out.path());
    let fresh = driver.state.clone();
    for case in goldens["cases"].as_array().unwrap() {
        driver.state = fresh.clone();
        driver.position = 0;
        let steps = ids(&case["logits_steps"]);
        let expected =
            recorded.tensor(&format!("{}.logits", case["id"].as_str().unwrap())).unwrap();
        let expected: Vec<f32> = expected
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        let vocab = expected.len() / steps.len();
        let mut logits = Vec::new();
        for token in ids(&case["prompt_ids"]) {
            logits = driver.step(token);
        }
        for (step, token) in ids(&case["output_ids"]).into_iter().enumerate() {
            if let Some(row) = steps.iter().position(|&s| s == step) {
                let distance = Distance::of(&logits, &expected[row * vocab..][..vocab]).unwrap();
                worst = worst.max(distance.largest);
            }
            total += 1;
            same += usize::from(argmax(&logits) == token);
            logits = driver.step(token);
        }
    }
    (worst, same, total)
}

#[test]
fn tied_bf16_matches_transformers() {
    let (worst, same, total) = compare(&fixture("qwen35-tied"), Precision::Fp16, 1);
    println!("largest logit difference {worst:.2e}, greedy {same}/{total}");
    assert!(worst < 1e-3, "logits differ by {worst}");
    assert_eq!(same, total);
}

#[test]
fn untied_sharded_f16_matches_transformers_in_three_contexts() {
    let (worst, same, total) = compare(&fixture("qwen35-untied"), Precision::Fp16, 3);
    println!("largest logit difference {worst:.2e}, greedy {same}/{total}");
    assert!(worst < 1e-3, "logits differ by {worst}");
    assert_eq!(same, total);
}

#[test]
fn int8_weights_stay_near_and_keep_the_greedy_tokens() {
    let (worst, same, total) = compare(&fixture("qwen35-tied"), Precision::W8A16, 2);
    println!("largest logit difference {worst:.2e}, greedy {same}/{total}");
    assert!(worst > 1e-3, "the weights were not quantized");
    assert!(same * 100 >= total * 95, "greedy {same}/{total}");
}

#[test]
fn four_bit_weights_stay_near_and_keep_the_greedy_tokens() {
    let (worst, same, total) = compare(&fixture("qwen35-tied"), Precision::W4A16, 1);
    println!("largest logit difference {worst:.2e}, greedy {same}/{total}");
    assert!(worst > 1e-2, "the weights were not quantized");
    assert!(same * 100 >= total * 95, "greedy {same}/{total}");
}

/// Any other checkpoint with goldens, such as one that `tests/oracle/train.py unseen` made.
#[tier(by_hand = "QHX_TEST_CHECKPOINT")]
#[test]
fn checkpoint_of_the_environment_matches() {
    let dir = std::env::var_os("QHX_TEST_CHECKPOINT").unwrap();
    for shards in [1, 2] {
        let (worst, same, total) = compare(Path::new(&dir), Precision::Fp16, shards);
        println!("largest logit difference {worst:.2e}, greedy {same}/{total}");
        assert!(worst < 1e-3, "logits differ by {worst}");
        assert_eq!(same, total);
    }
}
