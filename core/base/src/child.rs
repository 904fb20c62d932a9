//! Tasks in a process of their own, for work that may crash, never end or take all memory.
//!
//! A program that can be started again to do tasks declares it once, with [`ChildProgram::install`]. The command
//! line does: its hidden command `helper TASK` calls [`serve`]. From then on [`program`] returns it, and
//! whoever has such work asks for it with [`ChildProgram::ask`]. In a program that installs nothing, the
//! work is done in the process itself, with whatever bounds its module has.
//!
//! | the child | how |
//! |---|---|
//! | crashes | the parent gets [`ChildFailure::Crashed`] with the signal or exit code; no core file is written |
//! | is ended by the system or a user | the parent gets [`ChildFailure::Killed`]: this means nothing for the task |
//! | is of another version | it reports its version first, and gets no input |
//! | takes too long | the parent ends it |
//! | takes too much memory | the child limits itself before it reads its input; on Windows, its job |
//! | prints | standard output and standard error of the task go nowhere; the answer has a stream of its own |
//! | outlives the parent | it ends when its standard input closes |
//!
//! This is no sandbox: the child has the rights of the parent.
//!
//! The child begins with `qhxH`, the length of its version (one byte) and its version. To its standard input go the
//! length of an input (8 bytes, little-endian) and the input. Back come `qhxA`, one byte for whether the task
//! failed, the length of the answer and the answer. A [`Helper`] then sends the next input; the child ends when its
//! standard input does.

mod limits;

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::escape::shown;
use crate::stdout::redirect_to_stderr;
use crate::{CancelToken, Error, ErrorKind, Result, error};

/// Begins an answer.
const MAGIC: [u8; 4] = *b"qhxA";

/// Begins what a child writes: a program that is no helper of ours is noticed by it.
const GREETING: [u8; 4] = *b"qhxH";

/// Version that parent and child must share.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Bytes kept of the end of a child's standard error.
const LAST_WORDS: usize = 4 << 10;

/// Message with which Rust's standard library reports that memory ran out.
const NO_MEMORY: &[u8] = b"memory allocation of ";

static PROGRAM: OnceLock<ChildProgram> = OnceLock::new();

/// The file of this very program, as it was called when the program first asked for it.
static THIS: OnceLock<PathBuf> = OnceLock::new();

/// A program that does tasks when it is started with these arguments, then the task's name, then
/// the memory limit in bytes (0 for none). It has to pass the last two to [`serve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildProgram {
    /// The program's file.
    pub program: PathBuf,
    /// Arguments that come before the task's name.
    pub arguments: Vec<OsString>,
}

/// Limits of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory; `None` for no limit. On Linux and Android this counts what the process can write and
    /// shares with nobody, on Windows what it has committed, on other Unix systems its whole address space.
    pub memory: Option<u64>,
    /// Time until an answer has come.
    pub time: Duration,
    /// Bytes of an answer.
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
        /// Error that the system reports.
        why: String,
    },
    /// The program is no helper, or one of another version.
    #[error("{}: cannot be used as a helper: it is {found}, expected qhx {VERSION}", program.display())]
    Foreign {
        /// The program's file.
        program: PathBuf,
        /// Description of the program that was found.
        found: String,
    },
    /// The process crashed before it answered: `signal 11`, `exit code 101`.
    #[error("the process that tried it ended with {0}")]
    Crashed(String),
    /// The system or a user ended the process before it answered: `signal 9`.
    #[error("the system or a user ended the process that tried it ({0})")]
    Killed(String),
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
    /// The task itself returned an error.
    #[error("{0}")]
    Task(Error),
}

impl ChildFailure {
    /// Error of the task. `what` names its object, such as a file, and comes first in the message. An error that the
    /// task returned keeps its kind and message. A fault of the helper itself becomes [`ErrorKind::Internal`].
    pub fn into_error(self, kind: ErrorKind, what: impl std::fmt::Display) -> Error {
        let kind = if self.is_the_helpers() { ErrorKind::Internal } else { kind };
        let hint = match &self {
            Self::Foreign { .. } => Some("the program was replaced while it ran: start it again"),
            Self::Killed(_) => Some("try again; systems end processes where memory runs short"),
            _ => None,
        };
        let error = match self {
            Self::Task(error) => return error,
            Self::Cancelled => Error::new(ErrorKind::Cancelled, self.to_string()).context(what),
            other => Error::new(kind, other.to_string()).context(what),
        };
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }

    /// True for a failure of the helper itself, which means nothing for its input.
    pub fn is_the_helpers(&self) -> bool {
        matches!(self, Self::Start { .. } | Self::Foreign { .. } | Self::Killed(_))
    }
}

/// For how long a program remembers that a file crashed a helper.
const CRASH_REMEMBERED: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// A crash of a helper, as it is kept in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CrashTime(u64);

impl CrashTime {
    /// A crash of this moment.
    pub fn now() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(now.map_or(0, |now| now.as_secs()))
    }

    /// True if the crash is too old to be held against a file, or lies in the future.
    pub fn is_over(self) -> bool {
        Self::now().0.checked_sub(self.0).is_none_or(|age| age >= CRASH_REMEMBERED.as_secs())
    }

    /// The message for a crash that is kept in `file`.
    pub fn hint(file: &Path) -> String {
        let days = CRASH_REMEMBERED.as_secs() / (24 * 60 * 60);
        format!(
            "this is remembered for {days} days: delete {} to have it tried again",
            file.display()
        )
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
    ///
    /// On Linux and Android that is the file that runs, also after another one has taken its place.
    ///
    /// # Errors
    /// When the path of this program cannot be found.
    pub fn this<A: Into<OsString>>(arguments: impl IntoIterator<Item = A>) -> io::Result<Self> {
        let arguments = arguments.into_iter().map(Into::into).collect();
        let program = match THIS.get() {
            Some(program) => program.clone(),
            None => {
                let program = std::env::current_exe()?;
                THIS.get_or_init(|| program).clone()
            }
        };
        Ok(Self { program, arguments })
    }

    /// Has the whole process use it from now on. The first one stays.
    pub fn install(self) {
        let _ = PROGRAM.set(self);
    }

    /// Does `task` in a new process and waits for the answer.
    ///
    /// # Errors
    /// Any [`ChildFailure`]: the task failed, or the process did not start, ended, or exceeded a limit.
    pub fn ask(&self, task: &str, input: Vec<u8>, limits: Limits) -> Result<Vec<u8>, ChildFailure> {
        self.ask_until(task, input, limits, &CancelToken::new())
    }

    /// Same as [`ChildProgram::ask`], but cancelling ends the process with [`ChildFailure::Cancelled`].
    ///
    /// # Errors
    /// Errors of [`ChildProgram::ask`], and [`ChildFailure::Cancelled`].
    pub fn ask_until(
        &self,
        task: &str,
        input: Vec<u8>,
        limits: Limits,
        cancel: &CancelToken,
    ) -> Result<Vec<u8>, ChildFailure> {
        self.start(task, limits)?.ask(input, cancel)
    }

    /// Starts a process that does `task` for one input after the other.
    ///
    /// # Errors
    /// When the process does not start.
    pub fn start(&self, task: &str, limits: Limits) -> Result<Helper, ChildFailure> {
        let cannot = |e: io::Error| ChildFailure::Start {
            program: self.program.clone(),
            why: e.to_string(),
        };
        let mut child = Running(self.spawn(task, limits.memory).map_err(cannot)?);
        tracing::debug!(task, process = child.0.id(), "started a helper");
        let last_words = last_words(&mut child.0).map_err(cannot)?;
        let (inputs, answers) = converse(&mut child.0, limits.output).map_err(cannot)?;
        let program = self.program.clone();
        Ok(Helper { child, program, limits, greeted: false, inputs, answers, last_words })
    }

    fn spawn(&self, task: &str, memory: Option<u64>) -> io::Result<Child> {
        let mut command = Command::new(self.file());
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

    /// Path of the running executable, even if it was replaced or moved on disk.
    fn file(&self) -> &Path {
        let running = Path::new("/proc/self/exe");
        let linux = cfg!(any(target_os = "linux", target_os = "android"));
        match running.read_link() {
            Ok(found) if linux && THIS.get() == Some(&self.program) && found != self.program => {
                running
            }
            _ => &self.program,
        }
    }
}

/// A process that does one task for one input after the other; see [`ChildProgram::start`]. It ends when this value is
/// dropped.
#[derive(Debug)]
pub struct Helper {
    child: Running,
    program: PathBuf,
    limits: Limits,
    /// True once the process has reported its version.
    greeted: bool,
    inputs: Sender<Vec<u8>>,
    answers: Receiver<io::Result<Answer>>,
    last_words: Receiver<Vec<u8>>,
}

impl Helper {
    /// Has it do the task for `input` and waits for the answer. After a failure other than [`ChildFailure::Task`] it
    /// answers nothing more.
    ///
    /// # Errors
    /// Errors of [`ChildProgram::ask_until`].
    pub fn ask(&mut self, input: Vec<u8>, cancel: &CancelToken) -> Result<Vec<u8>, ChildFailure> {
        let start = Instant::now();
        // Without a reader the process has ended, which its missing answer shows.
        let _ = self.inputs.send(input);
        loop {
            let left = self.limits.time.saturating_sub(start.elapsed());
            match wait(&self.answers, left, cancel) {
                _ if cancel.is_cancelled() => return Err(ChildFailure::Cancelled),
                Ok(Ok(Answer::Greeting(version)))
                    if !self.greeted && version == VERSION.as_bytes() =>
                {
                    self.greeted = true;
                }
                Ok(Ok(Answer::Whole(bytes))) if self.greeted => return Ok(bytes),
                Ok(Ok(Answer::Failed(error))) if self.greeted => {
                    return Err(ChildFailure::Task(error.into_error()));
                }
                Ok(Ok(Answer::TooLong)) if self.greeted => {
                    return Err(ChildFailure::TooMuchOutput(self.limits.output));
                }
                Ok(Ok(answer)) => return Err(self.foreign(&answer)),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(ChildFailure::TimedOut(self.limits.time));
                }
                Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            }
        }
    }

    fn foreign(&self, answer: &Answer) -> ChildFailure {
        let found = match answer {
            Answer::Greeting(version) => format!("qhx {}", String::from_utf8_lossy(version)),
            _ => "another program or version".to_owned(),
        };
        ChildFailure::Foreign { program: self.program.clone(), found: shown(&found).into_owned() }
    }

    /// Why there is no answer.
    fn ended(&mut self) -> ChildFailure {
        let status = match self.child.ended() {
            Ok(Some(status)) => status,
            Ok(None) => return ChildFailure::Crashed("no answer".to_owned()),
            Err(e) => {
                return ChildFailure::Start { program: self.program.clone(), why: e.to_string() };
            }
        };
        let words = self.last_words.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
        let no_memory = words.windows(NO_MEMORY.len()).any(|part| part == NO_MEMORY);
        match self.limits.memory {
            Some(memory) if no_memory => ChildFailure::OutOfMemory(memory),
            _ if !is_crash(status) => ChildFailure::Killed(describe(status)),
            // It had not even looked at its input.
            _ if !self.greeted => ChildFailure::Start {
                program: self.program.clone(),
                why: format!("it ended with {}", describe(status)),
            },
            _ => ChildFailure::Crashed(describe(status)),
        }
    }
}

/// Receives a message within `time`, unless cancelled first.
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
#[derive(Debug)]
struct Running(Child);

impl Running {
    /// Exit status if the process ended by itself; `None` while it runs.
    fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        // A process closes its files after its exit status is settled, on Windows shortly before.
        let start = Instant::now();
        loop {
            match self.0.try_wait()? {
                None if start.elapsed() < Duration::from_secs(1) => {
                    thread::sleep(Duration::from_millis(1));
                }
                status => return Ok(status),
            }
        }
    }

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

#[derive(Debug)]
enum Answer {
    /// The version of the helper.
    Greeting(Vec<u8>),
    Whole(Vec<u8>),
    Failed(PlainError),
    TooLong,
    /// Anything that no helper writes.
    Unknown,
}

/// Writes inputs and reads answers on threads: neither pipe may block the other, nor the parent.
#[expect(clippy::type_complexity, reason = "the two ends of two channels")]
fn converse(
    child: &mut Child,
    limit: usize,
) -> io::Result<(Sender<Vec<u8>>, Receiver<io::Result<Answer>>)> {
    let (Some(mut stdin), Some(mut stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("it has no pipes"));
    };
    let (input, inputs) = mpsc::channel::<Vec<u8>>();
    let (sender, answers) = mpsc::channel();
    // The pipe stays open until nobody asks any more: the child ends when it closes.
    thread::Builder::new().spawn(move || {
        for input in inputs {
            // A child that died does not read it, which its missing answer shows.
            let _ = stdin.write_all(&(input.len() as u64).to_le_bytes());
            let _ = stdin.write_all(&input).and_then(|()| stdin.flush());
        }
    })?;
    thread::Builder::new().spawn(move || {
        loop {
            let answer = read_answer(&mut stdout, limit);
            let last =
                !matches!(answer, Ok(Answer::Greeting(_) | Answer::Whole(_) | Answer::Failed(_)));
            if sender.send(answer).is_err() || last {
                return;
            }
        }
    })?;
    Ok((input, answers))
}

fn read_answer(stdout: &mut impl Read, limit: usize) -> io::Result<Answer> {
    let (mut magic, mut byte) = ([0; MAGIC.len()], [0]);
    stdout.read_exact(&mut magic)?;
    if magic != MAGIC && magic != GREETING {
        return Ok(Answer::Unknown);
    }
    stdout.read_exact(&mut byte)?;
    if magic == GREETING {
        let mut version = vec![0; byte[0].into()];
        stdout.read_exact(&mut version)?;
        return Ok(Answer::Greeting(version));
    }
    let mut len = [0; 8];
    stdout.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > limit as u64 {
        return Ok(Answer::TooLong);
    }
    let mut bytes = Vec::new();
    if stdout.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match byte {
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

/// True if the process crashed rather than being killed.
fn is_crash(status: ExitStatus) -> bool {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        use libc::{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
        return [SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP].contains(&signal);
    }
    // What Ctrl-C and a closed console end a process with.
    const STATUS_CONTROL_C_EXIT: i32 = 0xc000_013a_u32.cast_signed();
    !(cfg!(windows) && status.code() == Some(STATUS_CONTROL_C_EXIT))
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
    output.write_all(&GREETING)?;
    output.write_all(&[VERSION.len() as u8])?;
    output.write_all(VERSION.as_bytes())?;
    for input in inputs()? {
        let answer = match tasks.iter().find(|(known, _)| OsStr::new(known) == name) {
            Some((_, task)) => catch_unwind(AssertUnwindSafe(|| task(&input)))
                .unwrap_or_else(|_| Err(error!(Internal, "the helper's task panicked"))),
            None => {
                let name = name.to_string_lossy();
                Err(error!(Internal, "the helper has no task {name:?}"))
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
        output.flush()?;
    }
    Ok(())
}

/// Reads the inputs on a thread, which ends the process when the parent goes away.
fn inputs() -> io::Result<Receiver<Vec<u8>>> {
    let (sender, inputs) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        while let Ok(input) = read_input()
            && sender.send(input).is_ok()
        {}
        std::process::exit(ErrorKind::Cancelled.exit_code().into());
    })?;
    Ok(inputs)
}

fn read_input() -> io::Result<Vec<u8>> {
    let mut stdin = io::stdin();
    let mut len = [0; 8];
    stdin.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let mut input = Vec::new();
    if stdin.take(len).read_to_end(&mut input)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
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
        let kind = self.kind.parse().unwrap_or(ErrorKind::Internal);
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
