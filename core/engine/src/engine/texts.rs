//! Text functions of a model beside its graphs: usable from any thread while a generation runs.

use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use qhx_grammar::{AnswerForm, Vocabulary};
use serde_json::{Map, Value};

use crate::manifest::Manifest;
use crate::op::OpenInfo;
use crate::sampling::AllowedTokens;
use qhx_base::artifacts::Artifacts;
use qhx_base::trace::{self, Trace};
use qhx_base::{CancelToken, Result, error};
use qhx_text::{
    Beginning, CallFormat, ChatTemplate, Infill, Message, ReasoningMarks, RenderOptions, Tokenizer,
    Tool, ToolCall,
};

/// The tokenizer, the chat template and the limits of a model: see [`Model::texts`](super::Model::texts).
#[derive(Debug)]
pub struct TextPipeline {
    name: String,
    place: String,
    tokenizer: Option<Tokenizer>,
    chat: Option<ChatTemplate>,
    max_ctx: usize,
    /// Token ids that the op can consume are below this.
    pub(super) input_vocab: usize,
    /// Tokens that may be chosen at all: those that the op can consume and the tokenizer knows.
    pub(super) allowed: Arc<AllowedTokens>,
    /// Tokens that stand for images, audio and videos, and for no text.
    media: Vec<u32>,
    /// Tokens that end an answer.
    ends: Vec<u32>,
    /// Made when a grammar needs it.
    vocabulary: OnceLock<Result<Vocabulary>>,
}

impl TextPipeline {
    /// Reads the tokenizer that a manifest names, and its chat template.
    pub(super) fn open(
        manifest: &Manifest,
        artifacts: &Artifacts,
        trace: Option<&Arc<Trace>>,
    ) -> Result<Self> {
        let _span = trace::span(trace, "read tokenizer");
        let tokenizer = match &manifest.artifacts.tokenizer {
            Some(_) => Some(Tokenizer::from_file(&manifest.tokenizer_path(artifacts)?)?),
            None => None,
        };
        let chat = manifest.chat_template(artifacts, tokenizer.as_ref())?;
        let (name, place) = (manifest.model.name.clone(), manifest.path.display().to_string());
        let ends = manifest.params.eos_token_id.clone();
        let mut texts = Self { tokenizer, chat, ends, ..Self::without(name, place) };
        let handover = texts.call_format().and_then(CallFormat::handover);
        texts.ends.extend(handover.and_then(|mark| texts.special(mark)));
        Ok(texts)
    }

    /// Takes in the limits that the op of the bundle declares.
    ///
    /// Tokens that may be chosen are those that the tokenizer knows, and those whose meaning is declared without a text:
    /// ends of an answer by the manifest, times by the op's rules. Other rows of the embedding table only pad it to a
    /// round number, and nobody trained their logits.
    pub(super) fn limit(&mut self, info: &OpenInfo, manifest: &Manifest) {
        self.max_ctx = info.max_ctx;
        self.media.clone_from(&info.placeholders);
        // An op of an earlier interface does not say it. The manifest's number is that of the table's
        // rows, which the kit checks.
        let declared = Some(info.input_vocab).filter(|&rows| rows > 0).or(manifest.params.vocab);
        let count = declared.unwrap_or(info.vocab).min(info.vocab);
        self.input_vocab = count;
        self.allowed = Arc::new(match &self.tokenizer {
            None => AllowedTokens::below(count),
            Some(tokenizer) => AllowedTokens::select(count, |id| {
                let is_time = info.logit_rules.times.is_some_and(|times| id >= times.first);
                self.ends.contains(&id) || is_time || tokenizer.id_to_token(id).is_some()
            }),
        });
    }

    /// The same without tokenizer and chat template, which a draft model has no use for.
    pub(super) fn bare(&self) -> Self {
        let (name, place) = (self.name.clone(), self.place.clone());
        let ends = self.ends.clone();
        Self { max_ctx: self.max_ctx, ends, ..Self::without(name, place) }
    }

    fn without(name: String, place: String) -> Self {
        Self {
            name,
            place,
            tokenizer: None,
            chat: None,
            max_ctx: 0,
            input_vocab: 0,
            allowed: Arc::new(AllowedTokens::below(0)),
            media: Vec::new(),
            ends: Vec::new(),
            vocabulary: OnceLock::new(),
        }
    }

    /// The model's name.
    pub fn model_name(&self) -> &str {
        &self.name
    }

    /// Positions that the context holds: tokens, and those of images, audio and videos.
    pub fn max_ctx(&self) -> usize {
        self.max_ctx
    }

    /// The tokenizer, when the bundle has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// True when conversations can be rendered.
    pub fn can_chat(&self) -> bool {
        self.chat.is_some()
    }

    /// The tokens of a text to complete, with those that the tokenizer puts around it.
    ///
    /// # Errors
    /// When the bundle has no tokenizer, or the text cannot be tokenized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.require_tokenizer()?.encode(text, true)
    }

    /// The prompt for the text between two others, of a model that was trained to fill in.
    ///
    /// # Errors
    /// When the bundle has no tokenizer, or errors of [`Infill::new`].
    pub fn infill(&self, before: &str, behind: &str) -> Result<Infill> {
        Infill::new(self.require_tokenizer()?, before, behind).map_err(|e| e.context(&self.name))
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// When the bundle has no tokenizer, or it does not know a token.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.require_tokenizer()?.decode(tokens)
    }

    /// Number of tokens of a conversation of texts, the beginning of its answer included.
    ///
    /// # Errors
    /// Errors of [`TextPipeline::render`] and [`TextPipeline::encode`].
    pub fn count(&self, messages: &[Message], cancel: &CancelToken) -> Result<usize> {
        let options = RenderOptions { cancel: cancel.clone(), ..RenderOptions::default() };
        let text = self.require_chat()?.render(messages, &options)?;
        // The template spells what a tokenizer would put around the text.
        Ok(self.require_tokenizer()?.encode(&text, false)?.len())
    }

    /// A conversation as the chat template renders it, with the beginning of the answer. `thinking`: whether the model
    /// is to think first, where its template knows that. `arguments`: further variables of the template.
    ///
    /// # Errors
    /// When the model does not chat, the template refuses the conversation, or rendering is cancelled.
    pub fn render(
        &self,
        messages: &[Message],
        thinking: Option<bool>,
        arguments: &Map<String, Value>,
        cancel: &CancelToken,
    ) -> Result<String> {
        let options = RenderOptions {
            enable_thinking: thinking,
            arguments: arguments.clone(),
            cancel: cancel.clone(),
            ..RenderOptions::default()
        };
        self.require_chat()?.render(messages, &options)
    }

    /// The tokens as a [`Grammar`](super::Grammar) sees them. The first call makes them, which takes some seconds
    /// for 250,000 tokens: a program that does not want the first request with a grammar to wait calls it before, from
    /// any thread.
    ///
    /// # Errors
    /// When the bundle has no tokenizer, or one whose tokens have no bytes of their own.
    pub fn vocabulary(&self) -> Result<&Vocabulary> {
        let make = || {
            let allowed = |id| self.allowed.contains(id) && !self.media.contains(&id);
            Vocabulary::new(self.require_tokenizer()?, self.allowed.end(), allowed, &self.ends)
        };
        self.vocabulary.get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// The same, made on another thread where it is not there yet: that takes seconds for 250,000 tokens.
    ///
    /// # Errors
    /// Errors of [`TextPipeline::vocabulary`], and when `cancel` is set meanwhile. It is made all the same, for the next call.
    pub(super) fn vocabulary_unless(self: &Arc<Self>, cancel: &CancelToken) -> Result<&Vocabulary> {
        if self.vocabulary.get().is_none() {
            let (made, is_made) = mpsc::sync_channel::<()>(1);
            let texts = Arc::clone(self);
            let make = move || {
                // Whoever asks gets the error.
                let _ = texts.vocabulary();
                drop(made);
            };
            let making = std::thread::Builder::new().name("qhx-vocabulary".to_owned()).spawn(make);
            while making.is_ok() {
                cancel.check()?;
                match is_made.recv_timeout(Duration::from_millis(10)) {
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    _ => break,
                }
            }
        }
        self.vocabulary()
    }

    /// The format in which the chat template has the model call tools; `None` where it knows no tools, or the format is
    /// not known here.
    pub fn call_format(&self) -> Option<CallFormat> {
        self.chat.as_ref()?.call_format()
    }

    /// The calls of tools in an answer's tokens, in order: none where the format is not known.
    ///
    /// # Errors
    /// When the bundle has no tokenizer, or it does not know a token.
    pub fn calls(&self, tokens: &[u32], tools: &[Tool]) -> Result<Vec<ToolCall>> {
        let Some(format) = self.call_format() else { return Ok(Vec::new()) };
        let tokens = match tokens.split_last() {
            Some((last, before)) if self.ends.contains(last) => before,
            _ => tokens,
        };
        Ok(format.calls(&self.require_tokenizer()?.decode_with_special(tokens)?, tools))
    }

    /// The marks around the reasoning of an answer. They are in its text, also where they are special tokens.
    pub fn reasoning(&self) -> ReasoningMarks {
        self.chat.as_ref().and_then(ChatTemplate::reasoning).unwrap_or_default()
    }

    /// Form of an answer with such a beginning.
    pub(super) fn form(&self, beginning: Beginning) -> AnswerForm {
        let reasons = self.chat.as_ref().and_then(ChatTemplate::reasoning).is_some();
        let beginning = if reasons { beginning } else { Beginning::Text };
        AnswerForm {
            calls: self.call_format(),
            reasoning: self.reasoning(),
            beginning,
            one_call: false,
        }
    }

    /// Tokens that end an answer: those of the manifest, and the one that hands over to whoever runs calls.
    pub(super) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The token that is spelled like this, where it is a special one, which is no text of an answer.
    pub fn special(&self, spelling: &str) -> Option<u32> {
        let tokenizer = self.tokenizer.as_ref()?;
        tokenizer.token_to_id(spelling).filter(|&id| tokenizer.visible_token(id).is_none())
    }

    pub(super) fn require_chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            error!(
                Usage,
                "{}: the model does not chat: neither the manifest's chat nor a chat template \
                     beside the tokenizer says how",
                self.place
            )
            .hint("give the text to complete without --chat")
        })
    }

    pub(super) fn require_tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| {
            error!(
                Prompt,
                "{}: the bundle has no tokenizer, so a text cannot become tokens", self.place
            )
            .hint("give token ids as the prompt, or name tokenizer.json in artifacts.tokenizer")
        })
    }
}
