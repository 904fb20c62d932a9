//! Windows, filters, and the features of two front ends.

use qhx_kit::audio::{
    Clip, Edge, FrontEnd, Log, LogMel, MelFilters, MelOptions, MelScale, Spectrum, Window,
    limit_range,
};
use serde::Deserialize;

use super::{goldens, rows, sound};

const RATE: u32 = 16_000;

/// `Gemma4AudioFeatureExtractor`: 20 ms every 10 ms, one sample more than the frame must be there.
fn magnitude_ln() -> LogMel {
    LogMel::new(FrontEnd {
        rate: RATE,
        frame: 320,
        hop: 160,
        fft: 512,
        window: Window::PeriodicHann,
        left: 160,
        span: 321,
        edge: Edge::Zeros,
        spectrum: Spectrum::Magnitude,
        filters: MelOptions {
            mels: 128,
            min_hz: 0.0,
            max_hz: 8000.0,
            scale: MelScale::Htk,
            area_norm: false,
        },
        log: Log::LnAdd(1e-3),
    })
    .unwrap()
}

/// `WhisperFeatureExtractor`: 25 ms every 10 ms, mirrored at both ends, without the last frame.
fn power_log10() -> LogMel {
    let front = serde_json::json!({
        "rate": RATE, "frame": 400, "hop": 160, "fft": 400, "window": "periodic_hann", "left": 200, "span": 360,
        "edge": "reflect", "spectrum": "power", "log": {"log10_max": 1e-10},
        "filters": {"mels": 80, "min_hz": 0, "max_hz": 8000, "scale": "slaney", "area_norm": true}
    });
    LogMel::new(serde_json::from_value(front).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Case {
    front: String,
    sound: String,
    samples: usize,
    frames: usize,
    valid: Option<usize>,
    /// Distance of the class, which transforms in f32, from its own arithmetic in f64.
    #[serde(default)]
    rounding: f32,
    kept: Vec<usize>,
    at: usize,
}

/// Largest difference between the kept rows and the goldens'.
fn difference(case: &Case, features: &[f32], width: usize, rows: &[f32]) -> f32 {
    let mut worst = 0f32;
    for (index, frame) in case.kept.iter().enumerate() {
        let expected = &rows[case.at + index * width..][..width];
        for (found, expected) in features[frame * width..][..width].iter().zip(expected) {
            assert!(found.is_finite() && expected.is_finite());
            worst = worst.max((found - expected).abs());
        }
    }
    worst
}

#[test]
fn magnitudes_and_natural_logarithms_are_those_of_the_extractor() {
    let rows = rows();
    let mut mel = magnitude_ln();
    let mut seen = 0;
    for case in goldens::<Vec<Case>>("/cases") {
        if case.front != "magnitude_ln" {
            continue;
        }
        seen += 1;
        let what = format!("{} of {} samples", case.sound, case.samples);
        let samples = sound(&case.sound, case.samples);
        // The class pads to a multiple of 128 samples, makes frames of all, and hides those of padding.
        let padded = case.samples.next_multiple_of(128);
        assert_eq!(mel.frames(padded), case.frames, "{what}");
        let mut features = vec![f32::NAN; case.frames * mel.mels()];
        let clip = Clip::new(&samples, RATE, RATE).unwrap();
        let valid = mel.write(clip, &mut features).unwrap();
        assert_eq!(Some(valid), case.valid, "{what}");
        let worst = difference(&case, &features, mel.mels(), &rows);
        let allowed = if case.rounding > 0.0 { 2e-4 + case.rounding } else { 2e-5 };
        assert!(worst <= allowed, "{what}: off by {worst}");
    }
    assert!(seen >= 16);
}

#[test]
fn powers_and_decimal_logarithms_are_those_of_the_extractor() {
    let rows = rows();
    let mut mel = power_log10();
    let mut seen = 0;
    for case in goldens::<Vec<Case>>("/cases") {
        if case.front != "power_log10" {
            continue;
        }
        seen += 1;
        // The class pads to 30 seconds.
        let mut samples = sound(&case.sound, case.samples);
        samples.resize(30 * RATE as usize, 0.0);
        let mut features = vec![f32::NAN; 3000 * mel.mels()];
        let clip = Clip::new(&samples, RATE, RATE).unwrap();
        assert_eq!(mel.write(clip, &mut features).unwrap(), 3000);
        limit_range(&mut features, 8.0);
        features.iter_mut().for_each(|value| *value = (*value + 4.0) / 4.0);
        let worst = difference(&case, &features, mel.mels(), &rows);
        assert!(worst <= 2e-4, "{}: off by {worst}", case.sound);
    }
    assert_eq!(seen, 3);
}

#[derive(Deserialize)]
struct Bank {
    scale: MelScale,
    area_norm: bool,
    min_hz: f64,
    values: Vec<f32>,
}

#[derive(Deserialize)]
struct Hann {
    periodic: Vec<f32>,
    symmetric: Vec<f32>,
}

#[test]
fn filters_and_windows_are_those_of_the_library() {
    let (mels, bins) = (12, 33);
    for Bank { scale, area_norm, min_hz, values } in goldens::<Vec<Bank>>("/filters") {
        let options = MelOptions { mels, min_hz, max_hz: 7600.0, scale, area_norm };
        let bank = MelFilters::new(&options, RATE, bins).unwrap();
        let largest = values.iter().copied().fold(0.0, f32::max);
        for bin in 0..bins {
            let mut line = vec![0.0; bins];
            line[bin] = 1.0;
            let mut found = vec![f32::NAN; mels];
            bank.write(&line, &mut found);
            for (mel, found) in found.into_iter().enumerate() {
                let expected = values[mel * bins + bin];
                let off = (found - expected).abs();
                assert!(
                    off <= 1e-6 * largest,
                    "{scale:?}: filter {mel}, bin {bin}: {found}, not {expected}"
                );
            }
        }
    }
    let Hann { periodic, symmetric } = goldens("/hann");
    for (window, expected) in [(Window::PeriodicHann, periodic), (Window::SymmetricHann, symmetric)]
    {
        for (found, expected) in window.values(expected.len()).into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{window:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn rows_after_the_audio_are_zero() {
    let mut mel = magnitude_ln();
    let (noise, short) = (sound("noise", 1600), sound("tone", 500));
    let mut features = vec![f32::NAN; 12 * 128];
    let clip = Clip::new(&noise, RATE, RATE).unwrap();
    assert_eq!(mel.write(clip, &mut features).unwrap(), 9);
    let clip = Clip::new(&short, RATE, RATE).unwrap();
    assert_eq!(mel.write(clip, &mut features).unwrap(), 3);
    assert!(features[3 * 128..].iter().all(|value| *value == 0.0));
    let mut fresh = vec![f32::NAN; 12 * 128];
    magnitude_ln().write(clip, &mut fresh).unwrap();
    assert_eq!(features, fresh);
    let silence = [0.0];
    let clip = Clip::new(&silence, RATE, RATE).unwrap();
    assert_eq!(mel.write(clip, &mut features).unwrap(), 0);
    assert!(features.iter().all(|value| *value == 0.0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut mel = magnitude_ln();
    let noise = sound("noise", 1600);
    let clip = Clip::new(&noise, RATE, RATE).unwrap();
    for room in [8 * 128, 9 * 128 + 1, 0] {
        let error = mel.write(clip, &mut vec![0.0; room]).unwrap_err();
        assert!(error.message().contains("9 frames"), "{error}");
        assert!(error.message().contains("rows of 128"), "{error}");
    }
    let sound = mel.front_end().clone();
    let wrong = [
        FrontEnd { hop: 0, ..sound.clone() },
        FrontEnd { left: usize::MAX, span: usize::MAX, ..sound.clone() },
        FrontEnd { span: 160, ..sound.clone() },
        FrontEnd { span: usize::MAX, ..sound.clone() },
        FrontEnd { frame: 513, ..sound.clone() },
        FrontEnd { log: Log::LnAdd(0.0), ..sound.clone() },
        FrontEnd { log: Log::Log10Max(f32::NAN), ..sound.clone() },
        FrontEnd { rate: 8_000, ..sound.clone() },
    ];
    for front in wrong {
        let error = LogMel::new(front).unwrap_err();
        assert!(error.message().contains("expected"), "{error}");
    }
}
