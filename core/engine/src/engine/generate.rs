//! A generation: from a prompt to the answer, its text and its timings.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_grammar::Grammar;
use serde_json::{Map, Value};

use super::decode::{GenerationState, LogprobRecorder, Run, Text};
use super::grammar::GrammarCursor;
use super::model::Model;
use super::prefix_reuse;
use super::prompt::{self, Encoded, Reader};
use super::sequence::Sequence;
use super::texts::TextPipeline;
use super::types::{Event, Generation, Part, Prompt, Request, Speculate};
use crate::op::{HostOp as _, Task};
use crate::sampling::{AllowedTokens, Rules, Sampler};
use crate::stop::StopFilter;
use qhx_base::{ErrorKind, Result, TooLong, bail, error, trace};
use qhx_text::{Beginning, Detokenizer, Message, RenderOptions};

impl Model {
    /// Continues a prompt. `on_event` sees tokens and text as they come and may break off: then the
    /// generation so far comes back with [`FinishReason::Cancelled`](super::FinishReason::Cancelled), as after a
    /// cancellation.
    ///
    /// State of earlier calls is used as far as the prompt begins with what they consumed.
    ///
    /// # Errors
    /// When the request is invalid, the prompt does not fit the model, or the host-op fails.
    pub fn generate(
        &mut self,
        request: &Request,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let mut run = self.start(request)?;
        while let Some(event) = run.next_event()? {
            if on_event(event).is_break() {
                run.stop()?;
            }
        }
        run.finish()
    }

    /// Completes a text, greedily and to its end, by at most [`Request::MAX_NEW`] tokens. The run gives the pieces of
    /// what follows.
    ///
    /// # Errors
    /// Errors of [`Model::start`].
    pub fn complete(&mut self, text: impl Into<String>) -> Result<Run<'_>> {
        self.start(&Request::completion(text))
    }

    /// Begins to continue a prompt: it is tokenized and checked, and nothing is executed yet. The [`Run`] goes on as
    /// far as it is asked to.
    ///
    /// # Errors
    /// When the request is invalid, the prompt does not fit the model, or the model cannot be opened again.
    pub fn start(&mut self, request: &Request) -> Result<Run<'_>> {
        self.require_generation(&request.prompt)?;
        self.op.require_logits()?;
        request.check(self.manifest())?;
        let start = Instant::now();
        let cancel = request.cancel.clone();
        let following = self.space.cancel.follow(&cancel);
        let work = match self.prepare(request) {
            // Before a token was consumed: nothing is there, and nothing is lost.
            Err(e) if e.kind() == ErrorKind::Cancelled => None,
            work => work?,
        };
        Ok(Run::new(self, work, cancel, following, start))
    }

    /// Errors unless the op generates, or transcribes and the prompt has audio.
    pub(super) fn require_generation(&self, prompt: &Prompt) -> Result<()> {
        let is_audio = |part: &Part| matches!(part, Part::Media(media) if media.noun() == "audio");
        let heard = matches!(prompt, Prompt::Parts(parts) if parts.iter().any(is_audio));
        if heard && self.op().description.tasks.contains(&Task::Transcribe) {
            return Ok(());
        }
        self.require(Task::Generate, "generate")
    }

    /// From a request to what its generation works with; `None` where it is cancelled already.
    fn prepare(&mut self, request: &Request) -> Result<Option<GenerationState>> {
        if self.space.cancel.is_cancelled() {
            return Ok(None);
        }
        self.speculation.idle();
        let stop_ids = self.stop_ids(request);
        self.revive()?;
        let speculate = self.speculation.resolved(request.speculate, &self.op);
        self.speculation.prepare(speculate, &mut self.op)?;
        let tokenize = trace::span(self.bundle.trace(), "tokenize");
        let mut prompt = self.encode(
            &request.prompt,
            &request.template_arguments,
            prefix_reuse::saves(self.op.info()),
        )?;
        prompt.sequence = prompt.sequence.salted(request.salt.as_deref());
        drop(tokenize);
        let grammar = self.grammar(request, &prompt, &stop_ids)?;
        self.check_length(&prompt)?;
        if request.prompt_logprobs.is_some() && !prompt.sequence.spans.is_empty() {
            bail!(
                Prompt,
                "log-probabilities of a prompt: it has images, audio or videos, expected tokens alone"
            );
        }
        let allowed = self.allowed(&stop_ids)?;
        let vocab = self.op.info().vocab;
        let outside = request.sampling.logit_bias.keys().find(|&&token| token as usize >= vocab);
        if let Some(token) = outside {
            return Err(error!(
                Usage,
                "option logit_bias: found token {token}, which is outside the model's vocabulary of {vocab}"
            )
            .hint("the tokens are those of another model's tokenizer"));
        }
        let mut sampler =
            Sampler::restricted(request.sampling.clone(), vocab, Arc::clone(&allowed))?
                .softcapped(self.op.info().softcap);
        let tokens = &prompt.sequence.tokens;
        sampler.accept_prompt(tokens);
        let room = self.op.info().max_ctx.saturating_sub(tokens.len());
        let budget = request.max_new.min(room.saturating_add(1));
        self.prefix.reserve(tokens.len() + budget.min(1 << 20));
        let mut ends = stop_ids.clone();
        if !request.ignore_eos {
            ends.extend_from_slice(self.bundle.texts.ends());
        }
        let text = self.text(request, &prompt, ends)?;
        let predicted = match request.prediction.as_deref() {
            Some(text) if speculate != Speculate::Off => {
                self.bundle.texts.require_tokenizer()?.encode(text, false)?
            }
            _ => Vec::new(),
        };
        let rules = Rules::new(&self.op.info().logit_rules, &allowed, tokens);
        Ok(Some(GenerationState {
            sampling: request.sampling.clone(),
            speculate,
            predicted,
            stop_ids,
            prompt,
            budget,
            sampler,
            rules,
            allowed,
            grammar,
            unconsumed: 0,
            forced: 0,
            logprobs: request.logprobs.map(LogprobRecorder::new),
            scored: request.prompt_logprobs.map(LogprobRecorder::new),
            text,
            tokens: Vec::with_capacity(budget.min(1 << 20)),
            sampling_time: Duration::ZERO,
            steps: 0,
        }))
    }

    /// Tokens of a prompt, as [`Model::generate`] would consume them. Where an image, audio clip or video
    /// lies, the token that stands for it stands at each of its positions.
    ///
    /// # Errors
    /// Errors of [`Model::generate`] about the prompt.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        self.encode(prompt, &Map::new(), false).map(|encoded| encoded.sequence.tokens)
    }

    /// Tokens of a request's prompt, as [`Model::encode_prompt`], with the template's variables that it has.
    ///
    /// # Errors
    /// The errors of [`Model::encode_prompt`].
    pub fn encode_request(&self, request: &Request) -> Result<Vec<u32>> {
        let encoded = self.encode(&request.prompt, &request.template_arguments, false);
        encoded.map(|encoded| encoded.sequence.tokens)
    }

    /// Embeds a prompt of parts; see [`Model::embed`].
    ///
    /// # Errors
    /// Errors of [`Model::embed`], and those of [`Model::generate`] about the prompt.
    pub fn embed_prompt(&mut self, prompt: &Prompt) -> Result<&[f32]> {
        self.require_vectors()?;
        self.revive()?;
        let encoded = self.encode_whole(prompt)?;
        let positions = encoded.sequence.len();
        self.embed_segments(&encoded.segments(0..positions), ("positions", positions))
    }

    /// Positions of a prompt that the context holds.
    pub(super) fn encode_whole(&self, prompt: &Prompt) -> Result<Encoded> {
        let tokenize = trace::span(self.bundle.trace(), "tokenize");
        let encoded = self.encode(prompt, &Map::new(), false)?;
        drop(tokenize);
        self.check_length(&encoded)?;
        Ok(encoded)
    }

    /// Positions of a prompt; with `checkpoint`, also where to save the state.
    fn encode(
        &self,
        prompt: &Prompt,
        template_arguments: &Map<String, Value>,
        checkpoint: bool,
    ) -> Result<Encoded> {
        match prompt {
            Prompt::Tokens(tokens) => Ok(Encoded::plain(tokens.clone())),
            Prompt::Text(text) if text.is_empty() => Err(prompt::empty()),
            Prompt::Text(text) => self.reader().parts(&[Part::Text(text.clone())]),
            Prompt::Parts(parts) => self.reader().parts(parts),
            Prompt::Chat { messages, thinking } => {
                let chat = self.bundle.texts.require_chat()?;
                let render = |messages: &[Message],
                              arguments: &Map<String, Value>,
                              media: &[String],
                              add_generation_prompt| {
                    let options = RenderOptions {
                        add_generation_prompt,
                        enable_thinking: *thinking,
                        arguments: arguments.clone(),
                        media: media.to_vec(),
                        cancel: self.space.cancel.current(),
                    };
                    chat.render(messages, &options)
                };
                self.reader().chat(messages, template_arguments, render, checkpoint)
            }
        }
    }

    fn reader(&self) -> Reader<'_> {
        Reader {
            model: &self.manifest().model.name,
            op: &self.op,
            tokenizer: self.bundle.texts.require_tokenizer(),
            reasoning: self.bundle.texts.reasoning(),
            max_ctx: self.op.info().max_ctx,
            cancel: self.space.cancel.current(),
            trace: self.bundle.trace(),
        }
    }

    fn check_length(&self, prompt: &Encoded) -> Result<()> {
        let max_ctx = self.op.info().max_ctx;
        let Sequence { tokens, spans, .. } = &prompt.sequence;
        if tokens.is_empty() {
            return Err(prompt::empty());
        }
        if tokens.len() > max_ctx {
            let unit = if spans.is_empty() { "tokens" } else { "positions" };
            let end = prompt.at(max_ctx);
            let end = end.map_or(String::new(), |media| format!("; it ends inside {media}"));
            return Err(error!(
                Prompt,
                "the prompt has {} {unit}, the context of {} holds {max_ctx}{end}",
                tokens.len(),
                self.manifest().model.name
            )
            .with_source(TooLong { max: max_ctx })
            .hint("shorten the prompt, or forge the model with a larger --max-ctx"));
        }
        let placeholders = &self.op.info().placeholders;
        let is_placeholder = |&(at, token): &(usize, &u32)| {
            placeholders.contains(token)
                && !spans.iter().any(|span| (span.start..span.end()).contains(&at))
        };
        if !placeholders.is_empty()
            && let Some((_, &token)) = tokens.iter().enumerate().find(is_placeholder)
        {
            return Err(self.reader().unexpected(token));
        }
        // A host-op that has no vocabulary looks at its tokens itself: a voice's are more than phonemes.
        let vocab = self.bundle.texts.input_vocab;
        let outside = |&&token: &&u32| vocab > 0 && token as usize >= vocab;
        if let Some(token) = tokens.iter().find(outside) {
            bail!(Prompt, "token {token} is outside the model's vocabulary of {vocab}");
        }
        Ok(())
    }

    /// Tokens that end the answer as the caller asks. A stop text that the tokenizer spells as one special token is
    /// that token: it never becomes text.
    fn stop_ids(&self, request: &Request) -> Vec<u32> {
        let special = |text: &String| self.bundle.texts.special(text);
        request.stop_ids.iter().copied().chain(request.stop.iter().filter_map(special)).collect()
    }

    /// Tokens that may be chosen when `stop_ids` end the answer. Stop tokens are not turned into text, so the tokenizer
    /// need not know them.
    fn allowed(&self, stop_ids: &[u32]) -> Result<Arc<AllowedTokens>> {
        let TextPipeline { allowed, input_vocab: count, .. } = &*self.bundle.texts;
        let unknown = |&&id: &&u32| (id as usize) < *count && !allowed.contains(id);
        if stop_ids.iter().find(unknown).is_some() {
            let chosen = |id| allowed.contains(id) || stop_ids.contains(&id);
            return Ok(Arc::new(AllowedTokens::select(*count, chosen)));
        }
        if allowed.is_empty() {
            return Err(error!(
                Artifact,
                "{}: no token can be generated: the tokenizer knows none of the {count} tokens \
                     of the model",
                self.manifest().path.display()
            )
            .hint("artifacts.tokenizer is another model's, or a file was damaged"));
        }
        Ok(Arc::clone(allowed))
    }

    /// The request's grammar at the beginning of an answer.
    fn grammar(
        &self,
        request: &Request,
        prompt: &Encoded,
        stop_ids: &[u32],
    ) -> Result<Option<GrammarCursor>> {
        let Some(grammar) = &request.grammar else { return Ok(None) };
        let _span = trace::span(self.bundle.trace(), "compile grammar");
        let mut form = self.bundle.texts.form(prompt.beginning);
        form.one_call = request.one_call;
        let vocabulary = self.bundle.texts.vocabulary_unless(&self.space.cancel.current())?;
        let constraint = vocabulary.constrain(grammar, form, stop_ids, request.ignore_eos)?;
        Ok(Some(GrammarCursor::new(constraint)))
    }

    fn text(&self, request: &Request, prompt: &Encoded, ends: Vec<u32>) -> Result<Text> {
        // A completed text goes on where the prompt ends, as does a message that is continued; another answer is a
        // text of its own, which the template takes back as it is.
        let is_own =
            matches!(&request.prompt, Prompt::Chat { messages, .. } if !Message::goes_on(messages));
        let before = if is_own { &[] } else { prompt.sequence.tokens.as_slice() };
        let stream = self.bundle.texts.tokenizer().map(|tokenizer| {
            let mut stream = Detokenizer::new(tokenizer);
            stream.start(before).map(|()| stream)
        });
        // An answer with a form from its first token on has no reasoning.
        let free = matches!(request.grammar, None | Some(Grammar::OptionalCalls(_)));
        let beginning = if free { prompt.beginning } else { Beginning::Text };
        let marks = self.bundle.texts.reasoning();
        let special = |mark: &'static str| Some((self.bundle.texts.special(mark)?, mark));
        Ok(Text {
            stream: stream.transpose()?,
            stop: StopFilter::new(request.stop.clone(), ends)?.beginning(beginning, marks),
            marks: [marks.open, marks.close].into_iter().filter_map(special).collect(),
            shown: String::new(),
            whole: String::new(),
        })
    }
}
