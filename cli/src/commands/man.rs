//! `qhx man`: manual pages of the programs, for those who make packages.

use std::path::PathBuf;

use clap::Args;
use qhx_base::{Error, ErrorKind, Result};

use crate::Status;
use crate::app::App;

/// Write the manual pages of the programs
///
/// One for each program and each command. For example: qhx man ~/.local/share/man/man1
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The folder, which is made where it is not there
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Runs the command. `programs` describe the command lines.
pub(crate) fn run<const N: usize>(
    args: &ManArgs,
    programs: [clap::Command; N],
    app: &mut App,
) -> Result<Status> {
    let folder = &args.folder;
    let failed = |e| Error::io(ErrorKind::Io, folder, e);
    std::fs::create_dir_all(folder).map_err(failed)?;
    for program in programs {
        clap_mangen::generate_to(program, folder).map_err(failed)?;
    }
    app.output.line(&folder.display().to_string())?;
    Ok(Status::Done)
}
