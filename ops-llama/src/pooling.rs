//! From one row a token to one vector a text.

use std::ops::Range;

use qhx_op::{BufferId, Error, ErrorCode, Host, Result, View};
use serde::Deserialize;

/// Min norm that is divided by, as in `torch.nn.functional.normalize`.
const MIN_NORM: f32 = 1e-12;

/// How the rows of the real tokens become one (Sentence-BERT, arXiv 1908.10084).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// The last one.
    Last,
    /// The first one.
    Cls,
}

/// Pools rows of `width` values into a buffer of f32.
#[derive(Debug)]
pub(crate) struct Pooler {
    pub pooling: Pooling,
    pub normalize: bool,
    width: usize,
    /// One row, wide.
    row: Vec<f32>,
    sum: Vec<f32>,
}

impl Pooler {
    /// For rows of `width` values.
    pub fn new(pooling: Pooling, normalize: bool, width: usize) -> Self {
        Self { pooling, normalize, width, row: vec![0.0; width], sum: vec![0.0; width] }
    }

    /// Pools the rows of `source` that belong to a text, at least one, into row `place` of `target`, f32
    /// `[…, width]`. Allocates nothing.
    pub fn pool(
        &mut self,
        host: &mut Host,
        source: View,
        text: Range<usize>,
        target: BufferId,
        place: usize,
    ) -> Result<()> {
        let Range { start, end } = text;
        let rows = match self.pooling {
            Pooling::Mean => start..end,
            Pooling::Last => end.saturating_sub(1)..end,
            Pooling::Cls => start..start + 1,
        };
        let count = rows.len().max(1) as f32;
        self.sum.fill(0.0);
        for row in rows {
            source.to_f32(host, row * self.width, &mut self.row)?;
            for (sum, value) in self.sum.iter_mut().zip(&self.row) {
                *sum += value;
            }
        }
        let mut squares = 0f64;
        for value in &mut self.sum {
            *value /= count;
            squares += f64::from(*value) * f64::from(*value);
        }
        if !squares.is_finite() {
            return Err(Error::new(
                ErrorCode::EXECUTE,
                "the encoder's last rows are not finite: a value overflowed in a graph, or the \
                 weights of a context are damaged",
            ));
        }
        if self.normalize {
            let norm = (squares.sqrt() as f32).max(MIN_NORM);
            self.sum.iter_mut().for_each(|value| *value /= norm);
        }
        let place = place * self.width..(place + 1) * self.width;
        host.f32s_mut(target)[place].copy_from_slice(&self.sum);
        Ok(())
    }
}
