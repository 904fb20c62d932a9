//! Calls as `call:NAME{KEY:VALUE,…}`, with bare keys and marks of their own around texts.

use serde_json::{Map, Number, Value};

use super::{Tool, ToolCall};

/// Beginning of a call.
pub(super) const CALL: &str = "call:";
/// Levels of lists and objects in an argument.
const MAX_DEPTH: usize = 64;

/// The call that `text` begins with, and what is behind it. A mark may be followed by a stray colon.
pub(super) fn call<'a>(text: &'a str, quote: &'a str) -> Option<(ToolCall, &'a str)> {
    let text = text.trim_start();
    let text = text.strip_prefix(':').unwrap_or(text).strip_prefix(CALL)?;
    let (name, _) = text.split_once('{')?;
    let is_part = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
    if name.trim().is_empty() || !name.trim().chars().all(is_part) {
        return None;
    }
    let mut reader = Reader { rest: &text[name.len()..], quote };
    let arguments = reader.value(0)?;
    Some((ToolCall { name: name.trim().to_owned(), arguments }, reader.rest))
}

/// Calls of known tools without marks, each at the beginning of the text or behind white space.
pub(super) fn unmarked(text: &str, quote: &str, tools: &[Tool]) -> Vec<ToolCall> {
    let mut calls = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find(CALL).map(|at| from + at) {
        from = at + CALL.len();
        let begins = text[..at].chars().next_back().is_none_or(char::is_whitespace);
        let known = |call: &ToolCall| tools.iter().any(|tool| tool.name == call.name);
        if let Some((call, rest)) =
            call(&text[at..], quote).filter(|(call, _)| begins && known(call))
        {
            calls.push(call);
            from = text.len() - rest.len();
        }
    }
    calls
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'a str,
}

impl<'a> Reader<'a> {
    /// Skips white space, and `text` behind it. False where it is not there.
    fn eat(&mut self, text: &str) -> bool {
        super::eat(&mut self.rest, text)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        if let Some(text) = self.text()? {
            return Some(Value::String(text));
        }
        if self.eat("{") {
            return self.object(depth).map(Value::Object);
        }
        if self.eat("[") {
            let mut list = Vec::new();
            while !self.eat("]") {
                list.push(self.value(depth + 1)?);
                if !self.eat(",") && !self.rest.starts_with(']') {
                    return None;
                }
            }
            return Some(list.into());
        }
        let word = self.bare(&[',', '}', ']'])?;
        Some(match word {
            "true" | "True" => true.into(),
            "false" | "False" => false.into(),
            "null" | "None" => Value::Null,
            _ => match serde_json::from_str::<Number>(word.strip_suffix('.').unwrap_or(word)) {
                Ok(number) => Value::Number(number),
                Err(_) => word.into(),
            },
        })
    }

    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut map = Map::new();
        while !self.eat("}") {
            let key = match self.text()? {
                Some(key) => key,
                None => self.bare(&[':', '}'])?.to_owned(),
            };
            if key.is_empty() || !self.eat(":") {
                return None;
            }
            map.insert(key, self.value(depth + 1)?);
            if !self.eat(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
        Some(map)
    }

    /// The text that comes between marks, or between quotes as JSON has them; the inner `None` where none comes.
    #[expect(clippy::option_option, reason = "a text that does not end is no value")]
    fn text(&mut self) -> Option<Option<String>> {
        if self.eat(self.quote) {
            let (text, rest) = self.rest.split_once(self.quote)?;
            self.rest = rest;
            return Some(Some(text.to_owned()));
        }
        if !self.rest.starts_with('"') {
            return Some(None);
        }
        let mut texts = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
        let text = texts.next()?.ok()?;
        self.rest = &self.rest[texts.byte_offset()..];
        Some(Some(text))
    }

    /// The text up to one of `ends`; `None` where none of them comes.
    fn bare(&mut self, ends: &[char]) -> Option<&'a str> {
        let (word, rest) = self.rest.split_at(self.rest.find(ends)?);
        self.rest = rest;
        (!word.contains(['[', '{'])).then(|| word.trim())
    }
}
