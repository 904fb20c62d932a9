//! `qhx doctor`: what works on this machine, and why the rest does not.

use std::path::Path;

use clap::Args;
use qhx::{cache, libraries};
use qhx_core::Result;
use qhx_core::op::OpProvider as _;
use qhx_core::qnn::{Device, LogLevel, QnnBackend, QnnOptions};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::plugins;
use crate::Status;
use crate::app::App;
use crate::args::{LibraryArgs, MemoryArgs};
use crate::output::Report;
use crate::vars::{self, Variable};
use qhx::npu_files::{ANDROID, NpuFile};

/// Check this machine: libraries, plugins, folders
///
/// A check is `ok`, `missing` (not there, and not needed for the rest) or `broken` (there, and
/// does not work). Exit code 1 when one is broken.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Health {
    Ok,
    Missing,
    Broken,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    health: Health,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    details: Map<String, Value>,
}

impl Check {
    fn new(name: &'static str, health: Health, found: impl Into<String>) -> Self {
        Self { name, health, found: found.into(), hint: None, details: Map::new() }
    }

    fn failed(name: &'static str, error: &qhx_core::Error) -> Self {
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

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs, app: &mut App) -> Result<Status> {
    let mut checks = vec![platform(), cpu(), qnn(&args.libraries, &args.memory)];
    checks.extend(host_ops(app));
    checks.push(cache_folder());
    let variables: Map<String, Value> = vars::ALL
        .iter()
        .filter_map(|variable| {
            let value = vars::get(variable.name)?.to_string_lossy().into();
            Some((variable.name.to_owned(), value))
        })
        .collect();
    let healthy = checks.iter().all(|check| check.health != Health::Broken);
    if args.json {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "healthy": healthy,
            "checks": checks,
            "environment": variables,
        });
        app.output.json_pretty(&report)?;
    } else {
        app.output.report(&text(&checks, &variables))?;
    }
    Ok(if healthy { Status::Done } else { Status::Found })
}

fn text(checks: &[Check], variables: &Map<String, Value>) -> Report {
    let mut text = Report::default();
    text.line(format_args!("qhx {}", env!("CARGO_PKG_VERSION")));
    for check in checks {
        let health = match check.health {
            Health::Ok => "ok     ",
            Health::Missing => "missing",
            Health::Broken => "BROKEN ",
        };
        text.line(format_args!("{health} {:12} {}", check.name, check.found));
        let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
        for (key, value) in &check.details {
            // A list has a line for each of its entries.
            for value in value.as_array().unwrap_or(&vec![value.clone()]) {
                text.line(format_args!("{:21}{key}: {}", "", plain(value)));
            }
        }
        if let Some(hint) = &check.hint {
            text.line(format_args!("{:21}hint: {hint}", ""));
        }
    }
    for Variable { name, what, .. } in vars::ALL {
        match variables.get(name).and_then(Value::as_str) {
            Some(value) => text.line(format_args!("env     {name}={value}")),
            None => text.line(format_args!("env     {name} is not set ({what})")),
        }
    }
    text
}

fn platform() -> Check {
    let found = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let builtin = cfg!(feature = "builtin-ops");
    Check::new("platform", Health::Ok, found).detail("cores", cores).detail("builtin_ops", builtin)
}

fn cpu() -> Check {
    match qhx::backends::cpu(None) {
        Ok(backend) => Check::new("cpu backend", Health::Ok, backend.info().version),
        Err(e) => Check::failed("cpu backend", &e),
    }
}

fn qnn(args: &LibraryArgs, memory: &MemoryArgs) -> Check {
    const NAME: &str = "qnn backend";
    let libraries = match args.files().find() {
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
        memory: memory.memory,
        cdsprpc: memory.cdsprpc.clone(),
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

fn host_ops(app: &App) -> Vec<Check> {
    const NAME: &str = "host-ops";
    let found = match app.plugins() {
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
    let files = match plugins::files(&app.plugin_options()) {
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
