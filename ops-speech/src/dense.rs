//! Arithmetic of voices on the host, in f32: dense layers, norms, noise. A file of values is read in the order in which
//! the forge writes it.

use std::f64::consts::TAU;
use std::ops::Range;

/// Sums of a dot product that are kept apart.
const LANES: usize = 16;

/// `[outputs, inputs]`, and a bias.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Range<usize>,
    pub(crate) bias: Range<usize>,
    pub(crate) inputs: usize,
}

/// Hands out the parts of the file one behind the other.
#[derive(Debug)]
pub(crate) struct Cursor(pub(crate) usize);

impl Cursor {
    pub(crate) fn take(&mut self, len: usize) -> Range<usize> {
        let start = self.0;
        self.0 = start.saturating_add(len);
        start..self.0
    }

    pub(crate) fn linear(&mut self, outputs: usize, inputs: usize) -> Linear {
        Linear {
            weight: self.take(outputs.saturating_mul(inputs)),
            bias: self.take(outputs),
            inputs,
        }
    }
}

impl Linear {
    pub(crate) fn rows(&self, all: &[f32], rows: &[f32]) -> Vec<f32> {
        let (weight, bias) = (&all[self.weight.clone()], &all[self.bias.clone()]);
        let mut out = Vec::with_capacity(rows.len() / self.inputs.max(1) * bias.len());
        for row in rows.chunks_exact(self.inputs) {
            out.extend(
                weight
                    .chunks_exact(self.inputs)
                    .zip(bias)
                    .map(|(weights, bias)| dot(row, weights) + bias),
            );
        }
        out
    }
}

/// LayerNorm without gain and shift.
pub(crate) fn normalise(row: &mut [f32], eps: f32) {
    let count = row.len().max(1) as f32;
    let mean = row.iter().sum::<f32>() / count;
    row.iter_mut().for_each(|value| *value -= mean);
    let variance = row.iter().map(|value| value * value).sum::<f32>() / count;
    let scale = 1.0 / (variance + eps).sqrt();
    row.iter_mut().for_each(|value| *value *= scale);
}

pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (whole_a, whole_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = whole_a.remainder().iter().zip(whole_b.remainder()).map(|(a, b)| a * b).sum::<f32>();
    for (a, b) in whole_a.zip(whole_b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f32>() + rest
}

/// A normal number that depends on its place: SplitMix64 (Steele et al. 2014), and the cosine of Box and Muller.
pub(crate) fn normal(seed: u64, place: u64) -> f32 {
    let mut z = seed.wrapping_add(place.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    let part = |bits: u64| bits as f64 / (1u64 << 32) as f64;
    let (first, second) = (part((z >> 32) + 1), part(z & u64::from(u32::MAX)));
    ((-2.0 * first.ln()).sqrt() * (TAU * second).cos()) as f32
}
