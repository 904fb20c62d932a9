//! The experts of many tokens at once: each expert once a layer, over the tokens that chose it.

use half::f16;

use super::ffn::Ffn;
use super::residual::{Residual, Tensor};
use super::route::Choice;
use super::spans::Spans;
use super::table::Table;
use crate::kernels::{f16_to_f32, f32_to_f16};
use qhx_op::{BufferId, DType, Error, GraphId, Host, Result};

/// Values that are converted to f32 at a time.
const BLOCK: usize = 512;
/// No row.
const NONE: u32 = u32::MAX;

/// The graph of one expert over several tokens, and what gathers and scatters their rows.
///
/// | tensor | shape | |
/// |---|---|---|
/// | `x` → `y` | `[tokens, hidden]` | the expert's tokens, and what it adds to each |
#[derive(Debug)]
pub(super) struct Grouped {
    ffn: Ffn,
    /// Tokens that the expert's graph takes at once.
    pub ffn_rows: usize,
    ffn_x: Tensor,
    ffn_y: Tensor,
    /// The residual with what the experts have added so far, f32 `[rows, hidden]`.
    sum: BufferId,
    /// Choices of each token, one token after the other.
    choices: Vec<Choice>,
    pub a_token: usize,
    /// Tokens of the expert that is running.
    members: Vec<(u32, f32)>,
    /// For each token its row in the expert's graph.
    row_of: Vec<u32>,
}

impl Grouped {
    /// Binds everything, for steps of at most as many rows as `residual` has. `a_token` is how many experts a token
    /// goes to.
    pub fn open(
        host: &mut Host,
        residual: &Residual,
        a_token: usize,
        ffn: GraphId,
        table: &Table,
        step: f32,
    ) -> Result<Self> {
        let input = host.input(ffn, "x")?;
        let output = host.output(ffn, "y")?;
        let dtype = host.require_float(ffn, input)?;
        let (x, y) = (host.tensor(ffn, input), host.tensor(ffn, output));
        if dtype != residual.z.dtype
            || x.width() != residual.hidden
            || x.elements() == 0
            || x.elements() != y.elements()
        {
            return Err(Error::graph(format!(
                "graph {:?} (manifest /plan/params/ffn_prefill): tensors {x} and {y}: expected rows of \
                 {} values, {}, as many in both",
                host.graph(ffn).name,
                residual.hidden,
                residual.z.dtype
            )));
        }
        let ffn_rows = x.elements() / residual.hidden;
        let ffn_x = Tensor { buffer: host.allocate_for(ffn, input)?, dtype };
        let dtype = host.require_float(ffn, output)?;
        let ffn_y = Tensor { buffer: host.allocate_for(ffn, output)?, dtype };
        let rows = residual.rows;
        Ok(Self {
            ffn: Ffn::open(host, ffn, &[String::new()], table, step)?,
            ffn_rows,
            ffn_x,
            ffn_y,
            sum: host.allocate(rows * residual.hidden * size_of::<f32>())?,
            choices: vec![Choice::default(); rows * a_token],
            a_token,
            members: Vec::with_capacity(rows),
            row_of: vec![NONE; rows],
        })
    }

    /// The graph.
    pub fn graph(&self) -> GraphId {
        self.ffn.graph
    }

    /// Choices of the token in a row, to be written.
    pub fn choices(&mut self, row: usize) -> &mut [Choice] {
        &mut self.choices[row * self.a_token..(row + 1) * self.a_token]
    }

    /// Asks for the experts that `count` tokens go to. A prompt that goes to all of a layer's goes to all of the next
    /// one's, most likely: they come from the disk while this layer is computed.
    pub fn ask(&self, host: &Host, count: usize, table: &Table, layer: usize) {
        let all = 0..table.sizes.experts;
        let chosen = |expert: usize| {
            let mut choices = self.choices[..count * self.a_token].iter();
            choices.any(|choice| choice.expert == expert)
        };
        table.ask(host, layer, all.clone().filter(|&expert| chosen(expert)));
        if all.clone().all(chosen) && layer + 1 < table.sizes.layers {
            table.ask(host, layer + 1, all);
        }
    }

    /// Each expert of a layer over its tokens; their sum becomes the next residual.
    pub fn run(
        &mut self,
        host: &mut Host,
        residual: &Residual,
        count: usize,
        table: &Table,
        layer: usize,
        spans: &Spans,
    ) -> Result<()> {
        spans.time(host, spans.scatter, |host| self.start(host, residual, count))?;
        for expert in 0..residual.experts {
            self.members.clear();
            let tokens = self.choices[..count * self.a_token].chunks_exact(self.a_token);
            for (token, choices) in tokens.enumerate() {
                let chosen = choices.iter().find(|choice| choice.expert == expert);
                self.members.extend(chosen.map(|choice| (token as u32, choice.multiplier)));
            }
            if self.members.is_empty() {
                continue;
            }
            spans.time(host, spans.experts, |host| {
                self.ffn.load(host, table, layer, std::iter::once(expert))
            })?;
            for first in (0..self.members.len()).step_by(self.ffn_rows) {
                let last = self.members.len().min(first + self.ffn_rows);
                spans.time(host, spans.scatter, |host| self.gather(host, residual, first..last))?;
                host.execute(self.ffn.graph)?;
                spans
                    .time(host, spans.scatter, |host| self.scatter(host, residual, first..last))?;
            }
        }
        spans.time(host, spans.scatter, |host| self.finish(host, residual, count))
    }

    /// The sum begins as the residual that the experts add to.
    fn start(&self, host: &mut Host, residual: &Residual, count: usize) -> Result<()> {
        let (hidden, y) = (residual.hidden, residual.y);
        host.parallel_fill([y.buffer], &[self.sum], hidden * 4, |[y_bytes], _, first, bytes| {
            let row = first / (hidden * 4);
            if row < count {
                let out: &mut [f32] = bytemuck::cast_slice_mut(bytes);
                to_f32(y_bytes, y.dtype, row * hidden, out);
            }
        })
    }

    /// The rows of some members, one below the other, become the input of the expert.
    fn gather(
        &self,
        host: &mut Host,
        residual: &Residual,
        members: std::ops::Range<usize>,
    ) -> Result<()> {
        let members = &self.members[members];
        let row_bytes = residual.hidden * self.ffn_x.dtype.size();
        let sources = [residual.z.buffer];
        host.parallel_fill(sources, &[self.ffn_x.buffer], row_bytes, |[z], _, first, bytes| {
            if let Some((token, _)) = members.get(first / row_bytes) {
                let start = *token as usize * row_bytes;
                bytes.copy_from_slice(&z[start..start + row_bytes]);
            }
        })
    }

    /// Adds what the expert gave, times the multipliers, to the rows of its members.
    fn scatter(
        &mut self,
        host: &mut Host,
        residual: &Residual,
        members: std::ops::Range<usize>,
    ) -> Result<()> {
        self.row_of.fill(NONE);
        let members = &self.members[members];
        for (row, (token, _)) in members.iter().enumerate() {
            self.row_of[*token as usize] = row as u32;
        }
        let (hidden, y, row_of) = (residual.hidden, self.ffn_y, &self.row_of);
        host.parallel_fill([y.buffer], &[self.sum], hidden * 4, |[y_bytes], _, first, bytes| {
            let row = row_of[first / (hidden * 4)];
            let Some((_, multiplier)) = members.get(row as usize) else { return };
            let sum: &mut [f32] = bytemuck::cast_slice_mut(bytes);
            let mut wide = [0f32; BLOCK];
            for (block, sum) in sum.chunks_mut(BLOCK).enumerate() {
                let wide = &mut wide[..sum.len()];
                to_f32(y_bytes, y.dtype, row as usize * hidden + block * BLOCK, wide);
                for (sum, value) in sum.iter_mut().zip(wide) {
                    *sum += *multiplier * *value;
                }
            }
        })
    }

    /// The sum becomes the next layer's residual; rows after the prompt become zero.
    fn finish(&self, host: &mut Host, residual: &Residual, count: usize) -> Result<()> {
        let (hidden, x) = (residual.hidden, residual.x);
        let row_bytes = hidden * x.dtype.size();
        host.parallel_fill([self.sum], &[x.buffer], row_bytes, |[sum], _, first, bytes| {
            let row = first / row_bytes;
            let sum: &[f32] = bytemuck::cast_slice(sum);
            let sum = &sum[row * hidden..(row + 1) * hidden];
            match x.dtype {
                _ if row >= count => bytes.fill(0),
                DType::F16 => f32_to_f16(sum, bytemuck::cast_slice_mut(bytes)),
                _ => bytes.copy_from_slice(bytemuck::cast_slice(sum)),
            }
        })
    }
}

/// Values of an f16 or f32 buffer from element `first` on.
fn to_f32(bytes: &[u8], dtype: DType, first: usize, out: &mut [f32]) {
    let range = first..first + out.len();
    match dtype {
        DType::F16 => {
            let values: &[f16] = bytemuck::cast_slice(bytes);
            f16_to_f32(&values[range], out);
        }
        _ => {
            let values: &[f32] = bytemuck::cast_slice(bytes);
            out.copy_from_slice(&values[range]);
        }
    }
}
