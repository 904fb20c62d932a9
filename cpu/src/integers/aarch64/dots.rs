//! Four bytes times four others, four times in an instruction (`sdot`).

use std::arch::aarch64::*;
use std::arch::asm;

use super::{
    BLOCKS, BYTES, Filled, Group, HALF, LANES, Octets, PAIR, PANEL, Pair, Panel, TILE, Wide,
    floats, groups, integers, joined, lanes, load, nibbles, rows, write,
};
use crate::integers::{GROUP, IntegerTask};
use crate::kernels::Row;

/// Vectors of sums of a row of weights with a panel.
const PARTS: usize = PANEL / LANES;

#[target_feature(enable = "neon,dotprod")]
pub(super) fn few(task: &mut IntegerTask<'_, '_>, groups: &[Group]) {
    task.each_rows(groups, |pair, x, n, out| match out {
        [a] => dots(pair, x, n, [a]),
        [a, b] => dots(pair, x, n, [a, b]),
        [a, b, c] => dots(pair, x, n, [a, b, c]),
        [a, b, c, d] => dots(pair, x, n, [a, b, c, d]),
        _ => {}
    });
}

#[target_feature(enable = "neon,dotprod")]
pub(super) fn several(task: &mut IntegerTask<'_, '_>, panels: &[Panel], wide: &mut Wide) {
    task.each_tile(
        panels,
        wide,
        |wide, row, weights| wide.fill(row, 1, weights),
        |wide, panel| multiply(wide, panel),
    );
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots<const M: usize>(pair: [Row<'_>; PAIR], x: &[Group], n: usize, out: [&mut &mut [f32]; M]) {
    let x = rows(x);
    let sums = match Pair::new(pair) {
        Some(Pair::I8(w, scales)) => dots_i8(x, w, scales),
        Some(Pair::I8Blocks(w, scales)) => dots_blocks::<M, GROUP>(x, w, scales, |w, block| {
            let w = &w.as_chunks().0[2 * block..][..2];
            [load(&w[0]), load(&w[1])]
        }),
        Some(Pair::I4(w, scales)) => dots_blocks::<M, { GROUP / 2 }>(x, w, scales, |w, block| {
            nibbles(load(&w.as_chunks().0[block]))
        }),
        None => return,
    };
    write(sums, n, out);
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_i8<const M: usize>(
    x: [&[Group]; M],
    w: [&[i8]; PAIR],
    scales: [f32; PAIR],
) -> [[f32; PAIR]; M] {
    let w = w.map(Filled::<_, GROUP>::new);
    let mut sums = [[vdupq_n_f32(0.0); PAIR]; M];
    let mut index = 0;
    for pairs in groups(&w) {
        for (a, b) in pairs {
            let w = [a.as_chunks::<BYTES>().0, b.as_chunks().0];
            let mut high = [[vdupq_n_s32(0); PAIR]; M];
            let mut low = [[vdupq_n_s32(0); PAIR]; M];
            for at in 0..GROUP / BYTES {
                let w = [load(&w[0][at]), load(&w[1][at])];
                for m in 0..M {
                    let values = &x[m][index].values;
                    let (upper, lower) = (load(&values[2 * at]), load(&values[2 * at + 1]));
                    for n in 0..PAIR {
                        high[m][n] = sdot(high[m][n], w[n], upper);
                        low[m][n] = sdot(low[m][n], w[n], lower);
                    }
                }
            }
            for m in 0..M {
                for n in 0..PAIR {
                    let sum = vcvtq_f32_s32(joined(high[m][n], low[m][n]));
                    sums[m][n] = vfmaq_n_f32(sums[m][n], sum, x[m][index].scales[0]);
                }
            }
            index += 1;
        }
    }
    totals(sums).map(|[a, b]| [a * scales[0], b * scales[1]])
}

/// As [`dots_i8`], with a scale for each block. `wide` makes two vectors of a block in a group of `N` bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dots_blocks<const M: usize, const N: usize>(
    x: [&[Group]; M],
    w: [&[i8]; PAIR],
    scales: [&[f32]; PAIR],
    wide: impl Fn(&[i8; N], usize) -> [int8x16_t; 2],
) -> [[f32; PAIR]; M] {
    let w = w.map(Filled::<_, N>::new);
    let scales = scales.map(Filled::<_, BLOCKS>::new);
    let mut sums = [[vdupq_n_f32(0.0); PAIR]; M];
    let mut index = 0;
    for pairs in groups(&w) {
        for (a, b) in pairs {
            let w = [a, b];
            let mut parts = [[[vdupq_n_s32(0); BLOCKS]; PAIR]; M];
            for block in 0..BLOCKS {
                let w = [wide(w[0], block), wide(w[1], block)];
                for m in 0..M {
                    let x = &x[m][index].values[4 * block..][..4];
                    let (high, low) = ([load(&x[0]), load(&x[2])], [load(&x[1]), load(&x[3])]);
                    for n in 0..PAIR {
                        let upper = sdot(sdot(vdupq_n_s32(0), w[n][0], high[0]), w[n][1], high[1]);
                        let sum = sdot(vshlq_n_s32::<8>(upper), w[n][0], low[0]);
                        parts[m][n][block] = sdot(sum, w[n][1], low[1]);
                    }
                }
            }
            let factors = [floats(scales[0].get(index)), floats(scales[1].get(index))];
            for m in 0..M {
                let Group { offsets, scales, .. } = &x[m][index];
                for n in 0..PAIR {
                    // A lane is a block's sum.
                    let [a, b, c, d] = parts[m][n];
                    let all = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
                    let all = vcvtq_f32_s32(vaddq_s32(all, integers(&offsets[0])));
                    sums[m][n] = vfmaq_f32(sums[m][n], all, vmulq_f32(factors[n], floats(scales)));
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
fn multiply(wide: &Wide, panel: &Panel) -> [[f32; PANEL]; TILE] {
    let blocks = wide.scales.len() / TILE;
    let rows = wide.values.as_flattened().as_chunks::<BYTES>().0;
    let (stride, vectors) = (rows.len() / TILE, wide.block / BYTES);
    let mut sums = [[vdupq_n_f32(0.0); PARTS]; TILE];
    for (block, x) in panel.values.chunks_exact(wide.block / HALF).enumerate() {
        let mut high = [[vdupq_n_s32(0); PARTS]; TILE];
        let mut low = [[vdupq_n_s32(0); PARTS]; TILE];
        for (at, [first, second]) in x.as_chunks().0.iter().enumerate() {
            let mut w = [vdupq_n_s8(0); TILE];
            for (n, w) in w.iter_mut().enumerate() {
                *w = load(&rows[n * stride + block * vectors + at]);
            }
            add_octets::<0, 1>(&mut high, &mut low, first, &w);
            add_octets::<2, 3>(&mut high, &mut low, second, &w);
        }
        let factors = panel.scales[block].as_chunks::<LANES>().0;
        for part in 0..PARTS {
            let factors = floats(&factors[part]);
            for n in 0..TILE {
                let sum = vcvtq_f32_s32(joined(high[n][part], low[n][part]));
                let scale = vmulq_n_f32(factors, wide.scales[n * blocks + block]);
                sums[n][part] = vfmaq_f32(sums[n][part], sum, scale);
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
fn add_octets<const FIRST: i32, const SECOND: i32>(
    high: &mut [[int32x4_t; PARTS]; TILE],
    low: &mut [[int32x4_t; PARTS]; TILE],
    x: &Octets,
    w: &[int8x16_t; TILE],
) {
    for part in 0..PARTS {
        for n in 0..TILE {
            high[n][part] = sdot_lane::<FIRST>(high[n][part], load(&x[part]), w[n]);
            low[n][part] = sdot_lane::<FIRST>(low[n][part], load(&x[PARTS + part]), w[n]);
        }
        for n in 0..TILE {
            high[n][part] = sdot_lane::<SECOND>(high[n][part], load(&x[2 * PARTS + part]), w[n]);
            low[n][part] = sdot_lane::<SECOND>(low[n][part], load(&x[3 * PARTS + part]), w[n]);
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

/// As [`sdot`], with the same four bytes of `b` for all sums.
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
