//! Compiles each context in a process of its own: the program with its hidden command `compile-context`, so that it has
//! the recipes of the forge that starts it.
//!
//! The QNN library numbers what it makes from the start of the process, so that a binary would depend on
//! what was compiled before it: only a new process makes the same one again after a forge was stopped. The
//! library also leaves what lies in memory where it rounds sizes up; the allocator of the new process has
//! to hand out zeros, so that binaries are equal byte for byte and carry nothing of the process away. And when
//! the library crashes, or the system ends it for the memory it takes, the forge can say so.
//!
//! The process writes one JSON object a line: its progress, then its bytes or its error. It ends when its standard
//! input closes, and so does not outlive the forge.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use parking_lot::Mutex;
use qhx::vars;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_graph::graph::Graph;
use qhx_terminal::args::ProcessArgs;
use qhx_terminal::output::Output;
use qhx_terminal::signal::INTERRUPTED;
use qhx_terminal::{Status, Terminal};
use serde::{Deserialize, Serialize};

use super::args::{CompileContextArgs, ForgeArgs};
use super::compiler::compiler;
use super::targets::TargetChoice;
use super::{Found, Program};
use crate::compile::Compiler;
use crate::estimate::{GraphEstimate, has_no_cost_model, read, temporary};
use crate::plan::plan;
use crate::qnn::QnnCompiler;
use crate::{Progress, registry};

/// The setting with which glibc's allocator fills what it hands out with zeros, small blocks included.
const ALLOCATOR: (&str, &str) =
    (vars::GLIBC_TUNABLES, "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0");
/// Interval at which a waiting forge checks for cancellation.
const TICK: Duration = Duration::from_millis(50);

/// A report of the process that compiles to the forge.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Stage { what: String, total: u64 },
    Done(u64),
    Note(String),
    Estimated(Box<GraphEstimate>),
    Finished(u64),
    Failed { kind: String, message: String, hint: Option<String>, code: Option<u64> },
}

/// Compiles in processes of their own.
pub(super) struct SubprocessCompiler {
    compiler: Arc<dyn Compiler>,
    file: PathBuf,
    /// Name that people call the program by, for the hint to plan the memory.
    name: String,
    /// Arguments before the context's key and the binary's path.
    before: Vec<OsString>,
    /// Arguments behind them.
    behind: Vec<OsString>,
    estimates: Estimates,
}

/// Estimates of the graphs that were compiled, where the command line asks for them.
pub(super) type Estimates = Arc<Mutex<Vec<GraphEstimate>>>;

impl SubprocessCompiler {
    /// Compiles as `compiler` does, in processes of `file`, which is the program. `found` is added to the options of
    /// the command line.
    pub(super) fn new(
        compiler: Arc<dyn Compiler>,
        file: &Path,
        program: &Program,
        target: TargetChoice,
        found: &Found,
        process: &ProcessArgs,
    ) -> Self {
        let mut options: Vec<OsString> = vec!["-v".into(); process.verbose.into()];
        options.extend(["--target".into(), target.name().into()]);
        if let Some(filter) = &process.log {
            options.extend(["--log".into(), filter.into()]);
        }
        let line = [OsString::from("--")].into_iter().chain(std::env::args_os());
        let more = found.words();
        let before = program.words.iter().copied().chain(["compile-context"]);
        let behind = options.into_iter().chain(line).chain(more);
        Self::with_command(
            compiler,
            file,
            program,
            before.map(Into::into).collect(),
            behind.collect(),
        )
    }

    /// Compiles as `compiler` does, in processes of `file`: the arguments `before` stand before a context's key and the
    /// binary's path, those of `behind` after them.
    pub(super) fn with_command(
        compiler: Arc<dyn Compiler>,
        file: &Path,
        program: &Program,
        before: Vec<OsString>,
        behind: Vec<OsString>,
    ) -> Self {
        let (file, name) = (file.to_owned(), program.name.clone());
        Self { compiler, file, name, before, behind, estimates: Estimates::default() }
    }

    /// Adds the estimates of what is compiled to `estimates`.
    pub(super) fn estimating(mut self, estimates: Estimates) -> Self {
        self.estimates = estimates;
        self
    }

    fn start(&self, key: &str, share_weights: bool, out: &Path) -> Result<Child> {
        let (variable, value) = ALLOCATOR;
        let mut tunables = std::env::var_os(variable).unwrap_or_default();
        if !tunables.is_empty() {
            tunables.push(":");
        }
        tunables.push(value);
        // Absolute: a relative path may begin like an option.
        let out = std::path::absolute(out).map_err(|e| Error::io(ErrorKind::Io, out, e))?;
        Command::new(&self.file)
            .args(&self.before)
            .arg(key)
            .arg(&out)
            .args(share_weights.then_some("--share-weights"))
            .args(&self.behind)
            .env(variable, tunables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Error::io(ErrorKind::Io, &self.file, e))
    }
}

impl Compiler for SubprocessCompiler {
    fn dsp_arch(&self) -> &str {
        self.compiler.dsp_arch()
    }

    fn soc_model(&self) -> Option<u32> {
        self.compiler.soc_model()
    }

    fn version(&self) -> String {
        self.compiler.version()
    }

    fn compile(
        &self,
        key: &str,
        _graphs: &[Graph],
        share_weights: bool,
        out: &Path,
        progress: &mut dyn Progress,
    ) -> Result<u64> {
        let mut child = self.start(key, share_weights, out)?;
        let result = follow(&lines(&mut child), &self.estimates, progress);
        if result.is_err() {
            // It has ended, or is not wanted any more.
            let _ = child.kill();
        }
        let status = child.wait().map_err(|e| Error::io(ErrorKind::Io, &self.file, e))?;
        match result {
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => Err(Error::new(
                ErrorKind::Runtime,
                format!("the process that compiles it ended with {status} before it was done"),
            )
            .hint(format!(
                "signal 9 mostly means that memory ran out: see `{} plan`, and take more --shards; \
                 any other signal is a crash of the QNN library",
                self.name
            ))),
            Err(error) => {
                let _ = std::fs::remove_file(out);
                Err(error)
            }
        }
    }
}

/// The lines of the child's standard output, read by a thread of their own.
fn lines(child: &mut Child) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
    }
    receiver
}

/// Passes on what the child says until it ends. The bytes it wrote; none when it did not get so far.
fn follow(
    lines: &Receiver<String>,
    estimates: &Estimates,
    progress: &mut dyn Progress,
) -> Result<Option<u64>> {
    let mut bytes = None;
    loop {
        let line = match lines.recv_timeout(TICK) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => return Ok(bytes),
            Err(RecvTimeoutError::Timeout) if progress.cancelled() => {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            Err(RecvTimeoutError::Timeout) => continue,
        };
        let message = serde_json::from_str(&line).map_err(|e| {
            Error::caused(
                ErrorKind::Internal,
                format_args!("the process that compiles wrote {line:?}"),
                e,
            )
        })?;
        match message {
            Message::Stage { what, total } => progress.stage(&what, total),
            Message::Done(done) => progress.advance(done),
            Message::Note(note) => progress.note(&note),
            Message::Estimated(estimate) => estimates.lock().push(*estimate),
            Message::Finished(written) => bytes = Some(written),
            Message::Failed { kind, message, hint, code } => {
                let kind = kind.parse().unwrap_or(ErrorKind::Internal);
                let mut error = Error::new(kind, message);
                if let Some(hint) = hint {
                    error = error.hint(hint);
                }
                return Err(match code {
                    Some(code) => error.with_code(code),
                    None => error,
                });
            }
        }
    }
}

/// Compiles a context of the forge that started this process.
pub(super) fn run(
    args: &CompileContextArgs,
    program: &Program,
    terminal: Terminal<'_>,
) -> Result<Status> {
    serve(terminal, |messages| compile(args, program, messages))
}

/// Does what another process waits for, and reports to it.
pub(super) fn serve(
    terminal: Terminal<'_>,
    work: impl FnOnce(&mut MessageProgress<'_>) -> Result<u64>,
) -> Result<Status> {
    std::thread::spawn(|| {
        // Nothing is ever written: this returns when the forge has ended.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(INTERRUPTED);
    });
    let _working = terminal.interrupts.working();
    let token = terminal.interrupts.token().clone();
    let mut progress = MessageProgress { output: terminal.output, token };
    let message = match work(&mut progress) {
        Ok(bytes) => Message::Finished(bytes),
        Err(error) => Message::Failed {
            kind: error.kind().name().to_owned(),
            message: error.message().to_owned(),
            hint: error.hint_text().map(str::to_owned),
            code: error.code(),
        },
    };
    progress.output.json(&message)?;
    Ok(Status::Done)
}

fn compile(
    args: &CompileContextArgs,
    program: &Program,
    messages: &mut MessageProgress<'_>,
) -> Result<u64> {
    let forge = (program.parse)(&args.forge)
        .map_err(|e| Error::new(ErrorKind::Usage, e.to_string()).with_source(e))?;
    let ForgeArgs { shape, libraries, .. } = &forge;
    let libraries = libraries.files().require("a context binary")?;
    let target = args.target.target(&libraries)?;
    let compiler = compiler(&libraries, target)?;
    let options = shape.options(&args.file, Some(target))?;
    let (_, recipe) = plan(&forge.checkpoint()?, registry::recipe, &options, true)?;
    let context = recipe.contexts.iter().find(|c| c.key == args.key).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("the recipe has no context {:?}", args.key))
    })?;
    let compile = |compiler: &QnnCompiler, messages: &mut MessageProgress<'_>| {
        let CompileContextArgs { share_weights, file, .. } = args;
        let graphs: Vec<_> = context.compiled().cloned().collect();
        compiler.compile(&context.key, &graphs, *share_weights, file, messages)
    };
    if !forge.estimate {
        return compile(&compiler, messages);
    }
    let folder = temporary()?;
    let scheduled = compiler.clone().with_schedules(folder.path(), forge.corner);
    let bytes = match compile(&scheduled, messages) {
        // The estimate says so when the bundle is there.
        Err(error) if has_no_cost_model(&error) => return compile(&compiler, messages),
        other => other?,
    };
    for estimate in read(&recipe, context, &compiler, &args.file, folder.path())? {
        messages.send(&Message::Estimated(Box::new(estimate)));
    }
    Ok(bytes)
}

/// Progress as messages to the forge.
pub(super) struct MessageProgress<'a> {
    output: &'a mut Output,
    token: CancelToken,
}

impl MessageProgress<'_> {
    fn send(&mut self, message: &Message) {
        if self.output.json(message).is_err() {
            // The forge has ended.
            self.token.cancel();
        }
    }
}

impl Progress for MessageProgress<'_> {
    fn stage(&mut self, what: &str, total: u64) {
        self.send(&Message::Stage { what: what.to_owned(), total });
    }

    fn advance(&mut self, done: u64) {
        self.send(&Message::Done(done));
    }

    fn note(&mut self, message: &str) {
        self.send(&Message::Note(message.to_owned()));
    }

    fn cancelled(&self) -> bool {
        self.token.is_cancelled()
    }
}
