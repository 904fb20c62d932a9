//! The parts of the op's time.

use std::time::Instant;

use qhx_op::{Host, Result, SpanId};

/// The named parts of the op's time.
#[derive(Debug)]
pub(crate) struct Spans {
    /// Embedding rows, rotary tables, masks.
    pub fill: SpanId,
    /// Choosing experts.
    pub route: SpanId,
    /// Getting experts' weights into the graphs.
    pub experts: SpanId,
    /// Gathering and scattering tokens of a prompt.
    pub scatter: SpanId,
    /// Writing cache rows.
    pub commit: SpanId,
    /// Prompts that went through the prefill graphs, graphs included.
    pub batched: SpanId,
    /// Prompts that went through the graphs for one token, graphs included.
    pub stepped: SpanId,
}

impl Spans {
    pub fn new(host: &Host) -> Self {
        Self {
            fill: host.span("fill"),
            route: host.span("route"),
            experts: host.span("experts"),
            scatter: host.span("gather and scatter"),
            commit: host.span("commit"),
            batched: host.span("prefill batched"),
            stepped: host.span("prefill token by token"),
        }
    }

    /// Runs a part and adds its time.
    pub fn time<T>(
        &self,
        host: &mut Host,
        span: SpanId,
        part: impl FnOnce(&mut Host) -> Result<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let result = part(host);
        host.end(span, start);
        result
    }
}
