//! The library as programs in C and C++ see it: its header, its symbols, and a client that goes through all of it.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

mod package;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use qhexrt::abi::{self, Layout};
use qhx_forge::{ForgeOptions, Silent, Task, forge};
use qhx_tests::tiny::{self, Variant};
use qhx_tests::{files, multimodal, plugin_files};
use qhx_text::Tokenizer;
use qhx_tiers::tier;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Tokens that the client has generated on the CPU; the last one ends a character.
const TOKENS: usize = 12;
/// And on the emulator, which takes up to a second for each.
const EMULATED: usize = 4;
/// Random sequences in the usual run, and in the full one.
const SEQUENCES: [usize; 2] = [100, 1000];

fn folder() -> PathBuf {
    qhx_paths::workspace().join("bindings/c")
}

/// The libraries of this build. Cargo builds them beside the test.
fn library(name: &str) -> PathBuf {
    let file = std::env::current_exe().unwrap().with_file_name(name);
    assert!(file.is_file(), "{} was not built", file.display());
    file
}

/// The shared library under the name that programs look for.
fn named(folder: &Path) {
    std::os::unix::fs::symlink(library("libqhexrt.so"), folder.join("libqhexrt.so.1")).unwrap();
}

fn ok(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stderr}", output.status);
    output
}

/// Compiles a program that needs the header.
fn compile(compiler: &str, source: &Path, program: &Path, arguments: &[&str]) {
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]).arg(folder().join("include"));
    ok(command.arg(source).arg("-o").arg(program).args(arguments));
}

/// Links the shared library from a folder.
fn shared(folder: &Path) -> Vec<String> {
    vec![library("libqhexrt.so").display().to_string(), format!("-Wl,-rpath,{}", folder.display())]
}

/// The structs of the header.
const LAYOUTS: [Layout; 7] = [
    abi::GenCfg::LAYOUT,
    abi::Inputs::LAYOUT,
    abi::Media::LAYOUT,
    abi::GenerateOptions::LAYOUT,
    abi::Output::LAYOUT,
    abi::LastError::LAYOUT,
    abi::RuntimeOptions::LAYOUT,
];

#[test]
fn the_header_is_what_rust_has() {
    let constants = [
        ("QHX_ABI_VERSION_MAJOR", abi::ABI_VERSION_MAJOR),
        ("QHX_ABI_VERSION_MINOR", abi::ABI_VERSION_MINOR),
        ("QHX_MAX_HISTORY", abi::MAX_HISTORY),
        ("QHX_OK", abi::OK),
        ("QHX_ERROR_PANICKED", abi::PANICKED),
        ("QHX_ERROR_HANDLE", abi::HANDLE),
        ("QHX_ERROR_BUSY", abi::BUSY),
        ("QHX_ERROR_INTERNAL", abi::INTERNAL),
        ("QHX_ERROR_CANCELLED", abi::CANCELLED),
        ("QHX_MEDIA_IMAGE", abi::MEDIA_IMAGE),
        ("QHX_MEDIA_AUDIO", abi::MEDIA_AUDIO),
    ];
    let mut kinds = Vec::new();
    for name in [
        "usage",
        "manifest",
        "artifact",
        "runtime",
        "context",
        "graph",
        "plugin",
        "prompt",
        "execute",
        "io",
        "device_lost",
        "internal",
        "cancelled",
    ] {
        let kind: qhx_base::ErrorKind = name.parse().unwrap();
        kinds.push((format!("QHX_ERROR_{}", name.to_uppercase()), i32::from(kind.exit_code())));
    }
    let mut source = "#include <stdio.h>\n#include \"qhexrt_c.h\"\nint main(void) {\n".to_owned();
    let mut expected = String::new();
    let field = "((TYPE *)0)->";
    for Layout { name, size, fields } in LAYOUTS {
        writeln!(source, "printf(\"{name} %zu\\n\", sizeof({name}));").unwrap();
        writeln!(expected, "{name} {size}").unwrap();
        let mut end = 0;
        for (member, offset, size) in fields {
            let of = field.replace("TYPE", name);
            writeln!(
                source,
                "printf(\"{member} %zu %zu\\n\", offsetof({name}, {member}), sizeof({of}{member}));"
            )
            .unwrap();
            writeln!(expected, "{member} {offset} {size}").unwrap();
            end = offset + size;
        }
        // A field that only the header has would be in between, or behind the last one.
        assert!(size - end < 8, "{name}");
    }
    let constants = constants.iter().map(|(name, value)| ((*name).to_owned(), *value));
    for (name, value) in constants.chain(kinds) {
        writeln!(source, "printf(\"{name} %d\\n\", (int){name});").unwrap();
        writeln!(expected, "{name} {value}").unwrap();
    }
    source.push_str("return 0; }\n");
    let out = tempfile::tempdir().unwrap();
    let (file, program) = (out.path().join("layout.c"), out.path().join("layout"));
    std::fs::write(&file, source).unwrap();
    compile("cc", &file, &program, &["-std=c99"]);
    let printed = ok(&mut Command::new(program)).stdout;
    assert_eq!(String::from_utf8(printed).unwrap(), expected);
}

/// The structs of 1.0 on 64-bit machines: name and bytes, and each field with its offset and bytes; those that later
/// versions added, too. Nothing here may change while the major version is 1.
#[cfg(target_pointer_width = "64")]
const FIRST: [(&str, &str); 7] = [
    (
        "qhx_gen_cfg 88",
        "max_new_tokens 0 4, temperature 4 4, top_k 8 4, top_p 12 4, min_p 16 4, repetition_penalty 20 4, \
         repetition_window 24 4, seed 32 8, stop_strings 40 8, n_stop_strings 48 4, stop_token_ids 56 8, \
         n_stop_token_ids 64 4, grammar 72 8, grammar_kind 80 4",
    ),
    (
        "qhx_inputs 88",
        "text 0 8, system_prompt 8 8, history 16 8, n_history 24 4, no_template 28 4, image_path 32 8, \
         image_data 40 8, image_size 48 8, mask_path 56 8, audio 64 8, n_audio 72 8, audio_sr 80 4",
    ),
    (
        "qhx_media 56",
        "kind 0 4, path 8 8, data 16 8, size 24 8, samples 32 8, n_samples 40 8, sample_rate 48 4",
    ),
    (
        "qhx_generate_options 80",
        "struct_size 0 8, disable_thinking 8 4, should_cancel 16 8, should_cancel_user 24 8, tokens 32 8, \
         n_tokens 40 4, media 48 8, n_media 56 4, every_token 60 4, embed_query 64 4, logprobs 68 4, \
         top_logprobs 72 4, reserved 76 4, logit_bias_tokens 80 8, logit_biases 88 8, n_logit_bias 96 4, \
         word_times 100 4, cache_salt 104 8, vad 112 8",
    ),
    (
        "qhx_output 168",
        "status 0 4, text 8 8, n_generated 16 4, n_prompt 20 4, prefill_ms 24 8, decode_ms 32 8, audio 40 8, \
         n_audio 48 8, sample_rate 56 4, embedding 64 8, n_embedding 72 4, image 80 8, img_h 88 4, img_w 92 4, \
         img_c 96 4, n_text 104 8, n_reused 112 4, finish_reason 120 8, tokens 128 8, logprobs 136 8, \
         top_tokens 144 8, top_logprobs 152 8, n_top 160 4",
    ),
    ("qhx_error 48", "struct_size 0 8, status 8 4, kind 16 8, message 24 8, hint 32 8, code 40 8"),
    (
        "qhx_runtime_options 80",
        "struct_size 0 8, htp 8 8, system 16 8, backend 24 8, device_arch 32 8, plugins 40 8, threads 48 4, \
         decode_on 56 8, cpu_activations 64 8, cpu_caches 72 8",
    ),
];

/// A struct without `struct_size` that grew would be written behind the place that a program of 1.0 has for it.
#[cfg(target_pointer_width = "64")]
#[test]
fn structs_are_those_of_1_0_or_grew_at_their_end() {
    for (Layout { name, size, fields }, (first, expected)) in LAYOUTS.iter().zip(FIRST) {
        let (mut found, mut end) = (Vec::new(), 0);
        for (field, offset, bytes) in *fields {
            found.push(format!("{field} {offset} {bytes}"));
            end = offset + bytes;
        }
        if fields[0].0 == "struct_size" {
            found.truncate(expected.split(", ").count());
            // Otherwise the next field would lie where this version's callers set nothing.
            assert_eq!(end, *size, "{name}: padding behind the last field");
            assert!(first.starts_with(name) && found.join(", ") == expected, "{name}: {found:?}");
        } else {
            assert_eq!(
                (format!("{name} {size}"), found.join(", ")),
                (first.to_owned(), expected.to_owned())
            );
        }
    }
}

#[test]
fn the_library_exports_what_the_header_declares() {
    let header = std::fs::read_to_string(folder().join("include/qhexrt_c.h")).unwrap();
    let declared: BTreeSet<_> = header
        .split("QHX_API ")
        .skip(1)
        .filter_map(|text| text.split_once('(')?.0.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("qhx_"))
        .collect();
    let library = library("libqhexrt.so");
    let symbols = ok(Command::new("nm").args(["-D", "--defined-only"]).arg(&library)).stdout;
    let symbols = String::from_utf8(symbols).unwrap();
    let exported: BTreeSet<_> =
        symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(exported, declared);
    assert!(declared.len() >= 15);
    let dynamic = ok(Command::new("readelf").arg("-d").arg(library)).stdout;
    let dynamic = String::from_utf8(dynamic).unwrap();
    assert!(dynamic.contains("[libqhexrt.so.1]") && dynamic.contains("NODELETE"), "{dynamic}");
}

/// Inputs of the client: bundles, prompts, and expected answers.
struct Given {
    folder: TempDir,
    language: PathBuf,
    prompt: String,
    expected: String,
}

fn language(target: Option<&'static str>, tokens: usize) -> Given {
    let checkpoint = tiny::fixture("llama3-tiny");
    let language = tiny::bundle(&checkpoint, Variant { target, ..tiny::CPU });
    let goldens = tiny::goldens(&checkpoint);
    let case = goldens.cases.iter().find(|case| case.id == "france").unwrap();
    let tokenizer = Tokenizer::from_file(&checkpoint.join("tokenizer.json")).unwrap();
    let expected = tokenizer.decode(&case.output_ids[..tokens]).unwrap();
    assert!(case.text.starts_with(&expected), "{expected:?}");
    let folder = tempfile::tempdir().unwrap();
    named(folder.path());
    Given { folder, language, prompt: case.prompt.clone(), expected }
}

impl Given {
    /// The client, compiled with these arguments.
    fn client(&self, name: &str, arguments: &[&str]) -> Command {
        let program = self.folder.path().join(name);
        let shared = shared(self.folder.path());
        let mut all = vec!["-std=c++17", "-pthread"];
        all.extend(arguments);
        all.extend(shared.iter().map(String::as_str));
        compile("c++", &folder().join("tests/client.cpp"), &program, &all);
        let mut command = Command::new(program);
        // No plugin and no cache of the user's.
        command.env("HOME", self.folder.path()).env_remove("QHX_PLUGIN_PATH");
        for name in ["XDG_DATA_HOME", "XDG_CACHE_HOME", "QHX_DEVICE_ARCH"] {
            command.env_remove(name);
        }
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A folder with the plugin of the multimodal fixture, its bundle with and without what asks for a transcription,
    /// and a red image.
    fn multimodal(&self) -> [PathBuf; 4] {
        let [plugins, image] = ["plugins", "red.png"].map(|name| self.path(name));
        std::fs::create_dir(&plugins).unwrap();
        let plugin = plugin_files::build("qhx-test-multimodal-plugin");
        std::fs::copy(&plugin, plugins.join(plugin.file_name().unwrap())).unwrap();
        let bundle = multimodal::write(&self.path("multimodal")).unwrap();
        let transcribing = multimodal::write(&self.path("transcribing")).unwrap();
        files::edit(&transcribing, |manifest| {
            manifest["params"]["transcription"] = json!({"prompt": "ab", "chat": false});
        });
        let red = image::RgbImage::from_pixel(2, 4, image::Rgb([255, 0, 0]));
        red.save(&image).unwrap();
        [plugins, bundle, transcribing, image]
    }

    /// Adds a bundle that finds words, a clip, and the words in it with their times.
    fn words(&self, client: &mut Command) {
        let checkpoint = tiny::fixture("whisper-tiny");
        let options = ForgeOptions::new(self.path("listening"));
        client.arg(forge(&checkpoint, &options, &mut Silent).unwrap().manifest);
        let goldens: Value = files::json(&checkpoint.join("words.json"));
        let case = &goldens["cases"][0];
        client.arg(checkpoint.join(case["clip"].as_str().unwrap()));
        for word in case["words"].as_array().unwrap() {
            client.arg(word[0].as_str().unwrap());
            client.args([word[1].to_string(), word[2].to_string()]);
        }
    }

    /// Runs the client through everything.
    fn all(&self, client: &mut Command) {
        let [plugins, bundle, transcribing, image] = self.multimodal();
        let mut options = ForgeOptions::new(self.path("embedding"));
        (options.task, options.prefill) = (Some(Task::Embed), Some(Vec::new()));
        let embedding = tiny::fixture("embed-mistral-tiny");
        let embedding = forge(&embedding, &options, &mut Silent).unwrap().manifest;
        client.arg("all").arg(&self.language).arg(&self.prompt).arg(&self.expected);
        client.args([plugins, bundle, image, transcribing, embedding]);
        client.arg(self.path("state"));
        self.words(client);
        // Nothing is said where results of a program go.
        assert_eq!(ok(client.env("QHX_BACKEND", "cpu")).stdout, b"");
    }
}

/// A leak ends the client with this code, as any fault of memory does.
const ASAN: [(&str, &str); 1] = [("ASAN_OPTIONS", "detect_leaks=1:exitcode=9:abort_on_error=0")];

#[test]
fn a_client_goes_through_all_of_it() {
    let given = language(None, TOKENS);
    let mut client = given.client("client", &["-O1", "-fsanitize=address,undefined"]);
    given.all(client.envs(ASAN).env("QHX_DEVICE_ARCH", "v79"));
}

#[test]
fn a_state_goes_on_in_another_process() {
    let given = language(None, TOKENS);
    let program = given.client("client", &["-O1", "-fsanitize=address,undefined"]);
    for what in ["save", "restore"] {
        let mut client = Command::new(program.get_program());
        client.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        client.arg(what).arg(&given.language).arg(given.path("state"));
        ok(client.envs(ASAN).env("QHX_BACKEND", "cpu"));
    }
}

#[test]
fn random_calls_neither_crash_nor_leak() {
    let given = language(None, TOKENS);
    let [plugins, bundle, _, image] = given.multimodal();
    let mut client = given.client("client", &["-O1", "-fsanitize=address,undefined"]);
    let count = SEQUENCES[usize::from(tiny::full_matrix())].to_string();
    client.args(["random", &count]).args([plugins, bundle, image]);
    ok(client.envs(ASAN).env("QHX_BACKEND", "cpu"));
}

impl Given {
    /// Runs a client with a few steps of two sessions on two threads.
    fn briefly(&self, client: &mut Command, backend: &str) {
        client.arg("brief").arg(&self.language).arg(&self.prompt).arg(&self.expected);
        ok(client.env("QHX_BACKEND", backend));
    }
}

#[test]
fn a_library_may_call_while_the_runtime_loads_it() {
    let given = language(None, TOKENS);
    let (source, library) = (folder().join("tests/loaded.c"), given.path("libloaded.so"));
    compile("cc", &source, &library, &["-std=c99", "-D_DEFAULT_SOURCE", "-shared", "-fPIC"]);
    let mut client = given.client("client", &["-O1"]);
    let output = client.arg("loading").arg(&library).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    assert!(stderr.contains("while it is loaded: a runtime is being made"), "{stderr}");
}

#[test]
fn a_session_whose_reset_panicked_is_opened_again() {
    let given = language(None, TOKENS);
    let [plugins, bundle, ..] = given.multimodal();
    files::edit(&bundle, |manifest| manifest["params"]["panics_in_reset"] = true.into());
    let mut client = given.client("client", &["-O1"]);
    ok(client.arg("resetting").args([plugins, bundle]).env("QHX_BACKEND", "cpu"));
}

#[tier(qnn)]
fn a_client_generates_on_the_npu() {
    let given = language(Some("v81"), EMULATED);
    given.briefly(&mut given.client("client", &["-O1"]), "qnn");
}

/// The sanitizer checks only what callbacks and threads of the client do to the client's own memory. It does not see
/// the atomics of the library, which is therefore suppressed.
#[test]
fn threads_of_a_client_do_not_race() {
    let given = language(None, EMULATED);
    let suppressions = given.path("suppressions");
    std::fs::write(&suppressions, "called_from_lib:libqhexrt.so.1\n").unwrap();
    let mut client = given.client("client", &["-O1", "-fsanitize=thread"]);
    client.env("TSAN_OPTIONS", format!("suppressions={}", suppressions.display()));
    given.briefly(&mut client, "cpu");
}

#[test]
fn an_exception_of_a_callback_ends_the_process() {
    let given = language(None, TOKENS);
    let mut client = given.client("client", &["-O1"]);
    client.arg("throw").arg(&given.language).arg(&given.prompt).env("QHX_BACKEND", "cpu");
    let output = client.output().unwrap();
    assert_eq!(output.status.signal(), Some(6), "{}", output.status);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("begun") && stderr.contains("foreign exception"), "{stderr}");
}

#[test]
fn the_package_file_has_the_version() {
    let file = std::fs::read_to_string(folder().join("package/qhexrt.pc")).unwrap();
    assert!(file.contains(concat!("Version: ", env!("CARGO_PKG_VERSION"), "\n")), "{file}");
}

#[test]
fn the_example_runs_with_either_library() {
    let given = language(None, TOKENS);
    let source = qhx_paths::workspace().join("examples/c/chat.c");
    let shared = shared(given.folder.path());
    let with: Vec<_> = shared.iter().map(String::as_str).collect();
    let archive = library("libqhexrt.a").display().to_string();
    let within = [&*archive, "-lpthread", "-ldl", "-lm"];
    let mut answers = Vec::new();
    for (name, libraries) in [("shared", &with[..]), ("static", &within)] {
        let program = given.path(name);
        compile("cc", &source, &program, &[&["-std=c99"], libraries].concat());
        let mut chat = Command::new(program);
        chat.env("QHX_BACKEND", "cpu").arg(&given.language).arg("Hello");
        answers.push(String::from_utf8(ok(&mut chat).stdout).unwrap());
        let failed = chat.arg("too many").output().unwrap();
        assert_eq!(failed.status.code(), Some(2));
    }
    assert!(answers[0].len() > 1 && answers[0] == answers[1], "{answers:?}");
}
