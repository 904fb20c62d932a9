//! Views of a matrix: other rows, in another order, scaled or transposed.

use std::ops::Range;
use std::sync::Arc;

use qhx_base::Result;
use qhx_types::DType;

use super::{Reordered, RowSource};
use crate::onnx::StoredWeight;
use crate::quantize::{QuantizedForm, QuantizedMut};

/// Methods of a view that are those of its source.
macro_rules! of_source {
    ($($method:ident -> $type:ty),* $(,)?) => {$(
        fn $method(&self) -> $type {
            self.source.$method()
        }
    )*};
}

/// The rows of `source` times `factor`, such as a power of two that keeps what is computed with them within f16.
pub fn scaled(source: Arc<dyn RowSource>, factor: f32) -> Arc<dyn RowSource> {
    if factor == 1.0 { source } else { Arc::new(Scaled { source, factor }) }
}

/// The rows of `source`, each of whose inputs is worth `worth` where they are quantized.
pub fn weighted(source: Arc<dyn RowSource>, worth: Arc<[f32]>) -> Arc<dyn RowSource> {
    Arc::new(Weighted { source, worth })
}

#[derive(Debug)]
struct Weighted {
    source: Arc<dyn RowSource>,
    worth: Arc<[f32]>,
}

impl RowSource for Weighted {
    of_source!(
        name -> &str, shape -> [usize; 2], stored_dtype -> DType, first_row -> usize,
        block_form -> Option<QuantizedForm>, nearest_form -> Option<QuantizedForm>,
        stored -> Option<&StoredWeight>, reordered -> Option<Reordered>,
    );

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.source.read_f32(first, out)
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        self.source.read_blocks(first, out)
    }

    fn worth(&self) -> Option<&[f32]> {
        Some(&self.worth)
    }
}

/// These rows of `source`, which has them.
pub fn row_range(source: &Arc<dyn RowSource>, rows: Range<usize>) -> Arc<dyn RowSource> {
    Arc::new(Rows { source: Arc::clone(source), rows })
}

#[derive(Debug)]
struct Rows {
    source: Arc<dyn RowSource>,
    rows: Range<usize>,
}

impl RowSource for Rows {
    of_source!(
        name -> &str, stored_dtype -> DType, block_form -> Option<QuantizedForm>,
        nearest_form -> Option<QuantizedForm>, worth -> Option<&[f32]>,
    );

    fn shape(&self) -> [usize; 2] {
        [self.rows.len(), self.source.shape()[1]]
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.source.read_f32(self.rows.start + first, out)
    }

    fn first_row(&self) -> usize {
        self.source.first_row() + self.rows.start
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        self.source.read_blocks(self.rows.start + first, out)
    }

    fn reordered(&self) -> Option<Reordered> {
        let found = self.source.reordered()?;
        Some(found.over(|source| Arc::new(Self { source, rows: self.rows.clone() })))
    }
}

/// The rows of `source` in this order, a permutation: row n is row `order[n]` of it.
pub fn row_order(source: Arc<dyn RowSource>, order: Arc<[u32]>) -> Arc<dyn RowSource> {
    Arc::new(RowOrder { source, order })
}

#[derive(Debug)]
struct RowOrder {
    source: Arc<dyn RowSource>,
    order: Arc<[u32]>,
}

impl RowOrder {
    /// Positions in the source of the rows from `first` on.
    fn places(&self, first: usize) -> impl Iterator<Item = usize> {
        self.order.iter().skip(first).map(|row| *row as usize)
    }
}

impl RowSource for RowOrder {
    of_source!(
        name -> &str, shape -> [usize; 2], stored_dtype -> DType, worth -> Option<&[f32]>,
        block_form -> Option<QuantizedForm>, nearest_form -> Option<QuantizedForm>,
    );

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let mut rows = out.chunks_exact_mut(self.shape()[1].max(1)).zip(self.places(first));
        rows.try_for_each(|(row, place)| self.source.read_f32(place, row))
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let QuantizedMut { form, values, scales, offsets } = out;
        let cols = self.shape()[1].max(1);
        let blocks = form.blocks(cols).unwrap_or(1);
        let mut offsets = offsets.chunks_exact_mut(blocks);
        let rows = values.chunks_exact_mut(cols).zip(scales.chunks_exact_mut(blocks));
        for ((values, scales), place) in rows.zip(self.places(first)) {
            let offsets = offsets.next().unwrap_or_default();
            self.source.read_blocks(place, QuantizedMut { form, values, scales, offsets })?;
        }
        Ok(())
    }

    fn reordered(&self) -> Option<Reordered> {
        let found = self.source.reordered()?;
        Some(found.over(|source| row_order(source, Arc::clone(&self.order))))
    }
}

#[derive(Debug)]
struct Scaled {
    source: Arc<dyn RowSource>,
    factor: f32,
}

impl RowSource for Scaled {
    of_source!(
        name -> &str, shape -> [usize; 2], stored_dtype -> DType, first_row -> usize,
        block_form -> Option<QuantizedForm>, nearest_form -> Option<QuantizedForm>,
        worth -> Option<&[f32]>,
    );

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.source.read_f32(first, out)?;
        out.iter_mut().for_each(|value| *value *= self.factor);
        Ok(())
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let mut out = out;
        self.source.read_blocks(first, out.reborrow())?;
        out.scales.iter_mut().for_each(|scale| *scale *= self.factor);
        Ok(())
    }

    fn reordered(&self) -> Option<Reordered> {
        Some(self.source.reordered()?.over(|source| scaled(source, self.factor)))
    }
}

/// The columns of `source` as rows, for a projection that a checkpoint stores as `[inputs, outputs]`. All of `source`
/// is read for each call, a row at a time.
pub fn transposed(source: Arc<dyn RowSource>) -> Arc<dyn RowSource> {
    Arc::new(Transposed { source })
}

#[derive(Debug)]
struct Transposed {
    source: Arc<dyn RowSource>,
}

impl RowSource for Transposed {
    of_source!(name -> &str, stored_dtype -> DType);

    fn shape(&self) -> [usize; 2] {
        let [rows, cols] = self.source.shape();
        [cols, rows]
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let [outputs, inputs] = self.shape();
        let mut column = vec![0f32; outputs];
        for input in 0..inputs {
            self.source.read_f32(input, &mut column)?;
            let places = out.iter_mut().skip(input).step_by(inputs.max(1));
            places.zip(column.iter().skip(first)).for_each(|(to, from)| *to = *from);
        }
        Ok(())
    }
}
