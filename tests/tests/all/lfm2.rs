//! A family from outside, `examples/lfm2`: built by the commands of `docs/adding-a-family.md`, run
//! by programs that do not know it, compared with goldens that `transformers` made.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use qhx_core::manifest::Manifest;
use qhx_tests::outside::{self, Family};
use qhx_tests::plugin_files::{self, workspace};
use qhx_tests::replay::{alike, hands_over, shortest, speculative_exact, step_exact, within};
use qhx_tests::{backends, poison, tiny};
use qhx_tiers::tier;
use serde_json::json;

const PAGE: &str = "adding-a-family.md";

/// The family, and the project's program and plugins before.
struct Scene {
    family: Family,
    before: Vec<(PathBuf, String)>,
}

fn made() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| {
        let before = outside::hashes(&plugin_files::programs());
        Scene { family: Family::made("The worked example: LFM2.5", "lfm2"), before }
    })
}

/// Output of `verify` for a backend when every case passed.
fn passed(backend: &str) -> String {
    let cases = tiny::goldens(&tiny::fixture("lfm2-tiny")).cases.len();
    format!("passed: {cases} of {cases} cases passed (greedy_exact, backend {backend})")
}

#[test]
fn the_family_runs_and_the_programs_stay_the_same_bytes() {
    let Scene { family, before } = made();
    let Family { place, folder, plugin, .. } = family;
    // The same checkpoint, every case, compared in tokens with the reference's.
    let (bundle, plugin_file) = (folder.join("bundle"), plugin.to_str().unwrap());
    let suite = tiny::fixture("lfm2-tiny").join("suite.json");
    let verify = ["verify", bundle.to_str().unwrap(), suite.to_str().unwrap(), "--backend", "cpu"];
    let (success, text) = place.qhx(&[&verify[..], &["--plugin", plugin_file]].concat());
    assert!(success && text.contains(&passed("cpu")), "{text}");

    // In steps: logits, where they were recorded.
    let goldens = tiny::goldens(&tiny::fixture("lfm2-tiny"));
    let mut model = family.open(&bundle, backends::cpu());
    let every = shortest(&goldens, usize::MAX);
    within(step_exact(&mut model, &goldens, &every, "cpu"), 1e-3, "cpu");
    // Convolutions keep the rows of accepted draft tokens.
    let found = speculative_exact(&mut model, &every, "3".parse().unwrap(), "cpu");
    assert!(found.drafted > 0, "{found:?}");

    every_command_knows_the_family(family);

    // A broken row of the embedding table fails its token and spoils no other.
    let prompt = &goldens.cases[0].prompt_ids;
    let poisoned = (0..).find(|token| !prompt.contains(token)).unwrap();
    let manifest = Manifest::load(&bundle).unwrap().path;
    let manifest = poison::bundle(&manifest, &folder.join("poisoned"), poisoned);
    poison::survives(&mut family.open(&manifest, backends::cpu()), prompt, poisoned);

    // It is the plugin that does it: without it the program has no such op.
    let (success, text) = place.qhx(&verify);
    assert!(!success && text.contains("host-op \"lfm2_generate\" is not installed"), "{text}");
    assert_eq!(outside::hashes(&plugin_files::programs()), *before, "a program or plugin changed");
}

#[tier(qnn)]
fn the_family_runs_on_the_npu() {
    let Scene { family, .. } = made();
    let text = family.on_npu.as_ref().unwrap();
    assert!(text.contains(&passed("qnn")), "{text}");
    let backend = backends::qnn();
    let mut model = family.open(&family.folder.join("bundle-v81"), backend);
    let brief = tiny::goldens(&tiny::fixture("lfm2-tiny")).brief();
    let cases = shortest(&brief, 2);
    alike(step_exact(&mut model, &brief, &cases, "qnn"), 0.999, "qnn");
    alike(hands_over(&mut model, &brief, cases[1], "qnn"), 0.999, "tokens on the CPU");

    let config = tiny::fixture("lfm2-tiny").join("config.json");
    let estimate = ["estimate", config.to_str().unwrap(), "--json"];
    let (code, [estimate, said]) = family.forge(&estimate);
    assert_eq!(code, Some(0), "{said}");
    let estimate: serde_json::Value = serde_json::from_str(&estimate).unwrap();
    assert_eq!(estimate["graphs"][0]["graph"], "decode", "{estimate}");
}

/// The manifest declares all that the family's op does, so that its recipe is enough.
#[test]
fn a_recipe_alone_makes_a_family() {
    let folder = &made().family.folder;
    let goldens = tiny::goldens(&tiny::fixture("lfm2-tiny"));
    let states = json!({"states": ["conv"]});
    let mut model = outside::open_declared(&folder.join("bundle"), &states, backends::cpu());
    let every = shortest(&goldens, usize::MAX);
    within(step_exact(&mut model, &goldens, &every, "cpu"), 1e-3, "cpu");
}

/// Experts are the kit's on both sides: the op does not know of them.
#[test]
fn experts_of_the_family_need_nothing_from_its_op() {
    let Scene { family, .. } = made();
    let (checkpoint, goldens) = tiny::model("lfm2-moe");
    for (out, prefill) in [("moe", "0"), ("moe-prefill", "4")] {
        let options = ["--cpu-only", "--max-ctx", "64", "--prefill", prefill];
        let (success, said) = family.bundle(&checkpoint, out, &options);
        assert!(success, "{said}");
        let mut model = family.open(&family.folder.join(out), backends::cpu());
        let every = shortest(&goldens, usize::MAX);
        let label = format!("lfm2-moe, prefill {prefill}");
        within(step_exact(&mut model, &goldens, &every, &label), 1e-4, &label);
    }
}

/// The program around the recipe can do all that `qhx forge` can.
fn every_command_knows_the_family(family: &Family) {
    let tiny = tiny::fixture("lfm2-tiny");
    let (tiny, config) = (tiny.to_str().unwrap(), tiny.join("config.json"));
    let config = config.to_str().unwrap();
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();

    let (code, [plan, _]) = family.forge(&["plan", config, "--json"]);
    assert_eq!((code, json(&plan)["family"].as_str()), (Some(0), Some("lfm2")), "{plan}");
    let synthetic = ["--synthetic", config, "--out", "drawn", "--cpu-only", "--json"];
    let (code, [report, said]) = family.forge(&synthetic);
    assert_eq!((code, json(&report)["family"].as_str()), (Some(0), Some("lfm2")), "{said}");
    let (code, [error, said]) = family.forge(&["nowhere", "--out", "x", "--json"]);
    let error = json(&error);
    assert_eq!((code, &error["error"]["exit_code"]), (Some(4), &4.into()), "{said}");
    assert!(said.starts_with("error: nowhere: not a folder"), "{said}");
    let (code, [_, said]) = family.forge(&[tiny, "--out", "x", "--recipe-option", "a=b"]);
    assert!(code == Some(2) && said.contains("no recipe option \"a\""), "{code:?} {said}");
    let (code, [help, _]) = family.forge(&["--help"]);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        code == Some(0) && help.contains("Lfm2ForCausalLM, Lfm2MoeForCausalLM, LlamaBidirectional"),
        "{help}"
    );
}

#[test]
fn the_page_counts_its_lines() {
    let page = fs::read_to_string(workspace().join("docs").join(PAGE)).unwrap();
    for example in ["lfm2", "gemma3", "smolvlm"] {
        let folder = workspace().join("examples").join(example);
        let parts = ["op/src", "recipe/src"];
        let files = parts.iter().flat_map(|part| {
            let files = fs::read_dir(folder.join(part)).unwrap();
            files.map(move |file| format!("{part}/{}", file.unwrap().file_name().display()))
        });
        for file in files {
            let path = folder.join(&file);
            let text = fs::read_to_string(path).unwrap();
            let said = format!("`{file}`, {} lines", text.lines().count());
            assert!(page.contains(&said), "{PAGE} does not say {said:?}");
        }
    }
}

/// The op sees the plugin interface and the kit, and nothing else of the runtime.
#[test]
fn the_op_depends_on_the_interface_and_the_kit_alone() {
    for folder in ["lfm2/op", "gemma3/op", "smolvlm/op", "plugin-template"] {
        let manifest = format!("examples/{folder}/Cargo.toml");
        let text = fs::read_to_string(workspace().join(&manifest)).unwrap();
        let ours: Vec<_> = text.lines().filter(|line| line.starts_with("qhx")).collect();
        assert!(
            matches!(ours[..], [kit, op] if kit.starts_with("qhx-kit = ") && op.starts_with("qhx-op = ")),
            "{manifest}: {ours:?}"
        );
    }
}
