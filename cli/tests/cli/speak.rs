//! `qhx speak`: a tiny model of drawn weights, whose sounds are no words.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use qhx_paths::fixture;

use crate::run::{Run, folder};

pub fn forge(folder: &Path, how: &[&str]) -> PathBuf {
    let out = folder.join("voice");
    qhx!(folder, "forge", fixture("kokoro-tiny"), "--out", out)
        .args(["--name", "tiny", "--cpu-only", "--recipe-option", "windows=2"])
        .args(how)
        .run()
        .ok();
    out
}

fn speak(folder: &Path, bundle: &Path, words: &[&str]) -> Run {
    qhx!(folder, "speak", bundle).args(words).run()
}

/// Samples of a WAV file of 16 bits.
fn samples(bytes: &[u8]) -> usize {
    assert!(bytes.starts_with(b"RIFF") && &bytes[36..40] == b"data");
    assert_eq!(
        u32::from_le_bytes([bytes[40], bytes[41], bytes[42], bytes[43]]) as usize,
        bytes.len() - 44
    );
    (bytes.len() - 44) / 2
}

#[test]
fn a_text_becomes_a_file_by_its_lexicon_and_voice() {
    let folder = folder();
    let lexicon = folder.path().join("words.json");
    std::fs::write(&lexicon, r#"{"hello": "həlˈO", "world": {"DEFAULT": "wˈɜɹld"}}"#).unwrap();
    let bundle = forge(folder.path(), &["--lexicon", &lexicon.display().to_string()]);
    qhx!(folder, "inspect", bundle).run().ok().prints(&["voices     af_one, bm_two\n"]);
    let file = folder.path().join("out.wav");
    let out = file.display().to_string();
    let words = ["Hello worlds. Zip!", "-o", &out, "--json", "--speed", "2"];
    let report = speak(folder.path(), &bundle, &words).ok().json();
    let of_words = samples(&std::fs::read(&file).unwrap());
    assert_eq!(report["out_of_lexicon"], serde_json::json!(["Zip"]));
    assert_eq!(report["parts"], 2);
    assert_eq!(report["cancelled"], false);
    assert!(
        (report["seconds"].as_f64().unwrap() * 24e3 - of_words as f64).abs() < 24.0,
        "{report}"
    );
    // The same by its phonemes.
    let arrays = folder.path().join("arrays");
    let dump = arrays.display().to_string();
    let spoken = ["həlˈO wˈɜɹldz.", "--phonemes", "-o", &out, "--dump", &dump];
    speak(folder.path(), &bundle, &spoken).ok();
    assert!(arrays.join("f0.npy").is_file());
    let first = std::fs::read(&file).unwrap();
    speak(folder.path(), &bundle, &["Hello worlds.", "-o", &out]).ok();
    assert_eq!(std::fs::read(&file).unwrap(), first);
    speak(folder.path(), &bundle, &["Hello worlds.", "-o", &out, "--voice", "bm_two"]).ok();
    assert_ne!(std::fs::read(&file).unwrap(), first);
    // The extension says what the file is, unless the format is given.
    let begins: [(&str, &[&str], &[u8]); 5] = [
        ("out.mp3", &[], b"\xff"),
        ("out.OPUS", &[], b"OggS"),
        ("out.flac", &[], b"fLaC"),
        ("out.aac", &[], b"\xff\xf1"),
        ("out.mp3", &["--format", "wav"], b"RIFF"),
    ];
    for (name, more, begin) in begins {
        let out = folder.path().join(name);
        let named = out.display().to_string();
        let words = [&["Hello worlds.", "-o", &named][..], more].concat();
        speak(folder.path(), &bundle, &words).ok();
        assert!(std::fs::read(&out).unwrap().starts_with(begin), "{name}");
    }
}

#[test]
fn what_cannot_be_said_is_refused_before_a_file_is_touched() {
    let folder = folder();
    let bundle = forge(folder.path(), &[]);
    let kept = folder.path().join("kept.wav");
    std::fs::write(&kept, "kept").unwrap();
    let out = kept.display().to_string();
    let nowhere = folder.path().join("none/out.wav").display().to_string();
    for (words, what) in [
        (
            &["Hi.", "-o", &out, "--voice", "af_on"][..],
            "did you mean \"af_one\"? It has af_one, bm_two",
        ),
        (&["Hi.", "-o", &out, "--speed", "0"], "speed 0, expected a number from 0.25 to 4"),
        (&["Hi.", "-o", &out, "--speed", "NaN"], "speed NaN"),
        (&["Hi.", "-o", &nowhere], "none/out.wav"),
        (&["", "-o", &out], "the text is empty"),
        (&["😀 🎉", "-o", &out], "nothing of the text has a sound: 😀🎉"),
        (&["Say дом", "-o", &out], "of Cyrillic script"),
        (&["漢字", "-o", &out], "of Han script"),
        (&["xQ", "-o", &out, "--phonemes"], "no phoneme 'x'"),
        (&["Hi.", "-o", "-", "--json"], "standard output is the audio already"),
    ] {
        let run = speak(folder.path(), &bundle, words);
        assert_ne!(run.code, 0, "{words:?}");
        assert!(run.stderr.contains(what), "{words:?}: {}", run.stderr);
        assert_eq!(std::fs::read(&kept).unwrap(), b"kept", "{words:?}");
    }
}

/// A program in the place of espeak-ng, which answers each letter with itself.
#[cfg(unix)]
fn phonemizer(folder: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let program = folder.join("phonemizer");
    std::fs::write(&program, "#!/bin/sh\ntr 'A-Z' 'a-z'\n").expect("a program");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("a program");
    program
}

#[cfg(unix)]
#[test]
fn a_voice_of_piper_speaks_by_espeak() {
    let folder = folder();
    let out = folder.path().join("piper");
    qhx!(folder, "forge", fixture("piper-tiny/en_US-tiny-medium.onnx"), "--out", out)
        .args(["--name", "tiny", "--cpu-only", "--recipe-option", "windows=2"])
        .run()
        .ok();
    qhx!(folder, "inspect", out).run().ok().prints(&["voices     ann, cy, bob\n"]);
    let program = phonemizer(folder.path());
    let say = |words: &[&str], name: &str| {
        let file = folder.path().join(name).display().to_string();
        let run = qhx!(folder, "speak", out).args(words).args(["-o", &file]);
        run.env("QHX_ESPEAK", &program).run().ok();
        std::fs::read(file).unwrap()
    };
    let spoken = say(&["Hello, we see."], "a.wav");
    assert_eq!(spoken, say(&["hello, we see.", "--phonemes", "--seed", "0"], "b.wav"));
    assert_ne!(spoken, say(&["Hello, we see.", "--seed", "1"], "c.wav"));
    assert_ne!(spoken, say(&["Hello, we see.", "--voice", "bob"], "d.wav"));
    let out_file = folder.path().join("e.wav").display().to_string();
    let missing = qhx!(folder, "speak", out, "Hello.", "-o", &out_file);
    let missing = missing.env("QHX_ESPEAK", folder.path().join("none")).run();
    missing.fails(2, &["espeak-ng", "not installed", "apt install espeak-ng"]);
    assert!(!Path::new(&out_file).exists(), "nothing is written before");
}

#[test]
fn a_text_is_said_while_it_comes() {
    let folder = folder();
    let bundle = forge(folder.path(), &[]);
    let mut child = qhx!(folder, "speak", bundle, "-", "-o", "-").start_with_streams();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"Hello there. How").unwrap();
    // The first sentence is heard while the second is written.
    let mut heard = [0; 4096];
    output.read_exact(&mut heard).unwrap();
    input.write_all(b" are you").unwrap();
    drop(input);
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    let file = folder.path().join("whole.wav").display().to_string();
    speak(folder.path(), &bundle, &["Hello there. How are you", "-o", &file]).ok();
    // The header of a stream knows no length.
    assert_eq!([&heard[44..], &rest].concat(), std::fs::read(&file).unwrap()[44..]);
}
