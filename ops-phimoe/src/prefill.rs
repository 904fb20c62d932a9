//! Many tokens of a prompt at once: one execution of attention and router per layer, and each expert once per
//! layer over the tokens that chose it.

use half::f16;
use qhx_op::fill::{Embedding, Rope, StepMask};
use qhx_op::kernels::{f16_to_f32, f32_to_f16};
use qhx_op::{BufferId, DType, Error, GraphId, Host, Result};

use crate::ffn::{Ffn, SINGLE};
use crate::layers::{Layers, Router, Tensor};
use crate::route::Choice;
use crate::spans::Spans;
use crate::table::Table;

/// Values that are converted to f32 at a time.
const BLOCK: usize = 512;
/// No row.
const NONE: u32 = u32::MAX;

/// The prefill graphs and what lies between them.
#[derive(Debug)]
pub(crate) struct Batched {
    pub layers: Layers,
    /// Of graphs that read caches: others have one that never changes.
    mask: Option<StepMask>,
    ffn: Ffn,
    /// Tokens that the expert's graph takes at once.
    ffn_rows: usize,
    ffn_x: Tensor,
    ffn_y: Tensor,
    /// The residual with what the experts have added so far, f32 `[rows, hidden]`.
    sum: BufferId,
    choices: Vec<[Choice; 2]>,
    /// Tokens of the expert that is running.
    members: Vec<(u32, f32)>,
    /// For each token its row in the expert's graph.
    row_of: Vec<u32>,
}

impl Batched {
    /// Binds everything but caches and the mask, which is bound where the graphs read caches.
    pub fn open(
        host: &mut Host,
        layers: Layers,
        mask: Option<StepMask>,
        ffn: GraphId,
        table: &Table,
        step: f32,
    ) -> Result<Self> {
        let input = host.input(ffn, "x")?;
        let output = host.output(ffn, "y")?;
        let dtype = host.require_float(ffn, input)?;
        let (x, y) = (host.tensor(ffn, input), host.tensor(ffn, output));
        if dtype != layers.z.dtype
            || x.width() != layers.hidden
            || x.elements() == 0
            || x.elements() != y.elements()
        {
            return Err(Error::graph(format!(
                "graph {:?} (manifest /plan/params/ffn_prefill): tensors {x} and {y}: expected rows of \
                 {} values, {}, as many in both",
                host.graph(ffn).name,
                layers.hidden,
                layers.z.dtype
            )));
        }
        let ffn_rows = x.elements() / layers.hidden;
        let ffn_x = Tensor { buffer: host.allocate_for(ffn, input)?, dtype };
        let dtype = host.require_float(ffn, output)?;
        let ffn_y = Tensor { buffer: host.allocate_for(ffn, output)?, dtype };
        let rows = layers.rows;
        Ok(Self {
            ffn: Ffn::open(host, ffn, &SINGLE, table, step)?,
            ffn_rows,
            ffn_x,
            ffn_y,
            sum: host.allocate(rows * layers.hidden * size_of::<f32>())?,
            choices: vec![[Choice::default(); 2]; rows],
            members: Vec::with_capacity(rows),
            row_of: vec![NONE; rows],
            layers,
            mask,
        })
    }

    /// Whether the graphs take tokens that others come before.
    pub fn continues(&self) -> bool {
        self.mask.is_some()
    }

    /// Runs tokens from `position` on through all layers; of the prompt's `total`, `done` came before. The residual of
    /// token `i` ends up in row `i` of `layers.x`, and the new rows of the caches where the graphs give them.
    #[expect(clippy::too_many_arguments, reason = "the parts of the op that both ways share")]
    pub fn run(
        &mut self,
        host: &mut Host,
        tokens: &[u32],
        position: usize,
        [done, total]: [usize; 2],
        embedding: &Embedding,
        rope: &mut Rope,
        table: &Table,
        router: &mut Router,
        spans: &Spans,
    ) -> Result<()> {
        spans.time(host, spans.fill, |host| {
            let x = self.layers.x;
            embedding.gather_rows(host, tokens, x.buffer, x.dtype)?;
            self.layers.fill_rope(host, rope, position);
            if let Some(mask) = &mut self.mask {
                mask.fill(host, position);
            }
            Ok(())
        })?;
        for layer in 0..self.layers.graphs.len() {
            host.execute(self.layers.graphs[layer])?;
            spans.time(host, spans.route, |host| {
                for row in 0..tokens.len() {
                    self.choices[row] =
                        router.choose(host, &self.layers, layer, row, position + row)?;
                }
                self.ask(host, tokens.len(), table, layer);
                Ok(())
            })?;
            self.experts(host, tokens.len(), table, layer, spans)?;
            let part = tokens.len() * (layer + 1) / self.layers.graphs.len();
            host.progress(done + part, total);
        }
        Ok(())
    }

    /// Asks for the experts that tokens go to. A prompt that goes to all of a layer's goes to all of the next one's,
    /// most likely: they come from the disk while this layer is computed.
    fn ask(&self, host: &Host, count: usize, table: &Table, layer: usize) {
        let all = 0..self.layers.experts;
        let chosen = |expert: usize| {
            let mut choices = self.choices[..count].iter().flatten();
            choices.any(|choice| choice.expert == expert)
        };
        table.ask(host, layer, all.clone().filter(|&expert| chosen(expert)));
        if all.clone().all(chosen) && layer + 1 < self.layers.graphs.len() {
            table.ask(host, layer + 1, all);
        }
    }

    /// Each expert of a layer over its tokens; their sum becomes the next residual.
    fn experts(
        &mut self,
        host: &mut Host,
        count: usize,
        table: &Table,
        layer: usize,
        spans: &Spans,
    ) -> Result<()> {
        spans.time(host, spans.scatter, |host| self.start(host, count))?;
        for expert in 0..self.layers.experts {
            self.members.clear();
            for (token, choices) in self.choices[..count].iter().enumerate() {
                let chosen = choices.iter().find(|choice| choice.expert == expert);
                self.members.extend(chosen.map(|choice| (token as u32, choice.multiplier)));
            }
            if self.members.is_empty() {
                continue;
            }
            spans.time(host, spans.experts, |host| self.ffn.load(host, table, layer, &[expert]))?;
            for first in (0..self.members.len()).step_by(self.ffn_rows) {
                let last = self.members.len().min(first + self.ffn_rows);
                spans.time(host, spans.scatter, |host| self.gather(host, first..last))?;
                host.execute(self.ffn.graph)?;
                spans.time(host, spans.scatter, |host| self.scatter(host, first..last))?;
            }
        }
        spans.time(host, spans.scatter, |host| self.finish(host, count))
    }

    /// The sum starts as the residual after attention.
    fn start(&self, host: &mut Host, count: usize) -> Result<()> {
        let (hidden, y) = (self.layers.hidden, self.layers.y);
        host.parallel_fill([y.buffer], &[self.sum], hidden * 4, |[y_bytes], _, first, bytes| {
            let row = first / (hidden * 4);
            if row < count {
                let out: &mut [f32] = bytemuck::cast_slice_mut(bytes);
                to_f32(y_bytes, y.dtype, row * hidden, out);
            }
        })
    }

    /// The rows of some members, one below the other, become the input of the expert.
    fn gather(&self, host: &mut Host, members: std::ops::Range<usize>) -> Result<()> {
        let members = &self.members[members];
        let row_bytes = self.layers.hidden * self.ffn_x.dtype.size();
        let sources = [self.layers.z.buffer];
        host.parallel_fill(sources, &[self.ffn_x.buffer], row_bytes, |[z], _, first, bytes| {
            if let Some((token, _)) = members.get(first / row_bytes) {
                let start = *token as usize * row_bytes;
                bytes.copy_from_slice(&z[start..start + row_bytes]);
            }
        })
    }

    /// Adds what the expert gave, times the multipliers, to the rows of its members.
    fn scatter(&mut self, host: &mut Host, members: std::ops::Range<usize>) -> Result<()> {
        self.row_of.fill(NONE);
        let members = &self.members[members];
        for (row, (token, _)) in members.iter().enumerate() {
            self.row_of[*token as usize] = row as u32;
        }
        let (hidden, y, row_of) = (self.layers.hidden, self.ffn_y, &self.row_of);
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
    fn finish(&self, host: &mut Host, count: usize) -> Result<()> {
        let (hidden, x) = (self.layers.hidden, self.layers.x);
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
