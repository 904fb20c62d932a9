//! Speed of a bundle: prefill, decode, embedding, scoring, transcription and speech.

mod audio;
mod chart;
mod energy;
mod published;
mod rows;
mod speculation;
mod table;

use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use qhx::{positions, varied_tokens};
use qhx_base::{CancelToken, Error, ErrorKind, Result, files, trace};
use qhx_core::engine::{Model, Speculate};
use qhx_core::op::{Segment, Task};
use qhx_exec::backend::BackendInfo;
use qhx_exec::workspace::GraphStats;
use speculation::Answer;

pub use audio::{AudioRate, speak, transcribe};
pub use energy::EnergyMeter;
pub use published::published;
pub use rows::{BenchTable, PartTime, Rate, TableRow};
pub use speculation::Speculated;
pub use table::contexts;

/// Lengths of prompts when none are given; those that the context holds.
const PROMPTS: [usize; 2] = [128, 512];
/// A report of another run is not larger.
const MAX_REPORT: u64 = 16 << 20;

/// Tests to run, and number of repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchOptions {
    /// Lengths of prompts, or of texts to embed or score, in tokens; 128 and 512, as far as they fit, if there are
    /// none.
    pub prompts: Vec<usize>,
    /// Tokens to generate; 0 leaves that out.
    pub tokens: usize,
    /// Number of measured repeats, after one unmeasured run.
    pub repeat: u16,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self { prompts: Vec::new(), tokens: 64, repeat: 5 }
    }
}

impl BenchOptions {
    /// Checks that the lengths can be measured at all, before a model is opened.
    ///
    /// # Errors
    /// When a prompt has no tokens.
    pub fn check(&self) -> Result<()> {
        if self.prompts.contains(&0) {
            let what = "--prompt 0: expected lengths of at least one token";
            return Err(Error::new(ErrorKind::Usage, what));
        }
        Ok(())
    }

    /// Same as [`BenchOptions::check`], for a model that takes `max` positions.
    fn check_within(&self, max: usize) -> Result<()> {
        self.check()?;
        if let Some(long) = self.prompts.iter().find(|tokens| **tokens > max) {
            let what = format!("--prompt {long}: expected at most {max} tokens, the context");
            return Err(Error::new(ErrorKind::Usage, what));
        }
        Ok(())
    }
}

/// A measurement of one model. Sampling and the tokenizer are no part of it, but of [`Bench::speculate`].
///
/// ```no_run
/// use qhx_tools::bench::{Bench, BenchOptions};
///
/// let mut model = qhx::Bundle::open("qwen35/v81")?.model()?;
/// let report = Bench::new(&mut model, &BenchOptions::default())?.run(&mut model)?;
/// for result in &report.results {
///     println!("{}: {:.2} tokens/s", result.name, result.tokens_per_second.mean);
/// }
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug)]
pub struct Bench {
    tests: Vec<Test>,
    answers: Vec<Answer>,
    /// Tokens that are generated.
    tokens: usize,
    /// Positions of the context.
    max: usize,
    repeat: u16,
}

impl Bench {
    /// Decides what is measured of a model.
    ///
    /// # Errors
    /// When a prompt has no tokens, or more than the context holds.
    pub fn new(model: &mut Model, options: &BenchOptions) -> Result<Self> {
        let max = positions(model);
        options.check_within(max)?;
        let mut lengths = options.prompts.clone();
        if lengths.is_empty() {
            lengths.extend(PROMPTS.iter().filter(|tokens| **tokens <= max));
            if lengths.is_empty() {
                lengths.push(max);
            }
        }
        let generates = model.op().description.tasks.contains(&Task::Generate);
        let scores = model.info().scores > 0;
        if !generates && !scores && model.info().embedding_dim == 0 {
            let why = "generate, and has nothing that is measured by tokens";
            model.require(Task::Generate, why)?;
        }
        let kind = match (generates, scores) {
            (true, _) => Kind::Prompt,
            (false, true) => Kind::Score,
            (false, false) => Kind::Embed,
        };
        let mut tests: Vec<_> = lengths.into_iter().map(|tokens| Test { kind, tokens }).collect();
        // The context holds the token in front of them, too.
        let tokens = options.tokens.min(max.saturating_sub(1));
        if generates && tokens > 0 {
            tests.push(Test { kind: Kind::Generate, tokens });
        }
        Ok(Self { tests, answers: Vec::new(), tokens, max, repeat: options.repeat })
    }

    /// Tokens that are generated: as many as were asked for, or as the context leaves room for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Has two answers measured, too, each token by token and with draft tokens. A draft model is to be set before.
    ///
    /// # Errors
    /// When the model does not generate, cannot verify draft tokens, or has no room for an answer.
    pub fn speculate(&mut self, model: &mut Model, speculate: Speculate) -> Result<()> {
        if speculate == Speculate::Off || self.tokens == 0 {
            return Ok(());
        }
        let varied = varied_tokens(model, self.max.min(speculation::PROMPT));
        let length = (self.tokens, self.max);
        self.answers = speculation::answers(model, speculate, length, &varied)?;
        Ok(())
    }

    /// Measures everything, in turns.
    ///
    /// # Errors
    /// When the model fails or is cancelled, and where its logits are not numbers.
    pub fn run(mut self, model: &mut Model) -> Result<BenchReport> {
        let longest = self.tests.iter().map(|test| test.tokens).max().unwrap_or(1);
        let tokens = varied_tokens(model, longest);
        let mut seconds = vec![Vec::with_capacity(self.repeat.into()); self.tests.len()];
        let mut before = Vec::new();
        for turn in 0..=self.repeat {
            if turn == 1 {
                before = model.graph_stats();
            }
            // In turns, so that a device that becomes warm slows all of them.
            for (test, seconds) in self.tests.iter().zip(&mut seconds) {
                let took = test.run(model, &tokens)?;
                if turn > 0 {
                    seconds.push(took);
                }
            }
            self.answers.iter_mut().try_for_each(|answer| answer.take_turn(model, turn))?;
        }
        let results = self.tests.iter().zip(&seconds);
        let results = results.map(|(test, seconds)| Measured::of(*test, seconds));
        let results = results.chain(self.answers.iter().map(Answer::measured)).collect();
        Ok(BenchReport::of(model, self.repeat, results, &before))
    }
}

/// Results of a benchmark.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BenchReport {
    /// Name of the model.
    pub model: String,
    /// Name of the host-op.
    pub op: String,
    /// Backend that executed the graphs.
    pub backend: BackendInfo,
    /// Backend that decoded, if one was asked for: see [`Model::decode_on`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder: Option<BackendInfo>,
    /// Number of measured repeats.
    pub repeat: u16,
    /// Time that opening the model took, in milliseconds.
    pub load_ms: f64,
    /// The most memory that the process ever had resident, where the system says so.
    pub peak_memory_bytes: Option<u64>,
    /// Each test.
    pub results: Vec<Measured>,
    /// The graphs that were executed.
    pub graphs: Vec<GraphTime>,
}

impl BenchReport {
    /// Report on a model whose graphs had executed `before` when the first measured turn began.
    fn of(model: &Model, repeat: u16, results: Vec<Measured>, before: &[GraphStats]) -> Self {
        Self {
            model: model.manifest().model.name.clone(),
            op: model.op().description.name.clone(),
            backend: model.backend().clone(),
            decoder: model.decoder().map(|decoder| decoder.backend.clone()),
            repeat,
            load_ms: millis(model.load_time()),
            peak_memory_bytes: peak_memory(),
            results,
            graphs: executed(&model.graph_stats(), before),
        }
    }

    /// Writes into each result how many times as fast it is as in another run. Returns whether both have any test in
    /// common.
    pub fn compare(&mut self, other: &EarlierReport) -> bool {
        for measured in &mut self.results {
            let same = other.results.iter().find(|other| other.name == measured.name);
            measured.ratio =
                same.map(|other| measured.rate().mean / other.rate().mean.max(f64::MIN_POSITIVE));
        }
        self.results.iter().any(|measured| measured.ratio.is_some())
    }
}

/// A graph's part of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GraphTime {
    /// Key of its context.
    pub context: String,
    /// Its name.
    pub graph: String,
    /// Number of executions.
    pub executions: u64,
    /// Executions that took more than 5 times the median of the graph's last ones, and 200 ms at least.
    pub slow: u64,
    /// Time of an execution, in milliseconds.
    pub mean_ms: f64,
    /// Its share of the time of all graphs.
    pub share: f64,
}

/// The part of a report that another run is compared with.
#[derive(Debug, Clone, Deserialize)]
pub struct EarlierReport {
    results: Vec<Measured>,
}

impl EarlierReport {
    /// Reads a report that was written as JSON.
    ///
    /// # Errors
    /// When the file cannot be read, or is no report.
    pub fn read(path: &Path) -> Result<Self> {
        let text = files::read_text(ErrorKind::Artifact, path, MAX_REPORT)?;
        serde_json::from_str(&text).map_err(|e| {
            Error::new(ErrorKind::Artifact, format!("{}: {e}", path.display()))
                .hint("expected what `qhx bench --json` printed")
        })
    }
}

/// Kind of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Prompt,
    Generate,
    Embed,
    Score,
}

/// Kind and size of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Test {
    kind: Kind,
    tokens: usize,
}

impl Test {
    fn name(self) -> String {
        let kind = match self.kind {
            Kind::Prompt => "pp",
            Kind::Generate => "tg",
            Kind::Embed => "embed",
            Kind::Score => "score",
        };
        format!("{kind}{}", self.tokens)
    }

    /// Seconds that it took.
    fn run(self, model: &mut Model, tokens: &[u32]) -> Result<f64> {
        let all = tokens.get(..self.tokens).unwrap_or(tokens);
        let trace = model.trace().cloned();
        let _span = trace::span(trace.as_ref(), self.name());
        let mut start = Instant::now();
        match self.kind {
            Kind::Embed => model.embed(all).map(drop)?,
            Kind::Score => model.score_parts(&[all], &CancelToken::new()).map(drop)?,
            Kind::Prompt | Kind::Generate => {
                model.reset()?;
                let op = model.op_mut();
                if self.kind == Kind::Prompt {
                    start = Instant::now();
                    op.prefill(&[Segment::Tokens(all)])?;
                } else {
                    op.prefill(&[Segment::Tokens(all.get(..1).unwrap_or(all))])?;
                    start = Instant::now();
                    all.iter().try_for_each(|&token| op.decode(token))?;
                }
                // Where logits are not numbers, the time means nothing.
                qhx_core::sampling::argmax(op.logits()?)?;
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Mean and standard deviation of some numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation, as of a sample.
    pub sd: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count().max(1) as f64;
        let mean = values.clone().sum::<f64>() / count;
        let squares = values.map(|value| (value - mean).powi(2)).sum::<f64>();
        // Of a sample, not of all there could be.
        let sd = (squares / (count - 1.0).max(1.0)).sqrt();
        Self { mean, sd }
    }
}

/// Result of a test.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Measured {
    /// Its name, such as `pp128`, `tg64`, `embed128` or `audio30`.
    pub name: String,
    /// Tokens that were consumed or generated.
    pub tokens: usize,
    /// Milliseconds of the whole test.
    pub ms: Spread,
    /// Its rate.
    pub tokens_per_second: Spread,
    /// Rate against real time, for tests that transcribe or speak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio: Option<AudioRate>,
    /// Result of speculative decoding, for an answer by it.
    #[serde(default, rename = "drafts", skip_serializing_if = "Option::is_none")]
    pub speculated: Option<Speculated>,
    /// Times the rate of the run that this one is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

impl Measured {
    fn of(test: Test, seconds: &[f64]) -> Self {
        let tokens = test.tokens;
        Self {
            name: test.name(),
            tokens,
            ms: Spread::of(seconds.iter().map(|s| s * 1e3)),
            tokens_per_second: Spread::of(seconds.iter().map(|s| tokens as f64 / s.max(1e-9))),
            audio: None,
            speculated: None,
            ratio: None,
        }
    }

    /// Rate that runs are compared by: audio over time, or else tokens over time.
    fn rate(&self) -> Spread {
        self.audio.map_or(self.tokens_per_second, |audio| audio.times_real_time)
    }
}

/// Executions of the graphs since `before`, with each graph's share of their total time.
fn executed(now: &[GraphStats], before: &[GraphStats]) -> Vec<GraphTime> {
    let mut graphs: Vec<_> = now.to_vec();
    for (graph, before) in graphs.iter_mut().zip(before) {
        graph.executions = graph.executions.saturating_sub(before.executions);
        graph.slow = graph.slow.saturating_sub(before.slow);
        graph.busy = graph.busy.saturating_sub(before.busy);
    }
    let all = graphs.iter().map(|graph| graph.busy.as_secs_f64()).sum::<f64>();
    let used = graphs.into_iter().filter(|graph| graph.executions > 0);
    let time = |graph: GraphStats| GraphTime {
        mean_ms: graph.busy.as_secs_f64() * 1e3 / graph.executions as f64,
        share: graph.busy.as_secs_f64() / all.max(f64::MIN_POSITIVE),
        context: graph.context,
        graph: graph.graph,
        executions: graph.executions,
        slow: graph.slow,
    };
    used.map(time).collect()
}

/// Milliseconds with three places.
fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// The most memory that this process ever had resident, in bytes; none where the system does not say.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
