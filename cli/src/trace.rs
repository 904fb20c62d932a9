//! `--trace`: a file that says what was done when.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use qhx_base::Result;
use qhx_base::trace::Trace;
use qhx_qnn::ProfileLevel;

/// What is traced.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct TraceArgs {
    /// Write what was done when to this file; https://ui.perfetto.dev shows it
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// How much of it the NPU's library measures
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t, requires = "trace")]
    pub trace_level: TraceLevel,
}

/// How much the NPU's library measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum TraceLevel {
    /// Times of whole graphs
    #[default]
    Basic,
    /// Also the cycles of every node, which makes graphs slower
    Detailed,
}

/// A trace under way.
#[derive(Debug, Clone)]
pub(crate) struct Tracing {
    pub trace: Arc<Trace>,
    pub level: ProfileLevel,
}

impl TraceArgs {
    /// Does some work, with a trace where one is asked for. The work's own failure comes before one of the trace.
    pub(crate) fn trace<T>(&self, work: impl FnOnce(Option<&Tracing>) -> Result<T>) -> Result<T> {
        let Some(path) = &self.trace else { return work(None) };
        let level = match self.trace_level {
            TraceLevel::Basic => ProfileLevel::Basic,
            TraceLevel::Detailed => ProfileLevel::Detailed,
        };
        let tracing = Tracing { trace: Arc::new(Trace::create(path, "qhx")?), level };
        let done = work(Some(&tracing));
        let finished = tracing.trace.finish();
        done.and_then(|done| finished.map(|()| done))
    }
}
