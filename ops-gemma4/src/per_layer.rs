//! Per-layer inputs: what each layer gets of a token besides the hidden row.
//!
//! Arithmetic: `Gemma4TextModel.get_per_layer_inputs` and `project_per_layer_inputs` of `transformers`.

use half::f16;
use qhx_op::decoder::{Chunk, Filler, Pass};
use qhx_op::fill::{Embedding, FloatInput};
use qhx_op::kernels::f16_to_f32;
use qhx_op::{BufferId, DType, Error, Host, Result};
use serde::Deserialize;

/// The input of a graph: the values of its layers, one layer behind the other.
pub(crate) const PLE: &str = "ple";

/// Rows of the projection that a thread computes at a time.
const ROWS: usize = 64;
/// Weights that are converted at once.
const BLOCK: usize = 256;
/// Sums that are kept at once, so that they become vectors.
const LANES: usize = 16;

/// `params.ple` of the manifest.
#[derive(Debug, Deserialize)]
struct Params {
    /// Values for each layer.
    width: usize,
    /// Row of the table for positions that are no text.
    pad_token_id: u32,
    /// Epsilon of the norm.
    eps: f32,
}

/// Fills [`PLE`]: `(rms(W·x / √hidden, norm) + table[token] · √width) / √2` for each layer, x the row that the first
/// layer gets.
#[derive(Debug)]
pub(crate) struct PerLayerInputs {
    params: Params,
    layers: usize,
    embedding: Embedding,
    table: Embedding,
    projection: BufferId,
    projection_type: DType,
    norm: Vec<f32>,
    /// Values of one token, of all layers.
    row: Vec<f32>,
    passes: Vec<Bound>,
}

/// The inputs of a pass.
#[derive(Debug)]
struct Bound {
    rows: usize,
    /// For each graph its input, the first value in a token's row and how many there are.
    inputs: Vec<(FloatInput, usize, usize)>,
    /// Rows x `[rows, hidden]` in f32.
    x: BufferId,
    /// Their projections `[layers · width, rows]` in f32.
    projected: BufferId,
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
        let vocab = embedding.vocab();
        if params.pad_token_id as usize >= vocab {
            return Err(Error::manifest(format!(
                "manifest /params/ple/pad_token_id: {}, expected a token below {vocab}",
                params.pad_token_id
            )));
        }
        let table = Embedding::open_at(host, "/artifacts/ple/table", all, Some(vocab))?
            .scaled((width as f32).sqrt())?;
        let matrix = Embedding::open_at(host, "/artifacts/ple/proj", hidden, Some(all))?;
        let weights = Embedding::open_at(host, "/artifacts/ple/norm", width, Some(1))?;
        let mut norm = vec![0.0; width];
        weights.read(host, 0, 0, &mut norm)?;
        let (projection, projection_type) = matrix.table();
        let row = vec![0.0; all.max(hidden)];
        Ok(Self {
            params,
            layers,
            embedding,
            table,
            projection,
            projection_type,
            norm,
            row,
            passes: Vec::new(),
        })
    }

    /// Writes the rows x of a chunk into the pass's buffer. Gives a row of the table for each token by its number in
    /// the chunk: that of padding for soft tokens.
    fn rows(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let hidden = self.embedding.hidden();
        let x = self.passes[chunk.pass].x;
        for (row, &token) in chunk.tokens.iter().enumerate() {
            let values = &mut self.row[..hidden];
            self.embedding.read(host, token, 0, values)?;
            host.f32s_mut(x)[row * hidden..(row + 1) * hidden].copy_from_slice(values);
        }
        for (row, values) in chunk.soft_rows(hidden) {
            host.f32s_mut(x)[row * hidden..(row + 1) * hidden].copy_from_slice(values);
        }
        Ok(())
    }

    /// Projects the first `count` rows of a pass on the host's threads.
    fn project(&self, host: &mut Host, pass: usize, count: usize) -> Result<()> {
        let Bound { rows, x, projected, .. } = self.passes[pass];
        let (hidden, dtype) = (self.embedding.hidden(), self.projection_type);
        let stride = hidden * dtype.size();
        host.parallel_fill(
            [self.projection, x],
            &[projected],
            ROWS * rows * size_of::<f32>(),
            |[weights, x], _, first, piece| {
                let x: &[f32] = bytemuck::cast_slice(x);
                let sums: &mut [f32] = bytemuck::cast_slice_mut(piece);
                let first = first / (rows * size_of::<f32>());
                for (output, sums) in sums.chunks_exact_mut(rows).enumerate() {
                    let at = (first + output) * stride;
                    multiply(&weights[at..at + stride], dtype, x, hidden, &mut sums[..count]);
                }
            },
        )
    }
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
    fn bind(&mut self, host: &mut Host, pass: Pass<'_>) -> Result<()> {
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
        let bytes = |values: usize| values.saturating_mul(rows).saturating_mul(size_of::<f32>());
        let x = host.allocate(bytes(self.embedding.hidden()))?;
        let projected = host.allocate(bytes(all))?;
        self.passes.push(Bound { rows, inputs, x, projected });
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let count = chunk.tokens.len();
        self.rows(host, chunk)?;
        self.project(host, chunk.pass, count)?;
        let mut soft = chunk.soft_rows(self.embedding.hidden()).map(|(row, _)| row).peekable();
        let scale = 1.0 / (self.embedding.hidden() as f32).sqrt();
        let Params { width, pad_token_id, eps } = self.params;
        let Bound { rows, ref inputs, projected, .. } = self.passes[chunk.pass];
        for (row, &token) in chunk.tokens.iter().enumerate() {
            let is_soft = soft.next_if_eq(&row).is_some();
            let values = &mut self.row[..self.layers * width];
            self.table.read(host, if is_soft { pad_token_id } else { token }, 0, values)?;
            let projected = host.f32s(projected)[row..].iter().step_by(rows);
            let mut projected = projected.map(|sum| sum * scale);
            for values in values.chunks_exact_mut(width) {
                let mean = projected.clone().take(width).map(|v| v * v).sum::<f32>() / width as f32;
                let factor = 1.0 / (mean + eps).sqrt();
                for ((value, norm), context) in
                    values.iter_mut().zip(&self.norm).zip(&mut projected)
                {
                    *value = (*value + context * factor * norm) * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
            for &(input, first, count) in inputs {
                input.write_at(host, row * count, &values[first..first + count])?;
            }
        }
        Ok(())
    }
}
