//! Reports: inspect, doctor, plugins, completions, help.

use crate::run::{Program, bundle, copy_of_bundle, edit_manifest, folder, neutral};

#[test]
fn inspect_without_libraries_shows_the_onnx_side() {
    let folder = folder();
    let run = qhx!(folder, "inspect", "--all", bundle()).run().ok();
    let text = neutral(&run.stdout, folder.path());
    let parts = [
        "model      tiny\n",
        "host-op    qwen3_5_generate\n",
        "max ctx    192\n",
        "embedding table: [bundle]/",
        "(ONNX)\n    in ",
        "past_ssm_",
    ];
    qhx_tests::has(&text, &parts);
    run.says(&["note: no libQnnSystem is given or installed"]);
    let run = qhx!(folder, "inspect", "--json", bundle()).run().ok();
    let json = run.json();
    assert_eq!(json["model"], "tiny");
    assert_eq!(json["params"]["max_ctx"], 192);
    assert!(json["contexts"].as_array().is_some_and(|c| c.len() >= 2), "{json}");
    let graph = &json["contexts"][0]["onnx"][0];
    assert!(graph["inputs"].is_array(), "{json}");
}

#[test]
fn inspect_fits_a_screen() {
    let folder = folder();
    let run = qhx!(folder, "inspect", bundle()).run().ok();
    let text = neutral(&run.stdout, folder.path());
    assert!(text.lines().count() < 24 && !text.contains("past_ssm_"), "{text}");
    let parts = [
        "model      tiny\n",
        "embedding table: ",
        "context \"decode\": ",
        "; graphs decode, prefill16\n",
    ];
    qhx_tests::has(&text, &parts);
    let all = qhx!(folder, "inspect", "--all", bundle()).run().ok();
    all.prints(&["in  past_ssm_0 f32[6, 24, 20]"]);
}

#[test]
fn inspect_says_what_a_bundle_lacks_to_run() {
    let folder = folder();
    let bundle = copy_of_bundle(folder.path());
    let inspect = || qhx!(folder, "inspect", "tiny").run();
    inspect().ok().prints(&["missing    nothing\n"]);
    let decode = || "plan.params.decode: found 7, expected a string or an array";
    edit_manifest(&bundle, |m| m["plan"]["params"]["decode"] = 7.into());
    inspect().ok().prints(&["missing    ", decode()]);
    qhx!(folder, "generate", "tiny", "a").run().fails(3, &[decode()]);
    // A graph that is not there, then a tensor, then the host-op and a file.
    edit_manifest(&bundle, |m| m["plan"]["params"]["decode"] = "decod".into());
    inspect().ok().prints(&["missing    ", "graph \"decod\" is in no context of the bundle"]);
    edit_manifest(&bundle, |m| {
        m["plan"]["params"]["decode"] = "decode".into();
        m["plan"]["params"]["tensors"] = serde_json::json!({"x": "hidden"});
    });
    inspect().ok().prints(&["missing    ", "\"hidden\""]);
    edit_manifest(&bundle, |m| m["plan"]["steps"][0]["host"] = "other_generate".into());
    std::fs::remove_file(bundle.join("tokenizer.json")).expect("a tokenizer");
    let text = inspect().ok();
    text.prints(&[
        "missing    host-op \"other_generate\" is not installed",
        "hint: install its plugin",
    ]);
    text.prints(&["missing    tokenizer: ", "tokenizer.json is not there"]);
    let json = qhx!(folder, "inspect", "tiny", "--json").run().ok().json();
    assert_eq!(json["missing"].as_array().map(Vec::len), Some(2), "{json}");
}

#[test]
fn inspecting_a_context_binary_needs_the_system_library() {
    let folder = folder();
    std::fs::write(folder.path().join("x.bin"), b"\0\x01").expect("a file");
    qhx!(folder, "inspect", "x.bin").run().fails(5, &["reading a context binary needs"]);
}

#[test]
fn doctor_tells_missing_from_broken() {
    let run = qhx!(folder(), "doctor", "--json").run().ok();
    let json = run.json();
    assert_eq!(json["healthy"], true);
    let health = |json: &serde_json::Value, name: &str| {
        let checks = json["checks"].as_array().expect("checks").iter();
        checks.clone().find(|c| c["name"] == name).expect("the check")["health"].clone()
    };
    assert_eq!(health(&json, "cpu backend"), "ok");
    assert_eq!(health(&json, "qnn backend"), "missing");
    assert_eq!(health(&json, "host-ops"), "ok");
    let run = qhx!(folder(), "doctor", "--json").env("QHX_QNN_HTP", "/nowhere/libQnnHtp.so").run();
    assert_eq!(run.code, 1);
    let json = run.json();
    assert_eq!(json["healthy"], false);
    assert_eq!(health(&json, "qnn backend"), "broken");
    assert_eq!(json["environment"]["QHX_QNN_HTP"], "/nowhere/libQnnHtp.so");
    qhx!(folder(), "doctor").run().ok().prints(&["missing qnn backend"]);
}

#[test]
fn plugins_are_listed_with_their_state() {
    let folder = folder();
    let plugins = folder.path().join("qhx/plugins");
    std::fs::create_dir_all(&plugins).expect("a folder");
    let name = format!("broken.{}", std::env::consts::DLL_EXTENSION);
    std::fs::write(plugins.join(name), b"not a library").expect("a file");
    let run = qhx!(folder, "plugins", "list", "--json").run().ok();
    let json = run.json();
    let files = json["files"].as_array().expect("files");
    // The list loads nothing: a plugin beside the program stands there by its file.
    let listed = |file: &serde_json::Value| {
        file["path"].as_str().is_some_and(|path| path.contains("qhx_ops_qwen35_plugin"))
    };
    let ops = json["ops"].as_array().expect("ops");
    let linked_in = ops.iter().any(|op| op["name"] == "qwen3_5_generate");
    assert!(linked_in || files.iter().any(listed), "{json}");
    let broken = files.iter().find(|f| f["status"] == "not_installed").expect("the stranger");
    assert!(broken["reason"].as_str().is_some_and(|why| why.contains("qhx plugins install")));
    qhx!(folder, "plugins", "list").run().ok().prints(&["not installed: "]);
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let run = qhx!(folder(), "completions", shell).run().ok();
        assert!(run.stdout.contains("qhx"), "{shell}");
        assert!(run.stdout.contains("generate"), "{shell}");
        assert_eq!(run.stderr, "", "{shell}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = folder();
    qhx!(folder, "man", "pages/man1").run().ok();
    let page = |name: &str| {
        let path = folder.path().join("pages/man1").join(format!("{name}.1"));
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let help = qhx!(folder, "--help").run().ok().stdout;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next().filter(|name| *name != "help"))
        .collect();
    assert!(commands.contains(&"serve") && commands.contains(&"completions"), "{commands:?}");
    for command in commands {
        let page = page(&format!("qhx-{command}"));
        assert!(page.contains(&format!(".TH qhx-{command} 1")), "{command}: {page}");
    }
    assert!(page("qhx").contains("qhx\\-serve(1)"), "{}", page("qhx"));
    assert!(page("qhx-serve").contains("\\-\\-api\\-key\\-file"), "{}", page("qhx-serve"));
    assert!(page("qhx-forge-plan").contains("CHECKPOINT"), "{}", page("qhx-forge-plan"));
    for program in ["qhx_generate", "qhx_embed"] {
        assert!(page(program).contains(&format!(".TH {program} 1")), "{}", page(program));
    }
    // Nobody calls what stands in no help.
    assert!(!folder.path().join("pages/man1/qhx-man.1").exists());
}

#[test]
fn every_command_has_help_with_examples_or_options() {
    for command in [
        "generate",
        "chat",
        "embed",
        "forge",
        "prepare",
        "inspect",
        "verify",
        "bench",
        "libraries",
        "push",
        "plugins",
        "doctor",
        "demo",
        "serve",
        "run",
        "models",
        "show",
        "ps",
        "rm",
        "cp",
        "publish",
    ] {
        let run = qhx!(folder(), command, "--help").run().ok();
        assert!(run.stdout.contains("Usage: qhx "), "{command}: {}", run.stdout);
        assert_eq!(run.stderr, "", "{command}");
    }
    let help = qhx!(folder(), "--help").run().ok().stdout;
    insta::assert_snapshot!(help);
}

#[test]
fn libraries_path_says_what_to_do() {
    let run = qhx!(folder(), "libraries", "path").run();
    assert_eq!(run.code, 5);
    assert_eq!(run.stdout, "");
    run.says(&["hint: "]);
}

/// The report names the chips for which each wheel has a stub and a skel: a chip may not be among them.
#[test]
fn install_says_which_chips_the_libraries_are_for() {
    let folder = folder();
    let installed = folder.path().join("cache/qnn/2.7.0-windows-arm64/onnxruntime_qnn");
    std::fs::create_dir_all(&installed).expect("a folder");
    let files = ["QnnHtp.dll", "QnnSystem.dll", "QnnHtpV73Stub.dll", "libQnnHtpV73Skel.so"];
    let others = ["QnnHtpV68Stub.dll", "libQnnHtpV68Skel.so", "QnnHtpV81Stub.dll"];
    for name in files.iter().chain(&others) {
        std::fs::write(installed.join(name), "").expect("a file");
    }
    let install = ["libraries", "install", "--for", "windows-arm64"];
    let run = Program::qhx(folder.path()).args(install).run().ok();
    run.says(&["they have stubs and skels for v68, v73\n"]);
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_wheel_that_is_another_file_is_refused() {
    let folder = folder();
    std::fs::write(folder.path().join("x.whl"), b"PK").expect("a file");
    qhx!(folder, "libraries", "install", "--wheel", "x.whl").run().fails(5, &["x.whl: sha256 "]);
    let left: Vec<_> = std::fs::read_dir(folder.path().join("cache/qnn"))
        .expect("a folder")
        .filter_map(Result::ok)
        .map(|e| e.file_name())
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn install_without_python_says_so() {
    let folder = folder();
    qhx!(folder, "libraries", "install")
        .env("PATH", folder.path())
        .run()
        .fails(5, &["python3 is not on the path", "apt-get install python3"]);
}
