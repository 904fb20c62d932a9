//! Makes bundles of checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx::models::Record;
use qhx_base::{CancelToken, Error, ErrorKind, Result, error, expected};
use qhx_forge::program::compiler;
use qhx_forge::{ForgeOptions, Progress, forge, rerank};
use qhx_types::Task;

use super::{Machine, OnStep, Step};

/// Task of a language model that tells by yes or no whether a document answers a query.
const RERANK: &str = "rerank";

/// Step of making a bundle.
#[derive(Debug)]
#[non_exhaustive]
pub enum ForgeStep<'a> {
    /// It begins.
    Begin {
        /// Name of the model.
        title: &'a str,
        /// `cpu`, or the architecture of the NPU.
        form: &'a str,
    },
    /// A stage begins, of this many bytes; 0 where that is not known.
    Stage(&'a str, u64),
    /// Bytes of the whole bundle, as planned.
    Total(u64),
    /// Bytes of a file that is done.
    Finished(u64),
    /// Bytes of the stage that are done.
    Advance(u64),
    /// Remark.
    Note(&'a str),
}

/// Bundle that is to be made.
#[derive(Debug, Clone, Copy)]
pub struct Making<'a> {
    /// Name among the models of this machine.
    pub name: &'a str,
    /// Name for people.
    pub title: &'a str,
    /// Precision of the weights: `fp16`, `w8a16` or `w4a16`.
    pub precision: &'a str,
    /// Task, where the checkpoint does not say it.
    pub task: Option<&'a str>,
    /// Positions of the context; the forge's default if none.
    pub max_ctx: Option<usize>,
    /// Origin of the checkpoint, with version or commit. A bundle of another one is made again.
    pub source: &'a str,
}

/// Makes the bundle of a checkpoint in the folder of a model. Returns its path.
pub(super) fn make(
    checkpoint: &Path,
    making: &Making<'_>,
    folder: &Path,
    machine: &Machine,
    on_step: OnStep<'_>,
    cancel: &CancelToken,
) -> Result<PathBuf> {
    let form = machine.form();
    let out = folder.join(&form);
    std::fs::create_dir_all(folder).map_err(|e| Error::io(ErrorKind::Io, folder, e))?;
    let mut options = ForgeOptions { overwrite: true, ..ForgeOptions::new(&out) };
    options.name = Some(making.name.to_owned());
    options.precision = making.precision.parse()?;
    match making.task {
        // A language model that is asked as Qwen3-Reranker is.
        Some(RERANK) => options.rerank = Some(rerank::qwen3()),
        task => options.task = task.map(parse_task).transpose()?,
    }
    options.max_ctx = making.max_ctx;
    if let (Some(libraries), Some(target)) = (machine.libraries(), machine.target()) {
        options.compiler = Some(Arc::new(compiler(libraries, target)?));
        options.share_weights = target.shares_weights() && !machine.is_emulated();
    }
    on_step(Step::Forge(ForgeStep::Begin { title: making.title, form: &form }));
    // A record of what was there stands for nothing while the bundle is made.
    qhx::models::records(folder)
        .iter()
        .filter(|old| old.form == form)
        .try_for_each(|old| old.remove(folder))?;
    forge(checkpoint, &options, &mut Reporter { on_step, cancel })
        .map_err(|e| e.context(format_args!("making a bundle of {}", making.title)))?;
    Record::of_made(folder, making.name, &form, making.source)?.write(folder)?;
    Ok(out)
}

/// Precision for a checkpoint that no index knows: a GGUF file keeps its blocks.
pub(super) fn precision_of(checkpoint: &Path) -> &'static str {
    let gguf = checkpoint.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    if gguf { "w4a16" } else { "w8a16" }
}

fn parse_task(name: &str) -> Result<Task> {
    let found = Task::ALL.into_iter().find(|task| task.name() == name);
    found.ok_or_else(|| {
        let known = expected(&Task::ALL.map(Task::name));
        error!(Usage, "task {name:?}: {known} or {RERANK}")
    })
}

struct Reporter<'a> {
    on_step: OnStep<'a>,
    cancel: &'a CancelToken,
}

impl Reporter<'_> {
    fn say(&self, step: ForgeStep<'_>) {
        (self.on_step)(Step::Forge(step));
    }
}

impl Progress for Reporter<'_> {
    fn stage(&mut self, what: &str, total: u64) {
        self.say(ForgeStep::Stage(what, total));
    }

    fn total(&mut self, bytes: u64) {
        self.say(ForgeStep::Total(bytes));
    }

    fn finished(&mut self, bytes: u64, _kept: bool) {
        self.say(ForgeStep::Finished(bytes));
    }

    fn advance(&mut self, done: u64) {
        self.say(ForgeStep::Advance(done));
    }

    fn note(&mut self, message: &str) {
        self.say(ForgeStep::Note(message));
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}
