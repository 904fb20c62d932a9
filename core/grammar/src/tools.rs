//! Calls of tools as a grammar, in the format of the model.

use std::fmt::Write as _;

use qhx_base::{Result, bail};
use qhx_text::{Beginning, CallFormat, CallSyntax, ReasoningMarks, Tags, Tool};
use serde_json::{Map, Value, json};

use crate::AnswerForm;
use crate::pairs::{Pairs, text};
use crate::schema::{flexible, spaced};
use crate::words::{ANY, MAX_FREE, escaped, literal, orders};

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
    form: AnswerForm,
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
        _ if form.one_call => String::new(),
        "" => String::new(),
        between => format!(" ({} call)*", literal(between)),
    };
    let end = if end.is_empty() { String::new() } else { mark(end) };
    let body = format!("{}call{several} {}{end}", texts(before), texts(behind));
    let more = match syntax.next.filter(|_| !form.one_call) {
        Some(between) => format!(" ({}{} {body})*", texts(between), mark(start)),
        None => String::new(),
    };
    let calls = match start {
        "" => body.clone(),
        start => format!("{} {body}{more}", mark(start)),
    };
    let mut lark = String::new();
    let _ = match (instead, start) {
        (Instead::Nothing, _) => writeln!(lark, "start: {calls}"),
        (Instead::Json(schema), _) => {
            let schema = flexible(schema.clone());
            writeln!(lark, "start: answer | {calls}\nanswer: %json {schema}")
        }
        (Instead::Text, "") => writeln!(lark, "answer: TEXT | {calls}\nTEXT: /[^{{](.|\\n)*/"),
        (Instead::Text, _) if is_special => {
            writeln!(lark, "answer: TEXT | TEXT {calls}\nTEXT: {ANY}")
        }
        (Instead::Text, start) => {
            // What begins as reasoning is that.
            let not = match form.beginning {
                Beginning::Either => format!(" & ~/\\s*{}(.|\\n)*/", escaped(form.reasoning.open)),
                _ => String::new(),
            };
            writeln!(
                lark,
                "answer: TEXT | before {body}{more}\nbefore[suffix={}]: BEFORE\nBEFORE: {ANY}{not}\n\
                 TEXT: {ANY} & ~/(.|\\n)*{}(.|\\n)*/{not}",
                literal(start),
                escaped(start)
            )
        }
    };
    if matches!(instead, Instead::Text) {
        let within = match syntax.call {
            CallSyntax::Pairs { quote } => quote,
            CallSyntax::Named { between } => between,
            _ => "",
        };
        let marks = [syntax.start, syntax.end, within]
            .map(|mark| special(mark).filter(|_| !mark.is_empty()));
        lark.push_str(&reasoned(form, &marks.into_iter().flatten().collect::<Vec<_>>(), &special));
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

/// The rule `start`: an `answer`, maybe behind reasoning, in which marks of calls are words. Reasoning that does not
/// end may be all there is. `marks`: those of calls that are special tokens, in the words of a grammar.
fn reasoned(
    form: AnswerForm,
    marks: &[String],
    special: impl Fn(&str) -> Option<String>,
) -> String {
    let ReasoningMarks { open, close, .. } = form.reasoning;
    let opened = match form.beginning {
        Beginning::Text => return "start: answer\n".to_owned(),
        Beginning::Reasoning => true,
        Beginning::Either => false,
    };
    let marks = marks.join(" | ");
    if let (Some(open), Some(close)) = (special(open), special(close)) {
        // Special tokens, which no text has: reasoning may come at any place.
        let words = if marks.is_empty() { "ANY".to_owned() } else { format!("(ANY | {marks})*") };
        let (begun, cut) = match opened {
            true => (format!("words {close} "), "words | "),
            false => (String::new(), ""),
        };
        return format!(
            "start: {cut}{begun}reasoning* (ANY (reasoning | {close}))* (answer | ANY {open} words)\n\
             reasoning: {open}+ words {close}\nwords: {words}\nANY: {ANY}\n"
        );
    }
    let begins = if opened { ANY.to_owned() } else { format!("/\\s*{}(.|\\n)*/", escaped(open)) };
    let unclosed = format!(" & ~/(.|\\n)*{}(.|\\n)*/", escaped(close));
    let (close, plain) = (literal(close), if opened { "" } else { "answer | " });
    if marks.is_empty() {
        return format!(
            "start: {plain}CUT | thought answer\nthought[suffix={close}]: BEGUN\nBEGUN: {begins}\n\
             CUT: {begins}{unclosed}\n"
        );
    }
    format!(
        "start: {plain}CUT (mark PART)* | (thought | CUT mark (PART mark)* closing) answer\nmark: {marks}\n\
         thought[suffix={close}]: BEGUN\nBEGUN: {begins}\nclosing[suffix={close}]: ANY\nANY: {ANY}\n\
         CUT: {begins}{unclosed}\nPART: {ANY}{unclosed}\n"
    )
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

/// True for texts, and for what may be one: that is written without quotes, too.
fn may_be_text(schema: &Value) -> bool {
    let kind = schema.get("type");
    let one_of =
        kind.and_then(Value::as_array).is_some_and(|all| all.iter().any(|one| one == "string"));
    (one_of || kind.is_some_and(|kind| kind == "string")) && schema.get("enum").is_none()
}

fn elements(lark: &mut String, index: usize, tool: &Tool, tags: &Tags) -> String {
    let [open, opened, close] = tags.call;
    let (mut must_come, mut may_come) = (Vec::new(), Vec::new());
    for (number, (name, schema, must)) in tool.arguments().into_iter().enumerate() {
        let begin = format!("{}{name}{}{}", tags.key[0], tags.key[1], tags.value[0]);
        let (begin, end) = (literal(&begin), literal(tags.value[1]));
        let argument = format!("p{index}_{number}");
        let texts = schema.get("enum").and_then(Value::as_array);
        let texts: Option<Vec<_>> = texts.and_then(|all| all.iter().map(Value::as_str).collect());
        let _ = if let Some(texts) = texts.filter(|texts| !texts.is_empty()) {
            let texts: Vec<_> = texts.into_iter().map(literal).collect();
            writeln!(lark, "{argument}: {begin} ({}) {end}", texts.join(" | "))
        } else if let Some(schema) = schema.as_object().filter(|_| may_be_text(schema)) {
            match text(schema, !tool.strict).filter(|_| schema["type"] == "string") {
                Some(form) => {
                    // Names of terminals are in capitals.
                    let name = if form.starts_with('/') { "V" } else { "v" };
                    let name = format!("{name}{index}_{number}");
                    writeln!(lark, "{argument}: {begin} {name} {end}\n{name}: {form}")
                }
                None => writeln!(
                    lark,
                    "{argument}: {begin} v{argument}\nv{argument}[suffix={end}]: {ANY}"
                ),
            }
        } else {
            let schema = within(tool, schema);
            writeln!(lark, "{argument}: {begin} v{argument} {end}\nv{argument}: %json {schema}")
        };
        if must { must_come.push(argument) } else { may_come.push(argument) }
    }
    let may_come = match may_come.join(" | ") {
        all if all.is_empty() => all,
        all => format!("({all})* "),
    };
    let arguments = if must_come.is_empty() {
        may_come
    } else if must_come.len() > MAX_FREE {
        must_come.iter().map(|argument| format!("{may_come}{argument} ")).collect::<String>()
            + &may_come
    } else {
        let _ =
            writeln!(lark, "s{index}_0: {}", if may_come.is_empty() { "\"\"" } else { &may_come });
        for (set, next) in orders(must_come.len()) {
            let next =
                next.into_iter().map(|(at, left)| format!("{} s{index}_{left}", must_come[at]));
            let next = next.collect::<Vec<_>>().join(" | ");
            let _ = writeln!(lark, "s{index}_{set}: {may_come}({next})");
        }
        format!("s{index}_{} ", (1_usize << must_come.len()) - 1)
    };
    let close = if close.is_empty() { String::new() } else { literal(close) };
    format!("{} {arguments}{close}", literal(&format!("{open}{}{opened}", tool.name)))
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
