//! The Qwen3.5 recipe against `transformers`: the ONNX reference graphs of the decode and head graphs, run token by
//! token, give the logits and greedy tokens of the goldens.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{Precision, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_paths::fixture;
use qhx_tiers::tier;
use safetensors::SafeTensors;

mod common;

use common::graphs::{Driver, Onnx, ids};
use common::read_json;

/// The share of greedy tokens that are those of the goldens, and the largest difference of recorded logits, over all
/// cases.
#[expect(clippy::print_stdout, reason = "a test says what it measured")]
fn compare(dir: &Path, precision: Precision, shards: usize) -> (f64, f64) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let prefill = Some(Vec::new());
    let options =
        RecipeOptions { precision, shards, prefill, max_ctx: 200, ..RecipeOptions::default() };
    let recipe = recipe(&checkpoint, &options).unwrap();
    let out = tempfile::tempdir().unwrap();
    let recorded = std::fs::read(dir.join("goldens.safetensors")).unwrap();
    let recorded = SafeTensors::deserialize(&recorded).unwrap();
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let graphs: Vec<_> = graphs.map(|graph| Onnx::new(graph, out.path())).collect();
    let mut driver = Driver::new(&recipe, graphs);
    let (mut worst, mut same, mut total) = (0f64, 0, 0);
    for case in read_json(&dir.join("goldens.json"))["cases"].as_array().unwrap() {
        let steps = ids(&case["logits_steps"]);
        let name = format!("{}.logits", case["id"].as_str().unwrap());
        let expected = recorded.tensor(&name).unwrap().data().as_chunks().0.iter();
        let expected: Vec<f32> = expected.map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let vocab = expected.len() / steps.len();
        let found = driver.greedy(case, usize::MAX, |step, logits| {
            if let Some(row) = steps.iter().position(|&s| s == step) {
                let distance = Distance::of(logits, &expected[row * vocab..][..vocab]).unwrap();
                worst = worst.max(distance.largest);
            }
        });
        (same, total) = (same + found[0], total + found[1]);
    }
    println!("largest logit difference {worst:.2e}, greedy {same}/{total}");
    (worst, same as f64 / total as f64)
}

#[test]
fn decoders_in_f16_match_transformers() {
    for (model, shards) in [("qwen35-tied", 1), ("qwen35-untied", 3)] {
        let (worst, same) = compare(&fixture(model), Precision::Fp16, shards);
        assert!(worst < 1e-3 && same == 1.0, "{model}: logits differ by {worst}, greedy {same}");
    }
}

#[test]
fn low_bit_weights_stay_near_and_keep_the_greedy_tokens() {
    for (precision, shards, changed) in [(Precision::W8A16, 2, 1e-3), (Precision::W4A16, 1, 1e-2)] {
        let (worst, same) = compare(&fixture("qwen35-tied"), precision, shards);
        assert!(worst > changed, "{precision:?}: the weights were not quantized");
        assert!(same >= 0.95, "{precision:?}: greedy {same}");
    }
}

/// Any other checkpoint with goldens, such as one that `tests/oracle/train.py unseen` made.
#[tier(by_hand = "QHX_TEST_CHECKPOINT")]
fn checkpoint_of_the_environment_matches() {
    let dir = std::env::var_os("QHX_TEST_CHECKPOINT").unwrap();
    for shards in [1, 2] {
        let (worst, same) = compare(Path::new(&dir), Precision::Fp16, shards);
        assert!(worst < 1e-3 && same == 1.0, "logits differ by {worst}, greedy {same}");
    }
}
