//! The Wyoming protocol, in which Home Assistant asks for transcripts and speech: events over TCP.
//!
//! It knows no keys: whoever can connect is served.

mod event;
mod info;

use std::collections::hash_map::DefaultHasher;
use std::future::poll_fn;
use std::hash::{Hash as _, Hasher as _};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use axum::http::StatusCode;
use qhx::{SentenceSplitter, SpeakOptions, TranscribeOptions};
use serde_json::{Value, json};
use tokio::io::{AsyncBufRead as _, AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use self::event::Event;
use crate::app::Shared;
use crate::connections::AGAIN;
use crate::connections::{Bounded, client, prepare};
use crate::error::{ApiError, Result, broken};
use crate::fields::Fields;
use crate::ids;
use crate::pending::Pending;
use crate::queue::{Update, Work};
use crate::recording::Pcm;
use crate::registry::Served;
use crate::request::{Context, Memory};
use crate::request_metrics::Tally;
use crate::speech::MAX_INPUT;

/// Layouts of audio that are read.
const RATES: (u64, u64) = (4_000, 192_000);
const WIDTHS: (u64, u64) = (1, 4);
const CHANNELS: (u64, u64) = (1, 8);
/// Bytes of audio in an event that is sent.
const CHUNK: usize = 8 << 10;

/// Reason why an event is not done.
pub(super) enum Fault {
    /// The client has left, or reads nothing.
    Left,
    Error(ApiError),
}

impl From<ApiError> for Fault {
    fn from(error: ApiError) -> Self {
        Self::Error(error)
    }
}

impl From<std::io::Error> for Fault {
    fn from(_: std::io::Error) -> Self {
        Self::Left
    }
}

/// Serves connections until the server stops.
pub(crate) async fn serve(shared: Shared, listener: TcpListener) {
    let mut stopping = shared.stopping.subscribe();
    let mut stop = pin!(stopping.wait_for(|stopping| *stopping));
    loop {
        let next = poll_fn(|cx| match stop.as_mut().poll(cx) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => listener.poll_accept(cx).map(Some),
        });
        match next.await {
            None => return,
            Some(Ok((stream, peer))) => {
                tokio::spawn(connection(Arc::clone(&shared), stream, peer));
            }
            // Out of file descriptors, say.
            Some(Err(_)) => sleep(AGAIN).await,
        }
    }
}

async fn connection(shared: Shared, stream: TcpStream, peer: SocketAddr) {
    let write_limit = shared.options.write_limit;
    prepare(&stream, write_limit);
    let mut hasher = DefaultHasher::new();
    client(peer).hash(&mut hasher);
    let mut connection = Connection {
        io: BufReader::new(Bounded::new(stream, write_limit)),
        client: hasher.finish(),
        hearing: Hearing::default(),
        recording: None,
        refused: false,
        speech: None,
        shared: Arc::clone(&shared),
    };
    let place = shared.sessions.enter(client(peer));
    if place.is_err() {
        let message = "as many connections are open as may be; try again later";
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message);
        let _ = connection.error(&error.code("too_many_connections")).await;
        return;
    }
    // Where the client has left, nobody has to know.
    if let Err(Fault::Error(e)) = connection.serve().await {
        let _ = connection.error(&e).await;
    }
}

/// Model and options of a transcription.
#[derive(Default)]
struct Hearing {
    model: Option<String>,
    language: Option<String>,
    prompt: Option<String>,
}

/// Audio that is coming in.
struct Recording {
    context: Context,
    pcm: Pcm,
    bytes: Vec<u8>,
}

/// A text that comes piece by piece.
struct Speech {
    model: Arc<Served>,
    voice: Option<String>,
    text: SentenceSplitter,
    /// Characters that came, and are not said.
    waiting: usize,
}

struct Connection {
    shared: Shared,
    io: BufReader<Bounded>,
    client: u64,
    hearing: Hearing,
    recording: Option<Recording>,
    /// The audio that comes was refused, and is dropped up to its end.
    refused: bool,
    speech: Option<Speech>,
}

impl Connection {
    async fn serve(&mut self) -> Result<(), Fault> {
        let mut stopping = self.shared.stopping.subscribe();
        let mut stop = pin!(stopping.wait_for(|stopping| *stopping));
        let (idle, read_limit) = (self.shared.options.session_idle, self.shared.options.read_limit);
        loop {
            // What has begun is finished before the server ends.
            let begun = self.recording.is_some() || self.speech.is_some();
            let io = &mut self.io;
            let some = async {
                let mut some = pin!(io.fill_buf());
                poll_fn(|cx| {
                    if !begun && stop.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(Err(Fault::Left));
                    }
                    some.as_mut().poll(cx).map(|some| Ok(some.map(|bytes| !bytes.is_empty())?))
                })
                .await
            };
            // A text may come as slowly as a model writes it.
            let wait = if self.recording.is_some() { read_limit } else { idle };
            let late = || {
                let message = "nothing came for too long: the connection is closed";
                ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("request_timeout")
            };
            if !timeout(wait, some).await.map_err(|_| late())?? {
                return Err(Fault::Left);
            }
            let event =
                timeout(read_limit, event::read(&mut self.io)).await.map_err(|_| late())??;
            match self.event(event).await {
                Err(Fault::Error(e)) => self.error(&e).await?,
                done => done?,
            }
        }
    }

    async fn send(&mut self, kind: &str, data: &Value, payload: &[u8]) -> Result<(), Fault> {
        self.io.write_all(&event::written(kind, data, payload)).await?;
        Ok(self.io.flush().await?)
    }

    async fn error(&mut self, error: &ApiError) -> Result<(), Fault> {
        let error = error.json();
        let error = &error["error"];
        let code = if error["code"].is_null() { &error["type"] } else { &error["code"] };
        self.send("error", &json!({"text": error["message"], "code": code}), &[]).await
    }

    async fn event(&mut self, event: Event) -> Result<(), Fault> {
        let fields = Fields::new(&event.data);
        match event.kind.as_str() {
            "describe" => {
                let info = info::info(&self.shared.registry);
                self.send("info", &info, &[]).await
            }
            "ping" => {
                let text = fields.text("text")?;
                self.send("pong", &json!({"text": text}), &[]).await
            }
            "transcribe" => {
                (self.recording, self.refused) = (None, false);
                self.hearing = self.hearing(&fields)?;
                Ok(())
            }
            "audio-start" => {
                // What comes behind one that is wrong is dropped.
                (self.recording, self.refused) = (None, true);
                let pcm = layout(&fields)?;
                self.refused = false;
                let context = self.context("WYOMING transcribe");
                self.recording = Some(Recording { context, pcm, bytes: Vec::new() });
                Ok(())
            }
            "audio-chunk" if self.refused => Ok(()),
            "audio-chunk" => {
                let done = self.audio(&fields, &event.payload).await;
                if let Err(e) = &done {
                    // One error is enough.
                    self.refused = true;
                    if let Some(recording) = self.recording.take() {
                        ended(&recording.context, Some(e));
                    }
                }
                Ok(done?)
            }
            "audio-stop" if std::mem::take(&mut self.refused) => Ok(()),
            "audio-stop" => self.transcribe().await,
            "synthesize" if self.speech.is_some() => {
                // Sent with the whole text for servers that take none piece by piece.
                Ok(())
            }
            "synthesize" => {
                let (model, voice) = self.voice(&fields)?;
                let text = fields.needed("text")?.to_owned();
                self.speak(&model, voice, text).await
            }
            "synthesize-start" => {
                let (model, voice) = self.voice(&fields)?;
                self.speech =
                    Some(Speech { model, voice, text: SentenceSplitter::default(), waiting: 0 });
                Ok(())
            }
            "synthesize-chunk" => {
                if self.speech.is_none() {
                    return Err(out_of_order("synthesize-chunk", "synthesize-start").into());
                }
                self.speak_sentences(Some(fields.needed("text")?)).await
            }
            "synthesize-stop" => {
                if self.speech.is_none() {
                    return Err(out_of_order("synthesize-stop", "synthesize-start").into());
                }
                let spoken = self.speak_sentences(None).await;
                self.speech = None;
                if let Err(Fault::Error(e)) = &spoken {
                    self.error(e).await?;
                }
                self.send("synthesize-stopped", &json!({}), &[]).await
            }
            // As the protocol has it, what is not known is dropped.
            _ => Ok(()),
        }
    }

    /// Context of a request.
    fn context(&self, route: &str) -> Context {
        let shared = Arc::clone(&self.shared);
        let tally = Tally::new(Arc::clone(&shared), ids::new("req_"), route.to_owned());
        let (client, memory) = (self.client, Memory::default());
        Context { shared, client, key: None, tally: Arc::new(tally), memory }
    }

    fn hearing(&self, fields: &Fields<'_>) -> Result<Hearing> {
        let model = info::hearing(&self.shared.registry, fields.text("name")?)?;
        let language = fields.text("language")?.map(|tag| {
            // `en-US` is `en` for models that know that one only.
            let code = tag.split(['-', '_']).next().unwrap_or(tag);
            let known = model.languages();
            if known.iter().any(|known| known == tag) { tag } else { code }.to_owned()
        });
        let names = ["transcript_names", "transcript_terms"].map(|name| fields.texts(name));
        let [names, terms] = names;
        let words = [names?, terms?].concat().join(", ");
        Ok(Hearing {
            model: Some(model.name.clone()),
            language: language.filter(|code| !code.trim().is_empty()),
            prompt: Some(words).filter(|words| !words.trim().is_empty()),
        })
    }

    /// Takes a piece of audio.
    async fn audio(&mut self, fields: &Fields<'_>, payload: &[u8]) -> Result<()> {
        let Some(recording) = &mut self.recording else {
            return Err(out_of_order("audio-chunk", "audio-start"));
        };
        let pcm = layout(fields)?;
        if pcm != recording.pcm {
            let message =
                format!("expected audio as in audio-start, {:?}, found {pcm:?}", recording.pcm);
            return Err(ApiError::bad("audio-chunk", message).code("invalid_value"));
        }
        if !payload.len().is_multiple_of(pcm.frame()) {
            let message = format!(
                "expected whole samples of {} bytes, found {} bytes",
                pcm.frame(),
                payload.len()
            );
            return Err(ApiError::bad("payload_length", message).code("invalid_value"));
        }
        let bytes = recording.bytes.len() + payload.len();
        recording.context.room_for_audio(&recording.context.memory, bytes).await?;
        recording.bytes.extend_from_slice(payload);
        Ok(())
    }

    /// Answers the end of the audio with its transcript.
    async fn transcribe(&mut self) -> Result<(), Fault> {
        let Some(Recording { context, pcm, bytes }) = self.recording.take() else {
            return Err(out_of_order("audio-stop", "audio-start").into());
        };
        let done = self.transcript(&context, pcm, &bytes).await;
        if let Err(Fault::Error(e)) = &done {
            ended(&context, Some(e));
        }
        let transcript = done?;
        ended(&context, None);
        self.send("transcript", &transcript, &[]).await
    }

    async fn transcript(
        &mut self,
        context: &Context,
        pcm: Pcm,
        bytes: &[u8],
    ) -> Result<Value, Fault> {
        let Hearing { model, language, prompt } = std::mem::take(&mut self.hearing);
        let model = info::hearing(&self.shared.registry, model.as_deref())?;
        context.tally.update(|record| record.model = Some(model.name.clone()));
        if bytes.is_empty() {
            return Ok(json!({"text": ""}));
        }
        let options = TranscribeOptions::default().with_language(language).with_prompt(prompt);
        let mut pending =
            context.transcribing(&model, context.memory.clone(), pcm.wav(bytes), options)?;
        let Update::Transcribed(transcript) = self.awaited(&mut pending).await? else {
            return Err(broken().into());
        };
        let tokens = transcript.chunks.iter().map(|chunk| chunk.tokens).sum();
        context.tally.update(|record| record.completion_tokens = tokens);
        let mut answer = json!({"text": transcript.text.trim()});
        if let Some(language) = &transcript.language {
            answer["language"] = language.as_str().into();
        }
        Ok(answer)
    }

    /// Waits for what comes next of a job, which ends when the client leaves.
    async fn awaited(&mut self, pending: &mut Pending) -> Result<Update, Fault> {
        let io = &mut self.io;
        let mut more = false;
        let update = poll_fn(|cx| {
            if let Poll::Ready(update) = pending.poll_next(cx) {
                return Poll::Ready(Ok(update));
            }
            if !more {
                match Pin::new(&mut *io).poll_fill_buf(cx) {
                    Poll::Ready(Ok([]) | Err(_)) => return Poll::Ready(Err(Fault::Left)),
                    // The next event waits.
                    Poll::Ready(Ok(_)) => more = true,
                    Poll::Pending => {}
                }
            }
            Poll::Pending
        });
        match update.await?.ok_or_else(broken)? {
            Update::Failed(e) => Err(e.into()),
            update => Ok(update),
        }
    }

    /// The model and the voice that an event names.
    fn voice(&self, fields: &Fields<'_>) -> Result<(Arc<Served>, Option<String>)> {
        fields.only("text_format", &"text".into())?;
        let voice = fields.object("voice")?;
        let name = voice.as_ref().map(|voice| voice.text("name")).transpose()?.flatten();
        info::speaking(&self.shared.registry, name)
    }

    /// Says the sentences of a text that comes piece by piece that are whole with this piece; at its end, all of it.
    async fn speak_sentences(&mut self, piece: Option<&str>) -> Result<(), Fault> {
        let Some(speech) = &mut self.speech else { return Ok(()) };
        let sentences: Vec<String> = match piece {
            Some(piece) => speech.text.push(piece).collect(),
            None => speech.text.finish().into_iter().collect(),
        };
        speech.waiting = match sentences.is_empty() {
            true => speech.waiting + piece.map_or(0, |piece| piece.chars().count()),
            false => 0,
        };
        let (model, voice) = (Arc::clone(&speech.model), speech.voice.clone());
        if speech.waiting > MAX_INPUT {
            self.speech = None;
            return Err(too_long(MAX_INPUT + 1).into());
        }
        match sentences.is_empty() {
            true => Ok(()),
            false => self.speak(&model, voice, sentences.join(" ")).await,
        }
    }

    /// Answers a text with its audio, sentence by sentence.
    async fn speak(
        &mut self,
        model: &Arc<Served>,
        voice: Option<String>,
        text: String,
    ) -> Result<(), Fault> {
        let context = self.context("WYOMING synthesize");
        let done = self.spoken(&context, model, voice, text).await;
        if let Err(Fault::Error(e)) = &done {
            ended(&context, Some(e));
        }
        done?;
        ended(&context, None);
        self.send("audio-stop", &json!({}), &[]).await
    }

    async fn spoken(
        &mut self,
        context: &Context,
        model: &Arc<Served>,
        voice: Option<String>,
        text: String,
    ) -> Result<(), Fault> {
        context.tally.update(|record| record.model = Some(model.name.clone()));
        context.tally.prompt(|| text.clone());
        let count = text.chars().count();
        if count > MAX_INPUT {
            return Err(too_long(count).into());
        }
        let options = SpeakOptions::default().with_voice(voice);
        let work = Work::Speak { text, options, format: None };
        let mut pending = Pending::submit(context, model, Vec::new(), context.ticket(), work)?;
        let mut started = false;
        loop {
            match self.awaited(&mut pending).await? {
                Update::Said { bytes, rate } => {
                    let layout = json!({"rate": rate, "width": 2, "channels": 1});
                    if !std::mem::replace(&mut started, true) {
                        let mut start = layout.clone();
                        start["timestamp"] = 0.into();
                        self.send("audio-start", &start, &[]).await?;
                    }
                    for chunk in bytes.chunks(CHUNK) {
                        self.send("audio-chunk", &layout, chunk).await?;
                    }
                }
                Update::Spoken(_) if started => return Ok(()),
                _ => return Err(broken().into()),
            }
        }
    }
}

/// Notes how a request ended.
fn ended(context: &Context, error: Option<&ApiError>) {
    context.tally.update(|record| {
        record.status = error.map_or(StatusCode::OK, |error| error.status).as_u16();
        record.error = error.map(ApiError::reason);
    });
}

fn out_of_order(found: &str, before: &str) -> ApiError {
    ApiError::bad(found, format!("expected {before} before it")).code("out_of_order")
}

fn too_long(count: usize) -> ApiError {
    let message = format!("expected at most {MAX_INPUT} characters, found {count}");
    ApiError::bad("text", message).code("invalid_value")
}

/// The layout of audio that an event has.
fn layout(fields: &Fields<'_>) -> Result<Pcm> {
    let needed = |name, (min, max)| -> Result<usize> {
        fields.count(name, min, max)?.ok_or_else(|| fields.missing(name))
    };
    let small = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
    let rate = u32::try_from(needed("rate", RATES)?).unwrap_or(u32::MAX);
    let (width, channels) = (small(needed("width", WIDTHS)?), small(needed("channels", CHANNELS)?));
    Ok(Pcm { rate, width, channels })
}
