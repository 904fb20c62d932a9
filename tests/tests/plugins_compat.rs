//! Old and new plugins in old and new hosts, and plugins that were built otherwise.
//!
//! `tests/plugins/frozen-1.0` is the interface as it was at 1.0, with a plugin. A newer interface
//! is the present one with an added method in every table and an added field in the root; a broken
//! one has a changed signature or a changed struct.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says that it failed by panicking")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use qhx_core::CancelToken;
use qhx_core::engine::{Prompt, Request};
use qhx_plugins::{LoadErrorKind, Plugin, PluginOptions, Plugins};
use qhx_tests::null_model;
use qhx_tests::plugin_files::{self, Build, workspace};

/// Greedy continuation of the tokens 1, 2 by `test_frozen`: sums, modulo 16.
const EXPECTED: [u32; 4] = [3, 6, 12, 8];

/// Replaces a text that must be there.
fn edit(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from:?} is not there exactly once");
    text.replace(from, to)
}

/// Copies the files of `from` that `change` lets through, which gets path and content. What is
/// there already and the same stays untouched, so that nothing is built twice.
fn copy(from: &Path, to: &Path, change: &dyn Fn(&str, String) -> String) {
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            if entry.file_name() != "target" {
                copy(&path, &target, change);
            }
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let text = change(&path.to_string_lossy(), text);
        if fs::read_to_string(&target).ok().as_ref() != Some(&text) {
            fs::create_dir_all(to).unwrap();
            fs::write(target, text).unwrap();
        }
    }
}

/// The frozen workspace, its plugin under the name `package`, its interface as `change` makes it.
fn frozen(package: &str, change: &dyn Fn(&str, String) -> String) -> PathBuf {
    let root = plugin_files::scratch(package);
    let rename = |path: &str, text: String| {
        let text = text.replace("qhx-test-frozen-plugin", package);
        change(path, text)
    };
    copy(&workspace().join("tests/plugins/frozen-1.0"), &root, &rename);
    let lock = root.join("Cargo.lock");
    if !lock.exists() {
        fs::copy(workspace().join("Cargo.lock"), lock).unwrap();
    }
    root
}

fn unchanged(_path: &str, text: String) -> String {
    text
}

/// The interface of a later minor version: a method more in every table.
fn newer(path: &str, text: String) -> String {
    const CLOCK: &str = "\nunsafe extern \"C\" fn clock(_data: *mut c_void) -> u64 {\n    7\n}\n";
    if path.ends_with("op/Cargo.toml") {
        return edit(&text, "version = \"1.0.0\"", "version = \"1.1.0\"");
    }
    if path.ends_with("op/src/abi.rs") {
        let text = edit(
            &text,
            "pub span_add: unsafe extern \"C\" fn(data: *mut c_void, span: u32, nanoseconds: u64),\n",
            "pub span_add: unsafe extern \"C\" fn(data: *mut c_void, span: u32, nanoseconds: u64),\n\
             /// Added.\npub clock: unsafe extern \"C\" fn(data: *mut c_void) -> u64,\n",
        );
        let text = edit(
            &text,
            "    #[sabi(last_prefix_field)]\n    pub embed: unsafe extern \"C\" fn(\n        \
             data: *mut c_void,\n        segments: RSlice<'_, RawSegment<'_>>,\n    ) -> \
             RawResult<RawView>,\n",
            "    #[sabi(last_prefix_field)]\n    pub embed: unsafe extern \"C\" fn(\n        \
             data: *mut c_void,\n        segments: RSlice<'_, RawSegment<'_>>,\n    ) -> \
             RawResult<RawView>,\n/// Added.\npub clock: unsafe extern \"C\" fn(data: *mut c_void) -> u64,\n",
        );
        return edit(
            &text,
            "host: HostRef) -> RawResult<OpObject>,\n",
            "host: HostRef) -> RawResult<OpObject>,\n/// Added.\npub era: u64,\n",
        );
    }
    if path.ends_with("op/src/export.rs") {
        let text = edit(&text, "open: open_by_name }", "open: open_by_name, era: 2 }");
        return edit(&text, "embed: embed::<O>,\n", "embed: embed::<O>,\n        clock,\n") + CLOCK;
    }
    if path.ends_with("host/src/services.rs") || path.ends_with("op/src/harness.rs") {
        return edit(
            &text,
            "        span_add,\n    });",
            "        span_add,\n        clock,\n    });",
        ) + CLOCK;
    }
    text
}

fn generate(file: &Path) -> Vec<u32> {
    let options = PluginOptions {
        files: vec![file.to_owned()],
        only_named: true,
        ..PluginOptions::default()
    };
    let plugins = Plugins::discover(&options).unwrap();
    let mut model = null_model::open("test_frozen", &plugins, &CancelToken::new()).unwrap();
    let request = Request::greedy(Prompt::Tokens(vec![1, 2]), 4);
    let tokens = model.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap().tokens;
    let embedding = model.embed(&[4, 5]).unwrap();
    assert_eq!(embedding.iter().position(|&v| v == 1.0), Some(9));
    tokens
}

#[test]
fn the_frozen_plugin_runs_in_this_host() {
    let root = frozen("qhx-test-frozen-plugin", &unchanged);
    let file = Build::new(&root, "qhx-test-frozen-plugin").library();
    assert_eq!(Plugin::load(&file).unwrap().interface, "1.0.0");
    assert_eq!(generate(&file), EXPECTED);
}

#[test]
fn a_newer_plugin_runs_in_this_host() {
    let root = frozen("qhx-test-newer-plugin", &newer);
    let file = Build::new(&root, "qhx-test-newer-plugin").library();
    assert_eq!(Plugin::load(&file).unwrap().interface, "1.1.0");
    assert_eq!(generate(&file), EXPECTED);
}

#[test]
fn the_frozen_and_a_newer_plugin_run_in_a_newer_host() {
    let name = "qhx-test-newer-host";
    let root = plugin_files::scratch(name);
    let rename = |path: &str, text: String| newer(path, text.replace("qhx-test-compat-host", name));
    for member in ["core", "plugins/op", "plugins/host", "tests/plugins/compat-host", "tests/src"] {
        copy(&workspace().join(member), &root.join(member), &rename);
    }
    let manifest = fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
    let start = manifest.find("members = [").unwrap();
    let end = start + manifest[start..].find(']').unwrap() + 1;
    let members =
        "members = [\"core\", \"plugins/op\", \"plugins/host\", \"tests/plugins/compat-host\"]";
    let manifest = format!("{}{members}{}", &manifest[..start], &manifest[end..]);
    fs::write(root.join("Cargo.toml"), manifest).unwrap();
    if !root.join("Cargo.lock").exists() {
        fs::copy(workspace().join("Cargo.lock"), root.join("Cargo.lock")).unwrap();
    }
    let host = Build::new(&root, name).program();

    for (package, change, version) in [
        ("qhx-test-frozen-plugin", &unchanged as &dyn Fn(&str, String) -> String, "1.0.0"),
        ("qhx-test-newer-plugin", &newer, "1.1.0"),
    ] {
        let file = Build::new(&frozen(package, change), package).library();
        let output = Command::new(&host).arg(&file).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let expected = format!("host 1.1.0 plugin {version} tokens {EXPECTED:?}");
        assert_eq!(text.trim(), expected, "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn real_breaks_are_refused_in_one_sentence() {
    let signature = |path: &str, text: String| match path.ends_with("op/src/abi.rs") {
        true => edit(
            &text,
            "pub position: unsafe extern \"C\" fn(data: *mut c_void) -> u64,",
            "pub position: unsafe extern \"C\" fn(data: *mut c_void) -> RString,",
        ),
        false if path.ends_with("op/src/export.rs") => edit(
            &edit(
                &text,
                "unsafe extern \"C\" fn position<O: Op>(data: *mut c_void) -> u64 {",
                "unsafe extern \"C\" fn position<O: Op>(data: *mut c_void) -> RString {",
            ),
            "    position.unwrap_or(0)\n",
            "    position.unwrap_or(0).to_string().into()\n",
        ),
        false => text,
    };
    let layout = |path: &str, text: String| match path.ends_with("op/src/abi.rs") {
        true => edit(
            &text,
            "    /// First byte.\n    pub offset: u64,\n    /// Number of elements.\n    pub len: u64,",
            "    /// Number of elements.\n    pub len: u64,\n    /// First byte.\n    pub offset: u64,",
        ),
        false => text,
    };
    let removed = |path: &str, text: String| match path.ends_with("op/src/abi.rs") {
        true => edit(
            &text,
            "    /// Frees a saved state.\n    pub drop_snapshot: unsafe extern \"C\" fn(data: *mut c_void, snapshot: u64),\n",
            "",
        ),
        false if path.ends_with("op/src/export.rs") => {
            edit(&text, "        drop_snapshot: drop_snapshot::<O>,\n", "")
        }
        false => text,
    };
    type Edit<'a> = &'a dyn Fn(&str, String) -> String;
    let breaks: [(&str, Edit<'_>); 3] = [
        ("qhx-test-broken-signature", &signature),
        ("qhx-test-broken-layout", &layout),
        ("qhx-test-broken-removed", &removed),
    ];
    for (package, change) in breaks {
        let file = Build::new(&frozen(package, change), package).library();
        let error = Plugin::load(&file).unwrap_err();
        assert_eq!(error.kind, LoadErrorKind::Incompatible, "{error}");
        let message = error.to_string();
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.contains("types differ") && message.contains("rebuild"), "{message}");
        assert!(error.details.is_some_and(|text| text.lines().count() > 10));
    }
}

#[test]
fn plugins_built_otherwise_run() {
    let package = "qhx-test-frozen-plugin";
    let root = frozen(package, &unchanged);
    let release = Build::new(&root, package).args(&["--release"]).library();
    assert_eq!(generate(&release), EXPECTED, "release with LTO");

    let allocator = Build::new(&root, package).args(&["--features", "other-allocator"]);
    let allocator = allocator.library();
    assert_eq!(generate(&allocator), EXPECTED, "another allocator");

    let abort = Build::new(&root, package).args(&["--config", "profile.dev.panic='abort'"]);
    let abort = abort.library();
    assert_eq!(generate(&abort), EXPECTED, "panic = abort");
}

#[test]
fn a_plugin_of_another_toolchain_runs() {
    let package = "qhx-test-frozen-plugin";
    let root = frozen(package, &unchanged);
    let installed = Command::new("rustup").args(["toolchain", "list"]).output();
    let installed = installed.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    let other = installed.unwrap_or_default().lines().find_map(|line| {
        line.starts_with("nightly").then(|| line.split_whitespace().next().unwrap_or("").to_owned())
    });
    let Some(other) = other else {
        eprintln!("skipped: no toolchain but the workspace's is installed");
        return;
    };
    let file = Build::new(&root, package).toolchain(&other).library();
    assert_eq!(generate(&file), EXPECTED, "{other}");
}
