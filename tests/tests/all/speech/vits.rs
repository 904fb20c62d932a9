//! Tiny VITS models from the checkpoints as published to samples: a `VitsModel` of `transformers`, and a voice of Piper
//! as an ONNX file, against goldens of that class and of onnxruntime (`tests/oracle/vits.py`).

use std::path::Path;

use qhx_base::compare::Distance;
use qhx_base::{CancelToken, Result};
use qhx_core::engine::{Model, Prompt};
use qhx_core::op::Segment;
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::{backends, files, has, tiny};
use qhx_tiers::tier;
use serde::Deserialize;
use serde_json::json;

use crate::golden::{self as steps, find_damage};

const VITS: &str = "vits-tiny";
const PIPER: &str = "piper-tiny";

#[derive(Debug, Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    text: String,
    ids: Vec<u32>,
    voice: String,
    seed: u32,
    noise: [f64; 2],
    frames: Vec<u32>,
}

fn goldens(folder: &Path) -> Vec<Case> {
    let text = std::fs::read(folder.join("goldens.json")).unwrap();
    serde_json::from_slice::<Goldens>(&text).unwrap().cases
}

fn bundle(folder: &Path, windows: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(folder, |options| {
        set(options, &[("windows", windows), ("symbols", "160")]);
        change(options);
    })
}

/// Voice, speed, noise, seed and symbols as the tokens that the host-op takes.
fn tokens(bundle: &Forged, case: &Case) -> Vec<u32> {
    let manifest = bundle.json();
    let speech = &manifest["params"]["speech"];
    let voices = speech["voices"].as_array().unwrap();
    let voice = voices.iter().position(|voice| *voice == case.voice).unwrap() as u32;
    let symbol = |c: char| speech["symbols"][c.to_string()].as_u64().unwrap() as u32;
    let thousandths = |value: f64| (value * 1000.0) as u32;
    let head = [voice, 1000, thousandths(case.noise[0]), thousandths(case.noise[1]), case.seed];
    head.into_iter().chain(case.text.chars().map(symbol)).collect()
}

fn speak(model: &mut Model, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    let mut parts = Vec::new();
    model.speak(&Prompt::Tokens(tokens.to_vec()), &CancelToken::new(), |samples| {
        parts.push(samples.to_vec());
        Ok(())
    })?;
    Ok(parts)
}

/// Compares durations and samples of every case, made whole and in parts that overlap.
fn compare(folder: &Path, windows: &[&str]) {
    let golden = |name: &str| files::tensor(&folder.join("goldens.safetensors"), name).1;
    for windows in windows {
        let bundle = bundle(folder, windows, |_| ());
        for case in goldens(folder) {
            let mut model = Dumping::open(&bundle.manifest, backends::cpu());
            let parts = speak(&mut model, &tokens(&bundle, &case)).unwrap();
            let (name, samples) = (&case.name, parts.concat());
            let logs = model.array("durations");
            assert_eq!(logs.len(), case.ids.len(), "{windows}: {name}: symbols");
            let logs = Distance::of(&logs, &golden(&format!("{name}.logs"))).unwrap();
            let expected = golden(&format!("{name}.audio"));
            assert_eq!(samples.len(), expected.len(), "{windows}: {name}: samples");
            assert_eq!(expected.len() % case.frames.iter().sum::<u32>() as usize, 0);
            let distance = Distance::of(&samples, &expected).unwrap();
            eprintln!(
                "{windows} {name}: {} parts, logs {:.1e}, audio {:.1e} of {:.2}",
                parts.len(),
                logs.largest,
                distance.largest,
                expected.iter().fold(0f32, |most, value| most.max(value.abs()))
            );
            assert!(
                logs.largest <= 1e-4 && distance.largest <= 1e-4,
                "{windows}: {name}: {logs:?} {distance:?}"
            );
        }
    }
}

#[test]
fn cpu_equals_the_class() {
    compare(&tiny::fixture(VITS), &["1,9"]);
}

#[test]
fn cpu_equals_onnxruntime() {
    compare(&tiny::fixture(PIPER), &["1,9"]);
}

/// Windows of a second, where a text takes several.
#[test]
fn parts_have_the_samples_of_the_whole() {
    compare(&tiny::fixture(VITS), &["1"]);
}

/// Checkpoints of other shapes: a folder that `vits.py FOLDER --seed N` wrote.
#[tier(by_hand = "QHX_TEST_VITS")]
fn environment() {
    let folder = std::env::var_os("QHX_TEST_VITS").unwrap();
    for name in [VITS, PIPER] {
        compare(&Path::new(&folder).join(name), &["1", "1,9"]);
    }
}

#[test]
fn other_noise_speed_and_speakers_change_the_audio() {
    let bundle = bundle(&tiny::fixture(PIPER), "9", |_| ());
    let case = &goldens(&tiny::fixture(PIPER))[0];
    let mut model = bundle.on_cpu();
    let mut say = |change: fn(&mut Vec<u32>)| {
        let mut tokens = tokens(&bundle, case);
        change(&mut tokens);
        speak(&mut model, &tokens).unwrap().concat()
    };
    let usual = say(|_| ());
    assert_eq!(say(|head| head[4] = 7), usual, "a seed without noise");
    assert!(say(|head| head[1] = 2000).len() < usual.len(), "twice as fast");
    assert_ne!(say(|head| head[0] = 1), usual, "another speaker");
    let noisy = say(|head| head[2] = 600);
    assert_eq!(noisy.len(), usual.len(), "noise of frames leaves durations");
    assert_ne!(noisy, usual);
    assert_eq!(noisy, say(|head| head[2] = 600), "the same seed");
    assert_ne!(noisy, say(|head| (head[2], head[4]) = (600, 7)), "another seed");
}

#[test]
fn golden_steps_execute_every_graph_of_vits() {
    let bundle = bundle(&tiny::fixture(PIPER), "1,2", |_| ());
    find_damage(&bundle.manifest, &["encoder", "voice"]);
}

#[test]
fn tokens_that_vits_cannot_say_are_refused() {
    let bundle = bundle(&tiny::fixture(VITS), "1", |_| ());
    let mut model = bundle.on_cpu();
    let head = [0, 1000, 0, 0, 0];
    let with = |symbols: &[u32]| [&head[..], symbols].concat();
    for (tokens, what) in [
        (vec![], "no tokens"),
        (vec![0, 1000], "2 tokens, expected the number of a voice"),
        (with(&[]), "0 symbols, expected 1 to 79"),
        (with(&[1; 80]), "80 symbols"),
        (with(&[99]), "symbol 99"),
        (vec![1, 1000, 0, 0, 0, 1], "a voice below 1"),
        (vec![0, 0, 0, 0, 0, 1], "speed 0"),
        (vec![0, 1000, 4001, 0, 0, 1], "noise 4001"),
    ] {
        has(model.op_mut().speak(&[Segment::Tokens(&tokens)]).unwrap_err().message(), &[what]);
    }
    assert_eq!(model.op_mut().speak(&[]).unwrap().len(), 0);
}

#[test]
fn bundles_of_vits_that_do_not_fit_are_refused() {
    bundle(&tiny::fixture(PIPER), "1", |_| ()).refuses([
        ("/params/speech/durations/bins", json!(9), "as the sizes of manifest /params/speech"),
        ("/params/speech/durations/kernel", json!(4), "an odd kernel"),
        ("/params/speech/hop", json!(0), "expected numbers above 0"),
        ("/params/speech/flow", json!(10), "expected"),
        ("/params/speech/around", json!(500), "frames around a part"),
        ("/params/speech/speaker", json!(9), "expected"),
        ("/params/speech/blank", json!(999), "below the number of symbols"),
        ("/params/speech/voices", json!(["a"]), "a voice for each speaker"),
        (
            "/params/speech/script",
            json!({"by": "espeak", "voice": "-f"}),
            "name of a voice of espeak-ng",
        ),
        ("/params/speech/script", json!([{"by": "letters"}]), "one for each of the voices"),
        ("/params/speech/noise", json!([0.5, 9]), "from 0 to 4"),
        ("/plan/params/voice", json!("mouth"), "mouth"),
    ]);
}

#[test]
fn voices_that_are_damaged_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (onnx, json) = ("en_US-tiny-medium.onnx", "en_US-tiny-medium.onnx.json");
    let source = tiny::fixture(PIPER);
    let plan = |change: &dyn Fn(&Path)| {
        for file in [onnx, json] {
            std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
        }
        change(folder.path());
        let made = Forged::try_of(folder.path(), |o| set(o, &[("windows", "1")]));
        made.map(drop).unwrap_err().to_string()
    };
    let bytes = std::fs::read(source.join(onnx)).unwrap();
    let edit = |from: &'static str, to: &'static str| {
        plan(&move |folder: &Path| {
            let text = std::fs::read_to_string(folder.join(json)).unwrap();
            assert!(text.contains(from), "{from}");
            std::fs::write(folder.join(json), text.replace(from, to)).unwrap();
        })
    };
    has(
        &plan(&|folder| std::fs::remove_file(folder.join(json)).unwrap()),
        &["without its configuration"],
    );
    has(
        &plan(&|folder| std::fs::write(folder.join(onnx), &bytes[..9000]).unwrap()),
        &[onnx, "bytes"],
    );
    has(&plan(&|folder| std::fs::write(folder.join(onnx), b"").unwrap()), &[onnx]);
    has(&edit("\"sample_rate\": 800", "\"sample_rate\": -1"), &["audio.sample_rate", "from 0 to"]);
    has(&edit("\"noise_w\": 0.8", "\"noise_w\": \"much\""), &["inference.noise_w"]);
    has(&edit("\"bob\": 2", "\"bob\": 7"), &["speaker_id_map", "bob", "7 of 3 speakers"]);
    has(&edit("\"^\"", "\"^^\""), &["phoneme_id_map has no \"^\""]);
    let nan = f32::NAN.to_le_bytes();
    has(
        &plan(&|folder| {
            let mut bytes = bytes.clone();
            // The name, and the raw data behind it.
            let name = b"dp.proj.bias";
            let at = bytes.windows(name.len()).rposition(|part| part == name).unwrap() + name.len();
            assert_eq!(bytes[at..at + 2], [0x4a, 48]);
            bytes[at + 2..at + 6].copy_from_slice(&nan);
            std::fs::write(folder.join(onnx), bytes).unwrap();
        }),
        &["dp.proj.bias"],
    );
}

#[tier(qnn)]
fn the_npu_speaks_as_the_class() {
    let targets = tiny::targets();
    for target in targets {
        let folder = tiny::fixture(VITS);
        let bundle = bundle(&folder, "2", |o| {
            o.precision = Precision::Fp16;
            o.compiler = Some(backends::compiler(target));
        });
        let case = &goldens(&folder)[0];
        let mut model = Dumping::open(&bundle.manifest, backends::qnn());
        let samples = speak(&mut model, &tokens(&bundle, case)).unwrap().concat();
        let logs = model.array("durations");
        let logs = Distance::of(&logs, &tiny::golden_tensor(VITS, "one.logs")).unwrap();
        let expected = tiny::golden_tensor(VITS, "one.audio");
        assert_eq!(samples.len(), expected.len(), "{target}: {logs:?}");
        let audio = Distance::of(&samples, &expected).unwrap();
        eprintln!(
            "{target}: logs {:.1e}, audio {:.1e}, cosine {}",
            logs.largest, audio.largest, audio.cosine
        );
        assert!(logs.largest <= 0.02 && audio.cosine >= 0.999, "{target}: {logs:?}, {audio:?}");
        let mut model = bundle.open(backends::qnn());
        steps::pass(&bundle.manifest, &mut model, target);
    }
}
