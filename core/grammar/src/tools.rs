//! Calls of tools as a grammar, in the format of the model.

use std::fmt::Write as _;

use qhx_base::{Result, bail};
use qhx_text::{CallFormat, CallSyntax, REASONING, Tags, Tool};
use serde_json::{Map, Value, json};

use crate::pairs::{Pairs, text};
use crate::schema::{flexible, spaced};

/// A text in a grammar.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text in a regular expression.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(2 * text.len());
    for c in text.chars() {
        if r"\[](){}|*+?.^$/".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Alternative to calls in an answer.
pub(crate) enum Instead {
    Nothing,
    Text,
    /// JSON of a schema.
    Json(Value),
}

/// A grammar of calls. `special`: the spelling of a special token, where it is one.
pub(crate) fn lark(
    tools: &[Tool],
    format: CallFormat,
    instead: &Instead,
    special: impl Fn(&str) -> Option<String>,
) -> Result<String> {
    if tools.is_empty() {
        bail!(Usage, "the tools: there are none");
    }
    let syntax = format.syntax();
    let (start, end) = format.marks();
    if let (Instead::Json(schema), "") = (instead, start) {
        return Ok(format!("start: %json {}", flexible(bare_or(tools, schema))));
    }
    let is_special = special(start).is_some();
    let mark = |text: &str| special(text).unwrap_or_else(|| literal(text));
    let texts =
        |text: &str| if text.is_empty() { String::new() } else { format!("{} ", literal(text)) };
    // What comes behind the first mark.
    let [before, between, behind] = syntax.inner;
    let several = match between {
        "" => String::new(),
        between => format!(" ({} call)*", literal(between)),
    };
    let end = if end.is_empty() { String::new() } else { mark(end) };
    let body = format!("{}call{several} {}{end}", texts(before), texts(behind));
    let more = match syntax.next {
        Some(between) => format!(" ({}{} {body})*", texts(between), mark(start)),
        None => String::new(),
    };
    let calls = match start {
        "" => body.clone(),
        start => format!("{} {body}{more}", mark(start)),
    };
    // Reasoning between special tokens, which no text has.
    let reasoning =
        REASONING.iter().filter_map(|marks| Some([special(marks.open)?, special(marks.close)?]));
    let reasoning: Vec<_> =
        reasoning.map(|[open, close]| format!("{open} /(.|\\n)*/ {close}")).collect();
    let before = if reasoning.is_empty() { "" } else { "reasoning* " };
    let mut lark = String::new();
    let any = "/(.|\\n)*/";
    let _ = match (instead, start) {
        (Instead::Nothing, _) => writeln!(lark, "start: {calls}"),
        (Instead::Json(schema), _) => {
            let schema = flexible(schema.clone());
            writeln!(lark, "start: answer | {calls}\nanswer: %json {schema}")
        }
        (Instead::Text, "") => {
            writeln!(lark, "start: {before}(TEXT | {calls})\nTEXT: /[^{{](.|\\n)*/")
        }
        (Instead::Text, _) if is_special => {
            let between = if before.is_empty() { "" } else { "(TEXT reasoning)* " };
            writeln!(lark, "start: {before}{between}(TEXT | TEXT {calls})\nTEXT: {any}")
        }
        (Instead::Text, start) => writeln!(
            lark,
            "start: {before}(TEXT | before {body}{more})\nbefore[suffix={}]: {any}\n\
             TEXT: {any} & ~/(.|\\n)*{}(.|\\n)*/",
            literal(start),
            escaped(start)
        ),
    };
    if !reasoning.is_empty() && matches!(instead, Instead::Text) {
        let _ = writeln!(lark, "reasoning: {}", reasoning.join(" | "));
    }
    let names: Vec<_> = (0..tools.len()).map(|index| format!("f{index}")).collect();
    let _ = writeln!(lark, "call: {}", names.join(" | "));
    for (index, tool) in tools.iter().enumerate() {
        let name = &tool.name;
        let json = |lark: &mut String| {
            let schema = spaced(tool.parameters.clone(), !tool.strict);
            let _ = writeln!(lark, "a{index}: %json {schema}");
            format!("a{index}")
        };
        let rule = match syntax.call {
            CallSyntax::Json { arguments } => {
                let begin = format!(r#"{{"name": {}, "{arguments}": "#, literal(name));
                format!(r#"{} {} "}}""#, literal(&begin), json(&mut lark))
            }
            CallSyntax::Named { between } => {
                format!("{} {} {}", literal(name), mark(between), json(&mut lark))
            }
            CallSyntax::Tags(tags) => elements(&mut lark, index, tool, &tags),
            CallSyntax::Python => python(&mut lark, index, tool),
            CallSyntax::Pairs { quote } => {
                let rules =
                    Pairs::new(tool, index, &mark(quote), special(quote).is_some()).arguments();
                lark.push_str(&rules.1);
                format!("{} {}", literal(&format!("call:{name}")), rules.0)
            }
            _ => bail!(Internal, "calls in the format {:?} have no grammar", syntax.name),
        };
        let _ = writeln!(lark, "f{index}: {rule}");
    }
    Ok(lark)
}

/// A call without marks, or JSON of a schema: one schema, since both may begin alike.
fn bare_or(tools: &[Tool], schema: &Value) -> Value {
    let mut defined = Map::new();
    let mut define = |schema: &Value| {
        for key in DEFINITIONS {
            if let Some(Value::Object(own)) = schema.get(key) {
                let all = defined.entry(key).or_insert_with(|| Map::new().into());
                all.as_object_mut().into_iter().for_each(|all| all.extend(own.clone()));
            }
        }
    };
    define(schema);
    let mut any = vec![schema.clone()];
    for tool in tools {
        define(&tool.parameters);
        any.push(json!({
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": tool.parameters},
            "required": ["name", "parameters"],
            "additionalProperties": false,
        }));
    }
    defined.insert("anyOf".to_owned(), any.into());
    defined.into()
}

/// Keys of definitions that a schema refers to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// A schema of one argument, which can refer to what its tool defines.
fn within(tool: &Tool, schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(schema) = &mut schema {
        for key in DEFINITIONS {
            if let Some(definitions) = tool.parameters.get(key) {
                schema.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    spaced(schema, !tool.strict)
}

fn is_text(schema: &Value) -> bool {
    schema.get("type").is_some_and(|kind| kind == "string") && schema.get("enum").is_none()
}

fn elements(lark: &mut String, index: usize, tool: &Tool, tags: &Tags) -> String {
    let [open, opened, close] = tags.call;
    let mut rule = literal(&format!("{open}{}{opened}", tool.name));
    for (number, (name, schema, must)) in tool.arguments().into_iter().enumerate() {
        let begin = format!("{}{name}{}{}", tags.key[0], tags.key[1], tags.value[0]);
        let (begin, end) = (literal(&begin), literal(tags.value[1]));
        let argument = format!("p{index}_{number}");
        let texts = schema.get("enum").and_then(Value::as_array);
        let texts: Option<Vec<_>> = texts.and_then(|all| all.iter().map(Value::as_str).collect());
        let _ = if let Some(texts) = texts.filter(|texts| !texts.is_empty()) {
            let texts: Vec<_> = texts.into_iter().map(literal).collect();
            writeln!(lark, "{argument}: {begin} ({}) {end}", texts.join(" | "))
        } else if let Some(schema) = schema.as_object().filter(|_| is_text(schema)) {
            match text(schema, !tool.strict) {
                Some(form) => {
                    // Names of terminals are in capitals.
                    let name = if form.starts_with('/') { "V" } else { "v" };
                    let name = format!("{name}{index}_{number}");
                    writeln!(lark, "{argument}: {begin} {name} {end}\n{name}: {form}")
                }
                None => writeln!(
                    lark,
                    "{argument}: {begin} v{argument}\nv{argument}[suffix={end}]: /(.|\\n)*/"
                ),
            }
        } else {
            let schema = within(tool, schema);
            writeln!(lark, "{argument}: {begin} v{argument} {end}\nv{argument}: %json {schema}")
        };
        let _ = write!(rule, " {argument}{}", if must { "" } else { "?" });
    }
    if !close.is_empty() {
        let _ = write!(rule, " {}", literal(close));
    }
    rule
}

fn python(lark: &mut String, index: usize, tool: &Tool) -> String {
    let arguments = tool.arguments();
    for (number, (name, schema, _)) in arguments.iter().enumerate() {
        let (argument, begin) = (format!("p{index}_{number}"), literal(&format!("{name}=")));
        let _ = if schema.get("type").is_some_and(|kind| kind == "boolean") {
            writeln!(lark, r#"{argument}: {begin} ("True" | "False")"#)
        } else {
            let schema = within(tool, schema);
            writeln!(lark, "{argument}: {begin} v{argument}\nv{argument}: %json {schema}")
        };
    }
    let required = arguments.iter().filter(|(_, _, must)| *must).count();
    // From the argument `first` on: all that must be there, maybe those that may.
    let from = |first: usize| {
        let mut list = format!("p{index}_{first}");
        for number in first + 1..arguments.len() {
            let _ = if number < required {
                write!(list, r#" ", " p{index}_{number}"#)
            } else {
                write!(list, r#" (", " p{index}_{number})?"#)
            };
        }
        list
    };
    let lists = match (required, arguments.len()) {
        (0, 0) => String::new(),
        (0, count) => {
            let lists: Vec<_> = (0..count).map(from).collect();
            format!(" ({})?", lists.join(" | "))
        }
        _ => format!(" {}", from(0)),
    };
    format!(r#"{}{lists} ")""#, literal(&format!("{}(", tool.name)))
}
