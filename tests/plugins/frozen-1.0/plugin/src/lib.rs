//! `test_frozen`: uses every part of interface 1.0, over a graph `step` with the output `logits`.
//! Its answer after the tokens t₁ … tₙ favours (t₁ + … + tₙ) mod vocabulary.

#[cfg(feature = "other-allocator")]
mod allocator;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use qhx_op::{
    DType, Error, GraphId, Host, LogLevel, Modality, Op, OpDescription, OpInfo, Port, Result,
    Segment, SnapshotId, SpanId, Task, View,
};

struct Frozen {
    graph: GraphId,
    logits: View,
    sums: Vec<u32>,
    saved: Vec<Vec<u32>>,
    span: SpanId,
}

impl Frozen {
    fn step(&mut self, host: &mut Host, token: u32) -> Result<()> {
        let start = Instant::now();
        host.execute(self.graph)?;
        let sum = self.sums.last().copied().unwrap_or(0).wrapping_add(token);
        self.sums.push(sum);
        // Adds up the ones over the host's threads: the index of the best logit.
        let best = AtomicUsize::new(0);
        host.parallel_for(sum as usize % self.logits.len, |_| {
            best.fetch_add(1, Ordering::Relaxed);
        })?;
        let logits = host.f32s_mut(self.logits.buffer);
        logits.fill(0.0);
        logits[best.into_inner()] = 1.0;
        host.end(self.span, start);
        Ok(())
    }
}

impl Op for Frozen {
    fn describe() -> OpDescription {
        OpDescription {
            name: "test_frozen".to_owned(),
            summary: "built against interface 1.0".to_owned(),
            version: "1.0.0".to_owned(),
            tasks: vec![Task::Generate, Task::Embed],
            modalities: vec![Modality::Text],
            params_schema: serde_json::json!({"type": "object"}),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let name: Option<String> = host.value("/plan/steps/0/host")?;
        if name.as_deref() != Some("test_frozen") {
            return Err(Error::manifest(format!("opened as {name:?}")));
        }
        let graph = host.require_graph("/plan/params/step", "step")?;
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let len = host.tensor(graph, port).elements();
        let buffer = host.allocate(host.tensor(graph, port).byte_len())?;
        host.bind(graph, port, buffer, 0)?;
        if host.artifact("/nowhere", "absent.bin").is_ok() {
            return Err(Error::artifact("a file that does not exist was mapped"));
        }
        host.log(LogLevel::Debug, "opened");
        let span = host.span("step");
        let logits = View { buffer, dtype: DType::F32, offset: 0, len };
        Ok(Self { graph, logits, sums: Vec::new(), saved: Vec::new(), span })
    }

    fn info(&self) -> OpInfo {
        OpInfo {
            vocab: self.logits.len,
            max_ctx: 64,
            embedding_dim: self.logits.len,
            can_truncate: true,
            can_snapshot: true,
        }
    }

    fn reset(&mut self, _host: &mut Host) -> Result<()> {
        self.sums.clear();
        Ok(())
    }

    fn position(&self) -> usize {
        self.sums.len()
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        for segment in segments {
            let Segment::Tokens(tokens) = segment else {
                return Err(Error::prompt("text only"));
            };
            for (index, &token) in tokens.iter().enumerate() {
                self.step(host, token)?;
                host.progress(index + 1, tokens.len());
            }
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        assert!(token != 13, "token 13 goes wrong");
        self.step(host, token)?;
        Ok(self.logits)
    }

    fn truncate(&mut self, _host: &mut Host, position: usize) -> Result<()> {
        self.sums.truncate(position);
        Ok(())
    }

    fn snapshot(&mut self, _host: &mut Host) -> Result<SnapshotId> {
        self.saved.push(self.sums.clone());
        Ok(SnapshotId(self.saved.len() as u64 - 1))
    }

    fn restore(&mut self, _host: &mut Host, snapshot: SnapshotId) -> Result<()> {
        self.sums = self.saved[snapshot.0 as usize].clone();
        Ok(())
    }

    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        self.sums.clear();
        self.prefill(host, segments)
    }
}

qhx_op::register_ops!(Frozen);
qhx_op::export_plugin!();
