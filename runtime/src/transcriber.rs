//! Audio of any length to text: chunks that overlap, each transcribed by itself, joined at their borders.

use std::ops::Range;

use qhx_core::engine::{FinishReason, Message, Model, Prompt, Request};
use qhx_core::manifest::Transcription;
use qhx_core::op::{Piece, Segment};
use qhx_core::{CancelToken, Error, ErrorKind, Manifest, Media, Result};
use qhx_media::{Audio, Limits, Source};

use crate::media::{self, Attached};

/// Lengths of chunks are multiples of a second by this.
const STEPS_A_SECOND: usize = 10;
/// What part of a chunk the next one repeats.
const OVERLAP: usize = 10;
/// What part of the context is left for the words.
const ROOM: usize = 4;
/// Words that are said in a second, where a chunk has fewer of them: pauses may lie outside the overlap.
const WORDS_A_SECOND: f64 = 3.0;
/// Words at the end of a chunk, and at the beginning of the next one, that the border may have damaged.
const DAMAGED: usize = 2;

/// How audio is transcribed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TranscribeOptions {
    /// What asks the model for the words; the manifest's `params.transcription` if it is `None`.
    pub instruction: Option<Transcription>,
    /// Maximum number of tokens of a chunk.
    pub max_new: usize,
}

impl Default for TranscribeOptions {
    fn default() -> Self {
        Self { instruction: None, max_new: 256 }
    }
}

impl TranscribeOptions {
    /// What asks the model for the words, instead of the manifest's `params.transcription`.
    #[must_use]
    pub fn with_instruction(mut self, instruction: impl Into<Option<Transcription>>) -> Self {
        self.instruction = instruction.into();
        self
    }

    /// Maximum number of tokens of a chunk.
    #[must_use]
    pub fn with_max_new(mut self, max_new: usize) -> Self {
        self.max_new = max_new;
        self
    }

    /// What asks the model of this manifest for the words.
    ///
    /// # Errors
    /// When neither the options nor the manifest declare it.
    pub fn instruction(&self, manifest: &Manifest) -> Result<Transcription> {
        let declared = self.instruction.as_ref().or(manifest.params.transcription.as_ref());
        declared.cloned().ok_or_else(|| {
            let what =
                "params.transcription is missing, which says what asks the model for the words";
            Error::new(ErrorKind::Usage, format!("{}: {what}", manifest.path.display()))
                .hint("give it: --prompt TEXT, with --chat where the model answers messages")
        })
    }
}

/// What was said in one chunk.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Chunk {
    /// Where it begins, in seconds.
    pub start: f64,
    /// Where it ends, in seconds.
    pub end: f64,
    /// Its words, before they are joined with those of its neighbours.
    pub text: String,
    /// Why its text ended.
    pub finish_reason: FinishReason,
    /// Tokens of its text.
    pub tokens: usize,
}

/// What was said in an audio clip.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Transcript {
    /// All words.
    pub text: String,
    /// Length of the audio in seconds.
    pub seconds: f64,
    /// The chunks, in order.
    pub chunks: Vec<Chunk>,
    /// It was cancelled; the text ends with the last chunk.
    pub cancelled: bool,
}

/// How far a transcription is.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum TranscribeEvent<'a> {
    /// The audio is longer than the model takes at once, and is transcribed in chunks.
    Chunks {
        /// Number of chunks.
        count: usize,
        /// Length of the audio in seconds.
        seconds: f64,
        /// Length of the longest chunk in seconds.
        longest: f64,
        /// Overlap of two chunks in seconds.
        overlap: f64,
    },
    /// A chunk goes to the model.
    Begin,
    /// A token of the chunk's text was chosen.
    Token,
    /// A chunk is transcribed.
    Done(&'a Chunk),
}

/// A model that transcribes audio.
///
/// ```no_run
/// let mut transcriber = qhx::Bundle::open("gemma4/v81")?.transcriber()?;
/// println!("{}", transcriber.transcribe("talk.wav")?.text);
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug)]
pub struct Transcriber {
    model: Model,
    instruction: Transcription,
    max_new: usize,
}

impl Transcriber {
    /// Wraps an open model, which transcribes as its manifest declares.
    ///
    /// # Errors
    /// When the manifest does not declare what asks the model for the words.
    pub fn new(model: Model) -> Result<Self> {
        Self::with_options(model, &TranscribeOptions::default())
    }

    /// As [`Transcriber::new`], with options.
    ///
    /// # Errors
    /// As [`Transcriber::new`].
    pub fn with_options(model: Model, options: &TranscribeOptions) -> Result<Self> {
        let instruction = options.instruction(model.manifest())?;
        Ok(Self { model, instruction, max_new: options.max_new })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, to generate otherwise, say.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Sets the maximum number of tokens of a chunk.
    pub fn set_max_new(&mut self, max_new: usize) {
        self.max_new = max_new;
    }

    /// Decodes and transcribes a file.
    ///
    /// # Errors
    /// As [`Transcriber::transcribe_with`].
    pub fn transcribe(&mut self, file: impl Into<std::path::PathBuf>) -> Result<Transcript> {
        self.transcribe_with(&Source::File(file.into()), &CancelToken::new(), |_| {})
    }

    /// Decodes and transcribes audio, of any length. `on_event` is called as it goes on.
    ///
    /// # Errors
    /// When the audio cannot be decoded, the model does not take the shortest chunk, or the host-op fails. The error
    /// names the source.
    pub fn transcribe_with(
        &mut self,
        source: &Source,
        cancel: &CancelToken,
        on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        let audio =
            qhx_media::decode_audio(source, &self.model.media_rules().audio, &Limits::default())?;
        self.chunks(&source.to_string(), &audio, cancel, on_event).map_err(|e| e.context(source))
    }

    /// What ended a chunk's text that the model did not end, and what to do about it.
    pub fn cut_off(&self, chunk: &Chunk) -> Option<String> {
        let cut = chunk.finish_reason == FinishReason::Length;
        cut.then(|| cut_off(chunk.tokens, self.max_new, self.model.info().max_ctx))
    }

    /// Has the model transcribe one chunk after another.
    fn chunks(
        &mut self,
        name: &str,
        audio: &Audio,
        cancel: &CancelToken,
        mut on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        let longest = self.longest(name, audio)?;
        let chunks = qhx_op::audio::pieces(audio.samples.len(), longest, longest / OVERLAP)
            .map_err(|e| Error::new(ErrorKind::Internal, e.message().to_owned()))?;
        let seconds = |samples| seconds(audio, samples);
        let mut transcript =
            Transcript { seconds: seconds(audio.samples.len()), ..Transcript::default() };
        if chunks.len() > 1 {
            on_event(TranscribeEvent::Chunks {
                count: chunks.len(),
                seconds: transcript.seconds,
                longest: seconds(longest),
                overlap: seconds(longest / OVERLAP),
            });
        }
        let (mut behind, mut rate) = (0, WORDS_A_SECOND);
        for range in chunks {
            let Range { start, end } = range.clone();
            let overlap = seconds(behind.max(start) - start);
            behind = end;
            let [start, end] = [start, end].map(seconds);
            let samples = audio.samples.get(range).unwrap_or_default().to_vec();
            let chunk = [Attached::new(
                name,
                Media::audio(samples, audio.rate).map_err(|e| Error::of(ErrorKind::Prompt, e))?,
            )];
            self.model.reset()?;
            let prompt = prompt(&self.instruction, &chunk)?;
            let request = Request::greedy(prompt, self.max_new).cancelled_by(cancel.clone());
            on_event(TranscribeEvent::Begin);
            let mut run = self.model.start(&request)?;
            while run.next_event()?.is_some() {
                on_event(TranscribeEvent::Token);
            }
            let generation = run.finish()?;
            let text = generation.text.trim();
            let words = text.split_whitespace().count() as f64;
            let rate_here = words / (end - start).max(f64::MIN_POSITIVE);
            // Of both chunks the faster.
            let fastest = rate.max(rate_here);
            rate = rate_here.max(WORDS_A_SECOND);
            join(&mut transcript.text, text, (overlap * fastest).ceil() as usize);
            let finish_reason = generation.finish_reason;
            let tokens = generation.tokens.len();
            let chunk = Chunk { start, end, text: text.to_owned(), finish_reason, tokens };
            on_event(TranscribeEvent::Done(&chunk));
            transcript.chunks.push(chunk);
            transcript.cancelled = finish_reason == FinishReason::Cancelled;
            if transcript.cancelled {
                break;
            }
        }
        Ok(transcript)
    }

    /// The most samples of the audio, from its beginning, that the model takes at once. Errors with its reason when it
    /// does not take the shortest chunk.
    fn longest(&mut self, name: &str, audio: &Audio) -> Result<usize> {
        let model = &mut self.model;
        let all = audio.samples.len();
        let max_ctx = model.info().max_ctx;
        let step = (audio.rate as usize / STEPS_A_SECOND).max(1);
        let positions = |model: &mut Model, samples: usize| -> Result<usize> {
            let samples = audio.samples.get(..samples).unwrap_or(&audio.samples);
            let placement = model.op_mut().place(Segment::Audio { samples, rate: audio.rate })?;
            let positions = placement.pieces.iter().map(|piece| match piece {
                Piece::Part { positions, .. } => *positions,
                _ => 0,
            });
            Ok(positions.fold(0, usize::saturating_add))
        };
        // What the prompt has besides the audio.
        let shortest = step.min(all);
        let samples = audio.samples.get(..shortest).unwrap_or_default().to_vec();
        let chunk = [Attached::new(
            name,
            Media::audio(samples, audio.rate).map_err(|e| Error::of(ErrorKind::Prompt, e))?,
        )];
        let whole = model.encode_prompt(&prompt(&self.instruction, &chunk)?)?.len();
        let request = whole.saturating_sub(positions(model, shortest)?);
        let max = max_ctx.saturating_sub(max_ctx / ROOM).saturating_sub(request);
        let mut takes = |samples: usize| -> Result<()> {
            match positions(model, samples)? {
                positions if positions <= max => Ok(()),
                positions => Err(Error::new(
                    ErrorKind::Prompt,
                    format!(
                        "{:.1} s of audio take {positions} positions, and the context of {max_ctx} has {max} for \
                         audio beside a request of {request}",
                        seconds(audio, samples.min(all))
                    ),
                )
                .hint("forge the model with a larger --max-ctx")),
            }
        };
        // Doubled until the model takes no more, then halved between what it takes and what it does not.
        let (mut taken, mut refused) = (step.min(all), all.div_ceil(step) * step + step);
        takes(taken)?;
        while refused - taken > step {
            let doubled = taken.saturating_mul(2);
            let half = taken + (refused - taken) / 2 / step * step;
            let next = if doubled < half { doubled } else { half.max(taken + step) };
            match takes(next) {
                Ok(()) => taken = next,
                Err(_) => refused = next,
            }
        }
        Ok(taken.min(all))
    }
}

/// What ended an answer that its model did not end, and what to do about it.
fn cut_off(tokens: usize, max_new: usize, max_ctx: usize) -> String {
    if tokens >= max_new {
        return "give more with --max-new".to_owned();
    }
    format!("the context of {max_ctx} is full: forge the model with a larger --max-ctx")
}

fn seconds(audio: &Audio, samples: usize) -> f64 {
    samples as f64 / f64::from(audio.rate.max(1))
}

/// The audio, and behind it what asks for its words.
fn prompt(instruction: &Transcription, chunk: &[Attached]) -> Result<Prompt> {
    let text = instruction.prompt.clone();
    if !instruction.chat {
        return media::completion(text, chunk);
    }
    let message = Message::new("user", media::content(text, chunk)?);
    Ok(Prompt::Chat { messages: vec![message], thinking: None })
}

/// Appends the words of a chunk to those of the chunks before it, without those that both have at the border.
///
/// The border may cut a word in two, which the model then hears otherwise: up to [`DAMAGED`] words on either side of
/// what both have are dropped, too, unless it is a single word. The overlap holds no more than `max` words: what
/// speakers repeat stays.
fn join(whole: &mut String, next: &str, max: usize) {
    let before: Vec<String> = whole.split_whitespace().map(str::to_owned).collect();
    let words: Vec<&str> = next.split_whitespace().collect();
    let (kept, skipped) = border(&before, &words, max);
    let words = before.iter().take(kept).map(String::as_str).chain(words.into_iter().skip(skipped));
    *whole = words.collect::<Vec<_>>().join(" ");
}

/// How many words of `before` stay, and how many of `words` are left out; the overlap holds at most `max`.
fn border(before: &[String], words: &[&str], max: usize) -> (usize, usize) {
    let bare = |word: &str| {
        word.chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect::<String>()
    };
    let first = before.len().saturating_sub(max);
    let ends: Vec<_> = before.iter().skip(first).map(|word| bare(word)).collect();
    let begins: Vec<_> = words.iter().take(max).map(|word| bare(word)).collect();
    // The more words are the same and the fewer are dropped, the better.
    let mut best = (None, before.len(), 0);
    for from in 0..ends.len() {
        for skipped in 0..begins.len().min(DAMAGED + 1) {
            let pairs = ends.iter().skip(from).zip(begins.iter().skip(skipped));
            let same = pairs.take_while(|(a, b)| a == b).count();
            let dropped = ends.len() - from - same + skipped;
            let fits = ends.len() - from - same <= DAMAGED && (dropped == 0 || same > 1);
            let score = same.checked_sub(dropped).filter(|_| fits && same > 0);
            if score > best.0 {
                best = (score, first + from + same, skipped + same);
            }
        }
    }
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(chunks: &[&str]) -> String {
        let mut whole = String::new();
        chunks.iter().for_each(|chunk| join(&mut whole, chunk, 20));
        whole
    }

    #[test]
    fn words_that_two_chunks_have_in_common_are_written_once() {
        let chunks = ["The boat leaves", "leaves at noon.", "At noon, it rains", "", "it pours"];
        assert_eq!(joined(&chunks), "The boat leaves at noon. it rains it pours");
        assert_eq!(joined(&["a rose is a rose", "a rose is red"]), "a rose is a rose is red");
        assert_eq!(joined(&["one two", "three four"]), "one two three four");
    }

    #[test]
    fn no_more_words_are_joined_than_the_overlap_holds() {
        let mut whole = String::new();
        (0..9).for_each(|_| join(&mut whole, "the boat leaves at noon", 2));
        assert_eq!(whole.split_whitespace().count(), 9 * 5);
        let mut whole = "the boat leaves at noon the boat leaves".to_owned();
        join(&mut whole, "boat leaves at noon the boat leaves at noon", 2);
        let expected = "the boat leaves at noon the boat leaves at noon the boat leaves at noon";
        assert_eq!(whole, expected);
    }

    #[test]
    fn a_full_context_is_not_blamed_on_max_new() {
        assert_eq!(cut_off(256, 256, 4096), "give more with --max-new");
        assert!(cut_off(100, 256, 512).starts_with("the context of 512 is full"));
    }

    #[test]
    fn words_that_the_border_cut_are_heard_in_the_other_piece() {
        let chunks = ["we go down to the har", "on to the harbour at night"];
        assert_eq!(joined(&chunks), "we go down to the harbour at night");
        // One word in common among others is chance.
        assert_eq!(joined(&["see the sea", "and the moon"]), "see the sea and the moon");
    }
}
