//! Tests of weights.

use super::*;
use crate::quantize::Bits;

/// A matrix of 300,000 values, so that it is read in several blocks, with some replaced.
#[derive(Debug)]
struct Chosen(Vec<(usize, f32)>);

const COLS: usize = 100;

impl RowSource for Chosen {
    fn name(&self) -> &str {
        "layers.0.chosen.weight"
    }

    fn shape(&self) -> [usize; 2] {
        [3000, COLS]
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        out.fill(0.25);
        let begin = first * COLS;
        for (index, value) in &self.0 {
            if let Some(out) = index.checked_sub(begin).and_then(|i| out.get_mut(i)) {
                *out = *value;
            }
        }
        Ok(())
    }
}

/// Every way to read a weight.
fn errors(values: &[(usize, f32)]) -> [Option<Error>; 6] {
    let source: Arc<dyn RowSource> = Arc::new(Chosen(values.to_vec()));
    let weight = Weight::new(Arc::clone(&source), Storage::Float);
    [
        weight.to_f16().err(),
        weight.to_f32().err(),
        weight.to_int8().err(),
        weight.to_blocks(QuantizedForm::symmetric(Bits::Four, 20)).err(),
        stream(&*source, |_| Ok(())).err(),
        fits_f16(&*source).err(),
    ]
}

#[test]
fn values_that_are_not_numbers_are_named_with_their_number() {
    for (value, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")] {
        for error in errors(&[(299_999, f32::NAN), (170_001, value), (250_000, f32::INFINITY)]) {
            let error = error.expect("a refusal");
            assert_eq!(error.kind(), ErrorKind::Artifact);
            assert_eq!(
                error.message(),
                format!(
                    "tensor layers.0.chosen.weight: element 170001 is {word}; 3 of 300000 values are \
                     NaN or infinite"
                )
            );
        }
    }
    assert!(errors(&[(7, 65_519.0), (8, -1e-30)]).iter().all(Option::is_none));
}

#[test]
fn values_beyond_f16_are_named_with_their_magnitude() {
    let [half, wide, int8, blocks, streamed, fits] =
        errors(&[(200_000, -70_000.0), (200_005, 81_000.0)]);
    let error = half.expect("a refusal");
    assert_eq!(
        error.message(),
        "tensor layers.0.chosen.weight: element 200000 is -70000, and f16 holds at most 65504; 2 of \
         300000 values are too large, the largest magnitude is 81000"
    );
    assert!(error.hint_text().is_some_and(|hint| hint.contains("--cpu-only")), "{error}");
    // Other forms hold them.
    assert!([wide, int8, blocks, streamed, fits].iter().all(Option::is_none));
}

/// Spoils rows that were read.
type Damage = fn(&mut QuantizedMut<'_>);

/// 3000 rows of 64 quantized values, and what a damaged checkpoint has at some row.
#[derive(Debug)]
struct Stored {
    form: QuantizedForm,
    damage: Option<(usize, Damage)>,
}

impl RowSource for Stored {
    fn name(&self) -> &str {
        "layers.0.stored.qweight"
    }

    fn shape(&self) -> [usize; 2] {
        [3000, 64]
    }

    fn stored_dtype(&self) -> DType {
        DType::F16
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        dequantize_blocks(self, first, out)
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        Some(self.form)
    }

    fn read_blocks(&self, first: usize, mut out: QuantizedMut<'_>) -> Result<()> {
        for (index, q) in out.values.iter_mut().enumerate() {
            *q = ((first * 64 + index) * 5 % 16) as i8 - 8;
        }
        for (index, scale) in out.scales.iter_mut().enumerate() {
            *scale = if (first + index).is_multiple_of(2) { 0.25 } else { -0.125 };
        }
        out.offsets.fill(1.5);
        if let Some((row, damage)) = self.damage
            && (first..first + out.values.len() / 64).contains(&row)
        {
            damage(&mut out);
        }
        Ok(())
    }
}

#[test]
fn quantized_weights_of_a_checkpoint_stay_as_they_are() {
    for offsets in [false, true] {
        let form = QuantizedForm { bits: Bits::Four, block: 32, offsets };
        let source: Arc<dyn RowSource> = Arc::new(Stored { form, damage: None });
        let weight = |source| Weight::new(source, Storage::Float);
        let found = weight(Arc::clone(&source)).to_blocks(form).unwrap();
        let mut expected = Quantized::zeroed(form, 3000 * 64);
        source.read_blocks(0, expected.as_mut()).unwrap();
        assert_eq!(found, expected);
        let mut wide = vec![0f32; 3000 * 64];
        expected.as_ref().dequantize(&mut wide);
        assert_eq!(weight(Arc::clone(&source)).to_f32().unwrap(), wide);
        // Rows of it, four times as large: the quantized values are the same.
        let rows = scaled(row_range(&source, 2000..2600), 4.0);
        let part = weight(rows).to_blocks(form).unwrap();
        assert_eq!(part.values, expected.values[2000 * 64..2600 * 64]);
        let scales: Vec<f32> = expected.scales[4000..5200].iter().map(|s| s * 4.0).collect();
        assert_eq!(part.scales, scales);
        assert_eq!(part.offsets.len(), if offsets { 1200 } else { 0 });
        // In another form its values are quantized again.
        let other = QuantizedForm::symmetric(Bits::Eight, 64);
        let again = weight(source).to_blocks(other).unwrap();
        assert_eq!((again.scales.len(), again.offsets.len()), (3000, 0));
    }
}

#[test]
fn damaged_values_are_named_with_their_tensor() {
    let form = QuantizedForm { bits: Bits::Four, block: 32, offsets: true };
    let cases: [(Damage, &str); 3] = [
        (|out| out.values[5] = 8, "an integer is 8, expected -8 to 7"),
        (|out| out.scales[1] = f32::NAN, "a scale is NaN, expected a finite number"),
        (|out| out.offsets[0] = f32::INFINITY, "an offset is inf, expected a finite number"),
    ];
    for (damage, expected) in cases {
        let source = Arc::new(Stored { form, damage: Some((2100, damage)) });
        let weight = Weight::new(source, Storage::Float);
        let error = weight.to_blocks(form).unwrap_err();
        assert!(error.message().ends_with(expected), "{error}");
        assert!(error.message().starts_with("tensor layers.0.stored.qweight: from row 2048"));
        assert_eq!(error.kind(), ErrorKind::Artifact);
    }
    let source = Arc::new(Stored { form, damage: None });
    let malformed = QuantizedForm { block: 48, ..form };
    let error = Weight::new(source, Storage::Float).to_blocks(malformed).unwrap_err();
    assert!(error.message().contains("blocks of 48 in rows of 64 inputs"), "{error}");
}
