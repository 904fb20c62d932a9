//! A matrix whose values are at hand, in the place of a tensor of the checkpoint.

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::RowSource;
use qhx_types::DType;

/// A matrix that was made of tensors of the checkpoint.
#[derive(Debug)]
pub(super) struct Held {
    name: String,
    shape: [usize; 2],
    values: Vec<f32>,
}

impl Held {
    /// The matrix of a name whose rows are `values`, one behind the other.
    pub fn matrix(
        name: impl Into<String>,
        shape: [usize; 2],
        values: Vec<f32>,
    ) -> Arc<dyn RowSource> {
        Arc::new(Self { name: name.into(), shape, values })
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
        let from = first.saturating_mul(self.shape[1]);
        let values = self.values.get(from..from.saturating_add(out.len())).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("{}: no rows from {first} on", self.name))
        })?;
        out.copy_from_slice(values);
        Ok(())
    }
}
