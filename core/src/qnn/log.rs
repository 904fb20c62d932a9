//! The libraries' log, handed to `tracing`.

#![expect(unsafe_code, reason = "formats the arguments of a C callback")]

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use qhx_qnn_sys as sys;
use serde::{Deserialize, Serialize};

/// How much the libraries say.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Failures.
    #[default]
    Error,
    /// Failures and warnings.
    Warn,
    /// What happens.
    Info,
    /// Sizes, estimates and decisions of the compiler.
    Verbose,
    /// Everything.
    Debug,
}

impl LogLevel {
    pub(crate) const fn code(self) -> u32 {
        sys::LOG_ERROR + self as u32
    }
}

/// Lines of failures that [`failures_since`] remembers.
const KEPT: usize = 32;

static TOTAL: AtomicU64 = AtomicU64::new(0);
static LINES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// The number of failure lines logged so far, for [`failures_since`].
pub(crate) fn mark() -> u64 {
    TOTAL.load(Ordering::Relaxed)
}

/// The last failure lines logged after `mark`. The log has no owner: a line may come from a call
/// on another thread.
pub(crate) fn failures_since(mark: u64) -> Vec<String> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let new = TOTAL.load(Ordering::Relaxed).saturating_sub(mark);
    let new = usize::try_from(new).unwrap_or(usize::MAX);
    lines.iter().skip(lines.len().saturating_sub(new)).cloned().collect()
}

#[cfg(unix)]
unsafe extern "C" {
    fn vsnprintf(
        buffer: *mut c_char,
        size: usize,
        format: *const c_char,
        arguments: *mut c_void,
    ) -> c_int;
}

/// Called by the libraries, from any of their threads.
pub(crate) unsafe extern "C" fn callback(
    format: *const c_char,
    level: u32,
    _timestamp: u64,
    arguments: *mut c_void,
) {
    if format.is_null() {
        return;
    }
    let mut buffer = [0u8; 1024];
    #[cfg(unix)]
    // SAFETY: the buffer has the given size; format and arguments belong together and live until
    // this function returns.
    let written = unsafe { vsnprintf(buffer.as_mut_ptr().cast(), buffer.len(), format, arguments) };
    #[cfg(not(unix))]
    let written = {
        let _ = arguments;
        // SAFETY: the format is a C string that lives until this function returns.
        let text = unsafe { CStr::from_ptr(format) }.to_bytes();
        let n = text.len().min(buffer.len() - 1);
        buffer[..n].copy_from_slice(&text[..n]);
        n as c_int
    };
    if written < 0 {
        return;
    }
    // A subscriber that panics must not unwind into the library.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default().to_string_lossy();
        emit(level, text.trim());
    }));
}

fn emit(level: u32, line: &str) {
    if line.is_empty() {
        return;
    }
    match level {
        // The compiler of 2.51 says this about its own settings whenever it runs.
        sys::LOG_ERROR if line.contains("unexpected GraphHtpSettings option") => {
            tracing::debug!(target: "qnn", "{line}");
        }
        sys::LOG_ERROR => {
            {
                let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
                TOTAL.fetch_add(1, Ordering::Relaxed);
                if lines.len() == KEPT {
                    lines.pop_front();
                }
                lines.push_back(line.to_owned());
            }
            tracing::warn!(target: "qnn", "{line}");
        }
        2 => tracing::warn!(target: "qnn", "{line}"),
        3 => tracing::info!(target: "qnn", "{line}"),
        4 => tracing::debug!(target: "qnn", "{line}"),
        _ => tracing::trace!(target: "qnn", "{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_after_a_mark_are_the_new_ones_and_bounded() {
        let start = mark();
        for i in 0..KEPT + 5 {
            emit(1, &format!("failure {i}"));
        }
        emit(3, "not a failure");
        let lines = failures_since(start);
        assert_eq!(lines.len(), KEPT);
        assert_eq!(lines.last().map(String::as_str), Some("failure 36"));
        let after = mark();
        assert!(failures_since(after).is_empty());
    }
}
