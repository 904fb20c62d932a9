//! `qhx run`: from a name to an answer.

use std::path::PathBuf;

use clap::Args;
use qhx::hub::index::{Does, Entry};
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::models::{Machine, Models, Wanted};

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, IndexArgs};
use crate::commands::chat::{self, ChatOptions, Single};
use crate::media::MediaArgs;
use crate::progress::ObtainProgress;
use crate::trace::Tracing;

const EXAMPLES: &str = "\
Examples:
  qhx run smollm2
  qhx run smollm2 'What is gravity?'
  qhx run qwen3-vl-2b 'What is in this image?' --image photograph.jpg
  qhx run owner/qwen35_HNPU
  qhx models                                  # all names";

/// Make a model ready by its name, and talk with it
///
/// A name of the index (qhx models) is a published bundle for this machine's NPU, or a checkpoint that a bundle is made
/// of, for the NPU or for the CPU. OWNER/NAME is a repository of a hub, a path a bundle. What was fetched and made
/// stays in the cache: the next time it begins at once. An interrupted one goes on where it ended.
///
/// With PROMPT it answers once. Models that do not answer texts are made ready; the message says which command
/// uses them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// The model: a name of the index, OWNER/NAME of a hub, or a bundle's path
    pub name: String,
    /// The message [default: those of standard input, one a line]
    pub prompt: Option<String>,
    #[command(flatten)]
    pub index: IndexArgs,
    #[command(flatten)]
    pub media: MediaArgs,
    #[command(flatten)]
    pub chat: ChatOptions,
}

/// Runs the command.
pub(crate) fn run(args: &RunArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    if args.prompt.is_none() && !args.media.files.is_empty() {
        return Err(Error::new(ErrorKind::Usage, "--image, --audio and --video need a PROMPT")
            .hint("in a conversation /image FILE and the like attach files"));
    }
    let attachments = args.media.attachments()?;
    let models = args.index.models(&app.interrupts)?;
    let path = obtain(&args.name, &models, &args.chat.backend, app)?;
    let entry = models.index().entry(&args.name);
    if let Some(command) = entry.and_then(command_of) {
        say!("{0} is ready: qhx {command} {0} …", args.name);
        app.output.line(&path.display().to_string())?;
        return Ok(Status::Done);
    }
    let single = args.prompt.as_deref().map(|text| Single { text, attachments });
    chat::talk(&path, &args.chat, single, app, tracing)
}

/// Makes the model of a name ready. Returns its bundle's path.
pub(crate) fn obtain(
    name: &str,
    models: &Models,
    backend: &BackendArgs,
    app: &App,
) -> Result<PathBuf> {
    let wanted = models.find(name)?;
    if let Wanted::Path(path) = wanted {
        return Ok(path);
    }
    let machine = Machine::of(backend.backend, &backend.libraries.files())?;
    let progress = ObtainProgress::new(app.interrupts.token().clone());
    let _working = app.interrupts.working();
    let path =
        models.obtain(&wanted, &machine, &|step| progress.step(&step), app.interrupts.token());
    progress.end();
    path
}

/// Command that uses a model which does not answer texts.
pub(crate) fn command_of(entry: &Entry) -> Option<&'static str> {
    let first = entry.does.iter().find_map(|does| match does {
        Does::Text => Some(None),
        Does::Transcribe => Some(Some("transcribe")),
        Does::Speak => Some(Some("speak")),
        Does::Embed => Some(Some("embed")),
        Does::Rerank => Some(Some("rerank")),
        _ => None,
    });
    first.flatten()
}
