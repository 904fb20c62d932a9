//! Products on several threads.

use std::borrow::Cow;

use rayon::prelude::*;
use rten_simd::SimdOp;

use crate::kernels::{Arrange, Task};
use crate::weights::Weights;

/// Rows of weights in a task are a multiple of this, which the kernels compute without a rest.
const ROWS: usize = 12;
/// Tasks for each thread, so that none waits long for the last.
const SHARES: usize = 4;
/// Multiplications that are not worth waking a thread for.
const SMALL: usize = 1 << 15;

/// `y = x · weightsᵀ + bias`.
pub(crate) struct Operands<'a, 'o> {
    pub(crate) weights: &'a Weights,
    pub(crate) bias: Option<&'a [f32]>,
    /// Whole rows of the weights' columns.
    pub(crate) x: &'a [f32],
    /// As many rows of the weights' rows.
    pub(crate) y: &'o mut [f32],
}

/// Computes all of them, on the threads of the rayon pool that it is called in.
pub(crate) fn multiply(all: Vec<Operands<'_, '_>>) {
    let shares = rayon::current_num_threads() * SHARES;
    let work: usize = all.iter().map(|one| one.weights.columns.saturating_mul(one.y.len())).sum();
    // Borrowed by the tasks, which the threads share.
    let arranged: Vec<Cow<'_, [f32]>> = all.iter().map(arranged).collect();
    let mut tasks = Vec::with_capacity((shares + 1) * all.len());
    for (one, x) in all.into_iter().zip(&arranged) {
        split(Operands { x, ..one }, shares, &mut tasks);
    }
    if work <= SMALL {
        tasks.into_iter().for_each(SimdOp::dispatch);
    } else {
        tasks.into_par_iter().with_max_len(1).for_each(SimdOp::dispatch);
    }
}

fn arranged<'a>(one: &Operands<'a, '_>) -> Cow<'a, [f32]> {
    let Operands { weights, x, .. } = *one;
    Arrange { weights: weights.part(0..weights.rows), columns: weights.columns, x }.dispatch()
}

/// Tasks of some rows of weights each. They write to different columns of `y`.
fn split<'a, 'o>(one: Operands<'a, 'o>, shares: usize, tasks: &mut Vec<Task<'a, 'o>>) {
    let Operands { weights, bias, x, y } = one;
    let rows = weights.rows;
    let step = rows.div_ceil(shares).next_multiple_of(ROWS);
    let begin = tasks.len();
    for start in (0..rows).step_by(step) {
        let range = start..rows.min(start + step);
        tasks.push(Task {
            weights: weights.part(range.clone()),
            columns: weights.columns,
            x,
            out: Vec::with_capacity(y.len() / rows),
            bias: bias.and_then(|bias| bias.get(range)),
        });
    }
    for row in y.chunks_exact_mut(rows) {
        for (task, piece) in tasks[begin..].iter_mut().zip(row.chunks_mut(step)) {
            task.out.push(piece);
        }
    }
}
