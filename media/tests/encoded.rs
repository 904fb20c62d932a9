//! Audio files that are written, read again: the same samples, as near as the format has them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]

use qhx_media::{
    AUDIO_FORMATS, AudioFormat, AudioRules, Limits, Source, decode_audio, encode_audio,
};

/// Half a second of a voice: harmonics of a pitch that changes, under a soft envelope.
fn voice(rate: u32) -> Vec<f32> {
    let mut phase = 0.0f64;
    let sample = |at: u32| {
        let t = f64::from(at) / f64::from(rate);
        phase += (140.0 + 30.0 * (15.0 * t).sin()) / f64::from(rate);
        let sum: f64 = (1..12)
            .map(|k| (std::f64::consts::TAU * phase * f64::from(k)).sin() / f64::from(k * k))
            .sum();
        (0.4 * sum * (std::f64::consts::TAU * t).sin().abs()) as f32
    };
    (0..rate / 2).map(sample).collect()
}

fn decoded(bytes: Vec<u8>, rate: u32) -> Vec<f32> {
    let mut rules = AudioRules::default();
    rules.rate = rate;
    let source = Source::Bytes { name: "made".to_owned(), bytes };
    decode_audio(&source, &rules, &Limits::default())
        .unwrap_or_else(|e| panic!("{}", e.report()))
        .samples
}

/// Ratio of the samples to what is off, in decibels, and the delay at which it is largest.
fn fidelity(samples: &[f32], decoded: &[f32]) -> (f32, usize) {
    let power = |all: &mut dyn Iterator<Item = f32>| all.map(|x| x * x).sum::<f32>();
    let at = |lag: usize| {
        let pairs = || samples.iter().zip(decoded.get(lag..).unwrap_or_default());
        if pairs().count() < samples.len() * 9 / 10 {
            return f32::MIN;
        }
        let off = power(&mut pairs().map(|(a, b)| a - b));
        10.0 * (power(&mut pairs().map(|(a, _)| *a)) / off.max(1e-12)).log10()
    };
    (0..3000).map(|lag| (at(lag), lag)).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[test]
fn each_format_is_read_again_as_what_was_written() {
    // 24 kHz is Kokoro's rate; 96 kHz is one that no lossy format has.
    for rate in [24_000, 96_000] {
        let samples = voice(rate);
        for (name, format) in AUDIO_FORMATS {
            if format == AudioFormat::Pcm {
                continue;
            }
            let bytes = encode_audio(&samples, rate, format).unwrap();
            let found = decoded(bytes.clone(), rate);
            let (ratio, lag) = fidelity(&samples, &found);
            let (least, most_lag) = match format {
                AudioFormat::Mp3 => (40.0, 0),
                AudioFormat::Opus => (20.0, 0),
                // ADTS has no place for the encoder's delay of a frame, 1024 samples at 48 kHz at most.
                AudioFormat::Aac => (15.0, 1024 * rate as usize / rate.min(48_000) as usize + 2),
                _ => (70.0, 0),
            };
            assert!(ratio > least, "{name}, {rate} Hz: {ratio} dB at {lag}");
            assert!(lag <= most_lag, "{name}, {rate} Hz: {lag}");
        }
    }
}

#[test]
fn samples_beyond_one_are_cut_off() {
    let wav = encode_audio(&[0.0, 0.5, -1.0, 2.0], 24_000, AudioFormat::Wav).unwrap();
    for (found, expected) in decoded(wav, 24_000).iter().zip([0.0, 0.5, -1.0, 1.0]) {
        assert!((found - expected).abs() < 1e-4, "{found} {expected}");
    }
    let loud = vec![f32::MAX; 4800];
    for (name, format) in AUDIO_FORMATS {
        assert!(!encode_audio(&loud, 24_000, format).unwrap().is_empty(), "{name}");
        assert!(!encode_audio(&[0.5], 24_000, format).unwrap().is_empty(), "{name}");
        assert!(encode_audio(&[], 24_000, format).is_err(), "{name}");
    }
}

#[test]
fn a_format_has_the_extension_of_its_files() {
    assert_eq!(AudioFormat::named("MP3"), Some(AudioFormat::Mp3));
    assert_eq!(AudioFormat::named("wma"), None);
    assert_eq!(AudioFormat::Opus.media_type(), "audio/ogg");
}
