//! Weights that a file holds in another order than their module, or in 8 bits.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::RowSource;
use qhx_types::DType;
use safetensors::tensor::Dtype;

use crate::import::Imported;

/// Places of a module's gates (input, forget, cell, output) among those of ONNX (input, output, forget, cell).
const GATES: [usize; 4] = [0, 2, 3, 1];

/// A weight of a module.
#[derive(Debug, Clone)]
pub(crate) struct Laid {
    pub(super) file: Mapped,
    pub(super) dtype: Dtype,
    pub(super) bytes: Range<usize>,
    /// Sizes in the module, outputs first.
    pub(super) shape: Vec<usize>,
    /// Elements from a row to the next, and from a column to the next.
    pub(super) strides: [usize; 2],
    /// Rows are those of an LSTM's gates.
    pub(super) gates: bool,
    /// Factors of quantized values, and the values that stand for 0: one for all, or one for each row of the file. None
    /// for floats.
    pub(super) scales: Vec<[f32; 2]>,
}

impl Laid {
    /// Rows of the module's weight, and elements of each.
    fn sizes(&self) -> [usize; 2] {
        let rows = self.shape.first().copied().unwrap_or(1);
        [rows, self.shape.iter().skip(1).product::<usize>().max(1)]
    }

    /// The element `at` of the module's weight, by the function that reads an element of the file.
    fn value(&self, at: usize, read: impl Fn(usize) -> Option<f32>) -> f32 {
        let [rows, cols] = self.sizes();
        let row = match (at / cols, rows / GATES.len()) {
            (row, unit) if self.gates && unit > 0 => {
                GATES.get(row / unit).map_or(row, |gate| gate * unit + row % unit)
            }
            (row, _) => row,
        };
        let stored = read(row * self.strides[0] + at % cols * self.strides[1]);
        let value = stored.unwrap_or(f32::NAN);
        match self.scales.get(row).or(self.scales.first()) {
            Some([scale, zero]) => (value - zero) * scale,
            None => value,
        }
    }
}

impl Imported for Laid {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn form(&self) -> &'static str {
        if self.scales.is_empty() { "ONNX" } else { "ONNX in 8 bits" }
    }

    /// Values of 8 bits become floats: activations beside them are floats here.
    fn has_quantized_weights(&self) -> bool {
        false
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        let elements = |[rows, cols]: [usize; 2]| rows.checked_mul(cols);
        if elements(shape).is_none() || elements(shape) != elements(self.sizes()) {
            let what = format!("tensor {name}: {:?} seen as {shape:?}", self.shape);
            return Err(Error::new(ErrorKind::Internal, what));
        }
        Ok(Arc::new(Matrix { name: name.to_owned(), shape, laid: self.clone() }))
    }
}

/// A weight seen as a matrix.
#[derive(Debug)]
struct Matrix {
    name: String,
    shape: [usize; 2],
    laid: Laid,
}

impl RowSource for Matrix {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        match self.laid.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            _ => DType::I8,
        }
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let laid = &self.laid;
        let stored = laid.file.bytes().get(laid.bytes.clone()).unwrap_or_default();
        let (words, halves) = (stored.as_chunks().0, stored.as_chunks().0);
        let first = first * self.shape[1];
        for (at, out) in (first..).zip(out) {
            *out = laid.value(at, |at| {
                Some(match laid.dtype {
                    Dtype::F32 => f32::from_le_bytes(*words.get(at)?),
                    Dtype::F16 => f16::from_le_bytes(*halves.get(at)?).to_f32(),
                    Dtype::BF16 => bf16::from_le_bytes(*halves.get(at)?).to_f32(),
                    Dtype::I8 => f32::from(stored.get(at)?.cast_signed()),
                    _ => f32::from(*stored.get(at)?),
                })
            });
        }
        Ok(())
    }
}
