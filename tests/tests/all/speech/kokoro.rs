//! The tiny models of Kokoro and KittenTTS from the checkpoints as published (`.pth`, or ONNX in f32 and of 8 bits;
//! voices) to samples, against goldens that the package `kokoro` made (`tests/oracle/kokoro_speak.py`, `kitten.py`), with
//! the noise of the source drawn by the same generator.

use std::path::Path;

use qhx_base::compare::Distance;
use qhx_base::{CancelToken, Result};
use qhx_core::engine::{Model, Prompt};
use qhx_core::op::Segment;
use qhx_forge::{ForgeOptions, Precision};
use qhx_kit::audio::{Clip, FrontEnd, LogMel};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::{backends, has, tiny};
use qhx_tiers::tier;
use serde::Deserialize;
use serde_json::json;

use crate::golden::{self as steps, find_damage};

const FIXTURE: &str = "kokoro-tiny";
const KITTENS: [&str; 2] = ["kitten-tiny", "kitten-int8"];

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    phonemes: String,
    voice: String,
    speed: f64,
    /// Characters of the text, where the model asks for them.
    length: Option<u32>,
    durations: Vec<f32>,
}

fn goldens(fixture: &str) -> Vec<Case> {
    tiny::golden_json::<Goldens>(fixture).cases
}

fn bundle(windows: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    bundle_of(FIXTURE, windows, change)
}

fn bundle_of(fixture: &str, windows: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(fixture), |options| {
        set(options, &[("windows", windows)]);
        change(options);
    })
}

/// Voice, speed and phonemes as the tokens that the host-op takes.
fn tokens(bundle: &Forged, case: &Case) -> Vec<u32> {
    let manifest = bundle.json();
    let speech = &manifest["params"]["speech"];
    let voices = speech["voices"].as_array().unwrap();
    let voice = voices.iter().position(|voice| *voice == case.voice).unwrap();
    let symbol = |c: char| speech["symbols"][c.to_string()].as_u64().unwrap() as u32;
    let own = speech["speeds"].as_array().map_or(1.0, |speeds| speeds[voice].as_f64().unwrap());
    let head = [voice as u32, (case.speed * own * 1000.0) as u32];
    head.into_iter().chain(case.length).chain(case.phonemes.chars().map(symbol)).collect()
}

fn speak(model: &mut Model, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    let mut parts = Vec::new();
    model.speak(&Prompt::Tokens(tokens.to_vec()), &CancelToken::new(), |samples| {
        parts.push(samples.to_vec());
        Ok(())
    })?;
    Ok(parts)
}

/// The mean distance of two clips' log-mel spectra, in nats.
fn mel_distance(found: &[f32], expected: &[f32]) -> f64 {
    let front: FrontEnd = serde_json::from_value(json!({
        "rate": 24_000, "frame": 600, "hop": 150, "fft": 1024, "window": "symmetric_hann", "left": 300, "span": 450,
        "spectrum": "power",
        "filters": {"mels": 80, "min_hz": 0.0, "max_hz": 12_000.0, "scale": "slaney", "area_norm": true},
        "log": {"ln_add": 1e-6},
    }))
    .unwrap();
    let spectrum = |samples: &[f32]| {
        let mut mel = LogMel::new(front.clone()).unwrap();
        let mut rows = vec![0.0; mel.frames(samples.len()) * mel.mels()];
        mel.write(Clip::new(samples, 24_000, 24_000).unwrap(), &mut rows).unwrap();
        rows
    };
    let (found, expected) = (spectrum(found), spectrum(expected));
    let sum: f64 = found.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs())).sum();
    sum / expected.len() as f64
}

/// Each part of the arithmetic, through graphs as long as the clip needs and through longer ones, which hide the rest.
#[test]
fn cpu_equals_the_package() {
    for (fixture, windows) in
        [(FIXTURE, "3"), (FIXTURE, "2,4"), (KITTENS[0], "3"), (KITTENS[1], "4")]
    {
        let bundle = bundle_of(fixture, windows, |_| ());
        for case in goldens(fixture) {
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            let parts = speak(&mut model, &tokens(&bundle, &case)).unwrap();
            let name = &case.name;
            let golden = |part: &str| tiny::golden_tensor(fixture, &format!("{name}.{part}"));
            let distance = |part: &str, found: &[f32]| {
                let expected = golden(part);
                assert_eq!(found.len(), expected.len(), "{fixture}: {windows}: {name}: {part}");
                let distance = Distance::of(found, &expected).unwrap();
                eprintln!(
                    "{fixture} {windows} {name} {part}: {:.1e}, {:.1e}",
                    distance.largest, distance.relative
                );
                distance
            };
            let bert = distance("bert", &model.array("bert"));
            assert_eq!(model.array("durations"), case.durations, "{fixture}: {windows}: {name}");
            let spectrum = model.array("spectrum");
            let steps = spectrum.len() / 22;
            let eighth = |step| (0..22).map(move |bin| bin * steps + step);
            let eighths: Vec<f32> =
                (0..steps).step_by(8).flat_map(eighth).map(|at| spectrum[at]).collect();
            let [samples] = &parts[..] else { panic!("{} parts", parts.len()) };
            let mel = mel_distance(samples, &golden("audio"));
            eprintln!("{fixture} {windows} {name} mel: {mel:.1e}");
            let found = [
                bert,
                distance("f0", &model.array("f0")),
                distance("n", &model.array("n")),
                distance("post", &eighths),
                distance("audio", samples),
            ];
            // The phase of a sine is the sum of all F0 before it, which f32 holds to 1e-5: the package's own spectrum
            // moves by 0.3 with that. The second voice has noise alone.
            let (post, audio, mels) =
                if name == "one" { (0.5, 0.15, 0.15) } else { (2e-4, 1e-4, 1e-4) };
            for (distance, limit) in found.iter().zip([1e-4, 2e-2, 1e-3, post, audio]) {
                assert!(
                    distance.largest <= limit,
                    "{fixture}: {windows}: {name}: {} > {limit}",
                    distance.largest
                );
            }
            assert!(mel <= mels, "{fixture}: {windows}: {name}: {mel:e}");
        }
    }
}

#[test]
fn long_texts_come_in_parts_cut_behind_pauses() {
    let bundle = bundle("1", |_| ());
    let case = &goldens(FIXTURE)[0];
    let mut model = bundle.on_cpu();
    let parts = speak(&mut model, &tokens(&bundle, case)).unwrap();
    let frames: f32 = case.durations.iter().sum();
    let lengths: Vec<_> = parts.iter().map(|part| part.len() / 600).collect();
    assert_eq!(lengths.iter().sum::<usize>(), frames as usize);
    assert!(lengths.len() > 2 && lengths.iter().all(|len| *len <= 40), "{lengths:?}");
    // `həlˈO ` and what stands in front of it: the cut is behind the space.
    let space = 1 + case.phonemes.chars().position(|c| c == ' ').unwrap() + 1;
    assert_eq!(lengths[0] as f32, case.durations[..space].iter().sum::<f32>());
}

#[test]
fn golden_steps_execute_every_graph_of_a_voice() {
    let bundle = bundle("1,2", |_| ());
    find_damage(&bundle.manifest, &["albert", "prosody", "voice"]);
}

#[test]
fn tokens_that_are_no_speech_are_refused() {
    let bundle = bundle("1", |_| ());
    let mut model = bundle.on_cpu();
    let long = vec![1; 63];
    for (tokens, what) in [
        (&[][..], "no tokens"),
        (&[0, 1000], "0 phonemes, expected 1 to 62"),
        (&[0, 0, 1], "speed 0"),
        (&[0, 5000, 1], "speed 5000"),
        (&[2, 1000, 1], "a voice below 2"),
        (&[0, 1000, 80], "phoneme 80"),
        (&[&[0, 1000][..], &long].concat(), "63 phonemes"),
    ] {
        has(model.op_mut().speak(&[Segment::Tokens(tokens)]).unwrap_err().message(), &[what]);
    }
    assert_eq!(model.op_mut().speak(&[]).unwrap().len(), 0);
}

#[test]
fn bundles_that_do_not_fit_are_refused() {
    bundle("1", |_| ()).refuses([
        ("/params/speech/durations", json!(13), "as the sizes of manifest /params/speech"),
        ("/params/speech/rows", json!(9), "2 voices of 9 rows"),
        ("/params/speech/source/hop", json!(0), "expected an even fft"),
        ("/params/hidden", json!(15), "expected"),
        ("/plan/params/voice", json!("mouth"), "mouth"),
        ("/plan/params/symbols", json!(["symbols", "albert"]), "expected as many"),
    ]);
}

#[test]
fn kittens_that_are_damaged_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["config.json", "kitten_tts_tiny.onnx", "voices.npz"];
    let [config, onnx, voices] = files;
    let source = tiny::fixture(KITTENS[1]);
    let made = |change: &dyn Fn(&Path)| {
        for file in files {
            std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
        }
        change(folder.path());
        let made = Forged::try_of(folder.path(), |o| set(o, &[("windows", "1")]));
        made.map(drop).unwrap_err().to_string()
    };
    let edit = |from: &'static str, to: &'static str| {
        made(&move |folder: &Path| {
            let text = std::fs::read_to_string(folder.join(config)).unwrap();
            assert!(text.contains(from), "{from}");
            std::fs::write(folder.join(config), text.replace(from, to)).unwrap();
        })
    };
    has(&made(&|folder| std::fs::remove_file(folder.join(voices)).unwrap()), &[voices]);
    has(&made(&|folder| std::fs::write(folder.join(voices), b"PK").unwrap()), &[voices, "ZIP"]);
    // An archive of nothing.
    let empty = [b"PK\x05\x06", &[0; 18][..]].concat();
    has(&made(&|folder| std::fs::write(folder.join(voices), &empty).unwrap()), &["holds no voice"]);
    has(&edit("\"voices.npz\"", "\"../voices.npz\""), &["voices", "the name of a file beside it"]);
    has(&edit("-m\": 0.8", "-m\": 0.08"), &["speed_priors", "from 0.25 to 4"]);
    let bytes = std::fs::read(source.join(onnx)).unwrap();
    for length in [0, 9000, bytes.len() - 1] {
        let cut = made(&|folder| std::fs::write(folder.join(onnx), &bytes[..length]).unwrap());
        has(&cut, &[onnx]);
    }
    // One of a kind without another: what is named is missed, and a weight without its scale.
    let renamed = |name: &'static str| {
        made(&|folder| {
            let mut bytes = bytes.clone();
            let length = name.len();
            let places: Vec<_> = (0..bytes.len() - length)
                .filter(|at| bytes[*at..].starts_with(name.as_bytes()))
                .collect();
            assert!(!places.is_empty(), "{name}");
            places.into_iter().for_each(|at| bytes[at] = b'X');
            std::fs::write(folder.join(onnx), bytes).unwrap();
        })
    };
    has(&renamed("kmodel.bert_encoder.bias"), &["no tensor bert_encoder.bias"]);
    has(&renamed("attention.query.bias"), &["attention.query"]);
    has(
        &renamed("kmodel.text_encoder.embedding.weight_scale"),
        &["no tensor", "kmodel.text_encoder.embedding.weight_scale"],
    );
}

/// The voice without sines, whose graphs are short; both, and the other chip, with `QHX_FULL`.
#[tier(qnn)]
fn the_npu_speaks_the_same() {
    let full = tiny::full_matrix();
    for target in if full { &["v81", "v73"][..] } else { &["v81"] } {
        compare_on_npu(FIXTURE, target, full);
    }
}

#[tier(qnn, full)]
fn the_npu_speaks_as_kittens_do() {
    compare_on_npu(KITTENS[0], "v81", false);
    compare_on_npu(KITTENS[1], "v73", false);
}

/// Compares what a chip says with the package's; of the voice without sines alone unless `both`.
#[track_caller]
fn compare_on_npu(fixture: &str, target: &str, both: bool) {
    let bundle = bundle_of(fixture, if both { "3" } else { "1" }, |o| {
        o.precision = Precision::Fp16;
        o.compiler = Some(backends::compiler(target));
    });
    for case in goldens(fixture).iter().filter(|case| both || case.name == "two") {
        let mut model = Dumping::open(&bundle.manifest, backends::qnn());
        let parts = speak(&mut model, &tokens(&bundle, case)).unwrap();
        let name = format!("{fixture} {target} {}", case.name);
        assert_eq!(model.array("durations"), case.durations, "{name}");
        let golden = |part: &str| tiny::golden_tensor(fixture, &format!("{}.{part}", case.name));
        let distance = Distance::of(&model.array("f0"), &golden("f0")).unwrap().largest;
        let mel = mel_distance(&parts[0], &golden("audio"));
        eprintln!("{name}: F0 {distance:.2} Hz, mel {mel:.2e}");
        // Phases of sines sum up what F0 is off.
        let limit = if case.name == "one" { 1.0 } else { 0.1 };
        assert!(distance <= 15.0 && mel <= limit, "{name}: {distance} Hz, {mel}");
    }
    let mut model = bundle.open(backends::qnn());
    steps::pass(&bundle.manifest, &mut model, target);
}
