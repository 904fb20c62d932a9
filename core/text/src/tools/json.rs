//! Calls in JSON.

use serde_json::{Map, Value};

use super::{Tool, ToolCall};

/// The call that a text is: an object with the name of a tool and its arguments, and nothing else. Models write it that
/// way, too, when they forget the marks.
pub(super) fn bare_call(text: &str, tools: &[Tool]) -> Vec<ToolCall> {
    let call: Option<Map<String, Value>> = serde_json::from_str(text.trim()).ok();
    let is_argument = |key: &str| matches!(key, "arguments" | "parameters");
    let exact = |call: &Map<String, Value>| {
        call.len() == 2 && call.keys().all(|key| key == "name" || is_argument(key))
    };
    let call = call.filter(exact).and_then(|call| json_call(call.into()));
    let known = |call: &ToolCall| tools.iter().any(|tool| tool.name == call.name);
    call.into_iter().filter(|call| call.arguments.is_object() && known(call)).collect()
}

/// Adds the calls that `text` begins with, as JSON values or a list of them. Returns what is behind the first value.
pub(super) fn calls<'a>(text: &'a str, calls: &mut Vec<ToolCall>) -> &'a str {
    // Newer models write the name, `[ARGS]`, the arguments.
    let name = text.find(['{', '[']).map(|at| text.split_at(at));
    if let Some((name, arguments)) = name.filter(|(name, _)| !name.trim().is_empty()) {
        let mut values = values(arguments.strip_prefix("[ARGS]").unwrap_or(arguments));
        if let Some(Ok(arguments @ Value::Object(_))) = values.next() {
            calls.push(ToolCall { name: name.trim().to_owned(), arguments });
        }
        return text;
    }
    let mut rest = text;
    loop {
        let mut values = values(rest);
        let Some(Ok(value)) = values.next() else { return rest };
        rest = &rest[values.byte_offset()..];
        match value {
            Value::Array(list) => calls.extend(list.into_iter().filter_map(json_call)),
            value => calls.extend(json_call(value)),
        }
        // Several have semicolons between.
        match rest.trim_start().strip_prefix(';') {
            Some(more) => rest = more,
            None => return rest,
        }
    }
}

fn values(text: &str) -> serde_json::StreamDeserializer<'_, serde_json::de::StrRead<'_>, Value> {
    serde_json::Deserializer::from_str(text).into_iter()
}

fn json_call(value: Value) -> Option<ToolCall> {
    let Value::Object(mut call) = value else { return None };
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = call.remove("arguments").or_else(|| call.remove("parameters"));
    let arguments = match arguments.unwrap_or(Value::Null) {
        // Some models write the arguments as a text of JSON.
        Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        Value::Null => Map::new().into(),
        other => other,
    };
    Some(ToolCall { name, arguments })
}
