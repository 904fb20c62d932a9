//! `/v1/audio/speech`: a text as audio.

use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use qhx::{AUDIO_FORMATS, AudioFormat, SpeakOptions};

use crate::error::{ApiError, Result, broken};
use crate::fields::Fields;
use crate::pending::Pending;
use crate::queue::{Update, Work};
use crate::registry::Ability;
use crate::request::Asked;
use crate::request_metrics::Tally;
use crate::sse::{self, Events, Progress};

/// Fields that are refused.
pub(crate) const REFUSED: [&str; 1] = ["instructions"];

/// Characters of a text, as the API has it.
pub(crate) const MAX_INPUT: usize = 4096;

/// Voices of OpenAI's interface, which clients ask for by default.
const OPENAI: [&str; 13] = [
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage",
    "shimmer", "verse",
];

/// The voice of the model that stands for one of OpenAI's: that of the same name, such as Kokoro's `af_alloy`, or else
/// one by the place in the list.
fn of_openai<'a>(voice: &'a str, voices: &'a [String]) -> &'a str {
    if voices.is_empty() || voices.iter().any(|own| own == voice) {
        return voice;
    }
    let Some(place) = OPENAI.iter().position(|known| *known == voice) else { return voice };
    let same = voices.iter().find(|own| own.split_once('_').is_some_and(|(_, name)| name == voice));
    same.or_else(|| voices.get(place % voices.len())).map_or(voice, String::as_str)
}

pub(crate) async fn speak(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let model = context.shared.registry.able(fields.text("model")?, Ability::Speak)?;
    let text = fields.needed("input")?.to_owned();
    fields.unsupported(&REFUSED)?;
    fields.only("stream_format", &"audio".into())?;
    let count = text.chars().count();
    if count > MAX_INPUT {
        let message = format!("expected at most {MAX_INPUT} characters, found {count}");
        return Err(ApiError::bad("input", message).code("invalid_value"));
    }
    // As the API has it.
    let format = fields.text("response_format")?.unwrap_or("mp3");
    let format = AudioFormat::named(format).ok_or_else(|| {
        let names = AUDIO_FORMATS.map(|(name, _)| name).join(", ");
        fields.wrong("response_format", &format!("one of {names}"))
    })?;
    let speed = fields.number("speed", 0.25, 4.0)?.unwrap_or(1.0);
    let voices = model.voices();
    let voice = fields.text("voice")?.map(|voice| of_openai(voice, voices).to_owned());
    if let Some(unknown) = voice.as_ref().filter(|voice| !voices.contains(voice)) {
        let message = format!("the model has no voice {unknown:?}; it has {}", voices.join(", "));
        return Err(ApiError::bad("voice", message).code("invalid_value"));
    }
    let options = SpeakOptions::default().with_voice(voice).with_speed(speed);
    // Samples alone need nothing of what follows.
    let streams = format == AudioFormat::Pcm;
    let work = Work::Speak { text, options, format: Some(format).filter(|_| !streams) };
    let mut pending = Pending::submit(&context, &model, Vec::new(), context.ticket(), work)?;
    if streams {
        pending.begun(context.shared.options.time_limit).await?;
        return Ok(sse::respond(&context, pending, Speaking, Events::default()));
    }
    let Update::Spoken(bytes) = pending.only().await? else { return Err(broken()) };
    Ok(([(header::CONTENT_TYPE, format.media_type())], bytes).into_response())
}

/// Samples that come as they are made.
struct Speaking;

impl Progress for Speaking {
    const KIND: &'static str = "audio/pcm";
    const PING: Option<&'static str> = None;

    fn take(
        &mut self,
        update: Option<Update>,
        events: &mut Events,
        _tally: &Tally,
    ) -> Result<bool> {
        match update {
            Some(Update::Said { bytes, .. }) => {
                events.bytes(bytes);
                Ok(false)
            }
            Some(Update::Spoken(_)) => Ok(true),
            Some(Update::Failed(error)) => Err(error),
            _ => Err(broken()),
        }
    }

    fn failed(&mut self, _error: &ApiError, _events: &mut Events) {}
}
