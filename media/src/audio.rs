//! Decoding audio: from the packets of a file to one channel of samples at the rate that is asked for.

use std::borrow::Cow;
use std::io::{Cursor, ErrorKind as IoErrorKind, Read, Seek as _};

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::Media;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_AAC, CODEC_ID_OPUS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error as SymphoniaError;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSourceStream, ReadBytes as _};
use symphonia::core::packet::Packet;
use symphonia::core::units::TimeBase;
use symphonia::default::formats::{
    AdtsReader, FlacReader, IsoMp4Reader, MkvReader, MpaReader, OggReader, WavReader,
};

use crate::container::{self, Edit, Findings};
use crate::format::{Format, Kind};
use crate::opus::{self, Opus};
use crate::resample::Resampler;
use crate::source::Pipe;
use crate::wave::{self, too_many_channels};
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

/// Decodes audio: WAV (integers, floats, A-law, µ-law), FLAC, MP3, AAC (plain or in MP4), Opus or Vorbis in Ogg or
/// WebM, Opus in MP4.
///
/// Integers are divided by 2^(bits − 1). Several channels become their mean. Audio of the wanted rate keeps each
/// sample as it is; others are resampled. An MP3 file whose first frame does not count the others, as a recording of a
/// stream, is taken to be as long as it is. Samples that only fill a decoder, and those outside the edit of an MP4
/// file, are left out. Where packets of Opus are missing there is silence, so that what follows keeps its time.
///
/// # Errors
///
/// [`ErrorKind::Io`] where the file cannot be read; [`ErrorKind::Prompt`] where it is no audio, is broken or cut off,
/// longer than the limits, or holds a sample that is no number.
pub fn decode_audio(source: &Source, rules: &AudioRules, limits: &Limits) -> Result<Audio> {
    let mut reader = AudioReader::open(source, rules, limits)?;
    let mut samples = Vec::new();
    while reader.read(&mut samples)? {}
    Ok(Audio { samples, rate: rules.rate })
}

/// Audio that is decoded while it is read, as [`decode_audio`] decodes it.
pub struct AudioReader<'a> {
    file: Opened<'a>,
    decoder: Codec,
    /// `None` once the audio has ended.
    resampler: Option<Resampler>,
    /// Rate that is asked for.
    wanted: u32,
    limits: Limits,
    /// Samples of a channel so far.
    frames: u64,
    /// Samples that were given out.
    read: u64,
    interleaved: Vec<f32>,
    mono: Vec<f32>,
    /// Samples that may be padding.
    waiting: Vec<f32>,
}

impl std::fmt::Debug for AudioReader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AudioReader")
            .field("source", &self.file.source.to_string())
            .field("read", &self.read)
            .finish_non_exhaustive()
    }
}

impl<'a> AudioReader<'a> {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// Errors of [`decode_audio`] that the header shows.
    pub fn open(source: &'a Source, rules: &AudioRules, limits: &Limits) -> Result<Self> {
        Self::of(Opened::new(source, limits)?, rules, limits)
    }

    /// Reads the header of a WAV file that is still being written, from a pipe, say. `name` is that of messages.
    ///
    /// The audio may be of any length. A length in the header is believed where it is less than 2 GiB: beyond that
    /// programs name one that they do not know yet.
    ///
    /// # Errors
    /// Errors of [`decode_audio`] that the header shows.
    pub fn stream(name: &str, input: impl Read + Send + 'a, rules: &AudioRules) -> Result<Self> {
        let file = Opened::stream(name, input)?;
        Self::of(file, rules, &Limits { seconds: u32::MAX, ..Limits::default() })
    }

    fn of(mut file: Opened<'a>, rules: &AudioRules, limits: &Limits) -> Result<Self> {
        if !RATES.contains(&rules.rate) {
            let what = format!("a rate of {} Hz is asked for, expected {RATES:?}", rules.rate);
            return Err(Error::new(ErrorKind::Usage, what));
        }
        let decoder = file.decoder()?;
        let max = u64::from(limits.seconds) * u64::from(file.rate);
        if let Some(frames) = file.declared.filter(|&frames| frames > max) {
            return Err(file.too_long(frames, limits));
        }
        Ok(Self {
            resampler: Some(Resampler::new(file.rate, rules.rate)),
            file,
            decoder,
            wanted: rules.rate,
            limits: *limits,
            frames: 0,
            read: 0,
            interleaved: Vec::new(),
            mono: Vec::new(),
            waiting: Vec::new(),
        })
    }

    /// Number of samples at the rate that is asked for, if the header declares it.
    pub fn declared(&self) -> Option<u64> {
        let (from, to) = (u128::from(self.file.rate), u128::from(self.wanted));
        let count = |frames| (u128::from(frames) * to).div_ceil(from);
        self.file.declared.and_then(|frames| u64::try_from(count(frames)).ok())
    }

    /// Appends the samples of the next packet. False once the audio has ended.
    ///
    /// # Errors
    /// Errors of [`decode_audio`].
    pub fn read(&mut self, samples: &mut Vec<f32>) -> Result<bool> {
        let Some(resampler) = &mut self.resampler else { return Ok(false) };
        let (rate, limits) = (self.file.rate, &self.limits);
        let file = &mut self.file;
        let max = u64::from(limits.seconds) * u64::from(rate);
        let more = match file.next(&mut self.decoder, &mut self.interleaved)? {
            Some(Decoded { channels, gap }) => {
                if gap > max.saturating_sub(self.frames) {
                    return Err(file.too_long(self.frames.saturating_add(gap), limits));
                }
                if gap > 0 {
                    resampler.push(&std::mem::take(&mut self.waiting));
                    resampler.silence(gap);
                    self.frames += gap;
                }
                file.trim(channels, self.frames, &mut self.interleaved);
                mix(&self.interleaved, channels, &mut self.mono);
                if let Some(at) = self.interleaved.iter().position(|sample| !sample.is_finite()) {
                    let frame = self.frames + (at / channels) as u64;
                    let value = self.interleaved.get(at).copied().unwrap_or_default();
                    return Err(file.not_a_number(value, frame));
                }
                self.frames += self.mono.len() as u64;
                if self.frames > max {
                    return Err(file.too_long(self.frames, limits));
                }
                self.waiting.append(&mut self.mono);
                // The last samples may be padding.
                let known = self.waiting.len().saturating_sub(file.padding);
                resampler.push(self.waiting.get(..known).unwrap_or_default());
                self.waiting.drain(..known);
                true
            }
            None => {
                self.frames -= self.waiting.len() as u64;
                file.check_length(self.frames)?;
                false
            }
        };
        let new = match self.resampler.take_if(|_| !more) {
            Some(resampler) => resampler.finish(),
            None => self.resampler.as_mut().map(Resampler::take).unwrap_or_default(),
        };
        if let Some(at) = new.iter().position(|sample| !sample.is_finite()) {
            let value = new.get(at).copied().unwrap_or_default();
            let at = (self.read + at as u64) * u64::from(rate) / u64::from(self.wanted);
            return Err(self.file.not_a_number(value, at));
        }
        self.read += new.len() as u64;
        match samples.is_empty() {
            true => *samples = new,
            false => samples.extend_from_slice(&new),
        }
        Ok(more)
    }
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
    source: Cow<'a, Source>,
    format: Format,
    reader: Box<dyn FormatReader + 'a>,
    track: u32,
    codec: AudioCodecParameters,
    rate: u32,
    /// Samples of a channel that the header declares, those that are heard.
    declared: Option<u64>,
    /// Samples of a channel that are still to be left out.
    skip: u64,
    /// Samples of a channel that are padding at the end.
    padding: usize,
    /// Times of packets.
    time_base: Option<TimeBase>,
    /// End of the packet before, in samples.
    end: Option<i128>,
}

/// Decoder of a file's codec.
enum Codec {
    Opus(Box<Opus>),
    Other(Box<dyn AudioDecoder>),
}

/// Samples of a packet.
struct Decoded {
    channels: usize,
    /// Samples of a channel that are missing before it.
    gap: u64,
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
        if matches!(format, Format::Flac | Format::Mp3 | Format::Adts) {
            stream.without_tags(source)?;
        }
        let bytes = stream.len;
        let found = match format {
            Format::Mp3 | Format::Adts => {
                let missing = frames::missing(&mut stream, start, format == Format::Adts);
                missing.map(|missing| Findings { missing, ..Findings::default() })
            }
            Format::Mp4 => container::mp4(&mut stream, start, bytes),
            Format::Webm => container::webm(&mut stream, start, bytes),
            _ => Ok(Findings::default()),
        };
        let found = found.map_err(|e| Error::caused(ErrorKind::Io, source, e))?;
        if found.missing > 0 {
            let part = if matches!(format, Format::Mp4 | Format::Webm) { "part" } else { "frame" };
            let what = format!("its last {part} lacks {} bytes or more", found.missing);
            return Err(source.broken(format.name(), what));
        }
        stream.rewind().map_err(|e| Error::caused(ErrorKind::Io, source, e))?;
        let mut stream = MediaSourceStream::new(Box::new(stream), Default::default());
        stream.ignore_bytes(start).map_err(|e| broken(e.into()))?;
        let options = FormatOptions::default();
        let reader: Box<dyn FormatReader + 'a> = match format {
            Format::Wav => Box::new(WavReader::try_new(stream, options).map_err(broken)?),
            Format::Flac => Box::new(FlacReader::try_new(stream, options).map_err(broken)?),
            Format::Ogg => Box::new(OggReader::try_new(stream, options).map_err(broken)?),
            Format::Adts => Box::new(AdtsReader::try_new(stream, options).map_err(broken)?),
            Format::Mp4 => Box::new(IsoMp4Reader::try_new(stream, options).map_err(broken)?),
            Format::Webm => Box::new(MkvReader::try_new(stream, options).map_err(broken)?),
            _ => Box::new(MpaReader::try_new(stream, options).map_err(broken)?),
        };
        // Without a frame that counts the others, the number of an MP3 or AAC file is an estimate, and a fragmented
        // MP4 file has 0.
        let counted = match format {
            Format::Mp3 => counts_frames(&head),
            Format::Adts => false,
            _ => true,
        };
        let mut file = Self::of(Cow::Borrowed(source), format, reader)?;
        file.declared =
            file.declared.filter(|&frames| counted && (frames, format) != (0, Format::Mp4));
        // More than a packet is none.
        let padding = u128::from(found.padding) * u128::from(file.rate) / 1_000_000_000;
        let padding = usize::try_from(padding)
            .ok()
            .filter(|padding| *padding <= opus_pure::MAX_PACKET_SAMPLES);
        file.padding = padding.unwrap_or(0);
        if let Some(edit) = found.edit {
            file.cut(edit);
        }
        file.check_size(bytes)?;
        Ok(file)
    }

    /// A WAV file in a pipe, of which only the header is there.
    fn stream(name: &str, mut input: impl Read + Send + 'a) -> Result<Self> {
        let source = Source::Bytes { name: name.to_owned(), bytes: Vec::new() };
        let header = wave::header(&mut input).map_err(|e| match e.kind() {
            IoErrorKind::InvalidData => source.broken(Format::Wav.name(), e),
            _ => Error::caused(ErrorKind::Io, &source, e),
        })?;
        if let Some(why) = too_many_channels(&mut Cursor::new(&header.bytes), 0) {
            return Err(source.broken(Format::Wav.name(), why));
        }
        let counted = header.counted;
        let stream = Pipe::new(Cursor::new(header.bytes).chain(input));
        let stream = MediaSourceStream::new(Box::new(stream), Default::default());
        let reader = WavReader::try_new(stream, FormatOptions::default())
            .map_err(|e| unread(&source, Format::Wav, &e))?;
        let mut file = Self::of(Cow::Owned(source), Format::Wav, Box::new(reader))?;
        file.declared = file.declared.filter(|_| counted);
        Ok(file)
    }

    /// The audio of a container whose header was read.
    fn of(
        source: Cow<'a, Source>,
        format: Format,
        reader: Box<dyn FormatReader + 'a>,
    ) -> Result<Self> {
        let silent = || {
            let what = format!("the {} file has no audio track that is read", format.name());
            source.refused(what).hint(
                "is it a video without audio? Otherwise convert it to WAV: ffmpeg -i FILE out.wav",
            )
        };
        let track = reader.default_track(TrackType::Audio).ok_or_else(silent)?;
        let codec =
            track.codec_params.as_ref().and_then(|codec| codec.audio()).ok_or_else(silent)?;
        let codec = codec.clone();
        let rate =
            if codec.codec == CODEC_ID_OPUS { opus::RATE } else { codec.sample_rate.unwrap_or(0) };
        if !RATES.contains(&rate) {
            let what = format!("its header declares {rate} samples per second, expected {RATES:?}");
            return Err(source.broken(format.name(), what));
        }
        Ok(Self {
            source,
            format,
            track: track.id,
            time_base: track.time_base,
            declared: track.num_frames,
            reader,
            codec,
            rate,
            skip: 0,
            padding: 0,
            end: None,
        })
    }

    /// Leaves out what an edit of an MP4 file does: mostly the samples that only fill the decoder.
    fn cut(&mut self, edit: Edit) {
        let rate = u64::from(self.rate);
        let start = self.samples_at(edit.start.into());
        self.skip = u64::try_from(start).unwrap_or(u64::MAX);
        let rest = self.declared.map(|declared| declared.saturating_sub(self.skip));
        let length = edit.length.saturating_mul(rate).checked_div(edit.scale.into());
        // Its units of time are coarse.
        let shorter = length.filter(|length| {
            *length > 0 && rest.is_some_and(|rest| length.saturating_add(rate / 10) < rest)
        });
        self.declared = shorter.or(rest);
    }

    /// A time of the container in samples.
    fn samples_at(&self, time: i128) -> i128 {
        let rate = i128::from(self.rate);
        self.time_base.map_or(time, |base| {
            time * i128::from(base.numer.get()) * rate / i128::from(base.denom.get())
        })
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

    fn decoder(&mut self) -> Result<Codec> {
        if self.codec.codec == CODEC_ID_OPUS {
            let head = self.codec.extra_data.as_deref().unwrap_or_default();
            let opus = Opus::new(head, self.format == Format::Mp4)
                .map_err(|why| self.source.broken(self.format.name(), why))?;
            if self.format == Format::Ogg {
                self.declared = self.declared.map(|all| all.saturating_sub(opus.pre_skip));
            }
            if self.skip == 0 {
                self.skip = opus.pre_skip;
            }
            return Ok(Codec::Opus(Box::new(opus)));
        }
        let options = AudioDecoderOptions::default();
        let decoder = symphonia::default::get_codecs().make_audio_decoder(&self.codec, &options);
        decoder.map(Codec::Other).map_err(|_| {
            let format = self.format.name();
            let what = match self.codec.codec {
                CODEC_ID_AAC => format!(
                    "a {format} file with AAC of a kind that is not read: HE-AAC, or more than two channels"
                ),
                codec => format!("a {format} file whose coding is not understood ({codec})"),
            };
            self.source.refused(what).hint("convert it to plain WAV: ffmpeg -i FILE out.wav")
        })
    }

    /// Decodes the next samples, `None` at the end.
    fn next(&mut self, codec: &mut Codec, interleaved: &mut Vec<f32>) -> Result<Option<Decoded>> {
        loop {
            let packet = match self.reader.next_packet() {
                Ok(Some(packet)) => packet,
                Ok(None) => return Ok(None),
                // The file is whole; only its end ends what declares no size.
                Err(SymphoniaError::IoError(e))
                    if e.kind() == IoErrorKind::UnexpectedEof
                        && (self.format == Format::Webm
                            || self.format == Format::Wav && self.declared.is_none()) =>
                {
                    return Ok(None);
                }
                Err(e) => return Err(self.broken(&e)),
            };
            if packet.track_id != self.track {
                continue;
            }
            let decoder = match codec {
                Codec::Other(decoder) => decoder,
                // A packet that was not sent.
                Codec::Opus(_) if packet.data.is_empty() => continue,
                Codec::Opus(opus) => {
                    let (channels, name) = (opus.channels, self.format.name());
                    let samples = opus.decode(&packet.data).map_err(|why| {
                        self.source.broken(name, format!("a packet of Opus: {why}"))
                    })?;
                    let length = samples.len() / channels;
                    let trim = usize::try_from(packet.trim_end.get()).unwrap_or(length);
                    let heard = length.saturating_sub(trim) * channels;
                    interleaved.clear();
                    interleaved.extend_from_slice(samples.get(..heard).unwrap_or_default());
                    return Ok(Some(Decoded { channels, gap: self.gap(&packet, length) }));
                }
            };
            let decoded = decoder.decode(&packet).map_err(|e| self.broken(&e))?;
            let channels = decoded.spec().channels().count();
            if decoded.spec().rate() != self.rate || channels == 0 {
                return Err(self.source.broken(self.format.name(), "its rate changes midway"));
            }
            decoded.copy_to_vec_interleaved(interleaved);
            return Ok(Some(Decoded { channels, gap: 0 }));
        }
    }

    /// Samples that are missing between the packet before and this one of `length` samples: a recorder leaves out
    /// packets of silence, and a network loses some. Less than a packet is how coarse the container's times are.
    fn gap(&mut self, packet: &Packet, length: usize) -> u64 {
        let (start, length) = (self.samples_at(packet.pts.get().into()), length as i128);
        let gap = self.end.map_or(0, |end| start - end);
        self.end = Some(start + length);
        if gap * 10 < length * 9 { 0 } else { u64::try_from(gap).unwrap_or(u64::MAX) }
    }

    /// Leaves out samples that are not heard, behind the first `frames`.
    fn trim(&mut self, channels: usize, frames: u64, interleaved: &mut Vec<f32>) {
        let all = (interleaved.len() / channels) as u64;
        let skip = self.skip.min(all);
        self.skip -= skip;
        interleaved.drain(..skip as usize * channels);
        if let (Format::Mp4, Some(declared)) = (self.format, self.declared) {
            let left = declared.saturating_sub(frames).min(all - skip);
            interleaved.truncate(left as usize * channels);
        }
    }

    fn broken(&self, e: &SymphoniaError) -> Error {
        unread(&self.source, self.format, e)
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
