//! From arguments to an exit code: parses, takes standard output over, runs the command, reports.

use std::env;
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ContextValue;
use clap::{CommandFactory as _, Parser as _};
use qhx_core::escape::shown;
use qhx_core::{Error, ErrorKind, Result};
use qhx_plugins::{PluginOptions, Plugins, Prober};
use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, GlobalArgs};
use crate::commands;
use crate::helper;
use crate::output::Output;
use crate::panics::Panics;
use crate::signal::Interrupts;
use crate::stderr;

/// What every command works with.
pub(crate) struct App {
    pub output: Output,
    pub interrupts: Interrupts,
    pub global: GlobalArgs,
}

/// How a command ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// Did what was asked.
    Done,
    /// A check that was asked for found something.
    Found,
    /// Interrupted; what there was is written.
    Cancelled,
    /// A part of the work failed, which is said already; the rest is done.
    Reported(ErrorKind),
}

impl Status {
    fn exit_code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Found => 1,
            Self::Cancelled => ErrorKind::Cancelled.exit_code(),
            Self::Reported(kind) => kind.exit_code(),
        }
    }
}

impl App {
    /// The host-ops: those linked in and those of plugins.
    pub(crate) fn plugins(&self) -> Result<Plugins> {
        Plugins::discover(&self.plugin_options())
    }

    /// Which plugins to consider, and how. A plugin that is not installed is tried in a child
    /// process first: this program with `plugins probe`.
    pub(crate) fn plugin_options(&self) -> PluginOptions {
        let prober = this_program().map(|program| {
            Prober::new(program, ["plugins", "probe"])
                .remembering(qhx_plugins::search::memory_file())
        });
        PluginOptions {
            files: self.global.plugins.clone(),
            dirs: self.global.plugin_dirs.clone(),
            only_named: false,
            no_plugins: self.global.no_plugins,
            allow_untrusted: self.global.allow_untrusted_plugins,
            prober,
        }
    }
}

/// `qhx` itself, or the one beside `qhx_generate`: what tries plugins and compiles parts of bundles.
/// Without one plugins are loaded untried.
pub(crate) fn this_program() -> Option<PathBuf> {
    let exe = env::current_exe().ok()?;
    let qhx = exe.with_file_name(format!("qhx{}", env::consts::EXE_SUFFIX));
    qhx.is_file().then_some(qhx)
}

/// Runs `qhx` with the arguments of the process.
pub fn run() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments) {
        return code;
    }
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(e) => return refuse(e, &arguments),
    };
    let json = cli.command.wants_json();
    start(cli.global, json, |app| dispatch(cli.command, app))
}

/// Runs `qhx_generate` with the arguments of the process.
pub fn run_generate() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments) {
        return code;
    }
    let args = match commands::classic::ClassicArgs::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(e) => return refuse(e, &arguments),
    };
    start(args.global.clone(), false, |app| commands::classic::run(&args, app))
}

/// Runs `qhx_embed` with the arguments of the process.
pub fn run_embed() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments) {
        return code;
    }
    let args = match commands::embed::classic::EmbedClassicArgs::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(e) => return refuse(e, &arguments),
    };
    let json = args.json;
    start(args.global.clone(), json, |app| commands::embed::classic::run(&args, app))
}

/// The description of the command line, for shell completions.
pub(crate) fn command() -> clap::Command {
    Cli::command()
}

fn dispatch(command: Command, app: &mut App) -> Result<Status> {
    match command {
        Command::Generate(args) => commands::generate::run(&args, app),
        Command::Chat(args) => commands::chat::run(&args, app),
        Command::Embed(args) => commands::embed::run(&args, app),
        Command::Forge(args) => commands::forge::run(&args, app),
        Command::Inspect(args) => commands::inspect::run(&args, app),
        Command::Verify(args) => commands::verify::run(&args, app),
        Command::Runtime(args) => commands::runtime::run(&args, app),
        Command::Plugins(args) => commands::plugins::run(&args, app),
        Command::Doctor(args) => commands::doctor::run(&args, app),
        Command::Demo(args) => commands::demo::run(&args, app),
        Command::Completions(args) => commands::completions::run(&args, app),
    }
}

impl Command {
    /// True when a program reads the output, and wants failures in it, too.
    fn wants_json(&self) -> bool {
        match self {
            Self::Generate(args) => args.json,
            Self::Chat(args) => args.json,
            Self::Embed(args) => args.json,
            Self::Forge(args) => args.wants_json(),
            Self::Inspect(args) => args.json,
            Self::Verify(args) => args.json,
            Self::Runtime(args) => args.wants_json(),
            Self::Plugins(args) => args.wants_json(),
            Self::Doctor(args) => args.json,
            Self::Demo(args) => args.json,
            Self::Completions(_) => false,
        }
    }
}

/// Prints help, or says what is wrong with the arguments.
fn refuse(mut error: clap::Error, arguments: &[OsString]) -> ExitCode {
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
            let _ = output.json(&error_json(&error));
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

fn start(
    global: GlobalArgs,
    json: bool,
    command: impl FnOnce(&mut App) -> Result<Status>,
) -> ExitCode {
    let panics = Panics::install();
    let mut app = match prepare(global) {
        Ok(app) => app,
        Err(e) => {
            stderr::error(&e);
            return ExitCode::from(e.kind().exit_code());
        }
    };
    // What a panic leaves behind is dropped, but for the output, which writes whole lines.
    let result = catch_unwind(AssertUnwindSafe(|| command(&mut app)))
        .unwrap_or_else(|_| Err(panics.error()));
    if app.output.is_closed() {
        // As `head` does when it has read enough.
        return ExitCode::SUCCESS;
    }
    match result {
        Ok(status) => ExitCode::from(status.exit_code()),
        Err(e) => {
            stderr::error(&e);
            if json {
                let _ = app.output.json(&error_json(&e));
            }
            ExitCode::from(e.kind().exit_code())
        }
    }
}

fn prepare(global: GlobalArgs) -> Result<App> {
    log(&global)?;
    Ok(App { output: Output::take()?, interrupts: Interrupts::install()?, global })
}

/// A failure for programs.
pub(crate) fn error_json(error: &Error) -> serde_json::Value {
    json!({"error": {
        "kind": error.kind().name(),
        "message": error.message(),
        "hint": error.hint_text(),
        "code": error.code(),
        "exit_code": error.kind().exit_code(),
    }})
}

/// Sends the log to standard error.
fn log(global: &GlobalArgs) -> Result<()> {
    let filter = match (&global.log, global.verbose) {
        (Some(filter), _) => filter.as_str(),
        // What the QNN libraries say that matters is part of the errors.
        (None, 0) => "warn,qnn=error",
        (None, 1) => "info",
        (None, 2) => "debug",
        (None, _) => "trace",
    };
    let filter = EnvFilter::try_new(filter).map_err(|e| {
        Error::new(ErrorKind::Usage, format!("log filter {filter:?}: {e}"))
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
