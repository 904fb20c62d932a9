//! Two rows of eight bytes times two others in an instruction (`smmla`).
//!
//! A few rows of `x` are multiplied with two rows of weights at a time: the sums are those of the first one with upper
//! and lower bits of `x`, and those of the second one.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{
    BLOCKS, Beside, Filled, Form, Group, HALF, PANEL, Panel, TILE, Wide, floats, integers, joined,
    lanes, load, nibbles, write,
};
use crate::integers::{BLOCK, GROUP, IntegerTask, rows};

/// Rows of weights that are multiplied with a few rows of `x` at a time.
const ROWS: usize = 2;
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
    beside: &Beside<'_, ROWS>,
    x: &[Group<PARTS>],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let x = rows(x);
    let bytes = |w: [&[i8; GROUP]; ROWS], block: usize| {
        let [first, second] = w.map(|w| w.as_chunks().0);
        let rows = |at: usize| both(load(&first[at]), load(&second[at]));
        let ([a, b], [c, d]) = (rows(2 * block), rows(2 * block + 1));
        [a, b, c, d]
    };
    let halves = |w: [&[i8; GROUP / 2]; ROWS], block: usize| {
        let [first, second] = w.map(|w| w.as_chunks().0);
        let [first, second] = both(load(&first[block]), load(&second[block]));
        let ([a, c], [b, d]) = (nibbles(first), nibbles(second));
        [a, b, c, d]
    };
    let sums = match (beside.form, beside.shifts.is_empty()) {
        (Form::Rows, _) => dots_blocks::<PARTS, M, GROUP, false, false>(x, beside, bytes),
        (Form::Blocks, true) => dots_blocks::<PARTS, M, GROUP, true, false>(x, beside, bytes),
        (Form::Blocks, false) => dots_blocks::<PARTS, M, GROUP, true, true>(x, beside, bytes),
        (Form::Nibbles, true) => {
            dots_blocks::<PARTS, M, { GROUP / 2 }, true, false>(x, beside, halves)
        }
        (Form::Nibbles, false) => {
            dots_blocks::<PARTS, M, { GROUP / 2 }, true, true>(x, beside, halves)
        }
    };
    write(sums, n, out);
}

/// Products of two rows of weights with rows of `x`. `wide` makes vectors of eight columns each of a block in two
/// groups of `N` bytes; blocks may have scales and addends.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn dots_blocks<
    const PARTS: usize,
    const M: usize,
    const N: usize,
    const SCALES: bool,
    const SHIFTS: bool,
>(
    x: [&[Group<PARTS>]; M],
    beside: &Beside<'_, ROWS>,
    wide: impl Fn([&[i8; N]; ROWS], usize) -> [int8x16_t; BLOCK_VECTORS],
) -> [[f32; ROWS]; M] {
    let mut sums = [vdupq_n_f32(0.0); M];
    let mut index = 0;
    let [a, b] = beside.bytes.map(Filled::<_, N>::new);
    // The whole groups, then the last one: with a choice in the loop the compiler makes one for each vector.
    for groups in [a.whole.iter().zip(b.whole), a.last().iter().zip(b.last())] {
        for (a, b) in groups {
            let mut parts = [[vdupq_n_s32(0); BLOCKS]; M];
            for block in 0..BLOCKS {
                let w = wide([a, b], block);
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
            for m in 0..M {
                let [a, b, c, d] = parts[m];
                let mut all = [vcvtq_f32_s32(vpaddq_s32(a, b)), vcvtq_f32_s32(vpaddq_s32(c, d))];
                let scales = in_turns([floats(&x[m][index].scales); 2]);
                if SCALES {
                    let factors = in_turns(beside.scales[index]);
                    for half in 0..2 {
                        all[half] = vmulq_f32(all[half], factors[half]);
                    }
                }
                if SHIFTS {
                    let shifts = in_turns(beside.shifts[index]);
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
    let mut all = [[0f32; ROWS]; M];
    for (all, sums) in all.iter_mut().zip(sums) {
        let [a, b, c, d] = lanes(sums);
        let [first, second] = beside.rows;
        *all = [(a + c) * first, (b + d) * second];
    }
    all
}

/// The products of each row of weights with all rows of the panel. Blocks may have addends.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn multiply<const PARTS: usize, const SHIFTS: bool>(
    wide: &Wide,
    panel: &Panel<PARTS>,
) -> [[f32; PANEL]; TILE] {
    let shifts = if SHIFTS { &wide.shifts } else { &wide.scales };
    // Each vector has the sums of two rows of weights with two of the panel.
    let mut sums = [[vdupq_n_f32(0.0); SIDES]; PAIRS];
    let of_x = panel.values.iter().zip(&panel.scales).zip(&panel.sums);
    let of_w = wide.values.iter().zip(&wide.scales).zip(shifts);
    for (((x, scales_of_x), sums_of_x), ((w, scales), shifts)) in of_x.zip(of_w) {
        let mut parts = [[[vdupq_n_s32(0); PARTS]; SIDES]; PAIRS];
        for (at, x) in x.iter().enumerate() {
            let (first, second) = (load(&w[at]), load(&w[BLOCK_VECTORS + at]));
            for side in 0..SIDES {
                for (part, x) in x.iter().enumerate() {
                    let x = load(&x[side]);
                    parts[0][side][part] = smmla(parts[0][side][part], first, x);
                    parts[1][side][part] = smmla(parts[1][side][part], second, x);
                }
            }
        }
        let scales = in_turns([floats(scales); 2]);
        let shifts = in_turns([floats(shifts); 2]);
        for side in 0..SIDES {
            let of_x = twice(&scales_of_x.as_chunks().0[side]);
            let sums_of_x = twice(&sums_of_x.as_chunks().0[side]);
            for n in 0..PAIRS {
                let sum = vcvtq_f32_s32(joined(parts[n][side]));
                sums[n][side] = vfmaq_f32(sums[n][side], sum, vmulq_f32(scales[n], of_x));
                if SHIFTS {
                    sums[n][side] = vfmaq_f32(sums[n][side], shifts[n], sums_of_x);
                }
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

/// Two numbers, and the same two again.
#[inline]
#[target_feature(enable = "neon")]
fn twice(two: &[f32; 2]) -> float32x4_t {
    // SAFETY: reads the two numbers.
    let two = unsafe { vld1_f32(two.as_ptr()) };
    vcombine_f32(two, two)
}

/// The lanes of two vectors in turns.
#[inline]
#[target_feature(enable = "neon")]
fn in_turns([a, b]: [float32x4_t; 2]) -> [float32x4_t; 2] {
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
