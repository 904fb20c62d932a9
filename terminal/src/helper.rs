//! The hidden command `helper TASK`: this program as a child of itself, for work that may crash, never end or
//! take all memory. See [`qhx_base::child`].

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use qhx_base::child::{ChildProgram, Task, serve};

/// The word that makes the program a helper.
pub const COMMAND: &str = "helper";

/// Tasks of every helper.
const TASKS: &[Task] = &[qhx_qnn::probe::TASK, qhx_text::CHAT_TEMPLATE_TASK];

/// Does the task when the program was started for one. Otherwise has the process start helpers where it
/// needs them. `tasks`: what this program's helper does besides.
pub fn take_over(arguments: &[OsString], tasks: &[Task]) -> Option<ExitCode> {
    if let [_, command, task @ ..] = arguments
        && command == OsStr::new(COMMAND)
    {
        return Some(serve(task, &[TASKS, tasks].concat()));
    }
    match ChildProgram::this([COMMAND]) {
        Ok(program) => program.install(),
        Err(error) => {
            tracing::debug!("this program's file is unknown, so it has no helpers: {error}")
        }
    }
    None
}
