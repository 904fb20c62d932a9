//! Models that are not served yet: an index of them, and the work that makes one ready.

use std::fmt;
use std::path::PathBuf;

use qhx::{CancelToken, Result};
use qhx_base::setters;
use serde::Serialize;

/// Source of models that the server does not serve yet, by name.
///
/// All calls may block; the server makes them on threads of their own. It calls [`Catalog::obtain`] for names of
/// [`Catalog::entries`] only, for a few names at a time, and never [`Catalog::obtain`] and [`Catalog::remove`] of one
/// name at once.
pub trait Catalog: fmt::Debug + Send + Sync {
    /// Entries of the index, and the models that were fetched or made already.
    ///
    /// # Errors
    /// When the index or the folder of the models cannot be read.
    fn entries(&self) -> Result<Vec<CatalogEntry>>;

    /// Makes the model ready on this machine (pull, or fetch and forge) and returns the path of its bundle.
    ///
    /// # Errors
    /// When the model cannot be fetched or made, or `cancel` was cancelled. Clients see message and hint.
    fn obtain(
        &self,
        name: &str,
        progress: &(dyn Fn(CatalogProgress<'_>) + Sync),
        cancel: &CancelToken,
    ) -> Result<PathBuf>;

    /// Removes the files of a model that was obtained. Returns bytes that are free again.
    ///
    /// # Errors
    /// When there is nothing to remove, or files cannot be removed.
    fn remove(&self, name: &str) -> Result<u64>;

    /// State of this machine, as `qhx doctor --json` prints it.
    ///
    /// # Errors
    /// When the machine cannot be checked at all; a failed check is part of the result.
    fn doctor(&self) -> Result<serde_json::Value>;
}

/// Model of a [`Catalog`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CatalogEntry {
    /// Name that clients ask for.
    pub name: String,
    /// Name for people.
    pub title: String,
    /// Abilities: `text`, `image`, `audio`, `video`, `transcribe`, `speak`, `embed`, `rerank`.
    pub does: Vec<String>,
    /// Licence of the weights.
    pub licence: Option<String>,
    /// Bytes that obtaining it fetches.
    pub fetch_bytes: Option<u64>,
    /// Bytes that it takes on this machine: measured for one that is here, estimated for others.
    pub disk_bytes: Option<u64>,
    /// True if it was obtained.
    pub here: bool,
    /// Remark for people, such as "asks for accepted terms".
    pub note: Option<String>,
    /// Path of its bundle. With one, the model is served from the start.
    #[serde(skip)]
    pub bundle: Option<PathBuf>,
}

impl CatalogEntry {
    /// An entry with a name, which is its title too.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        Self { title: name.clone(), name, ..Self::default() }
    }

    setters! {
        /// Sets the name for people.
        title(title: impl Into<String>) => title = title.into(),
        /// Sets the licence of the weights.
        licence(licence: impl Into<Option<String>>) => licence = licence.into(),
        /// Sets the bytes that obtaining it fetches.
        fetch_bytes(bytes: impl Into<Option<u64>>) => fetch_bytes = bytes.into(),
        /// Sets the bytes that it takes on this machine.
        disk_bytes(bytes: impl Into<Option<u64>>) => disk_bytes = bytes.into(),
        /// Sets whether it was obtained.
        here: bool,
        /// Sets the path of its bundle, with which it is served from the start.
        bundle(bundle: impl Into<Option<PathBuf>>) => bundle = bundle.into(),
        /// Sets the remark for people.
        note(note: impl Into<Option<String>>) => note = note.into(),
    }

    /// Sets the abilities.
    #[must_use]
    pub fn does<S: Into<String>>(mut self, does: impl IntoIterator<Item = S>) -> Self {
        self.does = does.into_iter().map(Into::into).collect();
        self
    }
}

/// Progress of [`Catalog::obtain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CatalogProgress<'a> {
    /// Step under way, for people: "fetching model.safetensors".
    pub step: &'a str,
    /// Units of the step that are done, mostly bytes.
    pub done: u64,
    /// All units of the step, if they are known.
    pub total: Option<u64>,
}
