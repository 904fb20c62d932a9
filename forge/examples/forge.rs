//! Makes a bundle for the CPU backend: `cargo run -p qhx-forge --example forge CHECKPOINT OUT [w8a16]`.

#![expect(clippy::print_stderr, reason = "an example, whose report is what it prints")]

use std::path::PathBuf;

use qhx_base::{Error, ErrorKind, Result};
use qhx_forge::{ForgeOptions, Progress, forge};

/// Prints stages and notes to stderr.
struct Lines;

impl Progress for Lines {
    fn stage(&mut self, what: &str, total: u64) {
        eprintln!("{what} ({} MiB)", total >> 20);
    }

    fn advance(&mut self, _done: u64) {}

    fn note(&mut self, message: &str) {
        eprintln!("note: {message}");
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(checkpoint), Some(out)) = (arguments.next(), arguments.next()) else {
        return Err(Error::new(ErrorKind::Usage, "expected CHECKPOINT and OUT"));
    };
    let mut options = ForgeOptions::new(out);
    if let Some(precision) = arguments.next() {
        options.precision = precision.to_string_lossy().parse()?;
    }
    let report = forge(&checkpoint, &options, &mut Lines)?;
    eprintln!("{}: {} MiB", report.manifest.display(), report.bytes >> 20);
    Ok(())
}
