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
use crate::commands::classic::{self, ClassicArgs};
use crate::commands::embed::classic::EmbedClassicArgs;
use crate::commands::{
    bench, chat, completions, demo, doctor, embed, forge, generate, inspect, libraries, man,
    models, plugins, ps, publish, pull, pulled, push, rerank, serve, speak, transcribe, verify,
};
use crate::progress::PromptProgress;

const EXAMPLES: &str = "\
Examples:
  qhx run smollm2
  qhx models
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
    Run(Box<commands::run::RunArgs>),
    Models(models::ModelsArgs),
    Show(models::ShowArgs),
    Generate(generate::GenerateArgs),
    Chat(chat::ChatArgs),
    Transcribe(transcribe::TranscribeArgs),
    Speak(speak::SpeakArgs),
    Rerank(rerank::RerankArgs),
    Serve(Box<serve::ServeArgs>),
    Embed(embed::EmbedArgs),
    Pull(pull::PullArgs),
    List(pulled::ListArgs),
    Publish(publish::PublishArgs),
    Rm(pulled::RmArgs),
    Cp(pulled::CpArgs),
    Ps(ps::PsArgs),
    #[command(mut_arg("checkpoint", |arg| arg.help(
        "Folder of the checkpoint, a GGUF file of llama.cpp, or the name OWNER/NAME of one that a hub has, which is \
         fetched first"
    )))]
    Forge(Box<ForgeArgs>),
    Prepare(PrepareArgs),
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Bench(bench::BenchArgs),
    Libraries(libraries::LibrariesArgs),
    Push(push::PushArgs),
    Plugins(plugins::PluginsArgs),
    Doctor(doctor::DoctorArgs),
    Demo(demo::DemoArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    Man(man::ManArgs),
    /// Print the version
    Version,
}

/// Task of a helper of these programs besides those of every helper: it tries plugins.
const TASKS: &[Task] = &[qhx_plugins::probe::TASK];

/// Runs `qhx` with the arguments of the process.
pub fn run() -> ExitCode {
    start::<Cli>(|cli| {
        let (json, libraries) = cli.command.common();
        let libraries = libraries.cloned();
        let command = Box::new(|app: &mut App| dispatch(cli.command, app));
        Start { libraries, json, global: cli.global, command }
    })
}

/// Runs `qhx_generate` with the arguments of the process.
pub fn run_generate() -> ExitCode {
    start::<ClassicArgs>(|args| Start {
        libraries: Some(args.backend().libraries),
        json: false,
        global: args.global.clone(),
        command: Box::new(move |app| classic::run(&args, app)),
    })
}

/// Runs `qhx_embed` with the arguments of the process.
pub fn run_embed() -> ExitCode {
    start::<EmbedClassicArgs>(|args| Start {
        libraries: Some(args.backend().libraries),
        json: args.json,
        global: args.global.clone(),
        command: Box::new(move |app| embed::classic::run(&args, app)),
    })
}

fn dispatch(command: Command, app: &mut App) -> Result<Status> {
    match command {
        Command::Run(args) => args.chat.tracing.trace(|t| commands::run::run(&args, app, t)),
        Command::Models(args) => models::models(&args, app),
        Command::Show(args) => models::show(&args, app),
        Command::Generate(args) => args.tracing.trace(|t| generate::run(&args, app, t)),
        Command::Chat(args) => args.options.tracing.trace(|t| chat::run(&args, app, t)),
        Command::Transcribe(args) => args.tracing.trace(|t| transcribe::run(&args, app, t)),
        Command::Speak(args) => args.tracing.trace(|t| speak::run(&args, app, t)),
        Command::Rerank(args) => args.tracing.trace(|t| rerank::run(&args, app, t)),
        Command::Serve(args) => serve::run(&args, app),
        Command::Embed(args) => args.tracing.trace(|t| embed::run(&args, app, t)),
        Command::Pull(args) => pull::run(&args, app),
        Command::List(args) => pulled::list(&args, app),
        Command::Publish(args) => publish::run(&args, app),
        Command::Rm(args) => pulled::rm(&args, app),
        Command::Cp(args) => pulled::cp(&args, app),
        Command::Ps(args) => ps::run(&args, app),
        Command::Forge(args) => forge::run(*args, app),
        Command::Prepare(args) => forge::prepare(&args, app),
        Command::Inspect(args) => inspect::run(&args, app),
        Command::Verify(args) => verify::run(&args, app),
        Command::Bench(args) => args.tracing.trace(|t| bench::run(&args, app, t)),
        Command::Libraries(args) => libraries::run(&args, app),
        Command::Push(args) => push::run(&args, app),
        Command::Plugins(args) => plugins::run(&args, app),
        Command::Doctor(args) => doctor::run(&args, app),
        Command::Demo(args) => demo::run(&args, app),
        Command::Completions(args) => completions::run(&args, Cli::command(), app),
        Command::Man(args) => {
            let programs = [Cli::command(), ClassicArgs::command(), EmbedClassicArgs::command()];
            man::run(&args, programs, app)
        }
        Command::Version => {
            app.output.line(&format!("qhx {}", env!("CARGO_PKG_VERSION")))?;
            Ok(Status::Done)
        }
    }
}

impl Command {
    /// True when a program reads the output, and wants failures in it, too; and options of the QNN libraries, for
    /// commands that open a device.
    fn common(&self) -> (bool, Option<&LibraryArgs>) {
        match self {
            Self::Run(args) => (args.chat.json, Some(&args.chat.backend.libraries)),
            Self::Models(args) => (args.json, None),
            Self::Show(args) => (args.json, Some(&args.libraries)),
            Self::Generate(args) => (args.json, Some(&args.backend.libraries)),
            Self::Chat(args) => (args.options.json, Some(&args.options.backend.libraries)),
            Self::Transcribe(args) => (args.json, Some(&args.backend.libraries)),
            Self::Speak(args) => (args.json, Some(&args.backend.libraries)),
            Self::Rerank(args) => (args.json, Some(&args.backend.libraries)),
            Self::Serve(args) => (false, Some(&args.backend.libraries)),
            Self::Embed(args) => (args.json, Some(&args.backend.libraries)),
            Self::Pull(args) => (args.json, Some(&args.libraries)),
            Self::List(args) => (args.json, None),
            Self::Publish(args) => (args.json, None),
            Self::Rm(args) => (args.json, None),
            Self::Cp(args) => (args.json, None),
            Self::Ps(args) => (args.json, None),
            Self::Forge(args) => (args.wants_json(), None),
            Self::Prepare(args) => (args.json, Some(&args.libraries)),
            Self::Inspect(args) => (args.json, None),
            Self::Verify(args) => (args.json, Some(&args.backend.libraries)),
            Self::Bench(args) => (args.json, Some(&args.backend.libraries)),
            Self::Libraries(args) => (args.wants_json(), None),
            Self::Plugins(args) => (args.wants_json(), None),
            Self::Doctor(args) => (args.json, Some(&args.libraries)),
            Self::Demo(args) => (args.json, Some(&args.backend.libraries)),
            Self::Push(_) | Self::Completions(_) | Self::Man(_) | Self::Version => (false, None),
        }
    }
}

type Action = Box<dyn FnOnce(&mut App) -> Result<Status>>;

/// A command that is ready to run.
struct Start {
    /// Options of the QNN libraries, where a device may be opened.
    libraries: Option<LibraryArgs>,
    json: bool,
    global: GlobalArgs,
    command: Action,
}

/// Parses the arguments of the process, and runs what they ask for.
fn start<A: Parser>(prepare: impl FnOnce(A) -> Start) -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments, TASKS) {
        return code;
    }
    let Start { libraries, json, global, command } = match A::try_parse_from(&arguments) {
        Ok(args) => prepare(args),
        Err(e) => return refuse(e, &arguments),
    };
    if let Some(libraries) = libraries {
        skels::announce(&libraries.files());
    }
    let process = global.process.clone();
    let app = |output, interrupts| {
        let progress = PromptProgress::default();
        App { output, interrupts, global, progress }
    };
    qhx_terminal::run(&process, json, app, command)
}
