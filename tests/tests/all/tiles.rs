//! Families whose images are cut into tiles, and whose bundles the op `vision_generate` runs. Goldens are of
//! `transformers` (`tests/oracle/tiles.py`).

use std::path::Path;

use qhx_base::Result;
use qhx_core::engine::{Model, Part, Prompt};
use qhx_forge::ForgeOptions;
use qhx_tests::forged::Forged;
use qhx_tests::images::{Sights, answer};
use qhx_tests::replay::{alike, within};
use qhx_tests::{backends, files, plugin_files, tiny};
use qhx_tiers::tier;
use qhx_types::Media;
use serde_json::{Value, json};

const INTERNVL: &str = "vision/internvl";
/// Other shapes, in the layout of the original code.
const CODE: &str = "vision/internvl-code";
const LFM2: &str = "vision/lfm2vl";
const DOCLING: &str = "vision/docling";
/// Logits and features on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

fn bundle(
    checkpoint: &Path,
    prefill: &[usize],
    change: impl FnOnce(&mut ForgeOptions),
) -> Result<Forged> {
    Forged::try_of(checkpoint, |options| {
        (options.max_ctx, options.prefill) = (Some(200), Some(prefill.to_vec()));
        change(options);
    })
}

/// A bundle of a checkpoint with other keys in one of its files.
fn changed(fixture: &str, file: &str, keys: &Value) -> Result<Forged> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    plugin_files::copy_folder(&tiny::fixture(fixture), &checkpoint);
    files::edit(&checkpoint.join(file), |config| merge(config, keys));
    bundle(&checkpoint, &[], |_| ())
}

fn merge(into: &mut Value, keys: &Value) {
    match (into, keys) {
        (Value::Object(into), Value::Object(keys)) => {
            for (key, value) in keys {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, value) => *into = value.clone(),
    }
}

/// Prompts, answers and logits, in chunks and token by token, and features.
fn equal(fixture: &str, prefill: &[usize]) {
    let sights = Sights::of(&tiny::fixture(fixture));
    let cases: Vec<_> = sights.cases.iter().collect();
    for prefill in [prefill, &[]] {
        let label = format!("{fixture}, prefill {prefill:?}");
        let bundle = bundle(&tiny::fixture(fixture), prefill, |_| ()).unwrap();
        let mut model = bundle.on_cpu();
        sights.greedy_exact(&mut model, &cases, &label);
        within(sights.step_exact(&mut model, &cases, &label), CPU_DISTANCE, &label);
        drop(model);
        if prefill.is_empty() {
            continue;
        }
        let dump = tempfile::tempdir().unwrap();
        let plugins = tiny::plugins();
        let mut model =
            tiny::open_dumping(&bundle.manifest, backends::cpu(), &plugins, dump.path());
        let (cosine, off) = sights.features(model.op_mut(), dump.path(), "native", None, false, 0);
        eprintln!("{label}: features differ by at most {off:.2e}, cosine {cosine:.7}");
        assert!(off <= CPU_DISTANCE, "{label}: features differ by {off:e}");
    }
}

/// What was seen stays in the caches.
fn remembers(fixture: &str, tokens: usize) {
    let sights = Sights::of(&tiny::fixture(fixture));
    let bundle = bundle(&tiny::fixture(fixture), &[16], |_| ()).unwrap();
    let mut model = bundle.on_cpu();
    let [first, again] = ["boat", "again"].map(|id| {
        let case = sights.case(id);
        let found = answer(&mut model, sights.prompt(case), &case.golden);
        assert_eq!(found.tokens, case.golden.output_ids, "{fixture}, {id}");
        found
    });
    assert_eq!(first.reused_tokens, 0);
    assert!(again.reused_tokens > tokens, "{fixture}: reused {}", again.reused_tokens);
}

/// A checkpoint that `tests/oracle/tiles.py` drew elsewhere.
#[tier(by_hand = "QHX_TEST_TILES")]
fn a_checkpoint_of_the_environment_equals_the_reference() {
    let folder = std::env::var_os("QHX_TEST_TILES").unwrap();
    equal(&folder.into_string().unwrap(), &[16]);
}

#[test]
fn internvl_equals_the_reference() {
    equal(INTERNVL, &[16, 40]);
    remembers(INTERNVL, 60);
}

#[test]
fn internvl_of_the_original_code_equals_the_reference() {
    equal(CODE, &[16]);
}

#[test]
fn lfm2_vl_equals_the_reference() {
    equal(LFM2, &[16]);
    remembers(LFM2, 40);
}

#[test]
fn docling_answers_with_its_marks() {
    equal(DOCLING, &[16]);
}

/// The prompt of an image.
fn shown(model: &mut Model, width: u32, height: u32) -> Result<Vec<u32>> {
    let rgb = vec![90; (width * height * 3) as usize];
    let image = Media::image(rgb, width, height).unwrap();
    model.encode_prompt(&Prompt::Parts(vec![Part::Media(image), Part::Text("Seen:".into())]))
}

#[test]
fn an_image_that_does_not_fit_is_refused() {
    let bundle = bundle(&tiny::fixture(LFM2), &[16], |_| ()).unwrap();
    let mut model = bundle.on_cpu();
    let error = shown(&mut model, 20_000, 1).unwrap_err().to_string();
    assert!(error.contains("patches, expected at most 48; cut it"), "{error}");
    assert!(shown(&mut model, 1, 1).is_ok());

    // 13 parts of 9 positions do not fit 100.
    let keys = json!({"max_patches": 12});
    let bundle = changed(INTERNVL, "preprocessor_config.json", &keys).unwrap();
    let mut model = bundle.on_cpu();
    let prompt = shown(&mut model, 1, 20_000).unwrap();
    assert!(prompt.len() > 9 * 13, "{}", prompt.len());
}

#[test]
fn what_checkpoints_do_otherwise_is_refused() {
    for (fixture, file, keys, expected) in [
        (
            INTERNVL,
            "config.json",
            json!({"vision_feature_layer": -2}),
            "vision_feature_layer is -2",
        ),
        (
            INTERNVL,
            "config.json",
            json!({"downsample_ratio": 0.4}),
            "downsample_ratio is 0.4, expected",
        ),
        (
            INTERNVL,
            "config.json",
            json!({"text_config": {"model_type": "qwen9"}}),
            "model_type is \"qwen9\"",
        ),
        (
            INTERNVL,
            "config.json",
            json!({"vision_config": {"use_mean_pooling": false}}),
            "use_mean_pooling is false",
        ),
        (
            INTERNVL,
            "config.json",
            json!({"vision_config": {"num_hidden_layers": 4}}),
            "encoder.layer.3.",
        ),
        (
            INTERNVL,
            "preprocessor_config.json",
            json!({"size": {"height": 48}}),
            "size.height is 48, expected 30",
        ),
        (
            INTERNVL,
            "preprocessor_config.json",
            json!({"max_patches": 0}),
            "max_patches is 0, expected a number",
        ),
        (CODE, "config.json", json!({"ps_version": "v1"}), "ps_version is \"v1\", expected \"v2\""),
        (CODE, "config.json", json!({"select_layer": -4}), "select_layer is -4"),
        (
            LFM2,
            "config.json",
            json!({"projector_hidden_act": "relu"}),
            "projector_hidden_act is \"relu\"",
        ),
        (
            LFM2,
            "preprocessor_config.json",
            json!({"downsample_factor": 3}),
            "downsample_factor is 3, expected 2",
        ),
        (LFM2, "preprocessor_config.json", json!({"tile_size": 28}), "multiples of 2 patches"),
    ] {
        let error = changed(fixture, file, &keys).unwrap_err().to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
}

#[tier(qnn)]
fn tiles_equal_the_reference_on_the_npu() {
    let both = |target| [(INTERNVL, target), (LFM2, target)];
    for (fixture, target) in tiny::targets().iter().flat_map(both) {
        let sights = Sights::of(&tiny::fixture(fixture));
        let bundle = bundle(&tiny::fixture(fixture), &[16], |options| {
            options.compiler = Some(backends::compiler(target));
        });
        let bundle = bundle.unwrap();
        let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
        let mut model =
            tiny::open_dumping(&bundle.manifest, backends::qnn(), &plugins, dump.path());
        let shown = Some(&["sun"][..]);
        let (cosine, _) = sights.features(model.op_mut(), dump.path(), "native", shown, false, 0);
        assert!(cosine >= 0.999, "{fixture}: features: cosine {cosine}");
        let cases = [sights.case("plain")];
        alike(sights.step_exact(&mut model, &cases, target), 0.999, fixture);
    }
}
