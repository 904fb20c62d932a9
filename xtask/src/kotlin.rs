//! The Kotlin library: compiled, tested on a Java virtual machine, and laid out for Android.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::cargo::{self, PROGRAM, Result};
use crate::kotlinc::{Tools, at, compile, folder, java, joined, tools};
use crate::{android, android_app};

/// Bundles for the tests: name, checkpoint, and arguments of `qhx forge`.
const BUNDLES: [(&str, &str, &str); 4] = [
    ("language", "llama3-tiny", ""),
    ("listening", "whisper-tiny", ""),
    ("encoder", "embed-mistral-tiny", "--task embed --max-ctx 180"),
    ("seeing", "qwen3vl-tiny", "--max-ctx 200 --prefill 16 --recipe-option image-size=48"),
];

/// A bundle that transcribes: of a checkpoint without a chat template, whose manifest declares how.
const HEARING: (&str, &str) = (
    "gemma4-tiny",
    "--max-ctx 200 --prefill 24 --recipe-option towers=audio --recipe-option audio-tokens=54",
);

/// A chat template that knows tools.
const CALLING: &str = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}\
    {% for message in messages %}{{ message.content }}{% endfor %}";

/// Builds the native part, and the program as it was tested: in two commands, as in one each would have features of the
/// other's dependencies, and be built once more.
fn native() -> Result<(PathBuf, PathBuf)> {
    let qhx = cargo::build(&["qhx-cli"], &["--features", PROGRAM], "qhx")?;
    cargo::run(&mut cargo::cargo(&["build", "--package", "qhx-jni"]))?;
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = qhx.with_file_name(format!("{prefix}qhxjni{suffix}"));
    Ok((qhx, library))
}

/// Lays the archive for Android out, compiles everything and runs the tests: those of the NPU, too, where its libraries
/// are named. `run` runs a command of tests.
pub(crate) fn test(
    tools: &Tools,
    npu: Option<&(PathBuf, PathBuf)>,
    run: &impl Fn(&mut Command) -> Result<()>,
) -> Result<()> {
    let (qhx, native) = native()?;
    let out = qhx.with_file_name("kotlin");
    // What another version left would be found, too.
    let _ = std::fs::remove_dir_all(&out);
    let given = Given { qhx: &qhx, folder: out.join("given"), home: out.join("home") };
    given.bundles()?;
    given.values()?;
    if let Some((htp, system)) = npu {
        given.npu(htp, system)?;
    }
    let laid = android::lay_out(tools, &out, None)?;
    given.text("aar", &laid.to_string_lossy())?;
    given.text("exports", &exports(&native)?)?;
    let (classes, tests) = (out.join("classes.jar"), out.join("tests.jar"));
    let friends = [OsString::from(format!("-Xfriend-paths={}", classes.display()))];
    let examples = qhx_paths::workspace().join("examples/kotlin");
    let mut sources = vec![folder().join("tests"), examples, pages(&out)?];
    sources.extend(android_app::plain_sources());
    compile(tools, &sources, std::slice::from_ref(&classes), &friends, &tests)?;
    let class_path = joined(tools.libraries().iter().chain(&[classes, tests]))?;
    let program = |arguments: &[&str]| {
        let mut program = java();
        let native = native.parent().unwrap_or(&out).display();
        program.arg("-Xcheck:jni").arg(format!("-Djava.library.path={native}"));
        program.arg("-cp").arg(&class_path).args(arguments).current_dir(&given.folder);
        given.clean(&mut program);
        run(&mut program)
    };
    program(&["dev.qhx.tests.HarnessKt", "."])?;
    android_app::build(tools, &out)?;
    program(&["ChatKt", "language", "What colour is the sky?"])?;
    program(&["PagesKt"])
}

/// `cargo xtask kotlin`.
pub(crate) fn tier() -> Result<()> {
    if let Some(why) = android_app::missing() {
        return Err(why);
    }
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let npu = set("QHX_QNN_HTP").zip(set("QHX_QNN_SYSTEM"));
    test(&tools()?, npu.as_ref(), &cargo::run)
}

/// The functions that a library exports, a line each.
fn exports(library: &Path) -> Result<String> {
    let symbols = cargo::output(Command::new("nm").args(["-D", "--defined-only"]).arg(library))?;
    let names = symbols.lines().filter_map(|line| line.split_whitespace().nth(2));
    Ok(names.collect::<Vec<_>>().join("\n"))
}

/// A program with the lines of Kotlin that pages show. Those of the README run.
fn pages(out: &Path) -> Result<PathBuf> {
    let (mut imports, mut functions) = (Vec::new(), Vec::new());
    for page in ["README.md", "bindings/kotlin/README.md", "docs/kotlin.md"] {
        let path = qhx_paths::workspace().join(page);
        let text = std::fs::read_to_string(&path).map_err(at(&path))?;
        for block in text.split("```kotlin\n").skip(1) {
            let lines = block.split("\n```").next().unwrap_or_default().lines();
            let (import, code): (Vec<_>, Vec<_>) =
                lines.partition(|line| line.starts_with("import "));
            imports.extend(import.into_iter().map(str::to_owned));
            functions.push(code.join("\n"));
        }
    }
    imports.push("import kotlinx.coroutines.runBlocking".to_owned());
    imports.sort();
    imports.dedup();
    let mut source = imports.join("\n");
    for (index, code) in functions.iter().enumerate() {
        source.push_str(&format!("\n\nsuspend fun block{index}() {{\n{code}\n}}"));
    }
    source.push_str("\n\nfun main() = runBlocking { block0() }\n");
    let file = out.join("Pages.kt");
    std::fs::write(&file, source).map_err(at(&file))?;
    Ok(file)
}

/// Inputs of the tests.
struct Given<'a> {
    qhx: &'a Path,
    folder: PathBuf,
    home: PathBuf,
}

impl Given<'_> {
    /// Without settings, plugins and caches of the user's.
    fn clean(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("QHX_") || text.starts_with("XDG_") {
                command.env_remove(name);
            }
        }
        command.env("HOME", &self.home).env("QHX_CACHE_DIR", &self.home);
        command.env("QHX_BACKEND", "cpu");
    }

    fn text(&self, name: &str, text: &str) -> Result<()> {
        let file = self.folder.join(format!("{name}.txt"));
        std::fs::write(&file, text).map_err(at(&file))
    }

    fn forge(&self, checkpoint: &Path, name: &str, arguments: &str) -> Result<()> {
        let mut forge = Command::new(self.qhx);
        self.clean(&mut forge);
        forge.arg("forge").arg(checkpoint).arg("--out").arg(self.folder.join(name));
        forge.arg("--cpu-only").args(arguments.split_whitespace());
        cargo::output(&mut forge).map(drop)
    }

    fn bundles(&self) -> Result<()> {
        std::fs::create_dir_all(&self.folder).map_err(at(&self.folder))?;
        for (name, checkpoint, arguments) in BUNDLES {
            self.forge(&qhx_paths::fixture(checkpoint), name, arguments)?;
        }
        let checkpoint = self.home.join("hearing");
        copy(&qhx_paths::fixture(HEARING.0), &checkpoint)?;
        let config = checkpoint.join("tokenizer_config.json");
        let mut value = json(&config)?;
        value.as_object_mut().and_then(|value| value.remove("chat_template"));
        std::fs::write(&config, value.to_string()).map_err(at(&config))?;
        self.forge(&checkpoint, "hearing", HEARING.1)?;
        let calling = self.folder.join("calling");
        copy(&self.folder.join("language"), &calling)?;
        let template = calling.join("chat_template.jinja");
        std::fs::write(&template, CALLING).map_err(at(&template))?;
        // Under the names that the README has.
        for (name, shown) in [("language", "qwen35/v81"), ("encoder", "embedcode/v81")] {
            copy(&self.folder.join(name), &self.folder.join(shown))?;
        }
        Ok(())
    }

    /// A bundle for the NPU.
    fn npu(&self, htp: &Path, system: &Path) -> Result<()> {
        let mut forge = Command::new(self.qhx);
        self.clean(&mut forge);
        forge.env("QHX_QNN_HTP", htp).env("QHX_QNN_SYSTEM", system);
        forge.arg("forge").arg(qhx_paths::fixture("llama3-tiny"));
        forge.arg("--out").arg(self.folder.join("npu"));
        forge.args(["--target", "v81", "--for-emulator", "--max-ctx", "64"]);
        forge.args(["--prefill", "0", "--no-golden"]);
        cargo::output(&mut forge)?;
        self.text("htp", &htp.to_string_lossy())?;
        self.text("system", &system.to_string_lossy())
    }

    /// Prompts, and what `transformers` answers.
    fn values(&self) -> Result<()> {
        let fixture = qhx_paths::fixture("llama3-tiny");
        let goldens = json(&fixture.join("goldens.json"))?;
        let cases = goldens["cases"].as_array().into_iter().flatten();
        let case = cases.into_iter().find(|case| case["id"] == "france");
        let case = case.ok_or("llama3-tiny has no case france")?;
        let tokens = case["output_ids"].as_array().into_iter().flatten().map(Value::to_string);
        self.text("prompt", case["prompt"].as_str().unwrap_or_default())?;
        self.text("answer", case["text"].as_str().unwrap_or_default())?;
        self.text("tokens", &tokens.collect::<Vec<_>>().join(" "))?;
        let turns = goldens["chat"][0]["turns"].as_array().into_iter().flatten();
        for (index, turn) in turns.enumerate() {
            self.text(&format!("question-{index}"), turn["user"].as_str().unwrap_or_default())?;
            self.text(&format!("reply-{index}"), turn["text"].as_str().unwrap_or_default())?;
        }
        let words = json(&qhx_paths::fixture("whisper-tiny").join("words.json"))?;
        let case = &words["cases"][0];
        self.text("clip", case["clip"].as_str().unwrap_or_default())?;
        let words = case["words"].as_array().into_iter().flatten();
        let words = words.map(|word| {
            let text = word[0].as_str().unwrap_or_default();
            format!("{text} {} {}", word[1], word[2])
        });
        self.text("words", &words.collect::<Vec<_>>().join("\n"))?;
        let fixtures = fixture.parent().unwrap_or(&fixture);
        self.text("fixtures", &fixtures.to_string_lossy())?;
        self.text("version", env!("CARGO_PKG_VERSION"))
    }
}

fn json(file: &Path) -> Result<Value> {
    let text = std::fs::read(file).map_err(at(file))?;
    serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", file.display()))
}

/// Copies a folder.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).map_err(at(to))?;
    cargo::run(Command::new("cp").arg("-r").arg(from.join(".")).arg(to))
}
