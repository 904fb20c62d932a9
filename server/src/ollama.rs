//! Ollama's interface (`/api/…`): its requests as those of OpenAI's interface, and its lines of JSON.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::{SignedDuration, Timestamp};
use qhx::ToolCall;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Answers, Delta, Step};
use crate::completions::Completion;
use crate::embeddings::{self, Embedded, vectors};
use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::{Fields, wrong};
use crate::generation_request::{Ask, GENERATION, GenerationRequest};
use crate::ids;
use crate::registry::{Ability, Served};
use crate::request::{Asked, Context};
use crate::sse::{self, Events, Writer};

/// Fields that are refused.
pub(crate) const REFUSED: [&str; 2] = ["template", "context"];

/// Version of Ollama whose interface this is: clients look for what they need by it.
const VERSION: &str = "0.12.0";
/// Tag that stands for none.
const LATEST: &str = ":latest";
/// Time of a model that is never unloaded, as Ollama gives it.
const NEVER: i64 = 10_000_000_000;
/// Options of a model under other names than those of OpenAI's interface.
const RENAMED: [(&str, &str); 2] =
    [("repeat_penalty", "repetition_penalty"), ("num_predict", "max_tokens")];

pub(crate) async fn version() -> Response {
    json_response(StatusCode::OK, &json!({"version": VERSION}))
}

pub(crate) async fn tags(Extension(context): Extension<Context>) -> Response {
    let models = context.shared.registry.models();
    let models = models.iter().map(|model| {
        let mut json = listed(model);
        json["modified_at"] = time(model.facts().created).into();
        json
    });
    json_response(StatusCode::OK, &json!({"models": models.collect::<Vec<_>>()}))
}

pub(crate) async fn loaded(Extension(context): Extension<Context>) -> Response {
    let models = context.shared.registry.models();
    let models = models.iter().filter(|model| model.is_loaded());
    let models = models.map(|model| {
        let mut json = listed(model);
        let left = model.expires().map(|at| at.saturating_duration_since(Instant::now()));
        let at = left.map_or(NEVER as u64, |left| ids::now().saturating_add(left.as_secs()));
        json["expires_at"] = time(at).into();
        json["size_vram"] = model.loaded_bytes().into();
        json["context_length"] = model.positions().into();
        json
    });
    json_response(StatusCode::OK, &json!({"models": models.collect::<Vec<_>>()}))
}

pub(crate) async fn show(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let model = find(&context, &fields)?;
    let of = Arc::clone(&model);
    // What a template can do is known once it is read.
    let info = context.blocking(move |context| context.info(&of)).await?;
    let facts = model.facts();
    let mut about = Map::new();
    about.insert("general.architecture".to_owned(), facts.family.into());
    for (name, value) in [
        ("context_length", model.positions()),
        ("embedding_length", facts.hidden),
        ("block_count", facts.layers),
    ] {
        if let Some(value) = value {
            about.insert(format!("{}.{name}", facts.family), value.into());
        }
    }
    let generates = model.can(Ability::Generate);
    let capabilities = [
        ("completion", generates),
        ("tools", generates && info.can_call),
        ("vision", generates && model.sees()),
        ("embedding", model.can(Ability::Embed)),
    ];
    let capabilities = capabilities.into_iter().filter(|(_, can)| *can).map(|(name, _)| name);
    let json = json!({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(&model),
        "model_info": about,
        "capabilities": capabilities.collect::<Vec<_>>(),
        "modified_at": time(facts.created),
    });
    Ok(json_response(StatusCode::OK, &json))
}

pub(crate) async fn refused() -> ApiError {
    let message = "none is made here: qhx forge makes a bundle, and qhx serve serves it";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message).code("not_served")
}

pub(crate) async fn chat(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let stream = fields.flag("stream")?.unwrap_or(true);
    let model = begin(&context, &fields)?;
    let messages = fields.list("messages")?.map_or(&[][..], Vec::as_slice);
    if messages.is_empty() {
        return only_load(context, &fields, model, true).await;
    }
    let mut request = options(&fields)?;
    let turn = |(at, value)| message(value, &format!("messages[{at}]"));
    let messages = messages.iter().enumerate().map(turn).collect::<Result<Vec<_>>>()?;
    request.insert("messages".to_owned(), messages.into());
    if let Some(tools) = fields.get("tools") {
        request.insert("tools".to_owned(), tools.clone());
    }
    let ask = context.memory.work(|| Ask::of_chat(&Fields::new(&request)))?;
    let asked = context.ask(Some(model.name.clone()), ask).await?;
    respond(&context, asked, (true, stream)).await
}

pub(crate) async fn generate(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let stream = fields.flag("stream")?.unwrap_or(true);
    let model = begin(&context, &fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let images = fields.texts("images")?;
    if prompt.is_empty() && images.is_empty() {
        return only_load(context, &fields, model, false).await;
    }
    fields.unsupported(&REFUSED)?;
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    let mut request = options(&fields)?;
    let of = Arc::clone(&model);
    let info = context.blocking(move |context| context.info(&of)).await?;
    let raw = fields.flag("raw")?.unwrap_or(false) || suffix.is_some();
    let asked = if raw || !info.texts.can_chat() {
        request.insert("suffix".to_owned(), suffix.into());
        request.insert("prompt".to_owned(), prompt.into());
        request.entry("max_tokens").or_insert_with(|| info.texts.max_ctx().into());
        request.remove("reasoning_effort");
        let completion = context.memory.work(|| Completion::read(&Fields::new(&request)))?;
        let submit = move |context: Context| completion.submit(&context, Some(&model.name));
        context.blocking(submit).await?.0
    } else {
        let system = fields.text("system")?.filter(|system| !system.is_empty());
        let system = system.map(|system| json!({"role": "system", "content": system}));
        let user = json!({"role": "user", "content": content(prompt, &images)});
        let messages: Vec<_> = system.into_iter().chain([user]).collect();
        request.insert("messages".to_owned(), messages.into());
        let ask = context.memory.work(|| Ask::of_chat(&Fields::new(&request)))?;
        context.ask(Some(model.name.clone()), ask).await?
    };
    respond(&context, asked, (false, stream)).await
}

pub(crate) async fn embed(Asked { context, map }: Asked) -> Result<Response> {
    let began = Instant::now();
    let fields = Fields::new(&map);
    let mut request = Map::new();
    request.insert("truncate".to_owned(), fields.flag("truncate")?.unwrap_or(true).into());
    for name in ["input", "dimensions"] {
        request.insert(name.to_owned(), fields.get(name).cloned().unwrap_or_default());
    }
    let Embedded { model, vectors, tokens } = embedded(&context, &fields, request).await?;
    let respond = || {
        let json = json!({
            "model": model,
            "embeddings": vectors,
            "total_duration": nanoseconds(began.elapsed()),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        });
        json_response(StatusCode::OK, &json)
    };
    Ok(embeddings::written(vectors.len(), respond))
}

/// The older form, of one text.
pub(crate) async fn embeddings(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let mut request = Map::new();
    request.insert("input".to_owned(), fields.needed("prompt")?.into());
    request.insert("truncate".to_owned(), true.into());
    let found = embedded(&context, &fields, request).await?;
    let vector = found.vectors.into_iter().next().ok_or_else(broken)?;
    Ok(json_response(StatusCode::OK, &json!({"embedding": vector})))
}

async fn embedded(
    context: &Context,
    fields: &Fields<'_>,
    mut request: Map<String, Value>,
) -> Result<Embedded> {
    let model = begin(context, fields)?;
    request.insert("model".to_owned(), model.name.as_str().into());
    vectors(context, &Fields::new(&request)).await
}

/// Name of the model that is asked for, without the tag that stands for none.
pub(crate) fn name<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>> {
    let name = fields.text("model")?.map_or_else(|| fields.text("name"), |name| Ok(Some(name)))?;
    Ok(name.map(|name| name.strip_suffix(LATEST).unwrap_or(name)))
}

fn find(context: &Context, fields: &Fields<'_>) -> Result<Arc<Served>> {
    context.shared.registry.find(name(fields)?)
}

/// The model that is asked for, which is kept as long as the request wants.
fn begin(context: &Context, fields: &Fields<'_>) -> Result<Arc<Served>> {
    let model = find(context, fields)?;
    if let Some(keep) = keep_alive(fields)? {
        model.keep(keep);
    }
    Ok(model)
}

/// `keep_alive`: seconds, or a text such as `5m`; less than 0 keeps the model.
fn keep_alive(fields: &Fields<'_>) -> Result<Option<Option<Duration>>> {
    let Some(value) = fields.get("keep_alive") else { return Ok(None) };
    let seconds = match value {
        Value::String(text) => match text.parse() {
            Ok(seconds) => Some(seconds),
            Err(_) => text.parse().ok().map(|time: SignedDuration| time.as_secs_f64()),
        },
        value => value.as_f64(),
    };
    let expected = "seconds, or a time such as \"5m\"";
    let seconds = seconds.filter(|seconds| seconds.is_finite());
    let seconds = seconds.ok_or_else(|| wrong("keep_alive", expected, value))?;
    Ok(Some(Duration::try_from_secs_f64(seconds).ok()))
}

/// Loads a model, or has it unloaded, for a request that asks for nothing else.
async fn only_load(
    context: Context,
    fields: &Fields<'_>,
    model: Arc<Served>,
    chat: bool,
) -> Result<Response> {
    let unloads = keep_alive(fields)? == Some(Some(Duration::ZERO));
    let name = model.name.clone();
    if unloads {
        // Files are unmapped, which takes time.
        let unload = move |_| {
            model.unload_soon();
            Ok(())
        };
        context.blocking(unload).await?;
    } else {
        let load = move |context: Context| {
            let loaded = context.shared.registry.load(&model, &context.shared.metrics);
            loaded.map_err(|e| ApiError::of_model(&e, &model.name))
        };
        context.blocking(load).await?;
    }
    let mut json = json!({
        "model": name,
        "created_at": now(),
        "done": true,
        "done_reason": if unloads { "unload" } else { "load" },
    });
    match chat {
        true => json["message"] = json!({"role": "assistant", "content": ""}),
        false => json["response"] = "".into(),
    }
    Ok(json_response(StatusCode::OK, &json))
}

/// Options of a request in the words of OpenAI's interface.
fn options(fields: &Fields<'_>) -> Result<Map<String, Value>> {
    let mut request = Map::new();
    if let Some(options) = fields.object("options")? {
        let own = GENERATION.iter().map(|name| (*name, *name));
        for (from, to) in RENAMED.into_iter().chain(own) {
            if let Some(value) = options.get(from) {
                request.insert(to.to_owned(), value.clone());
            }
        }
    }
    // Less than 1: as many as there is room for.
    if request.get("max_tokens").and_then(Value::as_i64).is_some_and(|count| count < 1) {
        request.remove("max_tokens");
    }
    let format = match fields.get("format") {
        Some(Value::String(text)) if text.is_empty() => None,
        Some(Value::String(text)) if text == "json" => Some(json!({"type": "json_object"})),
        Some(schema @ Value::Object(_)) => Some(
            json!({"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}),
        ),
        None => None,
        Some(other) => return Err(wrong("format", "\"json\" or a JSON schema", other)),
    };
    request.extend(format.map(|format| ("response_format".to_owned(), format)));
    match fields.get("think") {
        None => {}
        Some(Value::Bool(true)) => {
            let arguments = json!({"enable_thinking": true});
            request.insert("chat_template_kwargs".to_owned(), arguments);
        }
        Some(Value::Bool(false)) => {
            request.insert("reasoning_effort".to_owned(), "none".into());
        }
        Some(Value::String(effort)) => {
            request.insert("reasoning_effort".to_owned(), effort.as_str().into());
        }
        Some(other) => return Err(wrong("think", "true, false or an effort", other)),
    }
    Ok(request)
}

/// A message of a conversation in the form of OpenAI's interface.
fn message(value: &Value, place: &str) -> Result<Value> {
    let fields = Fields::of(value, place)?;
    let text = fields.text("content")?.unwrap_or_default();
    let mut message = json!({
        "role": fields.needed("role")?,
        "content": content(text, &fields.texts("images")?),
        "reasoning_content": fields.text("thinking")?,
        "name": fields.text("tool_name")?.map_or_else(|| fields.text("name"), |n| Ok(Some(n)))?,
        "tool_call_id": fields.text("tool_call_id")?,
    });
    if let Some(calls) = fields.list("tool_calls")? {
        message["tool_calls"] = calls.clone().into();
    }
    Ok(message)
}

/// A text with images in base64.
fn content(text: &str, images: &[String]) -> Value {
    if images.is_empty() {
        return text.into();
    }
    let url = |data: &String| match data.starts_with("data:") {
        true => data.clone(),
        // The first bytes tell the format.
        false => format!("data:image/png;base64,{data}"),
    };
    let images =
        images.iter().map(|image| json!({"type": "image_url", "image_url": {"url": url(image)}}));
    images.chain([json!({"type": "text", "text": text})]).collect()
}

async fn respond(
    context: &Context,
    mut asked: GenerationRequest,
    (chat, stream): (bool, bool),
) -> Result<Response> {
    let mut writer = LineWriter::new(&asked.model, chat);
    if stream {
        return sse::stream(context, asked, writer).await;
    }
    while let Some(update) = asked.pending.next().await? {
        if let Some(step) = asked.answers.take(update)? {
            writer.note(&step);
        }
        asked.answers.note(&context.tally);
    }
    let answer = asked.answers.answers.first().filter(|answer| answer.finish.is_some());
    let answer = answer.ok_or_else(broken)?;
    let said = writer.said(&answer.text, &answer.reasoning, &answer.calls);
    let json = writer.last(said, &asked.answers);
    Ok(json_response(StatusCode::OK, &json))
}

/// Writes lines.
struct LineWriter {
    model: String,
    chat: bool,
    began: Instant,
    /// When the prompt was consumed.
    prefilled: Option<Instant>,
}

impl LineWriter {
    fn new(model: &str, chat: bool) -> Self {
        Self { model: model.to_owned(), chat, began: Instant::now(), prefilled: None }
    }

    fn note(&mut self, step: &Step) {
        if step.prefilled {
            self.prefilled.get_or_insert_with(Instant::now);
        }
    }

    /// A part of the answer, under the name that the route has for it.
    fn said(&self, text: &str, reasoning: &str, calls: &[ToolCall]) -> Map<String, Value> {
        let mut said = Map::new();
        if !reasoning.is_empty() {
            said.insert("thinking".to_owned(), reasoning.into());
        }
        if !self.chat {
            said.insert("response".to_owned(), text.into());
            return said;
        }
        said.insert("role".to_owned(), "assistant".into());
        said.insert("content".to_owned(), text.into());
        if !calls.is_empty() {
            let call = |(index, call): (usize, &ToolCall)| {
                json!({
                    "id": ids::new("call_"),
                    "function": {"index": index, "name": call.name, "arguments": call.arguments},
                })
            };
            said.insert("tool_calls".to_owned(), calls.iter().enumerate().map(call).collect());
        }
        let mut message = Map::new();
        message.insert("message".to_owned(), said.into());
        message
    }

    fn line(&self, said: Map<String, Value>, done: bool) -> Value {
        let mut line = json!({"model": self.model, "created_at": now(), "done": done});
        if let Some(line) = line.as_object_mut() {
            line.extend(said);
        }
        line
    }

    fn last(&self, said: Map<String, Value>, answers: &Answers) -> Value {
        let mut line = self.line(said, true);
        let finish = answers.answers.first().and_then(Answer::finish_reason);
        let prompt = self.prefilled.map_or(Duration::ZERO, |at| at - self.began);
        line["done_reason"] = if finish == Some("length") { "length" } else { "stop" }.into();
        line["total_duration"] = nanoseconds(self.began.elapsed()).into();
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = answers.usage.prompt.into();
        line["prompt_eval_duration"] = nanoseconds(prompt).into();
        line["eval_count"] = answers.usage.completion.into();
        line["eval_duration"] = nanoseconds(self.began.elapsed().saturating_sub(prompt)).into();
        line
    }
}

impl Writer for LineWriter {
    const KIND: &'static str = "application/x-ndjson";
    const PING: Option<&'static str> = None;

    fn begin(&mut self, _: &mut Events) {}

    fn step(&mut self, step: &Step, _: &Answers, events: &mut Events) {
        self.note(step);
        for delta in &step.deltas {
            let said = match delta {
                Delta::Text(text) => self.said(text, "", &[]),
                Delta::Reasoning(text) => self.said("", text, &[]),
                Delta::Call(call) => self.said("", "", std::slice::from_ref(call)),
            };
            events.line(&self.line(said, false));
        }
    }

    fn end(&mut self, answers: &Answers, events: &mut Events) {
        events.line(&self.last(self.said("", "", &[]), answers));
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.line(&error.ollama());
    }
}

/// A model of a list.
fn listed(model: &Served) -> Value {
    let facts = model.facts();
    json!({
        "name": model.name,
        "model": model.name,
        "size": facts.bytes,
        "digest": facts.digest,
        "details": details(model),
    })
}

fn details(model: &Served) -> Value {
    let facts = model.facts();
    json!({
        "parent_model": "",
        "format": "qhexrt",
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": "",
        "quantization_level": facts.precision,
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn now() -> String {
    Timestamp::now().to_string()
}

/// Seconds since 1970 as RFC 3339 has them.
fn time(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(NEVER);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX).to_string()
}
