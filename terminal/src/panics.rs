//! Panics: a fault of qhx, or of a library that met input it cannot take.
//!
//! The standard hook prints what a panic says, input included, to the terminal at once, also where the caller makes an
//! error of it. Here the log gets it, and one that reaches the top is reported like any other error.

use std::backtrace::Backtrace;
use std::panic::{self, PanicHookInfo};
use std::sync::{Arc, Mutex, PoisonError};

use qhx_base::{Error, ErrorKind};

/// Message of the latest panic.
#[derive(Debug, Clone, Default)]
pub(crate) struct Panics(Arc<Mutex<Option<String>>>);

impl Panics {
    /// Takes panics over from the standard hook. Once per process.
    pub(crate) fn install() -> Self {
        let panics = Self::default();
        let latest = panics.clone();
        panic::set_hook(Box::new(move |info| latest.note(info)));
        panics
    }

    fn note(&self, info: &PanicHookInfo<'_>) {
        let text = info.payload_as_str().unwrap_or("a panic without words");
        let place = info.location().map(|place| format!(" ({place})")).unwrap_or_default();
        tracing::debug!(backtrace = %Backtrace::capture(), "panic: {text}{place}");
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = Some(format!("{text}{place}"));
    }

    /// The error that a panic becomes which nobody caught.
    pub(crate) fn error(&self) -> Error {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = latest.take().unwrap_or_default();
        Error::new(ErrorKind::Internal, format!("qhx failed in a way it should not: {text}"))
            .hint("please report it; RUST_BACKTRACE=1 with -vv shows where it happened")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_that_says_where() {
        let usual = panic::take_hook();
        let panics = Panics::install();
        let caught = panic::catch_unwind(|| panic!("slice of {}", "\u{1b}[2J"));
        panic::set_hook(usual);
        assert!(caught.is_err());
        let error = panics.error();
        assert_eq!(error.kind().exit_code(), 70);
        let message = error.message();
        assert!(message.contains("slice of \\u{1b}[2J (terminal/src/panics.rs:"), "{message}");
    }
}
