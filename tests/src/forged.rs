//! Bundles that a test forges for itself, and models that dump what they compute.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::compare::Distance;
use qhx_base::{Error, Result};
use qhx_core::engine::Model;
use qhx_exec::backend::Backend;
use qhx_forge::{ForgeOptions, Silent, forge};
use serde_json::Value;
// As in the program, its recipe is one of the forge's.
use smolvlm_forge as _;

use crate::{backends, files, tiny};

/// A bundle in a folder of its own.
#[derive(Debug)]
pub struct Forged {
    /// The manifest.
    pub manifest: PathBuf,
    _folder: tempfile::TempDir,
}

impl Forged {
    /// Forges a checkpoint for the CPU, unless `change` sets other options, with graphs for it in any case.
    pub fn of(checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> Self {
        Self::try_of(checkpoint, change)
            .unwrap_or_else(|e| panic!("forging {}: {e}", checkpoint.display()))
    }

    /// Same as [`Forged::of`], for a checkpoint that may be refused.
    pub fn try_of(checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> Result<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut options = ForgeOptions::new(folder.path().join("bundle"));
        options.onnx = true;
        change(&mut options);
        let report = forge(checkpoint, &options, &mut Silent)?;
        Ok(Self { manifest: report.manifest, _folder: folder })
    }

    /// Opens the bundle.
    pub fn open(&self, backend: Arc<dyn Backend>) -> Model {
        tiny::open(&self.manifest, backend).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Opens the bundle on the CPU.
    pub fn on_cpu(&self) -> Model {
        self.open(backends::cpu())
    }

    /// Error of opening the bundle on the CPU.
    pub fn refusal(&self) -> Error {
        tiny::open(&self.manifest, backends::cpu()).expect_err("a bundle that is refused")
    }

    /// The manifest's JSON.
    pub fn json(&self) -> Value {
        files::json(&self.manifest)
    }

    /// Changes the manifest.
    pub fn edit(&self, change: impl FnOnce(&mut Value)) {
        files::edit(&self.manifest, change);
    }

    /// Asserts that opening fails with `what` in the message while the manifest has another value at each pointer.
    pub fn refuses(&self, cases: impl IntoIterator<Item = (&'static str, Value, &'static str)>) {
        let whole = self.json();
        for (pointer, value, what) in cases {
            self.edit(|manifest| *manifest.pointer_mut(pointer).expect(pointer) = value);
            let error = self.refusal().to_string();
            assert!(error.contains(what), "{pointer}: {error}");
            self.edit(|manifest| manifest.clone_from(&whole));
        }
    }
}

/// Sets options of a recipe.
pub fn set(options: &mut ForgeOptions, given: &[(&str, &str)]) {
    let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    options.recipe_options.extend(given);
}

/// A model that dumps the arrays of its op into a folder of its own.
#[derive(Debug)]
pub struct Dumping {
    model: Model,
    folder: tempfile::TempDir,
    /// Arrays read so far, by name.
    read: BTreeMap<String, usize>,
}

impl Dumping {
    /// Opens a bundle.
    pub fn open(manifest: &Path, backend: Arc<dyn Backend>) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dump = folder.path().join("dump");
        let model = tiny::open_dumping(manifest, backend, &tiny::plugins(), &dump);
        Self { model, folder, read: BTreeMap::new() }
    }

    fn next(&mut self, name: &str) -> Option<Vec<f32>> {
        let read = self.read.entry(name.to_owned()).or_default();
        *read += 1;
        files::dumped(&self.folder.path().join("dump"), name, *read - 1)
    }

    /// The next array of a name.
    pub fn array(&mut self, name: &str) -> Vec<f32> {
        self.next(name).unwrap_or_else(|| panic!("no further array {name} is dumped"))
    }

    /// All further arrays of a name, one behind the other.
    pub fn arrays(&mut self, name: &str) -> Vec<f32> {
        std::iter::from_fn(|| self.next(name)).flatten().collect()
    }

    /// Distance of the last values of the next array of a name.
    pub fn distance(&mut self, name: &str, expected: &[f32]) -> Distance {
        let found = self.array(name);
        let found = &found[found.len() - expected.len()..];
        Distance::of(found, expected).unwrap_or_else(|e| panic!("{name}: {e}"))
    }
}

impl Deref for Dumping {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.model
    }
}

impl DerefMut for Dumping {
    fn deref_mut(&mut self) -> &mut Model {
        &mut self.model
    }
}
