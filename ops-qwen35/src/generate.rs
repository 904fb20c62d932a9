//! `qwen3_5_generate`: decode over prompt, any number of decode shards, a separate or fused head.

use std::time::Instant;

use qhx_op::fill::{Embedding, Mask, Rope, RopeTables};
use qhx_op::state::StateCarrier;
use qhx_op::{
    BufferId, DType, Error, GraphId, Host, Modality, Op, OpDescription, OpInfo, Port, Result,
    Segment, SnapshotId, SpanId, Task, View, schema,
};
use serde::Deserialize;
use serde_json::json;

/// Roles of tensors that are no state.
const ROLES: [&str; 6] = ["x", "y", "cos", "sin", "cmask", "logits"];
/// Fraction of a head that is rotated when the manifest does not say: the family's own.
const ROTARY_FRACTION: f64 = 0.25;
/// Base of the rotary frequencies when the manifest does not say: the family's own.
const ROPE_THETA: f64 = 1e7;

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
struct Params {
    decode: OneOrMany,
    lmhead: Option<String>,
}

/// One decode graph with the inputs that the host fills.
#[derive(Debug)]
struct Shard {
    graph: GraphId,
    mask: Option<Mask>,
}

/// Text generation for the Qwen3.5 hybrid family.
#[derive(Debug)]
pub struct Generate {
    shards: Vec<Shard>,
    head: Option<GraphId>,
    embedding: Embedding,
    rope: Rope,
    tables: RopeTables,
    state: StateCarrier,
    /// Input of the first shard.
    x: BufferId,
    x_dtype: DType,
    logits: View,
    max_ctx: usize,
    fill_span: SpanId,
    commit_span: SpanId,
}

/// The decode graphs are group 0 of the state carrier, the only one.
const STEP: usize = 0;

impl Generate {
    /// Runs one token through the decode shards, and through the head when `logits` is asked for.
    /// Commits the state last, so that a failure leaves it as it was.
    fn step(&mut self, host: &mut Host, token: u32, logits: bool) -> Result<()> {
        let start = Instant::now();
        let position = self.state.position();
        self.embedding.gather(host, token, self.x, self.x_dtype)?;
        self.tables.fill(host, &mut self.rope, position);
        for shard in &mut self.shards {
            if let Some(mask) = &mut shard.mask {
                mask.fill(host, position);
            }
        }
        host.end(self.fill_span, start);
        for shard in &self.shards {
            host.execute(shard.graph)?;
        }
        if let (Some(head), true) = (self.head, logits) {
            host.execute(head)?;
        }
        let start = Instant::now();
        self.state.commit(host, STEP, 1)?;
        host.end(self.commit_span, start);
        Ok(())
    }

    fn check_room(&self, tokens: usize) -> Result<()> {
        let position = self.state.position();
        if position + tokens <= self.max_ctx {
            return Ok(());
        }
        Err(Error::prompt(format!(
            "{tokens} tokens at position {position} do not fit into the context of {} tokens",
            self.max_ctx
        )))
    }
}

/// Checks that one graph's output can be another's input and binds one buffer to both.
fn chain(host: &mut Host, from: (GraphId, Port), to: (GraphId, Port)) -> Result<()> {
    let (source, target) = (host.tensor(from.0, from.1), host.tensor(to.0, to.1));
    if source.dtype != target.dtype || source.elements() != target.elements() {
        return Err(Error::graph(format!(
            "graph {:?} hands on {source}, but graph {:?} takes {target}; both must have the same \
             dtype and number of values",
            host.graph(from.0).name,
            host.graph(to.0).name
        )));
    }
    let buffer = host.allocate_for(from.0, from.1)?;
    host.bind(to.0, to.1, buffer, 0)
}

/// Every layer must have a KV cache, or a convolution FIFO and a recurrent state.
fn check_layers(state: &StateCarrier, layers: usize, graphs: &str) -> Result<()> {
    for layer in 0..layers {
        let cache = [format!("k_{layer}"), format!("v_{layer}")];
        let recurrent = [format!("conv_{layer}"), format!("ssm_{layer}")];
        let caches = cache.iter().filter(|role| state.has_cache(role)).count();
        let states = recurrent.iter().filter(|role| state.has_state(role)).count();
        match (caches, states) {
            (2, 0) | (0, 2) => {}
            (0, 0) => {
                return Err(Error::graph(format!(
                    "layer {layer}: {graphs} have neither past_k_{layer}/past_v_{layer} nor \
                     past_conv_{layer}/past_ssm_{layer}; expected one pair for each of the \
                     manifest's {layers} layers (params.n_layers)"
                )));
            }
            (0, 1) | (1, 0) => {
                let missing = cache
                    .iter()
                    .filter(|role| caches == 1 && !state.has_cache(role))
                    .chain(recurrent.iter().filter(|role| states == 1 && !state.has_state(role)))
                    .map(|role| format!("past_{role}"))
                    .collect::<String>();
                return Err(Error::graph(format!(
                    "layer {layer}: {graphs} lack {missing}; the layer's other state is there"
                )));
            }
            _ => {
                return Err(Error::graph(format!(
                    "layer {layer}: {graphs} have both a KV cache and a recurrent state; expected \
                     one of them"
                )));
            }
        }
    }
    Ok(())
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: "qwen3_5_generate".to_owned(),
            summary: "Text generation for the Qwen3.5 hybrid family (gated delta rule and softmax \
                      attention)"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["decode"],
                "properties": {
                    "decode": schema::graphs("Decode graph, or the shards in order."),
                    "lmhead": {
                        "description": "Graph from hidden row to logits; absent when the last decode graph gives logits.",
                        "type": "string"
                    },
                    "tensors": schema::tensors(ROLES.into_iter().chain(schema::STATE_ROLES))
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let params: Params = host.params()?;
        let names = match params.decode {
            OneOrMany::One(name) => vec![name],
            OneOrMany::Many(names) => names,
        };
        if names.is_empty() {
            return Err(Error::manifest("manifest /plan/params/decode: no graph is named"));
        }
        let graphs = names
            .iter()
            .map(|name| host.require_graph("/plan/params/decode", name))
            .collect::<Result<Vec<_>>>()?;
        let (first, last) = (graphs[0], graphs[graphs.len() - 1]);

        let x_port = Port::Input(host.graph(first).require_input("x")?);
        let hidden = host.tensor(first, x_port).elements();
        if let Some(said) = host.value::<usize>("/params/hidden")?
            && said != hidden
        {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {}: expected {said} values, the manifest's params.hidden",
                host.graph(first).name,
                host.tensor(first, x_port)
            )));
        }
        let embedding = Embedding::open(host, hidden, host.value("/params/vocab")?)?;
        embedding.check(host, first, x_port)?;
        let x_dtype = host.require_float(first, x_port)?;
        let x = host.allocate_for(first, x_port)?;

        for pair in graphs.windows(2) {
            let output = Port::Output(host.graph(pair[0]).require_output("y")?);
            let input = Port::Input(host.graph(pair[1]).require_input("x")?);
            chain(host, (pair[0], output), (pair[1], input))?;
        }

        let head = params
            .lmhead
            .map(|name| host.require_graph("/plan/params/lmhead", &name))
            .transpose()?;
        if let Some(head) = head {
            let output = Port::Output(host.graph(last).require_output("y")?);
            let input = Port::Input(host.graph(head).require_input("x")?);
            chain(host, (last, output), (head, input))?;
        }
        let logits_graph = head.unwrap_or(last);
        let port = Port::Output(host.graph(logits_graph).require_output("logits")?);
        let dtype = host.require_float(logits_graph, port)?;
        let len = host.tensor(logits_graph, port).elements();
        if len < embedding.vocab() {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {}: expected at least {} values, one for each row of the \
                 embedding table",
                host.graph(logits_graph).name,
                host.tensor(logits_graph, port),
                embedding.vocab()
            )));
        }
        let buffer = host.allocate_for(logits_graph, port)?;
        let logits = View { buffer, dtype, offset: 0, len };

        let state = StateCarrier::new(host, &[&graphs])?;
        if let Some(layers) = host.value::<usize>("/params/n_layers")? {
            check_layers(&state, layers, &format!("the decode graphs ({})", names.join(", ")))?;
        }
        let said = host.value::<usize>("/params/max_ctx")?;
        let max_ctx = match (state.capacity(), said) {
            (Some(capacity), Some(said)) if said > capacity => {
                return Err(Error::graph(format!(
                    "the manifest's params.max_ctx is {said}, but the KV cache of the decode \
                     graphs holds {capacity} rows"
                )));
            }
            (capacity, said) => said.or(capacity).unwrap_or(usize::MAX),
        };

        let head_dim = host.value::<f64>("/params/head_dim")?;
        let rotary_dim = match (host.value::<usize>("/params/rotary_dim")?, head_dim) {
            (Some(rotary_dim), _) => Some(rotary_dim),
            (None, Some(head_dim)) => {
                let fraction = host.value("/params/partial_rotary_factor")?;
                Some((head_dim * fraction.unwrap_or(ROTARY_FRACTION)).round() as usize)
            }
            (None, None) => None,
        };
        let rotates = graphs.iter().any(|&g| host.graph(g).input("cos").is_some());
        let rotary_dim = match (rotary_dim, rotates) {
            (Some(dim), _) => dim,
            (None, false) => 2,
            (None, true) => {
                return Err(Error::manifest(
                    "manifest /params: rotary_dim is missing, and so is head_dim to derive it from",
                ));
            }
        };
        let rope = Rope::new(rotary_dim, host.value("/params/rope_theta")?.unwrap_or(ROPE_THETA))?;
        let capacity = state.capacity().unwrap_or(0);
        let tables = rope.bind_all(host, &graphs, 1)?;
        let shards = graphs
            .iter()
            .map(|&graph| Ok(Shard { graph, mask: Mask::bind(host, graph, capacity)? }))
            .collect::<Result<_>>()?;
        let fill_span = host.span("fill");
        let commit_span = host.span("commit");
        Ok(Self {
            shards,
            head,
            embedding,
            rope,
            tables,
            state,
            x,
            x_dtype,
            logits,
            max_ctx,
            fill_span,
            commit_span,
        })
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
        let mut total = 0;
        for segment in segments {
            match segment {
                Segment::Tokens(tokens) => total += tokens.len(),
                Segment::Image { .. } => return Err(text_only("an image")),
                Segment::Audio { .. } => return Err(text_only("audio")),
                _ => return Err(text_only("a segment of an unknown kind")),
            }
        }
        if total == 0 {
            return Err(Error::prompt("the prompt has no tokens"));
        }
        self.check_room(total)?;
        let tokens = segments.iter().flat_map(|segment| match segment {
            Segment::Tokens(tokens) => *tokens,
            _ => &[],
        });
        for (index, &token) in tokens.enumerate() {
            self.step(host, token, index + 1 == total)?;
            host.progress(index + 1, total);
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        self.check_room(1)?;
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

fn text_only(found: &str) -> Error {
    Error::prompt(format!("qwen3_5_generate takes text only; the prompt has {found}"))
}
