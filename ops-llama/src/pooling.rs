//! From one row a token to one vector a text.

use std::ops::Range;

use qhx_op::{BufferId, Error, ErrorCode, Host, Result, View};
use serde::Deserialize;

use crate::modules::{Declared, Modules, normalize};

/// Pooling of the rows of the real tokens into one (Sentence-BERT, arXiv 1908.10084).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// The last one.
    Last,
    /// The first one.
    Cls,
    /// The largest value of each column.
    Max,
    /// Their sum over the root of their number.
    MeanSqrtLen,
    /// Their mean, the n-th of them weighted with n, counted from 1.
    WeightedMean,
}

/// One way to pool, or several whose vectors stand one after the other.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Poolings {
    One(Pooling),
    Many(Vec<Pooling>),
}

impl Default for Poolings {
    fn default() -> Self {
        Self::One(Pooling::default())
    }
}

impl From<Poolings> for Vec<Pooling> {
    fn from(poolings: Poolings) -> Self {
        match poolings {
            Poolings::One(one) => vec![one],
            Poolings::Many(all) => all,
        }
    }
}

/// Pools rows of `width` values into a buffer of f32.
#[derive(Debug)]
pub(crate) struct Pooler {
    poolings: Vec<Pooling>,
    normalize: bool,
    modules: Modules,
    width: usize,
    /// One row, wide.
    row: Vec<f32>,
    /// A vector for each pooling.
    pooled: Vec<f32>,
}

impl Pooler {
    /// For rows of `width` values. Errors when there is no pooling, or a module does not fit.
    pub fn open(
        host: &mut Host,
        poolings: Poolings,
        normalize: bool,
        modules: &[Declared],
        width: usize,
    ) -> Result<Self> {
        let poolings: Vec<Pooling> = poolings.into();
        if poolings.is_empty() {
            return Err(Error::manifest(
                "manifest /plan/params/pooling: an empty list, expected at least one".to_owned(),
            ));
        }
        let pooled = vec![0.0; width * poolings.len()];
        let modules = Modules::open(host, modules, pooled.len())?;
        Ok(Self { poolings, normalize, modules, width, row: vec![0.0; width], pooled })
    }

    /// Values of a vector.
    pub fn outputs(&self) -> usize {
        self.modules.outputs().unwrap_or(self.pooled.len())
    }

    /// Pools the rows of `source` that belong to a text, at least one, into row `place` of `target`, f32
    /// `[…, outputs]`. Allocates nothing.
    pub fn pool(
        &mut self,
        host: &mut Host,
        source: View,
        text: Range<usize>,
        target: BufferId,
        place: usize,
    ) -> Result<()> {
        let width = self.width;
        let pooled = self.pooled.chunks_exact_mut(width.max(1));
        for (pooling, to) in self.poolings.iter().zip(pooled) {
            pool(host, source, *pooling, text.clone(), &mut self.row, to)?;
        }
        let squares = self.pooled.iter().map(|value| f64::from(*value) * f64::from(*value));
        if !squares.sum::<f64>().is_finite() {
            return Err(Error::new(
                ErrorCode::EXECUTE,
                "the encoder's last rows are not finite: a value overflowed in a graph, or the \
                 weights of a context are damaged",
            ));
        }
        if self.normalize {
            normalize(&mut self.pooled);
        }
        let vector = self.modules.run(host, &self.pooled)?;
        let place = place * vector.len()..(place + 1) * vector.len();
        host.f32s_mut(target)[place].copy_from_slice(vector);
        Ok(())
    }
}

/// Pools the rows of a text in one way; `row` is room for one.
fn pool(
    host: &Host,
    source: View,
    pooling: Pooling,
    text: Range<usize>,
    row: &mut [f32],
    to: &mut [f32],
) -> Result<()> {
    let Range { start, end } = text;
    let rows = match pooling {
        Pooling::Last => end.saturating_sub(1)..end,
        Pooling::Cls => start..start + 1,
        _ => start..end,
    };
    let count = rows.len().max(1) as f32;
    to.fill(if pooling == Pooling::Max { f32::NEG_INFINITY } else { 0.0 });
    for (nth, place) in rows.enumerate() {
        source.to_f32(host, place * row.len(), row)?;
        let weight = if pooling == Pooling::WeightedMean { (nth + 1) as f32 } else { 1.0 };
        for (to, value) in to.iter_mut().zip(&*row) {
            *to = match pooling {
                Pooling::Max => to.max(*value),
                _ => *to + value * weight,
            };
        }
    }
    let over = match pooling {
        Pooling::Max => 1.0,
        Pooling::MeanSqrtLen => count.sqrt(),
        Pooling::WeightedMean => count * (count + 1.0) / 2.0,
        Pooling::Mean | Pooling::Last | Pooling::Cls => count,
    };
    to.iter_mut().for_each(|value| *value /= over);
    Ok(())
}
