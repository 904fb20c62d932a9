//! `qhx forge`: the commands are those of every program with recipes, see [`qhx_forge::program`].

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use qhx_core::Result;
use qhx_forge::program::{self, ForgeArgs, Program};

use crate::app::App;
use crate::args::GlobalArgs;
use crate::program::this_program;
use crate::status::Status;

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

/// Runs the command.
pub(crate) fn run(args: &ForgeArgs, app: &mut App) -> Result<Status> {
    let program =
        Program { name: "qhx forge".to_owned(), file: this_program(), words: &["forge"], parse };
    program::run(args, &program, app.terminal())
}
