//! Floating point as files store it.

use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_types::DType;

/// Converts little-endian f16, bf16 or f32 at any address.
pub(crate) fn to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(values) => values.convert_to_f32_slice(out),
            Err(_) => {
                // Headers of any length put tensors at any address.
                let pairs = bytes.as_chunks::<2>().0;
                let values: Vec<f16> = pairs.iter().map(|p| f16::from_le_bytes(*p)).collect();
                values.convert_to_f32_slice(out);
            }
        },
        DType::Bf16 => {
            for (value, pair) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16);
            }
        }
        _ => {
            for (value, quad) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*quad);
            }
        }
    }
}
