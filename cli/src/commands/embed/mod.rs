//! `qhx embed`: one vector for each text.

mod args;
pub(crate) mod classic;
mod encoder;
#[cfg(feature = "parquet")]
mod parquet;
mod rows;
mod sink;

pub(crate) use args::EmbedArgs;

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use qhx_core::{ErrorKind, Result};

use crate::app::{App, Status};
use crate::session;
use encoder::Encoder;
use rows::Rows;
use sink::{Sink, Vector};

const BAR: &str = "embed [{bar:30}] {pos}/{len} texts {per_sec} {eta}";

/// Runs the command.
pub(crate) fn run(args: &EmbedArgs, app: &mut App) -> Result<Status> {
    args.check()?;
    // What is there already is read before a model is loaded for it.
    let mut sink = Sink::open(args)?;
    let mut rows = Rows::open(args)?;
    let skipped = rows.skip(sink.resumed())?;
    if skipped > 0 {
        say!("resume: {skipped} texts are in the output already");
    }
    let model = session::open(app, &args.bundle, None, &args.backend)?;
    let query = args.prefix_query.clone();
    let document = args.prefix_doc.clone();
    let mut encoder = Encoder::new(model, query, document, args.truncate)?;
    let bar = bar(rows.total()?, skipped);
    let working = app.interrupts.working();
    let status = loop {
        if app.interrupts.token().is_cancelled() {
            break Status::Cancelled;
        }
        let Some(row) = rows.next()? else { break Status::Done };
        match encoder.embed(&row.text, row.role) {
            Ok(embedding) => {
                sink.write(
                    &mut app.output,
                    &Vector { index: row.index, text: &row.text, embedding },
                )?;
            }
            Err(e) if e.kind() == ErrorKind::Cancelled => break Status::Cancelled,
            Err(e) => {
                sink.finish(false)?;
                return Err(e.context(format_args!("text {}", row.index)));
            }
        }
        bar.inc(1);
    };
    drop(working);
    sink.finish(matches!(status, Status::Done))?;
    let texts = bar.position() - skipped;
    bar.finish_and_clear();
    say!("{}", summary(&encoder, texts));
    Ok(status)
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

fn summary(encoder: &Encoder, texts: u64) -> String {
    let model = encoder.model();
    let graphs: Duration = model.graph_stats().iter().map(|s| s.busy).sum();
    let parts = model
        .graph_stats()
        .iter()
        .filter(|s| s.executions > 0)
        .map(|s| format!("{} {:.1} ms", s.graph, session::ms(s.busy) / s.executions as f64))
        .collect::<Vec<_>>()
        .join(", ");
    let each = if texts == 0 { 0.0 } else { session::ms(graphs) / texts as f64 };
    format!(
        "{}, {texts} texts, {each:.1} ms a text in graphs{}{}",
        session::load(model),
        if parts.is_empty() { "" } else { ": " },
        parts
    )
}
