//! Gemma 3: layers that slide over the last positions among layers that see all, and images whose tokens see each
//! other. Goldens are of `transformers`.

use std::fs;
use std::path::Path;

use qhx_core::engine::{Model, Prompt, Request};
use qhx_forge::ForgeOptions;
use qhx_tests::forged::{Forged, set};
use qhx_tests::images::{Sights, answer};
use qhx_tests::replay::{
    accepted_exact, alike, generate, greedy_exact, hands_over, play, shortest, speculative_exact,
    step_exact, within,
};
use qhx_tests::tiny::{self, CPU, Case, Goldens, Variant};
use qhx_tests::{backends, files, plugin_files, suite};
use qhx_tiers::tier;
use serde_json::{Value, json};

const TINY: &str = "gemma3-tiny";
/// The checkpoint with a vision tower.
const SEES: &str = "gemma3-vision";
/// Positions that a sliding layer of the tiny model sees.
const WINDOW: usize = 12;
/// Logits on the CPU differ by rounding only. A tenth of what other families are allowed: the error function's GELU
/// in the place of the tanh moves no logit of this tiny model by more than 1.6e-3.
const CPU_DISTANCE: f64 = 1e-4;

/// A bundle for the CPU, unless `change` sets other options.
fn bundle(checkpoint: &Path, prefill: &[usize], change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(checkpoint, |options| {
        options.max_ctx = Some(200);
        options.prefill = Some(prefill.to_vec());
        change(options);
    })
}

#[test]
fn sliding_and_full_layers_equal_the_reference() {
    let (checkpoint, goldens) = tiny::model(TINY);
    let cases: Vec<_> = goldens.cases.iter().collect();
    let longest = cases.iter().map(|case| case.prompt_ids.len()).max();
    assert!(longest.unwrap() > 6 * WINDOW, "a prompt goes around the rings several times");
    let made = |prefill: &[usize], shards, contexts: &[usize]| {
        bundle(&checkpoint, prefill, |options| {
            (options.shards, options.contexts) = (shards, contexts.to_vec());
        })
    };
    for (bundle, label) in [
        (made(&[16], 1, &[]), "prompts in chunks of 16, wider than the window"),
        (made(&[5, 7], 1, &[]), "prompts in chunks of 5 and 7"),
        (made(&[], 1, &[]), "prompts token by token"),
        (made(&[16], 3, &[]), "three shards"),
        (made(&[16], 1, &[16, 32]), "three contexts"),
    ] {
        let mut model = bundle.on_cpu();
        greedy_exact(&mut model, &cases, label);
        within(step_exact(&mut model, &goldens, &cases, label), CPU_DISTANCE, label);
        for chat in &goldens.chat {
            let played = play(&mut model, chat);
            for (index, pair) in chat.turns.windows(2).enumerate() {
                let reused = played[index + 1].reused_tokens;
                assert_eq!(reused, pair[1].reusable(&pair[0]), "{label}, {}, {index}", chat.id);
            }
        }
    }
    going_back(&mut made(&[16], 1, &[]).on_cpu(), &goldens);
}

/// Rings lose no row to a draft token that is not accepted.
#[test]
fn rings_keep_what_draft_tokens_would_take() {
    let (checkpoint, goldens) = tiny::model(TINY);
    let cases: Vec<_> = goldens.cases.iter().collect();
    let mut model = bundle(&checkpoint, &[5, 7], |_| ()).on_cpu();
    let found = speculative_exact(&mut model, &cases, "6".parse().unwrap(), "drafts");
    let long: &Case = cases.iter().find(|case| case.prompt_ids.len() > WINDOW).unwrap();
    let kept = accepted_exact(&mut model, long, 7, 2);
    eprintln!("{found:?}, logits after two of seven {kept:?}");
    assert!(found.drafted > 0 && kept.largest <= CPU_DISTANCE, "{found:?}, {kept:?}");
}

/// There the rings hold all positions.
#[test]
fn a_context_shorter_than_the_window_ends_in_time() {
    let (checkpoint, goldens) = tiny::model(TINY);
    let context = WINDOW - 2;
    let bundle = bundle(&checkpoint, &[], |options| options.max_ctx = Some(context));
    let case = goldens.cases.iter().find(|case| case.id == "tiny").unwrap();
    let request = Request::greedy(Prompt::Text(case.prompt.clone()), case.output_ids.len());
    let tokens = generate(&mut bundle.on_cpu(), &request).tokens;
    let expected = context - case.prompt_ids.len();
    assert!(tokens.len() >= expected, "{tokens:?}");
    assert_eq!(tokens, case.output_ids[..tokens.len()]);
}

/// The rings no longer hold what a token in the middle of an earlier text sees, so the model goes back to what was
/// saved there; and says the same as at first.
fn going_back(model: &mut Model, goldens: &Goldens) {
    let turn = &goldens.chat[0].turns[0];
    assert!(turn.output_ids.len() > 2 * WINDOW);
    let request = Request::greedy(goldens.chat[0].prompt(0), turn.output_ids.len());
    model.reset().unwrap();
    assert_eq!(generate(model, &request).tokens, turn.output_ids);
    let again = generate(model, &request);
    assert_eq!(again.tokens, turn.output_ids);
    assert!(again.reused_tokens > 0, "the second time consumed the whole question again");
}

/// The configuration that `transformers` 5 writes, and the layout of the multimodal checkpoints, whose decoder has
/// another prefix: the same graphs and the same parameters.
#[test]
fn other_spellings_are_the_same_model() {
    let tiny = tiny::fixture(TINY);
    let expected = graphs(&tiny);
    let mut config: Value = files::json(&tiny.join("config.json"));
    let text = config.as_object_mut().unwrap();
    for key in ["rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"] {
        assert!(text.remove(key).is_some(), "{key}");
    }
    let dtype = text.remove("torch_dtype").unwrap();
    let kinds = ["sliding_attention", "sliding_attention", "full_attention"];
    let kinds: Vec<_> = kinds.into_iter().cycle().take(7).collect();
    text.insert("layer_types".to_owned(), json!(kinds));
    text.insert(
        "rope_parameters".to_owned(),
        json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }),
    );
    let nested = json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": dtype,
        "text_config": text,
    });
    for prefix in ["language_model.model.", "model.language_model."] {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("other");
        plugin_files::copy_folder(&tiny, &other);
        fs::write(other.join("config.json"), nested.to_string()).unwrap();
        files::edit_tensors(&other.join("model.safetensors"), |tensors| {
            for (name, ..) in &mut *tensors {
                *name = format!("{prefix}{}", name.strip_prefix("model.").unwrap());
            }
            tensors.push(("vision_tower.weight".to_owned(), tensors[0].1, vec![0], Vec::new()));
        });
        assert_eq!(graphs(&other), expected, "{prefix}");
    }
}

/// What a bundle of a checkpoint computes: parameters, plan, and hashes of graphs and weights.
fn graphs(checkpoint: &Path) -> (Value, Value, Vec<(String, String)>) {
    let bundle = bundle(checkpoint, &[16], |options| options.name = Some(TINY.to_owned()));
    let manifest = bundle.json();
    (manifest["params"].clone(), manifest["plan"].clone(), onnx(&manifest))
}

/// Hashes of the ONNX graphs and their weights.
fn onnx(manifest: &Value) -> Vec<(String, String)> {
    let files = manifest["artifacts"]["files"].as_object().unwrap();
    let files = files.iter().filter(|(path, _)| path.starts_with("onnx"));
    let files: Vec<_> = files
        .map(|(path, file)| (path.clone(), file["sha256"].as_str().unwrap().to_owned()))
        .collect();
    assert!(!files.is_empty(), "{manifest}");
    files
}

/// The multimodal checkpoint: its tower, and attention in both directions among the tokens of an image, which are more
/// than a sliding layer's window.
#[test]
fn images_equal_the_reference() {
    let (checkpoint, sights) = (tiny::fixture(SEES), Sights::of(&tiny::fixture(SEES)));
    let bundle = bundle(&checkpoint, &[4, 12], |_| ());
    let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
    let mut model = tiny::open_dumping(&bundle.manifest, backends::cpu(), &plugins, dump.path());
    let (cosine, off) = sights.features(model.op_mut(), dump.path(), "native", None, false, 0);
    eprintln!("images: features differ by at most {off:.2e}, cosine {cosine:.7}");
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
    let cases = sights.of_mode("native");
    sights.greedy_exact(&mut model, &cases, "images");
    within(sights.step_exact(&mut model, &cases, "images"), CPU_DISTANCE, "images");
    let [boat, again] = ["boat", "again"].map(|id| sights.case(id));
    model.reset().unwrap();
    answer(&mut model, sights.prompt(boat), &boat.golden);
    let second = answer(&mut model, sights.prompt(again), &again.golden);
    assert_eq!(second.tokens, again.golden.output_ids);
    assert!(second.reused_tokens > 20, "reused {}", second.reused_tokens);
}

#[test]
fn what_images_need_is_asked_for() {
    let sees = tiny::fixture(SEES);
    let narrow = |options: &mut ForgeOptions| {
        (options.max_ctx, options.prefill) = (Some(160), Some(vec![4, 8]));
    };
    let error = Forged::try_of(&sees, narrow).unwrap_err().to_string();
    assert!(error.contains("expected one of 9 or more"), "{error}");
    let blind = Forged::of(&sees, |options| {
        narrow(options);
        set(options, &[("towers", "none")]);
    });
    assert_eq!(blind.json()["plan"]["steps"][0]["host"], "decoder_generate");

    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("pans");
    plugin_files::copy_folder(&sees, &other);
    files::edit(&other.join("preprocessor_config.json"), |config| {
        config["do_pan_and_scan"] = json!(true);
    });
    let error = Forged::try_of(&other, |_| ()).unwrap_err().to_string();
    assert!(error.contains("do_pan_and_scan is true, expected false"), "{error}");
}

#[tier(qnn)]
fn images_equal_the_reference_on_the_npu() {
    let (checkpoint, sights) = (tiny::fixture(SEES), Sights::of(&tiny::fixture(SEES)));
    let bundle = bundle(&checkpoint, &[12], |options| {
        (options.max_ctx, options.compiler) = (Some(160), Some(backends::compiler("v81")));
    });
    let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
    let mut model = tiny::open_dumping(&bundle.manifest, backends::qnn(), &plugins, dump.path());
    let shown = Some(&["boat"][..]);
    let (cosine, _) = sights.features(model.op_mut(), dump.path(), "native", shown, false, 0);
    assert!(cosine >= 0.999, "features: cosine {cosine}");
    let cases = ["boat", "two"].map(|id| sights.case(id));
    sights.greedy_exact(&mut model, &cases, "v81");
    alike(sights.step_exact(&mut model, &cases, "v81"), 0.999, "v81");
}

/// On the emulator: prompts around the ring with the prompt graph and in steps, in fp16; int8 weights by the tolerant
/// gate.
#[tier(qnn)]
fn sliding_and_full_layers_equal_the_reference_on_the_npu() {
    let (most, full) = if tiny::full_matrix() { (usize::MAX, true) } else { (2, false) };
    let goldens = tiny::goldens(&tiny::fixture(TINY)).brief();
    let checkpoint = tiny::fixture(TINY);
    let variant = Variant { target: Some("v81"), prefill: &[16], ..CPU };
    let mut model = tiny::open(&tiny::bundle(&checkpoint, variant), backends::qnn()).unwrap();
    let mut cases = shortest(&goldens, most);
    // A prompt of more than one chunk.
    cases.extend(goldens.cases.iter().find(|case| case.id == "ends").filter(|_| !full));
    greedy_exact(&mut model, &cases[cases.len() - 1..], "fp16");
    alike(step_exact(&mut model, &goldens, &cases, "fp16"), 0.999, "v81 fp16");
    alike(hands_over(&mut model, &goldens, cases[0], "fp16"), 0.999, "tokens on the CPU");
    if full {
        for chat in &goldens.chat {
            play(&mut model, chat);
        }
    }
    drop(model);
    let int8 = Variant { target: Some("v79"), int8: true, ..variant };
    let mut model = tiny::open(&tiny::bundle(&checkpoint, int8), backends::qnn()).unwrap();
    let cases = shortest(&goldens, if full { 3 } else { 1 });
    suite::passes(&mut model, &cases, usize::MAX, "w8a16");
}
