//! Has a child process read a context binary's metadata first, so that a file that crashes the
//! system library is reported instead of ending the program, and remembers what came of it.
//!
//! It takes a program that has helpers ([`crate::child`]), such as the command line; elsewhere the
//! file is read at once. What the child reads does not matter, only that it comes through: the
//! parent reads the file again. Loading a context into the NPU is not tried this way.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::info::BinaryInfo;
use super::library::SystemLibrary;
use crate::artifacts::Mapped;
use crate::child::{ChildFailure, ChildProgram, Limits, Task};
use crate::files::{self, FileIdentity};
use crate::{Error, ErrorKind, Result};

/// What a helper does for this module: a program with helpers lists it among its tasks.
pub const TASK: Task = ("context-metadata", read);

/// A child that has not read the metadata by then never will.
const PATIENCE: Duration = Duration::from_secs(20);

/// Memory of the child besides the file.
const MEMORY: u64 = 2 << 30;

#[derive(Debug, Serialize, Deserialize)]
struct Request {
    system: PathBuf,
    file: PathBuf,
}

fn read(input: &[u8]) -> Result<Vec<u8>> {
    let request: Request = serde_json::from_slice(input)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("{}: {e}", TASK.0)))?;
    let system = SystemLibrary::open(&request.system)?;
    let file = Mapped::open(&request.file)?;
    // An error is no crash: the parent gets the same one.
    let _ = BinaryInfo::read(&system, "", file.bytes());
    Ok(Vec::new())
}

/// Refuses a file whose metadata crashes the library.
pub(super) fn try_file(system: &SystemLibrary, file: &Mapped, memory: Option<&Path>) -> Result<()> {
    let Some(program) = crate::child::program() else { return Ok(()) };
    let library = format!("{} {}", system.path().display(), system.version());
    try_with(program, system.path(), &library, file, memory)
}

fn try_with(
    program: &ChildProgram,
    system: &Path,
    library: &str,
    file: &Mapped,
    memory: Option<&Path>,
) -> Result<()> {
    let path = std::path::absolute(file.path())
        .map_err(|e| Error::io(ErrorKind::Artifact, file.path(), &e))?;
    let known = memory.and_then(|memory| Memory::read(memory, library).files.remove(&path));
    let failure = match known {
        Some(known) if known.identity == *file.identity() => known.failure,
        _ => {
            let request = Request { system: system.to_owned(), file: path.clone() };
            let Some(failure) = ask(program, &request, file.len() as u64) else { return Ok(()) };
            if let Some(memory) = memory {
                remember(memory, library, path, file.identity().clone(), failure.clone());
            }
            failure
        }
    };
    match failure {
        None => Ok(()),
        Some(failure) => Err(Error::new(
            ErrorKind::Artifact,
            format!("{}: its metadata cannot be read: {failure}", file.path().display()),
        )
        .hint("download the file again and compare its size and hash with the bundle's")),
    }
}

/// What came of it: nothing, or why the child did not come through. `None` where nothing can be
/// said of the file.
fn ask(program: &ChildProgram, request: &Request, file_bytes: u64) -> Option<Option<String>> {
    let limits =
        Limits { memory: Some(MEMORY.saturating_add(file_bytes)), time: PATIENCE, output: 0 };
    let answer = match serde_json::to_vec(request) {
        Ok(input) => program.ask(TASK.0, input, limits).map_err(|e| (e.to_string(), Some(e))),
        // A path that is not UTF-8.
        Err(e) => Err((e.to_string(), None)),
    };
    match answer {
        Ok(_) => Some(None),
        Err((
            said,
            Some(
                ChildFailure::Crashed(_) | ChildFailure::TimedOut(_) | ChildFailure::OutOfMemory(_),
            ),
        )) => Some(Some(said)),
        Err((said, _)) => {
            tracing::warn!("{}: not tried in a process of its own: {said}", request.file.display());
            None
        }
    }
}

/// What came of earlier tries, by path.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory {
    version: u32,
    /// The system library that the answers are for.
    library: String,
    files: BTreeMap<PathBuf, Tried>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Tried {
    identity: FileIdentity,
    failure: Option<String>,
}

impl Memory {
    const VERSION: u32 = 1;
    const MAX_BYTES: u64 = 16 << 20;

    /// What a file remembers; nothing when it cannot be read or is of another version.
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

/// Best effort: a program that may not write there asks again the next time.
fn remember(
    memory: &Path,
    library: &str,
    path: PathBuf,
    identity: FileIdentity,
    failure: Option<String>,
) {
    let mut known = Memory::read(memory, library);
    known.files.retain(|path, _| path.exists());
    known.files.insert(path, Tried { identity, failure });
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

    /// A helper that runs a line of shell instead of the task.
    fn helper(line: &str) -> ChildProgram {
        ChildProgram { program: "/bin/sh".into(), arguments: vec!["-c".into(), line.into()] }
    }

    const CRASHES: &str = "kill -SEGV $$";
    const COMES_THROUGH: &str = r"printf 'qhxA\000\000\000\000\000\000\000\000\000'";

    #[test]
    fn a_file_that_crashes_a_child_is_refused_and_remembered_until_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let memory = dir.path().join("cache/tried.json");
        let path = dir.path().join("part.bin");
        std::fs::write(&path, b"first").unwrap();
        let attempt = |line: &str, library: &str| {
            let file = Mapped::open(&path).unwrap();
            try_with(&helper(line), Path::new("libQnnSystem.so"), library, &file, Some(&memory))
        };
        let error = attempt(CRASHES, "1.15").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact);
        assert!(error.message().contains("part.bin: its metadata cannot be read"), "{error}");
        assert!(error.message().contains("signal 11"), "{error}");
        // The next time no child is asked.
        let again = attempt(COMES_THROUGH, "1.15").unwrap_err();
        assert_eq!(again.message(), error.message());
        // Another library may read it.
        attempt(COMES_THROUGH, "1.16").unwrap();
        attempt(CRASHES, "1.16").unwrap();
        // A changed file is tried again.
        std::fs::write(&path, b"second").unwrap();
        attempt(CRASHES, "1.16").unwrap_err();
    }

    #[test]
    fn what_cannot_be_tried_is_not_held_against_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let memory = dir.path().join("tried.json");
        let path = dir.path().join("part.bin");
        std::fs::write(&path, b"x").unwrap();
        let file = Mapped::open(&path).unwrap();
        let nowhere = ChildProgram { program: "/nowhere/qhx".into(), arguments: Vec::new() };
        try_with(&nowhere, Path::new("s"), "1", &file, Some(&memory)).unwrap();
        assert!(!memory.exists());
    }
}
