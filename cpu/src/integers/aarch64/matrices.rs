//! Two rows of eight bytes times two others in an instruction (`smmla`).
//!
//! A few rows of `x` are multiplied with two rows of weights at a time: the sums are those of the first one with upper
//! and lower bits of `x`, and those of the second one.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{
    BLOCKS, BYTES, Filled, Group, HALF, PAIR, PANEL, Pair, PairBytes, Panel, TILE, Wide, floats,
    groups, integers, joined, lanes, load, nibbles, write,
};
use crate::integers::{BLOCK, GROUP, IntegerTask, rows};

/// Pairs of rows of a panel.
const SIDES: usize = PANEL / 2;
/// Pairs of rows of weights that are multiplied with a panel at a time.
const PAIRS: usize = TILE / 2;
/// Vectors of eight columns each of two rows in a block.
const BLOCK_VECTORS: usize = BLOCK / HALF;

entries!("neon,i8mm", 2);

#[inline]
#[target_feature(enable = "neon,i8mm")]
fn dots<const PARTS: usize, const M: usize>(
    pair: &Pair<'_>,
    x: &[Group<PARTS>],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let x = rows(x);
    let sums = match pair.bytes {
        PairBytes::I8(w) => dots_blocks(x, w, pair, |w: [&[i8; GROUP]; PAIR], block| {
            let w = w.map(|w| w.as_chunks().0);
            let halves = |at: usize| both(load(&w[0][at]), load(&w[1][at]));
            let ([a, b], [c, d]) = (halves(2 * block), halves(2 * block + 1));
            [a, b, c, d]
        }),
        PairBytes::I4(w) => dots_blocks(x, w, pair, |w: [&[i8; GROUP / 2]; PAIR], block| {
            let w = w.map(|w| w.as_chunks().0);
            let [first, second] = both(load(&w[0][block]), load(&w[1][block]));
            let ([a, c], [b, d]) = (nibbles(first), nibbles(second));
            [a, b, c, d]
        }),
    };
    write(sums, n, out);
}

/// Products of two rows of weights with rows of `x`. `wide` makes vectors of eight columns each of a block in two
/// groups of `N` bytes.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn dots_blocks<const PARTS: usize, const M: usize, const N: usize>(
    x: [&[Group<PARTS>]; M],
    w: [&[i8]; PAIR],
    pair: &Pair<'_>,
    wide: impl Fn([&[i8; N]; PAIR], usize) -> [int8x16_t; BLOCK_VECTORS],
) -> [[f32; PAIR]; M] {
    let w = w.map(Filled::<_, N>::new);
    let mut sums = [vdupq_n_f32(0.0); M];
    let mut index = 0;
    for pairs in groups(&w) {
        for (a, b) in pairs {
            let w = [a, b];
            let mut parts = [[vdupq_n_s32(0); BLOCKS]; M];
            for block in 0..BLOCKS {
                let w = wide(w, block);
                for m in 0..M {
                    let Group { values, offsets, .. } = &x[m][index];
                    let mut sum = integers(&offsets[block]);
                    let x = &values.as_flattened().as_chunks::<BLOCK_VECTORS>().0[block];
                    for (w, x) in w.iter().zip(x) {
                        sum = smmla(sum, *w, load(x));
                    }
                    parts[m][block] = shifted(sum);
                }
            }
            // In turns those of the first row and of the second one, as the sums.
            let factors = pair.scales.group(index);
            let shifts = match pair.shifts(index, factors) {
                Some(shifts) => Some(in_turns(shifts)),
                None => None,
            };
            let factors = in_turns(factors);
            for m in 0..M {
                let [a, b, c, d] = parts[m];
                let mut all = [vcvtq_f32_s32(vpaddq_s32(a, b)), vcvtq_f32_s32(vpaddq_s32(c, d))];
                let scales = in_turns([floats(&x[m][index].scales); 2]);
                for half in 0..2 {
                    all[half] = vmulq_f32(all[half], factors[half]);
                }
                if let Some(shifts) = shifts {
                    let of_x = in_turns([floats(&x[m][index].sums); 2]);
                    for half in 0..2 {
                        all[half] = vfmaq_f32(all[half], shifts[half], of_x[half]);
                    }
                }
                for half in 0..2 {
                    sums[m] = vfmaq_f32(sums[m], all[half], scales[half]);
                }
            }
            index += 1;
        }
    }
    let mut all = [[0f32; PAIR]; M];
    for (all, sums) in all.iter_mut().zip(sums) {
        let [a, b, c, d] = lanes(sums);
        *all = [a + c, b + d];
    }
    all
}

/// The products of each row of weights with all rows of the panel.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn multiply<const PARTS: usize>(wide: &Wide, panel: &Panel<PARTS>) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let pairs = wide.values.as_flattened().as_chunks::<BYTES>().0;
    let (stride, octets) = (pairs.len() / PAIRS, BLOCK_VECTORS);
    // Each vector has the sums of two rows of weights with two of the panel.
    let mut sums = [[vdupq_n_f32(0.0); SIDES]; PAIRS];
    for (block, x) in panel.values.chunks_exact(octets).enumerate() {
        let mut parts = [[[vdupq_n_s32(0); PARTS]; SIDES]; PAIRS];
        for (at, x) in x.iter().enumerate() {
            let mut w = [vdupq_n_s8(0); PAIRS];
            for (n, w) in w.iter_mut().enumerate() {
                *w = load(&pairs[n * stride + block * octets + at]);
            }
            for side in 0..SIDES {
                for (part, x) in x.iter().enumerate() {
                    let x = load(&x[side]);
                    for n in 0..PAIRS {
                        parts[n][side][part] = smmla(parts[n][side][part], w[n], x);
                    }
                }
            }
        }
        let factors = panel.scales[block].as_chunks::<2>().0;
        let of_x = panel.sums[block].as_chunks::<2>().0;
        for n in 0..PAIRS {
            let scale = |row: usize| vdup_n_f32(wide.scales[(2 * n + row) * blocks + block]);
            let scales = vcombine_f32(scale(0), scale(1));
            let shift = |row: usize| vdup_n_f32(wide.shifts[(2 * n + row) * blocks + block]);
            let shifts = vcombine_f32(shift(0), shift(1));
            for side in 0..SIDES {
                // SAFETY: reads the two numbers.
                let factors = unsafe { vld1_f32(factors[side].as_ptr()) };
                let factors = vcombine_f32(factors, factors);
                // SAFETY: as above.
                let of_x = unsafe { vld1_f32(of_x[side].as_ptr()) };
                let sum = vmulq_f32(vcvtq_f32_s32(joined(parts[n][side])), scales);
                let sum = vfmaq_f32(sum, shifts, vcombine_f32(of_x, of_x));
                sums[n][side] = vfmaq_f32(sums[n][side], sum, factors);
            }
        }
    }
    let mut all = [[0f32; PANEL]; TILE];
    for (rows, sums) in all.as_chunks_mut::<2>().0.iter_mut().zip(sums) {
        for (side, sums) in sums.into_iter().enumerate() {
            let [a, b, c, d] = lanes(sums);
            rows[0].as_chunks_mut().0[side] = [a, b];
            rows[1].as_chunks_mut().0[side] = [c, d];
        }
    }
    all
}

/// The lanes of two vectors in turns.
#[inline]
#[target_feature(enable = "neon")]
fn in_turns([a, b]: [float32x4_t; PAIR]) -> [float32x4_t; 2] {
    [vzip1q_f32(a, b), vzip2q_f32(a, b)]
}

/// The first halves of two vectors, and their second ones.
#[inline]
#[target_feature(enable = "neon")]
fn both(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
    [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))]
}

/// Sums of upper and lower bits in turns, the upper ones where they belong.
#[inline]
#[target_feature(enable = "neon")]
fn shifted(sums: int32x4_t) -> int32x4_t {
    vshlq_s32(sums, integers(&[8, 0, 8, 0]))
}

/// Adds the products of two rows of eight bytes with two others: each of `a` with the first of `b`, then the second.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction, which the processor has, only computes with these registers.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
