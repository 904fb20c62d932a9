//! A tensor of a safetensors file that holds floating point.

use std::ops::Range;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::RowSource;
use qhx_types::DType;

use crate::floats;

/// A mapped tensor, seen as a matrix.
#[derive(Debug)]
pub(super) struct Matrix {
    pub name: String,
    pub map: Mapped,
    pub bytes: Range<usize>,
    pub dtype: DType,
    pub shape: [usize; 2],
}

impl Matrix {
    /// The stored bytes of `len` elements from row `first` on.
    fn stored(&self, first: usize, len: usize) -> Result<&[u8]> {
        let size = self.dtype.size();
        let range = first
            .checked_mul(self.shape[1])
            .and_then(|n| n.checked_mul(size))
            .and_then(|n| n.checked_add(self.bytes.start))
            .and_then(|start| Some(start..start.checked_add(len.checked_mul(size)?)?))
            .filter(|r| r.end <= self.bytes.end);
        range.and_then(|r| self.map.bytes().get(r)).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("tensor {}: {len} elements from row {first} are out of bounds", self.name),
            )
        })
    }
}

impl RowSource for Matrix {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        self.dtype
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        floats::to_f32(self.dtype, self.stored(first, out.len())?, out);
        Ok(())
    }
}
