//! Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a recurrent layer whose state decays by a factor for each head.
//!
//! Arithmetic: `transformers`, `models/mamba2/modeling_mamba2.py`. One token takes a step of the recurrence, several
//! take its chunked form (`mamba2_chunk_scan`): matmuls instead of a step for each token.
//!
//! | tensor | shape, P rows, G groups of H heads | |
//! |---|---|---|
//! | `past_conv_i` → `present_conv_i` | `[kernel − 1, H · dim + 2 · G · state]` | rows oldest first |
//! | `past_ssm_i` → `present_ssm_i` | f32 `[G, state, H / G · dim]` | heads of a group side by side: B and C are theirs in common |
//! | `valid`, `keep` | `[P, 1]`, `[kernel − 1, kernel − 1 + P]` | where P > 1, see [`Scan::inputs`] |

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, ReduceOp, TensorId, UnaryOp};
use serde_json::Value;

use super::conv::{CausalConv, conv_taps, gcd};
use super::layers::{Layers, scaled};
use super::reader::Reader;
use crate::recipe::Precision;

/// Tokens that are computed at once; more are computed one chunk after the other.
const WIDEST: usize = 64;
/// Bound on how much a token forgets: e to the power of minus this is 0 in half precision.
const MAX_DECAY: f32 = 60.0;

/// Position of the norm beside the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateNorm {
    /// No norm.
    None,
    /// Rows are normalised, then gated.
    Before,
    /// Rows are gated, then normalised.
    After,
}

/// Sizes and switches of Mamba-2 layers.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2 {
    /// Heads, a multiple of `groups`.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Groups of heads with a B and a C each; the norm covers a group, too.
    pub groups: usize,
    /// Elements of B and C.
    pub state: usize,
    /// Rows that the convolution sees.
    pub kernel: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// `in_proj` has a bias.
    pub in_bias: bool,
    /// `out_proj` has a bias.
    pub out_bias: bool,
    /// Position of the norm.
    pub norm: GateNorm,
    /// Least and largest time step, where there are bounds.
    pub limits: Option<[f32; 2]>,
    /// Factor of the rows before `in_proj`.
    pub in_factor: f32,
    /// Factors of the parts of `in_proj`: gate, x, B, C, time step.
    pub factors: [f32; 5],
}

impl Mamba2 {
    /// Elements of all heads.
    pub const fn inner(&self) -> usize {
        self.heads * self.dim
    }

    /// Channels of the convolution: x, B and C.
    pub const fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Checks that the sizes fit each other.
    ///
    /// # Errors
    /// When heads are no multiple of groups, or a convolution has no state.
    pub fn check(self, reader: &Reader<'_>) -> Result<Self> {
        if !self.heads.is_multiple_of(self.groups) {
            return Err(reader.fault(format!(
                "Mamba-2 has {} heads and {} groups, expected a multiple and its divisor",
                self.heads, self.groups
            )));
        }
        if self.kernel < 2 {
            return Err(reader.fault(
                "the convolution of Mamba-2 has a kernel of 1, expected at least 2".to_owned(),
            ));
        }
        Ok(self)
    }

    /// The limits of time steps under `key`; none for 0 and infinity, as where the key is absent.
    ///
    /// # Errors
    /// When they are no two numbers in order.
    pub fn limits(reader: &Reader<'_>, key: &str) -> Result<Option<[f32; 2]>> {
        let Some(value) = reader.get(key) else { return Ok(None) };
        // `transformers` writes numbers that JSON does not have as such objects.
        let number = |value: &Value| match value.get("__float__").and_then(Value::as_str) {
            Some("Infinity") => Some(f32::INFINITY),
            _ => value.as_f64().map(|number| number as f32),
        };
        let limits: Option<Vec<f32>> =
            value.as_array().and_then(|list| list.iter().map(number).collect());
        match limits.as_deref() {
            Some(&[0.0, f32::INFINITY]) => Ok(None),
            Some(&[least, most]) if least >= 0.0 && least < most => Ok(Some([least, most])),
            _ => Err(reader.bad(key, value, "a number from 0 on and a larger one")),
        }
    }
}

/// Inputs and constants that the recurrent layers of a graph share.
#[derive(Debug)]
pub struct Scan {
    rows: usize,
    /// `[rows, 1]` and `[kernel − 1, kernel − 1 + rows]`; none of one row.
    valid: Option<[TensorId; 2]>,
    /// Sizes of chunks that occur, and the constants of each.
    sizes: Vec<(usize, Constants)>,
}

/// Matrices of a chunk of C tokens.
#[derive(Debug, Clone)]
struct Constants {
    /// Ones on and below the diagonal, for each head: `[heads, C, C]`.
    sums: TensorId,
    /// Ones on and below the diagonal: `[C, C]`.
    lower: TensorId,
    /// Ones above the diagonal: `[C, C]`.
    behind: TensorId,
    /// Ones below the diagonal: `[1, C, C]`.
    below: TensorId,
}

impl Constants {
    fn new(b: &mut GraphBuilder, heads: usize, size: usize) -> Result<Self> {
        let mut matrix = |name: &str, copies: &[usize], one: fn(usize, usize) -> bool| {
            let values = (0..size * size).map(|at| f32::from(u8::from(one(at / size, at % size))));
            let values = values.collect::<Vec<f32>>().repeat(copies.iter().product());
            let shape = [copies, &[size, size]].concat();
            b.constant(&format!("{name}_{size}"), Elem::Activation, &shape, values)
        };
        Ok(Self {
            sums: matrix("sums", &[heads], |row, column| row >= column)?,
            lower: matrix("lower", &[], |row, column| row >= column)?,
            behind: matrix("behind", &[], |row, column| row < column)?,
            below: matrix("below", &[1], |row, column| row > column)?,
        })
    }
}

impl Scan {
    /// For several rows adds the inputs `valid` `[rows, 1]`, 1 for tokens and 0 for the rows behind them, and `keep`
    /// `[kernel − 1, kernel − 1 + rows]`, which chooses the rows that convolutions of the next graph begin with.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn inputs(b: &mut GraphBuilder, mamba: &Mamba2, rows: usize) -> Result<Self> {
        if rows == 1 {
            return Ok(Self { rows, valid: None, sizes: Vec::new() });
        }
        let older = mamba.kernel - 1;
        let valid = b.input("valid", Elem::Activation, &[rows, 1])?;
        let keep = b.input("keep", Elem::Activation, &[older, older + rows])?;
        let mut sizes: Vec<(usize, Constants)> = Vec::new();
        for size in chunks(rows) {
            if size > 1 && sizes.iter().all(|(have, _)| *have != size) {
                sizes.push((size, Constants::new(b, mamba.heads, size)?));
            }
        }
        Ok(Self { rows, valid: Some([valid, keep]), sizes })
    }
}

/// Sizes of the chunks of `rows` tokens.
fn chunks(rows: usize) -> impl Iterator<Item = usize> {
    (0..rows).step_by(WIDEST).map(move |first| WIDEST.min(rows - first))
}

/// Writes and reads of tokens. R rows, H heads in G groups.
#[derive(Debug, Clone, Copy)]
struct Tokens {
    /// `[R, H, dim]`
    x: TensorId,
    /// `[R, G, state]`
    write: TensorId,
    /// `[R, G, state]`
    read: TensorId,
    /// Time steps, 0 for rows that are no tokens: `[R, H]`.
    step: TensorId,
    /// Logarithm of what is left of the state after the token: `[R, H]`, at most 0.
    decay: TensorId,
}

impl Tokens {
    fn part(&self, b: &mut GraphBuilder, first: usize, end: usize) -> Result<Self> {
        let mut slice = |x: TensorId| b.slice(x, 0, first, end);
        Ok(Self {
            x: slice(self.x)?,
            write: slice(self.write)?,
            read: slice(self.read)?,
            step: slice(self.step)?,
            decay: slice(self.decay)?,
        })
    }
}

impl Layers<'_> {
    /// A Mamba-2 layer on rows x `[rows, hidden]`, with the tensors below `name` (`layers.3.mamba`): `in_proj`,
    /// `conv1d`, `A_log`, `D`, `dt_bias`, `norm` where there is one, `out_proj`. `layer` numbers its states.
    ///
    /// # Errors
    /// When a tensor is missing, or shapes do not fit.
    pub fn mamba2(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        (name, layer): (&str, usize),
        mamba: &Mamba2,
        scan: &Scan,
    ) -> Result<TensorId> {
        let Mamba2 { heads, dim, groups, state, in_bias, factors, .. } = *mamba;
        let (rows, hidden, inner) = (scan.rows, b.width(x)?, mamba.inner());
        let parts = [("in_gate", inner), ("in_conv", mamba.channels()), ("in_step", heads)];
        let parts = parts.map(|(name, outputs)| (name, outputs, in_bias));
        let [gate, columns, step] = self.rows_of(name, Some("in_proj"), parts, hidden)?;
        let x = scaled(b, x, mamba.in_factor)?;
        let [gate, columns] = self.build_all(b, x, [gate, columns])?;
        // One output a head: as int8 they would save nothing and cost accuracy where it counts.
        let [step] = Self { precision: Precision::Fp16, ..*self }.build_all(b, x, [step])?;

        let keep = scan.valid.map(|[_, keep]| keep);
        let mixed = self.mamba2_conv(name, layer, mamba)?.build(b, columns, keep)?;
        let mixed = b.silu(mixed)?;
        let width = b.width(mixed)?;
        let mut part = |start: usize, shape: [usize; 3]| {
            let end = start + shape[1] * shape[2];
            let part = match rows {
                1 => b.slice(mixed, 0, start / width, end / width)?,
                _ => b.slice(mixed, 1, start, end)?,
            };
            b.reshape(part, &shape)
        };
        let values = part(0, [rows, heads, dim])?;
        let write = part(inner, [rows, groups, state])?;
        let read = part(inner + groups * state, [rows, groups, state])?;

        let step = scaled(b, step, factors[4])?;
        let (step, decay) = self.time_steps(b, step, name, mamba, scan)?;
        let past = [groups, state, heads / groups * dim];
        let past = b.input(&format!("past_ssm_{layer}"), Elem::F32, &past)?;
        let mut carried = b.cast(past, Elem::Activation)?;
        let tokens = Tokens { x: values, write, read, step, decay };
        let mut outs = Vec::new();
        let mut first = 0;
        for size in chunks(rows) {
            let part = if size == rows { tokens } else { tokens.part(b, first, first + size)? };
            let constants = scan.sizes.iter().find(|(have, _)| *have == size);
            let (out, next) = match constants {
                Some((_, constants)) => mamba.chunk(b, &part, carried, constants)?,
                None => mamba.one(b, &part, carried)?,
            };
            outs.push(out);
            (carried, first) = (next, first + size);
        }
        let out = if let [out] = outs[..] { out } else { b.concat(&outs, 0)? };
        let skip = self.checkpoint.values(&format!("{name}.D"), &[heads])?;
        let skip = b.constant("skip", Elem::Activation, &[1, heads, 1], skip)?;
        let skipped = b.mul(values, skip)?;
        let out = b.add(out, skipped)?;
        let out = b.reshape(out, &[rows, inner])?;
        let gate = scaled(b, gate, factors[0])?;
        let gated = self.mamba2_gate(b, out, gate, name, mamba)?;
        let y = self.linear(b, gated, &format!("{name}.out_proj"), hidden, mamba.out_bias)?;
        let carried = b.cast(carried, Elem::F32)?;
        b.output(&format!("present_ssm_{layer}"), carried)?;
        Ok(y)
    }

    /// The convolution, in whose taps the factors of x, B and C are.
    fn mamba2_conv(&self, name: &str, layer: usize, mamba: &Mamba2) -> Result<CausalConv> {
        let Mamba2 { dim, groups, state, kernel, factors, .. } = *mamba;
        let (channels, inner) = (mamba.channels(), mamba.inner());
        let mut taps =
            conv_taps(self.checkpoint, &format!("{name}.conv1d.weight"), [channels, kernel])?;
        for row in taps.chunks_exact_mut(channels) {
            for (channel, tap) in row.iter_mut().enumerate() {
                let part = channel.checked_sub(inner).map_or(0, |at| 1 + at / (groups * state));
                *tap *= factors[1 + part];
            }
        }
        let bias = mamba.conv_bias.then(|| format!("{name}.conv1d.bias"));
        let bias = bias.map(|bias| self.checkpoint.values(&bias, &[channels])).transpose()?;
        Ok(CausalConv { layer, channels, kernel, width: gcd(dim, state), taps, bias })
    }

    /// Time steps of raw ones `[rows, heads]`, and the logarithms of what they leave of the state.
    fn time_steps(
        &self,
        b: &mut GraphBuilder,
        raw: TensorId,
        name: &str,
        mamba: &Mamba2,
        scan: &Scan,
    ) -> Result<(TensorId, TensorId)> {
        let bias = self.checkpoint.values(&format!("{name}.dt_bias"), &[mamba.heads])?;
        let bias = b.row("step_bias", bias)?;
        let step = b.add(raw, bias)?;
        let mut step = b.softplus(step)?;
        if let Some([least, most]) = mamba.limits {
            step = b.clamp(step, least, most)?;
        }
        if let Some([valid, _]) = scan.valid {
            step = b.mul(step, valid)?;
        }
        let mut rates = self.checkpoint.values(&format!("{name}.A_log"), &[mamba.heads])?;
        rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        let rates = b.row("rates", rates)?;
        let decay = b.mul(step, rates)?;
        Ok((step, b.clamp(decay, -MAX_DECAY, 0.0)?))
    }

    /// `out` `[rows, heads · dim]`, gated and normalised as the switches say.
    fn mamba2_gate(
        &self,
        b: &mut GraphBuilder,
        out: TensorId,
        gate: TensorId,
        name: &str,
        mamba: &Mamba2,
    ) -> Result<TensorId> {
        let gate = b.silu(gate)?;
        let norm = |b: &mut GraphBuilder, x: TensorId| {
            let (inner, shape) = (mamba.inner(), b.shape(x)?.to_vec());
            let weight = self.checkpoint.values(&format!("{name}.norm.weight"), &[inner])?;
            if mamba.groups == 1 {
                let weight = b.row("gate_norm", weight)?;
                return b.rms_norm(x, self.eps, weight);
            }
            let each = inner / mamba.groups;
            let x = b.reshape(x, &[shape[0] * mamba.groups, each])?;
            let ones = b.row("ones", vec![1.0; each])?;
            let x = b.rms_norm(x, self.eps, ones)?;
            let x = b.reshape(x, &shape)?;
            let weight = b.row("gate_norm", weight)?;
            b.mul(x, weight)
        };
        match mamba.norm {
            GateNorm::None => b.mul(out, gate),
            GateNorm::Before => {
                let out = norm(b, out)?;
                b.mul(out, gate)
            }
            GateNorm::After => {
                let out = b.mul(out, gate)?;
                norm(b, out)
            }
        }
    }
}

impl Mamba2 {
    /// Elements of the heads of a group.
    const fn lane(&self) -> usize {
        self.heads / self.groups * self.dim
    }

    /// Heads' numbers `[1, H]` as `[G, 1, lane]`: each for all elements of the head.
    fn spread(&self, b: &mut GraphBuilder, numbers: TensorId) -> Result<TensorId> {
        let column = b.reshape(numbers, &[self.heads, 1])?;
        let ones = vec![1.0; self.inner()];
        let name = b.numbered("spread", column);
        let ones = b.constant(&name, Elem::Activation, &[self.heads, self.dim], ones)?;
        let all = b.mul(column, ones)?;
        b.reshape(all, &[self.groups, 1, self.lane()])
    }

    /// Rows `[R, …]` of G times `width` elements as `[G, R, width]`.
    fn by_group(&self, b: &mut GraphBuilder, x: TensorId, width: usize) -> Result<TensorId> {
        let rows = b.shape(x)?.first().copied().unwrap_or(1);
        if self.groups == 1 || rows == 1 {
            return b.reshape(x, &[self.groups, rows, width]);
        }
        let x = b.reshape(x, &[rows, self.groups, width])?;
        b.transpose(x, &[1, 0, 2])
    }

    /// One step of the recurrence S' = e^a S + Bᵀ Δx, whose output C S' is read of the old state: C S' = e^a C S +
    /// (C·B) Δx. Output `[1, H, dim]`.
    fn one(
        &self,
        b: &mut GraphBuilder,
        tokens: &Tokens,
        state: TensorId,
    ) -> Result<(TensorId, TensorId)> {
        let Tokens { x, write, read, step, decay } = *tokens;
        let step = b.reshape(step, &[1, self.heads, 1])?;
        let value = b.mul(x, step)?;
        let value = b.reshape(value, &[self.groups, 1, self.lane()])?;
        let decay = b.unary(UnaryOp::Exp, decay)?;
        let decay = self.spread(b, decay)?;
        let write = b.reshape(write, &[self.groups, 1, self.state])?;
        let read = b.reshape(read, &[self.groups, 1, self.state])?;
        let old = b.matmul(read, state, false)?;
        let old = b.mul(old, decay)?;
        let overlap = b.mul(read, write)?;
        let overlap = b.reduce(ReduceOp::Sum, overlap, 2)?;
        let own = b.mul(value, overlap)?;
        let out = b.add(old, own)?;
        let kept = b.mul(state, decay)?;
        let column = b.reshape(write, &[self.groups, self.state, 1])?;
        let update = b.mul(column, value)?;
        let state = b.add(kept, update)?;
        Ok((b.reshape(out, &[1, self.heads, self.dim])?, state))
    }

    /// Values that the tokens of a chunk read, `[C, H, dim]`, and the state after them.
    ///
    /// With a_t the logarithms of decays and L = e^(a_j+1 + … + a_i) for j ≤ i: out = (L · CBᵀ) Δx + e^(a_1 + … + a_i)
    /// C S, S' = e^(a_1 + … ) S + (B e^(a_i+1 + …))ᵀ Δx. Sums over the tokens between two are matmuls with ones: a
    /// difference of sums would cancel.
    fn chunk(
        &self,
        b: &mut GraphBuilder,
        tokens: &Tokens,
        state: TensorId,
        constants: &Constants,
    ) -> Result<(TensorId, TensorId)> {
        let Tokens { x, write, read, step, decay } = *tokens;
        let (heads, groups, size) = (self.heads, self.groups, b.shape(x)?[0]);
        let columns = b.transpose(decay, &[1, 0])?;
        let columns = b.reshape(columns, &[heads, size, 1])?;
        let steps = b.mul(columns, constants.below)?;
        let between = b.matmul(constants.sums, steps, false)?;
        let between = b.unary(UnaryOp::Exp, between)?;
        let since = b.matmul(constants.lower, decay, false)?;
        let since = b.unary(UnaryOp::Exp, since)?;
        let until = b.matmul(constants.behind, decay, false)?;
        let until = b.unary(UnaryOp::Exp, until)?;

        let read = self.by_group(b, read, self.state)?;
        let write = self.by_group(b, write, self.state)?;
        let overlap = b.matmul(read, write, true)?;
        let seen = b.reshape(constants.lower, &[1, size, size])?;
        let overlap = b.mul(overlap, seen)?;
        let overlap = b.reshape(overlap, &[groups, 1, size, size])?;
        let between = b.reshape(between, &[groups, heads / groups, size, size])?;
        let weights = b.mul(between, overlap)?;
        let weights = b.reshape(weights, &[heads, size, size])?;
        let step = b.reshape(step, &[size, heads, 1])?;
        let values = b.mul(x, step)?;
        let by_head = b.transpose(values, &[1, 0, 2])?;
        let own = b.matmul(weights, by_head, false)?;
        let own = b.transpose(own, &[1, 0, 2])?;
        let old = b.matmul(read, state, false)?;
        let old = if groups == 1 { old } else { b.transpose(old, &[1, 0, 2])? };
        let old = b.reshape(old, &[size, heads, self.dim])?;
        let left = b.slice(since, 0, size - 1, size)?;
        let since = b.reshape(since, &[size, heads, 1])?;
        let old = b.mul(old, since)?;
        let out = b.add(old, own)?;

        let until = b.reshape(until, &[size, heads, 1])?;
        let values = b.mul(values, until)?;
        let values = self.by_group(b, values, self.lane())?;
        let write = b.transpose(write, &[0, 2, 1])?;
        let update = b.matmul(write, values, false)?;
        let left = self.spread(b, left)?;
        let kept = b.mul(state, left)?;
        Ok((out, b.add(kept, update)?))
    }
}
