//! What reads files inside of commands, for `tests/fuzz`. Nobody else is to use it: it changes with the commands.

use std::path::Path;

use clap::Parser;
use qhx_core::{Error, ErrorKind, Result};

use crate::commands::embed::{EmbedArgs, Rows};
use qhx::verify::Suite;

/// Reads a suite of prompts with reference answers.
///
/// # Errors
///
/// Where the file is not one.
pub fn suite(path: &Path) -> Result<()> {
    Suite::load(path).map(drop)
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: EmbedArgs,
}

/// Reads the texts of `qhx embed --input PATH` to the end.
///
/// # Errors
///
/// Where a line is not a text.
pub fn rows(path: &Path) -> Result<()> {
    let words = ["embed".as_ref(), "bundle".as_ref(), "--input".as_ref(), path.as_os_str()];
    let line = Line::try_parse_from(words)
        .map_err(|e| Error::new(ErrorKind::Usage, e.to_string()).with_source(e))?;
    let mut rows = Rows::open(&line.args)?;
    while rows.next()?.is_some() {}
    Ok(())
}
