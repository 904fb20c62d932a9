//! Products on several threads.

use std::borrow::Cow;

use rayon::prelude::*;
use rten_simd::SimdOp;

use crate::kernels::{Arrange, Columns, Rows, Task};
use crate::weights::Weights;

/// Rows of weights in a task are a multiple of this, which the kernels compute without a rest.
const ROW_STEP: usize = 12;
/// Tasks for each thread, so that none waits long for the last.
const SHARES: usize = 4;
/// Multiplications that are not worth waking a thread for.
const SMALL: usize = 1 << 15;

/// A product.
pub(crate) enum Operands<'a, 'o> {
    /// `y = x · weightsᵀ + bias`. `x` is whole rows of the weights' columns, `y` as many rows of the weights' rows.
    Stored(&'a Weights, Option<&'a [f32]>, &'a [f32], &'o mut [f32]),
    /// Products of what is computed.
    Heads(Heads<'a, 'o>),
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
    /// Whether `b` is transposed.
    pub(crate) transposed: bool,
}

/// What one thread computes at a time.
enum Work<'a, 'o> {
    Rows(Task<'a, 'o>),
    Columns(Columns<'a, 'o>),
}

impl Work<'_, '_> {
    fn run(self) {
        match self {
            Self::Rows(task) => task.dispatch(),
            Self::Columns(task) => task.dispatch(),
        }
    }
}

/// Computes all of them, on the threads of the rayon pool that it is called in.
pub(crate) fn multiply(all: Vec<Operands<'_, '_>>) {
    let shares = rayon::current_num_threads() * SHARES;
    let work: usize = all.iter().map(Operands::work).fold(0, usize::saturating_add);
    // Borrowed by the tasks, which the threads share.
    let arranged: Vec<Cow<'_, [f32]>> = all.iter().map(Operands::arranged).collect();
    let mut tasks = Vec::with_capacity((shares + 1) * all.len());
    for (one, x) in all.into_iter().zip(&arranged) {
        match one {
            Operands::Stored(weights, bias, _, y) => split(weights, bias, x, y, shares, &mut tasks),
            Operands::Heads(heads) => heads.split(&mut tasks),
        }
    }
    if work <= SMALL {
        tasks.into_iter().for_each(Work::run);
    } else {
        tasks.into_par_iter().with_max_len(1).for_each(Work::run);
    }
}

impl<'a> Operands<'a, '_> {
    /// Multiplications.
    fn work(&self) -> usize {
        match self {
            Self::Stored(weights, _, _, y) => weights.columns.saturating_mul(y.len()),
            Self::Heads(Heads { y, shape: [.., k], .. }) => k.saturating_mul(y.len()),
        }
    }

    /// `x` as the tasks read it.
    fn arranged(&self) -> Cow<'a, [f32]> {
        match *self {
            Self::Stored(weights, _, x, _) => {
                let (rows, columns) = (weights.part(0..weights.rows), weights.columns);
                Arrange { weights: rows, columns, x }.dispatch()
            }
            Self::Heads(Heads { x, .. }) => Cow::Borrowed(x),
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
                true => Work::Rows(Task { weights: Rows::F32(b), columns: k, x, out, bias: None }),
                false => Work::Columns(Columns { x, b, out }),
            });
        }
    }
}

/// Tasks of some rows of weights each. They write to different columns of `y`.
fn split<'a, 'o>(
    weights: &'a Weights,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    y: &'o mut [f32],
    shares: usize,
    tasks: &mut Vec<Work<'a, 'o>>,
) {
    let rows = weights.rows;
    let step = rows.div_ceil(shares).next_multiple_of(ROW_STEP);
    let starts = (0..rows).step_by(step);
    let mut outs: Vec<Vec<&mut [f32]>> =
        starts.clone().map(|_| Vec::with_capacity(y.len() / rows)).collect();
    for row in y.chunks_exact_mut(rows) {
        outs.iter_mut().zip(row.chunks_mut(step)).for_each(|(out, piece)| out.push(piece));
    }
    tasks.extend(starts.zip(outs).map(|(start, out)| {
        let range = start..rows.min(start + step);
        Work::Rows(Task {
            weights: weights.part(range.clone()),
            columns: weights.columns,
            x,
            out,
            bias: bias.and_then(|bias| bias.get(range)),
        })
    }));
}
