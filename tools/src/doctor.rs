//! Diagnosis of this machine: the parts that work, and why the rest does not.

use std::path::Path;

use qhx::Runtime;
use qhx::folders;
use qhx::hub;
use qhx::npu_files::{ANDROID, NpuFile};
use qhx::{cache, libraries, vars};
use qhx_base::Error;
use qhx_core::op::OpProvider as _;
use qhx_plugins::{PluginOptions, Plugins, survey};
use qhx_qnn::{Device, LogLevel, Platform, QnnBackend, QnnOptions};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::inspect::{Contents, TargetRun, inspect};

/// Health of a part of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Health {
    /// It works.
    Ok,
    /// It is not there, and not needed for the rest.
    Missing,
    /// It is there, and does not work.
    Broken,
}

/// A part of the machine that was looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// Name of the part.
    pub name: &'static str,
    /// Health of the part.
    pub health: Health,
    /// Result of the check.
    pub found: String,
    /// Advice on a fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// More about it, by name: texts, numbers, lists of texts.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub details: Map<String, Value>,
}

impl Check {
    fn new(name: &'static str, health: Health, found: impl Into<String>) -> Self {
        Self { name, health, found: found.into(), hint: None, details: Map::new() }
    }

    fn failed(name: &'static str, error: &Error) -> Self {
        Self {
            hint: error.hint_text().map(str::to_owned),
            ..Self::new(name, Health::Broken, error.message())
        }
    }

    fn detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.details.insert(key.to_owned(), value.into());
        self
    }
}

/// Results of all checks of a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Version of this crate.
    pub version: &'static str,
    /// Nothing is broken.
    pub healthy: bool,
    /// The checks.
    pub checks: Vec<Check>,
    /// Variables of [`vars::ALL`] that are set and not empty.
    pub environment: Map<String, Value>,
}

/// Looks at what a runtime would use: libraries, device, plugins, folders; with `bundle`, also which bundle of that
/// folder the device of this machine should take, or how one bundle runs on it. Opens libraries, and loads plugins.
///
/// ```no_run
/// for check in qhx_tools::doctor::diagnose(&qhx::Runtime::default(), None).checks {
///     println!("{}: {:?}, {}", check.name, check.health, check.found);
/// }
/// ```
pub fn diagnose(runtime: &Runtime, bundle: Option<&Path>) -> Diagnosis {
    let mut checks = vec![platform(), cpu(), qnn(runtime)];
    checks.extend(host_ops(runtime.plugin_options()));
    checks.push(cache_folder());
    checks.extend(bundle.map(|path| bundle_check(runtime, path)));
    let set = |variable: &vars::Variable| {
        let value = vars::get(variable.name)?;
        let secret = variable.name == vars::HF_TOKEN;
        let value = if secret { "(a secret)".into() } else { value.to_string_lossy().into() };
        Some((variable.name.to_owned(), value))
    };
    Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        healthy: checks.iter().all(|check| check.health != Health::Broken),
        checks,
        environment: vars::ALL.iter().filter_map(set).collect(),
    }
}

fn bundle_check(runtime: &Runtime, path: &Path) -> Check {
    const NAME: &str = "bundle";
    let arch = runtime.device_arch();
    let path = match hub::resolve_for(path, || arch) {
        Ok(path) => path,
        Err(e) => return Check::failed(NAME, &e),
    };
    let path = path.as_path();
    let device = match arch {
        Some(arch) => format!("this v{arch} device"),
        None if Platform::is_emulated() => "the emulator, which runs all of them".to_owned(),
        None => "a device that is not known".to_owned(),
    };
    let targets = folders::targets(path);
    let taken = match folders::choose(&targets, arch) {
        _ if targets.is_empty() => path.to_owned(),
        Ok(taken) => taken.path.clone(),
        Err(e) => return Check::failed(NAME, &e),
    };
    let contents = match inspect(runtime, &taken) {
        Ok(Contents::Bundle(contents)) => contents,
        Ok(_) => {
            return Check::new(NAME, Health::Broken, format!("{}: no bundle", path.display()));
        }
        Err(e) => return Check::failed(NAME, &e),
    };
    let made = contents.dsp_arch.map_or_else(|| "the CPU".to_owned(), |arch| format!("v{arch}"));
    let found = format!("{}, made for {made}, is what {device} takes", taken.display());
    let run = contents
        .targets
        .into_iter()
        .find(|run| Some(&run.target) == arch.map(|a| format!("v{a}")).as_ref());
    match run {
        Some(TargetRun { runs: "refused", reason, hint, .. }) => Check {
            hint,
            ..Check::new(
                NAME,
                Health::Broken,
                format!("{}: {}", taken.display(), reason.unwrap_or_default()),
            )
        },
        Some(TargetRun { runs, reason, hint, .. }) if runs != "optimal" => {
            let check =
                Check::new(NAME, Health::Ok, format!("{found}: {}", reason.unwrap_or_default()));
            Check { hint, ..check }
        }
        _ => Check::new(NAME, Health::Ok, found),
    }
}

fn platform() -> Check {
    let found = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let builtin = qhx::builtin::FAMILIES.join(", ");
    Check::new("platform", Health::Ok, found).detail("cores", cores).detail("builtin_ops", builtin)
}

fn cpu() -> Check {
    match qhx::backends::cpu(None) {
        Ok(backend) => Check::new("cpu backend", Health::Ok, backend.info().version),
        Err(e) => Check::failed("cpu backend", &e),
    }
}

fn qnn(runtime: &Runtime) -> Check {
    const NAME: &str = "qnn backend";
    let libraries = match runtime.libraries().find() {
        Ok(Some(libraries)) => libraries,
        Ok(None) => {
            let mut check =
                Check::new(NAME, Health::Missing, "no libraries are given or installed");
            if cfg!(target_os = "android") {
                let files = NpuFile::all(ANDROID, None);
                let missing =
                    files.iter().map(|file| Value::from(file.to_string())).collect::<Vec<_>>();
                check = check.detail("missing", missing);
            }
            return Check { hint: Some(libraries::how_to_get().to_owned()), ..check };
        }
        Err(e) => return Check::failed(NAME, &e),
    };
    let library = match libraries.open() {
        Ok(library) => library,
        Err(e) => return Check::failed(NAME, &e),
    };
    let details = |check: Check| {
        check
            .detail("htp", libraries.htp.display().to_string())
            .detail("system", libraries.system.display().to_string())
            .detail("build", library.build_id())
            .detail("core_api", library.core_version().to_string())
            .detail("htp_api", library.backend_version().to_string())
            .detail("system_api", library.system().version().to_string())
    };
    // The log of this level says what the chip is called, also where opening fails.
    let options = QnnOptions {
        log: LogLevel::Verbose,
        memory: runtime.device().memory,
        cdsprpc: runtime.device().cdsprpc.clone(),
        ..QnnOptions::default()
    };
    let backend = QnnBackend::with_library(&library, options);
    let chip = Device::soc_name();
    let backend = match backend {
        Ok(backend) => backend,
        Err(e) => return details(Check::failed(NAME, &e)).detail("chip", chip),
    };
    let qairt = library.core_version().qairt().unwrap_or("of unknown release");
    let check = Check::new(NAME, Health::Ok, format!("QAIRT {qairt}, {}", libraries.source));
    let check = details(check).detail("memory", backend.memory());
    let platform = backend.platform();
    if platform.emulated {
        return check.detail("device", "emulator of every architecture");
    }
    let arch = platform.arch.map_or_else(|| "unknown".to_owned(), |arch| format!("v{arch}"));
    check.detail("device", arch).detail("soc", platform.soc).detail("chip", chip)
}

fn host_ops(plugins: &PluginOptions) -> Vec<Check> {
    const NAME: &str = "host-ops";
    let found = match Plugins::discover(plugins) {
        Ok(found) => found,
        Err(e) => return vec![Check::failed(NAME, &e)],
    };
    let names: Vec<_> = found.list().into_iter().map(|entry| entry.description.name).collect();
    let mut checks = vec![if names.is_empty() {
        Check {
            hint: Some(format!(
                "put plugins beside the program or into a folder of {}, or build with the feature \
                 builtin-ops",
                vars::PLUGIN_PATH
            )),
            ..Check::new(NAME, Health::Broken, "none is installed")
        }
    } else {
        Check::new(NAME, Health::Ok, names.join(", "))
    }];
    let files = match survey(plugins) {
        Ok(files) => files,
        Err(e) => return vec![Check::failed(NAME, &e)],
    };
    for file in files {
        let path = file.path.display().to_string();
        let check = match file.reason {
            Some(reason) => Check::new("plugin", Health::Broken, format!("{path}: {reason}")),
            None => Check::new("plugin", Health::Ok, path),
        };
        let check = check.detail("status", file.status.name());
        checks.push(match file.interface {
            Some(interface) => {
                check.detail("interface", interface).detail("ops", file.ops.join(", "))
            }
            None => check,
        });
    }
    checks
}

fn cache_folder() -> Check {
    const NAME: &str = "cache folder";
    let dir = match cache::dir() {
        Ok(dir) => dir,
        Err(e) => return Check::failed(NAME, &e),
    };
    // The nearest folder that exists is the one in which the others would be made.
    let existing = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    match tempfile::tempfile_in(existing) {
        Ok(_) => Check::new(NAME, Health::Ok, dir.display().to_string()),
        Err(e) => Check {
            hint: Some(format!("set {} to a folder that qhx may write to", vars::CACHE_DIR)),
            ..Check::new(NAME, Health::Broken, format!("{}: {e}", dir.display()))
        },
    }
}
