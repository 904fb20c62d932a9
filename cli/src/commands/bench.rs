//! `qhx bench`: how fast a bundle consumes prompts, generates and embeds.

mod speculation;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use qhx_core::engine::{Model, Speculate};
use qhx_core::op::{Segment, Task};
use qhx_core::workspace::GraphStats;
use qhx_core::{Error, ErrorKind, Manifest, Result, files, trace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, SpeculateArgs};
use crate::session::{self, Opening};
use crate::time::{millis, ms};
use crate::trace::{TraceArgs, Tracing};
use speculation::{Answer, Speculated, answers};

/// Lengths of prompts when none are given; those that the context holds.
const PROMPTS: [usize; 2] = [128, 512];
/// A report of another run is not larger.
const MOST_REPORT: u64 = 16 << 20;

const EXAMPLES: &str = "\
Examples:
  qhx bench qwen35/v81
  qhx bench qwen35/v81 --prompt 32,512 --tokens 128 --repeat 10
  qhx bench old/v81 --json > old.json && qhx bench new/v81 --compare old.json
  qhx bench qwen35/v81 --speculate auto

pp128 is a prompt of 128 tokens, consumed from nothing until the logits of its last token are there; tg64 is 64 tokens,
one at a time, behind one token; embed128 is a text of 128 tokens. Each is done once unmeasured, and then all of them in
turns. Sampling and the tokenizer are not part of it.

With --speculate two answers follow, each token by token and with draft tokens: repeats64 goes on with a prompt that repeats,
varies64 is drawn behind one that does not. Here all that a generation does counts.";

/// Measure how fast a bundle consumes prompts, generates and embeds
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// Lengths of prompts, or of texts to embed, in tokens [default: 128,512, as far as they fit]
    #[arg(short, long, value_name = "P,…", value_delimiter = ',')]
    pub prompt: Vec<usize>,
    /// Tokens to generate; 0 leaves that out
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64)]
    pub tokens: usize,
    /// How often each is measured
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Print how many times as fast this is as the run whose report (--json) is in FILE
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub speculate: SpeculateArgs,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Test {
    Prompt(usize),
    Generate(usize),
    Embed(usize),
}

impl Test {
    fn name(self) -> String {
        match self {
            Self::Prompt(tokens) => format!("pp{tokens}"),
            Self::Generate(tokens) => format!("tg{tokens}"),
            Self::Embed(tokens) => format!("embed{tokens}"),
        }
    }

    fn tokens(self) -> usize {
        match self {
            Self::Prompt(tokens) | Self::Generate(tokens) | Self::Embed(tokens) => tokens,
        }
    }

    /// Seconds that it took.
    fn run(self, model: &mut Model, tokens: &[u32]) -> Result<f64> {
        let of = |count: usize| tokens.get(..count).unwrap_or(tokens);
        let trace = model.trace().cloned();
        let _span = trace::span(trace.as_ref(), self.name());
        if let Self::Embed(count) = self {
            let start = Instant::now();
            model.embed(of(count))?;
            return Ok(start.elapsed().as_secs_f64());
        }
        model.reset()?;
        let op = model.op_mut();
        let start = match self {
            Self::Generate(count) => {
                op.prefill(&[Segment::Tokens(of(1))])?;
                let start = Instant::now();
                of(count).iter().try_for_each(|&token| op.decode(token))?;
                start
            }
            Self::Prompt(count) | Self::Embed(count) => {
                let start = Instant::now();
                op.prefill(&[Segment::Tokens(of(count))])?;
                start
            }
        };
        // Where logits are not numbers, the time means nothing.
        qhx_core::sampling::argmax(op.logits()?)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Mean and standard deviation of some numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Spread {
    mean: f64,
    sd: f64,
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

/// What a test gave.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Measured {
    name: String,
    tokens: usize,
    /// Of the whole test.
    ms: Spread,
    tokens_per_second: Spread,
    /// Of an answer of speculative decoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guesses: Option<Speculated>,
    /// Times the rate of the run that this one is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

impl Measured {
    fn of(test: Test, seconds: &[f64]) -> Self {
        let tokens = test.tokens();
        Self {
            name: test.name(),
            tokens,
            ms: Spread::of(seconds.iter().map(|s| s * 1e3)),
            tokens_per_second: Spread::of(seconds.iter().map(|s| tokens as f64 / s.max(1e-9))),
            guesses: None,
            ratio: None,
        }
    }

    fn line(&self) -> String {
        let Self { name, tokens, ms, tokens_per_second: rate, guesses, ratio } = self;
        let each = format!("{:.3} ms a token", ms.mean / *tokens as f64);
        let each = match guesses {
            Some(guesses) => format!("{each}, {}", guesses.line()),
            None if name.starts_with("tg") => each,
            None => format!("{:.1} ms", ms.mean),
        };
        let ratio = ratio.map_or_else(String::new, |ratio| format!("  {ratio:.2} times as fast"));
        format!("{name:<10} {:>10.2} ± {:<8.2} tokens/s  {each}{ratio}", rate.mean, rate.sd)
    }
}

/// The part of a report that another run is compared with.
#[derive(Debug, Deserialize)]
struct Report {
    results: Vec<Measured>,
}

impl Report {
    fn read(path: &Path) -> Result<Self> {
        let text = files::read_text(ErrorKind::Artifact, path, MOST_REPORT)?;
        serde_json::from_str(&text).map_err(|e| {
            Error::new(ErrorKind::Artifact, format!("{}: {e}", path.display()))
                .hint("expected what `qhx bench --json` printed")
        })
    }
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, app: &mut App) -> Result<Status> {
    args.tracing.trace(|tracing| run_traced(args, app, tracing))
}

fn run_traced(args: &BenchArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    let other = args.compare.as_deref().map(Report::read).transpose()?;
    let (mut model, tests, mut answers) = open(args, app, tracing)?;
    let working = app.interrupts.working();
    let longest = tests.iter().map(|test| test.tokens()).max().unwrap_or(1);
    let tokens = tokens(&mut model, longest);
    let mut seconds = vec![Vec::with_capacity(args.repeat.into()); tests.len()];
    let mut before = Vec::new();
    for turn in 0..=args.repeat {
        if turn == 1 {
            before = model.graph_stats();
        }
        // In turns, so that a device that becomes warm slows all of them.
        for (test, seconds) in tests.iter().zip(&mut seconds) {
            let took = test.run(&mut model, &tokens)?;
            if turn > 0 {
                seconds.push(took);
            }
        }
        answers.iter_mut().try_for_each(|answer| answer.take_turn(&mut model, turn))?;
    }
    drop(working);
    let graphs = executed(&model.graph_stats(), &before);
    let results = tests.iter().zip(&seconds).map(|(test, seconds)| Measured::of(*test, seconds));
    let mut results: Vec<_> = results.chain(answers.iter().map(Answer::measured)).collect();
    for measured in &mut results {
        let same = |other: &&Measured| other.name == measured.name;
        let other = other.as_ref().and_then(|report| report.results.iter().find(same));
        measured.ratio = other.map(|other| {
            measured.tokens_per_second.mean / other.tokens_per_second.mean.max(f64::MIN_POSITIVE)
        });
    }
    if other.is_some() && results.iter().all(|measured| measured.ratio.is_none()) {
        say!("nothing to compare: the other report has none of these tests");
    }
    let peak = peak_memory();
    if args.json {
        app.output.json(&report(args, &model, &results, &graphs, peak))?;
        return Ok(Status::Done);
    }
    for measured in &results {
        app.output.line(&measured.line())?;
    }
    for (GraphStats { graph, executions, busy, .. }, share) in &graphs {
        let each = ms(*busy) / (*executions).max(1) as f64;
        app.output.line(&format!(
            "  graph {graph}: {executions} executions of {each:.3} ms, {:.0} % of the time",
            share * 100.0
        ))?;
    }
    let memory = peak.map_or_else(String::new, |bytes| format!(", peak memory {} MB", bytes >> 20));
    app.output.line(&format!("  opened in {:.0} ms{memory}", ms(model.load_time())))?;
    Ok(Status::Done)
}

/// Opens the bundle, and says what of it is measured: tests, and answers of speculative decoding.
fn open(
    args: &BenchArgs,
    app: &App,
    tracing: Option<&Tracing>,
) -> Result<(Model, Vec<Test>, Vec<Answer>)> {
    let usage = |what: String| Err(Error::new(ErrorKind::Usage, what));
    if args.prompt.contains(&0) {
        return usage("--prompt 0: expected lengths of at least one token".to_owned());
    }
    let mut model = session::open_checked(
        app,
        &args.bundle,
        &args.backend,
        Opening { tracing, ..Opening::default() },
        |_: &Manifest| Ok(()),
    )?;
    say!("{}", session::load(&model));
    let most = if model.info().max_ctx == 0 { usize::MAX } else { model.info().max_ctx };
    if let Some(long) = args.prompt.iter().find(|tokens| **tokens > most) {
        return usage(format!("--prompt {long}: expected at most {most} tokens, the context"));
    }
    let mut lengths = args.prompt.clone();
    if lengths.is_empty() {
        lengths.extend(PROMPTS.iter().filter(|tokens| **tokens <= most));
        if lengths.is_empty() {
            lengths.push(most);
        }
    }
    let generates = model.op().description.tasks.contains(&Task::Generate);
    let mut tests: Vec<_> = lengths
        .into_iter()
        .map(|tokens| if generates { Test::Prompt(tokens) } else { Test::Embed(tokens) })
        .collect();
    // The context holds the token in front of them, too.
    let tokens = args.tokens.min(most.saturating_sub(1));
    if generates && tokens > 0 {
        if tokens < args.tokens {
            say!("generating {tokens} tokens, what a context of {most} leaves room for");
        }
        tests.push(Test::Generate(tokens));
    }
    let speculate = args.speculate.mode();
    if speculate == Speculate::Off || tokens == 0 {
        return Ok((model, tests, Vec::new()));
    }
    if !generates {
        return usage("option --speculate: the bundle does not generate".to_owned());
    }
    session::open_draft(app, &mut model, args.speculate.draft()?, &args.backend, tracing)?;
    let varied = self::tokens(&mut model, most.min(speculation::PROMPT));
    let answers = answers(&mut model, speculate, (tokens, most), &varied)?;
    Ok((model, tests, answers))
}

/// Tokens that the model takes, the same in each run: none that stands for an image or audio.
fn tokens(model: &mut Model, count: usize) -> Vec<u32> {
    let (vocab, op) = (model.info().vocab, model.op_mut());
    let vocab = match op.info().input_vocab {
        0 => vocab,
        rows => rows,
    };
    let vocab = u32::try_from(vocab.max(1)).unwrap_or(u32::MAX);
    let placeholders = op.info().placeholders.clone();
    // A prime step, so that texts of any length vary.
    let all = (0..u32::MAX).map(|i| i.wrapping_mul(7919).wrapping_add(17) % vocab);
    all.filter(|token| !placeholders.contains(token)).take(count).collect()
}

/// What the graphs did since `before`, and what share of all their time each took.
fn executed(now: &[GraphStats], before: &[GraphStats]) -> Vec<(GraphStats, f64)> {
    let mut graphs: Vec<_> = now.to_vec();
    for (graph, before) in graphs.iter_mut().zip(before) {
        graph.executions = graph.executions.saturating_sub(before.executions);
        graph.busy = graph.busy.saturating_sub(before.busy);
    }
    let all = graphs.iter().map(|graph| graph.busy.as_secs_f64()).sum::<f64>();
    let used = graphs.into_iter().filter(|graph| graph.executions > 0);
    used.map(|graph| {
        let share = graph.busy.as_secs_f64() / all.max(f64::MIN_POSITIVE);
        (graph, share)
    })
    .collect()
}

fn report(
    args: &BenchArgs,
    model: &Model,
    results: &[Measured],
    graphs: &[(GraphStats, f64)],
    peak: Option<u64>,
) -> Value {
    let graphs: Vec<_> = graphs
        .iter()
        .map(|(graph, share)| {
            json!({
                "context": graph.context,
                "graph": graph.graph,
                "executions": graph.executions,
                "mean_ms": ms(graph.busy) / graph.executions.max(1) as f64,
                "share": share,
            })
        })
        .collect();
    json!({
        "bundle": args.bundle.display().to_string(),
        "model": model.manifest().model.name,
        "op": model.op().description.name,
        "backend": model.backend(),
        "repeat": args.repeat,
        "load_ms": millis(model.load_time()),
        "peak_memory_bytes": peak,
        "results": results,
        "graphs": graphs,
    })
}

/// The most memory that this process ever had resident, in bytes; none where the system does not say.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
