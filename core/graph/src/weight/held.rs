//! Weights whose values are in memory.

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::DType;

use super::{RowSource, dequantize_blocks};
use crate::quantize::{Quantized, QuantizedForm, QuantizedMut};

#[derive(Debug)]
enum Values {
    Floats(Vec<f32>),
    Blocks(Quantized),
}

/// A matrix whose values are not those of a checkpoint's file, such as one that was made of several tensors.
#[derive(Debug)]
struct Held {
    name: String,
    shape: [usize; 2],
    values: Values,
}

/// The matrix of a name whose rows are `values`, one behind the other.
pub fn held(name: impl Into<String>, shape: [usize; 2], values: Vec<f32>) -> Arc<dyn RowSource> {
    Arc::new(Held { name: name.into(), shape, values: Values::Floats(values) })
}

/// Same as [`held`], for values that are quantized.
pub fn held_blocks(
    name: impl Into<String>,
    shape: [usize; 2],
    values: Quantized,
) -> Arc<dyn RowSource> {
    Arc::new(Held { name: name.into(), shape, values: Values::Blocks(values) })
}

impl Held {
    /// Copies elements of rows from `first` on, of which each row has `columns`.
    fn copy<T: Copy>(&self, all: &[T], first: usize, columns: usize, out: &mut [T]) -> Result<()> {
        // Symmetric forms have no offsets.
        if out.is_empty() {
            return Ok(());
        }
        let from = first.saturating_mul(columns);
        let part = all.get(from..from.saturating_add(out.len())).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("{}: no rows from {first} on", self.name))
        })?;
        out.copy_from_slice(part);
        Ok(())
    }
}

impl RowSource for Held {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        match &self.values {
            Values::Floats(values) => self.copy(values, first, self.shape[1], out),
            Values::Blocks(_) => dequantize_blocks(self, first, out),
        }
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        match &self.values {
            Values::Floats(_) => None,
            Values::Blocks(values) => Some(values.form),
        }
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let Values::Blocks(Quantized { form, values, scales, offsets }) = &self.values else {
            let what = format!("{}: its values are not quantized", self.name);
            return Err(Error::new(ErrorKind::Internal, what));
        };
        let blocks = self.shape[1] / form.block.max(1);
        self.copy(values, first, self.shape[1], out.values)?;
        self.copy(scales, first, blocks, out.scales)?;
        self.copy(offsets, first, blocks, out.offsets)
    }
}
