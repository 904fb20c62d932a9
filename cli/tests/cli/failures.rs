//! Bad arguments and damaged bundles: one message, a documented exit code, nothing on stdout.
//!
//! Hints on the QNN libraries differ between platforms; the snapshots are those of x86-64 Linux.

use std::path::Path;

use crate::run::{Program, bundle, copy_of_bundle, edit_manifest, folder, neutral};

/// Runs `qhx` and returns the exit code and the neutral message.
fn fail(folder: &Path, args: &[&str], stdin: &[u8]) -> String {
    let run = Program::qhx(folder).args(args).stdin(stdin).run();
    assert_eq!(run.stdout, "", "{run:?}");
    let message: String = run
        .stderr
        .lines()
        .skip_while(|line| !line.starts_with("error: "))
        .collect::<Vec<_>>()
        .join("\n");
    let args: Vec<_> = args.iter().map(|a| if a.len() > 60 { "[long]" } else { *a }).collect();
    let call = format!("$ qhx {}", args.join(" "));
    format!("{}\nexit {}\n{}", neutral(&call, folder), run.code, neutral(&message, folder))
}

fn generate(folder: &Path, bundle: &Path, args: &[&str], stdin: &[u8]) -> String {
    let bundle = bundle.to_str().expect("a plain path");
    let all: Vec<_> = ["generate", bundle].iter().chain(args).copied().collect();
    fail(folder, &all, stdin)
}

#[test]
fn arguments() {
    let mut seen = Vec::new();
    let folder = folder();
    let dir = folder.path();
    seen.push(fail(dir, &["frobnicate"], b""));
    seen.push(fail(dir, &["generate"], b""));
    seen.push(generate(dir, bundle(), &["a", "--top-p", "1.5"], b""));
    seen.push(generate(dir, bundle(), &["a", "--backend", "gpu"], b""));
    seen.push(generate(dir, bundle(), &["a", "--threads", "0"], b""));
    seen.push(generate(dir, bundle(), &["a", "--cpu-activations", "f32"], b""));
    seen.push(generate(dir, bundle(), &["a", "--device-arch", "x1"], b""));
    insta::assert_snapshot!(seen.join("\n\n"));
}

#[test]
fn prompts() {
    let mut seen = Vec::new();
    let folder = folder();
    let dir = folder.path();
    seen.push(generate(dir, bundle(), &[""], b""));
    seen.push(generate(dir, bundle(), &["-"], b""));
    seen.push(generate(dir, bundle(), &["-"], b"caf\xe9"));
    seen.push(generate(dir, bundle(), &["--ids", "1,two"], b""));
    seen.push(generate(dir, bundle(), &["--ids", "1,99999"], b""));
    let long = "word ".repeat(200);
    seen.push(generate(dir, bundle(), &[&long], b""));
    insta::assert_snapshot!(seen.join("\n\n"));
}

#[test]
fn a_prompt_of_ten_megabytes_is_refused_by_its_length() {
    let bundle = bundle().to_str().expect("a plain path");
    qhx!(folder(), "generate", bundle, "-")
        .stdin("word ".repeat(2 << 20).as_bytes())
        .run()
        .fails(9, &["the text is too long: a text of 10485760 bytes", "the context holds 192"]);
}

#[test]
fn a_panic_of_the_tokenizer_library_is_an_error() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    qhx_tests::files::edit(&bundle.join("tokenizer.json"), |tokenizer| {
        // A trie of one node, outside of which the library looks for every letter.
        tokenizer["normalizer"] = serde_json::json!({
            "type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="});
    });
    let bundle = bundle.to_str().expect("a plain path");
    let run = qhx!(folder, "generate", bundle, "a").run();
    assert_ne!(run.code, 0, "{run:?}");
    run.says(&["tokenizer.json: ", "the tokenizer's configuration is inconsistent"]);
    assert!(!run.stderr.contains("panicked"), "{run:?}");
}

#[cfg(unix)]
#[test]
fn a_prompt_argument_that_is_not_utf8() {
    use std::os::unix::ffi::OsStrExt as _;
    qhx!(folder(), "generate", bundle(), std::ffi::OsStr::from_bytes(b"caf\xe9"))
        .run()
        .fails(9, &["the prompt is not valid UTF-8"]);
}

#[test]
fn manifests() {
    let mut seen = Vec::new();
    let folder = folder();
    let dir = folder.path();
    seen.push(fail(dir, &["generate", "nowhere", "a"], b""));
    std::fs::create_dir(dir.join("empty")).expect("a folder");
    seen.push(fail(dir, &["generate", "empty", "a"], b""));
    std::fs::write(dir.join("garbage.json"), b"{\"schema_version\": 1,").expect("a file");
    seen.push(fail(dir, &["generate", "garbage.json", "a"], b""));
    insta::assert_snapshot!(seen.join("\n\n"));
}

#[test]
fn an_unknown_host_op_lists_what_is_installed() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    edit_manifest(&bundle, |m| m["plan"]["steps"][0]["host"] = "other_generate".into());
    let message = generate(folder.path(), &bundle, &["a"], b"");
    let second = message.lines().nth(2).expect("a message");
    let listed = second
        .strip_prefix("error: host-op \"other_generate\" is not installed; installed: ")
        .expect("a list of what is installed");
    assert!(listed.split(", ").any(|op| op == "qwen3_5_generate"), "{message}");
    assert!(message.contains("\nexit 8\n"), "{message}");
    assert!(message.contains("hint: ") && message.contains("--plugin FILE"), "{message}");
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn an_explicit_backend_never_falls_back() {
    let mut seen = Vec::new();
    let folder = folder();
    let dir = folder.path();
    seen.push(generate(dir, bundle(), &["a", "--backend", "qnn"], b""));
    let message = generate(dir, bundle(), &["a", "--backend", "qnn", "--htp", "none.so"], b"");
    assert!(message.contains("\nexit 5\n"), "{message}");
    seen.push(generate(dir, bundle(), &["a", "--qnn-system", "none.so"], b""));
    insta::assert_snapshot!(seen.join("\n\n"));
}

#[test]
fn plugins_that_are_none() {
    let mut seen = Vec::new();
    let folder = folder();
    let dir = folder.path();
    std::fs::write(dir.join("notes.so"), b"not a library").expect("a file");
    let message = generate(dir, bundle(), &["a", "--plugin", "notes.so"], b"");
    assert!(message.contains("\nexit 8\nerror: notes.so: "), "{message}");
    seen.push(generate(dir, bundle(), &["a", "--plugin", "gone.so"], b""));
    seen.push(generate(dir, bundle(), &["a", "--plugin-dir", "gone"], b""));
    insta::assert_snapshot!(seen.join("\n\n"));
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn checkpoints() {
    let mut seen = Vec::new();
    let folder = folder();
    let dir = folder.path();
    seen.push(fail(dir, &["forge", "nowhere", "--out", "out"], b""));
    seen.push(fail(dir, &["forge", ".", "--out", "out", "--target", "v99"], b""));
    seen.push(fail(dir, &["forge", ".", "--out", "out", "--target", "v79"], b""));
    seen.push(fail(dir, &["forge", "--check", ".", "--out", "out"], b""));
    assert!(!dir.join("out").exists());
    insta::assert_snapshot!(seen.join("\n\n"));
}

#[test]
fn failures_are_json_when_json_is_asked_for() {
    let folder = folder();
    let run = qhx!(folder, "generate", "nowhere", "a", "--json").run();
    assert_eq!(run.code, 3);
    assert!(run.stderr.starts_with("error: nowhere: no such file"), "{}", run.stderr);
    insta::assert_json_snapshot!(run.json(), @r#"
    {
      "error": {
        "kind": "manifest",
        "message": "nowhere: no such file",
        "hint": "give the bundle's folder or its manifest; if it is a name, fetch it: qhx pull nowhere",
        "code": null,
        "exit_code": 3
      }
    }
    "#);
    let run = qhx!(folder, "generate", "--json", "--bogus").run();
    assert_eq!(run.code, 2);
    assert_eq!(run.json()["error"]["kind"], "usage");
    let run = qhx!(folder, "libraries", "info", "--json").run();
    assert_eq!(run.code, 5);
    assert_eq!(run.json()["error"]["kind"], "runtime");
    for command in ["plan", "estimate"] {
        let run = qhx!(folder, "forge", command, "nowhere", "--json").run();
        assert_eq!(run.code, 4, "{run:?}");
        assert_eq!(run.json()["error"]["kind"], "artifact", "{command}");
    }
}

/// The user's folders lie where absolute paths say; a relative one would be anybody's working directory.
#[cfg(unix)]
#[test]
fn a_home_that_is_not_absolute_is_none() {
    let folder = folder();
    let dir = folder.path();
    let here = |args: &[&str]| {
        Program::qhx(dir)
            .args(args)
            .env("HOME", "relative")
            .env("XDG_DATA_HOME", "")
            .env("QHX_CACHE_DIR", "")
            .run()
    };
    here(&["plugins", "install", "any.so"]).fails(8, &["XDG_DATA_HOME"]);
    here(&["demo", "--backend", "cpu"]).fails(11, &["HOME is not set to an absolute path"]);
    assert!(!dir.join("relative").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_reader_that_leaves_is_no_failure() {
    let folder = folder();
    let program = qhx_paths::program("qhx");
    let status = std::process::Command::new("sh")
        .args(["-c", "\"$0\" completions bash | head -c 10 >/dev/null; exit ${PIPESTATUS:-0}"])
        .arg(program)
        .current_dir(folder.path())
        .stderr(std::process::Stdio::piped())
        .output()
        .expect("a shell");
    assert!(status.stderr.is_empty(), "{}", String::from_utf8_lossy(&status.stderr));
}

#[test]
fn stop_texts_are_checked_before_the_bundle_is_loaded() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    edit_manifest(&bundle, |manifest| {
        let artifacts = manifest["artifacts"].as_object_mut().expect("an object");
        artifacts.remove("tokenizer").expect("a tokenizer");
    });
    for (command, stop, says) in [
        (&["generate", "--ids", "5"][..], "", "a stop string is empty"),
        (&["generate", "--ids", "5"], "x", "\"x\" would never be found"),
        (&["chat"], "", "a stop string is empty"),
    ] {
        let program = Program::qhx(folder.path()).args(&command[..1]).arg(&bundle);
        let run = program.args(&command[1..]).args(["--stop", stop]).run();
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.stderr.contains(says) && !run.stderr.contains("backend:"), "{}", run.stderr);
    }
}
