//! A graph as a program: a list of instructions over memory that is laid out when the graph is compiled.
//!
//! Shapes are fixed, so that everything but the arithmetic happens once: values that are only read in another order
//! (`Reshape`, `Transpose`, `Slice`) are no instructions, and a value's memory goes to the next that fits when nobody
//! reads it any more. Matmuls read their weights as they are stored.

mod attend;
#[cfg(test)]
mod attend_tests;
mod compile;
mod conv;
#[cfg(test)]
mod conv_tests;
mod kernels;
mod lower;
mod memory;
#[cfg(test)]
mod tests;
mod view;

use std::sync::atomic::{AtomicBool, Ordering};

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::graph::{BinaryOp, Graph, ReduceOp};
use qhx_types::TensorInfo;
use rten_simd::SimdOp;

use self::attend::{Attend, AttendScratch, CacheScales, MaskShape, Seen, Stored};
use self::conv::{Conv, ConvShape, Padding};
use self::kernels::{IntPairs, LayerNorm, Pairs, Reduce, RmsNorm, Singles, ToF32, Unary, softmax};
use self::view::{Place, Walk};
use crate::integers::are_regular;
use crate::kernels::{Rows, Scales};
use crate::matmul::{Heads, Matrix, Operands, multiply};
use crate::options::{Activations, Caches};
use crate::team::Team;
use crate::weights::{Floats, Weights};

/// A whole graph.
pub(crate) struct Program {
    instructions: Vec<Instruction>,
    constants: Vec<Floats>,
    /// Elements of each buffer.
    buffers: Vec<usize>,
    results: Vec<Walk<1>>,
    /// Elements that instructions compute, each as often as numbers are multiplied for it.
    work: u64,
    /// Type that matmuls with stored weights may round activations to.
    pub(crate) activations: Activations,
    /// The tensors of the graph.
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) outputs: Vec<TensorInfo>,
}

/// An input of the graph, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Input<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
    I8(&'a [i8]),
    /// Bits of f16.
    F16(&'a [u16]),
}

/// The memory of one execution, which the next uses again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// f32, or the bits of i32.
    buffers: Vec<Vec<f32>>,
    /// Positions that each mask shows.
    seen: Vec<Vec<Seen>>,
    attention: AttendScratch,
}

/// All elements of a value, which lie one after the other.
#[derive(Debug, Clone, Copy)]
struct Dense {
    place: Place,
    start: usize,
    len: usize,
}

/// Type of the elements of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Elem {
    F32,
    I32,
    I8,
    /// Caches that only attention reads.
    F16,
}

enum Instruction {
    Binary {
        op: BinaryOp,
        walk: Walk<2>,
        out: usize,
    },
    /// The same of i32.
    IntBinary {
        op: BinaryOp,
        walk: Walk<2>,
        out: usize,
    },
    /// [`Unary::Copy`] moves i32, too.
    Unary {
        op: Unary,
        walk: Walk<1>,
        out: usize,
    },
    /// Integers as f32.
    Convert {
        from: Elem,
        walk: Walk<1>,
        out: usize,
    },
    /// Copies rows of `width` elements to every `stride` elements from `start` on.
    Part {
        walk: Walk<1>,
        out: usize,
        start: usize,
        width: usize,
        stride: usize,
    },
    /// Copies rows to between zeros.
    Pad {
        padding: Padding,
        walk: Walk<1>,
        out: usize,
    },
    Reduce {
        op: ReduceOp,
        x: Dense,
        size: usize,
        inner: usize,
        out: usize,
    },
    Softmax {
        x: Dense,
        size: usize,
        out: usize,
    },
    RmsNorm {
        x: Dense,
        weight: Dense,
        epsilon: f32,
        out: usize,
    },
    LayerNorm {
        x: Dense,
        weight: Dense,
        bias: Dense,
        epsilon: f32,
        out: usize,
    },
    /// Rows of a table.
    Gather {
        table: Table,
        width: usize,
        indices: Dense,
        out: usize,
    },
    Conv {
        shape: ConvShape,
        x: Dense,
        filters: Dense,
        bias: Option<Dense>,
        out: usize,
    },
    /// Finds out what a mask shows, once for all layers.
    See {
        mask: Dense,
        shape: MaskShape,
        seen: usize,
    },
    Attend {
        attend: Box<Attend>,
        out: usize,
    },
    /// Matmuls that wait for nothing of each other.
    Matmuls(Vec<Matmul>),
}

/// Table that rows are gathered from.
enum Table {
    /// f32, or i32.
    Values(Dense),
    /// Rows that are dequantized when they are gathered.
    Stored(Box<Weights>),
}

struct Matmul {
    x: Dense,
    out: usize,
    by: By,
}

enum By {
    Stored(Box<Weights>, Option<Floats>),
    /// int8 `[rows, columns]` of an input, and the scale of each row, which is a constant.
    Input {
        b: Dense,
        scales: Vec<f32>,
        columns: usize,
    },
    /// `[heads, m, n]`, the `k` that is summed over, and whether `b` is transposed.
    Heads {
        b: Dense,
        shape: [usize; 3],
        k: usize,
        transposed: bool,
    },
}

/// Work of a graph that is worth a second thread, which has to be woken.
const SMALL: u64 = 1 << 18;
/// Elements that are worth a second thread, and the fewest that each gets.
const SHARE: usize = 1 << 14;
/// The same where an element takes many instructions.
const LONG_SHARE: usize = 1 << 12;

impl Program {
    /// The program of a graph that was read from a file. With [`Caches::F16`] inputs that attention alone reads, as its
    /// caches, are f16.
    ///
    /// # Errors
    /// Sizes that no memory has.
    pub(crate) fn compile(graph: &Graph, caches: Caches) -> Result<Self, String> {
        compile::compile(graph, caches)
    }

    /// True if matmuls multiply single rows with stored weights, which then are what an execution reads: several rows
    /// take little longer.
    pub(crate) fn reads_weights_for_one_row(&self) -> bool {
        let mut stored = self.matmuls().filter_map(Matmul::stored_row).peekable();
        stored.peek().is_some() && stored.all(|is_row| is_row)
    }

    fn matmuls(&self) -> impl Iterator<Item = &Matmul> {
        self.instructions.iter().flat_map(|instruction| match instruction {
            Instruction::Matmuls(all) => all.as_slice(),
            _ => &[],
        })
    }

    /// Gives an execution its memory.
    fn reserve(&self, scratch: &mut Scratch) -> Result<()> {
        scratch.buffers.resize_with(self.buffers.len(), Vec::new);
        // All are asked for before the first is touched: a graph that cannot run takes no memory.
        for (buffer, &len) in scratch.buffers.iter_mut().zip(&self.buffers) {
            buffer.try_reserve_exact(len.saturating_sub(buffer.len())).map_err(|_| {
                let bytes = len * size_of::<f32>();
                let message = format!("a value of {len} elements of f32 takes {bytes} bytes");
                Error::new(ErrorKind::Execute, message)
                    .hint("no memory is left for it; a graph for fewer rows takes less")
            })?;
        }
        for (buffer, &len) in scratch.buffers.iter_mut().zip(&self.buffers) {
            buffer.resize(len, 0.0);
        }
        Ok(())
    }

    /// Executes the graph on the threads of the rayon pool that it is called in. Afterwards outputs are read.
    pub(crate) fn run(&self, inputs: &[Input<'_>], scratch: &mut Scratch) -> Result<()> {
        self.reserve(scratch)?;
        let mut run = |team: &Team| {
            let mut all = self.instructions.iter();
            all.try_for_each(|one| self.step(one, inputs, scratch, team))
        };
        if self.work < SMALL { run(&Team::Alone) } else { Team::gather(run) }
    }

    /// Executes the graph for several sequences, each with inputs and memory of its own. All of them get what they would
    /// get alone, to the bit; weights are read once for all.
    pub(crate) fn run_together(
        &self,
        inputs: &[Vec<Input<'_>>],
        scratches: &mut [Scratch],
    ) -> Result<()> {
        scratches.iter_mut().try_for_each(|scratch| self.reserve(scratch))?;
        let mut rows = Vec::new();
        let mut run = |team: &Team| {
            self.instructions.iter().try_for_each(|one| {
                if let Instruction::Matmuls(matmuls) = one
                    && self.multiply_rows(matmuls, inputs, scratches, &mut rows, team)?
                {
                    return Ok(());
                }
                let mut each = inputs.iter().zip(scratches.iter_mut());
                each.try_for_each(|(inputs, scratch)| self.step(one, inputs, scratch, team))
            })
        };
        let work = self.work.saturating_mul(inputs.len() as u64);
        if work < SMALL { run(&Team::Alone) } else { Team::gather(run) }
    }

    /// Multiplies the single rows of several sequences with stored weights at once, as they come from memory. False
    /// where that is not all that `matmuls` are, or a row is not multiplied in integers as the others are: nothing has
    /// happened then.
    fn multiply_rows(
        &self,
        matmuls: &[Matmul],
        inputs: &[Vec<Input<'_>>],
        scratches: &mut [Scratch],
        rows: &mut Vec<Vec<f32>>,
        team: &Team,
    ) -> Result<bool> {
        if !matmuls.iter().all(|matmul| matmul.stored_row() == Some(true)) {
            return Ok(false);
        }
        let count = inputs.len();
        // Matmuls of one `x` share its rows.
        let is_same = |a: &Dense, b: &Dense| (a.place, a.start, a.len) == (b.place, b.start, b.len);
        let mut xs: Vec<(Dense, Vec<f32>)> = Vec::with_capacity(matmuls.len());
        for Matmul { x, .. } in matmuls {
            if xs.iter().any(|(known, _)| is_same(known, x)) {
                continue;
            }
            let mut all = rows.pop().unwrap_or_default();
            all.clear();
            for (inputs, scratch) in inputs.iter().zip(scratches.iter()) {
                let memory = Memory { program: self, inputs, buffers: &scratch.buffers };
                all.extend_from_slice(memory.dense(*x)?);
            }
            xs.push((*x, all));
        }
        let regular = xs.iter().all(|(x, rows)| are_regular(rows, x.len));
        let mut results = Vec::with_capacity(matmuls.len());
        if regular {
            for matmul in matmuls {
                let By::Stored(weights, _) = &matmul.by else { continue };
                let mut y = rows.pop().unwrap_or_default();
                y.resize(count * weights.rows, 0.0);
                results.push(y);
            }
            let operands = matmuls.iter().zip(&mut results).filter_map(|(matmul, y)| {
                let By::Stored(weights, bias) = &matmul.by else { return None };
                let matrix = Matrix::stored(weights, bias.as_ref(), self.activations);
                let (_, x) = xs.iter().find(|(known, _)| is_same(known, &matmul.x))?;
                Some(Operands::Rows(matrix, x, y))
            });
            multiply(operands.collect(), team);
            for (matmul, y) in matmuls.iter().zip(&results) {
                for (scratch, y) in scratches.iter_mut().zip(y.chunks_exact(y.len() / count)) {
                    buffer(&mut scratch.buffers, matmul.out)?[..y.len()].copy_from_slice(y);
                }
            }
        }
        rows.extend(xs.into_iter().map(|(_, rows)| rows).chain(results));
        Ok(regular)
    }

    /// Writes output `index` of the last execution, row by row: f32, or the bits of i32.
    pub(crate) fn output(&self, index: usize, scratch: &Scratch, to: &mut [f32]) -> Result<()> {
        let walk = self.results.get(index).filter(|walk| walk.len == to.len());
        let walk = walk.ok_or_else(|| internal("an output has another size"))?;
        let memory = Memory { program: self, inputs: &[], buffers: &scratch.buffers };
        let x = memory.words(walk.places[0])?;
        Singles { op: Unary::Copy, walk, at: 0, x, out: to }.dispatch();
        Ok(())
    }

    fn step(
        &self,
        instruction: &Instruction,
        inputs: &[Input<'_>],
        scratch: &mut Scratch,
        team: &Team,
    ) -> Result<()> {
        let Scratch { buffers, seen, attention } = scratch;
        let out = match instruction {
            Instruction::Binary { out, .. }
            | Instruction::IntBinary { out, .. }
            | Instruction::Unary { out, .. }
            | Instruction::Convert { out, .. }
            | Instruction::Part { out, .. }
            | Instruction::Pad { out, .. }
            | Instruction::Reduce { out, .. }
            | Instruction::Softmax { out, .. }
            | Instruction::RmsNorm { out, .. }
            | Instruction::LayerNorm { out, .. }
            | Instruction::Gather { out, .. }
            | Instruction::Conv { out, .. }
            | Instruction::Attend { out, .. } => *out,
            Instruction::See { mask, shape, seen: index } => {
                if seen.len() <= *index {
                    seen.resize_with(index + 1, Vec::new);
                }
                let mask = Memory { program: self, inputs, buffers }.dense(*mask)?;
                Seen::fill(&mut seen[*index], mask, *shape, team);
                return Ok(());
            }
            Instruction::Matmuls(matmuls) => {
                return self.multiply(matmuls, inputs, buffers, team);
            }
        };
        // Nothing reads what it writes to.
        let mut to = std::mem::take(buffer(buffers, out)?);
        let memory = Memory { program: self, inputs, buffers };
        let done = match instruction {
            Instruction::Attend { attend, .. } => {
                memory.attend(attend, seen, &mut to, attention, team)
            }
            _ => memory.compute(instruction, &mut to, team),
        };
        *buffer(buffers, out)? = to;
        done
    }

    fn multiply(
        &self,
        matmuls: &[Matmul],
        inputs: &[Input<'_>],
        buffers: &mut [Vec<f32>],
        team: &Team,
    ) -> Result<()> {
        let mut results = Vec::with_capacity(matmuls.len());
        for matmul in matmuls {
            results.push(std::mem::take(buffer(buffers, matmul.out)?));
        }
        let memory = Memory { program: self, inputs, buffers };
        let operands = matmuls.iter().zip(&mut results).map(|(matmul, y)| {
            let x = memory.dense(matmul.x)?;
            let rows = |matrix: Matrix<'_>| x.len() / matrix.columns * matrix.rows;
            Ok(match &matmul.by {
                By::Stored(weights, bias) => {
                    let matrix = Matrix::stored(weights, bias.as_ref(), self.activations);
                    Operands::Rows(matrix, x, &mut y[..rows(matrix)])
                }
                By::Input { b, scales, columns } => {
                    let Input::I8(values) = memory.given(b.place)? else {
                        return Err(internal("weights are not int8"));
                    };
                    let all = Rows::I8(values, Scales::F32(scales));
                    let (rows_of, columns) = (scales.len(), *columns);
                    let matrix = Matrix {
                        all,
                        rows: rows_of,
                        columns,
                        bias: None,
                        offsets: None,
                        activations: None,
                    };
                    Operands::Rows(matrix, x, &mut y[..rows(matrix)])
                }
                By::Heads { b, shape: [heads, m, n], k, transposed } => Operands::Heads(Heads {
                    x,
                    b: memory.dense(*b)?,
                    y: &mut y[..heads * m * n],
                    shape: [*m, *n, *k],
                    transposed: *transposed,
                }),
            })
        });
        let done = operands.collect::<Result<Vec<_>>>().map(|all| multiply(all, team));
        for (matmul, y) in matmuls.iter().zip(results) {
            *buffer(buffers, matmul.out)? = y;
        }
        done
    }

    /// The weights of all matmuls, and tables.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &Weights> {
        self.instructions.iter().flat_map(|instruction| {
            let (matmuls, table) = match instruction {
                Instruction::Matmuls(matmuls) => (matmuls.as_slice(), None),
                Instruction::Gather { table: Table::Stored(table), .. } => {
                    (&[][..], Some(&**table))
                }
                _ => (&[][..], None),
            };
            let stored = matmuls.iter().filter_map(|matmul| match &matmul.by {
                By::Stored(weights, _) => Some(&**weights),
                By::Input { .. } | By::Heads { .. } => None,
            });
            stored.chain(table)
        })
    }

    /// Elements of the constants.
    pub(crate) fn constants(&self) -> u64 {
        self.constants.iter().map(|values| values.get().len() as u64).sum()
    }
}

/// Memory that instructions read.
#[derive(Clone, Copy)]
struct Memory<'a> {
    program: &'a Program,
    inputs: &'a [Input<'a>],
    buffers: &'a [Vec<f32>],
}

impl<'a> Memory<'a> {
    fn given(self, place: Place) -> Result<Input<'a>> {
        Ok(match place {
            Place::Input(index) => {
                *self.inputs.get(index).ok_or_else(|| internal("an input is missing"))?
            }
            Place::Constant(index) => Input::F32(self.program.constants[index].get()),
            Place::Buffer(index) => Input::F32(&self.buffers[index]),
        })
    }

    /// f32, or the bits of i32.
    fn words(self, place: Place) -> Result<&'a [f32]> {
        match self.given(place)? {
            Input::F32(values) => Ok(values),
            Input::I32(values) => Ok(bytemuck::cast_slice(values)),
            Input::I8(_) | Input::F16(_) => Err(internal("a value is neither f32 nor i32")),
        }
    }

    fn ints(self, place: Place) -> Result<&'a [i32]> {
        Ok(bytemuck::cast_slice(self.words(place)?))
    }

    fn dense(self, value: Dense) -> Result<&'a [f32]> {
        let all = self.words(value.place)?;
        let found = all.get(value.start..value.start + value.len);
        found.ok_or_else(|| internal("a value is cut off"))
    }

    /// f32, or the bits of f16.
    fn floats(self, value: Dense) -> Result<Stored<'a>> {
        let Input::F16(all) = self.given(value.place)? else {
            return Ok(Stored::F32(self.dense(value)?));
        };
        let found = all.get(value.start..value.start + value.len);
        Ok(Stored::F16(found.ok_or_else(|| internal("a value is cut off"))?))
    }

    fn bytes(self, value: Dense) -> Result<&'a [i8]> {
        let Input::I8(all) = self.given(value.place)? else {
            return Err(internal("a value is not int8"));
        };
        let found = all.get(value.start..value.start + value.len);
        found.ok_or_else(|| internal("a value is cut off"))
    }

    fn attend(
        self,
        attend: &Attend,
        seen: &[Vec<Seen>],
        to: &mut [f32],
        scratch: &mut AttendScratch,
        team: &Team,
    ) -> Result<()> {
        let AttendScratch { own, sums } = scratch;
        let Attend { keys: [past_k, k], values: [past_v, v], scales, .. } = *attend;
        let past = match scales {
            None => [self.floats(past_k)?, self.floats(past_v)?],
            Some(CacheScales { rows: [of_k, of_v], step }) => [
                Stored::I8(self.bytes(past_k)?, self.dense(of_k)?, step),
                Stored::I8(self.bytes(past_v)?, self.dense(of_v)?, step),
            ],
        };
        let seen = seen.get(attend.seen).filter(|seen| !seen.is_empty());
        let operands = attend::Operands {
            q: self.dense(attend.q)?,
            past,
            own: attend::as_stored(past, [self.dense(k)?, self.dense(v)?], own),
            mask: self.dense(attend.mask)?,
            seen: seen.ok_or_else(|| internal("nobody looked at a mask"))?,
            shape: attend.shape,
        };
        operands.run(to, sums, team);
        Ok(())
    }

    fn compute(self, instruction: &Instruction, to: &mut [f32], team: &Team) -> Result<()> {
        match instruction {
            Instruction::Binary { op, walk, .. } => {
                let (a, b) = (self.words(walk.places[0])?, self.words(walk.places[1])?);
                team.parts(&mut to[..walk.len], walk.part(SHARE), |at, out| {
                    Pairs { op: *op, walk, at, a, b, out }.dispatch();
                });
            }
            Instruction::IntBinary { op, walk, .. } => {
                let (a, b) = (self.ints(walk.places[0])?, self.ints(walk.places[1])?);
                let to: &mut [i32] = bytemuck::cast_slice_mut(&mut to[..walk.len]);
                let divided = AtomicBool::new(false);
                team.parts(to, walk.part(SHARE), |at, out| {
                    if (IntPairs { op: *op, walk, at, a, b, out }).run().is_err() {
                        divided.store(true, Ordering::Relaxed);
                    }
                });
                if divided.into_inner() {
                    let message = "an integer is divided by 0";
                    return Err(Error::new(ErrorKind::Execute, message));
                }
            }
            Instruction::Unary { op, walk, .. } => {
                singles(*op, walk, self.words(walk.places[0])?, &mut to[..walk.len], team);
            }
            Instruction::Convert { from, walk, .. } => {
                let (place, to) = (walk.places[0], &mut to[..walk.len]);
                match (from, self.given(place)?) {
                    (Elem::I32, _) => singles(Unary::Copy, walk, self.ints(place)?, to, team),
                    (_, Input::I8(x)) => singles(Unary::Copy, walk, x, to, team),
                    _ => return Err(internal("integers are of another type")),
                }
            }
            Instruction::Part { walk, start, width, stride, .. } => {
                let x = self.words(walk.places[0])?;
                let rows = to[*start..].chunks_mut(*stride).enumerate();
                for (row, to) in rows.take(walk.len / width) {
                    let (at, out) = (row * width, &mut to[..*width]);
                    Singles { op: Unary::Copy, walk, at, x, out }.dispatch();
                }
            }
            Instruction::Pad { padding, walk, .. } => {
                let (x, Padding { width, beside, .. }) = (self.words(walk.places[0])?, *padding);
                let stride = padding.stride();
                let to = &mut to[..padding.len()];
                team.parts(to, (SHARE / stride).max(1) * stride, |at, out| {
                    for (row, out) in out.chunks_exact_mut(stride).enumerate() {
                        let Some(row) = padding.source(at / stride + row) else {
                            out.fill(0.0);
                            continue;
                        };
                        let (before, rest) = out.split_at_mut(beside[0]);
                        let (out, behind) = rest.split_at_mut(width);
                        before.fill(0.0);
                        behind.fill(0.0);
                        Singles { op: Unary::Copy, walk, at: row * width, x, out }.dispatch();
                    }
                });
            }
            Instruction::Conv { shape, x, filters, bias, .. } => {
                let (x, filters) = (self.dense(*x)?, self.dense(*filters)?);
                let bias = bias.map(|bias| self.dense(bias)).transpose()?;
                let (to, shape) = (&mut to[..shape.len()], *shape);
                let part = SHARE.next_multiple_of(shape.filters);
                team.parts(to, part, |at, out| {
                    let first = at / shape.filters;
                    Conv { shape, x, filters, bias, first, out }.dispatch();
                });
            }
            Instruction::Reduce { op, x, size, inner, .. } => {
                let (x, all) = (self.dense(*x)?, x.len / size);
                let part = (SHARE / size).max(1).next_multiple_of(*inner);
                team.parts(&mut to[..all], part, |at, out| {
                    let x = &x[at * size..][..out.len() * size];
                    Reduce { op: *op, x, size: *size, inner: *inner, out }.dispatch();
                });
            }
            Instruction::Softmax { x, size, .. } => {
                let x = self.dense(*x)?;
                team.parts(&mut to[..x.len()], LONG_SHARE.next_multiple_of(*size), |at, out| {
                    softmax(&x[at..][..out.len()], *size, out);
                });
            }
            Instruction::RmsNorm { x, weight, epsilon, .. } => {
                let (x, weight, epsilon) = (self.dense(*x)?, self.dense(*weight)?, *epsilon);
                team.parts(&mut to[..x.len()], SHARE.next_multiple_of(weight.len()), |at, out| {
                    let x = &x[at..][..out.len()];
                    RmsNorm { x, weight, epsilon, out }.dispatch();
                });
            }
            Instruction::LayerNorm { x, weight, bias, epsilon, .. } => {
                let (x, weight) = (self.dense(*x)?, self.dense(*weight)?);
                let (bias, epsilon) = (self.dense(*bias)?, *epsilon);
                team.parts(&mut to[..x.len()], SHARE.next_multiple_of(weight.len()), |at, out| {
                    let x = &x[at..][..out.len()];
                    LayerNorm { x, weight, bias, epsilon, out }.dispatch();
                });
            }
            Instruction::Gather { table, width, indices, .. } => {
                let all = self.ints(indices.place)?;
                let values = match table {
                    Table::Values(values) => self.dense(*values)?,
                    Table::Stored(_) => &[],
                };
                let rows = match table {
                    Table::Values(values) => values.len / width,
                    Table::Stored(weights) => weights.rows,
                };
                let wanted = all[indices.start..][..indices.len].iter();
                for (to, &index) in to.chunks_exact_mut(*width).zip(wanted) {
                    // As in ONNX, those below 0 count from the end.
                    let from_end = if index < 0 { rows as i64 } else { 0 };
                    let row = usize::try_from(i64::from(index) + from_end).ok();
                    let found = row.filter(|row| *row < rows);
                    let row = found.ok_or_else(|| {
                        let message = format!("index {index} of a table of {rows} rows");
                        Error::new(ErrorKind::Execute, message)
                    })?;
                    match table {
                        Table::Values(_) => to.copy_from_slice(&values[row * width..][..*width]),
                        Table::Stored(weights) => weights.dequantize(row, to),
                    }
                }
            }
            Instruction::See { .. } | Instruction::Attend { .. } | Instruction::Matmuls(_) => {
                return Err(internal("it is computed elsewhere"));
            }
        }
        Ok(())
    }
}

fn singles<T: ToF32>(op: Unary, walk: &Walk<1>, x: &[T], to: &mut [f32], team: &Team) {
    let share = if op.is_long() { LONG_SHARE } else { SHARE };
    team.parts(to, walk.part(share), |at, out| Singles { op, walk, at, x, out }.dispatch());
}

fn buffer(buffers: &mut [Vec<f32>], index: usize) -> Result<&mut Vec<f32>> {
    buffers.get_mut(index).ok_or_else(|| internal("a buffer does not exist"))
}

fn internal(message: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("the instructions of a graph: {message}"))
}
