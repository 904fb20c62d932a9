//! `/v1/realtime`: transcription sessions of the Realtime API, over a WebSocket.
//!
//! A client appends audio, which ends up in items: the client commits them, or the server does at the end of a turn.
//! Items are transcribed one after another. While somebody speaks, the turn so far is transcribed again and again
//! where no other work waits, for the text that stays.

mod input;
mod session;
mod stable;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Extension;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use qhx::{TranscribeLimits, TranscribeOptions, Transcript, Turn};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use self::input::{Change, Input};
use self::session::{Encoding, Session, Turns};
use self::stable::Stable;
use crate::app::Peer;
use crate::connections::{Place, client};
use crate::error::{ApiError, Result, broken};
use crate::ids;
use crate::pending::Pending;
use crate::queue::Update;
use crate::registry::{Ability, Served};
use crate::request::{Context, Memory};

/// Greatest size of a message: a minute of audio.
const MAX_MESSAGE: usize = 4 << 20;
/// Greatest size of a session's configuration.
const MAX_SESSION: usize = 64 << 10;
/// Characters of an event's id that an error repeats.
const MAX_ID: usize = 512;
/// Bytes that are read from the socket at a time.
const READ: usize = 16 << 10;
/// Messages of more bytes are decoded where that keeps no other request waiting.
const LARGE: usize = 64 << 10;
/// Items that wait. Beyond that nothing more is read until one is done.
const MAX_WAITING: usize = 8;
/// Time for which a session goes on, as the API has it.
const LIFETIME: Duration = Duration::from_secs(3600);
/// Time between the beginnings of two partial transcripts.
const PARTIAL: Duration = Duration::from_secs(1);
/// The same, of a model that goes on where it was, and transcribes nothing twice.
const GOING_ON: Duration = Duration::from_millis(200);
/// Part of a second that a committed buffer has at least.
const SHORTEST: usize = 10;

/// The protocol that clients name beside their key.
const PROTOCOL: &str = "realtime";

/// Events that are sent by clients, as far as there are any in a session that transcribes.
const EVENTS: &str = "session.update, transcription_session.update, input_audio_buffer.append, \
    input_audio_buffer.commit or input_audio_buffer.clear";

/// Begins a session.
pub(crate) async fn connect(
    Extension(context): Extension<Context>,
    Extension(peer): Extension<Peer>,
    uri: Uri,
    headers: HeaderMap,
    upgrade: std::result::Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let upgrade = upgrade.map_err(|rejection| {
        let message = format!("expected a WebSocket: {}", rejection.body_text());
        ApiError::new(StatusCode::BAD_REQUEST, message).code("websocket_expected")
    })?;
    let query = uri.query().unwrap_or_default();
    let model = query.split('&').find_map(|pair| pair.strip_prefix("model="));
    let model = model.map(|name| percent_encoding::percent_decode_str(name).decode_utf8_lossy());
    match context.shared.registry.able(model.as_deref(), Ability::Transcribe) {
        // The session names it.
        Err(e) if model.is_none() && e.status == StatusCode::BAD_REQUEST => {}
        found => drop(found?),
    }
    let place = context.shared.sessions.enter(client(peer.address)).map_err(|_| {
        let message = "as many sessions are open as may be; try again later";
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("too_many_sessions")
    })?;
    let beta = headers.get("openai-beta").is_some_and(|value| value == "realtime=v1");
    let session = Session {
        id: ids::new("sess_"),
        expires: ids::now() + LIFETIME.as_secs(),
        encoding: Encoding::Pcm(24_000),
        turns: Some(Turns::default()),
        model: model.map(Into::into),
        language: None,
        prompt: None,
        beta,
    };
    let upgrade = upgrade
        .max_message_size(MAX_MESSAGE)
        .max_frame_size(MAX_MESSAGE)
        .read_buffer_size(READ)
        .write_buffer_size(0)
        .protocols([PROTOCOL]);
    let input = Input::new(session.encoding.pcm().rate, session.turns)?;
    let begin = move |socket| Connection::new(context, session, input, socket, place).run();
    Ok(upgrade.on_upgrade(begin))
}

/// The client has left, or reads nothing.
struct Left;

impl From<axum::Error> for Left {
    fn from(_: axum::Error) -> Self {
        Self
    }
}

/// An event of a client. Other fields are skipped, whatever they are.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    event_id: Option<&'a RawValue>,
    #[serde(borrow)]
    audio: Option<&'a RawValue>,
    #[serde(borrow)]
    session: Option<&'a RawValue>,
}

/// A text; `None` for another value.
fn text(value: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(value?.get()).ok()
}

/// Audio of the conversation that is not transcribed yet.
struct Item {
    id: String,
    audio: Vec<i16>,
    encoding: Encoding,
    memory: Memory,
    stable: Stable,
}

/// A transcription under way.
struct Running {
    item: String,
    pending: Pending,
    /// Set for an item that is whole: what was shown of it.
    whole: Option<Stable>,
}

/// Something that happens.
enum Next {
    Message(Option<std::result::Result<Message, axum::Error>>),
    Done(Option<Update>),
    Tick,
    Stopping,
}

struct Connection {
    context: Context,
    session: Session,
    socket: WebSocket,
    input: Input,
    /// Memory of the input.
    memory: Memory,
    /// Partial transcripts of the turn that goes on.
    stable: Stable,
    waiting: VecDeque<Item>,
    running: Option<Running>,
    /// Beginning of the last partial transcript, and the samples that it was of.
    partial: (Instant, usize),
    /// Time between two of them.
    interval: Duration,
    last: Option<String>,
    heartbeat: Interval,
    /// When something came from the client.
    seen: Instant,
    until: Instant,
    stopping: bool,
    _place: Place,
}

impl Connection {
    fn new(
        context: Context,
        session: Session,
        input: Input,
        socket: WebSocket,
        place: Place,
    ) -> Self {
        let mut heartbeat = interval(context.shared.options.heartbeat);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        heartbeat.reset();
        let now = Instant::now();
        Self {
            input,
            context,
            session,
            socket,
            memory: Memory::default(),
            stable: Stable::default(),
            waiting: VecDeque::new(),
            running: None,
            partial: (now, 0),
            interval: PARTIAL,
            last: None,
            heartbeat,
            seen: now,
            until: now + LIFETIME,
            stopping: false,
            _place: place,
        }
    }

    async fn run(mut self) {
        // Where the client has left, nobody has to know.
        if let Ok(code) = self.serve().await {
            let reason = "".into();
            let _ = self.socket.send(Message::Close(Some(CloseFrame { code, reason }))).await;
        }
    }

    /// Serves the session, until it ends with a code.
    async fn serve(&mut self) -> Result<u16, Left> {
        let mut stop = self.context.shared.stopping.subscribe();
        let mut stop = pin!(stop.wait_for(|stopping| *stopping));
        let kind =
            if self.session.beta { "transcription_session.created" } else { "session.created" };
        self.send(kind, json!({"session": self.session.json()})).await?;
        loop {
            self.start().await?;
            if self.stopping && self.running.is_none() {
                return Ok(close_code::AWAY);
            }
            let reads = !self.stopping && self.waiting.len() < MAX_WAITING;
            if !reads {
                self.seen = Instant::now();
            }
            let next = {
                let Self { socket, running, heartbeat, stopping, .. } = &mut *self;
                let mut message = pin!(socket.recv());
                poll_fn(|cx| {
                    if let Some(running) = running
                        && let Poll::Ready(update) = running.pending.poll_next(cx)
                    {
                        return Poll::Ready(Next::Done(update));
                    }
                    if !*stopping && stop.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(Next::Stopping);
                    }
                    if heartbeat.poll_tick(cx).is_ready() {
                        return Poll::Ready(Next::Tick);
                    }
                    if !reads {
                        return Poll::Pending;
                    }
                    message.as_mut().poll(cx).map(Next::Message)
                })
                .await
            };
            match next {
                Next::Done(update) => self.done(update).await?,
                Next::Stopping => self.stopping = true,
                Next::Tick => {
                    if Instant::now() > self.until {
                        let minutes = LIFETIME.as_secs() / 60;
                        let message =
                            format!("a session lasts {minutes} minutes: begin another one");
                        let error = ApiError::malformed(message).code("session_expired");
                        self.error(&error, None).await?;
                        return Ok(close_code::NORMAL);
                    }
                    if self.seen.elapsed() > self.context.shared.options.read_limit {
                        return Err(Left);
                    }
                    self.socket.send(Message::Ping(Default::default())).await?;
                }
                Next::Message(message) => {
                    self.seen = Instant::now();
                    match message {
                        Some(Ok(Message::Text(text))) => self.event(&text).await?,
                        Some(Ok(Message::Binary(_))) => {
                            let message = "expected events as text: audio goes into \
                                input_audio_buffer.append in base64";
                            let error = ApiError::malformed(message).code("invalid_event");
                            self.error(&error, None).await?;
                        }
                        Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                        Some(Ok(Message::Close(_))) | None => return Err(Left),
                        Some(Err(e)) => {
                            let message = format!("the message is not read: {e}");
                            let error = ApiError::malformed(message).code("invalid_event");
                            self.error(&error, None).await?;
                            return Ok(close_code::SIZE);
                        }
                    }
                }
            }
        }
    }

    /// Sends an event.
    async fn send(&mut self, kind: &str, fields: Value) -> Result<(), Left> {
        let mut event = json!({"type": kind, "event_id": ids::new("event_")});
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        Ok(self.socket.send(Message::Text(event.to_string().into())).await?)
    }

    async fn error(&mut self, error: &ApiError, id: Option<String>) -> Result<(), Left> {
        let reason = error.reason();
        self.context.tally.update(|record| record.error = Some(reason));
        let mut error = error.json()["error"].take();
        error["event_id"] = id.into();
        self.send("error", json!({"error": error})).await
    }

    /// Does what an event asks for. One that is wrong changes nothing.
    async fn event(&mut self, message: &str) -> Result<(), Left> {
        let event: Event<'_> = match serde_json::from_str(message) {
            Ok(event) => event,
            Err(e) => {
                let message = format!("the event is no JSON object: {e}");
                let error = ApiError::malformed(message).code("malformed_json");
                return self.error(&error, None).await;
            }
        };
        let id = text(event.event_id).filter(|id| id.len() <= MAX_ID);
        let kind = text(event.kind).unwrap_or_default();
        let done = match kind.as_str() {
            "session.update" | "transcription_session.update" => {
                self.session.beta |= kind == "transcription_session.update";
                self.update(event.session)
            }
            "input_audio_buffer.append" => match self.append(event.audio).await {
                Ok(changes) => return self.changed(changes).await,
                Err(e) => Err(e),
            },
            "input_audio_buffer.commit" => match self.shortest() {
                Ok(()) => {
                    let (item, audio) = self.input.take();
                    return self.commit(item, audio).await;
                }
                Err(e) => Err(e),
            },
            "input_audio_buffer.clear" => {
                self.input.take();
                self.forget();
                return self.send("input_audio_buffer.cleared", json!({})).await;
            }
            "" => Err(ApiError::bad("type", format!("expected {EVENTS}")).code("invalid_event")),
            other => {
                let other: String = other.chars().take(100).collect();
                let message = format!(
                    "{other} is not supported: sessions here transcribe; expected {EVENTS}"
                );
                Err(ApiError::bad("type", message).code("unsupported"))
            }
        };
        match done {
            Err(e) => self.error(&e, id).await,
            Ok(()) => {
                let beta = if self.session.beta { "transcription_" } else { "" };
                let session = json!({"session": self.session.json()});
                self.send(&format!("{beta}session.updated"), session).await
            }
        }
    }

    /// Changes the configuration.
    fn update(&mut self, session: Option<&RawValue>) -> Result<()> {
        let missing =
            || ApiError::bad("session", "it is missing").code("missing_required_parameter");
        let raw = session.ok_or_else(missing)?.get();
        if raw.len() > MAX_SESSION {
            let message = format!("expected at most {MAX_SESSION} bytes, found {}", raw.len());
            return Err(ApiError::bad("session", message).code("invalid_value"));
        }
        let update: Value = serde_json::from_str(raw).map_err(|e| {
            ApiError::malformed(format!("the session is not JSON: {e}")).code("malformed_json")
        })?;
        let session = self.session.updated(&update)?;
        if session.model != self.session.model {
            self.context.shared.registry.able(session.model.as_deref(), Ability::Transcribe)?;
        }
        if session.encoding.pcm() != self.session.encoding.pcm() {
            self.input = Input::new(session.encoding.pcm().rate, session.turns)?;
            self.forget();
        } else if session.turns != self.session.turns {
            self.input.detect(session.turns)?;
            self.forget();
        }
        self.session = session;
        Ok(())
    }

    /// Drops partial transcripts.
    fn forget(&mut self) {
        self.running.take_if(|running| running.whole.is_none());
        self.stable = Stable::default();
    }

    /// Takes audio into the buffer.
    async fn append(&mut self, audio: Option<&RawValue>) -> Result<Vec<Change>> {
        let wrong = |e: String| ApiError::bad("audio", e).code("invalid_value");
        let encoding = self.session.encoding;
        let decode = || {
            let audio =
                text(audio).ok_or_else(|| wrong("expected a string of base64".to_owned()))?;
            let bytes = STANDARD
                .decode(audio)
                .map_err(|e| wrong(format!("expected base64 of raw audio: {e}")))?;
            encoding.decode(&bytes)
        };
        let large = audio.is_some_and(|audio| audio.get().len() > LARGE);
        let samples = if large { tokio::task::block_in_place(decode) } else { decode() }?;
        let bytes = 2 * (self.input.samples().len() + samples.len());
        self.context.room_for_audio(&self.memory, bytes).await?;
        let input = &mut self.input;
        Ok(match large {
            true => tokio::task::block_in_place(|| input.push(&samples)),
            false => input.push(&samples),
        })
    }

    /// Errors for a buffer that is too short to be committed.
    fn shortest(&self) -> Result<()> {
        let (samples, pcm) = (self.input.samples().len(), self.session.encoding.pcm());
        if samples * SHORTEST >= pcm.rate as usize {
            return Ok(());
        }
        let message = format!(
            "the buffer is too short: expected at least {} ms of audio, found {:.0} ms",
            1000 / SHORTEST,
            pcm.seconds(2 * samples) * 1e3
        );
        Err(ApiError::malformed(message).code("input_audio_buffer_commit_empty"))
    }

    /// Tells the client what became of the buffer.
    async fn changed(&mut self, changes: Vec<Change>) -> Result<(), Left> {
        for change in changes {
            match change {
                Change::Started { item, ms } => {
                    self.forget();
                    self.partial = (Instant::now(), 0);
                    let fields = json!({"audio_start_ms": ms, "item_id": item});
                    self.send("input_audio_buffer.speech_started", fields).await?;
                }
                Change::Stopped { item, ms, audio } => {
                    let fields = json!({"audio_end_ms": ms, "item_id": item});
                    self.send("input_audio_buffer.speech_stopped", fields).await?;
                    self.commit(item, audio).await?;
                }
            }
        }
        Ok(())
    }

    /// Makes an item of audio, which is then transcribed.
    async fn commit(&mut self, id: String, audio: Vec<i16>) -> Result<(), Left> {
        let stable = self.stable.clone();
        self.forget();
        let memory = std::mem::take(&mut self.memory);
        let place = json!({"previous_item_id": self.last, "item_id": id});
        self.send("input_audio_buffer.committed", place).await?;
        let item = json!({
            "id": id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": null}],
        });
        let fields = json!({"previous_item_id": self.last, "item": item});
        if self.session.beta {
            self.send("conversation.item.created", fields).await?;
        } else {
            self.send("conversation.item.added", fields.clone()).await?;
            self.send("conversation.item.done", fields).await?;
        }
        self.last = Some(id.clone());
        let encoding = self.session.encoding;
        self.waiting.push_back(Item { id, audio, encoding, memory, stable });
        Ok(())
    }

    /// Begins the next transcription: of an item that waits, or else of the turn so far.
    async fn start(&mut self) -> Result<(), Left> {
        while self.running.is_none() {
            let Some(Item { id, audio, encoding, memory, stable }) = self.waiting.pop_front()
            else {
                self.start_partial();
                return Ok(());
            };
            let (limits, turn) = (TranscribeLimits::default(), Turn::new(&id, true));
            match self.transcribing(&audio, encoding, memory, limits, turn) {
                Ok(pending) => {
                    self.running = Some(Running { item: id, pending, whole: Some(stable) });
                }
                Err(e) => self.failed(&id, &e).await?,
            }
        }
        Ok(())
    }

    /// Begins a transcription of the turn so far, if it is time for one and nobody waits for the models.
    fn start_partial(&mut self) {
        let (since, before) = self.partial;
        let Some(item) = self.input.speaking().map(str::to_owned) else { return };
        let (waits, _) = self.context.shared.queue.counts();
        let samples = self.input.samples().len();
        if since.elapsed() < self.interval || samples <= before || waits > 0 || self.stopping {
            return;
        }
        self.partial = (Instant::now(), samples);
        // Nothing is drawn again.
        let limits = TranscribeLimits::default().temperatures(vec![0.0]).unwrap_or_default();
        let (encoding, memory) = (self.session.encoding, self.memory.clone());
        // Without it, the text comes at the end of the turn.
        let turn = Turn::new(&item, false);
        let samples = self.input.samples();
        if let Ok(pending) = self.transcribing(samples, encoding, memory, limits, turn) {
            self.running = Some(Running { item, pending, whole: None });
        }
    }

    fn transcribing(
        &self,
        audio: &[i16],
        encoding: Encoding,
        memory: Memory,
        limits: TranscribeLimits,
        turn: Turn,
    ) -> Result<Pending> {
        let Session { model, language, prompt, .. } = &self.session;
        let registry = &self.context.shared.registry;
        let model: Arc<Served> = registry.able(model.as_deref(), Ability::Transcribe)?;
        self.context.tally.update(|record| record.model = Some(model.name.clone()));
        let options = TranscribeOptions::default()
            .with_language(language.clone())
            .with_prompt(prompt.clone())
            .with_limits(limits)
            .with_turn(turn);
        let bytes: Vec<u8> = audio.iter().flat_map(|sample| sample.to_le_bytes()).collect();
        self.context.transcribing(&model, memory, encoding.pcm().wav(&bytes), options)
    }

    /// Takes what came of a transcription.
    async fn done(&mut self, update: Option<Update>) -> Result<(), Left> {
        let Some(Running { item, whole, .. }) = self.running.take() else { return Ok(()) };
        let transcript = match update {
            Some(Update::Transcribed(transcript)) => Ok(transcript),
            Some(Update::Failed(e)) => Err(e),
            _ => Err(broken()),
        };
        match (transcript, whole) {
            (Ok(transcript), Some(stable)) => self.completed(&item, &stable, &transcript).await,
            (Err(e), Some(_)) => self.failed(&item, &e).await,
            (Ok(transcript), None) => {
                self.interval = if transcript.settled { GOING_ON } else { PARTIAL };
                match self.stable.take(transcript.text.trim(), transcript.settled) {
                    Some(more) => self.delta(&item, &more).await,
                    None => Ok(()),
                }
            }
            // The text comes at the end of the turn.
            (Err(_), None) => Ok(()),
        }
    }

    async fn delta(&mut self, item: &str, delta: &str) -> Result<(), Left> {
        let fields = json!({"item_id": item, "content_index": 0, "delta": delta});
        self.send("conversation.item.input_audio_transcription.delta", fields).await
    }

    async fn completed(
        &mut self,
        item: &str,
        stable: &Stable,
        transcript: &Transcript,
    ) -> Result<(), Left> {
        let tokens: usize = transcript.chunks.iter().map(|chunk| chunk.tokens).sum();
        self.context.tally.update(|record| record.completion_tokens += tokens);
        let text = transcript.text.trim();
        if let Some(rest) = stable.rest(text) {
            self.delta(item, rest).await?;
        }
        let usage = json!({"type": "duration", "seconds": transcript.seconds});
        let fields =
            json!({"item_id": item, "content_index": 0, "transcript": text, "usage": usage});
        self.send("conversation.item.input_audio_transcription.completed", fields).await
    }

    async fn failed(&mut self, item: &str, error: &ApiError) -> Result<(), Left> {
        let reason = error.reason();
        self.context.tally.update(|record| record.error = Some(reason));
        let error = error.json()["error"].take();
        let fields = json!({"item_id": item, "content_index": 0, "error": error});
        self.send("conversation.item.input_audio_transcription.failed", fields).await
    }
}
