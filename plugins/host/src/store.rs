//! Installing, listing, verifying and removing plugins in a folder with a lock.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use qhx_base::files::FileIdentity;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::op::OpDescription;
use serde::Serialize;

use crate::load::{Demands, LoadError, LoadErrorKind, Plugin, pin};
use crate::lock::{LOCK_FILE, Lock, Locked, is_file_name};
use crate::probe::{Probed, Prober, probe};
use crate::trust::{self, Pinned};

/// Names of copies that are being tried begin with this.
const COPY_PREFIX: &str = ".installing-";

/// A folder of installed plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    dir: PathBuf,
    allow_untrusted: bool,
}

/// Result of [`Store::install`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InstalledPlugin {
    /// The installed file.
    pub path: PathBuf,
    /// Its entry in the lock.
    pub plugin: Locked,
    /// True when a plugin of this file name was there before.
    pub replaced: bool,
    /// Other installed plugins with an op of the same name: `(op, file)`.
    pub conflicts: Vec<(String, String)>,
}

/// State of an installed plugin compared with the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PluginHealth {
    /// The file that was installed, for this program.
    Ok,
    /// Another file, or somebody else could change it.
    Changed,
    /// No file.
    Missing,
    /// For another version of the interface.
    Incompatible,
    /// Somebody else could change the file or its folder.
    Untrusted,
}

impl PluginHealth {
    /// The name in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Changed => "changed",
            Self::Missing => "missing",
            Self::Incompatible => "incompatible",
            Self::Untrusted => "untrusted",
        }
    }
}

/// One plugin as [`Store::verify`] found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The file.
    pub path: PathBuf,
    /// State compared with the lock.
    pub health: PluginHealth,
    /// Why, when it is not in order.
    pub reason: Option<String>,
}

impl Store {
    /// The plugins installed in a folder.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), allow_untrusted: false }
    }

    /// The plugins installed for this user.
    ///
    /// # Errors
    /// When there is no user folder, and when the program runs with more rights than the user.
    pub fn for_user() -> Result<Self> {
        if qhx_base::rights::runs_with_extra_rights() {
            return Err(Error::new(
                ErrorKind::Plugin,
                "this program runs with more rights than its user (set-user-id), so the user's \
                 plugins are not touched",
            ));
        }
        crate::search::user_dir().map(Self::new).ok_or_else(|| {
            Error::new(ErrorKind::Plugin, "there is no folder for the user's data")
                .hint("set HOME or XDG_DATA_HOME to an absolute path")
        })
    }

    /// Does not ask who could change a file or folder.
    #[must_use]
    pub fn allow_untrusted(mut self, allow: bool) -> Self {
        self.allow_untrusted = allow;
        self
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Plugins that the lock lists; empty if there is no lock.
    ///
    /// # Errors
    /// When the lock cannot be read.
    pub fn plugins(&self) -> Result<Vec<Locked>> {
        Ok(Lock::read(&self.dir)?.map(|lock| lock.plugins).unwrap_or_default())
    }

    /// Copies a plugin into the folder and records it. The copy is what is hashed and tried; it is
    /// tried in a child process when a prober is given.
    ///
    /// # Errors
    /// When the file is no plugin, fails when it is tried, or cannot be copied.
    pub fn install(&self, file: &Path, prober: Option<&Prober>) -> Result<InstalledPlugin> {
        let plugin_error = |message: String| {
            Error::new(ErrorKind::Plugin, format!("{}: {message}", file.display()))
        };
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let extension = std::env::consts::DLL_EXTENSION;
        if !is_file_name(name) || Path::new(name).extension() != Some(OsStr::new(extension)) {
            return Err(plugin_error(format!(
                "a plugin is a file named *.{extension}; build its cdylib crate with cargo build"
            )));
        }
        let source =
            Pinned::open(file).map_err(|e| plugin_error(format!("cannot be read: {e}")))?;
        let io = |path: &Path| {
            let path = path.to_owned();
            move |e: std::io::Error| Error::io(ErrorKind::Io, &path, e)
        };
        create_private(&self.dir).map_err(io(&self.dir))?;
        if !self.allow_untrusted {
            trust::check_dir(&self.dir).map_err(|why| {
                Error::new(ErrorKind::Plugin, format!("nothing is installed: {why}"))
                    .hint("take the right away: chmod go-w")
            })?;
        }
        let _guard = self.guard()?;
        self.remove_leftovers();
        let mut lock = self.lock()?;

        // The name ends as a library's must: some loaders ask.
        let mut copy = tempfile::Builder::new()
            .prefix(COPY_PREFIX)
            .suffix(&format!(".{extension}"))
            .tempfile_in(&self.dir)
            .map_err(io(&self.dir))?;
        std::io::copy(&mut &source.file, copy.as_file_mut()).map_err(io(file))?;
        copy.as_file_mut().flush().map_err(io(copy.path()))?;
        copy.as_file().sync_all().map_err(io(copy.path()))?;
        let identity = FileIdentity::of(&copy.as_file().metadata().map_err(io(copy.path()))?);
        // Closed: Windows loads no library that somebody may still write to.
        let copy = copy.into_temp_path();

        let sha256 = {
            let pinned = Pinned::open(&copy).map_err(plugin_error)?;
            let fail = |why| Error::new(ErrorKind::Io, format!("{}: {why}", copy.display()));
            pinned.sha256().map_err(fail)?
        };
        let demands = Demands {
            allow_untrusted: self.allow_untrusted,
            sha256: Some(&sha256),
            ..Demands::default()
        };
        let probed = try_out(&copy, prober, &demands)
            .map_err(|e| plugin_error(format!("not installed: {}", e.message)))?;

        let without_schema = |op| OpDescription { params_schema: serde_json::Value::Null, ..op };
        let plugin = Locked {
            file: name.to_owned(),
            sha256,
            bytes: identity.bytes,
            modified_ns: identity.modified_ns,
            interface: probed.interface,
            ops: probed.ops.into_iter().map(without_schema).collect(),
        };
        let path = self.dir.join(name);
        let replaced = lock.get(name).is_some();
        copy.persist(&path).map_err(|e| io(&path)(e.error))?;
        lock.plugins.retain(|p| p.file != name);
        let conflicts = plugin
            .ops
            .iter()
            .flat_map(|op| {
                lock.plugins
                    .iter()
                    .filter(|p| p.ops.iter().any(|other| other.name == op.name))
                    .map(|p| (op.name.clone(), p.file.clone()))
            })
            .collect();
        lock.plugins.push(plugin.clone());
        lock.write()?;
        Ok(InstalledPlugin { path, plugin, replaced, conflicts })
    }

    /// Removes a plugin, by file name, by file name without prefix and extension, or by the name
    /// of an op that only it has.
    ///
    /// # Errors
    /// Errors of [`Store::find`], or if the files cannot be changed.
    pub fn remove(&self, name: &str) -> Result<Locked> {
        let found = self.find(name)?;
        let _guard = self.guard()?;
        let mut lock = self.lock()?;
        lock.plugins.retain(|p| p.file != found.file);
        lock.write()?;
        let path = found.path(&self.dir);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(ErrorKind::Io, &path, error))
            }
            _ => Ok(found),
        }
    }

    /// The installed plugin that a user means by `name`; see [`Store::remove`].
    ///
    /// # Errors
    /// When there is no such plugin, or several could be meant.
    pub fn find(&self, name: &str) -> Result<Locked> {
        let mut plugins = self.plugins()?;
        if let Some(index) = plugins.iter().position(|p| p.file == name || stem(&p.file) == name) {
            return Ok(plugins.swap_remove(index));
        }
        let having = |p: &&Locked| p.ops.iter().any(|op| op.name == name);
        let by_op: Vec<_> = plugins.iter().filter(having).collect();
        match by_op[..] {
            [one] => Ok(one.clone()),
            [] => {
                let names: Vec<_> = plugins.iter().map(|p| p.file.as_str()).collect();
                Err(Error::new(
                    ErrorKind::Plugin,
                    format!("no plugin {name:?} is installed in {}", self.dir.display()),
                )
                .hint(if names.is_empty() {
                    "none is; install one with qhx plugins install FILE".to_owned()
                } else {
                    format!("installed: {}", names.join(", "))
                }))
            }
            _ => {
                let names: Vec<_> = by_op.iter().map(|p| p.file.as_str()).collect();
                Err(Error::new(
                    ErrorKind::Plugin,
                    format!("several plugins have the host-op {name:?}: {}", names.join(", ")),
                )
                .hint("give the file name"))
            }
        }
    }

    /// Hashes every installed plugin and compares.
    ///
    /// # Errors
    /// When the lock cannot be read.
    pub fn verify(&self) -> Result<Vec<Verified>> {
        let all = self.plugins()?;
        Ok(all.iter().map(|p| examine(&self.dir, p, self.allow_untrusted, true)).collect())
    }

    fn lock(&self) -> Result<Lock> {
        Ok(Lock::read(&self.dir)?
            .unwrap_or_else(|| Lock { dir: self.dir.clone(), plugins: Vec::new() }))
    }

    /// Removes copies of installations that were stopped. Only the holder of the guard makes copies,
    /// so that none of those there is in use.
    fn remove_leftovers(&self) {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return };
        for entry in entries.flatten() {
            let is_copy = entry.file_name().to_str().is_some_and(|n| n.starts_with(COPY_PREFIX));
            if is_copy && entry.file_type().is_ok_and(|kind| kind.is_file()) {
                // One that stays is loaded by nobody: it is not in the lock.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Keeps two programs from changing the lock at once.
    fn guard(&self) -> Result<File> {
        let path = self.dir.join(format!(".{LOCK_FILE}.guard"));
        let io = |e: std::io::Error| Error::io(ErrorKind::Io, &path, e);
        let file =
            File::options().create(true).truncate(false).write(true).open(&path).map_err(io)?;
        file.lock().map_err(io)?;
        Ok(file)
    }
}

/// Loads a plugin to learn what it has, in a child process when there is a prober.
pub(crate) fn try_out(
    path: &Path,
    prober: Option<&Prober>,
    demands: &Demands<'_>,
) -> Result<Probed, LoadError> {
    match prober {
        Some(prober) => probe(&prober.clone().remembering(None), path, demands),
        None => Plugin::load_checked(path, demands)
            .map(|plugin| Probed { interface: plugin.interface, ops: plugin.ops }),
    }
}

/// Compares a plugin with its entry, without running any of its code. Reads the file when `hash`
/// is set or when its length or time differ from those recorded.
pub(crate) fn examine(dir: &Path, locked: &Locked, allow_untrusted: bool, hash: bool) -> Verified {
    let path = locked.path(dir);
    let verified = |health, reason: Option<String>| Verified { path: path.clone(), health, reason };
    if let Err(why) = crate::header::check_interface(&locked.interface) {
        return verified(PluginHealth::Incompatible, Some(why));
    }
    let known = |data: std::fs::Metadata| {
        let identity = FileIdentity::of(&data);
        (identity.bytes, identity.modified_ns) == (locked.bytes, locked.modified_ns)
    };
    let read = hash || !std::fs::metadata(&path).is_ok_and(known);
    let demands = Demands {
        found_in: Some(dir),
        allow_untrusted,
        sha256: read.then_some(locked.sha256.as_str()),
    };
    match pin(&path, &demands) {
        Ok(_) => verified(PluginHealth::Ok, None),
        Err(error) => {
            let health = match error.kind {
                LoadErrorKind::Missing => PluginHealth::Missing,
                LoadErrorKind::Untrusted => PluginHealth::Untrusted,
                _ => PluginHealth::Changed,
            };
            verified(health, Some(error.message))
        }
    }
}

/// A library's file name without the system's prefix and extension.
pub(crate) fn stem(file: &str) -> &str {
    let name = file.strip_suffix(std::env::consts::DLL_SUFFIX).unwrap_or(file);
    name.strip_prefix(std::env::consts::DLL_PREFIX).unwrap_or(name)
}

/// Makes a folder that only the user may enter, where it does not exist yet.
fn create_private(dir: &Path) -> std::io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}
