//! `llama_embed_sharded`: an encoder in chained parts.

use std::time::Instant;

use qhx_kit::fill::{Embedding, PaddingMask, Rope, RopeTables};
use qhx_kit::{GraphCosts, OneOrMany, schema};
use qhx_op::text::{count_tokens, tokens};
use qhx_op::{
    BufferId, DType, Encoder, Error, GraphId, GraphInfo, Host, Modality, Op, OpDescription,
    OpenInfo, Packing, Result, Segment, SpanId, Task, TensorInfo, View,
};
use serde::Deserialize;
use serde_json::json;

use crate::embeddings::Rows;
use crate::modules::Declared;
use crate::of_tokens::{self, TokenHeads};
use crate::pooling::{Pooler, Poolings};

const NAME: &str = "llama_embed_sharded";
/// The names of [`Pooling`](crate::pooling::Pooling).
const POOLINGS: [&str; 6] = ["mean", "last", "cls", "max", "mean_sqrt_len", "weighted_mean"];
const BUCKETS: &str = "/plan/params/buckets";
const LOCAL: &str = "/params/local";
const LOCAL_MASK: &str = "cmask_local";

#[derive(Debug, Deserialize)]
struct Params {
    parts: OneOrMany,
    buckets: Option<OneOrMany>,
    #[serde(default)]
    causal: bool,
    #[serde(default)]
    pooling: Poolings,
    #[serde(default = "yes")]
    normalize: bool,
    #[serde(default)]
    modules: Vec<Declared>,
    #[serde(default)]
    scores: usize,
    #[serde(default)]
    of_tokens: of_tokens::Declared,
}

fn yes() -> bool {
    true
}

/// `params.local` of the manifest: layers that see a window, besides their rope.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Local {
    /// Positions before and after its own that a token sees.
    reach: usize,
}

/// Inputs that are filled for a model's layers, by kind: layers that see a whole text, and layers that see a window.
#[derive(Debug)]
struct Kinds {
    /// One of each kind.
    ropes: Vec<Rope>,
    causal: bool,
    local: Option<Local>,
}

impl Kinds {
    fn open(host: &Host, causal: bool) -> Result<Self> {
        let local: Option<Local> = host.value(LOCAL)?;
        let mut ropes = vec![Rope::from_params(host, "/params")?];
        if local.is_some() {
            ropes.push(Rope::from_params(host, LOCAL)?.named("cos_local", "sin_local"));
        }
        Ok(Self { ropes, causal, local })
    }

    /// Binds the masks of graphs over `length` positions.
    fn masks(
        &self,
        host: &mut Host,
        graphs: &[GraphId],
        length: usize,
    ) -> Result<Vec<PaddingMask>> {
        let mut masks = vec![PaddingMask::bind_all(host, graphs, length, self.causal)?];
        if let Some(Local { reach }) = self.local {
            masks.push(PaddingMask::bind_local(host, graphs, LOCAL_MASK, length, reach)?);
        }
        masks.retain(|mask| !mask.is_empty());
        Ok(masks)
    }
}

/// One vector for a text.
#[derive(Debug)]
pub struct EmbedSharded {
    /// The shortest first.
    buckets: Vec<Bucket>,
    packing: Packing,
    rows: Rows,
    kinds: Kinds,
    pooler: Pooler,
    width: usize,
    /// Values are scores of the task score, not those of vectors.
    scores: bool,
    /// The text's vector, and values of its tokens behind it; none where there are no such.
    tokens_out: Option<BufferId>,
    token_heads: TokenHeads,
    /// The vectors of as many texts as fit into one execution, f32 `[…, width]`.
    vectors: BufferId,
    /// Tokens of the texts that go through the graphs, one text behind the other.
    tokens: Vec<u32>,
    /// Number of tokens of each text.
    lengths: Vec<usize>,
    /// From which of them on a text is the second of a pair.
    second: usize,
    fill_span: SpanId,
    pool_span: SpanId,
}

/// The whole encoder for texts of up to `length` tokens.
#[derive(Debug)]
struct Bucket {
    length: usize,
    /// With the names of their times.
    parts: Vec<(GraphId, SpanId)>,
    masks: Vec<PaddingMask>,
    /// One for each kind of layers.
    tables: Vec<RopeTables>,
    /// Input of the first part, `[length, hidden]`.
    x: (BufferId, DType),
    /// Output of the last part, `[length, width]`.
    y: View,
    width: usize,
}

impl Bucket {
    /// Binds the graphs of one length, in order, to each other.
    fn open(host: &mut Host, graphs: &[GraphId], rows: &Rows, kinds: &mut Kinds) -> Result<Self> {
        let (first, last) = (graphs[0], graphs[graphs.len() - 1]);
        let input = host.input(first, "x")?;
        let (length, _) = host.rows_of(first, input)?;
        rows.tokens().check_rows(host, first, input, length)?;
        rows.check_length(length)?;
        let View { buffer: x, dtype: x_dtype, .. } = host.view_for(first, input)?;

        // The rows go from part to part in buffers that are bound at both ends; a part may write
        // where the part before its own predecessor wrote.
        let mut earlier = None;
        let mut current = x;
        for pair in graphs.windows(2) {
            let (output, input) = host.check_chain(pair[0], pair[1])?;
            let bytes = host.tensor(pair[0], output).byte_len();
            let buffer = match earlier.filter(|&b| host.len(b) == bytes) {
                Some(buffer) => buffer,
                None => host.allocate(bytes)?,
            };
            host.bind(pair[0], output, buffer, 0)?;
            host.bind(pair[1], input, buffer, 0)?;
            // The first input is filled before part 0 runs, so it takes part too.
            earlier = Some(current);
            current = buffer;
        }

        let output = host.output(last, "y")?;
        let tensor = host.tensor(last, output);
        let width = tensor.width();
        if tensor.elements() != length * width {
            let what = format!("expected {length} rows, one for each position of the first part");
            return Err(host.misfit(last, output, what));
        }
        let y = host.view_for(last, output)?;

        // The positions of a text that is alone; they stay until several share the graphs.
        let mut tables = Vec::with_capacity(kinds.ropes.len());
        for rope in &mut kinds.ropes {
            let mut bound = rope.bind_all(host, graphs, length)?;
            bound.fill(host, rope, 0);
            tables.push(bound);
        }
        let masks = kinds.masks(host, graphs, length)?;
        if masks.is_empty() {
            return Err(Error::graph(format!(
                "graph {:?} has no input cmask, so padding of shorter texts could not be hidden; \
                 if the graphs call it otherwise, say so in plan.params.tensors",
                host.graph(first).name
            )));
        }
        let span = |(index, &graph)| (graph, host.span(&format!("part {index}")));
        let parts = graphs.iter().enumerate().map(span).collect();
        Ok(Self { length, parts, masks, tables, x: (x, x_dtype), y, width })
    }

    fn graphs(&self) -> impl Iterator<Item = GraphId> {
        self.parts.iter().map(|(graph, _)| *graph)
    }
}

/// The graphs of each length, the shortest first. Graphs of `buckets` with as many rows of `x` are the parts of one
/// encoder.
fn by_length(host: &Host, params: &Params) -> Result<Vec<Vec<GraphId>>> {
    let rows =
        |graph: GraphId| -> Result<usize> { Ok(host.rows_of(graph, host.input(graph, "x")?)?.0) };
    let parts = params.parts.graphs(host, "/plan/params/parts")?;
    let mut lengths = vec![(rows(parts[0])?, parts)];
    if let Some(buckets) = &params.buckets {
        for graph in buckets.graphs(host, BUCKETS)? {
            let length = rows(graph)?;
            if length >= lengths[0].0 {
                return Err(Error::graph(format!(
                    "manifest {BUCKETS}: graph {:?} takes {length} rows, expected fewer than the {} of \
                     plan.params.parts",
                    host.graph(graph).name,
                    lengths[0].0
                )));
            }
            match lengths.iter_mut().find(|(have, _)| *have == length) {
                Some((_, parts)) => parts.push(graph),
                None => lengths.push((length, vec![graph])),
            }
        }
    }
    lengths.sort_by_key(|(length, _)| *length);
    Ok(lengths.into_iter().map(|(_, graphs)| graphs).collect())
}

impl Op for EmbedSharded {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "One vector for a text, or one score for a pair of texts, from a Llama-like encoder in chained parts".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Embed, Task::Score],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["parts"],
                "properties": {
                    "parts": schema::graphs(
                        "Graphs of the encoder, in order; each takes the rows of the one before."
                    ),
                    "buckets": schema::graphs(
                        "Graphs as those of parts, for shorter texts. Those of one length are the parts of one encoder."
                    ),
                    "causal": {
                        "description": "A token sees only those before it. Needs masks [length, length].",
                        "type": "boolean",
                        "default": false
                    },
                    "pooling": {
                        "description": "Which rows become the vector. Those of several ways stand one after the other.",
                        "anyOf": [
                            {"enum": POOLINGS},
                            {"type": "array", "minItems": 1, "items": {"enum": POOLINGS}}
                        ],
                        "default": "mean"
                    },
                    "normalize": {
                        "description": "Divide the pooled vector by its Euclidean norm.",
                        "type": "boolean",
                        "default": true
                    },
                    "modules": {
                        "description": "What the pooled vector passes, in order; weights are files of artifacts.modules.",
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["kind"],
                            "properties": {"kind": {"enum": ["dense", "layer_norm", "normalize", "truncate"]}}
                        }
                    },
                    "scores": {
                        "description": "Values of the pooled vector that are scores of a text or of a pair of texts.",
                        "type": "integer",
                        "minimum": 0,
                        "default": 0
                    },
                    "of_tokens": {
                        "description": "Heads for each token of a text; their weights are files of artifacts.modules.",
                        "type": "object",
                        "properties": {
                            "weights": {"type": "object", "required": ["weight", "bias"]},
                            "vectors": {"type": "object", "required": ["weight", "bias", "outputs"]}
                        }
                    },
                    "tensors": schema::tensors([
                        "x", "y", "cos", "sin", "cmask", "cos_local", "sin_local", LOCAL_MASK
                    ])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let params: Params = host.params()?;
        let lengths = by_length(host, &params)?;
        check_all_parts(host, &lengths.concat())?;
        let mut embedding = Embedding::open_for(host, lengths[0][0])?;
        if let Some(scale) = host.value("/params/embed_scale")? {
            embedding = embedding.scaled(scale)?;
        }
        let rows = Rows::open(host, embedding)?;
        let mut kinds = Kinds::open(host, params.causal)?;
        let mut buckets: Vec<Bucket> = Vec::with_capacity(lengths.len());
        for graphs in &lengths {
            let bucket = Bucket::open(host, graphs, &rows, &mut kinds)?;
            if let Some(other) = buckets.first().filter(|other| other.width != bucket.width) {
                return Err(Error::graph(format!(
                    "the encoder of {} tokens gives rows of {} values, expected {} as that of {} tokens",
                    bucket.length, bucket.width, other.width, other.length
                )));
            }
            buckets.push(bucket);
        }
        let longest = &buckets[buckets.len() - 1];
        let (length, width) = (longest.length, longest.width);
        let packing = packing(host, &buckets);
        // A text has at least one token.
        let most = packing.buckets.last().map_or(1, |bucket| bucket.rows);
        let Params { pooling, normalize, modules, scores, of_tokens, .. } = params;
        let token_heads = TokenHeads::open(host, &of_tokens, width)?;
        let pooler = Pooler::open(host, pooling, normalize, &modules, width)?;
        let width = pooler.outputs();
        if scores > 0 && scores != width {
            return Err(Error::manifest(format!(
                "manifest /plan/params/scores: {scores} scores, but vectors of {width} values"
            )));
        }
        let bytes = most.checked_mul(width).and_then(|count| count.checked_mul(4));
        let bytes = bytes.ok_or_else(|| {
            Error::graph(format!("{most} vectors of {width} values are more than fit into memory"))
        })?;
        let vectors = host.allocate(bytes)?;
        let of = token_heads.of();
        let tokens_out = match of.is_none() {
            true => None,
            false => {
                let values = width.checked_add(of.values(length));
                let bytes = values.and_then(|count| count.checked_mul(4)).ok_or_else(|| {
                    Error::graph(format!("values of {length} tokens are more than fit into memory"))
                })?;
                Some(host.allocate(bytes)?)
            }
        };
        Ok(Self {
            buckets,
            packing,
            rows,
            kinds,
            pooler,
            width,
            scores: scores > 0,
            tokens_out,
            token_heads,
            vectors,
            tokens: Vec::with_capacity(length),
            lengths: Vec::with_capacity(most),
            second: usize::MAX,
            fill_span: host.span("fill"),
            pool_span: host.span("pool"),
        })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo {
            max_ctx: self.longest(),
            embedding_dim: if self.scores { 0 } else { self.width },
            scores: if self.scores { self.width } else { 0 },
            packing: self.packing.clone(),
            of_tokens: self.token_heads.of(),
            ..OpenInfo::default()
        }
    }

    fn encoder(&mut self) -> Option<&mut dyn Encoder> {
        Some(self)
    }
}

impl Encoder for EmbedSharded {
    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let real = count_tokens(NAME, segments)?;
        let longest = self.longest();
        if real > longest {
            return Err(Error::prompt(format!(
                "the text has {real} tokens, the encoder takes at most {longest}; shorten or split the \
                 text, or have it truncated"
            )));
        }
        self.tokens.clear();
        self.tokens.extend(tokens(segments));
        self.lengths.clear();
        self.lengths.push(real);
        self.rows.check_parts(segments.len())?;
        self.second = match segments {
            [Segment::Tokens(first), _, ..] => first.len(),
            _ => usize::MAX,
        };
        self.run(host)
    }

    fn embed_tokens(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let vector = self.embed(host, segments)?;
        self.run_tokens(host, vector)
    }

    fn embed_many(&mut self, host: &mut Host, texts: &[&[u32]]) -> Result<View> {
        let longest = self.packing.buckets.last().map_or(0, |bucket| bucket.rows);
        let all = texts.iter().fold(0usize, |all, text| all.saturating_add(text.len()));
        if all > longest || texts.is_empty() || texts.iter().any(|text| text.is_empty()) {
            return Err(Error::prompt(format!(
                "{} texts of {all} tokens together; the encoder takes texts of at most {longest} tokens at once, each \
                 of at least one",
                texts.len()
            )));
        }
        self.tokens.clear();
        self.lengths.clear();
        self.second = usize::MAX;
        for text in texts {
            self.tokens.extend_from_slice(text);
            self.lengths.push(text.len());
        }
        self.run(host)
    }
}

impl EmbedSharded {
    /// Writes what each token of the one text that went through the graphs has behind the text's vector.
    fn run_tokens(&mut self, host: &mut Host, vector: View) -> Result<View> {
        let Some(target) = self.tokens_out else {
            return Err(Error::unsupported("values for each token of a text"));
        };
        let (real, width) = (self.tokens.len(), self.width);
        let Some(bucket) = self.buckets.iter().find(|bucket| bucket.length >= real) else {
            return Err(Error::prompt(format!("{real} tokens are more than the encoder takes")));
        };
        let start = Instant::now();
        let mut values = vec![0.0; width];
        vector.to_f32(host, 0, &mut values)?;
        host.f32s_mut(target)[..width].copy_from_slice(&values);
        self.token_heads.write(host, bucket.y, 0..real, (target, width))?;
        host.end(self.pool_span, start);
        let len = width + self.token_heads.of().values(real);
        Ok(View { buffer: target, dtype: DType::F32, offset: 0, len })
    }

    /// Tokens of the longest text.
    fn longest(&self) -> usize {
        self.buckets.last().map_or(0, |bucket| bucket.length)
    }

    /// Embeds the texts of `tokens`, as many as there are `lengths`, at once.
    fn run(&mut self, host: &mut Host) -> Result<View> {
        let start = Instant::now();
        let all = self.tokens.len();
        // The shortest graphs that hold the texts: they add the smallest padding.
        let Some(bucket) = self.buckets.iter_mut().find(|bucket| bucket.length >= all) else {
            return Err(Error::prompt(format!("{all} tokens are more than the encoder takes")));
        };
        self.rows.fill(host, &self.tokens, &self.lengths, self.second, bucket.x)?;
        bucket.masks.iter_mut().for_each(|mask| mask.fill_texts(host, &self.lengths));
        for (tables, rope) in bucket.tables.iter_mut().zip(&mut self.kinds.ropes) {
            tables.fill_texts(host, rope, &self.lengths);
        }
        host.end(self.fill_span, start);
        for &(graph, span) in &bucket.parts {
            let start = Instant::now();
            host.execute(graph)?;
            host.end(span, start);
        }
        let start = Instant::now();
        let mut first = 0;
        for (place, &length) in self.lengths.iter().enumerate() {
            let text = first..first + length;
            self.pooler.pool(host, bucket.y, text, self.vectors, place)?;
            first += length;
        }
        host.end(self.pool_span, start);
        let len = self.lengths.len() * self.width;
        Ok(View { buffer: self.vectors, dtype: DType::F32, offset: 0, len })
    }
}

/// The graphs that take several texts: those whose masks keep texts apart. A text that shares graphs goes through the
/// shortest that hold all, so a longer one is left out with all beyond it.
fn packing(host: &Host, buckets: &[Bucket]) -> Packing {
    let costs = GraphCosts::of(host, buckets.iter().flat_map(Bucket::graphs));
    let cost = |bucket: &Bucket| qhx_op::Bucket {
        rows: bucket.length,
        cost: costs.sum(host, &bucket.graphs().collect::<Vec<_>>(), bucket.length),
    };
    let separate =
        buckets.iter().take_while(|bucket| bucket.masks.iter().all(PaddingMask::separates));
    Packing { buckets: separate.map(cost).collect() }
}

/// Errors for a graph that is a part by its rows, but is not named: without it a part of an encoder
/// would run and answer.
fn check_all_parts(host: &Host, parts: &[GraphId]) -> Result<()> {
    let ends = |graph: &GraphInfo| {
        let (x, y) = (graph.input("x")?, graph.output("y")?);
        let rows = |tensor: &TensorInfo| (tensor.dtype, tensor.shape.clone());
        Some([rows(&graph.inputs[x]), rows(&graph.outputs[y])])
    };
    let named: Vec<_> = parts.iter().map(|&part| host.graph(part)).collect();
    let chained: Vec<_> = named.iter().filter_map(|part| ends(part)).flatten().collect();
    let forgotten = host.graphs().iter().find(|graph| {
        let is = |part: &&GraphInfo| (&part.context, &part.name) == (&graph.context, &graph.name);
        let fits = ends(graph).is_some_and(|ends| ends.iter().any(|rows| chained.contains(rows)));
        fits && !named.iter().any(is)
    });
    match forgotten {
        Some(graph) => Err(Error::manifest(format!(
            "manifest /plan/params/parts: graph {:?} of context {:?} takes or gives the same rows as \
             the parts, but is not among them; name every part in order, or remove the context \
             from the manifest",
            graph.name, graph.context
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
