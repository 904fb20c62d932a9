//! Renders in a child process, where the operating system bounds memory and time and a crash ends nothing else.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Template;
use crate::child::{ChildProgram, Limits, Task};
use crate::{CancelToken, Error, ErrorKind, Result};

/// What a rendering may take: published templates need a few megabytes and milliseconds.
const LIMITS: Limits =
    Limits { memory: Some(512 << 20), time: Duration::from_secs(10), output: super::MAX_OUTPUT };

/// Compiles and renders chat templates: the task of a helper whose program is installed with
/// [`ChildProgram::install`].
pub const TASK: Task = ("chat-template", answer);

/// A template to compile, and to render when there is a context.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    pub template: Template,
    pub context: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Has `program` compile or render. `kind` is that of an error that the child could not tell.
pub(super) fn ask(
    program: &ChildProgram,
    request: &Request,
    origin: &str,
    kind: ErrorKind,
    cancel: &CancelToken,
) -> Result<String> {
    let input = serde_json::to_vec(request)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the template as JSON", e))?;
    let answer =
        program.ask_until(TASK.0, input, LIMITS, cancel).map_err(|failure| match failure {
            crate::child::ChildFailure::Task(error) => error.context(origin),
            failure => failure.into_error(kind, origin),
        })?;
    String::from_utf8(answer)
        .map_err(|_| Error::new(kind, format!("{origin}: the result is not UTF-8")))
}

fn answer(input: &[u8]) -> Result<Vec<u8>> {
    let Request { template, context } = serde_json::from_slice(input)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the template as JSON", e))?;
    // The parent puts the template's name before the message.
    let environment = super::on_a_thread(|| super::compile(&template.source))
        .map_err(|why| Error::new(ErrorKind::Artifact, why).hint(super::HINT))?;
    let Some(context) = context else { return Ok(Vec::new()) };
    let text = super::on_a_thread(|| super::render(&environment, &context))
        .map_err(|why| Error::new(ErrorKind::Prompt, why))?;
    Ok(text.into_bytes())
}
