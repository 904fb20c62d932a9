//! Windows: the program and plugins are built for x86-64 Windows with MinGW and run under Wine.
//!
//! The bundle is made by the program of this machine. What it generates under Wine is compared with the bundle's
//! reference answers and with what the program of this machine prints, byte by byte.

mod checks;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cargo::{self, Result, cargo, works};
use checks::CHECKS;

const TARGET: &str = "x86_64-pc-windows-gnu";

/// The checkpoint of the bundle, and what its reference answers begin with.
const FIXTURE: &str = "tests/fixtures/llama3-tiny";
const PROMPT: &str = "The capital of France is";

/// A run that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(120);

/// MinGW's compiler, which links, too.
const GCC: &str = "x86_64-w64-mingw32-gcc";

/// Debian's folder of Wine's programs: without the package `wine`, they are not on the search path.
const WINE_FOLDER: &str = "/usr/lib/wine";

/// Wine for 64-bit programs, and its server.
fn wine() -> Option<(PathBuf, PathBuf)> {
    let found = |names: &[&str]| {
        let candidates =
            names.iter().flat_map(|name| [Path::new(WINE_FOLDER).join(name), name.into()]);
        candidates.into_iter().find(|program| works(Command::new(program).arg("--version")))
    };
    Some((found(&["wine64", "wine"])?, found(&["wineserver64", "wineserver"])?))
}

/// Missing requirement of this tier, with how to get it; `None` if the tier can run.
pub(crate) fn missing() -> Option<String> {
    if wine().is_none() {
        return Some("Wine is not installed: apt-get install wine64".to_owned());
    }
    if !works(Command::new(GCC).arg("--version")) {
        return Some("MinGW is not installed: apt-get install gcc-mingw-w64-x86-64".to_owned());
    }
    let installed = cargo::output(Command::new("rustup").args(["target", "list", "--installed"]));
    if !installed.unwrap_or_default().lines().any(|line| line.trim() == TARGET) {
        return Some(format!("rustup target add {TARGET}"));
    }
    None
}

/// Builds and runs everything; `qhx` is the program of this machine. Errors with all that failed.
pub(crate) fn run(qhx: &Path) -> Result<()> {
    let built = build()?;
    let scene = Scene::new(qhx, &built)?;
    let result = scene.check_all();
    // Only the server of this prefix.
    works(scene.environment(&scene.server).arg("--kill"));
    result
}

impl Scene {
    fn check_all(&self) -> Result<()> {
        let mut failed = Vec::new();
        for (name, check) in CHECKS {
            let start = Instant::now();
            let result = check(self);
            let how = if result.is_ok() { "ok" } else { "FAILED" };
            eprintln!("windows: {name} ... {how} ({:.1} s)", start.elapsed().as_secs_f64());
            failed.extend(result.err().map(|why| format!("windows: {name}: {why}")));
        }
        if failed.is_empty() { Ok(()) } else { Err(failed.join("\n\n")) }
    }
}

/// The profile of programs for other machines, whose vector code is not what is compared here.
const PROFILE: [&str; 4] =
    ["--profile", "emulated", "--config", "profile.emulated.package.qhx-kit.opt-level=0"];

/// Builds the program, a plugin, and plugins that misbehave; returns the folder they are in.
fn build() -> Result<PathBuf> {
    let mut build =
        cargo(&["build", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
    build.args(PROFILE).args(["--package", "qhx-cli", "--package", "qhx-ops-llama-plugin"]);
    build.args(["--package", "qhx-test-malformed-plugins", "--lib", "--bin", "qhx"]);
    build.args(["--example", "crash_on_load"]);
    let messages = cargo::output(&mut build)?;
    let program = cargo::executables(&messages).remove("qhx").ok_or("cargo built no qhx.exe")?;
    Ok(program.parent().ok_or("qhx.exe lies in no folder")?.to_owned())
}

/// Scene in which the program runs: a folder whose name is hard to get right.
struct Scene {
    wine: PathBuf,
    server: PathBuf,
    /// Windows as Wine imitates it, kept from run to run.
    prefix: PathBuf,
    /// The current folder of all runs.
    folder: PathBuf,
    /// The program, in a folder with its plugin.
    program: PathBuf,
    /// The program of this machine.
    host: PathBuf,
}

/// The bundle, in [`Scene::folder`].
const BUNDLE: &str = "Bündel für alle";

impl Scene {
    fn new(host: &Path, built: &Path) -> Result<Self> {
        let root = qhx_paths::workspace().join("target/wine");
        let folder = root.join("Äpfel & Öl");
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        }
        let programs = folder.join("Programm Ordner");
        make(&programs)?;
        let (wine, server) = wine().ok_or("Wine is not installed")?;
        let scene = Self {
            wine,
            server,
            prefix: root.join("prefix"),
            program: programs.join("qhx.exe"),
            host: host.to_owned(),
            folder,
        };
        make(&scene.prefix)?;
        // The server would otherwise end with every run, and the next one would wait for a new one.
        let mut server = scene.environment(&scene.server);
        if !works(server.arg(format!("--persistent={}", PATIENCE.as_secs()))) {
            return Err("Wine's server does not start".to_owned());
        }
        if !works(scene.environment(&scene.wine).args(["wineboot", "--init"])) {
            return Err("Wine cannot make a prefix: wineboot --init fails".to_owned());
        }
        scene.complete_wine()?;
        copy(&built.join("qhx.exe"), &scene.program)?;
        copy(&built.join("qhx_ops_llama_plugin.dll"), &programs.join("qhx_ops_llama_plugin.dll"))?;
        let malformed = scene.folder.join("malformed");
        make(&malformed)?;
        copy(&built.join("examples/crash_on_load.dll"), &malformed.join("crash_on_load.dll"))?;
        write(&malformed.join("text.dll"), "no library\n")?;
        let mut forge = Command::new(host);
        forge.args(["forge", "--cpu-only", "--out"]).arg(scene.folder.join(BUNDLE));
        forge.arg(qhx_paths::workspace().join(FIXTURE)).stdout(Stdio::null());
        cargo::run(&mut forge)?;
        Ok(scene)
    }

    /// Gives Wine 8 the library that it lacks. Every program of Rust needs it.
    fn complete_wine(&self) -> Result<()> {
        let library = self.prefix.join("drive_c/windows/system32/bcryptprimitives.dll");
        if library.exists() {
            return Ok(());
        }
        let source = qhx_paths::workspace().join("xtask/src/windows/bcryptprimitives.c");
        cargo::run(
            Command::new(GCC).arg("-shared").arg("-o").args([library, source]).arg("-ladvapi32"),
        )
    }

    /// A program of Wine, in an environment that does not depend on the user's.
    fn environment(&self, program: &Path) -> Command {
        let mut wine = Command::new(program);
        wine.env("WINEPREFIX", &self.prefix)
            // Where Debian's package `wine` is not installed, Wine does not find its own programs.
            .env("WINELOADER", &self.wine)
            .env("WINESERVER", &self.server)
            // No window asks for .NET or a browser, and Wine does not report what it lacks.
            .env("WINEDLLOVERRIDES", "mscoree=;mshtml=")
            .env("WINEDEBUG", "-all")
            // Wine reads names of files as this says.
            .env("LC_ALL", "C.UTF-8")
            .env("QHX_CACHE_DIR", "cache")
            .env_remove("DISPLAY")
            .current_dir(&self.folder);
        for name in ["QHX_QNN_HTP", "QHX_QNN_SYSTEM", "QHX_PLUGIN_PATH", "QHX_LOG"] {
            wine.env_remove(name);
        }
        wine
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.environment(&self.wine);
        command.arg(&self.program).args(arguments);
        command
    }

    /// Runs the program without standard input.
    fn qhx(&self, arguments: &[&str]) -> Result<Ran> {
        self.qhx_reading(arguments, "")
    }

    /// Runs the program with a text as its standard input.
    fn qhx_reading(&self, arguments: &[&str], input: &str) -> Result<Ran> {
        let mut child = piped(&mut self.command(arguments))?;
        // What is not read is no failure.
        let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
        finish(child, format!("qhx {}", arguments.join(" ")))
    }
}

/// Output of a run, and its exit code.
struct Ran {
    command: String,
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    /// Fails unless the exit code is `code`.
    fn code(self, code: i32) -> Result<Self> {
        if self.code == Some(code) {
            Ok(self)
        } else {
            Err(self.unexpected(&format!("exit code {code}")))
        }
    }

    /// Fails unless both streams together contain all `parts`.
    fn says(self, parts: &[&str]) -> Result<Self> {
        let all = format!("{}\n{}", self.stdout, self.stderr);
        match parts.iter().find(|part| !all.contains(**part)) {
            Some(part) => Err(self.unexpected(&format!("{part:?}"))),
            // The form of paths that Windows's own functions return is for nobody to read.
            None if all.contains(r"\\?\") => Err(self.unexpected(r"no \\?\ in messages")),
            None => Ok(self),
        }
    }

    fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout).map_err(|e| self.unexpected(&format!("JSON ({e})")))
    }

    fn unexpected(&self, expected: &str) -> String {
        let Self { command, code, stdout, stderr } = self;
        format!(
            "{command}: expected {expected}; exit code {code:?}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
        )
    }
}

fn piped(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().map_err(|e| format!("wine: {e}"))
}

/// Waits for the end of a run, for [`PATIENCE`].
fn finish(mut child: Child, command: String) -> Result<Ran> {
    fn collect(stream: Option<impl std::io::Read + Send + 'static>) -> impl FnOnce() -> String {
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        move || reader.join().unwrap_or_default()
    }
    let (stdout, stderr) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|e| format!("{command}: {e}"))? {
            Some(status) => break status,
            None if start.elapsed() > PATIENCE => {
                let _ = child.kill();
                return Err(format!("{command}: had not ended after {} s", PATIENCE.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    Ok(Ran { command, code: status.code(), stdout: stdout(), stderr: stderr() })
}

fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).map(drop).map_err(|e| format!("{}: {e}", from.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}
