//! Families that see an image in one pass of an encoder: PaddleOCR-VL. Goldens are of `transformers`.

use std::path::Path;

use qhx_base::ErrorKind;
use qhx_core::engine::{Part, Prompt, Request};
use qhx_forge::ForgeOptions;
use qhx_tests::forged::{Forged, set};
use qhx_tests::images::{Sights, answer};
use qhx_tests::replay::{alike, try_generate, within};
use qhx_tests::{backends, files, plugin_files, tiny};
use qhx_tiers::tier;
use qhx_types::Media;
use serde_json::{Value, json};

/// Logits and features on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

const PADDLE: &str = "vision/paddleocr";

/// A bundle for a context of 200 tokens, for the CPU unless `change` sets other options.
fn bundle(name: &str, prefill: &[usize], change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(name), |options| {
        (options.max_ctx, options.prefill) = (Some(200), Some(prefill.to_vec()));
        change(options);
    })
}

/// Compares pixels, features, tokens and logits of all cases, the follow-up question with what the caches hold.
fn equals_the_reference(name: &str, bundle: &Forged) {
    let sights = Sights::of(&tiny::fixture(name));
    let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
    let mut model = tiny::open_dumping(&bundle.manifest, backends::cpu(), &plugins, dump.path());
    let (cosine, off) = sights.features(model.op_mut(), dump.path(), "native", None, false, 0);
    eprintln!("{name}: features differ by at most {off:.2e}, cosine {cosine:.7}");
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
    let cases = sights.of_mode("native");
    assert!(cases.len() >= 5);
    sights.greedy_exact(&mut model, &cases, name);
    within(sights.step_exact(&mut model, &cases, name), CPU_DISTANCE, name);
}

/// Answers the question that follows the first one, and says how many positions were reused.
fn reused(name: &str, bundle: &Forged) -> usize {
    let sights = Sights::of(&tiny::fixture(name));
    let mut model = tiny::open(&bundle.manifest, backends::cpu()).unwrap();
    let [boat, again] = ["boat", "again"].map(|id| sights.case(id));
    answer(&mut model, sights.prompt(boat), &boat.golden);
    let second = answer(&mut model, sights.prompt(again), &again.golden);
    assert_eq!(second.tokens, again.golden.output_ids);
    second.reused_tokens
}

/// Two cases on the emulator of the NPU, and the features of an image.
fn equals_the_reference_on_the_npu(name: &str, bundle: &Forged) {
    let sights = Sights::of(&tiny::fixture(name));
    let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
    let mut model = tiny::open_dumping(&bundle.manifest, backends::qnn(), &plugins, dump.path());
    let shown = Some(&["boat"][..]);
    let (cosine, _) = sights.features(model.op_mut(), dump.path(), "native", shown, false, 0);
    assert!(cosine >= 0.999, "features: cosine {cosine}");
    let cases = ["boat", "two"].map(|id| sights.case(id));
    sights.greedy_exact(&mut model, &cases, "v81");
    alike(sights.step_exact(&mut model, &cases, "v81"), 0.999, "v81");
}

/// The error of a prompt with an image of these sides and a word.
fn refused(bundle: &Forged, width: u32, height: u32) -> qhx_base::Error {
    let mut model = tiny::open(&bundle.manifest, backends::cpu()).unwrap();
    let pixels = vec![90; (width * height * 3) as usize];
    let image = Media::image(pixels, width, height).unwrap();
    let parts = vec![Part::Media(image), Part::Text("Seen:".to_owned())];
    let request = Request::greedy(Prompt::Parts(parts), 2);
    try_generate(&mut model, &request).unwrap_err()
}

/// A copy of a checkpoint with one key of its configuration changed, forged.
fn with_key(name: &str, pointer: &str, value: Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    plugin_files::copy_folder(&tiny::fixture(name), &checkpoint);
    files::edit(&checkpoint.join("config.json"), |config| {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[key] = value;
    });
    forged(&checkpoint)
}

fn forged(checkpoint: &Path) -> String {
    let made = Forged::try_of(checkpoint, |options| options.max_ctx = Some(200));
    made.map(drop).unwrap_err().report().to_string()
}

#[test]
fn paddleocr_reads_images_of_any_shape_as_the_reference_does() {
    let bundle = bundle(PADDLE, &[7], |options| {
        options.shards = 2;
        set(options, &[("image-patches", "24,56")]);
    });
    equals_the_reference(PADDLE, &bundle);
    assert!(reused(PADDLE, &bundle) > 20);
    let error = refused(&bundle, 20_000, 2);
    assert_eq!(error.kind(), ErrorKind::Prompt);
    assert!(error.message().contains("factor of 200"), "{error}");
}

#[tier(qnn)]
fn paddleocr_gives_the_reference_s_tokens_on_the_npu() {
    let bundle = bundle(PADDLE, &[16], |options| {
        options.compiler = Some(backends::compiler("v81"));
        set(options, &[("image-patches", "56")]);
    });
    equals_the_reference_on_the_npu(PADDLE, &bundle);
}

#[test]
fn what_paddleocr_cannot_be_is_named() {
    for (pointer, value, words) in [
        ("/vision_config/num_hidden_layers", json!(4), "encoder.layers.3"),
        ("/vision_config/image_size", json!(40), "position_embedding.weight"),
        ("/vision_config/layer_norm_eps", json!(1e-5), "layer_norm_eps is 0.00001"),
        ("/vision_config/patch_size", json!(300), "patches of at most 256"),
        ("/image_token_id", json!(500), "image_token_id is 500"),
        ("/hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
    ] {
        let report = with_key(PADDLE, pointer, value);
        assert!(report.contains(words), "{report}\n  does not say {words:?}");
    }
}
