//! `qhx embed`: one vector for each text.

mod args;
mod batches;
pub(crate) mod classic;
mod fingerprint;
#[cfg(feature = "parquet")]
mod parquet;
mod record;
mod row;
mod rows;
mod sink;

pub(crate) use args::EmbedArgs;
pub(crate) use rows::Rows;

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use qhx::{EmbedOptions, Embedder};
use qhx_core::{Error, ErrorKind, Result};

use crate::Status;
use crate::app::App;
use crate::session::{self, Opening};
use crate::time;
use crate::trace::Tracing;
use batches::{Batch, Batches};
use fingerprint::Fingerprint;
use sink::{Claim, Sink};

const BAR: &str = "embed [{bar:30}] {pos}/{len} texts {per_sec} {eta}";

/// Runs the command.
pub(crate) fn run(args: &EmbedArgs, app: &mut App) -> Result<Status> {
    args.tracing.trace(|tracing| run_traced(args, app, tracing))
}

fn run_traced(args: &EmbedArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    args.check()?;
    // The output is touched when everything else is open, and claimed before a model is loaded for it.
    let mut rows = Rows::open(args)?;
    let claim = Claim::new(args, &rows)?;
    let opening = Opening { tracing, ..Opening::default() };
    let model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    let mut options = EmbedOptions::default();
    options.query_prefix = args.prefix_query.clone();
    options.document_prefix = args.prefix_doc.clone();
    options.truncate = args.truncate;
    let mut encoder = Embedder::with_options(model, options)?;
    let mut sink = claim.open(
        Fingerprint::new(&encoder, args),
        encoder.model().info().embedding_dim,
        &mut rows,
    )?;
    let skipped = sink.resumed();
    if skipped > 0 {
        say!("resume: {skipped} texts are in the output already");
    }
    let bar = bar(rows.total(), skipped);
    let working = app.interrupts.working();
    let tokens = if args.no_pack { 0 } else { encoder.model().batch_tokens() };
    let result = Batches::start(rows, encoder.texts().clone(), tokens)
        .and_then(|batches| embed_all(&batches, &mut encoder, &mut sink, &bar, app));
    drop(working);
    // What is done stays, whatever ended the run.
    let finished = sink.finish(matches!(result, Ok(Status::Done)));
    let status = result?;
    finished?;
    let texts = bar.position() - skipped;
    bar.finish_and_clear();
    say!("{}", summary(&encoder, texts));
    Ok(status)
}

/// Embeds the texts until there are no more.
fn embed_all(
    batches: &Batches,
    encoder: &mut Embedder,
    sink: &mut Sink,
    bar: &ProgressBar,
    app: &mut App,
) -> Result<Status> {
    let embedded = loop {
        match batches.next(app.interrupts.token()) {
            Ok(None) => return Ok(Status::Done),
            Ok(Some(batch)) => {
                if let Err(e) = embed_batch(&batch, encoder, sink, bar, app) {
                    break e;
                }
            }
            Err(e) => break e,
        }
    };
    match embedded.kind() {
        ErrorKind::Cancelled => Ok(Status::Cancelled),
        _ => Err(embedded),
    }
}

/// Embeds the texts of a batch. An error of the model names the text.
fn embed_batch(
    batch: &Batch,
    encoder: &mut Embedder,
    sink: &mut Sink,
    bar: &ProgressBar,
    app: &mut App,
) -> Result<()> {
    let (mut written, mut unwritten) = (0, None);
    let embedded = encoder.embed_each(&batch.tokens, |index, vector| {
        let row = &batch.rows[index];
        if let Err(e) = sink.write(&mut app.output, row, vector) {
            unwritten = Some(e);
            return Err(Error::new(ErrorKind::Io, "a vector was not written"));
        }
        written = index + 1;
        bar.inc(1);
        Ok(())
    });
    match (unwritten, embedded) {
        (Some(e), _) => Err(e),
        (None, Ok(())) => Ok(()),
        (None, Err(e)) => match batch.rows.get(written) {
            Some(row) => Err(e.context(format_args!("text {}", row.index))),
            None => Err(e),
        },
    }
}

fn bar(total: Option<u64>, done: u64) -> ProgressBar {
    let bar = match total {
        Some(total) if std::io::stderr().is_terminal() => ProgressBar::new(total),
        _ => ProgressBar::hidden(),
    };
    let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("=> "));
    bar.set_position(done);
    bar
}

fn summary(encoder: &Embedder, texts: u64) -> String {
    let model = encoder.model();
    let graphs: Duration = model.graph_stats().iter().map(|s| s.busy).sum();
    let parts = model
        .graph_stats()
        .iter()
        .filter(|s| s.executions > 0)
        .map(|s| format!("{} {:.1} ms", s.graph, time::ms(s.busy) / s.executions as f64))
        .collect::<Vec<_>>()
        .join(", ");
    let each = if texts == 0 { 0.0 } else { time::ms(graphs) / texts as f64 };
    format!(
        "{}, {texts} texts, {each:.1} ms a text in graphs{}{}",
        session::load(model),
        if parts.is_empty() { "" } else { ": " },
        parts
    )
}
