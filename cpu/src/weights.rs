//! Weights of matmuls, which stay in the mapped files as they are stored.

use std::ops::Range;
use std::sync::Arc;

use qhx_base::artifacts::Mapped;
use qhx_graph::onnx::{Numbers, Reals, StoredWeight};
use qhx_graph::weight::Weight;
use qhx_types::quantized::{BLOCK, Bits, QuantizedForm, repeated};
use rten_simd::SimdOp;

use crate::kernels::{self, DequantizeRow, Multiples, Rows};

/// Elements of a matrix: those of a mapped file, or a copy.
#[derive(Debug, Clone)]
pub(crate) struct Stored(Bytes);

#[derive(Debug, Clone)]
enum Bytes {
    Mapped(Mapped, Range<usize>),
    /// The words, and how many bytes of them count.
    Own(Arc<[u32]>, usize),
}

impl Stored {
    /// Numbers where they lie, or a copy of them where they are not aligned.
    fn of(numbers: &Numbers, align: usize) -> Self {
        match numbers.bytes().as_ptr().addr().is_multiple_of(align) {
            true => Self(Bytes::Mapped(numbers.file().clone(), numbers.range())),
            false => Self::copied(numbers.bytes()),
        }
    }

    /// A copy of these bytes.
    pub(crate) fn copied(bytes: &[u8]) -> Self {
        let mut words = vec![0u32; bytes.len().div_ceil(size_of::<u32>())];
        bytemuck::cast_slice_mut::<_, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(Bytes::Own(words.into(), bytes.len()))
    }

    fn bytes(&self) -> &[u8] {
        match &self.0 {
            Bytes::Mapped(file, range) => file.bytes().get(range.clone()),
            Bytes::Own(words, len) => bytemuck::cast_slice(words).get(..*len),
        }
        .unwrap_or_default()
    }

    /// The elements. Their alignment, see [`Stored::of`], makes the conversion succeed.
    fn elements<T: bytemuck::AnyBitPattern>(&self) -> &[T] {
        bytemuck::try_cast_slice(self.bytes()).unwrap_or_default()
    }
}

/// Scales, a bias or another constant: in the file, or in memory of its own.
#[derive(Debug, Clone)]
pub(crate) enum Floats {
    Stored(Stored),
    Own(Vec<f32>),
}

impl Floats {
    pub(crate) fn get(&self) -> &[f32] {
        match self {
            Self::Stored(stored) => stored.elements(),
            Self::Own(values) => values,
        }
    }
}

/// Scales of quantized weights, or their offsets: see [`kernels::Scales`].
#[derive(Debug, Clone)]
pub(crate) enum Scales {
    F32(Floats),
    F16(Stored),
    Multiples { units: Stored, multiples: Stored, minima: bool },
}

impl Scales {
    pub(crate) fn get(&self) -> kernels::Scales<'_> {
        match self {
            Self::F32(scales) => kernels::Scales::F32(scales.get()),
            Self::F16(scales) => kernels::Scales::F16(scales.elements()),
            Self::Multiples { units, multiples, minima } => {
                let (units, multiples) = (units.elements(), multiples.elements());
                kernels::Scales::Multiples(Multiples { units, multiples, minima: *minima })
            }
        }
    }

    /// Numbers where they lie.
    fn of(reals: &Reals) -> Self {
        match reals {
            Reals::Half(numbers) => Self::F16(Stored::of(numbers, 2)),
            Reals::Float(numbers) => Self::F32(Floats::Stored(Stored::of(numbers, 4))),
            Reals::Multiples { units, multiples, minima } => Self::Multiples {
                units: Stored::of(units, 2),
                multiples: Stored::of(multiples, 1),
                minima: *minima,
            },
        }
    }

    fn bytes(&self) -> usize {
        match self.get() {
            kernels::Scales::F32(all) => size_of_val(all),
            kernels::Scales::F16(all) => size_of_val(all),
            // Scales and minima lie beside each other.
            kernels::Scales::Multiples(Multiples { minima: true, .. }) => 0,
            kernels::Scales::Multiples(all) => size_of_val(all.units) + all.multiples.len(),
        }
    }

    /// Those of blocks that are `pieces` shorter ones each.
    pub(crate) fn repeated(self, pieces: usize) -> Self {
        if pieces == 1 {
            return self;
        }
        match self.get() {
            kernels::Scales::F32(scales) => Self::F32(Floats::Own(repeated(scales, pieces))),
            kernels::Scales::F16(scales) => {
                Self::F16(Stored::copied(bytemuck::cast_slice(&repeated(scales, pieces))))
            }
            // Blocks of super-blocks have no pieces.
            kernels::Scales::Multiples(..) => self,
        }
    }
}

/// Storage form of a matrix's elements.
#[derive(Debug, Clone)]
pub(crate) enum Form {
    F32,
    F16,
    /// Integers in one of the forms that are multiplied as they are ([`Form::quantized`]), and their scales.
    Quantized(QuantizedForm, Scales),
}

impl Form {
    /// Quantized weights of this number of columns: with eight bits a scale for each row or each [`BLOCK`], with four
    /// bits for each [`BLOCK`]. Offsets are kept beside them ([`Weights::offsets`]).
    pub(crate) fn quantized(form: QuantizedForm, columns: usize, scales: Scales) -> Option<Self> {
        let rows = form.bits == Bits::Eight && form.block == columns;
        let known = rows || form.block == BLOCK && columns.is_multiple_of(BLOCK);
        (known && !form.offsets).then_some(Self::Quantized(form, scales))
    }
}

/// A matrix `[rows, columns]`, `rows` of which are outputs of a matmul.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) form: Form,
    pub(crate) stored: Stored,
    /// Offset of each block: see [`kernels::Scales`].
    pub(crate) offsets: Option<Scales>,
}

impl Weights {
    /// The weights of a graph that was read from a file, as they are stored there.
    pub(crate) fn of(weight: &Weight) -> Result<Self, String> {
        let (rows, columns, source) = (weight.rows(), weight.cols(), weight.source());
        let stored = source.stored().ok_or_else(|| format!("{} is in no file", source.name()))?;
        let (form, packed, integers, scales, offsets) = match stored {
            StoredWeight::Floats(reals) => {
                let (form, stored) = match reals {
                    Reals::Half(numbers) => (Form::F16, Stored::of(numbers, 2)),
                    Reals::Float(numbers) => (Form::F32, Stored::of(numbers, 4)),
                    Reals::Multiples { .. } => {
                        return Err(format!("{}: not floats", source.name()));
                    }
                };
                return Ok(Self { rows, columns, form, stored, offsets: None });
            }
            StoredWeight::Quantized { form, packed, integers, scales, offsets, .. } => {
                (*form, *packed, Stored::of(integers, 4), scales, offsets)
            }
        };
        let (scales, offsets) = (Scales::of(scales), offsets.as_ref().map(Scales::of));
        let whole = |form: QuantizedForm, scales, offsets| {
            let form = Form::quantized(form, columns, scales)?;
            Some(Self { rows, columns, form, stored: integers.clone(), offsets })
        };
        // Integers of 4 bits that are not packed are a byte each.
        let bytes = |block| QuantizedForm::symmetric(Bits::Eight, block);
        let found = if packed {
            whole(QuantizedForm::symmetric(Bits::Four, BLOCK), scales, offsets)
        } else if form.block == columns && offsets.is_none() {
            whole(bytes(columns), scales, None)
        } else if let Some(pieces) = form.pieces() {
            let offsets = offsets.map(|offsets| offsets.repeated(pieces));
            whole(bytes(BLOCK), scales.repeated(pieces), offsets)
        } else {
            let blocks = (rows * columns).checked_div(form.block).unwrap_or_default();
            let (block, form) = (form.block, Form::Quantized(bytes(form.block), scales.clone()));
            let all = Self { rows: blocks, columns: block, form, stored: integers, offsets: None };
            let mut values = all.dequantized();
            if let Some(offsets) = offsets {
                for (index, block) in values.chunks_exact_mut(all.columns).enumerate() {
                    let shift = offsets.get().get(index) * scales.get().get(index);
                    block.iter_mut().for_each(|w| *w += shift);
                }
            }
            Some(Self::own(rows, columns, &values))
        };
        found.ok_or_else(|| format!("{}: blocks that do not divide its rows", source.name()))
    }

    /// A matrix of f32 that is in no file.
    pub(crate) fn own(rows: usize, columns: usize, values: &[f32]) -> Self {
        let stored = Stored::copied(bytemuck::cast_slice(values));
        Self { rows, columns, form: Form::F32, stored, offsets: None }
    }

    /// All rows.
    pub(crate) fn all(&self) -> Rows<'_> {
        match &self.form {
            Form::F32 => Rows::F32(self.stored.elements()),
            Form::F16 => Rows::F16(self.stored.elements()),
            Form::Quantized(QuantizedForm { bits: Bits::Four, .. }, scales) => {
                Rows::I4(self.stored.elements(), scales.get())
            }
            Form::Quantized(form, scales) if form.block == self.columns => {
                Rows::I8(self.stored.elements(), scales.get())
            }
            Form::Quantized(_, scales) => Rows::I8Blocks(self.stored.elements(), scales.get()),
        }
    }

    /// Writes a row as f32, where it is stored as floats or int8 without offsets.
    pub(crate) fn dequantize(&self, row: usize, to: &mut [f32]) {
        let Self { columns, .. } = *self;
        DequantizeRow { weights: self.all(), columns, row, to }.dispatch();
    }

    /// All elements as f32, as [`Weights::dequantize`].
    pub(crate) fn dequantized(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.columns];
        let rows = values.chunks_exact_mut(self.columns.max(1)).enumerate();
        rows.for_each(|(row, to)| self.dequantize(row, to));
        values
    }

    /// Address of the elements in memory, and bytes of them and their scales.
    pub(crate) fn extent(&self) -> (usize, u64) {
        let scales = match &self.form {
            Form::F32 | Form::F16 => 0,
            Form::Quantized(_, scales) => scales.bytes(),
        };
        let offsets = self.offsets.as_ref().map_or(0, Scales::bytes);
        let bytes = self.stored.bytes();
        (bytes.as_ptr().addr(), (bytes.len() + scales + offsets) as u64)
    }
}
