//! Tasks in a process of their own, for work that may crash, never end or take all memory.
//!
//! A program that can be started again to do tasks says so once, with [`ChildProgram::install`]. The command
//! line does: its hidden command `helper TASK` calls [`serve`]. From then on [`program`] answers with it, and
//! whoever has such work asks for it with [`ChildProgram::ask`]. In a program that installs nothing, the
//! work is done in the process itself, with whatever bounds its module has.
//!
//! | the child | how |
//! |---|---|
//! | crashes | the parent gets [`ChildFailure::Crashed`] with the signal or exit code; no core file is written |
//! | takes too long | the parent ends it |
//! | takes too much memory | the child limits itself before it reads its input; on Windows, its job |
//! | prints | standard output and standard error of the task go nowhere; the answer has a stream of its own |
//! | outlives the parent | it ends when its standard input closes |
//!
//! This is no sandbox: the child has the rights of the parent.
//!
//! To the child's standard input go the length of the input (8 bytes, little-endian) and the input. Back come
//! `qhxA`, one byte that says whether the task failed, the length of the answer and the answer.

mod limits;

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::qnn::stdout::redirect_to_stderr;
use crate::{CancelToken, Error, ErrorKind, Result};

/// Begins an answer: a program that is no helper of ours is noticed by it.
const MAGIC: [u8; 4] = *b"qhxA";

/// What is kept of a child's last words on standard error, in bytes.
const LAST_WORDS: usize = 4 << 10;

/// How Rust's standard library says that memory ran out.
const NO_MEMORY: &[u8] = b"memory allocation of ";

static PROGRAM: OnceLock<ChildProgram> = OnceLock::new();

/// A program that does tasks when it is started with these arguments, then the task's name, then
/// the memory limit in bytes (0 for none). It has to pass the last two to [`serve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildProgram {
    /// The program's file.
    pub program: PathBuf,
    /// Arguments that come before the task's name.
    pub arguments: Vec<OsString>,
}

/// What a task may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory; `None` for no limit. On Linux and Android this counts what the process can write and
    /// shares with nobody, on Windows what it has committed, on other Unix systems its whole address space.
    pub memory: Option<u64>,
    /// Time until the answer has come.
    pub time: Duration,
    /// Bytes of the answer.
    pub output: usize,
}

/// Why a task gave no answer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ChildFailure {
    /// The process could not be started.
    #[error("{}: cannot be started as a helper: {why}", program.display())]
    Start {
        /// The program's file.
        program: PathBuf,
        /// What the system says.
        why: String,
    },
    /// The process ended before it answered: `signal 11`, `exit code 101`.
    #[error("the process that tried it ended with {0}")]
    Crashed(String),
    /// The process was ended because its time was up.
    #[error("it had not ended after {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The process needed more memory than its limit in bytes.
    #[error("it needs more than {} MiB of memory", .0 >> 20)]
    OutOfMemory(u64),
    /// The answer is longer than this limit in bytes.
    #[error("its result is longer than {0} bytes")]
    TooMuchOutput(usize),
    /// The caller asked for the work to stop.
    #[error("cancelled")]
    Cancelled,
    /// The task itself answered with an error.
    #[error("{0}")]
    Task(Error),
}

impl ChildFailure {
    /// As the error of what the task was to do: `what` names it, such as a file, and comes first in the message.
    /// An error that the task answered with stays as it is, kind and message.
    pub fn into_error(self, kind: ErrorKind, what: impl std::fmt::Display) -> Error {
        match self {
            Self::Task(error) => error,
            Self::Cancelled => Error::new(ErrorKind::Cancelled, self.to_string()).context(what),
            Self::Start { .. } => Error::new(ErrorKind::Internal, self.to_string()).context(what),
            other => Error::new(kind, other.to_string()).context(what),
        }
    }
}

/// A task of a helper: its name, and what makes an answer of an input.
pub type Task = (&'static str, fn(&[u8]) -> Result<Vec<u8>>);

/// The program that this process has installed.
pub fn program() -> Option<&'static ChildProgram> {
    PROGRAM.get()
}

impl ChildProgram {
    /// This very program with the given arguments.
    pub fn this<A: Into<OsString>>(arguments: impl IntoIterator<Item = A>) -> io::Result<Self> {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Ok(Self { program: std::env::current_exe()?, arguments })
    }

    /// Has the whole process use it from now on. The first one stays.
    pub fn install(self) {
        let _ = PROGRAM.set(self);
    }

    /// Does `task` in a new process and waits for the answer.
    pub fn ask(&self, task: &str, input: Vec<u8>, limits: Limits) -> Result<Vec<u8>, ChildFailure> {
        self.ask_until(task, input, limits, &CancelToken::new())
    }

    /// As [`ChildProgram::ask`]. Cancelling ends the process with [`ChildFailure::Cancelled`].
    pub fn ask_until(
        &self,
        task: &str,
        input: Vec<u8>,
        limits: Limits,
        cancel: &CancelToken,
    ) -> Result<Vec<u8>, ChildFailure> {
        let cannot = |e: io::Error| ChildFailure::Start {
            program: self.program.clone(),
            why: e.to_string(),
        };
        let mut child = Running(self.spawn(task, limits.memory).map_err(cannot)?);
        let last_words = last_words(&mut child.0).map_err(cannot)?;
        let answer = converse(&mut child.0, input, limits.output).map_err(cannot)?;
        match wait(&answer, limits.time, cancel) {
            _ if cancel.is_cancelled() => return Err(ChildFailure::Cancelled),
            Ok(Ok(Answer::Whole(bytes))) => return Ok(bytes),
            Ok(Ok(Answer::Failed(error))) => return Err(ChildFailure::Task(error.into_error())),
            Ok(Ok(Answer::TooLong)) => return Err(ChildFailure::TooMuchOutput(limits.output)),
            Err(RecvTimeoutError::Timeout) => return Err(ChildFailure::TimedOut(limits.time)),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => {}
        }
        // A process closes its files after its exit status is settled. One that closed its output and
        // goes on is ended here.
        let status = child.end().map_err(cannot)?;
        let words = last_words.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
        let no_memory = words.windows(NO_MEMORY.len()).any(|part| part == NO_MEMORY);
        match limits.memory {
            Some(memory) if no_memory => Err(ChildFailure::OutOfMemory(memory)),
            _ => Err(ChildFailure::Crashed(describe(status))),
        }
    }

    fn spawn(&self, task: &str, memory: Option<u64>) -> io::Result<Child> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .arg(task)
            .arg(memory.unwrap_or(0).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Ctrl-C is for the parent, which ends the child by going away.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        #[cfg(windows)]
        {
            const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
            std::os::windows::process::CommandExt::creation_flags(
                &mut command,
                CREATE_NEW_PROCESS_GROUP,
            );
        }
        command.spawn()
    }
}

/// What comes within a time, unless it is cancelled before.
fn wait<T>(
    receiver: &Receiver<T>,
    time: Duration,
    cancel: &CancelToken,
) -> Result<T, RecvTimeoutError> {
    const STEP: Duration = Duration::from_millis(20);
    let start = Instant::now();
    loop {
        let left = time.saturating_sub(start.elapsed());
        match receiver.recv_timeout(left.min(STEP)) {
            Err(RecvTimeoutError::Timeout) if left > STEP && !cancel.is_cancelled() => {}
            received => return received,
        }
    }
}

/// A child that does not outlive this value.
struct Running(Child);

impl Running {
    fn end(&mut self) -> io::Result<ExitStatus> {
        // It fails when the child has ended, which is as well.
        let _ = self.0.kill();
        self.0.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

enum Answer {
    Whole(Vec<u8>),
    Failed(PlainError),
    TooLong,
}

/// Writes the input and reads the answer on threads: neither pipe may block the other, nor the parent.
fn converse(
    child: &mut Child,
    input: Vec<u8>,
    limit: usize,
) -> io::Result<Receiver<io::Result<Answer>>> {
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("it has no pipes"));
    };
    let (sender, receiver) = mpsc::channel();
    let (answered, has_answered) = mpsc::channel::<()>();
    thread::Builder::new().spawn(move || {
        // A child that died does not read it, which its missing answer tells.
        let _ = stdin.write_all(&(input.len() as u64).to_le_bytes());
        let _ = stdin.write_all(&input).and_then(|()| stdin.flush());
        drop(input);
        // The pipe stays open until the answer is there: the child ends when it closes.
        let _ = has_answered.recv();
    })?;
    thread::Builder::new().spawn(move || {
        let answer = read_answer(stdout, limit);
        drop(answered);
        let _ = sender.send(answer);
    })?;
    Ok(receiver)
}

fn read_answer(mut stdout: impl Read, limit: usize) -> io::Result<Answer> {
    let mut magic = [0; MAGIC.len()];
    let (mut failed, mut len) = ([0], [0; 8]);
    stdout.read_exact(&mut magic)?;
    stdout.read_exact(&mut failed)?;
    stdout.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if magic != MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    if len > limit as u64 {
        return Ok(Answer::TooLong);
    }
    let mut bytes = Vec::new();
    if stdout.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match failed {
        [0] => Ok(Answer::Whole(bytes)),
        _ => Ok(Answer::Failed(serde_json::from_slice(&bytes)?)),
    }
}

/// Reads standard error to its end, so that the child never waits for a reader, and keeps the end of it.
fn last_words(child: &mut Child) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    let Some(mut stderr) = child.stderr.take() else { return Ok(receiver) };
    thread::Builder::new().spawn(move || {
        let (mut kept, mut buffer) = (Vec::new(), [0; LAST_WORDS]);
        while let Ok(len @ 1..) = stderr.read(&mut buffer) {
            kept.extend_from_slice(&buffer[..len]);
            kept.drain(..kept.len().saturating_sub(LAST_WORDS));
        }
        let _ = sender.send(kept);
    })?;
    Ok(receiver)
}

fn describe(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal}");
    }
    match status.code() {
        // What Windows ends a process with, such as 0xc0000005, is known by its hexadecimal digits.
        Some(code) if cfg!(windows) && code < 0 => format!("exit code {code:#x}"),
        Some(code) => format!("exit code {code}"),
        None => "no exit code".to_owned(),
    }
}

/// The child's part. `arguments` are those after the ones of [`ChildProgram::arguments`]: the task's
/// name and the memory limit. A program calls this before anything else, and ends with what it returns.
pub fn serve(arguments: &[OsString], tasks: &[Task]) -> ExitCode {
    match do_task(arguments, tasks) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(ErrorKind::Usage.exit_code()),
    }
}

fn do_task(arguments: &[OsString], tasks: &[Task]) -> io::Result<()> {
    let [name, memory] = arguments else { return Err(io::ErrorKind::InvalidInput.into()) };
    let memory = memory.to_str().and_then(|m| m.parse().ok()).ok_or(io::ErrorKind::InvalidInput)?;
    limits::set(memory)?;
    // What libraries print goes to standard error, of which the parent shows nothing.
    let mut output = redirect_to_stderr()?.into_file()?;
    let input = read_input()?;
    let answer = match tasks.iter().find(|(known, _)| OsStr::new(known) == name) {
        Some((_, task)) => catch_unwind(AssertUnwindSafe(|| task(&input)))
            .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the helper's task panicked"))),
        None => {
            let name = name.to_string_lossy();
            Err(Error::new(ErrorKind::Internal, format!("the helper has no task {name:?}")))
        }
    };
    let (failed, bytes) = match answer {
        Ok(bytes) => (0, bytes),
        Err(error) => (1, serde_json::to_vec(&PlainError::of(&error))?),
    };
    output.write_all(&MAGIC)?;
    output.write_all(&[failed])?;
    output.write_all(&(bytes.len() as u64).to_le_bytes())?;
    output.write_all(&bytes)?;
    output.flush()
}

/// Reads the input, and ends the process when the parent goes away after that.
fn read_input() -> io::Result<Vec<u8>> {
    let mut stdin = io::stdin();
    let mut len = [0; 8];
    stdin.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let mut input = Vec::new();
    if (&mut stdin).take(len).read_to_end(&mut input)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    thread::Builder::new().spawn(move || {
        // Nothing more is ever written: this returns when the pipe closes.
        let _ = stdin.read(&mut [0]);
        std::process::exit(ErrorKind::Cancelled.exit_code().into());
    })?;
    Ok(input)
}

/// An error on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
struct PlainError {
    kind: String,
    message: String,
    hint: Option<String>,
    code: Option<u64>,
}

impl PlainError {
    fn of(error: &Error) -> Self {
        Self {
            kind: error.kind().name().to_owned(),
            message: error.message().to_owned(),
            hint: error.hint_text().map(str::to_owned),
            code: error.code(),
        }
    }

    // No `From`: a second one for `Error` would make the type of `?` ambiguous elsewhere.
    fn into_error(self) -> Error {
        let kind = ErrorKind::from_name(&self.kind).unwrap_or(ErrorKind::Internal);
        let mut error = Error::new(kind, self.message);
        if let Some(hint) = self.hint {
            error = error.hint(hint);
        }
        match self.code {
            Some(code) => error.with_code(code),
            None => error,
        }
    }
}
