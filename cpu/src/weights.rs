//! Weights of matmuls, which stay in the mapped files as they are stored.

use std::ops::Range;
use std::sync::Arc;

use qhx_base::artifacts::Mapped;
use qhx_types::quantized::{BLOCK, Bits, QuantizedForm, repeated};
use rten_simd::SimdOp;

use crate::kernels::{self, DequantizeRow, Rows};

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
    /// The elements that lie at these bytes, or none where the file has no such bytes or they are not aligned.
    pub(crate) fn new(file: &Mapped, range: Range<usize>, align: usize) -> Option<Self> {
        let address = file.bytes().get(range.clone())?.as_ptr().addr();
        address.is_multiple_of(align).then(|| Self(Bytes::Mapped(file.clone(), range)))
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

    /// The elements. What was checked in [`Stored::new`] makes the conversion succeed.
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

/// Scales of quantized weights.
#[derive(Debug, Clone)]
pub(crate) enum Scales {
    F32(Floats),
    F16(Stored),
}

impl Scales {
    fn get(&self) -> kernels::Scales<'_> {
        match self {
            Self::F32(scales) => kernels::Scales::F32(scales.get()),
            Self::F16(scales) => kernels::Scales::F16(scales.elements()),
        }
    }

    /// Scales of blocks that are `pieces` shorter ones each.
    pub(crate) fn repeated(self, pieces: usize) -> Self {
        if pieces == 1 {
            return self;
        }
        match self.get() {
            kernels::Scales::F32(scales) => Self::F32(Floats::Own(repeated(scales, pieces))),
            kernels::Scales::F16(scales) => {
                Self::F16(Stored::copied(bytemuck::cast_slice(&repeated(scales, pieces))))
            }
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
    /// Offset added to all weights of a block, `[blocks, rows]`.
    pub(crate) offsets: Option<Floats>,
}

impl Weights {
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
            Form::Quantized(_, scales) => match scales.get() {
                kernels::Scales::F32(scales) => size_of_val(scales),
                kernels::Scales::F16(scales) => size_of_val(scales),
            },
        };
        let offsets = self.offsets.as_ref().map_or(0, |offsets| size_of_val(offsets.get()));
        let bytes = self.stored.bytes();
        (bytes.as_ptr().addr(), (bytes.len() + scales + offsets) as u64)
    }
}
