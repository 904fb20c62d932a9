//! `plugins.lock`: list of the plugins installed in a folder, with hashes, in readable JSON.
//!
//! A folder with a lock loads only what the lock lists, and only as long as the file is the one
//! that was installed. The lock also lists which host-ops a plugin has, so that listing and finding
//! need not run any code of a plugin.

use std::io::Write;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result, files};
use qhx_core::op::OpDescription;
use serde::{Deserialize, Serialize};

/// Name of the file in a folder of plugins.
pub const LOCK_FILE: &str = "plugins.lock";

/// Version of the format. Keys that a later qhx adds within it may be passed over: what an older one must know is a
/// new version.
const VERSION: u32 = 1;

/// Locks are small; a larger file is not one.
const MAX_BYTES: u64 = 16 << 20;

/// For people who open the file.
const NOTE: &str = "Plugins of this folder. One loads only while its hash is the one recorded here. \
     Change it with `qhx plugins install` and `qhx plugins remove`.";

/// Plugins installed in one folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lock {
    /// The folder.
    pub dir: PathBuf,
    /// The plugins, sorted by file name.
    pub plugins: Vec<Locked>,
}

/// An installed plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locked {
    /// File name in the folder.
    pub file: String,
    /// SHA-256 of the file, 64 lower-case hexadecimal digits.
    pub sha256: String,
    /// Length of the file.
    pub bytes: u64,
    /// Time of its last change in nanoseconds since 1970. A file with the recorded length and time
    /// is listed without being read; loading and verifying always hash it.
    #[serde(default)]
    pub modified_ns: i64,
    /// Version of the plugin interface that it was built against.
    pub interface: String,
    /// Its host-ops, without their schemas.
    pub ops: Vec<OpDescription>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    #[serde(skip_deserializing)]
    note: &'static str,
    version: u32,
    #[serde(default)]
    plugins: Vec<Locked>,
}

impl Lock {
    /// The lock of a folder; `None` when it has none.
    ///
    /// # Errors
    /// When the lock cannot be read or is invalid.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(LOCK_FILE);
        let bad = |why: String| {
            Error::new(ErrorKind::Plugin, format!("{}: {why}", path.display())).hint(
                "install the plugins again: delete the file, then qhx plugins install FILE for each",
            )
        };
        match std::fs::metadata(&path) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(bad(format!("cannot be read: {}", files::why(&error)))),
        }
        let text = files::read_text(ErrorKind::Plugin, &path, MAX_BYTES)?;
        let document: Document =
            serde_json::from_str(&text).map_err(|e| bad(format!("not a lock of plugins: {e}")))?;
        if document.version != VERSION {
            return Err(bad(format!(
                "version {}, expected {VERSION}; another version of qhx wrote it",
                document.version
            )));
        }
        for plugin in &document.plugins {
            plugin.check().map_err(|why| bad(format!("plugin {:?}: {why}", plugin.file)))?;
        }
        Ok(Some(Self { dir: dir.to_owned(), plugins: document.plugins }))
    }

    /// Writes the lock: the old one stays until the new one is complete.
    ///
    /// # Errors
    /// When the lock cannot be written.
    pub fn write(&mut self) -> Result<()> {
        self.plugins.sort_by(|a, b| a.file.cmp(&b.file));
        let path = self.dir.join(LOCK_FILE);
        let document = Document { note: NOTE, version: VERSION, plugins: self.plugins.clone() };
        let text = serde_json::to_string_pretty(&document).map_err(|e| {
            Error::caused(ErrorKind::Internal, format_args!("{}", path.display()), e)
        })?;
        let write = || -> std::io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
            writeln!(file, "{text}")?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|e| e.error)?;
            Ok(())
        };
        write().map_err(|e| Error::io(ErrorKind::Io, &path, e))
    }

    /// The entry of a file name.
    pub fn get(&self, file: &str) -> Option<&Locked> {
        self.plugins.iter().find(|p| p.file == file)
    }
}

impl Locked {
    /// Path at which the file should be.
    pub fn path(&self, dir: &Path) -> PathBuf {
        dir.join(&self.file)
    }

    fn check(&self) -> Result<(), String> {
        if !is_file_name(&self.file) {
            return Err("expected a file name without folders".to_owned());
        }
        let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        if self.sha256.len() != 64 || !self.sha256.chars().all(hex) {
            return Err(format!(
                "sha256 {:?}, expected 64 lower-case hexadecimal digits",
                self.sha256
            ));
        }
        self.ops.iter().try_for_each(|op| check_op_name(&op.name))
    }
}

/// True for a plain file name: no separators, nothing hidden, nothing relative.
pub(crate) fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0', ':'])
}

/// An op's name is an identifier.
pub(crate) fn check_op_name(name: &str) -> Result<(), String> {
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.is_empty() || !name.chars().all(valid) {
        return Err(format!("host-op name {name:?}: expected lower-case letters, digits and _"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use qhx_core::op::{Modality, Task};

    use super::*;

    fn lock(dir: &Path) -> Lock {
        Lock {
            dir: dir.to_owned(),
            plugins: vec![Locked {
                file: "libx.so".to_owned(),
                sha256: "ab".repeat(32),
                bytes: 7,
                modified_ns: 1_700_000_000_123_456_789,
                interface: "1.0.0".to_owned(),
                ops: vec![OpDescription {
                    name: "x_generate".to_owned(),
                    version: "0.1.0".to_owned(),
                    summary: "says \"x\"".to_owned(),
                    tasks: vec![Task::Generate],
                    modalities: vec![Modality::Text],
                    ..OpDescription::default()
                }],
            }],
        }
    }

    #[test]
    fn what_is_written_reads_back_and_a_person_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Lock::read(folder.path()).unwrap(), None);
        let mut written = lock(folder.path());
        written.write().unwrap();
        assert_eq!(Lock::read(folder.path()).unwrap(), Some(written));
        let text = std::fs::read_to_string(folder.path().join(LOCK_FILE)).unwrap();
        for line in ["\"file\": \"libx.so\",", "\"interface\": \"1.0.0\",", "\"ops\": ["] {
            assert!(text.lines().any(|l| l.trim() == line), "{line:?} is not a line of\n{text}");
        }
    }

    #[test]
    fn keys_of_a_later_qhx_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let mut written = lock(folder.path());
        written.write().unwrap();
        let path = folder.path().join(LOCK_FILE);
        let good = std::fs::read_to_string(&path).unwrap();
        let more = good
            .replacen("\"version\": 1", "\"written_by\": \"qhx 9\",\n\"version\": 1", 1)
            .replacen("\"interface\"", "\"signed_by\": \"x\",\n\"interface\"", 1)
            .replacen("\"tasks\"", "\"licence\": \"MIT\",\n\"tasks\"", 1);
        assert_eq!(more.lines().count(), good.lines().count() + 3, "{more}");
        std::fs::write(&path, more).unwrap();
        assert_eq!(Lock::read(folder.path()).unwrap(), Some(written));
    }

    #[test]
    fn a_lock_that_declares_something_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        lock(folder.path()).write().unwrap();
        let path = folder.path().join(LOCK_FILE);
        let good = std::fs::read_to_string(&path).unwrap();
        for (from, to, says) in [
            ("\"version\": 1", "\"version\": 9", "version 9, expected 1"),
            ("libx.so", "../libx.so", "without folders"),
            ("libx.so", "", "without folders"),
            ("abab", "ABAB", "hexadecimal"),
            ("x_generate", "x/generate", "lower-case letters"),
            ("\"interface\"", "\"interfaces\"", "interface"),
            ("\"plugins\": [", "\"plugins\": [[", "not a lock"),
        ] {
            std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let error = Lock::read(folder.path()).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(LOCK_FILE), "{to:?}: {error}");
        }
    }
}
