//! `qhx transcribe`: a tiny model of Gemma 4 that heard four sentences, and a host-op that answers `l` to whatever
//! audio clips (`tests/plugins/multimodal`).

use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};

use qhx_paths::fixture;
use qhx_tests::files;
use qhx_tiers::tier;
use serde_json::{Value, json};

use crate::run::{self, Program, Run, folder};

const TINY: &str = "gemma4-tiny";

/// The tiny model without its chat template, as a checkpoint that only goes on with texts.
pub fn base(folder: &Path) -> PathBuf {
    let checkpoint = folder.join("checkpoint");
    qhx_tests::plugin_files::copy_folder(&fixture(TINY), &checkpoint);
    files::edit(&checkpoint.join("tokenizer_config.json"), |config| {
        config.as_object_mut().and_then(|config| config.remove("chat_template"));
    });
    checkpoint
}

/// A bundle that takes audio clips of 2.2 seconds.
pub fn forge(folder: &Path, checkpoint: &Path, how: &[&str]) -> PathBuf {
    let out = folder.join("gemma4");
    qhx!(folder, "forge", checkpoint, "--out", out)
        .args(["--name", "tiny", "--max-ctx", "200", "--prefill", "24"])
        .args(["--recipe-option", "towers=audio", "--recipe-option", "audio-tokens=54"])
        .args(how)
        .run()
        .ok();
    out
}

pub fn sentence(id: &str) -> String {
    fixture(TINY).join(format!("{id}.wav")).display().to_string()
}

#[test]
fn spoken_sentences_become_their_words() {
    let folder = folder();
    let bundle = forge(folder.path(), &base(folder.path()), &["--cpu-only"]);
    let transcribe = |words: &[&str]| qhx!(folder, "transcribe", bundle).args(words).run();
    let run = transcribe(&[&sentence("noon"), &sentence("rain")]).ok();
    assert_eq!(run.stdout, "the boat leaves at noon\nrain comes before the night\n");
    run.says(&["noon.wav: 1.7 s of audio in "]);

    let (short, long) = (sentence("stop"), folder.path().join("long.wav"));
    let mut samples = Vec::new();
    for id in ["bread", "noon"] {
        let wav = std::fs::read(sentence(id)).expect("a file");
        samples.extend_from_slice(&wav[44..]);
    }
    std::fs::write(&long, wav(16_000, 1, 16, &samples)).expect("written");
    let long = long.display().to_string();
    let sounds = transcribe(&[&short, &long, "--json"]).ok().json()["sounds"].clone();
    let piece = json!({"start": 0.0, "end": 0.613, "text": "stop", "finish_reason": "eos"});
    let stop = json!({"name": short, "seconds": 0.613, "text": "stop", "pieces": [piece]});
    assert_eq!(sounds[0], stop);
    let times = |piece: &Value| (piece["start"].as_f64(), piece["end"].as_f64());
    let pieces = sounds[1]["pieces"].as_array().expect("a list");
    let times: Vec<_> = pieces.iter().map(times).collect();
    assert_eq!(times, [(Some(0.0), Some(2.1)), (Some(1.89), Some(2.888))]);

    #[cfg(unix)]
    {
        // Ctrl-C ends it, and what is written down stays.
        let many = vec![sentence("noon"); 2000];
        let mut child = qhx!(folder, "transcribe", bundle).args(many).start();
        let mut line = [0; "the boat leaves at noon\n".len()];
        let mut stdout = child.stdout.take().expect("a pipe");
        std::io::Read::read_exact(&mut stdout, &mut line).expect("a line");
        assert_eq!(line, *b"the boat leaves at noon\n");
        run::signal("-INT", child.id());
        assert_eq!(crate::interrupt::code(child), Some(130));
    }

    let generate = |words: &[&str]| qhx!(folder, "generate", bundle).args(words).run();
    generate(&["\nTranscription: ", "--audio", &long])
        .fails(9, &["audio of 2.9 s is 72 soft tokens, the bundle takes 54", "qhx transcribe"]);
    let image = fixture(TINY).join("boat.png").display().to_string();
    generate(&["Describe this image.", "--image", &image])
        .fails(9, &["the bundle takes no images"]);
}

#[tier(qnn, full)]
fn the_npu_writes_down_a_sentence() {
    let (htp, system) = qhx_tests::tiny::qnn_libraries();
    let folder = folder();
    let libraries =
        ["--htp", htp.to_str().expect("UTF-8"), "--qnn-system", system.to_str().expect("UTF-8")];
    let how = [&["--target", "v81", "--for-emulator"][..], &libraries].concat();
    let bundle = forge(folder.path(), &base(folder.path()), &how);
    let run = qhx!(folder, "transcribe", bundle, "--backend", "qnn")
        .args(libraries)
        .args([sentence("noon")])
        .run()
        .ok();
    assert_eq!(run.stdout, "the boat leaves at noon\n");
}

/// A WAV file.
pub fn wav(rate: u32, channels: u16, bits: u16, data: &[u8]) -> Vec<u8> {
    let frame = channels * bits / 8;
    let len = u32::try_from(data.len()).expect("short");
    let mut wav = b"RIFF".to_vec();
    wav.extend((36 + len).to_le_bytes());
    wav.extend(b"WAVEfmt \x10\0\0\0\x01\0");
    wav.extend(channels.to_le_bytes());
    wav.extend(rate.to_le_bytes());
    wav.extend((rate * u32::from(frame)).to_le_bytes());
    wav.extend(frame.to_le_bytes());
    wav.extend(bits.to_le_bytes());
    wav.extend(b"data");
    wav.extend(len.to_le_bytes());
    wav.extend(data);
    wav
}

/// A folder with the bundle `multimodal` and audio clips, and what `qhx transcribe` makes of them.
fn multimodal(folder: &Path, words: &[&str]) -> Run {
    qhx_tests::multimodal::write(&folder.join("multimodal")).expect("the bundle is written");
    // An op for 8 kHz: a tone of 8 bits, of two channels, of another rate, and silence.
    let tone = |count: usize| (0..count).map(|i| 128 + 100 * (i % 2) as u8).collect::<Vec<_>>();
    std::fs::write(folder.join("long.wav"), wav(8_000, 1, 8, &tone(24_000))).expect("written");
    std::fs::write(folder.join("stereo.wav"), wav(8_000, 2, 8, &tone(800))).expect("written");
    let slow: Vec<u8> = (0..9_600u32).map(|i| (128 + 50 * (i / 100 % 2)) as u8).collect();
    std::fs::write(folder.join("fast.wav"), wav(96_000, 1, 8, &slow)).expect("written");
    std::fs::write(folder.join("none.wav"), wav(8_000, 1, 8, &[])).expect("written");
    let mut cut = wav(8_000, 1, 8, &tone(800));
    cut.truncate(500);
    std::fs::write(folder.join("cut.wav"), cut).expect("written");
    qhx!(folder, "--plugin", crate::media::plugin())
        .args(["transcribe", "multimodal", "--max-new", "2"])
        .args(words)
        .run()
}

#[test]
fn what_is_too_long_is_cut_into_pieces_that_overlap() {
    let folder = folder();
    // The context holds 64 positions of 100 samples, of which a quarter is left for the words, and two are the request.
    let run = multimodal(folder.path(), &["long.wav", "--prompt", "ab"]).ok();
    assert_eq!(run.stdout, "ll\n");
    let says = "long.wav: 3.0 s of audio, the model takes 0.5 s at a time: cut into 7 chunks that overlap by 0.1 s";
    run.says(&[says, "is cut off after 2 tokens"]);
    let sounds = multimodal(folder.path(), &["long.wav", "--prompt", "ab", "--json"]).ok().json();
    let pieces = sounds["sounds"][0]["pieces"].as_array().expect("a list");
    let times = pieces.iter().map(|piece| (piece["start"].as_f64(), piece["end"].as_f64()));
    let times: Vec<_> = times.map(|(start, end)| (start.expect("s"), end.expect("s"))).collect();
    let starts = [0.0, 0.45, 0.9, 1.35, 1.8, 2.25, 2.7];
    let expected = starts.map(|start: f64| (start, (start + 0.5).min(3.0)));
    assert_eq!(times, expected);
}

/// The op of the test hears a language, and how loud a chunk is.
#[test]
fn what_the_host_op_found_is_reported() {
    let folder = folder();
    let run = multimodal(folder.path(), &["long.wav", "fast.wav", "--prompt", "ab", "--json"]).ok();
    run.says(&["times real time, language hum"]);
    let report = run.json();
    let found = |sound: usize| {
        let sound = &report["sounds"][sound];
        assert_eq!(sound["language"], "hum");
        let notes = sound["notes"].as_array().expect("a list");
        let of = |note: &Value| {
            let [start, end, sure] = [&note["start"], &note["end"], &note["found"]["confidence"]]
                .map(|value| value.as_f64().expect("a number"));
            (start, end, (sure * 100.0).round())
        };
        notes.iter().map(of).collect::<Vec<_>>()
    };
    // A sample is 0 or 100 of 128; of the other clip 0 or 50.
    let long = found(0);
    assert_eq!(long.len(), 7);
    assert_eq!(long[1], (0.45, 0.95, 39.0));
    assert_eq!(found(1), [(0.0, 0.1, 20.0)]);
}

#[test]
fn any_channels_bits_and_rate_are_taken() {
    let folder = folder();
    let run =
        multimodal(folder.path(), &["stereo.wav", "fast.wav", "--prompt", "ab", "--chat"]).ok();
    assert_eq!(run.stdout, "ll\nll\n");
    for (words, code, what) in [
        (&["stereo.wav"][..], 2, "params.transcription"),
        (&["none.wav", "--prompt", "ab"], 9, "none.wav: holds no audio (0 samples)"),
        (&["cut.wav", "--prompt", "ab"], 9, "cut.wav: a broken or cut-off WAV file"),
        (&["gone.wav", "--prompt", "ab"], 11, "gone.wav: "),
        (&["stereo.wav", "--chat"], 2, "--prompt"),
    ] {
        let run = multimodal(folder.path(), words);
        assert_eq!(run.code, code, "{run:?}");
        assert!(run.stderr.contains(what) && run.stdout.is_empty(), "{what}: {run:?}");
    }
}

/// A tiny Whisper that takes two seconds at once.
pub fn whisper(folder: &Path) -> PathBuf {
    run::forge(folder, &fixture("whisper-tiny"), "whisper", "--name tiny --cpu-only")
}

/// The windows of long audio begin where `transformers` begins them, and its segments have the same words and times;
/// from a file, and as raw samples that are recorded.
#[test]
fn long_audio_has_the_segments_of_the_reference() {
    let folder = folder();
    let bundle = whisper(folder.path());
    let goldens: Value = files::json(&fixture("whisper-tiny").join("goldens.json"));
    let expected = |piece: &Value| {
        let text = piece["text"].as_str().expect("a text").trim().to_owned();
        (piece["start"].as_f64(), piece["end"].as_f64(), text)
    };
    let plain = goldens["long"][0]["segments"].as_array().expect("segments");
    let mut plain: Vec<_> = plain.iter().map(expected).collect();
    plain.retain(|(.., text)| !text.is_empty());
    assert!(plain.len() > 4, "{plain:?}");
    let long = fixture("whisper-tiny").join("long.wav");
    let transcribe = || qhx!(folder, "transcribe", bundle);
    let run =
        transcribe().args([&long]).args(["--format", "json", "--temperature", "0"]).run().ok();
    let sound = run.json()["sounds"][0].clone();
    assert_eq!(sound["language"], "en");
    let pieces = sound["pieces"].as_array().expect("a list").iter().map(expected);
    assert_eq!(pieces.collect::<Vec<_>>(), plain);
    run.says(&["times real time, language en"]);

    let samples = std::fs::read(&long).expect("a file").split_off(44);
    let run =
        transcribe().args(["-", "--format", "srt", "--temperature", "0"]).stdin(samples).run().ok();
    let cues: Vec<_> = run.stdout.trim_end().split("\n\n").collect();
    assert_eq!(cues.len(), plain.len(), "{}", run.stdout);
    let first = format!("1\n00:00:00,{:03.0} --> ", plain[0].0.expect("a time") * 1e3);
    assert!(cues[0].starts_with(&first) && cues[0].ends_with(&plain[0].2), "{}", cues[0]);
    run.says(&[&plain[1].2]);
}

/// A WAV file of two channels, whose length the header does not have, is written down while it is written; a FLAC file
/// as soon as it is there.
#[test]
fn files_in_a_pipe_are_those_on_disk() {
    let folder = folder();
    let bundle = whisper(folder.path());
    let long = fixture("whisper-tiny").join("long.wav");
    let transcribe = |from: &str| {
        let run = qhx!(folder, "transcribe", bundle, "--temperature", "0", from);
        run.args(["--format", "srt"])
    };
    let whole = transcribe(&long.display().to_string()).run().ok().stdout;
    let mono = std::fs::read(&long).expect("a file").split_off(44);
    let stereo: Vec<_> = mono.chunks(2).flat_map(|pair| [pair, pair].concat()).collect();
    let mut piped = wav(16_000, 2, 16, &stereo);
    piped[4..8].fill(u8::MAX);
    piped[40..44].fill(u8::MAX);
    let mut child = transcribe("-").start_with_streams();
    let (mut input, said) = (child.stdin.take().unwrap(), child.stderr.take().unwrap());
    let (beginning, end) = piped.split_at(piped.len() * 3 / 4);
    input.write_all(beginning).unwrap();
    let mut said = std::io::BufReader::new(said).lines().map_while(std::result::Result::ok);
    assert!(said.any(|line| line.starts_with("standard input: ") && line.contains(" s to ")));
    input.write_all(end).unwrap();
    drop(input);
    let rest = said.collect::<Vec<_>>().join("\n");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{rest}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), whole);

    let flac = std::fs::read(fixture("media").join("tone16.flac")).expect("a file");
    transcribe("-").stdin(flac).run().ok();
    piped.truncate(30);
    let cut = transcribe("-").stdin(piped).run();
    cut.fails(9, &["error: standard input: a broken or cut-off WAV file"]);
}

/// The tokenizer of the tiny model ends with `<|notimestamps|>`, as those of 2022 and of many fine-tunes do. Ids behind
/// it are times all the same, and the transcript is that of a tokenizer that spells them.
#[test]
fn times_need_no_tokens_in_the_tokenizer() {
    let folder = folder();
    let bundle = whisper(folder.path());
    qhx!(folder, "verify", bundle).run().ok().prints(&["ok   golden generate-audio: "]);

    let spelled = folder.path().join("spelled");
    qhx_tests::plugin_files::copy_folder(&fixture("whisper-tiny"), &spelled);
    files::edit(&spelled.join("tokenizer.json"), |tokenizer| {
        let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
        let last = added.last().cloned().expect("a token");
        assert_eq!(last["content"], "<|notimestamps|>");
        for step in 0..=100u64 {
            let mut token = last.clone();
            token["id"] = json!(last["id"].as_u64().expect("an id") + 1 + step);
            token["content"] = json!(format!("<|{:.2}|>", step as f64 * 0.02));
            token["special"] = json!(false);
            added.push(token);
        }
    });
    let options = "--name tiny --cpu-only --no-golden";
    let out = run::forge(folder.path(), &spelled, "of-spelled", options);
    let long = fixture("whisper-tiny").join("long.wav");
    let [one, other] = [&bundle, &out].map(|bundle| {
        let run = qhx!(folder, "transcribe", bundle, long);
        run.args(["--json"]).run().ok().json()["sounds"][0].clone()
    });
    assert!(one["pieces"].as_array().expect("a list").len() > 4, "{one}");
    assert_eq!(one, other);
}

#[test]
fn languages_tasks_and_times_that_a_model_has_not_are_named() {
    let folder = folder();
    let bundle = whisper(folder.path());
    let one = fixture("whisper-tiny").join("one.wav").display().to_string();
    let program = |words: &[&str]| {
        let begun = Program::qhx(folder.path()).args(&words[..1]).args([&bundle]);
        begun.args(&words[1..]).run()
    };
    for (words, text) in [
        (&["transcribe", &one, "--language", "de"][..], "Brot Winter\n"),
        (&["transcribe", &one, "--times", "none"], "Brot Winter\n"),
        (&["transcribe", &one, "--task", "translate"], "bread winter\n"),
    ] {
        assert_eq!(program(words).ok().stdout, text, "{words:?}");
    }
    for (words, what) in [
        (
            &["transcribe", &one, "--language", "deu"][..],
            "did you mean \"de\"? It knows de, en, fr",
        ),
        (&["transcribe", &one, "--task", "sing"], "does not know the task \"sing\""),
        (&["generate", "boat"], "use it with `qhx transcribe`"),
        (&["chat"], "does not chat; it does transcribe"),
    ] {
        program(words).fails(2, &[what]);
    }
    qhx!(folder, "transcribe", bundle, "-").run().fails(9, &["0 samples"]);
    // Digital silence has no words, and is no error.
    let silence = vec![0; 32_000];
    let run = qhx!(folder, "transcribe", bundle, "-").stdin(silence).run();
    assert_eq!(run.code, 0, "{run:?}");
    std::fs::write(folder.path().join("odd.wav"), wav(96_000, 7, 16, &[0; 7 * 2 * 9600]))
        .expect("written");
    let run = program(&["transcribe", "odd.wav"]);
    assert!(run.code == 0 || run.stderr.contains("channels"), "{run:?}");
}

/// By the weights of attention, as `transformers` finds them with `return_timestamps="word"`.
#[test]
fn words_have_the_times_of_the_reference() {
    let folder = folder();
    let bundle = whisper(folder.path());
    let goldens: Value = files::json(&fixture("whisper-tiny").join("words.json"));
    let transcribe = |bundle: &Path, clip: &str, words: &[&str]| {
        let run = qhx!(folder, "transcribe", bundle);
        run.args([fixture("whisper-tiny").join(clip)]).args(words).run()
    };
    let cases = goldens["cases"].as_array().expect("a list");
    for case in cases {
        let [clip, language] = ["clip", "language"].map(|key| case[key].as_str().expect("a text"));
        let words = ["--language", language, "--times", "word", "--temperature", "0", "--json"];
        let sound = transcribe(&bundle, clip, &words).ok().json()["sounds"][0].clone();
        let pieces = sound["pieces"].as_array().expect("a list").iter();
        let pieces = pieces.map(|piece| json!([piece["text"], piece["start"], piece["end"]]));
        assert_eq!(pieces.collect::<Value>(), case["words"], "{clip}");
    }
    let run = transcribe(&bundle, "one.wav", &["--times", "word", "--format", "srt"]).ok();
    let [first, second] = ["00:00:00,000 --> 00:00:00,300\nBrot", "00:00:00,300 --> 00:00:00,620"];
    assert_eq!(run.stdout, format!("1\n{first}\n\n2\n{second}\nWinter\n\n"));

    // A checkpoint that does not say which heads follow the audio.
    let plain = folder.path().join("plain");
    qhx_tests::plugin_files::copy_folder(&fixture("whisper-tiny"), &plain);
    let path = plain.join("generation_config.json");
    let mut config: Value = files::json(&path);
    let heads = config["alignment_heads"].take();
    std::fs::write(&path, config.to_string()).expect("written");
    let out = folder.path().join("of-plain");
    let forge = || {
        qhx!(folder, "forge", plain, "--out", out)
            .args(["--name", "tiny", "--cpu-only", "--no-golden"])
            .run()
    };
    forge().ok();
    transcribe(&out, "one.wav", &["--times", "word"])
        .fails(2, &["times of words: the graphs give no weights of attention", "alignment_heads"]);
    config["alignment_heads"] = heads;
    config["alignment_heads"][0] = json!([2, 0]);
    std::fs::write(&path, config.to_string()).expect("written");
    let run = forge();
    let what = "expected pairs of one of 2 layers and one of 3 heads";
    assert!(run.code != 0 && run.stderr.contains(what), "{run:?}");
}

/// A tiny Parakeet that takes two seconds at once.
fn parakeet(folder: &Path, kind: &str) -> PathBuf {
    let checkpoint = fixture(&format!("parakeet-{kind}-tiny"));
    let options = "--name tiny --cpu-only --recipe-option windows=1,2";
    run::forge(folder, &checkpoint, kind, options)
}

/// Windows that overlap give the tokens of the reference at its times, from a file and from a recording.
#[test]
fn long_audio_has_the_tokens_of_the_reference() {
    let folder = folder();
    let long = fixture("whisper-tiny").join("long.wav");
    let samples = std::fs::read(&long).expect("a file").split_off(44);
    for kind in ["ctc", "tdt"] {
        let bundle = parakeet(folder.path(), kind);
        let goldens = fixture(&format!("parakeet-{kind}-tiny")).join("goldens.json");
        let goldens: Value = files::json(&goldens);
        let long_case = &goldens["long"];
        let text = long_case["text"].as_str().expect("a text");
        assert!(text.split(' ').count() > 4, "{text}");
        let run = qhx!(folder, "transcribe", bundle, long, "--times", "word", "--format", "json")
            .run()
            .ok();
        let sound = run.json()["sounds"][0].clone();
        assert_eq!(sound["text"], *text);
        let words: Vec<_> = text.split(' ').collect();
        let pieces = sound["pieces"].as_array().expect("a list");
        assert_eq!(pieces.iter().map(|piece| &piece["text"]).collect::<Vec<_>>(), words);
        // Each word begins where one of the tokens does.
        let row = goldens["row_seconds"].as_f64().expect("a number");
        let tokens = long_case["tokens"].as_array().expect("a list").iter();
        let starts: Vec<f64> =
            tokens.map(|token| token[1].as_f64().expect("a row") * row).collect();
        let begins = |piece: &Value| {
            let start = piece["start"].as_f64().expect("a time");
            starts.iter().any(|known| (known - start).abs() < 2e-3)
        };
        assert!(pieces.iter().all(begins), "{pieces:?}, expected of {starts:?}");
        run.says(&["cut into 4 chunks that overlap by 0.3 s"]);

        let cues = qhx!(folder, "transcribe", bundle, "-", "--format", "srt")
            .stdin(samples.clone())
            .run()
            .ok();
        let cue_text = |cue: &str| cue.lines().skip(2).collect::<Vec<_>>().join(" ");
        let said: Vec<_> = cues.stdout.trim_end().split("\n\n").map(cue_text).collect();
        assert!(said.len() > 1, "{}", cues.stdout);
        assert_eq!(said.join(" "), *text);
    }
}

#[test]
fn a_recogniser_takes_any_audio_and_names_what_it_lacks() {
    let folder = folder();
    let bundle = parakeet(folder.path(), "tdt");
    let write = |name: &str, rate, channels, data: &[u8]| {
        std::fs::write(folder.path().join(name), wav(rate, channels, 16, data)).expect("written");
    };
    write("none.wav", 16_000, 1, &[]);
    write("silence.wav", 16_000, 1, &[0; 32_000]);
    write("slow.wav", 8_000, 1, &[0; 8_000]);
    write("fast.wav", 96_000, 7, &[0; 7 * 2 * 9600]);
    write("loud.wav", 16_000, 1, &[0xff, 0x7f, 0, 0x80].repeat(4000));
    // Samples of f32, one of which is no number.
    let mut nan = wav(16_000, 1, 32, &[f32::NAN.to_le_bytes(); 400].concat());
    nan[20] = 3;
    std::fs::write(folder.path().join("nan.wav"), nan).expect("written");
    let program = |words: &[&str]| {
        Program::qhx(folder.path()).args(&words[..1]).args([&bundle]).args(&words[1..]).run()
    };
    for file in ["silence.wav", "slow.wav", "loud.wav"] {
        assert_eq!(program(&["transcribe", file]).code, 0, "{file}");
    }
    let run = program(&["transcribe", "fast.wav"]);
    assert!(run.code == 0 || run.stderr.contains("channels"), "{run:?}");
    for (words, code, what) in [
        (&["transcribe", "none.wav"][..], 9, "0 samples"),
        (&["transcribe", "nan.wav"], 9, "NaN"),
        (&["transcribe", "-"], 9, "0 samples"),
        (&["transcribe", "silence.wav", "--language", "de"], 2, "has one only"),
        (&["transcribe", "silence.wav", "--prompt", "boat"], 2, "no place for one"),
        (&["generate", "boat"], 2, "use it with `qhx transcribe`"),
    ] {
        program(words).fails(code, &[what]);
    }
}
