//! Caches of int8 rows, each of which has a scale of its own.
//!
//! A graph gives new rows as floats. When they are written, the largest value of a row becomes ±127: a value is its
//! integer times [`STEP`] times the scale of its row, which graphs apply to scores and weights instead of values.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::cache::{Append, Cache, Rows};
use qhx_op::{DType, Error, GraphId, GraphInfo, Host, Port, Quantization, Result, TensorInfo};

/// Value of one step of an integer. With it, sums of integers times computed values stay within f16.
const STEP: f32 = 1.0 / 128.0;
/// The largest integer, so that the range is the same both ways.
const MAX: f32 = 127.0;
/// The 0 of unsigned integers.
const UNSIGNED_ZERO: u8 = 128;
/// Values that are converted at a time.
const BLOCK: usize = 256;
/// Added to a float, 1.5 · 2²³ leaves no place for a fraction: the lowest byte is the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// The byte of 0 of 8-bit integers; none of another type.
fn zero_of(dtype: DType) -> Option<u8> {
    match dtype {
        DType::I8 | DType::SFixed8 => Some(0),
        DType::UFixed8 => Some(UNSIGNED_ZERO),
        _ => None,
    }
}

pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::F32)
}

/// True if rows of `new` are rounded for a cache of `past`.
pub(super) fn become_f16(past: DType, new: DType) -> bool {
    (past, new) == (DType::F16, DType::F32)
}

/// Name of the input of scales.
fn scale_name(role: &str) -> String {
    format!("scale_{role}")
}

/// Makes signed integers of those around `zero`, or the other way round.
pub(super) fn recentred(bytes: &mut [u8], zero: u8) {
    bytes.iter_mut().for_each(|byte| *byte ^= zero);
}

/// Form of the rows of a new cache `past`, where `next` is the index behind it in the caches.
///
/// # Errors
/// When new rows are of another type that is not converted, or the graph has scales for a cache of values.
pub(super) fn rows_of(
    info: &GraphInfo,
    role: &str,
    [past, new]: [&TensorInfo; 2],
    next: usize,
) -> Result<Rows> {
    match zero_of(past.dtype).filter(|_| is_float(new.dtype)) {
        Some(zero) => return Ok(Rows::Int8 { scales: next, zero }),
        None if past.dtype != new.dtype && !become_f16(past.dtype, new.dtype) => {
            return Err(Error::graph(format!(
                "graph {:?}: {past} and {new} do not fit as a cache and its new rows: the dtypes differ",
                info.name
            )));
        }
        None => {}
    }
    match info.input(&scale_name(role)) {
        None => Ok(Rows::Plain),
        Some(scale) => Err(Error::graph(format!(
            "graph {:?}: input {} has scales of rows, but the cache {past} is not int8",
            info.name, info.inputs[scale]
        ))),
    }
}

/// Binds the scales of the cache of that index, which `graph` reads as `past`; the first time they get a cache of
/// their own. Nothing is done for a cache without scales.
///
/// # Errors
/// When the graph has no input for them, or one that does not fit.
pub(super) fn bind_scales(
    caches: &mut Vec<Cache>,
    host: &mut Host,
    graph: GraphId,
    past: &TensorInfo,
    index: usize,
) -> Result<()> {
    let Cache { ref role, axis, outer, stride, window, rows, .. } = caches[index];
    let Rows::Int8 { scales, zero } = rows else { return Ok(()) };
    let (info, name) = (host.graph(graph), scale_name(role));
    let capacity = past.shape.get(axis).copied().unwrap_or(0);
    let misfit = |found: &dyn std::fmt::Display| {
        Error::graph(format!(
            "graph {:?}: {found}; expected an input {name} of f16 or f32 with {outer} by {capacity} scales, one \
             for each row of {past}",
            info.name
        ))
    };
    let offset = -i32::from(zero);
    let encoding = Quantization::PerTensor { scale: STEP, offset };
    if past.quantization != Quantization::None && past.quantization != encoding {
        return Err(Error::graph(format!(
            "graph {:?}: {past} has the encoding {:?}, expected {encoding:?}",
            info.name, past.quantization
        )));
    }
    let input = info.input(&name).ok_or_else(|| misfit(&format_args!("{past} has no scales")))?;
    let tensor = info.inputs[input].clone();
    let blocks = tensor.shape.iter().rev().skip(1).product::<usize>();
    let known = caches.get(scales).map(|cache| cache.dtype);
    if !is_float(tensor.dtype)
        || (tensor.shape.last(), blocks) != (Some(&capacity), outer)
        || known.is_some_and(|dtype| dtype != tensor.dtype)
    {
        return Err(misfit(&format_args!("found {tensor}")));
    }
    if let Some(have) = caches.get(scales) {
        return host.bind(graph, Port::Input(input), have.buffer, 0);
    }
    let buffer = host.allocate_for(graph, Port::Input(input))?;
    caches.push(Cache {
        role: name,
        buffer,
        dtype: tensor.dtype,
        axis: tensor.shape.len() - 1,
        outer,
        capacity,
        stride,
        row: tensor.dtype.size(),
        window,
        rows: Rows::Scales,
    });
    Ok(())
}

/// Quantizes the first `count` rows of each block of `append` to the slots of the positions from `position` on.
#[inline(never)]
pub(super) fn write(
    host: &mut Host,
    append: &Append,
    [cache, scales]: [&Cache; 2],
    zero: u8,
    position: usize,
    count: usize,
) {
    let each = |write: &mut dyn FnMut(usize, usize)| {
        for (from, slot, count) in cache.runs(position, count) {
            for block in 0..cache.outer {
                let (from, to) = (block * append.rows + from, block * cache.stride + slot);
                (0..count).for_each(|row| write(from + row, to + row));
            }
        }
    };
    let (source, target) = host.pair(append.new, scales.buffer);
    each(&mut |from, to| {
        let scale = Row::of(source, from, append).scale(scales.dtype);
        let to = &mut target[to * scales.row..][..scales.row];
        match scales.dtype {
            DType::F16 => to.copy_from_slice(&f16::from_f32(scale).to_ne_bytes()),
            _ => to.copy_from_slice(&scale.to_ne_bytes()),
        }
    });
    let (source, target) = host.pair(append.new, cache.buffer);
    each(&mut |from, to| {
        let row = Row::of(source, from, append);
        let scale = row.scale(scales.dtype);
        row.quantize(scale, zero, &mut target[to * cache.row..][..cache.row]);
    });
}

/// New values of one position and block, all of them finite.
#[derive(Clone, Copy)]
struct Row<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

impl<'a> Row<'a> {
    fn of(source: &'a [u8], index: usize, append: &Append) -> Self {
        Self { bytes: &source[index * append.row..][..append.row], dtype: append.dtype }
    }

    /// The largest value without its sign.
    fn largest(self) -> f32 {
        // Floats without a sign have the order of their bits.
        match self.dtype {
            DType::F16 => {
                let bits = self.bytes.as_chunks().0.iter();
                let largest =
                    bits.fold(0, |most: u16, b| most.max(u16::from_ne_bytes(*b) & 0x7fff));
                f16::from_bits(largest).to_f32()
            }
            _ => {
                let bits = self.bytes.as_chunks().0.iter();
                let largest =
                    bits.fold(0, |most: u32, b| most.max(u32::from_ne_bytes(*b) & 0x7fff_ffff));
                f32::from_bits(largest)
            }
        }
    }

    /// Its scale, as `dtype` stores it.
    fn scale(self, dtype: DType) -> f32 {
        let scale = self.largest() * (1.0 / (MAX * STEP));
        match dtype {
            DType::F16 => f16::from_f32(scale.min(f16::MAX.to_f32())).to_f32(),
            _ => scale.min(f32::MAX),
        }
    }

    fn quantize(self, scale: f32, zero: u8, target: &mut [u8]) {
        // A scale of 0 is that of values which are too small for one.
        let factor = if scale > 0.0 { 1.0 / (STEP * scale) } else { 0.0 };
        let mut wide = [0f32; BLOCK];
        let bytes = BLOCK * self.dtype.size();
        for (source, target) in self.bytes.chunks(bytes).zip(target.chunks_mut(BLOCK)) {
            let wide = &mut wide[..target.len()];
            match self.dtype {
                DType::F16 => {
                    let mut halves = [f16::ZERO; BLOCK];
                    for (to, from) in halves.iter_mut().zip(source.as_chunks().0) {
                        *to = f16::from_ne_bytes(*from);
                    }
                    halves[..wide.len()].convert_to_f32_slice(wide);
                }
                _ => {
                    for (to, from) in wide.iter_mut().zip(source.as_chunks().0) {
                        *to = f32::from_ne_bytes(*from);
                    }
                }
            }
            for (to, value) in target.iter_mut().zip(wide) {
                let scaled = (*value * factor).clamp(-MAX, MAX);
                *to = ((scaled + ROUND).to_bits() as u8) ^ zero;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the bytes that a row of floats becomes with a scale of `dtype`.
    fn round_trip(values: &[f32], from: DType, dtype: DType, zero: u8) -> Vec<f32> {
        let halves = || values.iter().flat_map(|v| f16::from_f32(*v).to_ne_bytes());
        let bytes: Vec<u8> = match from {
            DType::F16 => halves().collect(),
            _ => values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        };
        let row = Row { bytes: &bytes, dtype: from };
        let (scale, mut stored) = (row.scale(dtype), vec![1; values.len()]);
        assert!(scale.is_finite());
        row.quantize(scale, zero, &mut stored);
        recentred(&mut stored, zero);
        stored.iter().map(|byte| f32::from(byte.cast_signed()) / 128.0 * scale).collect()
    }

    #[test]
    fn a_row_is_off_by_half_a_step_at_most() {
        let values: Vec<f32> =
            (0..601).map(|i| ((i * 37 % 601) as f32 - 300.0) * 0.013_7).collect();
        for size in [1e-3, 1.0, 3e3] {
            let values: Vec<f32> = values.iter().map(|v| v * size).collect();
            let step = values.iter().fold(0f32, |most, v| most.max(v.abs())) / MAX;
            for (from, scale, zero) in [
                (DType::F32, DType::F32, 0),
                (DType::F16, DType::F16, UNSIGNED_ZERO),
                (DType::F16, DType::F16, 0),
            ] {
                let found = round_trip(&values, from, scale, zero);
                for (found, value) in found.iter().zip(&values) {
                    // The scale and the value are rounded to f16 once each.
                    let limit = 0.5 * step + value.abs() / 1000.0;
                    assert!((found - value).abs() <= limit, "{value}: {found}, {from:?}");
                }
            }
        }
    }

    #[test]
    fn rows_of_extreme_sizes_stay_numbers() {
        for (values, from, near) in [
            (&[0.0; 3][..], DType::F16, 0.0),
            (&[65_504.0, -65_504.0, 0.0], DType::F16, 600.0),
            (&[f32::MAX, -f32::MAX], DType::F32, f32::MAX / 100.0),
            (&[1e-8, -1e-8], DType::F32, 1e-8),
            (&[6e-8, 0.0], DType::F16, 6e-8),
        ] {
            for scale in [DType::F16, DType::F32] {
                // Only a CPU has f32, and it has both.
                if from == DType::F32 && scale == DType::F16 && values[0] > 1e5 {
                    continue;
                }
                let found = round_trip(values, from, scale, UNSIGNED_ZERO);
                let fits = found.iter().zip(values).all(|(a, b)| (a - b).abs() <= near);
                assert!(fits, "{values:?}: {found:?}");
            }
        }
    }
}
