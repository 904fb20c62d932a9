//! SmolVLM, whose images are cut into tiles: a family of the program that is the example of one from outside,
//! `examples/smolvlm`. Goldens are of `transformers`.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;

use qhx_base::Result;
use qhx_core::engine::Model;
use qhx_forge::ForgeOptions;
use qhx_tests::forged::Forged;
use qhx_tests::images::{Sights, answer};
use qhx_tests::outside::{self, Outside};
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

/// A bundle for the CPU, unless `change` sets other options.
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

/// A bundle of the tiny checkpoint with other keys of its processor.
fn processed(processor: Value) -> Result<Forged> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    plugin_files::copy_folder(&tiny::fixture(TINY), &checkpoint);
    files::edit(&checkpoint.join("preprocessor_config.json"), |config| {
        config.as_object_mut().unwrap().extend(processor.as_object().unwrap().clone());
    });
    bundle(&checkpoint, &[], |_| ())
}

/// Opens a bundle on the CPU, with what it computes dumped into a folder.
fn dumping(bundle: &Forged, dump: &Path) -> Model {
    tiny::open_dumping(&bundle.manifest, backends::cpu(), &tiny::plugins(), dump)
}

/// The page's commands, in an empty folder, with programs that do not know the op by its new name.
#[tier(full)]
fn the_page_makes_the_family_from_outside() {
    let before = outside::hashes(&plugin_files::programs());
    let place = Outside::new(&plugin_files::programs()[0]);
    let mut blocks = outside::commands(PAGE, "The worked example: SmolVLM");
    blocks.retain(|block| !block.commands.contains("--target") || tiny::qnn_tier().is_some());
    place.run(&blocks);

    // It is the plugin that does it.
    let suite = tiny::fixture(TINY).join("suite.json");
    let verify = ["verify", "smolvlm/bundle", suite.to_str().unwrap(), "--backend", "cpu"];
    let (success, text) = place.qhx(&verify);
    assert!(!success && text.contains("host-op \"my_smolvlm\" is not installed"), "{text}");
    assert_eq!(outside::hashes(&plugin_files::programs()), before, "a program or plugin changed");
}

/// As the other families, and with golden steps.
#[test]
fn the_program_that_people_install_forges_and_runs_it() {
    let qhx = &plugin_files::programs()[0];
    let (place, tiny) = (Outside::new(qhx), tiny::fixture(TINY));
    let suite = tiny.join("suite.json");
    let [tiny, suite] = [&tiny, &suite].map(|path| path.to_str().unwrap());
    for (arguments, says) in [
        (&["forge", tiny, "--out", "made", "--cpu-only", "--max-ctx", "200"][..], "made/smolvlm"),
        (&["verify", "made", suite, "--backend", "cpu"], "passed: 1 of 1 cases passed"),
    ] {
        let (code, [printed, said]) = place.program(qhx, arguments);
        assert!(code == Some(0) && printed.contains(says), "{printed}\n{said}");
    }
    let manifest: Value = files::json(&place.folder().join("made/smolvlm-tiny.json"));
    assert!(manifest["artifacts"]["golden"].is_string(), "{manifest}");
}

/// It can do all that `qhx forge` can.
#[test]
fn the_program_around_the_recipe_has_the_forges_commands() {
    let program = plugin_files::build_program("smolvlm-forge");
    let place = Outside::new(&program);
    let forge = |arguments: &[&str]| place.program(&program, arguments);
    let tiny = tiny::fixture(TINY);
    let (tiny, config) = (tiny.to_str().unwrap(), tiny.join("config.json"));
    let config = config.to_str().unwrap();
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();

    let (code, [_, said]) = forge(&[tiny, "--out", "made", "--cpu-only", "--prefill", "0"]);
    assert_eq!(code, Some(0), "{said}");
    let manifest: Value = files::json(&place.folder().join("made/smolvlm-tiny.json"));
    assert_eq!(manifest["plan"]["steps"][0]["host"], "smolvlm_generate");
    let (code, [plan, said]) = forge(&["plan", config, "--json"]);
    assert_eq!((code, json(&plan)["family"].as_str()), (Some(0), Some("smolvlm")), "{said}");
    let (code, [error, said]) = forge(&["nowhere", "--out", "x", "--json"]);
    let error = json(&error);
    assert_eq!((code, &error["error"]["exit_code"]), (Some(4), &4.into()), "{said}");
    assert!(said.starts_with("error: nowhere: not a folder"), "{said}");
    let (code, [_, said]) = forge(&[tiny, "--out", "x", "--recipe-option", "a=b"]);
    assert!(code == Some(2) && said.contains("no recipe option \"a\""), "{code:?} {said}");
    let (code, [help, _]) = forge(&["--help"]);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(code == Some(0) && help.contains("SmolVLMForConditionalGeneration"), "{help}");
    let Some(libraries) = tiny::qnn_tier() else { return };
    eprintln!("estimate by {}", libraries.0.display());
    let (code, [estimate, said]) = forge(&["estimate", config, "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let found = json(&estimate);
    let mut graphs = found["graphs"].as_array().unwrap().iter();
    assert!(graphs.any(|graph| graph["graph"] == "decode"), "{estimate}");
}

#[test]
fn the_page_counts_its_lines() {
    let page = fs::read_to_string(workspace().join("docs").join(PAGE)).unwrap();
    let folder = workspace().join("examples/smolvlm");
    let files = ["op/src", "plugin/src", "recipe/src"].into_iter().flat_map(|part| {
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
    let sights = Sights::of(&tiny::fixture(TINY));
    let bundle = bundle(&tiny::fixture(TINY), &[16], |_| ()).unwrap();
    let mut model = bundle.on_cpu();
    near(&mut model, &sights, "native", "tiles");

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
    let mut model = dumping(&bundle, dump.path());
    let (cosine, off) = sights.features(model.op_mut(), dump.path(), "native", None, false, 0);
    eprintln!("tiles: features differ by at most {off:.2e}, cosine {cosine:.7}");
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
}

#[test]
fn an_image_that_is_not_cut_equals_the_reference() {
    let sights = Sights::of(&tiny::fixture(TINY));
    let bundle = processed(json!({"do_image_splitting": false})).unwrap();
    let dump = tempfile::tempdir().unwrap();
    let mut model = dumping(&bundle, dump.path());
    let (_, off) = sights.features(model.op_mut(), dump.path(), "fixed", None, false, 0);
    assert!(off <= CPU_DISTANCE, "features differ by {off:e}");
    near(&mut model, &sights, "fixed", "whole images, token by token");
}

/// Tokens of prompt and answer, and logits.
fn near(model: &mut Model, sights: &Sights, mode: &str, label: &str) {
    let cases = sights.of_mode(mode);
    assert!(cases.len() > 1);
    sights.greedy_exact(model, &cases, label);
    within(sights.step_exact(model, &cases, label), CPU_DISTANCE, label);
}

#[test]
fn what_a_processor_does_otherwise_is_refused() {
    for (processor, expected) in [
        (
            json!({"max_image_size": {"longest_edge": 12}}),
            "max_image_size.longest_edge is 12, expected 24, the tower's image_size",
        ),
        (json!({"resample": 0}), "resample is 0, expected 1 (Lanczos)"),
        (json!({"rescale_factor": 1}), "rescale_factor is 1, expected 1/255"),
        (json!({"do_normalize": false}), "do_normalize is false, expected true"),
        (json!({"do_image_splitting": 1}), "do_image_splitting is 1, expected true or"),
    ] {
        let error = processed(processor).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[tier(qnn)]
fn images_in_tiles_equal_the_reference_on_the_npu() {
    let sights = Sights::of(&tiny::fixture(TINY));
    let bundle = bundle(&tiny::fixture(TINY), &[16], |options| {
        options.compiler = Some(backends::compiler("v81"));
    });
    let bundle = bundle.unwrap();
    let (dump, plugins) = (tempfile::tempdir().unwrap(), tiny::plugins());
    let mut model = tiny::open_dumping(&bundle.manifest, backends::qnn(), &plugins, dump.path());
    let shown = Some(&["train"][..]);
    let (cosine, _) = sights.features(model.op_mut(), dump.path(), "native", shown, false, 0);
    assert!(cosine >= 0.999, "features: cosine {cosine}");
    let cases = ["boat", "plain"].map(|id| sights.case(id));
    sights.greedy_exact(&mut model, &cases, "v81");
    alike(sights.step_exact(&mut model, &cases[1..], "v81"), 0.999, "v81");
}
