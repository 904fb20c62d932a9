//! Large weights: read from the checkpoint row by row when a graph is lowered.

use std::fmt;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_base::{Error, ErrorKind, Result};
use qhx_types::DType;
use rayon::prelude::*;

use crate::onnx::StoredWeight;
use crate::quantize::{
    Bits, Quantized, QuantizedForm, QuantizedMut, quantize_block, quantize_row, round_scales,
};

mod held;
mod views;

pub use held::{held, held_blocks};
pub use views::{row_order, row_range, scaled, transposed, weighted};

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

    /// Element type in the checkpoint: f16, bf16 or f32; i8 for values of at most 8 bits, whatever their form.
    fn stored_dtype(&self) -> DType;

    /// Writes whole rows from `first` on into `out`, whose length is a multiple of the columns. The values
    /// are those of the checkpoint, and may be NaN or infinite; [`read`] refuses such values.
    ///
    /// # Errors
    /// When the rows cannot be read.
    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()>;

    /// The row of the checkpoint's tensor that row 0 is, for messages.
    fn first_row(&self) -> usize {
        0
    }

    /// The form of the quantized weights, where the checkpoint holds these and not floating point, such as
    /// GGUF's Q4_0 or GPTQ's. The block divides the columns. [`RowSource::read_f32`] then gives the values that they
    /// stand for ([`dequantize_blocks`]).
    ///
    /// A weight that is stored in the same form ([`Storage::Blocks`]) hands on the values, scales and offsets as
    /// they are: the QNN graph and its reference graph have the very numbers that another program chose.
    /// The precision of a recipe sees to it.
    fn block_form(&self) -> Option<QuantizedForm> {
        None
    }

    /// The form that holds its values nearest where a bundle has quantized weights: the checkpoint's own
    /// ([`RowSource::block_form`]), or one for those of a form that no graph has, such as GGUF's Q6_K. None where the
    /// checkpoint holds floating point, which any form rounds.
    fn nearest_form(&self) -> Option<QuantizedForm> {
        self.block_form()
    }

    /// Writes the quantized values of whole rows from `first` on into `out`, whose parts are as long as
    /// [`RowSource::block_form`] asks for. Values out of the form's range, and scales and offsets that are not
    /// finite, are refused by [`Weight::to_blocks`]. Errors where there is no such form.
    ///
    /// # Errors
    /// When the rows cannot be read, or the checkpoint holds no quantized values.
    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let _ = (first, out);
        let what = format!("{}: the checkpoint holds no quantized values of it", self.name());
        Err(Error::new(ErrorKind::Internal, what))
    }

    /// Weight of each input's error where values are quantized, relative to the others; all alike if none.
    fn worth(&self) -> Option<&[f32]> {
        None
    }

    /// The numbers where they lie in the files of an ONNX graph that was read. None for all other weights.
    fn stored(&self) -> Option<&StoredWeight> {
        None
    }

    /// The same matrix with its columns in the order in which graphs can hold its quantized weights, where blocks are
    /// no neighbours in its own (GPTQ's `desc_act`). None for all others.
    fn reordered(&self) -> Option<Reordered> {
        None
    }
}

/// A matrix whose columns are in another order than those of the checkpoint.
#[derive(Debug, Clone)]
pub struct Reordered {
    /// The matrix.
    pub source: Arc<dyn RowSource>,
    /// Column of the checkpoint's matrix for each column of it. A permutation.
    pub order: Arc<[u32]>,
}

impl Reordered {
    /// The same order of columns over a view of other rows or scales of the matrix.
    fn over(self, view: impl FnOnce(Arc<dyn RowSource>) -> Arc<dyn RowSource>) -> Self {
        Self { source: view(self.source), order: self.order }
    }
}

/// [`RowSource::read_f32`] of a source with a [`RowSource::block_form`]: the dequantized values.
///
/// # Errors
/// Errors of [`RowSource::read_blocks`].
pub fn dequantize_blocks(source: &dyn RowSource, first: usize, out: &mut [f32]) -> Result<()> {
    let Some(form) = source.block_form() else { return source.read_f32(first, out) };
    let mut blocks = Quantized::zeroed(form, out.len());
    source.read_blocks(first, blocks.as_mut())?;
    blocks.as_ref().dequantize(out);
    Ok(())
}

/// Storage of a weight in the lowered graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// f16 in QNN; in ONNX the checkpoint's own values.
    Float,
    /// Symmetric int8 with one scale per row (output channel), in QNN and in ONNX.
    Int8,
    /// Values of 4 or 8 bits with one scale, and possibly one offset, for each block of inputs of a row.
    Blocks(QuantizedForm),
}

impl Storage {
    /// The form of a weight of `inputs` inputs that is stored so; none for floats.
    pub const fn form(self, inputs: usize) -> Option<QuantizedForm> {
        match self {
            Self::Float => None,
            Self::Int8 => Some(QuantizedForm::symmetric(Bits::Eight, inputs)),
            Self::Blocks(form) => Some(form),
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float => f.write_str("f16"),
            Self::Int8 => f.write_str("int8"),
            Self::Blocks(QuantizedForm { bits, block, .. }) => {
                write!(f, "int{} in blocks of {block}", bits.count())
            }
        }
    }
}

/// Largest magnitudes of what a weight is multiplied with, and of the products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// Elements of rows that it is multiplied with.
    pub inputs: f32,
    /// Elements of the results.
    pub outputs: f32,
}

/// A weight `[out, in]` and how it is to be stored. Clones share the source.
#[derive(Debug, Clone)]
pub struct Weight {
    source: Arc<dyn RowSource>,
    storage: Storage,
    range: Option<Range>,
}

impl Weight {
    /// A weight over `source`.
    pub fn new(source: Arc<dyn RowSource>, storage: Storage) -> Self {
        Self { source, storage, range: None }
    }

    /// Multiplied with 16-bit integers of this range where a backend has such a form. Scales of blocks of 4 bits that
    /// are not the checkpoint's own become multiples ([`Quantized::multiples`]).
    #[must_use]
    pub fn with_range(self, range: Range) -> Self {
        Self { range: Some(range), ..self }
    }

    /// Range of the 16-bit integers that it is multiplied with.
    pub fn range(&self) -> Option<Range> {
        self.range
    }

    /// Storage in the lowered graphs.
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
        let Some(form) = self.storage.form(self.cols()) else {
            return rows.saturating_mul(cols).saturating_mul(2);
        };
        if self.range.is_some() && form.bits == Bits::Four {
            // Multiples of a byte, f32 scales of rows, and offsets in f16.
            let blocks = rows.saturating_mul(cols) / form.block.max(1) as u64;
            let offset = if form.offsets { 3 } else { 1 };
            let scales = blocks.saturating_mul(offset).saturating_add(rows.saturating_mul(4));
            return form.bits.packed(rows.saturating_mul(cols)).saturating_add(scales);
        }
        // The library rounds the scales and offsets of blocks to f16.
        let scale = if self.storage == Storage::Int8 { 4 } else { 2 };
        form.bytes(rows, cols, scale)
    }

    /// All values as f16, row-major. Read in parallel.
    ///
    /// # Errors
    /// When a value is too large for f16, NaN or infinite.
    pub fn to_f16(&self) -> Result<Vec<f16>> {
        let mut out = self.zeroed(f16::ZERO)?;
        let cols = self.cols();
        let rows = rows_per_block(cols);
        out.par_chunks_mut(rows * cols).enumerate().try_for_each(|(block, chunk)| {
            let mut wide = vec![0f32; chunk.len()];
            read(&*self.source, block * rows, &mut wide)?;
            to_f16(&wide, chunk).map_err(|_| beyond_f16(&*self.source))
        })?;
        Ok(out)
    }

    /// All values as f32, row-major. Read in parallel.
    ///
    /// # Errors
    /// When a value is NaN or infinite.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = self.zeroed(0f32)?;
        read_rows(&*self.source, 0, &mut out)?;
        Ok(out)
    }

    /// All values as int8 with one scale per row, `w ≈ q · scale[row]`: those of the source where it has such. Read in
    /// parallel.
    ///
    /// # Errors
    /// When a value is NaN or infinite.
    pub fn to_int8(&self) -> Result<Quantized> {
        let cols = self.cols();
        let form = QuantizedForm::symmetric(Bits::Eight, cols);
        if self.source.block_form() == Some(form) {
            return self.to_blocks(form);
        }
        let mut all = Quantized::zeroed(form, self.elements()?);
        let rows = rows_per_block(cols);
        let blocks = all.values.par_chunks_mut(rows * cols).zip(all.scales.par_chunks_mut(rows));
        blocks.enumerate().try_for_each(|(block, (values, scales))| {
            let mut wide = vec![0f32; values.len()];
            read(&*self.source, block * rows, &mut wide)?;
            let pairs = wide.chunks_exact(cols).zip(values.chunks_exact_mut(cols));
            for ((row, out), scale) in pairs.zip(scales) {
                *scale = quantize_row(row, out).map_err(|e| e.context(self.source.name()))?;
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// All values quantized in blocks of the form `form`: those of the checkpoint where it has such, else as
    /// [`quantize_block`] does. Read in parallel.
    ///
    /// # Errors
    /// When a value, a scale or an offset is not finite or out of range.
    pub fn to_blocks(&self, form: QuantizedForm) -> Result<Quantized> {
        let (source, cols) = (&*self.source, self.cols());
        let Some(count) = form.blocks(cols) else {
            let what =
                format!("{}: blocks of {} in rows of {cols} inputs", source.name(), form.block);
            return Err(Error::new(ErrorKind::Graph, what)
                .hint("the length of a block has to divide the inputs"));
        };
        let stored = source.block_form() == Some(form);
        let mut all = Quantized::zeroed(form, self.elements()?);
        let rows = rows_per_block(cols);
        let scales = rows * count;
        let mut offsets: Vec<&mut [f32]> = all.offsets.chunks_mut(scales).collect();
        offsets.resize_with(self.rows().div_ceil(rows), Default::default);
        let parts = all.values.par_chunks_mut(rows * cols).zip(all.scales.par_chunks_mut(scales));
        parts.zip(offsets).enumerate().try_for_each(|(part, ((values, scales), offsets))| {
            let out = QuantizedMut { form, values, scales, offsets };
            match stored {
                true => read_stored(source, part * rows, out),
                false => quantize_blocks(source, part * rows, out, self.range.is_some()),
            }
        })?;
        Ok(all)
    }

    fn zeroed<T: Copy>(&self, zero: T) -> Result<Vec<T>> {
        Ok(vec![zero; self.elements()?])
    }

    fn elements(&self) -> Result<usize> {
        self.rows().checked_mul(self.cols()).ok_or_else(|| {
            Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: {:?} is larger than memory can be",
                    self.source.name(),
                    self.source.shape()
                ),
            )
        })
    }
}

/// Reads the quantized values that the checkpoint holds, and checks them.
fn read_stored(source: &dyn RowSource, first: usize, mut out: QuantizedMut<'_>) -> Result<()> {
    source.read_blocks(first, out.reborrow())?;
    let QuantizedMut { form, values, scales, offsets } = out;
    let damaged = |what: String| {
        let row = source.first_row() + first;
        let what = format!("tensor {}: from row {row} on, {what}", source.name());
        Error::new(ErrorKind::Artifact, what).hint("the checkpoint is damaged; download it again")
    };
    let (low, high) = form.bits.range();
    if let Some(q) = values.iter().find(|q| !(low..=high).contains(*q)) {
        return Err(damaged(format!("an integer is {q}, expected {low} to {high}")));
    }
    for (what, numbers) in [("a scale", scales), ("an offset", offsets)] {
        if let Some(number) = numbers.iter().find(|n| n.is_nan() || n.abs() > ABSURD) {
            let expected = if number.is_finite() { "at most 1e12" } else { "a finite number" };
            return Err(damaged(format!("{what} is {number}, expected {expected}")));
        }
    }
    Ok(())
}

/// Reads values and quantizes them, with scales that are multiples of their row's if `multiples`.
fn quantize_blocks(
    source: &dyn RowSource,
    first: usize,
    mut out: QuantizedMut<'_>,
    multiples: bool,
) -> Result<()> {
    let form = out.form;
    let mut wide = vec![0f32; out.values.len()];
    read(source, first, &mut wide)?;
    let cols = source.shape()[1];
    let worth = source.worth().filter(|worth| worth.len() == cols).unwrap_or_default();
    let own = out.reborrow();
    let (mut scales, mut offsets) = (own.scales.iter_mut(), own.offsets.iter_mut());
    let rows = wide.chunks_exact(cols.max(1)).zip(own.values.chunks_exact_mut(cols.max(1)));
    for (row, values) in rows {
        let mut worth = worth.chunks(form.block);
        for (block, values) in row.chunks(form.block).zip(values.chunks_mut(form.block)) {
            let found = quantize_block(block, form, worth.next().unwrap_or_default(), values);
            let (scale, offset) = found.map_err(|e| e.context(source.name()))?;
            if !scale.is_finite() {
                return Err(beyond_f16(source));
            }
            if let Some(to) = scales.next() {
                *to = scale;
            }
            if let Some(to) = offsets.next() {
                *to = offset;
            }
        }
    }
    if multiples && form.bits == Bits::Four {
        let count = form.blocks(cols).unwrap_or(1);
        let mut offsets = out.offsets.chunks_mut(count);
        let rows = out.values.chunks_exact_mut(cols.max(1)).zip(out.scales.chunks_mut(count));
        for (row, (values, scales)) in wide.chunks_exact(cols.max(1)).zip(rows) {
            let offsets = offsets.next().unwrap_or_default();
            round_scales(row, worth, QuantizedMut { form, values, scales, offsets });
        }
    }
    Ok(())
}

/// Hands all rows of `source` to `take` in order, some megabytes at a time, read in parallel.
///
/// # Errors
/// Errors of `take`, and of reading.
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

/// A magnitude beyond which no trained weight is: sums of such values leave f32.
const ABSURD: f32 = 1e12;

/// Reads whole rows from `first` on into `out`.
///
/// # Errors
/// When one of the values is NaN, infinite or of absurd size: the message names the first such value of the tensor,
/// and how many there are.
pub fn read(source: &dyn RowSource, first: usize, out: &mut [f32]) -> Result<()> {
    source.read_f32(first, out)?;
    if out.iter().fold(true, |sane, v| sane & (v.abs() <= ABSURD)) {
        return Ok(());
    }
    Err(not_sane(source))
}

/// Error for a tensor with values that are NaN, infinite or of absurd size.
fn not_sane(source: &dyn RowSource) -> Error {
    let bad = |v: f32| v.is_nan() || v.abs() > ABSURD;
    let Bad { first, value, count, total, .. } = match Bad::find(source, bad) {
        Ok(bad) => bad,
        Err(error) => return error,
    };
    let beyond = if value.is_finite() { ", or beyond 1e12, as no trained weight is" } else { "" };
    Error::new(
        ErrorKind::Artifact,
        format!(
            "tensor {}: element {first} is {value}; {count} of {total} values are NaN or infinite{beyond}",
            source.name()
        ),
    )
    .hint("the checkpoint is damaged, or was saved after training diverged; download it again")
}

/// Error for a tensor with values that f16 cannot hold.
pub fn beyond_f16(source: &dyn RowSource) -> Error {
    let found = Bad::find(source, |v| v.is_finite() && v.abs() >= F16_OVERFLOW);
    let Bad { first, value, count, total, peak } = match found {
        Ok(bad) => bad,
        Err(error) => return error,
    };
    let hint = "the NPU computes in f16; a bundle for the CPU only (`--cpu-only`) keeps f32 weights as they are";
    if count == 0 {
        let what = format!(
            "tensor {}: its quantized values, their scales or offsets are too large for f16, which holds at most {}",
            source.name(),
            f16::MAX
        );
        return Error::new(ErrorKind::Artifact, what).hint(hint);
    }
    Error::new(
        ErrorKind::Artifact,
        format!(
            "tensor {}: element {first} is {value}, and f16 holds at most {}; {count} of {total} values are \
             too large, the largest magnitude is {peak}",
            source.name(),
            f16::MAX
        ),
    )
    .hint(hint)
}

/// Values of a tensor that cannot be used.
struct Bad {
    /// Index in the row-major tensor of the checkpoint.
    first: usize,
    value: f32,
    count: usize,
    /// Values looked at.
    total: usize,
    /// Largest magnitude of the bad ones.
    peak: f32,
}

impl Bad {
    /// Looks at all values of a tensor of which one is known to be `bad`.
    fn find(source: &dyn RowSource, bad: impl Fn(f32) -> bool) -> Result<Self> {
        let [rows, cols] = source.shape();
        let mut found = Self {
            first: 0,
            value: f32::NAN,
            count: 0,
            total: rows.saturating_mul(cols),
            peak: 0.0,
        };
        let window = rows_per_block(cols).min(rows.max(1));
        let mut wide = vec![0f32; window * cols];
        for first in (0..rows).step_by(window) {
            let part = wide.get_mut(..window.min(rows - first) * cols).unwrap_or_default();
            source.read_f32(first, part)?;
            for (index, &value) in part.iter().enumerate().filter(|(_, v)| bad(**v)) {
                if found.count == 0 {
                    found.first = (source.first_row() + first) * cols + index;
                    found.value = value;
                }
                found.count += 1;
                found.peak = found.peak.max(value.abs());
            }
        }
        Ok(found)
    }
}

/// Smallest magnitude that f16 rounds to infinity.
pub const F16_OVERFLOW: f32 = 65520.0;

/// Rounds to f16.
///
/// # Errors
/// When a value is too large for it or not a number.
pub fn to_f16(wide: &[f32], out: &mut [f16]) -> Result<()> {
    out.convert_from_f32_slice(wide);
    if wide.iter().fold(true, |fits, w| fits & (w.abs() < F16_OVERFLOW)) {
        return Ok(());
    }
    let fits = |w: &f32| w.abs() < F16_OVERFLOW;
    let index = wide.iter().position(|w| !fits(w)).unwrap_or(0);
    let worst = wide.get(index).copied().unwrap_or(f32::NAN);
    Err(Error::new(
        ErrorKind::Artifact,
        format!("value {index} is {worst}, and f16 holds at most {}", f16::MAX),
    )
    .hint("the NPU computes in f16; a bundle for the CPU only (`--cpu-only`) keeps f32 values as they are"))
}

/// True when rounding to f16 changes nothing that matters: no value by more than 2⁻¹⁷ of the
/// largest. So for f16 always, for bf16 unless a value overflows (f16 has more mantissa bits, and
/// only bits below 2⁻²⁴ are lost), for f32 when the values came from either.
///
/// # Errors
/// When the tensor cannot be read.
pub fn fits_f16(source: &dyn RowSource) -> Result<bool> {
    Ok(source.stored_dtype() == DType::F16 || f16_error(source)? <= F16_EXACT)
}

/// True when a table is to be stored as f16: [`fits_f16`], or its values have at most 8 bits in the checkpoint and
/// f16 holds the largest. A table in f32 would be four times the size of what was published, for digits below the
/// checkpoint's own steps.
///
/// # Errors
/// When the tensor cannot be read.
pub fn table_fits_f16(source: &dyn RowSource) -> Result<bool> {
    match source.stored_dtype() {
        DType::I8 => Ok(f16_error(source)?.is_finite()),
        _ => fits_f16(source),
    }
}

/// The part of the largest value by which rounding to f16 may change others: 2⁻¹⁷.
const F16_EXACT: f32 = 1.0 / 131_072.0;

/// The most that rounding to f16 changes a value, as a part of the largest; infinite when f16 does not hold that.
fn f16_error(source: &dyn RowSource) -> Result<f32> {
    let (mut peak, mut error) = (0f32, 0f32);
    let mut finite = true;
    let mut half = Vec::new();
    let mut back = Vec::new();
    stream(source, |wide| {
        half.resize(wide.len(), f16::ZERO);
        back.resize(wide.len(), 0f32);
        half.convert_from_f32_slice(wide);
        half.convert_to_f32_slice(&mut back);
        for (&w, &b) in wide.iter().zip(&back) {
            finite &= b.is_finite();
            peak = peak.max(w.abs());
            error = error.max((w - b).abs());
        }
        Ok(())
    })?;
    Ok(match (finite, peak > 0.0) {
        (false, _) => f32::INFINITY,
        (true, true) => error / peak,
        (true, false) => 0.0,
    })
}

/// Fills `out` with whole rows from `first` on, in parallel.
fn read_rows(source: &dyn RowSource, first: usize, out: &mut [f32]) -> Result<()> {
    let cols = source.shape()[1];
    let rows = rows_per_block(cols);
    out.par_chunks_mut(rows * cols)
        .enumerate()
        .try_for_each(|(block, chunk)| read(source, first + block * rows, chunk))
}

fn rows_per_block(cols: usize) -> usize {
    (BLOCK / cols.max(1)).max(1)
}

#[cfg(test)]
mod tests;
