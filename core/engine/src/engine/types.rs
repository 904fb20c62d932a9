//! Input and output of a generation.

use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use qhx_grammar::Grammar;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::manifest::Manifest;
use crate::op::{HandOvers, SpanStats};
use crate::sampling::TokenLogprobs;
use crate::stop::StopFilter;
use qhx_base::{CancelToken, Result, bail, error, setters};
use qhx_text::{Content, ContentPart, Message};
use qhx_types::Media;

/// Prompt to continue.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A text, completed as it is.
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
    /// Texts, tokens, images, audio and videos, completed as they are.
    Parts(Vec<Part>),
    /// A conversation, rendered with the model's chat template; the assistant answers.
    Chat {
        /// The turns so far. Where the last one is the assistant's, the answer goes on with it, and is what is added.
        messages: Vec<Message>,
        /// True if the model should think before it answers, for templates that know that.
        thinking: Option<bool>,
    },
}

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A text. It is tokenized together with its neighbours.
    Text(String),
    /// Token ids, taken as they are. What a tokenizer puts around a text is then theirs to have.
    Tokens(Vec<u32>),
    /// An image, audio clip or video.
    Media(Media),
}

impl From<Content> for Prompt {
    fn from(content: Content) -> Self {
        let part = |part| match part {
            ContentPart::Text(text) => Part::Text(text),
            ContentPart::Media(media) => Part::Media(media),
        };
        match content {
            Content::Text(text) => Self::Text(text),
            Content::Parts(parts) => Self::Parts(parts.into_iter().map(part).collect()),
        }
    }
}

/// One generation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Request {
    /// Prompt to continue.
    pub prompt: Prompt,
    /// Maximum number of tokens to generate.
    pub max_new: usize,
    /// Sampling parameters for the next token.
    pub sampling: crate::sampling::SamplingParams,
    /// Texts that end the answer; none of them appears in it. In the answer to a conversation they act behind the
    /// reasoning, unless one of them holds the mark that ends it. One that is a special token of the tokenizer, such as
    /// `</s>`, ends it as that token.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Do not end at the model's end-of-text tokens.
    pub ignore_eos: bool,
    /// Speculative decoding.
    pub speculate: Speculate,
    /// Text that much of the answer is expected to be, such as a file of which a line changes: draft tokens come from
    /// it, too, where [`Request::speculate`] has any.
    pub prediction: Option<String>,
    /// Grammar of the answer, which ends where nothing more may follow, with [`FinishReason::Eos`].
    pub grammar: Option<Grammar>,
    /// The answer has one call of a tool at most, where its grammar has calls.
    pub one_call: bool,
    /// Log-probabilities of the chosen tokens, and of this number of most likely tokens in the place of each; at most
    /// [`MAX_LOGPROBS`] of them. Where a grammar leaves no choice, the model is asked all the same.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's tokens, and of this number of most likely tokens in the place of each; at most
    /// [`MAX_LOGPROBS`]. The prompt is then consumed from its beginning and in small steps, which takes as long as an
    /// answer of its length where the op verifies no draft tokens. It has to be of tokens alone.
    pub prompt_logprobs: Option<usize>,
    /// Further variables of the chat template, such as `reasoning_effort`: see
    /// [`RenderOptions::arguments`](qhx_text::RenderOptions::arguments).
    pub template_arguments: Map<String, Value>,
    /// Salt of the states that the generation may go on from, in this session and among
    /// [kept states](super::ModelOptions::keep_states): those of requests with the same one. Requests without a salt
    /// share theirs. [`Generation::reused_tokens`] then says nothing about prompts with another salt.
    pub salt: Option<String>,
    /// Stops this generation, also while its prompt is rendered or tokenized; other requests go on. Where it is
    /// cancelled before its turn, nothing runs. A clone of the request shares it.
    pub cancel: CancelToken,
}

/// Maximum of [`Request::logprobs`] and [`Request::prompt_logprobs`].
pub const MAX_LOGPROBS: usize = 128;

/// Maximum number of draft tokens of a verification step.
pub const MAX_DRAFT_TOKENS: usize = 64;

/// Speculative decoding: whether several draft tokens are verified in one step. The answer is that of plain decoding,
/// as far as graphs that take several tokens round as those that take one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Speculate {
    /// [`Speculate::Auto`] where the model has a drafting head of its own, else [`Speculate::Off`].
    #[default]
    Model,
    /// One token a step.
    Off,
    /// Draft tokens only as far as they pay, by step time and acceptance rate: a run gets at most 5 % slower than
    /// without them. A draft model also consumes the prompt, which does not count.
    Auto,
    /// This number of draft tokens wherever there are some, whether that pays or not; fewer where no graph takes as
    /// many.
    Tokens(NonZeroUsize),
}

impl FromStr for Speculate {
    type Err = String;

    /// `off`, `auto`, or a number up to [`MAX_DRAFT_TOKENS`].
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            _ => text
                .parse()
                .ok()
                .filter(|count: &NonZeroUsize| count.get() <= MAX_DRAFT_TOKENS)
                .map(Self::Tokens)
                .ok_or_else(|| {
                    format!("expected auto, off, or a number from 1 to {MAX_DRAFT_TOKENS}")
                }),
        }
    }
}

/// Counts of speculative decoding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// Verification steps.
    pub verifications: usize,
    /// Draft tokens that were verified.
    pub drafted: usize,
    /// Draft tokens that were accepted and became part of the answer.
    pub accepted: usize,
}

impl Request {
    /// A greedy generation of at most `max_new` tokens.
    pub fn greedy(prompt: Prompt, max_new: usize) -> Self {
        Self {
            prompt,
            max_new,
            sampling: crate::sampling::SamplingParams::default(),
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            speculate: Speculate::default(),
            prediction: None,
            grammar: None,
            one_call: false,
            logprobs: None,
            prompt_logprobs: None,
            template_arguments: Map::new(),
            salt: None,
            cancel: CancelToken::new(),
        }
    }

    /// Maximum number of tokens of a request that does not say otherwise.
    pub const MAX_NEW: usize = 1024;

    /// A text to complete, greedily.
    ///
    /// ```
    /// # use qhx_core::engine::Request;
    /// let request = Request::completion("The capital of France is").max_new(32).stop(".");
    /// ```
    pub fn completion(text: impl Into<String>) -> Self {
        Self::greedy(Prompt::Text(text.into()), Self::MAX_NEW)
    }

    /// A conversation to answer, greedily.
    pub fn chat(messages: impl Into<Vec<Message>>) -> Self {
        Self::greedy(Prompt::Chat { messages: messages.into(), thinking: None }, Self::MAX_NEW)
    }

    setters! {
        /// With this maximum number of tokens.
        max_new: usize,
        /// With tokens chosen as these parameters declare.
        sampling: crate::sampling::SamplingParams,
        /// With tokens drawn at this temperature; 0 takes the most likely one.
        temperature(temperature: f32) => sampling.temperature = temperature,
        /// With choices that are the same on every machine.
        seed(seed: u64) => sampling.seed = Some(seed),
        /// Going on behind the model's end-of-text tokens.
        ignore_eos: bool,
        /// With this prompt instead.
        prompt: Prompt,
        /// Stopped by this token, and by no other.
        cancelled_by(cancel: CancelToken) => cancel = cancel,
        /// Going on from states of requests with this salt only: see [`Request::salt`].
        salt(salt: impl Into<Option<String>>) => salt = salt.into(),
        /// With draft tokens; by default those of the model's own drafting head, as far as they pay.
        speculate: Speculate,
        /// With draft tokens from a text that much of the answer is expected to be.
        prediction(text: impl Into<Option<String>>) => prediction = text.into(),
        /// With an answer that is of this grammar.
        ///
        /// ```
        /// # use qhx_core::engine::{Grammar, Request};
        /// let schema = r#"{"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}"#;
        /// let request = Request::completion("Rome was founded in").grammar(Grammar::json_schema(schema)?);
        /// # Ok::<_, qhx_base::Error>(())
        /// ```
        grammar(grammar: impl Into<Option<Grammar>>) => grammar = grammar.into(),
        /// With one call of a tool at most, where the grammar has calls.
        one_call: bool,
        /// With log-probabilities of the chosen tokens, and of the `top` most likely ones in the place of each.
        logprobs(top: impl Into<Option<usize>>) => logprobs = top.into(),
        /// With log-probabilities of the prompt's tokens, and of the `top` most likely ones in the place of each.
        prompt_logprobs(top: impl Into<Option<usize>>) => prompt_logprobs = top.into(),
    }

    /// With a further text that ends the answer.
    #[must_use]
    pub fn stop(mut self, text: impl Into<String>) -> Self {
        self.stop.push(text.into());
        self
    }

    /// With further texts that end the answer.
    #[must_use]
    pub fn stops(mut self, texts: impl IntoIterator<Item = String>) -> Self {
        self.stop.extend(texts);
        self
    }

    /// With further tokens that end the answer.
    #[must_use]
    pub fn stop_ids(mut self, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.stop_ids.extend(tokens);
        self
    }

    /// With further variables of the chat template.
    #[must_use]
    pub fn template_arguments(
        mut self,
        arguments: impl IntoIterator<Item = (String, Value)>,
    ) -> Self {
        self.template_arguments.extend(arguments);
        self
    }

    /// With a further variable of the chat template.
    #[must_use]
    pub fn template_argument(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.template_arguments.insert(name.into(), value.into());
        self
    }

    /// Sets whether the model thinks before it answers a conversation, for templates that know that.
    #[must_use]
    pub fn thinking(mut self, thinks: bool) -> Self {
        if let Prompt::Chat { thinking, .. } = &mut self.prompt {
            *thinking = Some(thinks);
        }
        self
    }

    /// Checks what can be checked before anything is loaded or run: the options of sampling, and
    /// the stop texts, which need a tokenizer. [`super::Model::generate`] does so itself.
    ///
    /// # Errors
    /// When a sampling option is out of range, or a stop text is invalid or has no tokenizer.
    pub fn check(&self, manifest: &Manifest) -> Result<()> {
        self.sampling.validate()?;
        StopFilter::check(&self.stop)?;
        let asked = self.logprobs.max(self.prompt_logprobs);
        if let Some(top) = asked.filter(|&top| top > MAX_LOGPROBS) {
            bail!(Usage, "option logprobs: found {top}, expected at most {MAX_LOGPROBS}");
        }
        match self.stop.first() {
            Some(text) if manifest.artifacts.tokenizer.is_none() => Err(error!(
                Usage,
                "option stop: {text:?} would never be found: {} names no tokenizer, so that \
                     tokens do not become text",
                manifest.path.display()
            )
            .hint("leave the option out, or name tokenizer.json in artifacts.tokenizer")),
            _ => Ok(()),
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its text, or the grammar was at its end.
    Eos,
    /// A stop text or stop token came.
    Stop,
    /// `max_new` tokens were generated, or the context is full.
    Length,
    /// The caller asked to stop.
    Cancelled,
}

impl FinishReason {
    /// The name in messages and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Time spent in each part of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    /// Opening the model: files, contexts, host-op.
    pub load: Duration,
    /// Consuming the prompt.
    pub prefill: Duration,
    /// From the first sampled token to the last, without what the caller does between two events.
    pub decode: Duration,
    /// Inside graphs, during prefill and decode.
    pub graph: Duration,
    /// Choosing tokens.
    pub sampling: Duration,
    /// Everything else during prefill and decode: host-op, text.
    pub host: Duration,
    /// Decode steps executed, those that verified draft tokens included. Several forced tokens that are consumed
    /// together count as one.
    pub decode_steps: usize,
    /// Tokens of the answer that were not chosen, since the grammar left no choice.
    pub forced_tokens: usize,
    /// Counts of draft tokens.
    pub drafts: DraftCounts,
    /// Executions that took more than 5 times the median of their graph's last ones, and 200 ms at least.
    pub slow_executions: u64,
    /// States that went from one backend to the other, whose time is part of `host`: see
    /// [`Model::decode_on`](super::Model::decode_on).
    pub hand_overs: HandOvers,
}

impl Timings {
    /// Tokens per second while decoding; 0 without a decode step.
    pub fn decode_tokens_per_second(&self) -> f64 {
        let seconds = self.decode.as_secs_f64();
        let tokens = self.decode_steps + self.drafts.accepted + self.forced_tokens;
        if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
    }
}

/// A token of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptToken {
    /// The token.
    pub id: u32,
    /// Its log-probabilities behind the tokens before it; `None` for the first one.
    pub logprobs: Option<TokenLogprobs>,
}

/// A finished generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text, without special tokens and stop texts.
    pub text: String,
    /// Every token that was chosen, the ending one included.
    pub tokens: Vec<u32>,
    /// Log-probabilities of the tokens, where [`Request::logprobs`] asks for them.
    pub logprobs: Vec<TokenLogprobs>,
    /// The prompt's tokens with their log-probabilities, where [`Request::prompt_logprobs`] asks for them.
    pub prompt_logprobs: Vec<PromptToken>,
    /// Positions of the prompt: its tokens, and those of images, audio and videos.
    pub prompt_tokens: usize,
    /// Positions of the prompt whose state was there already.
    pub reused_tokens: usize,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Text of [`Request::stop`] that ended it, if one did.
    pub stopped_at: Option<String>,
    /// Time spent in each part.
    pub timings: Timings,
    /// The parts of the host-op that ran, in its own words, such as the way that a prompt took.
    pub spans: Vec<SpanStats>,
}

impl Generation {
    /// A generation that was cancelled before it began, of a model that took `load` to open.
    pub(super) fn cancelled(load: Duration) -> Self {
        Self {
            text: String::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            prompt_tokens: 0,
            reused_tokens: 0,
            finish_reason: FinishReason::Cancelled,
            stopped_at: None,
            timings: Timings { load, ..Timings::default() },
            spans: Vec::new(),
        }
    }
}

/// Something that happened during a generation.
///
/// [`Event::Prefilled`] comes first, then an [`Event::Token`] for every token but the one that ends
/// the answer by its id, and last, if there is any, [`Event::Rest`]. The texts together are
/// [`Generation::text`]. Once the callback breaks off, no further event comes, and what was held back
/// is in [`Generation::text`] only.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The prompt is consumed.
    Prefilled {
        /// Positions of the prompt.
        tokens: usize,
        /// Number of these positions whose state was there already.
        reused: usize,
    },
    /// A token was chosen.
    Token {
        /// The token.
        id: u32,
        /// Text that became complete with it; may be empty.
        text: &'a str,
        /// Its log-probability, where [`Request::logprobs`] asks for it.
        logprobs: Option<&'a TokenLogprobs>,
    },
    /// The answer has ended, and with it what was held back because more could have come: the
    /// beginning of a stop text, or bytes of an incomplete character.
    Rest {
        /// The text, never empty.
        text: &'a str,
    },
}

impl<'a> Event<'a> {
    /// The part of the answer's text that came with the event.
    pub fn text(&self) -> Option<&'a str> {
        match *self {
            Self::Token { text, .. } | Self::Rest { text } => Some(text),
            Self::Prefilled { .. } => None,
        }
    }
}
