//! A generation under way: choose, check what ends it, step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::checked::subtract_spans;
use super::grammar::GrammarCursor;
use super::model::Model;
use super::prompt::Encoded;
use super::speculate::{Start, StepTime};
use super::types::{Event, FinishReason, Generation, PromptToken, Speculate, Timings};
use crate::op::{HandOvers, HostOp as _, Logits, OpenInfo, SpanStats};
use crate::sampling::{AllowedTokens, Logprobs, Rules, Sampler, SamplingParams, TokenLogprobs};
use crate::stop::StopFilter;
use qhx_base::LinkedToken;
use qhx_base::trace::{Category, Event as Traced};
use qhx_base::{CancelToken, Error, ErrorKind, Result, bail, trace};
use qhx_text::{Beginning, Detokenizer};

/// Text that becomes complete token by token, when the bundle has a tokenizer.
pub(super) struct Text {
    pub stream: Option<Detokenizer>,
    pub stop: StopFilter,
    /// Special tokens that open and close reasoning, which are spelled out.
    pub marks: Vec<(u32, &'static str)>,
    /// Text that the last token completed and that may be shown.
    pub shown: String,
    /// All that was shown.
    pub whole: String,
}

impl Text {
    /// Takes in a token. True when a stop text came.
    fn push(&mut self, token: u32) -> Result<bool> {
        self.shown.clear();
        let Some(stream) = &mut self.stream else { return Ok(false) };
        let mark = self.marks.iter().find(|(id, _)| *id == token).map(|(_, mark)| *mark);
        let text = stream.push(token)?;
        let stopped = self.stop.push(mark.unwrap_or(text), &mut self.shown);
        self.whole.push_str(&self.shown);
        Ok(stopped)
    }

    /// Shows what was held back because more could have come.
    ///
    /// # Errors
    /// When the detokenizer fails.
    pub fn finish(&mut self) -> Result<()> {
        self.shown.clear();
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if !self.stop.push(stream.finish()?, &mut self.shown) {
            self.stop.finish(&mut self.shown);
        }
        self.whole.push_str(&self.shown);
        Ok(())
    }
}

/// State of a generation once its prompt is tokenized.
pub(super) struct GenerationState {
    pub sampling: SamplingParams,
    pub speculate: Speculate,
    /// Tokens of which many are expected to be those of the answer.
    pub predicted: Vec<u32>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_ids: Vec<u32>,
    pub prompt: Encoded,
    /// Maximum number of tokens.
    pub budget: usize,
    pub sampler: Sampler,
    /// Tokens that the sampler chooses among.
    pub allowed: Arc<AllowedTokens>,
    /// Rules of the op that further limit those tokens.
    pub rules: Option<Rules>,
    /// Grammar that further limits those tokens.
    pub grammar: Option<GrammarCursor>,
    /// Tokens at the end of the answer that the op has not consumed: the one that was chosen last, and forced ones
    /// behind it.
    pub unconsumed: usize,
    /// Tokens that the grammar left no choice about.
    pub forced: usize,
    /// Log-probabilities that were asked for.
    pub logprobs: Option<LogprobRecorder>,
    /// Log-probabilities of the prompt's tokens, if they were asked for.
    pub scored: Option<LogprobRecorder>,
    /// Draft tokens that are checked.
    pub text: Text,
    /// Tokens that were chosen.
    pub tokens: Vec<u32>,
    pub sampling_time: Duration,
    /// Steps, also those that verified draft tokens.
    pub steps: usize,
}

/// Log-probabilities that were asked for.
pub(super) struct LogprobRecorder {
    /// Most likely tokens in the place of each.
    top: usize,
    compute: Logprobs,
    /// Log-probabilities of the tokens so far.
    pub found: Vec<TokenLogprobs>,
}

impl LogprobRecorder {
    /// With `top` most likely tokens in the place of each.
    pub fn new(top: usize) -> Self {
        Self { top, compute: Logprobs::default(), found: Vec::new() }
    }

    /// Notes the log-probability of a token, which is one of `among`.
    pub fn note(
        &mut self,
        logits: Logits<'_>,
        cap: Option<f32>,
        token: u32,
        among: &AllowedTokens,
    ) {
        self.found.push(self.compute.of(logits, cap, token, self.top, among));
    }

    /// Tokens of a prompt with what was found, which is nothing for the first.
    fn tokens(self, prompt: &Encoded) -> Vec<PromptToken> {
        let logprobs = std::iter::once(None).chain(self.found.into_iter().map(Some));
        let tokens = prompt.sequence.tokens.iter().zip(logprobs);
        tokens.map(|(&id, logprobs)| PromptToken { id, logprobs }).collect()
    }
}

impl GenerationState {
    /// The token chosen last. There is one after the first choice.
    fn last(&self) -> u32 {
        self.tokens.last().copied().unwrap_or_default()
    }

    /// The token that comes next whatever the logits are, if the grammar leaves no choice and nobody asks for them.
    fn forced(&self) -> Option<u32> {
        self.grammar.as_ref().filter(|_| self.logprobs.is_none())?.forced()
    }
}

/// Phase of a generation.
#[derive(Debug, Clone, Copy)]
enum Phase {
    /// The prompt is to be consumed.
    Prompt,
    /// The first token is to be chosen.
    First,
    /// The token chosen last is to be consumed.
    Step,
    /// Draft tokens were verified, and tokens are chosen from their rows.
    Verified(Verified),
    /// No further token is chosen; the text that was held back is still to come.
    Ended(FinishReason),
    /// All is there.
    Done(FinishReason),
    /// It failed, and the error was returned.
    Failed,
}

/// A step that verified draft tokens.
#[derive(Debug, Clone, Copy)]
struct Verified {
    /// Tokens of the answer before it.
    before: usize,
    /// The row that the next token is chosen from.
    row: usize,
    /// No further row is asked for.
    closed: bool,
    /// Why the answer ends with the token chosen last.
    ended: Option<FinishReason>,
    time: StepTime,
}

/// Result of choosing a token.
struct Chosen {
    /// The token is part of the answer's text, or at least an event.
    shown: bool,
    ended: Option<FinishReason>,
}

/// Event, before it borrows the text.
enum Happened {
    Prefilled,
    Token,
    Rest,
}

/// A generation under way, which goes on as far as it is asked to: see [`Model::start`].
///
/// Its iterator yields the pieces of the answer's text, none of them empty. [`Run::next_event`] returns every event and
/// copies no text. [`Run::finish`] returns the whole. Between two calls nothing is executed.
///
/// A run that is dropped ends where it is. The model keeps what was consumed for the next request.
pub struct Run<'m> {
    model: &'m mut Model,
    /// `None` where it was cancelled before the prompt was tokenized.
    work: Option<Box<GenerationState>>,
    phase: Phase,
    start: Instant,
    prefill: Duration,
    decode: Duration,
    reused: usize,
    graph_before: Duration,
    slow_before: u64,
    hand_overs_before: HandOvers,
    spans_before: Vec<SpanStats>,
    cancel: CancelToken,
    _following: LinkedToken,
}

impl std::fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("model", &self.model)
            .field("phase", &self.phase)
            .field("tokens", &self.work.as_ref().map(|work| &work.tokens))
            .finish_non_exhaustive()
    }
}

impl<'m> Run<'m> {
    /// A generation whose prompt is tokenized, or that was cancelled before.
    pub(super) fn new(
        model: &'m mut Model,
        work: Option<GenerationState>,
        cancel: CancelToken,
        following: LinkedToken,
        start: Instant,
    ) -> Self {
        let phase = match work {
            Some(_) => Phase::Prompt,
            None => Phase::Done(FinishReason::Cancelled),
        };
        Self {
            graph_before: model.op.graph_time(),
            slow_before: model.op.slow_executions(),
            hand_overs_before: model.op.hand_overs(),
            spans_before: model.op.span_stats(),
            model,
            work: work.map(Box::new),
            phase,
            start,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            reused: 0,
            cancel,
            _following: following,
        }
    }

    /// Beginning of the answer, as far as the prompt decides it: text, unless the prompt is a conversation.
    pub fn beginning(&self) -> Beginning {
        self.work.as_ref().map_or(Beginning::Text, |work| work.prompt.beginning)
    }

    /// Stops this generation from any thread, within one graph execution; the model's other work goes on.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    /// Goes on to the next event. `None` once the generation has ended.
    ///
    /// # Errors
    /// When the host-op fails, or the logits are not finite. The run is over then; the model can be asked again.
    pub fn next_event(&mut self) -> Result<Option<Event<'_>>> {
        let Some(work) = self.work.as_deref_mut() else { return Ok(None) };
        let start = Instant::now();
        let in_prompt = matches!(self.phase, Phase::Prompt);
        let happened = self.model.advance(work, &mut self.phase, &mut self.reused);
        *(if in_prompt { &mut self.prefill } else { &mut self.decode }) += start.elapsed();
        let happened = happened.inspect_err(|_| {
            self.phase = Phase::Failed;
            self.model.settle();
        })?;
        let Some(happened) = happened else { return Ok(None) };
        let GenerationState { prompt, text, tokens, logprobs, .. } = work;
        Ok(Some(match happened {
            Happened::Prefilled => {
                Event::Prefilled { tokens: prompt.sequence.len(), reused: self.reused }
            }
            Happened::Token => Event::Token {
                id: tokens.last().copied().unwrap_or_default(),
                text: &text.shown,
                logprobs: logprobs.as_ref().and_then(|asked| asked.found.last()),
            },
            Happened::Rest => Event::Rest { text: &text.shown },
        }))
    }

    /// Ends the generation here, with [`FinishReason::Cancelled`]: no further event comes. Text that was held back is
    /// in [`Generation::text`] only.
    ///
    /// # Errors
    /// When the host-op fails to accept what was chosen.
    pub fn stop(&mut self) -> Result<()> {
        let Some(work) = self.work.as_deref_mut() else { return Ok(()) };
        if let Phase::Verified(verified) = self.phase {
            let start = Instant::now();
            let closed = self.model.close(work, verified, Ok(()));
            self.decode += start.elapsed();
            closed.inspect_err(|_| {
                self.phase = Phase::Failed;
                self.model.settle();
            })?;
        }
        if !matches!(self.phase, Phase::Done(_) | Phase::Failed) {
            self.model.end(work)?;
            self.phase = Phase::Done(FinishReason::Cancelled);
        }
        Ok(())
    }

    /// The whole generation. Goes on to its end first, where it has not ended.
    ///
    /// # Errors
    /// Errors of [`Run::next_event`], including one of an earlier call.
    pub fn finish(mut self) -> Result<Generation> {
        while self.next_event()?.is_some() {}
        let finish_reason = match self.phase {
            Phase::Done(reason) => reason,
            _ => bail!(Usage, "the generation failed, as was reported"),
        };
        let Some(work) = self.work.take() else {
            return Ok(Generation::cancelled(self.model.load));
        };
        let GenerationState { prompt, text, tokens, steps, forced, logprobs, scored, .. } = *work;
        let sampling = work.sampling_time;
        let graph = self.model.op.graph_time().saturating_sub(self.graph_before);
        let stop_token = || {
            let spelt = self.model.bundle.texts.tokenizer()?.id_to_token(*tokens.last()?)?;
            text.stop.has(&spelt).then_some(spelt)
        };
        let stopped_at = text.stop.stopped_at().map(str::to_owned);
        let stopped_at = match finish_reason {
            FinishReason::Stop => stopped_at.or_else(stop_token),
            _ => None,
        };
        let timings = Timings {
            load: self.model.load,
            prefill: self.prefill,
            decode: self.decode,
            graph,
            sampling,
            host: (self.prefill + self.decode).saturating_sub(graph + sampling),
            decode_steps: steps,
            forced_tokens: forced,
            drafts: self.model.speculation.counts(),
            slow_executions: self.model.op.slow_executions().saturating_sub(self.slow_before),
            hand_overs: self.model.op.hand_overs().since(self.hand_overs_before),
        };
        Ok(Generation {
            text: text.whole,
            tokens,
            logprobs: logprobs.map_or_else(Vec::new, |asked| asked.found),
            prompt_logprobs: scored.map_or_else(Vec::new, |scored| scored.tokens(&prompt)),
            prompt_tokens: prompt.sequence.len(),
            reused_tokens: self.reused,
            finish_reason,
            stopped_at,
            timings,
            spans: ran(&self.spans_before, self.model.op.span_stats()),
        })
    }
}

impl Iterator for Run<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        loop {
            match self.next_event() {
                Err(e) => {
                    // Whoever goes on after an error gets no second one.
                    self.work = None;
                    return Some(Err(e));
                }
                Ok(None) => return None,
                Ok(Some(event)) => {
                    if let Some(text) = event.text().filter(|text| !text.is_empty()) {
                        return Some(Ok(text.to_owned()));
                    }
                }
            }
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if matches!(self.phase, Phase::Verified(_)) {
            // What cannot be accepted is consumed again by the next request.
            let _ = self.stop();
        }
        self.model.settle();
        if let Some(trace) = self.model.trace() {
            trace.add(&Traced::new("generate", Category::Host, self.start, self.start.elapsed()));
        }
    }
}

/// Counts and times added to spans, without the spans that did not run.
fn ran(before: &[SpanStats], mut spans: Vec<SpanStats>) -> Vec<SpanStats> {
    subtract_spans(&mut spans, before);
    spans.retain(|span| span.count > 0);
    spans
}

impl Model {
    /// Goes on to the next event of a generation; `None` where it has ended.
    fn advance(
        &mut self,
        work: &mut GenerationState,
        phase: &mut Phase,
        reused: &mut usize,
    ) -> Result<Option<Happened>> {
        loop {
            let went = match *phase {
                Phase::Prompt => self.begin(work, reused).map(|()| {
                    *phase = Phase::First;
                    Some(Happened::Prefilled)
                }),
                Phase::First if work.tokens.len() >= work.budget => {
                    *phase = Phase::Ended(FinishReason::Length);
                    Ok(None)
                }
                Phase::First => self.choose_next(work, phase),
                Phase::Step => self.step_or_verify(work, phase),
                Phase::Verified(verified) => self.next_row(work, verified, phase),
                Phase::Ended(reason) => {
                    self.end(work)?;
                    *phase = Phase::Done(reason);
                    Ok((!work.text.shown.is_empty()).then_some(Happened::Rest))
                }
                Phase::Done(_) => return Ok(None),
                Phase::Failed => bail!(Usage, "the generation failed, as was reported"),
            };
            match went {
                Err(e) if e.kind() == ErrorKind::Cancelled => {
                    *phase = Phase::Ended(FinishReason::Cancelled);
                }
                Err(e) => return Err(e),
                Ok(Some(happened)) => return Ok(Some(happened)),
                Ok(None) => {}
            }
        }
    }

    /// Consumes the prompt.
    fn begin(&mut self, work: &mut GenerationState, reused: &mut usize) -> Result<()> {
        let start = Instant::now();
        let bundle = Arc::clone(&self.bundle);
        let mut consuming = trace::span(bundle.trace(), "prompt");
        let prefilled = match &mut work.scored {
            Some(scored) => self.score(&work.prompt, &work.allowed, scored),
            None => self.consume(&work.prompt, reused),
        };
        if let Some(span) = &mut consuming {
            span.argument("positions", work.prompt.sequence.len());
            span.argument("reused", *reused);
        }
        drop(consuming);
        prefilled?;
        let consumed = (work.prompt.sequence.len() - *reused, start.elapsed().as_secs_f64());
        let begin = Start {
            prompt: &work.prompt.sequence.tokens,
            predicted: &work.predicted,
            max: work.budget,
            sampling: &work.sampling,
            allowed: &work.allowed,
            media: !work.prompt.sequence.spans.is_empty(),
            cancel: &self.space.cancel.current(),
        };
        self.speculation.begin(work.speculate, &self.op, &begin, consumed);
        Ok(())
    }

    /// Ends the answer's text, and keeps what was consumed.
    fn end(&mut self, work: &mut GenerationState) -> Result<()> {
        self.settle();
        work.text.shown.clear();
        if work.text.stop.stopped_at().is_none() {
            work.text.finish()?;
        }
        Ok(())
    }

    /// Chooses a token from the logits of a plain step.
    fn choose_next(
        &mut self,
        work: &mut GenerationState,
        phase: &mut Phase,
    ) -> Result<Option<Happened>> {
        let Chosen { shown, ended } = self.choose(work)?;
        *phase = ended.map_or(Phase::Step, Phase::Ended);
        Ok(shown.then_some(Happened::Token))
    }

    /// Chooses the next token among the logits.
    fn choose(&mut self, work: &mut GenerationState) -> Result<Chosen> {
        if self.space.cancel.is_cancelled() {
            return Ok(Chosen { shown: false, ended: Some(FinishReason::Cancelled) });
        }
        let start = Instant::now();
        let sample = trace::span(self.bundle.trace(), "sample");
        let ruled = work.rules.is_some();
        let GenerationState { sampler, grammar, allowed, rules, tokens, .. } = work;
        let among = match rules {
            Some(rules) => rules.allowed(tokens, self.op.logits()?),
            None => &**allowed,
        };
        let (token, sampled) = match grammar.as_mut().map(|grammar| (grammar.forced(), grammar)) {
            None => (None, sampler.sample_among(self.op.logits()?, among)),
            Some((Some(token), _)) => (Some(token), Ok(token)),
            Some((None, grammar)) => {
                let allowed = grammar.allowed(among)?;
                if allowed.is_empty() {
                    return Ok(Chosen { shown: false, ended: Some(FinishReason::Eos) });
                }
                (None, sampler.sample_among(self.op.logits()?, allowed))
            }
        };
        work.forced += usize::from(token.is_some());
        let token = match sampled {
            Ok(token) => token,
            Err(e) => {
                let error = self.op.about_logits(e);
                drop(sample);
                self.forget_state();
                return Err(error);
            }
        };
        if let Some(asked) = &mut work.logprobs {
            if ruled {
                asked.compute.only_allowed();
            }
            asked.note(self.op.logits()?, self.op.info().softcap, token, among);
        }
        work.sampler.accept(token);
        work.tokens.push(token);
        work.unconsumed += 1;
        let stops = work.text.stop.is_stop_token(token);
        if let Some(grammar) = work.grammar.as_mut().filter(|_| !stops) {
            grammar.accept(token)?;
        }
        drop(sample);
        work.sampling_time += start.elapsed();
        self.speculation.push(token);
        let GenerationState { text, stop_ids, .. } = work;
        if stops {
            let stop = stop_ids.contains(&token);
            let reason = if stop { FinishReason::Stop } else { FinishReason::Eos };
            return Ok(Chosen { shown: false, ended: Some(reason) });
        }
        let detokenize = trace::span(self.bundle.trace(), "detokenize");
        let stopped = text.push(token)?;
        drop(detokenize);
        let over = work.grammar.as_ref().is_some_and(GrammarCursor::is_over);
        let ended = if stopped {
            Some(FinishReason::Stop)
        } else if over {
            Some(FinishReason::Eos)
        } else if work.tokens.len() >= work.budget {
            Some(FinishReason::Length)
        } else {
            None
        };
        Ok(Chosen { shown: true, ended })
    }

    /// Consumes the token chosen last and chooses the next one, or has draft tokens verified.
    /// Forced tokens come before anything is consumed, and then are consumed together.
    fn step_or_verify(
        &mut self,
        work: &mut GenerationState,
        phase: &mut Phase,
    ) -> Result<Option<Happened>> {
        if work.forced().is_some() {
            return self.choose_next(work, phase);
        }
        if work.unconsumed > 1 {
            let count = std::mem::take(&mut work.unconsumed);
            self.steps(count, &work.prompt, &work.tokens)?;
        } else {
            if self.speculation.is_active() && self.draft(work)? > 0 {
                work.unconsumed = 0;
                return self.verify(work, phase);
            }
            let start = Instant::now();
            work.unconsumed = 0;
            self.step(work.last(), &work.prompt, &work.tokens)?;
            self.speculation.stepped(start.elapsed().as_secs_f64());
        }
        work.steps += 1;
        self.choose_next(work, phase)
    }

    /// Makes draft tokens. Returns the number of them to verify.
    fn draft(&mut self, work: &mut GenerationState) -> Result<usize> {
        let room = self.op.info().max_ctx.saturating_sub(self.op.position());
        let max_drafts = room.min(work.budget - work.tokens.len()).saturating_sub(1);
        let _span = trace::span(self.bundle.trace(), "draft");
        let (last, allowed, grammar) = (work.last(), &work.allowed, &mut work.grammar);
        let may = |info: &OpenInfo, drafts: &[u32]| {
            let may =
                |token: &&u32| allowed.contains(**token) && !info.placeholders.contains(*token);
            let count = drafts.iter().take_while(may).count();
            // All in one call: it parses them from the first on.
            grammar.as_mut().map_or(count, |grammar| grammar.accepts(&drafts[..count]))
        };
        let rng = work.sampler.rng();
        let step = self.speculation.propose(&mut self.op, last, max_drafts, rng, may)?;
        Ok(step.len() - 1)
    }

    /// Verifies draft tokens together with the token chosen last. Those that are chosen, too, are accepted.
    fn verify(
        &mut self,
        work: &mut GenerationState,
        phase: &mut Phase,
    ) -> Result<Option<Happened>> {
        let start = Instant::now();
        let span = trace::span_with(self.bundle.trace(), "verify", |s| {
            s.argument("tokens", self.speculation.step().len());
            s.argument("position", self.op.position());
        });
        let checked = self.op.verify(self.speculation.step());
        drop(span);
        let time = StepTime { pass: start.elapsed().as_secs_f64(), ..StepTime::default() };
        let before = work.tokens.len();
        match checked {
            Ok(()) => {
                *phase =
                    Phase::Verified(Verified { before, row: 0, closed: false, ended: None, time });
                Ok(None)
            }
            Err(e) => self.recover(work, e, phase),
        }
    }

    /// Chooses a token from the next row that was verified. Behind the last one the chosen tokens are accepted.
    fn next_row(
        &mut self,
        work: &mut GenerationState,
        mut verified: Verified,
        phase: &mut Phase,
    ) -> Result<Option<Happened>> {
        if verified.closed {
            self.close(work, verified, Ok(()))?;
            *phase = verified.ended.map_or(Phase::Step, Phase::Ended);
            return Ok(None);
        }
        let start = Instant::now();
        let logits = match work.forced() {
            Some(_) => Ok(()),
            None => self.op.row_logits(verified.row),
        };
        verified.time.pass += start.elapsed().as_secs_f64();
        match logits {
            Err(e) if self.is_lost(&e) => return self.recover(work, e, phase),
            // Nothing was chosen.
            Err(e) if verified.row == 0 => return Err(e),
            Err(e) => {
                *phase = Phase::Step;
                self.close(work, verified, Err(e))?;
                return Ok(None);
            }
            Ok(()) => {}
        }
        let Chosen { shown, ended } = self.choose(work)?;
        verified.row += 1;
        verified.ended = ended;
        let draft = self.speculation.step().get(verified.row);
        verified.closed = ended.is_some() || draft != Some(&work.last());
        *phase = Phase::Verified(verified);
        Ok(shown.then_some(Happened::Token))
    }

    /// Computes the state again where the device was lost while draft tokens were verified, and chooses by a plain
    /// step.
    fn recover(
        &mut self,
        work: &mut GenerationState,
        error: Error,
        phase: &mut Phase,
    ) -> Result<Option<Happened>> {
        if !self.is_lost(&error) {
            return Err(error);
        }
        self.replay(error, &work.prompt, &work.tokens)?;
        work.unconsumed = 0;
        work.steps += 1;
        self.choose_next(work, phase)
    }

    /// Accepts the tokens that were chosen from verified rows. `checked` is why no further row could be asked for.
    fn close(
        &mut self,
        work: &mut GenerationState,
        verified: Verified,
        checked: Result<()>,
    ) -> Result<()> {
        let Verified { before, mut time, .. } = verified;
        // The token chosen last is not consumed yet; where the run was cancelled before, the first one is.
        let count = (work.tokens.len() - before).max(1);
        let start = Instant::now();
        let span = trace::span_with(self.bundle.trace(), "accept", |s| s.argument("tokens", count));
        let accepted = self.op.accept(count);
        drop(span);
        time.keep += start.elapsed().as_secs_f64();
        work.steps += 1;
        work.unconsumed = usize::from(work.tokens.len() > before);
        match accepted {
            Ok(()) => {
                for &token in &self.speculation.step()[..count] {
                    self.prefix.push(token);
                }
                self.speculation.verified(count, time);
            }
            Err(e) if self.is_lost(&e) => {
                let consumed = work.tokens.len().saturating_sub(1).max(before);
                self.replay(e, &work.prompt, &work.tokens[..consumed])?;
            }
            Err(e) => return Err(e),
        }
        checked
    }
}
