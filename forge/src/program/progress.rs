//! Progress of a forge on standard error: bars for people, one line a stage where nobody watches.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar};
use qhx_base::CancelToken;
use qhx_graph::progress::Progress;
use qhx_terminal::progress::style;
use qhx_terminal::say;

const BYTES: &str =
    "{msg:32} [{bar:24}] {bytes:>11} / {total_bytes:11} {elapsed:>4}, left {eta:>4}{prefix}";
const SPINNER: &str = "{msg:32} {spinner} {elapsed}";

/// Shows how far a forge is.
#[derive(Debug)]
pub struct ForgeProgress {
    cancel: CancelToken,
    bar: Option<ProgressBar>,
    terminal: bool,
    quiet: bool,
    /// Bytes of the whole work, of what this run has made of it, and of what was there before.
    total: u64,
    made: u64,
    kept: u64,
    begun: Instant,
}

impl ForgeProgress {
    /// A display that stops the forge when `cancel` is cancelled.
    pub fn new(cancel: CancelToken) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let begun = Instant::now();
        Self { cancel, bar: None, terminal, quiet: false, total: 0, made: 0, kept: 0, begun }
    }

    /// Bytes of the whole work: the plan's estimate, or what is there where that is more.
    fn whole(&self) -> u64 {
        self.total.max(self.made + self.kept)
    }

    /// Time for the rest of the work at the rate so far; none before there is one.
    fn left(&self) -> Option<HumanDuration> {
        let rest = self.total.saturating_sub(self.made + self.kept) as f64;
        let ratio = (self.made > 0).then(|| rest / self.made as f64)?;
        Some(HumanDuration(self.begun.elapsed().mul_f64(ratio.min(1e6))))
    }

    /// The same without lines where nobody watches.
    pub fn quiet(cancel: CancelToken) -> Self {
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
            if let Some(left) = self.left() {
                bar.set_prefix(format!(", of all {left}"));
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            self.bar = Some(bar);
        } else if !self.quiet {
            let (done, all) = (HumanBytes(self.made + self.kept), HumanBytes(self.whole()));
            match self.left() {
                Some(left) => say!("{what} ({done} of {all}, left {left})"),
                None => say!("{what}"),
            }
        }
    }

    fn total(&mut self, bytes: u64) {
        self.total = bytes;
        self.begun = Instant::now();
    }

    fn finished(&mut self, bytes: u64, kept: bool) {
        if kept {
            self.kept += bytes;
        } else {
            self.made += bytes;
        }
    }

    fn advance(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            if bar.length().is_some_and(|length| length < done) {
                bar.set_length(done);
            }
            bar.set_position(done);
        }
    }

    fn note(&mut self, message: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say!("note: {message}")),
            None => say!("note: {message}"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_never_passes_the_total() {
        let mut progress = ForgeProgress::quiet(CancelToken::default());
        progress.total(100);
        progress.finished(60, false);
        assert_eq!(progress.whole(), 100);
        progress.finished(50, true);
        assert_eq!(progress.whole(), 110);
        let bar = ProgressBar::hidden();
        bar.set_length(10);
        progress.bar = Some(bar.clone());
        progress.advance(12);
        assert_eq!((bar.position(), bar.length()), (12, Some(12)));
    }
}
