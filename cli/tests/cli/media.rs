//! Images, audio clips and videos on the command line, with a host-op that sums what it is fed
//! (`tests/plugins/multimodal`): a red image makes it answer `r`, a blue one `u`, an audio clip `l`, a video `w`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use image::{Rgb, RgbImage};
use qhx_paths::fixture;
use serde_json::{Value, json};

use crate::run::{Program, Run, bundle, folder};

const RED: Rgb<u8> = Rgb([255, 0, 0]);
const BLUE: Rgb<u8> = Rgb([0, 0, 255]);
const WHITE: Rgb<u8> = Rgb([255, 255, 255]);

pub fn plugin() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| qhx_tests::plugin_files::build("qhx-test-multimodal-plugin"))
}

/// A folder with the bundle `multimodal` and some files.
fn place() -> tempfile::TempDir {
    let folder = folder();
    let dir = folder.path();
    qhx_tests::multimodal::write(&dir.join("multimodal")).expect("the bundle is written");
    save(&dir.join("red.png"), RED, 4);
    save(&dir.join("blue.png"), BLUE, 4);
    std::fs::copy(fixture("media/pcm_24.wav"), dir.join("audio.wav")).expect("a file");
    std::fs::write(dir.join("notes.png"), "notes").expect("a file");
    folder
}

/// An image of one colour, which takes `height` positions.
fn save(path: &Path, colour: Rgb<u8>, height: u32) {
    RgbImage::from_pixel(2, height, colour).save(path).expect("an image");
}

fn program(dir: &Path, words: &[&str]) -> Program {
    qhx!(dir, "--plugin", plugin()).args(words)
}

fn generate(dir: &Path, words: &[&str]) -> Run {
    program(dir, &["generate", "multimodal", "--max-new", "2"]).args(words).run()
}

#[test]
fn what_is_shown_and_heard_is_answered() {
    let place = place();
    let dir = place.path();
    let answer = |words: &[&str]| generate(dir, words).ok().stdout;
    assert_eq!(answer(&["ab", "--image", "red.png"]), "rr\n");
    assert_eq!(answer(&["a<image>b", "--image", "blue.png"]), "uu\n");
    assert_eq!(answer(&["ab", "--image", "red.png", "--chat"]), "rr\n");
    assert_eq!(answer(&["ab", "--audio", "audio.wav"]), "ll\n");
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
        ["ab", "--video", "frames", "--fps", "4", "--audio", "audio.wav", "--image", "red.png"];
    let run = generate(dir, &words).ok();
    let lines = [
        "video frames: 3 frames of 2 × 3 pixels, to 0.5 s, read in ",
        "audio audio.wav: 0.025 s at 8000 Hz, read in ",
        "image red.png: 2 × 4 pixels, read in ",
    ];
    run.says(&lines);
    assert!(run.stderr.contains("; op: vision "), "the op's own parts: {}", run.stderr);

    let mut answer = generate(dir, &[&words[..], &["--json"]].concat()).ok().json();
    let media = answer["media"].as_array_mut().expect("a list");
    for part in &mut *media {
        let time = part.as_object_mut().and_then(|part| part.remove("read_ms"));
        assert!(time.and_then(|ms| ms.as_f64()).is_some_and(|ms| ms >= 0.0));
    }
    let expected = json!([
        {"modality": "video", "name": "frames", "width": 2, "height": 3, "frames": 3, "last": 0.5},
        {"modality": "audio", "name": "audio.wav", "seconds": 0.025, "rate": 8000},
        {"modality": "image", "name": "red.png", "width": 2, "height": 4},
    ]);
    assert_eq!(json!(media), expected);
    let timings = &answer["timings"];
    assert!(timings["spans_ms"]["audio"].is_number(), "{answer}");
    assert!(timings["vision_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{answer}");
    assert_eq!(timings["vision_ms"], timings["spans_ms"]["vision"]);
    let answer = generate(dir, &["ab", "--json"]).ok().json();
    assert_eq!((&answer["media"], &answer["timings"]["vision_ms"]), (&json!([]), &json!(0.0)));
}

#[test]
fn parts_stand_in_the_order_of_the_command_line() {
    let place = place();
    let dir = place.path();
    save(&dir.join("high.png"), RED, 62);
    // The context holds 64 positions. An image has a token before and after it, a frame one before it.
    let ends = |words: &[&str], what: &str| {
        let run = generate(dir, words);
        assert_eq!(run.code, 9, "{run:?}");
        assert!(run.stderr.contains(what), "{what}: {}", run.stderr);
    };
    let first = ["ab", "--image", "high.png", "--audio", "audio.wav"];
    ends(&first, "it ends inside audio 1 of the prompt, which takes positions 64 to 65");
    let second = ["ab", "--audio", "audio.wav", "--image", "high.png"];
    ends(&second, "it ends inside image 1 of the prompt, which takes positions 3 to 64");
    let marked = ["a<audio>bb<image>", "--image", "high.png", "--audio", "audio.wav"];
    ends(&marked, "it ends inside image 1 of the prompt, which takes positions 6 to 67");
}

#[test]
fn marks_and_files_have_to_be_as_many() {
    let place = place();
    let dir = place.path();
    for (words, counts) in [
        (
            &["<image><image>", "--image", "red.png"][..],
            "placeholders <image> in the text: 2, files of image: 1",
        ),
        (
            &["<image>", "--image", "a", "--image", "b"],
            "placeholders <image> in the text: 1, files of image: 2",
        ),
    ] {
        generate(dir, words).fails(9, &[counts, "hint:"]);
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
        ("notes.png", 9, "notes.png: found text, expected an image (PNG, JPEG, WebP, GIF)"),
        ("audio.wav", 9, "audio.wav: found audio (WAV), expected an image"),
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
    run.says(&["cut.jpg: a broken or cut-off JPEG file"]);
}

#[test]
fn a_model_without_audio_refuses_clips_before_loading() {
    let run = qhx!(folder(), "generate", bundle(), "The", "--audio", "gone").run();
    assert_eq!(run.code, 9, "{run:?}");
    let says = "gone: host-op \"qwen3_5_generate\" does not take the modality audio; it takes text, image, video";
    run.says(&[says]);
    assert!(!run.stderr.contains("backend:"), "{run:?}");
}

#[test]
fn a_bundle_without_a_vision_graph_refuses_images() {
    let place = place();
    let run = qhx!(place, "generate", bundle(), "The", "--image", "red.png").run();
    assert_eq!((run.code, &*run.stdout), (9, ""), "{run:?}");
    run.says(&["this bundle takes text only"]);
}

#[test]
fn a_conversation_goes_on_after_a_bad_file() {
    let place = place();
    let dir = place.path();
    let input = "/image gone.png\n/image notes.png\n/image\n/image red.png\na\nc\n/reset\n/image blue.png\na <image> b\n";
    let chat = |more: &[&str]| {
        program(dir, &["chat", "multimodal", "--max-new", "2"]).args(more).stdin(input).run()
    };
    let run = chat(&["--json"]);
    let lines: Vec<Value> = run.json_lines();
    assert_eq!(lines.len(), 6, "{run:?}");
    let error = |line: &Value| line["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(error(&lines[0]).starts_with("gone.png: "), "{run:?}");
    assert!(error(&lines[1]).contains("notes.png: found text"), "{run:?}");
    assert_eq!(error(&lines[2]), "/image names no file");
    let texts: Vec<&str> = lines[3..].iter().filter_map(|line| line["text"].as_str()).collect();
    assert_eq!(texts, ["rr", "rr", "uu"], "the image of a message stays in the conversation");
    assert_eq!(lines[3]["media"][0]["name"], "red.png");
    assert_eq!(lines[4]["media"], json!([]));
    let run = chat(&[]);
    assert_eq!((run.code, run.stdout.as_str()), (9, "rr\nrr\nuu\n"), "{run:?}");
    run.says(&["image red.png: 2 × 4 pixels", "(the next message goes without it)"]);
}

/// A JPEG whose header declares this number of pixels a side.
fn jpeg_of(side: u16) -> Vec<u8> {
    let mut jpeg = std::fs::read(fixture("media/baseline.jpg")).expect("a file");
    let frame = jpeg.windows(2).position(|marker| marker == [0xff, 0xc0]).expect("a frame");
    jpeg[frame + 5..frame + 9].copy_from_slice(&[side.to_be_bytes(), side.to_be_bytes()].concat());
    jpeg
}

/// The JSON lines of a conversation.
fn chat_lines(dir: &Path, input: &str) -> (i32, Vec<Value>) {
    let run = program(dir, &["chat", "multimodal", "--max-new", "2", "--json"]).stdin(input).run();
    (run.code, run.json_lines())
}

#[test]
fn odd_images_are_shown() {
    let place = place();
    let dir = place.path();
    std::fs::write(dir.join("dot.jpg"), jpeg_of(1)).expect("a file");
    RgbImage::from_pixel(400, 2, RED).save(dir.join("line.png")).expect("an image");
    let odd = ["dot.jpg", "line.png", "cmyk.jpg", "alpha.webp", "rgb16.png", "animated.gif"];
    for name in &odd[2..] {
        std::fs::copy(fixture("media").join(name), dir.join(name)).expect("a file");
    }
    let input: String = odd.iter().map(|name| format!("/image {name}\na\n/reset\n")).collect();
    let (code, lines) = chat_lines(dir, &input);
    let size =
        |line: &Value| [&line["media"][0]["width"], &line["media"][0]["height"]].map(Value::as_u64);
    let sizes: Vec<_> = lines.iter().map(size).collect();
    let expected = [[1, 1], [400, 2], [40, 24], [40, 24], [40, 24], [40, 24]];
    assert_eq!((code, sizes), (0, expected.map(|size| size.map(Some)).to_vec()), "{lines:?}");
}

#[test]
fn a_conversation_is_the_same_after_images_that_cannot_be() {
    let place = place();
    let dir = place.path();
    let png = std::fs::read(dir.join("red.png")).expect("a file");
    std::fs::write(dir.join("cut.png"), &png[..png.len() - 16]).expect("a file");
    std::fs::write(dir.join("large.jpg"), jpeg_of(20_000)).expect("a file");
    save(&dir.join("high.png"), RED, 55);
    let begin = "/image red.png\na<image>b\n";
    let end = "c\n";
    let (code, clean) = chat_lines(dir, &[begin, end].concat());
    assert_eq!((code, clean.len()), (0, 2), "{clean:?}");
    let same = ["text", "tokens", "prompt_tokens", "reused_tokens", "finish_reason", "media"];
    assert!(clean[1]["reused_tokens"].as_u64() > Some(4), "{clean:?}");
    let bad = [
        ("/image cut.png\n", "cut.png: a broken or cut-off PNG file"),
        ("/image large.jpg\n", "large.jpg: 20000 × 20000 pixels are 400.0 megapixels"),
        ("/image high.png\na\n", "it ends inside image 2 of the prompt"),
        (
            "/image high.png\n/image high.png\nb<image>\n",
            "placeholders <image> in the text: 1, files of image: 2",
        ),
        (
            "/image high.png\n<image>a<image>\n",
            "placeholders <image> in the text: 2, files of image: 1",
        ),
    ];
    let input: String = bad.iter().map(|(input, _)| *input).collect();
    let (code, lines) = chat_lines(dir, &[begin, &input, end].concat());
    assert_eq!((code, lines.len()), (9, bad.len() + 2), "{lines:?}");
    for (line, (input, says)) in lines[1..].iter().zip(bad) {
        let error = &line["error"];
        let message = error["message"].as_str().unwrap_or_default();
        assert!(error["kind"] == "prompt" && message.contains(says), "{input}: {line}");
        assert!(error["hint"].is_string(), "{line}");
    }
    let last = &lines[lines.len() - 1];
    same.iter().for_each(|key| assert_eq!(last[key], clean[1][key], "{key}: {last}"));

    // A token that stands for an image is no image, and a text that spells it no token.
    generate(dir, &["0,4,1", "--ids"]).fails(9, &["token 4 (\"<image>\") stands for an image"]);
    assert_eq!(generate(dir, &["a<image>"]).code, 0);
}

#[test]
fn suites_have_images_audio_clips_and_videos_beside_them() {
    let place = place();
    let dir = place.path();
    let parts = dir.join("parts");
    std::fs::create_dir(&parts).expect("a folder");
    save(&parts.join("blue.png"), BLUE, 4);
    std::fs::create_dir(parts.join("frames")).expect("a folder");
    (0..2).for_each(|n| save(&parts.join(format!("frames/{n}.png")), WHITE, 2));
    std::fs::copy(dir.join("audio.wav"), parts.join("audio.wav")).expect("a file");
    let verify = |cases: Value| {
        let suite = json!({"schema": "npu_suite/v1", "cases": cases});
        std::fs::write(parts.join("suite.json"), suite.to_string()).expect("a file");
        program(dir, &["verify", "multimodal", "parts/suite.json"]).run()
    };
    let run = verify(json!([
        {"id": "seen", "prompt": "a<image>b", "images": ["blue.png"], "gold": [10, 10]},
        {"id": "heard", "prompt_ids": [0, 1], "audio": ["audio.wav"], "gold": [11, 11]},
        {"id": "moved", "prompt": "a<video>b", "videos": ["frames"], "fps": 4, "gold": [12, 12]},
        {"id": "read", "prompt": "bb", "gold": [1, 1]},
    ]));
    assert_eq!(run.code, 0, "{run:?}");
    run.prints(&["passed: 4 of 4 cases"]);
    verify(json!([{"prompt": "a", "videos": ["frames"], "fps": 0, "gold": [12]}]))
        .fails(4, &["case 1: fps"]);
    let run = verify(json!([{"id": "wrong", "prompt": "a", "images": ["blue.png"], "gold": [8]}]));
    assert_eq!(run.code, 1, "{run:?}");
    for file in ["../red.png", "/etc/passwd", ""] {
        verify(json!([{"id": "out", "prompt": "a", "images": [file], "gold": [8]}]))
            .fails(4, &["case out: ", "beside the suite"]);
    }
    verify(json!([{"prompt": "a", "images": ["gone.png"], "gold": [8]}])).fails(11, &["gone.png"]);
}

#[test]
fn suites_say_what_images_become() {
    let place = place();
    let dir = place.path();
    for image in ["blue", "red"] {
        generate(dir, &["ab", "--image", &format!("{image}.png"), "--dump", image]).ok();
    }
    let verify = |arrays: Value, least: Value| {
        let suite = json!({"schema": "npu_suite/v1", "gate": "greedy_tol", "min_cosine": least, "cases": [
            {"id": "first", "prompt": "ab", "gold": [0]},
            {"id": "second", "prompt": "bb", "gold": [1]},
            {"id": "blue", "prompt": "ab", "images": ["blue.png"], "arrays": arrays, "gold": [10]},
        ]});
        std::fs::write(dir.join("suite.json"), suite.to_string()).expect("a file");
        program(dir, &["verify", "multimodal", "suite.json"]).run()
    };
    let run = verify(json!({"rows": "blue/rows.npy", "logits": "blue/logits.npy"}), json!(null));
    assert_eq!(run.code, 0, "{run:?}");
    let line = "ok   blue: exact; logits: cosine 1.000000; rows: cosine 1.000000\n";
    run.prints(&[line]);
    // Enough of the cases pass, but no array may be another.
    for (array, file, says) in [
        ("rows", "red/rows.npy", "rows: cosine 0.000000 in row 0, expected 0.999\n"),
        ("rows", "blue/logits.npy", "rows: shape [4, 16], expected [16]\n"),
        ("sounds", "blue/rows.npy", "sounds: not made; the prompt gave logits, rows\n"),
    ] {
        let run = verify(json!({array: file}), json!(null));
        let ends = "FAILED: 2 of 3 cases passed (greedy_tol, backend cpu)\n";
        assert!(run.code == 1 && run.stdout.ends_with(ends), "{run:?}");
        run.prints(&[&format!("FAIL blue: exact; {says}")]);
    }
    assert_eq!(verify(json!({"rows": "red/rows.npy"}), json!(-1)).code, 0);
    for (file, least, code, says) in [
        ("notes.png", json!(null), 4, "case blue: notes.png: not a .npy file"),
        ("gone.npy", json!(null), 4, "case blue: gone.npy: "),
        ("../rows.npy", json!(null), 4, "case blue: \"../rows.npy\" is no path beside the suite"),
        ("blue/rows.npy", json!(1.5), 4, "min_cosine is no cosine"),
    ] {
        let run = verify(json!({"rows": file}), least);
        run.fails(code, &[says]);
        assert!(!run.stderr.contains("backend:"), "nothing is loaded: {run:?}");
    }
}

#[test]
fn the_argument_order_of_published_bundles_ends_with_an_image() {
    let place = place();
    let run = |prompt: &str, image: &str| {
        Program::classic(place.path())
            .args(["--plugin"])
            .arg(plugin())
            .args(["multimodal", "cpu", "-", "multimodal", "2", prompt, image])
            .run()
    };
    assert_eq!(run("ab", "red.png").ok().stdout, "rr\n");
    assert_eq!(run("0,1", "blue.png").ok().stdout, "uu\n");
    run("ab", "notes.png").fails(9, &["notes.png: found text"]);
}
