//! Four bytes times four others, four times in an instruction (`sdot`).

use std::arch::aarch64::*;
use std::arch::asm;

use super::{
    BLOCKS, BYTES, Beside, Filled, Form, Group, LANES, Octets, PANEL, Panel, TILE, Wide, floats,
    integers, joined, lanes, load, nibbles, write,
};
use crate::integers::{BLOCK, GROUP, IntegerTask, rows};

/// Rows of weights that are multiplied with a few rows of `x` at a time.
const ROWS: usize = 4;
/// Vectors of sums of a row of weights with a panel.
const SIDES: usize = PANEL / LANES;
/// Vectors of a block of a row of weights.
const VECTORS: usize = BLOCK / BYTES;

entries!("neon,dotprod", 1);

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots<const PARTS: usize, const M: usize>(
    beside: &Beside<'_, ROWS>,
    x: &[Group<PARTS>],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let x = rows(x);
    let bytes = |w: &[i8; GROUP], block: usize| {
        let w = &w.as_chunks().0[2 * block..][..2];
        [load(&w[0]), load(&w[1])]
    };
    let halves = |w: &[i8; GROUP / 2], block: usize| nibbles(load(&w.as_chunks().0[block]));
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

/// Products of rows of weights with rows of `x`. `wide` makes two vectors of a block in a group's `N` bytes; blocks may
/// have scales and addends.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_blocks<
    const PARTS: usize,
    const M: usize,
    const N: usize,
    const SCALES: bool,
    const SHIFTS: bool,
>(
    x: [&[Group<PARTS>]; M],
    beside: &Beside<'_, ROWS>,
    wide: impl Fn(&[i8; N], usize) -> [int8x16_t; 2],
) -> [[f32; ROWS]; M] {
    let mut sums = [[vdupq_n_f32(0.0); ROWS]; M];
    let mut index = 0;
    let [a, b, c, d] = beside.bytes.map(Filled::<_, N>::new);
    let whole = a.whole.iter().zip(b.whole).zip(c.whole).zip(d.whole);
    let last = a.last().iter().zip(b.last()).zip(c.last()).zip(d.last());
    // The whole groups, then the last one: with a choice in the loop the compiler makes one for each vector.
    for groups in [whole, last] {
        for (((a, b), c), d) in groups {
            let w = [a, b, c, d];
            for n in 0..ROWS {
                let mut blocks = [[vdupq_n_s8(0); 2]; BLOCKS];
                blocks.iter_mut().enumerate().for_each(|(block, to)| *to = wide(w[n], block));
                for m in 0..M {
                    let Group { values, offsets, sums: of_x, scales: scales_of_x } = &x[m][index];
                    let mut parts = [vdupq_n_s32(0); BLOCKS];
                    for (block, w) in blocks.iter().enumerate() {
                        let x = &values[VECTORS * block..][..VECTORS];
                        for part in 0..PARTS {
                            let mut sum = vshlq_n_s32::<8>(parts[block]);
                            if part + 1 == PARTS {
                                sum = vaddq_s32(sum, integers(&offsets[block]));
                            }
                            sum = sdot(sum, w[0], load(&x[0][part]));
                            parts[block] = sdot(sum, w[1], load(&x[1][part]));
                        }
                    }
                    // A lane is a block's sum.
                    let [a, b, c, d] = parts;
                    let all = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
                    let mut all = vcvtq_f32_s32(all);
                    if SCALES {
                        all = vmulq_f32(all, beside.scales[index][n]);
                    }
                    if SHIFTS {
                        all = vfmaq_f32(all, beside.shifts[index][n], floats(of_x));
                    }
                    sums[m][n] = vfmaq_f32(sums[m][n], all, floats(scales_of_x));
                }
            }
            index += 1;
        }
    }
    totals(sums, beside.rows)
}

/// The products of each row of weights with all rows of the panel. Blocks may have addends.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn multiply<const PARTS: usize, const SHIFTS: bool>(
    wide: &Wide,
    panel: &Panel<PARTS>,
) -> [[f32; PANEL]; TILE] {
    let shifts = if SHIFTS { &wide.shifts } else { &wide.scales };
    let mut sums = [[vdupq_n_f32(0.0); SIDES]; TILE];
    let of_x = panel.values.iter().zip(&panel.scales).zip(&panel.sums);
    let of_w = wide.values.iter().zip(&wide.scales).zip(shifts);
    for (((x, scales_of_x), sums_of_x), ((w, scales), shifts)) in of_x.zip(of_w) {
        let mut parts = [[[vdupq_n_s32(0); PARTS]; SIDES]; TILE];
        for at in 0..VECTORS {
            let mut vectors = [vdupq_n_s8(0); TILE];
            for n in 0..TILE {
                vectors[n] = load(&w[VECTORS * n + at]);
            }
            add_octets::<0, 1, PARTS>(&mut parts, &x[2 * at], &vectors);
            add_octets::<2, 3, PARTS>(&mut parts, &x[2 * at + 1], &vectors);
        }
        for side in 0..SIDES {
            let of_side = |all: &[f32; PANEL]| floats(&all.as_chunks().0[side]);
            let (of_x, sums_of_x) = (of_side(scales_of_x), of_side(sums_of_x));
            for n in 0..TILE {
                let factors = vmulq_n_f32(of_x, scales[n]);
                let sum = vcvtq_f32_s32(joined(parts[n][side]));
                sums[n][side] = vfmaq_f32(sums[n][side], sum, factors);
                if SHIFTS {
                    sums[n][side] = vfmaq_n_f32(sums[n][side], sums_of_x, shifts[n]);
                }
            }
        }
    }
    let mut all = [[0f32; PANEL]; TILE];
    for (to, sums) in all.iter_mut().zip(sums) {
        for (to, sums) in to.as_chunks_mut().0.iter_mut().zip(sums) {
            *to = lanes(sums);
        }
    }
    all
}

/// Adds the products of eight columns of all rows with the eight of each row of weights, which are two of four.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_octets<const FIRST: i32, const SECOND: i32, const PARTS: usize>(
    sums: &mut [[[int32x4_t; PARTS]; SIDES]; TILE],
    x: &Octets<PARTS>,
    w: &[int8x16_t; TILE],
) {
    for side in 0..SIDES {
        for (part, x) in x.iter().enumerate() {
            let (first, second) = (load(&x[side]), load(&x[SIDES + side]));
            for n in 0..TILE {
                let sum = &mut sums[n][side][part];
                *sum = sdot_lane::<FIRST>(*sum, first, w[n]);
            }
            for n in 0..TILE {
                let sum = &mut sums[n][side][part];
                *sum = sdot_lane::<SECOND>(*sum, second, w[n]);
            }
        }
    }
}

/// Adds the products of four bytes to each of four sums.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction, which the processor has, only computes with these registers.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Same as [`sdot`], with the same four bytes of `b` for all sums.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot_lane<const QUAD: i32>(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as above.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.4b[{quad}]",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            quad = const QUAD,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The sum of the lanes of each, times the scale of its row of weights.
#[inline]
#[target_feature(enable = "neon")]
fn totals<const M: usize>(sums: [[float32x4_t; ROWS]; M], scales: [f32; ROWS]) -> [[f32; ROWS]; M] {
    let scales = floats(&scales);
    let mut all = [[0f32; ROWS]; M];
    for (totals, [a, b, c, d]) in all.iter_mut().zip(sums) {
        let sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
        *totals = lanes(vmulq_f32(sums, scales));
    }
    all
}
