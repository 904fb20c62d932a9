//! `%` and `format` of Python's strings, within bounds.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::python::{self, MAX_TEXT, pairs, too_long};

type Result<T> = std::result::Result<T, Error>;

/// `value % arguments`, for strings.
pub(super) fn percent(format: &str, arguments: &[Value]) -> Result<Value> {
    fill(FormatStyle::Printf, format, arguments)
}

/// Fills in the places of a format. What they may come to is bounded before: the engine spells out any width.
pub(super) fn fill(style: FormatStyle, format: &str, arguments: &[Value]) -> Result<Value> {
    let (mut longest, mut held) = (0, 0_usize);
    let mut plain = |value: &Value| {
        // `%(name)s` takes the members of one dictionary, and `{name}` named arguments.
        let value = plainly(value)?;
        let len = value.as_str().map_or(LONGEST_NUMBER, str::len);
        longest = len.max(longest);
        held = held.saturating_add(len);
        if held > MAX_FORMATTED { Err(too_long()) } else { Ok(value) }
    };
    let mut filled = Vec::with_capacity(arguments.len());
    for argument in arguments {
        let named =
            arguments.len() == 1 && argument.kind() == ValueKind::Map && format.contains("%(");
        filled.push(if argument.is_kwargs() {
            for [_, value] in pairs(argument)? {
                plain(&value)?;
            }
            argument.clone()
        } else if named && matches!(style, FormatStyle::Printf) {
            let members =
                pairs(argument)?.into_iter().map(|[key, value]| Ok((key, plain(&value)?)));
            Value::from_pairs(members.collect::<Result<Vec<_>>>()?)
        } else {
            plain(argument)?
        });
    }
    let (places, columns) = columns(matches!(style, FormatStyle::Printf), format);
    let max_length =
        places.saturating_mul(longest).saturating_add(columns).saturating_add(format.len());
    if max_length > MAX_FORMATTED {
        return Err(too_long());
    }
    let text = formatting::format(style, format, &filled)?;
    if text.len() > MAX_TEXT { Err(too_long()) } else { Ok(text.into()) }
}

/// Bytes that a number takes as text, without width and precision.
const LONGEST_NUMBER: usize = 400;

/// Maximum size of a format's arguments, and of the text that its places can produce.
const MAX_FORMATTED: usize = 4 * MAX_TEXT;

/// The number of places in a format, and the sum of their widths and precisions.
fn columns(percent: bool, format: &str) -> (usize, usize) {
    let (mut places, mut columns, mut number) = (0_usize, 0_usize, 0_usize);
    let (mut inside, mut named) = (false, false);
    for c in format.chars() {
        if let Some(digit) = c.to_digit(10).filter(|_| inside && !named) {
            number = number.saturating_mul(10).saturating_add(digit as usize);
            continue;
        }
        columns = columns.saturating_add(std::mem::take(&mut number));
        match c {
            '%' if percent => inside = !inside,
            '(' if percent && inside => named = true,
            ')' if percent && inside => named = false,
            _ if percent => inside = inside && (named || "#-+. hlL".contains(c)),
            '{' => inside = true,
            '}' => inside = false,
            _ => {}
        }
        places += usize::from(c == if percent { '%' } else { '{' });
    }
    (places, columns.saturating_add(number))
}

/// Text that `format` and `%` print for a value that is neither text nor a number.
fn plainly(value: &Value) -> Result<Value> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if !value.is_kwargs() => {
            python::str(value).map(Value::from)
        }
        _ => Ok(value.clone()),
    }
}
