//! Ctrl-C: the first one asks the work to stop, the second one ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use qhx_core::{CancelToken, Error, ErrorKind, Result};

/// The exit code of an interrupted command.
pub(crate) const INTERRUPTED: i32 = ErrorKind::Cancelled.exit_code() as i32;

/// Turns Ctrl-C, SIGTERM and SIGHUP into a cancelled token.
#[derive(Debug, Clone)]
pub(crate) struct Interrupts {
    token: CancelToken,
    /// Something is under way that looks at the token. Otherwise Ctrl-C ends the process at once.
    working: Arc<AtomicBool>,
}

/// Until it is dropped, the first Ctrl-C only cancels.
#[derive(Debug)]
pub(crate) struct Working(Arc<AtomicBool>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Interrupts {
    /// Installs the handler. Once per process.
    pub(crate) fn install() -> Result<Self> {
        let interrupts =
            Self { token: CancelToken::new(), working: Arc::new(AtomicBool::new(false)) };
        let Self { token, working } = interrupts.clone();
        ctrlc::set_handler(move || {
            if token.is_cancelled() || !working.load(Ordering::Acquire) {
                std::process::exit(INTERRUPTED);
            }
            token.cancel();
        })
        .map_err(|e| Error::new(ErrorKind::Internal, format!("Ctrl-C cannot be handled: {e}")))?;
        Ok(interrupts)
    }

    /// The token that the first Ctrl-C cancels.
    pub(crate) fn token(&self) -> &CancelToken {
        &self.token
    }

    /// Says that work has begun that looks at the token.
    pub(crate) fn working(&self) -> Working {
        self.working.store(true, Ordering::Release);
        Working(Arc::clone(&self.working))
    }
}
