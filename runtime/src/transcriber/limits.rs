//! When the words of a window are drawn again at a higher temperature, or left out.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use qhx_base::{Result, bail};

/// Limits of a window's words, as `transformers` has them (Radford et al. 2022, arXiv 2212.04356, section 4.5).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Temperatures, in the order in which they are tried. Words within the limits are kept, and the last ones whatever
    /// they are.
    pub temperatures: Vec<f32>,
    /// Max compression ratio of the tokens: repetitive words compress more.
    pub compression: Option<f64>,
    /// The least mean log-probability of the tokens.
    pub logprob: Option<f64>,
    /// Max probability of no speech. Above it, words that are below [`Limits::logprob`] are left out.
    pub no_speech: Option<f64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            temperatures: vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            compression: Some(1.35),
            logprob: Some(-1.0),
            no_speech: Some(0.6),
        }
    }
}

/// Verdict on the words of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Keep,
    /// Nobody spoke.
    Leave,
    /// To be drawn again.
    Again,
}

impl Limits {
    /// The likeliest words, whatever they are.
    pub fn none() -> Self {
        Self { temperatures: vec![0.0], compression: None, logprob: None, no_speech: None }
    }

    /// With these temperatures.
    ///
    /// # Errors
    /// When there are none, or one is out of range.
    pub fn temperatures(self, temperatures: Vec<f32>) -> Result<Self> {
        let fits = |t: &f32| (0.0..=2.0).contains(t);
        if temperatures.is_empty() || !temperatures.iter().all(fits) {
            bail!(Usage, "temperatures {temperatures:?}: expected at least one, from 0 to 2");
        }
        Ok(Self { temperatures, ..self })
    }

    /// Judges the tokens of a window, the ending one included, of a vocabulary of `vocab`.
    pub(super) fn judge(
        &self,
        tokens: &[u32],
        vocab: usize,
        logprob: f64,
        silence: f64,
    ) -> Verdict {
        let unsure = self.logprob.is_some_and(|least| logprob < least);
        if unsure && self.no_speech.is_some_and(|most| silence > most) {
            return Verdict::Leave;
        }
        let circles = self.compression.is_some_and(|most| compression(tokens, vocab) > most);
        if unsure || circles { Verdict::Again } else { Verdict::Keep }
    }
}

/// Compression ratio of tokens, as `WhisperGenerationMixin._retrieve_compression_ratio`.
fn compression(tokens: &[u32], vocab: usize) -> f64 {
    let width = ((vocab.max(2) as f64).log2() / 8.0) as usize + 1;
    let bytes: Vec<u8> =
        tokens.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)).collect();
    ratio(&bytes)
}

/// Ratio of the number of bytes to that of the same bytes compressed.
pub(super) fn ratio(bytes: &[u8]) -> f64 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing to memory does not fail.
    let deflated = encoder.write_all(bytes).and_then(|()| encoder.finish());
    bytes.len() as f64 / deflated.map_or(1, |bytes| bytes.len()).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_circles_are_drawn_again_and_silence_has_none() {
        let limits = Limits::default();
        let (plain, circles): (Vec<u32>, Vec<u32>) =
            ((0..40).map(|i| i * 997).collect(), vec![7; 40]);
        let judge = |tokens, logprob, silence| limits.judge(tokens, 51_865, logprob, silence);
        assert_eq!(judge(&plain, -0.3, 0.9), Verdict::Keep);
        assert_eq!(judge(&circles, -0.3, 0.9), Verdict::Again);
        assert_eq!(judge(&plain, -1.3, 0.1), Verdict::Again);
        assert_eq!(judge(&circles, -1.3, 0.9), Verdict::Leave);
        assert_eq!(Limits::none().judge(&circles, 51_865, -9.0, 1.0), Verdict::Keep);
        assert!(Limits::none().temperatures(vec![]).is_err());
        assert!(Limits::none().temperatures(vec![f32::NAN]).is_err());
    }
}
