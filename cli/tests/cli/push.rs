//! `qhx push`, with a stand-in for adb: a script whose phone is a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Run, copy_of_bundle, edit_manifest, folder};

/// Answers as adb does, writes down what it is asked, and runs shell lines here.
const ADB: &str = r#"#!/bin/sh
echo "$*" >> "$PHONE/calls"
case "$1" in
devices) printf 'List of devices attached\n'; cat "$PHONE/devices"; exit 0;;
esac
shift 2
case "$1" in
shell) shift; exec sh -c "$1";;
push)
    if [ -e "$PHONE/full" ]; then
        echo "adb: error: failed to copy '$2' to '$3': remote couldn't write: No space left on device" >&2
        exit 1
    fi
    if [ -e "$PHONE/cuts" ]; then head -c 3 "$2" > "$3"; else cp "$2" "$3"; fi;;
esac
"#;

/// Prints how it is called, as a program for phones would print text.
const PROGRAM: &str = r#"#!/bin/sh
echo "text of $6 ($LD_LIBRARY_PATH, $1 $2 $3 $4 $5)"
[ "$6" != fails ]
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
        scene.script("qhx_generate", PROGRAM);
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

    /// Another process writes it: one that another test starts meanwhile would keep a file open that this one writes,
    /// and the system runs no program that is open for writing.
    fn script(&self, name: &str, text: &str) {
        let mut writer = Command::new("sh");
        writer.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(self.path(name));
        assert!(writer.arg(text).status().expect("sh runs").success());
    }

    fn push(&self, arguments: &[&str]) -> Run {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        self.push_with(arguments, &path)
    }

    fn push_with(&self, arguments: &[&str], path: &str) -> Run {
        qhx!(self.folder, "push", "tiny", "--program", "qhx_generate")
            .args([Path::new("--to"), &self.path("phone/it's here")])
            .args(arguments)
            .env("PATH", path)
            .env("PHONE", self.path("phone"))
            .run()
    }

    fn copied(&self) -> usize {
        let calls = fs::read_to_string(self.path("phone/calls")).expect("calls");
        calls.lines().filter(|line| line.starts_with("-s ab12 push ")).count()
    }
}

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
    scene.script("bin/getprop", "#!/bin/sh\n[ $1 = ro.soc.model ] && echo SM8750\n");
    fs::create_dir_all(scene.path("sdk/lib/hexagon-v79/unsigned")).expect("a folder");
    scene.write("sdk/lib/hexagon-v79/unsigned/libQnnHtpV79Skel.so", "skel");
    scene.push(&["it", "--libraries", "sdk"]).ok().prints(&["text of it"]);
    let there = scene.path("phone/it's here");
    for name in ["libQnnHtpV79Skel.so", "libQnnHtpV79Stub.so", "v73/tokenizer.json"] {
        assert!(there.join(name).is_file(), "{name}");
    }
    assert!(!there.join("libQnnHtpV81Skel.so").exists() && !there.join("v81").exists());
}

#[test]
fn only_what_differs_is_copied_and_the_text_comes_back() {
    let scene = Scene::new();
    let all = ["--libraries", "sdk", "--max-new", "7"];
    let run = scene.push(&[&["it's $HOME"][..], &all].concat()).ok();
    let expected = "text of it's $HOME (., tiny/tiny.json libQnnHtp.so libQnnSystem.so tiny 7)\n";
    assert_eq!(run.stdout, expected);
    let there = scene.path("phone/it's here");
    for name in
        ["qhx_generate", "libQnnHtpV81Skel.so", "libQnnHtpV81Stub.so", "tiny/tokenizer.json"]
    {
        assert!(there.join(name).is_file(), "{name}");
    }
    assert!(!there.join("libQnnHtpV79Stub.so").exists(), "of another architecture");
    assert!(!there.join("tiny/onnx").exists(), "for the CPU");
    let first = scene.copied();
    run.says(&[&format!("{first} of {first} files copied to ")]);

    scene.push(&all).ok();
    assert_eq!(scene.copied(), first, "nothing differs");
    fs::write(scene.bundle.join("tokenizer_config.json"), "{}").expect("written");
    let run = scene.push(&["again"]).ok();
    assert_eq!(scene.copied(), first + 1, "the libraries are there already");
    assert!(run.stdout.starts_with("text of again "), "{}", run.stdout);

    let run = scene.push(&["fails"]);
    assert_eq!((run.code, run.stdout.starts_with("text of fails")), (10, true), "{run:?}");
    run.says(&["qhx_generate on ab12 ended with 1"]);
}

#[test]
fn what_is_missing_is_named_before_anything_is_copied() {
    let scene = Scene::new();
    fs::remove_dir_all(scene.path("sdk/lib/hexagon-v81")).expect("it was there");
    let run = scene.push(&["--libraries", "sdk"]);
    assert_eq!(run.code, 5, "{run:?}");
    let expected = "sdk lacks libQnnHtpV81Skel.so (in the QAIRT SDK: lib/hexagon-v81/unsigned)\n";
    run.says(&[expected]);

    scene.push(&[]).says(&["on ab12 lacks libQnnHtp.so (in the QAIRT SDK", "--libraries DIR"]);

    fs::remove_file(scene.path("qhx_generate")).expect("it was there");
    scene.push(&["--libraries", "sdk"]).fails(2, &["--target aarch64-linux-android"]);
    assert!(!scene.path("phone/it's here").exists());
}

#[test]
fn a_device_that_cannot_be_used_is_one_message() {
    let scene = Scene::new();
    let message = |devices: &str, arguments: &[&str], kind: i32| {
        scene.write("phone/devices", devices);
        let run = scene.push(&[&["--libraries", "sdk"][..], arguments].concat());
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

    scene.write("phone/full", "");
    let text = message(two, &["--serial", "ab12"], 11);
    assert!(text.contains("qhx_generate") && text.contains("No space left on device"), "{text}");
    fs::remove_file(scene.path("phone/full")).expect("it was there");
    scene.write("phone/cuts", "");
    qhx_tests::has(&message(two, &["--serial", "ab12"], 11), &["qhx_generate: arrived as "]);

    scene
        .push_with(&["--libraries", "sdk"], &scene.path("phone").display().to_string())
        .fails(2, &["adb is not on the path"]);
}
