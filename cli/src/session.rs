//! Opens a bundle, runs a generation on it and says how it went.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use qhx::media::{Attached, Attachment};
use qhx::{ChatRun, DecodeOn};
use qhx_base::trace::Trace;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::Manifest;
use qhx_core::dump::Dump;
use qhx_core::engine::{
    DraftCounts, Event, FinishReason, Generation, Model, Request, Run, Timings,
};
use qhx_core::op::{HandOvers, OpDescription, OpSource, SpanStats};
use qhx_core::sampling::TokenLogprobs;
use qhx_exec::backend::Backend;
use serde_json::{Value, json};

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, PreparingArgs};
use crate::emulator;
use crate::media;
use crate::program::this_program;
use crate::time::{millis, ms};
use crate::trace::Tracing;

/// Opens the bundle at `path` with the backend that the options choose.
pub(crate) fn open(
    app: &App,
    path: &Path,
    root: Option<&Path>,
    backend: &BackendArgs,
) -> Result<Model> {
    open_checked(app, path, backend, Opening { root, ..Opening::default() }, |_| Ok(()))
}

/// Options for opening a bundle.
#[derive(Debug, Default)]
pub(crate) struct Opening<'a> {
    /// The folder that the manifest's paths resolve against.
    pub root: Option<&'a Path>,
    /// Target for arrays of the model.
    pub dump: Option<Arc<Dump>>,
    /// Trace of the run.
    pub tracing: Option<&'a Tracing>,
    /// Backend that answers while a portable bundle is prepared, if it is to be prepared.
    pub preparing: Option<&'a PreparingArgs>,
    /// Backend that consumes the tokens of answers, if that is asked for.
    pub decode_on: Option<DecodeOn>,
    /// Attachments that the host-op has to take; the files are looked at before anything is loaded.
    pub attachments: &'a [Attachment],
    /// Text whose placeholders they have to fit.
    pub text: &'a str,
}

/// Same as [`open`]; `check` sees the manifest before anything else of the bundle is loaded.
pub(crate) fn open_checked(
    app: &App,
    path: &Path,
    backend: &BackendArgs,
    opening: Opening<'_>,
    check: impl FnOnce(&Manifest) -> Result<()>,
) -> Result<Model> {
    let Opening { root, dump, tracing, preparing, decode_on, attachments, text } = opening;
    let mut runtime = app.runtime(backend, tracing);
    if preparing.is_some_and(|preparing| preparing.while_preparing.is_some()) {
        let qhx = this_program().ok_or_else(|| {
            Error::new(ErrorKind::Runtime, "--while-preparing: qhx is not beside this program")
        })?;
        runtime = runtime.while_preparing(qhx);
    }
    if let Some(dump) = dump {
        runtime = runtime.dump(dump);
    }
    if let Some(on) = decode_on {
        runtime = runtime.decode_on(on);
    }
    let runtime = runtime.build();
    let bundle = runtime.bundle(path, root)?;
    check(bundle.manifest())?;
    let taken = |op: &OpDescription| qhx::media::check(text, attachments, op);
    let model = runtime.load_checked(&bundle, taken, say_backend)?;
    if let Some(decoder) = model.decoder() {
        say!("tokens: {} ({})", decoder.backend.label(), decoder.reason);
    }
    Ok(model)
}

/// Says which backend was taken, and why.
pub(crate) fn say_backend(backend: &dyn Backend, reason: &str) {
    say!("backend: {} ({reason})", backend.info().label());
    emulator::advise(backend);
}

/// Opens the bundle of a draft, if there is one, and has it make draft tokens for the model.
pub(crate) fn open_draft(
    app: &App,
    model: &mut Model,
    draft: Option<&Path>,
    backend: &BackendArgs,
    tracing: Option<&Tracing>,
) -> Result<()> {
    let Some(path) = draft else { return Ok(()) };
    let opening = Opening { tracing, ..Opening::default() };
    let draft = open_checked(app, path, backend, opening, |_| Ok(()))
        .map_err(|e| e.context("option --draft"))?;
    say!("draft: {}", load(&draft));
    model.set_draft(draft)
}

/// Output on standard output while tokens come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// The text.
    Text,
    /// Token ids, separated by commas, once all are there.
    Ids,
    /// Nothing.
    Quiet,
}

/// A generation under way, of a prompt or of a conversation.
pub(crate) trait Events {
    fn next_event(&mut self) -> Result<Option<Event<'_>>>;
    fn finish(self) -> Result<Generation>;
}

impl Events for Run<'_> {
    fn next_event(&mut self) -> Result<Option<Event<'_>>> {
        Run::next_event(self)
    }

    fn finish(self) -> Result<Generation> {
        Run::finish(self)
    }
}

impl Events for ChatRun<'_> {
    fn next_event(&mut self) -> Result<Option<Event<'_>>> {
        ChatRun::next_event(self)
    }

    fn finish(self) -> Result<Generation> {
        ChatRun::finish(self)
    }
}

/// Generates and streams to standard output. A line ends what was streamed. `attached` is what of the prompt the model
/// has not seen yet.
pub(crate) fn generate(
    app: &mut App,
    model: &mut Model,
    request: &Request,
    attached: &[Attached],
    stream: Stream,
) -> Result<Generation> {
    let trace = model.trace().cloned();
    let looks_at = media::names(attached);
    follow(app, &request.cancel, looks_at, trace.as_ref(), stream, || model.start(request))
}

/// Same as [`generate`], for a run that `start` begins and `cancel` stops.
pub(crate) fn follow<R: Events>(
    app: &mut App,
    cancel: &CancelToken,
    looks_at: Option<String>,
    trace: Option<&Arc<Trace>>,
    stream: Stream,
    start: impl FnOnce() -> Result<R>,
) -> Result<Generation> {
    let _working = app.interrupts.working_on(cancel);
    let progress = app.progress.clone();
    progress.begin(looks_at.as_deref());
    let generation = start().and_then(|run| print(app, run, stream));
    progress.end();
    if let Some(trace) = trace {
        // A second Ctrl-C ends the process where it is.
        trace.flush();
    }
    let (generation, ends_line) = generation?;
    match stream {
        Stream::Text if !ends_line => app.output.write("\n")?,
        Stream::Ids => app.output.line(&crate::prompt::join(&generation.tokens))?,
        Stream::Text | Stream::Quiet => {}
    }
    Ok(generation)
}

/// Writes the text of a run as it comes. Returns whether it ends with a line end.
fn print(app: &mut App, mut run: impl Events, stream: Stream) -> Result<(Generation, bool)> {
    let mut ends_line = false;
    while let Some(event) = run.next_event()? {
        app.progress.end();
        let text = event.text().filter(|text| stream == Stream::Text && !text.is_empty());
        if let Some(text) = text {
            ends_line = text.ends_with('\n');
            // A run that is dropped ends where it is.
            app.output.write(text)?;
        }
    }
    Ok((run.finish()?, ends_line))
}

/// The exit status that a generation deserves.
pub(crate) fn status(generation: &Generation) -> Status {
    match generation.finish_reason {
        FinishReason::Cancelled => Status::Cancelled,
        _ => Status::Done,
    }
}

/// One line about where the time went.
pub(crate) fn summary(generation: &Generation) -> String {
    let Generation { timings: t, prompt_tokens, reused_tokens, .. } = generation;
    format!(
        "prompt {prompt_tokens} tokens ({reused_tokens} reused) in {:.1} ms, {} tokens in {:.1} ms \
         ({:.1} tok/s{}), graphs {:.1} ms, host {:.1} ms, sampling {:.1} ms, finish: {}{}",
        ms(t.prefill),
        generation.tokens.len(),
        ms(t.decode),
        t.decode_tokens_per_second(),
        drafts(t),
        ms(t.graph),
        ms(t.host),
        ms(t.sampling),
        generation.finish_reason.name(),
        handed_over(t) + &parts(generation),
    )
}

/// Number of tokens that a grammar forced, and the result of speculative decoding where tokens were verified.
fn drafts(t: &Timings) -> String {
    let DraftCounts { verifications, drafted, accepted } = t.drafts;
    let forced = match t.forced_tokens {
        0 => String::new(),
        count => format!(", {count} tokens forced"),
    };
    if verifications == 0 {
        return forced;
    }
    format!("{forced}, {accepted} of {drafted} draft tokens accepted, {} steps", t.decode_steps)
}

/// The states that went from one backend to the other.
fn handed_over(t: &Timings) -> String {
    let HandOvers { count, bytes, busy } = t.hand_overs;
    let times = if count == 1 { String::new() } else { format!(" {count} times") };
    match count {
        0 => String::new(),
        _ => format!(", state handed over{times}: {bytes} bytes in {:.1} ms", ms(busy)),
    }
}

/// The parts of the host-op that ran.
fn parts(generation: &Generation) -> String {
    let part = |span: &SpanStats| format!("{} {:.1} ms", span.name, ms(span.busy));
    let parts: Vec<_> = generation.spans.iter().map(part).collect();
    if parts.is_empty() { String::new() } else { format!("; op: {}", parts.join(", ")) }
}

/// A generation for programs, with the images and audio of its prompt.
pub(crate) fn json(model: &Model, generation: &Generation, attached: &[Attached]) -> Value {
    let mut json = json!({
        "text": generation.text,
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_tokens,
        "reused_tokens": generation.reused_tokens,
        "media": media::json(attached),
        "finish_reason": generation.finish_reason,
        "timings": timings(generation),
        "backend": model.backend().name,
        "activations": model.backend().activations(),
        "caches": model.backend().caches(),
        "op": model.op().description.name,
        "plugin": origin(model),
    });
    if let Some(decoder) = model.decoder() {
        json["decoder"] = json!({
            "backend": decoder.backend.name,
            "activations": decoder.backend.activations(),
            "caches": decoder.backend.caches(),
            "reason": decoder.reason,
        });
    }
    if !generation.logprobs.is_empty() {
        json["logprobs"] = generation.logprobs.iter().map(logprobs).collect();
    }
    json
}

fn logprobs(of: &TokenLogprobs) -> Value {
    let top = of.top.iter().map(|(token, logprob)| json!({"token": token, "logprob": logprob}));
    json!({"logprob": of.logprob, "top": top.collect::<Vec<_>>()})
}

/// The part of a host-op that looks at images and videos, where it measures that.
const VISION: &str = "vision";

fn timings(generation: &Generation) -> Value {
    let t: &Timings = &generation.timings;
    let HandOvers { count, bytes, busy } = t.hand_overs;
    let spans = generation.spans.iter().map(|s| (s.name.clone(), json!(millis(s.busy))));
    let vision = generation.spans.iter().find(|span| span.name == VISION);
    json!({
        "load_ms": millis(t.load),
        "prefill_ms": millis(t.prefill),
        "decode_ms": millis(t.decode),
        "decode_tok_s": (t.decode_tokens_per_second() * 1e3).round() / 1e3,
        "graph_ms": millis(t.graph),
        "host_ms": millis(t.host),
        "sampling_ms": millis(t.sampling),
        "decode_steps": t.decode_steps,
        "forced_tokens": t.forced_tokens,
        "drafts": t.drafts,
        "slow_executions": t.slow_executions,
        "hand_overs": {"count": count, "bytes": bytes, "ms": millis(busy)},
        "vision_ms": millis(vision.map_or(Duration::ZERO, |span| span.busy)),
        "spans_ms": Value::Object(spans.collect()),
    })
}

/// The plugin's file, or `builtin`.
pub(crate) fn origin(model: &Model) -> String {
    match &model.op().source {
        OpSource::Builtin => "builtin".to_owned(),
        OpSource::Plugin(path) => path.display().to_string(),
    }
}

/// Time that opening a model took, and of it that of each context.
pub(crate) fn load(model: &Model) -> String {
    let contexts = model.context_loads().iter();
    let contexts: Vec<_> = contexts.map(|c| format!("{} {:.1}", c.key, ms(c.time))).collect();
    format!("load {:.1} ms ({})", ms(model.load_time()), contexts.join(", "))
}
