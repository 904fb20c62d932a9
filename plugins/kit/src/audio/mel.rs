//! Mel filter banks: triangles over the bins of a spectrum, evenly spaced on the mel scale.

use serde::Deserialize;

use qhx_op::{Error, Result};

/// Formula that maps frequencies to mels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MelScale {
    /// `2595 · log10(1 + f / 700)` (the Hidden Markov Model Toolkit).
    Htk,
    /// Linear below 1000 Hz and logarithmic above (Slaney's Auditory Toolbox, librosa).
    Slaney,
}

/// Start of the logarithmic part of Slaney's scale, in hertz and in mels.
const SLANEY_BREAK: (f64, f64) = (1000.0, 15.0);

impl MelScale {
    fn mels(self, hertz: f64) -> f64 {
        let (min_hertz, min_mels) = SLANEY_BREAK;
        match self {
            Self::Htk => 2595.0 * (1.0 + hertz / 700.0).log10(),
            Self::Slaney if hertz < min_hertz => 3.0 * hertz / 200.0,
            Self::Slaney => min_mels + (hertz / min_hertz).ln() * 27.0 / 6.4f64.ln(),
        }
    }

    fn hertz(self, mels: f64) -> f64 {
        let (min_hertz, min_mels) = SLANEY_BREAK;
        match self {
            Self::Htk => 700.0 * (10f64.powf(mels / 2595.0) - 1.0),
            Self::Slaney if mels < min_mels => 200.0 * mels / 3.0,
            Self::Slaney => min_hertz * ((mels - min_mels) * 6.4f64.ln() / 27.0).exp(),
        }
    }
}

/// Settings of [`MelFilters::new`].
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct MelOptions {
    /// Number of filters.
    pub mels: usize,
    /// Start of the first triangle, in hertz.
    pub min_hz: f64,
    /// End of the last triangle, in hertz.
    pub max_hz: f64,
    /// Formula that maps frequencies to mels.
    pub scale: MelScale,
    /// Divide each triangle by half its width in hertz, so that all have one area (`norm="slaney"`).
    /// Otherwise all have height 1.
    #[serde(default)]
    pub area_norm: bool,
}

/// A filter is never asked for more often; a manifest that declares more would only cost memory.
const MAX_MELS: usize = 1 << 12;

/// A triangle is never narrower, in hertz: its weights would leave the range of f32.
const MIN_WIDTH: f64 = 1e-3;

/// A bank of triangular filters (`mel_filter_bank` of `transformers.audio_utils`, triangles in hertz).
/// Only the bins within a triangle are stored.
#[derive(Debug, Clone)]
pub struct MelFilters {
    bins: usize,
    /// For each filter: its first bin, and where its weights end.
    filters: Vec<(usize, usize)>,
    weights: Vec<f32>,
}

impl MelFilters {
    /// Filters for spectra of `bins` numbers, from 0 Hz to half of `rate`.
    ///
    /// # Errors
    /// When an option is out of range.
    pub fn new(options: &MelOptions, rate: u32, bins: usize) -> Result<Self> {
        let MelOptions { mels, min_hz, max_hz, scale, area_norm } = *options;
        let nyquist = f64::from(rate / 2);
        let range = 0.0 <= min_hz && min_hz < max_hz && max_hz <= f64::from(rate) / 2.0;
        if bins < 2 || !(1..=MAX_MELS).contains(&mels) || !range {
            return Err(Error::manifest(format!(
                "{mels} mel filters from {min_hz} to {max_hz} Hz over {bins} bins at {rate} samples a \
                 second: expected 1 to {MAX_MELS} filters, rising frequencies up to half the rate, \
                 and two bins or more"
            )));
        }
        let (low, high) = (scale.mels(min_hz), scale.mels(max_hz));
        let corner = |i: usize| scale.hertz(low + (high - low) * i as f64 / (mels + 1) as f64);
        let frequency = |bin: usize| nyquist * bin as f64 / (bins - 1) as f64;
        let (mut filters, mut weights) = (Vec::with_capacity(mels), Vec::new());
        for mel in 0..mels {
            let (left, centre, right) = (corner(mel), corner(mel + 1), corner(mel + 2));
            if right - left < MIN_WIDTH {
                return Err(Error::manifest(format!(
                    "{mels} mel filters from {min_hz} to {max_hz} Hz: filter {mel} is {} Hz wide, \
                     expected at least {MIN_WIDTH}; take fewer or a wider range",
                    right - left
                )));
            }
            let scale = if area_norm { 2.0 / (right - left) } else { 1.0 };
            let weight = |bin: usize| {
                let f = frequency(bin);
                let (up, down) = ((f - left) / (centre - left), (right - f) / (right - centre));
                (scale * up.min(down).max(0.0)) as f32
            };
            let first = (0..bins).find(|&bin| weight(bin) > 0.0).unwrap_or(bins);
            weights.extend((first..bins).map(weight).take_while(|&weight| weight > 0.0));
            filters.push((first, weights.len()));
        }
        Ok(Self { bins, filters, weights })
    }

    /// Number of filters.
    pub fn mels(&self) -> usize {
        self.filters.len()
    }

    /// Writes what each filter lets through of `spectrum`.
    ///
    /// # Panics
    /// When `spectrum` has not as many numbers as the bank was made for, or `target` has not one place
    /// for each filter.
    pub fn write(&self, spectrum: &[f32], target: &mut [f32]) {
        assert_eq!(
            (spectrum.len(), target.len()),
            (self.bins, self.mels()),
            "sizes of a filter bank"
        );
        let mut from = 0;
        for (to, &(first, end)) in target.iter_mut().zip(&self.filters) {
            let weights = &self.weights[from..end];
            *to = weights.iter().zip(&spectrum[first..]).map(|(weight, bin)| weight * bin).sum();
            from = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banks_that_make_no_sense_are_refused() {
        let sane = MelOptions {
            mels: 128,
            min_hz: 0.0,
            max_hz: 8000.0,
            scale: MelScale::Htk,
            area_norm: false,
        };
        assert_eq!(MelFilters::new(&sane, 16_000, 257).unwrap().mels(), 128);
        let wrong = [
            MelOptions { mels: 0, ..sane.clone() },
            MelOptions { mels: usize::MAX, ..sane.clone() },
            MelOptions { min_hz: -1.0, ..sane.clone() },
            MelOptions { min_hz: 9000.0, ..sane.clone() },
            MelOptions { max_hz: 8001.0, ..sane.clone() },
            MelOptions { max_hz: f64::NAN, ..sane.clone() },
        ];
        for options in wrong {
            let error = MelFilters::new(&options, 16_000, 257).unwrap_err();
            assert!(error.message().contains("16000"), "{error}");
        }
        let narrow = MelOptions { max_hz: 1e-200, area_norm: true, ..sane.clone() };
        let error = MelFilters::new(&narrow, 16_000, 257).unwrap_err();
        assert!(error.message().contains("Hz wide"), "{error}");
        assert!(MelFilters::new(&sane, 16_000, 1).is_err());
        assert!(MelFilters::new(&sane, 0, 257).is_err());
    }
}
