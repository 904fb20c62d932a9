//! `qhx demo`: the whole way with a tiny model, from a checkpoint to text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use qhx::libraries::Libraries;
use qhx::{BackendChoice, cache};
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::Manifest;
use qhx_core::engine::{Prompt, Request};
use qhx_forge::program::compiler;
use qhx_forge::{ForgeOptions, forge};
use qhx_qnn::Target;
use qhx_tools::verify::is_intact;

use crate::Status;
use crate::app::App;
use crate::args::BackendArgs;
use crate::fixture;
use crate::progress::ForgeProgress;
use crate::session::{self, Stream};

const PROMPT: &str = "The capital of France is";
/// The end of the sentence and the one after it.
const MAX_NEW: usize = 23;
const MAX_CTX: usize = 128;

/// Run a tiny model, from its checkpoint to text
///
/// Makes a bundle of a small Qwen3.5 checkpoint that comes with the program, in the cache folder,
/// and completes a sentence with it. With QNN libraries the bundle has context binaries and runs
/// on the NPU or its emulator; without, it runs on the CPU.
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
    let libraries = match args.backend.backend {
        BackendChoice::Cpu => None,
        BackendChoice::Qnn => Some(args.backend.libraries.files().require("backend qnn")?),
        BackendChoice::Auto => args.backend.libraries.files().find()?,
    };
    let bundle = bundle(app, libraries.as_ref())?;
    let mut model = session::open(app, &bundle, None, &args.backend)?;
    let request = Request::greedy(Prompt::Text(PROMPT.to_owned()), MAX_NEW);
    if !args.json {
        app.output.write(PROMPT)?;
    }
    let stream = if args.json { Stream::Quiet } else { Stream::Text };
    let generation = session::generate(app, &mut model, &request, &[], stream)?;
    if args.json {
        app.output.json(&session::json(&model, &generation, &[]))?;
    }
    say!("{}, {}", session::load(&model), session::summary(&generation));
    say!("bundle: {}", bundle.display());
    Ok(session::status(&generation))
}

/// The tiny model's bundle, made if it is not there yet.
fn bundle(app: &App, libraries: Option<&Libraries>) -> Result<PathBuf> {
    let target = Target::V81;
    let form = libraries.map_or_else(|| "cpu".to_owned(), |_| target.to_string());
    let parent = cache::dir()?.join("demo");
    let name = format!("{}-{}-{form}", env!("CARGO_PKG_VERSION"), fixture::fingerprint());
    let out = parent.join(name);
    let _working = app.interrupts.working();
    let cancel = app.interrupts.token();
    if out.is_dir() && reusable(&out, cancel)? {
        return Ok(out);
    }
    std::fs::create_dir_all(&parent).map_err(|e| Error::io(ErrorKind::Io, &parent, e))?;
    let checkpoint = tempfile::Builder::new()
        .prefix(".checkpoint-")
        .tempdir_in(&parent)
        .map_err(|e| Error::io(ErrorKind::Io, &parent, e))?;
    fixture::write(checkpoint.path())?;
    say!("making the tiny model's bundle for {form}");
    let compiler = libraries.map(|libraries| compiler(libraries, target)).transpose()?;
    let options = ForgeOptions {
        overwrite: true,
        name: Some("qwen35-tiny".to_owned()),
        max_ctx: Some(MAX_CTX),
        compiler: compiler.map(|compiler| Arc::new(compiler) as _),
        ..ForgeOptions::new(&out)
    };
    let mut progress = ForgeProgress::quiet(cancel.clone());
    match forge(checkpoint.path(), &options, &mut progress) {
        Ok(_) => Ok(out),
        // Another process made it meanwhile.
        Err(e) if e.kind() != ErrorKind::Cancelled && reusable(&out, cancel)? => {
            tracing::debug!(error = %e, "made by another process");
            Ok(out)
        }
        Err(e) => Err(e),
    }
}

fn reusable(bundle: &Path, cancel: &qhx_base::CancelToken) -> Result<bool> {
    match Manifest::load(bundle) {
        Ok(manifest) => is_intact(&manifest, cancel),
        Err(_) => Ok(false),
    }
}
