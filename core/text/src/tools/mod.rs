//! Tools that a model may call, and its calls.

mod formats;
pub(crate) mod generic;
mod json;
mod pairs;
mod python;
pub(crate) mod results;
mod tags;
#[cfg(test)]
mod tests;

use qhx_base::{Result, error};
use serde::Serialize;
use serde_json::{Map, Value};

pub use formats::{CallFormat, CallSyntax, Syntax};
pub use tags::Tags;

/// A tool that a model may call.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Tool {
    /// Name that calls use.
    pub name: String,
    /// The JSON schema of its arguments, which are an object.
    pub parameters: Value,
    /// True where all of the schema has to be held to. Otherwise words that no grammar can hold to are left out.
    pub strict: bool,
}

impl Tool {
    /// Key of an argument's schema: a grammar in the Lark syntax that the text is of. A format that writes texts as
    /// they are holds to it; in JSON, where they are escaped, none can.
    pub const LARK: &str = "x-lark";

    /// A tool whose arguments are of a JSON schema.
    pub fn new(name: impl Into<String>, parameters: Value) -> Self {
        Self { name: name.into(), parameters, strict: false }
    }

    /// The same, held to all of its schema if `strict`.
    #[must_use]
    pub fn strict(self, strict: bool) -> Self {
        Self { strict, ..self }
    }

    /// The tools of a list as servers take it: `[{"type": "function", "function": {"name": …, "parameters": …}}]`. What
    /// is in `function` may also stand there by itself. `strict` asks for all of the schema.
    ///
    /// # Errors
    /// When it is no list, or a tool has no name, one that is there already, or parameters that are no object.
    pub fn list(value: &Value) -> Result<Vec<Self>> {
        let fail = |what: String| {
            Err(error!(Usage, "the list of tools: {what}").hint(
                "expected [{\"type\": \"function\", \"function\": {\"name\": …, \"parameters\": …}}]",
            ))
        };
        let Some(list) = value.as_array() else { return fail("it is no list".to_owned()) };
        let mut tools: Vec<Self> = Vec::with_capacity(list.len());
        for (index, entry) in list.iter().enumerate() {
            let function = entry.get("function").unwrap_or(entry);
            let Some(name) = function.get("name").and_then(Value::as_str) else {
                return fail(format!("tool {index} has no name"));
            };
            let plain = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
            if name.is_empty() || !name.chars().all(plain) {
                return fail(format!("{name:?} is no name: expected letters, digits, _ and -"));
            }
            if tools.iter().any(|tool| tool.name == name) {
                return fail(format!("there are two tools {name:?}"));
            }
            let parameters = match function.get("parameters") {
                None | Some(Value::Null) => Map::from_iter([("type".to_owned(), "object".into())]),
                Some(Value::Object(parameters)) => parameters.clone(),
                Some(other) => {
                    return fail(format!(
                        "the parameters of {name:?} are {other}, expected a schema"
                    ));
                }
            };
            let strict = function.get("strict").or(entry.get("strict")) == Some(&Value::Bool(true));
            tools.push(Self::new(name, parameters.into()).strict(strict));
        }
        if tools.is_empty() { fail("it is empty".to_owned()) } else { Ok(tools) }
    }

    /// The arguments that it takes, with their schemas, and whether each must be there; those first that must.
    pub fn arguments(&self) -> Vec<(&str, &Value, bool)> {
        let required = self.parameters.get("required").and_then(Value::as_array);
        let must = |name: &str| required.is_some_and(|all| all.iter().any(|one| one == name));
        let properties = self.parameters.get("properties").and_then(Value::as_object);
        let all = properties.into_iter().flatten();
        let mut all: Vec<_> =
            all.map(|(name, schema)| (name.as_str(), schema, must(name))).collect();
        all.sort_by_key(|(_, _, must)| !must);
        all
    }

    /// True where an argument is a text and nothing else.
    fn takes_text(&self, argument: &str) -> bool {
        let schema = self.parameters.get("properties").and_then(|all| all.get(argument));
        let Some(schema) = schema else { return false };
        let texts = schema.get("enum").and_then(Value::as_array);
        schema.get("type").is_some_and(|kind| kind == "string")
            || texts.is_some_and(|all| all.iter().all(Value::is_string))
    }
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments: an object, unless the model wrote something else.
    pub arguments: Value,
}

/// Skips white space, and `text` behind it. False where it is not there.
fn eat(rest: &mut &str, text: &str) -> bool {
    *rest = rest.trim_start();
    rest.strip_prefix(text).is_some_and(|behind| {
        *rest = behind;
        true
    })
}
