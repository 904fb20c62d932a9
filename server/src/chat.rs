//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use qhx::{TextPipeline, TokenLogprobs, ToolCall};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Answers, Delta, Step, Usage};
use crate::custom_tools::CustomTools;
use crate::error::{ApiError, Result, json_response};
use crate::fields::Fields;
use crate::generation_request::Ask;
use crate::ids;
use crate::request::Asked;
use crate::sse::{self, Events, Writer};

/// Fingerprint that tells clients which program answers.
pub(crate) const FINGERPRINT: &str = concat!("qhx-", env!("CARGO_PKG_VERSION"));

pub(crate) async fn completions(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let model = fields.text("model")?.map(str::to_owned);
    let stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = include_usage(&fields)?;
    let ask = context.memory.work(|| Ask::of_chat(&fields))?;
    let has_logprobs = ask.logprobs.is_some();
    let custom = CustomTools::of(&map);
    let mut asked = context.ask(model, ask).await?;
    let head = Head::new("chatcmpl-", &asked.model);
    if stream {
        let texts = Arc::clone(&asked.texts);
        let logprobs = Vec::new();
        let writer =
            ChatWriter { head, texts, custom, include_usage, has_logprobs, logprobs, calls: 0 };
        return sse::stream(&context, asked, writer).await;
    }
    asked.answers.collect(asked.pending, &context.tally).await?;
    let answers = asked.answers.answers.iter().enumerate();
    let choice = |(index, answer): (usize, &Answer)| {
        let logprobs = has_logprobs.then(|| logprobs(&answer.logprobs, &asked.texts));
        json!({
            "index": index,
            "message": message(answer, &custom),
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason(),
        })
    };
    let choices: Vec<_> = answers.map(choice).collect();
    let mut json = head.json("chat.completion");
    json["choices"] = choices.into();
    json["usage"] = usage(&asked.answers.usage);
    Ok(json_response(StatusCode::OK, &json))
}

/// `stream_options.include_usage`.
pub(crate) fn include_usage(fields: &Fields<'_>) -> Result<bool> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    Ok(options.flag("include_usage")?.unwrap_or(false))
}

/// Fields that all chunks of an answer have.
#[derive(Debug)]
pub(crate) struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    pub(crate) fn new(prefix: &str, model: &str) -> Self {
        Self { id: ids::new(prefix), created: ids::now(), model: model.to_owned() }
    }

    pub(crate) fn json(&self, object: &str) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        })
    }
}

/// Tokens as clients count them.
pub(crate) fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.drafted[0],
            "rejected_prediction_tokens": usage.drafted[1],
        },
    })
}

fn message(answer: &Answer, custom: &CustomTools) -> Value {
    let mut message = Map::new();
    message.insert("role".to_owned(), "assistant".into());
    let only_calls = answer.text.is_empty() && !answer.calls.is_empty();
    let content = if only_calls { Value::Null } else { answer.text.as_str().into() };
    message.insert("content".to_owned(), content);
    message.insert("refusal".to_owned(), Value::Null);
    if !answer.reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), answer.reasoning.as_str().into());
    }
    if !answer.calls.is_empty() {
        let calls = answer.calls.iter().map(|one| call(one, custom));
        message.insert("tool_calls".to_owned(), calls.collect());
    }
    message.into()
}

fn call(call: &ToolCall, custom: &CustomTools) -> Value {
    if let Some(input) = custom.input(call) {
        let custom = json!({"name": call.name, "input": input});
        return json!({"id": ids::new("call_"), "type": "custom", "custom": custom});
    }
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": ids::new("call_"), "type": "function", "function": function})
}

/// Log-probabilities of tokens.
fn logprobs(tokens: &[(u32, TokenLogprobs)], texts: &TextPipeline) -> Value {
    let content: Vec<_> = tokens.iter().map(|token| logprob(token, texts)).collect();
    json!({"content": content, "refusal": null})
}

/// Log-probability of a token, and those of the most likely ones in its place.
pub(crate) fn logprob((id, logprobs): &(u32, TokenLogprobs), texts: &TextPipeline) -> Value {
    let mut json = token(*id, logprobs.logprob, texts);
    let top = logprobs.top.iter().map(|(id, logprob)| token(*id, *logprob, texts));
    json["top_logprobs"] = top.collect();
    json
}

fn token(id: u32, logprob: f32, texts: &TextPipeline) -> Value {
    let bytes = bytes_of(id, texts);
    let text = String::from_utf8_lossy(&bytes);
    json!({"token": text, "logprob": finite(logprob), "bytes": bytes})
}

/// JSON has no −∞: as OpenAI has it.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// Bytes that a token adds to a text.
pub(crate) fn bytes_of(id: u32, texts: &TextPipeline) -> Vec<u8> {
    let Some(tokenizer) = texts.tokenizer() else { return Vec::new() };
    let bytes = tokenizer.token_bytes().and_then(|bytes| bytes.of(id));
    bytes.unwrap_or_else(|_| tokenizer.id_to_token(id).unwrap_or_default().into_bytes())
}

/// Writes chunks.
struct ChatWriter {
    head: Head,
    texts: Arc<TextPipeline>,
    custom: CustomTools,
    include_usage: bool,
    has_logprobs: bool,
    /// Log-probabilities of tokens whose text is held back.
    logprobs: Vec<(u32, TokenLogprobs)>,
    /// Calls of the present choice.
    calls: usize,
}

impl ChatWriter {
    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = self.head.json("chat.completion.chunk");
        chunk["choices"] = choices;
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn choice(&mut self, index: usize, delta: &Value, finish: Option<&str>) -> Value {
        let logprobs = std::mem::take(&mut self.logprobs);
        let logprobs = self.has_logprobs.then(|| logprobs_or_none(&logprobs, &self.texts));
        self.chunk(json!([{
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }]))
    }
}

fn logprobs_or_none(tokens: &[(u32, TokenLogprobs)], texts: &TextPipeline) -> Value {
    if tokens.is_empty() { Value::Null } else { logprobs(tokens, texts) }
}

impl Writer for ChatWriter {
    fn begin(&mut self, events: &mut Events) {
        let role = self.choice(0, &json!({"role": "assistant", "content": ""}), None);
        events.data(&role);
    }

    fn step(&mut self, step: &Step, answers: &Answers, events: &mut Events) {
        self.logprobs.extend(step.logprobs.clone());
        for delta in &step.deltas {
            let delta = match delta {
                Delta::Text(text) => json!({"content": text}),
                Delta::Reasoning(text) => json!({"reasoning_content": text}),
                Delta::Call(called) => {
                    let mut call = call(called, &self.custom);
                    call["index"] = self.calls.into();
                    self.calls += 1;
                    json!({"tool_calls": [call]})
                }
            };
            let chunk = self.choice(step.choice, &delta, None);
            events.data(&chunk);
        }
        if step.finished.is_some() {
            let finish = answers.answers.get(step.choice).and_then(Answer::finish_reason);
            let chunk = self.choice(step.choice, &json!({}), finish);
            events.data(&chunk);
            self.calls = 0;
            if step.choice + 1 < answers.answers.len() {
                let role = json!({"role": "assistant", "content": ""});
                let role = self.choice(step.choice + 1, &role, None);
                events.data(&role);
            }
        }
    }

    fn end(&mut self, answers: &Answers, events: &mut Events) {
        if self.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage(&answers.usage);
            events.data(&chunk);
        }
        events.text("data: [DONE]\n\n");
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.json());
        events.text("data: [DONE]\n\n");
    }
}
