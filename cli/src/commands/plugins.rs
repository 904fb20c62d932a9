//! `qhx plugins`: what is installed, where it comes from, installing and removing.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use qhx_core::Result;
use qhx_core::op::{OpProvider as _, OpSource};
use qhx_plugins::store::{Health, Store};
use qhx_plugins::{Listed, PluginOptions, Plugins, interface_version, survey};
use serde::Serialize;

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

#[derive(Debug, Serialize)]
struct ListReport {
    interface: &'static str,
    /// Host-ops that can be used, as far as is known without loading.
    ops: Vec<OpRow>,
    files: Vec<Listed>,
}

#[derive(Debug, Serialize)]
struct OpRow {
    name: String,
    from: String,
}

/// Every plugin file, as `qhx plugins list` and `qhx doctor` show it.
pub(crate) fn files(options: &PluginOptions) -> Result<Vec<Listed>> {
    survey(options)
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
    let options = app.plugin_options();
    let builtin =
        Plugins::discover(&PluginOptions { no_plugins: true, ..PluginOptions::default() })?;
    let mut ops: Vec<_> = builtin
        .list()
        .into_iter()
        .map(|entry| OpRow { name: entry.description.name, from: "builtin".to_owned() })
        .collect();
    let files = files(&options)?;
    for row in files.iter().filter(|row| row.status.is_usable()) {
        let own = row.ops.iter().filter(|op| !row.shadowed.contains(op));
        ops.retain(|op| !row.ops.contains(&op.name) || row.shadowed.contains(&op.name));
        ops.extend(own.map(|op| OpRow { name: op.clone(), from: row.path.display().to_string() }));
    }
    ops.sort_by(|a, b| a.name.cmp(&b.name));
    let report = ListReport { interface: interface_version(), ops, files };
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
        if let Some(note) = rivals(&op.name, &installed.path, app)? {
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

/// Where else a host-op of a plugin that was just installed comes from, and which of them is used.
fn rivals(op: &str, installed: &Path, app: &App) -> Result<Option<String>> {
    let mut options = app.plugin_options();
    // Those of this call alone decide nothing for later ones.
    options.files.clear();
    options.dirs.clear();
    let with: Vec<_> =
        files(&options)?.into_iter().filter(|row| row.ops.iter().any(|o| o == op)).collect();
    let used = with.iter().find(|row| !row.shadowed.iter().any(|o| o == op)).map(|row| &row.path);
    let used = match used {
        Some(path) if path == installed => {
            let others = with.iter().filter(|row| row.path != installed && row.status.is_usable());
            let others: Vec<_> = others.map(|row| row.path.display().to_string()).collect();
            let note = format!(
                "host-op {op} comes from this plugin now, and no longer from {}; qhx plugins list \
                 shows the order",
                others.join(", ")
            );
            return Ok((!others.is_empty()).then_some(note));
        }
        Some(path) => path.display().to_string(),
        None => "the program, in which it is linked".to_owned(),
    };
    Ok(Some(format!(
        "host-op {op} still comes from {used}, which is searched before this plugin; qhx plugins \
         list shows the order"
    )))
}

#[derive(Debug, Serialize)]
struct InfoReport {
    #[serde(flatten)]
    op: qhx_core::op::OpDescription,
    source: OpSource,
}

fn info(name: &str, json: bool, app: &mut App) -> Result<Status> {
    let plugins = app.plugins()?;
    let by_file = |entry: &qhx_core::op::OpEntry| match &entry.source {
        OpSource::Plugin(path) => path.file_name().is_some_and(|file| file == name),
        OpSource::Builtin => false,
    };
    let mut names: Vec<_> = plugins
        .list()
        .iter()
        .filter(|entry| by_file(entry))
        .map(|entry| entry.description.name.clone())
        .collect();
    if names.is_empty() {
        names.push(name.to_owned());
    }
    let ops = names
        .iter()
        .map(|name| {
            let entry = plugins.find(name)?;
            Ok(InfoReport { op: entry.description, source: entry.source })
        })
        .collect::<Result<Vec<_>>>()?;
    if json {
        app.output.json_pretty(&ops)?;
        return Ok(Status::Done);
    }
    for InfoReport { op, source } in &ops {
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
    let fine = verified.iter().all(|plugin| plugin.health == Health::Ok);
    Ok(if fine { Status::Done } else { Status::Found })
}
