//! A host-op whose step is one execution of a graph that does nothing, so that what is measured
//! around it is the interface. Part of the benchmark and of the plugin that it loads.

use qhx_op::{
    DType, Error, Generator, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Port, Result,
    Segment, Task, View,
};

/// Name of the host-op.
pub(crate) const NAME: &str = "bench_trivial";

/// One execution per token.
struct Trivial {
    graph: GraphId,
    logits: View,
    position: usize,
}

impl Op for Trivial {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "one execution per token".to_owned(),
            version: "0.0.1".to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: serde_json::Value::Null,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graph = host.require_graph("/plan/params/step", "step")?;
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let len = host.tensor(graph, port).elements();
        let buffer = host.allocate_for(graph, port)?;
        let logits = View { buffer, dtype: DType::F32, offset: 0, len };
        Ok(Self { graph, logits, position: 0 })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { vocab: self.logits.len, max_ctx: usize::MAX, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Trivial {
    fn reset(&mut self, _host: &mut Host) -> Result<()> {
        self.position = 0;
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        for segment in segments {
            let Segment::Tokens(tokens) = segment else {
                return Err(Error::prompt("text only"));
            };
            for &token in *tokens {
                self.decode(host, token)?;
            }
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, _token: u32) -> Result<View> {
        host.execute(self.graph)?;
        self.position += 1;
        Ok(self.logits)
    }
}

qhx_op::register_ops!(Trivial);
