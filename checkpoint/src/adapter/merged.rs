//! A weight and what adapters change of it.

use std::sync::Arc;

use qhx_base::Result;
use qhx_graph::weight::RowSource;
use qhx_types::DType;

/// A change of a weight `[rows, cols]`: `left · right · scale` is added, and with magnitudes each row then gets its own
/// (DoRA).
#[derive(Debug, Clone)]
pub(super) struct Change {
    /// `[rows, rank]`.
    pub left: Arc<[f32]>,
    /// `[rank, cols]`.
    pub right: Arc<[f32]>,
    pub rank: usize,
    pub rows: usize,
    pub cols: usize,
    pub scale: f32,
    pub magnitude: Option<Arc<[f32]>>,
}

impl Change {
    pub const fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Changes the row `row`; `sum` is room for one.
    fn apply(&self, row: usize, out: &mut [f32], sum: &mut [f32]) {
        let left = self.left.get(row * self.rank..(row + 1) * self.rank).unwrap_or_default();
        sum.fill(0.0);
        for (factor, right) in left.iter().zip(self.right.chunks_exact(self.cols.max(1))) {
            sum.iter_mut().zip(right).for_each(|(sum, right)| *sum += factor * right);
        }
        out.iter_mut().zip(&*sum).for_each(|(out, sum)| *out += sum * self.scale);
        if let Some(magnitude) = self.magnitude.as_ref().and_then(|all| all.get(row)) {
            let norm = out.iter().map(|value| value * value).sum::<f32>().sqrt();
            let factor = magnitude / norm;
            out.iter_mut().for_each(|value| *value *= factor);
        }
    }
}

/// A weight with its changes, one after the other.
#[derive(Debug)]
pub(super) struct Merged {
    pub source: Arc<dyn RowSource>,
    pub changes: Vec<Change>,
}

impl RowSource for Merged {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn shape(&self) -> [usize; 2] {
        self.source.shape()
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.source.read_f32(first, out)?;
        let cols = self.shape()[1].max(1);
        let mut sum = vec![0f32; cols];
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            self.changes.iter().for_each(|change| change.apply(first + row, out, &mut sum));
        }
        Ok(())
    }

    fn first_row(&self) -> usize {
        self.source.first_row()
    }
}

/// Rows of `cols` as columns.
pub(super) fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    let cols = cols.max(1);
    (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols).copied()).collect()
}
