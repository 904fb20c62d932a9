//! Reasoning, text and calls of tools in an answer, as its tokens come.

use std::sync::Arc;

use axum::http::StatusCode;
use qhx::{
    Beginning, CallFormat, FinishReason, Generation, PromptToken, ReasoningMarks, TextPipeline,
    TokenLogprobs, Tool, ToolCall,
};

use crate::error::{ApiError, Result, broken};
use crate::pending::Pending;
use crate::queue::Update;
use crate::registry::Info;
use crate::request_metrics::Tally;

/// A part of an answer that came.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Delta {
    Reasoning(String),
    Text(String),
    Call(ToolCall),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Reasoning may begin.
    Start,
    Thinking,
    Text,
    /// A call of a tool, unless the text turns out to be none.
    Calling,
}

/// Reads one answer.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    texts: Arc<TextPipeline>,
    tools: Vec<Tool>,
    several_calls: bool,
    /// Reasoning may stand before the answer.
    reasons: bool,
    mode: Mode,
    /// Text that is not shown yet.
    held: String,
    /// White space at the beginning of what comes is left out.
    trims: bool,
    /// Nothing of the text was shown.
    fresh: bool,
    /// Tokens behind the reasoning.
    tokens: Vec<u32>,
    reasoning_tokens: usize,
    reasoning: ReasoningMarks,
    /// The label of the reasoning may come.
    labelled: bool,
    /// The reasoning held back may be a call.
    doubtful: bool,
    /// The answer is calls alone.
    must_call: bool,
    /// The special token came that a call begins with.
    marked: bool,
    /// Format of calls, where there are tools.
    format: Option<CallFormat>,
    /// The marks of calls as special tokens, which are no text.
    ids: [Option<u32>; 2],
    /// Bytes of the text of calls in which no mark of an end is.
    searched: usize,
    /// Calls that are out.
    called: usize,
}

impl Reader {
    pub(crate) fn new(info: &Info, tools: Vec<Tool>, several_calls: bool) -> Self {
        let texts = Arc::clone(&info.texts);
        let format = texts.call_format().filter(|_| !tools.is_empty());
        let ids = format.map_or([None; 2], |format| {
            let (start, end) = format.marks();
            [start, end].map(|mark| texts.special(mark))
        });
        Self {
            reasoning: texts.reasoning(),
            texts,
            tools,
            several_calls,
            reasons: false,
            mode: Mode::Text,
            held: String::new(),
            trims: false,
            fresh: true,
            tokens: Vec::new(),
            reasoning_tokens: 0,
            labelled: false,
            doubtful: false,
            must_call: false,
            marked: false,
            format,
            ids,
            searched: 0,
            called: 0,
        }
    }

    /// Reader of an answer that may begin with reasoning.
    pub(crate) fn reasoning(self, reasons: bool) -> Self {
        Self { reasons, ..self }
    }

    /// Takes in what the prompt says about the answer's beginning.
    fn begin(&mut self, beginning: Beginning) {
        match beginning {
            Beginning::Reasoning if self.reasons => {
                (self.mode, self.trims) = (Mode::Thinking, true);
            }
            Beginning::Either if self.reasons => self.mode = Mode::Start,
            // It goes on with a text.
            Beginning::Text => self.fresh = false,
            _ => {}
        }
    }

    /// Expects an answer of calls alone, if `calls`.
    pub(crate) fn calling(mut self, calls: bool) -> Self {
        if calls {
            (self.mode, self.must_call) = (Mode::Calling, true);
        }
        self
    }

    /// Takes in what came with a token.
    fn push(&mut self, id: Option<u32>, text: &str, out: &mut Vec<Delta>) {
        let [start, end] = self.ids.map(|mark| mark.is_some() && id == mark);
        self.reasoning_tokens += usize::from(self.mode == Mode::Thinking && id.is_some());
        self.held.push_str(text);
        self.marked |= start;
        if start && self.mode != Mode::Calling {
            if self.mode == Mode::Start {
                self.mode = Mode::Text;
            }
            self.read(false, out);
            if self.mode == Mode::Thinking {
                self.doubtful = true;
            } else {
                self.held.truncate(self.held.trim_end().len());
                self.read(true, out);
                self.mode = Mode::Calling;
            }
        }
        self.tokens.extend(id);
        self.read(false, out);
        if self.mode == Mode::Calling && (end || self.has_end()) {
            // An error in decoding is reported at the end of the answer.
            let _ = self.read_calls(out);
        }
    }

    /// True where the text of calls has the mark of an end that was not seen before.
    fn has_end(&mut self) -> bool {
        let end = self.format.map_or("", |format| format.marks().1);
        if end.is_empty() {
            return false;
        }
        let found = self.held.get(self.searched..).and_then(|text| text.find(end));
        let unsure = (self.held.len() + 1).saturating_sub(end.len()).max(self.searched);
        let boundary = (unsure..).find(|&at| self.held.is_char_boundary(at)).unwrap_or(unsure);
        self.searched = found.map_or(boundary, |at| self.searched + at + end.len());
        found.is_some()
    }

    /// Shows the calls that are whole and not out yet.
    fn read_calls(&mut self, out: &mut Vec<Delta>) -> qhx::Result<()> {
        let mut calls = self.texts.calls(&self.tokens, &self.tools)?;
        if !self.several_calls {
            calls.truncate(1);
        }
        let before = self.called;
        self.called = before.max(calls.len());
        out.extend(calls.into_iter().skip(before).map(Delta::Call));
        Ok(())
    }

    /// True where what is held can only be a call: it must be one, or has the mark of one.
    fn calls_for_sure(&self) -> bool {
        let mark = self.format.map_or("", |format| format.marks().0);
        self.must_call || (!mark.is_empty() && (self.held.starts_with(mark) || self.marked))
    }

    fn end_reasoning(&mut self) {
        (self.mode, self.trims, self.doubtful) = (Mode::Text, true, false);
        self.tokens.clear();
    }

    /// Shows what can be shown; all of it at the `end`.
    fn read(&mut self, end: bool, out: &mut Vec<Delta>) {
        let ReasoningMarks { open, label, close, .. } = self.reasoning;
        loop {
            if self.trims {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                self.trims = self.held.is_empty();
            }
            match self.mode {
                Mode::Start => {
                    let begin = self.held.trim_start();
                    if let Some(rest) = begin.strip_prefix(open) {
                        self.held = rest.to_owned();
                        self.begin_reasoning();
                    } else if !end && open.starts_with(begin) {
                        return;
                    } else {
                        self.mode = Mode::Text;
                    }
                }
                Mode::Thinking if self.labelled => {
                    if let Some(rest) = self.held.strip_prefix(open) {
                        self.held = rest.to_owned();
                        continue;
                    }
                    let begins = |mark: &str| mark.starts_with(self.held.as_str());
                    if !end && (begins(label) || begins(open)) {
                        return;
                    }
                    let rest = self.held.strip_prefix(label);
                    let ends = |c: char| c.is_whitespace() || close.starts_with(c);
                    if let Some(rest) = rest.filter(|rest| rest.chars().next().is_none_or(ends)) {
                        self.held = rest.to_owned();
                        self.trims = true;
                    }
                    self.labelled = false;
                }
                Mode::Thinking => {
                    if let Some(at) = self.held.find(close) {
                        show(self.held[..at].trim_end().to_owned(), out, Delta::Reasoning);
                        self.held.drain(..at + close.len());
                        self.end_reasoning();
                        continue;
                    }
                    let call = self.format.map_or("", |format| format.marks().0);
                    let call = Some(call).filter(|mark| !mark.is_empty() && !self.doubtful);
                    // A call, unless the reasoning goes on behind it and ends.
                    if let Some(at) = call.and_then(|mark| self.held.find(mark)) {
                        let shown = self.held[..at].trim_end().len();
                        show(self.held.drain(..shown).collect(), out, Delta::Reasoning);
                        self.doubtful = true;
                    }
                    if self.doubtful {
                        return;
                    }
                    let shown = shown(&self.held, &[Some(close), call], end);
                    let text = self.held.drain(..shown).collect();
                    return show(text, out, Delta::Reasoning);
                }
                Mode::Text => {
                    if !self.read_text(end, out) {
                        return;
                    }
                }
                Mode::Calling => return,
            }
        }
    }

    fn begin_reasoning(&mut self) {
        (self.mode, self.trims) = (Mode::Thinking, true);
        self.labelled = !self.reasoning.label.is_empty();
    }

    /// True where reasoning begins within the text.
    fn read_text(&mut self, end: bool, out: &mut Vec<Delta>) -> bool {
        let mark = self.format.map(|format| format.marks().0);
        if let Some(format) = self.format.filter(|_| self.fresh && mark != Some("")) {
            match format.begins_unmarked(&self.held, &self.tools) {
                Some(true) => {
                    self.mode = Mode::Calling;
                    return false;
                }
                None if !end => return false,
                _ => {}
            }
        }
        let call = mark.filter(|mark| !mark.is_empty());
        let unmarked = self.format.map(CallFormat::unmarked).filter(|mark| !mark.is_empty());
        // Channels may come at any place.
        let ReasoningMarks { open, label, close, .. } = self.reasoning;
        let channel = |mark| Some(mark).filter(|_| self.reasons && !label.is_empty());
        // A mark that ends nothing is left out.
        if let Some(at) = channel(close).and_then(|mark| self.held.find(mark))
            && channel(open).and_then(|mark| self.held.find(mark)).is_none_or(|open| at < open)
        {
            self.held.replace_range(at..at + close.len(), "");
            return true;
        }
        let marks = [call.or(unmarked), unmarked, channel(open)];
        let found = marks.map(|mark| mark.and_then(|mark| self.held.find(mark)));
        let called = [found[0], found[1]].into_iter().flatten().min();
        let shown = match (called, found[2]) {
            (Some(at), other) if other.is_none_or(|other| at < other) => {
                self.mode = Mode::Calling;
                self.held[..at].trim_end().len()
            }
            (_, Some(at)) => {
                let text = self.held[..at].to_owned();
                self.fresh &= text.is_empty();
                show(text, out, Delta::Text);
                self.held.drain(..at + open.len());
                self.begin_reasoning();
                return true;
            }
            // Calls without a mark stand at the beginning only.
            _ if mark == Some("") && self.fresh => {
                let begin = self.held.trim_start();
                if begin.starts_with(['{', '[']) {
                    self.mode = Mode::Calling;
                    return false;
                }
                if begin.is_empty() && !end { 0 } else { self.held.len() }
            }
            _ => shown(&self.held, &[marks[0], marks[1], channel(open), channel(close)], end),
        };
        let text: String = self.held.drain(..shown).collect();
        self.fresh &= text.is_empty();
        show(text, out, Delta::Text);
        false
    }

    /// Reads the rest at the end of the answer.
    ///
    /// A call that was `cut` is no text.
    fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) -> qhx::Result<()> {
        self.read(true, out);
        if self.mode == Mode::Calling || self.doubtful {
            self.read_calls(out)?;
            if self.called == 0 && !(cut && self.calls_for_sure()) {
                let held = std::mem::take(&mut self.held);
                show(held, out, if self.doubtful { Delta::Reasoning } else { Delta::Text });
            }
        }
        Ok(())
    }
}

/// Length of the text to show: up to a possible beginning of one of the marks, without white space in front of it.
fn shown(text: &str, marks: &[Option<&str>], end: bool) -> usize {
    if end || marks.iter().all(Option::is_none) {
        return text.len();
    }
    let begins = |mark: &str| {
        let partial = text.char_indices().map(|(at, _)| at).rev().take(mark.len());
        partial.filter(|&at| mark.starts_with(&text[at..])).last()
    };
    let at = marks.iter().flatten().filter_map(|mark| begins(mark)).min().unwrap_or(text.len());
    text[..at].trim_end().len()
}

fn show(text: String, out: &mut Vec<Delta>, delta: impl FnOnce(String) -> Delta) {
    if !text.is_empty() {
        out.push(delta(text));
    }
}

/// An answer as far as it came.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answer {
    pub reasoning: String,
    pub text: String,
    pub calls: Vec<ToolCall>,
    pub logprobs: Vec<(u32, TokenLogprobs)>,
    /// Tokens of the prompt with their log-probabilities, if requested.
    pub prompt: Vec<PromptToken>,
    /// Why it ended; none while it goes on.
    pub finish: Option<FinishReason>,
    /// The stop text that ended it.
    pub stopped_at: Option<String>,
}

impl Answer {
    /// Why it ended, in OpenAI's words.
    pub(crate) fn finish_reason(&self) -> Option<&'static str> {
        let finish = self.finish?;
        Some(match finish {
            FinishReason::Length => "length",
            _ if !self.calls.is_empty() => "tool_calls",
            _ => "stop",
        })
    }
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: usize,
    pub cached: usize,
    pub completion: usize,
    pub reasoning: usize,
    /// Draft tokens that became part of an answer, and those that did not.
    pub drafted: [usize; 2],
}

/// Content of an update.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub choice: usize,
    /// The prompt is consumed.
    pub prefilled: bool,
    pub deltas: Vec<Delta>,
    pub logprobs: Option<(u32, TokenLogprobs)>,
    /// The choice is over.
    pub finished: Option<Box<Generation>>,
}

/// The answers of a request, one a choice.
#[derive(Debug)]
pub(crate) struct Answers {
    readers: Vec<Reader>,
    pub answers: Vec<Answer>,
    pub usage: Usage,
    /// Choices of each prompt.
    each: usize,
}

impl Answers {
    /// Answers that complete texts, without reasoning and calls.
    pub(crate) fn plain(info: &Info, count: usize, each: usize) -> Self {
        Self::new(vec![Reader::new(info, Vec::new(), true); count], each)
    }

    /// One for each reader; every `each` of them have one prompt.
    pub(crate) fn new(readers: Vec<Reader>, each: usize) -> Self {
        let answers = vec![Answer::default(); readers.len()];
        Self { readers, answers, usage: Usage::default(), each: each.max(1) }
    }

    /// Takes in what came of the job.
    pub(crate) fn take(&mut self, update: Update) -> Result<Option<Step>> {
        let mut step = Step::default();
        match update {
            Update::Failed(error) => return Err(error),
            Update::Token { choice, id, text, logprobs } => {
                let Some(reader) = self.readers.get_mut(choice) else { return Ok(None) };
                step.choice = choice;
                reader.push(id, &text, &mut step.deltas);
                step.logprobs = id.zip(logprobs);
            }
            Update::Prefilled { choice, tokens, reused, beginning } => {
                if let Some(reader) = self.readers.get_mut(choice) {
                    reader.begin(beginning);
                }
                if choice % self.each == 0 {
                    self.usage.prompt += tokens;
                    self.usage.cached += reused;
                }
                (step.choice, step.prefilled) = (choice, true);
            }
            Update::Finished { choice, generation } => {
                let Some(reader) = self.readers.get_mut(choice) else { return Ok(None) };
                step.choice = choice;
                let cut = generation.finish_reason == FinishReason::Length;
                reader.finish(cut, &mut step.deltas).map_err(|_| unreadable())?;
                self.usage.completion += generation.tokens.len();
                self.usage.reasoning += reader.reasoning_tokens;
                let drafts = generation.timings.drafts;
                self.usage.drafted[0] += drafts.accepted;
                self.usage.drafted[1] += drafts.drafted.saturating_sub(drafts.accepted);
                step.finished = Some(generation);
            }
            _ => return Ok(None),
        }
        let Some(answer) = self.answers.get_mut(step.choice) else { return Ok(None) };
        for delta in &step.deltas {
            match delta {
                Delta::Reasoning(text) => answer.reasoning.push_str(text),
                Delta::Text(text) => answer.text.push_str(text),
                Delta::Call(call) => answer.calls.push(call.clone()),
            }
        }
        answer.logprobs.extend(step.logprobs.clone());
        if let Some(generation) = &mut step.finished {
            answer.prompt = std::mem::take(&mut generation.prompt_logprobs);
            answer.stopped_at = generation.stopped_at.take();
            // Where there may be one call only, nothing follows it.
            let one_call =
                self.readers.get(step.choice).is_some_and(|reader| !reader.several_calls);
            let whole = one_call && !answer.calls.is_empty();
            answer.finish = Some(if whole { FinishReason::Eos } else { generation.finish_reason });
        }
        Ok(Some(step))
    }

    /// True once all choices are over.
    pub(crate) fn are_over(&self) -> bool {
        self.answers.iter().all(|answer| answer.finish.is_some())
    }

    /// Waits for all of them.
    pub(crate) async fn collect(&mut self, mut pending: Pending, tally: &Tally) -> Result<()> {
        while let Some(update) = pending.next().await? {
            self.take(update)?;
            self.note(tally);
        }
        if self.are_over() { Ok(()) } else { Err(broken()) }
    }

    /// Notes the tokens so far.
    pub(crate) fn note(&self, tally: &Tally) {
        let Usage { prompt, cached, completion, .. } = self.usage;
        tally.update(|record| {
            (record.prompt_tokens, record.cached_tokens) = (prompt, cached);
            record.completion_tokens = completion;
        });
    }
}

fn unreadable() -> ApiError {
    let message = "the answer has tokens that are no text";
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
}
