//! Softmax attention over a cache, of which only those positions are read that the mask shows.
//!
//! A part of the mask's rows shares the positions that any of them sees, whose scores, weights and values are computed
//! some at a time (Milakov and Gimelshein 2018, arXiv 1805.02867): the memory that it takes depends neither on the
//! context nor on the position.

use std::ops::Range;

use half::f16;
use half::slice::{HalfBitsSliceExt as _, HalfFloatSliceExt as _};
use rten_simd::{Isa, SimdOp, SimdUnaryOp};
use rten_vecmath::Exp;

use super::Dense;
use crate::heads::{Columns, StoredColumns, StoredRows, Turned};
use crate::kernels::{FEW, Rows, Task};
use crate::team::Team;

/// Largest value that a mask adds to hidden scores. The weight of a score that is thousands below another is 0 in f32.
const HIDDEN: f32 = -10_000.0;
/// Columns of a mask of which all are looked at or none.
const STEP: usize = 64;
/// Positions whose weights are in memory at a time.
const PIECE: usize = 256;
/// Rows of queries that share keys, about.
const SHARED: usize = 128;
/// Positions that are worth a thread of their own, and tasks from which on they are not cut into such.
const PART: usize = 512;
const TASKS: usize = 16;
/// Multiplications that are not worth waking a thread for.
const SMALL: usize = 1 << 15;

/// The sizes of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Heads of keys and values.
    pub(super) heads: usize,
    /// Heads of queries for each of them.
    pub(super) repeat: usize,
    /// Tokens.
    pub(super) rows: usize,
    /// Rows of the caches.
    pub(super) capacity: usize,
    /// Elements of a head.
    pub(super) dim: usize,
    /// Elements of the mask's rows, and whether there is one for each token.
    pub(super) mask: MaskShape,
}

impl Shape {
    /// Multiplications where the mask shows everything.
    pub(super) fn work(self) -> u64 {
        let Self { heads, repeat, rows, dim, mask, .. } = self;
        let sizes = [heads, repeat, rows, dim, mask.width];
        sizes.iter().fold(2, |all, size| all.saturating_mul(*size as u64))
    }
}

/// The sizes of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MaskShape {
    /// 1 or one for each token.
    pub(super) rows: usize,
    pub(super) width: usize,
    /// Rows of it that share what they see.
    pub(super) tile: usize,
}

impl MaskShape {
    pub(super) fn new(rows: usize, width: usize, repeat: usize) -> Self {
        Self { rows, width, tile: (SHARED / repeat.max(1)).clamp(16, STEP) }
    }
}

/// Operands of attention, and their places in memory.
#[derive(Debug)]
pub(super) struct Attend {
    pub(super) q: Dense,
    pub(super) keys: [Dense; 2],
    pub(super) values: [Dense; 2],
    pub(super) scales: Option<CacheScales>,
    pub(super) mask: Dense,
    /// Its place among those of [`super::Scratch`].
    pub(super) seen: usize,
    pub(super) shape: Shape,
}

/// Scales of int8 caches.
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheScales {
    /// A scale for each row of the keys, and of the values.
    pub(super) rows: [Dense; 2],
    /// Factor of all scales.
    pub(super) step: f32,
}

/// The positions that some rows of a mask see.
#[derive(Debug, Default, Clone)]
pub(super) struct Seen {
    runs: Vec<Range<usize>>,
    /// A row shows nothing: then all positions count, each with what the mask adds to it.
    all: bool,
}

impl Seen {
    /// Looks at all rows.
    pub(super) fn fill(to: &mut Vec<Self>, mask: &[f32], shape: MaskShape, team: &Team) {
        let MaskShape { rows, width, tile } = shape;
        to.resize_with(rows.div_ceil(tile), Self::default);
        let tiles: Vec<_> = to.iter_mut().zip(mask.chunks(tile * width)).collect();
        let look = |(seen, mask): (&mut Self, &[f32])| seen.look(mask, width);
        match mask.len() <= SMALL {
            true => tiles.into_iter().for_each(look),
            false => team.each(tiles, look),
        }
    }

    fn look(&mut self, mask: &[f32], width: usize) {
        self.runs.clear();
        let shows = |part: &[f32]| part.iter().fold(false, |any, value| any | !hides(*value));
        self.all = !mask.chunks_exact(width).all(shows);
        if self.all {
            return self.runs.push(0..width);
        }
        for start in (0..width).step_by(STEP) {
            let end = width.min(start + STEP);
            if !mask.chunks_exact(width).any(|row| shows(&row[start..end])) {
                continue;
            }
            match self.runs.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => self.runs.push(start..end),
            }
        }
    }

    /// Some positions at a time, those of the cache and the graph's own apart.
    fn pieces(&self, capacity: usize) -> impl Iterator<Item = Range<usize>> {
        self.runs.iter().flat_map(move |run| {
            let old = run.start..run.end.min(capacity);
            let own = run.start.max(capacity)..run.end;
            [old, own].into_iter().flat_map(|part| {
                let end = part.end;
                part.step_by(PIECE).map(move |start| start..end.min(start + PIECE))
            })
        })
    }
}

fn hides(value: f32) -> bool {
    value <= HIDDEN
}

/// The operands of [`Attend`].
pub(super) struct Operands<'a> {
    pub(super) q: &'a [f32],
    /// Keys and values of the cache, and the graph's own.
    pub(super) past: [Stored<'a>; 2],
    pub(super) own: [Stored<'a>; 2],
    pub(super) mask: &'a [f32],
    pub(super) seen: &'a [Seen],
    pub(super) shape: Shape,
}

/// Rows of keys or values.
#[derive(Clone, Copy)]
pub(super) enum Stored<'a> {
    F32(&'a [f32]),
    /// Bits of f16.
    F16(&'a [u16]),
    /// int8, a scale for each row, and what all of them are multiplied with.
    I8(&'a [i8], &'a [f32], f32),
}

impl<'a> Stored<'a> {
    /// Some of the rows, of `dim` elements each.
    fn part(self, rows: Range<usize>, dim: usize) -> Self {
        let elements = rows.start * dim..rows.end * dim;
        match self {
            Self::F32(all) => Self::F32(&all[elements]),
            Self::F16(all) => Self::F16(&all[elements]),
            Self::I8(all, scales, step) => Self::I8(&all[elements], &scales[rows], step),
        }
    }

    /// All of them as f32: themselves, or in `memory`.
    fn floats<'m>(self, dim: usize, memory: &'m mut [f32]) -> &'m [f32]
    where
        'a: 'm,
    {
        match self {
            Self::F32(all) => all,
            Self::F16(all) => {
                let to = &mut memory[..all.len()];
                all.reinterpret_cast::<f16>().convert_to_f32_slice(to);
                to
            }
            Self::I8(all, scales, step) => {
                let to = &mut memory[..all.len()];
                Dequantize { all, scales, step, dim, to }.dispatch();
                to
            }
        }
    }
}

/// Memory of attention, which the next one uses again.
#[derive(Debug, Default)]
pub(super) struct AttendScratch {
    /// Bits of f16 of the graph's own keys and values.
    pub(super) own: [Vec<u16>; 2],
    /// Running sums.
    pub(super) sums: Vec<f32>,
}

/// The graph's own keys and values as they will be read from the cache, so that it does not matter in which parts a
/// prompt is consumed: rounded, into `halves`, where the cache is f16. Those of int8 caches stay f32.
pub(super) fn as_stored<'a>(
    past: [Stored<'_>; 2],
    own: [&'a [f32]; 2],
    halves: &'a mut [Vec<u16>; 2],
) -> [Stored<'a>; 2] {
    let [k, v] = halves;
    let one = |past, own: &'a [f32], halves: &'a mut Vec<u16>| match past {
        Stored::F16(_) => {
            halves.resize(own.len(), 0);
            halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(own);
            Stored::F16(halves)
        }
        Stored::F32(_) | Stored::I8(..) => Stored::F32(own),
    };
    [one(past[0], own[0], k), one(past[1], own[1], v)]
}

/// Rows of int8 as f32.
struct Dequantize<'a> {
    all: &'a [i8],
    scales: &'a [f32],
    step: f32,
    dim: usize,
    to: &'a mut [f32],
}

impl SimdOp for Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Self { all, scales, step, dim, to } = self;
        let rows = to.chunks_exact_mut(dim).zip(all.chunks_exact(dim)).zip(scales);
        for ((to, row), scale) in rows {
            let factor = scale * step;
            to.iter_mut().zip(row).for_each(|(to, q)| *to = f32::from(*q) * factor);
        }
    }
}

/// Rows of queries of one head, and a share of the pieces of positions that they see.
struct Share<'a, 's> {
    head: usize,
    tokens: Range<usize>,
    seen: &'a Seen,
    pieces: Range<usize>,
    state: State<'s>,
}

/// Running sums for rows of queries: weighted values, the largest score, and the weights.
struct State<'s> {
    values: &'s mut [f32],
    most: &'s mut [f32],
    sums: &'s mut [f32],
}

impl<'s> State<'s> {
    /// For `rows` rows out of `memory`, which has exactly room for them.
    fn new(memory: &'s mut [f32], rows: usize) -> Self {
        let dim = memory.len() / rows.max(1) - 2;
        let (values, rest) = memory.split_at_mut(rows * dim);
        let (most, sums) = rest.split_at_mut(rows);
        Self { values, most, sums }
    }
}

impl Operands<'_> {
    /// Computes `to` `[heads, repeat · rows, dim]`. `memory` is taken for sums, and used again.
    pub(super) fn run(&self, to: &mut [f32], memory: &mut Vec<f32>, team: &Team) {
        let Shape { heads, repeat, rows, capacity, dim, mask } = self.shape;
        let tiles = rows.div_ceil(mask.tile);
        let counts = |seen: &Seen| (seen.pieces(capacity).count(), self.positions(seen));
        let counted: Vec<_> = self.seen.iter().map(counts).collect();
        // One row of the mask may stand for all tokens.
        let share = |tile: usize| tile.min(self.seen.len() - 1);
        // The number of parts does not depend on that of threads: neither do results.
        let most = TASKS / (heads * tiles).max(1);
        let parts = |tile: usize| {
            let (pieces, positions) = counted[share(tile)];
            (positions / PART).min(most).clamp(1, pieces.max(1))
        };
        let tokens = |tile: usize| tile * mask.tile..rows.min((tile + 1) * mask.tile);
        let room = |tile: usize| tokens(tile).len() * repeat * (dim + 2);
        let all: usize = (0..tiles).map(|tile| room(tile) * parts(tile)).sum();
        memory.clear();
        memory.resize(heads * all, 0.0);
        let mut shares = Vec::new();
        let (mut rest, mut work) = (memory.as_mut_slice(), 0);
        for (head, tile) in (0..heads).flat_map(|head| (0..tiles).map(move |tile| (head, tile))) {
            let (pieces, positions) = counted[share(tile)];
            let (tokens, parts) = (tokens(tile), parts(tile));
            work += positions * tokens.len() * repeat * dim;
            for part in 0..parts {
                let memory;
                (memory, rest) = rest.split_at_mut(room(tile));
                shares.push(Share {
                    head,
                    tokens: tokens.clone(),
                    seen: &self.seen[share(tile)],
                    pieces: pieces * part / parts..pieces * (part + 1) / parts,
                    state: State::new(memory, tokens.len() * repeat),
                });
            }
        }
        match work <= SMALL {
            true => shares.into_iter().for_each(|share| self.share(share)),
            false => team.each(shares, |share| self.share(share)),
        }
        let mut rest = memory.as_mut_slice();
        for to in to.chunks_exact_mut(repeat * rows * dim).take(heads) {
            for tile in 0..tiles {
                let memory;
                (memory, rest) = rest.split_at_mut(room(tile) * parts(tile));
                let tokens = tokens(tile);
                let parts: Vec<_> = memory
                    .chunks_exact_mut(room(tile))
                    .map(|memory| State::new(memory, tokens.len() * repeat))
                    .collect();
                for row in 0..tokens.len() * repeat {
                    let place = row / tokens.len() * rows + tokens.start + row % tokens.len();
                    finish(&parts, row, &mut to[place * dim..][..dim]);
                }
            }
        }
    }

    fn positions(&self, seen: &Seen) -> usize {
        seen.runs.iter().map(Range::len).sum()
    }

    fn share(&self, share: Share<'_, '_>) {
        let Shape { repeat, rows, capacity, dim, mask, .. } = self.shape;
        let Share { head, tokens, seen, pieces, state } = share;
        let count = tokens.len() * repeat;
        let mut q = Vec::with_capacity(count * dim);
        let queries = &self.q[head * repeat * rows * dim..][..repeat * rows * dim];
        for one in queries.chunks_exact(rows * dim) {
            q.extend_from_slice(&one[tokens.start * dim..tokens.end * dim]);
        }
        let State { values, most, sums } = state;
        most.fill(f32::NEG_INFINITY);
        let mut memory = vec![0f32; count * PIECE];
        let stored = !matches!(self.past[0], Stored::F32(_));
        let mut wide = vec![0f32; if stored && count > FEW { PIECE * dim } else { 0 }];
        for piece in seen.pieces(capacity).skip(pieces.start).take(pieces.len()) {
            let (all, first, each) = match piece.start < capacity {
                true => (self.past, 0, capacity),
                false => (self.own, capacity, rows),
            };
            let (start, len) = (head * each + piece.start - first, piece.len());
            let [keys, held] = all.map(|all| all.part(start..start + len, dim));
            let scores = &mut memory[..count * len];
            let out = scores.chunks_exact_mut(len).collect();
            match keys {
                _ if count > FEW => {
                    Turned { x: &q, b: keys.floats(dim, &mut wide), columns: dim, out }.dispatch();
                }
                Stored::F32(keys) => {
                    let weights = Rows::F32(keys);
                    Task { weights, columns: dim, x: &q, out, bias: None }.dispatch();
                }
                Stored::F16(b) => StoredRows::of_halves(&q, b, dim, out).dispatch(),
                Stored::I8(b, scales, step) => {
                    StoredRows { x: &q, b, columns: dim, out }.dispatch();
                    for scores in scores.chunks_exact_mut(len) {
                        scores.iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale * step);
                    }
                }
            }
            for (row, scores) in scores.chunks_exact_mut(len).enumerate() {
                let token = if mask.rows == 1 { 0 } else { tokens.start + row % tokens.len() };
                let mask = &self.mask[token * mask.width..][piece.clone()];
                let (most, sum) = (&mut most[row], &mut sums[row]);
                let values = &mut values[row * dim..][..dim];
                Weigh { scores, mask, all: seen.all, most, sum, values }.dispatch();
            }
            let out = values.chunks_exact_mut(dim).collect();
            let x = &mut memory[..count * len];
            match held {
                Stored::I8(b, scales, step) if count <= FEW => {
                    for x in x.chunks_exact_mut(len) {
                        // The scale of what is hidden may be anything.
                        x.iter_mut()
                            .zip(scales)
                            .filter(|(x, _)| **x != 0.0)
                            .for_each(|(x, scale)| *x *= scale * step);
                    }
                    StoredColumns { x, b, out }.dispatch();
                }
                Stored::F16(b) if count <= FEW => StoredColumns::of_halves(x, b, out).dispatch(),
                _ => {
                    let b = held.floats(dim, &mut wide);
                    Columns { x, b, stride: dim, add: true, out }.dispatch();
                }
            }
        }
    }
}

/// Scores of a row become weights, and what was summed before has the same scale afterwards.
struct Weigh<'a> {
    scores: &'a mut [f32],
    mask: &'a [f32],
    /// Nothing is hidden.
    all: bool,
    most: &'a mut f32,
    sum: &'a mut f32,
    values: &'a mut [f32],
}

impl SimdOp for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Self { scores, mask, all, most, sum, values } = self;
        let mut lanes = [*most; 32];
        // What is hidden may be anything, also what is no number.
        let masked = |score: f32, mask: f32| match !all && hides(mask) {
            true => f32::NEG_INFINITY,
            false => score + mask,
        };
        for (scores, mask) in scores.chunks_mut(lanes.len()).zip(mask.chunks(lanes.len())) {
            for ((score, mask), lane) in scores.iter_mut().zip(mask).zip(&mut lanes) {
                *score = masked(*score, *mask);
                *lane = if *score > *lane { *score } else { *lane };
            }
        }
        let largest = lanes.iter().fold(*most, |a, b| if *b > a { *b } else { a });
        let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        scores.iter_mut().for_each(|score| *score -= base);
        Exp {}.map_mut(scores);
        let mut lanes = [0f32; 32];
        for scores in scores.chunks(lanes.len()) {
            lanes.iter_mut().zip(scores).for_each(|(lane, weight)| *lane += *weight);
        }
        let factor = rescaled(*most, largest);
        *sum = *sum * factor + lanes.iter().sum::<f32>();
        if factor != 1.0 {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        *most = largest;
    }
}

/// Factor of sums whose largest score was `from`, and is `to`.
fn rescaled(from: f32, to: f32) -> f32 {
    if from == to { 1.0 } else { (from - to).exp() }
}

/// One row of queries: what its parts have summed.
fn finish(parts: &[State<'_>], row: usize, to: &mut [f32]) {
    let most = parts.iter().fold(f32::NEG_INFINITY, |most, part| most.max(part.most[row]));
    let factor = |part: &State<'_>| rescaled(part.most[row], most);
    let sum: f32 = parts.iter().map(|part| part.sums[row] * factor(part)).sum();
    to.fill(0.0);
    for part in parts {
        let factor = factor(part) / sum;
        let values = &part.values[row * to.len()..][..to.len()];
        to.iter_mut().zip(values).for_each(|(to, value)| *to += value * factor);
    }
}
