//! Renders in a child process, where the operating system bounds memory and time and a crash ends nothing else. One
//! process does all renderings of a template.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use qhx_base::child::{ChildFailure, ChildProgram, Helper, Limits, Task};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::Template;

/// Limits of a rendering: published templates need a few megabytes and milliseconds.
const LIMITS: Limits =
    Limits { memory: Some(512 << 20), time: Duration::from_secs(10), output: super::MAX_OUTPUT };

/// Compiles and renders chat templates: the task of a helper whose program is installed with
/// [`ChildProgram::install`].
pub const TASK: Task = ("chat-template", answer);

/// A template to compile, and to render when there is a context.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request<'a> {
    pub template: Cow<'a, Template>,
    pub context: Option<serde_json::Map<String, serde_json::Value>>,
}

/// A process that compiles and renders, started when it is first needed, and kept for the next rendering.
pub(super) struct Renderer {
    program: &'static ChildProgram,
    idle: Mutex<Option<Helper>>,
}

impl Renderer {
    pub(super) fn new(program: &'static ChildProgram) -> Self {
        Self { program, idle: Mutex::new(None) }
    }

    /// Has the process compile or render. `kind` is that of an error that the process could not report.
    pub(super) fn ask(
        &self,
        request: &Request<'_>,
        origin: &str,
        kind: ErrorKind,
        cancel: &CancelToken,
    ) -> Result<String> {
        let input = serde_json::to_vec(request)
            .map_err(|e| Error::caused(ErrorKind::Internal, "the template as JSON", e))?;
        let answer = self.answer(input, cancel).map_err(|failure| match failure {
            ChildFailure::Task(error) => error.context(origin),
            failure => failure.into_error(kind, origin),
        })?;
        String::from_utf8(answer)
            .map_err(|_| Error::new(kind, format!("{origin}: the result is not UTF-8")))
    }

    fn answer(&self, input: Vec<u8>, cancel: &CancelToken) -> Result<Vec<u8>, ChildFailure> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let known = idle().take();
        if let Some(mut helper) = known {
            match helper.ask(input.clone(), cancel) {
                // Ended since the last rendering, or full of what that one left.
                Err(failure)
                    if failure.is_the_helpers()
                        || matches!(failure, ChildFailure::OutOfMemory(_)) => {}
                answer => return self.keep(helper, answer),
            }
        }
        let mut helper = self.program.start(TASK.0, LIMITS)?;
        let answer = helper.ask(input, cancel);
        self.keep(helper, answer)
    }

    /// Keeps a process that goes on.
    fn keep(
        &self,
        helper: Helper,
        answer: Result<Vec<u8>, ChildFailure>,
    ) -> Result<Vec<u8>, ChildFailure> {
        if matches!(answer, Ok(_) | Err(ChildFailure::Task(_))) {
            *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = Some(helper);
        }
        answer
    }
}

fn answer(input: &[u8]) -> Result<Vec<u8>> {
    let Request { template, context }: Request<'_> = serde_json::from_slice(input)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the template as JSON", e))?;
    // The parent puts the template's name before the message.
    let environment = super::on_a_thread(|| super::compile(&template.source))
        .map_err(|why| Error::new(ErrorKind::Artifact, why).hint(super::HINT))?;
    let Some(context) = context else { return Ok(Vec::new()) };
    let text = super::on_a_thread(|| super::render(&environment, &context))
        .map_err(|why| Error::new(ErrorKind::Prompt, why))?;
    Ok(text.into_bytes())
}
