//! Texts to audio.
//!
//! A text becomes phonemes, sentence by sentence (`sentences.rs`): by a lexicon where there is one and by rules of
//! letters else (`phonemes.rs`), or by the program espeak-ng (`espeak.rs`), as the voice has it. Each sentence's audio
//! is there before the next one is looked at.

mod espeak;
mod lexicon;
mod numbers;
mod phonemes;
mod rules;
mod sentences;

use std::path::Path;

use qhx_base::{CancelToken, Error, ErrorKind, Result, error, setters};
use qhx_core::engine::{Model, Prompt};
use qhx_core::manifest::{Script, Speech};

pub use lexicon::Lexicon;
pub use sentences::SentenceSplitter;

/// Speeds that a text may have.
const SPEEDS: std::ops::RangeInclusive<f32> = 0.25..=4.0;
/// Deviations of noise that a model may be given.
const NOISES: std::ops::RangeInclusive<f32> = 0.0..=4.0;
/// Characters of a symbol.
const MAX_SYMBOL: usize = 4;
/// Letters with a mark, and both by themselves, as some voices have them.
const DECOMPOSED: [(char, [char; 2]); 8] = [
    ('ç', ['c', '\u{327}']),
    ('ã', ['a', '\u{303}']),
    ('õ', ['o', '\u{303}']),
    ('ẽ', ['e', '\u{303}']),
    ('ĩ', ['i', '\u{303}']),
    ('ũ', ['u', '\u{303}']),
    ('ñ', ['n', '\u{303}']),
    ('ỹ', ['y', '\u{303}']),
];
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
    /// Deviation of the noise in the audio's frames, of models that have such; the bundle's own if it is `None`.
    pub noise: Option<f32>,
    /// Deviation of the noise in durations, of models that have such; the bundle's own if it is `None`.
    pub duration_noise: Option<f32>,
    /// Seed of both.
    pub seed: u32,
}

impl Default for SpeakOptions {
    fn default() -> Self {
        Self {
            voice: None,
            speed: 1.0,
            phonemes: false,
            noise: None,
            duration_noise: None,
            seed: 0,
        }
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
        /// Deviation of the noise in frames.
        with_noise(noise: impl Into<Option<f32>>) => noise = noise.into(),
        /// Deviation of the noise in durations.
        with_duration_noise(noise: impl Into<Option<f32>>) => duration_noise = noise.into(),
        /// Seed of the noise.
        with_seed(seed: u32) => seed = seed,
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
    /// an error before anything is said, and so is a character of another script than that of the voice's letters.
    ///
    /// # Errors
    /// When the options or the text are none that the model takes, it fails, or `sound` does.
    pub fn speak_with(
        &mut self,
        text: &str,
        options: &SpeakOptions,
        cancel: &CancelToken,
        sound: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<Spoken> {
        self.check(text, options)?;
        self.speak_pieces([Ok(text)], options, cancel, sound)
    }

    /// Says a text that comes piece by piece, such as the words of a language model as it writes them: each sentence
    /// once it is whole. Phonemes are one sentence, up to the end of the text.
    ///
    /// # Errors
    /// When the options or a sentence are none that the model takes, a piece is an error, nothing of the text has a
    /// sound, the model fails, or `sound` does. What was said before then was given to `sound`.
    pub fn speak_pieces<T: AsRef<str>>(
        &mut self,
        pieces: impl IntoIterator<Item = Result<T>>,
        options: &SpeakOptions,
        cancel: &CancelToken,
        mut sound: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<Spoken> {
        let (head, mut spoken) = (self.head(options)?, Spoken::default());
        let (mut splitter, mut samples) = (SentenceSplitter::default(), 0);
        let mut pieces = pieces.into_iter();
        let mut whole = String::new();
        let mut blank = true;
        let mut more = true;
        'text: while more {
            let mut sentences = Vec::new();
            match pieces.next() {
                Some(piece) if options.phonemes => whole.push_str(piece?.as_ref()),
                Some(piece) => sentences.extend(splitter.push(piece?.as_ref())),
                None => {
                    more = false;
                    sentences.extend(splitter.finish());
                    sentences.extend(
                        Some(std::mem::take(&mut whole)).filter(|text| !text.trim().is_empty()),
                    );
                }
            }
            for sentence in sentences {
                blank = false;
                if cancel.is_cancelled() {
                    spoken.cancelled = true;
                    break 'text;
                }
                let sentence = match self.script(options)? {
                    Script::Espeak { spaced: true, .. } => espeak::ended(&sentence),
                    _ => sentence,
                };
                let count = u32::try_from(sentence.chars().count()).unwrap_or(u32::MAX);
                let count = Some(count).filter(|_| self.speech.counted);
                for phonemes in self.parts(&sentence, options, &mut spoken)? {
                    let tokens = head.iter().copied().chain(count).chain(phonemes).collect();
                    let said = self.model.speak(&Prompt::Tokens(tokens), cancel, |part| {
                        samples += part.len();
                        sound(part)
                    });
                    match said {
                        Err(e) if e.kind() == ErrorKind::Cancelled && cancel.is_cancelled() => {
                            spoken.cancelled = true;
                            break 'text;
                        }
                        said => said?,
                    }
                    spoken.parts += 1;
                }
            }
        }
        if spoken.parts == 0 && !spoken.cancelled {
            return Err(soundless(blank, &spoken));
        }
        spoken.seconds = samples as f64 / f64::from(self.rate.max(1));
        Ok(spoken)
    }

    /// Checks that the model can say a text in this way: before a file is written, say. Where espeak-ng makes the
    /// phonemes, it is asked for those of the beginning.
    ///
    /// # Errors
    /// Errors of [`Speaker::speak_with`] that concern the options and the text.
    pub fn check(&self, text: &str, options: &SpeakOptions) -> Result<()> {
        let mut spoken = Spoken::default();
        let slow = matches!(self.script(options)?, Script::Espeak { .. });
        let mut splitter = SentenceSplitter::default();
        let mut sentences: Vec<String> = match options.phonemes {
            true => vec![text.to_owned()],
            false => splitter.push(text).collect(),
        };
        sentences.extend(splitter.finish());
        self.head(options)?;
        let mut sounds = false;
        for sentence in &sentences {
            sounds |= !self.parts(sentence, options, &mut spoken)?.is_empty();
            if slow && sounds {
                break;
            }
        }
        if sounds { Ok(()) } else { Err(soundless(text.trim().is_empty(), &spoken)) }
    }

    /// Checks options, and that what makes phonemes for the voice is there: before a text is.
    ///
    /// # Errors
    /// Errors of [`Speaker::speak_with`] that concern the options.
    pub fn check_options(&self, options: &SpeakOptions) -> Result<()> {
        self.head(options)?;
        match self.script(options)? {
            Script::Espeak { voice, joined, spaced } => {
                espeak::phonemes("a", voice, *joined, *spaced).map(drop)
            }
            Script::Phonemes { of } => Err(no_phonemizer(of)),
            _ => Ok(()),
        }
    }

    /// Step from a text to phonemes.
    fn script(&self, options: &SpeakOptions) -> Result<&Script> {
        const LETTERS: &Script = &Script::Letters { lower: false, roman: false };
        if options.phonemes {
            return Ok(LETTERS);
        }
        let voice = voice(&self.speech.voices, options)?;
        Ok(self.speech.scripts.get(voice).unwrap_or(LETTERS))
    }

    /// The tokens in front of the phonemes.
    fn head(&self, options: &SpeakOptions) -> Result<Vec<u32>> {
        head(&self.speech, options)
    }

    /// The phonemes of a sentence as the model's numbers, in parts that it takes at once. None where nothing of it has
    /// a sound.
    fn parts(
        &self,
        sentence: &str,
        options: &SpeakOptions,
        spoken: &mut Spoken,
    ) -> Result<Vec<Vec<u32>>> {
        let script = self.script(options)?;
        let sentences = match script {
            _ if options.phonemes => vec![sentence.trim().to_owned()],
            Script::Lexicon => phonemes::sentences(sentence, &self.lexicon, spoken)?,
            Script::Espeak { voice, joined, spaced } => {
                vec![espeak::phonemes(sentence, voice, *joined, *spaced)?]
            }
            Script::Letters { lower: true, .. } => vec![sentence.to_lowercase()],
            Script::Phonemes { of } => return Err(no_phonemizer(of)),
            _ => vec![sentence.to_owned()],
        };
        let mut parts = Vec::new();
        for sentence in sentences {
            let numbers = self.numbers(&sentence, script, options, spoken)?;
            let sounds = |symbol: &(char, u32)| symbol.0.is_alphabetic();
            if numbers.iter().any(sounds) {
                parts.extend(split(&numbers, self.speech.limit));
            }
        }
        Ok(parts)
    }

    /// Symbols and their numbers.
    fn numbers(
        &self,
        sentence: &str,
        script: &Script,
        options: &SpeakOptions,
        spoken: &mut Spoken,
    ) -> Result<Vec<(char, u32)>> {
        let symbols = &self.speech.symbols;
        let longest = symbols.keys().map(|symbol| symbol.chars().count()).max().unwrap_or(1);
        let decomposes = matches!(script, Script::Espeak { joined: false, .. });
        let mut characters = Vec::new();
        for character in sentence.trim().chars() {
            let parts =
                DECOMPOSED.iter().find(|(whole, _)| *whole == character).map(|(_, parts)| parts);
            let known =
                |character: &char| symbols.contains_key(character.encode_utf8(&mut [0; 4]) as &str);
            match parts.filter(|parts| decomposes && parts.iter().all(known)) {
                Some(parts) => characters.extend(parts),
                None => characters.push(character),
            }
        }
        let (mut numbers, mut at) = (Vec::new(), 0);
        while let Some(&character) = characters.get(at) {
            let fitting = (1..=longest.min(MAX_SYMBOL)).rev().find_map(|len| {
                let symbol: String = characters.get(at..at + len)?.iter().collect();
                Some((len, *symbols.get(&symbol)?))
            });
            at += fitting.map_or(1, |(len, _)| len);
            match fitting {
                Some((_, id)) => numbers.push((character, id)),
                // A line's end is a space in phonemes.
                None if character.is_whitespace() => {
                    let space = symbols
                        .get(" ")
                        .filter(|_| numbers.last().is_some_and(|(last, _)| *last != ' '));
                    numbers.extend(space.map(|id| (' ', *id)));
                }
                None if options.phonemes => {
                    let known = symbols.keys().map(String::as_str).collect::<Vec<_>>().join("");
                    return Err(error!(Prompt, "the model has no phoneme {character:?}")
                        .hint(format!("it has {known}")));
                }
                None if matches!(script, Script::Letters { roman: true, .. })
                    && character.is_alphabetic() =>
                {
                    let what = format!(
                        "the voice has no letter {character:?}: it was trained on romanised texts"
                    );
                    return Err(Error::new(ErrorKind::Prompt, what)
                        .hint("romanise the text first, with uroman"));
                }
                None if !spoken.left_out.contains(&character) => spoken.left_out.push(character),
                None => {}
            }
        }
        while numbers.last().is_some_and(|(last, _)| *last == ' ') {
            numbers.pop();
        }
        Ok(numbers)
    }
}

/// The error of a text that nothing is said of.
fn soundless(blank: bool, spoken: &Spoken) -> Error {
    let left_out: String = spoken.left_out.iter().take(8).collect();
    let what = match (blank, left_out.is_empty()) {
        (true, _) => "the text is empty".to_owned(),
        (_, true) => "nothing of the text has a sound".to_owned(),
        _ => format!("nothing of the text has a sound: {left_out}"),
    };
    Error::new(ErrorKind::Prompt, what).hint("give a text with words or numbers")
}

/// The error of a voice whose phonemes nothing here makes.
fn no_phonemizer(of: &str) -> Error {
    error!(Usage, "the voice takes phonemes of {of:?}, which nothing here makes of a text")
        .hint("give the text as phonemes: --phonemes on the command line")
}

/// The number of the voice.
fn voice(voices: &[String], options: &SpeakOptions) -> Result<usize> {
    let Some(name) = &options.voice else { return Ok(0) };
    voices.iter().position(|known| known == name).ok_or_else(|| {
        let near = qhx_plugins::nearest(name, voices.iter().map(String::as_str));
        let near = near.map_or_else(String::new, |near| format!("did you mean {near:?}? "));
        error!(Usage, "the model has no voice {name:?}")
            .hint(format!("{near}It has {}", voices.join(", ")))
    })
}

/// The tokens of voice and speed, and of noise where the model has such.
fn head(speech: &Speech, options: &SpeakOptions) -> Result<Vec<u32>> {
    let voice = voice(&speech.voices, options)?;
    if !SPEEDS.contains(&options.speed) {
        let (min, max) = (SPEEDS.start(), SPEEDS.end());
        return Err(error!(
            Usage,
            "speed {}, expected a number from {min} to {max}", options.speed
        )
        .hint("1 is as the voice has it, 2 twice as fast"));
    }
    let thousandths = |value: f32| (value * 1000.0).round() as u32;
    let own = speech.speeds.get(voice).copied().unwrap_or(1.0);
    let speed = (options.speed * own).clamp(*SPEEDS.start(), *SPEEDS.end());
    let mut head = vec![voice as u32, thousandths(speed)];
    let given = [options.noise, options.duration_noise];
    if let Some(noise) = given.into_iter().flatten().find(|noise| !NOISES.contains(noise)) {
        let (min, max) = (NOISES.start(), NOISES.end());
        return Err(error!(Usage, "noise {noise}, expected a number from {min} to {max}"));
    }
    match speech.noise {
        Some(own) => {
            head.extend(
                given.iter().zip(own).map(|(given, own)| thousandths(given.unwrap_or(own))),
            );
            head.push(options.seed);
        }
        None if given.iter().any(Option::is_some) => {
            return Err(error!(Usage, "the model takes no noise")
                .hint("voices of Piper and other VITS models do"));
        }
        None => {}
    }
    Ok(head)
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
        let speech = |noise| Speech {
            voices: vec!["af_one".to_owned(), "bm_two".to_owned()],
            symbols: Default::default(),
            limit: 1,
            scripts: Vec::new(),
            noise,
            speeds: Vec::new(),
            counted: false,
        };
        let voices = speech(None);
        let options = SpeakOptions::default().with_voice("bm_two".to_owned()).with_speed(1.5);
        assert_eq!(head(&voices, &options).unwrap(), [1, 1500]);
        let slow = Speech { speeds: vec![1.0, 0.8], ..voices.clone() };
        assert_eq!(head(&slow, &options).unwrap(), [1, 1200]);
        let slower = options.clone().with_speed(0.25);
        assert_eq!(head(&slow, &slower).unwrap(), [1, 250], "the least that a model takes");
        let unknown =
            head(&voices, &SpeakOptions::default().with_voice("af_on".to_owned())).unwrap_err();
        let hint = unknown.hint_text().unwrap_or_default().to_owned();
        assert_eq!(hint, "did you mean \"af_one\"? It has af_one, bm_two");
        for speed in [f32::NAN, 0.0, -1.0, 4.5, f32::INFINITY] {
            let error = head(&voices, &SpeakOptions::default().with_speed(speed)).unwrap_err();
            assert!(error.message().contains("from 0.25 to 4"), "{speed}: {error}");
        }
        let noisy = SpeakOptions::default().with_noise(0.5).with_seed(3);
        assert_eq!(head(&speech(Some([0.667, 0.8])), &noisy).unwrap(), [0, 1000, 500, 800, 3]);
        assert!(head(&voices, &noisy).unwrap_err().message().contains("takes no noise"));
        let wild = SpeakOptions::default().with_duration_noise(f32::NAN);
        assert!(
            head(&speech(Some([0.0; 2])), &wild).unwrap_err().message().contains("from 0 to 4")
        );
    }
}
