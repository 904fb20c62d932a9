//! Errors of the host's services on their way through an op and back.
//!
//! Only a code, a message and a number cross the boundary. The host keeps the rest, and finds it by the number when a
//! call of the op fails because of that error.

use std::collections::VecDeque;

use qhx_base::Error;
use qhx_op::abi::RawError;

/// Maximum number of errors kept of one call of an op. An op that fails for one reason rarely meets others.
const MAX_ERRORS: usize = 8;

/// The errors that services returned during a call of the op.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    /// With their numbers, the latest last.
    kept: VecDeque<(u64, Error)>,
    last: u64,
}

impl Errors {
    /// Keeps the error that a service returns; gives its number.
    pub(crate) fn keep(&mut self, error: Error) -> u64 {
        if self.kept.len() == MAX_ERRORS {
            self.kept.pop_front();
        }
        self.last += 1;
        self.kept.push_back((self.last, error));
        self.last
    }

    /// The host's error behind the one that a call of the op failed with, with the op's message; `None`
    /// when the failure is the op's own. Forgets all others: the call is over.
    pub(crate) fn take(&mut self, raw: &RawError) -> Option<Error> {
        let (_, error) =
            std::mem::take(&mut self.kept).into_iter().find(|(token, _)| *token == raw.token)?;
        Some(error.with_message(raw.message.as_str()))
    }
}
