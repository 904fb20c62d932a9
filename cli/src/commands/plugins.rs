//! `qhx plugins`: what is installed, where it comes from, installing and removing.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use qhx::plugins::DescribedOp;
use qhx_base::Result;
use qhx_core::op::OpSource;
use qhx_plugins::Listed;
use qhx_plugins::store::{PluginHealth, Store};

use crate::Status;
use crate::app::App;
use crate::output::Report;

/// Host-ops and the plugins they come from
#[derive(Debug, Args)]
pub(crate) struct PluginsArgs {
    #[command(subcommand)]
    command: PluginsCommand,
}

#[derive(Debug, Subcommand)]
enum PluginsCommand {
    /// List every plugin file found, without running any plugin's code
    ///
    /// Searched, in this order: --plugin, --plugin-dir, what is linked in, QHX_PLUGIN_PATH, the
    /// user's data folder, and the program's folder. What each status means and what to do about
    /// it stands in docs/plugins.md.
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Copy a plugin into the user's folder, try it in a child process, and record its hash
    Install {
        /// The plugin: a dynamic library
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a host-op, or the host-ops of a plugin, with the JSON Schema of its parameters
    ///
    /// Loads the plugin.
    Info {
        /// Name of a host-op, or file name of a plugin
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Hash every installed plugin and compare
    Verify {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove an installed plugin
    Remove {
        /// File name of the plugin, with or without prefix and extension, or one of its host-ops
        name: String,
    },
}

impl PluginsArgs {
    pub(crate) fn wants_json(&self) -> bool {
        match &self.command {
            PluginsCommand::List { json }
            | PluginsCommand::Install { json, .. }
            | PluginsCommand::Info { json, .. }
            | PluginsCommand::Verify { json } => *json,
            PluginsCommand::Remove { .. } => false,
        }
    }
}

/// Adds a file to a list.
fn show(row: &Listed, list: &mut Report) {
    let mut line = format!("{}: {}", row.status.name(), row.path.display());
    if !row.ops.is_empty() {
        line.push_str(&format!("  {}", row.ops.join(", ")));
    }
    if let Some(interface) = &row.interface {
        line.push_str(&format!("  (interface {interface})"));
    }
    list.line(format_args!("{line}"));
    match &row.reason {
        Some(reason) => list.line(format_args!("    {reason}")),
        None if !row.shadowed.is_empty() => {
            list.line(format_args!("    from an earlier one: {}", row.shadowed.join(", ")));
        }
        None => {}
    }
}

/// Runs the command.
pub(crate) fn run(args: &PluginsArgs, app: &mut App) -> Result<Status> {
    match &args.command {
        PluginsCommand::List { json } => list(*json, app),
        PluginsCommand::Install { file, json } => install(file, *json, app),
        PluginsCommand::Info { name, json } => info(name, *json, app),
        PluginsCommand::Verify { json } => verify(*json, app),
        PluginsCommand::Remove { name } => {
            let removed = store(app)?.remove(name)?;
            app.output.line(&format!("removed {}", removed.file))?;
            Ok(Status::Done)
        }
    }
}

fn store(app: &App) -> Result<Store> {
    Ok(Store::for_user()?.allow_untrusted(app.global.allow_untrusted_plugins))
}

fn list(json: bool, app: &mut App) -> Result<Status> {
    let report = qhx::plugins::list(&app.plugin_options())?;
    if json {
        app.output.json_pretty(&report)?;
        return Ok(Status::Done);
    }
    let mut lines = Report::default();
    for op in report.ops.iter().filter(|op| op.from == "builtin") {
        lines.line(format_args!("linked in: {}", op.name));
    }
    for row in &report.files {
        show(row, &mut lines);
    }
    app.output.report(&lines)?;
    if report.ops.is_empty() && report.files.is_empty() {
        say!("no plugin is installed; install one with qhx plugins install FILE");
    }
    Ok(Status::Done)
}

fn install(file: &Path, json: bool, app: &mut App) -> Result<Status> {
    let prober = app.plugin_options().prober;
    let installed = store(app)?.install(file, prober.as_ref())?;
    for op in &installed.plugin.ops {
        if let Some(note) = qhx::plugins::rivals(&op.name, &installed.path, &app.plugin_options())?
        {
            say!("note: {note}");
        }
    }
    if json {
        app.output.json_pretty(&installed)?;
        return Ok(Status::Done);
    }
    let ops: Vec<_> = installed.plugin.ops.iter().map(|op| op.name.as_str()).collect();
    app.output.line(&format!(
        "{} {}: {} (interface {}, sha256 {})",
        if installed.replaced { "replaced" } else { "installed" },
        installed.path.display(),
        ops.join(", "),
        installed.plugin.interface,
        installed.plugin.sha256,
    ))?;
    Ok(Status::Done)
}

fn info(name: &str, json: bool, app: &mut App) -> Result<Status> {
    let ops = qhx::plugins::describe(&app.plugins()?, name)?;
    if json {
        app.output.json_pretty(&ops)?;
        return Ok(Status::Done);
    }
    for DescribedOp { op, source, .. } in &ops {
        app.output.line(&format!("{} {}", op.name, op.version))?;
        app.output.line(&format!("    {}", op.summary))?;
        let from = match source {
            OpSource::Builtin => "linked in".to_owned(),
            OpSource::Plugin(path) => path.display().to_string(),
        };
        app.output.line(&format!("    from: {from}"))?;
        let tasks: Vec<_> = op.tasks.iter().map(|task| task.name()).collect();
        let segments: Vec<_> = op.modalities.iter().map(|modality| modality.name()).collect();
        let (tasks, segments) = (tasks.join(", "), segments.join(", "));
        app.output.line(&format!("    tasks: {tasks}; segments: {segments}"))?;
        for line in format!("    plan.params: {:#}", op.params_schema).lines() {
            app.output.line(line)?;
        }
    }
    Ok(Status::Done)
}

fn verify(json: bool, app: &mut App) -> Result<Status> {
    let verified = store(app)?.verify()?;
    if json {
        app.output.json_pretty(&verified)?;
    } else {
        for plugin in &verified {
            let (health, path) = (plugin.health.name(), plugin.path.display());
            app.output.line(&format!("{health}: {path}"))?;
            if let Some(reason) = &plugin.reason {
                app.output.line(&format!("    {reason}"))?;
            }
        }
        if verified.is_empty() {
            say!("no plugin is installed");
        }
    }
    let fine = verified.iter().all(|plugin| plugin.health == PluginHealth::Ok);
    Ok(if fine { Status::Done } else { Status::Found })
}
