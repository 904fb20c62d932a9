//! Times as messages and programs get them.

use std::time::Duration;

/// Milliseconds.
pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Milliseconds with three places, for programs.
pub(crate) fn millis(duration: Duration) -> f64 {
    (ms(duration) * 1e3).round() / 1e3
}
