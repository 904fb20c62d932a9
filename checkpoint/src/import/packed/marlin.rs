//! The order of Marlin's kernels (`WQLinear_Marlin` of AutoAWQ): tiles of 16 inputs and 16 outputs, four of which are
//! permuted together.

use super::part::Part;

/// Inputs and outputs of a tile.
pub(super) const TILE: usize = 16;
/// Outputs of four tiles, which scales of groups are permuted in.
pub(super) const OUTPUTS: usize = 64;
/// Integers of four tiles.
const FOUR: usize = TILE * OUTPUTS;
/// Position of each integer in a permuted run of four tiles.
const PLACES: [u16; FOUR] = places();
/// The order of the eight integers of a word (`interleave` of `_get_perms`).
const INTERLEAVE: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Position of each output in 32 scales of whole rows (`scale_perm_single`).
const SINGLE: [usize; 8] = [0, 1, 8, 9, 16, 17, 24, 25];

/// The inverse of `perm` of `_get_perms`.
const fn places() -> [u16; FOUR] {
    let mut out = [0u16; FOUR];
    let mut at = 0;
    while at < FOUR {
        // The eight of a word are 4 rows of 2 blocks of 8 columns, which `at` counts through interleaved.
        let nth = at / 8 * 8 + INTERLEAVE[at % 8];
        let (lane, tile, within) = (nth / 32, nth / 8 % 4, nth % 8);
        let (block, which) = (within / 4, within % 4);
        let row = 2 * (lane % 4) + which % 2 + which / 2 * 8;
        let from = 16 * row + lane / 4 + 8 * block + 256 * tile;
        out[from] = at as u16;
        at += 1;
    }
    out
}

/// The integers, from 0 to 15: `[inputs / 16, outputs · 2]` words.
#[derive(Debug, Clone)]
pub(super) struct Tiles {
    pub part: Part,
    pub outputs: usize,
}

impl Tiles {
    pub fn get(&self, output: usize, input: usize) -> u8 {
        let flat = output / TILE * TILE * TILE + input % TILE * TILE + output % TILE;
        let place = PLACES.get(flat % FOUR).copied().map_or(0, usize::from);
        let at = input / TILE * self.outputs * TILE + flat / FOUR * FOUR + place;
        (self.part.word(at / 8) >> (4 * (at % 8)) & 15) as u8
    }
}

/// Position of an output's scale among those of a group: `scale_perm` has `i + 8 j` at `8 i + j`.
pub(super) const fn grouped(output: usize) -> usize {
    let within = output % OUTPUTS;
    output / OUTPUTS * OUTPUTS + within % 8 * 8 + within / 8
}

/// Position of an output's scale when a group is all inputs: `scale_perm_single`.
pub(super) fn single(output: usize) -> usize {
    let within = output % 32;
    // Of the four runs of eight, the one at 2 i has i, as each of its pairs has.
    let (run, nth) = (within % 8 / 2, within / 8 * 2 + within % 2);
    debug_assert_eq!(2 * run + SINGLE[nth], within);
    output / 32 * 32 + run * 8 + nth
}
