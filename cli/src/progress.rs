//! Progress on standard error: bars for people, one line a stage where nobody watches.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use qhx_core::CancelToken;
use qhx_core::op::ProgressFn;
use qhx_forge::Progress;

/// Prompts that are consumed faster than this get no bar.
const PATIENCE: Duration = Duration::from_millis(700);

const BYTES: &str = "{msg:32} [{bar:30}] {bytes:>11} / {total_bytes:11} {elapsed:>4}";
const SPINNER: &str = "{msg:32} {spinner} {elapsed}";
const TOKENS: &str = "prompt [{bar:30}] {pos}/{len} tokens";

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template);
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// Shows how far a forge is.
pub(crate) struct ForgeProgress {
    cancel: CancelToken,
    bar: Option<ProgressBar>,
    terminal: bool,
    quiet: bool,
}

impl ForgeProgress {
    /// A display that stops the forge when `cancel` is cancelled.
    pub(crate) fn new(cancel: CancelToken) -> Self {
        Self { cancel, bar: None, terminal: std::io::stderr().is_terminal(), quiet: false }
    }

    /// The same without lines where nobody watches.
    pub(crate) fn quiet(cancel: CancelToken) -> Self {
        let mut progress = Self::new(cancel);
        progress.quiet = true;
        progress
    }
}

impl Progress for ForgeProgress {
    fn stage(&mut self, what: &str, total: u64) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if self.terminal {
            let bar = if total > 0 {
                ProgressBar::new(total).with_style(style(BYTES))
            } else {
                ProgressBar::new_spinner().with_style(style(SPINNER))
            };
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            self.bar = Some(bar);
        } else if !self.quiet {
            eprintln!("{what}");
        }
    }

    fn advance(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    fn note(&mut self, message: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("note: {message}")),
            None => eprintln!("note: {message}"),
        }
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

impl Drop for ForgeProgress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Shows how far a long prompt is.
pub(crate) fn prompt() -> ProgressFn {
    struct State {
        begun: Instant,
        bar: Option<ProgressBar>,
    }
    let state = Mutex::new(State { begun: Instant::now(), bar: None });
    Arc::new(move |done, total| {
        let Ok(mut state) = state.lock() else { return };
        if done >= total {
            if let Some(bar) = state.bar.take() {
                bar.finish_and_clear();
            }
        } else if let Some(bar) = &state.bar {
            bar.set_position(done);
        } else if done <= 1 {
            state.begun = Instant::now();
        } else if state.begun.elapsed() > PATIENCE {
            let bar = ProgressBar::new(total).with_style(style(TOKENS));
            bar.set_position(done);
            state.bar = Some(bar);
        }
    })
}

/// A spinner with a message, for waiting.
pub(crate) fn waiting(message: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        eprintln!("{message}");
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_style(style("{msg} {spinner} {elapsed}"));
    bar.set_message(message.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
