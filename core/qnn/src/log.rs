//! The libraries' log, handed to `tracing`.

#![expect(unsafe_code, reason = "formats the arguments of a C callback")]

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

use qhx_qnn_sys as sys;
use serde::{Deserialize, Serialize};

use super::library::EMULATES;

/// Verbosity of the libraries.
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
    /// Events.
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

/// Lines of failures and warnings that are remembered.
const MAX_LINES: usize = 64;

/// A line of the log.
struct Line {
    level: u32,
    text: String,
    /// The thread that called the library; `None` for a thread of the library's own.
    caller: Option<ThreadId>,
}

static TOTAL: AtomicU64 = AtomicU64::new(0);
static LINES: Mutex<VecDeque<Line>> = Mutex::new(VecDeque::new());
static SOC: Mutex<Option<String>> = Mutex::new(None);

thread_local! {
    /// The thread calls the library: it has set a mark.
    static CALLS: Cell<bool> = const { Cell::new(false) };
}

/// The number of lines remembered so far, for [`failures_since`] and [`lines_since`] on this thread.
pub(crate) fn mark() -> u64 {
    CALLS.set(true);
    TOTAL.load(Ordering::Relaxed)
}

/// The last failure lines logged after `mark`, by calls of this thread or by threads of the library's own: what calls
/// of other threads log belongs to other contexts.
pub(crate) fn failures_since(mark: u64) -> Vec<String> {
    since(mark, sys::LOG_ERROR)
}

/// Same as [`failures_since`], with warnings, if the log was opened for them.
pub(crate) fn lines_since(mark: u64) -> Vec<String> {
    since(mark, WARNING)
}

fn since(mark: u64, level: u32) -> Vec<String> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let new = TOTAL.load(Ordering::Relaxed).saturating_sub(mark);
    let new = usize::try_from(new).unwrap_or(usize::MAX);
    let new = lines.iter().skip(lines.len().saturating_sub(new));
    let this = std::thread::current().id();
    let ours = |line: &&Line| line.level <= level && line.caller.is_none_or(|of| of == this);
    new.filter(ours).map(|line| line.text.clone()).collect()
}

/// True where the emulator logged since `mark` that the tightly coupled memory of its threads is not what a graph is
/// for: another thread executes graphs for a chip that has another amount of it.
pub(crate) fn emulator_mixes_chips(mark: u64) -> bool {
    let mixed = |line: &String| line.contains("allocated VTCM pointer to a VXU VTCM");
    EMULATES && failures_since(mark).iter().any(mixed)
}

/// The chip's name in the library's words, such as `SM8850`, once a device was opened with [`LogLevel::Verbose`].
pub(crate) fn soc_name() -> Option<String> {
    SOC.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Remembers a line.
fn keep(level: u32, text: &str) {
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    TOTAL.fetch_add(1, Ordering::Relaxed);
    if lines.len() == MAX_LINES {
        lines.pop_front();
    }
    // A thread that ends has no marks any more.
    let calls = CALLS.try_with(Cell::get).unwrap_or(false);
    let caller = calls.then(|| std::thread::current().id());
    lines.push_back(Line { level, text: text.to_owned(), caller });
}

const WARNING: u32 = 2;

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
    if let Some(soc) = detected_soc(line) {
        *SOC.lock().unwrap_or_else(PoisonError::into_inner) = Some(soc.to_owned());
    }
    match level {
        // The compiler of 2.51 reports this about its own settings whenever it runs.
        sys::LOG_ERROR if line.contains("unexpected GraphHtpSettings option") => {
            tracing::debug!(target: "qnn", "{line}");
        }
        sys::LOG_ERROR => {
            keep(level, line);
            tracing::warn!(target: "qnn", "{line}");
        }
        WARNING => {
            keep(level, line);
            tracing::warn!(target: "qnn", "{line}");
        }
        3 => tracing::info!(target: "qnn", "{line}"),
        4 => tracing::debug!(target: "qnn", "{line}"),
        _ => tracing::trace!(target: "qnn", "{line}"),
    }
}

/// The name in `<V> Detected Snapdragon SOC SM8850 with 6 SOCs`.
fn detected_soc(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("Detected Snapdragon SOC ")?;
    rest.split_whitespace().next().filter(|name| !name.starts_with("UNKNOWN"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_after_a_mark_are_the_new_ones_and_bounded() {
        let start = mark();
        for i in 0..MAX_LINES + 5 {
            emit(1, &format!("failure {i}"));
        }
        emit(2, "a warning");
        emit(3, "not a failure");
        let lines = failures_since(start);
        assert_eq!(lines.len(), MAX_LINES - 1);
        assert_eq!(lines.last().map(String::as_str), Some("failure 68"));
        assert_eq!(lines_since(start).last().map(String::as_str), Some("a warning"));
        let after = mark();
        assert!(failures_since(after).is_empty());
        // Calls of another thread are another model's; what the library's own threads say may be of this one.
        let other = || {
            mark();
            emit(1, "of another model");
        };
        std::thread::spawn(other).join().unwrap();
        assert!(failures_since(after).is_empty());
        std::thread::spawn(|| emit(1, "of the library's thread")).join().unwrap();
        assert_eq!(failures_since(after), ["of the library's thread"]);
    }

    #[test]
    fn the_chips_name_is_the_librarys() {
        assert_eq!(detected_soc("<V> Detected Snapdragon SOC SM8850 with 6 SOCs"), Some("SM8850"));
        assert_eq!(detected_soc("<V> Detected Snapdragon SOC UNKNOWN_SDM with 1 SOCs"), None);
        assert_eq!(detected_soc("<E> No Snapdragon SOC detected"), None);
    }
}
