//! The models and voices that are served, as the protocol describes them.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::error::{ApiError, Result};
use crate::registry::{Ability, Registry, Served};

/// Language of models that declare none, and of voices whose texts become phonemes by rules of English.
const LANGUAGE: &str = "en";

fn described(name: &str, description: &str, more: Value) -> Value {
    let mut described = json!({
        "name": name,
        "description": description,
        "attribution": {"name": "qhx", "url": ""},
        "installed": true,
        "version": env!("CARGO_PKG_VERSION"),
    });
    if let (Value::Object(described), Value::Object(more)) = (&mut described, more) {
        described.extend(more);
    }
    described
}

fn able(models: &[Arc<Served>], ability: Ability) -> impl Iterator<Item = &Arc<Served>> {
    models.iter().filter(move |model| model.can(ability))
}

/// The data of an `info` event: one program that transcribes and one that speaks, where there are models for them.
pub(super) fn info(registry: &Registry) -> Value {
    let served = registry.models();
    let models = able(&served, Ability::Transcribe).map(|model| {
        let mut languages = model.languages();
        if languages.is_empty() {
            languages.push(LANGUAGE.to_owned());
        }
        described(&model.name, &model.name, json!({"languages": languages}))
    });
    let models: Vec<_> = models.collect();
    let voices = voices(&served).into_iter().map(|(name, model, voice)| {
        let language = model.language_of(voice).unwrap_or_else(|| LANGUAGE.to_owned());
        described(&name, &name, json!({"languages": [language], "speakers": null}))
    });
    let voices: Vec<_> = voices.collect();
    let program = |name: &str, description: &str, list: Vec<Value>, more: Value| {
        let mut program = described("qhx", description, more);
        let empty = list.is_empty();
        program[name] = list.into();
        if empty { json!([]) } else { json!([program]) }
    };
    let asr = json!({"supports_transcript_streaming": false, "requires_external_vad": true});
    let tts = json!({"supports_synthesize_streaming": true});
    json!({
        "asr": program("models", "Speech to text", models, asr),
        "tts": program("voices", "Text to speech", voices, tts),
        "handle": [],
        "intent": [],
        "wake": [],
        "mic": [],
        "snd": [],
    })
}

/// All voices by the names that clients see: with the model in front where several speak.
fn voices(models: &[Arc<Served>]) -> Vec<(String, &Arc<Served>, &str)> {
    let several = able(models, Ability::Speak).nth(1).is_some();
    let mut voices = Vec::new();
    for model in able(models, Ability::Speak) {
        for voice in model.voices() {
            let name = if several { format!("{}/{voice}", model.name) } else { voice.clone() };
            voices.push((name, model, voice.as_str()));
        }
    }
    voices
}

/// The model that transcribes of a name, or the first one.
pub(super) fn hearing(registry: &Registry, name: Option<&str>) -> Result<Arc<Served>> {
    let models = registry.models();
    let first = able(&models, Ability::Transcribe).next().map(|model| model.name.as_str());
    registry.able(name.or(first), Ability::Transcribe)
}

/// The model of a voice, and the voice; the first one's own where none is named.
pub(super) fn speaking(
    registry: &Registry,
    voice: Option<&str>,
) -> Result<(Arc<Served>, Option<String>)> {
    let models = registry.models();
    let first = able(&models, Ability::Speak).next().map(|model| model.name.as_str());
    let Some(name) = voice else {
        return Ok((registry.able(first, Ability::Speak)?, None));
    };
    let voices = voices(&models);
    if let Some((_, model, voice)) = voices.iter().find(|(known, ..)| known == name) {
        return Ok((Arc::clone(model), Some((*voice).to_owned())));
    }
    registry.able(first, Ability::Speak)?;
    let known: Vec<_> = voices.iter().map(|(known, ..)| known.as_str()).collect();
    let message = format!("there is no voice {name:?} here; there is {}", known.join(", "));
    Err(ApiError::new(StatusCode::BAD_REQUEST, message).param("voice").code("invalid_value"))
}
