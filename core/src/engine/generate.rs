//! A generation: from a prompt to the answer, its text and its timings.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::decode::{Listener, Run, Text};
use super::model::{Model, input_vocab};
use super::prompt::{self, Encoded, Reader};
use super::reuse;
use super::sequence::Sequence;
use super::speculate::Start;
use super::types::{Event, FinishReason, Generation, Part, Prompt, Request, Timings};
use crate::op::{HostOp as _, SpanStats, Task};
use crate::sampling::{AllowedTokens, Sampler};
use crate::stop::StopFilter;
use crate::text::{ChatTemplate, Detokenizer, Message, RenderOptions};
use crate::{Error, ErrorKind, Result, trace};

impl Model {
    /// Continues a prompt. `on_event` sees tokens and text as they come and may break off: then the
    /// generation so far comes back with [`FinishReason::Cancelled`], as after a cancellation.
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
        self.require(Task::Generate, "generate")?;
        self.op.require_logits()?;
        request.check(&self.manifest)?;
        self.cancellable(&request.cancel, |model| model.generate_now(request, on_event))
    }

    fn generate_now(
        &mut self,
        request: &Request,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        if self.session.is_cancelled() {
            return Ok(self.nothing());
        }
        self.speculation.idle();
        match self.revive() {
            Err(e) if e.kind() == ErrorKind::Cancelled => return Ok(self.nothing()),
            revived => revived?,
        }
        let trace = self.trace.clone();
        let trace = trace.as_ref();
        let _span = trace::span(trace, "generate");
        let tokenize = trace::span(trace, "tokenize");
        let prompt = match self.encode(&request.prompt, reuse::saves(self.op.info())) {
            // Before a token was consumed: nothing is there, and nothing is lost.
            Err(e) if e.kind() == ErrorKind::Cancelled => return Ok(self.nothing()),
            prompt => prompt?,
        };
        drop(tokenize);
        self.check_length(&prompt)?;
        let stop_ids = self.stop_ids(request);
        let allowed = self.allowed(&stop_ids)?;
        let vocab = self.op.info().vocab;
        let mut sampler =
            Sampler::restricted(request.sampling.clone(), vocab, Arc::clone(&allowed))?
                .softcapped(self.op.info().softcap);
        let tokens = &prompt.sequence.tokens;
        sampler.accept_prompt(tokens);
        let room = self.op.info().max_ctx.saturating_sub(tokens.len());
        let budget = request.max_new.min(room.saturating_add(1));
        self.consumed.reserve(tokens.len() + budget.min(1 << 20));
        let mut ends = stop_ids.clone();
        if !request.ignore_eos {
            ends.extend_from_slice(&self.manifest.params.eos_token_id);
        }
        let text = self.text(request, tokens, ends)?;

        let graph_before = self.op.graph_time();
        let spans_before = self.op.span_stats();
        let mut run = Run {
            stop_ids,
            prompt: &prompt,
            budget,
            sampler,
            allowed: &allowed,
            text,
            listener: Listener { on_event, broke: false },
            tokens: Vec::with_capacity(budget.min(1 << 20)),
            sampling: Duration::ZERO,
            steps: 0,
        };
        let start = Instant::now();
        let mut reused = 0;
        let mut consuming = trace::span(trace, "prompt");
        let prefilled = self.consume(&prompt, &mut reused);
        if let Some(span) = &mut consuming {
            span.argument("positions", prompt.sequence.len());
            span.argument("reused", reused);
        }
        drop(consuming);
        if prefilled.is_ok() {
            let consumed = (prompt.sequence.len() - reused, start.elapsed().as_secs_f64());
            let media = !prompt.sequence.spans.is_empty();
            let (sampling, allowed) = (&request.sampling, &allowed);
            let cancel = &self.session.current();
            let begin = Start { prompt: tokens, most: budget, sampling, allowed, media, cancel };
            self.speculation.begin(request.speculate, &self.op, &begin, consumed);
        }
        let prefill = start.elapsed();
        let decode_start = Instant::now();

        let finished = match prefilled {
            Ok(()) => {
                let tokens = tokens.len();
                if run.listener.emit(Event::Prefilled { tokens, reused }) {
                    Ok(FinishReason::Cancelled)
                } else {
                    self.run(&mut run)
                }
            }
            Err(e) if e.kind() == ErrorKind::Cancelled => Ok(FinishReason::Cancelled),
            Err(e) => Err(e),
        };
        self.consumed.settle(self.op.position());
        let finish_reason = finished?;
        let Run { mut text, mut listener, tokens, sampling, steps, .. } = run;
        if text.stop.stopped_at().is_none() {
            text.finish()?;
            if !text.shown.is_empty() {
                listener.emit(Event::Rest { text: &text.shown });
            }
        }

        let decode = decode_start.elapsed();
        let graph = self.op.graph_time().saturating_sub(graph_before);
        let timings = Timings {
            load: self.load,
            prefill,
            decode,
            graph,
            sampling,
            host: (prefill + decode).saturating_sub(graph + sampling),
            decode_steps: steps,
            guesses: self.speculation.counts(),
        };
        Ok(Generation {
            text: text.whole,
            tokens,
            prompt_tokens: prompt.sequence.len(),
            reused_tokens: reused,
            finish_reason,
            timings,
            spans: ran(&spans_before, self.op.span_stats()),
        })
    }

    /// A generation that was cancelled before it began.
    fn nothing(&self) -> Generation {
        Generation {
            text: String::new(),
            tokens: Vec::new(),
            prompt_tokens: 0,
            reused_tokens: 0,
            finish_reason: FinishReason::Cancelled,
            timings: Timings { load: self.load, ..Timings::default() },
            spans: Vec::new(),
        }
    }

    /// Tokens of a prompt, as [`Model::generate`] would consume them. Where an image, audio clip or video
    /// lies, the token that stands for it stands at each of its positions.
    ///
    /// # Errors
    /// As [`Model::generate`] about the prompt.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        self.encode(prompt, false).map(|encoded| encoded.sequence.tokens)
    }

    /// Embeds a prompt of parts; see [`Model::embed`].
    ///
    /// # Errors
    /// As [`Model::embed`], and as [`Model::generate`] about the prompt.
    pub fn embed_prompt(&mut self, prompt: &Prompt) -> Result<&[f32]> {
        self.require(Task::Embed, "embed")?;
        self.revive()?;
        let tokenize = trace::span(self.trace.as_ref(), "tokenize");
        let encoded = self.encode(prompt, false)?;
        drop(tokenize);
        self.check_length(&encoded)?;
        let positions = encoded.sequence.len();
        self.embed_segments(&encoded.segments(0..positions), ("positions", positions))
    }

    /// Positions of a prompt; with `checkpoint`, also where to save the state.
    fn encode(&self, prompt: &Prompt, checkpoint: bool) -> Result<Encoded> {
        match prompt {
            Prompt::Tokens(tokens) => Ok(Encoded::plain(tokens.clone())),
            Prompt::Text(text) if text.is_empty() => Err(prompt::empty()),
            Prompt::Text(text) => self.reader().parts(&[Part::Text(text.clone())]),
            Prompt::Parts(parts) => self.reader().parts(parts),
            Prompt::Chat { messages, thinking } => {
                let chat = self.require_chat()?;
                let render = |messages: &[Message],
                              arguments: &serde_json::Map<String, serde_json::Value>,
                              media: &[String],
                              add_generation_prompt| {
                    let options = RenderOptions {
                        add_generation_prompt,
                        enable_thinking: *thinking,
                        arguments: arguments.clone(),
                        media: media.to_vec(),
                        cancel: self.session.current(),
                    };
                    chat.render(messages, &options)
                };
                self.reader().chat(messages, &self.template_arguments, render, checkpoint)
            }
        }
    }

    fn require_chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!(
                    "{}: the model does not chat: neither the manifest's chat nor a chat template \
                     beside the tokenizer says how",
                    self.manifest.path.display()
                ),
            )
            .hint("give the text to complete without --chat")
        })
    }

    fn reader(&self) -> Reader<'_> {
        Reader {
            model: &self.manifest.model.name,
            op: &self.op,
            tokenizer: self.require_tokenizer(),
            max_ctx: self.op.info().max_ctx,
            cancel: self.session.current(),
            trace: self.trace.as_ref(),
        }
    }

    fn check_length(&self, prompt: &Encoded) -> Result<()> {
        let max_ctx = self.op.info().max_ctx;
        let Sequence { tokens, spans } = &prompt.sequence;
        if tokens.is_empty() {
            return Err(prompt::empty());
        }
        if tokens.len() > max_ctx {
            let unit = if spans.is_empty() { "tokens" } else { "positions" };
            let end = prompt.at(max_ctx);
            let end = end.map_or(String::new(), |media| format!("; it ends inside {media}"));
            return Err(Error::new(
                ErrorKind::Prompt,
                format!(
                    "the prompt has {} {unit}, the context of {} holds {max_ctx}{end}",
                    tokens.len(),
                    self.manifest.model.name
                ),
            )
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
        let vocab = input_vocab(&self.op, &self.manifest);
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::new(
                ErrorKind::Prompt,
                format!("token {token} is outside the model's vocabulary of {vocab}"),
            ));
        }
        Ok(())
    }

    /// Tokens that end the answer as the caller asks. A stop text that the tokenizer spells as one special token is
    /// that token: it never becomes text.
    fn stop_ids(&self, request: &Request) -> Vec<u32> {
        let special = |text: &String| {
            let tokenizer = self.tokenizer.as_ref()?;
            let id = tokenizer.token_to_id(text)?;
            tokenizer.visible_token(id).is_none().then_some(id)
        };
        request.stop_ids.iter().copied().chain(request.stop.iter().filter_map(special)).collect()
    }

    /// What may be chosen where `stop_ids` end the answer: they are not turned into text, so that
    /// the tokenizer need not know them.
    fn allowed(&self, stop_ids: &[u32]) -> Result<Arc<AllowedTokens>> {
        let count = input_vocab(&self.op, &self.manifest);
        let unknown = |&&id: &&u32| (id as usize) < count && !self.allowed.contains(id);
        if stop_ids.iter().find(unknown).is_some() {
            let allowed = |id| self.allowed.contains(id) || stop_ids.contains(&id);
            return Ok(Arc::new(AllowedTokens::select(count, allowed)));
        }
        if self.allowed.is_empty() {
            return Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: no token can be generated: the tokenizer knows none of the {count} tokens \
                     of the model",
                    self.manifest.path.display()
                ),
            )
            .hint("artifacts.tokenizer is another model's, or a file was damaged"));
        }
        Ok(Arc::clone(&self.allowed))
    }

    fn text(&self, request: &Request, prompt: &[u32], ends: Vec<u32>) -> Result<Text> {
        // A completed text goes on where the prompt ends; an answer is a text of its own, which
        // the template takes back as it is.
        let before = if request.prompt.is_chat() { &[] } else { prompt };
        let stream = self.tokenizer.as_ref().map(|tokenizer| {
            let mut stream = Detokenizer::new(tokenizer);
            stream.start(before).map(|()| stream)
        });
        Ok(Text {
            stream: stream.transpose()?,
            stop: StopFilter::new(request.stop.clone(), ends)?,
            shown: String::new(),
            whole: String::new(),
        })
    }

    /// Brings the op's state to the end of the prompt.
    pub(super) fn consume_once(&mut self, prompt: &Encoded, reused: &mut usize) -> Result<()> {
        let sequence = &prompt.sequence;
        *reused = self.consumed.prepare(&mut self.op, sequence)?;
        let mut done = *reused;
        let last = sequence.len();
        // Cut only where the state is then saved: every part costs an execution of the head.
        let wanted = |&c: &usize| c > done && self.consumed.wants(self.op.info(), sequence, c);
        let stops = prompt.checkpoint.filter(wanted);
        for end in stops.into_iter().chain([last]) {
            let result = self.op.consume(&prompt.segments(done..end), end - done);
            self.consumed.extend(sequence, done..end);
            if let Err(e) = result {
                self.consumed.settle(self.op.position());
                return Err(e);
            }
            if end < last {
                let _span = trace::span(self.trace.as_ref(), "save state");
                self.consumed.checkpoint(&mut self.op)?;
            }
            done = end;
        }
        if let Some(dump) = &self.dump {
            let logits = self.op.logits()?.capped(self.op.info().softcap);
            dump.write("logits", &[logits.len()], &logits)?;
        }
        Ok(())
    }
}

/// What was added to spans, without those that did not run.
fn ran(before: &[SpanStats], after: Vec<SpanStats>) -> Vec<SpanStats> {
    let mut spans = after;
    for span in &mut spans {
        if let Some(earlier) = before.iter().find(|earlier| earlier.name == span.name) {
            span.count -= earlier.count.min(span.count);
            span.busy = span.busy.saturating_sub(earlier.busy);
        }
    }
    spans.retain(|span| span.count > 0);
    spans
}
