//! Audio of any length to text.
//!
//! A model that gives times is led from one window to the next by them (`windows.rs`). One whose tokens have times
//! hears windows that overlap, each of which gives the words of its own part (`context.rs`). For another one the audio
//! is cut into chunks that overlap, each transcribed by itself, and joined at their borders.

mod asked;
mod context;
mod join;
mod limits;
mod live;
mod stream;
mod windows;
mod words;
mod written;

use std::collections::BTreeMap;

use qhx_media::{Audio, AudioReader, Limits, Source, SpeechRules};

use crate::media::Attached;
use join::join;
pub use limits::Limits as TranscribeLimits;
pub use live::Live;
use qhx_base::{CancelToken, Error, ErrorKind, Result, bail, error, setters};
use qhx_core::Manifest;
use qhx_core::engine::{FinishReason, Generation, Model, Request};
use qhx_core::manifest::{AnswerHead, Spelling, Transcription};
use qhx_core::op::{Answer, Piece, Segment};
use qhx_text::Tokenizer;
use qhx_types::Media;
use stream::Following;
pub use stream::Turn;
pub use written::{srt, vtt};

/// Lengths of chunks are multiples of a second by this.
const STEPS_A_SECOND: usize = 10;
/// Divisor of a chunk's length that gives its overlap with the next one.
const OVERLAP: usize = 10;
/// Divisor of the context's length that gives the part left for the words.
const ROOM: usize = 4;
/// Words that are said in a second, where a chunk has fewer of them: pauses may lie outside the overlap.
const WORDS_A_SECOND: f64 = 3.0;

/// Options for transcribing audio.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TranscribeOptions {
    /// Prompt that asks the model for the words; the manifest's `params.transcription` if it is `None`.
    pub instruction: Option<Transcription>,
    /// Maximum number of tokens of a chunk.
    pub max_new: usize,
    /// Code of the language that is spoken, such as `de`; what the model hears in the first window if it is `None`.
    pub language: Option<String>,
    /// Task of a model that has several: `transcribe`, or `translate`, into English unless `into` is set.
    pub task: Option<String>,
    /// Code of the language to translate into, of a model that translates into several.
    pub into: Option<String>,
    /// Punctuation and capitals, of a model that has the choice: it writes them unless this is `Some(false)`.
    pub punctuation: Option<bool>,
    /// Times to give beside the text.
    pub times: Times,
    /// Text that was said before, or words that may come up, such as names. For models that take such a text.
    pub prompt: Option<String>,
    /// Each window goes on from the words before it. What goes wrong once may then go wrong on and on.
    pub condition_on_previous: bool,
    /// When the words of a window are drawn again, or left out.
    pub limits: TranscribeLimits,
    /// Rules by which speech is found: the model is given speech alone, one stretch behind the other, and all of the
    /// audio if it is `None`. Times are those of the whole audio in any case.
    pub vad: Option<SpeechRules>,
    /// The turn that the audio belongs to, which may go on: a model that is given audio piece by piece
    /// ([`Transcriber::streams`]) then goes on where the turn was left, and another one begins with each transcription.
    pub turn: Option<Turn>,
}

impl Default for TranscribeOptions {
    fn default() -> Self {
        Self {
            instruction: None,
            max_new: 256,
            language: None,
            task: None,
            into: None,
            punctuation: None,
            times: Times::default(),
            prompt: None,
            condition_on_previous: false,
            limits: TranscribeLimits::default(),
            vad: None,
            turn: None,
        }
    }
}

/// Which times of the words are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Times {
    /// None: of audio that the model takes at once, no tokens are spent on times.
    None,
    /// Times of segments, the stretches said in one go; times of chunks if the model gives none.
    #[default]
    Segment,
    /// Times of each word, beside those of segments: [`Transcript::words`].
    Word,
}

/// Names of [`Times`] in options.
pub const TIMES: [(&str, Times); 3] =
    [("none", Times::None), ("segment", Times::Segment), ("word", Times::Word)];

impl TranscribeOptions {
    setters! {
        /// Prompt that asks the model for the words, instead of the manifest's `params.transcription`.
        with_instruction(instruction: impl Into<Option<Transcription>>) => instruction = instruction.into(),
        /// Maximum number of tokens of a chunk.
        with_max_new(max_new: usize) => max_new = max_new,
        /// The language that is spoken, by its code.
        with_language(language: impl Into<Option<String>>) => language = language.into(),
        /// Task: `transcribe` or `translate`.
        with_task(task: impl Into<Option<String>>) => task = task.into(),
        /// The language to translate into, by its code.
        with_into(into: impl Into<Option<String>>) => into = into.into(),
        /// Punctuation and capitals, of a model that has the choice.
        with_punctuation(punctuation: impl Into<Option<bool>>) => punctuation = punctuation.into(),
        /// Times to give beside the text.
        with_times(times: Times) => times = times,
        /// Text that was said before.
        with_prompt(prompt: impl Into<Option<String>>) => prompt = prompt.into(),
        /// When the words of a window are drawn again, or left out.
        with_limits(limits: TranscribeLimits) => limits = limits,
        /// Rules by which speech is found, for a model that is given speech alone.
        with_vad(vad: impl Into<Option<SpeechRules>>) => vad = vad.into(),
        /// The turn that the audio belongs to, for a model that is given audio piece by piece.
        with_turn(turn: impl Into<Option<Turn>>) => turn = turn.into(),
    }

    /// Prompt that asks the model of this manifest for the words.
    ///
    /// # Errors
    /// When neither the options nor the manifest declare it.
    pub fn instruction(&self, manifest: &Manifest) -> Result<Transcription> {
        let declared = self.instruction.as_ref().or(manifest.params.transcription.as_ref());
        declared.cloned().ok_or_else(|| {
            let what =
                "params.transcription is missing, which says what asks the model for the words";
            error!(Usage, "{}: {what}", manifest.path.display())
                .hint("give it: --prompt TEXT, with --chat where the model answers messages")
        })
    }
}

/// Transcript of one chunk.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Chunk {
    /// Start in seconds.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
    /// Its words, before they are joined with those of its neighbours.
    pub text: String,
    /// Why its text ended.
    pub finish_reason: FinishReason,
    /// Tokens of its text.
    pub tokens: usize,
    /// These tokens, with those that are times.
    pub ids: Vec<u32>,
    /// Scores of the window that it is a part of, where the model is led by times.
    pub scores: Option<Scores>,
}

/// How sure a model is of a window's words, as Whisper's own program (`transcribe.py` of `openai-whisper`) says for each
/// segment.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Scores {
    /// Start of the window in seconds.
    pub seek: f64,
    /// Temperature at which its words were drawn.
    pub temperature: f32,
    /// Mean log-probability of its tokens, the ending one included.
    pub avg_logprob: f64,
    /// Ratio of its text's bytes to those of the same text deflated. zlib's is up to a fifth larger for texts that
    /// repeat themselves.
    pub compression_ratio: f64,
    /// Probability that nobody speaks; `None` for a model that has no token for it.
    pub no_speech_prob: Option<f64>,
}

/// Transcript of an audio clip.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Transcript {
    /// All words.
    pub text: String,
    /// Length of the audio in seconds.
    pub seconds: f64,
    /// Code of the language that is spoken, where the model has several.
    pub language: Option<String>,
    /// The chunks, in order: segments of a model that gives times.
    pub chunks: Vec<Chunk>,
    /// The words, in order, where [`Times::Word`] are asked for.
    pub words: Vec<Chunk>,
    /// Findings of the host-op besides the words, for each part of the audio that it was given at once.
    pub notes: Vec<Note>,
    /// It was cancelled; the text ends with the last chunk.
    pub cancelled: bool,
    /// The audio is a turn that goes on ([`TranscribeOptions::turn`]), and what comes changes nothing of this.
    pub settled: bool,
}

/// Findings of a host-op in a part of the audio, besides its words.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Note {
    /// Start of the part in seconds.
    pub start: f64,
    /// End of the part in seconds.
    pub end: f64,
    /// Findings by the host-op's own names. Common ones are `language`, a code, and `confidence`, from 0 to 1.
    pub found: Found,
}

/// Findings of a host-op by name.
type Found = serde_json::Map<String, serde_json::Value>;

impl Transcript {
    /// Takes what was found between `start` and `end`; a language counts where none is known.
    fn note(&mut self, [start, end]: [f64; 2], found: Found) {
        if self.language.is_none() {
            self.language = found.get("language").and_then(|code| code.as_str()).map(str::to_owned);
        }
        if !found.is_empty() {
            self.notes.push(Note { start, end, found });
        }
    }
}

/// Progress of a transcription.
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
    /// Text that will not change any more. All of these, one behind the other, are [`Transcript::text`].
    Text(&'a str),
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
    options: TranscribeOptions,
    /// A turn that goes on.
    following: Option<Following>,
}

impl Transcriber {
    /// Wraps an open model, which transcribes as its manifest declares.
    ///
    /// # Errors
    /// When the manifest does not declare what asks the model for the words.
    pub fn new(model: Model) -> Result<Self> {
        Self::with_options(model, &TranscribeOptions::default())
    }

    /// Same as [`Transcriber::new`], with options.
    ///
    /// # Errors
    /// Errors of [`Transcriber::new`].
    pub fn with_options(model: Model, options: &TranscribeOptions) -> Result<Self> {
        let instruction = options.instruction(model.manifest())?;
        let transcriber = Self { model, instruction, options: options.clone(), following: None };
        transcriber.check()?;
        Ok(transcriber)
    }

    /// Sets the options of later transcriptions. The prompt that asks for the words stays the same.
    ///
    /// # Errors
    /// When the model does not know the language or the task, or has no way to what is wanted.
    pub fn set_options(&mut self, options: &TranscribeOptions) -> Result<()> {
        let before = std::mem::replace(&mut self.options, options.clone());
        self.check().inspect_err(|_| self.options = before)
    }

    /// These options without a language and a text before that the model has no way for: where a client sends them
    /// whatever the model is.
    pub fn fitting(&self, options: &TranscribeOptions) -> TranscribeOptions {
        let language = options.language.clone().filter(|_| !self.instruction.languages.is_empty());
        let prompt = options.prompt.clone().filter(|_| self.takes_prompt());
        TranscribeOptions { language, prompt, ..options.clone() }
    }

    /// Checks the options against what the bundle declares.
    fn check(&self) -> Result<()> {
        let Transcription { languages, tasks, times, .. } = &self.instruction;
        let named = |what: &str, name: &Option<String>, known: &BTreeMap<String, Spelling>| {
            let Some(name) = name.as_ref().filter(|name| !known.contains_key(*name)) else {
                return Ok(());
            };
            let path = self.model.manifest().path.display();
            if known.is_empty() {
                return Err(error!(
                    Usage,
                    "{path}: the {what} {name:?} is asked for, and the model has one only"
                )
                .hint(format!("leave --{what} out")));
            }
            let names: Vec<_> = known.keys().map(String::as_str).collect();
            let near = qhx_plugins::nearest(name, names.iter().copied());
            let near = near.map_or_else(String::new, |near| format!("did you mean {near:?}? "));
            Err(error!(Usage, "{path}: the model does not know the {what} {name:?}")
                .hint(format!("{near}It knows {}", names.join(", "))))
        };
        named("language", &self.options.language, languages)?;
        named("task", &self.options.task, tasks)?;
        let TranscribeOptions { into, punctuation, .. } = &self.options;
        if into.is_some() && !asked::has_place(&self.instruction, "{into}") {
            let what = "a language to translate into";
            return Err(self
                .refused(what, "the model does not have the choice")
                .hint("a model with the task translate translates into English"));
        }
        named("into", into, languages)?;
        if punctuation.is_some() && self.instruction.punctuation.is_none() {
            return Err(self.refused("punctuation", "the model does not have the choice"));
        }
        let refused = |what: &str, why: &str| Err(self.refused(what, why));
        if self.options.times == Times::Word {
            self.finds_words()?;
        }
        if self.options.prompt.is_some() && !self.takes_prompt() {
            return refused("a text that was said before", "the model has no place for one");
        }
        if let (Some(times), vocab @ 1..) = (times, self.model.info().vocab)
            && times.first.max(times.none) as usize >= vocab
        {
            let what =
                format!("params.transcription.times: tokens {} and {}", times.first, times.none);
            return refused(&what, &format!("expected tokens below {vocab}, the number of logits"));
        }
        Ok(())
    }

    /// True where the model takes a text that was said before.
    fn takes_prompt(&self) -> bool {
        self.instruction.previous.is_some() || asked::has_place(&self.instruction, "{prompt}")
    }

    /// True for a model that is given audio piece by piece, and has words of it as soon as it is sure of them.
    pub fn streams(&self) -> bool {
        self.model.info().streams
    }

    fn refused(&self, what: &str, why: &str) -> Error {
        let path = self.model.manifest().path.display();
        error!(Usage, "{path}: {what}: {why}")
    }

    /// Errors unless the model finds when each word is spoken, which [`Times::Word`] needs.
    ///
    /// # Errors
    /// When it does not, with the reason.
    pub fn finds_words(&self) -> Result<()> {
        if self.model.answers() || self.model.info().aligns {
            return Ok(());
        }
        let what = "times of words";
        Err(match self.instruction.times {
            Some(_) => self
                .refused(what, "the graphs give no weights of attention to find words by (align_*)")
                .hint(
                    "forge the checkpoint again where its generation_config.json has alignment_heads, as published \
                     ones have; times of segments are there in any case",
                ),
            None => self.refused(what, "the model gives no times"),
        })
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
        self.options.max_new = max_new;
    }

    /// Decodes and transcribes a file.
    ///
    /// # Errors
    /// Errors of [`Transcriber::transcribe_with`].
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
        let rules = self.model.media_rules().audio;
        let live = if self.options.turn.is_some() {
            // A turn goes on where it was left, among all of its samples.
            Live::whole(qhx_media::decode_audio(source, &rules, &Limits::default())?)
        } else {
            Live::file(AudioReader::open(source, &rules, &limits(source))?, rules.rate)?
        };
        self.transcribe_any(&source.to_string(), live, cancel, on_event)
            .map_err(|e| e.context(source))
    }

    /// Same as [`Transcriber::transcribe_with`], for audio that is still being recorded. The model is asked for each
    /// window or chunk as soon as its samples are there.
    ///
    /// # Errors
    /// Errors of [`Transcriber::transcribe_with`], and when `live` fails.
    pub fn transcribe_live(
        &mut self,
        name: &str,
        live: Live<'_>,
        cancel: &CancelToken,
        on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        self.transcribe_any(name, live, cancel, on_event).map_err(|e| e.context(name))
    }

    /// Writes down audio at the model's rate, at most `max_new` tokens for what it takes at once, in the first of its
    /// languages, whatever the words are worth.
    pub fn transcribe_whatever(&mut self, audio: Audio, max_new: usize) -> Result<Transcript> {
        let first = || self.instruction.languages.keys().next().cloned();
        let language = self.instruction.language.clone().or_else(first);
        let options = TranscribeOptions::default().with_language(language).with_max_new(max_new);
        let options = options.with_limits(TranscribeLimits::none());
        let before = std::mem::replace(&mut self.options, options);
        let found = self.transcribe_any("noise", Live::whole(audio), &CancelToken::new(), |_| {});
        self.options = before;
        found
    }

    /// Transcribes audio at the model's rate, in the way that the model needs.
    fn transcribe_any(
        &mut self,
        name: &str,
        mut live: Live<'_>,
        cancel: &CancelToken,
        on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        if self.streams() {
            if let Some(rules) = self.options.vad.filter(|_| self.options.turn.is_none()) {
                live = live.speech_alone(rules)?;
            }
            return self.streamed(live, cancel, on_event);
        }
        if let Some(rules) = self.options.vad {
            live = live.speech_alone(rules)?;
        }
        match (self.instruction.times, self.instruction.context) {
            (Some(_), _) if !self.model.answers() => self.windows(live, cancel, on_event),
            (_, Some(context)) if self.model.answers() => {
                self.in_context(live, context, cancel, on_event)
            }
            _ => self.chunks(name, live, cancel, on_event),
        }
    }

    /// Reason and hint for a chunk whose text was cut off; `None` if the model ended it.
    pub fn cut_off(&self, chunk: &Chunk) -> Option<String> {
        let cut = chunk.finish_reason == FinishReason::Length;
        let most = self.most_tokens(chunk.end - chunk.start);
        cut.then(|| match most < self.options.max_new && chunk.tokens >= most {
            true => {
                "params.transcription.tokens_per_second of the manifest allows no more".to_owned()
            }
            false => cut_off(chunk.tokens, self.options.max_new, self.model.info().max_ctx),
        })
    }

    /// Has the model transcribe one chunk after another.
    fn chunks(
        &mut self,
        name: &str,
        mut live: Live<'_>,
        cancel: &CancelToken,
        mut on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        let mut transcript = Transcript::default();
        while live.len() == 0 && !cancel.is_cancelled() && live.read()? {}
        transcript.seconds = live.seconds();
        if live.len() == 0 {
            if live.seconds() == 0.0 {
                bail!(Prompt, "holds no audio (0 samples)");
            }
            transcript.cancelled = cancel.is_cancelled();
            return Ok(transcript);
        }
        let longest = self.longest(name, &mut live)?;
        let step = longest - longest / OVERLAP;
        let rate = live.rate;
        let seconds = |samples| seconds(samples, rate);
        let (mut fastest_before, mut settled) = (WORDS_A_SECOND, Settled::default());
        let mut start = 0;
        loop {
            // One sample more says whether this chunk is the last.
            while live.len() <= start + longest && !cancel.is_cancelled() && live.read()? {}
            transcript.seconds = live.seconds();
            let last = live.len() <= start + longest;
            let range = start..live.len().min(start + longest);
            if start == 0 && !last {
                on_event(TranscribeEvent::Chunks {
                    count: (live.expected() - longest).div_ceil(step) + 1,
                    seconds: seconds(live.expected()),
                    longest: seconds(longest),
                    overlap: seconds(longest / OVERLAP),
                });
            }
            let overlap = if start == 0 { 0.0 } else { seconds(longest - step) };
            let (from, long) = (seconds(start), seconds(range.len()));
            let (begins, ends) = (live.begins(from), live.ends(seconds(range.end)));
            let clip = media(live.part(range), rate)?;
            on_event(TranscribeEvent::Begin);
            let Said { text, ids, finish_reason, times, language, found } =
                match self.model.answers() {
                    true => self.answered(&clip, cancel)?,
                    false => self.generated(name, (clip, ends - begins), cancel, &mut on_event)?,
                };
            let text = text.trim();
            let words = text.split_whitespace().count() as f64;
            let rate_here = words / long.max(f64::MIN_POSITIVE);
            // Of both chunks the faster.
            let fastest = fastest_before.max(rate_here);
            fastest_before = rate_here.max(WORDS_A_SECOND);
            join(&mut transcript.text, text, (overlap * fastest).ceil() as usize);
            transcript.language = transcript.language.take().or(language);
            transcript.note([begins, ends], found);
            let (text, tokens) = (text.to_owned(), ids.len());
            let (start_at, end) = (begins, ends);
            let whole =
                Chunk { start: start_at, end, text, finish_reason, tokens, ids, scores: None };
            let at = |[begin, end]: [f32; 2]| {
                let [begin, end] = [begin, end].map(|time| from + f64::from(time));
                [live.begins(begin), live.ends(end)]
            };
            let times: Vec<_> = times.into_iter().map(at).collect();
            transcript.words.extend(self.timed(&whole, &times)?);
            on_event(TranscribeEvent::Done(&whole));
            transcript.chunks.push(whole);
            settled.until(&transcript.text, join::settled(&transcript.text), &mut on_event);
            transcript.cancelled = finish_reason == FinishReason::Cancelled;
            if transcript.cancelled || last {
                break;
            }
            start += step;
            live.forget(start);
        }
        settled.until(&transcript.text, transcript.text.len(), &mut on_event);
        Ok(transcript)
    }

    /// The most tokens of a clip, by its seconds.
    fn most_tokens(&self, seconds: f64) -> usize {
        let max_new = self.options.max_new;
        // The token of the clip counts among them.
        let most =
            |rate: f64| ((seconds * rate) as usize).saturating_sub(1).clamp(1, max_new.max(1));
        self.instruction.tokens_per_second.map_or(max_new, most)
    }

    /// Answer of a model that generates the words of a clip, of a length in seconds, token by token.
    fn generated(
        &mut self,
        name: &str,
        (clip, seconds): (Media, f64),
        cancel: &CancelToken,
        on_event: &mut impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Said> {
        self.model.reset()?;
        let max_new = self.most_tokens(seconds);
        let prompt = asked::prompt(&self.instruction, &self.options, Attached::new(name, clip))?;
        let request = Request::greedy(prompt, max_new).cancelled_by(cancel.clone());
        let mut run = self.model.start(&request)?;
        while run.next_event()?.is_some() {
            on_event(TranscribeEvent::Token);
        }
        let Generation { text, tokens: ids, finish_reason, .. } = run.finish()?;
        let found = self.found(finish_reason)?;
        let spoken = asked::language(&self.instruction, &self.options).map(str::to_owned);
        let said = Said { text, ids, finish_reason, times: Vec::new(), language: spoken, found };
        self.without_head(said)
    }

    /// The same without what an answer begins with, and with the language that this says.
    fn without_head(&self, said: Said) -> Result<Said> {
        let Some(AnswerHead { before, token, .. }) = &self.instruction.answer else {
            return Ok(said);
        };
        let Some(at) = said.ids.iter().position(|id| id == token) else { return Ok(said) };
        let (head, words) = said.ids.split_at(at);
        let words = words.get(1..).unwrap_or_default().to_vec();
        let head = self.decoded(head)?;
        let name = head.trim().strip_prefix(before.trim()).map(str::trim);
        let mut known = self.instruction.languages.iter();
        let code = known.find(|(_, spelling)| Some(spelling.text()) == name);
        let language = said.language.or_else(|| code.map(|(code, _)| code.clone()));
        Ok(Said { text: self.decoded(&words)?, ids: words, language, ..said })
    }

    /// Findings of a model that generates, in the audio that it has just heard.
    fn found(&mut self, finish_reason: FinishReason) -> Result<Found> {
        match finish_reason {
            FinishReason::Cancelled => Ok(Found::new()),
            _ => self.model.op_note(),
        }
    }

    /// Answer of a model whose host-op transcribes by itself.
    fn answered(&mut self, clip: &Media, cancel: &CancelToken) -> Result<Said> {
        let answer = match self.model.answer(clip, cancel) {
            Err(e) if e.kind() == ErrorKind::Cancelled => None,
            answer => Some(answer?),
        };
        let finish_reason =
            if answer.is_some() { FinishReason::Eos } else { FinishReason::Cancelled };
        let Answer { tokens: ids, times, language, note: found } = answer.unwrap_or_default();
        let text = self.decoded(&ids)?;
        Ok(Said { text, ids, finish_reason, times, language, found })
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        let missing = || {
            let what = "artifacts.tokenizer is missing, without which tokens are no text";
            error!(Artifact, "{}: {what}", self.model.manifest().path.display())
        };
        self.model.tokenizer().ok_or_else(missing)
    }

    /// The text of tokens.
    fn decoded(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer()?.decode(ids)
    }

    /// The most samples that a model takes at once that answers by itself.
    fn answer_window(&self, rate: u32) -> Result<usize> {
        let window = self.instruction.window.ok_or_else(|| {
            let what = "params.transcription.window is missing, the seconds of audio that the model takes at once";
            let path = self.model.manifest().path.display();
            error!(Artifact, "{path}: {what}")
        })?;
        Ok(((window * f64::from(rate)) as usize).max(1))
    }

    /// The most samples of the audio, from its beginning, that the model takes at once; of audio that is shorter all of
    /// it, or more. Reads at most twice as many. Errors with its reason when it does not take the shortest chunk.
    fn longest(&mut self, name: &str, live: &mut Live<'_>) -> Result<usize> {
        let rate = live.rate;
        if self.model.answers() {
            return self.answer_window(rate);
        }
        let model = &mut self.model;
        let max_ctx = model.info().max_ctx;
        let step = (rate as usize / STEPS_A_SECOND).max(1);
        let positions = |model: &mut Model, live: &Live<'_>, samples: usize| -> Result<usize> {
            let samples = live.part(0..samples);
            let placement = model.op_mut().place(Segment::Audio { samples, rate })?;
            let positions = placement.pieces.iter().map(|piece| match piece {
                Piece::Part { positions, .. } => *positions,
                _ => 0,
            });
            Ok(positions.fold(0, usize::saturating_add))
        };
        while live.len() < step && live.read()? {}
        // What the prompt has besides the audio.
        let shortest = step.min(live.len());
        let chunk = Attached::new(name, media(live.part(0..shortest), rate)?);
        let whole =
            model.encode_prompt(&asked::prompt(&self.instruction, &self.options, chunk)?)?.len();
        let request = whole.saturating_sub(positions(model, live, shortest)?);
        let max = max_ctx.saturating_sub(max_ctx / ROOM).saturating_sub(request);
        let mut takes = |live: &Live<'_>, samples: usize| -> Result<()> {
            match positions(model, live, samples)? {
                positions if positions <= max => Ok(()),
                positions => Err(error!(
                    Prompt,
                    "{:.1} s of audio take {positions} positions, and the context of {max_ctx} has {max} for audio \
                     beside a request of {request}",
                    seconds(samples.min(live.len()), rate)
                )
                .hint("forge the model with a larger --max-ctx")),
            }
        };
        let mut all = shortest;
        while takes(live, all).is_ok() {
            let wanted = all.saturating_mul(2);
            while live.len() < wanted && live.read()? {}
            if live.len() < wanted {
                all = live.len();
                break;
            }
            all = wanted;
        }
        most(step, all, &mut |samples| takes(live, samples))
    }
}

/// The most of `all` samples, in whole steps, that `takes` takes: doubled until it takes no more, then halved between
/// what it takes and what it does not.
fn most(step: usize, all: usize, takes: &mut dyn FnMut(usize) -> Result<()>) -> Result<usize> {
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

/// The bytes of a transcript's text that were given out.
#[derive(Debug, Default)]
struct Settled(usize);

impl Settled {
    /// Gives out the text up to byte `end`.
    fn until(&mut self, text: &str, end: usize, on_event: &mut impl FnMut(TranscribeEvent<'_>)) {
        if let Some(new) = text.get(self.0..end).filter(|new| !new.is_empty()) {
            on_event(TranscribeEvent::Text(new));
            self.0 = end;
        }
    }
}

/// Words and findings of a chunk.
struct Said {
    text: String,
    ids: Vec<u32>,
    finish_reason: FinishReason,
    /// Times of each token, if they are known.
    times: Vec<[f32; 2]>,
    language: Option<String>,
    /// Findings of the op besides the words.
    found: Found,
}

/// Samples as a part of a prompt.
fn media(samples: impl Into<Vec<f32>>, rate: u32) -> Result<Media> {
    Media::audio(samples.into(), rate).map_err(|e| Error::of(ErrorKind::Prompt, e))
}

/// Reason and hint for an answer that was cut off.
fn cut_off(tokens: usize, max_new: usize, max_ctx: usize) -> String {
    if tokens >= max_new {
        return "give more with --max-new".to_owned();
    }
    format!("the context of {max_ctx} is full: forge the model with a larger --max-ctx")
}

fn seconds(samples: usize, rate: u32) -> f64 {
    samples as f64 / f64::from(rate.max(1))
}

/// Limits of audio whose samples are not kept: a file may last a day, and be as large as a WAV file can be.
fn limits(source: &Source) -> Limits {
    let mut limits = Limits::default();
    if let Source::File(_) = source {
        (limits.seconds, limits.bytes) = (24 * 3600, 4 << 30);
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_context_is_not_blamed_on_max_new() {
        assert_eq!(cut_off(256, 256, 4096), "give more with --max-new");
        assert!(cut_off(100, 256, 512).starts_with("the context of 512 is full"));
    }
}
