//! `phimoe_generate`: the loop over layers, for one token and for a whole prompt.

use std::time::Instant;

use qhx_op::decoder::Head;
use qhx_op::experts::{self, ExpertParams, Experts, Residual, Rule};
use qhx_op::fill::{CausalMask, Embedding, Rope, StepMask};
use qhx_op::state::StateCarrier;
use qhx_op::text::{check_room, count_tokens, max_ctx, tokens};
use qhx_op::{
    Error, Generator, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Result, Segment,
    SpanId, Task, View, schema,
};
use serde_json::json;

use crate::names::{Params, require};
use crate::step::Step;

const NAME: &str = "phimoe_generate";
/// `router_jitter_noise` of the model class.
const JITTER: f32 = 0.01;
/// The step of one token, in the state carrier and for the head.
const STEP: usize = 0;
/// The step of a prompt.
const PROMPT: usize = 1;

/// The named parts of the op's time, but for that of the experts.
#[derive(Debug)]
struct Spans {
    /// Embedding rows, rotary tables, masks.
    fill: SpanId,
    /// Writing cache rows.
    commit: SpanId,
    /// Prompts that went through the prefill graphs, graphs included.
    batched: SpanId,
    /// Prompts that went through the graphs for one token, graphs included.
    stepped: SpanId,
}

/// Text generation for PhiMoE decoders.
#[derive(Debug)]
pub struct Generate {
    step: Step,
    batched: Option<Step>,
    prefill_min: usize,
    experts: Experts,
    head: Head,
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
        let start = Instant::now();
        self.step.fill(host, &self.embedding, &mut self.rope, &[token], position)?;
        host.end(self.spans.fill, start);
        let residual = &self.step.residual;
        for (layer, &graph) in residual.graphs.iter().enumerate() {
            host.execute(graph)?;
            self.experts.add(host, residual, layer, 1, position)?;
        }
        let view = logits.then(|| self.head.run(host, STEP, 0)).transpose()?;
        self.commit(host, STEP, 1)?;
        Ok(view)
    }

    fn commit(&mut self, host: &mut Host, step: usize, count: usize) -> Result<()> {
        let start = Instant::now();
        self.state.commit(host, step, count)?;
        host.end(self.spans.commit, start);
        Ok(())
    }

    /// How many of `left` tokens go through the prefill graphs next, if any do.
    fn fits(&self, left: usize) -> Option<usize> {
        let batched = self.batched.as_ref().filter(|_| left >= self.prefill_min)?;
        let goes_on = self.state.position() == 0 || batched.mask.is_some();
        goes_on.then(|| left.min(batched.residual.rows))
    }

    /// `count` tokens of the prompt from token `done` on through the prefill graphs; logits if they are the last.
    fn batch(&mut self, host: &mut Host, done: usize, count: usize) -> Result<Option<View>> {
        let Some(batched) = &mut self.batched else {
            return Err(Error::graph("the bundle has no prefill graphs"));
        };
        let position = self.state.position();
        let (tokens, total) = (&self.prompt[done..done + count], self.prompt.len());
        let start = Instant::now();
        batched.fill(host, &self.embedding, &mut self.rope, tokens, position)?;
        host.end(self.spans.fill, start);
        let residual = &batched.residual;
        for (layer, &graph) in residual.graphs.iter().enumerate() {
            host.execute(graph)?;
            self.experts.add(host, residual, layer, count, position)?;
            host.progress(done + count * (layer + 1) / residual.graphs.len(), total);
        }
        let last = done + count == total;
        let view = last.then(|| self.head.run(host, PROMPT, count - 1)).transpose()?;
        self.commit(host, PROMPT, count)?;
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
    ffn: &str,
    layers: usize,
) -> Result<Option<(Vec<GraphId>, GraphId)>> {
    let mut names = params.prefill.names(host, "/plan/params/prefill", Some(layers))?;
    names.push(ffn.to_owned());
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
    let ffn = host.require_graph("/plan/params/ffn_prefill", ffn)?;
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
    residual: &Residual,
    capacity: usize,
    window: Option<usize>,
) -> Result<StepMask> {
    for &graph in &residual.graphs {
        host.input(graph, "cmask")?;
    }
    let mask = CausalMask::new(capacity).window(window.unwrap_or(usize::MAX));
    let mut mask = mask.bind(host, &residual.graphs, residual.rows)?;
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
        let mut properties = schema::expert_params();
        let own = json!({
            "decode": {
                "description": "Graphs of attention and router for one token, one a layer.",
                "default": "a*",
                "oneOf": layers
            },
            "prefill": {
                "description": "As decode, for several tokens; without caches from the first token of a text on. May be absent from the bundle, together with ffn_prefill.",
                "default": "pf*",
                "oneOf": layers
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
            "tensors": schema::tensors(
                schema::DECODER_ROLES.into_iter().chain(schema::STATE_ROLES).chain(experts::ROLES)
            )
        });
        properties.extend(own.as_object().cloned().unwrap_or_default());
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
                "properties": properties
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let (params, of_experts) = (host.params::<Params>()?, host.params::<ExpertParams>()?);
        let n_layers = host.value::<usize>("/params/n_layers")?;
        let names = params.decode.names(host, "/plan/params/decode", n_layers)?;
        let decode = require(host, "/plan/params/decode", &names)?;
        check_caches(host, &decode, "past")?;
        let prompt = prefill_graphs(host, &params, &of_experts.ffn_prefill, decode.len())?;
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
        let mut step = Step::open(host, decode, &rope)?;
        let residual = &step.residual;
        if residual.rows != 1 {
            return Err(Error::graph(format!(
                "graph {:?}: x has {} rows, expected 1 for manifest /plan/params/decode",
                host.graph(residual.graphs[0]).name,
                residual.rows
            )));
        }
        let scored = "the number of experts that the router scores is";
        agree(host, "n_experts", residual.experts, scored)?;
        let mask = bind_mask(host, residual, capacity, window)?;
        let batched = match prompt {
            Some((graphs, _)) => {
                let past = caches_of(host, &graphs)?;
                let mut batched = Step::open(host, graphs, &rope)?;
                let capacity = if past { capacity } else { 0 };
                let mask = bind_mask(host, &batched.residual, capacity, window)?;
                batched.mask = past.then_some(mask);
                Some(batched)
            }
            None => None,
        };
        let jitter = host.value("/params/router_jitter_noise")?.unwrap_or(JITTER);
        let rule = Rule::Sparsemixer { jitter };
        let widest = batched.as_ref().map(|batched| &batched.residual);
        let experts = Experts::open(host, &of_experts, rule, residual, widest)?;
        let mut rows = vec![step.hidden_rows(host)?];
        if let Some(batched) = &batched {
            rows.push(batched.hidden_rows(host)?);
        }
        step.mask = Some(mask);
        let head = host.require_graph("/plan/params/lmhead", &params.lmhead)?;
        let head = Head::open(host, head, rows)?;
        let embedding = host.embedding_for(step.residual.graphs[0])?;
        if head.logits().len < embedding.vocab() {
            return Err(Error::graph(format!(
                "the graphs give {} logits, expected at least {}, one for each row of the embedding \
                 table",
                head.logits().len,
                embedding.vocab()
            )));
        }
        let spans = Spans {
            fill: host.span("fill"),
            commit: host.span("commit"),
            batched: host.span("prefill batched"),
            stepped: host.span("prefill token by token"),
        };
        Ok(Self {
            step,
            batched,
            prefill_min: params.prefill_min.max(1),
            experts,
            head,
            embedding,
            rope,
            state,
            max_ctx,
            prompt: Vec::with_capacity(max_ctx),
            spans,
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
