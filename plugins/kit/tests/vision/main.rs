//! Images as the processors of `transformers` shape them: `tests/oracle/shape.py` made the goldens.
#![expect(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

mod kernels;
mod patches;
mod positions;
mod resize;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

/// A list of the goldens.
fn goldens<T: DeserializeOwned>(pointer: &str) -> T {
    let text = include_str!("../../../../tests/fixtures/shape/vision.json");
    let all: serde_json::Value = serde_json::from_str(text).unwrap();
    T::deserialize(all.pointer(pointer).unwrap()).unwrap()
}

/// `image` of the generator: gradients, edges and noise.
fn image(width: u32, height: u32, seed: u32) -> Vec<u8> {
    let mut rgb = Vec::with_capacity(width as usize * height as usize * 3);
    for y in 0..height {
        for x in 0..width {
            for c in 0..3u32 {
                let mut h = x
                    .wrapping_mul(374_761_393)
                    .wrapping_add(y.wrapping_mul(668_265_263))
                    .wrapping_add((c + seed).wrapping_mul(2_246_822_519));
                h = (h ^ (h >> 13)).wrapping_mul(1_274_126_177);
                let noise = (h ^ (h >> 16)) & 255;
                let edge = ((x / 17 + y / 23 + c) & 1) * 255;
                let gradient = (x * 3 + y * 5 + c * 40) & 255;
                rgb.push(((2 * edge + gradient + noise) >> 2) as u8);
            }
        }
    }
    rgb
}

/// `values` of the generator: multiples of 1/4096.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let value = |i: u32| {
        let mut h = i.wrapping_add(seed).wrapping_mul(2_654_435_761);
        h = (h ^ (h >> 15)).wrapping_mul(2_246_822_519);
        h ^= h >> 13;
        ((h & 4095) as f32 - 2048.0) / 4096.0
    };
    (0..count as u32).map(value).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes as the generator wrote them: little-endian.
fn sha256_of_floats(values: &[f32]) -> String {
    sha256(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(f.is_finite() && (f - e).abs() <= tolerance, "{what}: number {i}: {f}, not {e}");
    }
}

#[derive(Deserialize)]
struct Source {
    size: [u32; 2],
    seed: u32,
    values: Vec<u8>,
}

#[test]
fn the_source_images_are_those_of_the_generator() {
    let Source { size: [width, height], seed, values } = goldens("/image");
    assert_eq!(image(width, height, seed), values);
}
