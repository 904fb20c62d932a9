//! The program around recipes of other crates.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use qhx::{Activations, CpuOptions, PluginOptions, Plugins};
use qhx_base::Result;
use qhx_core::Manifest;
use qhx_core::engine::{Model, ModelOptions};
use qhx_terminal::args::ProcessArgs;
use qhx_terminal::output::Output;
use qhx_terminal::signal::Interrupts;
use qhx_terminal::{STYLES, Terminal, helper, refuse};

use super::{ForgeArgs, Program};
use crate::f16_range::measure::OpenModel;
use crate::registry::architectures;

/// The command line: that of `qhx forge`.
#[derive(Debug, Parser)]
#[command(styles = STYLES, max_term_width = 100, disable_help_subcommand = true)]
struct Line {
    #[command(flatten)]
    forge: ForgeArgs,
    /// Load this plugin, which has the host-op of the bundle: the bundle is measured, and gets golden steps. May be
    /// given several times
    #[arg(long = "plugin", value_name = "FILE")]
    plugins: Vec<PathBuf>,
    #[command(flatten)]
    process: ProcessArgs,
}

/// Output and interrupts of the command.
struct App {
    output: Output,
    interrupts: Interrupts,
}

impl AsMut<Output> for App {
    fn as_mut(&mut self) -> &mut Output {
        &mut self.output
    }
}

/// A whole program, `fn main() -> ExitCode { qhx_forge::main() }`: all that `qhx forge` can do, with the recipes that
/// the program registers beside those of this crate.
///
/// The program is started again, with a hidden command, for each context and for work that may crash. Bundles are
/// measured and get golden steps if `--plugin` names the plugin of their host-op.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if let Some(code) = helper::take_over(&arguments, &[]) {
        return code;
    }
    let Line { forge, plugins, process } = match line(&arguments) {
        Ok(line) => line,
        Err(e) => return refuse(e, &arguments),
    };
    let program =
        Program { name: name(&arguments), file: env::current_exe().ok(), words: &[], parse };
    let app = |output, interrupts| App { output, interrupts };
    qhx_terminal::run(&process, forge.wants_json(), app, |app: &mut App| {
        let App { output, interrupts } = app;
        let cancel = interrupts.token().clone();
        let threads = process.threads();
        let open = |manifest: &Path| {
            let ops = Plugins::discover(&PluginOptions::default().files(plugins.clone()))?;
            // As `qhx forge` measures: weights, without what activations cost beside them.
            let activations = Activations::Int16;
            let cpu = CpuOptions { threads, activations, ..CpuOptions::default() };
            let backend = qhx::backends::cpu_with(cpu)?;
            let options = ModelOptions::new(Manifest::load(manifest)?, backend, &ops);
            Model::open(options.threads(threads).cancelled_by(cancel.clone()))
        };
        let open = (!plugins.is_empty()).then_some(&open as OpenModel<'_>);
        super::run(&forge, &program, open, Terminal { output, interrupts, process: &process })
    })
}

/// Name of the program.
fn name(arguments: &[OsString]) -> String {
    let file = arguments.first().and_then(|file| Path::new(file).file_stem());
    file.map_or_else(|| "forge".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn line(arguments: &[OsString]) -> Result<Line, clap::Error> {
    let name = name(arguments);
    let examples = format!(
        "Examples:\n  {name} CHECKPOINT --out DIR\n  {name} CHECKPOINT --out DIR --target v79 --precision w8a16 --check\n  \
         {name} plan CHECKPOINT\n  {name} estimate CHECKPOINT\n  {name} --synthetic config.json --out DIR\n\n\
         Model classes with a recipe: {}",
        architectures().unwrap_or_default().join(", ")
    );
    let command = Line::command()
        .about("Make a bundle from a Hugging Face checkpoint")
        .long_about(None)
        .after_help(examples)
        .mut_subcommand("plan", |command| command.after_help(None))
        .mut_subcommand("estimate", |command| command.after_help(None));
    Line::from_arg_matches(&command.try_get_matches_from(arguments)?)
}

fn parse(arguments: &[OsString]) -> Result<ForgeArgs, clap::Error> {
    line(arguments).map(|line| line.forge)
}
