//! Samples to the frames of an encoder.

use qhx_kit::audio::{Clip, FrontEnd, LogMel};
use qhx_op::{Error, Result};

/// Added to the deviation that mels are divided by (`EPSILON` of the class).
const EPSILON: f64 = 1e-5;

/// `ParakeetFeatureExtractor`: each sample less a part of the one before it, log-mel frames, and each mel less its mean
/// over the clip and divided by its deviation.
#[derive(Debug)]
pub(super) struct Features {
    log_mel: LogMel,
    /// The part of the sample before.
    preemphasis: f32,
    samples: Vec<f32>,
}

impl Features {
    pub(super) fn new(front_end: FrontEnd, preemphasis: f32) -> Result<Self> {
        if !(0.0..1.0).contains(&preemphasis) {
            let found = format!("manifest /params/audio/preemphasis: {preemphasis}");
            return Err(Error::manifest(format!("{found}, expected a number from 0 to below 1")));
        }
        Ok(Self { log_mel: LogMel::new(front_end)?, preemphasis, samples: Vec::new() })
    }

    pub(super) fn front_end(&self) -> &FrontEnd {
        self.log_mel.front_end()
    }

    pub(super) fn log_mel(&self) -> &LogMel {
        &self.log_mel
    }

    pub(super) fn mels(&self) -> usize {
        self.log_mel.mels()
    }

    /// Frames of a clip.
    pub(super) fn frames(&self, clip: Clip<'_>) -> usize {
        self.log_mel.frames(clip.samples().len())
    }

    /// Writes the frames of a clip, and zeros behind them. `rows` has room for all.
    pub(super) fn write(&mut self, clip: Clip<'_>, rows: &mut [f32]) -> Result<()> {
        let samples = clip.samples();
        self.samples.clear();
        self.samples.extend(samples.first());
        let pairs = samples.iter().zip(samples.iter().skip(1));
        self.samples.extend(pairs.map(|(before, sample)| sample - self.preemphasis * before));
        let rate = self.front_end().rate;
        let frames = self.log_mel.write(Clip::new(&self.samples, rate, rate)?, rows)?;
        let mels = self.mels();
        normalise(&mut rows[..frames * mels], mels);
        Ok(())
    }
}

/// Each column less its mean and divided by its deviation, that of a sample (n − 1). In f64, so that a column of one
/// value becomes zeros.
fn normalise(rows: &mut [f32], columns: usize) {
    let count = (rows.len() / columns) as f64;
    for column in 0..columns {
        let values = || rows.iter().skip(column).step_by(columns).map(|value| f64::from(*value));
        let mean = values().sum::<f64>() / count;
        let squares: f64 = values().map(|value| (value - mean) * (value - mean)).sum();
        let deviation = (squares / (count - 1.0).max(1.0)).sqrt() + EPSILON;
        for value in rows.iter_mut().skip(column).step_by(columns) {
            *value = ((f64::from(*value) - mean) / deviation) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_have_no_mean_and_a_deviation_of_one() {
        let mut rows = [1.0, 7.0, 2.0, 7.0, 3.0, 7.0];
        normalise(&mut rows, 2);
        for (found, expected) in rows.iter().zip([-1.0, 0.0, 0.0, 0.0, 1.0, 0.0]) {
            assert!((found - expected).abs() < 2e-5, "{rows:?}");
        }
        let mut one = [-16.6, 3.0];
        normalise(&mut one, 2);
        assert_eq!(one, [0.0, 0.0]);
    }
}
