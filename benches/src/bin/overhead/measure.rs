//! The fastest of several runs: what the machine can do, not what else it was doing.

use std::time::{Duration, Instant};

use qhx_benches::allocations;
use qhx_core::op::{HostOp, Segment};

use crate::Anything;

/// Turns of a measurement.
pub(crate) const TURNS: u32 = 5;

/// The fastest run.
pub(crate) struct Best {
    pub time: Duration,
    /// Heap allocations.
    pub allocations: u64,
    /// Time of each part of the host-op.
    pub spans: Vec<(String, Duration)>,
    /// Executions of each graph.
    pub executions: Vec<(String, u64)>,
}

impl Best {
    pub(crate) fn ms(&self) -> f64 {
        self.time.as_secs_f64() * 1e3
    }
}

/// Measures `body` this number of times, each time after `prepare`. A run before them does not count.
pub(crate) fn best(
    op: &mut dyn HostOp,
    turns: u32,
    mut prepare: impl FnMut(&mut dyn HostOp) -> Anything,
    mut body: impl FnMut(&mut dyn HostOp) -> Anything,
) -> Anything<Best> {
    let mut best: Option<Best> = None;
    for turn in 0..=turns {
        prepare(op)?;
        let (spans, graphs) = (op.span_stats(), op.graph_stats());
        let allocated = allocations::count();
        let start = Instant::now();
        body(op)?;
        let time = start.elapsed();
        let allocations = allocations::count() - allocated;
        if turn == 0 || best.as_ref().is_some_and(|best| best.time <= time) {
            continue;
        }
        let before = |name: &str| spans.iter().find(|s| s.name == name).map(|s| s.busy);
        let executed = |name: &str| graphs.iter().find(|g| g.graph == name).map(|g| g.executions);
        let spans = op.span_stats().into_iter().map(|span| {
            let earlier = before(&span.name).unwrap_or_default();
            (span.name, span.busy - earlier)
        });
        let executions = op.graph_stats().into_iter().map(|graph| {
            let earlier = executed(&graph.graph).unwrap_or_default();
            (graph.graph, graph.executions - earlier)
        });
        let executions = executions.filter(|(_, count)| *count > 0).collect();
        best = Some(Best { time, allocations, spans: spans.collect(), executions });
    }
    best.ok_or_else(|| "no run".into())
}

/// Measurements of a decoder.
pub(crate) struct Decoding {
    /// Tokens that are decoded one by one.
    pub tokens: u32,
    pub vocab: usize,
    /// Tokens of the prompt, and turns of it.
    pub prompt: (usize, u32),
    /// Max heap allocations of all tokens.
    pub allocations: u64,
}

impl Decoding {
    /// Prints the time of a token by part, of a prompt, and of a snapshot after it where there are such. Returns that
    /// of a token and of the prompt.
    pub(crate) fn run(&self, label: &str, op: &mut dyn HostOp) -> Anything<[Duration; 2]> {
        let Self { tokens, vocab, prompt: (length, turns), allocations } = *self;
        let token = |nth: usize| ((1000 + nth * 97) % vocab) as u32;
        let start = |op: &mut dyn HostOp| {
            op.reset()?;
            op.prefill(&[Segment::Tokens(&[1, 2, 3, 4, 5, 6, 7, 8])])?;
            Ok(op.decode(1)?)
        };
        let decode = best(op, TURNS, start, |op| {
            (0..tokens as usize).try_for_each(|nth| op.decode(token(nth)))?;
            Ok(())
        })?;
        let found = decode.allocations;
        assert!(found <= allocations, "{label}: {tokens} decode steps allocated {found} times");
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(tokens);
        println!(
            "{label}: {:.2} µs a token, {found} heap allocations in {tokens}",
            each(decode.time)
        );
        for (span, time) in decode.spans.iter().filter(|(_, time)| !time.is_zero()) {
            println!("  {span:<12} {:8.2} µs", each(*time));
        }
        let ids: Vec<u32> = (0..length).map(token).collect();
        let prompt =
            best(op, turns, |op| Ok(op.reset()?), |op| Ok(op.prefill(&[Segment::Tokens(&ids)])?))?;
        let executions =
            prompt.executions.iter().map(|(graph, count)| format!("{graph} × {count}"));
        let executions: Vec<_> = executions.collect();
        println!("  prompt of {length}: {:.2} ms; {}", prompt.ms(), executions.join(", "));
        // The prompt is consumed: the state holds its rows.
        if let Ok(id) = op.snapshot() {
            let nothing = |_: &mut dyn HostOp| Ok(());
            let restore = best(op, TURNS, nothing, |op| Ok(op.restore(id)?))?;
            let save = best(op, TURNS, nothing, |op| {
                let id = op.snapshot()?;
                op.drop_snapshot(id);
                Ok(())
            })?;
            println!("  snapshot: {:.2} ms, restore {:.2} ms", save.ms(), restore.ms());
        }
        Ok([decode.time, prompt.time])
    }
}
