//! From arguments to an exit code: parses, takes standard output over, runs the command, reports.

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use qhx::skels;
use qhx_base::Result;
use qhx_base::child::Task;
use qhx_forge::program::{ForgeArgs, PrepareArgs};
use qhx_terminal::{STYLES, helper, refuse};

use crate::Status;
use crate::app::App;
use crate::args::{GlobalArgs, LibraryArgs, variables};
use crate::commands;
use crate::progress::PromptProgress;

const EXAMPLES: &str = "\
Examples:
  qhx demo
  qhx libraries install
  qhx pull owner/qwen35_HNPU
  qhx forge Qwen3.5-0.8B --out qwen35/v81 --target v81
  qhx generate qwen35/v81 'The capital of France is' --max-new 32
  qhx chat qwen35/v81
  qhx serve qwen35/v81

Results go to standard output, everything else to standard error. Exit codes and environment
variables are described in docs/cli.md.";

fn after_help() -> String {
    format!("{EXAMPLES}\n\n{}", variables(&[]))
}

/// Runs, makes and checks bundles of QNN context binaries.
#[derive(Debug, Parser)]
#[command(name = "qhx", version, styles = STYLES, after_help = after_help(), max_term_width = 100)]
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
    Transcribe(commands::transcribe::TranscribeArgs),
    Speak(commands::speak::SpeakArgs),
    Rerank(commands::rerank::RerankArgs),
    Serve(Box<commands::serve::ServeArgs>),
    Embed(commands::embed::EmbedArgs),
    Pull(commands::pull::PullArgs),
    List(commands::pulled::ListArgs),
    Remove(commands::pulled::RemoveArgs),
    #[command(mut_arg("checkpoint", |arg| arg.help(
        "Folder of the checkpoint, a GGUF file of llama.cpp, or the name OWNER/NAME of one that a hub has, which is \
         fetched first"
    )))]
    Forge(Box<ForgeArgs>),
    Prepare(PrepareArgs),
    Inspect(commands::inspect::InspectArgs),
    Verify(commands::verify::VerifyArgs),
    Bench(commands::bench::BenchArgs),
    Libraries(commands::libraries::LibrariesArgs),
    Push(commands::push::PushArgs),
    Plugins(commands::plugins::PluginsArgs),
    Doctor(commands::doctor::DoctorArgs),
    Demo(commands::demo::DemoArgs),
    Completions(commands::completions::CompletionsArgs),
    #[command(hide = true)]
    Man(commands::man::ManArgs),
    /// Print the version
    Version,
}

/// Task of a helper of these programs besides those of every helper: it tries plugins.
const TASKS: &[Task] = &[qhx_plugins::probe::TASK];

/// Runs `qhx` with the arguments of the process.
pub fn run() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments, TASKS) {
        return code;
    }
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(e) => return refuse(e, &arguments),
    };
    if let Some(libraries) = cli.command.libraries() {
        skels::announce(&libraries.files());
    }
    let json = cli.command.wants_json();
    start(cli.global, json, |app| dispatch(cli.command, app))
}

/// Runs `qhx_generate` with the arguments of the process.
pub fn run_generate() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments, TASKS) {
        return code;
    }
    let args = match commands::classic::ClassicArgs::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(e) => return refuse(e, &arguments),
    };
    skels::announce(&args.backend().libraries.files());
    start(args.global.clone(), false, |app| commands::classic::run(&args, app))
}

/// Runs `qhx_embed` with the arguments of the process.
pub fn run_embed() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments, TASKS) {
        return code;
    }
    let args = match commands::embed::classic::EmbedClassicArgs::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(e) => return refuse(e, &arguments),
    };
    skels::announce(&args.backend().libraries.files());
    let json = args.json;
    start(args.global.clone(), json, |app| commands::embed::classic::run(&args, app))
}

fn dispatch(command: Command, app: &mut App) -> Result<Status> {
    match command {
        Command::Generate(args) => commands::generate::run(&args, app),
        Command::Chat(args) => commands::chat::run(&args, app),
        Command::Transcribe(args) => commands::transcribe::run(&args, app),
        Command::Speak(args) => commands::speak::run(&args, app),
        Command::Rerank(args) => commands::rerank::run(&args, app),
        Command::Serve(args) => commands::serve::run(&args, app),
        Command::Embed(args) => commands::embed::run(&args, app),
        Command::Pull(args) => commands::pull::run(&args, app),
        Command::List(args) => commands::pulled::list(&args, app),
        Command::Remove(args) => commands::pulled::remove(&args, app),
        Command::Forge(args) => commands::forge::run(*args, app),
        Command::Prepare(args) => commands::forge::prepare(&args, app),
        Command::Inspect(args) => commands::inspect::run(&args, app),
        Command::Verify(args) => commands::verify::run(&args, app),
        Command::Bench(args) => commands::bench::run(&args, app),
        Command::Libraries(args) => commands::libraries::run(&args, app),
        Command::Push(args) => commands::push::run(&args, app),
        Command::Plugins(args) => commands::plugins::run(&args, app),
        Command::Doctor(args) => commands::doctor::run(&args, app),
        Command::Demo(args) => commands::demo::run(&args, app),
        Command::Completions(args) => commands::completions::run(&args, Cli::command(), app),
        Command::Man(args) => {
            let embed = commands::embed::classic::EmbedClassicArgs::command();
            let programs = [Cli::command(), commands::classic::ClassicArgs::command(), embed];
            commands::man::run(&args, programs, app)
        }
        Command::Version => {
            app.output.line(&format!("qhx {}", env!("CARGO_PKG_VERSION")))?;
            Ok(Status::Done)
        }
    }
}

impl Command {
    /// Options of the QNN libraries, for commands that open a device.
    fn libraries(&self) -> Option<&LibraryArgs> {
        match self {
            Self::Generate(args) => Some(&args.backend.libraries),
            Self::Chat(args) => Some(&args.backend.libraries),
            Self::Transcribe(args) => Some(&args.backend.libraries),
            Self::Speak(args) => Some(&args.backend.libraries),
            Self::Rerank(args) => Some(&args.backend.libraries),
            Self::Serve(args) => Some(&args.backend.libraries),
            Self::Embed(args) => Some(&args.backend.libraries),
            Self::Verify(args) => Some(&args.backend.libraries),
            Self::Bench(args) => Some(&args.backend.libraries),
            Self::Demo(args) => Some(&args.backend.libraries),
            Self::Doctor(args) => Some(&args.libraries),
            Self::Prepare(args) => Some(&args.libraries),
            Self::Forge(_) | Self::Inspect(_) | Self::Libraries(_) => None,
            Self::Pull(args) => Some(&args.libraries),
            Self::List(_) | Self::Remove(_) => None,
            Self::Push(_)
            | Self::Plugins(_)
            | Self::Completions(_)
            | Self::Man(_)
            | Self::Version => None,
        }
    }

    /// True when a program reads the output, and wants failures in it, too.
    fn wants_json(&self) -> bool {
        match self {
            Self::Generate(args) => args.json,
            Self::Chat(args) => args.json,
            Self::Transcribe(args) => args.json,
            Self::Speak(args) => args.json,
            Self::Rerank(args) => args.json,
            Self::Embed(args) => args.json,
            Self::Pull(args) => args.json,
            Self::List(args) => args.json,
            Self::Remove(args) => args.json,
            Self::Forge(args) => args.wants_json(),
            Self::Prepare(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Verify(args) => args.json,
            Self::Bench(args) => args.json,
            Self::Libraries(args) => args.wants_json(),
            Self::Plugins(args) => args.wants_json(),
            Self::Doctor(args) => args.json,
            Self::Demo(args) => args.json,
            Self::Serve(_)
            | Self::Push(_)
            | Self::Completions(_)
            | Self::Man(_)
            | Self::Version => false,
        }
    }
}

fn start(
    global: GlobalArgs,
    json: bool,
    command: impl FnOnce(&mut App) -> Result<Status>,
) -> ExitCode {
    let process = global.process.clone();
    let app = |output, interrupts| {
        let progress = PromptProgress::default();
        App { output, interrupts, global, progress }
    };
    qhx_terminal::run(&process, json, app, command)
}
