//! The arguments of `qhx embed`.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use qhx::Role;
use qhx_core::{Error, ErrorKind, Result};

use crate::args::BackendArgs;
use crate::trace::TraceArgs;

const EXAMPLES: &str = "\
Examples:
  qhx embed embedcode/v81 'def fib(n): …' 'SELECT 1'
  qhx embed embedcode/v81 'fibonacci numbers' --role query --json
  qhx embed embedcode/v81 --input corpus.jsonl --output vectors.jsonl --resume
  qhx embed embedcode/v81 --input corpus.jsonl --shard 0/4 --output vectors-0.jsonl
  qhx embed embedcode/v81 --input corpus.parquet --output vectors.parquet --resume
  tail -f new.jsonl | qhx embed embedcode/v81 --input - --json

An input has one text a line: a JSON string, or an object with \"text\" and, where it is not that of
--role, \"role\" (query or document). Output lines are {\"index\", \"text\", \"embedding\"}; the index is
the line of the input, from 0. Files called .parquet are tables with columns of those names, where qhx
was built with --features parquet.";

/// Turn texts into vectors
///
/// Each text becomes one vector, pooled and normalised as the bundle says. Timings go to standard
/// error.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EmbedArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// Texts
    #[arg(value_name = "TEXT", conflicts_with = "input")]
    pub texts: Vec<String>,
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
    #[arg(long, value_name = "I/N", requires = "input", value_parser = parse_shard)]
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
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

impl EmbedArgs {
    /// What clap does not check.
    pub fn check(&self) -> Result<()> {
        if self.texts.is_empty() && self.input.is_none() {
            return Err(Error::new(ErrorKind::Usage, "no text and no input is given")
                .hint("give texts as arguments, or --input FILE; --input - is standard input"));
        }
        if !cfg!(feature = "parquet") {
            let files = [&self.input, &self.output].into_iter().flatten();
            if let Some(path) = files.into_iter().find(|path| is_parquet(path)) {
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!("{}: this qhx was built without Parquet", path.display()),
                )
                .hint("build it with --features parquet, or convert the file to JSON lines"));
            }
        }
        Ok(())
    }
}

/// True for the name of a Parquet table.
pub(crate) fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("parquet"))
}

fn role_parser() -> impl TypedValueParser<Value = Role> {
    let what = |role| match role {
        Role::Query => "Is searched for with",
        Role::Document => "Is found",
    };
    let values = Role::ALL.map(|role| PossibleValue::new(role.name()).help(what(role)));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Role>())
}

/// One part of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    pub index: u64,
    pub count: u64,
}

impl Shard {
    /// True for rows of this part.
    pub fn has(self, row: u64) -> bool {
        row % self.count == self.index
    }

    /// Rows from `row` on that come before the first of this part.
    pub fn others_before(self, row: u64) -> u64 {
        let part = row % self.count;
        if part <= self.index { self.index - part } else { self.count - part + self.index }
    }
}

fn parse_shard(text: &str) -> Result<Shard, String> {
    let parts = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    match parts {
        Some((index, count)) if index < count => Ok(Shard { index, count }),
        _ => Err("expected I/N with I below N, such as 0/4 to 3/4".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_the_rows() {
        let shards: Vec<_> = (0..3).map(|i| parse_shard(&format!("{i}/3")).unwrap()).collect();
        for row in 0..20 {
            assert_eq!(shards.iter().filter(|s| s.has(row)).count(), 1);
            for shard in &shards {
                let before = (row..).take_while(|&row| !shard.has(row)).count();
                assert_eq!(shard.others_before(row), before as u64);
            }
        }
        for bad in ["3/3", "0/0", "1", "a/b", "-1/2", ""] {
            assert!(parse_shard(bad).is_err(), "{bad}");
        }
    }
}
