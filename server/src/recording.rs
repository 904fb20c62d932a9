//! Raw audio that comes piece by piece, within the limits of a body.

use std::sync::Arc;

use axum::http::StatusCode;
use qhx::{Source, TranscribeOptions};

use crate::error::{ApiError, Result};
use crate::pending::Pending;
use crate::queue::Work;
use crate::registry::Served;
use crate::request::{Context, Memory, no_memory};

/// Layout of raw audio: integers, the low byte first, those of one byte without a sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pcm {
    pub rate: u32,
    /// Bytes of a sample.
    pub width: u16,
    pub channels: u16,
}

impl Pcm {
    /// Bytes of a sample of all channels.
    pub(crate) fn frame(self) -> usize {
        usize::from(self.width) * usize::from(self.channels)
    }

    /// Length of audio of this many bytes.
    pub(crate) fn seconds(self, bytes: usize) -> f64 {
        bytes as f64 / (self.frame().max(1) as f64 * f64::from(self.rate.max(1)))
    }

    /// A WAV file of the audio, which is then checked, mixed and resampled as any other.
    pub(crate) fn wav(self, audio: &[u8]) -> Source {
        const HEADER: u32 = 44;
        let len = u32::try_from(audio.len()).unwrap_or(u32::MAX - HEADER);
        let frame = u32::from(self.width) * u32::from(self.channels);
        let parts: [&[u8]; 11] = [
            b"RIFF",
            &len.saturating_add(HEADER - 8).to_le_bytes(),
            b"WAVEfmt \x10\0\0\0\x01\0",
            &self.channels.to_le_bytes(),
            &self.rate.to_le_bytes(),
            &self.rate.saturating_mul(frame).to_le_bytes(),
            &u16::try_from(frame).unwrap_or(u16::MAX).to_le_bytes(),
            &self.width.saturating_mul(8).to_le_bytes(),
            b"data",
            &len.to_le_bytes(),
            audio,
        ];
        Source::Bytes { name: "the audio".to_owned(), bytes: parts.concat() }
    }
}

impl Context {
    /// Waits until there is memory for audio of `bytes` bytes in all.
    pub(crate) async fn room_for_audio(&self, memory: &Memory, bytes: usize) -> Result<()> {
        let max = self.shared.options.max_body;
        if bytes > max {
            let message = format!("the audio takes more than {max} bytes");
            return Err(
                ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("audio_too_long")
            );
        }
        self.in_time(memory.take(&self.shared.memory, bytes), no_memory).await
    }

    /// Has audio transcribed, which holds `memory` until the work is over.
    pub(crate) fn transcribing(
        &self,
        model: &Arc<Served>,
        memory: Memory,
        source: Source,
        options: TranscribeOptions,
    ) -> Result<Pending> {
        let context = Self { memory, ..self.clone() };
        let work = Work::Transcribe { source, options: Box::new(options), streams: false };
        Pending::submit(&context, model, Vec::new(), context.ticket(), work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audio_of_each_layout_is_read_as_it_is() {
        for (width, sample, value) in [
            (1, &[0xc0][..], 0.5),
            (2, &[0, 0x40], 0.5),
            (3, &[0, 0, 0xc0], -0.5),
            (4, &[0, 0, 0, 0x40], 0.5),
        ] {
            for channels in [1, 2, 6] {
                let pcm = Pcm { rate: 16_000, width, channels };
                let audio = sample.repeat(usize::from(channels) * 160);
                assert!((pcm.seconds(audio.len()) - 0.01).abs() < 1e-9);
                let rules = qhx_media::AudioRules::default();
                assert_eq!(rules.rate, 16_000);
                let limits = qhx_media::Limits::default();
                let read = qhx_media::decode_audio(&pcm.wav(&audio), &rules, &limits).unwrap();
                assert_eq!(read.samples, [value; 160], "{width} bytes, {channels} channels");
            }
        }
    }
}
