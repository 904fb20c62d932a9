//! Custom tools, whose input is a text: functions of one argument for the model.

use std::borrow::Cow;

use qhx::{Tool, ToolCall};
use serde_json::{Map, Value, json};

use crate::error::Result;
use crate::fields::Fields;

/// Argument of a custom tool, whose input is a text.
const INPUT: &str = "input";

/// Names of the custom tools of a request, which have a text for input.
#[derive(Debug, Clone, Default)]
pub(crate) struct CustomTools(Vec<String>);

impl CustomTools {
    pub(crate) fn of(request: &Map<String, Value>) -> Self {
        let tools = request.get("tools").and_then(Value::as_array).into_iter().flatten();
        let custom = tools.filter(|tool| tool["type"] == "custom");
        let names = custom.filter_map(|tool| {
            tool.get("name").or_else(|| tool.get("custom")?.get("name"))?.as_str()
        });
        Self(names.map(str::to_owned).collect())
    }

    /// Input of a call of one of them.
    pub(crate) fn input<'a>(&self, call: &'a ToolCall) -> Option<Cow<'a, str>> {
        self.0.contains(&call.name).then(|| match call.arguments.get(INPUT) {
            Some(Value::String(text)) => Cow::Borrowed(text.as_str()),
            _ => Cow::Owned(call.arguments.to_string()),
        })
    }

    /// Arguments of a call with this input.
    pub(crate) fn arguments(input: &str) -> Value {
        json!({INPUT: input})
    }
}

/// A custom tool as a function of one text. The grammar of its input is a part of the description, and of the schema.
pub(crate) fn custom(tool: &Fields<'_>) -> Result<Value> {
    let own = tool.object("custom")?.unwrap_or_else(|| tool.clone());
    let mut description = own.text("description")?.unwrap_or_default().to_owned();
    let mut input = json!({"type": "string"});
    if let Some(format) = own.object("format")? {
        let format = format.object("grammar")?.unwrap_or(format);
        if let Some(definition) = format.text("definition")? {
            let syntax = format.text("syntax")?.unwrap_or("lark");
            match syntax {
                "regex" => input["pattern"] = format!("^(?:{definition})$").into(),
                "lark" => input[Tool::LARK] = definition.into(),
                _ => return Err(format.wrong("syntax", "lark or regex")),
            }
            description.push_str(&format!("\n\nThe input has this {syntax} form:\n{definition}"));
        }
    }
    let parameters = json!({
        "type": "object",
        "properties": {INPUT: input},
        "required": [INPUT],
        "additionalProperties": false,
    });
    let function =
        json!({"name": own.needed("name")?, "description": description, "parameters": parameters});
    Ok(json!({"type": "function", "function": function}))
}

/// A tool as templates show it: a Lark grammar stands in its description alone.
pub(crate) fn shown(mut tool: Value) -> Value {
    let input = tool.pointer_mut(&format!("/function/parameters/properties/{INPUT}"));
    if let Some(input) = input.and_then(Value::as_object_mut) {
        input.remove(Tool::LARK);
    }
    tool
}
