//! The step of a decoder: one token, or a prompt in chunks, through shards and a head.
//!
//! ```
//! use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
//! use qhx_kit::fill::{CausalMask, Rope};
//! use qhx_kit::state::StateCarrier;
//! use qhx_op::{Host, Result};
//!
//! fn open(host: &mut Host) -> Result<Decoder> {
//!     let graphs = DecoderGraphs::find(host)?;
//!     let state = StateCarrier::new(host, &graphs.groups())?;
//!     graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
//!     let mask = CausalMask::new(state.capacity().unwrap_or(0));
//!     let rope = Rope::from_params(host, "/params")?;
//!     Decoder::builder("my_generate", graphs, state).rope(rope).mask(mask).open(host)
//! }
//! ```
//!
//! A decoder is a [`Generator`]: an op that is one and nothing else gives it back in [`qhx_op::Op::generator`], and one
//! that adds to it names its field in [`qhx_op::inner_generator!`] and writes the calls that differ.
//! A model with two ropes or two kinds of mask adds both, under
//! names of their own; what fills other inputs is a [`Filler`].
//!
//! Graphs with an output `router` have [`crate::experts`] behind them, and the head normalises the residual itself.

mod clusters;
mod declared;
mod draft;
mod draft_graphs;
mod graphs;
mod head;
mod inputs;
mod passes;
mod soft;
mod verify;

use std::any::Any;
use std::time::Instant;

pub use declared::DeclaredDecoder;
pub use graphs::{DecoderGraphs, LayerState};
pub use head::{Head, HiddenRows};
pub use inputs::{Chunk, Filler, GraphVariant, Sight, SoftRows};
pub use soft::{SoftPart, SoftPrompt};

use crate::GraphCosts;
use crate::experts::{ExpertParams, Experts, Residual, Rule, Tensor};
use crate::fill::{CausalMask, Embedding, Rope};
use crate::kernels::all_finite;
use crate::state::StateCarrier;
use draft::{DraftHead, Drafted};
use draft_graphs::DRAFT_HEAD;
use head::Tail;
use inputs::{EmbeddingRows, Masks, RotaryTables, ValidRows};
use passes::{PassCost, PrefillPlan};
use qhx_op::text::{check_room, count_tokens, kind, max_ctx, takes, tokens};
use qhx_op::{
    DType, Error, ErrorCode, Generator, GraphId, Host, OpenInfo, Result, Segment, SnapshotId,
    SpanId, View,
};

/// Settings and parts of a [`Decoder`]. [`Decoder::builder`] makes one.
#[derive(Debug)]
#[must_use]
pub struct DecoderBuilder {
    op: &'static str,
    graphs: DecoderGraphs,
    state: StateCarrier,
    embedding: Option<Embedding>,
    router: Option<Rule>,
    fillers: Vec<Box<dyn Filler>>,
}

impl DecoderBuilder {
    /// The table that rows of `x` come from, instead of [`DecoderGraphs::embedding`].
    pub fn embedding(mut self, embedding: Embedding) -> Self {
        self.embedding = Some(embedding);
        self
    }

    /// Rule by which tokens choose experts, instead of `params.router` of the manifest.
    pub fn router(mut self, rule: Rule) -> Self {
        self.router = Some(rule);
        self
    }

    /// Adds rotary tables.
    pub fn rope(self, rope: Rope) -> Self {
        self.filler(RotaryTables::of(rope))
    }

    /// Adds a causal mask.
    pub fn mask(self, mask: CausalMask) -> Self {
        self.filler(Masks::of(mask))
    }

    /// Adds what fills other inputs.
    pub fn filler(mut self, filler: impl Filler + 'static) -> Self {
        self.fillers.push(Box::new(filler));
        self
    }

    /// Binds everything, and checks that the passes fit each other, the head and the manifest.
    ///
    /// # Errors
    /// When one of these checks fails.
    pub fn open(self, host: &mut Host) -> Result<Decoder> {
        let Self { op, graphs, state, embedding, router, mut fillers } = self;
        let embedding = match embedding {
            Some(embedding) => embedding,
            None => graphs.embedding(host)?,
        };
        let (input_vocab, hidden) = (embedding.vocab(), embedding.hidden());
        let mut rows_of_tokens = EmbeddingRows::of(embedding);
        fillers.push(Box::new(ValidRows::default()));
        let max_ctx = max_ctx(host, state.capacity())?;
        let whole = graphs.whole;
        let mut passes: Vec<Shards> = Vec::with_capacity(graphs.passes.len());
        let mut within = Vec::new();
        for (index, (rows, shards)) in graphs.passes.into_iter().enumerate() {
            state.check_complete(host, index)?;
            let capacity = state.capacity_in(index).unwrap_or(0);
            let like =
                passes.iter().take(whole).position(|pass| index >= whole && pass.rows == rows);
            within.extend(like.map(|like| SmallerContext { like, capacity, pass: index }));
            let begins = begins(host, index, &shards)?;
            let pass = GraphVariant { index, graphs: &shards, rows, begins, capacity };
            rows_of_tokens.bind(host, pass)?;
            let residual = match Residual::is_among(host, &shards) {
                true => {
                    let x = rows_of_tokens.input(index);
                    let x = Tensor { buffer: x.buffer(), dtype: x.dtype() };
                    let shared = like.and_then(|like| passes[like].residual.as_ref());
                    Some(match shared {
                        Some(shared) => Residual::beside(host, shards.clone(), shared)?,
                        None => Residual::open(host, shards.clone(), Some(x))?,
                    })
                }
                false => {
                    for pair in shards.windows(2) {
                        host.chain(pair[0], pair[1])?;
                    }
                    None
                }
            };
            for filler in &mut fillers {
                filler.bind(host, pass)?;
            }
            let tail = match &residual {
                Some(residual) => Tail::after(host, residual)?,
                None => Tail::bind(host, shards[shards.len() - 1], rows)?,
            };
            let writes = shards.iter().rposition(|&graph| state.writes(index, graph));
            let fills = writes.map_or(shards.len(), |last| last + 1);
            let masks_rows = |&graph: &GraphId| {
                !state.replaces(index, graph) || ValidRows::has_inputs(host, graph)
            };
            let only_full = rows > 1 && !shards.iter().all(masks_rows);
            let (graphs, source) = (shards, None);
            passes.push(Shards { graphs, residual, rows, fills, tail, source, only_full, begins });
        }
        let mut drafts = match graphs.draft_head.graphs.is_empty() {
            true => None,
            false => Some(DraftHead::open(host, graphs.draft_head, passes.len(), hidden, &state)?),
        };
        for pass in drafts.iter().flat_map(DraftHead::passes) {
            rows_of_tokens.bind(host, pass)?;
            fillers.iter_mut().try_for_each(|filler| filler.bind(host, pass))?;
        }
        fillers.insert(0, Box::new(rows_of_tokens));
        let experts = experts(host, &passes, router)?;
        let head = match graphs.head {
            Some(graph) => {
                let mut sources = Vec::new();
                for (index, pass) in passes.iter_mut().enumerate() {
                    // Prefill graphs may end where the last state is written.
                    if index == STEP || !matches!(pass.tail, Tail::None) {
                        pass.source = Some(sources.len());
                        sources.push(pass.tail.hidden(host, pass.rows, graph)?);
                    }
                }
                if let Some(drafts) = &mut drafts {
                    sources.iter().try_for_each(|rows| drafts.check_rows(host, rows))?;
                    drafts.add_sources(&mut sources);
                }
                Some(Head::open(host, graph, sources)?)
            }
            None => None,
        };
        if drafts.is_some() && (head.is_none() || experts.is_some()) {
            let what = if experts.is_some() { "experts" } else { "no graph lmhead" };
            return Err(Error::manifest(format!(
                "manifest {DRAFT_HEAD}: the decoder has {what}, expected one whose last graph gives normalised hidden \
                 states, which lmhead makes logits of; leave the drafting head out"
            )));
        }
        let vocab = vocab(host, &passes, head.as_ref())?;
        drafts.iter().try_for_each(|drafts| drafts.check_vocab(host, vocab))?;
        if vocab < input_vocab {
            return Err(Error::graph(format!(
                "the graphs give {vocab} logits, expected at least {input_vocab}, one for each row \
                 of the embedding table"
            )));
        }
        let widest = passes.iter().map(|pass| pass.rows).max().unwrap_or(1);
        for SmallerContext { like, pass, .. } in &within {
            if passes[*pass].gives_logits() != passes[*like].gives_logits() {
                return Err(only_one_gives_logits(host, &passes[*pass], &passes[*like]));
            }
        }
        within.sort_unstable_by_key(|within| within.capacity);
        // Which context a step is in is decided by the position, not by what it costs.
        let plan = PrefillPlan::plan(&costs(host, &passes[..whole], experts.as_ref()), max_ctx);
        Ok(Decoder {
            op,
            passes,
            whole,
            plan,
            within,
            experts,
            head,
            fillers,
            state,
            vocab,
            input_vocab,
            hidden,
            max_ctx,
            chunk: Vec::with_capacity(widest),
            soft: false,
            drafts,
            unkept: None,
            fill_span: host.span("fill"),
            commit_span: host.span("commit"),
        })
    }
}

/// True if the graphs of a pass write caches and read none. One graph among others may do so alone: the last layers of
/// a prompt whose logits are not needed leave their rows and compute nothing from them.
fn begins(host: &Host, pass: usize, graphs: &[GraphId]) -> Result<bool> {
    let reads = graphs
        .iter()
        .any(|&graph| host.graph(graph).inputs.iter().any(|t| t.role.starts_with("past_")));
    let writes =
        |graph: &&GraphId| host.graph(**graph).outputs.iter().any(|t| t.role.starts_with("new_"));
    let blind = graphs.iter().find(writes).filter(|_| !reads);
    if let (STEP, Some(&graph)) = (pass, blind) {
        return Err(Error::graph(format!(
            "graph {:?} gives rows of caches (new_*), and none of a step of one token reads them, expected past_*",
            host.graph(graph).name
        )));
    }
    Ok(blind.is_some())
}

/// The experts between the graphs of the passes: of all of them or of none.
fn experts(host: &mut Host, passes: &[Shards], rule: Option<Rule>) -> Result<Option<Experts>> {
    let Some(step) = &passes[STEP].residual else {
        return match passes.iter().find(|pass| pass.residual.is_some()) {
            Some(pass) => Err(mixed_experts(host, pass, &passes[STEP])),
            None => Ok(None),
        };
    };
    if let Some(pass) = passes.iter().find(|pass| pass.residual.is_none()) {
        return Err(mixed_experts(host, &passes[STEP], pass));
    }
    let wide = passes.iter().filter(|pass| pass.rows > 1);
    let wide = wide.filter_map(|pass| pass.residual.as_ref());
    let widest = wide.max_by_key(|residual| residual.rows);
    let params = host.params::<ExpertParams>()?;
    let rule = rule.map_or_else(|| host.require("/params/router"), Ok)?;
    Experts::open(host, &params, rule, step, widest).map(Some)
}

fn only_one_gives_logits(host: &Host, one: &Shards, other: &Shards) -> Error {
    let name = |pass: &Shards| host.graph(pass.graphs[pass.graphs.len() - 1]).name.clone();
    Error::graph(format!(
        "graphs {:?} and {:?} take {} rows in contexts of two sizes, and only one of them gives y or logits",
        name(one),
        name(other),
        one.rows
    ))
}

fn mixed_experts(host: &Host, with: &Shards, without: &Shards) -> Error {
    let name = |pass: &Shards| host.graph(pass.graphs[0]).name.clone();
    Error::graph(format!(
        "graph {:?} has an output router, and graph {:?} has none; expected experts after the graphs of every number \
         of tokens or of none",
        name(with),
        name(without)
    ))
}

/// Costs of the passes with the experts between their graphs: the bundle's own figures if it has one for each graph,
/// else a rule.
fn costs(host: &Host, passes: &[Shards], experts: Option<&Experts>) -> Vec<PassCost> {
    let graphs = passes.iter().flat_map(|pass| pass.graphs.iter().copied());
    let costs = GraphCosts::of(host, graphs.chain(experts.into_iter().flat_map(Experts::graphs)));
    let of = |pass: &Shards| {
        let layers = pass.residual.as_ref().map_or(0, |residual| residual.layers);
        let layer = experts.map_or(0.0, |experts| experts.cost(host, costs, pass.rows));
        let sum = |graphs: &[GraphId], layers: usize| {
            costs.sum(host, graphs, pass.rows) + layer * layers as f64
        };
        PassCost {
            rows: pass.rows,
            only_full: pass.only_full,
            begins: pass.begins,
            logits: pass.gives_logits(),
            // Nobody asks for what the experts behind the last of these graphs add.
            fill: sum(&pass.graphs[..pass.fills], layers.min(pass.fills.saturating_sub(1))),
            whole: sum(&pass.graphs, layers),
        }
    };
    passes.iter().map(of).collect()
}

/// Number of logits, the same in every pass that gives some.
fn vocab(host: &Host, passes: &[Shards], head: Option<&Head>) -> Result<usize> {
    if let Some(head) = head {
        return Ok(head.logits().len);
    }
    let step = &passes[STEP];
    let Some(logits) = step.tail.logits(0) else {
        host.output(step.graphs[step.graphs.len() - 1], "logits")?;
        return Ok(0);
    };
    for pass in passes {
        match pass.tail.logits(0) {
            Some(view) if view.len != logits.len => {
                return Err(Error::graph(format!(
                    "the graphs that take {} tokens give {} logits, expected {} as those that take \
                     one",
                    pass.rows, view.len, logits.len
                )));
            }
            _ => {}
        }
    }
    Ok(logits.len)
}

/// The shards that take a number of tokens in one step.
#[derive(Debug)]
struct Shards {
    graphs: Vec<GraphId>,
    /// Residual that experts add to between the graphs.
    residual: Option<Residual>,
    rows: usize,
    /// Graphs up to the last that writes state: all that a token needs whose logits nobody wants.
    fills: usize,
    tail: Tail,
    /// Number of its rows among those that the head reads.
    source: Option<usize>,
    /// A state that is replaced as a whole would take in the rows after the last token, too: no graph has an input for
    /// which rows are tokens.
    only_full: bool,
    /// They take the first tokens of a text alone.
    begins: bool,
}

impl Shards {
    fn gives_logits(&self) -> bool {
        self.source.is_some() || self.tail.logits(0).is_some()
    }
}

/// A pass that does in a smaller context what another does in the whole one.
#[derive(Debug, Clone, Copy)]
struct SmallerContext {
    /// Number of that other one.
    like: usize,
    /// Positions that its caches hold.
    capacity: usize,
    /// Its number.
    pass: usize,
}

/// The tokens of a step in the prompt that is being consumed; of one that is decoded, the default.
#[derive(Debug, Clone, Copy, Default)]
struct PromptSpan<'a> {
    /// Index of the first.
    index: usize,
    soft: &'a [SoftRows<'a>],
    /// What they see of each other.
    sight: Sight,
}

/// The pass that takes one token.
const STEP: usize = 0;

/// A decoder over bound graphs. Its state is as it was after the last step that succeeded.
#[derive(Debug)]
pub struct Decoder {
    op: &'static str,
    /// The one-token pass, then the prefill passes, the narrowest first, and then those of smaller contexts. The number
    /// of a pass is that of its group in the state carrier.
    passes: Vec<Shards>,
    /// Number of passes that are not of smaller contexts.
    whole: usize,
    /// Which of these prompts go through.
    plan: PrefillPlan,
    /// The passes of smaller contexts, the smallest first.
    within: Vec<SmallerContext>,
    experts: Option<Experts>,
    head: Option<Head>,
    fillers: Vec<Box<dyn Filler>>,
    state: StateCarrier,
    vocab: usize,
    input_vocab: usize,
    /// Values of a row of `x`.
    hidden: usize,
    max_ctx: usize,
    /// Tokens of the chunk under way; holds as many as the widest pass takes.
    chunk: Vec<u32>,
    /// Some of them are soft.
    soft: bool,
    drafts: Option<DraftHead>,
    /// The pass that ran the tokens of `chunk`, none of which is accepted yet.
    unkept: Option<(usize, u64)>,
    fill_span: SpanId,
    commit_span: SpanId,
}

/// A prompt is of text only: an op whose prompts hold more writes [`Generator::prefill`] over
/// [`Decoder::prefill_soft`]. What was consumed before a failure stays.
impl Generator for Decoder {
    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.state.reset(host);
        if let Some(drafts) = &mut self.drafts {
            drafts.truncate(host, 0);
        }
        Ok(())
    }

    fn position(&self) -> usize {
        self.state.position()
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        if let Some(media) = segments.iter().find(|one| takes(host.op(), one) == Some(true)) {
            return Err(Error::unsupported(&format!(
                "{}: prefill of {}: the op places it, but leaves prefill to the kit, which takes text only; write \
                 Generator::prefill over Decoder::prefill_soft",
                self.op,
                kind(media)
            )));
        }
        let total = count_tokens(self.op, segments)?;
        self.consume(host, total, tokens(segments), &[])
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        check_room(self.state.position(), 1, self.max_ctx)?;
        self.chunk.clear();
        self.chunk.push(token);
        last(self.step(host, STEP, PromptSpan::default(), true)?)
    }

    fn verify(&mut self, host: &mut Host, tokens: &[u32]) -> Result<()> {
        self.verify_step(host, tokens)
    }

    fn row_logits(&mut self, host: &mut Host, row: usize) -> Result<View> {
        self.verified_logits(host, row)
    }

    fn accept(&mut self, host: &mut Host, count: usize) -> Result<()> {
        self.accept_verified(host, count)
    }

    fn drafting(&mut self, _: &mut Host, on: bool) -> Result<()> {
        self.draft_head()?.switch(on)
    }

    fn draft(&mut self, host: &mut Host, token: u32) -> Result<View> {
        let position = self.state.position();
        check_room(position, 1, self.max_ctx)?;
        self.draft_head()?;
        let Self { drafts: Some(drafts), head: Some(head), fillers, state, .. } = self else {
            return Err(Error::unsupported("a drafting head without the graph lmhead"));
        };
        match drafts.draft(host, fillers, state, token)? {
            Drafted::Hidden { source, row } => head.run(host, source, row),
            Drafted::Logits(logits) => Ok(logits),
        }
    }

    fn truncate(&mut self, host: &mut Host, position: usize) -> Result<()> {
        self.state.truncate(position)?;
        if let Some(drafts) = &mut self.drafts {
            drafts.truncate(host, position);
        }
        Ok(())
    }

    fn snapshot(&mut self, host: &mut Host) -> Result<SnapshotId> {
        let id = self.state.snapshot(host);
        if let Some(drafts) = &mut self.drafts {
            drafts.save(host, id, self.state.position());
        }
        Ok(id)
    }

    fn restore(&mut self, host: &mut Host, id: SnapshotId) -> Result<()> {
        self.state.restore(host, id)?;
        if let Some(drafts) = &mut self.drafts {
            drafts.restore(host, id, self.state.position());
        }
        Ok(())
    }

    fn drop_snapshot(&mut self, _: &mut Host, id: SnapshotId) {
        self.state.drop_snapshot(id);
        if let Some(drafts) = &mut self.drafts {
            drafts.drop_saved(id);
        }
    }

    /// With the state of the drafting head while it is on.
    fn export_state(&mut self, host: &mut Host) -> Result<Vec<u8>> {
        let mut bytes = self.state.export(host)?;
        if let Some(drafts) = &mut self.drafts {
            drafts.export(host, &mut self.fillers, self.state.position(), &mut bytes)?;
        }
        Ok(bytes)
    }

    fn import_state(&mut self, host: &mut Host, position: usize, state: &[u8]) -> Result<()> {
        let (state, exported) = draft::split(state)?;
        self.state.import(host, position, state)?;
        if let Some(drafts) = &mut self.drafts {
            drafts.import(host, position, exported.as_ref());
        }
        Ok(())
    }
}

impl Decoder {
    /// A decoder of `graphs` with `state`, which has paired the tensors of
    /// [`DecoderGraphs::groups`]. `op` is the op's name, for messages.
    pub fn builder(op: &'static str, graphs: DecoderGraphs, state: StateCarrier) -> DecoderBuilder {
        DecoderBuilder { op, graphs, state, embedding: None, router: None, fillers: Vec::new() }
    }

    /// Everything that an op of text declares about itself. Draft tokens are verified wherever the graphs can
    /// ([`Decoder::verification`]): an op whose own `decode` computes other logits than [`Decoder::decode`] writes
    /// `verify`, `row_logits` and `accept`, too, or opts out with
    /// [`Verification::refused`](qhx_op::Verification::refused).
    pub fn info(&self) -> OpenInfo {
        let mut info = OpenInfo {
            vocab: self.vocab,
            max_ctx: self.max_ctx,
            input_vocab: self.input_vocab,
            drafts: self.drafts.is_some(),
            verification: self.verification(),
            ..OpenInfo::default()
        };
        self.state.describe(&mut info);
        info
    }

    /// Values of a row of its input `x`.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Rows of the embedding table.
    pub fn input_vocab(&self) -> usize {
        self.input_vocab
    }

    /// The first filler of a type, such as one that has to know what a prompt holds before the prompt
    /// is consumed.
    pub fn filler_mut<F: Filler>(&mut self) -> Option<&mut F> {
        self.fillers.iter_mut().find_map(|filler| {
            let filler: &mut dyn Any = &mut **filler;
            filler.downcast_mut()
        })
    }

    /// State that it carries from step to step.
    pub fn state(&self) -> &StateCarrier {
        &self.state
    }

    /// Mutable state that it carries from step to step.
    pub fn state_mut(&mut self) -> &mut StateCarrier {
        &mut self.state
    }

    /// Consumes a prompt in which `soft` rows stand instead of those of some tokens; returns the logits of the
    /// last token. What was consumed before a failure stays.
    ///
    /// # Errors
    /// When rows are not as wide as `x`, hold NaN or infinite values, or stand beyond the prompt: faults of who made
    /// them, and not of the prompt.
    pub fn prefill_soft(
        &mut self,
        host: &mut Host,
        prompt: &[u32],
        soft: &[SoftRows<'_>],
    ) -> Result<View> {
        for SoftRows { first, values, .. } in soft {
            let rows = values.len() / self.hidden.max(1);
            let fits = first.checked_add(rows).is_some_and(|end| end <= prompt.len());
            if !fits || rows * self.hidden != values.len() {
                let message = format!(
                    "{}: {} values of soft tokens from token {first} on, expected rows of {} for some of the {} tokens",
                    self.op,
                    values.len(),
                    self.hidden,
                    prompt.len()
                );
                return Err(Error::new(ErrorCode::INTERNAL, message));
            }
            if !all_finite(bytemuck::cast_slice(values), DType::F32) {
                let message = format!(
                    "{}: the soft rows from token {first} on have NaN or infinite values, expected numbers; the encoder \
                     that made them has overflowed, or its weights are damaged",
                    self.op
                );
                return Err(Error::new(ErrorCode::EXECUTE, message));
            }
        }
        if prompt.is_empty() {
            return Err(Error::prompt("the prompt has no tokens"));
        }
        self.consume(host, prompt.len(), prompt.iter().copied(), soft)
    }

    /// Consumes `total` tokens of `prompt`.
    fn consume(
        &mut self,
        host: &mut Host,
        total: usize,
        mut prompt: impl Iterator<Item = u32>,
        soft: &[SoftRows<'_>],
    ) -> Result<View> {
        check_room(self.state.position(), total, self.max_ctx)?;
        let mut done = 0;
        loop {
            let (pass, count, sight) = self.next(done, total, soft)?;
            self.chunk.clear();
            self.chunk.extend(prompt.by_ref().take(count));
            let span = PromptSpan { index: done, soft, sight };
            let view = self.step(host, pass, span, done + count == total)?;
            done += count;
            host.progress(done, total);
            if done == total {
                return last(view);
            }
        }
    }

    /// The pass for the next step of a prompt, how many tokens it takes, and what they see of each other.
    fn next(
        &self,
        done: usize,
        total: usize,
        soft: &[SoftRows<'_>],
    ) -> Result<(usize, usize, Sight)> {
        let begins = self.state.position() == 0;
        let mut wholes = soft.iter().filter(|rows| rows.together > 0 && rows.first >= done);
        let Some(whole) = wholes.next() else {
            let (pass, count) = self.plan.next(total - done, begins);
            return Ok((pass, count, Sight::Causal));
        };
        if whole.first > done {
            let (pass, count) = self.plan.next(whole.first - done, begins);
            return Ok((pass, count, Sight::Causal));
        }
        let count = whole.together.min(total - done);
        let pass = self.plan.taking(count, done + count == total).ok_or_else(|| {
            Error::prompt(format!(
                "{count} tokens that see each other, as those of an image do, so that one graph has to take them all; the widest \
                 takes {}; forge the bundle with --prefill {count}, or a number above it",
                self.plan.widest()
            ))
        })?;
        Ok((pass, count, if whole.prefix { Sight::Prefix } else { Sight::Together }))
    }

    /// Consumes tokens in steps of one pass, whatever another would cost, and calls `read` after each step with the
    /// number of the pass that ran, that of a smaller context where one holds the step, and the tokens that it took:
    /// for outputs that are no logits and that not all graphs have. No logits are made.
    ///
    /// # Errors
    /// When there is no such pass for any number of tokens, the context is full, a graph fails, and any error of
    /// `read`.
    pub fn consume_reading(
        &mut self,
        host: &mut Host,
        pass: usize,
        tokens: &[u32],
        mut read: impl FnMut(&mut Host, usize, usize) -> Result<()>,
    ) -> Result<()> {
        check_room(self.state.position(), tokens.len(), self.max_ctx)?;
        let shards = self.passes[..self.whole].get(pass);
        let Some(rows) = shards.filter(|one| !one.only_full && !one.begins).map(|one| one.rows)
        else {
            return Err(Error::unsupported(&format!("steps of a few tokens by pass {pass}")));
        };
        for tokens in tokens.chunks(rows) {
            self.chunk.clear();
            self.chunk.extend_from_slice(tokens);
            let pass = self.smallest(pass);
            self.run(host, pass, PromptSpan::default(), true)?;
            read(host, pass, tokens.len())?;
            self.commit(host, pass, tokens.len())?;
        }
        Ok(())
    }

    /// Runs `self.chunk`, which is the span of a prompt, through a pass and commits the state last, so that a failure
    /// leaves it as it was. With `logits`, returns those of the last token; without, graphs that write no state are
    /// left out.
    fn step(
        &mut self,
        host: &mut Host,
        pass: usize,
        span: PromptSpan<'_>,
        logits: bool,
    ) -> Result<Option<View>> {
        let pass = self.smallest(pass);
        self.run(host, pass, span, logits)?;
        let row = self.chunk.len() - 1;
        let view = if logits { self.logits_of(host, pass, row)? } else { None };
        self.commit(host, pass, self.chunk.len())?;
        Ok(view)
    }

    /// The pass that does the same as `pass` in the smallest context that holds `self.chunk`.
    fn smallest(&self, pass: usize) -> usize {
        let end = self.state.position() + self.chunk.len();
        let holds = |within: &&SmallerContext| within.like == pass && end <= within.capacity;
        self.within.iter().find(holds).map_or(pass, |within| within.pass)
    }

    /// Fills the inputs and executes the graphs for `self.chunk`; the state stays as it is. Without `logits`, graphs
    /// that write no state are left out.
    fn run(
        &mut self,
        host: &mut Host,
        pass: usize,
        PromptSpan { index, soft, sight }: PromptSpan<'_>,
        logits: bool,
    ) -> Result<()> {
        // What was not accepted until now is dropped.
        self.unkept = None;
        let start = Instant::now();
        self.state.arrange(host, pass);
        let Shards { graphs, residual, fills, .. } = &self.passes[pass];
        let position = self.state.position();
        let track = self.state.track();
        let chunk = Chunk { pass, tokens: &self.chunk, position, track, index, soft, sight };
        self.fillers.iter_mut().try_for_each(|filler| filler.fill(host, chunk))?;
        host.end(self.fill_span, start);
        let drafting = self.drafts.as_ref().is_some_and(DraftHead::is_on);
        self.soft = drafting && chunk.soft_rows(self.hidden).next().is_some();
        let graphs = if logits || drafting { graphs.as_slice() } else { &graphs[..*fills] };
        let (Some(experts), Some(residual)) = (&mut self.experts, residual) else {
            return graphs.iter().try_for_each(|&graph| host.execute(graph));
        };
        for (layer, &graph) in graphs.iter().enumerate() {
            host.execute(graph)?;
            let wanted = logits || layer + 1 < graphs.len();
            if wanted && layer < residual.layers {
                experts.add(host, residual, layer, self.chunk.len(), position)?;
            }
        }
        Ok(())
    }

    /// Logits of a row of what a pass has just given.
    fn logits_of(&mut self, host: &mut Host, pass: usize, row: usize) -> Result<Option<View>> {
        let Shards { tail, source, .. } = &self.passes[pass];
        match (&mut self.head, *source) {
            (Some(head), Some(source)) => head.run(host, source, row).map(Some),
            _ => Ok(tail.logits(row)),
        }
    }

    /// Takes the first `rows` rows of what a pass has just given into the state.
    fn commit(&mut self, host: &mut Host, pass: usize, rows: usize) -> Result<()> {
        let start = Instant::now();
        let position = self.state.position();
        self.state.commit(host, pass, rows)?;
        host.end(self.commit_span, start);
        if let Some(drafts) = &mut self.drafts {
            let hidden = match self.passes[pass].tail {
                Tail::Hidden(hidden) => Some((hidden, self.soft)),
                _ => None,
            };
            drafts.consumed(host, &mut self.fillers, position, &self.chunk[..rows], hidden);
        }
        Ok(())
    }

    fn draft_head(&mut self) -> Result<&mut DraftHead> {
        let missing = || Error::unsupported("a drafting head (plan.params.draft_head)");
        self.drafts.as_mut().ok_or_else(missing)
    }
}

fn last(view: Option<View>) -> Result<View> {
    view.ok_or_else(|| Error::graph("the last step gave no logits"))
}
