//! Weights of products, which stay in the mapped files as they are stored.

use std::ops::Range;

use qhx_core::artifacts::Mapped;

use crate::kernels::Rows;

/// Elements of a mapped file.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    file: Mapped,
    range: Range<usize>,
}

impl Stored {
    /// The elements that lie at these bytes, or none where the file has no such bytes or they are not aligned.
    pub(crate) fn new(file: &Mapped, range: Range<usize>, align: usize) -> Option<Self> {
        let address = file.bytes().get(range.clone())?.as_ptr().addr();
        address.is_multiple_of(align).then(|| Self { file: file.clone(), range })
    }

    fn bytes(&self) -> &[u8] {
        self.file.bytes().get(self.range.clone()).unwrap_or_default()
    }

    /// The elements. What was checked in [`Stored::new`] makes the conversion succeed.
    fn elements<T: bytemuck::AnyBitPattern>(&self) -> &[T] {
        bytemuck::try_cast_slice(self.bytes()).unwrap_or_default()
    }
}

/// Scales or a bias: in the file, or small and in the model.
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

/// How the elements of a matrix are stored.
#[derive(Debug, Clone)]
pub(crate) enum Form {
    F32,
    F16,
    /// With a scale for each row.
    I8(Floats),
    /// int8 with a scale for each [`BLOCK`](crate::kernels::BLOCK) of a row.
    I8Blocks(Floats),
    /// Four bits with a scale for each block of a row.
    I4(Floats),
}

/// A matrix `[rows, columns]`, `rows` of which are outputs of a product.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) form: Form,
    pub(crate) stored: Stored,
    /// What is added to all weights of a block, `[blocks, rows]`.
    pub(crate) offsets: Option<Floats>,
}

impl Weights {
    /// All rows.
    pub(crate) fn all(&self) -> Rows<'_> {
        match &self.form {
            Form::F32 => Rows::F32(self.stored.elements()),
            Form::F16 => Rows::F16(self.stored.elements()),
            Form::I8(scales) => Rows::I8(self.stored.elements(), scales.get()),
            Form::I8Blocks(scales) => Rows::I8Blocks(self.stored.elements(), scales.get()),
            Form::I4(scales) => Rows::I4(self.stored.elements(), scales.get()),
        }
    }

    /// Where the elements begin in memory, and how many bytes they and their scales take.
    pub(crate) fn extent(&self) -> (usize, u64) {
        let scales = match &self.form {
            Form::F32 | Form::F16 => 0,
            Form::I8(scales) | Form::I8Blocks(scales) | Form::I4(scales) => {
                size_of_val(scales.get())
            }
        };
        let offsets = self.offsets.as_ref().map_or(0, |offsets| size_of_val(offsets.get()));
        let bytes = self.stored.bytes();
        (bytes.as_ptr().addr(), (bytes.len() + scales + offsets) as u64)
    }
}
