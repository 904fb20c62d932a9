//! Families that see an image in one pass of an encoder: PaddleOCR-VL, PaliGemma, Mistral 3. Goldens are of
//! `transformers`.

use std::path::Path;
use std::time::{Duration, Instant};

use qhx::golden::Golden;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::engine::{Generation, Part, Prompt, Request};
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
const PALI: &str = "vision/paligemma";
const MISTRAL: &str = "vision/mistral3";

/// A bundle for a context of 200 tokens, for the CPU unless `change` sets other options.
fn bundle(name: &str, prefill: &[usize], change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(name), |options| {
        (options.max_ctx, options.prefill) = (Some(200), Some(prefill.to_vec()));
        change(options);
    })
}

/// Compares pixels, features, tokens and logits of all cases, the follow-up question with what the caches hold.
fn equals_the_reference(name: &str, bundle: &Forged) {
    equals(&tiny::fixture(name), bundle);
}

fn equals(checkpoint: &Path, bundle: &Forged) {
    let (name, sights) = (checkpoint.display().to_string(), Sights::of(checkpoint));
    let name = name.as_str();
    let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
    let mut model = tiny::open_dumping(&bundle.manifest, backends::cpu(), &plugins, dump.path());
    let (cosine, off) = sights.features(model.op_mut(), dump.path(), "native", None, false, 0);
    eprintln!("{name}: features differ by at most {off:.2e}, cosine {cosine:.7}");
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
    let cases = sights.of_mode("native");
    assert!(cases.len() >= 4);
    sights.greedy_exact(&mut model, &cases, name);
    within(sights.step_exact(&mut model, &cases, name), CPU_DISTANCE, name);
    // What the forge records of every bundle.
    let mut model = tiny::open(&bundle.manifest, backends::cpu()).unwrap();
    let golden = Golden::make(&mut model, false, &mut |_| ()).unwrap();
    assert!(golden.steps.len() > 1, "{name}");
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

/// Two cases on the emulator of the NPU, and the features of an image, of bundles made with these options.
fn equals_the_reference_on_the_npu(name: &str, prefill: usize, keys: &[(&str, &str)]) {
    let sights = Sights::of(&tiny::fixture(name));
    for target in tiny::targets() {
        let bundle = bundle(name, &[prefill], |options| {
            options.compiler = Some(backends::compiler(target));
            set(options, keys);
        });
        let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
        let mut model =
            tiny::open_dumping(&bundle.manifest, backends::qnn(), &plugins, dump.path());
        let shown = Some(&["boat"][..]);
        let (cosine, _) = sights.features(model.op_mut(), dump.path(), "native", shown, false, 0);
        assert!(cosine >= 0.999, "{target}: features: cosine {cosine}");
        let cases = ["boat", "two"].map(|id| sights.case(id));
        sights.greedy_exact(&mut model, &cases, target);
        alike(sights.step_exact(&mut model, &cases, target), 0.999, target);
    }
}

/// The error of a prompt with an image of these sides and a word.
fn refused(bundle: &Forged, width: u32, height: u32) -> Error {
    shown(bundle, width, height).unwrap_err()
}

/// Two tokens after a prompt with an image of these sides and a word.
fn shown(bundle: &Forged, width: u32, height: u32) -> Result<Generation> {
    let mut model = tiny::open(&bundle.manifest, backends::cpu()).unwrap();
    let pixels = vec![90; (width * height * 3) as usize];
    let image = Media::image(pixels, width, height).unwrap();
    let parts = vec![Part::Media(image), Part::Text("Seen:".to_owned())];
    let request = Request::greedy(Prompt::Parts(parts), 2);
    try_generate(&mut model, &request)
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
        set(options, &[("image-patches", "24,128")]);
    });
    equals_the_reference(PADDLE, &bundle);
    assert!(reused(PADDLE, &bundle) > 20);
    let error = refused(&bundle, 20_000, 2);
    assert_eq!(error.kind(), ErrorKind::Prompt);
    assert!(error.message().contains("factor of 200"), "{error}");
}

#[tier(qnn)]
fn paddleocr_gives_the_reference_s_tokens_on_the_npu() {
    equals_the_reference_on_the_npu(PADDLE, 16, &[("image-patches", "56")]);
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

/// Of two images and a question, too: no template is published, and the bundle has the processor's way as one.
#[test]
fn a_prompt_of_paligemma_sees_itself_as_the_reference_s_does() {
    let bundle = bundle(PALI, &[4, 70], |options| options.shards = 2);
    equals_the_reference(PALI, &bundle);
    let sights = Sights::of(&tiny::fixture(PALI));
    let mut model = tiny::open(&bundle.manifest, backends::cpu()).unwrap();
    let [boat, long] = ["boat", "long"].map(|id| sights.case(id));
    answer(&mut model, sights.prompt(boat), &boat.golden);
    // What the image's tokens became depends on the text behind them.
    assert_eq!(answer(&mut model, sights.prompt(long), &long.golden).reused_tokens, 0);
    let image = || Part::Media(sights.image("boat"));
    let parts = vec![image(), image(), image(), image(), Part::Text("Seen:\n".to_owned())];
    let error = try_generate(&mut model, &Request::greedy(Prompt::Parts(parts), 2)).unwrap_err();
    assert!(error.message().contains("tokens that see each other"), "{error}");
}

#[tier(qnn)]
fn paligemma_gives_the_reference_s_tokens_on_the_npu() {
    equals_the_reference_on_the_npu(PALI, 70, &[]);
}

#[test]
fn what_paligemma_cannot_be_is_named() {
    for (pointer, value, words) in [
        ("/vision_config/num_hidden_layers", json!(3), "encoder.layers.2"),
        ("/vision_config/projection_dim", json!(44), "projection_dim is 44, expected 48"),
        ("/text_config/model_type", json!("bert"), "model_type is \"bert\""),
        ("/text_config/num_hidden_layers", json!(4), "layers.3"),
        ("/vision_config/image_size", json!(30), "expected 30"),
    ] {
        let report = with_key(PALI, pointer, value);
        assert!(report.contains(words), "{report}\n  does not say {words:?}");
    }
    let narrow = Forged::try_of(&tiny::fixture(PALI), |options| {
        (options.max_ctx, options.prefill) = (Some(200), Some(vec![16]));
    });
    let report = narrow.unwrap_err().report().to_string();
    assert!(report.contains("expected one of 20 or more"), "{report}");
}

#[test]
fn mistral3_sees_rows_of_tokens_as_the_reference_does() {
    let bundle = bundle(MISTRAL, &[7], |options| {
        options.shards = 2;
        set(options, &[("image-patches", "48,196")]);
    });
    equals_the_reference(MISTRAL, &bundle);
    assert!(reused(MISTRAL, &bundle) > 20);
    // One token, which stops the reference.
    assert!(shown(&bundle, 1, 1).is_ok());
    let error = refused(&bundle, 20_000, 2);
    assert_eq!(error.kind(), ErrorKind::Prompt);
    assert!(error.message().contains("76×0") || error.message().contains("84×0"), "{error}");
}

/// An image that the largest graph does not hold is made smaller, in its shape.
#[test]
fn mistral3_makes_images_smaller_for_its_largest_graph() {
    let bundle = bundle(MISTRAL, &[16], |options| set(options, &[("image-patches", "48")]));
    let sights = Sights::of(&tiny::fixture(MISTRAL));
    let mut model = tiny::open(&bundle.manifest, backends::cpu()).unwrap();
    let prompt = sights.prompt(sights.case("boat"));
    let ids = model.encode_prompt(&prompt).unwrap();
    let shown = ids.iter().filter(|id| sights.is_pad(**id)).count();
    assert!((6..=12).contains(&shown), "{shown} tokens");
    assert!(try_generate(&mut model, &Request::greedy(prompt, 2)).is_ok());
}

#[tier(qnn)]
fn mistral3_gives_the_reference_s_tokens_on_the_npu() {
    equals_the_reference_on_the_npu(MISTRAL, 16, &[("image-patches", "196")]);
}

#[test]
fn what_mistral3_cannot_be_is_named() {
    for (pointer, value, words) in [
        ("/vision_config/num_hidden_layers", json!(4), "transformer.layers.3"),
        ("/vision_config/head_dim", json!(16), "head_dim is 16, expected 12"),
        ("/vision_config/hidden_act", json!("relu"), "hidden_act is \"relu\""),
        ("/vision_feature_layer", json!(-2), "vision_feature_layer is -2"),
        ("/projector_hidden_act", json!("silu"), "projector_hidden_act is \"silu\""),
        ("/spatial_merge_size", json!(3), "merging_layer.weight"),
    ] {
        let report = with_key(MISTRAL, pointer, value);
        assert!(report.contains(words), "{report}\n  does not say {words:?}");
    }
}

/// Max time of a prompt with an extreme image, on a busy machine.
const LONGEST: Duration = Duration::from_secs(60);

/// A checkpoint of each family that sees, and options of its recipe.
const SEEING: [(&str, &[(&str, &str)]); 11] = [
    (PADDLE, &[("image-patches", "24,128")]),
    (PALI, &[]),
    (MISTRAL, &[("image-patches", "48,196")]),
    ("vision/qwen2vl", &[("image-patches", "144")]),
    ("qwen25vl-unseen", &[("image-patches", "144")]),
    ("qwen3vl-unseen", &[("image-patches", "144")]),
    ("vision/internvl", &[]),
    ("vision/lfm2vl", &[]),
    ("vision/docling", &[]),
    ("smolvlm-tiny", &[]),
    ("gemma3-vision", &[]),
];

/// One pixel, and sides that differ by thousands: an answer, or an error that has the sides.
#[test]
fn extreme_images_are_answered_or_refused_by_their_sides() {
    let mut wrong = Vec::new();
    for (name, keys) in SEEING {
        let bundle = Forged::of(&tiny::fixture(name), |options| {
            (options.max_ctx, options.prefill) = (Some(150), Some(vec![70]));
            set(options, keys);
        });
        for (width, height) in [(1, 1), (1, 20_000), (20_000, 1), (20_000, 2), (3, 2000)] {
            let start = Instant::now();
            let found = shown(&bundle, width, height);
            let label = format!("{name}: {width}×{height}");
            eprintln!("{label}: {:?}, {:?}", start.elapsed(), found.as_ref().err());
            if start.elapsed() > LONGEST {
                wrong.push(format!("{label}: {:?}", start.elapsed()));
            }
            let Err(error) = found else { continue };
            let report = error.report().to_string();
            // The sides are those given, or those that the processor makes of them.
            let says = report.contains('×') && report.contains("expected");
            if error.kind() != ErrorKind::Prompt || !says {
                wrong.push(format!("{label}: {:?}: {report}", error.kind()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Any other checkpoint with goldens, such as one that `tests/oracle/seeing.py` made in other shapes.
#[tier(by_hand = "QHX_TEST_SEEING")]
fn a_named_checkpoint_gives_the_references_tokens_and_logits() {
    let folder = std::env::var_os("QHX_TEST_SEEING").unwrap();
    let folder = Path::new(&folder);
    let config: Value = files::json(&folder.join("config.json"));
    let bundle = Forged::of(folder, |options| {
        (options.max_ctx, options.prefill) = (Some(300), Some(vec![150]));
        let class = config["architectures"][0].as_str().unwrap();
        if !class.starts_with("PaliGemma") && !class.starts_with("Gemma3") {
            set(options, &[("image-patches", "396")]);
        }
    });
    equals(folder, &bundle);
}

/// As the card of Gemma 3 4B lays it out: one module more in the tower, keys that the class has by default left out,
/// the processor in two files.
#[test]
fn gemma3_as_published_needs_no_options() {
    let (name, folder) = ("gemma3-vision", tempfile::tempdir().unwrap());
    let checkpoint = folder.path().join("checkpoint");
    plugin_files::copy_folder(&tiny::fixture(name), &checkpoint);
    files::edit_tensors(&checkpoint.join("model.safetensors"), |tensors| {
        for (name, ..) in tensors {
            *name = name.replace("vision_tower.", "vision_tower.vision_model.");
        }
    });
    files::edit(&checkpoint.join("config.json"), |config| {
        let text = config["text_config"].as_object_mut().unwrap();
        text.retain(|key, _| {
            let kept = ["dim", "size", "num_", "model_type", "max_", "query", "window"];
            kept.iter().any(|part| key.contains(part))
        });
        text.insert("rope_scaling".to_owned(), json!({"factor": 8.0, "rope_type": "linear"}));
        text.insert("sliding_window_pattern".to_owned(), json!(2));
        let vision = config["vision_config"].as_object_mut().unwrap();
        vision.retain(|key, _| ["size", "num_hidden", "num_att"].iter().any(|p| key.contains(p)));
        let config = config.as_object_mut().unwrap();
        config.remove("tie_word_embeddings");
        let dtype = config.remove("dtype").unwrap();
        config.insert("torch_dtype".to_owned(), dtype);
    });
    let processor = json!({"image_seq_length": 9, "processor_class": "Gemma3Processor"});
    std::fs::write(checkpoint.join("processor_config.json"), processor.to_string()).unwrap();
    files::edit(&checkpoint.join("preprocessor_config.json"), |processor| {
        processor["image_seq_length"] = json!(9);
        processor["rescale_factor"] = json!(1.0 / 255.0);
    });
    equals_the_reference(name, &Forged::of(&checkpoint, |_| ()));
}
