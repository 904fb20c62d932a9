//! Weights drawn from a seed: a model's real shapes without its checkpoint.
//!
//! A value depends on the seed, the tensor's name and its place in the tensor, on nothing else: rows may
//! be read in any order, by any thread, and no tensor is ever held whole. Values are exact in f16.
//!
//! The scale keeps activations finite in f16 through any number of layers: matrices are uniform with a
//! standard deviation of `1/√fan_in`, `√½` of that where the output is added to the hidden states, and 1 for
//! the embedding table; norm weights lie around 1, everything else around 0.

use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_base::Result;
use qhx_graph::weight::RowSource;
use qhx_types::DType;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

/// Standard deviation of biases and of vectors of any other kind.
const VECTOR: f32 = 0.1;
/// Matrices whose outputs are added to the hidden states. Smaller, so that rounding errors grow less from layer
/// to layer.
const OUTPUTS: [&str; 5] = [
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "attn.proj.weight",
    "linear_fc2.weight",
];
/// Values that one step of the generator yields.
const LANES: usize = 4;
/// Values that are converted at a time.
const SLICE: usize = 1 << 12;

/// A matrix that is drawn when it is read.
#[derive(Debug, Clone)]
pub(crate) struct Drawn {
    name: String,
    shape: [usize; 2],
    key: u64,
    mean: f32,
    deviation: f32,
}

impl Drawn {
    /// The tensor `name` of the shape `stored`, seen as a matrix `shape`.
    pub fn new(seed: u64, name: &str, stored: &[usize], shape: [usize; 2]) -> Self {
        let norm = stored.len() == 1 && name.contains("norm") && !name.ends_with("bias");
        let fan_in: usize = stored.iter().skip(1).product();
        let (mean, deviation) = match stored.len() {
            // The rows that tokens begin with, against what each layer adds to them.
            2 if name.starts_with("embed_tokens") => (0.0, 1.0),
            1 if norm => (1.0, VECTOR),
            1 => (0.0, VECTOR),
            _ if OUTPUTS.iter().any(|end| name.ends_with(end)) => {
                (0.0, (0.5 / fan_in.max(1) as f32).sqrt())
            }
            _ => (0.0, 1.0 / (fan_in.max(1) as f32).sqrt()),
        };
        let key = name.bytes().fold(mix(seed), |key, byte| mix(key ^ u64::from(byte)));
        Self { name: name.to_owned(), shape, key, mean, deviation }
    }

    /// Values `first..first + out.len()` of the row-major matrix.
    fn draw(&self, first: usize, out: &mut [f32]) {
        // Uniform on ±√3·σ has the standard deviation σ.
        let scale = self.deviation * 3f32.sqrt() / f32::from(i16::MAX);
        let value = |bits: u64, lane: usize| {
            let bits = (bits >> (16 * lane)) as u16;
            f32::from(bits.cast_signed()) * scale + self.mean
        };
        let lead = (first.next_multiple_of(LANES) - first).min(out.len());
        let (head, body) = out.split_at_mut(lead);
        for (i, v) in head.iter_mut().enumerate() {
            *v = value(self.word(first + i), (first + i) % LANES);
        }
        for (i, four) in body.chunks_mut(LANES).enumerate() {
            let bits = self.word(first + lead + i * LANES);
            four.iter_mut().enumerate().for_each(|(lane, v)| *v = value(bits, lane));
        }
    }

    /// The random word that value `index` is a part of.
    fn word(&self, index: usize) -> u64 {
        mix(self.key.wrapping_add((index / LANES) as u64))
    }
}

impl RowSource for Drawn {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F16
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let mut half = [f16::ZERO; SLICE];
        let begin = first * self.shape[1];
        for (i, part) in out.chunks_mut(SLICE).enumerate() {
            self.draw(begin + i * SLICE, part);
            let half = &mut half[..part.len()];
            half.convert_from_f32_slice(part);
            half.convert_to_f32_slice(part);
        }
        Ok(())
    }
}

/// The first number of SplitMix64 (Steele, Lea and Flood 2014) for a seed.
fn mix(seed: u64) -> u64 {
    SplitMix64::seed_from_u64(seed).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(tensor: &Drawn, first: usize, rows: usize) -> Vec<f32> {
        let mut out = vec![0f32; rows * tensor.shape[1]];
        tensor.read_f32(first, &mut out).unwrap();
        out
    }

    #[test]
    fn any_order_gives_the_same_values_and_any_name_or_seed_others() {
        let shape = [37, 2501];
        let tensor = Drawn::new(7, "layers.0.mlp.up_proj.weight", &shape, shape);
        let whole = read(&tensor, 0, 37);
        for first in [0, 1, 13, 35] {
            assert_eq!(read(&tensor, first, 2), whole[first * 2501..][..2 * 2501], "{first}");
        }
        for (seed, name) in [(8, "layers.0.mlp.up_proj.weight"), (7, "layers.1.mlp.up_proj.weight")]
        {
            let other = read(&Drawn::new(seed, name, &shape, shape), 0, 37);
            let equal = other.iter().zip(&whole).filter(|(a, b)| a == b).count();
            assert!(equal < whole.len() / 100, "{equal} values are equal");
        }
    }

    #[test]
    fn values_have_the_stated_spread_and_are_exact_in_f16() {
        let tensor = Drawn::new(1, "a.weight", &[64, 1024], [64, 1024]);
        let values = read(&tensor, 0, 64);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let square = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 1e-3, "{mean}");
        assert!((square.sqrt() * 32.0 - 1.0).abs() < 0.02, "{square}");
        assert!(values.iter().all(|v| f16::from_f32(*v).to_f32() == *v));
        let norm = read(&Drawn::new(1, "norm.weight", &[512], [1, 512]), 0, 1);
        assert!(norm.iter().all(|v| (0.8..1.2).contains(v)));
    }
}
