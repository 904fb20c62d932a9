//! Texts to audio.
//!
//! A text becomes phonemes (`phonemes.rs`), sentence by sentence, by a lexicon where there is one and by rules of
//! letters else; each sentence's audio is there before the next one is looked at.

mod lexicon;
mod numbers;
mod phonemes;
mod rules;

use std::path::Path;

use qhx_base::{CancelToken, Error, ErrorKind, Result, error, setters};
use qhx_core::engine::{Model, Prompt};
use qhx_core::manifest::Speech;

pub use lexicon::Lexicon;

/// Speeds that a text may have.
const SPEEDS: std::ops::RangeInclusive<f32> = 0.25..=4.0;
/// Preferred places to split a text that is longer than the model takes, the best first.
const CUTS: [&str; 3] = [";:—…", ",", " "];

/// Options for speaking a text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SpeakOptions {
    /// The name of a voice; the first of the bundle if it is `None`.
    pub voice: Option<String>,
    /// Speed from 0.25 to 4; 1 is the voice's own.
    pub speed: f32,
    /// The text is phonemes already, in the symbols of the model (IPA).
    pub phonemes: bool,
}

impl Default for SpeakOptions {
    fn default() -> Self {
        Self { voice: None, speed: 1.0, phonemes: false }
    }
}

impl SpeakOptions {
    setters! {
        /// The name of a voice.
        with_voice(voice: impl Into<Option<String>>) => voice = voice.into(),
        /// Speed; 1 is the voice's own.
        with_speed(speed: f32) => speed = speed,
        /// True if the text is phonemes already.
        with_phonemes(phonemes: bool) => phonemes = phonemes,
    }
}

/// Result of speaking a text.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Spoken {
    /// Length of the audio in seconds.
    pub seconds: f64,
    /// Sentences that were said to their end, or parts of one where it is longer than the model takes.
    pub parts: usize,
    /// Characters that have no sound and were left out, such as emoji, each once.
    pub left_out: Vec<char>,
    /// Words that the lexicon lacks, or all where there is none, whose sounds rules of letters gave; each once, the
    /// first hundred.
    pub out_of_lexicon: Vec<String>,
    /// It was cancelled; the audio ends with the last part.
    pub cancelled: bool,
}

/// A model that speaks.
///
/// ```no_run
/// let mut speaker = qhx::Bundle::open("kokoro/v81")?.speaker()?;
/// let samples = speaker.speak("It is raining.")?;
/// println!("{:.1} s", samples.len() as f64 / f64::from(speaker.rate()));
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug)]
pub struct Speaker {
    model: Model,
    speech: Speech,
    rate: u32,
    lexicon: Lexicon,
}

impl Speaker {
    /// Wraps an open model, which speaks as its manifest declares, with the lexicon of its bundle.
    ///
    /// # Errors
    /// When the bundle is none that speaks, or its lexicon cannot be read.
    pub fn new(model: Model) -> Result<Self> {
        let manifest = model.manifest();
        let path = manifest.path.display();
        let missing = |what: &str| {
            error!(Usage, "{path}: {what}, expected a bundle that speaks")
                .hint("such as one of Kokoro, which `qhx forge` makes: docs/voice.md")
        };
        let speech = manifest.params.speech.clone();
        let speech = speech.ok_or_else(|| missing("params.speech is missing"))?;
        let out = model.info().sound_out.ok_or_else(|| missing("its host-op makes no audio"))?;
        let artifact = manifest.artifacts.rest.get("lexicon");
        let artifact = artifact.and_then(|files| files.get("words")?.as_str());
        let lexicon = match artifact {
            None => Lexicon::default(),
            Some(name) => {
                let file = manifest.open_artifacts().resolve("/artifacts/lexicon/words", name)?;
                Lexicon::read(&file)?
            }
        };
        Ok(Self { rate: out.rate, model, speech, lexicon })
    }

    /// Takes the words of this lexicon first, a JSON file as of `misaki`: see [`Lexicon`].
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn add_lexicon(&mut self, file: &Path) -> Result<()> {
        self.lexicon.add(Lexicon::read(file)?);
        Ok(())
    }

    /// Samples a second.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// The names of the voices.
    pub fn voices(&self) -> &[String] {
        &self.speech.voices
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, to measure it, say.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Says a text with the first voice: its samples, mono at [`Speaker::rate`].
    ///
    /// # Errors
    /// Errors of [`Speaker::speak_with`].
    pub fn speak(&mut self, text: &str) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        let options = SpeakOptions::default();
        self.speak_with(text, &options, &CancelToken::new(), |samples| {
            all.extend_from_slice(samples);
            Ok(())
        })?;
        Ok(all)
    }

    /// Says a text. `sound` is given the samples of each part as they are made. A text that no part of has a sound is
    /// an error before anything is said, and so is a character of another script.
    ///
    /// # Errors
    /// When the options or the text are none that the model takes, it fails, or `sound` does.
    pub fn speak_with(
        &mut self,
        text: &str,
        options: &SpeakOptions,
        cancel: &CancelToken,
        mut sound: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<Spoken> {
        let (head, mut spoken) = (self.head(options)?, Spoken::default());
        let parts = self.parts(text, options.phonemes, &mut spoken)?;
        let mut samples = 0;
        for phonemes in parts {
            let tokens = head.iter().copied().chain(phonemes).collect();
            let said = self.model.speak(&Prompt::Tokens(tokens), cancel, |part| {
                samples += part.len();
                sound(part)
            });
            match said {
                Err(e) if e.kind() == ErrorKind::Cancelled && cancel.is_cancelled() => {
                    spoken.cancelled = true;
                    break;
                }
                said => said?,
            }
            spoken.parts += 1;
        }
        spoken.seconds = samples as f64 / f64::from(self.rate.max(1));
        Ok(spoken)
    }

    /// Checks that the model can say a text in this way: before a file is written, say.
    ///
    /// # Errors
    /// Errors of [`Speaker::speak_with`] that concern the options and the text.
    pub fn check(&self, text: &str, options: &SpeakOptions) -> Result<()> {
        self.head(options)?;
        self.parts(text, options.phonemes, &mut Spoken::default()).map(drop)
    }

    /// The tokens of voice and speed.
    fn head(&self, options: &SpeakOptions) -> Result<[u32; 2]> {
        head(&self.speech.voices, options)
    }

    /// The phonemes of a text as the model's numbers, in parts that it takes at once.
    fn parts(&self, text: &str, phonemes: bool, spoken: &mut Spoken) -> Result<Vec<Vec<u32>>> {
        let symbols = &self.speech.symbols;
        let sentences = match phonemes {
            true => vec![text.trim().to_owned()],
            false => phonemes::sentences(text, &self.lexicon, spoken)?,
        };
        let mut parts = Vec::new();
        for sentence in sentences {
            let mut numbers = Vec::new();
            for character in sentence.chars() {
                match symbols.get(character.encode_utf8(&mut [0; 4]) as &str) {
                    Some(id) => numbers.push((character, *id)),
                    // A line's end is a space in phonemes.
                    None if character.is_whitespace() => {}
                    None if phonemes => {
                        return Err(error!(Prompt, "the model has no phoneme {character:?}").hint(
                            format!(
                                "it has {}",
                                symbols.keys().map(String::as_str).collect::<Vec<_>>().join("")
                            ),
                        ));
                    }
                    None if !spoken.left_out.contains(&character) => {
                        spoken.left_out.push(character)
                    }
                    None => {}
                }
            }
            parts.extend(split(&numbers, self.speech.limit));
        }
        let sounds = |part: &Vec<u32>| {
            let letters =
                symbols.iter().filter(|(symbol, _)| symbol.chars().any(char::is_alphabetic));
            let letters: Vec<_> = letters.map(|(_, id)| id).collect();
            part.iter().any(|id| letters.contains(&id))
        };
        parts.retain(sounds);
        if parts.is_empty() {
            let left_out: String = spoken.left_out.iter().take(8).collect();
            let what = match (text.trim().is_empty(), left_out.is_empty()) {
                (true, _) => "the text is empty".to_owned(),
                (_, true) => "nothing of the text has a sound".to_owned(),
                _ => format!("nothing of the text has a sound: {left_out}"),
            };
            return Err(
                Error::new(ErrorKind::Prompt, what).hint("give a text with words or numbers")
            );
        }
        Ok(parts)
    }
}

/// The tokens of voice and speed.
fn head(voices: &[String], options: &SpeakOptions) -> Result<[u32; 2]> {
    let voice = match &options.voice {
        None => 0,
        Some(name) => voices.iter().position(|known| known == name).ok_or_else(|| {
            let near = qhx_plugins::nearest(name, voices.iter().map(String::as_str));
            let near = near.map_or_else(String::new, |near| format!("did you mean {near:?}? "));
            error!(Usage, "the model has no voice {name:?}")
                .hint(format!("{near}It has {}", voices.join(", ")))
        })?,
    };
    if !SPEEDS.contains(&options.speed) {
        let (min, max) = (SPEEDS.start(), SPEEDS.end());
        return Err(error!(
            Usage,
            "speed {}, expected a number from {min} to {max}", options.speed
        )
        .hint("1 is as the voice has it, 2 twice as fast"));
    }
    Ok([voice as u32, (options.speed * 1000.0).round() as u32])
}

/// Parts of at most `limit` symbols, cut behind a pause where there is one in the second half of a part.
fn split(symbols: &[(char, u32)], limit: usize) -> Vec<Vec<u32>> {
    let (mut rest, mut parts) = (symbols, Vec::new());
    while rest.len() > limit {
        let window = &rest[limit / 2..limit];
        let behind = |cuts: &str| window.iter().rposition(|(symbol, _)| cuts.contains(*symbol));
        let cut = CUTS.iter().find_map(|cuts| behind(cuts)).map_or(limit, |at| limit / 2 + at + 1);
        let (part, more) = rest.split_at(cut);
        parts.push(part);
        rest = more;
    }
    parts.push(rest);
    parts.iter().map(|part| part.iter().map(|(_, id)| *id).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sentences_are_cut_behind_pauses() {
        let cut = |text: &str, limit| {
            let symbols: Vec<_> = text.chars().map(|c| (c, c as u32)).collect();
            let text =
                |part: Vec<u32>| part.into_iter().filter_map(char::from_u32).collect::<String>();
            split(&symbols, limit).into_iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(cut("ab cd, ef gh", 12), ["ab cd, ef gh"]);
        assert_eq!(cut("ab cd, ef gh", 9), ["ab cd,", " ef gh"]);
        assert_eq!(cut("abcdefgh", 3), ["abc", "def", "gh"]);
    }

    #[test]
    fn voices_and_speeds_are_checked() {
        let voices = ["af_one".to_owned(), "bm_two".to_owned()];
        let options = SpeakOptions::default().with_voice("bm_two".to_owned()).with_speed(1.5);
        assert_eq!(head(&voices, &options).unwrap(), [1, 1500]);
        let unknown =
            head(&voices, &SpeakOptions::default().with_voice("af_on".to_owned())).unwrap_err();
        let hint = unknown.hint_text().unwrap_or_default().to_owned();
        assert_eq!(hint, "did you mean \"af_one\"? It has af_one, bm_two");
        for speed in [f32::NAN, 0.0, -1.0, 4.5, f32::INFINITY] {
            let error = head(&voices, &SpeakOptions::default().with_speed(speed)).unwrap_err();
            assert!(error.message().contains("from 0.25 to 4"), "{speed}: {error}");
        }
    }
}
