//! Distance of computed numbers from the expected ones.
//!
//! A largest difference that is folded from 0 with `f32::max` skips NaN, so that an array of nothing but NaN would
//! differ by 0 from any other. Here numbers have to be finite before their distance means anything.

use crate::{Error, ErrorKind, Result, bail, error};

/// The distance of an array from the one that is expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    /// Largest absolute difference of two elements.
    pub largest: f64,
    /// The same as a part of the largest absolute value that is expected; infinite where only zeros are expected and
    /// something else was found.
    pub relative: f64,
    /// Cosine of the angle between the arrays as vectors: 1 where both are zero, 0 where one of them is.
    pub cosine: f64,
}

impl Distance {
    /// The distance of `found` from `expected`, in double precision.
    ///
    /// # Errors
    ///
    /// The arrays are empty or of different lengths, or an element of either is not finite. The message names the
    /// element.
    pub fn of<T: Copy + Into<f64>>(found: &[T], expected: &[T]) -> Result<Self> {
        let wrong = |message: String| Err(Error::new(ErrorKind::Graph, message));
        if found.len() != expected.len() {
            return wrong(format!("{} numbers, expected {}", found.len(), expected.len()));
        }
        if found.is_empty() {
            return wrong("no numbers to compare".to_owned());
        }
        let peak = |values: &[T], which: &str| {
            values.iter().enumerate().try_fold(0f64, |peak, (index, &value)| {
                let value: f64 = value.into();
                if value.is_finite() {
                    return Ok(peak.max(value.abs()));
                }
                Err(error!(Graph, "{which} {index} of {} is {value}", values.len())
                    .hint("only finite numbers can be compared"))
            })
        };
        let (found_peak, peak) = (peak(found, "number")?, peak(expected, "expected number")?);
        let pairs = || found.iter().zip(expected).map(|(&a, &b)| (a.into(), b.into()));
        let largest = pairs().fold(0f64, |max, (a, b): (f64, f64)| max.max((a - b).abs()));
        let relative = if largest == 0.0 { 0.0 } else { largest / peak };
        Ok(Self { largest, relative, cosine: cosine(pairs, found_peak, peak) })
    }

    /// The smallest cosine of a row of `width` elements with the one that is expected, and the number of that row.
    ///
    /// # Errors
    ///
    /// Errors of [`Distance::of`], or if the elements do not make whole rows.
    pub fn least_row(found: &[f32], expected: &[f32], width: usize) -> Result<(f64, usize)> {
        if width == 0 || !expected.len().is_multiple_of(width) || found.len() != expected.len() {
            let (found, expected) = (found.len(), expected.len());
            bail!(Graph, "{found} numbers, expected {expected} in rows of {width}");
        }
        let rows = found.chunks_exact(width).zip(expected.chunks_exact(width)).enumerate();
        let mut min = None;
        for (row, (found, expected)) in rows {
            let Self { cosine, .. } =
                Self::of(found, expected).map_err(|e| e.context(format_args!("row {row}")))?;
            if min.is_none_or(|(other, _)| cosine < other) {
                min = Some((cosine, row));
            }
        }
        min.ok_or_else(|| error!(Graph, "no numbers to compare"))
    }

    /// The larger differences and the smaller cosine of two.
    #[must_use]
    pub fn worse(self, other: Self) -> Self {
        Self {
            largest: self.largest.max(other.largest),
            relative: self.relative.max(other.relative),
            cosine: self.cosine.min(other.cosine),
        }
    }
}

/// The cosine of finite vectors with these largest absolute values. Each is divided by its own, so that no square
/// overflows or vanishes.
fn cosine<I: Iterator<Item = (f64, f64)>>(pairs: impl Fn() -> I, left: f64, right: f64) -> f64 {
    if left == 0.0 || right == 0.0 {
        return if left == right { 1.0 } else { 0.0 };
    }
    let (mut dot, mut a_square, mut b_square) = (0f64, 0f64, 0f64);
    for (a, b) in pairs() {
        let (a, b) = (a / left, b / right);
        dot += a * b;
        a_square += a * a;
        b_square += b * b;
    }
    dot / (a_square.sqrt() * b_square.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distance_has_a_size_and_a_direction() {
        let same = Distance::of(&[1f32, -2.0], &[1.0, -2.0]).unwrap();
        assert_eq!((same.largest, same.relative), (0.0, 0.0));
        assert!((same.cosine - 1.0).abs() < 1e-12);
        let twice = Distance::of(&[2f32, -4.0], &[1.0, -2.0]).unwrap();
        assert_eq!((twice.largest, twice.relative), (2.0, 1.0));
        assert!((twice.cosine - 1.0).abs() < 1e-12);
        let across = Distance::of(&[0f64, 3.0], &[4.0, 0.0]).unwrap();
        assert_eq!(across, Distance { largest: 4.0, relative: 1.0, cosine: 0.0 });
        assert_eq!(Distance::of(&[-1f32], &[1.0]).unwrap().cosine, -1.0);
        let worst = twice.worse(across);
        assert_eq!((worst.largest, worst.cosine), (4.0, 0.0));
    }

    #[test]
    fn zeros_and_the_largest_numbers_have_a_distance() {
        let of = |a: f64, b: f64| Distance::of(&[a], &[b]).unwrap();
        assert_eq!(of(0.0, 0.0), Distance { largest: 0.0, relative: 0.0, cosine: 1.0 });
        assert_eq!(of(0.0, 2.0), Distance { largest: 2.0, relative: 1.0, cosine: 0.0 });
        assert_eq!(of(2.0, 0.0).relative, f64::INFINITY);
        assert_eq!(of(f64::MAX, f64::MAX).cosine, 1.0);
        assert_eq!(of(f64::MIN_POSITIVE, f64::MIN_POSITIVE).cosine, 1.0);
    }

    #[test]
    fn what_is_not_finite_has_no_distance_even_from_itself() {
        let says = |found: &[f32], expected: &[f32], words: &str| {
            let error = Distance::of(found, expected).unwrap_err().to_string();
            assert!(error.contains(words), "{error:?} does not say {words:?}");
        };
        says(&[f32::NAN; 3], &[f32::NAN; 3], "number 0 of 3 is NaN");
        says(&[1.0, f32::INFINITY], &[1.0, f32::INFINITY], "number 1 of 2 is inf");
        says(&[1.0, 2.0], &[1.0, f32::NAN], "expected number 1 of 2 is NaN");
        says(&[1.0], &[1.0, 2.0], "1 numbers, expected 2");
        says(&[], &[], "no numbers");
    }
}
