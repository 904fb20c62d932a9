//! Log-mel features of a clip, frame by frame.

use serde::Deserialize;

use super::{Clip, Edge, MelFilters, MelOptions, Spectrum, Stft, Window};
use qhx_op::{Error, Result};

/// The logarithm of a number that may be 0.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Log {
    /// `ln(x + a)`.
    LnAdd(f32),
    /// `ln(max(x, a))`.
    LnMax(f32),
    /// `log10(max(x, a))`.
    Log10Max(f32),
}

impl Log {
    /// The logarithm of a number from 0 on.
    pub fn of(self, x: f32) -> f32 {
        match self {
            Self::LnAdd(a) => (x + a).ln(),
            Self::LnMax(a) => x.max(a).ln(),
            Self::Log10Max(a) => x.max(a).log10(),
        }
    }

    fn check(self) -> Result<()> {
        let (Self::LnAdd(a) | Self::LnMax(a) | Self::Log10Max(a)) = self;
        // Below the smallest normal number the logarithm of silence would depend on the machine.
        if a.is_finite() && a >= f32::MIN_POSITIVE {
            return Ok(());
        }
        Err(Error::manifest(format!(
            "{a} in a logarithm of mels: expected a small positive number"
        )))
    }
}

/// A front end: what a clip becomes before it enters an audio encoder.
///
/// Frame i begins at sample `i · hop − left`, and is made when `span` samples follow from there on.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct FrontEnd {
    /// Samples a second.
    pub rate: u32,
    /// Samples of a frame.
    pub frame: usize,
    /// Samples from the start of one frame to that of the next.
    pub hop: usize,
    /// Length of the Fourier transform; zeros follow the frame.
    pub fft: usize,
    /// Window that a frame is multiplied with.
    pub window: Window,
    /// Samples that the first frame begins before the clip.
    #[serde(default)]
    pub left: usize,
    /// Samples that must follow from the start of a frame: those of the frame, or more where a class
    /// asks for the next one, or fewer where it lets the last frame reach beyond the clip.
    pub span: usize,
    /// Samples assumed outside of the clip.
    #[serde(default)]
    pub edge: Edge,
    /// Magnitudes or their squares.
    pub spectrum: Spectrum,
    /// The filters.
    pub filters: MelOptions,
    /// The logarithm that is taken of them.
    pub log: Log,
}

/// Computes log-mel features. Planned once; a clip allocates nothing.
#[derive(Debug)]
pub struct LogMel {
    front: FrontEnd,
    stft: Stft,
    filters: MelFilters,
    spectrum: Vec<f32>,
}

impl LogMel {
    /// Plans the transform and makes the filters.
    ///
    /// # Errors
    /// When options do not fit each other; the message names them.
    pub fn new(front: FrontEnd) -> Result<Self> {
        let FrontEnd { frame, hop, fft, left, span, .. } = front;
        let stft = Stft::new(frame, fft, front.window)?;
        if hop == 0 || left > fft || span <= left || span > 2 * fft {
            return Err(Error::manifest(format!(
                "frames {hop} samples apart that begin {left} before the clip and need {span}: \
                 expected a positive distance, at most {fft} before, and more than those needed"
            )));
        }
        front.log.check()?;
        let filters = MelFilters::new(&front.filters, front.rate, stft.bins())?;
        Ok(Self { spectrum: vec![0.0; stft.bins()], front, stft, filters })
    }

    /// Settings of the front end.
    pub fn front_end(&self) -> &FrontEnd {
        &self.front
    }

    /// Numbers of a frame.
    pub fn mels(&self) -> usize {
        self.filters.mels()
    }

    /// Frames of a clip of `samples`. Give the clip's own length for the frames that hold audio, and the
    /// length it is padded to for all that a class makes.
    pub fn frames(&self, samples: usize) -> usize {
        let FrontEnd { hop, left, span, .. } = self.front;
        match samples.checked_sub(span - left) {
            Some(more) => more / hop + 1,
            None => 0,
        }
    }

    /// Writes the features of the clip's frames into the first rows of `target`, [`LogMel::mels`]
    /// numbers each, and 0 into the rows after them. Returns the number of frames.
    ///
    /// # Errors
    /// When `target` is not whole rows, or has fewer than the clip has frames.
    pub fn write(&mut self, clip: Clip<'_>, target: &mut [f32]) -> Result<usize> {
        let (mels, frames) = (self.mels(), self.frames(clip.samples().len()));
        let fits = frames.checked_mul(mels).is_some_and(|len| len <= target.len());
        if !fits || !target.len().is_multiple_of(mels) {
            return Err(Error::prompt(format!(
                "audio of {} samples has {frames} frames, and there is room for {} numbers: \
                 expected whole rows of {mels}, and one for each frame; cut the audio into shorter \
                 pieces",
                clip.samples().len(),
                target.len()
            )));
        }
        let (made, rest) = target.split_at_mut(frames * mels);
        let FrontEnd { hop, left, edge, spectrum, log, .. } = self.front;
        for (index, row) in made.chunks_exact_mut(mels).enumerate() {
            // A clip has at most isize::MAX bytes, and `left` is small.
            let start = (index * hop) as isize - left as isize;
            self.stft.write(clip.samples(), start, edge, spectrum, &mut self.spectrum)?;
            self.filters.write(&self.spectrum, row);
            row.iter_mut().for_each(|value| *value = log.of(*value));
        }
        rest.fill(0.0);
        Ok(frames)
    }
}

/// Raises what lies more than `range` below the largest value to that line: the dynamic range of
/// Whisper's features is 8.
pub fn limit_range(values: &mut [f32], range: f32) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|value| *value = value.max(largest - range));
}
