//! The formats in which models write calls.

use serde_json::{Map, Value};

use super::{Tool, ToolCall, python};
use crate::REASONING;

/// Format in which a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallFormat {
    /// `<tool_call>`, `{"name": …, "arguments": …}`, `</tool_call>` on three lines.
    Tagged,
    /// `<tool_call>`, `<function=NAME>`, and for each argument `<parameter=NAME>`, its value and
    /// `</parameter>`, a line each.
    Elements,
    /// `{"name": …, "parameters": …}`, maybe behind `<|python_tag|>`.
    Bare,
    /// `[TOOL_CALLS]` and a JSON list of `{"name": …, "arguments": …}`.
    Listed,
    /// A list of calls as Python writes them between `<|tool_call_start|>` and `<|tool_call_end|>`.
    Python,
}

const CALL: (&str, &str) = ("<tool_call>", "</tool_call>");
const PYTHON: (&str, &str) = ("<|tool_call_start|>", "<|tool_call_end|>");
const LISTED: &str = "[TOOL_CALLS]";
const BARE: &str = "<|python_tag|>";

impl CallFormat {
    /// The format that a chat template asks for; `None` where it knows no tools, or no format that is known here.
    pub fn of_template(source: &str) -> Option<Self> {
        if !source.contains("tool") {
            return None;
        }
        let has = |text| source.contains(text);
        let json = has("\"parameters\":") || has("\\\"parameters\\\":");
        Some(match () {
            () if has("<function=") => Self::Elements,
            () if has(PYTHON.0) => Self::Python,
            () if has(LISTED) => Self::Listed,
            () if has(CALL.0) => Self::Tagged,
            () if has(BARE) || json => Self::Bare,
            () => return None,
        })
    }

    /// Texts that a call begins and ends with; empty where there is none.
    pub fn marks(self) -> (&'static str, &'static str) {
        match self {
            Self::Tagged | Self::Elements => CALL,
            Self::Bare => ("", ""),
            Self::Listed => (LISTED, ""),
            Self::Python => PYTHON,
        }
    }

    /// The calls in an answer, whose special tokens are spelled out, in order. What looks like a call and cannot be
    /// read is none. `tools` say which arguments are texts, where the format does not.
    pub fn calls(self, answer: &str, tools: &[Tool]) -> Vec<ToolCall> {
        let mut calls = self.marked_calls(answer, tools);
        if calls.is_empty() {
            calls.extend(bare_call(answer, tools));
        }
        calls
    }

    fn marked_calls(self, answer: &str, tools: &[Tool]) -> Vec<ToolCall> {
        let mut calls = Vec::new();
        if self == Self::Bare {
            let text = answer.trim_start();
            json_calls(text.strip_prefix(BARE).unwrap_or(text), &mut calls);
            return calls;
        }
        let (start, end) = self.marks();
        let mut rest = answer;
        while let Some((_, behind)) = rest.split_once(start) {
            rest = behind;
            match self {
                Self::Elements => {
                    if let Some((call, behind)) = elements(rest, tools) {
                        calls.push(call);
                        rest = behind;
                    }
                }
                Self::Python => {
                    let text = rest.split_once(end).map_or(rest, |(text, _)| text);
                    calls.extend(python::calls(text));
                }
                _ => rest = json_calls(rest, &mut calls),
            }
        }
        calls
    }
}

/// The call that an answer is, behind its reasoning: an object with the name of a tool and its arguments, and nothing
/// else. Models write it that way, too, when they forget the marks.
fn bare_call(answer: &str, tools: &[Tool]) -> Option<ToolCall> {
    let text = answer.rsplit_once(REASONING.1).map_or(answer, |(_, text)| text);
    let call: Map<String, Value> = serde_json::from_str(text.trim()).ok()?;
    let is_argument = |key: &str| matches!(key, "arguments" | "parameters");
    let exact = call.len() == 2 && call.keys().all(|key| key == "name" || is_argument(key));
    let call = json_call(call.into()).filter(|call| exact && call.arguments.is_object())?;
    tools.iter().any(|tool| tool.name == call.name).then_some(call)
}

/// Adds the calls that `text` begins with, as JSON values or a list of them. Returns what is behind the first value.
fn json_calls<'a>(text: &'a str, calls: &mut Vec<ToolCall>) -> &'a str {
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

/// The call that `text` begins with, in elements, and what is behind it.
fn elements<'a>(text: &'a str, tools: &[Tool]) -> Option<(ToolCall, &'a str)> {
    let (name, mut rest) = text.trim_start().strip_prefix("<function=")?.split_once('>')?;
    let tool = tools.iter().find(|tool| tool.name == name);
    let mut arguments = Map::new();
    loop {
        let text = rest.trim_start();
        if let Some(behind) = text.strip_prefix("</function>") {
            let call = ToolCall { name: name.to_owned(), arguments: arguments.into() };
            return Some((call, behind));
        }
        let (argument, behind) = text.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, behind) = behind.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let is_text = tool.is_some_and(|tool| tool.takes_text(argument));
        let read = if is_text { None } else { serde_json::from_str(value.trim()).ok() };
        let value = read.unwrap_or_else(|| Value::String(value.to_owned()));
        arguments.insert(argument.to_owned(), value);
        rest = behind;
    }
}
