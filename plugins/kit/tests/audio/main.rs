//! Audio as the feature extractors of `transformers` shape it: `tests/oracle/shape.py` made the goldens.
#![expect(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

mod log_mel;

use std::collections::HashMap;

use serde::de::DeserializeOwned;

/// Part of the goldens.
fn goldens<T: DeserializeOwned>(pointer: &str) -> T {
    let text = include_str!("../../../../tests/fixtures/shape/audio.json");
    let all: serde_json::Value = serde_json::from_str(text).unwrap();
    T::deserialize(all.pointer(pointer).unwrap()).unwrap()
}

/// Rows of all cases.
fn rows() -> Vec<f32> {
    let bytes = include_bytes!("../../../../tests/fixtures/shape/audio.f32");
    let (values, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// `sound` of the generator.
fn sound(kind: &str, count: usize) -> Vec<f32> {
    let swept = |n: i64, start: i64, sweep: i64, loud: i64| {
        let x = (((n * start + n * n * sweep) & 0xffff_ffff) >> 16) - 32768;
        ((x * (32768 - x.abs())) >> 13).div_euclid(loud)
    };
    let wave = |n: i64| match kind {
        "silence" => 0,
        "click" if n == count as i64 / 5 => 29491,
        "click" if n == count as i64 - 3 => -16384,
        "click" => 0,
        "noise" => {
            let mut h = (n as u32).wrapping_mul(2_654_435_761);
            h = (h ^ (h >> 15)).wrapping_mul(2_246_822_519);
            h ^= h >> 13;
            i64::from(h & 16383) - 8192
        }
        "tone" => swept(n, 90_000_000, 0, 2),
        "chirp" => swept(n, 20_000_000, 24_000, 1),
        "faint" => swept(n, 300_000_000, 0, 400),
        other => unreachable!("{other}"),
    };
    (0..count as i64).map(|n| wave(n).clamp(-32768, 32767) as f32 / 32768.0).collect()
}

#[test]
fn the_source_audio_is_that_of_the_generator() {
    for (name, sum) in goldens::<HashMap<String, i64>>("/sums") {
        let (kind, count) = name.split_once(' ').unwrap();
        let found: f64 = sound(kind, count.parse().unwrap()).into_iter().map(f64::from).sum();
        assert_eq!((found * 32768.0).round() as i64, sum, "{name}");
    }
}
