//! Grammars in words.

use llguidance::api::TopLevelGrammar;
use qhx_base::{Result, bail, error};
use qhx_text::{Beginning, CallFormat, ReasoningMarks, Tool};
use serde_json::{Map, Value};

use crate::schema::flexible;
use crate::tools::{self, Instead};
use crate::words::literal;

/// Levels of arrays and objects in a schema, as `serde_json` reads them.
const MAX_DEPTH: usize = 127;

/// Conventions of a model for its answers.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnswerForm {
    /// Format of its calls of tools, if it makes any.
    pub calls: Option<CallFormat>,
    /// Marks around its reasoning.
    pub reasoning: ReasoningMarks,
    /// Part that comes first, reasoning or text.
    pub beginning: Beginning,
    /// One call is all that it may make.
    pub one_call: bool,
}

/// Form that an answer may have.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Grammar {
    /// A JSON object, whatever is in it.
    Json,
    /// JSON of a schema, with blanks between any two tokens in runs that end. Its key `x-guidance` may ask for other
    /// blanks, and leaves the rest as it is: `{"whitespace_flexible": false}` for none, or `{"item_separator": ", "}`.
    JsonSchema(Value),
    /// A text that the whole of a regular expression matches.
    Regex(String),
    /// A text of a grammar in the Lark syntax of `llguidance`, from its rule `start`.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// At least one call of these tools, in the format that the chat template asks for, and nothing else.
    Calls(Vec<Tool>),
    /// Any text, and calls of these tools behind it: what looks like a call is one.
    OptionalCalls(Vec<Tool>),
    /// Calls of these tools, or JSON of a schema in their place.
    CallsOrJson(Vec<Tool>, Value),
}

impl Grammar {
    /// Maximum size of a schema, grammar or list, in bytes of its text.
    pub const MAX_BYTES: usize = 4 << 20;

    /// JSON of the schema in `text`.
    ///
    /// # Errors
    /// When it is too long, or no JSON.
    pub fn json_schema(text: &str) -> Result<Self> {
        json("the JSON schema", text).map(Self::JsonSchema)
    }

    /// Grammar for a number and a text, as in the C interface of published bundles:
    ///
    /// | kind | text | |
    /// |---|---|---|
    /// | 0 | | no grammar |
    /// | 1 | `json` or none | [`Grammar::Json`] |
    /// | 1 | `json:` and a schema, or a schema | [`Grammar::JsonSchema`] |
    /// | 2 | a JSON list of tools | [`Grammar::Calls`] |
    /// | 3 | a JSON list of tools | [`Grammar::OptionalCalls`] |
    /// | 4 | a JSON list of texts, or texts with commas between | [`Grammar::Choice`] |
    ///
    /// # Errors
    /// When there is no such kind, or the text is not what the kind expects.
    pub fn of_kind(kind: i32, text: &str) -> Result<Option<Self>> {
        let text = text.trim();
        Ok(Some(match kind {
            0 => return Ok(None),
            1 => match text.strip_prefix("json").unwrap_or(text) {
                "" => Self::Json,
                schema => Self::json_schema(schema.strip_prefix(':').unwrap_or(schema))?,
            },
            2 => Self::Calls(Tool::list(&json("the list of tools", text)?)?),
            3 => Self::OptionalCalls(Tool::list(&json("the list of tools", text)?)?),
            4 if text.starts_with('[') => {
                let choices = json("the list of choices", text)?;
                let texts = choices.as_array().into_iter().flatten().map(Value::as_str);
                let texts: Option<Vec<_>> = texts.map(|text| text.map(str::to_owned)).collect();
                Self::Choice(
                    texts.ok_or_else(|| error!(Usage, "the list of choices: expected texts"))?,
                )
            }
            4 => Self::Choice(text.split(',').map(|text| text.trim().to_owned()).collect()),
            _ => bail!(Usage, "expected a kind of grammar from 0 to 4, found {kind}"),
        }))
    }

    /// Calls of these tools, or an answer of this form in their place; `None` where the form is not one of JSON.
    pub fn or_calls(self, tools: Vec<Tool>) -> Option<Self> {
        match self {
            Self::Json => Some(Self::CallsOrJson(tools, object())),
            Self::JsonSchema(schema) => Some(Self::CallsOrJson(tools, schema)),
            _ => None,
        }
    }

    /// The tools that an answer may call.
    pub fn tools(&self) -> Option<&[Tool]> {
        match self {
            Self::Calls(tools) | Self::OptionalCalls(tools) | Self::CallsOrJson(tools, _) => {
                Some(tools)
            }
            _ => None,
        }
    }

    /// Name in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Json | Self::JsonSchema(_) => "the JSON schema",
            Self::Regex(_) => "the regular expression",
            Self::Lark(_) => "the grammar",
            Self::Choice(_) => "the choices",
            Self::Calls(_) | Self::OptionalCalls(_) => "the tools",
            Self::CallsOrJson(..) => "the tools and the JSON schema",
        }
    }

    /// In the words of `llguidance`. `form`: how the model writes answers. `special`: the spelling of a special token
    /// in a grammar, where the tokenizer has it.
    pub(crate) fn compile(
        &self,
        form: AnswerForm,
        special: impl Fn(&str) -> Option<String>,
    ) -> Result<TopLevelGrammar> {
        match self {
            Self::Json => Ok(TopLevelGrammar::from_json_schema(flexible(object()))),
            Self::JsonSchema(schema) => {
                check_depth(schema)?;
                let size = schema.to_string().len();
                check_size(self.name(), size)?;
                Ok(TopLevelGrammar::from_json_schema(flexible(schema.clone())))
            }
            Self::Regex(regex) => {
                check_size(self.name(), regex.len())?;
                Ok(TopLevelGrammar::from_regex(regex))
            }
            Self::Lark(lark) => {
                check_size(self.name(), lark.len())?;
                Ok(TopLevelGrammar::from_lark(lark.clone()))
            }
            Self::Choice(choices) => {
                check_size(self.name(), choices.iter().map(String::len).sum())?;
                if choices.is_empty() || choices.iter().any(String::is_empty) {
                    let what = if choices.is_empty() { "there are none" } else { "one is empty" };
                    bail!(Usage, "the choices: {what}");
                }
                let choices: Vec<_> = choices.iter().map(|text| literal(text)).collect();
                Ok(TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | "))))
            }
            Self::Calls(tools) | Self::OptionalCalls(tools) | Self::CallsOrJson(tools, _) => {
                for tool in tools {
                    check_depth(&tool.parameters)?;
                }
                let format = form.calls.ok_or_else(|| {
                    error!(Usage, "the tools: the model calls none in a known format")
                        .hint("the chat template knows no tools; ask for JSON of a schema instead")
                })?;
                let instead = match self {
                    Self::OptionalCalls(_) => Instead::Text,
                    Self::CallsOrJson(_, schema) => {
                        check_depth(schema)?;
                        Instead::Json(schema.clone())
                    }
                    _ => Instead::Nothing,
                };
                let lark = tools::lark(tools, format, form, &instead, special)?;
                check_size(self.name(), lark.len())?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }
}

/// The schema of any object.
fn object() -> Value {
    let mut schema = Map::new();
    schema.insert("type".to_owned(), "object".into());
    schema.into()
}

fn check_size(what: &str, bytes: usize) -> Result<()> {
    let max = Grammar::MAX_BYTES;
    if bytes <= max {
        return Ok(());
    }
    Err(error!(Usage, "{what} has {bytes} bytes, expected at most {max}"))
}

/// A value that a program built may be deeper than any that is read.
fn check_depth(schema: &Value) -> Result<()> {
    let mut level: Vec<_> = vec![schema];
    for _ in 0..=MAX_DEPTH {
        if level.is_empty() {
            return Ok(());
        }
        let inner = level.iter().flat_map(|value| match value {
            Value::Array(values) => values.iter().collect::<Vec<_>>(),
            Value::Object(values) => values.values().collect(),
            _ => Vec::new(),
        });
        level = inner.collect();
    }
    Err(error!(Usage, "the JSON schema is nested deeper than {MAX_DEPTH} levels"))
}

fn json(what: &str, text: &str) -> Result<Value> {
    check_size(what, text.len())?;
    serde_json::from_str(text).map_err(|e| error!(Usage, "{what} is no JSON: {e}"))
}
