//! Steps of the program on a phone, one after the other, with their results.

use std::str::FromStr;
use std::time::{Duration, Instant};

use qhx_base::{Error, ErrorKind, Result};
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::adb::{Device, Fault, quoted, says_lost};
use super::files::{CACHE, Files, NAME, PLUGINS};
use super::process::{Finished, Limits};
use super::{PushEvent, PushOptions};

/// Bytes of a step's result.
const RESULT: usize = 8 << 20;
/// Last lines of a step's messages, and characters of each.
const LINES: usize = 40;
const LINE: usize = 600;
/// Time after which the phone itself ends a step; adb has this much longer.
const AFTER: Duration = Duration::from_secs(15);
/// Seconds after which a program is killed that does not end when its time is up, as one that waits for the NPU.
const KILL: u32 = 2;
/// Exit codes of `timeout` for a program whose time is up, and of one that was killed.
const TIMED_OUT: i32 = 124;
const KILLED: i32 = 137;

/// A step on the phone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PushStep {
    /// `qhx prepare`: compiles a portable bundle for the phone. Other bundles have no such step.
    Prepare,
    /// `qhx doctor`: libraries, chip and bundle.
    Doctor,
    /// `qhx verify`: the files' hashes and the golden steps.
    Verify,
    /// `qhx generate`: an answer and its times.
    Generate,
    /// `qhx bench`: rates.
    Bench,
}

impl PushStep {
    /// All of them, in order.
    pub const ALL: [Self; 5] =
        [Self::Prepare, Self::Doctor, Self::Verify, Self::Generate, Self::Bench];

    /// Its name, which is that of the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Doctor => "doctor",
            Self::Verify => "verify",
            Self::Generate => "generate",
            Self::Bench => "bench",
        }
    }
}

impl FromStr for PushStep {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|step| step.name() == name);
        found.ok_or_else(|| format!("no step {name:?}"))
    }
}

impl Serialize for PushStep {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Outcome {
    /// It succeeded.
    Passed,
    /// It found something wrong, or did not end as it should.
    Failed,
    /// It was not done: the bundle has no use for it, or the work was stopped before.
    Skipped,
}

/// Failure of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StepError {
    /// Kind of failure, as in the JSON of all commands.
    pub kind: String,
    /// The message.
    pub message: String,
    /// A likely fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl From<&Error> for StepError {
    fn from(error: &Error) -> Self {
        Self {
            kind: error.kind().name().to_owned(),
            message: error.message().to_owned(),
            hint: error.hint_text().map(str::to_owned),
        }
    }
}

/// Result of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// The step.
    pub step: PushStep,
    /// Its outcome.
    pub outcome: Outcome,
    /// Exit code of the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Time that it took, with that of the connection.
    pub ms: f64,
    /// Reason of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<StepError>,
    /// The program's JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// Last lines of its messages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<String>,
}

impl StepReport {
    /// A step that was not done.
    pub(super) fn skipped(step: PushStep, why: &Error) -> Self {
        let error = Some(StepError::from(why));
        let (outcome, messages) = (Outcome::Skipped, Vec::new());
        Self { step, outcome, exit_code: None, ms: 0.0, error, result: None, messages }
    }
}

/// Command line of a step, for the shell of the phone.
fn line(step: PushStep, options: &PushOptions, files: &Files) -> String {
    let time = options.patience.step.as_secs().max(1);
    let mut words: Vec<String> = vec![format!("./{NAME}"), step.name().to_owned()];
    words.extend(["--json", &quoted(files.bundle_path())].map(str::to_owned));
    // A bundle that gives wrong answers was named by `verify`. Here it answers all the same, and is not tried again.
    let opening = || ["--backend", "qnn", "--unverified"].map(str::to_owned);
    match step {
        PushStep::Prepare | PushStep::Doctor => {}
        PushStep::Verify => words.extend(["--backend", "qnn"].map(str::to_owned)),
        PushStep::Generate => {
            words.extend(opening());
            words.extend(["--max-new".to_owned(), options.max_new.to_string()]);
            words.extend(["--".to_owned(), quoted(&options.prompt)]);
        }
        PushStep::Bench => {
            words.extend(opening());
            words.extend(["--tokens", "32", "--repeat", "3"].map(str::to_owned));
        }
    }
    for plugin in &options.plugins {
        let name = plugin.file_name().unwrap_or_default().to_string_lossy();
        // Global options may stand in front of the command only where a prompt follows `--`.
        words.splice(1..1, ["--plugin".to_owned(), quoted(&format!("{PLUGINS}/{name}"))]);
    }
    format!(
        "cd {} || exit 1; T=; command -v timeout >/dev/null && T='timeout -k {KILL} {time}'; export LD_LIBRARY_PATH=. \
         QHX_CACHE_DIR=\"$PWD/{CACHE}\"; exec $T {}",
        quoted(&options.to),
        words.join(" ")
    )
}

/// Runs a step to its end.
pub(super) fn run(
    step: PushStep,
    options: &PushOptions,
    files: &Files,
    device: &Device,
    on_event: &mut dyn FnMut(PushEvent<'_>),
) -> Result<StepReport> {
    let start = Instant::now();
    let line = line(step, options, files);
    let limits = Limits { time: options.patience.step + AFTER, bytes: RESULT };
    let finished = device.start(&line, limits).and_then(|finished| {
        let lost = says_lost(&finished);
        if !lost && (finished.status.success() || json(&finished.stdout).is_some()) {
            return Ok(finished);
        }
        // A program that crashes leaves the phone where it is.
        match device.fault(step.name(), &finished) {
            Fault::Gone(error) => Err(Fault::Gone(error)),
            Fault::Other(_) => Ok(finished),
        }
    });
    let mut report = match finished {
        Ok(finished) => report(step, options, &finished, start.elapsed()),
        Err(Fault::Other(error)) if error.kind() == ErrorKind::Cancelled => return Err(error),
        Err(Fault::Other(error)) => failed(step, &error),
        Err(Fault::Gone(error)) => {
            on_event(PushEvent::Lost(&error));
            let back = device.wait();
            if back.is_ok() {
                on_event(PushEvent::Back);
            }
            let lost = "the phone disconnected or restarted during this step";
            let came = match &back {
                Ok(()) => String::new(),
                Err(late) => format!("; {}", late.message()),
            };
            let message = format!("{lost}: {}{came}", error.message());
            failed(step, &Error::new(ErrorKind::DeviceLost, message))
        }
    };
    report.ms = start.elapsed().as_secs_f64() * 1e3;
    Ok(report)
}

fn failed(step: PushStep, error: &Error) -> StepReport {
    StepReport { outcome: Outcome::Failed, ..StepReport::skipped(step, error) }
}

/// The object that a command printed. A line of somebody else's may stand before it.
fn json(stdout: &[u8]) -> Option<Value> {
    let text = String::from_utf8_lossy(stdout);
    let object = |text: &str| serde_json::from_str(text).ok().filter(Value::is_object);
    object(&text).or_else(|| {
        let start = text.find("\n{").filter(|_| !text.starts_with('{'))?;
        object(text.get(start..)?)
    })
}

/// Report of a program that ended.
fn report(
    step: PushStep,
    options: &PushOptions,
    finished: &Finished,
    time: Duration,
) -> StepReport {
    let late = time >= options.patience.step;
    let code = finished.status.code();
    let said = String::from_utf8_lossy(&finished.stderr).into_owned();
    let lines = said.lines().map(str::trim_end).filter(|line| !line.is_empty());
    let lines = lines.map(|line| line.chars().take(LINE).collect::<String>());
    let lines: Vec<_> = lines.collect();
    let messages = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default().to_vec();
    let result = json(&finished.stdout);
    let given = result.as_ref().and_then(|result| result.get("error")).map(|error| StepError {
        kind: text(error, "kind").unwrap_or_else(|| "internal".to_owned()),
        message: text(error, "message").unwrap_or_default(),
        hint: text(error, "hint"),
    });
    let error = match (&given, &result, code) {
        (_, _, Some(TIMED_OUT | KILLED)) if late => {
            let seconds = options.patience.step.as_secs();
            Some(execute(step, format!("was stopped after {seconds} s"), &lines))
        }
        (None, Some(_), Some(0)) => None,
        (None, Some(result), Some(1)) => Some(found(step, result)),
        (Some(_), _, _) => given.clone(),
        (None, None, Some(0)) => Some(execute(step, "printed no JSON".to_owned(), &lines)),
        (None, _, code) => Some(execute(step, ended(code), &lines)),
    };
    let useless = |error: &StepError| {
        step == PushStep::Generate && error.kind == "usage" && error.message.contains("; it does ")
    };
    let outcome = match &error {
        None => Outcome::Passed,
        Some(error) if useless(error) => Outcome::Skipped,
        Some(_) => Outcome::Failed,
    };
    let result = result.filter(|_| given.is_none());
    StepReport { step, outcome, exit_code: code, ms: 0.0, error, result, messages }
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().map(str::to_owned)
}

/// Words for the end of a program without a result.
fn ended(code: Option<i32>) -> String {
    let signal = match code {
        None => return "was ended by a signal".to_owned(),
        Some(132) => "illegal instruction",
        Some(134) => "aborted",
        Some(135) => "bus error",
        Some(137) => "killed, as where memory runs out",
        Some(139) => "segmentation fault",
        Some(126) => "cannot be executed",
        Some(127) => "not found",
        Some(code) => return format!("ended with {code}"),
    };
    format!("ended with {}: {signal}", code.unwrap_or_default())
}

/// Error of a program that says nothing in JSON, with its last message.
fn execute(step: PushStep, end: String, lines: &[String]) -> StepError {
    let said = lines.iter().rev().find(|line| line.starts_with("error: ")).or(lines.last());
    let said = said.map_or_else(String::new, |line| format!(": {line}"));
    let message = format!("{NAME} {} {end}{said}", step.name());
    StepError::from(&Error::new(ErrorKind::Execute, message))
}

/// Error of a check that found something.
fn found(step: PushStep, result: &Value) -> StepError {
    let list = |of: &Value, key: &str| of.get(key).and_then(Value::as_array).cloned();
    let failing = |of: &Value, key: &str| {
        let all = list(of, key).unwrap_or_default();
        all.into_iter().filter(|one| one.get("passed") == Some(&Value::Bool(false))).collect()
    };
    let mut hint = None;
    let message = match step {
        PushStep::Doctor => {
            let checks = list(result, "checks").unwrap_or_default();
            let broken = checks.iter().filter(|c| text(c, "health").as_deref() == Some("broken"));
            let lines = broken.map(|check| {
                hint = hint.take().or_else(|| text(check, "hint"));
                let [name, found] = ["name", "found"].map(|key| text(check, key));
                format!("{}: {}", name.unwrap_or_default(), found.unwrap_or_default())
            });
            lines.collect::<Vec<_>>().join("; ")
        }
        _ => {
            let files: Vec<Value> = failing(result, "files");
            let files = files.iter().map(|file| {
                let [path, why] = ["path", "message"].map(|key| text(file, key));
                format!("{}: {}", path.unwrap_or_default(), why.unwrap_or_default())
            });
            let golden = result.get("golden").unwrap_or(&Value::Null);
            let steps: Vec<Value> = failing(golden, "steps");
            let steps = steps.iter().map(|step| {
                let name = text(step, "name").unwrap_or_default();
                let cosine = step.get("cosine").map(|cosine| format!("cosine {cosine}"));
                let why = text(step, "message").or(cosine).unwrap_or_default();
                format!("golden step {name}: {why}")
            });
            files.chain(steps).collect::<Vec<_>>().join("; ")
        }
    };
    let message = if message.is_empty() { "a check failed".to_owned() } else { message };
    let error = Error::new(ErrorKind::Execute, message);
    StepError { hint, ..StepError::from(&error) }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    fn reported(step: PushStep, code: i32, stdout: &str, stderr: &str) -> StepReport {
        let status = ExitStatus::from_raw(code << 8);
        let (stdout, stderr) = (stdout.as_bytes().to_vec(), stderr.as_bytes().to_vec());
        let time = Duration::from_secs(if code == 124 { 900 } else { 1 });
        report(step, &PushOptions::new("b"), &Finished { status, stdout, stderr }, time)
    }

    #[test]
    fn each_end_of_a_step_has_an_outcome_and_a_message() {
        let deep = "[".repeat(100_000);
        let refused =
            r#"{"error": {"kind": "usage", "message": "op does not generate; it does embed"}}"#;
        let lost = r#"{"error": {"kind": "device_lost", "message": "gone", "hint": "again"}}"#;
        let broken =
            r#"{"checks": [{"name": "qnn backend", "health": "broken", "found": "no stub"}]}"#;
        let golden = r#"{"files": [], "golden": {"steps": [{"name": "a", "passed": false, "cosine": 0.5}]}}"#;
        for (step, code, stdout, outcome, message) in [
            (PushStep::Generate, 0, "{\r\n\"text\": \"a\"}\r\n", Outcome::Passed, ""),
            (PushStep::Generate, 0, "WARNING: linker\n{\"text\": 1}", Outcome::Passed, ""),
            (PushStep::Generate, 0, &deep, Outcome::Failed, "printed no JSON"),
            (PushStep::Generate, 0, "[1]", Outcome::Failed, "printed no JSON"),
            (PushStep::Generate, 2, refused, Outcome::Skipped, "it does embed"),
            (PushStep::Bench, 12, lost, Outcome::Failed, "gone"),
            (PushStep::Doctor, 1, broken, Outcome::Failed, "qnn backend: no stub"),
            (PushStep::Verify, 1, golden, Outcome::Failed, "golden step a: cosine 0.5"),
            (PushStep::Verify, 1, r#"{"golden": [7]}"#, Outcome::Failed, "a check failed"),
            (PushStep::Verify, 124, "", Outcome::Failed, "stopped after 900 s"),
            (PushStep::Bench, 139, "{\"cut", Outcome::Failed, "139: segmentation fault: error: b"),
        ] {
            let found = reported(step, code, stdout, "a\nerror: b\r\nc\n");
            let said = found.error.as_ref().map_or("", |error| &error.message);
            assert_eq!(found.outcome, outcome, "{found:?}");
            assert!(said.contains(message) && said.is_empty() == message.is_empty(), "{found:?}");
            assert_eq!(found.messages, ["a", "error: b", "c"]);
        }
    }
}
