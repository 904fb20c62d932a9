//! Calls whose name and arguments stand between tags.

use serde_json::{Map, Value};

use super::{Tool, ToolCall};

/// Tags of a call and its arguments, with the line ends that models write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tags {
    /// Before the name, behind it, and behind the arguments.
    pub call: [&'static str; 3],
    /// Before and behind the name of an argument.
    pub key: [&'static str; 2],
    /// Before and behind its value.
    pub value: [&'static str; 2],
}

/// Calls of known tools without the mark in front of the first one.
pub(super) fn unmarked(text: &str, tags: &Tags, end: &str, tools: &[Tool]) -> Vec<ToolCall> {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(tags.call[0]).filter(|_| !tags.call[0].is_empty()) {
        rest = &rest[at..];
        match call(rest, tags, end, tools) {
            Some((call, behind)) if tools.iter().any(|tool| tool.name == call.name) => {
                calls.push(call);
                rest = behind;
            }
            _ => rest = &rest[tags.call[0].len()..],
        }
    }
    calls
}

/// The call that `text` begins with, and what is behind it. `end`: the mark behind the call.
pub(super) fn call<'a>(
    text: &'a str,
    tags: &Tags,
    end: &str,
    tools: &[Tool],
) -> Option<(ToolCall, &'a str)> {
    let [open, opened, close] = tags.call.map(str::trim);
    let text = text.trim_start().strip_prefix(open)?;
    let (name, mut rest) = match opened {
        // The name ends where its line does, or at the first argument or the end.
        "" => {
            let ends = ["\n", tags.key[0], end].into_iter().filter_map(|end| text.find(end));
            text.split_at(ends.min()?)
        }
        opened => text.split_once(opened)?,
    };
    let name = name.trim();
    let tool = tools.iter().find(|tool| tool.name == name);
    let mut arguments = Map::new();
    let is_over = |text: &str| text.starts_with(if close.is_empty() { end } else { close });
    loop {
        let text = rest.trim_start();
        if is_over(text) {
            let call = ToolCall { name: name.to_owned(), arguments: arguments.into() };
            return Some((call, text.strip_prefix(close).unwrap_or(text)));
        }
        let (key, behind) = text.strip_prefix(tags.key[0])?.split_once(tags.key[1].trim())?;
        let [before, closing] = tags.value.map(str::trim);
        let text = match before {
            "" => behind,
            before => behind.trim_start().strip_prefix(before)?,
        };
        // A text may have what looks like the end of its argument: the end has another argument or the call's behind
        // it.
        let ends = text.match_indices(closing).map(|(at, _)| (at, &text[at + closing.len()..]));
        let mut ends = ends.filter(|(_, behind)| {
            let behind = behind.trim_start();
            behind.starts_with(tags.key[0]) || is_over(behind)
        });
        let (at, behind) = ends.next()?;
        let value = text[..at].strip_prefix('\n').unwrap_or(&text[..at]);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let is_text = tool.is_some_and(|tool| tool.takes_text(key.trim()));
        let read = if is_text { None } else { serde_json::from_str(value.trim()).ok() };
        let value = read.unwrap_or_else(|| Value::String(value.to_owned()));
        arguments.insert(key.trim().to_owned(), value);
        rest = behind;
    }
}
