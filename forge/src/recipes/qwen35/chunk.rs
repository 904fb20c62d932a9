//! The gated delta rule for several tokens at once: matmuls instead of a step for each token.
//!
//! Arithmetic: the chunked form of Yang et al. 2024 (arXiv 2412.06464), `torch_chunk_gated_delta_rule` of
//! `models/qwen3_5/modeling_qwen3_5.py`. The inverse that it needs is built up from blocks, each twice as wide as
//! those before: in half precision the sum of powers of the same matrix is not a number where tokens repeat.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, TensorId, UnaryOp};

use super::layers::{L2_EPS, Model, Projected};

/// Tokens that are computed at once; more are computed one chunk after the other.
const WIDEST: usize = 64;
/// Bound on how much a token forgets: e to the power of minus this is 0 in half precision.
const MAX_DECAY: f32 = 60.0;

/// The name of the input that is 1 for tokens and 0 for rows behind them.
const VALID: &str = "valid";
/// The name of the input that chooses the rows of the convolution that the next graph begins with.
const KEEP: &str = "keep";

/// Inputs that the layers of a graph for `rows` tokens share.
#[derive(Debug)]
pub(super) struct Chunks {
    rows: usize,
    /// `[rows, 1]`
    valid: TensorId,
    /// `[kernel − 1, kernel − 1 + rows]`
    keep: TensorId,
    /// Sizes of chunks that occur, and the constants of each.
    sizes: Vec<(usize, Constants)>,
}

/// Matrices of a chunk of C tokens.
#[derive(Debug, Clone)]
struct Constants {
    /// Ones on and below the diagonal, for each head: `[heads, C, C]`.
    sums: TensorId,
    /// Ones above the diagonal, for each head: `[heads, C, C]`.
    behind: TensorId,
    /// Ones on and below the diagonal: `[1, C, C]`.
    lower: TensorId,
    /// Ones below the diagonal: `[1, C, C]`.
    below: TensorId,
    /// Ones on the diagonal: `[1, C, C]`.
    diagonal: TensorId,
    /// For b = 1, 2, 4, …: ones where a row of the second half of a block of 2b meets a column of its first half.
    merges: Vec<TensorId>,
}

impl Constants {
    fn new(b: &mut GraphBuilder, heads: usize, size: usize) -> Result<Self> {
        let mut matrix = |name: &str, copies: usize, one: &dyn Fn(usize, usize) -> bool| {
            let values = (0..size * size).map(|at| f32::from(u8::from(one(at / size, at % size))));
            let values: Vec<f32> = values.collect();
            let name = format!("{name}_{size}");
            b.constant(&name, Elem::Activation, &[copies, size, size], values.repeat(copies))
        };
        let halves = (0..).map(|power| 1usize << power).take_while(|half| *half < size);
        let merges = halves.map(|half| {
            let whole = 2 * half;
            matrix(&format!("merge{half}"), 1, &|row, column| {
                row / whole == column / whole && row % whole >= half && column % whole < half
            })
        });
        let merges = merges.collect::<Result<_>>()?;
        Ok(Self {
            sums: matrix("sums", heads, &|row, column| row >= column)?,
            behind: matrix("behind", heads, &|row, column| row < column)?,
            lower: matrix("lower", 1, &|row, column| row >= column)?,
            below: matrix("below", 1, &|row, column| row > column)?,
            diagonal: matrix("diagonal", 1, &|row, column| row == column)?,
            merges,
        })
    }
}

impl Chunks {
    /// Adds the inputs `valid` and `keep`, and the constants.
    pub fn inputs(b: &mut GraphBuilder, model: &Model<'_>, rows: usize) -> Result<Self> {
        let older = model.config.kernel - 1;
        let valid = b.input(VALID, Elem::Activation, &[rows, 1])?;
        let keep = b.input(KEEP, Elem::Activation, &[older, older + rows])?;
        let mut sizes: Vec<(usize, Constants)> = Vec::new();
        for size in chunk_sizes(rows) {
            if sizes.iter().all(|(have, _)| *have != size) {
                sizes.push((size, Constants::new(b, model.config.value_heads, size)?));
            }
        }
        Ok(Self { rows, valid, keep, sizes })
    }

    fn constants(&self, size: usize) -> Option<&Constants> {
        self.sizes.iter().find(|(have, _)| *have == size).map(|(_, constants)| constants)
    }
}

/// Sizes of the chunks of `rows` tokens.
fn chunk_sizes(rows: usize) -> impl Iterator<Item = usize> {
    (0..rows).step_by(WIDEST).map(move |first| WIDEST.min(rows - first))
}

/// Contribution of a chunk's tokens to the state. C tokens, H heads.
struct Tokens {
    /// Queries of unit length, scaled: `[H, C, key_dim]`.
    q: TensorId,
    /// Keys of unit length: `[H, C, key_dim]`.
    k: TensorId,
    /// `[H, C, value_dim]`
    v: TensorId,
    /// Logarithm of what is left of the state after the token: `[H, C, 1]`, at most 0.
    decay: TensorId,
    /// Share of its value that the token writes: `[H, C, 1]`.
    beta: TensorId,
}

impl Tokens {
    fn part(&self, b: &mut GraphBuilder, first: usize, end: usize) -> Result<Self> {
        let mut slice = |x: TensorId| b.slice(x, 1, first, end);
        Ok(Self {
            q: slice(self.q)?,
            k: slice(self.k)?,
            v: slice(self.v)?,
            decay: slice(self.decay)?,
            beta: slice(self.beta)?,
        })
    }
}

impl Model<'_> {
    /// `Qwen3_5GatedDeltaNet` on the rows x `[rows, hidden]`, of which those that are not valid change no state.
    pub fn delta_net_of_rows(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        layer: usize,
        chunks: &Chunks,
    ) -> Result<TensorId> {
        let c = self.config;
        let (key_heads, heads, dk, dv) = (c.key_heads, c.value_heads, c.key_dim, c.value_dim);
        let (keys, values, rows) = (key_heads * dk, heads * dv, chunks.rows);
        let mixed = self.projected(b, x, layer, Projected::Mixed)?;
        let mixed = self.convolution(layer)?.build(b, mixed, Some(chunks.keep))?;
        let mixed = b.silu(mixed)?;

        let heads_of = |b: &mut GraphBuilder, start: usize, gain: f32| {
            let part = b.slice(mixed, 1, start, start + keys)?;
            let part = b.reshape(part, &[rows * key_heads, dk])?;
            let part = b.l2_norm(part, L2_EPS, gain)?;
            let part = b.reshape(part, &[rows, key_heads, dk])?;
            let part = b.transpose(part, &[1, 0, 2])?;
            // Value head j uses key head j / (heads / key_heads).
            let part = b.reshape(part, &[key_heads, rows * dk])?;
            let part = b.repeat_rows(part, heads / key_heads)?;
            b.reshape(part, &[heads, rows, dk])
        };
        let q = heads_of(b, 0, 1.0 / (dk as f32).sqrt())?;
        let k = heads_of(b, keys, 1.0)?;
        let v = b.slice(mixed, 1, 2 * keys, 2 * keys + values)?;
        let v = b.reshape(v, &[rows, heads, dv])?;
        let v = b.transpose(v, &[1, 0, 2])?;

        let by_head = |b: &mut GraphBuilder, gate: TensorId| {
            let gate = b.mul(gate, chunks.valid)?;
            let gate = b.transpose(gate, &[1, 0])?;
            b.reshape(gate, &[heads, rows, 1])
        };
        let beta = self.projected(b, x, layer, Projected::Beta)?;
        let beta = b.unary(UnaryOp::Sigmoid, beta)?;
        let beta = by_head(b, beta)?;
        let decay = self.projected(b, x, layer, Projected::Decay)?;
        let decay = self.log_decay(b, decay, layer)?;
        let decay = b.clamp(decay, -MAX_DECAY, 0.0)?;
        let decay = b.cast(decay, Elem::Activation)?;
        let decay = by_head(b, decay)?;

        let past = b.input(&format!("past_ssm_{layer}"), Elem::F32, &[heads, dk, dv])?;
        let mut state = b.cast(past, Elem::Activation)?;
        let tokens = Tokens { q, k, v, decay, beta };
        let mut outs = Vec::new();
        let mut first = 0;
        for size in chunk_sizes(rows) {
            let Some(constants) = chunks.constants(size) else { continue };
            let part = tokens.part(b, first, first + size)?;
            let (out, next) = self.chunk(b, &part, state, constants)?;
            outs.push(out);
            (state, first) = (next, first + size);
        }
        let out = b.concat(&outs, 1)?;
        let out = b.transpose(out, &[1, 0, 2])?;
        let out = b.reshape(out, &[rows * heads, dv])?;
        let y = self.gated(b, x, out, layer, rows)?;
        let state = b.cast(state, Elem::F32)?;
        b.output(&format!("present_ssm_{layer}"), state)?;
        Ok(y)
    }

    /// Values that the tokens of a chunk read, `[H, C, value_dim]`, and the state after them.
    ///
    /// With G the sums of the logarithms up to a token, A = exp(G_i − G_j) for j ≤ i and E = exp(G):
    /// T = (1 + B)⁻¹ for B = β · A · kkᵀ below the diagonal, V = T · β(v − E · kS),
    /// out = E · qS + (A · qkᵀ) · V, S' = E_C · S + (A_C · k)ᵀ · V.
    fn chunk(
        &self,
        b: &mut GraphBuilder,
        tokens: &Tokens,
        state: TensorId,
        constants: &Constants,
    ) -> Result<(TensorId, TensorId)> {
        let Tokens { q, k, v, decay, beta } = *tokens;
        let size = b.shape(q)?[1];
        // Sums over the tokens between two: a difference of G would cancel.
        let steps = b.mul(decay, constants.below)?;
        let between = b.matmul(constants.sums, steps, false)?;
        let between = b.unary(UnaryOp::Exp, between)?;
        let since = b.matmul(constants.sums, decay, false)?;
        let since = b.unary(UnaryOp::Exp, since)?;
        let until = b.matmul(constants.behind, decay, false)?;
        let until = b.unary(UnaryOp::Exp, until)?;

        let both = b.concat(&[q, k], 1)?;
        let scores = b.matmul(both, k, true)?;
        let [qk, kk] = [0, size].map(|first| (first, first + size));
        let qk = b.slice(scores, 1, qk.0, qk.1)?;
        let kk = b.slice(scores, 1, kk.0, kk.1)?;
        let reads = b.matmul(both, state, false)?;
        let q_state = b.slice(reads, 1, 0, size)?;
        let k_state = b.slice(reads, 1, size, 2 * size)?;

        let overlap = b.mul(kk, between)?;
        let overlap = b.mul(overlap, beta)?;
        let mut inverse = constants.diagonal;
        for (step, &merge) in constants.merges.iter().enumerate() {
            let block = b.mul(overlap, merge)?;
            let change = if step == 0 {
                block
            } else {
                let left = b.matmul(inverse, block, false)?;
                b.matmul(left, inverse, false)?
            };
            inverse = b.sub(inverse, change)?;
        }
        let known = b.mul(k_state, since)?;
        let error = b.sub(v, known)?;
        let error = b.mul(error, beta)?;
        let values =
            if constants.merges.is_empty() { error } else { b.matmul(inverse, error, false)? };

        let own = b.mul(qk, between)?;
        let own = b.mul(own, constants.lower)?;
        let own = b.matmul(own, values, false)?;
        let old = b.mul(q_state, since)?;
        let out = b.add(old, own)?;

        let left = b.slice(since, 1, size - 1, size)?;
        let kept = b.mul(state, left)?;
        let keys = b.mul(k, until)?;
        let keys = b.transpose(keys, &[0, 2, 1])?;
        let update = b.matmul(keys, values, false)?;
        Ok((out, b.add(kept, update)?))
    }
}
