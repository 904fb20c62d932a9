//! `qhx push`, with a stand-in for adb: a script whose phone is a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use qhx_tiers::tier;
use serde_json::{Value, json};

use crate::run::{Program, Run, copy_of_bundle, edit_manifest, folder};

/// Answers as adb does, writes down what it is asked, and runs shell lines here. Files in the folder of the phone make
/// faults.
const ADB: &str = r#"#!/bin/sh
echo "$*" >> "$PHONE/calls"
lost() { echo "error: device '$serial' not found" >&2; exit 1; }
case "$1" in
devices)
    [ -e "$PHONE/hangs" ] && exec /bin/sleep 60
    printf 'List of devices attached\n'; cat "$PHONE/devices"; exit 0;;
esac
serial=$2
shift 2
if [ "$1" = wait-for-device ]; then
    [ -e "$PHONE/returns" ] || exec sleep 60
    rm -f "$PHONE/gone"; exit 0
fi
[ -e "$PHONE/gone" ] && lost
case "$1" in
get-state) echo device;;
shell)
    if [ -e "$PHONE/crlf" ]; then sh -c "$2" > "$PHONE/out"; code=$?; sed 's/$/\r/' "$PHONE/out"; exit $code; fi
    sh -c "$2"; code=$?
    [ -e "$PHONE/gone" ] && lost
    exit $code;;
push)
    left=$(cat "$PHONE/left" 2>/dev/null || echo 1000)
    echo $((left - 1)) > "$PHONE/left"
    if [ "$left" = 0 ] && [ -e "$PHONE/full" ]; then
        echo "adb: error: failed to copy '$2' to '$3': remote couldn't write: No space left on device" >&2
        exit 1
    fi
    if [ "$left" = 0 ]; then head -c 3 "$2" > "$3"; touch "$PHONE/gone"; lost; fi
    if [ -e "$PHONE/cuts" ]; then head -c 3 "$2" > "$3"; else cp "$2" "$3"; fi;;
esac
"#;

/// Prints what the program prints, and faults as files in the folder of the phone ask for them.
const PROGRAM: &str = r#"#!/bin/sh
step=$1
case "$step" in --plugin) step=$3;; esac
for last; do :; done
fault() { [ -e "$PHONE/$step-$1" ]; }
echo "note of $step" >&2
fault crashes && kill -SEGV $$
fault floods && exec yes '{"text": ['
fault hangs && exec sleep 60
fault reboots && touch "$PHONE/gone"
fault is-hostile && { head -c 100000 /dev/zero | tr '\0' '['; exit 0; }
if fault fails; then
    echo '{"error": {"kind": "execute", "message": "no answer\u001b[31m", "hint": "try again"}}'; exit 10
fi
case "$step" in
prepare) echo '{"manifest": "cache/tiny"}';;
doctor) echo '{"version": "0", "checks": [{"name": "qnn backend", "health": "ok", "found": "QAIRT 2.51"}]}';;
verify) echo '{"files": [{"path": "a", "passed": true}], "golden": {"steps": [{"name": "b", "passed": true}]}}';;
generate) printf '{"text": "text of %s (%s)", "tokens": [1, 2],
  "timings": {"load_ms": 12, "decode_tok_s": 5.25}}\n' "$last" "$LD_LIBRARY_PATH, $HOME";;
bench) echo '{"results": [{"name": "tg64", "tokens_per_second": {"mean": 7.5}}]}';;
esac
"#;

struct Scene {
    folder: tempfile::TempDir,
    bundle: PathBuf,
}

impl Scene {
    fn new() -> Self {
        let folder = folder();
        let bundle = copy_of_bundle(folder.path());
        edit_manifest(&bundle, |manifest| manifest["model"]["dsp_arch"] = "v81".into());
        let scene = Self { folder, bundle };
        for name in ["bin", "phone", "sdk/lib/aarch64-android", "sdk/lib/hexagon-v81/unsigned"] {
            fs::create_dir_all(scene.path(name)).expect("a folder");
        }
        scene.script("bin/adb", ADB);
        scene.script("program", PROGRAM);
        scene.property("ro.product.model", "Phone 15");
        scene.write("phone/devices", "ab12\tdevice\n\n");
        for name in
            ["libQnnHtp.so", "libQnnSystem.so", "libQnnHtpV81Stub.so", "libQnnHtpV79Stub.so"]
        {
            scene.write(&format!("sdk/lib/aarch64-android/{name}"), name);
        }
        scene.write("sdk/lib/hexagon-v81/unsigned/libQnnHtpV81Skel.so", "skel");
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("written");
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).expect("it was there");
    }

    /// Another process writes it: one that another test starts meanwhile would keep a file open that this one writes,
    /// and the system runs no program that is open for writing.
    fn script(&self, name: &str, text: &str) {
        let mut writer = Command::new("sh");
        writer.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(self.path(name));
        assert!(writer.arg(text).status().expect("sh runs").success());
    }

    /// The only property that Android has, beside that it is up.
    fn property(&self, name: &str, value: &str) {
        let text = "#!/bin/sh\ncase $1 in NAME) echo 'VALUE';; sys.boot_completed) echo 1;; esac\n";
        self.script("bin/getprop", &text.replace("NAME", name).replace("VALUE", value));
    }

    fn push(&self, arguments: &[&str]) -> Run {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        self.push_with(arguments, &path)
    }

    fn push_with(&self, arguments: &[&str], path: &str) -> Run {
        qhx!(self.folder, "push", "tiny", "--program", "program")
            .args([Path::new("--to"), &self.path("phone/it's here")])
            .args(arguments)
            .env("PATH", path)
            .env("PHONE", self.path("phone"))
            .env("QAIRT_SDK_ROOT", "")
            .env("QNN_SDK_ROOT", "")
            .run()
    }

    /// The report of a run with all steps.
    fn report(&self, code: i32, arguments: &[&str]) -> (Value, Run) {
        let run = self.push(&[&["--report", "r.json", "--libraries", "sdk"], arguments].concat());
        assert_eq!(run.code, code, "{run:?}");
        let text = fs::read_to_string(self.path("r.json")).expect("a report");
        (serde_json::from_str(&text).expect("JSON"), run)
    }

    fn copied(&self) -> usize {
        let calls = fs::read_to_string(self.path("phone/calls")).expect("calls");
        calls.lines().filter(|line| line.starts_with("-s ab12 push ")).count()
    }
}

/// Outcomes of the steps of a report, and the message of the one that failed.
fn outcomes(report: &Value) -> (Vec<&str>, String) {
    let steps = report["steps"].as_array().expect("steps");
    let message = steps.iter().find_map(|step| step["error"]["message"].as_str());
    let outcomes = steps.iter().map(|step| step["outcome"].as_str().expect("an outcome"));
    (outcomes.collect(), message.unwrap_or_default().to_owned())
}

fn libraries(report: &Value) -> usize {
    report["libraries"].as_object().map_or(0, serde_json::Map::len)
}

const PASSED: [&str; 4] = ["passed"; 4];

#[test]
fn a_phone_gets_its_own_libraries_and_the_bundle_that_it_runs() {
    let scene = Scene::new();
    // A folder of bundles: the phone is an 8 Elite, whose own is not there.
    let several = scene.path("several");
    fs::create_dir(&several).expect("a folder");
    fs::rename(&scene.bundle, several.join("v73")).expect("moved");
    edit_manifest(&several.join("v73"), |manifest| manifest["model"]["dsp_arch"] = "v73".into());
    fs::create_dir_all(several.join("v81")).expect("a folder");
    scene.write("several/v81/m.json", "{}");
    fs::rename(&several, scene.path("tiny")).expect("moved");
    scene.property("ro.soc.model", "SM8750");
    fs::create_dir_all(scene.path("sdk/lib/hexagon-v79/unsigned")).expect("a folder");
    scene.write("sdk/lib/hexagon-v79/unsigned/libQnnHtpV79Skel.so", "skel");
    let (report, run) = scene.report(0, &["it"]);
    run.says(&["text of it", "SM8750 (v79)"]);
    assert_eq!((&report["device"]["arch"], &report["bundle"]["name"]), (&79.into(), &"v73".into()));
    let there = scene.path("phone/it's here");
    for name in ["libQnnHtpV79Skel.so", "libQnnHtpV79Stub.so", "v73/tokenizer.json"] {
        assert!(there.join(name).is_file(), "{name}");
    }
    assert!(!there.join("libQnnHtpV81Skel.so").exists() && !there.join("v81").exists());
}

#[test]
fn only_what_differs_is_copied_and_the_report_comes_back() {
    let scene = Scene::new();
    let (report, run) = scene.report(0, &["it's $HOME", "--max-new", "7"]);
    assert_eq!(run.stdout, "r.json\n");
    run.says(&[
        "phone     Phone 15",
        "generate  ok: 2 tokens, 5.2 tokens/s, load 12 ms",
        "tg64 7.5",
    ]);
    assert_eq!((&report["schema"], &report["passed"]), (&"qhx_report/v1".into(), &true.into()));
    assert_eq!(outcomes(&report).0, PASSED);
    assert_eq!(report["steps"][2]["messages"], json!(["note of generate"]));
    let text = report["steps"][2]["result"]["text"].as_str().expect("a text");
    assert_eq!(text, "text of it's $HOME (., ~)", "and no path of this user");
    for part in ["ab12", &scene.folder.path().display().to_string()] {
        assert!(!report.to_string().contains(part), "{report}");
    }
    let calls = fs::read_to_string(scene.path("phone/calls")).expect("calls");
    assert!(
        calls.contains("--backend qnn --unverified --max-new 7 -- 'it'\\''s $HOME'"),
        "{calls}"
    );
    let there = scene.path("phone/it's here");
    for name in ["qhx", "libQnnHtpV81Skel.so", "libQnnHtpV81Stub.so", "tiny/tokenizer.json"] {
        assert!(there.join(name).is_file(), "{name}");
    }
    assert!(!there.join("libQnnHtpV79Stub.so").exists(), "of another architecture");
    assert!(!there.join("tiny/onnx").exists(), "for the CPU");
    let first = scene.copied();
    run.says(&[&format!("{first} of {first} files copied to ")]);

    scene.push(&["--libraries", "sdk", "--no-steps"]).ok();
    assert_eq!(scene.copied(), first, "nothing differs");
    fs::write(scene.bundle.join("tokenizer_config.json"), "{}").expect("written");
    let run = scene.push(&["again", "--steps", "generate", "--report", "-"]).ok();
    assert_eq!(scene.copied(), first + 1, "the libraries are there already");
    let again = run.json();
    assert_eq!(again["libraries_from"], "on the phone");
    assert_eq!((&again["libraries"], 4), (&report["libraries"], libraries(&report)));
    assert_eq!(run.json()["steps"].as_array().map(Vec::len), Some(1));

    scene.push(&["--onnx", "--no-steps"]).ok();
    assert!(there.join("tiny/onnx").is_dir());
}

#[test]
fn a_step_that_fails_is_in_the_report_and_the_others_follow() {
    let scene = Scene::new();
    for (fault, message) in [
        ("doctor-fails", "no answer"),
        ("verify-crashes", "qhx verify ended with 139: segmentation fault"),
        ("generate-floods", "more than 8388608 bytes of output"),
        ("generate-is-hostile", "qhx generate printed no JSON"),
        ("bench-hangs", "qhx bench was stopped after 1 s"),
    ] {
        scene.write(&format!("phone/{fault}"), "");
        let (report, run) = scene.report(1, &["--step-time", "1"]);
        let (outcomes, found) = outcomes(&report);
        let step = fault.split('-').next().expect("a step");
        let failed = report["steps"].as_array().expect("steps").iter();
        let failed: Vec<_> = failed.filter(|step| step["outcome"] == "failed").collect();
        assert_eq!(failed.len(), 1, "{fault}: {outcomes:?}");
        assert_eq!(failed[0]["step"], step);
        assert!(found.contains(message), "{fault}: {found}");
        run.says(&[&format!("{step:<9} FAILED: ")]);
        assert!(!run.stderr.contains('\u{1b}'), "{fault}: {run:?}");
        scene.remove(&format!("phone/{fault}"));
    }
}

#[test]
fn a_phone_that_restarts_meanwhile_is_waited_for() {
    let scene = Scene::new();
    scene.write("phone/returns", "");
    scene.write("phone/left", "3");
    let (report, run) = scene.report(0, &[]);
    run.says(&["the phone disconnected: ", "the phone is back"]);
    let install = &report["install"];
    assert_eq!((&install["lost"], &install["copied"]), (&1.into(), &install["files"]));
    // Three arrived before, and were not copied again; one was cut.
    assert_eq!(Some(scene.copied() as u64), install["files"].as_u64().map(|files| files + 1));

    // While a step runs.
    scene.write("phone/verify-reboots", "");
    let (report, _) = scene.report(1, &[]);
    let (outcomes, message) = outcomes(&report);
    assert_eq!(outcomes, ["passed", "failed", "passed", "passed"]);
    assert!(message.contains("restarted during this step"), "{message}");
    assert_eq!(report["steps"][1]["error"]["kind"], "device_lost");

    // One that does not come back.
    scene.remove("phone/returns");
    scene.write("phone/left", "0");
    fs::remove_dir_all(scene.path("phone/it's here")).expect("it was there");
    let (report, run) = scene.report(11, &["--wait", "0.2"]);
    run.says(&["device ab12 did not come back in 0.2 s", "copying   FAILED: device ab12 did"]);
    assert_eq!(report["install_error"]["message"], "device SERIAL did not come back in 0.2 s");
    assert_eq!(report["steps"], json!([]));
}

#[test]
fn a_phone_that_is_full_says_how_much_is_missing() {
    let scene = Scene::new();
    scene.write("phone/left", "2");
    scene.write("phone/full", "");
    let (report, run) = scene.report(11, &[]);
    run.says(&["copying to ", "No space left on device", "make room for ", " MB on the device"]);
    assert_eq!((&report["passed"], &report["install"]["copied"]), (&false.into(), &2.into()));
    scene.remove("phone/full");
    scene.remove("phone/left");
    let before = scene.copied();
    let (report, _) = scene.report(0, &[]);
    let install = &report["install"];
    assert_eq!(install["files"].as_u64().map(|files| files - 2), install["copied"].as_u64());
    assert_eq!(Some((scene.copied() - before) as u64), install["copied"].as_u64());
}

#[test]
fn a_portable_bundle_is_prepared_on_the_phone_first() {
    let scene = Scene::new();
    edit_manifest(&scene.bundle, |manifest| manifest["portable"] = json!({}));
    scene.push(&["--libraries", "sdk"]).fails(5, &["sdk lacks libQnnHtpPrepare.so (in the QAIRT"]);
    scene.write("sdk/lib/aarch64-android/libQnnHtpPrepare.so", "compiler");
    let (report, run) = scene.report(0, &["--steps", "prepare,generate"]);
    run.says(&["prepare   ok: cache/tiny"]);
    assert_eq!(report["steps"][0]["step"], "prepare");
    let there = scene.path("phone/it's here");
    assert!(there.join("tiny/onnx").is_dir() && there.join("libQnnHtpPrepare.so").is_file());
}

#[test]
fn line_ends_of_an_old_adb_change_nothing() {
    let scene = Scene::new();
    scene.write("phone/devices", "ab12\tdevice\r\n\r\n");
    scene.write("phone/crlf", "");
    let (report, _) = scene.report(0, &[]);
    assert_eq!(outcomes(&report).0, PASSED);
    assert_eq!(report["device"]["model"], "Phone 15");
    let first = scene.copied();
    scene.report(0, &[]);
    assert_eq!(scene.copied(), first, "the hashes are read");
}

#[test]
fn what_is_missing_is_named_before_anything_is_copied() {
    let scene = Scene::new();
    fs::remove_dir_all(scene.path("sdk/lib/hexagon-v81")).expect("it was there");
    let run = scene.push(&["--libraries", "sdk"]);
    assert_eq!(run.code, 5, "{run:?}");
    let expected = "sdk lacks libQnnHtpV81Skel.so (in the QAIRT SDK: lib/hexagon-v81/unsigned)\n";
    run.says(&[expected]);

    scene.push(&[]).says(&["on the phone lacks libQnnHtp.so (in the QAIRT SDK", "--libraries DIR"]);

    scene.remove("program");
    scene.push(&["--libraries", "sdk"]).fails(2, &["--target aarch64-linux-android"]);
    assert!(!scene.path("phone/it's here").exists());
}

#[test]
fn the_libraries_of_the_sdk_are_found_by_its_variables() {
    let scene = Scene::new();
    let path = format!("{}:/usr/bin:/bin", scene.path("bin").display());
    let run = |variable: &str| {
        qhx!(scene.folder, "push", "tiny", "--program", "program", "--report", "-")
            .args([Path::new("--to"), &scene.path("phone").join(variable)])
            .env("PATH", &path)
            .env("PHONE", scene.path("phone"))
            .env("QAIRT_SDK_ROOT", "")
            .env("QNN_SDK_ROOT", "")
            .env(variable, scene.path("sdk"))
            .run()
    };
    for variable in ["QAIRT_SDK_ROOT", "QNN_SDK_ROOT"] {
        assert_eq!(run(variable).ok().json()["libraries_from"], variable);
    }
    fs::remove_dir_all(scene.path("phone/QNN_SDK_ROOT")).expect("it was there");
    scene.remove("sdk/lib/aarch64-android/libQnnSystem.so");
    run("QNN_SDK_ROOT").fails(5, &["; QNN_SDK_ROOT=", "sdk lacks libQnnSystem.so"]);
}

#[test]
fn a_device_that_cannot_be_used_is_one_message() {
    let scene = Scene::new();
    let message = |devices: &str, arguments: &[&str], kind: i32| {
        scene.write("phone/devices", devices);
        let run = scene.push(&[&["--libraries", "sdk", "--no-steps"][..], arguments].concat());
        assert_eq!(run.code, kind, "{run:?}");
        assert_eq!(run.stderr.lines().filter(|l| l.starts_with("error: ")).count(), 1, "{run:?}");
        run.says(&["\n  hint: "]);
        run.stderr
    };
    assert!(message("\n", &[], 2).contains("adb sees no device"));
    let two = "ab12\tdevice\ncd34\tdevice\n\n";
    qhx_tests::has(&message(two, &[], 2), &["adb sees 2 devices: ab12, cd34", "--serial"]);
    assert!(message(two, &["--serial", "ef56"], 2).contains("no device \"ef56\", but ab12, cd34"));
    assert!(message("ab12\tunauthorized\n", &[], 2).contains("allow USB debugging"));
    let rules = "ab12\tno permissions (missing udev rules? user is in the plugdev group)\n";
    qhx_tests::has(&message(rules, &[], 2), &["this user may not use it", "udev"]);

    scene.write("phone/cuts", "");
    qhx_tests::has(&message(two, &["--serial", "ab12"], 11), &["qhx: arrived as "]);

    scene.write("phone/hangs", "");
    let text = message(two, &["--serial", "ab12", "--answer-time", "0.2"], 11);
    qhx_tests::has(&text, &["adb devices: no answer in 0.2 s", "adb kill-server"]);

    scene
        .push_with(&["--libraries", "sdk"], &scene.path("phone").display().to_string())
        .fails(2, &["adb is not on the path"]);
    // Android's SDK has one, too.
    fs::create_dir_all(scene.path("android/platform-tools")).expect("a folder");
    fs::rename(scene.path("bin/adb"), scene.path("android/platform-tools/adb")).expect("moved");
    let run = qhx!(scene.folder, "push", "tiny", "--program", "program", "--answer-time", "0.2")
        .env("PATH", scene.path("phone"))
        .env("PHONE", scene.path("phone"))
        .env("ANDROID_HOME", scene.path("android"))
        .run();
    run.says(&["adb devices: no answer"]);
}

/// A fault of the NPU: its name, a plan of `tests/fake-device`, outcomes of the steps doctor, verify and generate, and
/// what the report says: a part of an error, or of a message of the program.
#[cfg(target_os = "linux")]
type Fault = (&'static str, Value, [&'static str; 3], &'static str);

/// All faults that the fake device can make. Those of the second list are tried with `QHX_FULL`.
#[cfg(target_os = "linux")]
fn faults() -> [Vec<Fault>; 2] {
    const OK: [&str; 3] = ["passed"; 3];
    const BROKEN: [&str; 3] = ["failed"; 3];
    const NO_ANSWER: [&str; 3] = ["passed", "failed", "failed"];
    const RECOVERS: [&str; 3] = ["passed", "failed", "passed"];
    let at = |call: &str, nth: u64, times: u64, then: Value| json!({"rules": [{"call": call, "nth": nth, "times": times, "then": then}]});
    let always = |call: &str, nth: u64, code: u64| at(call, nth, 1000, json!({"fail": code}));
    [
        vec![
            ("no fault", json!({}), OK, "\"text\":\" Paris.\""),
            (
                "execution",
                always("graphExecute", 2, 6004),
                NO_ANSWER,
                "QNN GRAPH_INVALID_TENSOR (6004)",
            ),
            (
                "no device",
                always("deviceCreate", 1, 14001),
                BROKEN,
                "QNN DEVICE_INVALID_CONFIG (14001)",
            ),
        ],
        vec![
            (
                "restart",
                at("graphExecute", 3, 1, json!({"restart": 1007})),
                RECOVERS,
                "the DSP restarted",
            ),
            (
                "binary",
                always("contextCreateFromBinary", 1, 5005),
                NO_ANSWER,
                "tiny/tiny_decode_f16.bin: loading context \\\"decode\\\": QNN CONTEXT_CREATE_FROM_BINARY",
            ),
            (
                "one context",
                json!({"max_contexts": 1}),
                NO_ANSWER,
                "context \\\"lmhead\\\": QNN MEM_ALLOC",
            ),
            (
                "memory",
                json!({"max_context_bytes": 1000}),
                NO_ANSWER,
                "context \\\"decode\\\": QNN MEM_ALLOC",
            ),
            (
                "raw memory",
                json!({"no_registered_memory": true}),
                OK,
                "no memory is registered: registering ",
            ),
            (
                "delay",
                at("graphExecute", 1, 1000, json!({"delay_ms": 5})),
                OK,
                "\"text\":\" Paris.\"",
            ),
            (
                "hang",
                at("graphExecute", 3, 1, json!("hang")),
                [""; 3],
                "qhx generate was stopped after 5 s",
            ),
            ("other chip", json!({"chip": {"arch": 73, "soc": 60, "vtcm_mb": 8}}), OK, ""),
        ],
    ]
}

/// The program runs here, as on a phone whose libQnnHtp is the fake device.
#[cfg(target_os = "linux")]
#[tier(qnn)]
fn the_report_says_which_fault_the_npu_has() {
    let scene = Scene::new();
    let (htp, system) = qhx_tests::tiny::qnn_libraries();
    let fake = qhx_fake_device::Control::file().expect("the provider in between");
    let sdk = scene.path("sdk/lib/aarch64-android");
    std::os::unix::fs::symlink(fake, sdk.join("new")).expect("a link");
    fs::rename(sdk.join("new"), sdk.join("libQnnHtp.so")).expect("in its place");
    fs::remove_dir_all(&scene.bundle).expect("it was there");
    Program::npu(scene.folder.path())
        .args([Path::new("forge"), &crate::run::checkpoint(), Path::new("--out"), &scene.bundle])
        .args(["--target", "v81", "--for-emulator", "--max-ctx", "32", "--prefill", "0"])
        .args(["--onnx", "--name", "tiny"])
        .run()
        .ok();
    let qhx = qhx_paths::program("qhx");
    let path = format!("{}:/usr/bin:/bin", scene.path("bin").display());
    let [first, others] = faults();
    let others = others.into_iter().filter(|_| qhx_tests::tiny::full_matrix());
    for (name, plan, outcome, says) in first.into_iter().chain(others) {
        scene.write("plan.json", &plan.to_string());
        let push = Program::qhx(scene.folder.path())
            .args(["push", "tiny", "--libraries", "sdk", "--report", "-", "--max-new", "4"])
            .args([Path::new("--program"), &qhx, Path::new("--to"), &scene.path("phone/there")])
            .env("PATH", &path)
            .env("PHONE", scene.path("phone"))
            .env("QHX_FAKE_REAL", &htp)
            // The real libQnnSystem has libraries beside it that are none of a phone's.
            .env("QHX_QNN_HTP", scene.path("phone/there/libQnnHtp.so"))
            .env("QHX_QNN_SYSTEM", &system)
            .env("QHX_CDSPRPC", scene.path("phone/there/libQnnHtp.so"))
            .env("QHX_FAKE_PLAN", scene.path("plan.json"));
        let plugin = (!cfg!(feature = "builtin-ops"))
            .then(|| qhx.with_file_name("libqhx_ops_qwen35_plugin.so"));
        let plugin = plugin.into_iter().flat_map(|file| [PathBuf::from("--plugin"), file]);
        // The rates of an emulator are nobody's, and take a while.
        let (steps, time) = match name {
            "hang" => ("generate", "5"),
            _ => ("doctor,verify,generate", "900"),
        };
        let run = push.args(plugin).args(["--steps", steps, "--step-time", time]).run();
        let report = run.json();
        let found = outcomes(&report).0;
        let expected = if name == "hang" { &["failed"][..] } else { &outcome };
        assert_eq!(found, expected, "{name}: {run:?}");
        assert_eq!(run.code, i32::from(found.contains(&"failed")), "{name}");
        assert!(report.to_string().contains(says), "{name}: {report:#}");
    }
}
