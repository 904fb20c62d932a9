//! Samples as audio files, for those who listen.

use opus_pure::{Application, MAX_PACKET_BYTES, OggOpusWriter, OpusEncoder, OpusHead};
use qhx_base::{Error, ErrorKind, Result};
use rusty_aac::{AacEncoder, AacEncoderConfig, AdtsHeader, write_adts_header};
use rusty_mp3::{Mp3Encoder, Mp3EncoderConfig};

use crate::opus::RATE as OPUS_TICKS;
use crate::resample::Resampler;

/// Format of an audio file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AudioFormat {
    /// A WAV file of 16 bits.
    Wav,
    /// Samples of 16 bits without a header.
    Pcm,
    /// FLAC of 16 bits.
    Flac,
    /// MP3.
    Mp3,
    /// Opus in Ogg.
    Opus,
    /// AAC-LC in ADTS frames.
    Aac,
}

/// Names of [`AudioFormat`] in options, which are also the extensions of files.
pub const AUDIO_FORMATS: [(&str, AudioFormat); 6] = [
    ("wav", AudioFormat::Wav),
    ("pcm", AudioFormat::Pcm),
    ("flac", AudioFormat::Flac),
    ("mp3", AudioFormat::Mp3),
    ("opus", AudioFormat::Opus),
    ("aac", AudioFormat::Aac),
];

/// Rates that Opus takes.
const OPUS: [u32; 5] = [8_000, 12_000, 16_000, 24_000, 48_000];
/// Rates that MP3 takes, and AAC, too.
const MPEG: [u32; 9] = [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000];
/// Bits a second of a voice. Each is the format's usual choice for one channel.
const MP3_BITS: u32 = 64_000;
const AAC_BITS: u32 = 64_000;
const OPUS_BITS: i32 = 48_000;
/// Compression level of FLAC, from 0 to 8: the usual one.
const FLAC_LEVEL: u32 = 5;

impl AudioFormat {
    /// The format of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        let named = |(known, _): &&(&str, Self)| known.eq_ignore_ascii_case(name);
        AUDIO_FORMATS.iter().find(named).map(|(_, format)| *format)
    }

    /// Media type of the file.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Wav => "audio/wav",
            Self::Pcm => "audio/pcm",
            Self::Flac => "audio/flac",
            Self::Mp3 => "audio/mpeg",
            // Of Ogg: `audio/opus` is that of packets on a network (RFC 7845, section 9).
            Self::Opus => "audio/ogg",
            Self::Aac => "audio/aac",
        }
    }
}

/// Encodes one channel of samples from −1 to 1; what is beyond is cut off. A rate that the format has not is changed to
/// the next higher one that it has.
///
/// # Errors
///
/// Without samples, and when the encoder fails.
pub fn encode_audio(samples: &[f32], rate: u32, format: AudioFormat) -> Result<Vec<u8>> {
    if samples.is_empty() || rate == 0 {
        return Err(Error::new(ErrorKind::Usage, "there are no samples to encode"));
    }
    match format {
        AudioFormat::Wav => {
            let mut bytes = wav_header(rate, Some(samples.len())).to_vec();
            bytes.extend(pcm16(samples));
            Ok(bytes)
        }
        AudioFormat::Pcm => Ok(pcm16(samples)),
        AudioFormat::Flac => {
            let mut encoder =
                rusty_flac::Encoder::new(rate, 1, 16).map_err(|e| failed("FLAC", e))?;
            encoder.set_compression_level(FLAC_LEVEL);
            encoder.push_s16le_bytes(&pcm16(samples)).map_err(|e| failed("FLAC", e))?;
            Ok(encoder.finish())
        }
        AudioFormat::Mp3 => {
            let (samples, rate) = at_one_of(&MPEG, samples, rate);
            let config = Mp3EncoderConfig { bitrate_kbps: MP3_BITS / 1000, vbr_quality: None };
            let mut encoder = Mp3Encoder::new(config);
            encoder.push_pcm_f32(&samples, 1, rate).map_err(|e| failed("MP3", e))?;
            encoder.finish();
            Ok(std::iter::from_fn(|| encoder.next_packet().ok()).flatten().collect())
        }
        AudioFormat::Opus => {
            let (samples, rate) = at_one_of(&OPUS, samples, rate);
            opus(&samples, rate).map_err(|e| failed("Opus", e))
        }
        AudioFormat::Aac => {
            let (samples, rate) = at_one_of(&MPEG, samples, rate);
            aac(&samples, rate).map_err(|e| failed("AAC", e))
        }
    }
}

fn failed(format: &str, e: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("the audio cannot be encoded as {format}: {e}"))
}

/// The samples at the least of these rates that is no lower than their own, and else at the highest, from −1 to 1.
fn at_one_of(rates: &[u32], samples: &[f32], rate: u32) -> (Vec<f32>, u32) {
    let higher = rates.iter().copied().filter(|one| *one >= rate).min();
    let to = higher.or_else(|| rates.iter().copied().max()).unwrap_or(rate);
    let mut resampler = Resampler::new(rate, to);
    resampler.push(samples);
    let samples = resampler.finish().into_iter();
    (samples.map(|sample| sample.clamp(-1.0, 1.0)).collect(), to)
}

/// Opus in Ogg, whose header and last page say which samples are not heard (RFC 7845, section 4).
fn opus(samples: &[f32], rate: u32) -> opus_pure::Result<Vec<u8>> {
    let frame = rate as usize / 50;
    let mut encoder = OpusEncoder::new(rate.cast_signed(), 1, Application::Audio)?;
    encoder.bitrate_bps = OPUS_BITS;
    let head = OpusHead::for_encoder(&encoder, rate);
    let ticks = OPUS_TICKS / rate;
    let pre_skip = u64::from(head.pre_skip);
    let delay = u32::from(head.pre_skip).div_ceil(ticks) as usize;
    let end = pre_skip + samples.len() as u64 * u64::from(ticks);
    let mut writer = OggOpusWriter::new(Vec::new(), head)?;
    let mut packet = vec![0; MAX_PACKET_BYTES];
    let mut block = vec![0.0; frame];
    let frames = (samples.len() + delay).div_ceil(frame);
    for at in 0..frames {
        let part = samples.get(at * frame..).unwrap_or_default();
        let part = part.get(..frame).unwrap_or(part);
        block.fill(0.0);
        block.iter_mut().zip(part).for_each(|(to, from)| *to = *from);
        let length = encoder.encode(&block, frame, &mut packet)?;
        let packet = packet.get(..length).unwrap_or_default();
        if at + 1 == frames {
            let rest = end.saturating_sub(u64::try_from(writer.granule()).unwrap_or(0));
            writer.write_packet_with_duration(packet, u32::try_from(rest).unwrap_or(u32::MAX))?;
        } else {
            writer.write_packet(packet)?;
        }
    }
    writer.finish()
}

fn aac(samples: &[f32], rate: u32) -> Result<Vec<u8>, rusty_aac::Error> {
    let config = AacEncoderConfig { bitrate_bps: AAC_BITS, ..AacEncoderConfig::default() };
    let mut encoder = AacEncoder::new(config);
    encoder.push_pcm(samples, 1, rate)?;
    encoder.finish();
    let mut bytes = Vec::new();
    while let Ok(packet) = encoder.next_packet() {
        bytes.extend(write_adts_header(&AdtsHeader {
            object_type: 2,
            sample_rate: rate,
            channels: 1,
            frame_length: 7 + packet.data.len(),
            header_len: 7,
        }));
        bytes.extend(packet.data);
    }
    Ok(bytes)
}

/// Bytes of [`wav_header`].
pub const WAV_HEADER: usize = 44;

/// The header of a WAV file of one channel of 16 bits, of `samples` samples; of a stream whose length is not known, as
/// long as a file can be.
pub fn wav_header(rate: u32, samples: Option<usize>) -> [u8; WAV_HEADER] {
    let most = u32::MAX - WAV_HEADER as u32;
    let bytes = samples.and_then(|count| u32::try_from(count.checked_mul(2)?).ok());
    let bytes = bytes.unwrap_or(most).min(most);
    let mut header = [0; WAV_HEADER];
    let parts: [&[u8]; 11] = [
        b"RIFF",
        &(bytes + WAV_HEADER as u32 - 8).to_le_bytes(),
        b"WAVEfmt \x10\0\0\0",
        // Integers, of one channel.
        &[1, 0, 1, 0],
        &rate.to_le_bytes(),
        &rate.saturating_mul(2).to_le_bytes(),
        &[2, 0],
        &[16, 0],
        b"data",
        &bytes.to_le_bytes(),
        &[],
    ];
    let values = parts.into_iter().flatten();
    header.iter_mut().zip(values).for_each(|(byte, value)| *byte = *value);
    header
}

/// Samples from −1 to 1 as little-endian integers of 16 bits; what is beyond is cut off.
pub fn pcm16(samples: &[f32]) -> Vec<u8> {
    let value = |sample: &f32| (sample.clamp(-1.0, 1.0) * 32767.0).round() as i16;
    samples.iter().flat_map(|sample| value(sample).to_le_bytes()).collect()
}
