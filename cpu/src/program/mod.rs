//! A graph as a list of instructions over memory that is laid out when it is loaded.
//!
//! Shapes are fixed, so that everything but the arithmetic happens once: values that are only read in another order
//! (`Reshape`, `Transpose`, `Slice`) are no instructions, and a value's memory goes to the next that fits when nobody
//! reads it any more. Products read their weights as they are stored. Graphs with other operators than these are
//! executed by [`crate::steps`].

mod attend;
#[cfg(test)]
mod attend_tests;
mod compile;
mod fused;
mod kernels;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashMap;

use qhx_core::artifacts::Mapped;
use qhx_core::{Error, ErrorKind, Result};
use rten_onnx::onnx::ModelProto;
use rten_simd::SimdOp;

use self::attend::{Attend, MaskShape, Seen};
use self::kernels::{Binary, LayerNorm, Pairs, Reduce, Reduction, Singles, Unary, Widen, softmax};
use self::view::{Place, Walk};
use crate::kernels::Rows;
use crate::product::{Heads, Matrix, Operands, multiply};
use crate::team::Team;
use crate::weights::{Floats, Weights};

/// A whole graph.
pub(crate) struct Tape {
    instructions: Vec<Instruction>,
    constants: Vec<Floats>,
    /// Elements of each buffer.
    buffers: Vec<usize>,
    outputs: Vec<Walk<1>>,
    /// Elements that instructions compute, each as often as numbers are multiplied for it.
    work: u64,
}

/// An input of the graph, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Given<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
    I8(&'a [i8]),
    U8(&'a [u8]),
}

/// The memory of one execution, which the next uses again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    buffers: Vec<Vec<f32>>,
    /// What each mask shows.
    seen: Vec<Vec<Seen>>,
    /// Sums of attention.
    sums: Vec<f32>,
}

/// All elements of a value, which lie one after the other.
#[derive(Debug, Clone, Copy)]
struct Dense {
    place: Place,
    start: usize,
    len: usize,
}

enum Instruction {
    Binary {
        op: Binary,
        walk: Walk<2>,
        out: usize,
    },
    /// Inputs of other types are widened before.
    Unary {
        op: Unary,
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
    Reduce {
        op: Reduction,
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
    LayerNorm {
        x: Dense,
        weight: Dense,
        bias: Option<Dense>,
        epsilon: f32,
        out: usize,
    },
    /// Rows of a table.
    Gather {
        table: Dense,
        width: usize,
        indices: Dense,
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
    Products(Vec<Product>),
}

struct Product {
    x: Dense,
    out: usize,
    by: By,
}

enum By {
    Stored(Box<Weights>, Option<Floats>),
    /// int8 `[rows, columns]` of an input, and the scale of each row, which is a constant.
    Given {
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
/// Elements that are worth a second thread; each gets so many at least.
const SHARE: usize = 1 << 14;
/// The same where an element takes many instructions.
const LONG_SHARE: usize = 1 << 12;

impl Tape {
    /// The instructions of a graph whose external data lies in `files`, or none where it has an operator, a type or a
    /// size that they do not cover.
    pub(crate) fn compile(model: &ModelProto, files: &HashMap<String, Mapped>) -> Option<Self> {
        compile::compile(model, files)
    }

    /// Executes the graph on the threads of the rayon pool that it is called in. Afterwards outputs are read.
    pub(crate) fn run(&self, inputs: &[Given<'_>], scratch: &mut Scratch) -> Result<()> {
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
        let mut run = |team: &Team| {
            let mut all = self.instructions.iter();
            all.try_for_each(|one| self.step(one, inputs, scratch, team))
        };
        if self.work < SMALL { run(&Team::Alone) } else { Team::gather(run) }
    }

    /// Writes output `index` of the last execution, row by row.
    pub(crate) fn output(&self, index: usize, scratch: &Scratch, to: &mut [f32]) -> Result<()> {
        let walk = self.outputs.get(index).filter(|walk| walk.len == to.len());
        let walk = walk.ok_or_else(|| internal("an output has another size"))?;
        let memory = Memory { tape: self, inputs: &[], buffers: &scratch.buffers };
        let x = memory.floats(walk.places[0])?;
        Singles { op: Unary::Copy, walk, at: 0, x, out: to }.dispatch();
        Ok(())
    }

    fn step(
        &self,
        instruction: &Instruction,
        inputs: &[Given<'_>],
        scratch: &mut Scratch,
        team: &Team,
    ) -> Result<()> {
        let Scratch { buffers, seen, sums } = scratch;
        let out = match instruction {
            Instruction::Binary { out, .. }
            | Instruction::Unary { out, .. }
            | Instruction::Part { out, .. }
            | Instruction::Reduce { out, .. }
            | Instruction::Softmax { out, .. }
            | Instruction::LayerNorm { out, .. }
            | Instruction::Gather { out, .. }
            | Instruction::Attend { out, .. } => *out,
            Instruction::See { mask, shape, seen: index } => {
                if seen.len() <= *index {
                    seen.resize_with(index + 1, Vec::new);
                }
                let mask = Memory { tape: self, inputs, buffers }.dense(*mask)?;
                Seen::fill(&mut seen[*index], mask, *shape, team);
                return Ok(());
            }
            Instruction::Products(products) => {
                return self.multiply(products, inputs, buffers, team);
            }
        };
        // Nothing reads what it writes to.
        let mut to = std::mem::take(buffer(buffers, out)?);
        let memory = Memory { tape: self, inputs, buffers };
        let done = match instruction {
            Instruction::Attend { attend, .. } => memory.attend(attend, seen, &mut to, sums, team),
            _ => memory.compute(instruction, &mut to, team),
        };
        *buffer(buffers, out)? = to;
        done
    }

    fn multiply(
        &self,
        products: &[Product],
        inputs: &[Given<'_>],
        buffers: &mut [Vec<f32>],
        team: &Team,
    ) -> Result<()> {
        let mut results = Vec::with_capacity(products.len());
        for product in products {
            results.push(std::mem::take(buffer(buffers, product.out)?));
        }
        let memory = Memory { tape: self, inputs, buffers };
        let operands = products.iter().zip(&mut results).map(|(product, y)| {
            let x = memory.dense(product.x)?;
            let rows = |matrix: Matrix<'_>| x.len() / matrix.columns * matrix.rows;
            Ok(match &product.by {
                By::Stored(weights, bias) => {
                    let matrix = Matrix::stored(weights, bias.as_ref());
                    Operands::Rows(matrix, x, &mut y[..rows(matrix)])
                }
                By::Given { b, scales, columns } => {
                    let Given::I8(values) = memory.given(b.place)? else {
                        return Err(internal("weights are not int8"));
                    };
                    let all = Rows::I8(values, scales);
                    let (rows_of, columns) = (scales.len(), *columns);
                    let (bias, offsets) = (None, None);
                    let matrix = Matrix { all, rows: rows_of, columns, bias, offsets, exact: true };
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
        for (product, y) in products.iter().zip(results) {
            *buffer(buffers, product.out)? = y;
        }
        done
    }

    /// Whether inputs hold weights of int8.
    pub(crate) fn is_given_weights(&self) -> bool {
        self.instructions.iter().any(|instruction| match instruction {
            Instruction::Products(all) => all.iter().any(|one| matches!(one.by, By::Given { .. })),
            _ => false,
        })
    }

    /// The weights of all products.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &Weights> {
        let products = self.instructions.iter().filter_map(|instruction| match instruction {
            Instruction::Products(products) => Some(products),
            _ => None,
        });
        products.flatten().filter_map(|product| match &product.by {
            By::Stored(weights, _) => Some(&**weights),
            By::Given { .. } | By::Heads { .. } => None,
        })
    }

    /// Elements of the constants.
    pub(crate) fn constants(&self) -> u64 {
        self.constants.iter().map(|values| values.get().len() as u64).sum()
    }
}

/// What instructions read.
#[derive(Clone, Copy)]
struct Memory<'a> {
    tape: &'a Tape,
    inputs: &'a [Given<'a>],
    buffers: &'a [Vec<f32>],
}

impl<'a> Memory<'a> {
    fn given(self, place: Place) -> Result<Given<'a>> {
        Ok(match place {
            Place::Input(index) => {
                *self.inputs.get(index).ok_or_else(|| internal("an input is missing"))?
            }
            Place::Constant(index) => Given::F32(self.tape.constants[index].get()),
            Place::Buffer(index) => Given::F32(&self.buffers[index]),
        })
    }

    fn floats(self, place: Place) -> Result<&'a [f32]> {
        match self.given(place)? {
            Given::F32(values) => Ok(values),
            _ => Err(internal("a value is not f32")),
        }
    }

    fn dense(self, value: Dense) -> Result<&'a [f32]> {
        let all = self.floats(value.place)?;
        let found = all.get(value.start..value.start + value.len);
        found.ok_or_else(|| internal("a value is cut off"))
    }

    fn attend(
        self,
        attend: &Attend,
        seen: &[Vec<Seen>],
        to: &mut [f32],
        sums: &mut Vec<f32>,
        team: &Team,
    ) -> Result<()> {
        let two = |[a, b]: [Dense; 2]| Ok([self.dense(a)?, self.dense(b)?]);
        let seen = seen.get(attend.seen).filter(|seen| !seen.is_empty());
        let operands = attend::Operands {
            q: self.dense(attend.q)?,
            keys: two(attend.keys)?,
            values: two(attend.values)?,
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
                let (a, b) = (self.floats(walk.places[0])?, self.floats(walk.places[1])?);
                team.parts(&mut to[..walk.len], walk.part(SHARE), |at, out| {
                    Pairs { op: *op, walk, at, a, b, out }.dispatch();
                });
            }
            Instruction::Unary { op, walk, .. } => {
                let to = &mut to[..walk.len];
                match self.given(walk.places[0])? {
                    Given::F32(x) => singles(*op, walk, x, to, team),
                    Given::I32(x) => singles(*op, walk, x, to, team),
                    Given::I8(x) => singles(*op, walk, x, to, team),
                    Given::U8(x) => singles(*op, walk, x, to, team),
                }
            }
            Instruction::Part { walk, start, width, stride, .. } => {
                let x = self.floats(walk.places[0])?;
                let rows = to[*start..].chunks_mut(*stride).enumerate();
                for (row, to) in rows.take(walk.len / width) {
                    let (at, out) = (row * width, &mut to[..*width]);
                    Singles { op: Unary::Copy, walk, at, x, out }.dispatch();
                }
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
            Instruction::LayerNorm { x, weight, bias, epsilon, .. } => {
                let (x, weight) = (self.dense(*x)?, self.dense(*weight)?);
                let (bias, epsilon) = (bias.map(|bias| self.dense(bias)).transpose()?, *epsilon);
                team.parts(&mut to[..x.len()], SHARE.next_multiple_of(weight.len()), |at, out| {
                    let x = &x[at..][..out.len()];
                    LayerNorm { x, weight, bias, epsilon, out }.dispatch();
                });
            }
            Instruction::Gather { table, width, indices, .. } => {
                let table = self.dense(*table)?;
                let Given::I32(all) = self.given(indices.place)? else {
                    return Err(internal("indices are not i32"));
                };
                let rows = table.len() / width;
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
                    to.copy_from_slice(&table[row * width..][..*width]);
                }
            }
            Instruction::See { .. } | Instruction::Attend { .. } | Instruction::Products(_) => {
                return Err(internal("it is computed elsewhere"));
            }
        }
        Ok(())
    }
}

fn singles<T: Widen>(op: Unary, walk: &Walk<1>, x: &[T], to: &mut [f32], team: &Team) {
    let share = if op.is_long() { LONG_SHARE } else { SHARE };
    team.parts(to, walk.part(share), |at, out| Singles { op, walk, at, x, out }.dispatch());
}

fn buffer(buffers: &mut [Vec<f32>], index: usize) -> Result<&mut Vec<f32>> {
    buffers.get_mut(index).ok_or_else(|| internal("a buffer does not exist"))
}

fn internal(message: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("the instructions of a graph: {message}"))
}
