//! Bars and spinners on standard error.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::say;

/// A spinner with a message and the time so far.
pub const SPINNER: &str = "{msg} {spinner} {elapsed}";

/// A style, by a template of [`indicatif`].
pub fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template);
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// A spinner with a message, for waiting; a line where nobody watches.
pub fn waiting(message: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        say!("{message}");
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_style(style(SPINNER));
    bar.set_message(message.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
