//! `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's interface.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use qhx::{CancelToken, FinishReason, Modality, ToolCall};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Answers, Delta, Step, Usage};
use crate::conversation::{Call, Conversation, Part, Turn, base64_part, url_part};
use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::{Fields, wrong};
use crate::generation_request::{Ask, Sampling, ToolChoice, cache_salt, format, is_foreign, stops};
use crate::ids;
use crate::pending::Pending;
use crate::queue::{Update, Work};
use crate::registry::{Ability, Served};
use crate::request::{Asked, Context};
use crate::sse::{self, Events, Writer};
use crate::tokens;

/// Fields that are refused.
pub(crate) const REFUSED: [&str; 2] = ["container", "mcp_servers"];

pub(crate) async fn create(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let model = fields.text("model")?.map(str::to_owned);
    let stream = fields.flag("stream")?.unwrap_or(false);
    let max_new = fields.count("max_tokens", 1, u32::MAX.into())?;
    let max_new = max_new.ok_or_else(|| fields.missing("max_tokens"))?;
    let ask = Ask { max_new: Some(max_new), ..context.memory.work(|| ask(&fields))? };
    let mut asked = context.ask(model, ask).await?;
    let (id, model) = (ids::new("msg_"), asked.model.clone());
    if stream {
        let writer = MessageWriter { id, model, open: None, index: 0 };
        return sse::stream(&context, asked, writer).await;
    }
    asked.answers.collect(asked.pending, &context.tally).await?;
    let answer = asked.answers.answers.first().ok_or_else(broken)?;
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        let thinking = json!({"type": "thinking", "thinking": answer.reasoning, "signature": ""});
        content.push(thinking);
    }
    if !answer.text.is_empty() || (content.is_empty() && answer.calls.is_empty()) {
        content.push(json!({"type": "text", "text": answer.text}));
    }
    content.extend(answer.calls.iter().map(|call| tool_use(call, call.arguments.clone())));
    let mut json = message(&id, &model, &content, &asked.answers.usage);
    (json["stop_reason"], json["stop_sequence"]) = end(answer);
    Ok(json_response(StatusCode::OK, &json))
}

pub(crate) async fn count_tokens(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let ask = context.memory.work(|| ask(&fields))?;
    let model = context.shared.registry.able(fields.text("model")?, Ability::Generate)?;
    let tokens = if ask.has_media() {
        // How many positions an image takes, only the model knows.
        let submit = move |context: Context| counting(&context, &model, ask);
        let Update::Counted(tokens) = context.blocking(submit).await?.only().await? else {
            return Err(broken());
        };
        tokens
    } else {
        let count = move |context: Context, ticket: &CancelToken| {
            tokens::of_conversation(&context, &model, &ask, ticket)
        };
        context.tokenizing(count).await?.len()
    };
    Ok(json_response(StatusCode::OK, &json!({"input_tokens": tokens})))
}

/// Has a model count the positions of a conversation.
fn counting(context: &Context, model: &Arc<Served>, ask: Ask) -> Result<Pending> {
    let info = context.info(model)?;
    let mut conversation = Conversation::new(&ask.turns, &info)?;
    let history = std::mem::take(&mut conversation.history);
    let request = Box::new(ask.prompt(conversation));
    let work = Work::Count { request, turns: ask.turns };
    Pending::submit(context, model, history, context.ticket(), work)
}

/// Reads the fields that both routes have.
fn ask(fields: &Fields<'_>) -> Result<Ask> {
    let mut turns = Vec::new();
    match fields.get("system") {
        None => {}
        Some(system) => {
            let parts = blocks(system, "system")?.parts;
            turns.push(Turn { role: "system".to_owned(), parts, ..Turn::default() });
        }
    }
    let messages = fields.list("messages")?.ok_or_else(|| fields.missing("messages"))?;
    for (at, message) in messages.iter().enumerate() {
        turns.extend(turns_of(message, &format!("messages[{at}]"))?);
    }
    fields.unsupported(&REFUSED)?;
    let config = fields.object("output_config")?;
    let config = config.map(|config| config.object("format")).transpose()?.flatten();
    let wanted =
        config.map_or_else(|| fields.object("output_format"), |wanted| Ok(Some(wanted)))?;
    let choice = fields.object("tool_choice")?;
    let one_call = match &choice {
        Some(choice) => choice.flag("disable_parallel_tool_use")?.unwrap_or(false),
        None => false,
    };
    let thinking = fields.object("thinking")?.map(|thinking| thinking.text("type")).transpose()?;
    Ok(Ask {
        turns,
        tools: tools(fields)?,
        choice: choice.map_or(Ok(ToolChoice::Auto), |choice| tool_choice(&choice))?,
        several_calls: !one_call,
        format: wanted.map_or(Ok(None), |wanted| format(&wanted))?,
        sampling: Sampling::read(fields)?,
        stop: stops(fields, "stop_sequences")?,
        choices: 1,
        thinking: thinking.flatten().map(|kind| kind != "disabled"),
        cache_salt: cache_salt(fields)?,
        ..Ask::default()
    })
}

fn tools(fields: &Fields<'_>) -> Result<Vec<Value>> {
    let tools = fields.list("tools")?.into_iter().flatten().enumerate();
    let tool = |(at, tool): (usize, &Value)| {
        let fields = Fields::of(tool, &format!("tools[{at}]"))?;
        if fields.text("type")?.is_some_and(is_foreign) {
            return Ok(None);
        }
        let mut function = Map::new();
        let name = fields.needed("name")?;
        function.insert("name".to_owned(), name.into());
        if let Some(description) = fields.text("description")? {
            function.insert("description".to_owned(), description.into());
        }
        let schema = fields.object("input_schema")?;
        let schema = schema.ok_or_else(|| fields.missing("input_schema"))?;
        function.insert("parameters".to_owned(), schema.map().clone().into());
        if fields.flag("strict")? == Some(true) {
            function.insert("strict".to_owned(), true.into());
        }
        Ok(Some(json!({"type": "function", "function": function})))
    };
    tools.map(tool).filter_map(Result::transpose).collect()
}

fn tool_choice(choice: &Fields<'_>) -> Result<ToolChoice> {
    match choice.needed("type")? {
        "auto" => Ok(ToolChoice::Auto),
        "none" => Ok(ToolChoice::None),
        "any" => Ok(ToolChoice::Required),
        "tool" => {
            let name = choice.needed("name")?;
            Ok(ToolChoice::One(name.to_owned()))
        }
        _ => Err(choice.wrong("type", "auto, any, tool or none")),
    }
}

/// A message: results of tools are turns of their own.
fn turns_of(value: &Value, place: &str) -> Result<Vec<Turn>> {
    let fields = Fields::of(value, place)?;
    let role = match fields.needed("role")? {
        role @ ("user" | "assistant" | "system") => role,
        _ => return Err(fields.wrong("role", "user or assistant")),
    };
    let content = fields.get("content").ok_or_else(|| fields.missing("content"))?;
    let Blocks { parts, calls, reasoning, mut results } = blocks(content, &fields.path("content"))?;
    if !parts.is_empty() || !calls.is_empty() {
        let role = role.to_owned();
        results.push(Turn { role, parts, calls, reasoning, ..Turn::default() });
    }
    Ok(results)
}

/// Parts of a content.
#[derive(Default)]
struct Blocks {
    parts: Vec<Part>,
    calls: Vec<Call>,
    reasoning: Option<String>,
    results: Vec<Turn>,
}

fn blocks(content: &Value, place: &str) -> Result<Blocks> {
    let mut blocks = Blocks::default();
    match content {
        Value::String(text) => blocks.parts.push(Part::Text(text.clone())),
        Value::Array(list) => {
            for (at, block) in list.iter().enumerate() {
                blocks.add(&Fields::of(block, &format!("{place}[{at}]"))?)?;
            }
        }
        other => return Err(wrong(place, "a string or a list of blocks", other)),
    }
    Ok(blocks)
}

impl Blocks {
    fn add(&mut self, block: &Fields<'_>) -> Result<()> {
        let needed = |name| block.needed(name).map(str::to_owned);
        match block.needed("type")? {
            "text" => self.parts.push(Part::Text(needed("text")?)),
            "image" => self.parts.push(image(block)?),
            "thinking" => self.reasoning = Some(needed("thinking")?),
            // What only its author can read.
            "redacted_thinking" => {}
            "tool_use" => self.calls.push(Call {
                id: needed("id")?,
                name: needed("name")?,
                arguments: block.get("input").cloned().unwrap_or_else(|| Map::new().into()),
            }),
            "tool_result" => {
                let parts = match block.get("content") {
                    Some(content) => blocks(content, &block.path("content"))?.parts,
                    None => Vec::new(),
                };
                let call_id = Some(needed("tool_use_id")?);
                let role = "tool".to_owned();
                self.results.push(Turn { role, parts, call_id, ..Turn::default() });
            }
            _ => {
                let expected = "text, image, thinking, tool_use or tool_result";
                return Err(block.wrong("type", expected));
            }
        }
        Ok(())
    }
}

fn image(block: &Fields<'_>) -> Result<Part> {
    let source = block.object("source")?.ok_or_else(|| block.missing("source"))?;
    match source.text("type")? {
        Some("base64") => {
            let data = source.needed("data")?;
            base64_part(Modality::Image, data, &source.path("data"))
        }
        _ => {
            let url = source.text("url")?.unwrap_or_default();
            url_part(Modality::Image, url, &source.path("url"))
        }
    }
}

/// Why an answer ended, in this interface's words: `stop_reason` and `stop_sequence`.
fn end(answer: &Answer) -> (Value, Value) {
    match (answer.finish, &answer.stopped_at) {
        (Some(FinishReason::Length), _) => ("max_tokens".into(), Value::Null),
        _ if !answer.calls.is_empty() => ("tool_use".into(), Value::Null),
        (_, Some(stop)) => ("stop_sequence".into(), stop.as_str().into()),
        _ => ("end_turn".into(), Value::Null),
    }
}

/// Tokens of a prompt that were not there already are counted apart from those that were.
fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    })
}

fn message(id: &str, model: &str, content: &[Value], used: &Usage) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(used),
    })
}

fn tool_use(call: &ToolCall, input: Value) -> Value {
    json!({"type": "tool_use", "id": ids::new("toolu_"), "name": call.name, "input": input})
}

/// Kinds of blocks that come piece by piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
}

/// Writes events.
struct MessageWriter {
    id: String,
    model: String,
    open: Option<Block>,
    /// Blocks that were closed.
    index: usize,
}

impl MessageWriter {
    fn event(events: &mut Events, kind: &str, more: Value) {
        let mut event = json!({"type": kind});
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        events.named(kind, &event);
    }

    fn close(&mut self, events: &mut Events) {
        if self.open.take().is_some() {
            Self::event(events, "content_block_stop", json!({"index": self.index}));
            self.index += 1;
        }
    }

    fn open(&mut self, block: Block, events: &mut Events) {
        if self.open == Some(block) {
            return;
        }
        self.close(events);
        self.open = Some(block);
        let empty = match block {
            Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Block::Text => json!({"type": "text", "text": ""}),
        };
        let more = json!({"index": self.index, "content_block": empty});
        Self::event(events, "content_block_start", more);
    }

    fn delta(&self, delta: &Value, events: &mut Events) {
        let more = json!({"index": self.index, "delta": delta});
        Self::event(events, "content_block_delta", more);
    }

    fn call(&mut self, call: &ToolCall, events: &mut Events) {
        self.close(events);
        let block = tool_use(call, Map::new().into());
        let more = json!({"index": self.index, "content_block": block});
        Self::event(events, "content_block_start", more);
        let input = call.arguments.to_string();
        self.delta(&json!({"type": "input_json_delta", "partial_json": input}), events);
        Self::event(events, "content_block_stop", json!({"index": self.index}));
        self.index += 1;
    }
}

impl Writer for MessageWriter {
    fn begin(&mut self, _: &mut Events) {}

    fn step(&mut self, step: &Step, answers: &Answers, events: &mut Events) {
        if step.prefilled {
            let message = message(&self.id, &self.model, &[], &answers.usage);
            Self::event(events, "message_start", json!({"message": message}));
        }
        for delta in &step.deltas {
            match delta {
                Delta::Reasoning(text) => {
                    self.open(Block::Thinking, events);
                    self.delta(&json!({"type": "thinking_delta", "thinking": text}), events);
                }
                Delta::Text(text) => {
                    self.open(Block::Text, events);
                    self.delta(&json!({"type": "text_delta", "text": text}), events);
                }
                Delta::Call(call) => self.call(call, events),
            }
        }
    }

    fn end(&mut self, answers: &Answers, events: &mut Events) {
        if self.index == 0 && self.open.is_none() {
            self.open(Block::Text, events);
        }
        self.close(events);
        if let Some(answer) = answers.answers.first() {
            let (reason, sequence) = end(answer);
            let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
            let more = json!({"delta": delta, "usage": usage(&answers.usage)});
            Self::event(events, "message_delta", more);
        }
        Self::event(events, "message_stop", json!({}));
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &error.anthropic());
    }
}
