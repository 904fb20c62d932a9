//! `my_generate`: the smallest complete host-op. One graph, `decode`, takes the embedding row of a
//! token and gives logits; what it has seen so far is in its caches and states.
//!
//! Places to change are marked with `CHANGE`.

use qhx_op::fill::{Embedding, Mask, Rope, RopeSlot};
use qhx_op::state::StateCarrier;
use qhx_op::{
    BufferId, DType, Error, GraphId, Host, Modality, Op, OpDescription, OpInfo, Port, Result,
    Segment, SnapshotId, Task, View, schema,
};
use serde::Deserialize;

/// CHANGE: roles of tensors that are no state. A manifest may say how a graph calls them.
const ROLES: [&str; 5] = ["x", "cos", "sin", "cmask", "logits"];

/// CHANGE: what the op reads from `plan.params` of the manifest.
#[derive(Debug, Deserialize)]
struct Params {
    /// Name of the graph.
    decode: String,
}

/// The open op: everything was found and checked when it was opened, so that a step only fills,
/// executes and commits.
#[derive(Debug)]
pub struct MyOp {
    graph: GraphId,
    embedding: Embedding,
    rope: Option<(Rope, RopeSlot)>,
    mask: Option<Mask>,
    state: StateCarrier,
    x: BufferId,
    x_dtype: DType,
    logits: View,
    max_ctx: usize,
}

impl MyOp {
    /// CHANGE: one token. The state changes last: a failed or cancelled step leaves it as it was.
    fn step(&mut self, host: &mut Host, token: u32) -> Result<()> {
        let position = self.state.position();
        if position >= self.max_ctx {
            return Err(Error::prompt(format!("the context of {position} tokens is full")));
        }
        self.embedding.gather(host, token, self.x, self.x_dtype)?;
        if let Some((rope, slot)) = &mut self.rope {
            rope.compute(position);
            slot.write(host, rope);
        }
        if let Some(mask) = &mut self.mask {
            mask.fill(host, position);
        }
        host.execute(self.graph)?;
        self.state.commit(host, 0, 1)
    }
}

impl Op for MyOp {
    fn describe() -> OpDescription {
        OpDescription {
            // CHANGE: manifests select the op by this name (`plan.steps[0].host`).
            name: "my_generate".to_owned(),
            summary: "A host-op of my own".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: serde_json::json!({
                "type": "object",
                "required": ["decode"],
                "properties": {
                    "decode": {"type": "string"},
                    "tensors": schema::tensors(ROLES.into_iter().chain(schema::STATE_ROLES))
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let params: Params = host.params()?;
        let graph = host.require_graph("/plan/params/decode", &params.decode)?;
        let x_port = Port::Input(host.graph(graph).require_input("x")?);
        let hidden = host.tensor(graph, x_port).elements();
        let embedding = Embedding::open(host, hidden, host.value("/params/vocab")?)?;
        embedding.check(host, graph, x_port)?;
        let x_dtype = host.require_float(graph, x_port)?;
        let x = host.allocate_for(graph, x_port)?;

        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let dtype = host.require_float(graph, port)?;
        let len = host.tensor(graph, port).elements();
        let logits = View { buffer: host.allocate_for(graph, port)?, dtype, offset: 0, len };

        // Pairs past_X with new_X (rows that are appended) and present_X (states that swap).
        let state = StateCarrier::new(host, &[&[graph]])?;
        let mask = Mask::bind(host, graph, state.capacity().unwrap_or(0))?;
        let rope = match host.graph(graph).input("cos") {
            None => None,
            Some(_) => {
                let rope = Rope::new(
                    host.require("/params/head_dim")?,
                    host.require("/params/rope_theta")?,
                )?;
                rope.bind(host, graph)?.map(|slot| (rope, slot))
            }
        };
        let max_ctx = host.value("/params/max_ctx")?.or(state.capacity()).unwrap_or(usize::MAX);
        if state.capacity().is_some_and(|rows| max_ctx > rows) {
            return Err(Error::graph(format!(
                "params.max_ctx is {max_ctx}, but the caches of graph {:?} hold fewer rows",
                params.decode
            )));
        }
        Ok(Self { graph, embedding, rope, mask, state, x, x_dtype, logits, max_ctx })
    }

    fn info(&self) -> OpInfo {
        let mut info =
            OpInfo { vocab: self.logits.len, max_ctx: self.max_ctx, ..OpInfo::default() };
        self.state.describe(&mut info);
        info
    }

    fn input_vocab(&self) -> usize {
        self.embedding.vocab()
    }

    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.state.reset(host);
        Ok(())
    }

    fn position(&self) -> usize {
        self.state.position()
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let mut consumed = 0;
        for segment in segments {
            let Segment::Tokens(tokens) = segment else {
                return Err(Error::prompt("my_generate takes text only"));
            };
            for &token in *tokens {
                self.step(host, token)?;
                consumed += 1;
            }
        }
        if consumed == 0 {
            return Err(Error::prompt("the prompt has no tokens"));
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        self.step(host, token)?;
        Ok(self.logits)
    }

    fn truncate(&mut self, _host: &mut Host, position: usize) -> Result<()> {
        self.state.truncate(position)
    }

    fn snapshot(&mut self, host: &mut Host) -> Result<SnapshotId> {
        Ok(self.state.snapshot(host))
    }

    fn restore(&mut self, host: &mut Host, snapshot: SnapshotId) -> Result<()> {
        self.state.restore(host, snapshot)
    }

    fn drop_snapshot(&mut self, _host: &mut Host, snapshot: SnapshotId) {
        self.state.drop_snapshot(snapshot);
    }
}

qhx_op::register_ops!(MyOp);
qhx_op::export_plugin!();
