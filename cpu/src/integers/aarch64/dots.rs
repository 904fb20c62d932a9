//! Four bytes times four others, four times in an instruction (`sdot`).

use std::arch::aarch64::*;
use std::arch::asm;

use super::{
    BLOCKS, BYTES, Filled, Group, HALF, LANES, Octets, PAIR, PANEL, Pair, PairBytes, Panel, TILE,
    Wide, floats, groups, integers, joined, lanes, load, nibbles, write,
};
use crate::integers::{BLOCK, GROUP, IntegerTask, rows};

/// Vectors of sums of a row of weights with a panel.
const SIDES: usize = PANEL / LANES;

entries!("neon,dotprod", 1);

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots<const PARTS: usize, const M: usize>(
    pair: &Pair<'_>,
    x: &[Group<PARTS>],
    n: usize,
    out: [&mut &mut [f32]; M],
) {
    let x = rows(x);
    let bytes = |w: &[i8; GROUP], block: usize| {
        let w = &w.as_chunks().0[2 * block..][..2];
        [load(&w[0]), load(&w[1])]
    };
    let sums = match pair.bytes {
        PairBytes::I8(w) => dots_blocks(x, w, pair, bytes),
        PairBytes::I4(w) => {
            let each = |w: &[i8; GROUP / 2], block: usize| nibbles(load(&w.as_chunks().0[block]));
            dots_blocks(x, w, pair, each)
        }
    };
    write(sums, n, out);
}

/// Products of two rows of weights with rows of `x`. `wide` makes two vectors of a block in a group's `N` bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_blocks<const PARTS: usize, const M: usize, const N: usize>(
    x: [&[Group<PARTS>]; M],
    w: [&[i8]; PAIR],
    pair: &Pair<'_>,
    wide: impl Fn(&[i8; N], usize) -> [int8x16_t; 2],
) -> [[f32; PAIR]; M] {
    let w = w.map(Filled::<_, N>::new);
    let mut sums = [[vdupq_n_f32(0.0); PAIR]; M];
    let mut index = 0;
    for pairs in groups(&w) {
        for (a, b) in pairs {
            let w = [a, b];
            let mut blocks = [[[vdupq_n_s8(0); 2]; PAIR]; BLOCKS];
            for (block, to) in blocks.iter_mut().enumerate() {
                *to = [wide(w[0], block), wide(w[1], block)];
            }
            let factors = pair.scales.group(index);
            let shifts = pair.shifts(index, factors);
            for m in 0..M {
                let Group { values, offsets: zero, sums: of_x, scales } = &x[m][index];
                let mut parts = [[vdupq_n_s32(0); BLOCKS]; PAIR];
                for (block, w) in blocks.iter().enumerate() {
                    let x = &values[2 * block..][..2];
                    for part in 0..PARTS {
                        let x = [load(&x[0][part]), load(&x[1][part])];
                        for n in 0..PAIR {
                            let sum = vshlq_n_s32::<8>(parts[n][block]);
                            parts[n][block] = sdot(sdot(sum, w[n][0], x[0]), w[n][1], x[1]);
                        }
                    }
                }
                for n in 0..PAIR {
                    // A lane is a block's sum.
                    let [a, b, c, d] = parts[n];
                    let all = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
                    let all = vcvtq_f32_s32(vaddq_s32(all, integers(&zero[0])));
                    let mut all = vmulq_f32(all, factors[n]);
                    if let Some(shifts) = shifts {
                        all = vfmaq_f32(all, shifts[n], floats(of_x));
                    }
                    sums[m][n] = vfmaq_f32(sums[m][n], all, floats(scales));
                }
            }
            index += 1;
        }
    }
    totals(sums)
}

/// The products of each row of weights with all rows of the panel.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn multiply<const PARTS: usize>(wide: &Wide, panel: &Panel<PARTS>) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let rows = wide.values.as_flattened().as_chunks::<BYTES>().0;
    let (stride, vectors) = (rows.len() / TILE, BLOCK / BYTES);
    let mut sums = [[vdupq_n_f32(0.0); SIDES]; TILE];
    for (block, x) in panel.values.chunks_exact(BLOCK / HALF).enumerate() {
        let mut parts = [[[vdupq_n_s32(0); PARTS]; SIDES]; TILE];
        for (at, [first, second]) in x.as_chunks().0.iter().enumerate() {
            let mut w = [vdupq_n_s8(0); TILE];
            for (n, w) in w.iter_mut().enumerate() {
                *w = load(&rows[n * stride + block * vectors + at]);
            }
            add_octets::<0, 1, PARTS>(&mut parts, first, &w);
            add_octets::<2, 3, PARTS>(&mut parts, second, &w);
        }
        let factors = panel.scales[block].as_chunks::<LANES>().0;
        let of_x = panel.sums[block].as_chunks::<LANES>().0;
        let of_x = [floats(&of_x[0]), floats(&of_x[1])];
        for side in 0..SIDES {
            let factors = floats(&factors[side]);
            for n in 0..TILE {
                let sum = vcvtq_f32_s32(joined(parts[n][side]));
                let sum = vmulq_n_f32(sum, wide.scales[n * blocks + block]);
                let sum = vfmaq_n_f32(sum, of_x[side], wide.shifts[n * blocks + block]);
                sums[n][side] = vfmaq_f32(sums[n][side], sum, factors);
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

/// The sum of the lanes of each.
#[inline]
#[target_feature(enable = "neon")]
fn totals<const M: usize>(sums: [[float32x4_t; PAIR]; M]) -> [[f32; PAIR]; M] {
    let mut all = [[0f32; PAIR]; M];
    for (totals, sums) in all.iter_mut().zip(sums) {
        for (total, sums) in totals.iter_mut().zip(sums) {
            *total = vaddvq_f32(sums);
        }
    }
    all
}
