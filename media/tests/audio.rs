//! Audio, compared with what libsndfile, libopus and ffmpeg read from the same files, and with what they were made of.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]

mod common;

use std::f64::consts::TAU;
use std::io::Read;

use common::{file, fixture};
use hound::{SampleFormat, WavSpec, WavWriter};
use qhx_media::{AudioRules, Incoming, Limits, Source, decode_audio};

fn read_at(source: &Source, rate: u32) -> Vec<f32> {
    let mut rules = AudioRules::default();
    rules.rate = rate;
    let audio = decode_audio(source, &rules, &Limits::default())
        .unwrap_or_else(|e| panic!("{}", e.report()));
    assert_eq!(audio.rate, rate);
    assert!(audio.samples.iter().all(|sample| sample.is_finite()));
    audio.samples
}

fn golden(name: &str) -> Vec<f32> {
    let reader = hound::WavReader::open(fixture(&format!("{name}.wav"))).unwrap();
    reader.into_samples::<f32>().map(Result::unwrap).collect()
}

/// A WAV file in memory with these samples, the channels one behind the other in each frame.
fn wav<T: hound::Sample + Copy>(rate: u32, channels: u16, bits: u16, samples: &[T]) -> Source {
    let float = bits == 32;
    let sample_format = if float { SampleFormat::Float } else { SampleFormat::Int };
    let spec = WavSpec { channels, sample_rate: rate, bits_per_sample: bits, sample_format };
    let mut bytes = std::io::Cursor::new(Vec::new());
    let mut writer = WavWriter::new(&mut bytes, spec).unwrap();
    samples.iter().for_each(|&sample| writer.write_sample(sample).unwrap());
    writer.finalize().unwrap();
    Source::Bytes { name: "made.wav".to_owned(), bytes: bytes.into_inner() }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn every_coding_gives_what_libsndfile_gives() {
    let exact = [
        "tone16.flac",
        "tone24.flac",
        "extensible.wav",
        "pcm_u8.wav",
        "pcm_24.wav",
        "pcm_32.wav",
        "double.wav",
        "alaw.wav",
        "ulaw.wav",
    ];
    for name in exact {
        assert_eq!(largest_difference(&read_at(&file(name), 16_000), &golden(name)), 0.0, "{name}");
    }
    for name in ["tone.mp3", "tone.ogg"] {
        let off = largest_difference(&read_at(&file(name), 16_000), &golden(name));
        assert!(off < 1e-5, "{name}: {off}");
    }
}

/// The file, the golden of libopus or ffmpeg, and how much longer that may be: ffmpeg leaves the padding at the end of
/// AAC, and of Opus in MP4.
const ENCODED: [(&str, u32, usize); 7] = [
    ("voice.opus", 48_000, 0),
    ("stereo.webm", 48_000, 0),
    ("recorded.webm", 48_000, 0),
    ("opus.mp4", 48_000, 960),
    ("voice.m4a", 44_100, 1024),
    ("fragments.mp4", 22_050, 0),
    ("voice.aac", 16_000, 0),
];

#[test]
fn opus_and_aac_give_what_libopus_and_ffmpeg_give() {
    for (name, rate, longer) in ENCODED {
        let (found, golden) =
            (read_at(&file(name), rate), read_at(&file(&format!("{name}.flac")), rate));
        let more = golden.len() as i64 - found.len() as i64;
        assert!((0..=longer as i64).contains(&more), "{name}: {} of {}", found.len(), golden.len());
        // A golden has 16 bits, and so have the two channels that it is the mean of.
        let off = largest_difference(&found, &golden[..found.len()]);
        assert!(off < 5e-5, "{name}: {off}");
    }
    // Neither the encoder's delay nor its padding are heard.
    assert_eq!(read_at(&file("voice.m4a"), 44_100).len(), 13_230);
    assert_eq!(read_at(&file("voice.opus"), 48_000).len(), 14_400);
}

#[test]
fn missing_packets_of_opus_leave_their_time() {
    let whole = std::fs::read(fixture("recorded.webm")).unwrap();
    let blocks: Vec<usize> = (0..whole.len() - 4)
        .filter(|&at| whole[at] == 0xa3 && whole[at + 2..at + 4] == [0x81, 0])
        .collect();
    let ogg = std::fs::read(fixture("voice.opus")).unwrap();
    let pages: Vec<usize> =
        (0..ogg.len() - 4).filter(|&at| ogg[at..].starts_with(b"OggS")).collect();
    for (name, bytes, hole) in
        [("recorded.webm", &whole, blocks[4]..blocks[6]), ("voice.opus", &ogg, pages[4]..pages[5])]
    {
        let mut bytes = bytes.clone();
        bytes.drain(hole);
        let holed = read_at(&Source::Bytes { name: name.to_owned(), bytes }, 48_000);
        let golden = read_at(&file(name), 48_000);
        let near = golden.len() as i64 - holed.len() as i64;
        // The times of WebM are milliseconds.
        assert!(near.abs() <= 96, "{name}: {} of {}", holed.len(), golden.len());
        let from = golden.len() - 2000;
        let off = |shift: i64| {
            let other = (from as i64 + shift) as usize;
            let pairs = golden[from..].iter().zip(&holed[other..]);
            pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        let off = (-96..=0).map(off).fold(f32::MAX, f32::min);
        assert!(off < 0.05, "{name}: {off}");
        assert!(holed.windows(900).any(|some| some.iter().all(|sample| *sample == 0.0)), "{name}");
    }
}

#[test]
fn pcm_is_scaled_to_one_and_channels_are_averaged() {
    let mono = wav(16_000, 1, 16, &[0i16, 1, -1, 32_767, -32_768, 12_345]);
    let expected = [0, 1, -1, 32_767, -32_768, 12_345].map(|v: i32| v as f32 / 32_768.0);
    assert_eq!(read_at(&mono, 16_000), expected);
    let stereo = wav(16_000, 2, 16, &[32_767i16, -32_768, 100, 201]);
    assert_eq!(read_at(&stereo, 16_000), [-0.5 / 32_768.0, 150.5 / 32_768.0]);
    let many = wav(16_000, 5, 32, &[0.5f32, 0.25, 0.125, -0.5, 0.375]);
    assert_eq!(read_at(&many, 16_000), [0.15]);
    let large = wav(16_000, 2, 32, &[f32::MAX, f32::MAX, 2.5, -1.0]);
    assert_eq!(read_at(&large, 16_000), [f32::MAX, 0.75]);
}

#[test]
fn the_wanted_rate_is_left_alone() {
    let samples: Vec<f32> = (0..5000).map(|i| ((i * i) as f32 * 1e-3).sin()).collect();
    assert_eq!(read_at(&wav(16_000, 1, 32, &samples), 16_000), samples);
    assert_eq!(read_at(&wav(44_100, 1, 32, &samples), 44_100), samples);
}

/// Sines of these frequencies with a soft beginning and end.
fn sines(frequencies: &[f64], rate: u32, seconds: f64) -> Vec<f32> {
    let count = (seconds * f64::from(rate)).ceil() as usize;
    let at = |i: usize| {
        let t = i as f64 / f64::from(rate);
        let fade = (t.min(seconds - t) / 0.1).clamp(0.0, 1.0);
        let fade = 0.5 - 0.5 * (fade * TAU / 2.0).cos();
        frequencies.iter().map(|f| 0.25 * fade * (TAU * f * t).sin()).sum::<f64>() as f32
    };
    (0..count).map(at).collect()
}

#[test]
fn resampling_keeps_the_waveform() {
    for from in [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 44_101] {
        let frequencies: &[f64] =
            if from == 8_000 { &[300.0, 1234.0, 3500.0] } else { &[300.0, 1234.0, 5000.0] };
        let given = wav(from, 1, 32, &sines(frequencies, from, 1.0));
        let off = largest_difference(&read_at(&given, 16_000), &sines(frequencies, 16_000, 1.0));
        assert!(off < 2e-5, "{from} Hz: {off}");
    }
}

#[test]
fn frequencies_above_half_the_lower_rate_do_not_alias() {
    for (from, frequency) in [(44_100, 9_000.0), (48_000, 12_000.0), (22_050, 8_500.0)] {
        let given = wav(from, 1, 32, &sines(&[frequency], from, 1.0));
        let rest = read_at(&given, 16_000).iter().fold(0.0f32, |max, v| max.max(v.abs()));
        assert!(rest < 1e-4, "{frequency} Hz at {from}: {rest}");
    }
}

#[test]
fn resampled_audio_has_its_length() {
    for (from, count) in [(44_100, 1), (44_100, 100), (8_000, 12_345), (48_000, 4_096)] {
        let given = wav(from, 1, 16, &vec![1000i16; count]);
        let expected = (count as u64 * 16_000).div_ceil(u64::from(from));
        assert_eq!(read_at(&given, 16_000).len() as u64, expected, "{count} at {from}");
    }
}

#[test]
fn tags_behind_the_audio_are_skipped() {
    let mut old = b"TAG".to_vec();
    old.resize(128, 0);
    // An item of four bytes, with a header and a footer.
    let mut ape = Vec::new();
    for (flags, items) in [(0xa000_0000u32, &b"item"[..]), (0x8000_0000, b"")] {
        ape.extend(b"APETAGEX\xd0\x07\0\0\x24\0\0\0\x01\0\0\0");
        ape.extend(flags.to_le_bytes());
        ape.extend([0; 8]);
        ape.extend(items);
    }
    let both = [ape.clone(), old.clone()].concat();
    for (name, tags) in ["tone16.flac", "tone.mp3"]
        .into_iter()
        .flat_map(|name| [&old, &ape, &both].map(|tags| (name, tags)))
    {
        let mut bytes = std::fs::read(fixture(name)).unwrap();
        bytes.extend(tags);
        let tagged = Source::Bytes { name: name.to_owned(), bytes };
        assert_eq!(read_at(&tagged, 16_000), read_at(&file(name), 16_000), "{name}");
    }
}

#[test]
fn tags_before_the_audio_are_skipped() {
    let mut bytes = b"ID3\x04\0\0\0\0\x4f\x0a".to_vec();
    bytes.resize(10 + 0x4f * 128 + 10, b'x');
    bytes.extend(std::fs::read(fixture("tone.mp3")).unwrap());
    let tagged = Source::Bytes { name: "tagged".to_owned(), bytes };
    assert_eq!(read_at(&tagged, 16_000), read_at(&file("tone.mp3"), 16_000));
}

/// Bytes that come a few at a time.
struct Drops<'a>(&'a [u8]);

impl Read for Drops<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let count = buf.len().min(7);
        self.0.read(&mut buf[..count])
    }
}

/// Samples of a pipe, or the report of the error.
fn from_pipe(bytes: &[u8], rate: u32) -> Result<Vec<f32>, String> {
    let mut rules = AudioRules::default();
    rules.rate = rate;
    let found = Incoming::open("the pipe", Drops(bytes), &rules, &Limits::default());
    match found.map_err(|e| e.report().to_string())? {
        Incoming::Wave(mut reader) => {
            let mut samples = Vec::new();
            while reader.read(&mut samples).map_err(|e| e.report().to_string())? {}
            Ok(samples)
        }
        Incoming::Whole(audio) => Ok(audio.samples),
        Incoming::Samples(mut source) => {
            let mut bytes = Vec::new();
            source.read_to_end(&mut bytes).unwrap();
            Ok(bytes.chunks(2).map(|pair| f32::from(pair[0])).collect())
        }
    }
}

/// A file through a pipe is the file, whatever length its writer put into the header.
#[test]
fn a_pipe_gives_what_a_file_gives() {
    let names = [
        "extensible.wav",
        "pcm_u8.wav",
        "double.wav",
        "ulaw.wav",
        "tone16.flac",
        "voice.opus",
        "voice.m4a",
        "voice.aac",
        "tone.mp3",
    ];
    for name in names {
        let bytes = std::fs::read(fixture(name)).unwrap();
        for rate in [16_000, 22_050] {
            assert_eq!(from_pipe(&bytes, rate).unwrap(), read_at(&file(name), rate), "{name}");
        }
    }
    let stereo: Vec<_> = (0..88_201 * 2).map(|at| (at % 321) as i16).collect();
    // Packets of 24 channels of 64 bits are larger than what is buffered.
    let many: Vec<_> =
        (0..24 * 5000).flat_map(|at| (f64::from(at % 77) / 100.0).to_le_bytes()).collect();
    let head =
        [&b"fmt \x10\0\0\0\x03\0\x18\0\x80\x3e\0\0\0\xe0\x2e\0\xc0\0\x40\0data"[..]].concat();
    let [riff, data] =
        [4 + head.len() + 4 + many.len(), many.len()].map(|len| (len as u32).to_le_bytes());
    let many = [&b"RIFF"[..], &riff, b"WAVE", &head, &data, &many].concat();
    let many = Source::Bytes { name: "many.wav".to_owned(), bytes: many };
    for source in [wav(44_100, 2, 16, &stereo), many] {
        let Source::Bytes { bytes, .. } = &source else { unreachable!() };
        let whole = read_at(&source, 16_000);
        let data = bytes.windows(4).position(|four| four == b"data").unwrap() + 4;
        // As ffmpeg, sox, arecord and GStreamer have it, and a file that is followed by a chunk of text.
        for [riff, length] in
            [[u32::MAX; 2], [0x7fff_f024, 0x7fff_f000], [0x8000_0024, 0x8000_0000], [0, 0]]
        {
            let mut piped = bytes.clone();
            piped[4..8].copy_from_slice(&riff.to_le_bytes());
            piped[data..data + 4].copy_from_slice(&length.to_le_bytes());
            assert_eq!(from_pipe(&piped, 16_000).unwrap(), whole, "{length:#x}");
            // Half a frame at its end is none.
            piped.pop();
            let short = from_pipe(&piped, 16_000).unwrap();
            assert!(whole.len() - short.len() <= 1, "{} of {}", short.len(), whole.len());
        }
        let followed = [&bytes[..], b"LIST\x04\0\0\0INFO"].concat();
        assert_eq!(from_pipe(&followed, 16_000).unwrap(), whole);
    }
    // No header: the first bytes are samples, too.
    let samples: Vec<_> = (0..100).collect();
    assert_eq!(from_pipe(&samples, 16_000).unwrap().len(), 50);
    // Nor is a frame of AAC or MP3 that stands alone one.
    for sync in [[0xff, 0xf1], [0xff, 0xfb]] {
        let samples = [&sync[..], &samples].concat();
        assert_eq!(from_pipe(&samples, 16_000).unwrap().len(), 51);
    }
    assert_eq!(from_pipe(b"RIFF", 16_000).unwrap(), [82.0, 70.0]);
}

#[test]
fn broken_audio_from_a_pipe_is_named() {
    let source = wav(16_000, 1, 16, &[0i16; 8000]);
    let Source::Bytes { bytes, .. } = &source else { unreachable!() };
    let error = |bytes: &[u8], what: &str| {
        let error = from_pipe(bytes, 16_000).unwrap_err();
        assert!(error.contains("the pipe: ") && error.contains(what), "{error}");
    };
    error(&bytes[..9001], "it ends in the middle of the audio");
    error(&bytes[..30], "a broken or cut-off WAV file");
    error(&bytes[..44], "a broken or cut-off WAV file");
    error(&[&bytes[..12], b"LIST\xff\xff\xff\x7f", &[0; 4000]].concat(), "within a MiB");
    error(&[&b"\x89PNG\r\n\x1a\n"[..], &[0; 40]].concat(), "an image (PNG)");
    error(b"OggS and then nothing of the kind", "a broken or cut-off Ogg file");
    let mut none = bytes[..44].to_vec();
    none[40..44].fill(0);
    error(&none, "0 samples");
}
