//! Decoding audio: from the packets of a file to one channel of samples at the rate that is asked for.

use std::io::{ErrorKind as IoErrorKind, Seek as _};

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::Media;
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error as SymphoniaError;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSourceStream, ReadBytes as _};
use symphonia::default::formats::{FlacReader, MpaReader, OggReader, WavReader};

use crate::format::{Format, Kind};
use crate::resample::Resampler;
use crate::wave::too_many_channels;
use crate::{AudioRules, Limits, Source, frames};

/// Rates that files may have, and that may be asked for.
const RATES: std::ops::RangeInclusive<u32> = 1_000..=768_000;

/// Samples of one frame of MP3: encoders do not agree on whether the frame that counts them counts itself.
fn mp3_frame(rate: u32) -> u64 {
    // MPEG 1 begins at 32 kHz, and MPEG 2 has frames of half the length.
    if rate < 32_000 { 576 } else { 1152 }
}

/// Decoded audio, one channel.
#[derive(Clone, PartialEq)]
pub struct Audio {
    /// Samples of one channel, −1 to 1; what a file holds beyond that is not clipped.
    pub samples: Vec<f32>,
    /// Samples per second.
    pub rate: u32,
}

impl Audio {
    /// The audio as a part of a prompt.
    ///
    /// # Errors
    /// When there are no samples.
    pub fn into_media(self) -> Result<Media> {
        Media::audio(self.samples, self.rate).map_err(|e| Error::of(ErrorKind::Prompt, e))
    }
}

impl std::fmt::Debug for Audio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Audio({} samples at {} Hz)", self.samples.len(), self.rate)
    }
}

/// Decodes audio: WAV (integers, floats, A-law, µ-law), FLAC, MP3, Ogg Vorbis.
///
/// Integers are divided by 2^(bits − 1). Several channels become their mean. Audio of the wanted rate keeps each
/// sample as it is; others are resampled. An MP3 file whose first frame does not count the others, as a recording of a
/// stream, is taken to be as long as it is.
///
/// # Errors
///
/// [`ErrorKind::Io`] where the file cannot be read; [`ErrorKind::Prompt`] where it is no audio, is broken or cut off,
/// longer than the limits, or holds a sample that is no number.
pub fn decode_audio(source: &Source, rules: &AudioRules, limits: &Limits) -> Result<Audio> {
    if !RATES.contains(&rules.rate) {
        let what = format!("a rate of {} Hz is asked for, expected {RATES:?}", rules.rate);
        return Err(Error::new(ErrorKind::Usage, what));
    }
    let mut file = Opened::new(source, limits)?;
    let mut decoder = file.decoder()?;
    let (rate, declared) = (file.rate, file.declared);
    let max = u64::from(limits.seconds) * u64::from(rate);
    if let Some(frames) = declared.filter(|&frames| frames > max) {
        return Err(file.too_long(frames, limits));
    }
    let mut resampler = Resampler::new(rate, rules.rate);
    let (mut frames, mut interleaved, mut mono) = (0u64, Vec::new(), Vec::new());
    while let Some(channels) = file.next(decoder.as_mut(), &mut interleaved)? {
        mix(&interleaved, channels, &mut mono);
        if let Some(at) = interleaved.iter().position(|sample| !sample.is_finite()) {
            let frame = frames + (at / channels) as u64;
            let value = interleaved.get(at).copied().unwrap_or_default();
            return Err(file.not_a_number(value, frame));
        }
        frames += mono.len() as u64;
        if frames > max {
            return Err(file.too_long(frames, limits));
        }
        resampler.push(&mono);
    }
    file.check_length(frames)?;
    let samples = resampler.finish();
    if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
        let value = samples.get(at).copied().unwrap_or_default();
        return Err(file.not_a_number(value, at as u64 * u64::from(rate) / u64::from(rules.rate)));
    }
    Ok(Audio { samples, rate: rules.rate })
}

/// The mean of the channels.
fn mix(interleaved: &[f32], channels: usize, mono: &mut Vec<f32>) {
    mono.clear();
    if channels == 1 {
        mono.extend_from_slice(interleaved);
        return;
    }
    // f64: the sum of two values is exact, and none overflows.
    let mean = |frame: &[f32]| frame.iter().copied().map(f64::from).sum::<f64>() / channels as f64;
    mono.extend(interleaved.chunks_exact(channels).map(|frame| mean(frame) as f32));
}

/// A file whose header was read.
struct Opened<'a> {
    source: &'a Source,
    format: Format,
    reader: Box<dyn FormatReader + 'a>,
    track: u32,
    codec: AudioCodecParameters,
    rate: u32,
    /// Samples of a channel that the header declares.
    declared: Option<u64>,
}

impl<'a> Opened<'a> {
    fn new(source: &'a Source, limits: &Limits) -> Result<Self> {
        let mut stream = source.open(limits)?;
        let (start, head) = stream.head(source)?;
        let format = Format::expect(source, &head, Kind::Audio)?;
        let broken = |e: SymphoniaError| unread(source, format, &e);
        if format == Format::Wav
            && let Some(why) = too_many_channels(&mut stream, start)
        {
            return Err(source.broken(format.name(), why));
        }
        if matches!(format, Format::Flac | Format::Mp3) {
            stream.without_tags(source)?;
        }
        if format == Format::Mp3 {
            let missing = frames::missing(&mut stream, start);
            match missing.map_err(|e| Error::caused(ErrorKind::Io, source, e))? {
                0 => {}
                missing => {
                    let what = format!("its last frame lacks {missing} bytes or more");
                    return Err(source.broken(format.name(), what));
                }
            }
            stream.rewind().map_err(|e| Error::caused(ErrorKind::Io, source, e))?;
        }
        let bytes = stream.len;
        let mut stream = MediaSourceStream::new(Box::new(stream), Default::default());
        stream.ignore_bytes(start).map_err(|e| broken(e.into()))?;
        let options = FormatOptions::default();
        let reader: Box<dyn FormatReader + 'a> = match format {
            Format::Wav => Box::new(WavReader::try_new(stream, options).map_err(broken)?),
            Format::Flac => Box::new(FlacReader::try_new(stream, options).map_err(broken)?),
            Format::Ogg => Box::new(OggReader::try_new(stream, options).map_err(broken)?),
            _ => Box::new(MpaReader::try_new(stream, options).map_err(broken)?),
        };
        let nothing = || source.broken(format.name(), "its header names no audio");
        let track = reader.default_track(TrackType::Audio).ok_or_else(nothing)?;
        let codec =
            track.codec_params.as_ref().and_then(|codec| codec.audio()).ok_or_else(nothing)?;
        let codec = codec.clone();
        let rate = codec.sample_rate.unwrap_or(0);
        if !RATES.contains(&rate) {
            let what = format!("its header declares {rate} samples per second, expected {RATES:?}");
            return Err(source.broken(format.name(), what));
        }
        // Without a frame that counts the others, the number of an MP3 file is an estimate.
        let counted = format != Format::Mp3 || counts_frames(&head);
        let declared = track.num_frames.filter(|_| counted);
        let track = track.id;
        let file = Self { source, format, reader, track, codec, rate, declared };
        file.check_size(bytes)?;
        Ok(file)
    }

    /// Checks that a WAV file is large enough for the length that its header declares.
    fn check_size(&self, bytes: u64) -> Result<()> {
        let codec = &self.codec;
        let channels = codec.channels.as_ref().map_or(1, |channels| channels.count() as u64);
        let bits = codec.bits_per_coded_sample.or(codec.bits_per_sample).unwrap_or(0);
        if self.format != Format::Wav {
            return Ok(());
        }
        let Some(declared) = self.declared else {
            return Err(self
                .source
                .refused("a WAV file whose header does not declare how long it is")
                .hint("a pipe wrote it: write to a file instead, or repair it: ffmpeg -i FILE out.wav"));
        };
        let needed = declared.saturating_mul(channels).saturating_mul(u64::from(bits) / 8);
        if needed > bytes {
            return Err(self.source.broken(
                "WAV",
                format!("its header declares {needed} bytes of audio, the file has {bytes} in all"),
            ));
        }
        Ok(())
    }

    fn decoder(&self) -> Result<Box<dyn AudioDecoder>> {
        let options = AudioDecoderOptions::default();
        symphonia::default::get_codecs().make_audio_decoder(&self.codec, &options).map_err(|_| {
            let format = self.format.name();
            self.source
                .refused(format!(
                    "a {format} file whose coding is not understood ({})",
                    self.codec.codec
                ))
                .hint("convert it to plain WAV: ffmpeg -i FILE out.wav")
        })
    }

    /// Decodes the next samples; the number of channels, or `None` at the end.
    fn next(
        &mut self,
        decoder: &mut dyn AudioDecoder,
        interleaved: &mut Vec<f32>,
    ) -> Result<Option<usize>> {
        loop {
            let packet = match self.reader.next_packet() {
                Ok(Some(packet)) => packet,
                Ok(None) => return Ok(None),
                Err(e) => return Err(self.broken(&e)),
            };
            if packet.track_id != self.track {
                continue;
            }
            let decoded = decoder.decode(&packet).map_err(|e| self.broken(&e))?;
            let channels = decoded.spec().channels().count();
            if decoded.spec().rate() != self.rate || channels == 0 {
                return Err(self.source.broken(self.format.name(), "its rate changes midway"));
            }
            decoded.copy_to_vec_interleaved(interleaved);
            return Ok(Some(channels));
        }
    }

    fn broken(&self, e: &SymphoniaError) -> Error {
        unread(self.source, self.format, e)
    }

    fn too_long(&self, frames: u64, limits: &Limits) -> Error {
        let seconds = frames as f64 / f64::from(self.rate);
        let what =
            format!("audio of {seconds:.0} seconds or more, at most {} are read", limits.seconds);
        self.source.refused(what).hint("cut out the part that matters")
    }

    fn not_a_number(&self, value: f32, frame: u64) -> Error {
        let seconds = frame as f64 / f64::from(self.rate);
        self.source
            .refused(format!("sample {frame} (at {seconds:.3} s) is {value}, expected −1 to 1"))
            .hint("the program that wrote the file computed no number there")
    }

    /// Checks that all is there that the header declares.
    fn check_length(&self, frames: u64) -> Result<()> {
        let tolerated = if self.format == Format::Mp3 { mp3_frame(self.rate) } else { 0 };
        match self.declared.filter(|&declared| frames + tolerated < declared) {
            None if frames == 0 => Err(self
                .source
                .refused("holds no audio (0 samples)")
                .hint("record or convert it again")),
            None => Ok(()),
            Some(declared) => {
                let rate = f64::from(self.rate);
                Err(self.source.broken(
                    self.format.name(),
                    format!(
                        "{:.3} of {:.3} seconds are there",
                        frames as f64 / rate,
                        declared as f64 / rate
                    ),
                ))
            }
        }
    }
}

/// True if the first frame of an MP3 file declares the number of frames.
fn counts_frames(head: &[u8]) -> bool {
    let tags: [&[u8]; 3] = [b"Xing", b"Info", b"VBRI"];
    let first = head.get(..64).unwrap_or(head);
    first.windows(4).any(|window| tags.contains(&window))
}

/// The error of a file that a decoder does not read.
fn unread(source: &Source, format: Format, e: &SymphoniaError) -> Error {
    match e {
        SymphoniaError::IoError(e) if e.kind() == IoErrorKind::UnexpectedEof => {
            source.broken(format.name(), "it ends in the middle of the audio")
        }
        SymphoniaError::Unsupported(what) => source
            .refused(format_args!("a {} file of a kind that is not read: {what}", format.name()))
            .hint("convert it to plain WAV: ffmpeg -i FILE out.wav"),
        e => source.broken(format.name(), e),
    }
}
