//! `qhx rerank`: which documents answer a query.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use qhx::{Ranked, Reranker};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::app::App;
use crate::args::BackendArgs;
use crate::time::ms;
use crate::trace::{TraceArgs, Tracing};
use crate::{Status, prompt, session};

const EXAMPLES: &str = "\
Examples:
  qhx rerank qwen3-reranker/v81 'capital of France' paris.txt bread.txt
  grep -rh France notes | qhx rerank qwen3-reranker/v81 'capital of France' --top 3";

/// Say which documents answer a query, the best first
///
/// Each document is a line of standard output: its score, from 0 to 1 as a rule, two spaces, and its file's name or, where
/// documents are lines, the line. The bundle is that of a causal reranker, made with `qhx forge --rerank`, or of a
/// cross-encoder, made with `qhx forge --task score`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RerankArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// What is asked
    pub query: OsString,
    /// The documents, a file each; without any, the lines of standard input are documents
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// What documents are looked for to do [default: the manifest's params.rerank.instruction]
    #[arg(long, value_name = "TEXT")]
    pub instruction: Option<String>,
    /// Cut what is too long for the model: the end of a document, or of a pair of texts for a cross-encoder that of the
    /// longer one
    #[arg(long)]
    pub truncate: bool,
    /// Print the N best only
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Runs the command.
pub(crate) fn run(args: &RerankArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    let query = args.query.to_str();
    let query =
        query.ok_or_else(|| Error::new(ErrorKind::Prompt, "the query is not valid UTF-8"))?;
    let (names, documents) = documents(args)?;
    let opening = session::Opening { tracing, ..session::Opening::default() };
    let model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    say!("{}", session::load(&model));
    let mut reranker = Reranker::new(model)?.truncate(args.truncate);
    if let Some(instruction) = &args.instruction {
        reranker = reranker.instruction(instruction);
    }
    let start = Instant::now();
    let ticket = CancelToken::new();
    let working = app.interrupts.working_on(&ticket);
    let ranked = reranker.rank_unless(query, &documents, &ticket);
    drop(working);
    let ranked = match ranked {
        Err(e) if e.kind() == ErrorKind::Cancelled => return Ok(Status::Cancelled),
        ranked => ranked?,
    };
    say!("{} documents in {:.1} ms", ranked.len(), ms(start.elapsed()));
    let best = &ranked[..ranked.len().min(args.top.unwrap_or(usize::MAX))];
    print(args, app, query, &names, best)?;
    Ok(Status::Done)
}

/// Names and texts of the documents.
fn documents(args: &RerankArgs) -> Result<(Vec<String>, Vec<String>)> {
    if args.files.is_empty() {
        let text = prompt::text(None)?;
        let lines: Vec<_> =
            text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
        if lines.is_empty() {
            let message = "there is no document on standard input";
            return Err(Error::new(ErrorKind::Prompt, message).hint("give one a line, or files"));
        }
        return Ok((lines.clone(), lines));
    }
    let texts = args.files.iter().map(|file| prompt::of_file(file)).collect::<Result<_>>()?;
    Ok((args.files.iter().map(|file| file.display().to_string()).collect(), texts))
}

fn print(
    args: &RerankArgs,
    app: &mut App,
    query: &str,
    names: &[String],
    best: &[Ranked],
) -> Result<()> {
    if args.json {
        let result = |one: &Ranked| -> Value {
            json!({"index": one.index, "score": one.score, "document": names[one.index]})
        };
        let results: Vec<_> = best.iter().map(result).collect();
        return app.output.json(&json!({"query": query, "results": results}));
    }
    best.iter()
        .try_for_each(|one| app.output.line(&format!("{:.4}  {}", one.score, names[one.index])))
}
