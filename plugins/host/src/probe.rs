//! Loads a plugin in a child process first, so that one that crashes while it is loaded is
//! reported instead of ending the program, and remembers what came of it.
//!
//! The child is a program that has [`TASK`] among its tasks ([`qhx_base::child`]); the `qhx` command
//! line is one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qhx_base::child::{ChildFailure, ChildProgram, CrashTime, Limits, Task};
use qhx_base::files::{self, FileIdentity};
use qhx_base::{Error, ErrorKind};
use qhx_core::op::OpDescription;
use serde::{Deserialize, Serialize};

use crate::load::{Demands, LoadError, LoadErrorKind, Plugin, pin};

/// The child's part: loads the plugin whose path it gets, and returns what it has. What else
/// the process does is up to the plugin.
pub const TASK: Task = ("plugin", serve);

/// Bytes of an answer. Descriptions of ops, with their schemas, have room in it.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Bytes of the file that remembers.
const MAX_CACHE_BYTES: u64 = 64 << 20;

/// A plugin that has not answered by then never will.
const PATIENCE: Duration = Duration::from_secs(20);

/// Settings of a probe: the child process to start, and the file that remembers results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prober {
    /// The program.
    pub child: ChildProgram,
    /// File that remembers what came of earlier probes; `None` to remember nothing.
    pub memory: Option<PathBuf>,
    /// Maximum time that the child may take.
    pub patience: Duration,
}

impl Prober {
    /// Starts `program` with `arguments`, after which come those of [`qhx_base::child::serve`].
    pub fn new<A: Into<OsString>>(
        program: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        let child = ChildProgram { program: program.into(), arguments };
        Self { child, memory: None, patience: PATIENCE }
    }

    /// Remembers in `file`.
    #[must_use]
    pub fn remembering(mut self, file: Option<PathBuf>) -> Self {
        self.memory = file;
        self
    }
}

/// Result of loading a plugin.
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

fn serve(path: &[u8]) -> qhx_base::Result<Vec<u8>> {
    let demands = Demands { allow_untrusted: true, ..Demands::default() };
    let answer = match Plugin::load_checked(&path_of(path), &demands) {
        Ok(plugin) => Answer::Loaded(Probed { interface: plugin.interface, ops: plugin.ops }),
        Err(error) => Answer::Failed { kind: error.kind, message: error.message },
    };
    serde_json::to_vec(&answer)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("the answer of a probe: {e}")))
}

/// A path on its way to the child.
#[cfg(unix)]
fn path_of(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    std::ffi::OsStr::from_bytes(bytes).into()
}

/// A path on its way to the child.
#[cfg(not(unix))]
fn path_of(bytes: &[u8]) -> PathBuf {
    String::from_utf8_lossy(bytes).into_owned().into()
}

/// Loads a plugin in a child process, or remembers what came of it when the file is the same.
///
/// Only what the file itself decides is remembered, a crash for some days. A child that cannot be started, that the
/// system ended or that took too long is not.
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
            if answer.is_lasting() {
                remember(prober, &pinned.path, &pinned.identity, &answer);
            }
            answer
        }
    };
    answer.into_result(prober, path)
}

impl Answer {
    fn into_result(self, prober: &Prober, path: &Path) -> Result<Probed, LoadError> {
        match (self, &prober.memory) {
            (Self::Loaded(probed), _) => Ok(probed),
            (Self::Failed { kind: kind @ LoadErrorKind::Crashed, message }, Some(memory)) => {
                let message = format!("{message}; {}", CrashTime::hint(memory));
                Err(LoadError::new(path, kind, message))
            }
            (Self::Failed { kind, message }, _) => Err(LoadError::new(path, kind, message)),
        }
    }

    /// True if the next probe of the same file would have the same result.
    fn is_lasting(&self) -> bool {
        use LoadErrorKind::{Crashed, Incompatible, NotAPlugin};
        match self {
            Self::Loaded(_) => true,
            Self::Failed { kind, .. } => matches!(kind, Crashed | Incompatible | NotAPlugin),
        }
    }
}

/// Remembered result for a file, without starting anything.
pub(crate) fn recalled(prober: &Prober, path: &Path) -> Option<Result<Probed, LoadError>> {
    let real = dunce::canonicalize(path).ok()?;
    let identity = FileIdentity::of(&std::fs::metadata(&real).ok()?);
    Some(recall(prober, &real, &identity)?.into_result(prober, path))
}

fn ask(prober: &Prober, path: &Path, real: &Path) -> Result<Answer, LoadError> {
    let limits = Limits { memory: None, time: prober.patience, output: MAX_ANSWER_BYTES };
    let input = real.as_os_str().as_encoded_bytes().to_vec();
    let crashed = |message: String| {
        let message = format!("not loaded: {message}");
        Ok(Answer::Failed { kind: LoadErrorKind::Crashed, message })
    };
    let bytes = match prober.child.ask(TASK.0, input, limits) {
        Ok(bytes) => bytes,
        Err(ChildFailure::Crashed(how)) => {
            return crashed(format!("loading it ended the process that tried it ({how})"));
        }
        Err(ChildFailure::TimedOut(time)) => {
            let message = format!(
                "not loaded: loading it had not ended after {} s when it was tried in a process of its own",
                time.as_secs_f32()
            );
            return Err(LoadError::new(path, LoadErrorKind::Misbehaved, message));
        }
        Err(failure) => {
            let hint = if matches!(failure, ChildFailure::Killed(_)) { "; try again" } else { "" };
            let message = format!("cannot be tried in a process of its own: {failure}{hint}");
            return Err(LoadError::new(path, LoadErrorKind::Misbehaved, message));
        }
    };
    serde_json::from_slice(&bytes)
        .or_else(|e| crashed(format!("what it answered is no answer: {e}")))
}

/// Results of earlier probes, by path.
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
    since: CrashTime,
    answer: Answer,
}

impl Memory {
    const VERSION: u32 = 2;

    /// Reads remembered results from a file; nothing if it cannot be read or is of another version.
    fn read(path: &Path) -> Self {
        let read = files::read(ErrorKind::Io, path, MAX_CACHE_BYTES).ok();
        let read = read.and_then(|text| serde_json::from_slice(&text).ok());
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

fn recall(prober: &Prober, path: &Path, identity: &FileIdentity) -> Option<Answer> {
    let known = Memory::read(prober.memory.as_deref()?).files.remove(path)?;
    let same = (known.inode, known.bytes, known.modified_ns)
        == (identity.inode, identity.bytes, identity.modified_ns);
    let over = known.since.is_over() && !matches!(known.answer, Answer::Loaded(_));
    (same && !over).then_some(known.answer)
}

/// Best effort: a program that may not write there asks again the next time.
fn remember(prober: &Prober, path: &Path, identity: &FileIdentity, answer: &Answer) {
    let Some(file) = prober.memory.as_deref() else { return };
    let Some(dir) = file.parent() else { return };
    let mut memory = Memory::read(file);
    memory.files.retain(|path, _| path.exists());
    let remembered = Remembered {
        inode: identity.inode,
        bytes: identity.bytes,
        modified_ns: identity.modified_ns,
        since: CrashTime::now(),
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
