//! Large weights: read from the checkpoint row by row when a graph is lowered.

use std::fmt;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_core::{DType, Error, ErrorKind, Result};
use rayon::prelude::*;

use crate::quantise::{Int8Rows, quantise_row};

/// Elements that one task of a parallel read handles.
const BLOCK: usize = 1 << 17;
/// Elements that are held at a time when a weight is streamed.
const WINDOW: usize = 1 << 23;

/// A matrix `[rows, cols]` that yields its rows on demand, from any thread.
pub trait RowSource: Send + Sync + fmt::Debug {
    /// The name in the checkpoint, for messages.
    fn name(&self) -> &str;

    /// Rows and columns. For the weight of a `Linear`: outputs and inputs.
    fn shape(&self) -> [usize; 2];

    /// Element type in the checkpoint: f16, bf16 or f32.
    fn stored_dtype(&self) -> DType;

    /// Writes whole rows from `first` on into `out`, whose length is a multiple of the columns.
    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()>;
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

    /// All values as f16, row-major. Read in parallel. Errors when a value does not fit.
    pub fn to_f16(&self) -> Result<Vec<f16>> {
        let mut out = self.zeroed(f16::ZERO)?;
        let cols = self.cols();
        let rows = rows_per_block(cols);
        out.par_chunks_mut(rows * cols).enumerate().try_for_each(|(block, chunk)| {
            let mut wide = vec![0f32; chunk.len()];
            self.source.read_f32(block * rows, &mut wide)?;
            narrow(&wide, chunk).map_err(|e| e.context(self.source.name()))
        })?;
        Ok(out)
    }

    /// All values as f32, row-major. Read in parallel.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = self.zeroed(0f32)?;
        read_rows(&*self.source, 0, &mut out)?;
        Ok(out)
    }

    /// All values as int8 with one scale per row: `w ≈ q · scale[row]`. Read in parallel.
    pub fn to_int8(&self) -> Result<Int8Rows> {
        let cols = self.cols();
        let mut values = self.zeroed(0i8)?;
        let mut scales = vec![0f32; self.rows()];
        let rows = rows_per_block(cols);
        let blocks = values.par_chunks_mut(rows * cols).zip(scales.par_chunks_mut(rows));
        blocks.enumerate().try_for_each(|(block, (values, scales))| {
            let mut wide = vec![0f32; values.len()];
            self.source.read_f32(block * rows, &mut wide)?;
            let pairs = wide.chunks_exact(cols).zip(values.chunks_exact_mut(cols));
            for ((row, out), scale) in pairs.zip(scales) {
                *scale = quantise_row(row, out).map_err(|e| e.context(self.source.name()))?;
            }
            Ok(())
        })?;
        Ok(Int8Rows { values, scales })
    }

    fn zeroed<T: Copy>(&self, zero: T) -> Result<Vec<T>> {
        let len = self.rows().checked_mul(self.cols()).ok_or_else(|| {
            Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: {:?} is larger than memory can be",
                    self.source.name(),
                    self.source.shape()
                ),
            )
        })?;
        Ok(vec![zero; len])
    }
}

/// Hands all rows of `source` to `take` in order, some megabytes at a time, read in parallel.
pub fn stream(source: &dyn RowSource, mut take: impl FnMut(&[f32]) -> Result<()>) -> Result<()> {
    let [rows, cols] = source.shape();
    let window = (WINDOW / cols.max(1)).clamp(1, rows.max(1));
    let mut wide = vec![0f32; window * cols];
    for first in (0..rows).step_by(window) {
        let len = window.min(rows - first) * cols;
        let part = wide.get_mut(..len).unwrap_or_default();
        read_rows(source, first, part)?;
        take(part)?;
    }
    Ok(())
}

/// Rounds to f16. Errors when a finite value overflows or one is not a number.
pub fn narrow(wide: &[f32], out: &mut [f16]) -> Result<()> {
    out.convert_from_f32_slice(wide);
    // Largest magnitude that still rounds to 65504.
    let fits = wide.iter().fold(true, |fits, w| fits & (w.abs() < 65520.0));
    if fits {
        return Ok(());
    }
    let worst = wide.iter().copied().find(|w| w.is_nan() || w.abs() >= 65520.0).unwrap_or(f32::NAN);
    Err(Error::new(ErrorKind::Artifact, format!("a weight is {worst}, which f16 cannot hold"))
        .hint("the checkpoint is damaged, or needs a backend with f32 weights"))
}

/// True when rounding to f16 changes nothing that matters: no value by more than 2⁻¹⁷ of the
/// largest. So for f16 always, for bf16 unless a value overflows (f16 has more mantissa bits, and
/// only bits below 2⁻²⁴ are lost), for f32 when the values came from either.
pub fn fits_f16(source: &dyn RowSource) -> Result<bool> {
    if source.stored_dtype() == DType::F16 {
        return Ok(true);
    }
    let (mut peak, mut error) = (0f32, 0f32);
    let mut finite = true;
    let mut narrow = Vec::new();
    let mut back = Vec::new();
    stream(source, |wide| {
        narrow.resize(wide.len(), f16::ZERO);
        back.resize(wide.len(), 0f32);
        narrow.convert_from_f32_slice(wide);
        narrow.convert_to_f32_slice(&mut back);
        for (&w, &b) in wide.iter().zip(&back) {
            finite &= b.is_finite();
            peak = peak.max(w.abs());
            error = error.max((w - b).abs());
        }
        Ok(())
    })?;
    Ok(finite && error <= peak * f32::powi(2.0, -17))
}

/// Fills `out` with whole rows from `first` on, in parallel.
fn read_rows(source: &dyn RowSource, first: usize, out: &mut [f32]) -> Result<()> {
    let cols = source.shape()[1];
    let rows = rows_per_block(cols);
    out.par_chunks_mut(rows * cols)
        .enumerate()
        .try_for_each(|(block, chunk)| source.read_f32(first + block * rows, chunk))
}

fn rows_per_block(cols: usize) -> usize {
    (BLOCK / cols.max(1)).max(1)
}
