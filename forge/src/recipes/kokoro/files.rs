//! The files of a bundle besides its graphs that are made of other files: the lexicon and the voices.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result, files};
use qhx_checkpoint::Checkpoint;
use qhx_graph::progress::Progress;
use serde_json::{Map, Value};

use super::config::Config;
use crate::recipe::{TableFile, TableSource, Tables};

/// Longest lexicon that is read.
const MAX_LEXICON: u64 = 64 << 20;

/// A lexicon as a file of the bundle: the JSON objects of all files as one.
pub(super) fn lexicon(files: &str) -> Result<Tables> {
    let mut words = Map::new();
    for file in files.split(',').rev() {
        let path = std::path::Path::new(file.trim());
        let found: Map<String, Value> = files::read_json(ErrorKind::Usage, path, MAX_LEXICON)
            .map_err(|e| e.context("no lexicon, expected a JSON object of words"))?;
        words.extend(found);
    }
    let bytes = serde_json::to_vec(&words)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the lexicon", e))?;
    // Not `.json`, which a manifest ends in.
    let file = TableFile {
        field: "words".to_owned(),
        name: "lexicon.words".to_owned(),
        dtype: None,
        block: None,
    };
    Ok(Tables { key: "lexicon".to_owned(), files: vec![file], source: Arc::new(Bytes(bytes)) })
}

/// A file as it is.
#[derive(Debug)]
struct Bytes(Vec<u8>);

impl TableSource for Bytes {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn write(&self, files: &mut [&mut dyn Write], progress: &mut dyn Progress) -> Result<()> {
        for file in files {
            file.write_all(&self.0).map_err(|e| Error::caused(ErrorKind::Io, "the lexicon", e))?;
        }
        progress.advance(self.bytes());
        Ok(())
    }
}

/// Voices of a model.
#[derive(Debug, Default)]
pub(super) struct Voices {
    pub(super) names: Vec<String>,
    /// Rows that each has.
    pub(super) rows: usize,
    /// The rows of all: the style of the decoder, and that of the prosody behind it.
    pub(super) values: Vec<f32>,
}

impl Voices {
    /// Adds a voice of a file, `[rows, width]` or `[rows, 1, width]`.
    pub(super) fn add(
        &mut self,
        file: &Path,
        name: String,
        shape: &[usize],
        width: usize,
        values: impl FnOnce() -> Result<Vec<f32>>,
    ) -> Result<()> {
        let rows = match *shape {
            [rows, 1, last] | [rows, last] if last == width && rows > 0 => Some(rows),
            _ => None,
        };
        let Some(rows) = rows.filter(|rows| self.names.is_empty() || *rows == self.rows) else {
            let rows =
                if self.names.is_empty() { "lengths".to_owned() } else { self.rows.to_string() };
            let what = format!(
                "{}: holds a tensor {shape:?}, expected [{rows}, 1, {width}]",
                file.display()
            );
            return Err(Error::new(ErrorKind::Artifact, what));
        };
        self.rows = rows;
        self.values.extend(values()?);
        self.names.push(name);
        Ok(())
    }
}

/// The voices of a checkpoint. Row n is that of n + 1 symbols.
pub(super) fn voices(checkpoint: &Checkpoint, config: &Config) -> Result<Voices> {
    let width = 2 * config.style;
    if checkpoint.seed().is_some() {
        let rows = config.albert.positions - 2;
        let values = checkpoint.values("voice", &[rows * width])?;
        return Ok(Voices { names: vec!["drawn".to_owned()], rows, values });
    }
    let folder = checkpoint.dir().join("voices");
    let files = std::fs::read_dir(&folder).map_err(|e| {
        Error::io(ErrorKind::Artifact, &folder, e).hint(
            "a voice of the model is a file voices/NAME.pt beside config.json; download them, too",
        )
    })?;
    let files = files.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|end| end == "pt")).collect();
    files.sort();
    let mut voices = Voices::default();
    for file in &files {
        let one = Checkpoint::open_torch(file)?;
        let shape = one.stored("").map(|(_, shape)| shape).unwrap_or_default();
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        voices.add(file, name, &shape, width, || one.values("", &shape))?;
    }
    if voices.names.is_empty() {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!("{}: holds no voice, a file .pt", folder.display()),
        ));
    }
    Ok(voices)
}
