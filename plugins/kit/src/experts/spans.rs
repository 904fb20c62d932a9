//! The parts of the time that experts take.

use std::time::Instant;

use qhx_op::{Host, Result, SpanId};

/// The named parts of the time.
#[derive(Debug)]
pub(super) struct Spans {
    /// Choosing experts.
    pub route: SpanId,
    /// Getting experts' weights into the graphs.
    pub experts: SpanId,
    /// Gathering and scattering tokens of a prompt.
    pub scatter: SpanId,
}

impl Spans {
    pub fn new(host: &Host) -> Self {
        Self {
            route: host.span("route"),
            experts: host.span("experts"),
            scatter: host.span("gather and scatter"),
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
