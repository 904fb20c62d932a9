//! `qhx bench`: how fast a bundle consumes prompts, generates, embeds, scores, writes audio down and speaks.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use qhx::{Speaker, Transcriber};
use qhx_base::{Error, ErrorKind, Result, files};
use qhx_core::engine::{Model, Speculate};
use qhx_core::op::Task;
use qhx_tools::bench::{
    self, AudioRate, Bench, BenchOptions, BenchReport, BenchTable, EarlierReport, EnergyMeter,
    GraphTime, Measured, Speculated,
};
use serde::Serialize;

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, DecodeArgs, SpeculateArgs};
use crate::session::{self, Opening};
use crate::trace::{TraceArgs, Tracing};

const EXAMPLES: &str = "\
Examples:
  qhx bench qwen35/v81
  qhx bench qwen35/v81 --prompt 32,512 --tokens 128 --repeat 10
  qhx bench old/v81 --json > old.json && qhx bench new/v81 --compare old.json
  qhx bench qwen35/v81 --speculate auto
  qhx bench qwen35/v81 --table --repeat 3 --json > mine.json
  qhx bench --join mine.json theirs.json --svg rates.svg

pp128 is a prompt of 128 tokens, consumed from nothing until the logits of its last token are there; tg64 is 64 tokens,
one at a time, behind one token; embed128 is a text of 128 tokens, and score128 one that a reranker's head scores. Each is
done once unmeasured, and then all of them in turns. Sampling and the tokenizer are not part of it.

Of a model that writes audio down, audio30 is 30 s of noise, from samples to text, with at most --tokens tokens for what the
model takes at once; of a voice, speak is one sentence, from text to samples. Their rate is in times of real time. What
encoder, decoder and head take is in the lines of the graphs.

With --speculate two answers follow, each token by token and with draft tokens: repeats64 goes on with a prompt that repeats,
varies64 is drawn behind one that does not. Here all that a generation does counts.

With --table the context is filled to 128, 512, 1024, 2048 … positions: a prompt, and behind it the tokens of an answer.
Their energy is measured, too, where the system has counters that may be read or a battery that discharges. Below are the
figures that others published for the same model, with their sources, and the estimates of the bundle: on a device they
say whether it runs as fast as it should. The object of --json is what to send.";

/// Measure how fast a bundle generates, embeds, scores, transcribes and speaks
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    #[arg(required_unless_present = "join")]
    pub bundle: Option<PathBuf>,
    /// Lengths of prompts, or of texts to embed, in tokens [default: 128,512, as far as they fit]; with --table how far
    /// the context is filled [default: 128,512,1024,2048,… and all of it]
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
    /// Print rates by context length, as a table in Markdown; with --json as an object that --join takes
    #[arg(long, conflicts_with_all = ["compare", "speculate", "draft"])]
    pub table: bool,
    /// Put the tables of these files into one, behind that of --table where a bundle is given
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["compare", "speculate", "draft"])]
    pub join: Vec<PathBuf>,
    /// Draw what the table has into FILE, too
    #[arg(long, value_name = "FILE", conflicts_with_all = ["compare", "speculate", "draft"])]
    pub svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub speculate: SpeculateArgs,
    #[command(flatten)]
    pub decode: DecodeArgs,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// JSON report of a benchmark.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    bundle: String,
    #[serde(flatten)]
    report: &'a BenchReport,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    let (prompts, tokens) = (args.prompt.clone(), args.tokens);
    let options = BenchOptions { prompts, tokens, repeat: args.repeat };
    options.check()?;
    let bundle = match args.bundle.as_deref() {
        Some(bundle) if !args.table && args.join.is_empty() && args.svg.is_none() => bundle,
        bundle => return tables(args, app, bundle, &options, tracing),
    };
    let other = args.compare.as_deref().map(EarlierReport::read).transpose()?;
    let model = open(args, app, bundle, tracing)?;
    let (mut report, _) = measure(args, app, model, &options, tracing)?;
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
        let bundle = bundle.display().to_string();
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

/// Measures what the model is for; returns it as a table, too.
fn measure(
    args: &BenchArgs,
    app: &mut App,
    mut model: Model,
    options: &BenchOptions,
    tracing: Option<&Tracing>,
) -> Result<(BenchReport, BenchTable)> {
    let tasks = &model.op().description.tasks;
    let (transcribes, speaks) = (tasks.contains(&Task::Transcribe), tasks.contains(&Task::Speak));
    if !transcribes && !speaks {
        let report = by_tokens(args, app, &mut model, options, tracing)?;
        let table = BenchTable::of_report(&model, &report)?;
        return Ok((report, table));
    }
    let _working = app.interrupts.working();
    if transcribes {
        let mut transcriber = Transcriber::new(model)?;
        let report = bench::transcribe(&mut transcriber, options)?;
        let table = BenchTable::of_report(transcriber.model(), &report)?;
        return Ok((report, table));
    }
    let mut speaker = Speaker::new(model)?;
    let report = bench::speak(&mut speaker, options)?;
    let table = BenchTable::of_report(speaker.model(), &report)?;
    Ok((report, table))
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
    let speculate = match args.speculate.mode() {
        // It is measured where it is asked for.
        Speculate::Model => Speculate::Off,
        mode => mode,
    };
    if speculate != Speculate::Off && tokens > 0 && generates {
        session::open_draft(app, model, args.speculate.draft()?, &args.backend, tracing)?;
    }
    bench.speculate(model, speculate)?;
    let _working = app.interrupts.working();
    bench.run(model)
}

fn open(
    args: &BenchArgs,
    app: &mut App,
    bundle: &Path,
    tracing: Option<&Tracing>,
) -> Result<Model> {
    let decode_on = args.decode.decode_on;
    let opening = Opening { tracing, decode_on, ..Opening::default() };
    let model = session::open_checked(app, bundle, &args.backend, opening, |_| Ok(()))?;
    say!("{}", session::load(&model));
    Ok(model)
}

/// Rates by context length, of a bundle and of files.
fn tables(
    args: &BenchArgs,
    app: &mut App,
    bundle: Option<&Path>,
    options: &BenchOptions,
    tracing: Option<&Tracing>,
) -> Result<Status> {
    if bundle.is_some() && !args.table {
        let what = "--join and --svg: expected --table beside a bundle";
        return Err(
            Error::new(ErrorKind::Usage, what).hint("leave out the bundle to join files alone")
        );
    }
    // What is wrong with a file is said before anything is measured.
    let others = args.join.iter().map(|path| BenchTable::read(path)).collect::<Result<Vec<_>>>()?;
    let mut tables = Vec::new();
    if let Some(bundle) = bundle {
        let mut model = open(args, app, bundle, tracing)?;
        tables.push(if model.op().description.tasks.contains(&Task::Generate) {
            let energy = EnergyMeter::system().inspect_err(|e| say!("{e}")).ok();
            let _working = app.interrupts.working();
            BenchTable::measure(&mut model, options, energy.as_ref())?
        } else {
            measure(args, app, model, options, tracing)?.1
        });
    }
    let mine = tables.first().filter(|_| bundle.is_some());
    let beside = mine.map(BenchTable::beside_published).transpose()?;
    tables.extend(others.into_iter().flatten());
    match tables.as_slice() {
        [table] if args.json => app.output.json(table)?,
        _ if args.json => app.output.json(&tables)?,
        _ => {
            let text = BenchTable::markdown(&tables);
            let beside = beside.map_or_else(String::new, |beside| format!("\n{beside}"));
            (text + &beside).lines().try_for_each(|line| app.output.line(line))?;
        }
    }
    if let Some(path) = &args.svg {
        let mut file = files::create(ErrorKind::Io, path)?;
        let svg = BenchTable::svg(&tables);
        file.write_all(svg.as_bytes()).map_err(|e| Error::io(ErrorKind::Io, path, e))?;
    }
    Ok(Status::Done)
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

/// Results of speculative decoding, in one line.
fn speculated_line(found: &Speculated) -> String {
    let Speculated { plain_tokens_per_second: plain, times_plain, least_times_plain, .. } = found;
    format!(
        "{times_plain:.2} times plain decoding ({:.2} ± {:.2} tokens/s; {least_times_plain:.2} in the worst turn), \
         {:.2} tokens a step, {} of {} draft tokens accepted",
        plain.mean, plain.sd, found.tokens_per_step, found.accepted, found.drafted
    )
}
