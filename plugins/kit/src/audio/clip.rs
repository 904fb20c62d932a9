//! Checked samples, and long clips in chunks.

use std::ops::Range;

use qhx_op::{Error, Result, Segment};

/// Samples lie between −1 and 1. A file may overshoot; this much is another scale.
const LOUDEST: f32 = 256.0;

/// Mono samples, at least one, all of them numbers.
#[derive(Clone, Copy)]
pub struct Clip<'a> {
    samples: &'a [f32],
}

impl std::fmt::Debug for Clip<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clip").field("samples", &self.samples.len()).finish()
    }
}

impl<'a> Clip<'a> {
    /// A clip of samples, `rate` of them a second.
    ///
    /// # Errors
    /// When there are no samples, when they do not have `expected` samples a second, or when one is NaN, infinite, or
    /// far from the range from −1 to 1.
    pub fn new(samples: &'a [f32], rate: u32, expected: u32) -> Result<Self> {
        if rate != expected {
            return Err(Error::prompt(format!(
                "audio of {rate} samples a second, expected {expected}; resample it first"
            )));
        }
        if samples.is_empty() {
            return Err(Error::prompt("audio of 0 samples, expected at least one"));
        }
        let sound = |sample: &f32| (-LOUDEST..=LOUDEST).contains(sample);
        if let Some(index) = samples.iter().position(|sample| !sound(sample)) {
            return Err(Error::prompt(format!(
                "sample {index} of {} is {}, expected numbers between −1 and 1; the file is damaged, \
                 or its samples were not scaled",
                samples.len(),
                samples[index]
            )));
        }
        Ok(Self { samples })
    }

    /// The clip of a segment.
    ///
    /// # Errors
    /// When the segment is none, or is malformed.
    pub fn of_segment(segment: &Segment<'a>, expected: u32) -> Result<Self> {
        match *segment {
            Segment::Audio { samples, rate } => Self::new(samples, rate, expected),
            _ => Err(Error::prompt("a segment is not audio, but audio was expected")),
        }
    }

    /// The samples.
    pub fn samples(&self) -> &'a [f32] {
        self.samples
    }

    /// Part of the clip, such as one of [`pieces`]; `None` when it has no such part, or an empty one.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        let samples = self.samples.get(range).filter(|samples| !samples.is_empty())?;
        Some(Self { samples })
    }
}

/// Splits `len` samples into chunks of `piece`, the last one shorter, each of which begins `overlap`
/// samples before the one before it ends. No chunk lies within the overlap alone.
///
/// # Errors
/// Unless `overlap` is less than `piece`.
pub fn pieces(
    len: usize,
    piece: usize,
    overlap: usize,
) -> Result<impl ExactSizeIterator<Item = Range<usize>> + Clone> {
    let Some(step) = piece.checked_sub(overlap).filter(|&step| step > 0) else {
        return Err(Error::manifest(format!(
            "pieces of {piece} samples that share {overlap}: expected fewer shared ones"
        )));
    };
    let count = match len {
        0 => 0,
        _ => len.saturating_sub(piece).div_ceil(step) + 1,
    };
    Ok((0..count).map(move |index| {
        let start = index * step;
        start..start.saturating_add(piece).min(len)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_that_are_no_audio_are_refused() {
        for (bad, part) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf"), (-30_000.0, "-30000")] {
            let error = Clip::new(&[0.0, 0.5, bad], 16_000, 16_000).unwrap_err();
            assert!(error.message().contains("sample 2 of 3"), "{error}");
            assert!(error.message().contains(part), "{error}");
        }
        let error = Clip::new(&[0.0], 8_000, 16_000).unwrap_err();
        assert!(error.message().contains("8000") && error.message().contains("16000"), "{error}");
        assert!(Clip::new(&[], 16_000, 16_000).unwrap_err().message().contains("0 samples"));
        assert!(Clip::of_segment(&Segment::Tokens(&[1]), 16_000).is_err());
        let clip = Segment::Audio { samples: &[1.5, -1.0], rate: 16_000 };
        let clip = Clip::of_segment(&clip, 16_000).unwrap();
        assert_eq!(clip.part(1..2).unwrap().samples(), [-1.0]);
        assert!(clip.part(1..3).is_none() && clip.part(1..1).is_none());
    }

    #[test]
    fn chunks_overlap_and_cover_the_clip() {
        let cut = |len, piece, overlap| -> Vec<_> {
            pieces(len, piece, overlap).unwrap().map(|piece| (piece.start, piece.end)).collect()
        };
        assert_eq!(cut(10, 10, 3), [(0, 10)]);
        assert_eq!(cut(11, 10, 3), [(0, 10), (7, 11)]);
        assert_eq!(cut(17, 10, 3), [(0, 10), (7, 17)]);
        assert_eq!(cut(18, 10, 3), [(0, 10), (7, 17), (14, 18)]);
        assert_eq!(cut(4, 10, 0), [(0, 4)]);
        assert_eq!(cut(0, 10, 0), []);
        assert_eq!(pieces(usize::MAX, usize::MAX, usize::MAX - 1).unwrap().len(), 1);
        for (piece, overlap) in [(0, 0), (3, 3), (3, 4)] {
            assert!(pieces(9, piece, overlap).is_err(), "{piece}, {overlap}");
        }
    }
}
