//! Diagnosis of this machine: the parts that work, and why the rest does not.

use std::path::Path;

use qhx::Runtime;
use qhx::folders;
use qhx::hub;
use qhx::npu_files::{ANDROID, NpuFile};
use qhx::{cache, libraries, vars};
use qhx_base::{Error, Result};
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
        let hint = error.hint_text().map(str::to_owned);
        Self::new(name, Health::Broken, error.message()).hint(hint)
    }

    /// A check whose failure is what was found.
    fn of(name: &'static str, check: impl FnOnce(&'static str) -> Result<Self>) -> Self {
        check(name).unwrap_or_else(|error| Self::failed(name, &error))
    }

    fn hint(self, hint: impl Into<Option<String>>) -> Self {
        Self { hint: hint.into(), ..self }
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
    const OPS: &str = "host-ops";
    let cpu_version =
        |name| Ok(Check::new(name, Health::Ok, qhx::backends::cpu(None)?.info().version));
    let mut checks = vec![
        platform(),
        Check::of("cpu backend", cpu_version),
        Check::of("qnn backend", |name| qnn(name, runtime)),
    ];
    let ops = host_ops(OPS, runtime.plugin_options());
    checks.extend(ops.unwrap_or_else(|error| vec![Check::failed(OPS, &error)]));
    checks.push(Check::of("cache folder", cache_folder));
    let bundle = bundle.map(|path| Check::of("bundle", |name| bundle_check(name, runtime, path)));
    checks.extend(bundle);
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

fn bundle_check(name: &'static str, runtime: &Runtime, path: &Path) -> Result<Check> {
    let arch = runtime.device_arch();
    let path = hub::resolve_for(path, || arch)?;
    let device = match arch {
        Some(arch) => format!("this v{arch} device"),
        None if Platform::is_emulated() => "the emulator, which runs all of them".to_owned(),
        None => "a device that is not known".to_owned(),
    };
    let targets = folders::targets(&path);
    let taken = match targets.is_empty() {
        true => &path,
        false => &folders::choose(&targets, arch)?.path,
    };
    let Contents::Bundle(contents) = inspect(runtime, taken)? else {
        let found = format!("{}: no bundle", path.display());
        return Ok(Check::new(name, Health::Broken, found));
    };
    let made = contents.dsp_arch.map_or_else(|| "the CPU".to_owned(), |arch| format!("v{arch}"));
    let found = format!("{}, made for {made}, is what {device} takes", taken.display());
    let target = arch.map(|arch| format!("v{arch}"));
    let run = contents.targets.into_iter().find(|run| Some(&run.target) == target.as_ref());
    let Some(TargetRun { runs, reason, hint, .. }) = run.filter(|run| run.runs != "optimal") else {
        return Ok(Check::new(name, Health::Ok, found));
    };
    let reason = reason.unwrap_or_default();
    let check = match runs {
        "refused" => Check::new(name, Health::Broken, format!("{}: {reason}", taken.display())),
        _ => Check::new(name, Health::Ok, format!("{found}: {reason}")),
    };
    Ok(check.hint(hint))
}

fn platform() -> Check {
    let found = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let builtin = qhx::builtin::FAMILIES.join(", ");
    Check::new("platform", Health::Ok, found).detail("cores", cores).detail("builtin_ops", builtin)
}

fn qnn(name: &'static str, runtime: &Runtime) -> Result<Check> {
    let Some(libraries) = runtime.libraries().find()? else {
        let mut check = Check::new(name, Health::Missing, "no libraries are given or installed");
        if cfg!(target_os = "android") {
            let files = NpuFile::all(ANDROID, None);
            let missing = files.iter().map(|file| Value::from(file.to_string()));
            check = check.detail("missing", missing.collect::<Vec<_>>());
        }
        return Ok(check.hint(libraries::how_to_get().to_owned()));
    };
    let library = libraries.open()?;
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
        Err(e) => return Ok(details(Check::failed(name, &e)).detail("chip", chip)),
    };
    let qairt = library.core_version().qairt().unwrap_or("of unknown release");
    let check = Check::new(name, Health::Ok, format!("QAIRT {qairt}, {}", libraries.source));
    let check = details(check).detail("memory", backend.memory());
    let platform = backend.platform();
    if platform.emulated {
        return Ok(check.detail("device", "emulator of every architecture"));
    }
    let arch = platform.arch.map_or_else(|| "unknown".to_owned(), |arch| format!("v{arch}"));
    Ok(check.detail("device", arch).detail("soc", platform.soc).detail("chip", chip))
}

fn host_ops(name: &'static str, plugins: &PluginOptions) -> Result<Vec<Check>> {
    let found = Plugins::discover(plugins)?;
    let names: Vec<_> = found.list().into_iter().map(|entry| entry.description.name).collect();
    let mut checks = vec![if names.is_empty() {
        Check::new(name, Health::Broken, "none is installed").hint(format!(
            "put plugins beside the program or into a folder of {}, or build with the feature builtin-ops",
            vars::PLUGIN_PATH
        ))
    } else {
        Check::new(name, Health::Ok, names.join(", "))
    }];
    for file in survey(plugins)? {
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
    Ok(checks)
}

fn cache_folder(name: &'static str) -> Result<Check> {
    let dir = cache::dir()?;
    // The nearest folder that exists is the one in which the others would be made.
    let existing = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    Ok(match tempfile::tempfile_in(existing) {
        Ok(_) => Check::new(name, Health::Ok, dir.display().to_string()),
        Err(e) => Check::new(name, Health::Broken, format!("{}: {e}", dir.display()))
            .hint(format!("set {} to a folder that qhx may write to", vars::CACHE_DIR)),
    })
}
