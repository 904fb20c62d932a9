//! Quantization of weights: int8 with one scale per output channel, and blocks of 4-bit or 8-bit values.
//!
//! The forms are those of [`qhx_types::quantized`].
//!
//! int8: `scale = max|w| / 127`, `q = round(w / scale)`. The range of a row is used whole, zero stays zero, and −128 is
//! never used, so that the encoding is symmetric as QNN's `AXIS_SCALE_OFFSET` with offset 0.
//!
//! Blocks that the forge makes itself ([`quantize_block`]) have the scale, and the offset where the form has them, of
//! the least squared error among several. Each error counts as much as its input is worth: the sum of the squares of
//! what the weight is multiplied with, as in llama.cpp's importance matrices and in AWQ (Lin et al. 2023). Checkpoints
//! may hold other blocks ([`RowSource::block_form`](crate::weight::RowSource::block_form)).

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
pub use qhx_types::quantized::{
    BLOCK, Bits, MULTIPLES, Quantized, QuantizedForm, QuantizedMut, QuantizedRef,
};

/// Quantizes one row into `out` and returns its scale. A row of zeros has scale 1.
///
/// # Errors
/// When a value is not finite.
pub fn quantize_row(row: &[f32], out: &mut [i8]) -> Result<f32> {
    let peak = largest(row)?.abs();
    // Below this the division overflows or the scale is subnormal, which the NPU flushes to zero.
    let scale = if peak < 127.0 * f32::MIN_POSITIVE { 1.0 } else { peak / 127.0 };
    for (q, &w) in out.iter_mut().zip(row) {
        *q = (w / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    Ok(scale)
}

/// Quantizes one block into `out` and returns its scale and its offset, which is 0 where the form has none. `worth` has
/// a number for each value; all count alike if it is empty. The scale may be negative. A block of zeros has scale 1.
/// Scales and offsets are f16 values, as the NPU library rounds them, and scales are no smaller than f16's normal
/// numbers.
///
/// With 8 bits the value of the largest magnitude becomes −128. With 4 bits, several scales are tried, each moved to
/// its least-squares fit. Values that another program quantized to Q4_0 or Q4_1 come back as they were, but for the
/// rounding of offsets.
///
/// # Errors
/// When a value is not finite.
pub fn quantize_block(
    block: &[f32],
    form: QuantizedForm,
    worth: &[f32],
    out: &mut [i8],
) -> Result<(f32, f32)> {
    let (low, high) = form.bits.range();
    let first = normal(largest(block)? / f32::from(low));
    let rough = Affine { scale: first, offset: 0.0, low: low.into(), high: high.into() };
    let found = match form.bits {
        _ if block.iter().all(|w| *w == 0.0) => {
            out.fill(0);
            return Ok((1.0, 0.0));
        }
        _ if !first.is_finite() => rough,
        Bits::Four if form.offsets => fit(block, worth, rough, spans(block)),
        Bits::Four => fit(block, worth, rough, steps(first)),
        Bits::Eight => rough,
    };
    for (q, &w) in out.iter_mut().zip(block) {
        *q = found.integer(w) as i8;
    }
    Ok((found.scale, found.offset))
}

/// Rounds the scales of one row's blocks to whole multiples of one number, 1 to [`MULTIPLES`], as
/// [`Quantized::multiples`] finds them, and fits integers and offsets to these. `worth` is that of [`quantize_block`],
/// of the whole row. All products of the number are f16 values.
pub fn round_scales(row: &[f32], worth: &[f32], out: QuantizedMut<'_>) {
    let QuantizedMut { form, values, scales, offsets } = out;
    let (low, high) = form.bits.range();
    let blocks = || row.chunks(form.block.max(1));
    let is_zero = |block: &[f32]| block.iter().all(|w| *w == 0.0);
    let largest = blocks().zip(&*scales).filter(|(block, _)| !is_zero(block));
    let largest = largest.fold(0f32, |largest, (_, scale)| largest.max(scale.abs()));
    let unit = short(largest / f32::from(MULTIPLES));
    let least = (f16::MIN_POSITIVE.to_f32() / unit).ceil().clamp(1.0, MULTIPLES.into());
    let mut offsets = offsets.iter_mut();
    let mut worth = worth.chunks(form.block.max(1));
    let parts = values.chunks_mut(form.block.max(1)).zip(scales);
    for (block, (values, scale)) in blocks().zip(parts) {
        let (worth, mut offset) = (worth.next().unwrap_or_default(), offsets.next());
        if is_zero(block) {
            *scale = least * unit;
            continue;
        }
        let first = offset.as_deref().copied().unwrap_or(0.0);
        let exact = (scale.abs() / unit).clamp(least, MULTIPLES.into());
        let scaled = |multiple: f32| Affine {
            scale: multiple * unit,
            offset: 0.0,
            low: low.into(),
            high: high.into(),
        };
        // The middle of the integers stands for the same number as before, or for one nearby.
        let middle = (first - 0.5) * *scale;
        let mut best: Option<(f32, Affine)> = None;
        let mut take = |found: Affine| {
            let error = found.error(block, worth);
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, found));
            }
        };
        for step in -1..=2i8 {
            let multiple = (exact.floor() + f32::from(step)).clamp(least, MULTIPLES.into());
            let scaled = scaled(multiple);
            match offset {
                None => take(scaled),
                Some(_) => [-1.0, -0.5, 0.0, 0.5, 1.0].into_iter().for_each(|aside| {
                    let start = Affine { offset: middle / scaled.scale + 0.5 + aside, ..scaled };
                    take(start.shifted(block, worth).shifted(block, worth));
                }),
            }
        }
        let Some((_, found)) = best else { continue };
        *scale = found.scale;
        if let Some(offset) = &mut offset {
            **offset = found.offset;
        }
        for (q, &w) in values.iter_mut().zip(block) {
            *q = found.integer(w) as i8;
        }
    }
}

/// The next larger number of 7 significant bits, at least one whose 16-fold is a normal f16. Multiples of up to 16 are
/// f16 values.
fn short(unit: f32) -> f32 {
    const REST: u32 = (1 << 17) - 1;
    let least = f16::MIN_POSITIVE.to_f32() / f32::from(MULTIPLES);
    f32::from_bits((unit.max(least).to_bits() + REST) & !REST)
}

/// The nearest f16 that is a normal number; of numbers too small for that the least one.
fn normal(scale: f32) -> f32 {
    let least = f16::MIN_POSITIVE.to_f32();
    if scale.abs() < least { least.copysign(scale) } else { f16::from_f32(scale).to_f32() }
}

/// Map from integers to reals: `real = (integer + offset) · scale`.
#[derive(Clone, Copy)]
struct Affine {
    scale: f32,
    offset: f32,
    low: f32,
    high: f32,
}

impl Affine {
    /// The integer that is nearest to a real.
    fn integer(&self, w: f32) -> f32 {
        /// Sums with it have no digits behind the point. `f32::round_ties_even` would be a call.
        const ROUND: f32 = 12_582_912.0;
        let q = (w / self.scale - self.offset).clamp(self.low, self.high);
        (q + ROUND) - ROUND
    }

    /// The squared error.
    fn error(&self, block: &[f32], worth: &[f32]) -> f32 {
        let off = |w: f32| (w - (self.integer(w) + self.offset) * self.scale).powi(2);
        match worth {
            [] => block.iter().map(|&w| off(w)).sum(),
            worth => block.iter().zip(worth).map(|(&w, worth)| worth * off(w)).sum(),
        }
    }

    /// The offset of the least squared error for the integers that `self` gives.
    fn shifted(&self, block: &[f32], worth: &[f32]) -> Self {
        let (mut all, mut off) = (0f32, 0f32);
        let mut add = |w: f32, worth: f32| {
            all += worth;
            off += worth * (w / self.scale - self.integer(w));
        };
        match worth {
            [] => block.iter().for_each(|&w| add(w, 1.0)),
            worth => block.iter().zip(worth).for_each(|(&w, &worth)| add(w, worth)),
        }
        let offset = f16::from_f32(off / all).to_f32();
        Self { offset: if offset.is_finite() { offset } else { self.offset }, ..*self }
    }

    /// The least-squares fit to the integers that `self` gives; with an offset if `offsets`.
    fn fitted(&self, block: &[f32], worth: &[f32], offsets: bool) -> Self {
        let (mut all, mut q1, mut q2, mut w1, mut wq) = (0f32, 0f32, 0f32, 0f32, 0f32);
        let mut add = |w: f32, worth: f32| {
            let q = self.integer(w);
            all += worth;
            q1 += worth * q;
            q2 += worth * q * q;
            w1 += worth * w;
            wq += worth * w * q;
        };
        match worth {
            [] => block.iter().for_each(|&w| add(w, 1.0)),
            worth => block.iter().zip(worth).for_each(|(&w, &worth)| add(w, worth)),
        }
        if !offsets {
            return Self { scale: normal(wq / q2), ..*self };
        }
        let scale = (all * wq - q1 * w1) / (all * q2 - q1 * q1);
        let offset = f16::from_f32((w1 - scale * q1) / all / scale).to_f32();
        Self { scale: normal(scale), offset, ..*self }
    }
}

/// The best of `first` and of the fits to `others`, scales and offsets.
fn fit(
    block: &[f32],
    worth: &[f32],
    first: Affine,
    others: impl Iterator<Item = (f32, Option<f32>)>,
) -> Affine {
    let (mut best, mut least) = (first, first.error(block, worth));
    for (scale, offset) in others {
        let start = Affine { scale, offset: offset.unwrap_or(0.0), ..first };
        let found = start.fitted(block, worth, offset.is_some());
        if found.scale.is_finite() && found.offset.is_finite() {
            let error = found.error(block, worth);
            if error < least {
                (best, least) = (found, error);
            }
        }
    }
    best
}

/// Scales that map the value which `first` maps to −8 to −7 to −9.
fn steps(first: f32) -> impl Iterator<Item = (f32, Option<f32>)> {
    (28..=36u8).map(move |quarters| (first * 32.0 / f32::from(quarters), None))
}

/// Scales that spread the values over 12 to 16 steps, with offsets that leave out what is beyond 15 steps above, on
/// both sides, or below.
fn spans(block: &[f32]) -> impl Iterator<Item = (f32, Option<f32>)> {
    let (low, high) =
        block.iter().fold((f32::MAX, f32::MIN), |(low, high), w| (low.min(*w), high.max(*w)));
    let width = (high - low).max(f32::MIN_POSITIVE);
    (24..=32u8).flat_map(move |halves| {
        let scale = width * 2.0 / f32::from(halves);
        (0..=2u8).map(move |side| {
            let from = low + (width - 15.0 * scale) / 2.0 * f32::from(side);
            (scale, Some(from / scale + 8.0))
        })
    })
}

/// The value of the largest magnitude, the first of several. Errors when one is not finite.
fn largest(values: &[f32]) -> Result<f32> {
    let mut largest = 0f32;
    let mut finite = true;
    for &w in values {
        finite &= w.is_finite();
        if w.abs() > largest.abs() {
            largest = w;
        }
    }
    if finite {
        return Ok(largest);
    }
    Err(Error::new(ErrorKind::Artifact, "a weight is infinite or not a number")
        .hint("the checkpoint is damaged, or was saved after training diverged"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_maps_to_127_and_errors_stay_below_half_a_step() {
        let row: Vec<f32> = (0..100).map(|i| (i as f32 - 60.0) * 0.37).collect();
        let mut q = vec![0i8; row.len()];
        let scale = quantize_row(&row, &mut q).unwrap();
        assert_eq!(q[0], -127);
        for (&w, &q) in row.iter().zip(&q) {
            assert!((w - f32::from(q) * scale).abs() <= scale * 0.5001);
        }
    }

    #[test]
    fn zeros_and_tiny_rows_are_zero_with_scale_one() {
        for value in [0.0, f32::MIN_POSITIVE / 8.0] {
            let mut q = [1i8; 3];
            assert_eq!(quantize_row(&[value; 3], &mut q).unwrap(), 1.0);
            assert_eq!(q, [0; 3]);
        }
    }

    #[test]
    fn not_a_number_is_refused() {
        for value in [f32::NAN, f32::INFINITY] {
            let error = quantize_row(&[1.0, value], &mut [0; 2]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Artifact);
            let form = QuantizedForm::symmetric(Bits::Four, 2);
            let error = quantize_block(&[1.0, value], form, &[], &mut [0; 2]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Artifact);
        }
    }

    const SYMMETRIC: QuantizedForm = QuantizedForm::symmetric(Bits::Four, 32);
    const OFFSETS: QuantizedForm = QuantizedForm { offsets: true, ..SYMMETRIC };

    /// Squared error of a block, each of whose values counts as much as its worth.
    fn error(block: &[f32], worth: &[f32], q: &[i8], (scale, offset): (f32, f32)) -> f64 {
        let off = |(&w, &q): (&f32, &i8)| f64::from(w - (f32::from(q) + offset) * scale).powi(2);
        let worth = worth.iter().map(|worth| f64::from(*worth));
        block.iter().zip(q).map(off).zip(worth).map(|(off, worth)| off * worth).sum()
    }

    /// Sums of uniform numbers: nearly normal, as weights are.
    fn drawn(state: &mut u32) -> Vec<f32> {
        let mut next = || {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (*state >> 8) as f32 / (1 << 24) as f32
        };
        (0..32).map(|_| (0..6).fold(-3.0, |sum, _| sum + next())).collect()
    }

    #[test]
    fn four_bits_have_the_scales_and_offsets_of_the_least_error() {
        let ones = [1f32; 32];
        let (mut state, [mut plain, mut fitted, mut offsets, mut worthy, mut blind]) =
            (1u32, [0.0; 5]);
        for _ in 0..200 {
            let block = drawn(&mut state);
            let mut q = vec![0i8; 32];
            let found = quantize_block(&block, SYMMETRIC, &[], &mut q).unwrap();
            assert_eq!(found, (f16::from_f32(found.0).to_f32(), 0.0));
            fitted += error(&block, &ones, &q, found);
            let scale = f16::from_f32(largest(&block).unwrap() / -8.0).to_f32();
            let round = |w: &f32| (w / scale).round_ties_even().clamp(-8.0, 7.0) as i8;
            let rounded: Vec<_> = block.iter().map(round).collect();
            plain += error(&block, &ones, &rounded, (scale, 0.0));
            let found = quantize_block(&block, OFFSETS, &[], &mut q).unwrap();
            assert_eq!(found.1, f16::from_f32(found.1).to_f32());
            offsets += error(&block, &ones, &q, found);
            // A few inputs matter most.
            let worth: Vec<_> = drawn(&mut state).iter().map(|w| (2.0 * w).exp()).collect();
            blind += error(&block, &worth, &q, found);
            let found = quantize_block(&block, OFFSETS, &worth, &mut q).unwrap();
            worthy += error(&block, &worth, &q, found);
        }
        assert!(fitted < 0.92 * plain, "{fitted} of {plain}");
        assert!(offsets < 0.75 * plain, "{offsets} of {plain}");
        assert!(worthy < 0.72 * blind, "{worthy} of {blind}");
    }

    #[test]
    fn multiples_cost_little() {
        let (mut state, ones) = (7u32, [1f32; 32]);
        let (mut free, mut rounded) = (0.0, 0.0);
        for _ in 0..20 {
            // Blocks of different sizes, one of zeros.
            let mut row: Vec<f32> = (0..8)
                .flat_map(|i| {
                    drawn(&mut state).into_iter().map(move |w| w * (0.5 + 0.1 * i as f32))
                })
                .collect();
            row[32..64].fill(0.0);
            let mut all = Quantized::zeroed(OFFSETS, row.len());
            for (at, block) in row.chunks(32).enumerate() {
                let values = &mut all.values[at * 32..][..32];
                let (scale, offset) = quantize_block(block, OFFSETS, &[], values).unwrap();
                all.scales[at] = scale;
                all.offsets[at] = offset;
                free += error(block, &ones, values, (scale, offset));
            }
            assert_eq!(all.multiples(row.len()), None);
            round_scales(&row, &[], all.as_mut());
            let found = all.multiples(row.len()).unwrap();
            assert!(found.blocks.iter().any(|multiple| *multiple >= 15), "{found:?}");
            assert!(all.scales.iter().all(|scale| f16::from_f32(*scale).to_f32() == *scale));
            let mut wide = vec![1f32; row.len()];
            all.as_ref().dequantize(&mut wide);
            assert_eq!(wide[32..64], [0.0; 32]);
            for (at, block) in row.chunks(32).enumerate() {
                let offset = all.offsets.get(at).copied().unwrap_or(0.0);
                rounded +=
                    error(block, &ones, &all.values[at * 32..][..32], (all.scales[at], offset));
            }
        }
        assert!(rounded < 1.2 * free, "{rounded}, {free}");
        // Nothing but zeros, and numbers too small for f16.
        for row in [[0f32; 64], [1e-9; 64]] {
            let mut all = Quantized::zeroed(OFFSETS, 64);
            all.scales.fill(1.0);
            round_scales(&row, &[], all.as_mut());
            assert!(all.multiples(64).is_some(), "{:?}", all.scales);
            assert!(all.scales.iter().all(|scale| f16::from_f32(*scale).is_normal()));
        }
    }

    #[test]
    fn integers_of_other_programs_come_back() {
        let integers: Vec<i8> = (0..32).map(|i| (i * 7 % 16) as i8 - 8).collect();
        for scale in [0.0123f32, -0.75, 3e-4] {
            let scale = f16::from_f32(scale).to_f32();
            let block: Vec<_> = integers.iter().map(|&q| f32::from(q) * scale).collect();
            let mut q = vec![0i8; 32];
            assert_eq!(quantize_block(&block, SYMMETRIC, &[], &mut q).unwrap(), (scale, 0.0));
            assert_eq!(q, integers);
            let block: Vec<_> = integers.iter().map(|&q| (f32::from(q) + 4.5) * scale).collect();
            let (found, offset) = quantize_block(&block, OFFSETS, &[], &mut q).unwrap();
            for (w, q) in block.iter().zip(&q) {
                assert!((w - (f32::from(*q) + offset) * found).abs() < 0.02 * scale.abs());
            }
        }
    }

    #[test]
    fn blocks_use_their_range_and_stay_within_a_step() {
        let eight = QuantizedForm::symmetric(Bits::Eight, 32);
        for (form, peak) in
            [(SYMMETRIC, 2.0f32), (SYMMETRIC, -2.0), (eight, 2.0), (OFFSETS, 2.0), (OFFSETS, 1e-6)]
        {
            let mut block: Vec<f32> =
                (0..31).map(|i| (i as f32 - 15.0) * peak.abs() / 20.0).collect();
            block.push(peak);
            let mut q = vec![0i8; block.len()];
            let (scale, offset) = quantize_block(&block, form, &[], &mut q).unwrap();
            assert!(f16::from_f32(scale).is_normal());
            let (low, high) = form.bits.range();
            assert!(form != eight || q[31] == low, "{q:?}");
            let mut wide = vec![0f32; block.len()];
            let offsets = &[offset][..usize::from(form.offsets)];
            QuantizedRef { form, values: &q, scales: &[scale], offsets }.dequantize(&mut wide);
            for (&w, &wide) in block.iter().zip(&wide) {
                // Beyond the integers a value is clamped, by a step and its rounding at most.
                let within = (f32::from(low)..=f32::from(high)).contains(&(w / scale - offset));
                let bound = if within { 0.5001 } else { 1.501 };
                assert!((w - wide).abs() <= scale.abs() * bound, "{w} became {wide}");
            }
        }
        let mut q = [1i8; 32];
        assert_eq!(quantize_block(&[0.0; 32], OFFSETS, &[], &mut q).unwrap(), (1.0, 0.0));
        assert_eq!(q, [0; 32]);
        // Equal values have no width.
        let (scale, offset) = quantize_block(&[0.5; 32], OFFSETS, &[], &mut q).unwrap();
        assert!(((f32::from(q[0]) + offset) * scale - 0.5).abs() < 1e-3);
    }
}
