//! Per-layer inputs: what each layer gets of a token besides the hidden state.
//!
//! Arithmetic: `Gemma4TextModel.get_per_layer_inputs` and `project_per_layer_inputs` of `transformers`.

use half::f16;
use qhx_kit::OneOrMany;
use qhx_kit::decoder::{Chunk, Filler, GraphVariant};
use qhx_kit::fill::{Embedding, FloatInput};
use qhx_kit::kernels::f16_to_f32;
use qhx_op::{BufferId, DType, Error, GraphId, Host, Result, View};
use serde::Deserialize;

use crate::tower::check;

/// The input of a graph: the values of its layers, one layer behind the other.
pub(crate) const PLE: &str = "ple";
/// The output of a graph that projects: `[rows, layers · width]`, normalised layer by layer.
pub(crate) const CONTEXT: &str = "context";

/// Place in the manifest of the graphs that project rows, one for each number of rows.
const GRAPHS: &str = "/plan/params/ple";

/// Rows of the projection that a thread computes at a time.
const ROWS: usize = 64;
/// Weights that are converted at once.
const BLOCK: usize = 256;
/// Sums that are computed side by side, so that they become vectors.
const LANES: usize = 16;

/// `params.ple` of the manifest.
#[derive(Debug, Deserialize)]
struct Params {
    /// Values for each layer.
    width: usize,
    /// Row of the table for positions that are no text.
    pad_token_id: u32,
    /// Rows of the table, where it has fewer than the vocabulary has tokens: tokens behind them have its first row.
    vocab: Option<usize>,
    /// Epsilon of the norm.
    eps: f32,
}

/// Fills [`PLE`]: `(rms(W·x / √hidden, norm) + table[token] · √width) / √2` for each layer, x the row that the first
/// layer gets. The norm of the projection comes from graphs, where `plan.params.ple` names some.
#[derive(Debug)]
pub(crate) struct PerLayerInputs {
    params: Params,
    layers: usize,
    embedding: Embedding,
    table: Embedding,
    projection: Projection,
    /// Values of one token, of all layers.
    row: Vec<f32>,
    /// Projection of a token, which is added to these values.
    context: Vec<f32>,
    passes: Vec<Bound>,
}

/// Projection of rows, on the host or by graphs.
#[derive(Debug)]
enum Projection {
    Host {
        weights: BufferId,
        dtype: DType,
        norm: Vec<f32>,
    },
    /// Graphs from `x` to [`CONTEXT`] for different numbers of rows.
    Graphs(Vec<GraphId>),
}

/// The inputs of a pass.
#[derive(Debug)]
struct Bound {
    rows: usize,
    /// Values of a token that its graphs take, of the layers from the first on.
    used: usize,
    /// For each graph its input, the first value in a token's row and how many there are.
    inputs: Vec<(FloatInput, usize, usize)>,
    projected: Projected,
}

/// Place of a pass's rows x and their projections.
#[derive(Debug, Clone, Copy)]
enum Projected {
    /// Its graphs take no per-layer inputs.
    Nothing,
    /// x `[rows, hidden]` and `[used, rows]`, in f32.
    Host { x: BufferId, sums: BufferId },
    /// The view is of [`CONTEXT`].
    Graph { graph: GraphId, x: FloatInput, context: View },
}

impl PerLayerInputs {
    /// Maps the tables of `artifacts.ple`. `embedding` gives the rows x of tokens, scaled.
    pub fn open(host: &mut Host, embedding: Embedding, layers: usize) -> Result<Self> {
        let params: Params = host.require("/params/ple")?;
        let (width, hidden) = (params.width, embedding.hidden());
        let all = layers.checked_mul(width).filter(|all| *all > 0).ok_or_else(|| {
            Error::manifest(format!(
                "manifest /params/ple/width: {width} values for each of {layers} layers, expected some"
            ))
        })?;
        let vocab = params.vocab.unwrap_or_else(|| embedding.vocab());
        if params.pad_token_id as usize >= vocab {
            return Err(Error::manifest(format!(
                "manifest /params/ple/pad_token_id: {}, expected a token below {vocab}",
                params.pad_token_id
            )));
        }
        let table = Embedding::open_at(host, "/artifacts/ple/table", all, Some(vocab))?
            .scaled((width as f32).sqrt())?;
        let projection = match host.value::<OneOrMany>(GRAPHS)? {
            Some(names) => Projection::Graphs(names.graphs(host, GRAPHS)?),
            None => {
                let matrix = Embedding::open_at(host, "/artifacts/ple/proj", hidden, Some(all))?;
                let weights = Embedding::open_at(host, "/artifacts/ple/norm", width, Some(1))?;
                let mut norm = vec![0.0; width];
                weights.read(host, 0, 0, &mut norm)?;
                let (weights, dtype) = matrix.table()?;
                Projection::Host { weights, dtype, norm }
            }
        };
        let (row, context) = (vec![0.0; all.max(hidden)], vec![0.0; all]);
        Ok(Self { params, layers, embedding, table, projection, row, context, passes: Vec::new() })
    }

    /// Writes the rows x of a chunk where the pass has them: of tokens the embedding's, of soft tokens their own.
    fn rows(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let hidden = self.embedding.hidden();
        let target = self.passes[chunk.pass].projected;
        let write = |host: &mut Host, row: usize, values: &[f32]| match target {
            Projected::Host { x, .. } => {
                host.f32s_mut(x)[row * hidden..(row + 1) * hidden].copy_from_slice(values);
                Ok(())
            }
            Projected::Graph { x, .. } => x.write_at(host, row * hidden, values),
            Projected::Nothing => Ok(()),
        };
        for (row, &token) in chunk.tokens.iter().enumerate() {
            let values = &mut self.row[..hidden];
            self.embedding.read(host, token, 0, values)?;
            write(host, row, values)?;
        }
        chunk.soft_rows(hidden).try_for_each(|(row, values)| write(host, row, values))
    }

    /// Projects the first `count` rows of a pass: by its graph, or on the host's threads.
    fn project(&self, host: &mut Host, pass: usize, count: usize) -> Result<()> {
        let Bound { rows, projected, .. } = self.passes[pass];
        match (&self.projection, projected) {
            (Projection::Host { weights, dtype, .. }, Projected::Host { x, sums }) => {
                let (hidden, dtype) = (self.embedding.hidden(), *dtype);
                let stride = hidden * dtype.size();
                host.parallel_fill(
                    [*weights, x],
                    &[sums],
                    ROWS * rows * size_of::<f32>(),
                    |[weights, x], _, first, piece| {
                        let x: &[f32] = bytemuck::cast_slice(x);
                        let sums: &mut [f32] = bytemuck::cast_slice_mut(piece);
                        let first = first / (rows * size_of::<f32>());
                        for (output, sums) in sums.chunks_exact_mut(rows).enumerate() {
                            let at = (first + output) * stride;
                            let weights = &weights[at..at + stride];
                            multiply(weights, dtype, x, hidden, &mut sums[..count]);
                        }
                    },
                )
            }
            (_, Projected::Graph { graph, .. }) => host.execute(graph),
            (_, Projected::Nothing) | (Projection::Graphs(_), Projected::Host { .. }) => Ok(()),
        }
    }

    /// Reads the normalised projection of a row into [`Self::context`].
    fn read_context(&mut self, host: &Host, pass: usize, row: usize) {
        let Bound { rows, used, projected, .. } = self.passes[pass];
        let context = &mut self.context[..used];
        match (&self.projection, projected) {
            (Projection::Host { norm, .. }, Projected::Host { sums, .. }) => {
                let scale = 1.0 / (self.embedding.hidden() as f32).sqrt();
                let sums = host.f32s(sums)[row..].iter().step_by(rows);
                for (value, sum) in context.iter_mut().zip(sums) {
                    *value = sum * scale;
                }
                for values in context.chunks_exact_mut(self.params.width) {
                    let mean = values.iter().map(|v| v * v).sum::<f32>() / self.params.width as f32;
                    let factor = 1.0 / (mean + self.params.eps).sqrt();
                    for (value, norm) in values.iter_mut().zip(norm) {
                        *value *= factor * norm;
                    }
                }
            }
            (_, Projected::Graph { context: View { buffer, dtype, .. }, .. }) => {
                let range = row * used..(row + 1) * used;
                match dtype {
                    DType::F16 => f16_to_f32(&host.f16s(buffer)[range], context),
                    _ => context.copy_from_slice(&host.f32s(buffer)[range]),
                }
            }
            (_, Projected::Nothing) | (Projection::Graphs(_), Projected::Host { .. }) => {}
        }
    }
}

/// Binds the graph of `graphs` that projects `rows` rows of `hidden` values to `used` values each.
fn project_by(
    host: &mut Host,
    graphs: &[GraphId],
    rows: usize,
    hidden: usize,
    used: usize,
) -> Result<Projected> {
    let mut sizes = Vec::new();
    for &graph in graphs {
        let (input, output) = (host.input(graph, "x")?, host.output(graph, CONTEXT)?);
        if host.rows_of(graph, input)? == (rows, hidden) {
            check(host, graph, output, rows, used)?;
            let x = FloatInput::require(host, graph, "x")?;
            return Ok(Projected::Graph { graph, x, context: host.view_for(graph, output)? });
        }
        sizes.push(host.tensor(graph, input).to_string());
    }
    Err(Error::graph(format!(
        "manifest {GRAPHS}: the decoder takes {rows} rows of {hidden} values, and no graph that projects them does; \
         found {}",
        sizes.join(", ")
    )))
}

/// `sums[r] = weights · x[r]` for rows x of `hidden` values; weights f16 or f32.
fn multiply(weights: &[u8], dtype: DType, x: &[f32], hidden: usize, sums: &mut [f32]) {
    sums.fill(0.0);
    let mut wide = [0.0; BLOCK];
    for first in (0..hidden).step_by(BLOCK) {
        let count = BLOCK.min(hidden - first);
        let wide = &mut wide[..count];
        let bytes = &weights[first * dtype.size()..(first + count) * dtype.size()];
        if dtype == DType::F16 {
            // Rows of files are aligned to their values; what is not, stays zero.
            let halves: &[f16] = bytemuck::try_cast_slice(bytes).unwrap_or_default();
            f16_to_f32(halves, &mut wide[..halves.len()]);
        } else {
            wide.copy_from_slice(bytemuck::try_cast_slice(bytes).unwrap_or(&[0.0; BLOCK][..count]));
        }
        for (sum, row) in sums.iter_mut().zip(x.chunks_exact(hidden)) {
            *sum += dot(wide, &row[first..first + count]);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

impl Filler for PerLayerInputs {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        let (width, rows) = (self.params.width, pass.rows);
        let all = self.layers * width;
        let mut inputs = Vec::new();
        let mut first = 0;
        for &graph in pass.graphs {
            if host.graph(graph).input(PLE).is_none() {
                continue;
            }
            let input = FloatInput::require(host, graph, PLE)?;
            let count = input.len() / rows.max(1);
            let fits =
                count * rows == input.len() && count.is_multiple_of(width) && first + count <= all;
            if !fits {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {PLE} has {} values, expected {rows} rows of {width} for each of its layers, \
                     of which {} are left",
                    host.graph(graph).name,
                    input.len(),
                    self.layers - first / width
                )));
            }
            inputs.push((input, first, count));
            first += count;
        }
        if pass.index == 0 && first != all {
            return Err(Error::graph(format!(
                "the decode graphs take per-layer inputs ({PLE}) for {} layers, expected {}",
                first / width,
                self.layers
            )));
        }
        let hidden = self.embedding.hidden();
        // Passes of as many rows in contexts of several sizes take turns.
        let alike = self.passes.iter().find(|pass| (pass.rows, pass.used) == (rows, first));
        let projected = match (&self.projection, alike) {
            _ if first == 0 => Projected::Nothing,
            (_, Some(alike)) => alike.projected,
            (Projection::Host { .. }, None) => {
                let bytes = |n: usize| n.saturating_mul(rows).saturating_mul(size_of::<f32>());
                Projected::Host {
                    x: host.allocate(bytes(hidden))?,
                    sums: host.allocate(bytes(first))?,
                }
            }
            (Projection::Graphs(graphs), None) => project_by(host, graphs, rows, hidden, first)?,
        };
        self.passes.push(Bound { rows, used: first, inputs, projected });
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let count = chunk.tokens.len();
        if self.passes[chunk.pass].used == 0 {
            return Ok(());
        }
        self.rows(host, chunk)?;
        self.project(host, chunk.pass, count)?;
        let mut soft = chunk.soft_rows(self.embedding.hidden()).map(|(row, _)| row).peekable();
        for (row, &token) in chunk.tokens.iter().enumerate() {
            let is_soft = soft.next_if_eq(&row).is_some();
            self.read_context(host, chunk.pass, row);
            let values = &mut self.row[..self.passes[chunk.pass].used];
            let text_row = if (token as usize) < self.table.vocab() { token } else { 0 };
            let table_row = if is_soft { self.params.pad_token_id } else { text_row };
            self.table.read(host, table_row, 0, values)?;
            for (value, context) in values.iter_mut().zip(&self.context) {
                *value = (*value + context) * std::f32::consts::FRAC_1_SQRT_2;
            }
            for &(input, first, count) in &self.passes[chunk.pass].inputs {
                input.write_at(host, row * count, &values[first..first + count])?;
            }
        }
        Ok(())
    }
}
