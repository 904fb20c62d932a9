//! Filters of Jinja2 whose form, arguments or bounds differ in the engine. What is in neither list is an
//! unknown filter.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value, filters};

use super::format::percent;
use super::json::tojson;
use super::methods::{self, capitalize, cased, pad, split_lines};
use super::python::{self, Text, bind, fail, integer, is_space, pairs, tuple};

type Result<T> = std::result::Result<T, Error>;
type Filter = fn(&[Value]) -> Result<Value>;

const OURS: [(&str, Filter); 37] = [
    ("tojson", tojson),
    ("string", |args| python::str(first(args)).map(Value::from)),
    ("length", |args| length(first(args))),
    ("count", |args| length(first(args))),
    ("list", |args| items(first(args)).map(Value::from)),
    ("items", |args| match first(args).kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => Ok(pairs(first(args))?.into_iter().map(tuple).collect::<Vec<_>>().into()),
        other => Err(fail(format!("items: expected a dictionary, found {other}"))),
    }),
    ("join", join),
    ("default", default),
    ("d", default),
    ("upper", |args| python::str(first(args)).map(|s| s.to_uppercase().into())),
    ("lower", |args| python::str(first(args)).map(|s| s.to_lowercase().into())),
    ("capitalize", |args| python::str(first(args)).map(|s| capitalize(&s).into())),
    ("title", |args| python::str(first(args)).map(|s| title(&s).into())),
    ("trim", trim),
    ("replace", replace),
    ("center", |args| {
        let [value, width] = bind("center", args, ["value", "width"])?;
        let width = integer("center", width.as_ref(), 80)?;
        pad(&python::str(&value.unwrap_or_default())?, width, " ", "center")
    }),
    ("indent", indent),
    ("truncate", truncate),
    ("wordcount", |args| python::str(first(args)).map(|s| word_count(&s).into())),
    ("format", format),
    ("batch", batch),
    ("slice", slice),
    ("reverse", |args| match first(args).as_str() {
        Some(text) => Ok(text.chars().rev().collect::<String>().into()),
        None => {
            let mut items = items(first(args))?;
            items.reverse();
            Ok(items.into())
        }
    }),
    ("first", |args| Ok(items(first(args))?.into_iter().next().unwrap_or_default())),
    ("last", |args| Ok(items(first(args))?.pop().unwrap_or_default())),
    ("int", int),
    ("float", float),
    ("round", round),
    ("abs", |args| match first(args).kind() {
        ValueKind::Number => filters::abs(first(args).clone()),
        other => Err(fail(format!("abs: expected a number, found {other}"))),
    }),
    ("sum", sum),
    ("dictsort", dictsort),
    ("attr", |args| {
        let [value, name] = bind("attr", args, ["obj", "name"])?;
        value.unwrap_or_default().get_item(&name.unwrap_or_default())
    }),
    ("safe", |args| python::str(first(args)).map(Value::from)),
    ("escape", |args| python::str(first(args)).map(|s| escape(&s).into())),
    ("e", |args| python::str(first(args)).map(|s| escape(&s).into())),
    ("sort", |args| sorted("sort", args)),
    ("unique", |args| sorted("unique", args)),
];

/// Gives the environment the filters of Jinja2.
pub(super) fn add(environment: &mut Environment<'static>) {
    for (name, filter) in OURS {
        environment.add_filter(name, move |args: Rest<ValueOrKwargs>| filter(&args.into_values()));
    }
    environment.add_filter("map", filters::map);
    environment.add_filter("select", filters::select);
    environment.add_filter("selectattr", filters::selectattr);
    environment.add_filter("reject", filters::reject);
    environment.add_filter("rejectattr", filters::rejectattr);
    environment.add_filter("min", filters::min);
    environment.add_filter("max", filters::max);
    environment.add_filter("groupby", filters::groupby);
}

fn first(args: &[Value]) -> &Value {
    args.first().unwrap_or(&Value::UNDEFINED)
}

/// Items of a loop over the value.
fn items(value: &Value) -> Result<Vec<Value>> {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => Ok(text.chars().map(Value::from).collect()),
        (None, ValueKind::Undefined) => Ok(Vec::new()),
        (None, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) => {
            Ok(value.try_iter()?.collect())
        }
        (None, other) => Err(fail(format!("a value of type {other} is not iterable"))),
    }
}

fn length(value: &Value) -> Result<Value> {
    match value.kind() {
        ValueKind::Undefined => Ok(0.into()),
        _ => match value.len() {
            Some(len) => Ok(len.into()),
            None => Ok(items(value)?.len().into()),
        },
    }
}

fn attribute(value: &Value, path: &Value) -> Result<Value> {
    let Some(path) = path.as_str() else { return value.get_item(path) };
    path.split('.').try_fold(value.clone(), |value, name| match name.parse::<usize>() {
        Ok(index) => value.get_item_by_index(index),
        Err(_) => value.get_attr(name),
    })
}

fn join(args: &[Value]) -> Result<Value> {
    let [value, separator, path] = bind("join", args, ["value", "d", "attribute"])?;
    let separator = separator.as_ref().map(python::str).transpose()?.unwrap_or_default();
    let mut out = Text::default();
    for (index, item) in items(&value.unwrap_or_default())?.into_iter().enumerate() {
        let item = match &path {
            Some(path) if !path.is_none() => attribute(&item, path)?,
            _ => item,
        };
        out.push(if index == 0 { "" } else { &separator })?;
        out.push(&python::str(&item)?)?;
    }
    Ok(out.into_value())
}

fn default(args: &[Value]) -> Result<Value> {
    let [value, default, boolean] = bind("default", args, ["value", "default_value", "boolean"])?;
    let value = value.unwrap_or_default();
    let falsy = boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true();
    Ok(if value.is_undefined() || falsy { default.unwrap_or_else(|| "".into()) } else { value })
}

/// Words begin after white space, `-`, `(`, `{`, `[` and `<`, unlike those of `str.title`.
fn title(text: &str) -> String {
    let mut begins = true;
    cased(text, |c| std::mem::replace(&mut begins, is_space(c) || "-({[<".contains(c)))
}

fn trim(args: &[Value]) -> Result<Value> {
    let [value, chars] = bind("trim", args, ["value", "chars"])?;
    let text = python::str(&value.unwrap_or_default())?;
    let chars = chars.as_ref().filter(|chars| !chars.is_none()).and_then(Value::as_str);
    let trims = |c: char| chars.map_or(is_space(c), |chars| chars.contains(c));
    Ok(text.trim_matches(trims).into())
}

fn replace(args: &[Value]) -> Result<Value> {
    let [value, old, new, count] = bind("replace", args, ["s", "old", "new", "count"])?;
    let count = count.filter(|count| !count.is_none());
    let text = |value: Option<Value>| python::str(&value.unwrap_or_default());
    methods::replace(
        &text(value)?,
        &text(old)?,
        &text(new)?,
        integer("replace", count.as_ref(), -1)?,
    )
}

fn indent(args: &[Value]) -> Result<Value> {
    let [value, width, first, blank] = bind("indent", args, ["s", "width", "first", "blank"])?;
    let text = python::str(&value.unwrap_or_default())?;
    let mut out = Text::default();
    let mut indention = Text::default();
    match width.as_ref().and_then(Value::as_str) {
        Some(text) => indention.push(text)?,
        None => {
            let width = integer("indent", width.as_ref(), 4)?;
            indention.repeat(" ", usize::try_from(width).unwrap_or(0))?;
        }
    }
    let indention = indention.into_string();
    let is_true = |value: &Option<Value>| value.as_ref().is_some_and(|value| value.is_true());
    let blank = is_true(&blank);
    if is_true(&first) {
        out.push(&indention)?;
    }
    // Jinja2 adds a line end first, so that the last one is kept.
    let text = format!("{text}\n");
    for (index, line) in split_lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push("\n")?;
            if blank || !line.is_empty() {
                out.push(&indention)?;
            }
        }
        out.push(line)?;
    }
    Ok(out.into_value())
}

fn truncate(args: &[Value]) -> Result<Value> {
    let names = ["s", "length", "killwords", "end", "leeway"];
    let [value, length, kill, end, leeway] = bind("truncate", args, names)?;
    let text = python::str(&value.unwrap_or_default())?;
    let length = integer("truncate", length.as_ref(), 255)?;
    let end = end.as_ref().map(python::str).transpose()?.unwrap_or_else(|| "...".to_owned());
    let leeway = integer("truncate", leeway.as_ref().filter(|n| !n.is_none()), 5)?;
    let kept = length - end.chars().count() as i64;
    if kept < 0 || leeway < 0 {
        return Err(fail(
            "truncate: expected a length that the end fits into, and a leeway of at least 0",
        ));
    }
    if text.chars().count() as i64 <= length.saturating_add(leeway) {
        return Ok(text.into());
    }
    let kept: String = text.chars().take(kept as usize).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !kill.is_some_and(|kill| kill.is_true()) => words,
        _ => &kept,
    };
    Ok(format!("{kept}{end}").into())
}

/// Matches of `\w+`.
fn word_count(text: &str) -> usize {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
}

fn format(args: &[Value]) -> Result<Value> {
    let text = python::str(first(args))?;
    percent(&text, args.get(1..).unwrap_or_default())
}

/// Lists of `count` items; the last one is filled up.
fn batch(args: &[Value]) -> Result<Value> {
    let [value, count, fill] = bind("batch", args, ["value", "linecount", "fill_with"])?;
    let count = count_of("batch", count.as_ref())?;
    let fill = fill.filter(|fill| !fill.is_none());
    let items = items(&value.unwrap_or_default())?;
    let mut batches: Vec<Vec<Value>> = items.chunks(count).map(<[Value]>::to_vec).collect();
    if let (Some(fill), Some(last)) = (fill, batches.last_mut()) {
        bounded("batch", count)?;
        last.resize(count, fill);
    }
    Ok(batches.into_iter().map(Value::from).collect::<Vec<_>>().into())
}

/// `count` lists; shorter ones are filled up.
fn slice(args: &[Value]) -> Result<Value> {
    let [value, count, fill] = bind("slice", args, ["value", "slices", "fill_with"])?;
    let count = count_of("slice", count.as_ref())?;
    bounded("slice", count)?;
    let fill = fill.filter(|fill| !fill.is_none());
    let items = items(&value.unwrap_or_default())?;
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut rest = items.into_iter();
    let slices = (0..count).map(|index| {
        let mut slice: Vec<Value> =
            rest.by_ref().take(each + usize::from(index < longer)).collect();
        if index >= longer {
            slice.extend(fill.clone());
        }
        Value::from(slice)
    });
    Ok(slices.collect::<Vec<_>>().into())
}

fn count_of(what: &str, count: Option<&Value>) -> Result<usize> {
    let count = count.ok_or_else(|| fail(format!("{what}: an argument is missing")))?;
    match usize::try_from(integer(what, Some(count), 0)?) {
        Ok(count @ 1..) => Ok(count),
        _ => Err(fail(format!("{what}: expected a number above 0"))),
    }
}

fn bounded(what: &str, count: usize) -> Result<()> {
    const MAX_COUNT: usize = 100_000;
    if count > MAX_COUNT {
        return Err(fail(format!("{what}: {count} is more than {MAX_COUNT}")));
    }
    Ok(())
}

fn int(args: &[Value]) -> Result<Value> {
    let [value, default, base] = bind("int", args, ["value", "default", "base"])?;
    let base = integer("int", base.as_ref(), 10)?;
    let value = value.unwrap_or_default();
    let whole = |float: f64| float.is_finite().then(|| Value::from(float.trunc() as i128));
    let number = match value.as_str() {
        Some(text) => {
            let text = text.trim_matches(is_space).replace('_', "").to_lowercase();
            let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base));
            let base = base.ok_or_else(|| fail("int: expected a base from 2 to 36"))?;
            let prefix = match base {
                2 => "0b",
                8 => "0o",
                16 => "0x",
                _ => "",
            };
            let digits = text.strip_prefix(prefix).unwrap_or(&text);
            let exact = i128::from_str_radix(digits, base).ok().map(Value::from);
            exact.or_else(|| parse_float(&text).and_then(whole))
        }
        None => match value.kind() {
            ValueKind::Bool => Some(i64::from(value.is_true()).into()),
            ValueKind::Number if value.is_integer() => Some(value.clone()),
            ValueKind::Number => f64::try_from(value.clone()).ok().and_then(whole),
            _ => None,
        },
    };
    Ok(number.or(default).unwrap_or_else(|| 0.into()))
}

fn float(args: &[Value]) -> Result<Value> {
    let [value, default] = bind("float", args, ["value", "default"])?;
    let value = value.unwrap_or_default();
    let number = match value.as_str() {
        Some(text) => parse_float(text.trim_matches(is_space)),
        None => match value.kind() {
            ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
            ValueKind::Number => f64::try_from(value.clone()).ok(),
            _ => None,
        },
    };
    Ok(number.map(Value::from).or(default).unwrap_or_else(|| 0.0.into()))
}

fn parse_float(text: &str) -> Option<f64> {
    text.parse().ok()
}

fn round(args: &[Value]) -> Result<Value> {
    let [value, precision, method] = bind("round", args, ["value", "precision", "method"])?;
    let value = value.unwrap_or_default();
    let precision = integer("round", precision.as_ref(), 0)?;
    let precision = i32::try_from(precision.clamp(-300, 300)).unwrap_or(0);
    let Ok(number) = f64::try_from(value.clone()) else {
        return Err(fail(format!("round: expected a number, found {}", value.kind())));
    };
    let scale = 10_f64.powi(precision);
    let rounded = match method.as_ref().and_then(Value::as_str).unwrap_or("common") {
        "common" if value.is_integer() && precision >= 0 => return Ok(value),
        // Rust rounds the exact value to even, as Python does.
        "common" if precision >= 0 => {
            format!("{number:.*}", precision as usize).parse().unwrap_or(number)
        }
        "common" => (number * scale).round_ties_even() / scale,
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        _ => return Err(fail("round: the method must be common, ceil or floor")),
    };
    Ok(if value.is_integer() && precision < 0 && method.is_none() {
        Value::from(rounded as i128)
    } else {
        rounded.into()
    })
}

fn sum(args: &[Value]) -> Result<Value> {
    let [value, path, start] = bind("sum", args, ["iterable", "attribute", "start"])?;
    let (mut whole, mut fraction, mut exact) = (0_i128, 0.0, true);
    let mut add = |item: &Value| {
        match (i128::try_from(item.clone()), f64::try_from(item.clone())) {
            (Ok(number), _) if item.is_integer() || item.kind() == ValueKind::Bool => {
                whole = whole.checked_add(number).ok_or_else(|| fail("sum: too large"))?;
            }
            (_, Ok(number)) => {
                fraction += number;
                exact = false;
            }
            _ => return Err(fail(format!("sum: expected numbers, found {}", item.kind()))),
        }
        Ok(())
    };
    start.as_ref().map(&mut add).transpose()?;
    for item in items(&value.unwrap_or_default())? {
        match &path {
            Some(path) if !path.is_none() => add(&attribute(&item, path)?)?,
            _ => add(&item)?,
        }
    }
    Ok(if exact { Value::from(whole) } else { (whole as f64 + fraction).into() })
}

/// Sort key in Jinja2's order: upper and lower case alike unless `case_sensitive`.
fn folded(value: Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !case_sensitive => text.to_lowercase().into(),
        _ => value,
    }
}

fn dictsort(args: &[Value]) -> Result<Value> {
    let names = ["value", "case_sensitive", "by", "reverse"];
    let [value, case_sensitive, by, reverse] = bind("dictsort", args, names)?;
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (case_sensitive, reverse) = (is_true(case_sensitive), is_true(reverse));
    let place = match by.as_ref().and_then(Value::as_str) {
        None | Some("key") => 0,
        Some("value") => 1,
        Some(other) => {
            return Err(fail(format!("dictsort: by must be key or value, found {other:?}")));
        }
    };
    let mut keyed: Vec<(Value, [Value; 2])> = pairs(&value.unwrap_or_default())?
        .into_iter()
        .map(|pair| (folded(pair[place].clone(), case_sensitive), pair))
        .collect();
    sort_by_key(&mut keyed, reverse)?;
    Ok(keyed.into_iter().map(|(_, pair)| tuple(pair)).collect::<Vec<_>>().into())
}

/// Sorts as Python does: stable in both directions, and only what can be compared.
fn sort_by_key<T>(keyed: &mut [(Value, T)], reverse: bool) -> Result<()> {
    let kind = |value: &Value| match value.kind() {
        ValueKind::Bool => ValueKind::Number,
        ValueKind::Iterable => ValueKind::Seq,
        other => other,
    };
    if let Some((first, rest)) = keyed.split_first()
        && let Some((other, _)) = rest.iter().find(|(key, _)| kind(key) != kind(&first.0))
    {
        return Err(fail(format!("{} and {} have no order", first.0.kind(), other.kind())));
    }
    keyed.sort_by(|(a, _), (b, _)| if reverse { b.cmp(a) } else { a.cmp(b) });
    Ok(())
}

/// `sort` and `unique`, whose arguments stand in different orders.
fn sorted(what: &str, args: &[Value]) -> Result<Value> {
    let (value, reverse, case_sensitive, path) = if what == "sort" {
        let names = ["value", "reverse", "case_sensitive", "attribute"];
        let [value, reverse, case_sensitive, path] = bind(what, args, names)?;
        (value, reverse, case_sensitive, path)
    } else {
        let names = ["value", "case_sensitive", "attribute"];
        let [value, case_sensitive, path] = bind(what, args, names)?;
        (value, None, case_sensitive, path)
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let case_sensitive = is_true(case_sensitive);
    let mut keyed = Vec::new();
    for item in items(&value.unwrap_or_default())? {
        let key = match path.as_ref().filter(|path| !path.is_none()) {
            None => folded(item.clone(), case_sensitive),
            // Several attributes, separated by commas.
            Some(path) => match path.as_str() {
                Some(names) if names.contains(',') => names
                    .split(',')
                    .map(|name| Ok(folded(attribute(&item, &name.into())?, case_sensitive)))
                    .collect::<Result<Vec<Value>>>()?
                    .into(),
                _ => folded(attribute(&item, path)?, case_sensitive),
            },
        };
        keyed.push((key, item));
    }
    if what == "sort" {
        sort_by_key(&mut keyed, is_true(reverse))?;
    } else {
        let mut seen = std::collections::BTreeSet::new();
        keyed.retain(|(key, _)| seen.insert(key.clone()));
    }
    Ok(keyed.into_iter().map(|(_, item)| item).collect::<Vec<_>>().into())
}

/// Escapes a text like `markupsafe.escape`.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
