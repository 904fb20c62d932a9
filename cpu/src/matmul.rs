//! Matmuls on several threads.

use std::borrow::Cow;

use qhx_types::quantized::BLOCK;
use rten_simd::SimdOp;

use crate::heads::{Columns, Turned};
use crate::integers::{IntegerTask, Integers, integers};
use crate::kernels::{AddOffsets, Arrange, FEW, Rows, Scales, Task};
use crate::options::Activations;
use crate::team::Team;
use crate::weights::{self, Floats, Weights};

/// Rows of weights in a task are a multiple of this, as many as each kernel of integers computes at a time, or a
/// multiple of them.
const ROW_STEP: usize = 32;
/// The same of the kernels of f32, which compute six or twelve rows at a time.
const FLOAT_STEP: usize = 48;
/// Tasks for each thread, so that none waits long for the last.
const SHARES: usize = 4;
/// Multiplications that are not worth waking a thread for.
const SMALL: usize = 1 << 15;

/// A matmul.
pub(crate) enum Operands<'a, 'o> {
    /// `y = x · weightsᵀ + bias`. `x` is whole rows of the weights' columns, `y` as many rows of the weights' rows.
    Rows(Matrix<'a>, &'a [f32], &'o mut [f32]),
    /// Matmuls of what is computed.
    Heads(Heads<'a, 'o>),
}

/// Weights, and what is added.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) all: Rows<'a>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) bias: Option<&'a [f32]>,
    /// Offset of each block of [`BLOCK`]: see [`Scales`].
    pub(crate) offsets: Option<Scales<'a>>,
    /// Type that `x` may be rounded to where weights are int8 or of four bits.
    pub(crate) activations: Option<Activations>,
}

impl<'a> Matrix<'a> {
    pub(crate) fn stored(
        weights: &'a Weights,
        bias: Option<&'a Floats>,
        activations: Activations,
    ) -> Self {
        let &Weights { rows, columns, ref offsets, .. } = weights;
        let offsets = offsets.as_ref().map(weights::Scales::get);
        let bias = bias.map(Floats::get);
        Self { all: weights.all(), rows, columns, bias, offsets, activations: Some(activations) }
    }
}

/// `y[h] = x[h] · b[h]`, or `x[h] · b[h]ᵀ`, for each head.
pub(crate) struct Heads<'a, 'o> {
    /// `[heads, m, k]`, or `[1, m, k]` for all heads.
    pub(crate) x: &'a [f32],
    /// `[heads, k, n]`, or `[heads, n, k]` where it is transposed, or one matrix for all heads.
    pub(crate) b: &'a [f32],
    /// `[heads, m, n]`.
    pub(crate) y: &'o mut [f32],
    /// `m`, `n` and `k`.
    pub(crate) shape: [usize; 3],
    /// True if `b` is transposed.
    pub(crate) transposed: bool,
}

/// Work that one thread computes at a time.
enum Work<'a, 'o> {
    /// Some rows of weights.
    Rows {
        part: Matrix<'a>,
        x: &'a Factors<'a>,
        out: Vec<&'o mut [f32]>,
    },
    /// `x · bᵀ` of one head, whose rows have `columns` elements.
    Head {
        b: &'a [f32],
        columns: usize,
        x: &'a [f32],
        out: Vec<&'o mut [f32]>,
    },
    Columns(Columns<'a, 'o>),
}

impl Work<'_, '_> {
    fn run(self) {
        match self {
            Self::Rows { part, x, out } => part.multiply(x, out),
            Self::Head { b, columns, x, out } => {
                if out.len() <= FEW {
                    let weights = Rows::F32(b);
                    Task { weights, columns, x, out, bias: None }.dispatch();
                } else {
                    Turned { x, b, columns, out }.dispatch();
                }
            }
            Self::Columns(task) => task.dispatch(),
        }
    }
}

/// Computes all of them.
pub(crate) fn multiply(all: Vec<Operands<'_, '_>>, team: &Team) {
    let shares = team.threads() * SHARES;
    let work: usize = all.iter().map(Operands::work).fold(0, usize::saturating_add);
    // Borrowed by the tasks, which the threads share.
    let (arranged, places) = arrange(&all, team);
    let mut tasks = Vec::with_capacity((shares + 1) * all.len());
    for (one, place) in all.into_iter().zip(places) {
        match one {
            Operands::Rows(matrix, _, y) => {
                let Some(x) = arranged.get(place) else { continue };
                split(matrix, x, y, shares, &mut tasks);
            }
            Operands::Heads(heads) => heads.split(&mut tasks),
        }
    }
    if work <= SMALL {
        tasks.into_iter().for_each(Work::run);
    } else {
        team.each(tasks, Work::run);
    }
}

impl<'a> Operands<'a, '_> {
    /// Multiplications.
    fn work(&self) -> usize {
        match self {
            Self::Rows(matrix, _, y) => matrix.columns.saturating_mul(y.len()),
            Self::Heads(Heads { y, shape: [.., k], .. }) => k.saturating_mul(y.len()),
        }
    }
}

/// Factors of the weights, as the tasks read them, and the index of each operand's factors. Several operands may
/// share one.
fn arrange<'a>(all: &[Operands<'a, '_>], team: &Team) -> (Vec<Factors<'a>>, Vec<usize>) {
    let (mut arranged, mut known) = (Vec::with_capacity(all.len()), Vec::with_capacity(all.len()));
    let places = all.iter().map(|one| {
        let Operands::Rows(Matrix { all: rows, columns, offsets, activations, .. }, x, _) = *one
        else {
            return 0;
        };
        let kind = (std::mem::discriminant(&rows), offsets.is_some(), activations);
        let key = (x.as_ptr(), x.len(), kind);
        if let Some(place) = known.iter().position(|known| *known == key) {
            return place;
        }
        known.push(key);
        let integers = activations.and_then(|to| integers(to, rows, columns, x, team));
        arranged.push(match integers {
            Some(x) => Factors::Integers(x),
            None => Factors::Floats {
                x: Arrange { weights: rows, columns, x, team }.dispatch(),
                sums: match offsets {
                    Some(_) => x.chunks_exact(BLOCK).map(|block| block.iter().sum()).collect(),
                    None => Vec::new(),
                },
            },
        });
        arranged.len() - 1
    });
    let places = places.collect();
    (arranged, places)
}

/// Factors that weights are multiplied with.
enum Factors<'a> {
    Floats {
        x: Cow<'a, [f32]>,
        /// The sum of each block of a row, which offsets are multiplied with.
        sums: Vec<f32>,
    },
    Integers(Integers),
}

impl<'a> Matrix<'a> {
    fn multiply(self, x: &Factors<'_>, mut out: Vec<&mut [f32]>) {
        let Self { all: weights, columns, bias, offsets, .. } = self;
        match x {
            Factors::Floats { x, sums } => {
                let rows = out.iter_mut().map(|row| &mut **row).collect();
                Task { weights, columns, x, out: rows, bias }.dispatch();
                if let Some(offsets) = offsets {
                    AddOffsets { weights, offsets, sums, out }.dispatch();
                }
            }
            Factors::Integers(x) => IntegerTask { weights, columns, offsets, x, out, bias }.run(),
        }
    }
}

impl<'a, 'o> Heads<'a, 'o> {
    /// A task for each head.
    fn split(self, tasks: &mut Vec<Work<'a, 'o>>) {
        let Self { x, b, y, shape: [m, n, k], transposed } = self;
        if m * n == 0 {
            return;
        }
        let (x, b) =
            (x.chunks_exact((m * k).max(1)).cycle(), b.chunks_exact((n * k).max(1)).cycle());
        for ((x, b), y) in x.zip(b).zip(y.chunks_exact_mut(m * n)) {
            let out = y.chunks_exact_mut(n).collect();
            tasks.push(match transposed {
                true => Work::Head { b, columns: k, x, out },
                false => Work::Columns(Columns { x, b, stride: n, add: false, out }),
            });
        }
    }
}

/// Tasks of some rows of weights each. They write to different columns of `y`.
fn split<'a, 'o>(
    matrix: Matrix<'a>,
    x: &'a Factors<'a>,
    y: &'o mut [f32],
    shares: usize,
    tasks: &mut Vec<Work<'a, 'o>>,
) {
    let rows = matrix.rows;
    let multiple = if matches!(x, Factors::Floats { .. }) { FLOAT_STEP } else { ROW_STEP };
    let step = rows.div_ceil(shares).next_multiple_of(multiple);
    let starts = (0..rows).step_by(step);
    let mut outs: Vec<Vec<&mut [f32]>> =
        starts.clone().map(|_| Vec::with_capacity(y.len() / rows)).collect();
    for row in y.chunks_exact_mut(rows) {
        outs.iter_mut().zip(row.chunks_mut(step)).for_each(|(out, piece)| out.push(piece));
    }
    tasks.extend(starts.zip(outs).map(|(start, out)| {
        let range = start..rows.min(start + step);
        let part = Matrix {
            all: matrix.all.part(&range, matrix.columns),
            rows: range.len(),
            bias: matrix.bias.and_then(|bias| bias.get(range.clone())),
            offsets: matrix.offsets.map(|offsets| offsets.part(&range, matrix.columns / BLOCK)),
            ..matrix
        };
        Work::Rows { part, x, out }
    }));
}
