//! Pictures, sounds and videos on the command line, with a host-op that sums what it is fed (`tests/plugins/senses`):
//! a red picture makes it answer `r`, a blue one `u`, a sound `l`, a video `w`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use image::{Rgb, RgbImage};
use qhx_places::fixture;
use serde_json::{Value, json};

use crate::run::{Program, Run, bundle, folder};

const RED: Rgb<u8> = Rgb([255, 0, 0]);
const BLUE: Rgb<u8> = Rgb([0, 0, 255]);

fn plugin() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| qhx_tests::plugin_files::build("qhx-test-senses-plugin"))
}

/// A folder with the bundle `senses` and some files.
fn place() -> tempfile::TempDir {
    let folder = folder();
    let dir = folder.path();
    qhx_tests::senses::write(&dir.join("senses")).expect("the bundle is written");
    save(&dir.join("red.png"), RED, 4);
    save(&dir.join("blue.png"), BLUE, 4);
    std::fs::copy(fixture("media/pcm_24.wav"), dir.join("sound.wav")).expect("a file");
    std::fs::write(dir.join("notes.png"), "notes").expect("a file");
    folder
}

/// A picture of one colour, which takes `height` positions.
fn save(path: &Path, colour: Rgb<u8>, height: u32) {
    RgbImage::from_pixel(2, height, colour).save(path).expect("a picture");
}

fn program(dir: &Path, words: &[&str]) -> Program {
    Program::qhx(dir).args(["--plugin"]).arg_path(plugin()).args(words)
}

fn generate(dir: &Path, words: &[&str]) -> Run {
    program(dir, &["generate", "senses", "--max-new", "2"]).args(words).run()
}

#[test]
fn what_is_shown_and_heard_is_answered() {
    let place = place();
    let dir = place.path();
    let answer = |words: &[&str]| generate(dir, words).ok().stdout;
    assert_eq!(answer(&["ab", "--image", "red.png"]), "rr\n");
    assert_eq!(answer(&["a<image>b", "--image", "blue.png"]), "uu\n");
    assert_eq!(answer(&["ab", "--image", "red.png", "--chat"]), "rr\n");
    assert_eq!(answer(&["ab", "--audio", "sound.wav"]), "ll\n");
    assert_eq!(answer(&["ab"]), answer(&["ab"]));
    let png = std::fs::read(dir.join("red.png")).expect("a file");
    let url = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, png);
    let url = format!("data:image/png;base64,{url}");
    assert_eq!(answer(&["ab", "--image", &url]), "rr\n");
}

#[test]
fn each_part_is_reported_with_its_time() {
    let place = place();
    let dir = place.path();
    let frames = dir.join("frames");
    std::fs::create_dir(&frames).expect("a folder");
    (0..3).for_each(|n| save(&frames.join(format!("{n}.png")), BLUE, 3));
    let words =
        ["ab", "--video", "frames", "--fps", "4", "--audio", "sound.wav", "--image", "red.png"];
    let run = generate(dir, &words).ok();
    let lines = [
        "video frames: 3 frames of 2 × 3 pixels, to 0.5 s, read in ",
        "audio sound.wav: 0.025 s at 8000 Hz, read in ",
        "image red.png: 2 × 4 pixels, read in ",
    ];
    lines.iter().for_each(|line| assert!(run.stderr.contains(line), "{line}: {}", run.stderr));
    assert!(run.stderr.contains("op: senses "), "the op's own parts: {}", run.stderr);

    let mut answer = generate(dir, &[&words[..], &["--json"]].concat()).ok().json();
    let media = answer["media"].as_array_mut().expect("a list");
    for part in &mut *media {
        let time = part.as_object_mut().and_then(|part| part.remove("read_ms"));
        assert!(time.and_then(|ms| ms.as_f64()).is_some_and(|ms| ms >= 0.0));
    }
    let expected = json!([
        {"modality": "video", "name": "frames", "width": 2, "height": 3, "frames": 3, "last": 0.5},
        {"modality": "audio", "name": "sound.wav", "seconds": 0.025, "rate": 8000},
        {"modality": "image", "name": "red.png", "width": 2, "height": 4},
    ]);
    assert_eq!(json!(media), expected);
    assert!(answer["timings"]["spans_ms"]["senses"].is_number(), "{answer}");
    assert_eq!(generate(dir, &["ab", "--json"]).ok().json()["media"], json!([]));
}

#[test]
fn parts_stand_in_the_order_of_the_command_line() {
    let place = place();
    let dir = place.path();
    save(&dir.join("high.png"), RED, 62);
    // The context holds 64 positions. A picture has a token before and after it, a frame one before it.
    let ends = |words: &[&str], what: &str| {
        let run = generate(dir, words);
        assert_eq!(run.code, 9, "{run:?}");
        assert!(run.stderr.contains(what), "{what}: {}", run.stderr);
    };
    let first = ["ab", "--image", "high.png", "--audio", "sound.wav"];
    ends(&first, "it ends inside sound 1 of the prompt, which takes positions 64 to 65");
    let second = ["ab", "--audio", "sound.wav", "--image", "high.png"];
    ends(&second, "it ends inside image 1 of the prompt, which takes positions 3 to 64");
    let marked = ["a<audio>bb<image>", "--image", "high.png", "--audio", "sound.wav"];
    ends(&marked, "it ends inside image 1 of the prompt, which takes positions 6 to 67");
}

#[test]
fn marks_and_files_have_to_be_as_many() {
    let place = place();
    let dir = place.path();
    for (words, counts) in [
        (
            &["<image><image>", "--image", "red.png"][..],
            "marks <image> in the text: 2, files of image: 1",
        ),
        (
            &["<image>", "--image", "a", "--image", "b"],
            "marks <image> in the text: 1, files of image: 2",
        ),
    ] {
        let run = generate(dir, words);
        assert_eq!(run.code, 9, "{run:?}");
        assert!(run.stderr.contains(counts) && run.stderr.contains("hint:"), "{run:?}");
    }
    let run = generate(dir, &["1,2", "--ids", "--image", "red.png"]);
    assert_eq!(run.code, 2, "{run:?}");
}

#[test]
fn a_bad_file_is_named_before_the_model_is_loaded() {
    let place = place();
    let dir = place.path();
    for (file, code, what) in [
        ("gone.png", 11, "gone.png: "),
        ("notes.png", 9, "notes.png: found text, expected a picture (PNG, JPEG, WebP, GIF)"),
        ("sound.wav", 9, "sound.wav: found a sound (WAV), expected a picture"),
        ("data:image/png;base64,!", 9, "data URL: not base64"),
    ] {
        let run = generate(dir, &["ab", "--image", file]);
        assert_eq!(run.code, code, "{run:?}");
        assert!(run.stderr.contains(what) && run.stdout.is_empty(), "{run:?}");
        assert!(!run.stderr.contains("backend:"), "nothing is loaded: {run:?}");
    }
    // What is broken further behind is found by decoding.
    let whole = std::fs::read(fixture("media/baseline.jpg")).expect("a file");
    std::fs::write(dir.join("cut.jpg"), &whole[..600]).expect("a file");
    let run = generate(dir, &["ab", "--image", "cut.jpg", "--json"]);
    assert_eq!((run.code, &run.json()["error"]["kind"]), (9, &json!("prompt")), "{run:?}");
    assert!(run.stderr.contains("cut.jpg: a broken or cut-off JPEG file"), "{run:?}");
}

#[test]
fn a_model_of_text_refuses_pictures_before_anything_is_loaded_or_read() {
    let folder = folder();
    for option in ["image", "audio", "video"] {
        let run = Program::qhx(folder.path())
            .args(["generate"])
            .arg_path(bundle())
            .args(["The", &format!("--{option}"), "gone"])
            .run();
        assert_eq!(run.code, 9, "{run:?}");
        let says = format!(
            "gone: host-op \"qwen3_5_generate\" does not take the modality {option}; it takes text"
        );
        assert!(run.stderr.contains(&says), "{run:?}");
        assert!(!run.stderr.contains("backend:"), "{run:?}");
    }
}

#[test]
fn a_conversation_goes_on_after_a_bad_file() {
    let place = place();
    let dir = place.path();
    let input = "/image gone.png\n/image notes.png\n/image\n/image red.png\na\nc\n/reset\n/image blue.png\na <image> b\n";
    let chat = |more: &[&str]| {
        program(dir, &["chat", "senses", "--max-new", "2"]).args(more).stdin(input).run()
    };
    let run = chat(&["--json"]);
    let lines: Vec<Value> =
        run.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect();
    assert_eq!(lines.len(), 6, "{run:?}");
    let error = |line: &Value| line["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(error(&lines[0]).starts_with("gone.png: "), "{run:?}");
    assert!(error(&lines[1]).contains("notes.png: found text"), "{run:?}");
    assert_eq!(error(&lines[2]), "/image names no file");
    let texts: Vec<&str> = lines[3..].iter().filter_map(|line| line["text"].as_str()).collect();
    assert_eq!(texts, ["rr", "rr", "uu"], "the picture of a message stays in the conversation");
    assert_eq!(lines[3]["media"][0]["name"], "red.png");
    assert_eq!(lines[4]["media"], json!([]));
    let run = chat(&[]);
    assert_eq!((run.code, run.stdout.as_str()), (9, "rr\nrr\nuu\n"), "{run:?}");
    assert!(run.stderr.contains("image red.png: 2 × 4 pixels"), "{run:?}");
    assert!(run.stderr.contains("(the next message goes without it)"), "{run:?}");
}

#[test]
fn suites_have_pictures_and_sounds_beside_them() {
    let place = place();
    let dir = place.path();
    let parts = dir.join("parts");
    std::fs::create_dir(&parts).expect("a folder");
    save(&parts.join("blue.png"), BLUE, 4);
    std::fs::copy(dir.join("sound.wav"), parts.join("sound.wav")).expect("a file");
    let verify = |cases: Value| {
        let suite = json!({"schema": "npu_suite/v1", "cases": cases});
        std::fs::write(parts.join("suite.json"), suite.to_string()).expect("a file");
        program(dir, &["verify", "senses", "parts/suite.json"]).run()
    };
    let run = verify(json!([
        {"id": "seen", "prompt": "a<image>b", "images": ["blue.png"], "gold": [10, 10]},
        {"id": "heard", "prompt_ids": [0, 1], "audio": ["sound.wav"], "gold": [11, 11]},
        {"id": "read", "prompt": "bb", "gold": [1, 1]},
    ]));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("passed: 3 of 3 cases"), "{run:?}");
    let run = verify(json!([{"id": "wrong", "prompt": "a", "images": ["blue.png"], "gold": [8]}]));
    assert_eq!(run.code, 1, "{run:?}");
    for file in ["../red.png", "/etc/passwd", ""] {
        let run = verify(json!([{"id": "out", "prompt": "a", "images": [file], "gold": [8]}]));
        assert_eq!(run.code, 4, "{run:?}");
        assert!(
            run.stderr.contains("case out: ") && run.stderr.contains("beside the suite"),
            "{run:?}"
        );
    }
    let run = verify(json!([{"prompt": "a", "images": ["gone.png"], "gold": [8]}]));
    assert_eq!(run.code, 11, "{run:?}");
    assert!(run.stderr.contains("gone.png"), "{run:?}");
}

#[test]
fn the_argument_order_of_published_bundles_ends_with_a_picture() {
    let place = place();
    let run = |prompt: &str, image: &str| {
        Program::classic(place.path())
            .args(["--plugin"])
            .arg_path(plugin())
            .args(["senses", "cpu", "-", "senses", "2", prompt, image])
            .run()
    };
    assert_eq!(run("ab", "red.png").ok().stdout, "rr\n");
    assert_eq!(run("0,1", "blue.png").ok().stdout, "uu\n");
    let refused = run("ab", "notes.png");
    assert!(refused.code == 9 && refused.stderr.contains("notes.png: found text"), "{refused:?}");
}
