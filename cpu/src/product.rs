//! Products on several threads.

use std::borrow::Cow;

use rten_simd::SimdOp;

use crate::heads::{Columns, Turned};
use crate::integers::{IntegerTask, Integers, integers};
use crate::kernels::{Arrange, FEW, Rows, Task};
use crate::team::Team;
use crate::weights::Weights;

/// Rows of weights in a task are a multiple of this, which the kernels compute without a rest.
const ROW_STEP: usize = 32;
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
    Integers(IntegerTask<'a, 'o>),
    Rows(Task<'a, 'o>),
    /// `x · bᵀ` of one head, whose rows have so many columns.
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
            Self::Integers(task) => task.run(),
            Self::Rows(task) => task.dispatch(),
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
            Operands::Stored(weights, bias, _, y) => {
                let Some(x) = arranged.get(place) else { continue };
                split(weights, bias, x, y, shares, &mut tasks);
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
            Self::Stored(weights, _, _, y) => weights.columns.saturating_mul(y.len()),
            Self::Heads(Heads { y, shape: [.., k], .. }) => k.saturating_mul(y.len()),
        }
    }
}

/// What is multiplied with weights, as the tasks read it, and the place in it of each operand. Several may read the same.
fn arrange<'a>(all: &[Operands<'a, '_>], team: &Team) -> (Vec<Arranged<'a>>, Vec<usize>) {
    let (mut arranged, mut known) = (Vec::with_capacity(all.len()), Vec::with_capacity(all.len()));
    let places = all.iter().map(|one| {
        let Operands::Stored(weights, _, x, _) = *one else { return 0 };
        let (rows, columns) = (weights.part(0..weights.rows), weights.columns);
        let key = (x.as_ptr(), x.len(), std::mem::discriminant(&weights.form));
        if let Some(place) = known.iter().position(|known| *known == key) {
            return place;
        }
        known.push(key);
        arranged.push(match integers(rows, columns, x, team) {
            Some(x) => Arranged::Integers(x),
            None => Arranged::Floats(Arrange { weights: rows, columns, x, team }.dispatch()),
        });
        arranged.len() - 1
    });
    let places = places.collect();
    (arranged, places)
}

/// What weights are multiplied with.
enum Arranged<'a> {
    Floats(Cow<'a, [f32]>),
    Integers(Integers),
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
                false => Work::Columns(Columns { x, b, out }),
            });
        }
    }
}

/// Tasks of some rows of weights each. They write to different columns of `y`.
fn split<'a, 'o>(
    weights: &'a Weights,
    bias: Option<&'a [f32]>,
    x: &'a Arranged<'_>,
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
        let bias = bias.and_then(|bias| bias.get(range.clone()));
        let (weights, columns) = (weights.part(range), weights.columns);
        match x {
            Arranged::Floats(x) => Work::Rows(Task { weights, columns, x, out, bias }),
            Arranged::Integers(x) => Work::Integers(IntegerTask { weights, columns, x, out, bias }),
        }
    }));
}
