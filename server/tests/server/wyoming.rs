//! The Wyoming protocol.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bundles::{Running, hearing, listening, options, speaking};

fn serving() -> qhx_server::ServerOptions {
    let bundles = [("listening", listening()), ("speaking", speaking())];
    options(bundles).wyoming(std::net::SocketAddr::from(([127, 0, 0, 1], 0)))
}

/// A connection of a client.
struct Connection(BufReader<TcpStream>);

impl Connection {
    fn open(running: &Running) -> Self {
        let stream = TcpStream::connect(running.wyoming.unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(BufReader::new(stream))
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    fn send(&mut self, kind: &str, data: &Value, payload: &[u8]) {
        let data = data.to_string();
        let header =
            json!({"type": kind, "data_length": data.len(), "payload_length": payload.len()});
        self.write(&[format!("{header}\n{data}").as_bytes(), payload].concat());
    }

    /// The next event: its type, data and payload. `None` at the end.
    fn next(&mut self) -> Option<(String, Value, Vec<u8>)> {
        let mut line = String::new();
        if self.0.read_line(&mut line).unwrap_or(0) == 0 {
            return None;
        }
        let header: Value = serde_json::from_str(&line).unwrap();
        let mut part = |name: &str| {
            let mut bytes = vec![0; header[name].as_u64().unwrap_or(0) as usize];
            self.0.read_exact(&mut bytes).unwrap();
            bytes
        };
        let (data, payload) = (part("data_length"), part("payload_length"));
        let data = serde_json::from_slice(&data).unwrap();
        Some((header["type"].as_str().unwrap().to_owned(), data, payload))
    }

    #[track_caller]
    fn expect(&mut self, kind: &str) -> Value {
        let (found, data, _) = self.next().unwrap();
        assert_eq!(found, kind, "{data}");
        data
    }

    #[track_caller]
    fn refuses(&mut self, code: &str) -> String {
        let error = self.expect("error");
        assert_eq!(error["code"], code, "{error}");
        error["text"].as_str().unwrap().to_owned()
    }

    fn audio(&mut self, layout: &Value, audio: &[u8]) {
        self.send("audio-start", layout, &[]);
        for chunk in audio.chunks(2400) {
            self.send("audio-chunk", layout, chunk);
        }
        self.send("audio-stop", &json!({}), &[]);
    }

    /// The audio of an answer.
    fn spoken(&mut self) -> (Value, Vec<u8>) {
        let start = self.expect("audio-start");
        let mut audio = Vec::new();
        loop {
            let (kind, _, payload) = self.next().unwrap();
            match kind.as_str() {
                "audio-chunk" => audio.extend(payload),
                "audio-stop" => return (start, audio),
                other => panic!("{other}"),
            }
        }
    }
}

fn layout(rate: u32, width: u16, channels: u16) -> Value {
    json!({"rate": rate, "width": width, "channels": channels})
}

/// Samples at 16 kHz.
fn one() -> Vec<u8> {
    std::fs::read(qhx_paths::fixture("whisper-tiny/one.wav")).unwrap()[44..].to_vec()
}

#[test]
fn audio_of_each_layout_becomes_its_transcript() {
    let running = Running::start(serving());
    let mut connection = Connection::open(&running);
    connection.send("describe", &json!({}), &[]);
    let info = connection.expect("info");
    let model = &info["asr"][0]["models"][0];
    assert_eq!(model["name"], "listening");
    assert!(model["languages"].as_array().unwrap().contains(&json!("de")), "{model}");
    let voices = info["tts"][0]["voices"].as_array().unwrap();
    assert_eq!(voices.iter().map(|voice| &voice["name"]).collect::<Vec<_>>(), ["af_one", "bm_two"]);
    connection.send("ping", &json!({"text": "a"}), &[]);
    assert_eq!(connection.expect("pong")["text"], "a");
    let samples = one();
    let pairs = || samples.chunks_exact(2);
    for (layout, audio) in [
        (layout(16_000, 2, 1), samples.clone()),
        (layout(16_000, 2, 2), pairs().flat_map(|pair| [pair, pair].concat()).collect()),
        (layout(16_000, 4, 1), pairs().flat_map(|pair| [&[0, 0], pair].concat()).collect()),
        (layout(32_000, 2, 1), pairs().flat_map(|pair| [pair, pair].concat()).collect()),
    ] {
        connection.send("transcribe", &json!({"name": "listening", "language": "de-DE"}), &[]);
        connection.audio(&layout, &audio);
        let transcript = connection.expect("transcript");
        assert_eq!(transcript, json!({"text": "Brot Winter", "language": "de"}), "{layout}");
    }
    // Without its being asked for, and without audio.
    connection.audio(&layout(16_000, 2, 1), &samples);
    assert_eq!(connection.expect("transcript")["text"], "Brot Winter");
    connection.audio(&layout(16_000, 2, 1), &[]);
    assert_eq!(connection.expect("transcript")["text"], "");
    let line = running.line_with("WYOMING transcribe 200");
    assert!(line.contains("\"listening\""), "{line}");
}

#[test]
fn a_text_becomes_audio_whole_or_in_pieces() {
    let running = Running::start(serving());
    let mut connection = Connection::open(&running);
    let said = |text: &str| {
        let body = json!({"input": text, "voice": "bm_two", "response_format": "pcm"});
        running.client.post("/v1/audio/speech", &body).status(200).body
    };
    let voice = json!({"name": "bm_two"});
    connection.send("synthesize", &json!({"text": "Hello there.", "voice": voice}), &[]);
    let (start, audio) = connection.spoken();
    assert_eq!(
        (&start["rate"], &start["width"], &start["channels"]),
        (&json!(24_000), &json!(2), &json!(1))
    );
    assert_eq!(audio, said("Hello there."));
    // Sentence by sentence; the whole text that comes beside is for servers that know no pieces.
    connection.send("synthesize-start", &json!({"voice": voice}), &[]);
    for text in ["Hello ", "there. How", " are you"] {
        connection.send("synthesize-chunk", &json!({"text": text}), &[]);
    }
    assert_eq!(connection.spoken().1, said("Hello there."));
    connection.send(
        "synthesize",
        &json!({"text": "Hello there. How are you", "voice": voice}),
        &[],
    );
    connection.send("synthesize-stop", &json!({}), &[]);
    assert_eq!(connection.spoken().1, said(" How are you"));
    connection.expect("synthesize-stopped");
    for (kind, data, code, says) in [
        (
            "synthesize",
            json!({"text": "a", "voice": {"name": "zoe"}}),
            "invalid_value",
            "af_one, bm_two",
        ),
        ("synthesize", json!({}), "missing_required_parameter", "text"),
        ("synthesize", json!({"text": "a".repeat(4097)}), "invalid_value", "4096"),
        (
            "synthesize",
            json!({"text": "<a/>", "text_format": "ssml"}),
            "unsupported",
            "text_format",
        ),
        ("synthesize", json!({"text": "дом"}), "invalid_request_error", "Cyrillic"),
        ("synthesize-chunk", json!({"text": "a"}), "out_of_order", "synthesize-start"),
        ("synthesize-stop", json!({}), "out_of_order", "synthesize-start"),
    ] {
        connection.send(kind, &data, &[]);
        let text = connection.refuses(code);
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn events_that_are_wrong_are_refused() {
    let running = Running::start(serving().max_body(64 << 10));
    let mut connection = Connection::open(&running);
    let usual = layout(16_000, 2, 1);
    for (kind, data, payload, code) in [
        ("audio-chunk", usual.clone(), &[0, 0][..], "out_of_order"),
        ("audio-start", layout(0, 2, 1), &[], "invalid_value"),
        ("audio-start", layout(16_000, 9, 1), &[], "invalid_value"),
        ("audio-start", layout(16_000, 2, 0), &[], "invalid_value"),
        ("audio-start", json!({"rate": 16_000}), &[], "missing_required_parameter"),
        ("transcribe", json!({"name": "nothing"}), &[], "model_not_found"),
        ("transcribe", json!({"name": "speaking"}), &[], "model_not_supported"),
        ("ping", json!({"text": 1}), &[], "invalid_value"),
    ] {
        connection.send(kind, &data, payload);
        connection.refuses(code);
    }
    connection.send("audio-stop", &json!({}), &[]);
    connection.refuses("out_of_order");
    // One error for audio that is another one, odd, or too long; then it is dropped up to its end.
    for (layout, payload) in [(layout(8000, 2, 1), 2), (usual.clone(), 3), (usual.clone(), 65_538)]
    {
        connection.send("audio-start", &usual, &[]);
        connection.send("audio-chunk", &layout, &vec![0; payload]);
        connection.send("audio-chunk", &layout, &[0, 0]);
        connection.send("audio-stop", &json!({}), &[]);
        connection.expect("error");
    }
    connection.send("transcribe", &json!({"language": "xx"}), &[]);
    connection.audio(&usual, &one());
    assert!(connection.refuses("invalid_request_error").contains("language"));
    // What is not known is dropped, and so is its payload.
    connection.send("of-another-version", &json!({"a": 1}), &[1; 1000]);
    connection.audio(&usual, &one());
    assert_eq!(connection.expect("transcript")["text"], "Brot Winter");
    // After these nobody knows where the next event begins.
    let long = [b"{\"type\": \"".to_vec(), vec![b'a'; 70_000]].concat();
    for (bytes, code) in [
        (&b"no JSON\n"[..], "malformed_event"),
        (b"POST / HTTP/1.1\r\n", "malformed_event"),
        (b"{\"type\": 1}\n", "malformed_event"),
        (b"[]\n", "malformed_event"),
        (b"{\"type\": \"ping\", \"data_length\": 2}\n[]", "malformed_event"),
        (b"{\"type\": \"ping\", \"data_length\": 99999999999}\n", "event_too_large"),
        (b"{\"type\": \"audio-chunk\", \"payload_length\": 1e18}\n", "event_too_large"),
        (b"{\"type\": \"audio-chunk\", \"payload_length\": -1}\n", "event_too_large"),
        (&long, "malformed_event"),
    ] {
        let mut connection = Connection::open(&running);
        connection.write(bytes);
        connection.refuses(code);
        assert!(connection.next().is_none());
    }
    // Cut off.
    Connection::open(&running).write(b"{\"type\": \"audio-chunk\", \"payload_length\": 1000}\nabc");
    running.client.get("/health").status(200);
}

#[test]
fn silent_and_many_clients_are_bounded() {
    let limit = Duration::from_millis(200);
    let mut few = serving().read_limit(limit).session_idle(limit);
    few.max_connections = 3;
    let running = Running::start(few);
    let mut silent = Connection::open(&running);
    let mut slow = Connection::open(&running);
    slow.write(b"{\"type\": ");
    let mut pausing = Connection::open(&running);
    pausing.send("audio-start", &layout(16_000, 2, 1), &[]);
    std::thread::sleep(limit / 4);
    let mut more = Connection::open(&running);
    more.refuses("too_many_connections");
    assert!(more.next().is_none());
    for connection in [&mut silent, &mut slow, &mut pausing] {
        connection.refuses("request_timeout");
        assert!(connection.next().is_none());
    }
    // Their places are free again.
    let mut connection = Connection::open(&running);
    connection.send("ping", &json!({}), &[]);
    connection.expect("pong");
}

#[test]
fn work_ends_with_its_client() {
    let options = options([("hearing", hearing())]).parallel(1);
    let options = options.wyoming(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    let mut running = Running::start(options);
    let noon = std::fs::read(qhx_paths::fixture("gemma4-tiny/noon.wav")).unwrap()[44..].to_vec();
    let mut long = Connection::open(&running);
    long.audio(&layout(16_000, 2, 1), &noon.repeat(120));
    running.client.until("qhx_requests_running 1");
    let begin = Instant::now();
    drop(long);
    running.client.until("qhx_requests_running 0");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert!(running.line_with("WYOMING transcribe 499").contains("hearing"));
    // What has begun is finished before the server ends, and idle connections are closed.
    let mut idle = Connection::open(&running);
    idle.send("ping", &json!({}), &[]);
    idle.expect("pong");
    let mut last = Connection::open(&running);
    last.audio(&layout(16_000, 2, 1), &noon);
    running.client.until("qhx_requests_running 1");
    running.stop.cancel();
    assert_eq!(last.expect("transcript")["text"], "the boat leaves at noon");
    assert!(last.next().is_none() && idle.next().is_none());
    running.end();
}
