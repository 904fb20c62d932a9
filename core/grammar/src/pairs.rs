//! Arguments in pairs with bare keys, and marks of their own around texts: rules of a grammar for a JSON schema.
//!
//! A `format` of a text is not held to.

use std::collections::HashMap;
use std::fmt::Write as _;

use qhx_text::Tool;
use serde_json::{Map, Value};

use crate::schema::{looks_around, spaced};
use crate::words::{ANY, MAX_FREE, literal, orders};

/// A text of a schema, as a regular expression or a grammar within a grammar: of its `pattern` or Lark grammar, or else
/// of its lengths. `None` for any text.
pub(crate) fn text(schema: &Map<String, Value>, lenient: bool) -> Option<String> {
    if let Some(lark) = schema.get(Tool::LARK).and_then(Value::as_str) {
        return Some(format!("%lark {{\n{lark}\n}}"));
    }
    let mut forms = Vec::new();
    let pattern = schema.get("pattern").and_then(Value::as_str);
    if let Some(pattern) = pattern.filter(|pattern| !(lenient && looks_around(pattern))) {
        let (begun, rest) = match pattern.strip_prefix('^') {
            Some(rest) => ("", rest),
            None => (CHARACTERS, pattern),
        };
        let whole = rest.ends_with('$') && !rest.ends_with("\\$");
        let (rest, ended) = if whole { (&rest[..rest.len() - 1], "") } else { (rest, CHARACTERS) };
        // What would end the expression early.
        let rest = rest.replace("\\/", "/").replace('/', "\\/").replace('\n', "\\n");
        forms.push(format!("/{begun}({rest}){ended}/"));
    }
    let length = |key: &str| schema.get(key).and_then(Value::as_u64);
    let (min, max) = (length("minLength"), length("maxLength"));
    if min.is_some() || max.is_some() {
        let max = max.map(|max| max.to_string()).unwrap_or_default();
        forms.push(format!("/(.|\\n){{{},{max}}}/", min.unwrap_or(0)));
    }
    (!forms.is_empty()).then(|| forms.join(" & "))
}

/// Any text within a regular expression.
const CHARACTERS: &str = "(.|\\n)*";

/// Rules for the arguments of one tool.
pub(crate) struct Pairs<'a> {
    tool: &'a Tool,
    /// Beginning of the names of its rules.
    prefix: String,
    /// The mark around texts, in words of the grammar.
    quote: &'a str,
    /// The mark is a special token, which no text has.
    is_special: bool,
    lark: String,
    count: usize,
    /// Rules of parts that are referred to.
    referred: HashMap<String, String>,
    any: Option<String>,
}

impl<'a> Pairs<'a> {
    /// For the tool with a number. `quote` is the spelling of the mark around texts in the grammar.
    pub(crate) fn new(tool: &'a Tool, index: usize, quote: &'a str, is_special: bool) -> Self {
        Self {
            tool,
            prefix: format!("p{index}_"),
            quote,
            is_special,
            lark: String::new(),
            count: 0,
            referred: HashMap::new(),
            any: None,
        }
    }

    /// The name of the rule of all arguments, with braces, and the rules.
    pub(crate) fn arguments(mut self) -> (String, String) {
        let parameters = &self.tool.parameters;
        let is_object = parameters.get("type").is_none_or(|kind| kind == "object");
        let rule = match parameters.as_object().filter(|_| is_object) {
            Some(schema) => self.object(schema),
            None => self.value(parameters),
        };
        (rule, self.lark)
    }

    fn name(&mut self) -> String {
        self.count += 1;
        format!("{}{}", self.prefix, self.count)
    }

    /// A rule of its own.
    fn define(&mut self, body: &str) -> String {
        let name = self.name();
        let _ = writeln!(self.lark, "{name}: {body}");
        name
    }

    fn value(&mut self, schema: &Value) -> String {
        let Value::Object(schema) = schema else { return self.any() };
        if let Some(to) = schema.get("$ref").and_then(Value::as_str) {
            return self.reference(to);
        }
        if let Some(texts) =
            schema.get("enum").and_then(Value::as_array).filter(|all| !all.is_empty())
        {
            return self.constants(texts);
        }
        if let Some(value) = schema.get("const") {
            return self.constants(std::slice::from_ref(value));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(options) =
                schema.get(key).and_then(Value::as_array).filter(|all| !all.is_empty())
            {
                let options: Vec<_> = options.iter().map(|option| self.value(option)).collect();
                return self.define(&options.join(" | "));
            }
        }
        if let Some([one]) = schema.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
            return self.value(one);
        }
        match schema.get("type") {
            Some(Value::String(kind)) => self.of_type(kind, schema),
            Some(Value::Array(kinds)) if !kinds.is_empty() => {
                let kinds = kinds.iter().filter_map(Value::as_str);
                let options: Vec<_> = kinds.map(|kind| self.of_type(kind, schema)).collect();
                if options.is_empty() { self.any() } else { self.define(&options.join(" | ")) }
            }
            _ if schema.contains_key("properties") => self.object(schema),
            _ if schema.contains_key("items") => self.list(schema),
            _ => self.any(),
        }
    }

    fn of_type(&mut self, kind: &str, schema: &Map<String, Value>) -> String {
        match kind {
            "object" => self.object(schema),
            "array" => self.list(schema),
            "string" => {
                let text = text(schema, !self.tool.strict);
                self.text(text.as_deref())
            }
            // Numbers, true and false, null: as JSON has them.
            _ => {
                let mut schema = schema.clone();
                schema.insert("type".to_owned(), kind.into());
                let schema = spaced(schema.into(), !self.tool.strict);
                self.define(&format!("%json {schema}"))
            }
        }
    }

    /// A text of a form, or any text.
    fn text(&mut self, form: Option<&str>) -> String {
        let quote = self.quote;
        match form {
            Some(form) => {
                let mut name = self.name();
                if form.starts_with('/') {
                    // Names of terminals are in capitals.
                    name = name.to_uppercase();
                }
                let _ = writeln!(self.lark, "{name}: {form}");
                let form = name;
                self.define(&format!("{quote} {form} {quote}"))
            }
            None if self.is_special => self.define(&format!("{quote} {ANY} {quote}")),
            None => {
                let name = self.name();
                let _ = writeln!(self.lark, "{name}[suffix={quote}]: {ANY}");
                self.define(&format!("{quote} {name}"))
            }
        }
    }

    fn constants(&mut self, values: &[Value]) -> String {
        let values: Vec<_> = values.iter().map(|value| self.constant(value)).collect();
        self.define(&values.join(" | "))
    }

    fn constant(&self, value: &Value) -> String {
        let joined = |parts: Vec<String>, open: &str, close: &str| {
            format!("\"{open}\" {} \"{close}\"", parts.join(" \",\" "))
        };
        match value {
            Value::String(text) if text.is_empty() => format!("{0} {0}", self.quote),
            Value::String(text) => format!("{0} {1} {0}", self.quote, literal(text)),
            Value::Array(values) if values.is_empty() => "\"[]\"".to_owned(),
            Value::Array(values) => {
                joined(values.iter().map(|value| self.constant(value)).collect(), "[", "]")
            }
            Value::Object(values) if values.is_empty() => "\"{}\"".to_owned(),
            Value::Object(values) => {
                let pair = |(key, value): (&String, &Value)| {
                    format!("{} {}", literal(&format!("{key}:")), self.constant(value))
                };
                joined(values.iter().map(pair).collect(), "{", "}")
            }
            other => literal(&other.to_string()),
        }
    }

    fn list(&mut self, schema: &Map<String, Value>) -> String {
        let item = self.value(schema.get("items").unwrap_or(&Value::Null));
        let count = |key: &str| schema.get(key).and_then(Value::as_u64);
        let (min, max) = (count("minItems").unwrap_or(0), count("maxItems"));
        let more = |from: u64| match max {
            Some(max) => format!("(\",\" {item}){{{from},{}}}", max.saturating_sub(1).max(from)),
            None => format!("(\",\" {item}){{{from},}}"),
        };
        match (min, max) {
            (_, Some(0)) => self.define("\"[]\""),
            (0, Some(1)) => self.define(&format!("\"[\" ({item})? \"]\"")),
            (_, Some(1)) => self.define(&format!("\"[\" {item} \"]\"")),
            (0, _) => self.define(&format!("\"[\" ({item} {})? \"]\"", more(0))),
            (min, _) => self.define(&format!("\"[\" {item} {} \"]\"", more(min - 1))),
        }
    }

    /// Pairs in any order.
    fn object(&mut self, schema: &Map<String, Value>) -> String {
        let properties = schema.get("properties").and_then(Value::as_object);
        let Some(properties) = properties.filter(|all| !all.is_empty()) else {
            let value = match schema.get("additionalProperties") {
                Some(Value::Bool(false)) => return self.define("\"{}\""),
                Some(of) => self.value(of),
                None => self.any(),
            };
            let key = self.key();
            return self.define(&format!(
                "\"{{\" ({key} \":\" {value} (\",\" {key} \":\" {value})*)? \"}}\""
            ));
        };
        let required = schema.get("required").and_then(Value::as_array);
        let must = |key: &str| required.is_some_and(|all| all.iter().any(|one| one == key));
        let (mut must_come, mut may_come) = (Vec::new(), Vec::new());
        for (key, schema) in properties {
            let value = self.value(schema);
            let pair = self.define(&format!("{} {value}", literal(&format!("{key}:"))));
            if must(key) { must_come.push(pair) } else { may_come.push(pair) }
        }
        let may = may_come.join(" | ");
        let (before, behind) = match may.as_str() {
            "" => (String::new(), String::new()),
            may => (format!("(({may}) \",\")* "), format!("(\",\" ({may}))* ")),
        };
        let pairs = if must_come.is_empty() {
            format!("(({may}) {behind})?")
        } else if must_come.len() > MAX_FREE {
            before + &must_come.join(&format!(" {behind}\",\" ")) + " " + &behind
        } else {
            // For each set of those that must still come, what follows another pair.
            let full = (1_usize << must_come.len()) - 1;
            let more: Vec<_> = (0..=full).map(|_| self.name()).collect();
            let nothing = if behind.is_empty() { "\"\"" } else { &behind };
            let _ = writeln!(self.lark, "{}: {nothing}", more[0]);
            let mut first = String::new();
            for (set, next) in orders(must_come.len()) {
                let next = |comma: &str| {
                    let each = next
                        .iter()
                        .map(|(at, left)| format!("{comma}{} {}", must_come[*at], more[*left]));
                    each.collect::<Vec<_>>().join(" | ")
                };
                let _ = writeln!(self.lark, "{}: {behind}({})", more[set], next("\",\" "));
                if set == full {
                    first = format!("{before}({})", next(""));
                }
            }
            first
        };
        self.define(&format!("\"{{\" {pairs} \"}}\""))
    }

    fn key(&mut self) -> String {
        self.define("/[A-Za-z0-9_$.\\/ -]+/")
    }

    /// Any value.
    fn any(&mut self) -> String {
        if let Some(any) = &self.any {
            return any.clone();
        }
        let any = self.name();
        self.any = Some(any.clone());
        let (text, key) = (self.text(None), self.key());
        let number = self.define(r#"%json {"type": "number"}"#);
        let _ = writeln!(
            self.lark,
            "{any}: {text} | {number} | \"true\" | \"false\" | \"null\" | \"[\" ({any} (\",\" {any})*)? \"]\" | \
             \"{{\" ({key} \":\" {any} (\",\" {key} \":\" {any})*)? \"}}\""
        );
        any
    }

    /// The part of the tool's schema that is referred to; any value where there is none.
    fn reference(&mut self, to: &str) -> String {
        if let Some(rule) = self.referred.get(to) {
            return rule.clone();
        }
        let tool = self.tool;
        let part = to.strip_prefix('#').and_then(|pointer| tool.parameters.pointer(pointer));
        let Some(part) = part else { return self.any() };
        // A part may refer to itself.
        let rule = self.name();
        self.referred.insert(to.to_owned(), rule.clone());
        let value = self.value(part);
        let _ = writeln!(self.lark, "{rule}: {value}");
        rule
    }
}
