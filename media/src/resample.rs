//! Changing the rate of a sound, chunk by chunk.

use qhx_core::{Error, ErrorKind, Result};
use rubato::audioadapter_buffers::direct::SequentialSlice;
use rubato::{Fft, FixedSync, Indexing, Resampler as _, WindowFunction};

/// Samples of a chunk, at least: also the length of the filter in samples of the input.
const CHUNK: usize = 4096;

/// Takes samples at one rate and collects them at another.
///
/// Equal rates pass every sample on as it is. Otherwise a windowed sinc filter of thousands of taps is applied by FFT:
/// what lies below 0.98 of the lower rate's half comes through, what would fold back is suppressed. `n` samples become
/// `ceil(n · to / from)`, without delay.
pub(crate) struct Resampler {
    change: Option<Change>,
    output: Vec<f32>,
}

struct Change {
    fft: Fft<f32>,
    /// Samples that wait for a full chunk.
    waiting: Vec<f32>,
    /// Samples of one processed chunk.
    chunk: Vec<f32>,
    /// Samples of the filter's delay that are still to be dropped.
    delay: usize,
    taken: u64,
    from: u32,
    to: u32,
}

impl Resampler {
    pub fn new(from: u32, to: u32) -> Result<Self> {
        if from == to {
            return Ok(Self { change: None, output: Vec::new() });
        }
        // An even number of the smallest possible chunks: the delay is half a chunk, and has to be a whole number of
        // samples.
        let smallest = (from / gcd(from, to)) as usize;
        let chunk = smallest.saturating_mul(CHUNK.div_ceil(smallest).next_multiple_of(2));
        let fft = Fft::new_custom(
            from as usize,
            to as usize,
            chunk,
            1,
            1,
            WindowFunction::BlackmanHarris2,
            FixedSync::Both,
        )
        .map_err(|e| failed(from, to, e))?;
        let chunk = vec![0.0; fft.output_frames_max()];
        let delay = fft.output_delay();
        let change = Change { fft, waiting: Vec::new(), chunk, delay, taken: 0, from, to };
        Ok(Self { change: Some(change), output: Vec::new() })
    }

    /// Takes further samples.
    pub fn push(&mut self, samples: &[f32]) -> Result<()> {
        let Some(change) = &mut self.change else {
            self.output.extend_from_slice(samples);
            return Ok(());
        };
        change.taken += samples.len() as u64;
        change.waiting.extend_from_slice(samples);
        change.run(&mut self.output)
    }

    /// All samples at the new rate.
    pub fn finish(mut self) -> Result<Vec<f32>> {
        let Some(change) = &mut self.change else { return Ok(self.output) };
        let wanted = u128::from(change.taken) * u128::from(change.to);
        let wanted =
            usize::try_from(wanted.div_ceil(u128::from(change.from))).unwrap_or(usize::MAX);
        while self.output.len() < wanted {
            let need = change.fft.input_frames_next();
            change.waiting.resize(need, 0.0);
            change.run(&mut self.output)?;
        }
        self.output.truncate(wanted);
        Ok(self.output)
    }
}

impl Change {
    /// Processes all full chunks that wait.
    fn run(&mut self, output: &mut Vec<f32>) -> Result<()> {
        let (from, to) = (self.from, self.to);
        let mut done = 0;
        while self.waiting.len() - done >= self.fft.input_frames_next() {
            let waiting = self.waiting.get(done..).unwrap_or_default();
            let input = SequentialSlice::new(waiting, 1, waiting.len());
            let input = input.map_err(|e| failed(from, to, e))?;
            let frames = self.chunk.len();
            let chunk = SequentialSlice::new_mut(&mut self.chunk, 1, frames);
            let mut chunk = chunk.map_err(|e| failed(from, to, e))?;
            let (taken, given) = self
                .fft
                .process_into_buffer(&input, &mut chunk, Some(&Indexing::new()))
                .map_err(|e| failed(from, to, e))?;
            let skipped = self.delay.min(given);
            self.delay -= skipped;
            output.extend_from_slice(self.chunk.get(skipped..given).unwrap_or_default());
            done += taken;
        }
        self.waiting.drain(..done);
        Ok(())
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn failed(from: u32, to: u32, e: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("resampling from {from} to {to} Hz: {e}"))
}
