//! Slice kernels: half-precision conversion by slices, never value by value, int8 weights with one
//! scale a row to floats, and, with the feature `vision` or `audio`, dense layers in f32.

mod int8;
#[cfg(feature = "dense")]
mod linear;
mod parallel;

use half::f16;
use half::slice::HalfFloatSliceExt;

use qhx_op::DType;

pub use int8::{int8_to_f16, int8_to_f32};
#[cfg(feature = "dense")]
pub use linear::Linear;
pub use parallel::parallel_chunks;

/// Converts f32 to f16, rounding to nearest even. Both slices have the same length.
///
/// # Panics
/// When the lengths differ.
pub fn f32_to_f16(source: &[f32], target: &mut [f16]) {
    target.convert_from_f32_slice(source);
}

/// Converts f16 to f32, exactly. Both slices have the same length.
///
/// # Panics
/// When the lengths differ, as those of an f32 buffer that is read as f16 do: [`qhx_op::View::to_f32`] reads both.
#[track_caller]
pub fn f16_to_f32(source: &[f16], target: &mut [f32]) {
    assert!(
        source.len() == target.len(),
        "{} values of f16 for {} of f32, expected as many; a buffer of f32 has twice as many f16",
        source.len(),
        target.len()
    );
    source.convert_to_f32_slice(target);
}

/// True when none of the floats of type `dtype` in `bytes` is NaN or infinite: those have all bits of
/// the exponent set (IEEE 754-2019, 3.4). Other types have no such values.
pub fn all_finite(bytes: &[u8], dtype: DType) -> bool {
    const F32: u32 = 0x7f80_0000;
    let half = |exponent: u16| {
        let hit =
            |found, value: &[u8; 2]| found | (u16::from_ne_bytes(*value) & exponent == exponent);
        !bytes.as_chunks().0.iter().fold(false, hit)
    };
    match dtype {
        DType::F16 => half(0x7c00),
        DType::Bf16 => half(0x7f80),
        DType::F32 => {
            let hit = |found, value: &[u8; 4]| found | (u32::from_ne_bytes(*value) & F32 == F32);
            !bytes.as_chunks().0.iter().fold(false, hit)
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nan_and_infinity_are_not_finite() {
        let finite = [0.0, -0.0, 1.0, -65504.0, f32::from_bits(0x0001_0000)];
        for bad in [None, Some(f32::NAN), Some(f32::INFINITY), Some(f32::NEG_INFINITY)] {
            // In a place that is left over when a vector takes 4, 8 or 16 values.
            let values: Vec<f32> = finite.iter().cycle().take(37).copied().chain(bad).collect();
            let halves: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
            let brains: Vec<u16> = values.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
            assert_eq!(all_finite(bytemuck::cast_slice(&values), DType::F32), bad.is_none());
            assert_eq!(all_finite(bytemuck::cast_slice(&halves), DType::F16), bad.is_none());
            assert_eq!(all_finite(bytemuck::cast_slice(&brains), DType::Bf16), bad.is_none());
            assert!(all_finite(bytemuck::cast_slice(&values), DType::I32), "integers are finite");
        }
    }
}
