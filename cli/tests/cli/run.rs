//! Starts the programs and says what they did.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use qhx_paths::{PLUGINS, fixture, program};
use qhx_tests::plugin_files::copy_folder;
use qhx_tests::{files, has};

/// Result of a run.
#[derive(Debug)]
pub struct Run {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Run {
    /// Standard output as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).expect("standard output is JSON")
    }

    /// Standard output as a JSON document a line.
    pub fn json_lines(&self) -> Vec<serde_json::Value> {
        let parsed = |line| serde_json::from_str(line).expect("a line of JSON");
        self.stdout.lines().map(parsed).collect()
    }

    /// Asserts this exit code, and messages with each of these parts.
    #[track_caller]
    pub fn fails(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        self.says(parts);
    }

    /// Asserts that messages have each of these parts.
    #[track_caller]
    pub fn says(&self, parts: &[&str]) {
        has(&self.stderr, parts);
    }

    /// Asserts that the output has each of these parts.
    #[track_caller]
    pub fn prints(&self, parts: &[&str]) {
        has(&self.stdout, parts);
    }

    /// Asserts the exit code 0.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }
}

/// A program with arguments, in an environment without the user's settings.
pub struct Program {
    command: Command,
    stdin: Vec<u8>,
}

impl Program {
    fn at(name: &str, folder: &Path) -> Self {
        Self::of(Command::new(program(name)), folder)
    }

    fn of(mut command: Command, folder: &Path) -> Self {
        plugin();
        command.current_dir(folder);
        for name in [
            "QHX_QNN_HTP",
            "QHX_QNN_SYSTEM",
            "QHX_PLUGIN_PATH",
            "QHX_LOG",
            "XDG_CACHE_HOME",
            "QHX_EMB_QUERY_PREFIX",
            "QHX_EMB_DOC_PREFIX",
            "ADSP_LIBRARY_PATH",
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HTTPS_PROXY",
            "https_proxy",
            "ALL_PROXY",
            "all_proxy",
        ] {
            command.env_remove(name);
        }
        command
            .env("HOME", folder)
            .env("XDG_DATA_HOME", folder)
            // Nobody is asked unless a test names a hub.
            .env("HF_ENDPOINT", "http://127.0.0.1:9")
            .env("QHX_CACHE_DIR", folder.join("cache"));
        Self { command, stdin: Vec::new() }
    }

    /// `qhx`, in `folder`.
    pub fn qhx(folder: &Path) -> Self {
        Self::at("qhx", folder)
    }

    /// `qhx` with the QNN libraries, for a test with `#[tier(qnn)]`.
    pub fn npu(folder: &Path) -> Self {
        Self::qhx(folder).with_libraries()
    }

    /// Names the QNN libraries.
    pub fn with_libraries(self) -> Self {
        let (htp, system) = qhx_tests::tiny::qnn_libraries();
        self.env("QHX_QNN_HTP", htp).env("QHX_QNN_SYSTEM", system)
    }

    /// A line of a shell that finds the programs, in `folder`.
    #[cfg(unix)]
    pub fn shell(folder: &Path, line: &str) -> Self {
        let mut command = Command::new("sh");
        let programs = program("qhx").parent().expect("a folder").to_owned();
        let others = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(programs).chain(std::env::split_paths(&others));
        command.args(["-c", line]).env("PATH", std::env::join_paths(path).expect("a PATH"));
        Self::of(command, folder)
    }

    /// Another program that runs `qhx`, in `folder`.
    pub fn through(command: Command, folder: &Path) -> Self {
        Self::of(command, folder)
    }

    /// A program of `examples/library`, in `folder`.
    #[cfg(all(unix, not(feature = "builtin-ops")))]
    pub fn library(folder: &Path, name: &str) -> Self {
        Self::at(name, folder)
    }

    /// `qhx_generate`, in `folder`.
    pub fn classic(folder: &Path) -> Self {
        Self::at("qhx_generate", folder)
    }

    /// `qhx_embed`, in `folder`.
    pub fn embed(folder: &Path) -> Self {
        Self::at("qhx_embed", folder)
    }

    /// Adds arguments.
    pub fn args<A: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.command.args(args);
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Sets a variable.
    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Gives standard input.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// Same as [`Program::start`], with a pipe for standard input alone.
    pub fn start_with_stdin(self) -> Child {
        self.start_with([Stdio::piped(), Stdio::null(), Stdio::null()])
    }

    /// Starts it with pipes for all that it reads and writes.
    pub fn start_with_streams(self) -> Child {
        self.start_with([Stdio::piped(), Stdio::piped(), Stdio::piped()])
    }

    /// Starts it and hands it over as it is.
    pub fn start(self) -> Child {
        self.start_with([Stdio::null(), Stdio::piped(), Stdio::piped()])
    }

    fn start_with(mut self, [stdin, stdout, stderr]: [Stdio; 3]) -> Child {
        let command = self.command.stdin(stdin).stdout(stdout).stderr(stderr);
        command.spawn().expect("the program starts")
    }

    /// Runs it to its end.
    pub fn run(self) -> Run {
        self.run_with(Stdio::piped(), Stdio::piped())
    }

    /// Same as [`Program::run`], with these streams; output that does not go into a pipe is not in the result.
    pub fn run_with(mut self, stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> Run {
        let input = std::mem::take(&mut self.stdin);
        let mut child = self.start_with([Stdio::piped(), stdout.into(), stderr.into()]);
        let mut stdin = child.stdin.take().expect("a pipe");
        // A program that does not read its input closes the pipe.
        let _ = stdin.write_all(&input);
        drop(stdin);
        let output = child.wait_with_output().expect("the program ends");
        Run {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).expect("results are UTF-8"),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// `qhx` in a folder with arguments: texts and paths.
macro_rules! qhx {
    ($folder:expr $(, $word:expr)* $(,)?) => {
        $crate::run::Program::qhx($folder.as_ref())$(.arg(&$word))*
    };
}

/// Forges a checkpoint with options as on a command line. Returns the bundle, which is `folder/out`.
pub fn forge(folder: &Path, checkpoint: &Path, out: &str, options: &str) -> PathBuf {
    let forge = qhx!(folder, "forge", checkpoint, "--out", out);
    forge.args(options.split(' ')).run().ok();
    folder.join(out)
}

/// The tiny checkpoint.
pub fn checkpoint() -> PathBuf {
    fixture("qwen35-tied")
}

/// Builds the plugins beside the program, unless the host-ops are linked in.
fn plugin() {
    static BUILT: Mutex<bool> = Mutex::new(cfg!(feature = "builtin-ops"));
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if *built {
        return;
    }
    let qhx = program("qhx");
    let profile = qhx.parent().expect("a folder");
    let status = qhx_paths::cargo()
        // With the program: alone, plugins would have all they need compiled once more, with their features only.
        .args(["build", "--quiet", "--lib", "--bins", "--package", "qhx-cli"])
        .args(["--package", "qhx-library-examples"])
        .args(PLUGINS.iter().flat_map(|plugin| ["--package", plugin]))
        .arg("--target-dir")
        .arg(profile.parent().expect("a profile lies in the target folder"))
        .current_dir(qhx_paths::workspace())
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the plugins are built");
    *built = true;
}

/// A folder that is removed at the end of the test.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// A bundle of the tiny model for the CPU, made once.
pub fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, bundle) = BUNDLE.get_or_init(|| {
        let folder = folder();
        let out = folder.path().join("tiny");
        let forge = qhx!(folder, "forge", checkpoint(), "--out", out)
            .args(["--name", "tiny", "--max-ctx", "192", "--prefill", "16", "--cpu-only"])
            .run()
            .ok();
        assert_eq!(forge.stdout.trim_end(), out.join("tiny.json").to_string_lossy());
        (folder, out)
    });
    bundle
}

/// A copy of the bundle that a test may damage.
pub fn copy_of_bundle(to: &Path) -> PathBuf {
    let target = to.join("tiny");
    copy_folder(bundle(), &target);
    target
}

/// Changes the manifest of a copied bundle.
pub fn edit_manifest(bundle: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    files::edit(&bundle.join("tiny.json"), edit);
}

/// All files below a folder with their bytes.
pub fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(&at).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).expect("below it").to_owned();
                // Absent where it was renamed meanwhile.
                found.extend(std::fs::read(&path).ok().map(|bytes| (name, bytes)));
            }
        }
    }
    found
}

/// Sends a signal to a process.
pub fn signal(name: &str, id: u32) {
    let status = Command::new("kill").args([name, &id.to_string()]).status();
    assert!(status.expect("kill runs").success());
}

/// The processes that the threads of `parent` started, in Linux's table of processes.
pub fn children(parent: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let texts = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")));
    let texts = texts.map(Result::unwrap_or_default).collect::<String>();
    texts.split_whitespace().map(|id| id.parse().expect("an id")).collect()
}

/// A message without what differs from run to run.
pub fn neutral(text: &str, folder: &Path) -> String {
    let mut text = text.replace(&*folder.to_string_lossy(), "[folder]");
    text = text.replace(&*bundle().to_string_lossy(), "[bundle]");
    let qhx = program("qhx");
    let folder = qhx.parent().expect("a folder");
    text.replace(&*folder.to_string_lossy(), "[program]")
}
