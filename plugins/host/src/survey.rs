//! List for `qhx plugins list`: every plugin file in search order with its state, found without running any code of a
//! plugin.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use qhx_base::Result;
use serde::Serialize;

use crate::load::{Demands, LoadErrorKind, pin};
use crate::lock::{LOCK_FILE, Lock, Locked};
use crate::probe::recalled;
use crate::registry::{builtin_ops, check_named_dir, named_place, not_installed};
use crate::search::{Place, PluginOptions, default_places, files_in};
use crate::store::{PluginHealth, examine};

/// State of a plugin file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Status {
    /// Usable.
    Ok,
    /// Not the file that was installed.
    Changed,
    /// Listed in the lock, but not there.
    Missing,
    /// For another version of the interface.
    Incompatible,
    /// All of its ops come from somewhere that is searched earlier.
    Shadowed,
    /// Somebody else could change it.
    Untrusted,
    /// In a folder that loads installed plugins only, and not installed.
    NotInstalled,
    /// Crashed or hung when it was tried.
    Crashed,
    /// Not usable: no plugin, or its code failed.
    Broken,
    /// Not installed and not tried yet: what it has is known once it is loaded.
    Untried,
}

impl Status {
    /// The word in lists.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Changed => "changed",
            Self::Missing => "missing",
            Self::Incompatible => "incompatible",
            Self::Shadowed => "shadowed",
            Self::Untrusted => "untrusted",
            Self::NotInstalled => "not installed",
            Self::Crashed => "crashed",
            Self::Broken => "broken",
            Self::Untried => "untried",
        }
    }

    /// True when the plugin's ops can be used, or could if nothing came before it.
    pub const fn is_usable(self) -> bool {
        matches!(self, Self::Ok | Self::Shadowed | Self::Untried)
    }
}

/// A plugin file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// The file.
    pub path: PathBuf,
    /// Why it was looked at.
    pub place: &'static str,
    /// Its state.
    pub status: Status,
    /// Why it is not usable.
    pub reason: Option<String>,
    /// Interface version that it was built against, where known.
    pub interface: Option<String>,
    /// Names of its ops, where known.
    pub ops: Vec<String>,
    /// Names of its ops that come from somewhere else.
    pub shadowed: Vec<String>,
    /// The recorded hash of an installed plugin.
    pub sha256: Option<String>,
}

/// Everything that [`crate::Plugins::discover`] would consider, in its order.
///
/// # Errors
/// When a file or folder that is named explicitly, or its lock, cannot be used.
pub fn survey(options: &PluginOptions) -> Result<Vec<Listed>> {
    let mut options = options.clone();
    options.allow_untrusted &= !qhx_base::rights::runs_with_extra_rights();
    let mut found = Survey { options: &options, taken: BTreeSet::new(), rows: Vec::new() };
    if options.no_plugins {
        return Ok(found.rows);
    }
    for file in &options.files {
        let lock = file.parent().map(Lock::read).transpose()?.flatten();
        let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        match (lock.as_ref().and_then(|lock| lock.get(name)), file.parent()) {
            (Some(locked), Some(dir)) => found.installed(dir, "--plugin", locked),
            _ => found.loose(file, "--plugin"),
        }
    }
    for dir in &options.dirs {
        check_named_dir(dir)?;
        found.place(&named_place(dir));
    }
    found.taken.extend(builtin_ops()?.into_iter().map(|op| op.name));
    if !options.only_named {
        for place in default_places() {
            found.place(&place);
        }
    }
    Ok(found.rows)
}

struct Survey<'a> {
    options: &'a PluginOptions,
    taken: BTreeSet<String>,
    rows: Vec<Listed>,
}

impl Survey<'_> {
    fn place(&mut self, place: &Place) {
        let lock = match Lock::read(&place.dir) {
            Ok(lock) => lock,
            Err(error) => {
                let path = place.dir.join(LOCK_FILE);
                let mut row = self.row(path, place.why, Status::Broken);
                row.reason = Some(error.message().to_owned());
                self.rows.push(row);
                return;
            }
        };
        let only_installed = place.installed_only || lock.is_some();
        for file in files_in(place) {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if lock.as_ref().is_some_and(|lock| lock.get(name).is_some()) {
                continue;
            }
            if only_installed {
                let mut row = self.row(file.clone(), place.why, Status::NotInstalled);
                row.reason = Some(not_installed(&file).message);
                self.rows.push(row);
            } else if self.rows.iter().all(|row| row.path != file) {
                self.loose(&file, place.why);
            }
        }
        for locked in lock.iter().flat_map(|lock| &lock.plugins) {
            self.installed(&place.dir, place.why, locked);
        }
    }

    fn row(&self, path: PathBuf, place: &'static str, status: Status) -> Listed {
        Listed {
            path,
            place,
            status,
            reason: None,
            interface: None,
            ops: Vec::new(),
            shadowed: Vec::new(),
            sha256: None,
        }
    }

    fn installed(&mut self, dir: &Path, place: &'static str, locked: &Locked) {
        let verified = examine(dir, locked, self.options.allow_untrusted, false);
        let status = match verified.health {
            PluginHealth::Ok => Status::Ok,
            PluginHealth::Changed => Status::Changed,
            PluginHealth::Missing => Status::Missing,
            PluginHealth::Incompatible => Status::Incompatible,
            PluginHealth::Untrusted => Status::Untrusted,
        };
        let mut row = self.row(verified.path, place, status);
        row.reason = verified.reason;
        row.sha256 = Some(locked.sha256.clone());
        let ops = locked.ops.iter().map(|op| op.name.clone()).collect();
        // An installed plugin that will not load still takes its names: nothing else stands in.
        let takes = status != Status::Incompatible;
        self.push(row, locked.interface.clone(), ops, takes);
    }

    fn loose(&mut self, file: &Path, place: &'static str) {
        let demands = Demands {
            found_in: file.parent().filter(|dir| !dir.as_os_str().is_empty()),
            allow_untrusted: self.options.allow_untrusted,
            sha256: None,
        };
        let known = match pin(file, &demands) {
            Err(error) => Some(Err(error)),
            Ok(_) => self.options.prober.as_ref().and_then(|prober| recalled(prober, file)),
        };
        match known {
            None => {
                let row = self.row(file.to_owned(), place, Status::Untried);
                self.rows.push(row);
            }
            Some(Err(error)) => {
                let status = match error.kind {
                    LoadErrorKind::Missing => Status::Missing,
                    LoadErrorKind::Untrusted => Status::Untrusted,
                    LoadErrorKind::Changed => Status::Changed,
                    LoadErrorKind::Incompatible => Status::Incompatible,
                    LoadErrorKind::Crashed => Status::Crashed,
                    _ => Status::Broken,
                };
                let mut row = self.row(file.to_owned(), place, status);
                row.reason = Some(error.message);
                self.rows.push(row);
            }
            Some(Ok(probed)) => {
                let row = self.row(file.to_owned(), place, Status::Ok);
                let ops = probed.ops.into_iter().map(|op| op.name).collect();
                self.push(row, probed.interface, ops, true);
            }
        }
    }

    fn push(&mut self, mut row: Listed, interface: String, ops: Vec<String>, takes: bool) {
        row.interface = Some(interface);
        row.shadowed = ops.iter().filter(|op| self.taken.contains(*op)).cloned().collect();
        if row.status == Status::Ok && row.shadowed.len() == ops.len() {
            row.status = Status::Shadowed;
        }
        if takes {
            self.taken.extend(ops.iter().cloned());
        }
        row.ops = ops;
        self.rows.push(row);
    }
}
