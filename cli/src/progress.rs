//! How far a prompt is, on standard error where somebody watches.

use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use qhx_core::escape::shown;
use qhx_core::op::ProgressFn;
pub(crate) use qhx_forge::program::ForgeProgress;
use qhx_forge::program::terminal::progress::style;
pub(crate) use qhx_forge::program::terminal::progress::waiting;

/// Prompts that are consumed faster than this get no bar.
const PATIENCE: Duration = Duration::from_millis(700);

const TOKENS: &str = "prompt [{bar:30}] {pos}/{len} tokens";

/// Shows how far a prompt is: first that its images and audio go through graphs of their own, then its tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptProgress(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// When the first tokens were consumed.
    begun: Option<Instant>,
    /// A spinner, and then a bar.
    shown: Option<ProgressBar>,
    /// The bar is there.
    counts: bool,
}

impl PromptProgress {
    /// A prompt begins, which has this besides text.
    pub(crate) fn begin(&self, besides: Option<&str>) {
        self.end();
        if let Some(besides) = besides.filter(|_| std::io::stderr().is_terminal()) {
            self.update(|state| {
                state.shown = Some(waiting(&format!("looking at {}", shown(besides))))
            });
        }
    }

    /// The prompt is consumed, or given up.
    pub(crate) fn end(&self) {
        self.update(|state| {
            if let Some(shown) = std::mem::take(state).shown {
                shown.finish_and_clear();
            }
        });
    }

    /// What a model tells how many tokens are consumed; nothing where nobody watches.
    pub(crate) fn function(&self) -> Option<ProgressFn> {
        let progress = self.clone();
        let function: ProgressFn = Arc::new(move |done, total| progress.count(done, total));
        std::io::stderr().is_terminal().then_some(function)
    }

    fn count(&self, done: u64, total: u64) {
        if done >= total {
            return self.end();
        }
        self.update(|state| {
            let begun = *state.begun.get_or_insert_with(Instant::now);
            if !state.counts && (state.shown.is_some() || begun.elapsed() > PATIENCE) {
                let bar = ProgressBar::new(total).with_style(style(TOKENS));
                if let Some(spinner) = state.shown.replace(bar) {
                    spinner.finish_and_clear();
                }
                state.counts = true;
            }
            if let Some(bar) = state.shown.as_ref().filter(|_| state.counts) {
                bar.set_position(done);
            }
        });
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
