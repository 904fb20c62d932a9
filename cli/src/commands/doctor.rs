//! `qhx doctor`: what works on this machine, and why the rest does not.

use std::path::PathBuf;

use clap::Args;
use qhx::vars::{self, Variable};
use qhx::{DeviceOptions, Runtime};
use qhx_base::Result;
use qhx_tools::doctor::{Diagnosis, Health, diagnose};
use serde_json::Value;

use crate::Status;
use crate::app::App;
use crate::args::{LibraryArgs, MemoryArgs};
use crate::output::Report;

/// Check this machine: libraries, plugins, folders
///
/// A check is `ok`, `missing` (not there, and not needed for the rest) or `broken` (there, and
/// does not work). Exit code 1 when one is broken.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// A bundle, or a folder with bundles for several architectures: says which one this device takes, and how it runs
    #[arg(value_name = "BUNDLE")]
    pub bundle: Option<PathBuf>,
    /// Hexagon architecture of the device, where that of the library is not to be taken
    #[arg(long, value_name = "ARCH", value_parser = crate::args::parse_arch)]
    pub device_arch: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs, app: &mut App) -> Result<Status> {
    let device = DeviceOptions::default().memory(args.memory.memory).arch(args.device_arch);
    let device = device.cdsprpc(args.memory.cdsprpc.clone());
    let runtime = Runtime::builder().libraries(args.libraries.files()).device(device);
    let runtime = runtime.plugins(app.plugin_options()).build();
    let found = diagnose(&runtime, args.bundle.as_deref());
    if args.json {
        app.output.json_pretty(&found)?;
    } else {
        app.output.report(&text(&found))?;
    }
    Ok(if found.healthy { Status::Done } else { Status::Found })
}

fn text(found: &Diagnosis) -> Report {
    let mut text = Report::default();
    text.line(format_args!("qhx {}", found.version));
    for check in &found.checks {
        let health = match check.health {
            Health::Ok => "ok     ",
            Health::Missing => "missing",
            _ => "BROKEN ",
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
        match found.environment.get(name).and_then(Value::as_str) {
            Some(value) => text.line(format_args!("env     {name}={value}")),
            None => text.line(format_args!("env     {name} is not set ({what})")),
        }
    }
    text
}
