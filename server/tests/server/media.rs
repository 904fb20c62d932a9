//! Images in conversations, and `/v1/audio/transcriptions`.

use std::sync::OnceLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::bundles::{
    Running, hearing, language, listening, options, seeing, seeing_with_tools, shared,
};
use crate::client::{Client, Response};

const CHAT: &str = "/v1/chat/completions";

fn sensing() -> &'static Running {
    static SENSING: OnceLock<Running> = OnceLock::new();
    SENSING.get_or_init(|| {
        let bundles = [("seeing", seeing()), ("hearing", hearing()), ("listening", listening())];
        Running::start(options(bundles))
    })
}

fn boat() -> String {
    STANDARD.encode(std::fs::read(qhx_paths::fixture("qwen3vl-tiny/images/boat.png")).unwrap())
}

#[test]
fn an_image_is_seen_in_each_interface() {
    let client = &sensing().client;
    let url = format!("data:image/png;base64,{}", boat());
    let text = json!({"type": "text", "text": "Describe this image."});
    let content = json!([{"type": "image_url", "image_url": {"url": url}}, text]);
    let messages = json!([{"role": "user", "content": content}]);
    let body = json!({"model": "seeing", "messages": messages, "temperature": 0});
    let json = client.ask(CHAT, &body);
    assert_eq!(json["choices"][0]["message"]["content"], "A red boat on a blue sea.");
    let source = json!({"type": "base64", "media_type": "image/png", "data": boat()});
    let content = json!([{"type": "image", "source": source}, text]);
    let messages = json!([{"role": "user", "content": content}]);
    let body = json!({"model": "seeing", "messages": messages, "temperature": 0, "max_tokens": 40});
    let message = client.ask("/v1/messages", &body);
    assert_eq!(message["content"][0]["text"], "A red boat on a blue sea.");
    let count = client.ask("/v1/messages/count_tokens", &body);
    assert_eq!(count["input_tokens"], json["usage"]["prompt_tokens"]);
    let content = json!([
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "Describe this image."},
    ]);
    let input = json!([{"role": "user", "content": content}]);
    let body = json!({"model": "seeing", "input": input, "temperature": 0});
    let response = client.ask("/v1/responses", &body);
    assert_eq!(response["output"][0]["content"][0]["text"], "A red boat on a blue sea.");
}

#[test]
fn tools_count_beside_images() {
    let manifest = seeing_with_tools();
    let running = Running::start(options([("seeing", manifest.as_path())]));
    let source = json!({"type": "base64", "media_type": "image/png", "data": boat()});
    let content = json!([{"type": "image", "source": source}]);
    let tool = json!({"name": "weather", "input_schema": {"type": "object"}});
    let mut body = json!({"messages": [{"role": "user", "content": content}], "tools": [tool], "max_tokens": 1});
    let usage = running.client.ask("/v1/messages", &body)["usage"].clone();
    let used =
        ["input_tokens", "cache_read_input_tokens"].map(|name| usage[name].as_u64().unwrap());
    let count = |body: &Value| {
        let json = running.client.ask("/v1/messages/count_tokens", body);
        json["input_tokens"].as_u64().unwrap()
    };
    let with_tools = count(&body);
    assert_eq!(with_tools, used.iter().sum::<u64>());
    body["tools"] = json!([]);
    assert!(count(&body) < with_tools);
}

/// A PNG of 74 bytes that declares 60,000 × 60,000 pixels.
const BOMB: &str = "iVBORw0KGgoAAAANSUhEUgAA6mAAAOpgCAIAAAAPsOIVAAAAEUlEQVR4nGNgGAWjYBQMdwAAA+gAAbOm00YAAAAASUVORK5CYII=\
    ";

#[test]
fn what_is_no_image_is_refused() {
    let client = &sensing().client;
    let bomb = format!("data:image/png;base64,{BOMB}");
    for (url, code) in [
        (bomb.as_str(), "invalid_media"),
        ("data:image/png;base64,AAAA", "invalid_media"),
        ("data:image/png;base64,!", "invalid_value"),
        ("data:text/html,hello", "invalid_value"),
    ] {
        let content = json!([{"type": "image_url", "image_url": url}]);
        let messages = json!([{"role": "user", "content": content}]);
        let body = json!({"model": "seeing", "messages": messages});
        let error = client.post(CHAT, &body).refuses(400, "code", code);
        if url == bomb {
            assert!(error["message"].as_str().unwrap().contains("60000"), "{error}");
        }
    }
    let content =
        json!([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]);
    let messages = json!([{"role": "user", "content": content}]);
    let body = json!({"model": "seeing", "messages": messages});
    client.post(CHAT, &body).refuses(400, "code", "model_not_supported");
}

/// Runs a test in a process of its own, whose memory is that of no other test. True within it.
#[cfg(target_os = "linux")]
fn alone(test: &str) -> bool {
    if std::env::var_os("QHX_TEST_ALONE").is_some() {
        return true;
    }
    let mut process = std::process::Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", test, "--nocapture"]).env("QHX_TEST_ALONE", "1");
    let output = process.output().unwrap();
    let [said, failed] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}{failed}");
    false
}

/// MiB of this process.
#[cfg(target_os = "linux")]
fn resident(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn memory_of_large_requests_goes_back_to_the_system() {
    if !alone("media::memory_of_large_requests_goes_back_to_the_system") {
        return;
    }
    let running = Running::start(options([("language", language())]));
    let json = running.client.clone().with("content-type", "application/json");
    let before = resident("VmRSS:");
    // Many small values.
    let values =
        format!("{{\"prompt\": \"a\", \"unknown\": [{}1]}}", "{\"a\":[]},".repeat(700_000));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| json.send("POST", "/tokenize", values.as_bytes()).status(200));
        }
    });
    let taken = || resident("VmRSS:").saturating_sub(before);
    let most = resident("VmHWM:") - before;
    assert!(most > 100, "{most} MiB");
    let soon = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while taken() > 60 && std::time::Instant::now() < soon {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(taken() <= 60, "{} of {most} MiB stayed", taken());
}

#[cfg(target_os = "linux")]
#[test]
fn images_of_a_request_take_bounded_memory() {
    if !alone("media::images_of_a_request_take_bounded_memory") {
        return;
    }
    let highest = || resident("VmHWM:");
    let mut png = std::io::Cursor::new(Vec::new());
    let grey = image::GrayImage::new(5000, 5000);
    grey.write_to(&mut png, image::ImageFormat::Png).unwrap();
    drop(grey);
    let url = format!("data:image/png;base64,{}", STANDARD.encode(png.into_inner()));
    let running = Running::start(options([("seeing", seeing())]));
    let ask = |count: usize| {
        let image = json!({"type": "image_url", "image_url": {"url": url}});
        let messages = json!([{"role": "user", "content": vec![image; count]}]);
        running.client.post(CHAT, &json!({"messages": messages, "max_tokens": 1}))
    };
    ask(1).status(200);
    let before = highest();
    // 750 MB of pixels.
    let error = ask(10).refuses(400, "code", "invalid_media");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("25.0 megapixels") && message.contains("this request"), "{error}");
    let taken = highest() - before;
    assert!(taken < 250, "{taken} MiB");
}

/// A form of fields and a file.
fn form(fields: &[(&str, &str)], file: Option<&[u8]>) -> Response {
    form_to("/v1/audio/transcriptions", fields, file)
}

fn form_to(route: &str, fields: &[(&str, &str)], file: Option<&[u8]>) -> Response {
    send_form(&sensing().client, route, fields, file)
}

/// The transcription of a file.
pub fn form_of(client: &Client, fields: &[(&str, &str)], file: &[u8]) -> Response {
    send_form(client, "/v1/audio/transcriptions", fields, Some(file)).status(200)
}

fn send_form(
    client: &Client,
    route: &str,
    fields: &[(&str, &str)],
    file: Option<&[u8]>,
) -> Response {
    let mut body = Vec::new();
    for (name, value) in fields {
        let head =
            format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend_from_slice(head.as_bytes());
    }
    if let Some(file) = file {
        let head = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"../../noon.wav\"\r\n\
            content-type: audio/wav\r\n\r\n";
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(file);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--b--\r\n");
    let client = client.clone().with("content-type", "multipart/form-data; boundary=b");
    client.send("POST", route, &body)
}

#[test]
fn speech_becomes_text_in_each_format() {
    let noon = std::fs::read(qhx_paths::fixture("gemma4-tiny/noon.wav")).unwrap();
    let words = "the boat leaves at noon";
    let ask = |format| form(&[("model", "hearing"), ("response_format", format)], Some(&noon));
    assert_eq!(form(&[("model", "hearing")], Some(&noon)).status(200).json()["text"], words);
    assert_eq!(ask("json").status(200).json()["text"], words);
    assert_eq!(ask("text").status(200).text(), format!("{words}\n"));
    let verbose: Value = ask("verbose_json").status(200).json();
    assert_eq!(verbose["text"], words);
    let segment = &verbose["segments"][0];
    assert_eq!((&segment["text"], &segment["start"]), (&json!(words), &json!(0.0)));
    assert_eq!(segment["end"], verbose["duration"]);
    let srt = ask("srt").status(200).text();
    assert!(srt.starts_with("1\n00:00:00,000 --> 00:00:0"), "{srt}");
    assert!(srt.ends_with(&format!("\n{words}\n\n")), "{srt}");
    let vtt = ask("vtt").status(200);
    assert_eq!(vtt.header("content-type"), Some("text/vtt; charset=utf-8"));
    assert!(vtt.text().starts_with("WEBVTT\n\n00:00:00.000 --> 00:00:0"), "{}", vtt.text());
}

#[test]
fn speech_is_translated_into_english() {
    let clip = std::fs::read(qhx_paths::fixture("whisper-tiny/one.wav")).unwrap();
    let fields = [
        ("model", "listening"),
        ("language", ""),
        ("response_format", "verbose_json"),
        ("temperature", "0"),
    ];
    for (route, task, text) in [
        ("/v1/audio/transcriptions", "transcribe", "Brot Winter"),
        ("/v1/audio/translations", "translate", "bread winter"),
    ] {
        let said = form_to(route, &fields, Some(&clip)).status(200).json();
        assert_eq!((&said["task"], &said["text"]), (&json!(task), &json!(text)));
    }
    let error = form_to("/v1/audio/translations", &[("model", "hearing")], Some(&clip));
    error.status(400).says("translate");
}

#[test]
fn segments_have_whispers_scores() {
    let clip = std::fs::read(qhx_paths::fixture("whisper-tiny/two.wav")).unwrap();
    let ask = |model, temperature| {
        let fields =
            [("model", model), ("response_format", "verbose_json"), ("temperature", temperature)];
        form(&fields, Some(&clip)).status(200).json()["segments"][0].clone()
    };
    let segment = ask("listening", "0");
    let number = |name: &str| segment[name].as_f64().unwrap_or_else(|| panic!("{segment}"));
    // It has learnt these words by heart; `transformers` says how likely silence is.
    assert!((-0.5..0.0).contains(&number("avg_logprob")), "{segment}");
    let goldens = std::fs::read(qhx_paths::fixture("whisper-tiny/goldens.json")).unwrap();
    let goldens: Value = serde_json::from_slice(&goldens).unwrap();
    let silence = goldens["cases"][1]["no_speech"].as_f64().unwrap();
    assert!((number("no_speech_prob") / silence - 1.0).abs() < 1e-3, "{segment}");
    assert_eq!((number("temperature"), number("seek")), (0.0, 0.0), "{segment}");
    // Python's zlib makes 21 bytes of the 17 of "house house bread", the text of all segments.
    assert!((number("compression_ratio") - 17.0 / 21.0).abs() < 1e-6, "{segment}");
    assert_eq!(ask("listening", "0.4")["temperature"], 0.4);
    let other = ask("hearing", "0");
    for name in ["avg_logprob", "no_speech_prob", "compression_ratio", "temperature", "seek"] {
        assert!(other.as_object().unwrap().contains_key(name), "{other}");
        assert!(other[name].is_null(), "{other}");
    }
}

#[test]
fn a_transcript_comes_as_it_is_known() {
    let [long, noon] = ["whisper-tiny/long.wav", "gemma4-tiny/noon.wav"]
        .map(|name| std::fs::read(qhx_paths::fixture(name)).unwrap());
    // The first takes several windows, the other comes at once.
    for (model, clip, least) in [("listening", &long, 2), ("hearing", &noon, 1)] {
        let fields = [("model", model), ("temperature", "0")];
        let whole = form(&fields, Some(clip)).status(200).json();
        let streamed = form(&[&fields[..], &[("stream", "true")]].concat(), Some(clip)).status(200);
        assert_eq!(streamed.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let text = streamed.text();
        let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = events.map(|json| serde_json::from_str(json).unwrap()).collect();
        let (done, deltas) = events.split_last().unwrap();
        assert_eq!(done["type"], "transcript.text.done");
        assert_eq!((&done["text"], &done["usage"]), (&whole["text"], &whole["usage"]));
        assert!(deltas.iter().all(|delta| delta["type"] == "transcript.text.delta"), "{text}");
        let joined: String = deltas.iter().map(|delta| delta["delta"].as_str().unwrap()).collect();
        assert_eq!(joined, whole["text"].as_str().unwrap(), "{text}");
        assert!(deltas.len() >= least, "{model}: {text}");
    }
    for (name, value, param) in [
        ("stream", "perhaps", "stream"),
        ("include[]", "logprobs", "include[]"),
        ("chunking_strategy", "never", "chunking_strategy"),
        ("chunking_strategy", "{\"type\": \"words\"}", "chunking_strategy.type"),
        (
            "chunking_strategy",
            "{\"type\": \"server_vad\", \"threshold\": 2}",
            "chunking_strategy.threshold",
        ),
    ] {
        form(&[("model", "hearing"), (name, value)], Some(&noon)).refuses(400, "param", param);
    }
    let fields = [("model", "hearing"), ("stream", "true"), ("response_format", "srt")];
    form(&fields, Some(&noon)).refuses(400, "param", "stream");
    // Audio that cannot be read has a status of its own.
    form(&[("model", "hearing"), ("stream", "true")], Some(b"no audio")).status(400);
    form(&[("model", "hearing"), ("chunking_strategy", "auto")], Some(&noon)).status(200);
}

#[test]
fn silence_is_left_out_and_times_stay() {
    let noon = std::fs::read(qhx_paths::fixture("gemma4-tiny/noon.wav")).unwrap();
    let (silence, speech) = (vec![0; 96_000], &noon[44..]);
    let wav = |audio: &[u8]| [&qhx::wav_header(16_000, Some(audio.len() / 2))[..], audio].concat();
    let strategy = r#"{"type": "server_vad", "threshold": 0.3, "prefix_padding_ms": 400}"#;
    let fields = [
        ("model", "hearing"),
        ("response_format", "verbose_json"),
        ("chunking_strategy", strategy),
    ];
    let audio = [&silence[..], speech, &silence].concat();
    let said = form(&fields, Some(&wav(&audio))).status(200).json();
    let segment = &said["segments"][0];
    let [start, end] = ["start", "end"].map(|name| segment[name].as_f64().unwrap());
    assert!((2.5..3.2).contains(&start) && (4.0..5.3).contains(&end), "{said}");
    assert!((said["duration"].as_f64().unwrap() - 7.69).abs() < 0.1, "{said}");
    let said = form(&fields, Some(&wav(&silence))).status(200).json();
    assert_eq!((&said["text"], &said["segments"]), (&json!(""), &json!([])));
}

#[test]
fn words_have_times_where_they_are_asked_for() {
    let clip = std::fs::read(qhx_paths::fixture("whisper-tiny/two.wav")).unwrap();
    let goldens = std::fs::read(qhx_paths::fixture("whisper-tiny/words.json")).unwrap();
    let goldens: Value = serde_json::from_slice(&goldens).unwrap();
    let ask = |model, format, granularities: &[&str]| {
        let mut fields = vec![("model", model), ("response_format", format), ("temperature", "0")];
        fields.extend(granularities.iter().map(|name| ("timestamp_granularities[]", *name)));
        form(&fields, Some(&clip))
    };
    let said = ask("listening", "verbose_json", &["word", "segment"]).status(200).json();
    let words = said["words"].as_array().unwrap().iter();
    let words = words.map(|word| json!([word["word"], word["start"], word["end"]]));
    assert_eq!(words.collect::<Value>(), goldens["cases"][0]["words"]);
    assert!(!said["segments"].as_array().unwrap().is_empty());
    let alone = ask("listening", "verbose_json", &["word"]).status(200).json();
    assert_eq!((&alone["words"], &alone["segments"]), (&said["words"], &Value::Null));
    let segments = ask("listening", "verbose_json", &[]).status(200).json();
    assert_eq!((&segments["words"], &segments["segments"]), (&Value::Null, &said["segments"]));
    for (model, format, granularity, what) in [
        ("listening", "verbose_json", "syllable", "expected word or segment"),
        ("listening", "json", "word", "verbose_json"),
        ("hearing", "verbose_json", "word", "the model gives no times"),
    ] {
        let error =
            ask(model, format, &[granularity]).refuses(400, "param", "timestamp_granularities[]");
        assert!(error["message"].as_str().unwrap().contains(what), "{error}");
    }
}

#[test]
fn a_form_that_is_wrong_is_refused() {
    assert_eq!(form(&[("model", "hearing")], None).status(400).error()["param"], "file");
    assert_eq!(
        form(&[("response_format", "pdf")], None).status(400).error()["param"],
        "response_format"
    );
    assert_eq!(form(&[("model", "seeing")], Some(b"a")).status(400).error()["param"], "model");
    let error = form(&[("model", "hearing")], Some(b"no audio")).status(400).error();
    assert!(error["message"].as_str().unwrap().contains("file"), "{error}");
    let json = sensing().client.post("/v1/audio/transcriptions", &json!({}));
    json.refuses(415, "code", "unsupported_media_type");
    let error = shared().client.clone().with("content-type", "multipart/form-data; boundary=b");
    error.send("POST", "/v1/audio/transcriptions", b"--b--\r\n").status(501).says("transcribe");
}

#[test]
fn a_form_that_lies_is_refused() {
    let noon = std::fs::read(qhx_paths::fixture("gemma4-tiny/noon.wav")).unwrap();
    let head = b"--b\r\ncontent-disposition: form-data; name=\"file\"\r\n";
    let whole = |more: &[u8], end: &[u8]| [head, more, b"\r\n", &noon, end].concat();
    let of = "multipart/form-data; boundary=b";
    let many = b"--b\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n".repeat(2000);
    for (kind, body, code) in [
        // Another boundary than that of the head, none, and one that is too long.
        ("multipart/form-data; boundary=c", whole(b"", b"\r\n--b--\r\n"), "malformed_form"),
        ("multipart/form-data", whole(b"", b"\r\n--b--\r\n"), "unsupported_media_type"),
        // The end is missing, of the part or of its head.
        (of, whole(b"", b""), "malformed_form"),
        (of, head.to_vec(), "malformed_form"),
        (of, [head, &b"x: y"[..], &[b'z'; 100_000]].concat(), "malformed_form"),
        // It says that it is much longer than it is.
        (of, whole(b"content-length: 99999999999\r\n", b""), "malformed_form"),
        (of, [&many[..], b"--b--\r\n"].concat(), "missing_required_parameter"),
        (of, b"--b\r\n\r\nno name\r\n--b--\r\n".to_vec(), "malformed_form"),
        (of, [head, &b"\r\n\r\n--b--\r\n"[..]].concat(), "kind"),
    ] {
        let client = sensing().client.clone().with("content-type", kind);
        let response = client.send("POST", "/v1/audio/transcriptions", &body);
        assert!((400..500).contains(&response.status), "{kind}: {response:?}");
        let error = response.error();
        if code != "kind" {
            assert_eq!(
                error["code"],
                code,
                "{kind}: {}",
                String::from_utf8_lossy(&body[..80.min(body.len())])
            );
        }
    }
    assert_eq!(
        form(&[("model", "hearing")], Some(&noon)).status(200).json()["text"],
        "the boat leaves at noon"
    );
}
