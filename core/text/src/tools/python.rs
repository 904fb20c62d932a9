//! Calls as Python writes them: `[find(name="a", limit=3), stop()]`.

use serde_json::{Map, Number, Value};

use super::ToolCall;

/// Levels of lists and dicts in an argument.
const MAX_DEPTH: usize = 64;

/// The calls of a list; none where it cannot be read.
pub(super) fn calls(text: &str) -> Vec<ToolCall> {
    let mut reader = Reader { rest: text };
    let listed = reader.eat("[");
    let mut calls = Vec::new();
    while let Some(call) = reader.call() {
        calls.push(call);
        if !reader.eat(",") {
            break;
        }
    }
    let closed = !listed || reader.eat("]");
    if closed && reader.rest.trim().is_empty() { calls } else { Vec::new() }
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    /// Skips spaces, and `text` behind them. False where it is not there.
    fn eat(&mut self, text: &str) -> bool {
        super::eat(&mut self.rest, text)
    }

    fn name(&mut self) -> Option<&'a str> {
        self.rest = self.rest.trim_start();
        let is_part = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn call(&mut self) -> Option<ToolCall> {
        let name = self.name()?.to_owned();
        let mut arguments = Map::new();
        if !self.eat("(") {
            return None;
        }
        while !self.eat(")") {
            let argument = self.name()?.to_owned();
            if !self.eat("=") {
                return None;
            }
            let value = self.value(0)?;
            arguments.insert(argument, value);
            if !self.eat(",") && !self.rest.trim_start().starts_with(')') {
                return None;
            }
        }
        Some(ToolCall { name, arguments: arguments.into() })
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.text(quote).map(Value::String),
            '[' | '(' => {
                let end = if self.eat("[") { "]" } else { self.eat("(").then_some(")")? };
                let mut list = Vec::new();
                while !self.eat(end) {
                    list.push(self.value(depth + 1)?);
                    if !self.eat(",") && !self.rest.trim_start().starts_with(end) {
                        return None;
                    }
                }
                Some(list.into())
            }
            '{' => {
                self.eat("{");
                let mut map = Map::new();
                while !self.eat("}") {
                    let key = match self.value(depth + 1)? {
                        Value::String(key) => key,
                        other => other.to_string(),
                    };
                    if !self.eat(":") {
                        return None;
                    }
                    map.insert(key, self.value(depth + 1)?);
                    if !self.eat(",") && !self.rest.trim_start().starts_with('}') {
                        return None;
                    }
                }
                Some(map.into())
            }
            _ => self.word(),
        }
    }

    /// A number, or a name with a value.
    fn word(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_alphanumeric() || "_+-.".contains(c);
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(Value::Null),
            _ => serde_json::from_str::<Number>(word).ok().map(Value::Number),
        }
    }

    fn text(&mut self, quote: char) -> Option<String> {
        let mut chars = self.rest[1..].chars();
        let mut text = String::new();
        loop {
            match chars.next()? {
                c if c == quote => break,
                '\\' => text.push(match chars.next()? {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    'u' => {
                        let code = chars.as_str().get(..4)?;
                        chars = chars.as_str()[4..].chars();
                        char::from_u32(u32::from_str_radix(code, 16).ok()?)?
                    }
                    other => other,
                }),
                c => text.push(c),
            }
        }
        self.rest = chars.as_str();
        Some(text)
    }
}
