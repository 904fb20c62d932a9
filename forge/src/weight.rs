//! Large weights: read from the checkpoint row by row when a graph is lowered.

use std::fmt;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_core::{Error, ErrorKind, Result};
use rayon::prelude::*;

use crate::quantise::{Int8Rows, quantise_row};

/// Elements that one task of a parallel read handles.
const BLOCK: usize = 1 << 18;

/// A matrix `[rows, cols]` that yields its rows on demand, from any thread.
pub trait RowSource: Send + Sync + fmt::Debug {
    /// Rows and columns. For the weight of a `Linear`: outputs and inputs.
    fn shape(&self) -> [usize; 2];

    /// Writes whole rows from `first` on into `out`, whose length is a multiple of the columns.
    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()>;

    /// As [`RowSource::read_f32`], rounded to f16.
    fn read_f16(&self, first: usize, out: &mut [f16]) -> Result<()> {
        let mut wide = vec![0f32; out.len()];
        self.read_f32(first, &mut wide)?;
        out.convert_from_f32_slice(&wide);
        Ok(())
    }
}

/// How a weight is stored in the lowered graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// f16 in QNN; in ONNX the checkpoint's own values.
    Float,
    /// Symmetric int8 with one scale per row (output channel), in QNN and in ONNX.
    Int8,
}

/// A weight `[out, in]` and how it is to be stored. Clones share the source.
#[derive(Debug, Clone)]
pub struct Weight {
    source: Arc<dyn RowSource>,
    storage: Storage,
}

impl Weight {
    /// A weight over `source`.
    pub fn new(source: Arc<dyn RowSource>, storage: Storage) -> Self {
        Self { source, storage }
    }

    /// How it is stored.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Output channels.
    pub fn rows(&self) -> usize {
        self.source.shape()[0]
    }

    /// Input channels.
    pub fn cols(&self) -> usize {
        self.source.shape()[1]
    }

    /// The source of the rows.
    pub fn source(&self) -> &Arc<dyn RowSource> {
        &self.source
    }

    /// Bytes in a QNN graph, scales included.
    pub fn qnn_bytes(&self) -> u64 {
        let (rows, cols) = (self.rows() as u64, self.cols() as u64);
        match self.storage {
            Storage::Float => rows.saturating_mul(cols).saturating_mul(2),
            Storage::Int8 => rows.saturating_mul(cols).saturating_add(rows.saturating_mul(4)),
        }
    }

    /// All values as f16, row-major. Read in parallel.
    pub fn to_f16(&self) -> Result<Vec<f16>> {
        let mut out = zeroed(self, f16::ZERO)?;
        let cols = self.cols();
        let rows = rows_per_block(cols);
        out.par_chunks_mut(rows * cols)
            .enumerate()
            .try_for_each(|(block, chunk)| self.source.read_f16(block * rows, chunk))?;
        Ok(out)
    }

    /// All values as f32, row-major. Read in parallel.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = zeroed(self, 0f32)?;
        let cols = self.cols();
        let rows = rows_per_block(cols);
        out.par_chunks_mut(rows * cols)
            .enumerate()
            .try_for_each(|(block, chunk)| self.source.read_f32(block * rows, chunk))?;
        Ok(out)
    }

    /// All values as int8 with one scale per row: `w ≈ q · scale[row]`. Read in parallel.
    pub fn to_int8(&self) -> Result<Int8Rows> {
        let cols = self.cols();
        let mut values = zeroed(self, 0i8)?;
        let mut scales = vec![0f32; self.rows()];
        let rows = rows_per_block(cols);
        values
            .par_chunks_mut(rows * cols)
            .zip(scales.par_chunks_mut(rows))
            .enumerate()
            .try_for_each(|(block, (values, scales))| {
                let mut wide = vec![0f32; values.len()];
                self.source.read_f32(block * rows, &mut wide)?;
                for ((row, out), scale) in
                    wide.chunks_exact(cols).zip(values.chunks_exact_mut(cols)).zip(scales)
                {
                    *scale = quantise_row(row, out)?;
                }
                Ok(())
            })?;
        Ok(Int8Rows { values, scales })
    }
}

fn rows_per_block(cols: usize) -> usize {
    (BLOCK / cols.max(1)).max(1)
}

fn zeroed<T: Copy>(weight: &Weight, zero: T) -> Result<Vec<T>> {
    let len = weight.rows().checked_mul(weight.cols()).ok_or_else(|| {
        Error::new(
            ErrorKind::Artifact,
            format!(
                "a weight of {} × {} is larger than memory can be",
                weight.rows(),
                weight.cols()
            ),
        )
    })?;
    Ok(vec![zero; len])
}
