//! A request to a model, and its answer.

use std::num::NonZeroUsize;

use qhx::media::{self, Attached};
use qhx::{
    CallFormat, CancelToken, Content, ContentPart, Error, ErrorKind, Generation, Grammar, Message,
    Model, Prompt, Request, Result, SamplingParams, Speculate, TextPipeline, Tool, ToolCall,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::media::Item;

/// A request, as the package writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestJson {
    prompt: Asks,
    /// Media beside the text of a prompt, or of the last message: at their placeholders, or before it.
    #[serde(default)]
    beside: Vec<usize>,
    max_new_tokens: Option<usize>,
    #[serde(default)]
    sampling: Map<String, Value>,
    #[serde(default)]
    stop: Vec<String>,
    #[serde(default)]
    stop_tokens: Vec<u32>,
    #[serde(default)]
    ignore_eos: bool,
    speculate: Option<Drafts>,
    cache_salt: Option<String>,
    form: Option<Form>,
    thinking: Option<bool>,
    #[serde(default)]
    template_arguments: Map<String, Value>,
    /// A list, or its text.
    tools: Option<Value>,
    /// An answer is calls of tools, and nothing else.
    #[serde(default)]
    must_call: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asks {
    Text(String),
    Tokens(Vec<u32>),
    Messages(Vec<Turn>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: String,
    content: Said,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Said {
    Text(String),
    Parts(Vec<Part>),
}

/// A text, or the number of a medium.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Part {
    Text(String),
    Media(usize),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Drafts {
    Tokens(NonZeroUsize),
    Word(String),
}

/// Form that an answer must have.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// The text of a schema, or the schema.
    Schema(Value),
    Regex(String),
    Lark(String),
    Choice(Vec<String>),
}

/// A request of the engine, and what its answer is read with.
pub(crate) struct Question {
    pub(crate) request: Request,
    tools: Vec<Tool>,
}

impl RequestJson {
    /// Reads what the package wrote.
    ///
    /// # Errors
    /// When it is not JSON of this form.
    pub fn parse(json: &str) -> Result<Self> {
        let wrong = |e| Error::caused(ErrorKind::Usage, "the options", e);
        serde_json::from_str(json).map_err(wrong)
    }

    /// The request of the engine. Media are decoded by the rules of the model.
    pub(crate) fn question(
        self,
        model: &Model,
        items: &[Item],
        ticket: &CancelToken,
    ) -> Result<Question> {
        let mut attached = Vec::with_capacity(items.len());
        for item in items {
            ticket.check()?;
            attached.push(item.read(model)?);
        }
        let beside = self.beside.iter().map(|index| one(&attached, *index).cloned());
        let beside = beside.collect::<Result<Vec<_>>>()?;
        let own = match self.prompt {
            Asks::Messages(_) => model.sampling().cloned().unwrap_or_default(),
            Asks::Text(_) | Asks::Tokens(_) => SamplingParams::default(),
        };
        let prompt = match self.prompt {
            Asks::Text(text) => media::content(text, &beside)?.into(),
            Asks::Tokens(tokens) => media::tokens(tokens, &beside),
            Asks::Messages(turns) => {
                let messages = messages(turns, &beside, &attached)?;
                Prompt::Chat { messages, thinking: self.thinking }
            }
        };
        let mut request = Request::greedy(prompt, self.max_new_tokens.unwrap_or(Request::MAX_NEW))
            .sampling(own.with(&self.sampling)?)
            .stops(self.stop)
            .ignore_eos(self.ignore_eos)
            .salt(salt(self.cache_salt)?)
            .cancelled_by(ticket.clone());
        request.stop_ids = self.stop_tokens;
        request.template_arguments = self.template_arguments;
        request.speculate = match self.speculate {
            None => Speculate::default(),
            Some(Drafts::Tokens(count)) => speculate(&count.to_string())?,
            Some(Drafts::Word(word)) => speculate(&word)?,
        };
        let mut grammar = self.form.map(Form::grammar).transpose()?;
        let mut tools = Vec::new();
        if let Some(list) = self.tools {
            let list = as_json(list)?;
            tools = Tool::list(&list)?;
            check_calls(model.texts().call_format())?;
            if self.must_call {
                grammar = Some(Grammar::Calls(tools.clone()));
            }
            request = request.template_argument("tools", list);
        }
        Ok(Question { request: request.grammar(grammar), tools })
    }
}

/// JSON that a text holds; any other value is JSON already.
fn as_json(value: Value) -> Result<Value> {
    let Value::String(text) = value else { return Ok(value) };
    let wrong = |e| Error::caused(ErrorKind::Usage, "option tools", e);
    serde_json::from_str(&text).map_err(wrong)
}

fn one(attached: &[Attached], index: usize) -> Result<&Attached> {
    let missing = || Error::new(ErrorKind::Internal, format!("there is no medium {index}"));
    attached.get(index).ok_or_else(missing)
}

/// The messages; what is `beside` belongs to the last one.
fn messages(turns: Vec<Turn>, beside: &[Attached], attached: &[Attached]) -> Result<Vec<Message>> {
    let last = turns.len().saturating_sub(1);
    let message = |(index, Turn { role, content }): (usize, Turn)| {
        let beside = if index == last { beside } else { &[] };
        let content = match content {
            Said::Text(text) => media::content(text, beside)?,
            Said::Parts(parts) => {
                let before = beside.iter().map(|one| Ok(ContentPart::Media(one.media.clone())));
                let parts = parts.into_iter().map(|part| match part {
                    Part::Text(text) => Ok(ContentPart::Text(text)),
                    Part::Media(index) => {
                        Ok(ContentPart::Media(one(attached, index)?.media.clone()))
                    }
                });
                Content::from(before.chain(parts).collect::<Result<Vec<_>>>()?)
            }
        };
        Ok(Message::new(role, content))
    };
    turns.into_iter().enumerate().map(message).collect()
}

/// Salt of the states that may be gone on from. An empty one would set nobody apart.
fn salt(salt: Option<String>) -> Result<Option<String>> {
    match salt {
        Some(text) if text.is_empty() => {
            let message = "the cache salt is empty, expected a text that nobody else knows";
            Err(Error::new(ErrorKind::Usage, message).hint("leave it out where there is one user"))
        }
        salt => Ok(salt),
    }
}

fn speculate(text: &str) -> Result<Speculate> {
    let wrong = |e| Error::new(ErrorKind::Usage, format!("option speculate: {text}: {e}"));
    text.parse().map_err(wrong)
}

/// Errors where the model's calls could not be read.
fn check_calls(format: Option<CallFormat>) -> Result<()> {
    format.map(drop).ok_or_else(|| {
        let message =
            "option tools: the bundle has no chat template in Jinja, and its markers know no tools";
        Error::new(ErrorKind::Usage, message)
            .hint("describe the tools in the message, and ask for the call by the option schema")
    })
}

impl Form {
    fn grammar(self) -> Result<Grammar> {
        Ok(match self {
            Self::Schema(Value::String(text)) => Grammar::json_schema(&text)?,
            Self::Schema(schema) => Grammar::JsonSchema(schema),
            Self::Regex(regex) => Grammar::Regex(regex),
            Self::Lark(lark) => Grammar::Lark(lark),
            Self::Choice(choices) => Grammar::Choice(choices),
        })
    }
}

/// An answer, and the calls of tools that are in it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Answer {
    /// The text, without special tokens and stop texts.
    pub text: String,
    /// Every token that was chosen.
    pub tokens: Vec<u32>,
    /// Positions of the prompt.
    pub prompt_tokens: usize,
    /// Number of prompt positions whose state was there already.
    pub reused_tokens: usize,
    /// `eos`, `stop`, `length` or `cancelled`.
    pub finish_reason: &'static str,
    /// The stop text that ended it, if one did.
    pub stopped_at: Option<String>,
    /// The calls in it.
    pub tool_calls: Vec<ToolCall>,
    /// Time in which the prompt was consumed.
    pub prefill_seconds: f64,
    /// Time from the first token of the answer to its last.
    pub decode_seconds: f64,
}

impl Question {
    /// Converts a generation to an answer.
    pub(crate) fn answer(&self, texts: &TextPipeline, generation: Generation) -> Result<Answer> {
        let tool_calls = match &self.tools[..] {
            [] => Vec::new(),
            tools => texts.calls(&generation.tokens, tools)?,
        };
        let Generation { text, tokens, timings, prompt_tokens, reused_tokens, stopped_at, .. } =
            generation;
        Ok(Answer {
            text,
            tokens,
            prompt_tokens,
            reused_tokens,
            finish_reason: generation.finish_reason.name(),
            stopped_at,
            tool_calls,
            prefill_seconds: timings.prefill.as_secs_f64(),
            decode_seconds: timings.decode.as_secs_f64(),
        })
    }
}
