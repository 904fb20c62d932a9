//! `qhx forge`: the commands are those of every program with recipes, see [`qhx_forge::program`].

use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::Path;

use clap::{Parser, Subcommand};
use qhx::hub::{self, CheckpointFiles, Hub, HubOptions, Name};
use qhx::{Activations, CpuOptions};
use qhx_base::Result;
use qhx_core::Manifest;
use qhx_core::engine::{Model, ModelOptions};
use qhx_forge::program::{self, ForgeArgs, PrepareArgs, Program};
use qhx_plugins::Plugins;
// Its recipe is one of the program's.
use smolvlm_forge as _;

use crate::Status;
use crate::app::App;
use crate::args::GlobalArgs;
use crate::commands::pull::say_result;
use crate::program::this_program;
use crate::progress::PullProgress;

/// The command line of the forge that started this process.
#[derive(Debug, Parser)]
struct ForgeLine {
    #[command(flatten)]
    _global: GlobalArgs,
    #[command(subcommand)]
    command: ForgeCommand,
}

#[derive(Debug, Subcommand)]
enum ForgeCommand {
    Forge(ForgeArgs),
}

fn parse(line: &[OsString]) -> Result<ForgeArgs, clap::Error> {
    let ForgeCommand::Forge(mut args) = ForgeLine::try_parse_from(line)?.command;
    // The process that started this one has fetched it.
    if let Some((path, _)) = args.source()
        && let Ok(found) = hub::resolve(path)
    {
        *path = found;
    }
    Ok(args)
}

/// Fetches the checkpoint that is named as one of a hub, where nothing is at that path.
fn pull(args: &mut ForgeArgs, app: &App) -> Result<()> {
    let Some((path, weights)) = args.source().filter(|(path, _)| !path.exists()) else {
        return Ok(());
    };
    let Some(name) = path.to_str().and_then(|text| text.parse::<Name>().ok()) else {
        return Ok(());
    };
    let hub = Hub::new(HubOptions::from_environment()?);
    let files = if weights { CheckpointFiles::All } else { CheckpointFiles::Configuration };
    let progress = PullProgress::new(&name);
    let _working = app.interrupts.working();
    let cancel = app.interrupts.token();
    let pulled = hub::pull_checkpoint(&hub, &name, files, &|step| progress.step(&step), cancel);
    progress.end();
    let pulled = pulled?;
    say_result(&name, &pulled);
    *path = pulled.path;
    Ok(())
}

/// This program, as people call its command.
fn this(name: &str) -> Program {
    Program { name: name.to_owned(), file: this_program(), words: &["forge"], parse }
}

/// Runs `qhx prepare`.
pub(crate) fn prepare(args: &PrepareArgs, app: &mut App) -> Result<Status> {
    // Plans are the forge's.
    program::prepare(args, &this("qhx forge"), app.terminal())
}

/// Runs the command.
pub(crate) fn run(mut args: ForgeArgs, app: &mut App) -> Result<Status> {
    pull(&mut args, app)?;
    let args = &args;
    let program = this("qhx forge");
    if !args.opens_bundles() {
        return program::run(args, &program, None, app.terminal());
    }
    // Plugins are looked for when a bundle is opened, which may never happen; where one has to be, at once.
    let plugins = OnceCell::new();
    let options = app.plugin_options();
    if args.calibrates() {
        let _ = plugins.set(Ok(app.plugins()?));
    }
    let threads = app.global.process.threads();
    // Measured are weights, without what activations cost beside them, unless that is asked for.
    let activations = match app.global.cpu_activations {
        Activations::Auto => Activations::Int16,
        asked => asked,
    };
    let cpu = CpuOptions { threads, activations, caches: app.global.cpu_caches };
    let cancel = app.interrupts.token().clone();
    let open = |manifest: &Path| {
        let found: &Result<Plugins> = plugins.get_or_init(|| Plugins::discover(&options));
        let ops = found.as_ref().map_err(Clone::clone)?;
        Model::open(
            ModelOptions::new(Manifest::load(manifest)?, qhx::backends::cpu_with(cpu)?, ops)
                .threads(threads)
                .cancelled_by(cancel.clone()),
        )
    };
    program::run(args, &program, Some(&open), app.terminal())
}
