//! `qhx ps`: the models that a server has loaded.

use clap::Args;
use qhx_base::Result;
use qhx_tools::running::{Running, running};

use crate::Status;
use crate::app::App;
use crate::commands::inspect::size;
use crate::output::Report;

/// List the models that a server has in memory
///
/// Asks a qhx serve of this machine, or another server with Ollama's interface.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Address of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &PsArgs, app: &mut App) -> Result<Status> {
    let found = running(&args.server, app.interrupts.token())?;
    if args.json {
        app.output.json_pretty(&found)?;
        return Ok(Status::Done);
    }
    let width = found.iter().map(|model| model.name.len()).max().unwrap_or(0);
    let mut lines = Report::default();
    for Running { name, bytes, until, .. } in &found {
        // A model that stays has a time that nobody reaches.
        let until = until.as_deref().filter(|until| *until < "2200");
        let until = until.map(|until| format!("  until {until}")).unwrap_or_default();
        lines.line(format_args!("{name:width$}  {:>10}{until}", size(*bytes)));
    }
    app.output.report(&lines)?;
    if found.is_empty() {
        say!("{} has no model in memory", args.server);
    }
    Ok(Status::Done)
}
