//! `qhx_embed`: the argument order of published bundles.

use std::path::PathBuf;

use clap::Parser;
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, DeviceArgs, GlobalArgs, variables};
use crate::{session, time, vars};
use qhx::{EmbedOptions, Embedder, Role, cosine, norm};
use qhx_base::{Error, ErrorKind, Result};

const EXAMPLES: &str = "\
Examples:
  qhx_embed embedcode/nv-embedcode-7b.json libQnnHtp.so libQnnSystem.so embedcode 'fibonacci' 'def fib(n): …'
  qhx_embed embedcode cpu - embedcode 'fibonacci' 'def fib(n): …' --json

The first text is the query, the others are documents. The two variables replace the bundle's prefixes;
set and empty means none.";

fn after_help() -> String {
    format!("{EXAMPLES}\n\n{}", variables(&[vars::QUERY_PREFIX, vars::DOC_PREFIX]))
}

/// Values of a vector that people are shown.
const SHOWN: usize = 6;

/// Embeds a query and documents, with the argument order of published bundles.
///
/// Prints dimension, norm and first values, and the cosine of each document to the query.
#[derive(Debug, Parser)]
#[command(name = "qhx_embed", version, after_help = after_help(), max_term_width = 100)]
pub(crate) struct EmbedClassicArgs {
    /// The bundle's manifest, or its folder
    pub manifest: PathBuf,
    /// libQnnHtp.so, or the word `cpu` to run the bundle's ONNX graphs on the CPU
    #[arg(value_name = "libQnnHtp.so")]
    pub htp: PathBuf,
    /// libQnnSystem.so; `-` with `cpu`
    #[arg(value_name = "libQnnSystem.so")]
    pub system: PathBuf,
    /// The folder that the manifest's paths resolve against
    #[arg(value_name = "ARTIFACTS_ROOT")]
    pub root: PathBuf,
    /// The query
    pub query: String,
    /// Documents
    #[arg(value_name = "DOCUMENT")]
    pub documents: Vec<String>,
    /// Cut texts that are too long, instead of refusing them
    #[arg(long)]
    pub truncate: bool,
    /// Print one JSON object a text, with the whole vector
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub global: GlobalArgs,
}

impl EmbedClassicArgs {
    /// Backend that executes the graphs.
    pub(crate) fn backend(&self) -> BackendArgs {
        BackendArgs::classic(&self.htp, &self.system, self.device.clone())
    }
}

/// Runs the command.
pub(crate) fn run(args: &EmbedClassicArgs, app: &mut App) -> Result<Status> {
    let backend = args.backend();
    let options = EmbedOptions::default()
        .query_prefix(prefix(vars::QUERY_PREFIX)?)
        .document_prefix(prefix(vars::DOC_PREFIX)?)
        .truncate(args.truncate);
    let model = session::open(app, &args.manifest, Some(&args.root), &backend)?;
    let mut encoder = Embedder::with_options(model, options)?;
    let _working = app.interrupts.working();
    let mut first: Vec<f32> = Vec::new();
    let texts = std::iter::once(&args.query).chain(&args.documents);
    for (index, text) in texts.enumerate() {
        let role = if index == 0 { Role::Query } else { Role::Document };
        let vector =
            encoder.embed(text, role).map_err(|e| e.context(format_args!("text {index}")))?;
        if index == 0 {
            first = vector.to_vec();
        }
        let cosine = cosine(vector, &first);
        if args.json {
            // Written as f32: the shortest digits that give the same bits.
            let embedding = serde_json::to_string(vector)
                .map_err(|e| Error::caused(ErrorKind::Internal, "a vector as JSON", e))?;
            let line = format!(
                "{{\"index\":{index},\"text\":{},\"dimension\":{},\"norm\":{},\"cosine\":{},\"embedding\":{embedding}}}",
                json!(text),
                vector.len(),
                json!(norm(vector)),
                json!(cosine),
            );
            app.output.line(&line)?;
            continue;
        }
        let values: Vec<_> = vector.iter().take(SHOWN).map(|v| format!("{v:.6}")).collect();
        let name = if index == 0 { "query".to_owned() } else { format!("document {index}") };
        let cosine = if index == 0 { String::new() } else { format!("  cosine {cosine:.6}") };
        app.output.line(&format!(
            "{name}: dimension {}  norm {:.6}{cosine}  [{}, …]",
            vector.len(),
            norm(vector),
            values.join(", ")
        ))?;
    }
    for stats in encoder.model().graph_stats() {
        let each = time::ms(stats.busy) / stats.executions.max(1) as f64;
        say!("{}: {each:.1} ms a text", stats.graph);
    }
    say!("{}", session::load(encoder.model()));
    Ok(Status::Done)
}

/// A prefix of the environment: set and empty means none, unset means the manifest's.
fn prefix(name: &str) -> Result<Option<String>> {
    std::env::var_os(name)
        .map(|value| {
            value
                .into_string()
                .map_err(|_| Error::new(ErrorKind::Usage, format!("{name} is not valid UTF-8")))
        })
        .transpose()
}
