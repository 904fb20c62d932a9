//! `/v1/responses`.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Extension;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use qhx::{FinishReason, TextPipeline, ToolCall};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Answers, Delta, Step, Usage};
use crate::app::Shared;
use crate::chat::logprob;
use crate::conversation::{Call, Turn, arguments, parts};
use crate::custom_tools::CustomTools;
use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::{Fields, wrong};
use crate::generation_request::{
    Ask, GenerationRequest, MAX_TOP, Sampling, ToolChoice, cache_salt, format, is_foreign, tools,
};
use crate::ids;
use crate::request::{Asked, Context};
use crate::sse::{self, Events, Writer};
use crate::stored_responses::{Owner, References, StoredResponse};

/// Fields of a request that the response repeats.
const ECHOED: [&str; 13] = [
    "instructions",
    "max_output_tokens",
    "temperature",
    "top_p",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "truncation",
    "max_tool_calls",
];

/// Fields that are refused.
pub(crate) const REFUSED: [&str; 2] = ["background", "prompt"];
/// Value of `include` that asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

pub(crate) async fn create(Asked { context, mut map }: Asked) -> Result<Response> {
    let input = input(map.remove("input").unwrap_or_default())?;
    let fields = Fields::new(&map);
    let model = fields.text("model")?.map(str::to_owned);
    let stream = fields.flag("stream")?.unwrap_or(false);
    let previous = fields.text("previous_response_id")?;
    let stored = &context.shared.stored;
    let previous = previous.map(|id| stored.previous(context.key, id)).transpose()?;
    let refers = |item: &Value| item["type"] == "item_reference";
    let stored = previous.is_some() || input.iter().any(refers);
    let ask = || ask(&fields, &input, previous.as_deref(), &context);
    // Stored conversations may be long, however short the request is.
    let ask = if stored { tokio::task::block_in_place(ask) } else { context.memory.work(ask) }?;
    let keeper = fields.flag("store")?.unwrap_or(true).then(|| Keeper {
        shared: Arc::clone(&context.shared),
        owner: context.key,
        previous,
        input,
    });
    let mut asked = context.ask(model, ask).await?;
    let mut writer = ResponseWriter::new(&asked, &map, keeper);
    if stream {
        return sse::stream(&context, asked, writer).await;
    }
    asked.answers.collect(asked.pending, &context.tally).await?;
    let answer = asked.answers.answers.first().ok_or_else(broken)?;
    writer.whole(answer, &asked.answers.usage);
    let json = writer.response(status(answer), &asked.answers);
    writer.keep(&json);
    Ok(json_response(StatusCode::OK, &json))
}

/// A stored response.
pub(crate) async fn retrieve(
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Response> {
    let stored = context.shared.stored.find(context.key, &id).ok_or_else(|| unknown(&id))?;
    Ok(json_response(StatusCode::OK, &stored.response()))
}

/// Forgets a stored response.
pub(crate) async fn forget(
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Response> {
    if !context.shared.stored.remove(context.key, &id) {
        return Err(unknown(&id));
    }
    let json = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(StatusCode::OK, &json))
}

/// The items that a stored response was asked with.
pub(crate) async fn input_items(
    Extension(context): Extension<Context>,
    Path(id): Path<String>,
) -> Result<Response> {
    let stored = context.shared.stored.find(context.key, &id).ok_or_else(|| unknown(&id))?;
    let items = stored.input();
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let json = json!({
        "object": "list",
        "first_id": id(items.first()),
        "last_id": id(items.last()),
        "has_more": false,
        "data": items,
    });
    Ok(json_response(StatusCode::OK, &json))
}

fn unknown(id: &str) -> ApiError {
    let message =
        format!("there is no response {id:?}: it was not stored, or was removed for later ones");
    ApiError::new(StatusCode::NOT_FOUND, message).code("response_not_found")
}

/// The items of a request, each with an id.
fn input(given: Value) -> Result<Vec<Value>> {
    let mut items = match given {
        Value::Null => {
            let error = ApiError::bad("input", "it is missing");
            return Err(error.code("missing_required_parameter"));
        }
        Value::String(text) => {
            let part = json!({"type": "input_text", "text": text});
            vec![json!({"type": "message", "role": "user", "content": [part]})]
        }
        Value::Array(items) => items,
        other => return Err(wrong("input", "a string or a list of items", &other)),
    };
    for item in items.iter_mut().filter_map(Value::as_object_mut) {
        item.entry("id").or_insert_with(|| ids::new("item_").into());
    }
    Ok(items)
}

fn ask(
    fields: &Fields<'_>,
    input: &[Value],
    previous: Option<&StoredResponse>,
    context: &Context,
) -> Result<Ask> {
    if fields.get("conversation").is_some() {
        let message = "conversations are not stored: go on from previous_response_id, or send all of it as input";
        return Err(ApiError::bad("conversation", message).code("unsupported"));
    }
    fields.unsupported(&REFUSED)?;
    let top = fields.count("top_logprobs", 0, MAX_TOP)?;
    let included = fields.texts("include")?.iter().any(|name| name == LOGPROBS);
    let mut turns = Vec::new();
    turns.extend(fields.text("instructions")?.map(|text| Turn::text("system", text)));
    let mut references = References::new(&context.shared.stored, context.key);
    let said = previous.map(StoredResponse::conversation).unwrap_or_default();
    for (at, item) in said.iter().enumerate() {
        add(item, &format!("previous_response_id[{at}]"), &mut references, &mut turns)?;
    }
    for (at, item) in input.iter().enumerate() {
        add(item, &format!("input[{at}]"), &mut references, &mut turns)?;
    }
    let text = fields.object("text")?;
    let wanted = text.map(|text| text.object("format")).transpose()?.flatten();
    let mut ask = Ask {
        turns,
        tools: tools(fields)?,
        choice: ToolChoice::read(fields)?,
        several_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
        format: wanted.map_or(Ok(None), |wanted| format(&wanted))?,
        sampling: Sampling::read(fields)?,
        max_new: fields.count("max_output_tokens", 1, u32::MAX.into())?,
        choices: 1,
        logprobs: top.filter(|top| *top > 0).or(included.then_some(0)),
        cache_salt: cache_salt(fields)?,
        truncates: match fields.text("truncation")? {
            None | Some("disabled") => false,
            Some("auto") => true,
            Some(_) => return Err(fields.wrong("truncation", "auto or disabled")),
        },
        ..Ask::default()
    };
    // Bounds calls of tools that a maker's servers run: there are none.
    fields.count("max_tool_calls", 0, u32::MAX.into())?;
    let reasoning = fields.object("reasoning")?;
    ask.effort(reasoning.map(|reasoning| reasoning.text("effort")).transpose()?.flatten());
    Ok(ask)
}

/// Adds an item of the input to a conversation.
fn add(
    item: &Value,
    place: &str,
    references: &mut References<'_>,
    turns: &mut Vec<Turn>,
) -> Result<()> {
    let fields = Fields::of(item, place)?;
    let needed = |name| fields.needed(name).map(str::to_owned);
    match fields.text("type")?.unwrap_or("message") {
        "message" => turns.push(Turn::of_chat(item, place)?),
        "function_call" => {
            let call = Call {
                id: needed("call_id")?,
                name: needed("name")?,
                arguments: arguments(fields.get("arguments")),
            };
            add_call(call, turns);
        }
        "custom_tool_call" => {
            let call = Call {
                id: needed("call_id")?,
                name: needed("name")?,
                arguments: CustomTools::arguments(fields.needed("input")?),
            };
            add_call(call, turns);
        }
        "function_call_output" | "custom_tool_call_output" => turns.push(Turn {
            role: "tool".to_owned(),
            parts: parts(fields.get("output"), &fields.path("output"))?,
            call_id: Some(needed("call_id")?),
            ..Turn::default()
        }),
        "item_reference" => {
            let id = fields.needed("id")?;
            let item = references.item(id);
            let item = item.filter(|item| item["type"] != "item_reference").ok_or_else(|| {
                let message = format!(
                    "there is no stored item {id:?}, or it was referred to before: send the item itself"
                );
                ApiError::bad(fields.path("id"), message).code("item_not_found")
            })?;
            add(&item, place, references, turns)?;
        }
        // What was thought is not said again, and calls of other servers' tools have left no result.
        "reasoning" => {}
        kind if is_foreign(kind) => {}
        _ => {
            let expected = "message, function_call, custom_tool_call, their outputs, item_reference or reasoning";
            return Err(fields.wrong("type", expected));
        }
    }
    Ok(())
}

/// Adds a call to the answer before it, which it belongs to.
fn add_call(call: Call, turns: &mut Vec<Turn>) {
    match turns.last_mut().filter(|turn| turn.role == "assistant") {
        Some(turn) => turn.calls.push(call),
        None => {
            let role = "assistant".to_owned();
            turns.push(Turn { role, calls: vec![call], ..Turn::default() });
        }
    }
}

fn status(answer: &Answer) -> &'static str {
    match answer.finish {
        Some(FinishReason::Length) => "incomplete",
        _ => "completed",
    }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    })
}

/// Kind of content that is streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Text,
}

impl Kind {
    /// Beginning of the names of its events.
    fn name(self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text",
            Self::Text => "response.output_text",
        }
    }

    fn part(self, text: &str, logprobs: &[Value]) -> Value {
        match self {
            Self::Reasoning => json!({"type": "reasoning_text", "text": text}),
            Self::Text => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
            }
        }
    }

    fn item(self, id: &str, status: &str, content: Value) -> Value {
        match self {
            Self::Reasoning => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": content, "status": status})
            }
            Self::Text => json!({
                "id": id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }),
        }
    }
}

/// An item that is not whole.
struct Open {
    kind: Kind,
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

/// Stores the response once it is there.
struct Keeper {
    shared: Shared,
    owner: Owner,
    previous: Option<Arc<StoredResponse>>,
    /// The items of the request.
    input: Vec<Value>,
}

/// Writes events, and collects the items of the response.
struct ResponseWriter {
    keeper: Option<Keeper>,
    id: String,
    model: String,
    created: u64,
    custom: CustomTools,
    /// Fields of the request that the response repeats.
    echoed: Map<String, Value>,
    items: Vec<Value>,
    texts: Arc<TextPipeline>,
    /// Log-probabilities of tokens whose text is held back.
    logprobs: Vec<Value>,
    open: Option<Open>,
    /// Events so far.
    sequence: u64,
}

impl ResponseWriter {
    fn new(
        asked: &GenerationRequest,
        request: &Map<String, Value>,
        keeper: Option<Keeper>,
    ) -> Self {
        let given = |name: &str| request.get(name).cloned().unwrap_or_default();
        let mut echoed: Map<_, _> =
            ECHOED.iter().map(|name| ((*name).to_owned(), given(name))).collect();
        for (name, default) in [
            ("temperature", json!(asked.sampling.temperature)),
            ("top_p", json!(asked.sampling.top_p)),
            ("tools", json!([])),
            ("tool_choice", json!("auto")),
            ("text", json!({"format": {"type": "text"}})),
            ("reasoning", json!({"effort": null, "summary": null})),
            ("metadata", json!({})),
            ("parallel_tool_calls", json!(true)),
            ("truncation", json!("disabled")),
        ] {
            if echoed.get(name).is_none_or(Value::is_null) {
                echoed.insert(name.to_owned(), default);
            }
        }
        Self {
            keeper,
            id: ids::new("resp_"),
            model: asked.model.clone(),
            created: ids::now(),
            custom: CustomTools::of(request),
            echoed,
            items: Vec::new(),
            texts: Arc::clone(&asked.texts),
            logprobs: Vec::new(),
            open: None,
            sequence: 0,
        }
    }

    fn response(&self, status: &str, answers: &Answers) -> Value {
        let over = status == "completed" || status == "incomplete";
        let details = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": details,
            "model": self.model,
            "output": self.items,
            "store": self.keeper.is_some(),
            "service_tier": "default",
            "usage": over.then(|| usage(&answers.usage)),
        });
        if let Some(response) = response.as_object_mut() {
            response.extend(self.echoed.clone());
        }
        response
    }

    /// Stores the response, where it is to be and is not too large.
    fn keep(&mut self, response: &Value) {
        let Some(Keeper { shared, owner, previous, input }) = self.keeper.take() else { return };
        if !shared.stored.keep(owner, &self.id, previous, &input, response) {
            tracing::info!("{} is too large to be stored", self.id);
        }
    }

    fn event(&mut self, kind: &str, more: Value, events: &mut Events) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        events.named(kind, &event);
    }

    fn add_item(&mut self, item: &Value, events: &mut Events) {
        let more = json!({"output_index": self.items.len(), "item": item});
        self.event("response.output_item.added", more, events);
    }

    fn finish_item(&mut self, item: Value, events: &mut Events) {
        let more = json!({"output_index": self.items.len(), "item": item});
        self.event("response.output_item.done", more, events);
        self.items.push(item);
    }

    /// Position of a part of an item.
    fn place(&self, id: &str) -> Map<String, Value> {
        let mut place = Map::new();
        place.insert("item_id".to_owned(), id.into());
        place.insert("output_index".to_owned(), self.items.len().into());
        place.insert("content_index".to_owned(), 0.into());
        place
    }

    fn text(&mut self, kind: Kind, text: &str, events: &mut Events) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close("completed", events);
            let id = ids::new(if kind == Kind::Text { "msg_" } else { "rs_" });
            self.add_item(&kind.item(&id, "in_progress", json!([])), events);
            let mut more = self.place(&id);
            more.insert("part".to_owned(), kind.part("", &[]));
            self.event("response.content_part.added", more.into(), events);
            self.open = Some(Open { kind, id, text: String::new(), logprobs: Vec::new() });
        }
        let logprobs = std::mem::take(&mut self.logprobs);
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        open.logprobs.extend_from_slice(&logprobs);
        let id = open.id.clone();
        let mut more = self.place(&id);
        more.insert("delta".to_owned(), text.into());
        if kind == Kind::Text {
            more.insert("logprobs".to_owned(), logprobs.into());
        }
        self.event(&format!("{}.delta", kind.name()), more.into(), events);
    }

    fn close(&mut self, status: &str, events: &mut Events) {
        let Some(Open { kind, id, text, logprobs }) = self.open.take() else { return };
        let mut more = self.place(&id);
        more.insert("text".to_owned(), text.as_str().into());
        if kind == Kind::Text {
            more.insert("logprobs".to_owned(), logprobs.clone().into());
        }
        self.event(&format!("{}.done", kind.name()), more.into(), events);
        let part = kind.part(&text, &logprobs);
        let mut more = self.place(&id);
        more.insert("part".to_owned(), part.clone());
        self.event("response.content_part.done", more.into(), events);
        self.finish_item(kind.item(&id, status, json!([part])), events);
    }

    fn call(&mut self, call: &ToolCall, events: &mut Events) {
        self.close("completed", events);
        let custom = self.custom.input(call);
        let (prefix, kind, field, name) = match custom {
            Some(_) => ("ctc_", "custom_tool_call", "input", "custom_tool_call_input"),
            None => ("fc_", "function_call", "arguments", "function_call_arguments"),
        };
        let text = custom.map_or_else(|| call.arguments.to_string(), Cow::into_owned);
        let (id, call_id) = (ids::new(prefix), ids::new("call_"));
        let item = |status: &str, text: &str| {
            json!({
                "id": id,
                "type": kind,
                "status": status,
                "call_id": call_id,
                "name": call.name,
                field: text,
            })
        };
        self.add_item(&item("in_progress", ""), events);
        let output_index = self.items.len();
        let more = json!({"item_id": id, "output_index": output_index, "delta": text});
        self.event(&format!("response.{name}.delta"), more, events);
        let more = json!({
            "item_id": id,
            "output_index": output_index,
            "name": call.name,
            field: text,
        });
        self.event(&format!("response.{name}.done"), more, events);
        self.finish_item(item("completed", &text), events);
    }

    fn delta(&mut self, delta: &Delta, events: &mut Events) {
        match delta {
            Delta::Reasoning(text) => {
                self.logprobs.clear();
                self.text(Kind::Reasoning, text, events);
            }
            Delta::Text(text) => self.text(Kind::Text, text, events),
            Delta::Call(call) => self.call(call, events),
        }
    }

    /// The items of an answer that is whole.
    fn whole(&mut self, answer: &Answer, usage: &Usage) {
        let mut unsent = Events::default();
        for (kind, text) in [(Kind::Reasoning, &answer.reasoning), (Kind::Text, &answer.text)] {
            if !text.is_empty() {
                if kind == Kind::Text {
                    let tokens = answer.logprobs.iter().skip(usage.reasoning);
                    self.logprobs = tokens.map(|token| logprob(token, &self.texts)).collect();
                }
                self.text(kind, text, &mut unsent);
            }
        }
        answer.calls.iter().for_each(|call| self.call(call, &mut unsent));
        self.close(status(answer), &mut unsent);
    }
}

impl Writer for ResponseWriter {
    fn begin(&mut self, events: &mut Events) {
        let none = Answers::new(Vec::new(), 1);
        let response = self.response("in_progress", &none);
        self.event("response.created", json!({"response": response}), events);
        self.event("response.in_progress", json!({"response": response}), events);
    }

    fn step(&mut self, step: &Step, _: &Answers, events: &mut Events) {
        self.logprobs.extend(step.logprobs.iter().map(|token| logprob(token, &self.texts)));
        step.deltas.iter().for_each(|delta| self.delta(delta, events));
    }

    fn end(&mut self, answers: &Answers, events: &mut Events) {
        let status = answers.answers.first().map_or("completed", status);
        self.close(status, events);
        let response = self.response(status, answers);
        self.keep(&response);
        self.event(&format!("response.{status}"), json!({"response": response}), events);
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        let mut response = self.response("failed", &Answers::new(Vec::new(), 1));
        let error = error.json()["error"].clone();
        response["error"] = json!({"code": error["code"], "message": error["message"]});
        self.event("response.failed", json!({"response": response}), events);
    }
}
