//! `qhx bench`: how fast a bundle consumes prompts, generates, embeds, scores, writes audio down and speaks.

use std::path::PathBuf;

use clap::Args;
use qhx::bench::{
    self, AudioRate, Bench, BenchOptions, BenchReport, EarlierReport, GraphTime, Measured,
    Speculated,
};
use qhx::{Speaker, Transcriber};
use qhx_core::Result;
use qhx_core::engine::{Model, Speculate};
use qhx_core::op::Task;
use serde::Serialize;

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, SpeculateArgs};
use crate::session::{self, Opening};
use crate::trace::{TraceArgs, Tracing};

const EXAMPLES: &str = "\
Examples:
  qhx bench qwen35/v81
  qhx bench qwen35/v81 --prompt 32,512 --tokens 128 --repeat 10
  qhx bench old/v81 --json > old.json && qhx bench new/v81 --compare old.json
  qhx bench qwen35/v81 --speculate auto

pp128 is a prompt of 128 tokens, consumed from nothing until the logits of its last token are there; tg64 is 64 tokens,
one at a time, behind one token; embed128 is a text of 128 tokens, and score128 one that a reranker's head scores. Each is
done once unmeasured, and then all of them in turns. Sampling and the tokenizer are not part of it.

Of a model that writes audio down, audio30 is 30 s of noise, from samples to text, with at most --tokens tokens for what the
model takes at once; of a voice, speak is one sentence, from text to samples. Their rate is in times of real time. What
encoder, decoder and head take is in the lines of the graphs.

With --speculate two answers follow, each token by token and with draft tokens: repeats64 goes on with a prompt that repeats,
varies64 is drawn behind one that does not. Here all that a generation does counts.";

/// Measure how fast a bundle consumes prompts, generates, embeds, scores, writes audio down and speaks
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

/// What is printed for programs.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    bundle: String,
    #[serde(flatten)]
    report: &'a BenchReport,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, app: &mut App) -> Result<Status> {
    args.tracing.trace(|tracing| run_traced(args, app, tracing))
}

fn run_traced(args: &BenchArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    let other = args.compare.as_deref().map(EarlierReport::read).transpose()?;
    let options = BenchOptions::default().prompts(args.prompt.iter().copied());
    let options = options.tokens(args.tokens).repeat(args.repeat);
    options.check()?;
    let opening = Opening { tracing, ..Opening::default() };
    let mut model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    say!("{}", session::load(&model));
    let tasks = &model.op().description.tasks;
    let mut report = if tasks.contains(&Task::Transcribe) {
        let mut transcriber = Transcriber::new(model)?;
        let _working = app.interrupts.working();
        bench::transcribe(&mut transcriber, &options)?
    } else if tasks.contains(&Task::Speak) {
        let mut speaker = Speaker::new(model)?;
        let _working = app.interrupts.working();
        bench::speak(&mut speaker, &options)?
    } else {
        by_tokens(args, app, &mut model, &options, tracing)?
    };
    for Measured { name, speculated, .. } in &report.results {
        if let Some(same) = speculated.as_ref().and_then(|speculated| speculated.differs_at) {
            say!(
                "{name}: with draft tokens token {same} is another one; graphs of several rows round otherwise than those of one, \
                 and two tokens were almost as likely"
            );
        }
    }
    if other.is_some_and(|other| !report.compare(&other)) {
        say!("nothing to compare: the other report has none of these tests");
    }
    if args.json {
        let bundle = args.bundle.display().to_string();
        app.output.json(&Printed { bundle, report: &report })?;
        return Ok(Status::Done);
    }
    for measured in &report.results {
        app.output.line(&line(measured))?;
    }
    for GraphTime { graph, executions, slow, mean_ms, share, .. } in &report.graphs {
        let slow = if *slow > 0 { format!(", {slow} of them slow") } else { String::new() };
        app.output.line(&format!(
            "  graph {graph}: {executions} executions of {mean_ms:.3} ms{slow}, {:.0} % of the time",
            share * 100.0
        ))?;
    }
    let memory = report.peak_memory_bytes;
    let memory =
        memory.map_or_else(String::new, |bytes| format!(", peak memory {} MB", bytes >> 20));
    app.output.line(&format!("  opened in {:.0} ms{memory}", report.load_ms))?;
    Ok(Status::Done)
}

/// Measures prompts, tokens, texts and answers.
fn by_tokens(
    args: &BenchArgs,
    app: &mut App,
    model: &mut Model,
    options: &BenchOptions,
    tracing: Option<&Tracing>,
) -> Result<BenchReport> {
    let mut bench = Bench::new(model, options)?;
    let (tokens, generates) =
        (bench.tokens(), model.op().description.tasks.contains(&Task::Generate));
    if generates && 0 < tokens && tokens < args.tokens {
        let context = model.info().max_ctx;
        say!("generating {tokens} tokens, what a context of {context} leaves room for");
    }
    let speculate = args.speculate.mode();
    if speculate != Speculate::Off && tokens > 0 && generates {
        session::open_draft(app, model, args.speculate.draft()?, &args.backend, tracing)?;
    }
    bench.speculate(model, speculate)?;
    let _working = app.interrupts.working();
    bench.run(model)
}

/// A result for people.
fn line(measured: &Measured) -> String {
    let Measured { name, tokens, ms, tokens_per_second: rate, audio, speculated, ratio, .. } =
        measured;
    if let Some(AudioRate { seconds, times_real_time: rate, .. }) = audio {
        let tokens = if *tokens > 0 { format!(", {tokens} tokens") } else { String::new() };
        let ratio = ratio.map_or_else(String::new, |ratio| format!("  {ratio:.2} times as fast"));
        return format!(
            "{name:<10} {:>10.2} ± {:<8.2} times real time  {seconds:.1} s of audio in {:.1} ms{tokens}{ratio}",
            rate.mean, rate.sd, ms.mean
        );
    }
    let each = format!("{:.3} ms a token", ms.mean / *tokens as f64);
    let each = match speculated {
        Some(found) => format!("{each}, {}", speculated_line(found)),
        None if name.starts_with("tg") => each,
        None => format!("{:.1} ms", ms.mean),
    };
    let ratio = ratio.map_or_else(String::new, |ratio| format!("  {ratio:.2} times as fast"));
    format!("{name:<10} {:>10.2} ± {:<8.2} tokens/s  {each}{ratio}", rate.mean, rate.sd)
}

/// What speculative decoding gave.
fn speculated_line(found: &Speculated) -> String {
    let Speculated { plain_tokens_per_second: plain, times_plain, least_times_plain, .. } = found;
    format!(
        "{times_plain:.2} times plain decoding ({:.2} ± {:.2} tokens/s; {least_times_plain:.2} in the worst turn), \
         {:.2} tokens a step, {} of {} draft tokens accepted",
        plain.mean, plain.sd, found.tokens_per_step, found.accepted, found.drafted
    )
}
