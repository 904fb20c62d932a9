//! Old and new plugins in old and new hosts, plugins of broken interfaces, and plugins that were
//! built otherwise.
//!
//! `tests/plugins/frozen-1.0` is the interface as it was at 1.0, with a plugin. A newer interface
//! is one with an added function in every table and an added field in the root. A broken one has a
//! changed signature, a changed struct, or a function less.

#![cfg(target_os = "linux")]

use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

use qhx_base::{CancelToken, Error, ErrorKind};
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_plugins::{LoadErrorKind, Plugin};
use qhx_tests::null_model::{self, Setup};
use qhx_tests::plugin_files::{only, workspace};
use qhx_tests::replay::{complete, generate};
use qhx_tests::variants::{Edit, Variant, Way, unchanged};
use qhx_types::Media;

/// Greedy continuation of the tokens 1, 2 by `test_frozen`: sums, modulo 16.
const EXPECTED: [u32; 4] = [3, 6, 12, 8];

const FROZEN: Variant = Variant { name: "frozen", edit: unchanged, host: Some(&[]) };
/// 1.0 and what a later version adds.
const NEWER: Variant = Variant { name: "newer", edit: newer, host: Some(&["newer"]) };

const PLAIN: Way<'_> = Way { name: "", args: &[], release: false, toolchain: None };

/// Replaces a text that must be there once.
fn replace(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from:?} is not there exactly once");
    text.replace(from, to)
}

/// Puts `added` before the brace that closes what begins with `head`, which ends with a brace.
fn append(text: &str, head: &str, added: &str) -> String {
    let start = text.find(head).unwrap_or_else(|| panic!("{head:?} is not there")) + head.len();
    let mut depth = 1;
    let end = text[start..].find(|c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0
    });
    let end = start + end.unwrap_or_else(|| panic!("{head:?} is not closed"));
    let comma = if text[..end].trim_end().ends_with(',') { "" } else { "," };
    format!("{}{comma}\n{added}\n{}", text[..end].trim_end(), &text[end..])
}

/// The interface of a later minor version, and a plugin that uses what is new where the host has it.
fn newer(path: &str, text: String) -> String {
    const FIELD: &str = "/// Added.\npub clock: unsafe extern \"C\" fn(data: *mut c_void) -> u64,";
    const CLOCK: &str = "\nunsafe extern \"C\" fn clock(_data: *mut c_void) -> u64 {\n    7\n}\n";
    const LOG: &str = "        unsafe { services.log()(data, 4, \"opened\".into()) };\n";
    match path {
        "op/Cargo.toml" => replace(&text, "version = \"1.0.0\"", "version = \"1.99.0\""),
        "op/src/abi.rs" => {
            let text = append(&text, "pub struct HostVTable {", FIELD);
            let text = append(&text, "pub struct OpVTable {", FIELD);
            append(&text, "pub struct OpModule {", "/// Added.\npub era: u64,")
        }
        "plugin/src/lib.rs" => {
            let text = append(&text, "WithMetadata::new(OpModule {", "era: 2,");
            let text = append(&text, "WithMetadata::new(OpVTable {", "clock,") + CLOCK;
            let time = "let time = services.clock().map(|clock| unsafe { clock(data) });\n\
                        unsafe { services.log()(data, 4, format!(\"clock {time:?}\").as_str().into()) };\n";
            replace(&text, LOG, &format!("{time}{LOG}"))
        }
        _ => text,
    }
}

/// Runs the plugin in this program: tokens of a generation, and the version it was built against.
fn runs(file: &Path) -> (Vec<u32>, String) {
    let plugins = only(&[file.to_owned()]);
    let mut model = null_model::open("test_frozen", &plugins, &CancelToken::new()).unwrap();
    let speculate = "3".parse().unwrap();
    let request = Request::greedy(Prompt::Tokens(vec![1, 2]), 4).speculate(speculate);
    let tokens = generate(&mut model, &request).tokens;
    let embedding = model.embed(&[4, 5]).unwrap();
    assert_eq!(embedding.iter().position(|&v| v == 1.0), Some(9));
    (tokens, Plugin::load(file).unwrap().interface)
}

/// Runs a plugin in a host program and returns the line it prints.
fn hosted(host: &Path, plugin: &Path) -> String {
    let output = Command::new(host).arg(plugin).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    format!("{}{errors}", String::from_utf8_lossy(&output.stdout).trim_end())
}

fn line(host: &str, plugin: &str, added: &str, log: &[&str]) -> String {
    format!(
        "host {host} plugin {plugin} tokens {EXPECTED:?} position 5 embedded 9 added {added} log \
         {log:?}"
    )
}

#[test]
fn the_frozen_interface_is_that_of_1_0() {
    let read = |file: &str| fs::read_to_string(workspace().join(file)).unwrap();
    if qhx_plugins::interface_version() == "1.0.0" {
        assert_eq!(
            read("plugins/op/src/abi.rs"),
            read("tests/plugins/frozen-1.0/op/src/abi.rs"),
            "the interface changed and is still called 1.0.0: give qhx-op a new version"
        );
    }
    let major = qhx_plugins::interface_version().split('.').next();
    assert_eq!(major, Some("1"), "a new major version needs a frozen plugin of its own");
}

#[test]
fn a_frozen_plugin_runs_in_hosts_of_1_0_and_in_a_newer_one() {
    let frozen = FROZEN.build(PLAIN);
    assert_eq!(runs(&frozen.plugin), (EXPECTED.to_vec(), "1.0.0".to_owned()));
    let expected = line("1.0.0", "1.0.0", "not known", &["opened"]);
    assert_eq!(hosted(&frozen.host, &frozen.plugin), expected);
    // What the older plugin lacks is absent to the newer host, not a wild pointer.
    let expected = line("1.99.0", "1.0.0", "None None", &["opened"]);
    assert_eq!(hosted(&NEWER.build(PLAIN).host, &frozen.plugin), expected);
}

#[test]
fn a_newer_plugin_runs_in_hosts_of_1_0_and_of_its_own() {
    let newer = NEWER.build(PLAIN);
    assert_eq!(runs(&newer.plugin), (EXPECTED.to_vec(), "1.99.0".to_owned()));
    // What the older host lacks is absent to the newer plugin.
    let expected = line("1.0.0", "1.99.0", "not known", &["clock None", "opened"]);
    assert_eq!(hosted(&FROZEN.build(PLAIN).host, &newer.plugin), expected);
    // Of one age they use what is new.
    let expected = line("1.99.0", "1.99.0", "Some(2) Some(7)", &["clock Some(7)", "opened"]);
    assert_eq!(hosted(&newer.host, &newer.plugin), expected);
}

#[test]
fn every_call_of_1_0_is_used_through_a_frozen_plugin() {
    let plugins = only(&[FROZEN.build(PLAIN).plugin]);
    let mut model = null_model::open("test_frozen", &plugins, &CancelToken::new()).unwrap();
    let greedy = |model: &mut Model, prompt, max_new| {
        let request = Request::greedy(prompt, max_new).speculate("3".parse().unwrap());
        generate(model, &request)
    };
    // Sums reach a multiple of 16 and stay there: the zeros are draft tokens that are accepted.
    let said = greedy(&mut model, Prompt::Tokens(vec![1, 2]), 16);
    assert_eq!(said.tokens[..5], [3, 6, 12, 8, 0]);
    assert!(said.tokens[5..].iter().all(|token| *token == 0));
    assert!(
        said.timings.drafts.verifications > 0 && said.timings.drafts.accepted > 3,
        "{:?}",
        said.timings.drafts
    );
    // The tiles of an image count as 3 and 5.
    let image = Part::Media(Media::image(vec![0; 12], 2, 2).unwrap());
    let said = greedy(&mut model, Prompt::Parts(vec![Part::Tokens(vec![1]), image]), 4);
    assert_eq!(said.tokens, [9, 2, 4, 8]);
    assert!(model.op_note().unwrap()["sum"].is_u64());
    let op = model.op_mut();
    let (position, state) = (op.position(), op.export_state().unwrap());
    let saved = op.snapshot().unwrap();
    op.reset().unwrap();
    op.import_state(position, &state).unwrap();
    assert_eq!(op.position(), position);
    op.truncate(1).unwrap();
    op.restore(saved).unwrap();
    assert_eq!(op.position(), position);
    op.drop_snapshot(saved);
    let error = op.draft(1).unwrap_err();
    assert_eq!(error.message(), "draft", "a call that the plugin does not have");
    let texts: [&[u32]; 3] = [&[4, 5], &[1], &[7, 7]];
    let vectors = model.embed_many(&texts).unwrap();
    let best: Vec<_> = vectors.iter().map(|v| v.iter().position(|&v| v == 1.0)).collect();
    assert_eq!(best, [Some(9), Some(1), Some(14)]);
}

#[test]
fn an_error_of_the_host_keeps_its_hint_through_a_frozen_plugin() {
    let plugins = only(&[FROZEN.build(PLAIN).plugin]);
    let cause = Error::new(ErrorKind::Runtime, "the device is gone").hint("plug it in");
    let failure = Some(cause.with_code(1003));
    let setup = Setup { failure, ..Setup::default() };
    let mut model = null_model::open_with("test_frozen", &plugins, setup).unwrap();
    let error = complete(&mut model, &[1, 2], 4).unwrap_err();
    let parts = (error.kind(), error.hint_text(), error.code());
    assert_eq!(parts, (ErrorKind::Runtime, Some("plug it in"), Some(1003)), "{error}");
}

/// A function returns another type.
fn another_signature(path: &str, text: String) -> String {
    const POSITION: &str = "unsafe extern \"C\" fn position(data: *mut c_void) -> u64 {";
    match path {
        "op/src/abi.rs" => replace(
            &text,
            "pub position: unsafe extern \"C\" fn(data: *mut c_void) -> u64,",
            "pub position: unsafe extern \"C\" fn(data: *mut c_void) -> u32,",
        ),
        "plugin/src/lib.rs" => {
            let text = replace(&text, POSITION, &POSITION.replace("u64", "u32"));
            replace(&text, ".sums.len() as u64\n", ".sums.len() as u32\n")
        }
        _ => text,
    }
}

/// Two fields of a struct change places.
fn another_struct(path: &str, text: String) -> String {
    const OFFSET: &str = "    /// First byte.\n    pub offset: u64,\n";
    const LEN: &str = "    /// Number of elements.\n    pub len: u64,\n";
    match path {
        "op/src/abi.rs" => replace(&text, &format!("{OFFSET}{LEN}"), &format!("{LEN}{OFFSET}")),
        _ => text,
    }
}

/// A function that every 1.x has is gone.
fn a_function_less(path: &str, text: String) -> String {
    match path {
        "op/src/abi.rs" => replace(
            &text,
            "    /// Positions consumed so far.\n    pub position: unsafe extern \"C\" fn(data: *mut c_void) -> u64,\n",
            "",
        ),
        "plugin/src/lib.rs" => replace(&text, "info, position, place", "info, place"),
        _ => text,
    }
}

#[test]
fn real_breaks_are_refused_in_one_sentence() {
    let frozen_host = FROZEN.build(PLAIN).host;
    let breaks: [(&str, Edit); 3] =
        [("signature", another_signature), ("struct", another_struct), ("less", a_function_less)];
    for (name, edit) in breaks {
        let broken = Variant { name, edit, host: None };
        let file = broken.build(PLAIN).plugin;
        let error = Plugin::load(&file).unwrap_err();
        assert_eq!(error.kind, LoadErrorKind::Incompatible, "{name}: {error}");
        let message = error.to_string();
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.contains("types differ") && message.contains("rebuild"), "{message}");
        assert!(error.details.is_some_and(|text| text.lines().count() > 10));
        let message = hosted(&frozen_host, &file);
        assert!(message.starts_with("Incompatible: ") && !message.contains('\n'), "{message}");
    }
}

#[test]
fn a_plugin_of_another_major_version_is_refused_in_one_sentence() {
    fn version_9(path: &str, text: String) -> String {
        match path {
            "op/Cargo.toml" => replace(&text, "version = \"1.0.0\"", "version = \"9.0.0\""),
            _ => text,
        }
    }
    let other = Variant { name: "another-major", edit: version_9, host: None };
    let error = Plugin::load(&other.build(PLAIN).plugin).unwrap_err();
    assert_eq!(error.kind, LoadErrorKind::Incompatible);
    let message = error.to_string();
    let own = qhx_plugins::interface_version();
    assert!(message.contains("9.0.0") && message.contains(own), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
}

#[test]
fn a_plugin_with_another_allocator_runs() {
    let way = Way { name: "-allocator", args: &["--features", "other-allocator"], ..PLAIN };
    assert_eq!(runs(&PLUGIN.build(way).plugin).0, EXPECTED);
}

#[test]
fn a_plugin_of_a_release_build_with_link_time_optimization_runs() {
    let way = Way { name: "-release-lto", release: true, ..PLAIN };
    assert_eq!(runs(&PLUGIN.build(way).plugin).0, EXPECTED);
}

/// The frozen plugin without a host.
const PLUGIN: Variant = Variant { name: "otherwise", host: None, ..FROZEN };

/// Works until the plugin panics; then there is nobody to catch it.
#[test]
fn a_plugin_that_aborts_on_panic_runs() {
    let way = Way { name: "-abort", args: &["--config", "profile.dev.panic='abort'"], ..PLAIN };
    let (frozen, aborting) = (FROZEN.build(PLAIN), PLUGIN.build(way).plugin);
    assert_eq!(runs(&aborting).0, EXPECTED);
    let panic_in =
        |plugin: &Path| Command::new(&frozen.host).arg(plugin).arg("13").output().unwrap();
    let output = panic_in(&frozen.plugin);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && text.contains("token 13 goes wrong"), "{text}");
    let status = panic_in(&aborting).status;
    assert_eq!(status.signal(), Some(6), "SIGABRT expected: {status}");
}

/// The compiler that a command runs, such as `rustc 1.95.0 (59807616e 2026-04-14)`, and its minor
/// version.
fn compiler(command: &mut Command) -> Option<(String, u32)> {
    let output = command.args(["rustc", "--version"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let minor = text.strip_prefix("rustc 1.")?.split('.').next()?.parse().ok()?;
    Some((text.trim().to_owned(), minor))
}

#[test]
fn a_plugin_of_another_toolchain_runs() {
    /// The `rust-version` of the workspace.
    const OLDEST: u32 = 92;
    let list = Command::new("rustup").args(["toolchain", "list"]).output();
    let list = list.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let own = compiler(Command::new("env").arg("--"));
    let other = list.lines().filter_map(|line| line.split_whitespace().next()).find(|name| {
        let theirs = compiler(Command::new("rustup").args(["run", name]));
        theirs.as_ref().is_some_and(|(_, minor)| *minor >= OLDEST) && theirs != own
    });
    let Some(toolchain) = other else {
        // Not through `eprintln!`, which is shown for failures only.
        writeln!(std::io::stderr(), "skipped: plugin of another toolchain (only one is installed)")
            .unwrap();
        return;
    };
    let way = Way { name: "-toolchain", toolchain: Some(toolchain), ..PLAIN };
    let file = PLUGIN.build(way).plugin;
    assert_eq!(runs(&file).0, EXPECTED, "{toolchain}");
}
