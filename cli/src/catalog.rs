//! Models by name, for the page of a server.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use qhx::hub::DownloadProgress;
use qhx::hub::index::Entry;
use qhx::{Runtime, hub};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_server::{Catalog, CatalogEntry, CatalogProgress};
use qhx_tools::doctor::diagnose;
use qhx_tools::install::FetchStep;
use qhx_tools::models::{ForgeStep, Machine, Models, Step, plan};
use serde_json::Value;

use crate::commands::models::fetched;

/// Models of an index, as a server offers them.
#[derive(Debug)]
pub(crate) struct NamedModels {
    pub models: Models,
    /// Machine that models are made ready for.
    pub machine: Machine,
    /// Looks at the machine.
    pub runtime: Runtime,
}

impl Catalog for NamedModels {
    fn entries(&self) -> Result<Vec<CatalogEntry>> {
        let entry = |entry: &Entry| {
            let forms = self.models.forms(&entry.name);
            let here = forms.iter().any(|form| form.whole);
            let disk: u64 = forms.iter().map(|form| form.bytes).sum();
            let asks = entry.checkpoint.as_ref().is_some_and(|source| source.terms);
            let note = (asks && !here).then(|| "asks for an account and accepted terms".to_owned());
            // Of several forms it is the one that this machine opens.
            let bundle = hub::resolve(Path::new(&entry.name)).ok().filter(|_| here);
            CatalogEntry::new(&entry.name)
                .title(&entry.title)
                .does(entry.does.iter().map(|does| does.name()))
                .licence(entry.license.clone())
                .fetch_bytes(fetched(entry))
                .disk_bytes(Some(disk).filter(|bytes| *bytes > 0))
                .here(here)
                .note(note)
                .bundle(bundle.filter(|path| path.exists()))
        };
        // Models that cannot run here are not offered.
        let runs = |found: &&Entry| {
            plan(found, &self.machine).is_ok() || !self.models.forms(&found.name).is_empty()
        };
        Ok(self.models.index().models.iter().filter(runs).map(entry).collect())
    }

    fn obtain(
        &self,
        name: &str,
        progress: &(dyn Fn(CatalogProgress<'_>) + Sync),
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let shown = Mutex::new(Shown::default());
        let on_step = |step: Step<'_>| {
            let mut shown = shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            shown.take(&step);
            let Shown { step, done, total } = &*shown;
            let total = Some(*total).filter(|total| *total > 0);
            progress(CatalogProgress { step, done: *done, total });
        };
        self.models.obtain(&self.models.find(name)?, &self.machine, &on_step, cancel)
    }

    fn remove(&self, name: &str) -> Result<u64> {
        let removed = self.models.remove(name)?;
        removed
            .map(|removed| removed.bytes)
            .ok_or_else(|| Error::new(ErrorKind::Usage, format!("{name}: nothing of it is here")))
    }

    fn doctor(&self) -> Result<Value> {
        let found = diagnose(&self.runtime, None);
        serde_json::to_value(found).map_err(|e| Error::caused(ErrorKind::Internal, "the report", e))
    }
}

/// Step under way, and how far it is.
#[derive(Debug, Default)]
struct Shown {
    step: String,
    done: u64,
    total: u64,
}

impl Shown {
    fn begin(&mut self, step: String, total: u64) {
        *self = Self { step, done: 0, total };
    }

    fn take(&mut self, step: &Step<'_>) {
        match step {
            Step::Package(FetchStep::Download { requirements, megabytes }) => {
                self.begin(format!("fetching {requirements}"), u64::from(*megabytes) * 1_000_000);
            }
            Step::Package(FetchStep::Downloaded(bytes)) => self.done = *bytes,
            Step::Package(FetchStep::Unpack) => self.begin("unpacking".to_owned(), 0),
            Step::Package(_) | Step::Waiting(_) => {
                self.begin("waiting for another process".to_owned(), 0);
            }
            Step::Download(name, progress) => match progress {
                DownloadProgress::Begin { bytes, .. } => {
                    self.begin(format!("fetching {name}"), *bytes);
                }
                DownloadProgress::Kept(bytes) | DownloadProgress::Fetched(bytes) => {
                    self.done += bytes;
                }
                DownloadProgress::Lost(bytes) => self.done = self.done.saturating_sub(*bytes),
                _ => {}
            },
            Step::Forge(step) => match step {
                ForgeStep::Begin { title, .. } => {
                    self.begin(format!("making a bundle of {title}"), 0);
                }
                ForgeStep::Total(bytes) => self.total = *bytes,
                ForgeStep::Finished(bytes) => self.done += bytes,
                _ => {}
            },
            _ => {}
        }
    }
}
