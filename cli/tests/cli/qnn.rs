//! The tier that needs the QNN libraries: `QHX_QNN_HTP` and `QHX_QNN_SYSTEM` name them.

use std::path::Path;

use qhx_tests::rescaled::rescaled;
use qhx_tests::tiny::qnn_libraries;
use qhx_tiers::tier;

use crate::run::{Program, checkpoint, folder};
use crate::trace;

/// One test, because compiling takes seconds: forge, check, inspect, verify, generate. The weights are such that values
/// of layer 1 do not fit into f16 unless the forge folds what it measured: without, no step gives the golden tokens.
#[tier(qnn)]
fn the_whole_way_on_the_library() {
    let (htp, system) = qnn_libraries();
    let folder = folder();
    let qhx = || Program::npu(folder.path());
    let large = rescaled("qwen35-tied", |name| match name {
        "model.layers.1.mlp.up_proj.weight" => Some(17),
        "model.layers.1.mlp.down_proj.weight" => Some(-17),
        _ => None,
    });
    let forge = qhx()
        .args(["forge"])
        .args([large.path()])
        .args(["--out", "tiny", "--name", "qwen35-tied", "--target", "v79"])
        .args(["--max-ctx", "32", "--prefill", "0", "--onnx", "--json", "--check"])
        .run()
        .ok();
    let report = forge.json();
    assert_eq!(report["dsp_arch"], "v79");
    let rows = report["check"].as_array().expect("rows");
    assert!(!rows.is_empty() && rows.iter().all(|row| row["agrees"] == true), "{report}");
    let found = &report["headroom"];
    for peak in found["peaks"].as_array().expect("peaks") {
        let large = peak["headroom"].as_f64().expect("a number") < 1.0;
        let place = [&peak["layer"], &peak["kind"]].map(|name| name.as_str().expect("a name"));
        let expected = [["layers.1", "up_proj"], ["layers.1", "product"]].contains(&place);
        assert_eq!(large, expected, "{peak}");
    }
    let folds = found["folds"].as_object().expect("folds");
    assert!(folds.keys().eq(["model.layers.1.mlp.up_proj"]), "{found}");

    let inspect = qhx().args(["inspect", "tiny", "--json"]).run().ok().json();
    for context in inspect["contexts"].as_array().expect("contexts") {
        assert_eq!(context["binary"]["dsp_arch"], 79, "{context}");
        assert!(context["binary"]["graphs"][0]["inputs"].is_array());
    }
    let binary = inspect["contexts"][0]["binary"]["path"].as_str().expect("a path").to_owned();
    let one = qhx().args(["inspect", &binary]).run().ok();
    one.prints(&["arch v79, soc 69"]);

    let generate =
        qhx().args(["generate", "tiny", "The capital of France is", "--max-new", "4"]).run().ok();
    assert_eq!(generate.stdout, " Paris.\n", "the libraries' own output is not on stdout");
    for level in ["basic", "detailed"] {
        let traced = qhx()
            .args(["generate", "tiny", "The capital of France is", "--max-new", "4"])
            .args(["--trace", level, "--trace-level", level])
            .run()
            .ok();
        assert_eq!(traced.stdout, generate.stdout);
        let events = trace::events(&folder.path().join(level));
        trace::nested(&events, "graphExecute", "generate");
        let graphs = events.iter().filter(|e| e["cat"] == "graph").count();
        assert_eq!(trace::spans(&events, "graphExecute").len(), graphs);
        assert!(!trace::spans(&events, "contextCreateFromBinary").is_empty());
        let library: Vec<_> = events.iter().filter(|e| e["cat"] == "library").collect();
        assert!(library.len() > 2 * graphs, "{level}: {} events of the library", library.len());
        if level == "detailed" {
            assert!(library.iter().any(|e| e["args"]["cycles"].is_number()), "no node's cycles");
        }
    }
    generate.says(&["backend: qnn (given "]);

    // Tokens on the CPU, on the NPU, and on the one that was measured to be faster: once.
    let measured = |when| format!("measured {when} with this bundle: ");
    for (on, decoder, reason) in [
        ("cpu", "cpu", "asked for"),
        ("npu", "qnn", "asked for"),
        ("auto", "cpu", &*measured("now")),
        ("auto", "cpu", &measured("earlier")),
    ] {
        let json = qhx()
            .args(["generate", "tiny", "The capital of France is", "--max-new", "4", "--json"])
            .args(["--decode-on", on])
            .run()
            .ok()
            .json();
        assert_eq!(json["text"], " Paris.", "{on}: {json}");
        assert_eq!(
            (&json["backend"], &json["decoder"]["backend"]),
            (&"qnn".into(), &decoder.into())
        );
        let why = json["decoder"]["reason"].as_str().expect("why");
        // Half of the context.
        assert_eq!(why.ends_with(", behind 16 positions"), on == "auto", "{json}");
        assert!(why.starts_with(reason), "{json}");
        let moved = &json["timings"]["hand_overs"];
        assert_eq!(moved["count"], u64::from(decoder == "cpu"), "{on}: {json}");
        assert_eq!(moved["bytes"].as_u64() > Some(0), decoder == "cpu", "{on}: {json}");
    }
    // Where the CPU was measured to be hardly faster, the NPU goes on.
    for file in
        std::fs::read_dir(folder.path().join("cache/decode-on")).expect("what is remembered")
    {
        let file = file.expect("an entry").path();
        std::fs::write(file, r#"{"npu": 1.0, "cpu": 0.96, "behind": 16}"#).expect("written");
    }
    let auto = ["generate", "tiny", "a", "--max-new", "1", "--json", "--decode-on", "auto"];
    let json = qhx().args(auto).run().ok().json();
    assert_eq!(json["decoder"]["backend"], "qnn", "{json}");
    let reason = json["decoder"]["reason"].as_str().expect("why");
    assert!(reason.contains("1.0 ms a token on the NPU, 1.0 ms on the CPU"), "{json}");
    // The state goes over once behind each prompt, also where rates are measured.
    let table = qhx()
        .args(["bench", "tiny", "--table", "--prompt", "12", "--tokens", "4", "--repeat", "2"])
        .args(["--decode-on", "cpu", "--json"])
        .run()
        .ok()
        .json();
    assert_eq!((&table["backend"], &table["decoder"]), (&"qnn".into(), &"cpu".into()), "{table}");
    assert!(table["rows"][0]["hand_over_ms"].as_f64() > Some(0.0), "{table}");

    let classic = Program::classic(folder.path())
        .args(["tiny/qwen35-tied.json"])
        .args([&htp, &system])
        .args(["tiny", "4", "The capital of France is"])
        .run()
        .ok();
    assert_eq!(classic.stdout, " Paris.\n");

    #[cfg(target_os = "linux")]
    with_faults(&|| qhx().env("QHX_FAKE_REAL", &htp), folder.path());

    let wrong = qhx()
        .args(["generate", "tiny", "a", "--backend", "qnn", "--device-arch", "v75", "--json"])
        .run();
    assert_eq!(wrong.code, 6, "{wrong:?}");
    assert_eq!(wrong.json()["error"]["kind"], "context");
}

/// An overflow that no power of two helps is refused before anything is compiled.
#[tier(qnn)]
fn texts_of_check_show_the_headroom_of_each_layer() {
    let folder = folder();
    std::fs::write(folder.path().join("texts.txt"), "The capital of France is Paris.\n")
        .expect("a file");
    let large = rescaled("llama3-tiny", |name| {
        let projection = name.strip_prefix("model.layers.1.self_attn.");
        matches!(projection, Some("q_proj.weight" | "k_proj.weight")).then_some(9)
    });
    let run = Program::npu(folder.path())
        .args(["forge", "--out", "out", "--max-ctx", "32", "--check=texts.txt"])
        .arg(large.path())
        .run();
    run.fails(4, &["error: layers.1: score reaches "]);
    assert!(!folder.path().join("out").exists());
    let lines: Vec<_> = run.stdout.lines().collect();
    let ["largest values; f16 ends at 65504", layers @ .., outside] = &lines[..] else {
        panic!("{run:?}");
    };
    assert!(outside.starts_with("outside of layers: headroom "), "{outside}");
    assert_eq!(layers.len(), 4, "{run:?}");
    for (index, line) in layers.iter().enumerate() {
        let (headroom, values) = line
            .strip_prefix(&format!("layers.{index}: headroom "))
            .and_then(|rest| rest.split_once("x: "))
            .unwrap_or_else(|| panic!("{line}"));
        let values: Vec<_> = values
            .split(", ")
            .map(|value| value.split_once(' ').unwrap_or_else(|| panic!("{line}")))
            .map(|(kind, largest)| (kind, largest.parse::<f32>().expect("a number")))
            .collect();
        for kind in ["residual", "gate_proj", "up_proj", "product", "score"] {
            let of_kind = values.iter().filter(|(found, _)| *found == kind);
            assert_eq!(of_kind.count(), 1, "{kind}: {line}");
        }
        assert!(values.is_sorted_by(|a, b| a.1 >= b.1), "the largest first: {line}");
        let (headroom, largest) = (headroom.parse::<f32>().expect("a number"), values[0].1);
        assert!((headroom - 65_504.0 / largest).abs() <= 0.1 + headroom / 1e4, "{line}");
        assert_eq!(values[0].0 == "score" && headroom < 1.0, index == 1, "{line}");
    }
}

/// The program on an NPU that fails, restarts or hangs.
#[cfg(target_os = "linux")]
fn with_faults(qhx: &impl Fn() -> Program, folder: &Path) {
    let fake = qhx_fake_device::Control::file().expect("the provider in between");
    let generate = |plan: serde_json::Value| {
        std::fs::write(folder.join("plan.json"), plan.to_string()).expect("written");
        let run = qhx()
            .args(["generate", "tiny", "The capital of France is", "--max-new", "4"])
            .env("QHX_QNN_HTP", &fake)
            .env("QHX_FAKE_PLAN", folder.join("plan.json"))
            .env("QHX_FAKE_REPORT", folder.join("report.json"))
            .run();
        let report = std::fs::read(folder.join("report.json")).expect("a report");
        let report: qhx_fake_device::Report = serde_json::from_slice(&report).expect("a report");
        assert!(report.violations.is_empty() && report.alive.is_empty(), "{report:?}\n{run:?}");
        run
    };
    let at = |call: &str, nth: u32, then: serde_json::Value| {
        let rule = serde_json::json!({"call": call, "nth": nth, "then": then});
        serde_json::json!({ "rules": [rule] })
    };
    let restarted = generate(at("graphExecute", 3, serde_json::json!({"restart": 1007}))).ok();
    assert_eq!(restarted.stdout, " Paris.\n", "{}", restarted.stderr);
    restarted.says(&["the DSP restarted"]);

    let failed = generate(at("graphExecute", 2, serde_json::json!({"fail": 6004})));
    assert_eq!(failed.code, 10, "{failed:?}");
    let errors: Vec<_> = failed.stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert!(
        errors.len() == 1 && errors[0].contains("QNN GRAPH_INVALID_TENSOR (6004)"),
        "{failed:?}"
    );

    crate::interrupt::of_an_npu_that_hangs(qhx, &fake, folder);
}

/// Inverted bytes of a small context binary. The first ones crashed the library that this was written with.
const FLIPPED: [usize; 40] = [
    168, 182, 183, 258, 259, 432, 440, 443, 538, 539, 670, 671, 7, 60, 113, 166, 219, 272, 325,
    378, 431, 484, 537, 590, 643, 696, 749, 802, 855, 908, 961, 1014, 1067, 1120, 1173, 1226, 1279,
    1332, 1385, 1438,
];

#[tier(qnn)]
fn damaged_context_binaries_end_inspect_with_one_message() {
    const MOST_OUTPUT: usize = 64 << 10;
    let folder = folder();
    let qhx = || Program::npu(folder.path());
    qhx()
        .arg(Path::new("forge"))
        .arg(checkpoint())
        .args([
            "--out",
            "tiny",
            "--target",
            "v79",
            "--max-ctx",
            "32",
            "--prefill",
            "0",
            "--no-golden",
        ])
        .run()
        .ok();
    let sound = std::fs::read(folder.path().join("tiny/qwen35-tied_lmhead_f16.bin"))
        .expect("the forge wrote it");
    let damaged = folder.path().join("damaged.bin");
    for place in FLIPPED {
        let mut bytes = sound.clone();
        bytes[place] ^= 0xff;
        std::fs::write(&damaged, bytes).expect("the copy can be written");
        let run = qhx().args(["inspect", "damaged.bin"]).run();
        // What a byte changes may be harmless. A signal is no exit code, which is -1 here.
        assert!([0, 4, 6].contains(&run.code), "byte {place}: {run:?}");
        assert!(run.stdout.len() + run.stderr.len() < MOST_OUTPUT, "byte {place}: {run:?}");
        if run.code != 0 {
            assert!(run.stderr.starts_with("error: damaged.bin"), "byte {place}: {run:?}");
        }
    }
}

/// Prompt and decode graphs that keep their weights once: made, checked and described here, run on a device.
#[tier(qnn)]
fn a_bundle_for_devices_has_weights_once_and_its_own_message() {
    let folder = folder();
    let qhx = || Program::npu(folder.path());
    let tiny = qhx_paths::fixture("mistral-tiny");
    let forge = |out: &str, extra: &[&str]| {
        let report = qhx()
            .args([Path::new("forge"), &tiny, Path::new("--out"), Path::new(out)])
            .args(["--max-ctx", "48", "--prefill", "8", "--json"])
            .args(extra)
            .run()
            .ok()
            .json();
        let contexts = report["contexts"].as_array().expect("contexts");
        let keys: Vec<_> = contexts.iter().map(|c| c["key"].as_str().expect("a key")).collect();
        assert_eq!(keys, ["decode", "lmhead"]);
        let onnx = folder.path().join(out).join("onnx").exists();
        assert_eq!(onnx, extra.contains(&"--onnx"), "{extra:?}");
        report
    };
    let bytes = |report: &serde_json::Value| {
        report["contexts"][0]["binary_bytes"].as_u64().expect("the bytes of decode")
    };
    let once = forge("device", &["--check"]);
    // Binaries that the emulator loads were made for the check alone.
    let rows = once["check"].as_array().expect("rows");
    assert!(rows.len() > 2 && rows.iter().all(|row| row["agrees"] == true), "{once}");
    assert!(folder.path().join("device/golden").exists());
    let twice = forge("emulator", &["--for-emulator", "--no-golden"]);
    assert!(bytes(&once) * 4 < bytes(&twice) * 3, "{once}, {twice}");
    let hidden = std::fs::read_dir(folder.path()).expect("the folder").filter_map(|entry| {
        let name = entry.expect("an entry").file_name();
        name.to_string_lossy().starts_with(".qhx").then_some(name)
    });
    assert_eq!(hidden.count(), 0);

    qhx().args(["inspect", "device"]).run().ok().prints(&["shared weights"]);
    let generate = |bundle: &str, backend: &str| {
        qhx()
            .args(["generate", bundle, "The capital of France is", "--max-new", "4"])
            .args(["--backend", backend])
            .run()
    };
    generate("device", "qnn").fails(6, &["made for a device", "--for-emulator"]);
    generate("device", "cpu").fails(6, &["no ONNX files", "--onnx"]);
    assert_eq!(generate("emulator", "qnn").ok().stdout, " Paris.\n");
    forge("both", &["--onnx", "--no-golden"]);
    assert_eq!(generate("both", "cpu").ok().stdout, " Paris.\n");
}

/// The context binaries of a bundle, by key.
fn binaries(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let manifest = qhx_core::Manifest::load(folder).expect("a bundle");
    let contexts = manifest.artifacts.contexts.iter();
    let read = |path: &String| std::fs::read(manifest.root.join(path)).expect("a binary");
    contexts.map(|c| (c.key.clone(), read(c.bin.as_ref().expect("a binary")))).collect()
}

/// A portable bundle is prepared once, into what a forge makes for the same chip, and then opened.
#[tier(qnn)]
fn a_prepared_bundle_equals_a_forged_one_byte_for_byte() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let qhx = || Program::npu(folder.path());
    let forge = |out: &str, target: &[&str]| {
        let forge =
            qhx().args(["forge"]).args([qhx_paths::fixture("qwen2-tiny")]).args(["--out", out]);
        let shape = ["--precision", "w4a16", "--max-ctx", "32", "--prefill", "0"];
        forge.args(shape).args(target).run().ok();
    };
    forge("forged", &["--target", "v81", "--no-golden"]);
    forge("portable", &["--portable"]);
    let generate = |bundle: &str, extra: &[&str]| {
        qhx().args(["generate", bundle, "1,2,3", "--max-new", "4", "--ids"]).args(extra).run()
    };
    generate("portable", &[]).ok().says(&["`qhx prepare portable --target v81`"]);
    generate("portable", &["--backend", "qnn"]).says(&["hint: qhx prepare portable"]);

    // A folder that cannot be made: the cache is taken.
    std::fs::write(at("portable/prepared"), "").expect("written");
    let prepare = || qhx().args(["prepare", "portable", "--target", "v81", "--json"]).run().ok();
    let place = |report: &serde_json::Value| {
        let manifest = folder.path().join(report["manifest"].as_str().expect("a path"));
        manifest.parent().expect("its folder").to_owned()
    };
    let report = prepare().json();
    let cached = place(&report);
    assert!(!cached.starts_with(at("portable")), "{report}");
    assert_eq!(report["target"]["soc"], 87);
    assert_eq!(binaries(&cached), binaries(&at("forged")));
    qhx().args(["verify"]).arg(&cached).run().ok();

    let forged = generate("forged", &[]).ok();
    let after = generate("portable", &[]).ok();
    assert_eq!(after.stdout, forged.stdout);
    after.says(&["backend: qnn"]);
    let again = prepare();
    again.says(&["prepared already"]);

    // What has lost a binary is no bundle any more, and prepared again, now beside the bundle.
    let binaries_there = std::fs::read_dir(&cached).expect("its files");
    let mut files = binaries_there.filter_map(|entry| Some(entry.ok()?.path()));
    let binary = files.find(|path| path.ends_with(format!("{}.bin", binaries(&cached)[0].0)));
    std::fs::write(binary.expect("a binary"), b"half").expect("written");
    generate("portable", &[]).ok().says(&["backend: cpu"]);
    std::fs::remove_file(at("portable/prepared")).expect("removed");
    let beside = place(&prepare().json());
    assert!(beside.starts_with(at("portable/prepared")), "{}", beside.display());
    assert_eq!(binaries(&beside), binaries(&at("forged")));
    assert_eq!(generate("portable", &[]).ok().stdout, forged.stdout);

    qhx().args(["prepare", "forged", "--target", "v81"]).run().says(&["not a portable bundle"]);
    qhx().args(["prepare", "portable"]).run().says(&["emulator"]);
}
