//! The short-time Fourier transform: windowed frames and their spectra.

use std::f64::consts::TAU;
use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};
use serde::Deserialize;

use qhx_op::{Error, ErrorCode, Result};

/// A transform is never longer; a manifest that declares more would only cost memory.
const MAX_LENGTH: usize = 1 << 16;

/// Window that a frame is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Window {
    /// Hann, `½ − ½·cos(2πn / N)`: as if the frame were repeated.
    PeriodicHann,
    /// Hann, `½ − ½·cos(2πn / (N − 1))`: alike from both ends.
    SymmetricHann,
}

impl Window {
    /// The window for a frame of `len` samples, computed in f64.
    pub fn values(self, len: usize) -> Vec<f32> {
        let period = match self {
            Self::PeriodicHann => len,
            Self::SymmetricHann => len.saturating_sub(1).max(1),
        };
        let value = |n: usize| 0.5 - 0.5 * (TAU * n as f64 / period as f64).cos();
        (0..len).map(|n| value(n) as f32).collect()
    }
}

/// Real values taken from a complex spectrum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Spectrum {
    /// The absolute values.
    Magnitude,
    /// Their squares.
    Power,
}

/// Samples assumed before the first sample and after the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Edge {
    /// Silence.
    #[default]
    Zeros,
    /// The samples in reverse, without the one at the edge (`reflect` of numpy).
    Reflect,
}

impl Edge {
    /// The sample at `index`, which may lie outside.
    fn sample(self, samples: &[f32], index: isize) -> f32 {
        let last = samples.len() as isize - 1;
        let inside = match self {
            Self::Zeros => index,
            _ if last <= 0 => 0,
            Self::Reflect => {
                let turned = index.rem_euclid(2 * last);
                turned.min(2 * last - turned)
            }
        };
        usize::try_from(inside).ok().and_then(|i| samples.get(i)).copied().unwrap_or(0.0)
    }
}

/// Spectra of windowed frames. Planned once; a frame allocates nothing.
///
/// The transform is in f64. In f32 its rounding beside a loud tone, where the spectrum is nearly 0,
/// moves logarithms in the third decimal.
pub struct Stft {
    window: Vec<f32>,
    plan: Arc<dyn RealToComplex<f64>>,
    frame: Vec<f64>,
    bins: Vec<Complex<f64>>,
    scratch: Vec<Complex<f64>>,
}

impl std::fmt::Debug for Stft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stft")
            .field("frame", &self.window.len())
            .field("fft", &self.frame.len())
            .finish()
    }
}

impl Stft {
    /// Frames of `frame` samples, followed by zeros up to the `fft` of the transform.
    ///
    /// # Errors
    /// When `frame` or `fft` is out of range.
    pub fn new(frame: usize, fft: usize, window: Window) -> Result<Self> {
        if frame == 0 || frame > fft || !(2..=MAX_LENGTH).contains(&fft) {
            return Err(Error::manifest(format!(
                "frames of {frame} samples in a Fourier transform of {fft}: expected a frame that \
                 fits, and a transform of 2 to {MAX_LENGTH}"
            )));
        }
        let plan = RealFftPlanner::new().plan_fft_forward(fft);
        Ok(Self {
            window: window.values(frame),
            frame: plan.make_input_vec(),
            bins: plan.make_output_vec(),
            scratch: plan.make_scratch_vec(),
            plan,
        })
    }

    /// Numbers of a spectrum: half the transform's length, and one.
    pub fn bins(&self) -> usize {
        self.bins.len()
    }

    /// Writes the spectrum of the frame that begins at sample `start`, which may lie before the first.
    ///
    /// # Errors
    /// When `target` has not [`Stft::bins`] places.
    pub fn write(
        &mut self,
        samples: &[f32],
        start: isize,
        edge: Edge,
        spectrum: Spectrum,
        target: &mut [f32],
    ) -> Result<()> {
        let (frame, rest) = self.frame.split_at_mut(self.window.len());
        let inside = usize::try_from(start).ok().and_then(|first| samples.get(first..));
        match inside.and_then(|samples| samples.get(..frame.len())) {
            Some(samples) => {
                for ((to, sample), window) in frame.iter_mut().zip(samples).zip(&self.window) {
                    *to = f64::from(*sample) * f64::from(*window);
                }
            }
            None => {
                for (index, (to, window)) in frame.iter_mut().zip(&self.window).enumerate() {
                    let at = start.saturating_add_unsigned(index);
                    *to = f64::from(edge.sample(samples, at)) * f64::from(*window);
                }
            }
        }
        rest.fill(0.0);
        let found = target.len();
        self.plan
            .process_with_scratch(&mut self.frame, &mut self.bins, &mut self.scratch)
            .map_err(|e| Error::new(ErrorCode::INTERNAL, format!("Fourier transform: {e}")))?;
        if found != self.bins.len() {
            return Err(Error::new(
                ErrorCode::INTERNAL,
                format!("room for {found} numbers of a spectrum, expected {}", self.bins.len()),
            ));
        }
        for (to, bin) in target.iter_mut().zip(&self.bins) {
            let power = bin.norm_sqr();
            *to = match spectrum {
                Spectrum::Magnitude => power.sqrt() as f32,
                Spectrum::Power => power as f32,
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_outside_are_silence_or_mirrored() {
        let samples = [1.0, 2.0, 3.0];
        let at = |edge: Edge| (-3..7).map(|i| edge.sample(&samples, i)).collect::<Vec<_>>();
        assert_eq!(at(Edge::Zeros), [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(at(Edge::Reflect), [2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0]);
        assert_eq!(Edge::Reflect.sample(&[5.0], -9), 5.0);
        assert_eq!(Edge::Reflect.sample(&[], 0), 0.0);
    }

    #[test]
    fn a_cosine_is_one_line_of_the_spectrum() {
        let (len, line) = (64usize, 5usize);
        let wave = |n: usize| (TAU * (n * line) as f64 / len as f64).cos() as f32;
        let samples: Vec<f32> = (0..len).map(wave).collect();
        let mut stft = Stft::new(len, len, Window::PeriodicHann).unwrap();
        let mut found = vec![f32::NAN; stft.bins()];
        for (spectrum, peak) in [(Spectrum::Magnitude, 16.0), (Spectrum::Power, 256.0)] {
            stft.write(&samples, 0, Edge::Zeros, spectrum, &mut found).unwrap();
            for (bin, value) in found.iter().enumerate() {
                // The window spreads a line to its two neighbours, with half the amplitude.
                let expected: f32 = match bin.abs_diff(line) {
                    0 => peak,
                    1 if spectrum == Spectrum::Magnitude => peak / 2.0,
                    1 => peak / 4.0,
                    _ => 0.0,
                };
                assert!((value - expected).abs() < 1e-4 * peak, "bin {bin}: {value}");
            }
        }
        assert!(stft.write(&samples, 0, Edge::Zeros, Spectrum::Power, &mut [0.0; 3]).is_err());
        for start in [isize::MIN, isize::MAX] {
            for edge in [Edge::Zeros, Edge::Reflect] {
                stft.write(&samples, start, edge, Spectrum::Power, &mut found).unwrap();
                assert!(found.iter().all(|value| value.is_finite()));
            }
        }
    }

    #[test]
    fn lengths_that_make_no_sense_are_refused() {
        for (frame, fft) in [(0, 8), (9, 8), (1, 1), (1, MAX_LENGTH + 1), (usize::MAX, usize::MAX)]
        {
            let error = Stft::new(frame, fft, Window::SymmetricHann).unwrap_err();
            assert!(error.message().contains(&fft.to_string()), "{error}");
        }
        assert_eq!(Window::SymmetricHann.values(1), [0.0]);
    }
}
