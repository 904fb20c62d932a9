//! Loads a plugin in a child process first, so that one that crashes while it is loaded is
//! reported instead of ending the program, and remembers what came of it.
//!
//! The child is a program that calls [`serve`]; the `qhx` command line is one. It prints one line,
//! which begins with `MARK`: whatever the plugin prints besides does not matter.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use qhx_core::op::OpDescription;
use serde::{Deserialize, Serialize};
use wait_timeout::ChildExt as _;

use crate::load::{Demands, LoadError, LoadErrorKind, Plugin, pin};
use crate::trust::Identity;

/// Begins the line with the answer.
const MARK: &str = "qhx-probe: ";

/// A plugin that has not answered by then never will.
const PATIENCE: Duration = Duration::from_secs(20);

/// How to start the child, and where to remember.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prober {
    /// The program; it gets `arguments` and then the plugin's path.
    pub program: PathBuf,
    /// Come before the path.
    pub arguments: Vec<OsString>,
    /// File that remembers what came of earlier probes; `None` to remember nothing.
    pub memory: Option<PathBuf>,
    /// How long the child may take.
    pub patience: Duration,
}

impl Prober {
    /// Starts `program` with `arguments` and the plugin's path.
    pub fn new<A: Into<OsString>>(
        program: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self {
            program: program.into(),
            arguments: arguments.into_iter().map(Into::into).collect(),
            memory: None,
            patience: PATIENCE,
        }
    }

    /// Remembers in `file`.
    #[must_use]
    pub fn remembering(mut self, file: Option<PathBuf>) -> Self {
        self.memory = file;
        self
    }
}

/// What loading a plugin showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probed {
    /// The interface version that it was built against.
    pub interface: String,
    /// Its ops.
    pub ops: Vec<OpDescription>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Loaded(Probed),
    Failed { kind: LoadErrorKind, message: String },
}

/// The child's part: loads the plugin and prints the answer. What else the process does is up to
/// the plugin.
pub fn serve(path: &Path, out: &mut dyn Write) -> std::io::Result<()> {
    let demands = Demands { allow_untrusted: true, ..Demands::default() };
    let answer = match Plugin::load_checked(path, &demands) {
        Ok(plugin) => Answer::Loaded(Probed { interface: plugin.interface, ops: plugin.ops }),
        Err(error) => Answer::Failed { kind: error.kind, message: error.message },
    };
    let answer = serde_json::to_string(&answer).map_err(std::io::Error::other)?;
    writeln!(out, "\n{MARK}{answer}")?;
    out.flush()
}

/// Loads a plugin in a child process, or remembers what came of it when the file is the same.
///
/// Only what the file itself decides is remembered; a child that cannot be started is not.
pub(crate) fn probe(
    prober: &Prober,
    path: &Path,
    demands: &Demands<'_>,
) -> Result<Probed, LoadError> {
    let pinned = pin(path, demands)?;
    let answer = match recall(prober, &pinned.path, &pinned.identity) {
        Some(answer) => answer,
        None => {
            let answer = ask(prober, path, &pinned.path)?;
            remember(prober, &pinned.path, &pinned.identity, &answer);
            answer
        }
    };
    match answer {
        Answer::Loaded(probed) => Ok(probed),
        Answer::Failed { kind, message } => Err(LoadError::new(path, kind, message)),
    }
}

/// What is remembered of a file, without starting anything.
pub(crate) fn recalled(prober: &Prober, path: &Path) -> Option<Result<Probed, LoadError>> {
    let real = path.canonicalize().ok()?;
    let identity = Identity::of(&std::fs::metadata(&real).ok()?);
    Some(match recall(prober, &real, &identity)? {
        Answer::Loaded(probed) => Ok(probed),
        Answer::Failed { kind, message } => Err(LoadError::new(path, kind, message)),
    })
}

fn ask(prober: &Prober, path: &Path, real: &Path) -> Result<Answer, LoadError> {
    let fail = |message: String| LoadError::new(path, LoadErrorKind::Misbehaved, message);
    let mut child = Command::new(&prober.program)
        .args(&prober.arguments)
        .arg(real)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| {
            fail(format!(
                "cannot be tried in a process of its own: {}: {e}",
                prober.program.display()
            ))
        })?;
    let Some(mut stdout) = child.stdout.take() else {
        return Err(fail("cannot be tried: the child has no output".to_owned()));
    };
    // Read on another thread: a child that prints much and one that hangs must both end.
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stdout.read_to_end(&mut text);
        text
    });
    let crashed = |message: String| {
        Ok(Answer::Failed {
            kind: LoadErrorKind::Crashed,
            message: format!("not loaded: {message}"),
        })
    };
    let Some(status) = wait(&mut child, prober.patience) else {
        return crashed(format!(
            "loading it had not ended after {} s when it was tried in a process of its own",
            prober.patience.as_secs_f32()
        ));
    };
    let text = reader.join().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let answer = text.lines().rev().find_map(|line| line.strip_prefix(MARK));
    match answer.map(serde_json::from_str) {
        Some(Ok(answer)) if status.success() => Ok(answer),
        _ => crashed(format!(
            "loading it ended the process that tried it ({})",
            describe_status(status)
        )),
    }
}

fn describe_status(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal}");
    }
    match status.code() {
        Some(code) => format!("exit code {code}"),
        None => "no exit code".to_owned(),
    }
}

/// Waits for the child, and ends it when it takes too long.
fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    if let Ok(Some(status)) = child.wait_timeout(patience) {
        return Some(status);
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// What came of earlier probes, by path.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory {
    version: u32,
    /// Version of the plugin interface that the answers are for.
    interface: String,
    files: BTreeMap<PathBuf, Remembered>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    inode: u64,
    bytes: u64,
    modified_ns: i64,
    answer: Answer,
}

impl Memory {
    const VERSION: u32 = 1;

    /// What a file remembers; nothing when it cannot be read or is of another version.
    fn read(path: &Path) -> Self {
        let read = std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        match read {
            Some(Self { version: Self::VERSION, interface, files })
                if interface == crate::interface_version() =>
            {
                Self { version: Self::VERSION, interface, files }
            }
            _ => Self {
                version: Self::VERSION,
                interface: crate::interface_version().to_owned(),
                files: BTreeMap::new(),
            },
        }
    }
}

fn recall(prober: &Prober, path: &Path, identity: &Identity) -> Option<Answer> {
    let known = Memory::read(prober.memory.as_deref()?).files.remove(path)?;
    let same = (known.inode, known.bytes, known.modified_ns)
        == (identity.inode, identity.bytes, identity.modified_ns);
    same.then_some(known.answer)
}

/// Best effort: a program that may not write there asks again the next time.
fn remember(prober: &Prober, path: &Path, identity: &Identity, answer: &Answer) {
    let Some(file) = prober.memory.as_deref() else { return };
    let Some(dir) = file.parent() else { return };
    let mut memory = Memory::read(file);
    memory.files.retain(|path, _| path.exists());
    let remembered = Remembered {
        inode: identity.inode,
        bytes: identity.bytes,
        modified_ns: identity.modified_ns,
        answer: answer.clone(),
    };
    memory.files.insert(path.to_owned(), remembered);
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let mut temporary = tempfile::NamedTempFile::new_in(dir)?;
        serde_json::to_writer_pretty(&mut temporary, &memory)?;
        temporary.persist(file)?;
        Ok(())
    };
    if let Err(error) = write() {
        tracing::debug!(file = %file.display(), "cannot remember a probed plugin: {error}");
    }
}
