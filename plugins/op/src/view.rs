//! Views that an op returns: runs of floats.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::{BufferId, DType, Error, ErrorCode, Host, Result};

/// A run of floats in a buffer: logits or an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: BufferId,
    /// [`DType::F16`] or [`DType::F32`].
    pub dtype: DType,
    /// First byte.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl View {
    /// Copies `out.len()` values from element `first` of the view on; f16 is converted, exactly. Allocates nothing.
    ///
    /// # Errors
    /// The view is of neither f16 nor f32, or has too few values from there on, or its buffer has fewer bytes than it
    /// or does not align them: faults of who made the view.
    pub fn to_f32(self, host: &Host, first: usize, out: &mut [f32]) -> Result<()> {
        let Self { buffer, dtype, offset, len } = self;
        let count = out.len();
        let start = first.checked_mul(dtype.size()).and_then(|bytes| bytes.checked_add(offset));
        let end = count.checked_mul(dtype.size()).and_then(|bytes| bytes.checked_add(start?));
        let bytes = match (start, end) {
            (Some(start), Some(end))
                if len.checked_sub(first).is_some_and(|left| count <= left) =>
            {
                host.bytes(buffer).get(start..end)
            }
            _ => None,
        };
        let read = bytes.is_some_and(|bytes| match dtype {
            DType::F16 => bytemuck::try_cast_slice::<u8, f16>(bytes)
                .map(|all| all.convert_to_f32_slice(out))
                .is_ok(),
            DType::F32 => {
                bytemuck::try_cast_slice(bytes).map(|all| out.copy_from_slice(all)).is_ok()
            }
            _ => false,
        });
        if read {
            return Ok(());
        }
        let message = format!(
            "{count} values from element {first} on of {self:?}, a buffer of {} bytes; expected f16 or f32 that lie in \
             both",
            host.len(buffer)
        );
        Err(Error::new(ErrorCode::INTERNAL, message))
    }
}
