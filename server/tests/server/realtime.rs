//! `/v1/realtime`: transcription sessions.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tungstenite::client::IntoClientRequest as _;
use tungstenite::{Message, WebSocket};

use crate::bundles::{Running, following, hearing, listening, options, recognising, shared};
use crate::client::Client;

const ROUTE: &str = "/v1/realtime?intent=transcription";
const COMPLETED: &str = "conversation.item.input_audio_transcription.completed";
const DELTA: &str = "conversation.item.input_audio_transcription.delta";

fn sensing() -> &'static Running {
    static SENSING: OnceLock<Running> = OnceLock::new();
    SENSING.get_or_init(|| {
        Running::start(options([("hearing", hearing()), ("listening", listening())]))
    })
}

/// Samples of a clip at 16 kHz.
fn clip(name: &str) -> Vec<u8> {
    std::fs::read(qhx_paths::fixture(name)).unwrap()[44..].to_vec()
}

fn silence(seconds: f64) -> Vec<u8> {
    vec![0; (seconds * 16_000.0) as usize * 2]
}

struct Session(WebSocket<TcpStream>);

impl Session {
    fn open(client: &Client, route: &str) -> Self {
        Self::open_with(client, route, &[]).unwrap_or_else(|status| panic!("{status}"))
    }

    /// Opens a session with more headers, or returns the status that refuses it.
    fn open_with(
        client: &Client,
        route: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<Self, u16> {
        let mut request = format!("ws://{}{route}", client.address).into_client_request().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        match tungstenite::client(request, client.connect()) {
            Ok((socket, _)) => Ok(Self(socket)),
            Err(tungstenite::HandshakeError::Failure(tungstenite::Error::Http(response))) => {
                Err(response.status().as_u16())
            }
            Err(e) => panic!("{e}"),
        }
    }

    fn send(&mut self, event: &Value) {
        self.0.send(Message::text(event.to_string())).unwrap();
    }

    fn update(&mut self, input: &Value) -> Value {
        let session = json!({"type": "transcription", "audio": {"input": input}});
        self.send(&json!({"type": "session.update", "session": session}));
        self.until("session.updated")["session"].clone()
    }

    fn append(&mut self, audio: &[u8]) {
        for chunk in audio.chunks(3200) {
            let audio = STANDARD.encode(chunk);
            self.send(&json!({"type": "input_audio_buffer.append", "audio": audio}));
        }
    }

    fn next(&mut self) -> Value {
        loop {
            match self.0.read().unwrap() {
                Message::Text(text) => return serde_json::from_str(&text).unwrap(),
                Message::Close(frame) => panic!("closed: {frame:?}"),
                _ => {}
            }
        }
    }

    /// The next event, which has to be of this kind.
    #[track_caller]
    fn until(&mut self, kind: &str) -> Value {
        let event = self.next();
        assert_eq!(event["type"], kind, "{event}");
        event
    }

    /// Events up to the first one of a kind.
    fn all_until(&mut self, kind: &str) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            events.push(self.next());
            if events.last().is_some_and(|event| event["type"] == kind) {
                return events;
            }
        }
    }

    /// The error that an event is answered with.
    #[track_caller]
    fn refuses(&mut self, event: &Value, code: &str) -> String {
        self.send(event);
        self.error(code)
    }

    #[track_caller]
    fn error(&mut self, code: &str) -> String {
        let error = self.until("error")["error"].clone();
        assert_eq!(error["code"], code, "{error}");
        error["message"].as_str().unwrap().to_owned()
    }

    /// Waits until the server has closed the connection.
    fn closed(&mut self) -> Option<u16> {
        loop {
            match self.0.read() {
                Ok(Message::Close(frame)) => return frame.map(|frame| frame.code.into()),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    }
}

/// A format of the clips.
fn format() -> Value {
    json!({"type": "audio/pcm", "rate": 16_000})
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[test]
fn committed_audio_is_transcribed() {
    let mut session = Session::open(&sensing().client, ROUTE);
    let created = session.until("session.created")["session"].clone();
    let input = &created["audio"]["input"];
    assert_eq!(
        (&created["type"], &input["format"]["rate"]),
        (&json!("transcription"), &json!(24_000))
    );
    assert_eq!(input["turn_detection"]["type"], "server_vad");
    let updated = session.update(&json!({
        "format": format(),
        "turn_detection": null,
        "transcription": {"model": "listening"},
    }));
    assert_eq!(updated["audio"]["input"]["turn_detection"], Value::Null);
    session.append(&clip("whisper-tiny/one.wav"));
    session.send(&json!({"type": "input_audio_buffer.commit"}));
    let events = session.all_until(COMPLETED);
    assert_eq!(
        kinds(&events),
        [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            DELTA,
            COMPLETED
        ]
    );
    let item = &events[0]["item_id"];
    assert!(events[1]["item"]["id"] == *item && events[4]["item_id"] == *item, "{events:?}");
    assert_eq!(
        (&events[3]["delta"], &events[4]["transcript"]),
        (&json!("Brot Winter"), &json!("Brot Winter"))
    );
    assert_eq!(events[4]["usage"], json!({"type": "duration", "seconds": 0.71}));
    // Items follow each other. What is cleared is not transcribed, and too little is not committed.
    session.append(&clip("whisper-tiny/two.wav"));
    session.send(&json!({"type": "input_audio_buffer.clear"}));
    session.until("input_audio_buffer.cleared");
    let commit = json!({"type": "input_audio_buffer.commit", "event_id": "mine"});
    session.send(&commit);
    let error = session.until("error")["error"].clone();
    assert_eq!(
        (&error["code"], &error["event_id"]),
        (&json!("input_audio_buffer_commit_empty"), &json!("mine"))
    );
    session.append(&clip("whisper-tiny/one.wav"));
    session.send(&commit);
    assert_eq!(session.until("input_audio_buffer.committed")["previous_item_id"], *item);
    assert_eq!(session.all_until(COMPLETED).last().unwrap()["transcript"], "Brot Winter");
}

#[test]
fn the_server_finds_turns() {
    let client = &sensing().client;
    let mut session = Session::open(client, "/v1/realtime?model=hearing");
    session.until("session.created");
    let turns = json!({"type": "server_vad", "threshold": 0.3, "prefix_padding_ms": 100, "silence_duration_ms": 400});
    session.update(&json!({"format": format(), "turn_detection": turns}));
    let turn = [silence(1.0), clip("gemma4-tiny/noon.wav"), silence(2.0)].concat();
    let all = turn.repeat(2);
    session.append(&all);
    let mut events = session.all_until(COMPLETED);
    events.extend(session.all_until(COMPLETED));
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let started = of("input_audio_buffer.speech_started");
    let stopped = of("input_audio_buffer.speech_stopped");
    let completed = of(COMPLETED);
    for second in 0..2 {
        let item = &started[second]["item_id"];
        assert!(
            stopped[second]["item_id"] == *item && completed[second]["item_id"] == *item,
            "{events:?}"
        );
        let [from, to] = [&started[second]["audio_start_ms"], &stopped[second]["audio_end_ms"]]
            .map(|ms| ms.as_u64().unwrap() as usize);
        let begin = second * turn.len() / 32;
        assert!((begin + 600..begin + 1700).contains(&from), "{from} ms of {begin}");
        assert!((begin + 2300..begin + 4400).contains(&to), "{to} ms of {begin}");
        // The text is that of the audio between these times.
        let wav = [&qhx::wav_header(16_000, Some((to - from) * 16))[..], &all[from * 32..to * 32]]
            .concat();
        let text =
            crate::media::form_of(client, &[("model", "hearing")], &wav).json()["text"].clone();
        assert_eq!(completed[second]["transcript"], text);
    }
}

#[test]
fn text_that_stays_comes_while_somebody_speaks() {
    let mut session = Session::open(&sensing().client, "/v1/realtime?model=listening");
    session.until("session.created");
    // The clip's words are chords: where some of them are taken for a voice, the turn lasts as long as all.
    let turns = json!({"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 6500});
    session.update(&json!({"format": format(), "turn_detection": turns}));
    let long = clip("whisper-tiny/long.wav");
    let (first, rest) = long.split_at(128_000);
    let (second, rest) = rest.split_at(19_200);
    session.append(first);
    for part in second.chunks(6400) {
        std::thread::sleep(Duration::from_millis(1050));
        session.append(part);
    }
    session.append(rest);
    session.append(&silence(8.0));
    let events = session.all_until(COMPLETED);
    let kinds = kinds(&events);
    let stopped =
        kinds.iter().position(|kind| *kind == "input_audio_buffer.speech_stopped").unwrap();
    assert!(kinds[..stopped].contains(&DELTA), "{kinds:?}");
    let deltas = events.iter().filter(|event| event["type"] == DELTA);
    let text: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(events.last().unwrap()["transcript"], text);
}

#[test]
fn a_turn_goes_on_where_its_text_was_left() {
    let running = Running::start(options([("following", following())]));
    let source = qhx::Source::File(qhx_paths::fixture("silero/clip.flac"));
    let (rules, limits) = (qhx_media::AudioRules::default(), qhx_media::Limits::default());
    let samples = qhx_media::decode_audio(&source, &rules, &limits).unwrap().samples;
    let bytes = |samples: &[f32]| -> Vec<u8> {
        samples.iter().flat_map(|one| ((one * 32768.0) as i16).to_le_bytes()).collect()
    };
    // The sentence that is said from 0.7 s on, and the silence behind it.
    let spoken = bytes(&samples[..40_000]);
    let mut session = Session::open(&running.client, "/v1/realtime?model=following");
    session.until("session.created");
    let turns = json!({"type": "server_vad", "silence_duration_ms": 700});
    session.update(&json!({"format": format(), "turn_detection": turns}));
    let (first, rest) = spoken.split_at(40_000);
    let (second, rest) = rest.split_at(9600);
    session.append(first);
    std::thread::sleep(Duration::from_millis(1050));
    session.append(second);
    let mut events = session.all_until(DELTA);
    std::thread::sleep(Duration::from_millis(300));
    session.append(rest);
    session.append(&silence(2.0));
    events.extend(session.all_until(COMPLETED));
    let deltas = events.iter().filter(|event| event["type"] == DELTA);
    let text: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(events.last().unwrap()["transcript"].as_str().unwrap().trim(), text.trim());
    let number = |kind: &str, name: &str| {
        let event = events.iter().find(|event| event["type"] == kind).unwrap();
        event[name].as_u64().unwrap() as usize * 16
    };
    // The same as of the whole turn at once.
    let from = number("input_audio_buffer.speech_started", "audio_start_ms");
    let to = number("input_audio_buffer.speech_stopped", "audio_end_ms");
    let all = [&spoken[..], &silence(2.0)].concat();
    let wav = [&qhx::wav_header(16_000, Some(to - from))[..], &all[2 * from..2 * to]].concat();
    let whole = crate::media::form_of(&running.client, &[], &wav).json()["text"].clone();
    assert_eq!(events.last().unwrap()["transcript"], whole);
}

#[test]
fn the_older_form_and_other_models_do_as_well() {
    let bundles = [("recognising", recognising())];
    let running = Running::start(options(bundles).api_keys(["s3cret".to_owned()]));
    // As a page in a browser sends its key.
    let protocols = "realtime, openai-insecure-api-key.s3cret, openai-beta.realtime-v1";
    let headers = [("sec-websocket-protocol", protocols), ("openai-beta", "realtime=v1")];
    let mut session = Session::open_with(&running.client, ROUTE, &headers).unwrap();
    session.until("transcription_session.created");
    let update = json!({"input_audio_format": "pcm16", "turn_detection": null});
    session.send(&json!({"type": "transcription_session.update", "session": update}));
    let session_of = session.until("transcription_session.updated")["session"].clone();
    assert_eq!(session_of["input_audio_format"], "pcm16");
    let input = json!({"audio": {"input": {"format": format()}}});
    session.send(&json!({"type": "session.update", "session": input}));
    session.until("transcription_session.updated");
    session.append(&clip("whisper-tiny/two.wav"));
    session.send(&json!({"type": "input_audio_buffer.commit"}));
    let events = session.all_until(COMPLETED);
    assert_eq!(kinds(&events)[..2], ["input_audio_buffer.committed", "conversation.item.created"]);
    let wav = std::fs::read(qhx_paths::fixture("whisper-tiny/two.wav")).unwrap();
    let keyed = running.client.clone().with("x-api-key", "s3cret");
    let text = crate::media::form_of(&keyed, &[], &wav).json()["text"].clone();
    assert!(text.as_str().is_some_and(|text| text.contains("house bread")), "{text}");
    assert_eq!(events.last().unwrap()["transcript"], text);
    drop(session);
    let line = running.line_with("GET /v1/realtime 101");
    assert!(line.contains("\"recognising\""), "{line}");
    let refused = |headers: &[(&'static str, &str)]| {
        Session::open_with(&running.client, ROUTE, headers).err()
    };
    assert_eq!(refused(&[]), Some(401));
    assert_eq!(refused(&[("sec-websocket-protocol", "openai-insecure-api-key.other")]), Some(401));
    assert_eq!(
        refused(&[("authorization", "Bearer s3cret"), ("origin", "https://example.org")]),
        Some(403)
    );
}

#[test]
fn what_is_no_session_is_refused_before_it_begins() {
    let client = &sensing().client;
    let status = |client: &Client, route: &str| Session::open_with(client, route, &[]).err();
    assert_eq!(status(client, "/v1/realtime?model=nothing"), Some(404));
    assert_eq!(status(&shared().client, ROUTE), Some(501));
    let error = client.get(ROUTE).refuses(400, "code", "websocket_expected");
    assert!(error["message"].as_str().unwrap().contains("WebSocket"), "{error}");
    let rebound = b"GET /v1/realtime HTTP/1.1\r\nhost: evil.example\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
        sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    assert_eq!(client.raw(rebound).unwrap().status, 403);
    let mut few = options([("listening", listening())]);
    few.max_connections = 3;
    let running = Running::start(few);
    let open = |_| Session::open_with(&running.client, ROUTE, &[]);
    let sessions: Vec<_> = (0..3).map(open).collect();
    assert!(sessions.iter().all(Result::is_ok));
    // Sessions count by themselves, and so it is their number that is reached.
    assert_eq!(open(3).err(), Some(429));
    drop(sessions);
    while open(4).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn events_that_are_wrong_change_nothing() {
    let mut session = Session::open(&sensing().client, ROUTE);
    session.until("session.created");
    session.update(&json!({"format": format(), "turn_detection": null, "transcription": {"model": "listening"}}));
    let append = |audio: Value| json!({"type": "input_audio_buffer.append", "audio": audio});
    let update = |input: Value| json!({"type": "session.update", "session": {"type": "transcription", "audio": {"input": input}}});
    for (event, code, says) in [
        (json!({"type": "response.create"}), "unsupported", "response.create"),
        (
            json!({"type": "conversation.item.create", "item": {}}),
            "unsupported",
            "conversation.item.create",
        ),
        (
            json!({"type": "session.update", "session": {"type": "realtime"}}),
            "unsupported",
            "session.type",
        ),
        (json!({"type": "session.update"}), "missing_required_parameter", "session"),
        (update(json!({"transcription": {"model": "nothing"}})), "model_not_found", "nothing"),
        (
            update(json!({"noise_reduction": {"type": "far_field"}})),
            "unsupported",
            "noise_reduction",
        ),
        (update(json!({"format": {"type": "audio/pcm", "rate": 1}})), "invalid_value", "rate"),
        (
            json!({"type": "session.update", "session": {"a": "a".repeat(100_000)}}),
            "invalid_value",
            "65536",
        ),
        (append(json!("!")), "invalid_value", "base64"),
        (append(json!("AAAA")), "invalid_value", "found 3 bytes"),
        (append(json!([1, 2])), "invalid_value", "a string of base64"),
        (json!({"type": "input_audio_buffer.append"}), "invalid_value", "a string of base64"),
        (json!({"no": "type"}), "invalid_event", "session.update"),
        (json!([]), "malformed_json", "no JSON object"),
    ] {
        let message = session.refuses(&event, code);
        assert!(message.contains(says), "{message}");
    }
    for text in ["", "no JSON", "{\"type\": ", &"[".repeat(100_000)] {
        session.0.send(Message::text(text)).unwrap();
        session.error("malformed_json");
    }
    session.0.send(Message::binary(vec![0; 3200])).unwrap();
    assert!(session.error("invalid_event").contains("base64"));
    session.append(&clip("whisper-tiny/one.wav"));
    session.send(&json!({"type": "input_audio_buffer.commit"}));
    assert_eq!(session.all_until(COMPLETED).last().unwrap()["transcript"], "Brot Winter");
    // A message beyond the limit is not read, nor one that says it is.
    let large = append(json!("A".repeat(5 << 20))).to_string();
    let _ = session.0.send(Message::text(large));
    assert!(matches!(session.closed(), Some(1009) | None));
    for lie in [
        &b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0"[..],
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut session = Session::open(&sensing().client, ROUTE);
        session.0.get_mut().write_all(lie).unwrap();
        session.until("session.created");
        session.closed();
    }
    sensing().client.get("/health").status(200);
}

#[test]
fn a_transcription_that_fails_is_told() {
    let mut session = Session::open(&sensing().client, "/v1/realtime?model=listening");
    session.until("session.created");
    let transcription = json!({"language": "xx"});
    session.update(
        &json!({"format": format(), "turn_detection": null, "transcription": transcription}),
    );
    session.append(&clip("whisper-tiny/one.wav"));
    session.send(&json!({"type": "input_audio_buffer.commit"}));
    let failed = session.all_until("conversation.item.input_audio_transcription.failed");
    let message = failed.last().unwrap()["error"]["message"].as_str().unwrap();
    assert!(message.contains("does not know the language"), "{message}");
}

#[test]
fn audio_without_an_end_is_bounded() {
    let options = options([("listening", listening())]).max_body(64 << 10);
    let running = Running::start(options);
    let mut session = Session::open(&running.client, ROUTE);
    session.until("session.created");
    session.update(&json!({"format": format(), "turn_detection": null}));
    session.append(&silence(2.0));
    session.append(&silence(0.1));
    assert!(session.error("audio_too_long").contains("65536"));
    // What was taken is there.
    session.send(&json!({"type": "input_audio_buffer.commit"}));
    assert_eq!(session.all_until(COMPLETED).last().unwrap()["usage"]["seconds"], 2.0);
    session.append(&silence(2.0));
    session.send(&json!({"type": "input_audio_buffer.clear"}));
    session.until("input_audio_buffer.cleared");
}

#[test]
fn clients_that_read_nothing_are_given_up() {
    let limit = Duration::from_millis(500);
    let options = options([("listening", listening())]).write_limit(limit).read_limit(limit);
    let running = Running::start(options.heartbeat(Duration::from_millis(100)));
    // It says nothing, and answers no ping.
    let silent = Session::open(&running.client, ROUTE);
    let begin = Instant::now();
    running.line_with("GET /v1/realtime 101");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    drop(silent);
    running.lines.lock().unwrap().clear();
    // It asks for errors, and reads none of them.
    let request = format!("ws://{}{ROUTE}", running.client.address).into_client_request().unwrap();
    let (mut socket, _) = tungstenite::client(request, running.client.connect_narrow()).unwrap();
    socket.get_mut().set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    while socket.send(Message::text("{}")).is_ok() {}
    running.line_with("GET /v1/realtime 101");
}

#[test]
fn work_ends_with_its_client_and_before_the_server() {
    let mut running = Running::start(options([("hearing", hearing())]).parallel(1));
    let mut long = Session::open(&running.client, ROUTE);
    long.until("session.created");
    long.update(&json!({"format": format(), "turn_detection": null}));
    long.append(&clip("gemma4-tiny/noon.wav").repeat(120));
    long.send(&json!({"type": "input_audio_buffer.commit"}));
    running.client.until("qhx_requests_running 1");
    let begin = Instant::now();
    drop(long);
    running.client.until("qhx_requests_running 0");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert!(running.line_with("GET /v1/realtime 101").contains("hearing"));
    // What was committed is transcribed before the server ends.
    let mut last = Session::open(&running.client, ROUTE);
    last.until("session.created");
    last.update(&json!({"format": format(), "turn_detection": null}));
    last.append(&clip("gemma4-tiny/noon.wav"));
    last.send(&json!({"type": "input_audio_buffer.commit"}));
    last.until("input_audio_buffer.committed");
    running.stop.cancel();
    assert_eq!(last.all_until(COMPLETED).last().unwrap()["transcript"], "the boat leaves at noon");
    assert_eq!(last.closed(), Some(1001));
    running.end();
}
