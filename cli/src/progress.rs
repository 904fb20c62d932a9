//! How far a long prompt is, on standard error.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use qhx_core::op::ProgressFn;
pub(crate) use qhx_forge::program::ForgeProgress;
use qhx_terminal::progress::style;
pub(crate) use qhx_terminal::progress::waiting;

/// Prompts that are consumed faster than this get no bar.
const PATIENCE: Duration = Duration::from_millis(700);

const TOKENS: &str = "prompt [{bar:30}] {pos}/{len} tokens";

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
