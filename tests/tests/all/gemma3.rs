//! A second family from outside, `examples/gemma3`: layers that slide over the last positions among layers that see
//! all. Built by the commands of `docs/adding-a-family.md`, run by programs that do not know it, compared with
//! goldens that `transformers` made.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use qhx_base::compare::Distance;
use qhx_core::engine::{Model, Prompt, Request};
use qhx_tests::images::{Sights, answer};
use qhx_tests::outside::{self, Family};
use qhx_tests::replay::{
    accepted_exact, alike, generate, greedy_exact, hands_over, play, shortest, speculative_exact,
    step_exact, within,
};
use qhx_tests::tiny::{self, Case, Goldens};
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

/// The family, and the goldens of its tiny model.
struct Scene {
    family: Family,
    goldens: Goldens,
}

impl Scene {
    fn forge(&self, checkpoint: &Path, out: &str, options: &[&str]) -> PathBuf {
        let (success, said) = self.family.bundle(checkpoint, out, options);
        assert!(success, "{out}: {said}");
        self.family.folder.join(out)
    }

    fn open(&self, bundle: &Path) -> Model {
        self.family.open(bundle, backends::cpu())
    }

    fn cases(&self) -> Vec<&Case> {
        self.goldens.cases.iter().collect()
    }
}

fn made() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| Scene {
        family: Family::made("A second example: Gemma 3", "gemma3"),
        goldens: tiny::goldens(&tiny::fixture(TINY)),
    })
}

#[test]
fn sliding_and_full_layers_equal_the_reference() {
    let made = made();
    let bundle = made.family.folder.join("bundle");
    the_reference_s_tokens_and_logits(made, &bundle);
    a_context_shorter_than_the_window(made);
    going_back(&mut made.open(&bundle), &made.goldens);
    the_logits_that_are_dumped(made, &bundle);
    other_spellings(made, &bundle);
    // The manifest declares all that the family's op does with text.
    let mut declared = outside::open_declared(&bundle, &json!({}), backends::cpu());
    let distance =
        step_exact(&mut declared, &made.goldens, &shortest(&made.goldens, 2), "declared");
    assert!(distance.largest <= CPU_DISTANCE, "{distance:?}");
}

/// With prompts in chunks that are wider than the window, as the page makes them, in narrower ones, and token by token.
fn the_reference_s_tokens_and_logits(made: &Scene, wide: &Path) {
    let longest = made.goldens.cases.iter().map(|case| case.prompt_ids.len()).max();
    assert!(longest.unwrap() > 6 * WINDOW, "a prompt goes around the rings several times");
    let tiny = tiny::fixture(TINY);
    let narrow =
        made.forge(&tiny, "narrow", &["--cpu-only", "--max-ctx", "200", "--prefill", "5,7"]);
    let steps = made.forge(&tiny, "steps", &["--cpu-only", "--max-ctx", "200", "--prefill", "0"]);
    let contexts = ["--cpu-only", "--max-ctx", "200", "--contexts", "16,32"];
    let contexts = made.forge(&tiny, "contexts", &contexts);
    let shards = made.forge(&tiny, "shards", &["--cpu-only", "--max-ctx", "200", "--shards", "3"]);
    for (bundle, label) in [
        (wide, "prompts in chunks of 16"),
        (&narrow, "prompts in chunks of 5 and 7"),
        (&steps, "prompts token by token"),
        (&shards, "three shards"),
        (&contexts, "three contexts"),
    ] {
        let mut model = made.open(bundle);
        greedy_exact(&mut model, &made.cases(), label);
        if bundle == &*narrow {
            // Rings lose no row to a draft token that is not accepted.
            let found = speculative_exact(&mut model, &made.cases(), "6".parse().unwrap(), label);
            let case =
                made.cases().into_iter().find(|case| case.prompt_ids.len() > WINDOW).unwrap();
            let kept = accepted_exact(&mut model, case, 7, 2);
            eprintln!("{label}: {found:?}, logits after two of seven {kept:?}");
            assert!(found.drafted > 0 && kept.largest <= CPU_DISTANCE, "{found:?}, {kept:?}");
        }
        let found = step_exact(&mut model, &made.goldens, &made.cases(), label);
        within(found, CPU_DISTANCE, label);
        for chat in &made.goldens.chat {
            let played = play(&mut model, chat);
            for (index, pair) in chat.turns.windows(2).enumerate() {
                let reused = played[index + 1].reused_tokens;
                assert_eq!(reused, pair[1].reusable(&pair[0]), "{label}, {}, {index}", chat.id);
            }
        }
    }
}

/// There the rings hold all positions.
fn a_context_shorter_than_the_window(made: &Scene) {
    let context = WINDOW - 2;
    let options = ["--cpu-only", "--max-ctx", &context.to_string(), "--prefill", "0"];
    let bundle = made.forge(&tiny::fixture(TINY), "short", &options);
    let case = made.goldens.cases.iter().find(|case| case.id == "tiny").unwrap();
    let request = Request::greedy(Prompt::Text(case.prompt.clone()), case.output_ids.len());
    let tokens = generate(&mut made.open(&bundle), &request).tokens;
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

/// `qhx generate --dump` writes the logits after the prompt.
fn the_logits_that_are_dumped(made: &Scene, bundle: &Path) {
    let case = &made.goldens.cases[0];
    let folder = made.family.folder.join("dump");
    let [bundle, plugin, dump] =
        [bundle, &made.family.plugin, &folder].map(|p| p.to_str().unwrap());
    let limits = ["--max-new", "1", "--backend", "cpu"];
    let ask = ["generate", bundle, &case.prompt, "--plugin", plugin, "--dump", dump];
    let (success, text) = made.family.place.qhx(&[&ask[..], &limits].concat());
    assert!(success, "{text}");
    let expected = &made.goldens.logits(case)[0];
    let found = files::dumped(&folder, "logits", 0).unwrap();
    let found = &found[found.len() - expected.len()..];
    let distance = Distance::of(found, expected).unwrap();
    assert!(distance.largest <= CPU_DISTANCE, "{distance:?}");
}

/// The configuration that `transformers` 5 writes, and the layout of the multimodal checkpoints, whose decoder has
/// another prefix: the same graphs and the same parameters.
fn other_spellings(made: &Scene, bundle: &Path) {
    let tiny = tiny::fixture(TINY);
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
    let other = made.family.folder.join("other");
    for prefix in ["language_model.model.", "model.language_model."] {
        let _ = fs::remove_dir_all(&other);
        plugin_files::copy_folder(&tiny, &other);
        fs::write(other.join("config.json"), nested.to_string()).unwrap();
        files::edit_tensors(&other.join("model.safetensors"), |tensors| {
            for (name, ..) in &mut *tensors {
                *name = format!("{prefix}{}", name.strip_prefix("model.").unwrap());
            }
            tensors.push(("vision_tower.weight".to_owned(), tensors[0].1, vec![0], Vec::new()));
        });
        let name =
            ["--name", TINY, "--cpu-only", "--max-ctx", "200", "--prefill", "16", "--overwrite"];
        let same = made.forge(&other, "same", &name);
        let manifest = |bundle: &Path| {
            let path = qhx_core::manifest::Manifest::load(bundle).unwrap().path;
            let value: Value = files::json(&path);
            (value["params"].clone(), value["plan"].clone(), onnx(&value))
        };
        assert_eq!(manifest(&same), manifest(bundle), "{prefix}");
    }
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
    let made = made();
    let (checkpoint, sights) = (tiny::fixture(SEES), Sights::of(&tiny::fixture(SEES)));
    let options = ["--cpu-only", "--max-ctx", "160", "--prefill", "4,12"];
    let bundle = made.forge(&checkpoint, "sees", &options);
    let dump = tempfile::tempdir().unwrap();
    let mut model =
        outside::open_dumping(&bundle, &made.family.plugin, backends::cpu(), dump.path());
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
    let made = made();
    let forge = |checkpoint: &Path, out: &str, options: &[&str]| {
        made.family.bundle(checkpoint, out, options)
    };
    let sees = tiny::fixture(SEES);
    let narrow = ["--cpu-only", "--max-ctx", "160", "--prefill", "4,8"];
    let (success, said) = forge(&sees, "narrow-sees", &narrow);
    assert!(!success && said.contains("expected one of 9 or more"), "{said}");
    let (success, said) =
        forge(&sees, "blind", &[&narrow[..], &["--recipe-option", "towers=none"]].concat());
    assert!(success, "{said}");

    let other = made.family.folder.join("pans");
    plugin_files::copy_folder(&sees, &other);
    files::edit(&other.join("preprocessor_config.json"), |config| {
        config["do_pan_and_scan"] = json!(true);
    });
    let (success, said) = forge(&other, "pans-out", &["--cpu-only"]);
    assert!(!success && said.contains("do_pan_and_scan is true, expected false"), "{said}");
}

#[tier(qnn)]
fn images_equal_the_reference_on_the_npu() {
    let (made, sights) = (made(), Sights::of(&tiny::fixture(SEES)));
    let options = ["--target", "v81", "--max-ctx", "160", "--prefill", "12"];
    let bundle = made.forge(&tiny::fixture(SEES), "sees-v81", &options);
    let backend = backends::qnn();
    let dump = tempfile::tempdir().unwrap();
    let mut model = outside::open_dumping(&bundle, &made.family.plugin, backend, dump.path());
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
    let made = made();
    let (most, full) = if tiny::full_matrix() { (usize::MAX, true) } else { (2, false) };
    let goldens = tiny::goldens(&tiny::fixture(TINY)).brief();
    let bundle = made.family.folder.join("bundle-v81");
    let mut model = made.family.open(&bundle, backends::qnn());
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
    let int8 = ["--target", "v79", "--precision", "w8a16", "--max-ctx", "200", "--prefill", "16"];
    let bundle = made.forge(&tiny::fixture(TINY), "bundle-int8", &int8);
    let mut model = made.family.open(&bundle, backends::qnn());
    let cases = shortest(&goldens, if full { 3 } else { 1 });
    suite::passes(&mut model, &cases, usize::MAX, "w8a16");
}
