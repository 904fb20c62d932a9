//! `llama_embed_sharded`: an encoder in chained parts.

use std::time::Instant;

use qhx_op::fill::{Embedding, PaddingMask, Rope, RopeTables};
use qhx_op::text::{count_tokens, tokens};
use qhx_op::{
    BufferId, DType, Encoder, Error, GraphCosts, GraphId, GraphInfo, Host, Modality, OneOrMany, Op,
    OpDescription, OpenInfo, Packing, Result, Segment, SpanId, Task, TensorInfo, View, schema,
};
use serde::Deserialize;
use serde_json::json;

use crate::pooling::{Pooler, Pooling};

const NAME: &str = "llama_embed_sharded";
const BUCKETS: &str = "/plan/params/buckets";

#[derive(Debug, Deserialize)]
struct Params {
    parts: OneOrMany,
    buckets: Option<OneOrMany>,
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
    /// The shortest first.
    buckets: Vec<Bucket>,
    packing: Packing,
    embedding: Embedding,
    rope: Rope,
    pooler: Pooler,
    width: usize,
    /// The vectors of as many texts as fit into one execution, f32 `[…, width]`.
    vectors: BufferId,
    /// Of the texts that go through the graphs, one behind the other.
    tokens: Vec<u32>,
    /// How many of them each text has.
    lengths: Vec<usize>,
    fill_span: SpanId,
    pool_span: SpanId,
}

/// The whole encoder for texts of up to `length` tokens.
#[derive(Debug)]
struct Bucket {
    length: usize,
    /// With the names of their times.
    parts: Vec<(GraphId, SpanId)>,
    mask: PaddingMask,
    tables: RopeTables,
    /// Input of the first part, `[length, hidden]`.
    x: (BufferId, DType),
    /// Output of the last part, `[length, width]`.
    y: View,
    width: usize,
}

impl Bucket {
    /// Binds the graphs of one length, in order, to each other.
    fn open(
        host: &mut Host,
        graphs: &[GraphId],
        embedding: &Embedding,
        rope: &mut Rope,
        causal: bool,
    ) -> Result<Self> {
        let (first, last) = (graphs[0], graphs[graphs.len() - 1]);
        let input = host.input(first, "x")?;
        let (length, _) = host.rows_of(first, input)?;
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
        let y = host.view_for(last, output)?;

        // The positions of a text that is alone; they stay until several share the graphs.
        let mut tables = rope.bind_all(host, graphs, length)?;
        tables.fill(host, rope, 0);
        let mask = PaddingMask::bind_all(host, graphs, length, causal)?;
        if graphs.iter().all(|&graph| host.graph(graph).input("cmask").is_none()) {
            return Err(Error::graph(format!(
                "graph {:?} has no input cmask, so padding of shorter texts could not be hidden; \
                 if the graphs call it otherwise, say so in plan.params.tensors",
                host.graph(first).name
            )));
        }
        let span = |(index, &graph)| (graph, host.span(&format!("part {index}")));
        let parts = graphs.iter().enumerate().map(span).collect();
        Ok(Self { length, parts, mask, tables, x: (x, x_dtype), y, width })
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
                    "buckets": schema::graphs(
                        "Graphs as those of parts, for shorter texts. Those of one length are the parts of one encoder."
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
        let lengths = by_length(host, &params)?;
        check_all_parts(host, &lengths.concat())?;
        let embedding = host.embedding_for(lengths[0][0])?;
        let mut rope = Rope::from_params(host, "/params")?;
        let mut buckets: Vec<Bucket> = Vec::with_capacity(lengths.len());
        for graphs in &lengths {
            let bucket = Bucket::open(host, graphs, &embedding, &mut rope, params.causal)?;
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
        let texts = packing.buckets.last().map_or(1, |bucket| bucket.rows);
        let bytes = texts.checked_mul(width).and_then(|count| count.checked_mul(4));
        let bytes = bytes.ok_or_else(|| {
            Error::graph(format!("{texts} vectors of {width} values are more than fit into memory"))
        })?;
        let vectors = host.allocate(bytes)?;
        Ok(Self {
            buckets,
            packing,
            embedding,
            rope,
            pooler: Pooler::new(params.pooling, params.normalize, width),
            width,
            vectors,
            tokens: Vec::with_capacity(length),
            lengths: Vec::with_capacity(texts),
            fill_span: host.span("fill"),
            pool_span: host.span("pool"),
        })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo {
            max_ctx: self.longest(),
            embedding_dim: self.width,
            packing: self.packing.clone(),
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
        self.run(host)
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
        for text in texts {
            self.tokens.extend_from_slice(text);
            self.lengths.push(text.len());
        }
        self.run(host)
    }
}

impl EmbedSharded {
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
        self.embedding.gather_rows(host, &self.tokens, bucket.x.0, bucket.x.1)?;
        bucket.mask.fill_texts(host, &self.lengths);
        bucket.tables.fill_texts(host, &mut self.rope, &self.lengths);
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
    let separate = buckets.iter().take_while(|bucket| bucket.mask.separates());
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
mod tests {
    use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensor};

    use super::*;

    const F32: DType = DType::F32;

    /// A part over `rows` positions of two values.
    fn part(name: &str, rows: usize) -> GraphInfo {
        let table = |name: &str| tensor(name, F32, [rows, 1]);
        graph(
            name,
            [
                tensor("x", F32, [rows, 2]),
                table("cos"),
                table("sin"),
                tensor("cmask", F32, [1, rows]),
            ],
            [tensor("y", F32, [rows, 2])],
        )
    }

    /// A part adds to each row how many positions are visible.
    fn run(step: &mut Step<'_>) -> Result<()> {
        let visible = step.input("cmask")?.iter().filter(|value| **value == 0.0).count();
        let rows: Vec<_> = step.input("x")?.iter().map(|value| value + visible as f32).collect();
        step.set("y", &rows)
    }

    fn opened(params: serde_json::Value) -> Result<OpenOp> {
        // Token t is [t, -t].
        let table: Vec<u8> =
            [0f32, 0.0, 1.0, -1.0, 2.0, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let harness = OpHarness::new()
            .manifest(json!({
                "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
                "params": {"head_dim": 2, "rope_theta": 1e4},
                "plan": {"params": params}
            }))
            .file("embed.bin", table)
            .script(run);
        let graphs = [("a", 6), ("b", 6), ("a4", 4), ("b4", 4), ("a2", 2), ("b2", 2)];
        graphs
            .into_iter()
            .fold(harness, |h, (name, rows)| h.graph(part(name, rows)))
            .open::<EmbedSharded>()
    }

    #[test]
    fn a_text_goes_through_the_parts_of_the_shortest_length_that_holds_it() {
        let mut op = opened(json!({
            "parts": ["a", "b"], "buckets": ["a4", "b4", "a2", "b2"], "normalize": false
        }))
        .unwrap();
        assert_eq!((op.info().max_ctx, op.info().embedding_dim), (6, 2));
        for (tokens, used) in [
            (&[1, 2][..], ["a2", "b2"]),
            (&[2], ["a2", "b2"]),
            (&[1, 2, 0], ["a4", "b4"]),
            (&[1, 1, 1, 1, 2], ["a", "b"]),
            (&[1, 2, 0, 1], ["a4", "b4"]),
        ] {
            let names = ["a", "b", "a4", "b4", "a2", "b2"];
            let counts = |op: &OpenOp| names.map(|name| op.executions(name));
            let before = counts(&op);
            // The mean of the rows, and the visible positions once for each part.
            let count = tokens.len() as f32;
            let mean = tokens.iter().sum::<u32>() as f32 / count;
            let vector = op.embed(&[Segment::Tokens(tokens)]).unwrap();
            let expected = [mean + 2.0 * count, 2.0 * count - mean];
            let near = vector.iter().zip(expected).all(|(v, e)| (v - e).abs() < 1e-5);
            assert!(near && vector.len() == 2, "{tokens:?}: {vector:?}, expected {expected:?}");
            for ((name, after), before) in names.iter().zip(counts(&op)).zip(before) {
                assert_eq!(after - before, usize::from(used.contains(name)), "{tokens:?}, {name}");
            }
        }
        let error = op.embed(&[Segment::Tokens(&[1; 7])]).unwrap_err();
        assert!(error.message().contains("7 tokens, the encoder takes at most 6"), "{error}");
    }

    /// An encoder in one part with a row of the mask for each of six positions. A row becomes the sum of those that it
    /// sees, weighted by their positions so that none stands for another, and of its own rotary table.
    fn separating(pooling: &str, causal: bool) -> OpenOp {
        let table: Vec<u8> =
            [0f32, 0.0, 1.0, -1.0, 2.0, 5.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let graph = |name: &str, rows: usize| {
            let table = |name: &str| tensor(name, F32, [rows, 1]);
            let inputs = [
                tensor("x", F32, [rows, 2]),
                table("cos"),
                table("sin"),
                tensor("cmask", F32, [rows, rows]),
            ];
            graph(name, inputs, [tensor("y", F32, [rows, 2])])
        };
        OpHarness::new()
            .manifest(json!({
                "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
                "params": {"head_dim": 2, "rope_theta": 1e4},
                "plan": {"params": {
                    "parts": "enc", "buckets": "enc3", "pooling": pooling, "causal": causal, "normalize": false
                }}
            }))
            .file("embed.bin", table)
            .graph(graph("enc", 6))
            .graph(graph("enc3", 3))
            .script(|step| {
                let (x, mask, sin) = (step.input("x")?, step.input("cmask")?, step.input("sin")?);
                let mut y = Vec::new();
                for (row, mask) in mask.chunks(sin.len()).enumerate() {
                    let seen = |column: usize| -> f32 {
                        let keys = x.chunks(2).zip(mask).filter(|(_, mask)| **mask == 0.0);
                        keys.map(|(key, _)| key[column]).sum()
                    };
                    y.extend([seen(0) + 100.0 * sin[row], seen(1) + x[2 * row]]);
                }
                step.set("y", &y)
            })
            .open::<EmbedSharded>()
            .unwrap()
    }

    #[test]
    fn texts_in_one_graph_are_as_if_each_were_alone() {
        let texts: [&[u32]; 3] = [&[1, 2], &[2], &[2, 1, 1]];
        for pooling in ["mean", "last", "cls"] {
            for causal in [false, true] {
                let mut op = separating(pooling, causal);
                let rows: Vec<usize> = op.info().packing.buckets.iter().map(|b| b.rows).collect();
                assert_eq!(rows, [3, 6]);
                assert!(op.info().packing.buckets[0].cost < op.info().packing.buckets[1].cost);
                let alone = texts.map(|text| op.embed(&[Segment::Tokens(text)]).unwrap());
                assert_eq!(op.executions("enc"), 0);
                // In either order, and a text alone after others.
                for order in [[0, 1, 2], [2, 0, 1]] {
                    let together = op.embed_many(&order.map(|text| texts[text])).unwrap();
                    let expected: Vec<f32> = order.iter().flat_map(|&t| alone[t].clone()).collect();
                    assert_eq!(together, expected, "{pooling}, causal {causal}, {order:?}");
                }
                assert_eq!(op.executions("enc"), 2, "once for all");
                assert_eq!(op.embed(&[Segment::Tokens(texts[2])]).unwrap(), alone[2]);
                assert_eq!(op.embed_many(&texts[..2]).unwrap(), alone[..2].concat());
                assert_eq!(op.executions("enc"), 2, "three tokens need the shorter graph");
            }
        }
    }

    #[test]
    fn texts_that_do_not_fit_together_are_an_error() {
        let mut op = separating("mean", false);
        for texts in [&[&[1u32; 4][..], &[1; 3]][..], &[&[1], &[]], &[]] {
            let error = op.embed_many(texts).unwrap_err();
            assert!(error.message().contains("at most 6 tokens at once"), "{error}");
        }
        assert!(op.embed_many(&[&[1], &[7]]).unwrap_err().message().contains("token 7"));
        // Masks of one row cannot keep texts apart: bundles that have them embed one text at a time.
        let mut op =
            opened(json!({"parts": ["a", "b"], "buckets": ["a4", "b4", "a2", "b2"]})).unwrap();
        assert!(op.info().packing.buckets.is_empty());
        assert!(op.embed_many(&[&[1], &[1]]).is_err());
    }

    #[test]
    fn lengths_that_are_no_shorter_and_parts_without_a_name_are_errors() {
        let error = opened(json!({"parts": ["a4", "b4"], "buckets": ["a", "b"]})).unwrap_err();
        let expected = "/plan/params/buckets: graph \"a\" takes 6 rows, expected fewer than the 4";
        assert!(error.message().contains(expected), "{error}");
        let error = opened(json!({"parts": ["a", "b"], "buckets": ["a4"]})).unwrap_err();
        let expected = "graph \"b4\" of context \"b4\" takes or gives the same rows";
        assert!(error.message().contains(expected), "{error}");
    }
}
