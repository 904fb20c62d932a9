//! Reasoning, text and calls of tools in an answer, as its tokens come.

use std::sync::Arc;

use axum::http::StatusCode;
use qhx::{
    Beginning, FinishReason, Generation, PromptToken, REASONING, TextPipeline, TokenLogprobs, Tool,
    ToolCall,
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
    /// Beginning of a call; no text for a model whose calls begin like JSON.
    mark: Option<&'static str>,
    /// Special tokens, which are no text: where reasoning begins and ends, and a call begins.
    ids: [Option<u32>; 3],
}

impl Reader {
    pub(crate) fn new(info: &Info, tools: Vec<Tool>, several_calls: bool) -> Self {
        let texts = Arc::clone(&info.texts);
        let mark = texts.call_format().filter(|_| !tools.is_empty()).map(|format| format.marks().0);
        let special = |text: &str| {
            let tokenizer = texts.tokenizer()?;
            let id = tokenizer.token_to_id(text)?;
            tokenizer.visible_token(id).is_none().then_some(id)
        };
        let ids = [special(REASONING.0), special(REASONING.1), mark.and_then(special)];
        Self {
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
            mark,
            ids,
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
                (self.mode, self.trims) = (Mode::Thinking, true)
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
            self.mode = Mode::Calling;
        }
        self
    }

    /// Takes in what came with a token.
    fn push(&mut self, id: Option<u32>, text: &str, out: &mut Vec<Delta>) {
        let [open, close, call] = self.ids;
        self.reasoning_tokens += usize::from(self.mode == Mode::Thinking && id.is_some());
        self.held.push_str(text);
        match self.mode {
            Mode::Start if id.is_some() && id == open => {
                (self.mode, self.trims) = (Mode::Thinking, true);
            }
            Mode::Thinking if id.is_some() && id == close => {
                self.read(true, out);
                self.end_reasoning();
            }
            Mode::Thinking => {}
            Mode::Start | Mode::Text if id.is_some() && id == call => {
                self.tokens.extend(id);
                self.mode = Mode::Text;
                self.read(true, out);
                self.mode = Mode::Calling;
            }
            _ => self.tokens.extend(id),
        }
        self.read(false, out);
    }

    fn end_reasoning(&mut self) {
        (self.mode, self.trims) = (Mode::Text, true);
        self.tokens.clear();
    }

    /// Shows what can be shown; all of it at the `end`.
    fn read(&mut self, end: bool, out: &mut Vec<Delta>) {
        loop {
            if self.trims {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                self.trims = self.held.is_empty();
            }
            match self.mode {
                Mode::Start => {
                    let begin = self.held.trim_start();
                    if let Some(rest) = begin.strip_prefix(REASONING.0) {
                        self.held = rest.to_owned();
                        (self.mode, self.trims) = (Mode::Thinking, true);
                    } else if !end && REASONING.0.starts_with(begin) {
                        return;
                    } else {
                        self.mode = Mode::Text;
                    }
                }
                Mode::Thinking => {
                    if let Some((before, behind)) = self.held.split_once(REASONING.1) {
                        let (before, behind) = (before.trim_end().to_owned(), behind.to_owned());
                        show(before, out, Delta::Reasoning);
                        self.held = behind;
                        self.end_reasoning();
                        continue;
                    }
                    let shown = shown(&self.held, REASONING.1, end);
                    let text = self.held.drain(..shown).collect();
                    return show(text, out, Delta::Reasoning);
                }
                Mode::Text => return self.read_text(end, out),
                Mode::Calling => return,
            }
        }
    }

    fn read_text(&mut self, end: bool, out: &mut Vec<Delta>) {
        if self.fresh && self.mark != Some("") {
            match is_call(&self.held, &self.tools) {
                Some(true) => {
                    self.mode = Mode::Calling;
                    return;
                }
                None if !end => return,
                _ => {}
            }
        }
        let shown = match self.mark {
            None => self.held.len(),
            // Only at the beginning.
            Some("") if self.fresh => {
                let begin = self.held.trim_start();
                if begin.starts_with(['{', '[']) {
                    self.mode = Mode::Calling;
                    return;
                }
                if begin.is_empty() && !end { 0 } else { self.held.len() }
            }
            Some("") => self.held.len(),
            Some(mark) => match self.held.find(mark) {
                Some(at) => {
                    self.mode = Mode::Calling;
                    self.held.get(..at).map_or(0, |text| text.trim_end().len())
                }
                None => shown(&self.held, mark, end),
            },
        };
        let text: String = self.held.drain(..shown).collect();
        self.fresh &= text.is_empty();
        show(text, out, Delta::Text);
    }

    /// Reads the rest at the end of the answer.
    fn finish(&mut self, out: &mut Vec<Delta>) -> qhx::Result<()> {
        self.read(true, out);
        if self.mode == Mode::Calling {
            let mut calls = self.texts.calls(&self.tokens, &self.tools)?;
            if !self.several_calls {
                calls.truncate(1);
            }
            if calls.is_empty() {
                show(std::mem::take(&mut self.held), out, Delta::Text);
            }
            out.extend(calls.into_iter().map(Delta::Call));
        }
        Ok(())
    }
}

/// True for a text that begins like a call of one of the tools in bare JSON; `None` while it may become one.
fn is_call(text: &str, tools: &[Tool]) -> Option<bool> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut begins = tools.iter().map(|tool| format!("{{\"name\":\"{}\"", tool.name));
    if begins.clone().any(|begin| text.starts_with(&begin)) {
        return Some(true);
    }
    (!begins.any(|begin| begin.starts_with(&text))).then_some(false)
}

/// Length of the text to show: up to a possible beginning of `mark`, without white space in front of it.
fn shown(text: &str, mark: &str, end: bool) -> usize {
    if end {
        return text.len();
    }
    let partial = text.char_indices().map(|(at, _)| at);
    let begins = |&at: &usize| text.get(at..).is_some_and(|rest| mark.starts_with(rest));
    let at = partial.rev().take(mark.len()).filter(begins).last().unwrap_or(text.len());
    text.get(..at).map_or(0, |text| text.trim_end().len())
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
                reader.finish(&mut step.deltas).map_err(|_| unreadable())?;
                self.usage.completion += generation.tokens.len();
                self.usage.reasoning += reader.reasoning_tokens;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_may_become_a_bare_call_of_a_tool() {
        let tools = ["find", "find_all"].map(|name| Tool::new(name, serde_json::Value::Null));
        for (text, expected) in [
            ("", None),
            (" {\n  \"na", None),
            ("{\"name\": \"fin", None),
            ("{ \"name\" : \"find_all\", ", Some(true)),
            ("{\"name\": \"Paris\"", Some(false)),
            ("The", Some(false)),
        ] {
            assert_eq!(is_call(text, &tools), expected, "{text:?}");
        }
        assert_eq!(is_call("{\"name\"", &[]), Some(false));
    }
}
