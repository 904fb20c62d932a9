//! `qhx list` and `qhx remove`: what was fetched from a hub.

use clap::Args;
use qhx::hub::{Cache, HubOptions, Local, Name, Unfinished};
use qhx_base::Result;
use qhx_core::manifest::is_candidate;
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::commands::inspect::size;
use crate::output::Report;

/// Characters of a commit that people are shown.
const SHORT: usize = 10;

/// List what was fetched from a hub, by qhx and by other tools
///
/// Every command that takes a bundle takes these names, and `qhx forge` those of checkpoints.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Remove what was fetched from a hub
///
/// OWNER/NAME removes all of a repository, with @REVISION one revision, with /FOLDER one bundle.
/// Contents that another revision or bundle shares stay. What downloads of the repository left that
/// did not end is removed with it.
#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// OWNER/NAME[@REVISION][/FOLDER]
    #[arg(value_name = "NAME")]
    pub name: Name,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Runs `qhx list`.
pub(crate) fn list(args: &ListArgs, app: &mut App) -> Result<Status> {
    let cache = Cache::new(HubOptions::from_environment()?.cache);
    let (found, unfinished) = (cache.list(is_candidate)?, cache.unfinished()?);
    if args.json {
        let listed = json!({"cache": cache.root(), "found": found, "unfinished": unfinished});
        app.output.json_pretty(&listed)?;
        return Ok(Status::Done);
    }
    let mut lines = Report::default();
    let names = found.iter().map(|local| &local.name);
    let names = names.chain(unfinished.iter().map(|download| &download.name));
    let width = names.map(String::len).max().unwrap_or(0);
    for local in &found {
        lines.line(format_args!("{:width$}  {}", local.name, what(local)));
    }
    for Unfinished { name, bytes, .. } in &unfinished {
        let size = size(*bytes);
        lines.line(format_args!("{name:width$}  unfinished  {size:>10}  qhx pull goes on"));
    }
    app.output.report(&lines)?;
    if found.is_empty() && unfinished.is_empty() {
        say!("nothing is in {}; fetch a bundle with qhx pull OWNER/NAME", cache.root().display());
    }
    Ok(Status::Done)
}

fn what(local: &Local) -> String {
    let commit = local.commit.get(..SHORT).unwrap_or(&local.commit);
    let revisions = match local.revisions.join(", ") {
        none if none.is_empty() => String::new(),
        some => format!(" ({some})"),
    };
    let state = match local.complete {
        Some(true) => "",
        Some(false) => "  INCOMPLETE: pull it again",
        None => "  fetched by another tool",
    };
    format!("{:10}  {:>10}  {commit}{revisions}{state}", local.kind.name(), size(local.bytes))
}

/// Runs `qhx remove`.
pub(crate) fn remove(args: &RemoveArgs, app: &mut App) -> Result<Status> {
    let cache = Cache::new(HubOptions::from_environment()?.cache);
    let removed = cache.remove(&args.name)?;
    if args.json {
        app.output.json(&json!({"name": args.name.to_string(), "removed": removed}))?;
    } else {
        app.output.line(&format!(
            "removed {}: {} are free again",
            args.name,
            size(removed.bytes)
        ))?;
    }
    Ok(Status::Done)
}
