//! Matmuls of every form of weights with input that may be bad.

use rayon::ThreadPool;

use crate::kernels::Rows;
use crate::kernels::tests::{Stored, numbers};
use crate::matmul::{Matrix, Operands, multiply};
use crate::options::Activations;
use crate::team::Team;

const ALL: [Activations; 3] = [Activations::Auto, Activations::Int16, Activations::Int8];
/// Rows of `x`: those that read weights as they are stored, parts of a panel, and one more than a panel.
const COUNTS: [usize; 6] = [1, 2, 8, 9, 24, 33];
/// Columns: not a multiple of 128, of 256 but with super-blocks, and more than are computed at a time.
const COLUMNS: [usize; 4] = [32, 96, 256, 544];

/// A matrix of weights, and what they are as f64.
struct Case {
    stored: Stored,
    values: Vec<f64>,
    rows: usize,
    columns: usize,
    activations: Activations,
}

impl Case {
    /// All forms of weights with all types of activations.
    fn all(rows: usize, columns: usize) -> impl Iterator<Item = Self> {
        let each = move |activations| {
            Stored::all(rows, columns).into_iter().map(move |stored| {
                let values = (0..rows * columns).map(|at| stored.value(columns, at)).collect();
                Self { stored, values, rows, columns, activations }
            })
        };
        ALL.into_iter().flat_map(each)
    }

    fn multiply(&self, x: &[f32], team: &Team) -> Vec<f32> {
        let &Self { ref stored, rows, columns, activations, .. } = self;
        let (all, offsets, activations) = (stored.rows(), stored.offsets(), Some(activations));
        let matrix = Matrix { all, rows, columns, bias: None, offsets, activations };
        let mut y = vec![f32::NAN; x.len() / columns * rows];
        multiply(vec![Operands::Rows(matrix, x, &mut y)], team);
        y
    }

    /// The error of a column of `x` that the docs of integers give, in largest columns of its block.
    fn step(&self, steep: bool) -> f64 {
        let four = match self.stored.rows() {
            Rows::F32(_) | Rows::F16(_) => return 0.0,
            Rows::I8(..) | Rows::I8Blocks(..) => false,
            Rows::I4(..) => true,
        };
        match self.activations {
            Activations::Auto if four && !steep => 3.95e-3,
            Activations::Auto | Activations::Int16 => 1.6e-5,
            Activations::Int8 => 3.95e-3,
        }
    }

    /// Results of a row are as near as the docs say.
    fn near(&self, x: &[f32], y: &[f32], steep: bool) {
        let step = self.step(steep);
        let largest = |block: &[f32]| block.iter().fold(0f32, |most, x| most.max(x.abs()));
        let steps = x.chunks(32).map(|block| step * f64::from(largest(block)));
        let steps: Vec<_> = steps.collect();
        for (y, weights) in y.iter().zip(self.values.chunks_exact(self.columns)) {
            let (mut sum, mut most) = (0.0, f64::from(f32::MIN_POSITIVE));
            for (at, (x, w)) in x.iter().zip(weights).enumerate() {
                let product = f64::from(*x) * w;
                sum += product;
                // Sums of f32 err by their own, those with offsets by the products with both.
                most += steps[at / 32] * w.abs() + 2e-5 * (product.abs() + f64::from(x.abs()));
            }
            let name = self.name();
            assert!((f64::from(*y) - sum).abs() <= most, "{name}: {y}, not {sum} ± {most}");
        }
    }

    fn name(&self) -> String {
        let form = match self.stored.rows() {
            Rows::F32(_) => "f32",
            Rows::F16(_) => "f16",
            Rows::I8(..) => "int8",
            Rows::I8Blocks(..) => "int8 blocks",
            Rows::I4(..) => "int4",
        };
        let offsets = self.stored.offsets().is_some();
        let Self { rows, columns, activations, .. } = self;
        format!("{form}, offsets {offsets}, {rows} × {columns}, {activations:?}")
    }
}

fn pool(threads: usize) -> ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn every_number_of_threads_gives_the_same_bits() {
    let pools = [3, 7, 64].map(pool);
    for columns in COLUMNS {
        // The second is cut into more tasks by more threads.
        for case in [1, 200].into_iter().flat_map(|rows| Case::all(rows, columns)) {
            for count in COUNTS {
                let x = numbers(count * columns, 5);
                let alone = case.multiply(&x, &Team::Alone);
                for pool in &pools {
                    let found = pool.install(|| Team::gather(|team| case.multiply(&x, team)));
                    let same = alone.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
                    let threads = pool.current_num_threads();
                    assert!(same, "{}, {count} rows, {threads} threads", case.name());
                }
            }
        }
    }
}

#[test]
fn few_rows_and_odd_columns_are_as_exact_as_documented() {
    for columns in COLUMNS {
        for case in [1, 3, 14].into_iter().flat_map(|rows| Case::all(rows, columns)) {
            for count in COUNTS {
                let x = numbers(count * columns, 5);
                let y = case.multiply(&x, &Team::Alone);
                for (x, y) in x.chunks_exact(columns).zip(y.chunks_exact(case.rows)) {
                    case.near(x, y, false);
                }
            }
        }
    }
}

/// Each row but the bad one, which `bad` makes, is as exact as it is beside others. Calls `check` with the bad one.
fn beside(bad: impl Fn(&mut [f32]), check: impl Fn(&Case, &[f32], &[f32])) {
    for columns in [96, 256] {
        for case in Case::all(5, columns) {
            for count in COUNTS {
                let mut x = numbers(count * columns, 5);
                let at = count / 2;
                bad(&mut x[at * columns..][..columns]);
                let y = case.multiply(&x, &Team::Alone);
                let rows = x.chunks_exact(columns).zip(y.chunks_exact(case.rows));
                for (row, (x, y)) in rows.enumerate() {
                    if row == at { check(&case, x, y) } else { case.near(x, y, false) }
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_leaves_the_others_alone() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let check = |case: &Case, _: &[f32], y: &[f32]| {
            assert!(y.iter().all(|y| !y.is_finite()), "{}: {value}, {y:?}", case.name());
        };
        beside(|row| row[37] = value, check);
    }
}

#[test]
fn an_outlier_costs_its_own_block_alone() {
    // The row is as exact as with int16, except where int8 is asked for.
    beside(|row| row[37] = 1e4, |case, x, y| case.near(x, y, true));
}

#[test]
fn subnormal_numbers_are_multiplied() {
    let bad = |row: &mut [f32]| row.iter_mut().for_each(|x| *x *= 1e-40);
    let check = |case: &Case, x: &[f32], y: &[f32]| {
        case.near(x, y, false);
        let weighs = |weights: &[f64]| {
            weights.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum::<f64>().abs() > 1e-42
        };
        let mut all = y.iter().zip(case.values.chunks_exact(case.columns));
        assert!(all.all(|(y, weights)| *y != 0.0 || !weighs(weights)), "{}", case.name());
    };
    beside(bad, check);
    // A part of a row.
    beside(
        |row| row[..32].iter_mut().for_each(|x| *x *= 1e-42),
        |case, x, y| case.near(x, y, true),
    );
}
