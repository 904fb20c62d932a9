//! A family that sees, from outside: `examples/smolvlm`, whose images are cut into tiles. Built by the commands of
//! `docs/adding-a-family.md`, run by programs that do not know it, compared with goldens that `transformers` made.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use qhx_tests::images::{Sights, answer};
use qhx_tests::outside::{self, Family};
use qhx_tests::replay::{alike, within};
use qhx_tests::{
    backends, files,
    plugin_files::{self, workspace},
    tiny,
};
use qhx_tiers::tier;
use serde_json::{Value, json};

const TINY: &str = "smolvlm-tiny";
const PAGE: &str = "adding-a-family.md";
/// Logits and features on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

/// The family, what its tiny model sees, and the project's program and plugins before.
struct Scene {
    family: Family,
    before: Vec<(PathBuf, String)>,
    sights: Sights,
}

fn made() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| Scene {
        before: outside::hashes(&plugin_files::programs()),
        family: Family::made("The worked example: SmolVLM", "smolvlm"),
        sights: Sights::of(&tiny::fixture(TINY)),
    })
}

impl Scene {
    /// A bundle of the tiny checkpoint with other keys of its processor: what the program says, and whether it made
    /// one.
    fn forge(&self, out: &str, processor: Value) -> (bool, String) {
        let checkpoint = self.family.folder.join(format!("{out}-checkpoint"));
        plugin_files::copy_folder(&tiny::fixture(TINY), &checkpoint);
        files::edit(&checkpoint.join("preprocessor_config.json"), |config| {
            config.as_object_mut().unwrap().extend(processor.as_object().unwrap().clone());
        });
        let options = ["--cpu-only", "--max-ctx", "200", "--prefill", "0"];
        self.family.bundle(&checkpoint, out, &options)
    }
}

/// It is the plugin that does it, and the program around the recipe can do all that `qhx forge` can.
#[test]
fn the_family_runs_and_the_programs_stay_the_same_bytes() {
    let Scene { family, before, .. } = made();
    let (bundle, suite) = (family.folder.join("bundle"), tiny::fixture(TINY).join("suite.json"));
    let verify = ["verify", bundle.to_str().unwrap(), suite.to_str().unwrap(), "--backend", "cpu"];
    let (success, text) = family.place.qhx(&verify);
    assert!(!success && text.contains("host-op \"smolvlm_generate\" is not installed"), "{text}");
    assert_eq!(outside::hashes(&plugin_files::programs()), *before, "a program or plugin changed");

    let tiny = tiny::fixture(TINY);
    let (tiny, config) = (tiny.to_str().unwrap(), tiny.join("config.json"));
    let config = config.to_str().unwrap();
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let (code, [plan, said]) = family.forge(&["plan", config, "--json"]);
    assert_eq!((code, json(&plan)["family"].as_str()), (Some(0), Some("smolvlm")), "{said}");
    let (code, [error, said]) = family.forge(&["nowhere", "--out", "x", "--json"]);
    let error = json(&error);
    assert_eq!((code, &error["error"]["exit_code"]), (Some(4), &4.into()), "{said}");
    assert!(said.starts_with("error: nowhere: not a folder"), "{said}");
    let (code, [_, said]) = family.forge(&[tiny, "--out", "x", "--recipe-option", "a=b"]);
    assert!(code == Some(2) && said.contains("no recipe option \"a\""), "{code:?} {said}");
    let (code, [help, _]) = family.forge(&["--help"]);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(code == Some(0) && help.contains("SmolVLMForConditionalGeneration"), "{help}");
    let Some(libraries) = tiny::qnn_tier() else { return };
    eprintln!("estimate by {}", libraries.0.display());
    let (code, [estimate, said]) = family.forge(&["estimate", config, "--json"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(json(&estimate)["graphs"][0]["graph"], "decode", "{estimate}");
}

#[test]
fn the_page_counts_its_lines() {
    let page = fs::read_to_string(workspace().join("docs").join(PAGE)).unwrap();
    let folder = workspace().join("examples/smolvlm");
    let files = ["op/src", "recipe/src"].into_iter().flat_map(|part| {
        let files = fs::read_dir(folder.join(part)).unwrap();
        files.map(move |file| format!("{part}/{}", file.unwrap().file_name().display()))
    });
    for file in files {
        let text = fs::read_to_string(folder.join(&file)).unwrap();
        let said = format!("`{file}`, {} lines", text.lines().count());
        assert!(page.contains(&said), "{PAGE} does not say {said:?}");
    }
}

/// The op sees the plugin interface and the kit, and nothing else of the runtime.
#[test]
fn the_op_depends_on_the_interface_and_the_kit_alone() {
    for folder in ["smolvlm/op", "plugin-template"] {
        let manifest = format!("examples/{folder}/Cargo.toml");
        let text = fs::read_to_string(workspace().join(&manifest)).unwrap();
        let ours: Vec<_> = text.lines().filter(|line| line.starts_with("qhx")).collect();
        assert!(
            matches!(ours[..], [kit, op] if kit.starts_with("qhx-kit = ") && op.starts_with("qhx-op = ")),
            "{manifest}: {ours:?}"
        );
    }
}

#[test]
fn images_in_tiles_equal_the_reference() {
    let Scene { family: Family { folder, plugin, .. }, sights, .. } = made();
    let bundle = folder.join("bundle");
    let mut model = outside::open(&bundle, plugin, backends::cpu());
    near(&mut model, "native", "tiles");

    // What was seen stays in the caches.
    let [boat, again] = ["boat", "again"].map(|id| sights.case(id));
    model.reset().unwrap();
    let first = answer(&mut model, sights.prompt(boat), &boat.golden);
    assert_eq!(first.tokens, boat.golden.output_ids);
    let second = answer(&mut model, sights.prompt(again), &again.golden);
    assert_eq!(second.tokens, again.golden.output_ids);
    assert!(second.reused_tokens > 60, "reused {}", second.reused_tokens);
    drop(model);

    let dump = tempfile::tempdir().unwrap();
    let mut model = outside::open_dumping(&bundle, plugin, backends::cpu(), dump.path());
    let (cosine, off) = sights.features(model.op_mut(), dump.path(), "native", None, false, 0);
    eprintln!("tiles: features differ by at most {off:.2e}, cosine {cosine:.7}");
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
}

#[test]
fn an_image_that_is_not_cut_equals_the_reference() {
    let made = made();
    let (success, said) = made.forge("fixed", json!({"do_image_splitting": false}));
    assert!(success, "{said}");
    let dump = tempfile::tempdir().unwrap();
    let bundle = made.family.folder.join("fixed");
    let mut model =
        outside::open_dumping(&bundle, &made.family.plugin, backends::cpu(), dump.path());
    let (_, off) = made.sights.features(model.op_mut(), dump.path(), "fixed", None, false, 0);
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
    near(&mut model, "fixed", "whole images, token by token");
}

/// Tokens of prompt and answer, and logits.
fn near(model: &mut qhx_core::engine::Model, mode: &str, label: &str) {
    let sights = &made().sights;
    let cases = sights.of_mode(mode);
    assert!(cases.len() > 1);
    sights.greedy_exact(model, &cases, label);
    within(sights.step_exact(model, &cases, label), CPU_DISTANCE, label);
}

#[test]
fn what_a_processor_does_otherwise_is_refused() {
    for (out, processor, expected) in [
        (
            "tile",
            json!({"max_image_size": {"longest_edge": 12}}),
            "max_image_size.longest_edge is 12, expected 24, the tower's image_size",
        ),
        ("filter", json!({"resample": 0}), "resample is 0, expected 1 (Lanczos)"),
        ("scale", json!({"rescale_factor": 1}), "rescale_factor is 1, expected 1/255"),
        ("plain", json!({"do_normalize": false}), "do_normalize is false, expected true"),
        ("split", json!({"do_image_splitting": 1}), "do_image_splitting is 1, expected true or"),
    ] {
        let (success, said) = made().forge(out, processor);
        assert!(!success && said.contains(expected), "{said}");
    }
}

#[tier(qnn)]
fn images_in_tiles_equal_the_reference_on_the_npu() {
    let Scene { family: Family { folder, plugin, .. }, sights, .. } = made();
    let backend = backends::qnn();
    let dump = tempfile::tempdir().unwrap();
    let bundle = folder.join("bundle-v81");
    let mut model = outside::open_dumping(&bundle, plugin, backend, dump.path());
    let shown = Some(&["train"][..]);
    let (cosine, _) = sights.features(model.op_mut(), dump.path(), "native", shown, false, 0);
    assert!(cosine >= 0.999, "features: cosine {cosine}");
    let cases = ["boat", "plain"].map(|id| sights.case(id));
    sights.greedy_exact(&mut model, &cases, "v81");
    alike(sights.step_exact(&mut model, &cases[1..], "v81"), 0.999, "v81");
}
