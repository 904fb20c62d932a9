//! Slice kernels: half-precision conversion by slices, never value by value, and int8 weights with one
//! scale a row to floats.

mod int8;

use half::f16;
use half::slice::HalfFloatSliceExt;

pub use int8::{int8_to_f16, int8_to_f32};

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
/// When the lengths differ.
pub fn f16_to_f32(source: &[f16], target: &mut [f32]) {
    source.convert_to_f32_slice(target);
}
