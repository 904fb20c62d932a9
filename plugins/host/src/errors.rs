//! Errors of the host's services on their way through an op and back.
//!
//! Only a code and a message cross the boundary. The host keeps the rest. Since interface 1.1 the op's
//! kit asks for the number of an error when a service fails, and hands it back when a call of the op
//! fails because of it. An op of interface 1.0 hands back nothing; its error is the host's own when
//! both say the same.

use std::collections::VecDeque;

use qhx_base::Error;

/// Maximum number of errors kept of one call of an op. An op that fails for one reason rarely meets others.
const MAX_ERRORS: usize = 8;

/// The errors that services returned during a call of the op.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    /// With their numbers, the latest last.
    kept: VecDeque<(u64, Error)>,
    last: u64,
    /// The op's kit has asked for a number, so that it is one of 1.1 or later.
    asked: bool,
    /// The one that the op reports its call fails with.
    pub(crate) named: Option<u64>,
}

impl Errors {
    /// Keeps the error that a service returns.
    pub(crate) fn keep(&mut self, error: Error) {
        if self.kept.len() == MAX_ERRORS {
            self.kept.pop_front();
        }
        self.last += 1;
        self.kept.push_back((self.last, error));
    }

    /// The number of the latest error.
    pub(crate) fn token(&mut self) -> u64 {
        self.asked = true;
        self.last
    }

    /// The host's error behind the one that a call of the op failed with, saying `message`; `None`
    /// when the failure is the op's own. Forgets all others: the call is over.
    pub(crate) fn take(&mut self, message: &str) -> Option<Error> {
        let (kept, named) = (std::mem::take(&mut self.kept), self.named.take());
        if self.asked {
            let (_, error) = kept.into_iter().find(|(token, _)| Some(*token) == named)?;
            return Some(error.with_message(message));
        }
        kept.into_iter().map(|(_, error)| error).find(|error| error.message() == message)
    }
}
