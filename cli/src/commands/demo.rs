//! `qhx demo`: the whole way from a checkpoint to text, without a network.

use std::path::PathBuf;

use clap::Args;
use qhx::BackendChoice;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::engine::{Prompt, Request};
use qhx_tools::models::{Machine, Making, Models};

use crate::Status;
use crate::app::App;
use crate::args::BackendArgs;
use crate::fixture;
use crate::progress::ObtainProgress;
use crate::session::{self, Stream};

/// Beginning of a sentence for the tiny model.
const PROMPT: &str = "The capital of France is";
/// The end of the sentence and the one after it.
const MAX_NEW: usize = 23;
const MAX_CTX: usize = 128;

/// Complete a sentence with a tiny model that comes with the program
///
/// It needs no network: a bundle of the model is made in the cache folder. With QNN libraries it runs on the NPU or its
/// emulator, else on the CPU. `qhx run smollm2` runs a published model.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Runs the command.
pub(crate) fn run(args: &DemoArgs, app: &mut App) -> Result<Status> {
    let bundle = bundle(args, app)?;
    let mut model = session::open(app, &bundle, None, &args.backend)?;
    let stream = if args.json { Stream::Quiet } else { Stream::Text };
    if !args.json {
        app.output.write(PROMPT)?;
    }
    let request = Request::greedy(Prompt::Text(PROMPT.to_owned()), MAX_NEW);
    let generation = session::generate(app, &mut model, &request, &[], stream)?;
    if args.json {
        app.output.json(&session::json(&model, &generation, &[]))?;
    }
    say!("{}, {}", session::load(&model), session::summary(&generation));
    say!("bundle: {}", model.manifest().root.display());
    Ok(session::status(&generation))
}

/// The bundle in the cache folder, made if it is not there yet.
fn bundle(args: &DemoArgs, app: &App) -> Result<PathBuf> {
    let files = args.backend.libraries.files();
    // Of a model this small the emulator is quick.
    let choice = match args.backend.backend {
        BackendChoice::Auto if files.find()?.is_some() => BackendChoice::Qnn,
        choice => choice,
    };
    let machine = Machine::of(choice, &files)?;
    let scratch = tempfile::tempdir();
    let scratch = scratch.map_err(|e| Error::caused(ErrorKind::Io, "a temporary folder", e))?;
    fixture::write(scratch.path())?;
    let making = Making {
        name: "demo",
        title: "qwen35-tiny",
        precision: "fp16",
        task: None,
        max_ctx: Some(MAX_CTX),
        source: &fixture::fingerprint(),
    };
    let progress = ObtainProgress::new(app.interrupts.token().clone());
    let _working = app.interrupts.working();
    let models = Models::from_environment()?;
    let path = models.make(
        scratch.path(),
        &making,
        &machine,
        &|step| progress.step(&step),
        app.interrupts.token(),
    );
    progress.end();
    path
}
