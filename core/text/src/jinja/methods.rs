//! Methods of Python's strings, lists and dictionaries that change nothing; the sandbox of `transformers` refuses
//! the others, too.

use std::sync::Arc;

use minijinja::formatting::FormatStyle;
use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::format::fill;
use super::python::{self, Text, bind, fail, integer, is_space, pairs, text, tuple};

type Result<T> = std::result::Result<T, Error>;

/// Calls `value.method(args)`.
pub(super) fn call(
    _: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value> {
    if method == "__attr__" {
        return attribute(value, args.first().and_then(Value::as_str).unwrap_or_default());
    }
    let answer = match value.kind() {
        ValueKind::String => string(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq | ValueKind::Iterable => sequence(value, method, args)?,
        ValueKind::Map => mapping(value, method, args)?,
        _ => None,
    };
    answer.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))
}

/// Names that are found in a dictionary before its keys.
pub(super) const OF_MAPPINGS: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

/// A method of a dictionary that is not called.
#[derive(Debug)]
struct Method {
    of: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value> {
        mapping(&self.of, &self.name, args)?.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))
    }
}

/// `value.name` for a name that dictionaries have: of these it is the method, whatever keys there are.
fn attribute(value: &Value, name: &str) -> Result<Value> {
    if value.kind() != ValueKind::Map || value.is_kwargs() || python::is_namespace(value) {
        return value.get_attr(name);
    }
    Ok(match name {
        "copy" | "fromkeys" | "get" | "items" | "keys" | "values" => {
            Value::from_object(Method { of: value.clone(), name: name.to_owned() })
        }
        // The sandbox gives nothing that changes a dictionary.
        _ => Value::UNDEFINED,
    })
}

fn string(s: &str, method: &str, args: &[Value]) -> Result<Option<Value>> {
    let what = format!("str.{method}");
    let what = what.as_str();
    let nothing = || bind(what, args, []).map(|[]| ());
    let all = |test: fn(char) -> bool| -> Result<Option<Value>> {
        nothing()?;
        Ok(Some((!s.is_empty() && s.chars().all(test)).into()))
    };
    let value = match method {
        "upper" => nothing().map(|()| s.to_uppercase().into())?,
        "lower" => nothing().map(|()| s.to_lowercase().into())?,
        "casefold" => nothing().map(|()| s.to_lowercase().replace('ß', "ss").into())?,
        "capitalize" => nothing().map(|()| capitalize(s).into())?,
        "title" => nothing().map(|()| title(s).into())?,
        "swapcase" => nothing().map(|()| cased(s, |c| !c.is_uppercase()).into())?,
        "isupper" | "islower" => {
            nothing()?;
            let upper = method == "isupper";
            let cased = |c: &char| c.is_uppercase() || c.is_lowercase();
            let mut cased = s.chars().filter(cased).peekable();
            (cased.peek().is_some() && cased.all(|c| c.is_uppercase() == upper)).into()
        }
        "isspace" => return all(is_space),
        "isdigit" | "isdecimal" => return all(is_digit),
        "isnumeric" => return all(char::is_numeric),
        "isalpha" => return all(char::is_alphabetic),
        "isalnum" => return all(char::is_alphanumeric),
        "isascii" => nothing().map(|()| s.is_ascii().into())?,
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = bind(what, args, ["chars"])?;
            let chars = chars.filter(|chars| !chars.is_none());
            let chars = chars.as_ref().map(|chars| text(what, Some(chars))).transpose()?;
            let strips = |c: char| chars.map_or(is_space(c), |chars| chars.contains(c));
            match method {
                "strip" => s.trim_matches(strips),
                "lstrip" => s.trim_start_matches(strips),
                _ => s.trim_end_matches(strips),
            }
            .into()
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = bind(what, args, ["affix"])?;
            let affix = text(what, affix.as_ref())?;
            let rest = match method {
                "removeprefix" => s.strip_prefix(affix),
                _ => s.strip_suffix(affix),
            };
            rest.unwrap_or(s).into()
        }
        "startswith" | "endswith" => {
            let [affix, start, end] = bind(what, args, ["affix", "start", "end"])?;
            let part =
                part(what, s, start.as_ref(), end.as_ref())?.map_or("\u{0}", |(_, part)| part);
            let matches = |affix: &Value| {
                let affix = text(what, Some(affix))?;
                Ok(if method == "startswith" {
                    part.starts_with(affix)
                } else {
                    part.ends_with(affix)
                })
            };
            match affix {
                Some(tuple) if tuple.as_str().is_none() => {
                    let any: Result<Vec<bool>> =
                        tuple.try_iter()?.map(|affix| matches(&affix)).collect();
                    any?.contains(&true).into()
                }
                affix => matches(&affix.unwrap_or_default())?.into(),
            }
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [sub, start, end] = bind(what, args, ["sub", "start", "end"])?;
            let sub = text(what, sub.as_ref())?;
            let part = part(what, s, start.as_ref(), end.as_ref())?;
            if method == "count" {
                let count = part.map_or(0, |(_, part)| match sub {
                    "" => part.chars().count() + 1,
                    sub => part.matches(sub).count(),
                });
                return Ok(Some(count.into()));
            }
            let found = part.and_then(|(before, part)| {
                let at = if method.starts_with('r') { part.rfind(sub) } else { part.find(sub) }?;
                Some((before + part[..at].chars().count()) as i64)
            });
            match found {
                Some(at) => at.into(),
                None if method.ends_with("find") => (-1).into(),
                None => return Err(fail(format!("{what}: substring not found"))),
            }
        }
        "partition" | "rpartition" => {
            let [separator] = bind(what, args, ["sep"])?;
            let separator = text(what, separator.as_ref())?;
            if separator.is_empty() {
                return Err(fail(format!("{what}: empty separator")));
            }
            let parts = match (method, s.split_once(separator), s.rsplit_once(separator)) {
                ("partition", Some((head, tail)), _) | ("rpartition", _, Some((head, tail))) => {
                    [head, separator, tail]
                }
                ("partition", ..) => [s, "", ""],
                _ => ["", "", s],
            };
            tuple(parts.map(Value::from))
        }
        "split" | "rsplit" => {
            let [separator, limit] = bind(what, args, ["sep", "maxsplit"])?;
            let limit =
                usize::try_from(integer(what, limit.as_ref(), -1)?).unwrap_or(usize::MAX - 1);
            let separator = separator.filter(|separator| !separator.is_none());
            let parts = match &separator {
                None => split_at_spaces(s, limit, method == "rsplit"),
                Some(separator) => {
                    let separator = text(what, Some(separator))?;
                    if separator.is_empty() {
                        return Err(fail(format!("{what}: empty separator")));
                    }
                    if method == "split" {
                        s.splitn(limit + 1, separator).collect()
                    } else {
                        let mut parts: Vec<&str> = s.rsplitn(limit + 1, separator).collect();
                        parts.reverse();
                        parts
                    }
                }
            };
            parts.into_iter().map(Value::from).collect::<Vec<_>>().into()
        }
        "splitlines" => {
            let [keepends] = bind(what, args, ["keepends"])?;
            let keep = keepends.is_some_and(|keep| keep.is_true());
            split_lines(s, keep).into_iter().map(Value::from).collect::<Vec<_>>().into()
        }
        "replace" => {
            let [old, new, count] = bind(what, args, ["old", "new", "count"])?;
            let count = integer(what, count.as_ref(), -1)?;
            replace(s, text(what, old.as_ref())?, text(what, new.as_ref())?, count)?
        }
        "join" => {
            let [items] = bind(what, args, ["iterable"])?;
            let mut out = Text::default();
            for (index, item) in items.unwrap_or_default().try_iter()?.enumerate() {
                out.push(if index == 0 { "" } else { s })?;
                out.push(text(what, Some(&item))?)?;
            }
            out.into_value()
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = bind(what, args, ["width", "fillchar"])?;
            let width = width.ok_or_else(|| fail(format!("{what}: an argument is missing")))?;
            let fill = fill.unwrap_or_else(|| Value::from(" "));
            let fill = text(what, Some(&fill))?;
            if fill.chars().count() != 1 {
                return Err(fail(format!("{what}: the fill character must be one character")));
            }
            pad(s, integer(what, Some(&width), 0)?, fill, method)?
        }
        "zfill" => {
            let [width] = bind(what, args, ["width"])?;
            let width = width.ok_or_else(|| fail(format!("{what}: an argument is missing")))?;
            let width = usize::try_from(integer(what, Some(&width), 0)?).unwrap_or(0);
            let digits = s.trim_start_matches(['+', '-']);
            let sign =
                if s.len() - digits.len() > 1 { &s[..1] } else { &s[..s.len() - digits.len()] };
            let mut out = Text::default();
            out.push(sign)?;
            out.repeat("0", width.saturating_sub(s.chars().count()))?;
            out.push(&s[sign.len()..])?;
            out.into_value()
        }
        "expandtabs" => {
            let [size] = bind(what, args, ["tabsize"])?;
            let size = usize::try_from(integer(what, size.as_ref(), 8)?).unwrap_or(0);
            let (mut out, mut column) = (Text::default(), 0);
            for c in s.chars() {
                if c == '\t' {
                    let spaces = if size == 0 { 0 } else { size - column % size };
                    out.repeat(" ", spaces)?;
                    column += spaces;
                } else {
                    column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                    out.push(c.encode_utf8(&mut [0; 4]))?;
                }
            }
            out.into_value()
        }
        "format" => fill(FormatStyle::StrFormat, s, args)?,
        _ => return Ok(None),
    };
    Ok(Some(value))
}

/// Digits of all scripts, without fractions and letters that stand for numbers.
fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
        || c.is_numeric()
            && !c.is_ascii()
            && !c.is_alphabetic()
            && !matches!(c, '\u{bc}'..='\u{be}' | '\u{2150}'..='\u{2189}' | '\u{3007}')
}

/// The part of `s` that two indices of Python name, with the number of characters before it.
fn part<'s>(
    what: &str,
    s: &'s str,
    start: Option<&Value>,
    end: Option<&Value>,
) -> Result<Option<(usize, &'s str)>> {
    let len = s.chars().count() as i64;
    let place = |index: Option<&Value>, default: i64| -> Result<i64> {
        let index = integer(what, index.filter(|index| !index.is_none()), default)?;
        Ok(if index < 0 { index.saturating_add(len).max(0) } else { index })
    };
    let (start, end) = (place(start, 0)?, place(end, len)?.min(len));
    if start > end {
        return Ok(None);
    }
    let byte = |at: i64| s.char_indices().nth(at as usize).map_or(s.len(), |(byte, _)| byte);
    Ok(Some((start as usize, &s[byte(start)..byte(end)])))
}

/// `split` without a separator: runs of white space separate. What the limit leaves keeps its spaces at the far end.
fn split_at_spaces<'s>(s: &'s str, limit: usize, from_right: bool) -> Vec<&'s str> {
    let without_spaces = |s: &'s str| match from_right {
        true => s.trim_end_matches(is_space),
        false => s.trim_start_matches(is_space),
    };
    let mut parts = Vec::new();
    let mut rest = without_spaces(s);
    while !rest.is_empty() {
        let found = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = found.filter(|_| parts.len() < limit) else {
            parts.push(rest);
            break;
        };
        let space = rest[at..].chars().next().map_or(0, char::len_utf8);
        let (head, tail) = (&rest[..at], &rest[at + space..]);
        let (word, left) = if from_right { (tail, head) } else { (head, tail) };
        parts.push(word);
        rest = without_spaces(left);
    }
    if from_right {
        parts.reverse();
    }
    parts
}

pub(super) fn split_lines(s: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = s;
    while !rest.is_empty() {
        let at = rest.find(ends).unwrap_or(rest.len());
        let end = match &rest[at..] {
            tail if tail.starts_with("\r\n") => 2,
            tail => tail.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(&rest[..if keep_ends { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    lines
}

/// `str.replace`; every occurrence where `count` is negative.
pub(super) fn replace(s: &str, old: &str, new: &str, count: i64) -> Result<Value> {
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let mut out = Text::default();
    let mut at = 0;
    for (found, _) in s.match_indices(old).take(limit) {
        out.push(&s[at..found])?;
        out.push(new)?;
        at = found + old.len();
    }
    out.push(&s[at..])?;
    Ok(out.into_value())
}

pub(super) fn pad(s: &str, width: i64, fill: &str, method: &str) -> Result<Value> {
    let len = s.chars().count();
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(len);
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        // As CPython does: the odd one goes to the left when the width is odd.
        _ => missing / 2 + (missing & width as usize & 1),
    };
    let mut out = Text::default();
    out.repeat(fill, left)?;
    out.push(s)?;
    out.repeat(fill, missing - left)?;
    Ok(out.into_value())
}

pub(super) fn capitalize(s: &str) -> String {
    let mut chars = s.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect(),
        None => String::new(),
    }
}

/// `str.title`: upper case after everything that has no case.
fn title(s: &str) -> String {
    let mut inside = false;
    cased(s, |c| !std::mem::replace(&mut inside, c.is_uppercase() || c.is_lowercase()))
}

/// The text with the characters for which `upper` is true in upper case, and all others in lower case.
pub(super) fn cased(s: &str, mut upper: impl FnMut(char) -> bool) -> String {
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        if upper(c) {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
    }
    out
}

fn sequence(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>> {
    let what = format!("list.{method}");
    Ok(Some(match method {
        "count" | "index" => {
            let [wanted] = bind(&what, args, ["value"])?;
            let wanted = wanted.unwrap_or_default();
            let mut found = value.try_iter()?.enumerate().filter(|(_, item)| *item == wanted);
            match method {
                "count" => found.count().into(),
                _ => match found.next() {
                    Some((at, _)) => at.into(),
                    None => return Err(fail("list.index: the value is not in the list")),
                },
            }
        }
        "copy" => {
            let [] = bind(&what, args, [])?;
            value.clone()
        }
        _ => return Ok(None),
    }))
}

fn mapping(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>> {
    let what = format!("dict.{method}");
    let nothing = || bind(&what, args, []).map(|[]| ());
    Ok(Some(match method {
        "get" => {
            let [key, default] = bind(&what, args, ["key", "default"])?;
            let found = value.get_item(&key.unwrap_or_default())?;
            if found.is_undefined() { default.unwrap_or_else(|| Value::from(())) } else { found }
        }
        "keys" => nothing().and_then(|()| value.try_iter())?.collect::<Vec<_>>().into(),
        "values" => {
            nothing()?;
            let values: Result<Vec<Value>> =
                value.try_iter()?.map(|key| value.get_item(&key)).collect();
            values?.into()
        }
        "items" => {
            let pairs = nothing().and_then(|()| pairs(value))?;
            pairs.into_iter().map(tuple).collect::<Vec<_>>().into()
        }
        "copy" => nothing().map(|()| value.clone())?,
        _ => return Ok(None),
    }))
}
