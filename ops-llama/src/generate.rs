//! `llama_generate`: decoding with a KV cache, prompts in chunks.

use std::time::Instant;

use qhx_op::fill::{Embedding, Rope};
use qhx_op::state::StateCarrier;
use qhx_op::{
    Error, GraphId, Host, Modality, Op, OpDescription, OpInfo, Port, Result, Segment, SnapshotId,
    SpanId, Task, View, schema,
};
use serde::Deserialize;
use serde_json::json;

use crate::common::{OneOrMany, count_tokens, open_embedding, rope, rows_of, tokens};
use crate::pass::{Pass, Tail};

const NAME: &str = "llama_generate";
/// Roles of tensors that are no state.
const ROLES: [&str; 6] = ["x", "y", "cos", "sin", "cmask", "logits"];

#[derive(Debug, Deserialize)]
struct Params {
    decode: OneOrMany,
    prefill: Option<OneOrMany>,
    lmhead: Option<String>,
}

/// The graph from hidden row to logits.
#[derive(Debug)]
struct Head {
    graph: GraphId,
    input: Port,
    logits: View,
    /// Pass and row whose hidden row it reads.
    reads: (usize, usize),
}

/// Text generation for Llama-like decoders.
#[derive(Debug)]
pub struct Generate {
    /// The one-token pass, and then those for prompts, the narrowest first.
    passes: Vec<Pass>,
    head: Option<Head>,
    embedding: Embedding,
    rope: Rope,
    state: StateCarrier,
    vocab: usize,
    max_ctx: usize,
    /// Tokens of the chunk under way; holds as many as the widest pass takes.
    chunk: Vec<u32>,
    fill_span: SpanId,
    commit_span: SpanId,
}

/// The pass that takes one token.
const STEP: usize = 0;

impl Generate {
    /// Runs `self.chunk` through a pass and commits the state last, so that a failure leaves it as
    /// it was. With `logits`, answers with those of the last token.
    fn step(&mut self, host: &mut Host, pass: usize, logits: bool) -> Result<Option<View>> {
        let start = Instant::now();
        let position = self.state.position();
        self.passes[pass].fill(host, &self.embedding, &mut self.rope, &self.chunk, position)?;
        host.end(self.fill_span, start);
        self.passes[pass].execute(host)?;
        let row = self.chunk.len() - 1;
        let view = match &mut self.head {
            _ if !logits => None,
            Some(head) => {
                head.read(host, &self.passes, (pass, row))?;
                host.execute(head.graph)?;
                Some(head.logits)
            }
            None => self.passes[pass].logits(row),
        };
        let start = Instant::now();
        self.state.commit(host, self.passes[pass].group, self.chunk.len())?;
        host.end(self.commit_span, start);
        Ok(view)
    }

    /// The pass for the next chunk of `left` tokens: of those for prompts, the narrowest that takes
    /// them all, else the widest. So a prompt needs the fewest executions, and they pad the least.
    fn choose(&self, left: usize) -> usize {
        if left == 1 || self.passes.len() == 1 {
            return STEP;
        }
        let prompts = 1..self.passes.len();
        let fits = prompts.clone().find(|&pass| self.passes[pass].rows >= left);
        fits.unwrap_or(prompts.end - 1)
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

    fn last(view: Option<View>) -> Result<View> {
        view.ok_or_else(|| Error::graph("the last step gave no logits"))
    }
}

impl Head {
    /// Binds the head to a row of a pass. Nothing is copied.
    fn read(&mut self, host: &mut Host, passes: &[Pass], row: (usize, usize)) -> Result<()> {
        if self.reads == row {
            return Ok(());
        }
        if let Tail::Hidden(buffer, bytes) = passes[row.0].tail {
            host.bind(self.graph, self.input, buffer, row.1 * bytes)?;
            self.reads = row;
        }
        Ok(())
    }

    fn open(host: &mut Host, graph: GraphId, passes: &[Pass]) -> Result<Self> {
        let input = Port::Input(host.graph(graph).require_input("x")?);
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let dtype = host.require_float(graph, port)?;
        let len = host.tensor(graph, port).elements();
        let need = host.tensor(graph, input).byte_len();
        let buffer = host.allocate_for(graph, port)?;
        for pass in passes {
            match pass.tail {
                Tail::Hidden(_, bytes) if bytes == need => {}
                Tail::Hidden(_, bytes) => {
                    return Err(Error::graph(format!(
                        "the graphs that take {} tokens give rows of {bytes} bytes, but graph \
                         {:?} takes {} of {need} bytes",
                        pass.rows,
                        host.graph(graph).name,
                        host.tensor(graph, input)
                    )));
                }
                _ => {
                    return Err(Error::graph(format!(
                        "the graphs that take {} tokens have no output y, which graph {:?} \
                         (manifest /plan/params/lmhead) makes logits of",
                        pass.rows,
                        host.graph(graph).name
                    )));
                }
            }
        }
        let logits = View { buffer, dtype, offset: 0, len };
        let mut head = Self { graph, input, logits, reads: (usize::MAX, 0) };
        head.read(host, passes, (STEP, 0))?;
        Ok(head)
    }
}

/// Cuts a list of graphs into runs of the same number of rows, the narrowest first. Shards of one
/// pass stand one after the other.
fn passes(host: &Host, graphs: Vec<GraphId>) -> Result<Vec<(usize, Vec<GraphId>)>> {
    let mut found: Vec<(usize, Vec<GraphId>)> = Vec::new();
    for graph in graphs {
        let (rows, _) = rows_of(host, graph)?;
        match found.iter_mut().find(|(have, _)| *have == rows) {
            Some((_, shards)) => shards.push(graph),
            None => found.push((rows, vec![graph])),
        }
    }
    found.sort_by_key(|(rows, _)| *rows);
    Ok(found)
}

fn check_layers(state: &StateCarrier, layers: usize) -> Result<()> {
    for layer in 0..layers {
        for role in [format!("k_{layer}"), format!("v_{layer}")] {
            if !state.has_cache(&role) {
                return Err(Error::graph(format!(
                    "layer {layer}: the decode graphs have no past_{role} with new_{role}; \
                     expected a cache for each of the manifest's {layers} layers (params.n_layers)"
                )));
            }
        }
    }
    Ok(())
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for Llama-like decoders (Llama, Mistral, Qwen2, Qwen3)"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["decode"],
                "properties": {
                    "decode": schema::graphs("Graph that takes one token, or its shards in order."),
                    "prefill": schema::graphs(
                        "Graphs that take several tokens of a prompt. Those with as many rows of x \
                         are the shards of one step, in order; several numbers of rows may be there."
                    ),
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
        let decode = params.decode.graphs(host, "/plan/params/decode")?;
        let (rows, hidden) = rows_of(host, decode[0])?;
        if rows != 1 {
            return Err(Error::graph(format!(
                "graph {:?}: x has {rows} rows, expected 1 for manifest /plan/params/decode; name \
                 graphs that take several tokens in /plan/params/prefill",
                host.graph(decode[0]).name
            )));
        }
        let mut groups = vec![decode];
        if let Some(prefill) = &params.prefill {
            let graphs = prefill.graphs(host, "/plan/params/prefill")?;
            // A one-row graph among them would do what decode does.
            let wide = passes(host, graphs)?.into_iter().filter(|(rows, _)| *rows > 1);
            groups.extend(wide.map(|(_, graphs)| graphs));
        }
        let embedding = open_embedding(host, groups[STEP][0], hidden)?;
        let slices: Vec<_> = groups.iter().map(Vec::as_slice).collect();
        let state = StateCarrier::new(host, &slices)?;
        for group in 0..groups.len() {
            state.check_complete(host, group)?;
        }
        if let Some(layers) = host.value::<usize>("/params/n_layers")? {
            check_layers(&state, layers)?;
        }
        let capacity = state.capacity().unwrap_or(0);
        let max_ctx = match (state.capacity(), host.value::<usize>("/params/max_ctx")?) {
            (Some(capacity), Some(said)) if said > capacity => {
                return Err(Error::graph(format!(
                    "the manifest's params.max_ctx is {said}, but the KV cache of the decode \
                     graphs holds {capacity} rows"
                )));
            }
            (capacity, said) => said.or(capacity).unwrap_or(usize::MAX),
        };
        let rope = rope(host, &groups.concat())?;
        let mut passes = groups
            .iter()
            .enumerate()
            .map(|(group, graphs)| Pass::open(host, group, graphs, &embedding, &rope, capacity))
            .collect::<Result<Vec<_>>>()?;
        let head = params
            .lmhead
            .map(|name| host.require_graph("/plan/params/lmhead", &name))
            .transpose()?
            .map(|graph| Head::open(host, graph, &passes))
            .transpose()?;
        let vocab = match (&head, passes[STEP].tail) {
            (Some(head), _) => head.logits.len,
            (None, Tail::Logits { len, .. }) => len,
            (None, _) => {
                let last = groups[STEP][groups[STEP].len() - 1];
                host.graph(last).require_output("logits")?;
                0
            }
        };
        if vocab < embedding.vocab() {
            return Err(Error::graph(format!(
                "the graphs give {vocab} logits, expected at least {}, one for each row of the \
                 embedding table",
                embedding.vocab()
            )));
        }
        if head.is_none() {
            for pass in &mut passes {
                match pass.tail {
                    Tail::Logits { len, .. } if len != vocab => {
                        return Err(Error::graph(format!(
                            "the graphs that take {} tokens give {len} logits, expected {vocab} \
                             as those that take one",
                            pass.rows
                        )));
                    }
                    Tail::Hidden(..) => pass.tail = Tail::None,
                    _ => {}
                }
            }
        }
        let widest = passes.iter().map(|p| p.rows).max().unwrap_or(1);
        let fill_span = host.span("fill");
        let commit_span = host.span("commit");
        Ok(Self {
            passes,
            head,
            embedding,
            rope,
            state,
            vocab,
            max_ctx,
            chunk: Vec::with_capacity(widest),
            fill_span,
            commit_span,
        })
    }

    fn info(&self) -> OpInfo {
        let mut info = OpInfo { vocab: self.vocab, max_ctx: self.max_ctx, ..OpInfo::default() };
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
        let total = count_tokens(NAME, segments)?;
        self.check_room(total)?;
        let mut prompt = tokens(segments);
        let mut done = 0;
        loop {
            let mut left = total - done;
            let mut pass = self.choose(left);
            if left > 1 && left <= self.passes[pass].rows && !self.gives_logits(pass) {
                // The last token goes through a graph that gives logits.
                left -= 1;
                pass = self.choose(left);
            }
            let count = left.min(self.passes[pass].rows);
            self.chunk.clear();
            self.chunk.extend(prompt.by_ref().take(count));
            done += count;
            let view = self.step(host, pass, done == total)?;
            host.progress(done, total);
            if done == total {
                return Self::last(view);
            }
        }
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        self.check_room(1)?;
        self.chunk.clear();
        self.chunk.push(token);
        Self::last(self.step(host, STEP, true)?)
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

impl Generate {
    fn gives_logits(&self, pass: usize) -> bool {
        self.head.is_some() || self.passes[pass].logits(0).is_some()
    }
}
