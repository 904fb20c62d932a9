//! Host-ops that use what came with interface 1.1, over the graph `step` with the output `logits`.

use qhx_op::{
    BufferId, DType, Error, Generator, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Port,
    Result, Segment, Task, View,
};

/// Six halves in a buffer, of which the op dumps the last four.
const HALVES: [f32; 6] = [0.0, 1.0, 2.0, -0.5, 0.25, 6.0];

/// Actions of an op on a prompt.
const DUMP: usize = 0;
const FAIL: usize = 1;

struct Uses<const WHAT: usize> {
    graph: GraphId,
    halves: BufferId,
    logits: View,
    position: usize,
}

impl<const WHAT: usize> Uses<WHAT> {
    /// Dumps the prompt's tokens, and an array of halves from within a buffer.
    fn dump(&self, host: &mut Host, tokens: &[u32]) -> Result<()> {
        if host.dumping() {
            let values: Vec<f32> = tokens.iter().map(|&token| token as f32).collect();
            host.dump_values("tokens", &values, &[values.len()])?;
        }
        let view = View { buffer: self.halves, dtype: DType::F16, offset: 4, len: 4 };
        host.dump("halves", view, &[2, 2])?;
        match tokens {
            [0] => host.dump("../halves", view, &[2, 2]),
            [1] => host.dump("halves", view, &[5]),
            [2] => host.dump("halves", View { len: 5, ..view }, &[5]),
            _ => Ok(()),
        }
    }

    /// Executes a graph that fails, and fails in the way that the first token says.
    fn fail(&self, host: &mut Host, tokens: &[u32]) -> Result<()> {
        let failed = host.execute(self.graph);
        match (tokens, failed) {
            (_, Ok(())) => Ok(()),
            ([1, ..], Err(error)) => Err(error.context("layer 3").context("the prompt")),
            ([2, ..], Err(error)) => {
                // What fails on the way out is not why the call fails.
                let absent = host.artifact("/nowhere", "absent.bin");
                Err(if absent.is_err() { error } else { Error::prompt("a file was there") })
            }
            ([3, ..], Err(_)) => Err(Error::prompt("given up")),
            ([4, ..], Err(error)) => Err(Error::new(error.code(), error.message())),
            (_, Err(error)) => Err(error),
        }
    }
}

impl<const WHAT: usize> Op for Uses<WHAT> {
    fn describe() -> OpDescription {
        OpDescription {
            name: if WHAT == DUMP { "test_dump" } else { "test_fail" }.to_owned(),
            summary: "uses services of 1.1".to_owned(),
            version: "0.0.1".to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: serde_json::json!({}),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graph = host.require_graph("/plan/params/step", "step")?;
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let logits = host.view_for(graph, port)?;
        let halves = host.allocate(2 * HALVES.len())?;
        qhx_kit::kernels::f32_to_f16(&HALVES, host.f16s_mut(halves));
        Ok(Self { graph, halves, logits, position: 0 })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { vocab: self.logits.len, max_ctx: 64, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl<const WHAT: usize> Generator for Uses<WHAT> {
    fn reset(&mut self, _host: &mut Host) -> Result<()> {
        self.position = 0;
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let [Segment::Tokens(tokens)] = segments else {
            return Err(Error::prompt("one piece of text only"));
        };
        if WHAT == DUMP {
            self.dump(host, tokens)?;
        } else {
            self.fail(host, tokens)?;
        }
        self.position += tokens.len();
        Ok(self.logits)
    }

    fn decode(&mut self, _host: &mut Host, _token: u32) -> Result<View> {
        self.position += 1;
        Ok(self.logits)
    }
}

qhx_op::register_ops!(Uses<DUMP>, Uses<FAIL>);
qhx_op::export_plugin!();
