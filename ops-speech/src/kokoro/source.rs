//! The source of a voice, sines of F0 and its overtones, as a spectrum; and a spectrum as samples.
//!
//! `SineGen`, `SourceModuleHnNSF` and `TorchSTFT` of the package. It draws other noise for the source at each call;
//! here it is of a generator that depends on the place alone, so that a text sounds the same each time. The random
//! phases that the package also draws never reach its output: it reads the sines' frequencies in the middle of each
//! frame, and they are added to the first sample. Where a frame has no imaginary part but what rounding leaves of it,
//! as the mirrored first one, the package takes the angle of that: π or −π by chance. Here it is π.
//!
//! With `convolved` both transforms are those of `CustomSTFT`, with which the package exports models: convolutions with
//! the ends repeated, which neither double the bins of both halves nor divide by the sum of the windows.

use std::f64::consts::TAU;

use qhx_op::{Error, Host, Result};
use serde::Deserialize;

use super::host::Weights;
use crate::dense::normal;
use crate::ports::PLACE;

/// The logarithm of a magnitude is no larger: beyond, f32 overflows when magnitudes are added.
const MAX_LOG: f32 = 80.0;

/// Imaginary parts below this share of a frame's absolute sum are rounding, and none.
const ROUNDING: f32 = 1e-6;

/// The power that convolutions add to that of each bin.
const SMALLEST: f32 = 1e-14;

/// `params.speech.source` of the manifest.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct SourceParams {
    /// F0 and its overtones.
    sines: usize,
    /// Samples of a value of F0.
    samples: usize,
    fft: usize,
    hop: usize,
    /// Steps of zeros around the spectrum on either side, less one behind it.
    lead: usize,
    /// Amplitude of the sines.
    amplitude: f32,
    /// Deviation of the noise where there is a voice.
    noise: f32,
    /// F0 above which there is a voice, in Hz.
    voiced: f32,
    /// The transforms are convolutions.
    #[serde(default)]
    convolved: bool,
}

#[derive(Debug)]
pub(super) struct Source {
    params: SourceParams,
    rate: u32,
    /// A period of a cosine and of a sine, in `fft` values.
    waves: [Vec<f32>; 2],
    /// `torch.hann_window`.
    window: Vec<f32>,
    /// The sines of half a turn and its multiples as convolutions have them: the rounding of π.
    rounding: Vec<f32>,
}

impl Source {
    pub(super) fn new(params: SourceParams, rate: u32) -> Result<Self> {
        let SourceParams { sines, samples, fft, hop, lead, .. } = params;
        let sizes = [sines, samples, fft, hop, lead];
        let legal =
            sizes.iter().all(|n| (1..=1 << 14).contains(n)) && fft.is_multiple_of(2) && hop <= fft;
        if !legal || !samples.is_multiple_of(hop) || rate == 0 {
            return Err(Error::manifest(format!(
                "{}/source: {params:?} at {rate} Hz, expected an even fft, a hop of at most that, and samples that it \
                 divides",
                PLACE
            )));
        }
        let angle = |at: usize| TAU * at as f64 / fft as f64;
        let wave = |f: fn(f64) -> f64| (0..fft).map(|at| f(angle(at)) as f32).collect();
        let window = (0..fft).map(|at| (0.5 - 0.5 * angle(at).cos()) as f32).collect();
        let rounding = (0..fft).map(|at| angle(at * fft / 2).sin() as f32).collect();
        Ok(Self { params, rate, waves: [wave(f64::cos), wave(f64::sin)], window, rounding })
    }

    pub(super) fn sines(&self) -> usize {
        self.params.sines
    }

    /// Samples of a frame, which has two values of F0.
    pub(super) fn frame(&self) -> usize {
        2 * self.params.samples
    }

    /// Values of a step of the spectrum: magnitudes, and phases behind them.
    pub(super) fn bins(&self) -> usize {
        self.params.fft + 2
    }

    /// Steps of the spectrum of `frames` frames.
    pub(super) fn steps(&self, frames: usize) -> usize {
        frames * self.frame() / self.params.hop + 1
    }

    /// Steps with the zeros around them that a graph takes.
    pub(super) fn padded(&self, frames: usize) -> usize {
        self.steps(frames) - 1 + 2 * self.lead()
    }

    /// Zeros in front.
    pub(super) fn lead(&self) -> usize {
        self.params.lead
    }

    /// The spectrum `[bins, steps]` of the sines of F0, of two values a frame.
    pub(super) fn spectrum(
        &self,
        host: &Host,
        f0: &[f32],
        weights: &Weights,
        seed: u64,
    ) -> Result<Vec<f32>> {
        let (factors, shift) = weights.merge(host);
        let samples = self.merged(f0, factors, shift, seed);
        host.dump_values("source", &samples, &[samples.len()])?;
        Ok(self.transform(&samples))
    }

    /// Sines and noise as one signal.
    fn merged(&self, f0: &[f32], factors: &[f32], shift: f32, seed: u64) -> Vec<f32> {
        let SourceParams { sines, samples, amplitude, noise, voiced, .. } = self.params;
        // Turns of each sine up to the middle of each value of F0.
        let mut turns = vec![0.0; f0.len() * sines];
        let mut sums = vec![0.0; sines];
        for (f0, turns) in f0.iter().zip(turns.chunks_exact_mut(sines)) {
            for (at, (sum, turn)) in sums.iter_mut().zip(turns).enumerate() {
                *sum += (f64::from(*f0) * (at + 1) as f64 / f64::from(self.rate)).rem_euclid(1.0);
                *turn = *sum * samples as f64;
            }
        }
        let mut merged = Vec::with_capacity(f0.len() * samples);
        for at in 0..f0.len() * samples {
            let place = ((at as f64 + 0.5) / samples as f64 - 0.5).max(0.0);
            let (first, part) = (place as usize, place.fract());
            let second = (first + 1).min(f0.len() - 1);
            let voice = f0[at / samples] > voiced;
            let deviation = if voice { noise } else { amplitude / 3.0 };
            let mut sum = shift;
            for (sine, factor) in factors.iter().enumerate() {
                let mut value = deviation * normal(seed, (at * sines + sine) as u64);
                if voice {
                    let [a, b] = [first, second].map(|at| turns[at * sines + sine]);
                    value += amplitude * (TAU * (a + (b - a) * part).fract()).sin() as f32;
                }
                sum += factor * value;
            }
            merged.push(sum.tanh());
        }
        merged
    }

    /// Magnitudes and angles of steps that are centred on their samples; the signal is mirrored at its ends, or its ends
    /// are repeated.
    fn transform(&self, samples: &[f32]) -> Vec<f32> {
        let SourceParams { fft, hop, convolved, .. } = self.params;
        let (steps, half) = (samples.len() / hop + 1, fft / 2);
        let mut out = vec![0.0; (fft + 2) * steps];
        let mut frame = vec![0.0; fft];
        let last = samples.len() as isize - 1;
        for step in 0..steps {
            for (at, (value, weight)) in frame.iter_mut().zip(&self.window).enumerate() {
                let place = (step * hop + at) as isize - half as isize;
                let place = match place.abs() {
                    _ if convolved => place.clamp(0, last),
                    beyond if beyond > last => (2 * last - beyond).max(0),
                    within => within,
                };
                *value = samples[place as usize] * weight;
            }
            let whole: f32 = frame.iter().map(|value| value.abs()).sum();
            for bin in 0..=half {
                let part = |wave: &[f32]| -> f32 {
                    frame.iter().enumerate().map(|(at, value)| value * wave[bin * at % fft]).sum()
                };
                let real = part(&self.waves[0]);
                if convolved {
                    let imaginary = match bin {
                        0 => 0.0,
                        _ if bin == half => {
                            -frame.iter().zip(&self.rounding).map(|(a, b)| a * b).sum::<f32>()
                        }
                        _ => -part(&self.waves[1]),
                    };
                    let power = real * real + imaginary * imaginary;
                    out[bin * steps + step] = (power + SMALLEST).sqrt();
                    // Never −π of an imaginary part that is −0.
                    let imaginary = if imaginary == 0.0 { 0.0 } else { imaginary };
                    out[(half + 1 + bin) * steps + step] = imaginary.atan2(real);
                    continue;
                }
                let imaginary = -part(&self.waves[1]);
                // What rounding leaves of nothing, as at the mirrored ends, would choose between the angles π and −π. Of
                // real numbers the first and the last bin have nothing.
                let nothing = bin % half == 0 || imaginary.abs() <= ROUNDING * whole;
                let imaginary = if nothing { 0.0 } else { imaginary };
                out[bin * steps + step] = real.hypot(imaginary);
                out[(half + 1 + bin) * steps + step] = imaginary.atan2(real);
            }
        }
        out
    }

    /// The samples of a spectrum `[bins, steps]` as the graphs give it: logarithms of magnitudes, and what the phase is
    /// the sine of (`Generator.forward`, `torch.istft`).
    pub(super) fn samples(&self, spectrum: &[f32]) -> Vec<f32> {
        let SourceParams { fft, hop, convolved, .. } = self.params;
        let (steps, half) = (spectrum.len() / self.bins(), fft / 2);
        let whole = (steps - 1) * hop;
        let (mut sums, mut weights) = (vec![0.0; whole + fft], vec![0.0; whole + fft]);
        for step in 0..steps {
            let parts: Vec<[f32; 2]> = (0..=half)
                .map(|bin| {
                    let magnitude = spectrum[bin * steps + step].min(MAX_LOG).exp();
                    let phase = spectrum[(half + 1 + bin) * steps + step].sin();
                    // All but the first and the last stand for two.
                    let scale = if bin % half == 0 || convolved { 1.0 } else { 2.0 } / fft as f32;
                    let imaginary = if bin % half == 0 { 0.0 } else { phase.sin() };
                    [magnitude * phase.cos() * scale, magnitude * imaginary * scale]
                })
                .collect();
            for (at, window) in self.window.iter().enumerate() {
                let value: f32 = parts
                    .iter()
                    .enumerate()
                    .map(|(bin, [real, imaginary])| {
                        let turn = bin * at % fft;
                        real * self.waves[0][turn] - imaginary * self.waves[1][turn]
                    })
                    .sum();
                sums[step * hop + at] += value * window;
                weights[step * hop + at] += window * window;
            }
        }
        let inner = half..half + whole;
        sums[inner.clone()]
            .iter()
            .zip(&weights[inner])
            .map(|(sum, weight)| if convolved { *sum } else { sum / weight.max(1e-11) })
            .collect()
    }
}
