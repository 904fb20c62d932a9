//! `qhx forge`: the commands are those of every program with recipes, see [`qhx_forge::program`].

use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::Path;

use clap::{Parser, Subcommand};
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::{Manifest, Result};
use qhx_forge::program::{self, ForgeArgs, PrepareArgs, Program};
use qhx_plugins::Plugins;

use crate::Status;
use crate::app::App;
use crate::args::GlobalArgs;
use crate::program::this_program;

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
    let ForgeCommand::Forge(args) = ForgeLine::try_parse_from(line)?.command;
    Ok(args)
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
pub(crate) fn run(args: &ForgeArgs, app: &mut App) -> Result<Status> {
    let program = this("qhx forge");
    if !args.calibrates() && !args.makes_golden_steps() {
        return program::run(args, &program, None, app.terminal());
    }
    // Plugins are looked for when a bundle is opened, which may never happen; where one has to be, at once.
    let plugins = OnceCell::new();
    let options = app.plugin_options();
    if args.calibrates() {
        let _ = plugins.set(Ok(app.plugins()?));
    }
    let threads = app.global.process.threads();
    let cancel = app.interrupts.token().clone();
    let open = |manifest: &Path| {
        let found: &Result<Plugins> = plugins.get_or_init(|| Plugins::discover(&options));
        let ops = found.as_ref().map_err(Clone::clone)?;
        Model::open(
            ModelOptions::new(Manifest::load(manifest)?, qhx::backends::cpu(threads)?, ops)
                .threads(threads)
                .cancelled_by(cancel.clone()),
        )
    };
    program::run(args, &program, Some(&open), app.terminal())
}
