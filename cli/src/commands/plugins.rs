//! `qhx plugins`: host-ops and where they come from.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use qhx_core::Result;
use qhx_core::op::{OpProvider as _, OpSource};
use qhx_plugins::{PluginStatus, Plugins, interface_version};
use serde::Serialize;

use crate::app::{App, Status};

/// Host-ops and the plugins they come from
#[derive(Debug, Args)]
pub(crate) struct PluginsArgs {
    #[command(subcommand)]
    command: PluginsCommand,
}

#[derive(Debug, Subcommand)]
enum PluginsCommand {
    /// List every host-op, and what became of every plugin file found
    ///
    /// Searched, in this order: --plugin, --plugin-dir, what is linked in, QHX_PLUGIN_PATH, the
    /// user's data folder, and the program's folder. Status of a file: `loaded`; `shadowed`, its
    /// host-ops come from an earlier one; `missing`, `not_a_library`, `not_a_plugin`,
    /// `incompatible` or `misbehaved`, it is not used.
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

impl PluginsArgs {
    pub(crate) fn wants_json(&self) -> bool {
        let PluginsCommand::List { json } = &self.command;
        *json
    }
}

/// What is known of a plugin file.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct FileReport {
    pub file: PathBuf,
    pub status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    pub ops: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shadowed: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Debug, Serialize)]
struct OpReport {
    name: String,
    version: String,
    summary: String,
    from: String,
}

#[derive(Debug, Serialize)]
struct Report {
    interface: &'static str,
    ops: Vec<OpReport>,
    files: Vec<FileReport>,
}

/// What became of every plugin file.
pub(crate) fn files(plugins: &Plugins) -> Vec<FileReport> {
    plugins.files().iter().map(file).collect()
}

fn file(status: &PluginStatus) -> FileReport {
    match status {
        PluginStatus::Loaded { plugin, shadowed } => {
            let ops: Vec<_> = plugin.ops.iter().map(|op| op.name.clone()).collect();
            let useless = !shadowed.is_empty() && shadowed.len() == ops.len();
            FileReport {
                file: plugin.path.clone(),
                status: if useless { "shadowed" } else { "loaded" }.to_owned(),
                interface: Some(plugin.interface.clone()),
                ops,
                shadowed: shadowed.clone(),
                message: None,
            }
        }
        PluginStatus::Failed(error) => {
            let kind = serde_json::to_value(error.kind).unwrap_or_default();
            FileReport {
                file: error.path.clone(),
                status: kind.as_str().unwrap_or("failed").to_owned(),
                interface: None,
                ops: Vec::new(),
                shadowed: Vec::new(),
                message: Some(error.message.clone()),
            }
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &PluginsArgs, app: &mut App) -> Result<Status> {
    let PluginsCommand::List { json } = args.command;
    let plugins = app.plugins()?;
    let ops = plugins.list().into_iter().map(|entry| OpReport {
        name: entry.description.name,
        version: entry.description.version,
        summary: entry.description.summary,
        from: match entry.source {
            OpSource::Builtin => "builtin".to_owned(),
            OpSource::Plugin(path) => path.display().to_string(),
        },
    });
    let report =
        Report { interface: interface_version(), ops: ops.collect(), files: files(&plugins) };
    if json {
        app.output.json_pretty(&report)?;
        return Ok(Status::Done);
    }
    for op in &report.ops {
        app.output.line(&format!("{} {}  {}", op.name, op.version, op.from))?;
        if !op.summary.is_empty() {
            app.output.line(&format!("    {}", op.summary))?;
        }
    }
    if report.ops.is_empty() {
        eprintln!("no host-op is installed");
    }
    for file in report.files.iter().filter(|file| file.status != "loaded") {
        let message = match &file.message {
            Some(message) => message.clone(),
            None => format!("{} come from an earlier one", file.shadowed.join(", ")),
        };
        app.output.line(&format!("{}: {}: {message}", file.status, file.file.display()))?;
    }
    Ok(Status::Done)
}
