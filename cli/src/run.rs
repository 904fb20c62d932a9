//! From arguments to an exit code: parses, takes standard output over, runs the command, reports.

use std::env;
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::builder::styling::{AnsiColor, Styles};
use clap::error::ContextValue;
use clap::{CommandFactory as _, Parser, Subcommand};
use qhx_core::escape::shown;
use qhx_core::{Error, ErrorKind, Result};
use tracing_subscriber::EnvFilter;

use crate::app::App;
use crate::args::GlobalArgs;
use crate::commands;
use crate::helper;
use crate::output::Output;
use crate::panics::Panics;
use crate::signal::Interrupts;
use crate::status::Status;
use crate::stderr;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

const EXAMPLES: &str = "\
Examples:
  qhx demo
  qhx runtime install
  qhx forge Qwen3.5-0.8B --out qwen35/v81 --target v81
  qhx generate qwen35/v81 'The capital of France is' --max-new 32
  qhx chat qwen35/v81

Results go to standard output, everything else to standard error. Exit codes and environment
variables are listed in docs/cli.md.";

/// Runs, makes and checks bundles of QNN context binaries.
#[derive(Debug, Parser)]
#[command(name = "qhx", version, styles = STYLES, after_help = EXAMPLES, max_term_width = 100)]
#[command(disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    global: GlobalArgs,
    #[command(subcommand)]
    command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
enum Command {
    Generate(commands::generate::GenerateArgs),
    Chat(commands::chat::ChatArgs),
    Embed(commands::embed::EmbedArgs),
    Forge(commands::forge::args::ForgeArgs),
    Inspect(commands::inspect::InspectArgs),
    Verify(commands::verify::VerifyArgs),
    Runtime(commands::runtime::RuntimeArgs),
    Plugins(commands::plugins::PluginsArgs),
    Doctor(commands::doctor::DoctorArgs),
    Demo(commands::demo::DemoArgs),
    Completions(commands::completions::CompletionsArgs),
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
        Command::Completions(args) => commands::completions::run(&args, Cli::command(), app),
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
                let _ = app.output.error(&e);
            }
            ExitCode::from(e.kind().exit_code())
        }
    }
}

fn prepare(global: GlobalArgs) -> Result<App> {
    log(&global)?;
    Ok(App { output: Output::take()?, interrupts: Interrupts::install()?, global })
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
