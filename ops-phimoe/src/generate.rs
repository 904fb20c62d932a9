//! `phimoe_generate`: the loop over layers, for one token and for a whole prompt.

use std::time::Instant;

use qhx_op::decoder::Head;
use qhx_op::fill::{CausalMask, Embedding, Rope, StepMask};
use qhx_op::state::StateCarrier;
use qhx_op::text::{check_room, count_tokens, max_ctx, tokens};
use qhx_op::{
    Error, Generator, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Result, Segment, Task,
    View, schema,
};
use serde_json::json;

use crate::ffn::{self, PAIR};
use crate::layers::{Layers, Router};
use crate::names::{Params, require};
use crate::pair::Pair;
use crate::prefill::Batched;
use crate::spans::Spans;
use crate::table::{Sizes, Table};

const NAME: &str = "phimoe_generate";
/// Roles of tensors that are neither state nor an expert's weights.
const ROLES: [&str; 11] =
    ["x", "y", "z", "router", "cos", "sin", "cmask", "residual", "m1", "m2", "logits"];
/// `router_jitter_noise` of the model class.
const JITTER: f32 = 0.01;
/// The step of one token, in the state carrier and for the head.
const STEP: usize = 0;
/// The step of a prompt.
const PROMPT: usize = 1;

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
            self.layers.fill_rope(host, &mut self.rope, position);
            self.mask.fill(host, position);
            Ok(())
        })?;
        for layer in 0..self.layers.graphs.len() {
            host.execute(self.layers.graphs[layer])?;
            let choices = spans.time(host, spans.route, |host| {
                self.router.choose(host, &self.layers, layer, 0, position)
            })?;
            spans.time(host, spans.experts, |host| {
                self.table.ask(host, layer, choices.iter().map(|choice| choice.expert));
                for (tensor, choice) in self.pair.multipliers.iter().zip(choices) {
                    tensor.write(host, &[choice.multiplier]);
                }
                self.pair.ffn.load(host, &self.table, layer, &choices.map(|c| c.expert))
            })?;
            host.execute(self.pair.ffn.graph)?;
            self.pair.add_residual(host, &self.layers);
        }
        let view = logits.then(|| self.head.run(host, STEP, 0)).transpose()?;
        spans.time(host, spans.commit, |host| self.state.commit(host, STEP, 1))?;
        Ok(view)
    }

    /// How many of `left` tokens go through the prefill graphs next, if any do.
    fn fits(&self, left: usize) -> Option<usize> {
        let batched = self.batched.as_ref().filter(|_| left >= self.prefill_min)?;
        let goes_on = self.state.position() == 0 || batched.continues();
        goes_on.then(|| left.min(batched.layers.rows))
    }

    /// `count` tokens of the prompt from token `done` on through the prefill graphs; logits if they are the last.
    fn batch(&mut self, host: &mut Host, done: usize, count: usize) -> Result<Option<View>> {
        let spans = &self.spans;
        let Some(batched) = &mut self.batched else {
            return Err(Error::graph("the bundle has no prefill graphs"));
        };
        let position = self.state.position();
        let tokens = &self.prompt[done..done + count];
        batched.run(
            host,
            tokens,
            position,
            [done, self.prompt.len()],
            &self.embedding,
            &mut self.rope,
            &self.table,
            &mut self.router,
            spans,
        )?;
        let last = done + count == self.prompt.len();
        let view = last.then(|| self.head.run(host, PROMPT, count - 1)).transpose()?;
        spans.time(host, spans.commit, |host| self.state.commit(host, PROMPT, count))?;
        Ok(view)
    }

    /// The prompt token by token, from token `done` on.
    fn stepwise(&mut self, host: &mut Host, done: usize) -> Result<View> {
        let count = self.prompt.len();
        for index in done..count {
            let last = index + 1 == count;
            let view = self.step(host, self.prompt[index], last)?;
            host.progress(index + 1, count);
            if let Some(view) = view {
                return Ok(view);
            }
        }
        Err(Error::prompt("the prompt has no tokens"))
    }
}

/// The names of the prefill graphs: none when nothing is there, an error when only a part is.
fn prefill_graphs(
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
            "prefill graphs are there in part: {} are, {} are missing; the contexts that hold \
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

/// Whether the graphs read caches. Those that do go on at any position, others begin with a text's first token.
fn caches_of(host: &Host, graphs: &[GraphId]) -> Result<bool> {
    let reads =
        |graph: &GraphId| host.graph(*graph).inputs.iter().any(|t| t.role.starts_with("past_"));
    let count = graphs.iter().filter(|graph| reads(graph)).count();
    if count == 0 || count == graphs.len() {
        return Ok(count > 0);
    }
    let of = graphs.len();
    Err(Error::graph(format!(
        "{count} of {of} prefill graphs have caches as inputs, expected all or none"
    )))
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

/// Binds the mask of all graphs of a step, each of which must have one, over caches of `capacity`
/// rows, and fills it for the first token. `window`: how many positions a token sees, itself
/// included.
fn bind_mask(
    host: &mut Host,
    layers: &Layers,
    capacity: usize,
    window: Option<usize>,
) -> Result<StepMask> {
    for &graph in &layers.graphs {
        host.input(graph, "cmask")?;
    }
    let mask = CausalMask::new(capacity).window(window.unwrap_or(usize::MAX));
    let mut mask = mask.bind(host, &layers.graphs, layers.rows)?;
    mask.fill(host, 0);
    Ok(mask)
}

/// A number of the manifest against what the graphs say.
fn agree(host: &Host, key: &str, found: usize, what: &str) -> Result<()> {
    match host.value::<usize>(&format!("/params/{key}"))? {
        Some(declared) if declared != found => Err(Error::graph(format!(
            "{what} {found}, but the manifest's params.{key} is {declared}"
        ))),
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
                        "description": "As decode, for several tokens; without caches from the first token of a text on. May be absent from the bundle, together with ffn_prefill.",
                        "default": "pf*",
                        "oneOf": layers
                    },
                    "ffn_prefill": {
                        "description": "Graph of one expert for several tokens.",
                        "default": "ffn_pf",
                        "type": "string"
                    },
                    "lmhead": {
                        "description": "Graph from hidden state to logits, final norm included.",
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
                    "read_ahead": {
                        "description": "Ask the system for experts as a whole before their first use.",
                        "default": true,
                        "type": "boolean"
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
        let prompt = prefill_graphs(host, &params, decode.len())?;
        if let Some((graphs, _)) = &prompt {
            check_caches(host, graphs, if caches_of(host, graphs)? { "past" } else { "" })?;
        }
        let mut groups: Vec<&[GraphId]> = vec![&decode];
        groups.extend(prompt.as_ref().map(|(graphs, _)| graphs.as_slice()));
        let state = StateCarrier::new(host, &groups)?;
        for group in 0..groups.len() {
            state.check_complete(host, group)?;
        }
        let capacity = state.capacity().unwrap_or(0);
        let max_ctx = max_ctx(host, Some(capacity))?;
        let window = host.value::<usize>("/params/sliding_window")?.filter(|w| *w > 0);
        let rope = Rope::from_params(host, "/params")?;
        let layers = Layers::open(host, decode, &rope)?;
        if layers.rows != 1 {
            return Err(Error::graph(format!(
                "graph {:?}: x has {} rows, expected 1 for manifest /plan/params/decode",
                host.graph(layers.graphs[0]).name,
                layers.rows
            )));
        }
        agree(
            host,
            "n_experts",
            layers.experts,
            "the number of experts that the router scores is",
        )?;
        let mask = bind_mask(host, &layers, capacity, window)?;

        let ffn = host.require_graph("/plan/params/ffn", &params.ffn)?;
        let sizes = Sizes {
            layers: layers.graphs.len(),
            experts: layers.experts,
            hidden: layers.hidden,
            width: ffn::width(host, ffn, PAIR[0])?,
        };
        let table = Table::open(host, sizes, params.read_ahead)?;
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
                let past = caches_of(host, &prompt.graphs)?;
                let mask = bind_mask(host, &prompt, if past { capacity } else { 0 }, window)?;
                let mask = past.then_some(mask);
                Some(Batched::open(host, prompt, mask, ffn, &table, params.int8_step)?)
            }
            None => None,
        };
        let mut rows = vec![layers.residual(host)?];
        if let Some(batched) = &batched {
            rows.push(batched.layers.residual(host)?);
        }
        let head = host.require_graph("/plan/params/lmhead", &params.lmhead)?;
        let head = Head::open(host, head, rows)?;
        let embedding = host.embedding_for(layers.graphs[0])?;
        if head.logits().len < embedding.vocab() {
            return Err(Error::graph(format!(
                "the graphs give {} logits, expected at least {}, one for each row of the embedding \
                 table",
                head.logits().len,
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

    fn info(&self) -> OpenInfo {
        let mut info = OpenInfo {
            vocab: self.head.logits().len,
            max_ctx: self.max_ctx,
            input_vocab: self.embedding.vocab(),
            ..OpenInfo::default()
        };
        self.state.describe(&mut info);
        info
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Generate {
    fn state(&self) -> Option<&StateCarrier> {
        Some(&self.state)
    }

    fn state_mut(&mut self) -> Option<&mut StateCarrier> {
        Some(&mut self.state)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let count = count_tokens(NAME, segments)?;
        check_room(self.state.position(), count, self.max_ctx)?;
        self.prompt.clear();
        self.prompt.extend(tokens(segments));
        let mut done = 0;
        while let Some(rows) = self.fits(count - done) {
            let start = Instant::now();
            let view = self.batch(host, done, rows);
            host.end(self.spans.batched, start);
            if let Some(view) = view? {
                return Ok(view);
            }
            done += rows;
        }
        let start = Instant::now();
        let view = self.stepwise(host, done);
        host.end(self.spans.stepped, start);
        view
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        check_room(self.state.position(), 1, self.max_ctx)?;
        self.step(host, token, true)?.ok_or_else(|| Error::graph("the step gave no logits"))
    }
}
