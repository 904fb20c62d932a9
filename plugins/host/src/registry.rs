//! All ops that can be opened, by name.

use std::collections::BTreeMap;
use std::path::PathBuf;

use qhx_core::op::{HostOp, OpEntry, OpProvider, OpServices, OpSource};
use qhx_core::{Error, ErrorKind, Result};
use qhx_op::abi::OpModuleRef;

use crate::adapter::PluginOp;
use crate::load::{LoadError, Plugin, describe};
use crate::search::{Place, PluginOptions, default_places, files_in};

/// What became of a plugin file.
#[derive(Debug, Clone)]
pub enum PluginStatus {
    /// Loaded. `shadowed` are those of its ops that an earlier one has taken.
    Loaded {
        /// The plugin.
        plugin: Plugin,
        /// Names of ops that come from somewhere else.
        shadowed: Vec<String>,
    },
    /// Not usable.
    Failed(LoadError),
}

/// The ops linked into the program and those of all plugins found.
pub struct Plugins {
    ops: BTreeMap<String, (OpEntry, OpModuleRef)>,
    files: Vec<PluginStatus>,
    searched: Vec<PathBuf>,
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
    /// Finds and loads plugins. A file named explicitly must load; one that is found and does not
    /// load is remembered with the reason.
    pub fn discover(options: &PluginOptions) -> Result<Self> {
        let mut plugins =
            Self { ops: BTreeMap::new(), files: Vec::new(), searched: options.dirs.clone() };
        for file in &options.files {
            let plugin = Plugin::load(file).map_err(|e| {
                log_details(&e);
                Error::new(ErrorKind::Plugin, e.to_string())
            })?;
            plugins.add(plugin);
        }
        for dir in &options.dirs {
            if !dir.is_dir() {
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!("--plugin-dir {}: not a folder", dir.display()),
                ));
            }
            plugins.search(&Place { dir: dir.clone(), why: "--plugin-dir", by_name: false });
        }
        plugins.add_builtin()?;
        if !options.only_named {
            for place in default_places() {
                plugins.search(&place);
                plugins.searched.push(place.dir);
            }
        }
        Ok(plugins)
    }

    fn search(&mut self, place: &Place) {
        for file in files_in(place) {
            let known = |status: &PluginStatus| match status {
                PluginStatus::Loaded { plugin, .. } => {
                    file.canonicalize().is_ok_and(|real| real == plugin.path)
                }
                PluginStatus::Failed(error) => error.path == file,
            };
            if self.files.iter().any(known) {
                continue;
            }
            tracing::debug!(file = %file.display(), why = place.why, "loading plugin");
            match Plugin::load(&file) {
                Ok(plugin) => self.add(plugin),
                Err(error) => {
                    log_details(&error);
                    self.files.push(PluginStatus::Failed(error));
                }
            }
        }
    }

    fn add(&mut self, plugin: Plugin) {
        let source = OpSource::Plugin(plugin.path.clone());
        let shadowed = self.register(&plugin.ops, &source, plugin.module);
        self.files.push(PluginStatus::Loaded { plugin, shadowed });
    }

    fn add_builtin(&mut self) -> Result<()> {
        let module = qhx_op::export::module();
        let ops = describe(module).map_err(|m| Error::new(ErrorKind::Internal, m))?;
        self.register(&ops, &OpSource::Builtin, module);
        Ok(())
    }

    fn register(
        &mut self,
        ops: &[qhx_core::op::OpDescription],
        source: &OpSource,
        module: OpModuleRef,
    ) -> Vec<String> {
        let mut shadowed = Vec::new();
        for description in ops {
            if self.ops.contains_key(&description.name) {
                shadowed.push(description.name.clone());
                continue;
            }
            let entry = OpEntry { description: description.clone(), source: source.clone() };
            self.ops.insert(description.name.clone(), (entry, module));
        }
        shadowed
    }

    /// What became of every plugin file that was considered, in search order.
    pub fn files(&self) -> &[PluginStatus] {
        &self.files
    }

    fn get(&self, name: &str) -> Result<&(OpEntry, OpModuleRef)> {
        self.ops.get(name).ok_or_else(|| {
            let installed: Vec<_> = self.ops.keys().map(String::as_str).collect();
            let mut message = format!("host-op {name:?} is not installed");
            if installed.is_empty() {
                message.push_str("; no host-op is");
            } else {
                message.push_str(&format!("; installed: {}", installed.join(", ")));
            }
            for status in &self.files {
                if let PluginStatus::Failed(error) = status {
                    message.push_str(&format!("\n  not usable: {error}"));
                }
            }
            let searched: Vec<_> =
                self.searched.iter().map(|dir| dir.display().to_string()).collect();
            Error::new(ErrorKind::Plugin, message).hint(format!(
                "give its plugin with --plugin FILE, or put it into one of: {}",
                if searched.is_empty() { "(no folder)".to_owned() } else { searched.join(", ") }
            ))
        })
    }
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
        self.get(name).map(|(entry, _)| entry.clone())
    }

    fn open(&self, name: &str, services: OpServices) -> Result<Box<dyn HostOp>> {
        let (entry, module) = self.get(name)?;
        Ok(Box::new(PluginOp::open(name, &entry.source, *module, services)?))
    }
}
