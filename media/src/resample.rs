//! Changing the rate of audio, chunk by chunk.
//!
//! Written here: a file of gigabytes is resampled as it is decoded, any two rates of its header come up, and `n`
//! samples become exactly `ceil(n · to / from)` without delay, which the counts of frames and chunks rely on.

use std::f64::consts::PI;

/// Zeros of the sinc on each side of a filter's middle.
const ZEROS: usize = 64;
/// Frequency at which a filter halves what passes, as a share of the lower rate's half.
const CUTOFF: f64 = 0.955;
/// β of the Kaiser window: what is suppressed is 90 dB down.
const BETA: f64 = 9.0;
/// Filters for positions between two samples, per zero of the sinc. Between these, results are interpolated; they are
/// then off by 3e-7.
const PHASES: usize = 2048;
/// Filters have a multiple of this many taps.
const LANES: usize = 8;

/// Takes samples at one rate and collects them at another.
///
/// Equal rates pass every sample on as it is. Otherwise a sinc in a Kaiser window is laid over each place of a new
/// sample (J. O. Smith, "Digital Audio Resampling Home Page"): what lies below 0.91 of the lower rate's half comes
/// through, what would fold back is suppressed. `n` samples become `ceil(n · to / from)`, without delay.
pub(crate) struct Resampler {
    change: Option<Change>,
    output: Vec<f32>,
}

struct Change {
    filters: Filters,
    /// Samples from the first that a filter still reaches on.
    waiting: Vec<f32>,
    /// Index in `waiting` of the beginning of the next new sample's filter.
    first: usize,
    /// Offset of the new sample behind a sample, in units of `1 / up`.
    rest: u64,
    taken: u64,
    /// The rates without their common factor, the new one and the old one.
    up: u64,
    down: u64,
}

impl Resampler {
    /// Both rates are above 0.
    pub fn new(from: u32, to: u32) -> Self {
        let common = u64::from(gcd(from, to).max(1));
        let (up, down) = (u64::from(to) / common, u64::from(from) / common);
        let change = (up != down).then(|| {
            let filters = Filters::new(up, down);
            let waiting = vec![0.0; filters.half - 1];
            Change { filters, waiting, first: 0, rest: 0, taken: 0, up, down }
        });
        Self { change, output: Vec::new() }
    }

    /// Takes further samples.
    pub fn push(&mut self, samples: &[f32]) {
        let Some(change) = &mut self.change else {
            self.output.extend_from_slice(samples);
            return;
        };
        change.taken += samples.len() as u64;
        change.waiting.extend_from_slice(samples);
        change.run(&mut self.output);
    }

    /// Takes silence, hours of it at once: the same as n zeros.
    pub fn silence(&mut self, samples: u64) {
        let Some(change) = &self.change else {
            self.zeros(samples);
            return;
        };
        let (up, down) = (change.up, change.down);
        // Behind these, no filter reaches anything else.
        let edge = samples.min(change.filters.len() as u64);
        self.push(&vec![0.0; edge as usize]);
        let periods = (samples - edge) / down;
        if let Some(change) = &mut self.change {
            change.taken += periods * down;
        }
        self.zeros(periods * up);
        self.push(&vec![0.0; ((samples - edge) % down) as usize]);
    }

    fn zeros(&mut self, samples: u64) {
        let len = usize::try_from(samples).unwrap_or(usize::MAX).saturating_add(self.output.len());
        self.output.resize(len, 0.0);
    }

    /// The samples that are there so far, without those that [`Resampler::take`] returned before.
    pub fn take(&mut self) -> Vec<f32> {
        std::mem::take(&mut self.output)
    }

    /// All samples at the new rate.
    pub fn finish(mut self) -> Vec<f32> {
        let Some(change) = &mut self.change else { return self.output };
        let wanted = u128::from(change.taken) * u128::from(change.up);
        let wanted =
            usize::try_from(wanted.div_ceil(u128::from(change.down))).unwrap_or(usize::MAX);
        // Silence behind the audio, as far as the filter of its last sample reaches.
        change.waiting.resize(change.waiting.len() + change.filters.half, 0.0);
        change.run(&mut self.output);
        self.output.truncate(wanted);
        self.output
    }
}

impl Change {
    /// Makes all new samples whose filters lie within what waits.
    fn run(&mut self, output: &mut Vec<f32>) {
        while let Some(samples) = self.waiting.get(self.first..self.first + self.filters.len()) {
            output.push(self.filters.apply(samples, self.rest, self.up));
            let next = self.rest + self.down;
            self.first += (next / self.up) as usize;
            self.rest = next % self.up;
        }
        let done = self.first.min(self.waiting.len());
        self.waiting.drain(..done);
        self.first -= done;
    }
}

/// Filters for evenly spaced positions from one sample to the next, both included.
struct Filters {
    taps: Vec<f32>,
    /// Half the length of a filter.
    half: usize,
    phases: u64,
}

impl Filters {
    fn new(up: u64, down: u64) -> Self {
        // Downwards the sinc is as wide as the samples of the new rate lie apart.
        let width = (down as f64 / up as f64).max(1.0);
        let half = ((ZEROS as f64 * width).ceil() as usize).next_multiple_of(LANES / 2);
        let phases = up.min((PHASES as f64 / width).ceil() as u64);
        let mut taps = Vec::with_capacity((phases as usize + 1) * 2 * half);
        for phase in 0..=phases {
            let middle = (half - 1) as f64 + phase as f64 / phases as f64;
            let tap = |index: usize| {
                let x = index as f64 - middle;
                sinc(x * CUTOFF / width) * kaiser(x / half as f64)
            };
            let sum: f64 = (0..2 * half).map(tap).sum();
            taps.extend((0..2 * half).map(|index| (tap(index) / sum) as f32));
        }
        Self { taps, half, phases }
    }

    /// Taps of a filter.
    fn len(&self) -> usize {
        2 * self.half
    }

    /// The value `rest / up` behind the middle of `samples`.
    fn apply(&self, samples: &[f32], rest: u64, up: u64) -> f32 {
        let place = rest * self.phases;
        let filter = |phase: u64| {
            let first = phase as usize * self.len();
            self.taps.get(first..first + self.len()).unwrap_or_default()
        };
        let near = dot(samples, filter(place / up));
        match place % up {
            0 => near,
            part => {
                let far = dot(samples, filter(place / up + 1));
                near + (far - near) * (part as f64 / up as f64) as f32
            }
        }
    }
}

/// The dot product, in sums side by side that processors add at once.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (groups, _) = a.as_chunks::<LANES>();
    let (others, _) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in groups.iter().zip(others) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { (PI * x).sin() / (PI * x) }
}

/// The Kaiser window from −1 to 1, without the factor that makes its middle 1.
fn kaiser(x: f64) -> f64 {
    // The modified Bessel function of the first kind and order 0, by its power series.
    let quarter = BETA * BETA / 4.0 * (1.0 - x * x).max(0.0);
    let terms = (1..40).scan(1.0, |term, k| {
        *term *= quarter / f64::from(k * k);
        Some(*term)
    });
    1.0 + terms.sum::<f64>()
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_the_same_as_zeros() {
        let noise: Vec<f32> = (0..3000u32).map(|i| ((i * i % 977) as f32 / 977.0) - 0.5).collect();
        for (from, to) in [(48_000, 16_000), (48_000, 22_050), (16_000, 44_100), (16_000, 16_000)] {
            for samples in [0, 1, 500, 20_011] {
                let [mut quick, mut slow] = [(); 2].map(|()| Resampler::new(from, to));
                quick.push(&noise);
                slow.push(&noise);
                quick.silence(samples);
                slow.push(&vec![0.0; samples as usize]);
                quick.push(&noise);
                slow.push(&noise);
                assert_eq!(quick.finish(), slow.finish(), "{from} to {to}, {samples}");
            }
        }
    }
}
