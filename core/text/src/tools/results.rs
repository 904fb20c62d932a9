//! Results of calls within the message that has the calls, for templates that take no messages of tools.

use serde_json::{Map, Value, json};

use super::CallFormat;

/// Key of the results in a message.
const RESULTS: &str = "tool_responses";

/// True for a template that wants results within the message of the calls.
pub(crate) fn stand_within(source: &str) -> bool {
    let takes_messages = ["== 'tool'", "== \"tool\"", "!= 'tool'", "!= \"tool\""];
    CallFormat::of_template(source).is_some_and(|format| format.syntax().results_within)
        && source.contains(RESULTS)
        && !takes_messages.iter().any(|text| source.contains(text))
}

/// Puts messages of tools into the message of the assistant before them, and what the assistant says behind them, too,
/// unless it calls again.
pub(crate) fn put_within(messages: &mut Vec<Value>) {
    *messages =
        std::mem::take(messages).into_iter().fold(Vec::new(), |mut all: Vec<Value>, message| {
            let Some(last) = all.last_mut().filter(|last| last["role"] == "assistant") else {
                all.push(message);
                return all;
            };
            if message["role"] == "tool" {
                let result = json!({"name": name(last, &message), "response": response(&message)});
                match &mut last[RESULTS] {
                    Value::Array(results) => results.push(result),
                    results => *results = json!([result]),
                }
            } else if message["role"] == "assistant"
                && last.get(RESULTS).is_some()
                && is_empty(&last["content"])
                && message.get("tool_calls").is_none()
            {
                last["content"] = message["content"].clone();
            } else {
                all.push(message);
            }
            all
        });
}

fn is_empty(content: &Value) -> bool {
    match content {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(parts) => parts.is_empty(),
        _ => false,
    }
}

/// Name of the tool that a result is of: the one of its message, or of the call with its id, or of the call whose turn
/// it is.
fn name(calls: &Value, result: &Value) -> Value {
    let done = calls[RESULTS].as_array().map_or(0, Vec::len);
    let calls = calls["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
    let of_id =
        calls.iter().find(|call| !call["id"].is_null() && call["id"] == result["tool_call_id"]);
    let of_call = || of_id.or(calls.get(done)).map(|call| &call["function"]["name"]);
    result.get("name").filter(|name| name.is_string()).or_else(of_call).cloned().unwrap_or_default()
}

/// A result as an object where it is one, and else as a text.
fn response(message: &Value) -> Value {
    let text = super::generic::content(message);
    match serde_json::from_str::<Map<String, Value>>(&text) {
        Ok(object) => object.into(),
        Err(_) => text.into(),
    }
}
