//! A plain host-op for the odd libraries of `examples/`: one graph `step` with the output
//! `logits`, which are all zero.

use qhx_op::{
    Error, Generator, GraphId, Host, Modality, OpDescription, OpenInfo, Port, Result, Segment,
    Task, View,
};

/// The description of an op called `name`.
pub fn description(name: &str) -> OpDescription {
    OpDescription {
        name: name.to_owned(),
        summary: "for tests".to_owned(),
        version: "0.0.1".to_owned(),
        tasks: vec![Task::Generate],
        modalities: vec![Modality::Text],
        params_schema: serde_json::json!({}),
    }
}

/// Returns the zeros of the graph's output.
#[derive(Debug)]
pub struct Zeros {
    /// The graph.
    pub graph: GraphId,
    logits: View,
    position: usize,
}

impl Zeros {
    /// Binds the graph `step`.
    pub fn open(host: &mut Host) -> Result<Self> {
        let graph = host.require_graph("/plan/params/step", "step")?;
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let logits = host.view_for(graph, port)?;
        Ok(Self { graph, logits, position: 0 })
    }

    /// Properties of the opened op.
    pub fn info(&self) -> OpenInfo {
        OpenInfo { vocab: self.logits.len, max_ctx: 1 << 20, ..OpenInfo::default() }
    }
}

impl Generator for Zeros {
    fn reset(&mut self, _host: &mut Host) -> Result<()> {
        self.position = 0;
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn prefill(&mut self, _host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        for segment in segments {
            let Segment::Tokens(tokens) = segment else {
                return Err(Error::prompt("text only"));
            };
            self.position += tokens.len();
        }
        Ok(self.logits)
    }

    fn decode(&mut self, _host: &mut Host, _token: u32) -> Result<View> {
        self.position += 1;
        Ok(self.logits)
    }
}

/// A host-op around [`Zeros`]: `zeros!(Type, "name")`.
#[macro_export]
macro_rules! zeros {
    ($op:ident, $name:expr) => {
        struct $op($crate::Zeros);

        impl qhx_op::Op for $op {
            fn describe() -> qhx_op::OpDescription {
                $crate::description($name)
            }
            fn open(host: &mut qhx_op::Host) -> qhx_op::Result<Self> {
                $crate::Zeros::open(host).map(Self)
            }
            fn info(&self) -> qhx_op::OpenInfo {
                self.0.info()
            }
            fn generator(&mut self) -> Option<&mut dyn qhx_op::Generator> {
                Some(&mut self.0)
            }
        }
    };
}
