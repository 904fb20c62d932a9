//! `phimoe_generate`: the loop over layers, for one token and for a whole prompt.

use std::time::Instant;

use qhx_op::fill::{Embedding, Rope, RopeScaling};
use qhx_op::state::StateCarrier;
use qhx_op::{
    Error, GraphId, Host, Modality, Op, OpDescription, OpInfo, Result, Segment, SnapshotId, SpanId,
    Task, View, schema,
};
use serde_json::json;

use crate::ffn::{self, Ffn, PAIR};
use crate::head::Head;
use crate::layers::{Layers, Router, Side, Tensor, bind, port};
use crate::mask::{StepMask, bind_prompt_mask};
use crate::names::{Params, require};
use crate::prefill::Batched;
use crate::table::{Sizes, Table};

const NAME: &str = "phimoe_generate";
/// Roles of tensors that are neither state nor an expert's weights.
const ROLES: [&str; 11] =
    ["x", "y", "z", "router", "cos", "sin", "cmask", "residual", "m1", "m2", "logits"];
/// Base of the rotary frequencies when the manifest does not say (RoFormer, arXiv 2104.09864).
const ROPE_THETA: f64 = 1e4;
/// `router_jitter_noise` of the model class.
const JITTER: f32 = 0.01;
/// The step of one token, in the state carrier and for the head.
const STEP: usize = 0;
/// The step of a prompt.
const PROMPT: usize = 1;

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
    commit: SpanId,
    /// Prompts that went through the graphs for prompts, graphs included.
    batched: SpanId,
    /// Prompts that went through the graphs for one token, graphs included.
    stepped: SpanId,
}

impl Spans {
    fn new(host: &Host) -> Self {
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

/// The graph of the two experts of a token, and how it is chained with the layers.
#[derive(Debug)]
struct Pair {
    ffn: Ffn,
    multipliers: [Tensor; 2],
    /// Where the experts' sum comes out when the graph does not add the residual itself.
    sum: Option<Tensor>,
    /// Two rows for adding it.
    rows: [Vec<f32>; 2],
}

impl Pair {
    fn open(
        host: &mut Host,
        graph: GraphId,
        layers: &Layers,
        table: &Table,
        step: f32,
    ) -> Result<Self> {
        let ffn = Ffn::open(host, graph, &PAIR, table, step)?;
        let x = port(host, graph, Side::Input, "x")?;
        bind(host, graph, x, layers.z)?;
        let output = port(host, graph, Side::Output, "y")?;
        let sum = if host.graph(graph).input("residual").is_some() {
            let residual = port(host, graph, Side::Input, "residual")?;
            bind(host, graph, residual, layers.y)?;
            bind(host, graph, output, layers.x)?;
            None
        } else {
            let dtype = host.require_float(graph, output)?;
            let info = host.tensor(graph, output);
            if info.elements() != layers.hidden {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {info}: expected {} values, a hidden row",
                    host.graph(graph).name,
                    layers.hidden
                )));
            }
            Some(Tensor { buffer: host.allocate_for(graph, output)?, dtype })
        };
        let mut multiplier = |role: &str| {
            let port = port(host, graph, Side::Input, role)?;
            let dtype = host.require_float(graph, port)?;
            if host.tensor(graph, port).elements() != 1 {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {}: expected one value",
                    host.graph(graph).name,
                    host.tensor(graph, port)
                )));
            }
            Ok(Tensor { buffer: host.allocate_for(graph, port)?, dtype })
        };
        let multipliers = [multiplier("m1")?, multiplier("m2")?];
        let row = || if sum.is_some() { vec![0.0; layers.hidden] } else { Vec::new() };
        Ok(Self { ffn, multipliers, sum, rows: [row(), row()] })
    }

    /// The next residual where the graph gives only what the experts add.
    fn add_residual(&mut self, host: &mut Host, layers: &Layers) {
        let Some(sum) = self.sum else { return };
        let [rest, added] = &mut self.rows;
        layers.y.read(host, 0, rest);
        sum.read(host, 0, added);
        for (rest, added) in rest.iter_mut().zip(added) {
            *rest += *added;
        }
        layers.x.write(host, rest);
    }
}

/// Text generation for PhiMoE decoders.
#[derive(Debug)]
pub struct Generate {
    layers: Layers,
    mask: StepMask,
    pair: Pair,
    batched: Option<Batched>,
    prefill_min: usize,
    head: Head,
    table: Table,
    router: Router,
    embedding: Embedding,
    rope: Rope,
    state: StateCarrier,
    max_ctx: usize,
    /// Tokens of the prompt under way.
    prompt: Vec<u32>,
    spans: Spans,
}

impl Generate {
    /// Runs one token and commits the state last, so that a failure leaves it as it was.
    fn step(&mut self, host: &mut Host, token: u32, logits: bool) -> Result<Option<View>> {
        let position = self.state.position();
        let spans = &self.spans;
        spans.time(host, spans.fill, |host| {
            let x = self.layers.x;
            self.embedding.gather(host, token, x.buffer, x.dtype)?;
            self.layers.turn(host, &mut self.rope, position);
            self.mask.fill(host, position);
            Ok(())
        })?;
        for layer in 0..self.layers.graphs.len() {
            host.execute(self.layers.graphs[layer])?;
            let choices = spans.time(host, spans.route, |host| {
                self.router.choose(host, &self.layers, layer, 0, position)
            })?;
            spans.time(host, spans.experts, |host| {
                for (tensor, choice) in self.pair.multipliers.iter().zip(choices) {
                    tensor.write(host, &[choice.multiplier]);
                }
                self.pair.ffn.load(host, &self.table, layer, &choices.map(|c| c.expert))
            })?;
            host.execute(self.pair.ffn.graph)?;
            self.pair.add_residual(host, &self.layers);
        }
        let view = logits.then(|| self.head.run(host, STEP, &self.layers, 0)).transpose()?;
        spans.time(host, spans.commit, |host| self.state.commit(host, STEP, 1))?;
        Ok(view)
    }

    /// The prompt through the graphs for prompts.
    fn whole(&mut self, host: &mut Host) -> Result<View> {
        let spans = &self.spans;
        let Some(batched) = &mut self.batched else {
            return Err(Error::graph("the bundle has no graphs for prompts"));
        };
        batched.run(
            host,
            &self.prompt,
            &self.embedding,
            &mut self.rope,
            &self.table,
            &mut self.router,
            spans,
        )?;
        let view = self.head.run(host, PROMPT, &batched.layers, self.prompt.len() - 1)?;
        let count = self.prompt.len();
        spans.time(host, spans.commit, |host| self.state.commit(host, PROMPT, count))?;
        Ok(view)
    }

    /// The prompt token by token.
    fn stepwise(&mut self, host: &mut Host) -> Result<View> {
        let count = self.prompt.len();
        for index in 0..count {
            let last = index + 1 == count;
            let view = self.step(host, self.prompt[index], last)?;
            host.progress(index + 1, count);
            if let Some(view) = view {
                return Ok(view);
            }
        }
        Err(Error::prompt("the prompt has no tokens"))
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

    /// Collects the tokens of the prompt.
    fn read(&mut self, segments: &[Segment<'_>]) -> Result<()> {
        self.prompt.clear();
        for segment in segments {
            let found = match segment {
                Segment::Tokens(tokens) => {
                    self.check_room(self.prompt.len() + tokens.len())?;
                    self.prompt.extend_from_slice(tokens);
                    continue;
                }
                Segment::Image { .. } => "an image",
                Segment::Audio { .. } => "audio",
                _ => "a segment of an unknown kind",
            };
            return Err(Error::prompt(format!("{NAME} takes text only; the prompt has {found}")));
        }
        if self.prompt.is_empty() {
            return Err(Error::prompt("the prompt has no tokens"));
        }
        Ok(())
    }
}

fn rope(host: &Host) -> Result<Rope> {
    let Some(dim) = host.value::<usize>("/params/head_dim")? else {
        return Err(Error::manifest(
            "manifest /params: head_dim is missing, which the rotary tables are made for",
        ));
    };
    let rope = Rope::new(dim, host.value("/params/rope_theta")?.unwrap_or(ROPE_THETA))?;
    match host.value::<RopeScaling>("/params/rope_scaling")? {
        Some(scaling) => rope.scaled(scaling),
        None => Ok(rope),
    }
}

/// The names of the graphs for prompts: none when nothing is there, an error when only a part is.
fn prompt_graphs(
    host: &Host,
    params: &Params,
    layers: usize,
) -> Result<Option<(Vec<GraphId>, GraphId)>> {
    let mut names = params.prefill.names(host, "/plan/params/prefill", Some(layers))?;
    names.push(params.ffn_prefill.clone());
    let (here, missing): (Vec<_>, Vec<_>) =
        names.iter().partition(|name| host.find_graph(name).is_some());
    if here.is_empty() {
        return Ok(None);
    }
    if !missing.is_empty() {
        return Err(Error::graph(format!(
            "graphs for prompts are there in part: {} are, {} are missing; the contexts that hold \
             them belong together, complete them, or remove them all",
            listed(&here),
            listed(&missing)
        )));
    }
    names.pop();
    let ffn = host.require_graph("/plan/params/ffn_prefill", &params.ffn_prefill)?;
    Ok(Some((require(host, "/plan/params/prefill", &names)?, ffn)))
}

fn listed(names: &[&String]) -> String {
    const SHOWN: usize = 4;
    let mut list: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    if names.len() > SHOWN {
        list.push(format!("… ({} in all)", names.len()));
    }
    list.join(", ")
}

/// Each layer's graph has that layer's caches.
fn check_caches(host: &Host, graphs: &[GraphId], prefix: &str) -> Result<()> {
    for (layer, &graph) in graphs.iter().enumerate() {
        for kind in ["k", "v"] {
            host.graph(graph).require_output(&format!("new_{kind}_{layer}"))?;
            if prefix == "past" {
                host.graph(graph).require_input(&format!("past_{kind}_{layer}"))?;
            }
        }
    }
    Ok(())
}

/// A number of the manifest against what the graphs say.
fn agree(host: &Host, key: &str, found: usize, what: &str) -> Result<()> {
    match host.value::<usize>(&format!("/params/{key}"))? {
        Some(said) if said != found => {
            Err(Error::graph(format!("{what} {found}, but the manifest's params.{key} is {said}")))
        }
        _ => Ok(()),
    }
}

impl Op for Generate {
    fn describe() -> OpDescription {
        let layers = json!([
            {"type": "string", "description": "A name with one * for the layer's number."},
            {"type": "array", "items": {"type": "string"}, "minItems": 1}
        ]);
        let weights = ffn::roles();
        let weights = weights.iter().map(String::as_str);
        OpDescription {
            name: NAME.to_owned(),
            summary:
                "Text generation for PhiMoE decoders: two experts a token, weights on the host"
                    .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "decode": {
                        "description": "Graphs of attention and router for one token, one a layer.",
                        "default": "a*",
                        "oneOf": layers
                    },
                    "ffn": {
                        "description": "Graph of two experts for one token.",
                        "default": "ffn2",
                        "type": "string"
                    },
                    "prefill": {
                        "description": "As decode, for a prompt from its first token on. May be absent from the bundle, together with ffn_prefill.",
                        "default": "pf*",
                        "oneOf": layers
                    },
                    "ffn_prefill": {
                        "description": "Graph of one expert for several tokens.",
                        "default": "ffn_pf",
                        "type": "string"
                    },
                    "lmhead": {
                        "description": "Graph from hidden row to logits, final norm included.",
                        "default": "lmhead_ar1",
                        "type": "string"
                    },
                    "prefill_min": {
                        "description": "Tokens of the shortest prompt that goes through prefill.",
                        "default": 24,
                        "type": "integer",
                        "minimum": 0
                    },
                    "int8_step": {
                        "description": "What one step of int8 weight inputs is worth inside the graphs, their encoding's scale.",
                        "default": 1.0,
                        "type": "number",
                        "exclusiveMinimum": 0
                    },
                    "trace_routing": {
                        "description": "Log every routing decision, at level debug.",
                        "default": false,
                        "type": "boolean"
                    },
                    "tensors": schema::tensors(
                        ROLES.into_iter().chain(schema::STATE_ROLES).chain(weights)
                    )
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let params: Params = host.params()?;
        let n_layers = host.value::<usize>("/params/n_layers")?;
        let names = params.decode.names(host, "/plan/params/decode", n_layers)?;
        let decode = require(host, "/plan/params/decode", &names)?;
        check_caches(host, &decode, "past")?;
        let prompt = prompt_graphs(host, &params, decode.len())?;
        if let Some((graphs, _)) = &prompt {
            check_caches(host, graphs, "")?;
        }
        let mut groups: Vec<&[GraphId]> = vec![&decode];
        groups.extend(prompt.as_ref().map(|(graphs, _)| graphs.as_slice()));
        let state = StateCarrier::new(host, &groups)?;
        for group in 0..groups.len() {
            state.check_complete(host, group)?;
        }
        let capacity = state.capacity().unwrap_or(0);
        let max_ctx = host.value::<usize>("/params/max_ctx")?.unwrap_or(capacity);
        if max_ctx > capacity {
            return Err(Error::graph(format!(
                "the manifest's params.max_ctx is {max_ctx}, but the KV cache of the graphs holds \
                 {capacity} rows"
            )));
        }
        let window = host.value::<usize>("/params/sliding_window")?.filter(|w| *w > 0);
        let rope = rope(host)?;
        let layers = Layers::open(host, decode, &rope)?;
        if layers.rows != 1 {
            return Err(Error::graph(format!(
                "graph {:?}: x has {} rows, expected 1 for manifest /plan/params/decode",
                host.graph(layers.graphs[0]).name,
                layers.rows
            )));
        }
        agree(host, "hidden", layers.hidden, "the graphs take rows of")?;
        agree(
            host,
            "n_experts",
            layers.experts,
            "the number of experts that the router scores is",
        )?;
        let mask = StepMask::bind(host, &layers.graphs, capacity, window)?;

        let ffn = host.require_graph("/plan/params/ffn", &params.ffn)?;
        let sizes = Sizes {
            layers: layers.graphs.len(),
            experts: layers.experts,
            hidden: layers.hidden,
            width: ffn::width(host, ffn, PAIR[0])?,
        };
        let table = Table::open(host, sizes)?;
        let pair = Pair::open(host, ffn, &layers, &table, params.int8_step)?;
        let batched = match prompt {
            Some((graphs, ffn)) => {
                let prompt = Layers::open(host, graphs, &rope)?;
                let same = |l: &Layers| (l.hidden, l.experts, l.x.dtype);
                if same(&prompt) != same(&layers) {
                    return Err(Error::graph(format!(
                        "graph {:?}: hidden {}, {} experts, {}; expected {}, {} and {}, as the \
                         graphs for one token",
                        host.graph(prompt.graphs[0]).name,
                        prompt.hidden,
                        prompt.experts,
                        prompt.x.dtype,
                        layers.hidden,
                        layers.experts,
                        layers.x.dtype
                    )));
                }
                bind_prompt_mask(host, &prompt.graphs, prompt.rows, window)?;
                Some(Batched::open(host, prompt, ffn, &table, params.int8_step)?)
            }
            None => None,
        };
        let mut steps = vec![&layers];
        steps.extend(batched.as_ref().map(|batched| &batched.layers));
        let head = host.require_graph("/plan/params/lmhead", &params.lmhead)?;
        let head = Head::open(host, head, &steps)?;
        let embedding = Embedding::open(host, layers.hidden, host.value("/params/vocab")?)?;
        if head.logits.len < embedding.vocab() {
            return Err(Error::graph(format!(
                "the graphs give {} logits, expected at least {}, one for each row of the embedding \
                 table",
                head.logits.len,
                embedding.vocab()
            )));
        }
        let jitter = host.value("/params/router_jitter_noise")?.unwrap_or(JITTER);
        let router = Router::new(layers.experts, jitter, params.trace_routing);
        Ok(Self {
            layers,
            mask,
            pair,
            batched,
            prefill_min: params.prefill_min.max(1),
            head,
            table,
            router,
            embedding,
            rope,
            state,
            max_ctx,
            prompt: Vec::with_capacity(max_ctx),
            spans: Spans::new(host),
        })
    }

    fn info(&self) -> OpInfo {
        let mut info =
            OpInfo { vocab: self.head.logits.len, max_ctx: self.max_ctx, ..OpInfo::default() };
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
        self.read(segments)?;
        let count = self.prompt.len();
        let fits = self.state.position() == 0
            && count >= self.prefill_min
            && self.batched.as_ref().is_some_and(|batched| count <= batched.layers.rows);
        let start = Instant::now();
        let (view, span) = if fits {
            (self.whole(host), self.spans.batched)
        } else {
            (self.stepwise(host), self.spans.stepped)
        };
        host.end(span, start);
        view
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        self.check_room(1)?;
        self.step(host, token, true)?.ok_or_else(|| Error::graph("the step gave no logits"))
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
