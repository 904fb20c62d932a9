//! `lfm2_generate`: the host side of LFM2 and LFM2.5.
//!
//! Most layers are gated short convolutions, whose state is a FIFO of the last columns
//! (`past_conv_i` → `present_conv_i`); the others are attention with a KV cache (`past_k_i`,
//! `past_v_i` → `new_k_i`, `new_v_i`). One graph takes one token through all layers, another gives
//! logits. The prompt goes through the same graph token by token.

use qhx_op::fill::{Embedding, Mask, Rope, RopeSlot};
use qhx_op::state::StateCarrier;
use qhx_op::{
    BufferId, DType, Error, GraphId, Host, Modality, Op, OpDescription, OpInfo, Port, Result,
    Segment, SnapshotId, Task, View, schema,
};
use serde::Deserialize;
use serde_json::json;

/// Roles of tensors that are no state.
const ROLES: [&str; 6] = ["x", "y", "cos", "sin", "cmask", "logits"];

/// `plan.params` of the manifest.
#[derive(Debug, Deserialize)]
struct Params {
    decode: String,
    lmhead: String,
}

/// Text generation for LFM2 and LFM2.5.
#[derive(Debug)]
pub struct Generate {
    decode: GraphId,
    head: GraphId,
    embedding: Embedding,
    rope: Rope,
    tables: Option<RopeSlot>,
    mask: Option<Mask>,
    state: StateCarrier,
    x: BufferId,
    x_dtype: DType,
    logits: View,
    max_ctx: usize,
}

/// The decode graph is the only group of the state carrier.
const STEP: usize = 0;

impl Generate {
    /// Takes one token through the layers, and through the head where logits are wanted. The state
    /// changes last, so that a failure leaves it as it was.
    fn step(&mut self, host: &mut Host, token: u32, logits: bool) -> Result<()> {
        let position = self.state.position();
        if position >= self.max_ctx {
            return Err(Error::prompt(format!("the context of {position} tokens is full")));
        }
        self.embedding.gather(host, token, self.x, self.x_dtype)?;
        if let Some(tables) = &self.tables {
            self.rope.compute(position);
            tables.write(host, &self.rope);
        }
        if let Some(mask) = &mut self.mask {
            mask.fill(host, position);
        }
        host.execute(self.decode)?;
        if logits {
            host.execute(self.head)?;
        }
        self.state.commit(host, STEP, 1)
    }
}

/// Every layer must have a convolution's FIFO or a KV cache.
fn check_layers(state: &StateCarrier, layers: usize) -> Result<()> {
    for i in 0..layers {
        let attention = state.has_cache(&format!("k_{i}")) && state.has_cache(&format!("v_{i}"));
        if !attention && !state.has_state(&format!("conv_{i}")) {
            return Err(Error::graph(format!(
                "layer {i}: the decode graph has neither past_conv_{i} nor past_k_{i} and \
                 past_v_{i}; expected one for each of the {layers} layers (params.n_layers)"
            )));
        }
    }
    Ok(())
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: "lfm2_generate".to_owned(),
            summary: "Text generation for LFM2 and LFM2.5".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "type": "object",
                "required": ["decode", "lmhead"],
                "properties": {
                    "decode": {"type": "string", "description": "Graph of one token's layers."},
                    "lmhead": {"type": "string", "description": "Graph from hidden row to logits."},
                    "tensors": schema::tensors(ROLES.into_iter().chain(schema::STATE_ROLES))
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let params: Params = host.params()?;
        let decode = host.require_graph("/plan/params/decode", &params.decode)?;
        let head = host.require_graph("/plan/params/lmhead", &params.lmhead)?;

        // Token → row: the embedding table, mapped, into the input `x`.
        let x_port = Port::Input(host.graph(decode).require_input("x")?);
        let hidden = host.tensor(decode, x_port).elements();
        let embedding = Embedding::open(host, hidden, host.value("/params/vocab")?)?;
        embedding.check(host, decode, x_port)?;
        let x_dtype = host.require_float(decode, x_port)?;
        let x = host.allocate_for(decode, x_port)?;

        // Layers → head: one buffer is the output of one graph and the input of the other.
        let y_port = Port::Output(host.graph(decode).require_output("y")?);
        let head_port = Port::Input(host.graph(head).require_input("x")?);
        let (y, row) = (host.tensor(decode, y_port), host.tensor(head, head_port));
        if y.dtype != row.dtype || y.elements() != row.elements() {
            return Err(Error::graph(format!("{y} of the layers does not fit {row} of the head")));
        }
        let hidden_row = host.allocate_for(decode, y_port)?;
        host.bind(head, head_port, hidden_row, 0)?;

        let port = Port::Output(host.graph(head).require_output("logits")?);
        let dtype = host.require_float(head, port)?;
        let len = host.tensor(head, port).elements();
        let logits = View { buffer: host.allocate_for(head, port)?, dtype, offset: 0, len };

        // Caches and FIFOs: paired by name, allocated and bound.
        let state = StateCarrier::new(host, &[&[decode]])?;
        check_layers(&state, host.require("/params/n_layers")?)?;
        let capacity = state.capacity();
        let max_ctx = match (host.value("/params/max_ctx")?, capacity) {
            (Some(said), Some(rows)) if said > rows => {
                return Err(Error::graph(format!(
                    "params.max_ctx is {said}, but the KV cache holds {rows} rows"
                )));
            }
            (said, capacity) => said.or(capacity).unwrap_or(usize::MAX),
        };

        let rope =
            Rope::new(host.require("/params/head_dim")?, host.require("/params/rope_theta")?)?;
        let tables = rope.bind(host, decode)?;
        let mask = Mask::bind(host, decode, capacity.unwrap_or(0))?;
        Ok(Self { decode, head, embedding, rope, tables, mask, state, x, x_dtype, logits, max_ctx })
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
        let mut tokens = Vec::new();
        for segment in segments {
            let Segment::Tokens(part) = segment else {
                return Err(Error::prompt("lfm2_generate takes text only"));
            };
            tokens.extend_from_slice(part);
        }
        let room = self.max_ctx.saturating_sub(self.state.position());
        if tokens.is_empty() || tokens.len() > room {
            return Err(Error::prompt(format!(
                "a prompt of {} tokens, expected 1 to {room}",
                tokens.len()
            )));
        }
        for (index, &token) in tokens.iter().enumerate() {
            self.step(host, token, index + 1 == tokens.len())?;
            host.progress(index + 1, tokens.len());
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        self.step(host, token, true)?;
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

qhx_op::register_ops!(Generate);
qhx_op::export_plugin!();
