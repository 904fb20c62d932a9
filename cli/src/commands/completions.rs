//! `qhx completions`: completion scripts for shells.

use clap::Args;
use clap_complete::Shell;
use qhx_base::{Error, ErrorKind, Result};

use crate::Status;
use crate::app::App;

/// Print a completion script for a shell
///
/// For example: qhx completions bash > ~/.local/share/bash-completion/completions/qhx
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Runs the command. `program` describes the command line.
pub(crate) fn run(
    args: &CompletionsArgs,
    mut program: clap::Command,
    app: &mut App,
) -> Result<Status> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "qhx", &mut script);
    let script = String::from_utf8(script)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the completion script", e))?;
    app.output.write(&script)?;
    Ok(Status::Done)
}
