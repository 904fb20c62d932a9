//! `qhx forge --target`: several at once, names, and what is left when one fails.

use std::path::Path;
use std::time::Duration;

use qhx_tiers::tier;

use crate::run::{Program, checkpoint, folder};

fn forge(folder: &Path, target: &str, extra: &[&str]) -> Program {
    Program::npu(folder)
        .arg("forge")
        .arg(checkpoint())
        .args(["--out", "tiny", "--target", target, "--max-ctx", "32", "--prefill", "0"])
        .args(extra)
}

#[tier(qnn)]
fn each_target_has_a_folder_with_a_whole_bundle() {
    let folder = folder();
    let run = forge(folder.path(), "X-Elite,8-elite", &["--json", "--no-golden"]).run().ok();
    let reports = run.json_lines();
    let archs: Vec<_> = reports.iter().map(|report| &report["dsp_arch"]).collect();
    assert_eq!(archs, ["v73", "v79"], "{run:?}");
    for (arch, number, soc) in [("v73", 73, 60), ("v79", 79, 69)] {
        let bundle = format!("tiny/{arch}");
        let inspect = Program::npu(folder.path()).args(["inspect", &bundle, "--json"]);
        let inspect = inspect.run().ok().json();
        for context in inspect["contexts"].as_array().expect("contexts") {
            let binary = &context["binary"];
            assert_eq!((&binary["dsp_arch"], &binary["soc_model"]), (&number.into(), &soc.into()));
            // All of the chip's.
            assert_eq!(binary["graphs"][0]["figures"]["vtcm"], 8 << 20, "{binary}");
        }
    }
    forge(folder.path(), "v73,v79", &["--no-golden"])
        .run()
        .fails(2, &["tiny/v73: a bundle is there already"]);
    a_device_takes_what_it_runs(folder.path());
}

/// Checks the folder `tiny` with bundles for v73 and v79.
fn a_device_takes_what_it_runs(folder: &Path) {
    let qhx = |args: &[&str]| Program::npu(folder).args(args).run();
    let of_device =
        ["bundle for v73: tiny/v73", "a v69 device takes none of them", "a v75 device takes v73"];
    qhx(&["inspect", "tiny"]).ok().prints(&of_device);
    let devices = "devices    refused v68 v69, optimal v73, supported v75";
    qhx(&["inspect", "tiny/v73"]).ok().prints(&[devices]);
    qhx(&["inspect", "tiny/v73", "--all"]).ok().prints(&[
        "  v69 refused: compiled for Hexagon v73",
        "  v73 full speed",
        "  v81 supported: made for v73",
    ]);

    let ask = ["generate", "tiny", "The capital of France is", "--max-new", "2", "--json"];
    let backend = ["--backend", "qnn", "--device-arch"];
    for (device, warnings) in [("v75", 1), ("v79", 0)] {
        let run = qhx(&[&ask[..], &backend, &[device]].concat()).ok();
        assert_eq!(run.json()["text"], " Par", "{run:?}");
        assert_eq!(run.stderr.matches("runs at less than full speed").count(), warnings, "{run:?}");
    }
    assert_eq!(qhx(&ask).ok().json()["text"], " Par", "the newest, on the emulator");
    qhx(&[&ask[..], &backend, &["v69"]].concat())
        .fails(3, &["tiny: this v69 device runs none of v73, v79"]);

    let doctor = |bundle: &str, device: &str| {
        let run = qhx(&["doctor", bundle, "--device-arch", device, "--json", "--no-plugins"]);
        let checks = run.json()["checks"].as_array().expect("checks").clone();
        checks.into_iter().find(|check| check["name"] == "bundle").expect("the bundle")
    };
    let found = doctor("tiny", "v75");
    assert_eq!(found["health"], "ok", "{found}");
    let words = "tiny/v73, made for v73, is what this v75 device takes: made for v73, runs at less";
    assert!(found["found"].as_str().is_some_and(|text| text.starts_with(words)), "{found}");
    let found = doctor("tiny/v79", "v75");
    assert_eq!(found["health"], "broken", "{found}");
    assert!(
        found["hint"].as_str().is_some_and(|hint| hint.contains("forge it for v75")),
        "{found}"
    );
}

/// The stand-in device fails the compilations that begin after the second bundle is in its place.
#[cfg(target_os = "linux")]
#[tier(qnn)]
fn a_target_that_fails_leaves_the_others_whole() {
    let folder = folder();
    let (htp, _) = qhx_tests::tiny::qnn_libraries();
    let plan = folder.path().join("plan.json");
    std::fs::write(&plan, "{}").expect("a plan");
    let fake = qhx_fake_device::Control::file().expect("the provider in between");
    let run = forge(folder.path(), "v68,v69,8-gen-2", &["--no-golden"])
        .env("QHX_QNN_HTP", fake)
        .env("QHX_FAKE_REAL", htp)
        .env("QHX_FAKE_PLAN", &plan);
    let failing = r#"{"rules": [{"call": "graphFinalize", "times": 100, "then": {"fail": 6022}}]}"#;
    let second = folder.path().join("tiny/v69");
    let run = std::thread::scope(|scope| {
        let forge = scope.spawn(|| run.run());
        while !second.exists() && !forge.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let next = folder.path().join("next.json");
        std::fs::write(&next, failing).expect("another plan");
        std::fs::rename(&next, &plan).expect("it takes the place of the first");
        forge.join().expect("the program runs")
    });
    assert_ne!(run.code, 0, "{run:?}");
    run.says(&[
        "error: target v73: context ",
        "tiny/v68, tiny/v69 are finished and whole",
        "--target v73 --out tiny/v73 goes on from there",
    ]);
    for arch in ["v68", "v69"] {
        assert!(folder.path().join("tiny").join(arch).join("qwen35-tied.json").is_file(), "{arch}");
    }
    assert!(!folder.path().join("tiny/v73").exists());
    // v68 computes no floats on a device.
    run.says(&["v68 has no arithmetic in floats"]);
}

#[tier(qnn)]
fn targets_that_cannot_be_are_refused_at_once() {
    let folder = folder();
    let refused = |target: &str, words: &str| {
        let run = forge(folder.path(), target, &[]).run();
        assert_eq!((run.code, run.stderr.contains(words)), (2, true), "{target}: {run:?}");
    };
    refused("v81,x2-elite", "--target v81 and SC8480XP are both v81");
    refused("x-elit", "did you mean \"x-elite\"?");
    #[cfg(target_arch = "x86_64")]
    refused("this", "the QNN libraries of this machine are an emulator");
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 0);
}

#[test]
fn a_plan_counts_the_bundles_of_all_targets() {
    let folder = folder();
    let plan = || {
        let config = checkpoint().join("config.json");
        qhx!(folder, "forge", "plan", config)
    };
    let run = plan().args(["--target", "v73,8-elite,x2-elite"]).run().ok();
    run.prints(&["3 targets (v73, v79, SC8480XP): 3 bundles, "]);
    let json = plan().args(["--target", "v73,v79", "--json"]).run().ok().json();
    assert_eq!(json["targets"], serde_json::json!(["v73", "v79"]));
}
