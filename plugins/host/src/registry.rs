//! All ops that can be opened, by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use qhx_base::{Error, ErrorKind, Result};
use qhx_core::op::{OpDescription, OpEntry, OpOpener, OpProvider, OpSource};
use qhx_op::abi::OpModuleRef;

use crate::adapter::PluginOp;
use crate::header::check_interface;
use crate::load::{Demands, LoadError, LoadErrorKind, Plugin, describe};
use crate::lock::{Lock, Locked};
#[cfg(feature = "params-schema")]
use crate::params;
use crate::probe::probe;
use crate::search::{Place, PluginOptions, default_places, files_in};

/// State of a plugin file after the search.
#[derive(Debug, Clone)]
pub enum PluginStatus {
    /// Loaded. `shadowed` are those of its ops that an earlier one has taken.
    Loaded {
        /// The plugin.
        plugin: Plugin,
        /// Names of ops that come from somewhere else.
        shadowed: Vec<String>,
    },
    /// Installed. It is hashed and loaded when one of its ops is asked for.
    Installed {
        /// The file.
        path: PathBuf,
        /// Its entry in the lock.
        plugin: Locked,
        /// Names of ops that come from somewhere else.
        shadowed: Vec<String>,
    },
    /// Not usable.
    Failed(LoadError),
}

/// Source of an op's code.
#[derive(Clone, Copy)]
enum Provider {
    Loaded(OpModuleRef),
    /// Index into [`Plugins::installed`].
    Installed(usize),
}

struct Installed {
    dir: PathBuf,
    plugin: Locked,
    /// One that does not load is tried again the next time: there may have been too many open files.
    loaded: OnceLock<Plugin>,
}

/// The ops linked into the program and those of all plugins found.
pub struct Plugins {
    ops: BTreeMap<String, (OpEntry, Provider)>,
    installed: Vec<Installed>,
    files: Vec<PluginStatus>,
    searched: Vec<PathBuf>,
    options: PluginOptions,
}

impl std::fmt::Debug for Plugins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugins")
            .field("ops", &self.ops.keys().collect::<Vec<_>>())
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl Plugins {
    /// Finds plugins and loads those that are not installed. A file named explicitly must load;
    /// one that is found and does not load is remembered with the reason.
    ///
    /// # Errors
    /// When a file or folder that is named explicitly cannot be used.
    pub fn discover(options: &PluginOptions) -> Result<Self> {
        let mut options = options.clone();
        options.allow_untrusted &= !qhx_base::rights::runs_with_extra_rights();
        let mut plugins = Self {
            ops: BTreeMap::new(),
            installed: Vec::new(),
            files: Vec::new(),
            searched: options.dirs.clone(),
            options,
        };
        if plugins.options.no_plugins {
            plugins.searched.clear();
            plugins.add_builtin()?;
            return Ok(plugins);
        }
        for file in plugins.options.files.clone() {
            let plugin = plugins.load_named(&file)?;
            plugins.add(plugin);
        }
        for dir in plugins.options.dirs.clone() {
            check_named_dir(&dir)?;
            plugins.search(&named_place(&dir));
        }
        plugins.add_builtin()?;
        if !plugins.options.only_named {
            for place in default_places() {
                plugins.search(&place);
                plugins.searched.push(place.dir);
            }
        }
        Ok(plugins)
    }

    /// A file that the user named: it needs not be installed, but if it is, it must be the one.
    fn load_named(&self, file: &Path) -> Result<Plugin> {
        let lock = match file.parent() {
            Some(dir) => Lock::read(dir)?,
            None => None,
        };
        let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let sha256 = lock.as_ref().and_then(|l| l.get(name)).map(|p| p.sha256.as_str());
        self.load(file, file.parent(), sha256).map_err(|e| {
            log_details(&e);
            Error::new(ErrorKind::Plugin, e.to_string()).with_source(e)
        })
    }

    fn load(
        &self,
        file: &Path,
        found_in: Option<&Path>,
        sha256: Option<&str>,
    ) -> Result<Plugin, LoadError> {
        let allow_untrusted = self.options.allow_untrusted;
        let found_in = found_in.filter(|dir| !dir.as_os_str().is_empty());
        let demands = Demands { found_in, allow_untrusted, sha256 };
        if let (Some(prober), None) = (&self.options.prober, sha256) {
            probe(prober, file, &demands)?;
        }
        Plugin::load_checked(file, &demands)
    }

    fn search(&mut self, place: &Place) {
        match Lock::read(&place.dir) {
            Ok(Some(lock)) => self.search_installed(place, lock),
            Ok(None) => self.search_loose(place),
            Err(error) => {
                let path = place.dir.join(crate::lock::LOCK_FILE);
                let error = LoadError::new(&path, LoadErrorKind::NotInstalled, error.message());
                self.files.push(PluginStatus::Failed(error));
            }
        }
    }

    fn search_installed(&mut self, place: &Place, lock: Lock) {
        for file in files_in(place) {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if lock.get(name).is_none() {
                self.files.push(PluginStatus::Failed(not_installed(&file)));
            }
        }
        for plugin in lock.plugins {
            let path = plugin.path(&place.dir);
            if let Err(why) = check_interface(&plugin.interface) {
                let error = LoadError::new(&path, LoadErrorKind::Incompatible, why);
                self.files.push(PluginStatus::Failed(error));
                continue;
            }
            let provider = Provider::Installed(self.installed.len());
            let shadowed = self.register(&plugin.ops, &OpSource::Plugin(path.clone()), provider);
            self.installed.push(Installed {
                dir: place.dir.clone(),
                plugin: plugin.clone(),
                loaded: OnceLock::new(),
            });
            self.files.push(PluginStatus::Installed { path, plugin, shadowed });
        }
    }

    fn search_loose(&mut self, place: &Place) {
        for file in files_in(place) {
            if place.installed_only {
                self.files.push(PluginStatus::Failed(not_installed(&file)));
                continue;
            }
            let known = |status: &PluginStatus| match status {
                PluginStatus::Loaded { plugin, .. } => {
                    dunce::canonicalize(&file).is_ok_and(|real| real == plugin.path)
                }
                PluginStatus::Installed { path, .. } => *path == file,
                PluginStatus::Failed(error) => error.path == file,
            };
            if self.files.iter().any(known) {
                continue;
            }
            tracing::debug!(file = %file.display(), why = place.why, "loading plugin");
            match self.load(&file, Some(&place.dir), None) {
                Ok(plugin) => self.add(plugin),
                Err(error) => {
                    log_details(&error);
                    if place.why == NAMED {
                        tracing::warn!("passed over: {error}");
                    }
                    self.files.push(PluginStatus::Failed(error));
                }
            }
        }
    }

    fn add(&mut self, plugin: Plugin) {
        let source = OpSource::Plugin(plugin.path.clone());
        let shadowed = self.register(&plugin.ops, &source, Provider::Loaded(plugin.module));
        self.files.push(PluginStatus::Loaded { plugin, shadowed });
    }

    fn add_builtin(&mut self) -> Result<()> {
        let ops = builtin_ops()?;
        self.register(&ops, &OpSource::Builtin, Provider::Loaded(qhx_op::export::module()));
        Ok(())
    }

    fn register(
        &mut self,
        ops: &[OpDescription],
        source: &OpSource,
        provider: Provider,
    ) -> Vec<String> {
        let mut shadowed = Vec::new();
        for description in ops {
            if self.ops.contains_key(&description.name) {
                shadowed.push(description.name.clone());
                continue;
            }
            let entry = OpEntry { description: description.clone(), source: source.clone() };
            self.ops.insert(description.name.clone(), (entry, provider));
        }
        shadowed
    }

    /// State of every plugin file that was considered, in search order.
    pub fn files(&self) -> &[PluginStatus] {
        &self.files
    }

    /// The op's entry and code. An installed plugin is hashed and loaded here.
    fn get(&self, name: &str) -> Result<(OpEntry, OpModuleRef)> {
        let Some((entry, provider)) = self.ops.get(name) else { return Err(self.unknown(name)) };
        let index = match *provider {
            Provider::Loaded(module) => return Ok((entry.clone(), module)),
            Provider::Installed(index) => index,
        };
        let installed = &self.installed[index];
        let file = installed.plugin.path(&installed.dir);
        let plugin = match installed.loaded.get() {
            Some(plugin) => plugin,
            None => {
                let sha256 = Some(installed.plugin.sha256.as_str());
                let loaded = self.load(&file, Some(&installed.dir), sha256).map_err(|error| {
                    log_details(&error);
                    Error::caused(ErrorKind::Plugin, format_args!("host-op {name:?}"), error)
                })?;
                installed.loaded.get_or_init(|| loaded)
            }
        };
        let description = plugin.ops.iter().find(|op| op.name == name).ok_or_else(|| {
            Error::new(
                ErrorKind::Plugin,
                format!(
                    "{}: plugins.lock lists host-op {name:?}, the plugin has none",
                    file.display()
                ),
            )
            .hint("run qhx plugins install with the file again")
        })?;
        let entry = OpEntry { description: description.clone(), source: entry.source.clone() };
        Ok((entry, plugin.module))
    }

    fn unknown(&self, name: &str) -> Error {
        let installed: Vec<_> = self.ops.keys().map(String::as_str).collect();
        let mut message = format!("host-op {name:?} is not installed");
        if installed.is_empty() {
            message.push_str("; no host-op is");
        } else {
            message.push_str(&format!("; installed: {}", installed.join(", ")));
        }
        for status in &self.files {
            if let PluginStatus::Failed(error) = status {
                message.push_str(&format!("; not usable: {error}"));
            }
        }
        let error = Error::new(ErrorKind::Plugin, message);
        if self.options.no_plugins {
            return error.hint("plugins are switched off with --no-plugins");
        }
        let searched: Vec<_> = self.searched.iter().map(|dir| dir.display().to_string()).collect();
        error.hint(format!(
            "install its plugin with qhx plugins install FILE, or give it with --plugin FILE; \
             searched: {}",
            if searched.is_empty() { "(no folder)".to_owned() } else { searched.join(", ") }
        ))
    }
}

/// Descriptions of the ops linked into the program.
pub(crate) fn builtin_ops() -> Result<Vec<OpDescription>> {
    describe(qhx_op::export::module()).map_err(|m| Error::new(ErrorKind::Internal, m))
}

/// A folder that the user named must be one.
pub(crate) fn check_named_dir(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Usage, format!("--plugin-dir {}: not a folder", dir.display())))
}

/// Why a folder that the user named is searched.
const NAMED: &str = "--plugin-dir";

pub(crate) fn named_place(dir: &Path) -> Place {
    Place { dir: dir.to_owned(), why: NAMED, by_name: false, installed_only: false }
}

pub(crate) fn not_installed(file: &Path) -> LoadError {
    LoadError::new(
        file,
        LoadErrorKind::NotInstalled,
        "not loaded: this folder loads installed plugins only, and plugins.lock does not list it; \
         run qhx plugins install with the file",
    )
}

fn log_details(error: &LoadError) {
    if let Some(details) = &error.details {
        tracing::debug!(file = %error.path.display(), "layout differences:\n{details}");
    }
}

impl OpProvider for Plugins {
    fn list(&self) -> Vec<OpEntry> {
        self.ops.values().map(|(entry, _)| entry.clone()).collect()
    }

    fn find(&self, name: &str) -> Result<OpEntry> {
        self.get(name).map(|(entry, _)| entry)
    }

    #[cfg(feature = "params-schema")]
    fn check_params(&self, entry: &OpEntry, manifest: &qhx_core::Manifest) -> Result<()> {
        params::check(&entry.description, manifest)
    }

    fn opener(&self, name: &str) -> Result<OpOpener> {
        let (entry, module) = self.get(name)?;
        Ok(Arc::new(move |services| Ok(Box::new(PluginOp::open(&entry, module, services)?))))
    }
}
