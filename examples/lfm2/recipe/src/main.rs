//! Makes a bundle of an LFM2 checkpoint.
//!
//! - `lfm2-forge CHECKPOINT OUT`: for the CPU backend.
//! - `lfm2-forge CHECKPOINT OUT TARGET PRECISION HTP SYSTEM`: with context binaries for `v75`,
//!   `v79` or `v81`, in `fp16` or `w8a16`, made by the given QNN libraries.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use qhx_core::qnn::{Library, Target};
use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::{ForgeOptions, Progress, forge_with};

/// Writes a line to stderr, if somebody reads it: `eprintln!` would panic otherwise.
fn tell(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Tells stages and notes.
struct Lines;

impl Progress for Lines {
    fn stage(&mut self, what: &str, total: u64) {
        tell(format_args!("{what} ({} MiB)", total >> 20));
    }

    fn advance(&mut self, _done: u64) {}

    fn note(&mut self, message: &str) {
        tell(format_args!("note: {message}"));
    }
}

fn run() -> Result<()> {
    let usage = |what: String| Error::new(ErrorKind::Usage, what);
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (checkpoint, options) = match &arguments[..] {
        [checkpoint, out] => (checkpoint, ForgeOptions::new(out)),
        [checkpoint, out, target, precision, htp, system] => {
            let (target, precision) = (target.to_string_lossy(), precision.to_string_lossy());
            let library = Library::open(Path::new(htp), Some(Path::new(system)))?;
            let target = Target::named(&target)
                .ok_or_else(|| usage(format!("target {target:?}, expected v75, v79 or v81")))?;
            let mut options = ForgeOptions::new(out);
            options.precision = precision.parse()?;
            options.compiler = Some(Arc::new(QnnCompiler::new(library, target)));
            (checkpoint, options)
        }
        _ => {
            let what = "expected CHECKPOINT OUT [TARGET PRECISION HTP SYSTEM]";
            return Err(usage(what.to_owned()));
        }
    };
    let report = forge_with(Path::new(checkpoint), lfm2_forge::recipe, &options, &mut Lines)?;
    tell(format_args!("{}: {} MiB", report.manifest.display(), report.bytes >> 20));
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("lfm2-forge: {error}"));
            ExitCode::from(error.kind().exit_code())
        }
    }
}
