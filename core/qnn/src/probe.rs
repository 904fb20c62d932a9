//! Has a child process read a context binary's metadata, so that a file that crashes the system
//! library is reported instead of ending the program.
//!
//! It takes a program that has helpers ([`qhx_base::child`]), such as the command line. There the
//! child returns the whole [`BinaryInfo`], and the parent never gives the file's metadata to
//! the library. Elsewhere the library reads it in the process itself. A file that crashes the library
//! is remembered for some days; one whose child was ended by the system or took too long is not. Loading a context into
//! the NPU is not tried this way.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qhx_base::artifacts::Mapped;
use qhx_base::child::{ChildFailure, ChildProgram, CrashTime, Limits, Task};
use qhx_base::files::{self, FileIdentity};
use qhx_base::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::info::BinaryInfo;
use super::library::SystemLibrary;

/// Task of a helper for this module: a program with helpers lists it among its tasks.
pub const TASK: Task = ("context-metadata", answer);

/// A child that has not read the metadata by then never will.
const PATIENCE: Duration = Duration::from_secs(20);

/// Memory of the child besides the file, in bytes.
const MEMORY: u64 = 2 << 30;

/// Bytes of the answer. All that [`super::metadata`] lets through takes less as JSON.
const ANSWER: usize = 96 << 20;

/// Request that tells the child what to read. Paths need not be UTF-8.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    system: OsString,
    file: OsString,
    /// The file that the parent opened.
    identity: FileIdentity,
    /// The file's name in messages.
    name: String,
}

/// The child's part: the metadata as JSON.
fn answer(input: &[u8]) -> Result<Vec<u8>> {
    let internal =
        |e: serde_json::Error| Error::new(ErrorKind::Internal, e.to_string()).with_source(e);
    let request: Request = serde_json::from_slice(input).map_err(internal)?;
    let file = Mapped::open(Path::new(&request.file))?;
    if *file.identity() != request.identity {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!("{}: the file changed while it was opened", request.name),
        )
        .hint("try again when nothing writes to it"));
    }
    let system = SystemLibrary::open(Path::new(&request.system))?;
    let info = BinaryInfo::read(&system, &request.name, file.bytes())?;
    serde_json::to_vec(&info).map_err(internal)
}

impl BinaryInfo {
    /// Reads the metadata of a file, in a process of its own where the program has helpers
    /// ([`qhx_base::child`]): some damaged files crash the library. `tried` is the file that remembers
    /// which ones did.
    ///
    /// # Errors
    /// When the file is no context binary, or crashes the library that reads it.
    pub fn open(system: &SystemLibrary, file: &Mapped, tried: Option<&Path>) -> Result<Self> {
        let Some(program) = qhx_base::child::program() else {
            return Self::read(system, &file.path().display().to_string(), file.bytes());
        };
        let library = format!("{} {}", system.path().display(), system.version());
        read_in_child(program, system.path(), &library, file, tried)
    }
}

fn read_in_child(
    program: &ChildProgram,
    system: &Path,
    library: &str,
    file: &Mapped,
    memory: Option<&Path>,
) -> Result<BinaryInfo> {
    let path = std::path::absolute(file.path())
        .map_err(|e| Error::io(ErrorKind::Artifact, file.path(), e))?;
    let name = file.path().display();
    let cannot = format!("{name}: its metadata cannot be read");
    let refused = |failure: &str| {
        let mut hint =
            "download the file again and compare its size and hash with the bundle's".to_owned();
        if let Some(memory) = memory {
            hint += &format!("; {}", CrashTime::hint(memory));
        }
        Error::new(ErrorKind::Artifact, format!("{cannot}: {failure}")).hint(hint)
    };
    let known = memory.and_then(|memory| Memory::read(memory, library).files.remove(&path));
    if let Some(known) =
        known.filter(|known| known.identity == *file.identity() && !known.since.is_over())
    {
        return Err(refused(&known.failure));
    }
    let internal = |e: serde_json::Error| {
        Error::caused(
            ErrorKind::Internal,
            format_args!("{name}: asking a helper for its metadata"),
            e,
        )
    };
    let request = Request {
        system: system.as_os_str().to_owned(),
        file: path.as_os_str().to_owned(),
        identity: file.identity().clone(),
        name: name.to_string(),
    };
    let limits = Limits {
        memory: Some(MEMORY.saturating_add(file.len() as u64)),
        time: PATIENCE,
        output: ANSWER,
    };
    let input = serde_json::to_vec(&request).map_err(internal)?;
    match program.ask(TASK.0, input, limits) {
        Ok(answer) => serde_json::from_slice(&answer).map_err(internal),
        Err(failure @ ChildFailure::Crashed(_)) => {
            let failure = failure.to_string();
            let error = refused(&failure);
            if let Some(memory) = memory {
                let since = CrashTime::now();
                let failed = Failed { identity: request.identity, failure, since };
                remember(memory, library, path, failed);
            }
            Err(error)
        }
        Err(failure @ ChildFailure::TimedOut(_)) => Err(failure
            .into_error(ErrorKind::Artifact, cannot)
            .hint("try again when the machine is less busy, or download the file again")),
        Err(failure) => Err(failure.into_error(ErrorKind::Artifact, cannot)),
    }
}

/// Files that crashed a child, by path.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory {
    version: u32,
    /// The system library that read them.
    library: String,
    files: BTreeMap<PathBuf, Failed>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Failed {
    identity: FileIdentity,
    failure: String,
    since: CrashTime,
}

impl Memory {
    const VERSION: u32 = 3;
    const MAX_BYTES: u64 = 16 << 20;

    /// Memory that a file holds; empty when it cannot be read or is of another version.
    fn read(path: &Path, library: &str) -> Self {
        let known = files::read(ErrorKind::Io, path, Self::MAX_BYTES).ok();
        let known = known.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        match known {
            Some(known) if known.version == Self::VERSION && known.library == library => known,
            _ => {
                Self { version: Self::VERSION, library: library.to_owned(), files: BTreeMap::new() }
            }
        }
    }
}

/// Best effort: a program that may not write there asks a child again the next time.
fn remember(memory: &Path, library: &str, path: PathBuf, failed: Failed) {
    let mut known = Memory::read(memory, library);
    known.files.retain(|path, failed| !failed.since.is_over() && path.exists());
    known.files.insert(path, failed);
    let write = || -> std::io::Result<()> {
        if let Some(folder) = memory.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let temporary = memory.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&temporary, serde_json::to_vec(&known)?)?;
        std::fs::rename(&temporary, memory)
    };
    if let Err(error) = write() {
        tracing::debug!(file = %memory.display(), "cannot remember a tried file: {error}");
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::ApiVersion;

    /// A helper that runs a line of shell instead of the task.
    fn helper(line: &str) -> ChildProgram {
        ChildProgram { program: "/bin/sh".into(), arguments: vec!["-c".into(), line.into()] }
    }

    /// Bytes that a helper of this version writes first.
    fn greeting() -> Vec<u8> {
        let version = env!("CARGO_PKG_VERSION");
        [b"qhxH", &[version.len() as u8][..], version.as_bytes()].concat()
    }

    /// A helper that ends itself by a signal.
    fn ends_with(signal: &str) -> ChildProgram {
        let octal: String = greeting().iter().map(|byte| format!("\\{byte:03o}")).collect();
        helper(&format!("printf '{octal}'; kill -{signal} $$"))
    }

    /// A helper that gives this answer.
    fn answers(dir: &Path, failed: u8, answer: &serde_json::Value) -> ChildProgram {
        let body = serde_json::to_vec(answer).unwrap();
        let mut bytes = greeting();
        bytes.extend(b"qhxA");
        bytes.push(failed);
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        let file = dir.join("answer");
        std::fs::write(&file, bytes).unwrap();
        helper(&format!("cat '{}'", file.display()))
    }

    fn info() -> BinaryInfo {
        let version = ApiVersion { major: 1, minor: 2, patch: 3 };
        BinaryInfo {
            file_bytes: 5,
            backend_id: 6,
            build_id: "v2.51.0".to_owned(),
            core_version: version,
            backend_version: version,
            blob_version: version,
            blob_bytes: 0,
            dsp_arch: Some(79),
            soc_model: None,
            graphs: Vec::new(),
        }
    }

    /// A file of a byte, where crashes over it are remembered, and a program that reads it.
    struct Tried {
        dir: tempfile::TempDir,
        memory: PathBuf,
        path: PathBuf,
        file: Mapped,
        sound: ChildProgram,
    }

    impl Tried {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (memory, path) = (dir.path().join("tried.json"), dir.path().join("part.bin"));
            std::fs::write(&path, b"x").unwrap();
            let file = Mapped::open(&path).unwrap();
            let sound = answers(dir.path(), 0, &serde_json::to_value(info()).unwrap());
            Self { dir, memory, path, file, sound }
        }
    }

    #[test]
    fn only_a_crash_is_held_against_a_file() {
        let Tried { dir: _dir, memory, path: _, file, sound } = Tried::new();
        let attempt = |program: &ChildProgram| {
            read_in_child(program, Path::new("s"), "1", &file, Some(&memory))
        };
        for signal in ["KILL", "TERM"] {
            let error = attempt(&ends_with(signal)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal, "{signal}: {error}");
            assert!(error.message().contains("the system or a user ended"), "{signal}: {error}");
            assert!(error.hint_text().unwrap().contains("try again"), "{signal}: {error:?}");
            assert_eq!(attempt(&sound).unwrap(), info(), "{signal}");
        }
        assert!(!memory.exists());
    }

    #[test]
    fn a_crash_is_forgotten_after_some_days() {
        let Tried { dir: _dir, memory, path, file, sound } = Tried::new();
        let attempt = |program: &ChildProgram| {
            read_in_child(program, Path::new("s"), "1", &file, Some(&memory))
        };
        let hint = attempt(&ends_with("SEGV")).unwrap_err().hint_text().unwrap().to_owned();
        assert!(hint.contains(&format!("delete {}", memory.display())), "{hint}");
        attempt(&sound).unwrap_err();
        let mut known: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&memory).unwrap()).unwrap();
        let since = &mut known["files"][path.to_str().unwrap()]["since"];
        *since = (since.as_u64().unwrap() - 8 * 24 * 60 * 60).into();
        std::fs::write(&memory, known.to_string()).unwrap();
        assert_eq!(attempt(&sound).unwrap(), info());
    }

    #[test]
    fn a_crashing_file_is_refused_until_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let memory = dir.path().join("cache/tried.json");
        let path = dir.path().join("part.bin");
        std::fs::write(&path, b"first").unwrap();
        let sound = answers(dir.path(), 0, &serde_json::to_value(info()).unwrap());
        let crashes = ends_with("SEGV");
        let attempt = |program: &ChildProgram, library: &str| {
            let file = Mapped::open(&path).unwrap();
            read_in_child(program, Path::new("libQnnSystem.so"), library, &file, Some(&memory))
        };
        let error = attempt(&crashes, "1.15").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact);
        assert!(error.message().contains("part.bin: its metadata cannot be read"), "{error}");
        assert!(error.message().contains("signal 11"), "{error}");
        // The next time no child is asked.
        let again = attempt(&sound, "1.15").unwrap_err();
        assert_eq!(again.message(), error.message());
        // Another library may read it, and what it read is what the parent gets.
        assert_eq!(attempt(&sound, "1.16").unwrap(), info());
        attempt(&crashes, "1.16").unwrap_err();
        // A changed file is read again.
        std::fs::write(&path, b"second").unwrap();
        assert_eq!(attempt(&sound, "1.16").unwrap(), info());
    }

    #[test]
    fn an_error_of_the_child_is_not_held_against_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let memory = dir.path().join("tried.json");
        let path = dir.path().join("part.bin");
        std::fs::write(&path, b"x").unwrap();
        let file = Mapped::open(&path).unwrap();
        let attempt = |program: &ChildProgram| {
            read_in_child(program, Path::new("s"), "1", &file, Some(&memory)).unwrap_err()
        };
        let written = serde_json::json!({
            "kind": "context", "message": "part.bin: too new", "hint": "update qhx", "code": 5005,
        });
        let error = attempt(&answers(dir.path(), 1, &written));
        assert_eq!((error.kind(), error.code()), (ErrorKind::Context, Some(5005)));
        assert_eq!(error.message(), "part.bin: too new");
        assert_eq!(error.hint_text(), Some("update qhx"));
        let error = attempt(&answers(dir.path(), 0, &serde_json::json!({"graphs": 7})));
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(error.message().contains("part.bin: asking a helper"), "{error}");
        // The file is not read without a child where the program has one.
        let nowhere = ChildProgram { program: "/nowhere/qhx".into(), arguments: Vec::new() };
        let error = attempt(&nowhere);
        assert!(error.message().contains("/nowhere/qhx: cannot be started"), "{error}");
        assert!(!memory.exists());
    }
}
