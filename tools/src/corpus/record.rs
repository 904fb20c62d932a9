//! Record beside an output of how its rows were made, and the lock of the run that writes them.
//!
//! One hidden file, `.OUTPUT.qhx-embed.json`, is both. The system takes the lock back when the process that holds it
//! ends, whatever ended it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind as IoKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use same_file::Handle;
use serde::{Deserialize, Serialize};

use super::fingerprint::Fingerprint;
use super::refused;

const SCHEMA: &str = "qhx-embed/v1";
/// Longest record that is read.
const MAX_BYTES: u64 = 4 << 20;

/// Rows of a file that were written, and the settings that made them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Model and options.
    pub with: Fingerprint,
    /// Number of rows that were written for sure.
    pub rows: u64,
    /// SHA-256 over index, role and text of these rows of the input, in hexadecimal.
    pub of: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    schema: String,
    /// Progress of the output.
    output: Option<Progress>,
    /// Progress of the rows that will become the output.
    unfinished: Option<Progress>,
    /// They are complete and about to become it.
    #[serde(default)]
    publishing: bool,
}

/// The file that a record is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    /// The output.
    Output,
    /// The file whose rows become the output when they are complete.
    Unfinished,
}

/// The record, locked until it is dropped.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    file: File,
    content: Content,
    /// Nothing was written into it, now or earlier.
    empty: bool,
}

impl Record {
    /// Locks and reads the record of `output`. Errors at once when another run writes the same output.
    pub fn lock(output: &Path) -> Result<Self> {
        let path = path_of(output)?;
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, &path, e);
        let mut file = loop {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(&path);
            let file = file.map_err(fail)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(refused(output, "another qhx embed is writing it").hint(
                        "wait until it ends, or write to another output; each shard has its own",
                    ));
                }
                // Some systems and file systems have no locks.
                Err(TryLockError::Error(e)) if e.kind() == IoKind::Unsupported => {
                    tracing::warn!(path = %path.display(), "the output cannot be locked: {e}");
                    break file;
                }
                Err(TryLockError::Error(e)) => return Err(fail(e)),
            }
            // A run that wrote nothing has removed the file, perhaps after it was opened here.
            let held = file.try_clone().and_then(Handle::from_file);
            if held.is_ok_and(|held| Handle::from_path(&path).is_ok_and(|there| held == there)) {
                break file;
            }
        };
        let mut bytes = Vec::new();
        (&mut file).take(MAX_BYTES).read_to_end(&mut bytes).map_err(fail)?;
        let empty = bytes.is_empty();
        // Of a longer record that was overwritten, the end may be left.
        let first = serde_json::Deserializer::from_slice(&bytes).into_iter::<Content>().next();
        let content = match first {
            None => Content::default(),
            Some(Ok(content)) if content.schema == SCHEMA => content,
            Some(found) => {
                let why =
                    found.err().map_or_else(|| "another schema".to_owned(), |e| e.to_string());
                return Err(refused(&path, format_args!("no record of qhx embed: {why}"))
                    .hint("move the file away; --overwrite then begins again"));
            }
        };
        Ok(Self { path, file, content, empty })
    }

    /// Path of the record.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Recorded progress of a file.
    pub fn made(&self, slot: Slot) -> Option<&Progress> {
        match slot {
            Slot::Output => self.content.output.as_ref(),
            Slot::Unfinished => self.content.unfinished.as_ref(),
        }
    }

    /// Writes down how the rows of a file are made.
    pub fn set(&mut self, slot: Slot, made: Progress) -> Result<()> {
        self.content.publishing = false;
        match slot {
            Slot::Output => self.content.output = Some(made),
            Slot::Unfinished => self.content.unfinished = Some(made),
        }
        self.write()
    }

    /// Says that the unfinished rows become the output now.
    pub fn publishing(&mut self) -> Result<()> {
        self.content.publishing = true;
        self.write()
    }

    /// Says that they have become it.
    pub fn published(&mut self) -> Result<()> {
        self.content.publishing = false;
        self.content.output = self.content.unfinished.take();
        self.write()
    }

    /// True when a run ended between the last two. Whether the rows have become the output is seen by whether they
    /// are still there.
    pub fn was_publishing(&self) -> bool {
        self.content.publishing
    }

    fn write(&mut self) -> Result<()> {
        SCHEMA.clone_into(&mut self.content.schema);
        let mut text = serde_json::to_vec_pretty(&self.content)
            .map_err(|e| Error::caused(ErrorKind::Internal, "a record as JSON", e))?;
        text.push(b'\n');
        self.empty = false;
        // In place, as the lock is on the file; whole before what is left of a longer one is cut off.
        self.file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.write_all(&text))
            .and_then(|()| self.file.set_len(text.len() as u64))
            .map_err(|e| Error::io(ErrorKind::Io, &self.path, e))
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.empty {
            // It is still locked. One that stays does no harm.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// `.NAME.qhx-embed.json` beside the output: hidden, so that who reads all files of a folder does not read it.
fn path_of(output: &Path) -> Result<PathBuf> {
    let Some(name) = output.file_name() else {
        return Err(refused(output, "no name of a file"));
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".qhx-embed.json");
    Ok(output.with_file_name(hidden))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(rows: u64) -> Progress {
        Progress { rows, of: "x".repeat(usize::try_from(rows).unwrap()), ..Progress::default() }
    }

    #[test]
    fn a_record_is_read_again_and_an_empty_one_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.jsonl");
        let record = Record::lock(&output).unwrap();
        assert!(Record::lock(&output).unwrap_err().message().contains("another qhx embed"));
        drop(record);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut record = Record::lock(&output).unwrap();
        record.set(Slot::Unfinished, made(100)).unwrap();
        record.set(Slot::Unfinished, made(3)).unwrap();
        drop(record);
        let mut record = Record::lock(&output).unwrap();
        assert_eq!(record.made(Slot::Unfinished), Some(&made(3)));
        record.publishing().unwrap();
        record.published().unwrap();
        drop(record);
        let record = Record::lock(&output).unwrap();
        assert_eq!(
            (record.made(Slot::Output), record.made(Slot::Unfinished)),
            (Some(&made(3)), None)
        );
        assert!(!record.was_publishing());
    }

    #[test]
    fn what_is_left_of_a_longer_record_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.jsonl");
        let path = path_of(&output).unwrap();
        let text =
            format!("{{\"schema\":{SCHEMA:?},\"output\":null,\"unfinished\":null}}\n\"rest\"}}");
        std::fs::write(&path, text).unwrap();
        assert!(Record::lock(&output).unwrap().made(Slot::Output).is_none());
        for foreign in ["notes\n", "{\"schema\":\"other/v1\",\"output\":null,\"unfinished\":null}"]
        {
            std::fs::write(&path, foreign).unwrap();
            assert!(Record::lock(&output).is_err(), "{foreign}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), foreign);
        }
    }
}
