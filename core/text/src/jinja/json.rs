//! `tojson` as `transformers` defines it: `json.dumps` with four of its options.

use std::fmt::Write as _;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::python::{MAX_NESTING, Text, bind, fail, float_repr, number};

type Result<T> = std::result::Result<T, minijinja::Error>;

struct Options {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `value|tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(args: &[Value]) -> Result<Value> {
    let names = ["x", "ensure_ascii", "indent", "separators", "sort_keys"];
    let [value, ensure_ascii, indent, separators, sort_keys] = bind("tojson", args, names)?;
    let value = value.unwrap_or_default();
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) if indent.as_str().is_some() => indent.as_str().map(str::to_owned),
        Some(indent) => {
            let spaces = i64::try_from(indent).map_err(|_| fail("tojson: indent is no integer"))?;
            Some(" ".repeat(spaces.clamp(0, 1024) as usize))
        }
    };
    let (item_separator, key_separator) = match separators.filter(|pair| !pair.is_none()) {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
                [Some(item), Some(key)] => (item.to_owned(), key.to_owned()),
                _ => return Err(fail("tojson: separators are no pair of strings")),
            }
        }
    };
    let options = Options {
        ensure_ascii: is_true(ensure_ascii),
        indent,
        item_separator,
        key_separator,
        sort_keys: is_true(sort_keys),
    };
    let mut out = Text::default();
    write(&value, &options, 0, &mut out)?;
    Ok(out.into_value())
}

fn write(value: &Value, options: &Options, depth: usize, out: &mut Text) -> Result<()> {
    if depth > MAX_NESTING {
        return Err(fail(format!("tojson: values are nested deeper than {MAX_NESTING}")));
    }
    let line = |depth: usize, out: &mut Text| match &options.indent {
        None => Ok(()),
        Some(indent) => {
            out.push("\n")?;
            out.repeat(indent, depth)
        }
    };
    match value.kind() {
        ValueKind::None => out.push("null"),
        ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push(&json_number(value)),
        ValueKind::String => out.push(&quoted(value.as_str().unwrap_or_default(), options)),
        ValueKind::Seq => {
            out.push("[")?;
            let mut any = false;
            for item in value.try_iter()? {
                out.push(if any { &options.item_separator } else { "" })?;
                any = true;
                line(depth + 1, out)?;
                write(&item, options, depth + 1, out)?;
            }
            if any {
                line(depth, out)?;
            }
            out.push("]")
        }
        // Lists that were added or sliced.
        ValueKind::Iterable => {
            let list: Vec<Value> = value.try_iter()?.collect();
            write(&Value::from(list), options, depth, out)
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if options.sort_keys {
                keys.sort();
            }
            out.push("{")?;
            for (index, key) in keys.iter().enumerate() {
                out.push(if index == 0 { "" } else { &options.item_separator })?;
                line(depth + 1, out)?;
                let name = match key.kind() {
                    ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                    ValueKind::None => "null".to_owned(),
                    ValueKind::Bool => key.is_true().to_string(),
                    ValueKind::Number => json_number(key),
                    other => return Err(fail(format!("tojson: a key is of type {other}"))),
                };
                out.push(&quoted(&name, options))?;
                out.push(&options.key_separator)?;
                write(&value.get_item(key)?, options, depth + 1, out)?;
            }
            if !keys.is_empty() {
                line(depth, out)?;
            }
            out.push("}")
        }
        other => Err(fail(format!("tojson: a value of type {other} is not JSON serializable"))),
    }
}

fn json_number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() && float.is_nan() => "NaN".to_owned(),
        Ok(float) if !value.is_integer() && float.is_infinite() => {
            if float < 0.0 { "-Infinity" } else { "Infinity" }.to_owned()
        }
        Ok(float) if !value.is_integer() => float_repr(float),
        _ => number(value),
    }
}

fn quoted(text: &str, options: &Options) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        let _ = match c {
            '"' => out.write_str("\\\""),
            '\\' => out.write_str("\\\\"),
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            '\u{8}' => out.write_str("\\b"),
            '\u{c}' => out.write_str("\\f"),
            '\0'..='\u{1f}' => write!(out, "\\u{:04x}", u32::from(c)),
            ' '..='~' => out.write_char(c),
            _ if options.ensure_ascii => {
                c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))
            }
            _ => out.write_char(c),
        };
    }
    out.push('"');
    out
}
