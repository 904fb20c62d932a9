//! Chat templates in Jinja, as `transformers` renders them.
//!
//! `transformers/utils/chat_template_utils.py` sets the rules: blocks are trimmed, `break` and
//! `continue` work, Python's string methods work, `raise_exception`, `strftime_now` and a `tojson`
//! that spells like `json.dumps` are there, and `tools` and `documents` are none.
//!
//! A template is a program from a stranger: it runs with a limit on steps, depth and output, and
//! reaches no file. What its variables hold has no limit: a template that doubles a string forty
//! times exhausts memory.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind as JinjaErrorKind, Value};
use serde::Serialize;

use super::chat::{Message, RenderOptions};
use crate::{Error, ErrorKind, Result};

/// Instructions that one rendering may execute: a second or so.
const FUEL: u64 = 20_000_000;

/// Depth of macros and includes.
const DEPTH: usize = 64;

/// Bytes that one rendering may write.
const MAX_OUTPUT: usize = 64 << 20;

/// Bytes of template that are read.
const MAX_SOURCE: usize = 1 << 20;

const NAME: &str = "chat_template";

/// A compiled template.
pub(super) struct JinjaTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl JinjaTemplate {
    pub(super) fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            let message = format!("the chat template is larger than {} KiB", MAX_SOURCE >> 10);
            return Err(Error::new(ErrorKind::Artifact, message));
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(DEPTH);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(|e| {
            Error::new(ErrorKind::Artifact, format!("chat template: {}", describe(&e)))
                .hint("set \"chat\": {\"style\": \"markers\"} in the manifest to do without it")
        })?;
        Ok(Self { environment, bos_token: bos_token.into(), eos_token: eos_token.into() })
    }

    pub(super) fn render(&self, messages: &[Message], options: RenderOptions) -> Result<String> {
        let fail = |e: &JinjaError| {
            Error::new(ErrorKind::Prompt, format!("chat template: {}", describe(e)))
        };
        let template = self.environment.get_template(NAME).map_err(|e| fail(&e))?;
        let mut output = Bounded(Vec::new());
        let context = Context {
            messages,
            add_generation_prompt: options.add_generation_prompt,
            bos_token: &self.bos_token,
            eos_token: &self.eos_token,
            tools: None,
            documents: None,
            enable_thinking: options.enable_thinking,
        };
        template.render_captured_to(context, &mut output).map_err(|e| fail(&e))?;
        String::from_utf8(output.0)
            .map_err(|_| Error::new(ErrorKind::Prompt, "chat template: the result is not UTF-8"))
    }
}

#[derive(Serialize)]
struct Context<'a> {
    messages: &'a [Message],
    add_generation_prompt: bool,
    bos_token: &'a str,
    eos_token: &'a str,
    tools: Option<()>,
    documents: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_thinking: Option<bool>,
}

/// The message with what caused it, on one line.
fn describe(error: &JinjaError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}

/// A buffer that refuses to grow without end.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            let limit = MAX_OUTPUT >> 20;
            return Err(io::Error::other(format!("the prompt grows beyond {limit} MiB")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `{% generation %}` marks answers for training and renders what is in it; `{% if true %}` does
/// the same with the same trimming.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + len + 2]);
        result.push_str(before);
        let name =
            tag[2..tag.len() - 2].trim_matches(|c: char| c.is_whitespace() || "+-".contains(c));
        result.push_str(&match name {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_owned(),
        });
        rest = &rest[start + len + 2..];
    }
    result.push_str(rest);
    result
}

fn raise_exception(message: &str) -> Result<Value, JinjaError> {
    Err(JinjaError::new(JinjaErrorKind::InvalidOperation, message.to_owned()))
}

/// The current date and time in UTC.
fn strftime_now(format: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime(format, now.as_secs())
}

/// `strftime` of the C locale for seconds since 1970, in UTC.
fn strftime(format: &str, seconds: u64) -> String {
    const DAYS: [&str; 7] =
        ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": civil_from_days.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march + 2) / 5 + 1;
    let month = if march < 10 { march + 3 } else { march - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let leap = u64::from(month > 2 && (year % 4 == 0 && year % 100 != 0 || year % 400 == 0));
    let ordinal = if month > 2 { of_year + 60 + leap } else { of_year - 305 };
    let month_name = MONTHS[(month as usize - 1) % 12];
    let day_name = DAYS[((days + 4) % 7) as usize];
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };

    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = characters.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = characters.next();
        }
        let mut number = |value: u64, width: usize| {
            let width = if unpadded { 1 } else { width };
            let _ = write!(out, "{value:0width$}");
        };
        match code {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(ordinal, 3),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&strftime("%Y-%m-%d", seconds)),
            Some('T') => out.push_str(&strftime("%H:%M:%S", seconds)),
            Some('Z') => out.push_str("UTC"),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)` of Python.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, JinjaError> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    if value.kind() == ValueKind::Undefined {
        return Err(JinjaError::new(JinjaErrorKind::UndefinedError, "tojson of nothing"));
    }
    let json = serde_json::to_value(value)
        .map_err(|e| JinjaError::new(JinjaErrorKind::BadSerialization, "tojson").with_source(e))?;
    let mut out = String::new();
    python_json(&json, indent.map(|n| n.min(16)), 0, &mut out);
    Ok(Value::from_safe_string(out))
}

fn python_json(value: &serde_json::Value, indent: Option<usize>, depth: usize, out: &mut String) {
    use serde_json::Value as Json;
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match value {
        Json::Array(items) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index == 0 { "[" } else { separator });
                line(depth + 1, out);
                python_json(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push(']');
        }
        Json::Object(members) if !members.is_empty() => {
            for (index, (key, item)) in members.iter().enumerate() {
                out.push_str(if index == 0 { "{" } else { separator });
                line(depth + 1, out);
                let _ = write!(out, "{}: ", Json::String(key.clone()));
                python_json(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push('}');
        }
        other => {
            let _ = write!(out, "{other}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        let at = |seconds| strftime("%Y-%m-%d %H:%M:%S %a %j", seconds);
        assert_eq!(at(0), "1970-01-01 00:00:00 Thu 001");
        assert_eq!(at(951_782_400), "2000-02-29 00:00:00 Tue 060");
        assert_eq!(at(1_735_689_599), "2024-12-31 23:59:59 Tue 366");
        assert_eq!(at(4_107_542_400), "2100-03-01 00:00:00 Mon 060");
        assert_eq!(
            strftime("%-d %b %Y, %B, %A %I %p %y%%%Q%", 1_704_067_200 + 13 * 3600),
            "1 Jan 2024, January, Monday 01 PM 24%%Q%"
        );
    }

    #[test]
    fn json_is_spelled_as_python_does() {
        let value = serde_json::json!({"b": [1, 2.5, null, true], "a": {}, "ü<": "\"\n&'"});
        let mut out = String::new();
        python_json(&value, None, 0, &mut out);
        assert_eq!(out, r#"{"b": [1, 2.5, null, true], "a": {}, "ü<": "\"\n&'"}"#);
        out.clear();
        python_json(&serde_json::json!({"a": [1, []]}), Some(2), 0, &mut out);
        assert_eq!(out, "{\n  \"a\": [\n    1,\n    []\n  ]\n}");
    }

    #[test]
    fn generation_tags_keep_their_trimming() {
        let source = "a\n{%- generation -%}\n b {% endgeneration %}\n{% if x %}{{ generation }}";
        let expected = "a\n{%- if true -%}\n b {% endif %}\n{% if x %}{{ generation }}";
        assert_eq!(without_generation_tags(source), expected);
    }
}
