//! From options to an exit code: takes standard output over, runs a command, reports.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::builder::styling::{AnsiColor, Styles};
use clap::error::ContextValue;
use qhx_base::escape::shown;
use qhx_base::{Error, ErrorKind, Result};
use tracing_subscriber::EnvFilter;

use super::args::ProcessArgs;
use super::output::Output;
use super::panics::Panics;
use super::signal::Interrupts;
use super::status::Status;
use super::stderr;

/// Colours of help.
pub const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Output, interrupts and process options for a command.
#[derive(Debug)]
pub struct Terminal<'a> {
    /// Takes results.
    pub output: &'a mut Output,
    /// Ctrl-C.
    pub interrupts: &'a Interrupts,
    /// Options of the process.
    pub process: &'a ProcessArgs,
}

/// Runs a command once per process: takes over the log, panics, standard output and Ctrl-C, makes of them what the
/// command works with, and reports how it ended; failures as JSON, too, where a program reads the output (`json`).
pub fn run<A: AsMut<Output>>(
    process: &ProcessArgs,
    json: bool,
    app: impl FnOnce(Output, Interrupts) -> A,
    command: impl FnOnce(&mut A) -> Result<Status>,
) -> ExitCode {
    let panics = Panics::install();
    let mut app = match prepare(process) {
        Ok((output, interrupts)) => app(output, interrupts),
        Err(e) => {
            stderr::error(&e);
            return ExitCode::from(e.kind().exit_code());
        }
    };
    // What a panic leaves behind is dropped, but for the output, which writes whole lines.
    let result = catch_unwind(AssertUnwindSafe(|| command(&mut app)))
        .unwrap_or_else(|_| Err(panics.error()));
    let output = app.as_mut();
    if output.is_closed() {
        // As `head` does when it has read enough.
        return ExitCode::SUCCESS;
    }
    match result {
        Ok(status) => ExitCode::from(status.exit_code()),
        Err(e) => {
            stderr::error(&e);
            if json {
                let _ = output.error(&e);
            }
            ExitCode::from(e.kind().exit_code())
        }
    }
}

/// Prints help, or says what is wrong with the arguments.
pub fn refuse(mut error: clap::Error, arguments: &[OsString]) -> ExitCode {
    if !error.use_stderr() {
        // Help for a reader that has left is no failure.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    escape_arguments(&mut error);
    stderr::usage(&error);
    if arguments.iter().any(|a| a == "--json") {
        let text = error.render().to_string();
        let message = text.lines().next().unwrap_or_default();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        let error = Error::new(ErrorKind::Usage, message).hint("see --help");
        if let Ok(mut output) = Output::take() {
            let _ = output.error(&error);
        }
    }
    ExitCode::from(ErrorKind::Usage.exit_code())
}

/// Writes what an error quotes of the arguments with escapes.
fn escape_arguments(error: &mut clap::Error) {
    let quoted: Vec<_> = error
        .context()
        .filter_map(|(kind, value)| {
            let safe = match value {
                ContextValue::String(text) => ContextValue::String(shown(text).into_owned()),
                ContextValue::Strings(texts) => {
                    ContextValue::Strings(texts.iter().map(|t| shown(t).into_owned()).collect())
                }
                _ => return None,
            };
            Some((kind, safe))
        })
        .collect();
    for (kind, safe) in quoted {
        error.insert(kind, safe);
    }
}

fn prepare(process: &ProcessArgs) -> Result<(Output, Interrupts)> {
    log(process)?;
    Ok((Output::take()?, Interrupts::install()?))
}

/// Sends the log to standard error.
fn log(process: &ProcessArgs) -> Result<()> {
    let filter = match (&process.log, process.verbose) {
        (Some(filter), _) => filter.as_str(),
        // What the QNN libraries say that matters is part of the errors.
        (None, 0) => "warn,qnn=error",
        (None, 1) => "info",
        (None, 2) => "debug",
        (None, _) => "trace",
    };
    let filter = EnvFilter::try_new(filter).map_err(|e| {
        Error::caused(ErrorKind::Usage, format_args!("log filter {filter:?}"), e)
            .hint("expected levels by target, such as warn,qnn=debug")
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| stderr::Log)
        .with_ansi(stderr::colours())
        .without_time()
        .init();
    Ok(())
}
