//! Progress of a prompt or a download, on standard error.

use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, HumanBytes, HumanDuration, ProgressBar};
use qhx::hub::{DownloadProgress, Name};
use qhx_base::CancelToken;
use qhx_base::escape::shown;
use qhx_core::op::ProgressFn;
use qhx_forge::Progress as _;
pub(crate) use qhx_forge::program::ForgeProgress;
use qhx_terminal::progress::style;
pub(crate) use qhx_terminal::progress::waiting;
use qhx_tools::install::FetchStep;
use qhx_tools::models::{ForgeStep, Step};

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

    /// Function that a model calls with the number of consumed tokens; none where nobody watches.
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

const FETCHED: &str = "{msg} [{bar:30}] {bytes} / {total_bytes} {bytes_per_sec}, left {eta}";

/// Time between two lines where nobody watches.
const LINES: Duration = Duration::from_secs(10);

/// Shows how far a download is: a bar, or a line now and then where nobody watches.
#[derive(Debug)]
pub(crate) struct PullProgress {
    name: String,
    /// Hidden where nobody watches; it counts all the same.
    bar: ProgressBar,
    state: Mutex<Lines>,
}

#[derive(Debug)]
struct Lines {
    begun: Instant,
    last: Instant,
    fetched: u64,
}

impl PullProgress {
    pub(crate) fn new(name: &Name) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::no_length().with_style(style(FETCHED))
        } else {
            ProgressBar::hidden()
        };
        let name = name.to_string();
        bar.set_message(name.clone());
        let now = Instant::now();
        Self { name, bar, state: Mutex::new(Lines { begun: now, last: now, fetched: 0 }) }
    }

    /// The download is done, or given up.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }

    /// Shows a step.
    pub(crate) fn step(&self, step: &DownloadProgress<'_>) {
        match step {
            DownloadProgress::Begin { files, bytes } => {
                self.bar.set_length(*bytes);
                let all = HumanBytes(*bytes);
                self.bar.suspend(|| say!("fetching {}: {files} files, {all}", self.name));
            }
            DownloadProgress::Kept(bytes) => {
                self.bar.inc(*bytes);
                // What was there says nothing about the rest.
                self.bar.reset_eta();
            }
            DownloadProgress::Fetched(bytes) => self.fetched(*bytes),
            DownloadProgress::Lost(bytes) => self.bar.dec(*bytes),
            DownloadProgress::Waiting { path } => {
                self.bar.suspend(|| say!("{}: another process fetches it", shown(path)));
            }
            DownloadProgress::Retry { path, error, wait } => self.bar.suspend(|| {
                say!("{}: {error}; again in {:.1} s", shown(path), wait.as_secs_f64());
            }),
            _ => {}
        }
    }

    fn fetched(&self, bytes: u64) {
        self.bar.inc(bytes);
        let mut lines = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        lines.fetched += bytes;
        if lines.last.elapsed() < LINES || std::io::stderr().is_terminal() {
            return;
        }
        lines.last = Instant::now();
        let (done, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let ratio = total.saturating_sub(done) as f64 / lines.fetched.max(1) as f64;
        let left = HumanDuration(lines.begun.elapsed().mul_f64(ratio.min(1e6)));
        say!("{}: {} of {}, left {left}", self.name, HumanBytes(done), HumanBytes(total));
    }
}

/// Shows how far pip is with wheels: a spinner, or a line where nobody watches.
#[derive(Debug, Default)]
pub(crate) struct FetchProgress {
    bar: Option<ProgressBar>,
    message: String,
}

impl FetchProgress {
    /// Shows a step.
    pub(crate) fn step(&mut self, step: &FetchStep) {
        self.message = match step {
            FetchStep::Downloaded(bytes) => {
                let message = format!("{}: {}", self.message, DecimalBytes(*bytes));
                return self.bar.iter().for_each(|bar| bar.set_message(message.clone()));
            }
            FetchStep::Wait => "another process fetches it".to_owned(),
            FetchStep::Download { requirements, megabytes } => {
                format!("downloading {requirements} ({megabytes} MB) with pip")
            }
            _ => "unpacking".to_owned(),
        };
        self.clear();
        self.bar = Some(waiting(&self.message));
    }

    fn clear(&mut self) {
        self.bar.take().iter().for_each(ProgressBar::finish_and_clear);
    }
}

impl Drop for FetchProgress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Shows how far a model is that is made ready.
#[derive(Debug)]
pub(crate) struct ObtainProgress {
    cancel: CancelToken,
    shown: Mutex<Shown>,
}

/// Display of the step under way.
#[derive(Debug, Default)]
enum Shown {
    #[default]
    Nothing,
    Package(FetchProgress),
    Download(Arc<PullProgress>),
    Forge(Box<ForgeProgress>),
}

impl ObtainProgress {
    /// A display of work that `cancel` stops.
    pub(crate) fn new(cancel: CancelToken) -> Self {
        Self { cancel, shown: Mutex::new(Shown::Nothing) }
    }

    /// The model is ready, or given up.
    pub(crate) fn end(&self) {
        self.update(|shown| {
            if let Shown::Download(pull) = &*shown {
                pull.end();
            }
            *shown = Shown::Nothing;
        });
    }

    /// Shows a step.
    pub(crate) fn step(&self, step: &Step<'_>) {
        match step {
            Step::Package(step) => self.update(|shown| {
                if !matches!(shown, Shown::Package(_)) {
                    *shown = Shown::Package(FetchProgress::default());
                }
                if let Shown::Package(progress) = shown {
                    progress.step(step);
                }
            }),
            Step::Download(name, step) => {
                let mut pull = None;
                self.update(|shown| {
                    if !matches!(shown, Shown::Download(_)) {
                        *shown = Shown::Download(Arc::new(PullProgress::new(name)));
                    }
                    if let Shown::Download(progress) = shown {
                        pull = Some(Arc::clone(progress));
                    }
                });
                // Several threads report at once.
                pull.iter().for_each(|pull| pull.step(step));
            }
            Step::Forge(step) => self.forge(step),
            Step::Waiting(name) => say!("{name}: another process makes it ready"),
            Step::Note(note) => say!("note: {note}"),
            _ => {}
        }
    }

    fn forge(&self, step: &ForgeStep<'_>) {
        if let ForgeStep::Begin { title, form, .. } = step {
            self.end();
            say!("making a bundle of {title} for {form}");
        }
        self.update(|shown| {
            if !matches!(shown, Shown::Forge(_)) {
                *shown = Shown::Forge(Box::new(ForgeProgress::quiet(self.cancel.clone())));
            }
            let Shown::Forge(progress) = shown else { return };
            match step {
                ForgeStep::Stage(what, total) => progress.stage(what, *total),
                ForgeStep::Total(bytes) => progress.total(*bytes),
                ForgeStep::Finished(bytes) => progress.finished(*bytes, false),
                ForgeStep::Advance(done) => progress.advance(*done),
                ForgeStep::Note(note) => progress.note(note),
                _ => {}
            }
        });
    }

    fn update(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
