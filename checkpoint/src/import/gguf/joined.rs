//! Tensors of a file that are one in the Hugging Face checkpoint.

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::RowSource;
use qhx_types::DType;

use super::Tensor;
use crate::import::Imported;

/// Tensors of one shape: the first `unit` elements of each, then the next ones of each. Rows that follow each other
/// (queries, keys and values) are units as large as a tensor, filters of several frames as large as a filter.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    parts: Vec<Tensor>,
    shape: Vec<usize>,
    unit: usize,
}

impl Joined {
    /// `shape` has as many elements as `parts` together.
    pub fn new(parts: Vec<Tensor>, shape: Vec<usize>, unit: usize) -> Self {
        Self { parts, shape, unit: unit.max(1) }
    }
}

impl Imported for Joined {
    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn has_quantized_weights(&self) -> bool {
        false
    }

    fn form(&self) -> &'static str {
        self.parts.first().map_or("", Tensor::form)
    }

    /// Seen as a matrix. It hands out floats, of quantized weights the values that they stand for.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<dyn RowSource>> {
        let parts = self.parts.iter().map(|part| part.matrix(name, part.rows()));
        let parts: Vec<_> = parts.collect::<Result<_>>()?;
        let elements = |[rows, cols]: [usize; 2]| rows.saturating_mul(cols);
        let found: usize = parts.iter().map(|part| elements(part.shape())).sum();
        if found != elements(shape) {
            let what = format!("tensor {name}: {:?} seen as {shape:?}", self.shape);
            return Err(Error::new(ErrorKind::Internal, what));
        }
        Ok(Arc::new(Matrix { name: name.to_owned(), parts, shape, unit: self.unit }))
    }
}

/// A joined tensor seen as a matrix.
#[derive(Debug)]
struct Matrix {
    name: String,
    parts: Vec<Arc<dyn RowSource>>,
    shape: [usize; 2],
    unit: usize,
}

impl RowSource for Matrix {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        self.parts.first().map_or(DType::F32, |part| part.stored_dtype())
    }

    fn read_f32(&self, first: usize, mut out: &mut [f32]) -> Result<()> {
        let count = self.parts.len().max(1);
        let mut at = first * self.shape[1];
        while !out.is_empty() {
            let (unit, within) = (at / self.unit, at % self.unit);
            let (now, rest) = out.split_at_mut((self.unit - within).min(out.len()));
            let from = unit / count * self.unit + within;
            let part = self.parts.get(unit % count).filter(|part| {
                let [_, cols] = part.shape();
                cols > 0 && from.is_multiple_of(cols) && now.len().is_multiple_of(cols)
            });
            let Some(part) = part else {
                let what = format!("tensor {}: element {at} begins no row of its part", self.name);
                return Err(Error::new(ErrorKind::Internal, what));
            };
            part.read_f32(from / part.shape()[1], now)?;
            at += now.len();
            out = rest;
        }
        Ok(())
    }
}
