//! The prompt that asks a model for the words of a clip.

use qhx_base::Result;
use qhx_core::engine::{Message, Part, Prompt};
use qhx_core::manifest::{Spelling, Transcription};

use super::TranscribeOptions;
use crate::media::Attached;

/// Place of the audio in a whole prompt.
const AUDIO: &str = "{audio}";
/// Task of a translation, and its language where none is given.
const TRANSLATE: &str = "translate";
const ENGLISH: &str = "en";

/// True where a manifest has a whole prompt, with a place for `what`.
pub(super) fn has_place(instruction: &Transcription, what: &str) -> bool {
    is_whole(instruction) && instruction.prompt.contains(what)
}

/// True where a manifest has the whole prompt, with the audio in it.
pub(super) fn is_whole(instruction: &Transcription) -> bool {
    instruction.prompt.contains(AUDIO)
}

/// The code of the language that is asked for, or taken where none is.
pub(super) fn language<'a>(
    instruction: &'a Transcription,
    options: &'a TranscribeOptions,
) -> Option<&'a str> {
    options.language.as_deref().or(instruction.language.as_deref())
}

/// The audio, and what asks for its words.
pub(super) fn prompt(
    instruction: &Transcription,
    options: &TranscribeOptions,
    clip: Attached,
) -> Result<Prompt> {
    if is_whole(instruction) {
        return Ok(whole(instruction, options, clip));
    }
    let content = crate::media::content(instruction.prompt.clone(), &[clip])?;
    Ok(match instruction.chat {
        true => Prompt::Chat { messages: vec![Message::user(content)], thinking: None },
        false => content.into(),
    })
}

fn whole(instruction: &Transcription, options: &TranscribeOptions, clip: Attached) -> Prompt {
    let Transcription { languages, punctuation, answer, .. } = instruction;
    let spelled = |code: &str| languages.get(code).map_or("", Spelling::text);
    let spoken = language(instruction, options);
    let name = spoken.map_or("", spelled);
    let head = match answer {
        Some(answer) if !name.is_empty() => {
            format!("{}{name}{}", answer.before, answer.behind)
        }
        _ => name.to_owned(),
    };
    let translates = options.task.as_deref() == Some(TRANSLATE);
    let into = options.into.as_deref().or(if translates { Some(ENGLISH) } else { spoken });
    let [on, off] = punctuation.as_ref().map_or(["", ""], |[on, off]| [on.as_str(), off.as_str()]);
    let places = [
        ("{language}", head.as_str()),
        ("{into}", into.map_or("", spelled)),
        ("{punctuation}", if options.punctuation == Some(false) { off } else { on }),
        ("{prompt}", options.prompt.as_deref().unwrap_or("")),
    ];
    let (before, behind) = instruction.prompt.split_once(AUDIO).unwrap_or_default();
    let text = |template: &str| Some(filled(template, &places)).filter(|text| !text.is_empty());
    let parts =
        [text(before).map(Part::Text), Some(Part::Media(clip.media)), text(behind).map(Part::Text)];
    Prompt::Parts(parts.into_iter().flatten().collect())
}

/// A text with its places filled in one go: what is filled in has none.
fn filled(template: &str, places: &[(&str, &str)]) -> String {
    let (mut text, mut rest) = (String::new(), template);
    while let Some(at) = rest.find('{') {
        let (before, here) = rest.split_at(at);
        text.push_str(before);
        let place = places.iter().find(|(place, _)| here.starts_with(place));
        let (place, value) = place.map_or(("{", "{"), |(place, value)| (*place, *value));
        text.push_str(value);
        rest = here.get(place.len()..).unwrap_or_default();
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_has_no_places_itself() {
        let places = [("{prompt}", "{language}"), ("{language}", "de")];
        assert_eq!(filled("a {prompt} {x} {language}", &places), "a {language} {x} de");
    }
}
