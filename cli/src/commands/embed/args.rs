//! The arguments of `qhx embed`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, TypedValueParser};
use qhx::Role;
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::corpus::{Existing, Shard};

use crate::args::{BackendArgs, PreparingArgs, named};
use crate::trace::TraceArgs;

const EXAMPLES: &str = "\
Examples:
  qhx embed embedcode/v81 'def fib(n): …' 'SELECT 1'
  qhx embed embedcode/v81 'fibonacci numbers' --role query --json
  qhx embed embedcode/v81 --input corpus.jsonl --output vectors.jsonl --resume
  qhx embed siglip2/v81 'a boat' --image harbour.jpg --json
  qhx embed bge-m3/v81 'What is BGE M3?' --json --sparse --multi
  qhx embed embedcode/v81 --input corpus.jsonl --shard 0/4 --output vectors-0.jsonl
  qhx embed embedcode/v81 --input corpus.parquet --output vectors.parquet --resume
  tail -f new.jsonl | qhx embed embedcode/v81 --input - --json

An input has one text a line: a JSON string, or an object with \"text\" and, where it is not that of
--role, \"role\" (query or document); or with \"image\", the file of an image. Output lines are
{\"index\", \"text\" or \"image\", \"embedding\"}; the index is the line of the input, from 0. Files called
.parquet are tables with columns index, text and embedding, where qhx was built with --features parquet.";

/// Turn texts and images into vectors
///
/// Each text becomes one vector, and so does each image where the model takes images, pooled and normalised as the bundle says. Timings go to standard
/// error.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EmbedArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// Texts
    #[arg(value_name = "TEXT", conflicts_with = "input")]
    pub texts: Vec<String>,
    /// Images behind the texts: JPEG, PNG, WebP, or data: URLs; repeat it for more
    #[arg(long = "image", value_name = "FILE", conflicts_with = "input")]
    pub images: Vec<String>,
    /// Take texts from this file of JSON lines or Parquet table; `-` is standard input
    #[arg(short, long, value_name = "FILE|-")]
    pub input: Option<PathBuf>,
    /// Write JSON lines, or a Parquet table, to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Go on where an output that is there already ends
    #[arg(long, requires = "output", requires = "input", conflicts_with = "overwrite")]
    pub resume: bool,
    /// Replace an output that is there already
    #[arg(long, requires = "output")]
    pub overwrite: bool,
    /// Only every N-th text of the input, beginning with text I: I/N with I from 0 to N−1
    #[arg(long, value_name = "I/N", requires = "input", value_parser = |text: &str| text.parse::<Shard>())]
    pub shard: Option<Shard>,
    /// What a text is when its line does not say
    #[arg(long, value_name = "ROLE", default_value = "document", value_parser = role_parser())]
    pub role: Role,
    /// Put before queries, instead of the bundle's prefix
    #[arg(long, value_name = "TEXT")]
    pub prefix_query: Option<String>,
    /// Put before documents, instead of the bundle's prefix
    #[arg(long, value_name = "TEXT")]
    pub prefix_doc: Option<String>,
    /// Cut texts that are too long, instead of refusing them
    #[arg(long)]
    pub truncate: bool,
    /// Give each text graphs of its own, so that its last digits do not depend on the texts beside it
    #[arg(long)]
    pub no_pack: bool,
    /// Print one JSON object a text
    #[arg(long)]
    pub json: bool,
    /// With a weight for each token, by its id, of models that have such: bge-m3, gte-multilingual
    #[arg(long, requires = "json", conflicts_with = "output")]
    pub sparse: bool,
    /// With a vector for each token, of models that have such: bge-m3
    #[arg(long, requires = "json", conflicts_with = "output")]
    pub multi: bool,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub preparing: PreparingArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

impl EmbedArgs {
    /// Treatment of an output that is there already.
    pub fn existing(&self) -> Existing {
        match (self.resume, self.overwrite) {
            (true, _) => Existing::Resume,
            (_, true) => Existing::Replace,
            _ => Existing::Refuse,
        }
    }

    /// Checks that clap does not make.
    pub fn check(&self) -> Result<()> {
        if self.texts.is_empty() && self.images.is_empty() && self.input.is_none() {
            return Err(Error::new(ErrorKind::Usage, "no text and no input is given")
                .hint("give texts as arguments, or --input FILE; --input - is standard input"));
        }
        Ok(())
    }
}

fn role_parser() -> impl TypedValueParser<Value = Role> {
    let what = |role| match role {
        Role::Query => "Is searched for with",
        Role::Document => "Is found",
    };
    named(Role::ALL.map(|role| PossibleValue::new(role.name()).help(what(role))))
}
