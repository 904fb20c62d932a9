//! `/v1/audio/transcriptions`, and `/v1/audio/translations`.

use axum::Extension;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Multipart, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use qhx::{Chunk, Source, Times, TranscribeLimits, TranscribeOptions, Transcript, srt, vtt};
use qhx_media::SpeechRules;
use serde_json::{Value, json};

use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::Fields;
use crate::pending::Pending;
use crate::queue::{Update, Work};
use crate::registry::Ability;
use crate::request::Context;
use crate::request_metrics::Tally;
use crate::sse::{self, Events, Progress};

/// The field that asks for times of words.
pub(crate) const GRANULARITIES: &str = "timestamp_granularities[]";
/// The field that asks for more about the tokens.
const INCLUDE: &str = "include[]";
/// The field that says how audio is cut.
const CHUNKING: &str = "chunking_strategy";
/// Greatest times of `server_vad` in milliseconds.
const MAX_TIME: u64 = 10_000;
/// Names of the tasks.
const TRANSCRIBE: &str = "transcribe";
const TRANSLATE: &str = "translate";
/// Tokens of a chunk of the audio.
const MAX_NEW: usize = 256;

/// Format of a transcript.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Json,
    Text,
    Verbose,
    Srt,
    Vtt,
}

/// Fields of a form.
#[derive(Debug, Default)]
struct Form {
    file: Option<Vec<u8>>,
    model: Option<String>,
    /// The code of a language.
    language: Option<String>,
    /// Text that was said before.
    prompt: Option<String>,
    temperature: Option<f32>,
    format: Option<Format>,
    granularities: Granularities,
    stream: bool,
    /// Rules by which the audio without speech is left out.
    vad: Option<SpeechRules>,
}

/// Which times are asked for, by the names of the API; segments where none are.
#[derive(Debug, Clone, Copy, Default)]
struct Granularities {
    word: bool,
    segment: bool,
}

pub(crate) async fn transcribe(
    Extension(context): Extension<Context>,
    request: Request,
) -> Result<Response> {
    hear(context, request, TRANSCRIBE).await
}

/// Into English, whatever is spoken.
pub(crate) async fn translate(
    Extension(context): Extension<Context>,
    request: Request,
) -> Result<Response> {
    hear(context, request, TRANSLATE).await
}

async fn hear(context: Context, request: Request, task: &'static str) -> Result<Response> {
    let mut form = Form::read(&context, request).await?;
    let model = form.model.clone();
    context.tally.update(|record| record.model = model);
    let registry = &context.shared.registry;
    let model = registry.able(form.model.as_deref(), Ability::Transcribe)?;
    let missing = || ApiError::bad("file", "it is missing").code("missing_required_parameter");
    let source =
        Source::Bytes { name: "file".to_owned(), bytes: form.file.take().ok_or_else(missing)? };
    // As the API has it, 0 lets the limits raise it.
    let limits = match form.temperature.filter(|temperature| *temperature > 0.0) {
        Some(temperature) => {
            TranscribeLimits::default().temperatures(vec![temperature]).map_err(ApiError::from)?
        }
        None => TranscribeLimits::default(),
    };
    let options = TranscribeOptions::default()
        .with_max_new(MAX_NEW)
        .with_language(form.language.clone())
        .with_task((task == TRANSLATE).then(|| task.to_owned()))
        .with_prompt(form.prompt.clone())
        .with_times(if form.granularities.word { Times::Word } else { Times::Segment })
        .with_limits(limits)
        .with_vad(form.vad);
    let work = Work::Transcribe { source, options: Box::new(options), streams: form.stream };
    let mut pending = Pending::submit(&context, &model, Vec::new(), context.ticket(), work)?;
    if form.stream {
        pending.begun(context.shared.options.heartbeat).await?;
        return Ok(sse::respond(&context, pending, Hearing, Events::default()));
    }
    let Update::Transcribed(transcript) = pending.only().await? else { return Err(broken()) };
    note(&context.tally, &transcript);
    let transcript = &transcript;
    Ok(match form.format.unwrap_or(Format::Json) {
        Format::Json => json_response(StatusCode::OK, &brief(transcript)),
        Format::Verbose => json_response(StatusCode::OK, &verbose(transcript, &form, task)),
        Format::Text => text(format!("{}\n", transcript.text), "text/plain; charset=utf-8"),
        Format::Srt => text(srt(transcript), "application/x-subrip; charset=utf-8"),
        Format::Vtt => text(vtt(transcript), "text/vtt; charset=utf-8"),
    })
}

fn note(tally: &Tally, transcript: &Transcript) {
    let tokens = transcript.chunks.iter().map(|chunk| chunk.tokens).sum();
    tally.update(|record| record.completion_tokens = tokens);
}

/// A transcript that comes as it is known.
struct Hearing;

impl Progress for Hearing {
    fn take(&mut self, update: Option<Update>, events: &mut Events, tally: &Tally) -> Result<bool> {
        match update {
            Some(Update::Heard(delta)) => {
                events.data(&json!({"type": "transcript.text.delta", "delta": delta}));
                Ok(false)
            }
            Some(Update::Transcribed(transcript)) => {
                note(tally, &transcript);
                let mut done = brief(&transcript);
                done["type"] = "transcript.text.done".into();
                events.data(&done);
                Ok(true)
            }
            Some(Update::Failed(error)) => Err(error),
            _ => Err(broken()),
        }
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.json());
    }
}

impl Form {
    /// Reads a form of `multipart/form-data` within the server's limits.
    async fn read(context: &Context, request: Request) -> Result<Self> {
        let kind = request.headers().get(header::CONTENT_TYPE).cloned();
        let bytes = context.bytes(request).await?;
        let mut request = Request::new(Body::from(bytes));
        if let Some(kind) = kind {
            request.headers_mut().insert(header::CONTENT_TYPE, kind);
        }
        // It was read within the server's own limit.
        DefaultBodyLimit::disable().apply(&mut request);
        let mut parts = Multipart::from_request(request, &()).await.map_err(|e| {
            let message = format!("expected multipart/form-data: {}", e.body_text());
            ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
                .param("content-type")
                .code("unsupported_media_type")
        })?;
        let malformed = |e: axum::extract::multipart::MultipartError| {
            ApiError::malformed(format!("the form is malformed: {}", e.body_text()))
                .code("malformed_form")
        };
        let mut form = Self::default();
        while let Some(part) = parts.next_field().await.map_err(malformed)? {
            let name = part.name().unwrap_or_default().to_owned();
            if name == "file" {
                form.file = Some(part.bytes().await.map_err(malformed)?.to_vec());
                continue;
            }
            let value = part.text().await.map_err(malformed)?;
            match name.as_str() {
                "model" => form.model = Some(value),
                "language" => form.language = Some(value).filter(|code| !code.trim().is_empty()),
                "prompt" => form.prompt = Some(value).filter(|text| !text.trim().is_empty()),
                "temperature" => {
                    let temperature = value.trim().parse().ok().filter(|t| (0.0..=1.0).contains(t));
                    form.temperature = Some(temperature.ok_or_else(|| {
                        let message = "expected a number from 0 to 1";
                        ApiError::bad("temperature", message).code("invalid_value")
                    })?);
                }
                "stream" => {
                    form.stream = value.trim().to_lowercase().parse().map_err(|_| {
                        ApiError::bad("stream", "expected true or false").code("invalid_value")
                    })?;
                }
                INCLUDE | "include" => {
                    let message = format!("{value:?} is not given by this server");
                    return Err(ApiError::bad(INCLUDE, message).code("unsupported_parameter"));
                }
                CHUNKING => form.vad = vad(&value)?,
                "response_format" => form.format = Some(Format::read(&value)?),
                GRANULARITIES | "timestamp_granularities" => match value.as_str() {
                    "word" => form.granularities.word = true,
                    "segment" => form.granularities.segment = true,
                    _ => {
                        let error = ApiError::bad(GRANULARITIES, "expected word or segment");
                        return Err(error.code("invalid_value"));
                    }
                },
                _ => {}
            }
        }
        let Granularities { word, segment } = form.granularities;
        if (word || segment) && form.format != Some(Format::Verbose) {
            let error = ApiError::bad(GRANULARITIES, "expected response_format verbose_json, too");
            return Err(error.code("invalid_value"));
        }
        if form.stream && !matches!(form.format, None | Some(Format::Json | Format::Text)) {
            let error = ApiError::bad("stream", "expected response_format json or text with it");
            return Err(error.code("invalid_value"));
        }
        Ok(form)
    }
}

/// Rules of `chunking_strategy`: none for `auto`, with which the model is given the audio as it is, and those of
/// `server_vad`.
fn vad(value: &str) -> Result<Option<SpeechRules>> {
    const EXPECTED: &str = "expected auto or an object of the type server_vad";
    if value.trim() == "auto" {
        return Ok(None);
    }
    let wrong = || ApiError::bad(CHUNKING, EXPECTED).code("invalid_value");
    let value: Value = serde_json::from_str(value).map_err(|_| wrong())?;
    let fields = Fields::of(&value, CHUNKING)?;
    if fields.needed("type")? != "server_vad" {
        return Err(fields.wrong("type", "server_vad"));
    }
    let mut rules = SpeechRules::default();
    let millis = |name, usual: u32| -> Result<u32> {
        let found = fields.count(name, 0, MAX_TIME)?;
        Ok(found.and_then(|ms| u32::try_from(ms).ok()).unwrap_or(usual))
    };
    rules.threshold = fields.number("threshold", 0.0, 1.0)?.unwrap_or(rules.threshold);
    rules.pad_ms = millis("prefix_padding_ms", rules.pad_ms)?;
    rules.min_silence_ms = millis("silence_duration_ms", rules.min_silence_ms)?;
    Ok(Some(rules))
}

impl Format {
    fn read(name: &str) -> Result<Self> {
        match name {
            "json" => Ok(Self::Json),
            "text" => Ok(Self::Text),
            "verbose_json" => Ok(Self::Verbose),
            "srt" => Ok(Self::Srt),
            "vtt" => Ok(Self::Vtt),
            _ => {
                let message = "expected json, text, verbose_json, srt or vtt";
                Err(ApiError::bad("response_format", message).code("invalid_value"))
            }
        }
    }
}

fn text(text: String, kind: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

fn brief(transcript: &Transcript) -> Value {
    let usage = json!({"type": "duration", "seconds": transcript.seconds.ceil()});
    json!({"text": transcript.text, "usage": usage})
}

/// With the segments of a model that gives times, and else the chunks, and with words where they are asked for.
fn verbose(transcript: &Transcript, form: &Form, task: &str) -> Value {
    let segment = |(id, chunk): (usize, &Chunk)| {
        let scores = chunk.scores.as_ref();
        json!({
            "id": id,
            // In hundredths of a second, as Whisper's own program counts frames.
            "seek": scores.map(|scores| (scores.seek * 100.0).round() as u64),
            "start": millis(chunk.start),
            "end": millis(chunk.end),
            "text": chunk.text,
            "tokens": chunk.ids,
            "temperature": scores.map(|scores| millis(f64::from(scores.temperature))),
            "avg_logprob": scores.map(|scores| scores.avg_logprob),
            "compression_ratio": scores.map(|scores| scores.compression_ratio),
            "no_speech_prob": scores.and_then(|scores| scores.no_speech_prob),
        })
    };
    let word = |word: &Chunk| json!({"word": word.text, "start": millis(word.start), "end": millis(word.end)});
    let Granularities { word: words, segment: segments } = form.granularities;
    let mut json = brief(transcript);
    json["task"] = task.into();
    json["language"] = transcript.language.as_deref().or(form.language.as_deref()).into();
    json["duration"] = millis(transcript.seconds).into();
    if segments || !words {
        json["segments"] = transcript.chunks.iter().enumerate().map(segment).collect();
    }
    if words {
        json["words"] = transcript.words.iter().map(word).collect();
    }
    json
}

fn millis(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}
