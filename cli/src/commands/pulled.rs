//! `qhx list`, `qhx rm` and `qhx cp`: what was fetched from a hub, and made of it.

use std::path::PathBuf;

use clap::Args;
use qhx::hub::{self, Cache, HubOptions, Local, Name, Removed, Unfinished};
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::Manifest;
use qhx_core::manifest::is_candidate;
use qhx_tools::models::{Models, copy};
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::commands::inspect::size;
use crate::output::Report;

/// Characters of a commit that people are shown.
const SHORT: usize = 10;

/// List what is here: models by name, and what was fetched from hubs
///
/// Every command that takes a bundle takes these names, and `qhx forge` those of checkpoints.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Remove a model, or what was fetched from a hub
///
/// A name of the index removes its bundles and the checkpoint that came from a package; a checkpoint of a hub stays, as
/// other programs share it. OWNER/NAME removes all of a repository, with @REVISION one revision, with /FOLDER one
/// bundle. Contents that another revision or bundle shares stay. What downloads of the repository left that did not end
/// is removed with it.
#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// A name of the index, or OWNER/NAME[@REVISION][/FOLDER]
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Copy a bundle out into a folder, for another machine
///
/// The copy holds files where the cache has links. It gets its name once it is whole.
#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// The bundle: a name that was pulled, or a folder
    #[arg(value_name = "NAME")]
    pub name: PathBuf,
    /// A folder that is not there yet
    #[arg(value_name = "FOLDER")]
    pub to: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Runs `qhx list`.
pub(crate) fn list(args: &ListArgs, app: &mut App) -> Result<Status> {
    let cache = Cache::new(HubOptions::from_environment()?.cache);
    let models = Models::from_environment()?.list();
    let (found, unfinished) = (cache.list(is_candidate)?, cache.unfinished()?);
    if args.json {
        let listed = json!({
            "cache": cache.root(), "models": models, "found": found, "unfinished": unfinished,
        });
        app.output.json_pretty(&listed)?;
        return Ok(Status::Done);
    }
    let mut lines = Report::default();
    let names = found.iter().map(|local| &local.name);
    let names = names.chain(unfinished.iter().map(|download| &download.name));
    let names = names.chain(models.iter().map(|model| &model.name));
    let width = names.map(String::len).max().unwrap_or(0);
    for model in &models {
        let state = if model.whole { "" } else { "  INCOMPLETE: pull it again" };
        // Of what was fetched the repository says the size.
        let bytes = if model.bytes > 0 { size(model.bytes) } else { String::new() };
        lines.line(format_args!(
            "{:width$}  {:10}  {bytes:>10}  of {}{state}",
            model.name, model.form, model.source
        ));
    }
    for local in &found {
        lines.line(format_args!("{:width$}  {}", local.name, what(local)));
    }
    for Unfinished { name, bytes, .. } in &unfinished {
        let size = size(*bytes);
        lines.line(format_args!("{name:width$}  unfinished  {size:>10}  qhx pull goes on"));
    }
    app.output.report(&lines)?;
    if models.is_empty() && found.is_empty() && unfinished.is_empty() {
        say!("nothing is here; qhx run NAME begins, and qhx models lists the names");
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

/// Runs `qhx rm`.
pub(crate) fn rm(args: &RmArgs, app: &mut App) -> Result<Status> {
    let removed = Models::from_environment()?.remove(&args.name)?;
    let (bytes, stays, commits) = match removed {
        Some(removed) => (removed.bytes, removed.stays, Vec::new()),
        None => {
            let name: Name = args.name.parse().map_err(|e: Error| absent(&args.name, e))?;
            let cache = Cache::new(HubOptions::from_environment()?.cache);
            let Removed { bytes, commits, .. } = cache.remove(&name)?;
            (bytes, Vec::new(), commits)
        }
    };
    if args.json {
        app.output.json(&json!({
            "name": args.name, "bytes": bytes, "commits": commits, "stays": stays,
        }))?;
        return Ok(Status::Done);
    }
    app.output.line(&format!("removed {}: {} are free again", args.name, size(bytes)))?;
    for checkpoint in stays {
        say!("its checkpoint stays, as other programs may use it: qhx rm {checkpoint}");
    }
    Ok(Status::Done)
}

/// The error of a name that stands for nothing here.
fn absent(name: &str, error: Error) -> Error {
    if name.contains('/') {
        return error;
    }
    Error::new(ErrorKind::Usage, format!("{name}: nothing of it is here"))
        .hint("qhx list shows what is here")
}

/// Runs `qhx cp`.
pub(crate) fn cp(args: &CpArgs, app: &mut App) -> Result<Status> {
    let from = hub::resolve(&args.name)?;
    let manifest = Manifest::load(&from).map_err(|e| hub::how_to_fetch(&args.name, e))?;
    let _working = app.interrupts.working();
    let copied = copy(&manifest.root, &args.to, app.interrupts.token())?;
    if args.json {
        app.output.json(&copied)?;
    } else {
        app.output.line(&format!("{}: {}", copied.path.display(), size(copied.bytes)))?;
    }
    Ok(Status::Done)
}
