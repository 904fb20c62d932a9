//! Calls of the caller's functions.
//!
//! They are `C-unwind`: an exception that leaves one ends the process where Rust stops it, and nothing is undefined.

#![expect(unsafe_code, reason = "calls functions of the caller")]

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};

use qhx::CancelToken;

use crate::abi::{ShouldCancel, TokenCallback};

/// Receiver of the text.
pub(crate) struct Listener {
    callback: TokenCallback,
    user: *mut c_void,
    /// Text that is passed, with a NUL behind it.
    text: Vec<u8>,
}

impl Listener {
    pub(crate) fn new(callback: TokenCallback, user: *mut c_void) -> Self {
        Self { callback, user, text: Vec::new() }
    }

    /// A text, and the token that it came with. False where the caller wants no more.
    pub(crate) fn text(&mut self, text: &str, token: Option<u32>) -> bool {
        let token = token.and_then(|id| c_int::try_from(id).ok()).unwrap_or(-1);
        self.call(text, token, 0)
    }

    /// There is no more text.
    pub(crate) fn end(&mut self) {
        self.call("", -1, 1);
    }

    fn call(&mut self, text: &str, token: c_int, is_final: c_int) -> bool {
        let Some(callback) = self.callback else { return true };
        self.text.clear();
        self.text.extend_from_slice(text.as_bytes());
        self.text.push(0);
        let len = c_int::try_from(text.len()).unwrap_or(c_int::MAX);
        // SAFETY: the caller gave the function for this, with its argument; the text outlives the call.
        let goes_on = unsafe {
            callback(self.user, self.text.as_ptr().cast::<c_char>(), len, token, is_final)
        };
        goes_on != 0
    }
}

/// Whom to ask whether a generation is to be cancelled.
#[derive(Clone, Copy)]
pub(crate) struct Poll {
    callback: ShouldCancel,
    user: *mut c_void,
}

impl Poll {
    pub(crate) fn new(callback: ShouldCancel, user: *mut c_void) -> Self {
        Self { callback, user }
    }

    /// Asks, and cancels.
    pub(crate) fn ask(&self, ticket: &CancelToken) {
        let Some(callback) = self.callback else { return };
        if ticket.is_cancelled() {
            return;
        }
        // SAFETY: the caller gave the function for this, with its argument.
        if unsafe { callback(self.user) } != 0 {
            ticket.cancel();
        }
    }
}

thread_local! {
    /// The innermost generation of this thread; a callback may begin another one in another session.
    static ASKED: RefCell<Option<(Poll, CancelToken)>> = const { RefCell::new(None) };
}

/// Until what it returns is dropped, [`ask_within`] asks `poll`.
pub(crate) fn asking(poll: Poll, ticket: &CancelToken) -> Asking {
    Asking(ASKED.replace(Some((poll, ticket.clone()))))
}

/// See [`asking`].
pub(crate) struct Asking(Option<(Poll, CancelToken)>);

impl Drop for Asking {
    fn drop(&mut self) {
        ASKED.set(self.0.take());
    }
}

/// Asks for the generation of this thread, if there is one: called as a prompt goes on.
pub(crate) fn ask_within() {
    let asked = ASKED.with_borrow(Clone::clone);
    if let Some((poll, ticket)) = asked {
        poll.ask(&ticket);
    }
}
