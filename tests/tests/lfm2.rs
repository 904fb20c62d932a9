//! A family from outside, `examples/lfm2`: built by the commands of `docs/adding-a-family.md`, run
//! by programs that do not know it, compared with goldens that `transformers` made.

#![cfg(target_os = "linux")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use qhx_core::CancelToken;
use qhx_core::backend::Backend;
use qhx_core::compare::Distance;
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::manifest::Manifest;
use qhx_core::op::Segment;
use qhx_core::sampling::argmax;
use qhx_plugins::{PluginOptions, Plugins};
use qhx_tests::outside::{self, Outside};
use qhx_tests::plugin_files::{library_name, workspace};
use qhx_tests::{backends, poison, toys};

const PAGE: &str = "adding-a-family.md";
const SECTION: &str = "The worked example: LFM2.5";

#[test]
fn the_family_runs_on_both_backends_and_the_programs_stay_the_same_bytes() {
    let programs = outside::programs();
    let before = outside::hashes(&programs);
    let place = Outside::new(&programs[0]);
    let folder = place.folder().join("lfm2");
    let mut blocks = outside::commands(PAGE, SECTION);
    let libraries = toys::qnn_tier();
    let on_npu = blocks.iter().position(|block| block.commands.contains("--target")).unwrap();
    if libraries.is_none() {
        blocks.truncate(on_npu);
    }
    let printed = place.run(&blocks);

    // The same checkpoint, every case, compared in tokens with the reference's.
    let plugin = folder.join("target/release").join(library_name("lfm2_op"));
    let (bundle, plugin_file) = (folder.join("bundle"), plugin.to_str().unwrap());
    let suite = toys::fixture("lfm2-toy").join("suite.json");
    let cases = toys::goldens(&toys::fixture("lfm2-toy")).cases.len();
    let verify = ["verify", bundle.to_str().unwrap(), suite.to_str().unwrap(), "--backend", "cpu"];
    let (success, text) = place.qhx(&[&verify[..], &["--plugin", plugin_file]].concat());
    let passed = format!("passed: {cases} of {cases} cases passed (greedy_exact, backend ");
    assert!(success && text.contains(&format!("{passed}cpu)")), "{text}");
    if libraries.is_some() {
        let text = &printed[on_npu];
        assert!(text.contains(&format!("{passed}qnn)")), "{text}");
    }

    // In steps: logits, where they were recorded.
    steps(&bundle, &plugin, backends::cpu(), usize::MAX, |id, found, expected| {
        let distance = Distance::of(found, expected).unwrap();
        assert!(distance.largest <= 1e-3, "cpu, {id}: {distance:?}");
    });
    if let Some(libraries) = &libraries {
        let bundle = folder.join("bundle-v81");
        steps(&bundle, &plugin, backends::qnn(libraries), 2, |id, found, expected| {
            let cosine = Distance::of(found, expected).unwrap().cosine;
            assert!(cosine >= 0.999, "qnn, {id}: cosine {cosine}");
        });
    }

    every_command_knows_the_family(&place, &folder, libraries.is_some());

    // A broken row of the embedding table fails its token and spoils no other.
    let goldens = toys::goldens(&toys::fixture("lfm2-toy"));
    let prompt = &goldens.cases[0].prompt_ids;
    let poisoned = (0..).find(|token| !prompt.contains(token)).unwrap();
    let manifest = Manifest::load(&bundle).unwrap().path;
    let manifest = poison::bundle(&manifest, &folder.join("poisoned"), poisoned);
    poison::survives(&mut open(&manifest, &plugin, backends::cpu()), prompt, poisoned);

    // It is the plugin that does it: without it the program has no such op.
    let (success, text) = place.qhx(&verify);
    assert!(!success && text.contains("host-op \"lfm2_generate\" is not installed"), "{text}");
    assert_eq!(outside::hashes(&outside::programs()), before, "a program or plugin changed");
}

/// The program around the recipe can do all that `qhx forge` can.
fn every_command_knows_the_family(place: &Outside, folder: &Path, libraries: bool) {
    let program = folder.join("target/release/lfm2-forge");
    let toy = toys::fixture("lfm2-toy");
    let (toy, config) = (toy.to_str().unwrap(), toy.join("config.json"));
    let config = config.to_str().unwrap();
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();

    let (code, [plan, _]) = place.program(&program, &["plan", config, "--json"]);
    assert_eq!((code, json(&plan)["family"].as_str()), (Some(0), Some("lfm2")), "{plan}");
    let synthetic = ["--synthetic", config, "--out", "drawn", "--cpu-only", "--json"];
    let (code, [report, said]) = place.program(&program, &synthetic);
    assert_eq!((code, json(&report)["family"].as_str()), (Some(0), Some("lfm2")), "{said}");
    let (code, [error, said]) = place.program(&program, &["nowhere", "--out", "x", "--json"]);
    let error = json(&error);
    assert_eq!((code, &error["error"]["exit_code"]), (Some(4), &4.into()), "{said}");
    assert!(said.starts_with("error: nowhere: not a folder"), "{said}");
    let (code, [_, said]) = place.program(&program, &[toy, "--out", "x", "--recipe-option", "a=b"]);
    assert!(code == Some(2) && said.contains("no recipe option \"a\""), "{code:?} {said}");
    let (code, [help, _]) = place.program(&program, &["--help"]);
    assert!(code == Some(0) && help.contains("Lfm2ForCausalLM, LlamaBidirectionalModel"), "{help}");
    if libraries {
        let (code, [estimate, said]) = place.program(&program, &["estimate", config, "--json"]);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(json(&estimate)["graphs"][0]["graph"], "decode", "{estimate}");
    }
}

fn open(bundle: &Path, plugin: &Path, backend: Arc<dyn Backend>) -> Model {
    let options = PluginOptions {
        files: vec![plugin.to_owned()],
        only_named: true,
        ..PluginOptions::default()
    };
    Model::open(ModelOptions {
        manifest: Arc::new(Manifest::load(bundle).unwrap()),
        backend,
        ops: &Plugins::discover(&options).unwrap(),
        threads: Some(2),
        cancel: CancelToken::new(),
        progress: None,
        dump: None,
    })
    .unwrap_or_else(|e| panic!("{}: {e}", bundle.display()))
}

/// Steps through the cases, shortest first: the most likely token is the golden one at every step;
/// `compare` gets logits and recorded ones.
fn steps(
    bundle: &Path,
    plugin: &Path,
    backend: Arc<dyn Backend>,
    most: usize,
    compare: impl Fn(&str, &[f32], &[f32]),
) {
    let mut model = open(bundle, plugin, backend);
    let goldens = toys::goldens(&toys::fixture("lfm2-toy"));
    let mut cases: Vec<_> = goldens.cases.iter().collect();
    cases.sort_by_key(|case| case.prompt_ids.len() + case.output_ids.len());
    for case in cases.into_iter().take(most) {
        let recorded = goldens.logits(case);
        let op = model.op_mut();
        op.reset().unwrap();
        op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
        for (step, token) in case.output_ids.iter().enumerate() {
            if step > 0 {
                op.decode(case.output_ids[step - 1]).unwrap();
            }
            let logits = op.logits().unwrap();
            assert_eq!(argmax(logits).unwrap(), *token, "{}, step {step}", case.id);
            if let Some(index) = case.logits_steps.iter().position(|&s| s == step) {
                compare(&case.id, &logits.to_f32(), &recorded[index]);
            }
        }
    }
}

#[test]
fn the_page_counts_its_lines() {
    let page = fs::read_to_string(workspace().join("docs").join(PAGE)).unwrap();
    for file in ["op/src/lib.rs", "recipe/src/lib.rs", "recipe/src/config.rs", "recipe/src/main.rs"]
    {
        let text = fs::read_to_string(workspace().join("examples/lfm2").join(file)).unwrap();
        let said = format!("`{file}`, {} lines", text.lines().count());
        assert!(page.contains(&said), "{PAGE} does not say {said:?}");
    }
}

/// The op sees the interface crate and nothing else of the runtime.
#[test]
fn the_op_depends_on_the_interface_alone() {
    for manifest in ["examples/lfm2/op/Cargo.toml", "examples/plugin-template/Cargo.toml"] {
        let text = fs::read_to_string(workspace().join(manifest)).unwrap();
        let ours: Vec<_> = text.lines().filter(|line| line.starts_with("qhx")).collect();
        assert!(
            matches!(ours[..], [line] if line.starts_with("qhx-op = ")),
            "{manifest}: {ours:?}"
        );
    }
}
