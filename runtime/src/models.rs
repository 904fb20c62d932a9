//! Models that were made ready on this machine, found by their short names.
//!
//! `qhx pull smollm2`, and what apps build on `qhx_tools::models`, leave a folder `models/smollm2` in the cache: a
//! record of each form of the model, `cpu.json` or `v81.json`, beside the bundle of a form that was made here. Every
//! function that takes a bundle's path takes such a name.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::UNIX_EPOCH;

use qhx_base::{ErrorKind, Result, error, files};
use qhx_hub::Name;
use qhx_hub::index::is_model_name;
use qhx_qnn::runs_on;
use serde::{Deserialize, Serialize};

use crate::cache;

/// Form of a bundle for the CPU.
pub const CPU: &str = "cpu";
/// Longest record that is read.
const MAX_RECORD: u64 = 8 << 20;
/// End of a record's file name.
const RECORD: &str = ".json";

/// Record of a model in one form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Record {
    /// Name of the model.
    pub name: String,
    /// `cpu`, or the Hexagon architecture such as `v81`.
    pub form: String,
    /// Repository or package that it came from, with commit or version.
    pub source: String,
    /// Version of qhx that made it.
    pub qhx: String,
    /// Name of the bundle in the hub's cache, if it was fetched; without one it lies beside the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<Name>,
    /// Length, and time of the last change in nanoseconds, of the files of a bundle that was made here.
    #[serde(default)]
    pub files: BTreeMap<String, (u64, u64)>,
}

impl Record {
    /// Record of a bundle that lies in the folder `form` of `folder`, with its files as they are.
    ///
    /// # Errors
    /// When a file of it cannot be looked at.
    pub fn of_made(folder: &Path, name: &str, form: &str, source: &str) -> Result<Self> {
        let files = identities(&folder.join(form))?;
        Ok(Self { files, ..Self::new(name, form, source) })
    }

    /// Record of a bundle that was fetched from a hub.
    pub fn of_fetched(name: &str, form: &str, repository: Name) -> Self {
        let source = repository.to_string();
        Self { repository: Some(repository), ..Self::new(name, form, &source) }
    }

    fn new(name: &str, form: &str, source: &str) -> Self {
        let [name, form, source] = [name, form, source].map(str::to_owned);
        let qhx = env!("CARGO_PKG_VERSION").to_owned();
        Self { name, form, source, qhx, repository: None, files: BTreeMap::new() }
    }

    /// Architecture of its form; none of the CPU's.
    pub fn arch(&self) -> Option<u32> {
        self.form.strip_prefix('v')?.parse().ok()
    }

    /// Path of a bundle that was made in `folder`.
    pub fn made(&self, folder: &Path) -> PathBuf {
        folder.join(&self.form)
    }

    /// True if the bundle that was made in `folder` still has the files that it had.
    pub fn is_whole(&self, folder: &Path) -> bool {
        !self.files.is_empty()
            && identities(&self.made(folder)).is_ok_and(|found| found == self.files)
    }

    /// Bytes of a bundle that was made here.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|(bytes, _)| bytes).sum()
    }

    /// Writes it into the folder of the model.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = record_file(folder, &self.form);
        let text = serde_json::to_vec_pretty(self);
        let text = text.map_err(|e| error!(Internal, "the record of {}: {e}", self.name))?;
        cache::remember(&path, &text).map_err(|e| qhx_base::Error::io(ErrorKind::Io, &path, e))
    }

    /// Removes it from the folder of the model.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    pub fn remove(&self, folder: &Path) -> Result<()> {
        let path = record_file(folder, &self.form);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(qhx_base::Error::io(ErrorKind::Io, &path, e))
            }
            _ => Ok(()),
        }
    }
}

/// The folder of all models: `models` in the cache folder.
///
/// # Errors
/// When there is no cache folder.
pub fn folder() -> Result<PathBuf> {
    Ok(cache::dir()?.join("models"))
}

fn record_file(folder: &Path, form: &str) -> PathBuf {
    folder.join(format!("{form}{RECORD}"))
}

/// Records of a model in its folder, the CPU's first, then by architecture.
pub fn records(folder: &Path) -> Vec<Record> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(std::io::Result::ok);
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let file = entry.file_name().into_string().ok()?;
            let form = file.strip_suffix(RECORD)?;
            let record: Record = files::read_json(ErrorKind::Io, &entry.path(), MAX_RECORD).ok()?;
            let fits = record.form == form && (form == CPU || record.arch().is_some());
            fits.then_some(record)
        })
        .collect();
    found.sort_by_key(Record::arch);
    found
}

/// The record of the form for a device of the architecture `arch`: its own, otherwise the newest that it runs,
/// otherwise the CPU's. Without a device it is the CPU's, otherwise the newest.
pub fn choose(records: &[Record], arch: Option<u32>) -> Option<&Record> {
    let cpu = || records.iter().find(|record| record.arch().is_none());
    match arch {
        Some(arch) => {
            let runs = |record: &&Record| record.arch().is_some_and(|made| runs_on(made, arch));
            records.iter().rev().find(runs).or_else(cpu)
        }
        None => cpu().or_else(|| records.last()),
    }
}

/// The short name that a path is, if nothing is there: in lower case.
pub fn name_of(path: &Path) -> Option<String> {
    let mut parts = path.components();
    let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) else { return None };
    let name = name.to_str()?.to_ascii_lowercase();
    let there = path.exists() || path.with_file_name(format!("{}.json", path.to_str()?)).is_file();
    (is_model_name(&name) && !there).then_some(name)
}

/// Record and path of a model that was made ready, for a device of the architecture `arch`.
pub(crate) fn find(name: &str, arch: Option<u32>) -> Option<(Record, PathBuf)> {
    let folder = folder().ok()?.join(name);
    let records = records(&folder);
    let record = choose(&records, arch)?.clone();
    let path = match &record.repository {
        Some(repository) => PathBuf::from(repository.to_string()),
        None => record.made(&folder),
    };
    Some((record, path))
}

/// Length and time of each file below a folder, by its path there.
fn identities(folder: &Path) -> Result<BTreeMap<String, (u64, u64)>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![(folder.to_owned(), String::new())];
    while let Some((folder, inner)) = folders.pop() {
        let io = |e| qhx_base::Error::io(ErrorKind::Io, &folder, e);
        for entry in std::fs::read_dir(&folder).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let inner = if inner.is_empty() { name } else { format!("{inner}/{name}") };
            let data = entry.metadata().map_err(io)?;
            if data.is_dir() {
                folders.push((entry.path(), inner));
                continue;
            }
            let time = data.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let time = time.and_then(|time| u64::try_from(time.as_nanos()).ok()).unwrap_or(0);
            found.insert(inner, (data.len(), time));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(form: &str) -> Record {
        Record::new("m", form, "s")
    }

    #[test]
    fn a_machine_gets_the_form_that_it_runs() {
        let all = [record("cpu"), record("v73"), record("v81")];
        for (records, arch, taken) in [
            (&all[..], Some(81), Some("v81")),
            (&all[..], Some(79), Some("v73")),
            (&all[..], Some(68), Some("cpu")),
            (&all[..], None, Some("cpu")),
            (&all[1..], None, Some("v81")),
            (&all[1..], Some(68), None),
            (&[], None, None),
        ] {
            let found = choose(records, arch).map(|record| record.form.as_str());
            assert_eq!(found, taken, "{arch:?}");
        }
    }

    #[test]
    fn a_changed_bundle_is_not_whole() {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("cpu");
        std::fs::create_dir_all(bundle.join("onnx")).unwrap();
        std::fs::write(bundle.join("onnx/a"), "abc").unwrap();
        let record = Record::of_made(folder.path(), "m", CPU, "s").unwrap();
        record.write(folder.path()).unwrap();
        assert_eq!(records(folder.path()), std::slice::from_ref(&record));
        assert_eq!((record.is_whole(folder.path()), record.bytes()), (true, 3));
        std::fs::write(bundle.join("onnx/a"), "abcd").unwrap();
        assert!(!record.is_whole(folder.path()));
        record.remove(folder.path()).unwrap();
        assert!(records(folder.path()).is_empty());
    }

    #[test]
    fn a_path_is_a_name_only_where_nothing_is_there() {
        assert_eq!(name_of(Path::new("SmolLM2")).as_deref(), Some("smollm2"));
        for path in ["src", "a/b", "../a", "/a", "a b", "", ".", "Cargo.toml"] {
            assert_eq!(name_of(Path::new(path)), None, "{path}");
        }
    }
}
