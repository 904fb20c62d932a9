//! The image or audio of a golden step: made by arithmetic, and kept in the file with it.

use qhx_base::{Error, ErrorKind, Result, bail};
use qhx_core::engine::Model;
use qhx_core::op::Modality;
use qhx_types::Media;
use serde::{Deserialize, Serialize};

use super::mixed;

/// Pixels of a side of the image that is made. Models stretch it as they do any image.
const SIDE: u32 = 32;
/// Parts of a second that the audio has which is made.
const PART: u32 = 2;
/// Max number of times that audio is played: four minutes of half seconds.
const MAX_TIMES: u32 = 480;
/// Full scale of samples.
const SCALE: f32 = 32_768.0;

/// Media of a prompt: an image or audio.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Clip {
    /// An image.
    Image {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Interleaved RGB, 8 bits a channel, rows from the top.
        rgb: Vec<u8>,
    },
    /// Mono audio.
    Audio {
        /// Samples per second.
        rate: u32,
        /// Samples in −32768…32767.
        samples: Vec<i16>,
        /// Number of times that the samples are played, one after the other.
        #[serde(default = "once", skip_serializing_if = "is_once")]
        times: u32,
    },
}

impl Clip {
    /// One for each modality that the model's host-op knows. Whether the bundle has the graphs for it is another
    /// question.
    pub(super) fn all(model: &Model) -> Vec<Self> {
        let modalities = &model.op().description.modalities;
        let rate = model.info().media.audio.rate;
        let all = [(Modality::Image, Self::image()), (Modality::Audio, Self::audio(rate, 1))];
        all.into_iter().filter(|(one, _)| modalities.contains(one)).map(|(_, clip)| clip).collect()
    }

    /// Colours that rise across and down, and noise.
    fn image() -> Self {
        let noise = |index: u32| (mixed(index.into()) >> 56) as u8;
        let rise = |at: u32| (at * 255 / (SIDE - 1)) as u8;
        let pixels = (0..SIDE * SIDE).flat_map(|at| [rise(at % SIDE), rise(at / SIDE), noise(at)]);
        Self::Image { width: SIDE, height: SIDE, rgb: pixels.collect() }
    }

    /// Half seconds that fit seconds, one at least.
    pub(super) fn halves(seconds: f64) -> u32 {
        (seconds * f64::from(PART)).clamp(1.0, f64::from(MAX_TIMES)) as u32
    }

    /// A triangle wave of a fiftieth of the rate, with noise: half a second, `times` times.
    pub(super) fn audio(rate: u32, times: u32) -> Self {
        let wave = |at: u32| (i32::from((at % 50) as u8) - 25).abs() * 800 - 10_000;
        let noise = |at: u32| (mixed(at.into()) >> 52) as i32 - 2048;
        let samples = (0..rate / PART).map(|at| (wave(at) + noise(at)) as i16);
        Self::Audio { rate, samples: samples.collect(), times }
    }

    /// The name of its kind.
    pub(super) fn noun(&self) -> &'static str {
        match self {
            Self::Image { .. } => "image",
            Self::Audio { .. } => "audio",
        }
    }

    /// The clip as a part of a prompt.
    ///
    /// # Errors
    /// When its sizes contradict its contents.
    pub(super) fn media(&self) -> Result<Media> {
        let media = match self {
            Self::Image { width, height, rgb } => Media::image(rgb.clone(), *width, *height),
            Self::Audio { rate, samples, times } => {
                if !(1..=MAX_TIMES).contains(times) {
                    bail!(
                        Artifact,
                        "audio that is played {times} times, expected 1 to {MAX_TIMES}"
                    );
                }
                let played = (0..*times).flat_map(|_| samples);
                let samples = played.map(|sample| f32::from(*sample) / SCALE);
                Media::audio(samples.collect(), *rate)
            }
        };
        media.map_err(|e| Error::new(ErrorKind::Artifact, e.to_string()))
    }
}

const fn once() -> u32 {
    1
}

const fn is_once(times: &u32) -> bool {
    *times == 1
}
