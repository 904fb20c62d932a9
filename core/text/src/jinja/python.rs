//! Values as Python writes them, and the bounds of what a template may hold.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Maximum nesting depth of lists and dictionaries.
pub(super) const MAX_NESTING: usize = 128;

/// Values that something kept in a variable may consist of.
const MAX_VALUES: usize = 1 << 20;

/// Bytes of text that one value may hold.
pub(super) const MAX_TEXT: usize = 16 << 20;

pub(super) fn fail(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

pub(super) fn too_long() -> Error {
    fail(format!("a text grows beyond {} MiB", MAX_TEXT >> 20))
}

fn too_deep() -> Error {
    fail(format!("values are nested deeper than {MAX_NESTING}"))
}

pub(super) fn tuple(items: impl Into<Vec<Value>>) -> Value {
    Value::from_object(Tuple::new(items.into()))
}

/// Text that may not become longer than a template may make it.
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        if self.0.len() + text.len() > MAX_TEXT {
            return Err(too_long());
        }
        self.0.push_str(text);
        Ok(())
    }

    pub(super) fn repeat(&mut self, text: &str, times: usize) -> Result<(), Error> {
        match text.len().checked_mul(times) {
            Some(len) if len <= MAX_TEXT => self.push(&text.repeat(times)),
            _ => Err(too_long()),
        }
    }

    pub(super) fn into_value(self) -> Value {
        Value::from(self.0)
    }

    pub(super) fn into_string(self) -> String {
        self.0
    }
}

/// `str(value)`.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    if value.is_undefined() {
        return Ok(String::new());
    }
    let mut out = Text::default();
    write_repr(value, 0, &mut out)?;
    Ok(out.into_string())
}

/// Writes `repr(value)`.
fn write_repr(value: &Value, depth: usize, out: &mut Text) -> Result<(), Error> {
    if depth > MAX_NESTING {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => out.push("Undefined"),
        ValueKind::None => out.push("None"),
        ValueKind::Bool => out.push(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push(&number(value)),
        ValueKind::String => out.push(&quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let is_tuple = value.is_tuple();
            out.push(if is_tuple { "(" } else { "[" })?;
            for (index, item) in items.iter().enumerate() {
                out.push(if index == 0 { "" } else { ", " })?;
                write_repr(item, depth + 1, out)?;
            }
            out.push(match (is_tuple, items.len()) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            })
        }
        ValueKind::Map => {
            out.push("{")?;
            for (index, key) in value.try_iter()?.enumerate() {
                out.push(if index == 0 { "" } else { ", " })?;
                write_repr(&key, depth + 1, out)?;
                out.push(": ")?;
                write_repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push("}")
        }
        other => Err(fail(format!("a value of type {other} cannot be written as text"))),
    }
}

/// A number as `repr` writes it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_repr(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that read back as `float`, with an exponent where Python has one.
pub(super) fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float < 0.0 { "-inf" } else { "inf" }.to_owned();
    }
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let power: i32 = exponent.parse().unwrap_or(0);
    if float != 0.0 && !(-4..16).contains(&power) {
        let sign = if power < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", power.abs());
    }
    let mut text = float.to_string();
    if !text.contains('.') {
        text.push_str(".0");
    }
    text
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        let code = u32::from(c);
        let _ = match c {
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            '\\' => out.write_str("\\\\"),
            c if c == quote => write!(out, "\\{c}"),
            ' '..='~' => out.write_char(c),
            c if is_printable(c) => out.write_char(c),
            _ if code < 0x100 => write!(out, "\\x{code:02x}"),
            _ if code < 0x1_0000 => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out.push(quote);
    out
}

/// `str.isprintable` for characters that are not ASCII. Rust's `Debug` escapes the same categories, except that it
/// escapes a combining character only at the beginning.
fn is_printable(c: char) -> bool {
    !format!("{:?}", ['a', c].iter().collect::<String>()).contains("\\u{") && !c.is_ascii_control()
}

/// `str.isspace`.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Refuses what a variable may not keep: values that are too deep or too large, and namespaces inside of
/// other values, which could then hold themselves.
pub(super) fn check_kept(value: &Value, namespace_allowed: bool) -> Result<(), Error> {
    fn visit(
        value: &Value,
        depth: usize,
        namespace_allowed: bool,
        left: &mut (usize, usize),
    ) -> Result<(), Error> {
        if depth > MAX_NESTING {
            return Err(too_deep());
        }
        left.0 = left.0.checked_sub(1).ok_or_else(|| fail("a variable holds too many values"))?;
        if let Some(text) = value.as_str() {
            left.1 = left.1.checked_sub(text.len()).ok_or_else(too_long)?;
            return Ok(());
        }
        if is_namespace(value) {
            return match namespace_allowed {
                true => Ok(()),
                false => Err(fail("a namespace cannot be kept in another value")),
            };
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.try_for_each(|item| visit(&item, depth + 1, false, left))
            }
            ValueKind::Map => value.try_iter()?.try_for_each(|key| {
                visit(&key, depth + 1, false, left)?;
                visit(&value.get_item(&key)?, depth + 1, false, left)
            }),
            // What a macro closes over may hold the macro.
            ValueKind::Plain if depth > 0 || !namespace_allowed => {
                Err(fail("a macro or function cannot be kept in another value"))
            }
            _ => Ok(()),
        }
    }
    visit(value, 0, namespace_allowed, &mut (MAX_VALUES, MAX_TEXT))
}

pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Arguments of a filter or method by position and by name.
pub(super) fn bind<const N: usize>(
    what: &str,
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (named, positional) = match args.split_last() {
        Some((last, others)) if last.is_kwargs() => (Some(Kwargs::try_from(last.clone())?), others),
        _ => (None, args),
    };
    if positional.len() > N {
        return Err(Error::new(
            ErrorKind::TooManyArguments,
            format!("{what} takes at most {N} arguments, found {}", positional.len()),
        ));
    }
    let mut bound = [const { None }; N];
    for (slot, value) in bound.iter_mut().zip(positional) {
        *slot = Some(value.clone());
    }
    if let Some(named) = named {
        for (slot, name) in bound.iter_mut().zip(names) {
            if let Some(value) = named.get::<Option<Value>>(name).ok().flatten() {
                *slot = Some(value);
            } else if named.has(name) {
                *slot = Some(Value::from(()));
            }
        }
        named.assert_all_used().map_err(|e| fail(format!("{what}: {e}")))?;
    }
    Ok(bound)
}

/// The argument as a number of things; `default` where it is not given.
pub(super) fn integer(what: &str, value: Option<&Value>, default: i64) -> Result<i64, Error> {
    match value {
        None => Ok(default),
        Some(value) => i64::try_from(value.clone())
            .map_err(|_| fail(format!("{what}: expected an integer, found {}", value.kind()))),
    }
}

/// The argument as text.
pub(super) fn text<'a>(what: &str, value: Option<&'a Value>) -> Result<&'a str, Error> {
    match value {
        Some(value) => value
            .as_str()
            .ok_or_else(|| fail(format!("{what}: expected a string, found {}", value.kind()))),
        None => {
            Err(Error::new(ErrorKind::MissingArgument, format!("{what}: an argument is missing")))
        }
    }
}

/// Keys and values of a dictionary.
pub(super) fn pairs(value: &Value) -> Result<Vec<[Value; 2]>, Error> {
    value.try_iter()?.map(|key| Ok([key.clone(), value.get_item(&key)?])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_have_the_digits_of_python() {
        for (float, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e300, "1e+300"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(float), expected);
        }
    }
}
