//! `llama_embed_sharded`: an encoder in chained parts.

use std::time::Instant;

use qhx_op::fill::{Embedding, PaddingMask, Rope};
use qhx_op::text::{count_tokens, tokens};
use qhx_op::{
    BufferId, DType, Error, GraphId, GraphInfo, Host, Modality, OneOrMany, Op, OpDescription,
    OpInfo, Result, Segment, SpanId, Task, TensorInfo, View, schema,
};
use serde::Deserialize;
use serde_json::json;

use crate::pooling::{Pooler, Pooling};

const NAME: &str = "llama_embed_sharded";

#[derive(Debug, Deserialize)]
struct Params {
    parts: OneOrMany,
    #[serde(default)]
    causal: bool,
    #[serde(default)]
    pooling: Pooling,
    #[serde(default = "yes")]
    normalize: bool,
}

fn yes() -> bool {
    true
}

/// One vector for a text.
#[derive(Debug)]
pub struct EmbedSharded {
    /// With the names of their times.
    parts: Vec<(GraphId, SpanId)>,
    mask: PaddingMask,
    embedding: Embedding,
    /// Input of the first part, `[length, hidden]`.
    x: (BufferId, DType),
    /// Output of the last part, `[length, hidden]`.
    y: (BufferId, DType),
    pooler: Pooler,
    vector: View,
    length: usize,
    tokens: Vec<u32>,
    fill_span: SpanId,
    pool_span: SpanId,
}

impl Op for EmbedSharded {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "One vector for a text, from a Llama-like encoder in chained parts".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Embed],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["parts"],
                "properties": {
                    "parts": schema::graphs(
                        "Graphs of the encoder, in order; each takes the rows of the one before."
                    ),
                    "causal": {
                        "description": "A token sees only those before it. Needs masks [length, length].",
                        "type": "boolean",
                        "default": false
                    },
                    "pooling": {
                        "description": "Which rows become the vector.",
                        "enum": ["mean", "last", "cls"],
                        "default": "mean"
                    },
                    "normalize": {
                        "description": "Divide by the Euclidean norm.",
                        "type": "boolean",
                        "default": true
                    },
                    "tensors": schema::tensors(["x", "y", "cos", "sin", "cmask"])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let params: Params = host.params()?;
        let graphs = params.parts.graphs(host, "/plan/params/parts")?;
        check_all_parts(host, &graphs)?;
        let (first, last) = (graphs[0], graphs[graphs.len() - 1]);
        let input = host.input(first, "x")?;
        let (length, _) = host.rows_of(first, input)?;
        let embedding = host.embedding_for(first)?;
        embedding.check_rows(host, first, input, length)?;
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
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor}: expected {length} rows, one for each position of the \
                 first part",
                host.graph(last).name
            )));
        }
        let View { buffer: y, dtype: y_dtype, .. } = host.view_for(last, output)?;

        // Positions are the same for every text: the tables are filled once.
        let mut rope = Rope::from_params(host, "/params")?;
        rope.bind_all(host, &graphs, length)?.fill(host, &mut rope, 0);
        let mask = PaddingMask::bind_all(host, &graphs, length, params.causal)?;
        if graphs.iter().all(|&graph| host.graph(graph).input("cmask").is_none()) {
            return Err(Error::graph(format!(
                "graph {:?} has no input cmask, so padding of shorter texts could not be hidden; \
                 if the graphs call it otherwise, say so in plan.params.tensors",
                host.graph(first).name
            )));
        }
        let span = |(index, &graph)| (graph, host.span(&format!("part {index}")));
        let parts = graphs.iter().enumerate().map(span).collect();
        let vector = host.allocate(width * DType::F32.size())?;
        Ok(Self {
            parts,
            mask,
            embedding,
            x: (x, x_dtype),
            y: (y, y_dtype),
            pooler: Pooler::new(params.pooling, params.normalize, width),
            vector: View { buffer: vector, dtype: DType::F32, offset: 0, len: width },
            length,
            tokens: Vec::with_capacity(length),
            fill_span: host.span("fill"),
            pool_span: host.span("pool"),
        })
    }

    fn info(&self) -> OpInfo {
        OpInfo { max_ctx: self.length, embedding_dim: self.vector.len, ..OpInfo::default() }
    }

    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let start = Instant::now();
        let real = count_tokens(NAME, segments)?;
        if real > self.length {
            return Err(Error::prompt(format!(
                "the text has {real} tokens, the encoder takes at most {}; shorten or split the \
                 text, or have it truncated",
                self.length
            )));
        }
        self.tokens.clear();
        self.tokens.extend(tokens(segments));
        self.embedding.gather_rows(host, &self.tokens, self.x.0, self.x.1)?;
        self.mask.fill(host, real);
        host.end(self.fill_span, start);
        for &(graph, span) in &self.parts {
            let start = Instant::now();
            host.execute(graph)?;
            host.end(span, start);
        }
        let start = Instant::now();
        self.pooler.pool(host, self.y, real, self.vector.buffer)?;
        host.end(self.pool_span, start);
        Ok(self.vector)
    }
}

/// Errors for a graph that is a part by its rows, but is not named: without it a piece of an encoder
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
