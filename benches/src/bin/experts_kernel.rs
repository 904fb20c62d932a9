//! int8 weights with one scale a row to f16, at the shape of a Phi-tiny-MoE expert, against a plain copy
//! that reads and writes as many bytes.
//!
//! Prints GB/s of bytes read and written, best of many turns, and the ratio.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::time::{Duration, Instant};

use half::f16;
use qhx_kit::kernels::int8_to_f16;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use rayon::prelude::*;

const ROWS: usize = 4096;
const COLUMNS: usize = 448;
/// Matrices that take turns: 350 MB, more than caches hold, as are the experts that a token reads.
const MATRICES: usize = 64;
/// Values that a thread converts at a time, as the op does.
const PART: usize = 1 << 16;
const TURNS: usize = 12;

struct Data {
    values: Vec<i8>,
    scales: Vec<f32>,
    half: Vec<f16>,
    /// Half as many bytes again as the values have, twice.
    from: Vec<u8>,
    to: Vec<u8>,
}

fn dequantize(data: &mut Data) {
    let (values, scales) = (&data.values, &data.scales);
    data.half.par_chunks_mut(PART).enumerate().for_each(|(index, part)| {
        let first = index * PART;
        int8_to_f16(&values[first..first + part.len()], scales, COLUMNS, first, part);
    });
}

/// Copies as many parts as [`dequantize`] makes, of as many bytes each.
fn copy(data: &mut Data) {
    let from = &data.from;
    data.to.par_chunks_mut(PART * 3 / 2).enumerate().for_each(|(index, part)| {
        let first = index * PART * 3 / 2;
        part.copy_from_slice(&from[first..first + part.len()]);
    });
}

fn time(data: &mut [Data], run: impl Fn(&mut Data)) -> Duration {
    let start = Instant::now();
    data.iter_mut().for_each(run);
    start.elapsed() / data.len() as u32
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count = ROWS * COLUMNS;
    let mut random = SplitMix64::seed_from_u64(3);
    let mut data: Vec<Data> = (0..MATRICES)
        .map(|_| Data {
            values: (0..count).map(|_| random.next_u64() as i8).collect(),
            scales: (0..ROWS).map(|_| (random.next_u64() % 1000 + 1) as f32 * 1e-5).collect(),
            half: vec![f16::ZERO; count],
            from: (0..count * 3 / 2).map(|_| random.next_u64() as u8).collect(),
            to: vec![0; count * 3 / 2],
        })
        .collect();
    let bytes = (count * 3) as f64;
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let (mut kernel, mut plain) = (Duration::MAX, Duration::MAX);
        pool.install(|| {
            for _ in 0..TURNS {
                kernel = kernel.min(time(&mut data, dequantize));
                plain = plain.min(time(&mut data, copy));
            }
        });
        let rate = |time: Duration| bytes / time.as_secs_f64() / 1e9;
        println!(
            "{ROWS} x {COLUMNS}, {threads} threads: int8 to f16 {:.2} GB/s, copy {:.2} GB/s, \
             ratio {:.2}",
            rate(kernel),
            rate(plain),
            rate(kernel) / rate(plain)
        );
    }
    Ok(())
}
