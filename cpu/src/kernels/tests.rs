//! Tests of matmuls of f32 rows, and weights of every form for the tests of others.

use qhx_types::quantized::unpack_nibbles;

use super::*;

/// Numbers from -1 to 1 that follow from where they are.
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Each form of weights, and what they are as f64.
pub(crate) enum Stored {
    F32(Vec<f32>),
    F16(Vec<u16>),
    I8(Vec<i8>, Vec<f32>),
    I8Blocks(Vec<i8>, Factors, Option<Factors>),
    I4(Vec<i32>, Factors, Option<Factors>),
}

/// Scales of blocks, or their offsets.
#[derive(Clone)]
pub(crate) enum Factors {
    F32(Vec<f32>),
    F16(Vec<u16>),
    Multiples(Vec<u16>, Vec<u8>, bool),
}

impl Factors {
    fn both(count: usize, seed: u32) -> [Self; 2] {
        let all = numbers(count, seed);
        let halves = all.iter().map(|scale| f16::from_f32(*scale).to_bits()).collect();
        [Self::F32(all), Self::F16(halves)]
    }

    /// Scales and minima of `count` blocks.
    fn super_blocks(count: usize) -> [Self; 2] {
        let units = numbers(count / SUPER * 2, 31);
        let units: Vec<_> = units.iter().map(|unit| f16::from_f32(*unit).to_bits()).collect();
        let multiples = numbers(count * 2, 37).into_iter().map(|n| (n.abs() * 63.0) as u8);
        let multiples: Vec<_> = multiples.collect();
        [false, true].map(|minima| Self::Multiples(units.clone(), multiples.clone(), minima))
    }

    fn scales(&self) -> Scales<'_> {
        match self {
            Self::F32(all) => Scales::F32(all),
            Self::F16(all) => Scales::F16(all),
            Self::Multiples(units, multiples, minima) => {
                Scales::Multiples(Multiples { units, multiples, minima: *minima })
            }
        }
    }

    fn value(&self, at: usize) -> f64 {
        f64::from(match self {
            Self::F32(all) => all[at],
            Self::F16(all) => f16::from_bits(all[at]).to_f32(),
            Self::Multiples(..) => self.scales().get(at),
        })
    }
}

impl Stored {
    pub(crate) fn all(rows: usize, columns: usize) -> Vec<Self> {
        let wide = numbers(rows * columns, 7);
        let bytes: Vec<i8> = wide.iter().map(|w| (w * 127.0).round() as i8).collect();
        let mut all = vec![
            Self::F16(wide.iter().map(|w| f16::from_f32(*w).to_bits()).collect()),
            Self::I8(bytes.clone(), numbers(rows, 11)),
            Self::F32(wide),
        ];
        if columns.is_multiple_of(BLOCK) {
            let words = numbers(rows * columns / PACKED, 13);
            let words: Vec<_> = words.iter().map(|w| (w * i32::MAX as f32) as i32).collect();
            let [f32s, f16s] = Factors::both(rows * columns / BLOCK, 23);
            let offsets = Factors::both(rows * columns / BLOCK, 29).map(Some);
            let [in_f32s, in_f16s] = &offsets;
            for (factors, offsets) in [
                (&f32s, &None),
                (&f16s, &None),
                (&f32s, in_f32s),
                (&f16s, in_f16s),
                (&f16s, in_f32s),
            ] {
                all.push(Self::I8Blocks(bytes.clone(), factors.clone(), offsets.clone()));
                all.push(Self::I4(words.clone(), factors.clone(), offsets.clone()));
            }
            if columns.is_multiple_of(SUPER * BLOCK) {
                let [scales, minima] = Factors::super_blocks(rows * columns / BLOCK);
                all.push(Self::I4(words, scales, Some(minima)));
            }
        }
        all
    }

    pub(crate) fn rows(&self) -> Rows<'_> {
        match self {
            Self::F32(w) => Rows::F32(w),
            Self::F16(w) => Rows::F16(w),
            Self::I8(w, scales) => Rows::I8(w, Scales::F32(scales)),
            Self::I8Blocks(w, factors, _) => Rows::I8Blocks(w, factors.scales()),
            Self::I4(w, factors, _) => Rows::I4(w, factors.scales()),
        }
    }

    pub(crate) fn offsets(&self) -> Option<Scales<'_>> {
        match self {
            Self::I8Blocks(.., offsets) | Self::I4(.., offsets) => {
                offsets.as_ref().map(Factors::scales)
            }
            Self::F32(_) | Self::F16(_) | Self::I8(..) => None,
        }
    }

    pub(crate) fn value(&self, columns: usize, at: usize) -> f64 {
        let shifted = |integer: i8, factors: &Factors, offsets: &Option<Factors>| {
            let offset = offsets.as_ref().map_or(0.0, |offsets| offsets.value(at / BLOCK));
            let (integer, factor) = (f64::from(integer), factors.value(at / BLOCK));
            match offsets {
                Some(Factors::Multiples(..)) => (integer + 8.0) * factor + offset,
                _ => (integer + offset) * factor,
            }
        };
        match self {
            Self::F32(w) => f64::from(w[at]),
            Self::F16(w) => f64::from(f16::from_bits(w[at]).to_f32()),
            Self::I8(w, scales) => f64::from(w[at]) * f64::from(scales[at / columns]),
            Self::I8Blocks(w, factors, offsets) => shifted(w[at], factors, offsets),
            Self::I4(w, factors, offsets) => {
                let mut integers = [0; PACKED];
                unpack_nibbles(&w[at / PACKED].to_le_bytes(), &mut integers);
                shifted(integers[at % PACKED], factors, offsets)
            }
        }
    }
}

fn multiply(stored: &Stored, columns: usize, x: &[f32], rows: usize) -> Vec<f32> {
    let bias = numbers(rows, 19);
    let mut out = vec![f32::NAN; x.len() / columns * rows];
    let out_rows = out.chunks_exact_mut(rows).collect();
    let weights = stored.rows();
    let arranged = &Arrange { weights, columns, x, team: &Team::Alone }.dispatch();
    Task { weights, columns, x: arranged, out: out_rows, bias: Some(&bias) }.dispatch();
    if let Some(offsets) = stored.offsets() {
        let sums: Vec<f32> = x.chunks_exact(BLOCK).map(|block| block.iter().sum()).collect();
        let out = out.chunks_exact_mut(rows).collect();
        AddOffsets { weights, offsets, sums: &sums, out }.dispatch();
    }
    out
}

#[test]
fn every_form_at_odd_shapes() {
    // Neither rows nor columns are multiples of what is computed at a time, nor of vectors.
    for columns in [1, 7, 32, 33, 96, 160, 512, 1056, 2053] {
        for rows in [1, 3, 6, 13] {
            for stored in Stored::all(rows, columns) {
                for count in [1, 2, 3, 4, 5, 9, 37] {
                    let x = numbers(count * columns, 5);
                    let found = multiply(&stored, columns, &x, rows);
                    let bias = numbers(rows, 19);
                    for (at, y) in found.iter().enumerate() {
                        let (m, n) = (at / rows, at % rows);
                        let terms = (0..columns).map(|k| {
                            f64::from(x[m * columns + k]) * stored.value(columns, n * columns + k)
                        });
                        let (sum, size) =
                            terms.fold((0.0, 1.0), |(sum, size), t| (sum + t, size + t.abs()));
                        let expected = sum + f64::from(bias[n]);
                        let off = (f64::from(*y) - expected).abs();
                        assert!(
                            off <= 1e-6 * size,
                            "{count} × {columns} × {rows}: {y}, not {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn infinity_and_nan_reach_the_results_that_they_belong_to() {
    let (columns, rows) = (96, 7);
    for stored in Stored::all(rows, columns) {
        for (value, at) in [(f32::INFINITY, 0), (f32::NAN, 95), (f32::INFINITY, 50)] {
            for count in [1, 3, 11] {
                let mut x = numbers(count * columns, 5);
                x[(count - 1) * columns + at] = value;
                let found = multiply(&stored, columns, &x, rows);
                let (before, last) = found.split_at((count - 1) * rows);
                assert!(before.iter().all(|y| y.is_finite()));
                for (n, y) in last.iter().enumerate() {
                    let weight = stored.value(columns, n * columns + at);
                    let expected = f64::from(value) * weight;
                    // The product with an offset is a term of its own, which may be the other infinity.
                    let shifted = stored.offsets().is_some() && !y.is_finite();
                    let same = y.is_nan() && expected.is_nan() || f64::from(*y) == expected;
                    assert!(same || shifted, "{value} × {weight}: {y}");
                }
            }
        }
    }
}

#[test]
fn halves_keep_their_bits() {
    let bits = [0u16, 0x3c00, 0x7c00, 0x8001, 0xffff];
    assert!(halves(&bits).iter().zip(bits).all(|(half, bits)| half.to_bits() == bits));
}
