//! `qhx embed`: one vector for each text, and for each image.

mod args;
pub(crate) mod classic;

pub(crate) use args::EmbedArgs;

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use qhx::{EmbedOptions, Embedder, TokenVectors, norm};
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::corpus::{
    Claimed, Fingerprint, RowOptions, Rows, Vector, VectorFile, embed, embed_tokens,
};

use crate::Status;
use crate::app::App;
use crate::session::{self, Opening};
use crate::time;
use crate::trace::Tracing;

/// Values of a vector that people are shown.
const SHOWN: usize = 4;

const BAR: &str = "embed [{bar:30}] {pos}/{len} texts {per_sec} {eta}";

/// Runs the command.
pub(crate) fn run(args: &EmbedArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    args.check()?;
    // The output is touched when everything else is open, and claimed before a model is loaded for it.
    let options = RowOptions { role: args.role, shard: args.shard };
    let mut rows = match &args.input {
        None => Rows::of_texts(args.texts.iter(), options).and_images(args.images.iter()),
        Some(path) if path == Path::new("-") => Rows::stdin(options),
        Some(path) => Rows::open(path, options)?,
    };
    let claim = args.output.as_deref().map(|output| Claimed::new(output, args.existing(), &rows));
    let claim = claim.transpose()?;
    let opening = Opening { tracing, preparing: Some(&args.preparing), ..Opening::default() };
    let model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    let prefixes = EmbedOptions::default()
        .query_prefix(args.prefix_query.clone())
        .document_prefix(args.prefix_doc.clone())
        .truncate(args.truncate);
    let mut encoder = Embedder::with_options(model, prefixes)?;
    let settings = Fingerprint::new(&encoder, options, !args.no_pack);
    let file = claim.map(|claim| claim.open(settings, encoder.dimensions(), &mut rows));
    let mut file = file.transpose()?;
    let skipped = file.as_ref().map_or(0, VectorFile::resumed);
    if skipped > 0 {
        say!("resume: {skipped} texts are in the output already");
    }
    let bar = bar(rows.total(), skipped);
    let working = app.interrupts.working();
    let (cancel, output) = (app.interrupts.token(), &mut app.output);
    let result = if args.sparse || args.multi {
        embed_tokens(&mut encoder, rows, cancel, |row, found| {
            let (sparse, multi) = parts(args, found)?;
            output.json(&Vector::of(row, &found.vector).with_tokens(sparse, multi))?;
            bar.inc(1);
            Ok(())
        })
    } else {
        embed(&mut encoder, rows, !args.no_pack, cancel, |row, vector| {
            match &mut file {
                Some(file) => file.write(row, vector)?,
                None if args.json => output.json(&Vector::of(row, vector))?,
                None => output.line(&people(row.index, vector))?,
            }
            bar.inc(1);
            Ok(())
        })
    };
    drop(working);
    // What is done stays, whatever ended the run.
    let finished = file.map(|file| file.finish(result.is_ok())).transpose();
    if let Ok(Some(Some(lines))) = &finished {
        say!("what is done lies in {}; --resume goes on with it", lines.display());
    }
    let status = match result {
        Ok(()) => Status::Done,
        Err(e) if e.kind() == ErrorKind::Cancelled => Status::Cancelled,
        Err(e) => return Err(e),
    };
    finished?;
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

/// Weights and vectors of tokens; none that are not asked for.
type TokenParts<'a> = (Option<&'a BTreeMap<u32, f32>>, Option<&'a [Vec<f32>]>);

/// The parts that are asked for; an error where the model does not give one of them.
fn parts<'a>(args: &EmbedArgs, found: &'a TokenVectors) -> Result<TokenParts<'a>> {
    let missing = |option: &str, what: &str| {
        Error::new(ErrorKind::Usage, format!("{option}: the model has no {what} of tokens"))
            .hint("leave it out; BAAI/bge-m3 has both")
    };
    let sparse =
        args.sparse.then(|| found.sparse.as_ref().ok_or_else(|| missing("--sparse", "weights")));
    let multi =
        args.multi.then(|| found.multi.as_deref().ok_or_else(|| missing("--multi", "vectors")));
    Ok((sparse.transpose()?, multi.transpose()?))
}

/// A line for people.
fn people(index: u64, vector: &[f32]) -> String {
    let first: Vec<_> = vector.iter().take(SHOWN).map(|v| format!("{v:.5}")).collect();
    let more = if vector.len() > SHOWN { ", …" } else { "" };
    format!(
        "{}  dimension {}  norm {:.6}  [{}{more}]",
        index,
        vector.len(),
        norm(vector),
        first.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_the_first_values() {
        let expected = "3  dimension 5  norm 1.000000  [0.60000, 0.80000, 0.00000, 0.00000, …]";
        assert_eq!(people(3, &[0.6, 0.8, 0.0, 0.0, 0.0]), expected);
    }
}
