//! Tools for models whose chat template knows none, or has them called in an unknown format: the conversation describes
//! them, and calls and results are texts.

use serde_json::{Map, Value, json};

use super::CallFormat;

/// Format that such a model is asked for.
pub(crate) const FORMAT: CallFormat = CallFormat::TAGGED;

const BEFORE: &str =
    "You can call these functions, each a JSON object with a schema of its arguments:";
const BEHIND: &str = "To call one, answer with its name and arguments as JSON between these tags, and with nothing else. \
     You get the result in the next message. Answer in words where no function helps.";

/// Rewrites the messages of a template's variables, and takes the tools away.
pub(crate) fn tell(variables: &mut Map<String, Value>) {
    let tools = match variables.insert("tools".to_owned(), Value::Null) {
        Some(Value::Array(tools)) if !tools.is_empty() => Some(tools),
        _ => None,
    };
    let Some(Value::Array(messages)) = variables.get_mut("messages") else { return };
    let used = |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
    if messages.iter().any(used) {
        *messages = std::mem::take(messages).into_iter().fold(Vec::new(), as_texts);
    }
    let Some(tools) = tools else { return };
    let text = instructions(&tools);
    let first = messages.iter_mut().find(|message| message["role"] == "system");
    match first {
        Some(system) => append(&mut system["content"], &format!("\n\n{text}")),
        None => match messages.iter_mut().find(|message| message["role"] == "user") {
            Some(user) => prepend(&mut user["content"], &format!("{text}\n\n")),
            None => messages.insert(0, json!({"role": "user", "content": text})),
        },
    }
}

fn instructions(tools: &[Value]) -> String {
    let (open, close) = FORMAT.marks();
    let functions = tools.iter().map(|tool| tool.get("function").unwrap_or(tool).to_string());
    let functions = functions.collect::<Vec<_>>().join("\n");
    format!(
        "{BEFORE}\n{functions}\n\n{BEHIND}\n{open}\n{{\"name\": \"…\", \"arguments\": {{…}}}}\n{close}"
    )
}

/// Adds a message whose calls and results are texts. What the user says behind results stands in one message with them,
/// since many templates want the roles to take turns.
fn as_texts(mut rewritten: Vec<Value>, mut message: Value) -> Vec<Value> {
    let (open, close) = FORMAT.marks();
    if message["role"] == "tool" {
        let mut text = Value::Null;
        append(&mut text, &format!("<tool_response>\n{}\n</tool_response>", content(&message)));
        message = json!({"role": "user", "content": text, "result": true});
    } else if let Some(Value::Array(calls)) =
        message.as_object_mut().and_then(|message| message.remove("tool_calls"))
    {
        let calls = calls.iter().map(|call| {
            let call = call.get("function").unwrap_or(call);
            let call = json!({"name": call["name"], "arguments": call["arguments"]});
            format!("{open}\n{call}\n{close}")
        });
        let calls = calls.collect::<Vec<_>>().join("\n");
        let between = if content(&message).is_empty() { "" } else { "\n" };
        append(&mut message["content"], &format!("{between}{calls}"));
    }
    match rewritten.last_mut() {
        Some(last) if last.get("result").is_some() && message["role"] == "user" => {
            prepend(&mut message["content"], &format!("{}\n", content(last)));
            *last = message;
        }
        _ => rewritten.push(message),
    }
    rewritten
}

/// All texts of a message.
pub(super) fn content(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

fn append(content: &mut Value, text: &str) {
    match content {
        Value::String(content) => content.push_str(text),
        Value::Array(parts) => parts.push(json!({"type": "text", "text": text})),
        other => *other = text.into(),
    }
}

fn prepend(content: &mut Value, text: &str) {
    match content {
        Value::String(content) => content.insert_str(0, text),
        Value::Array(parts) => parts.insert(0, json!({"type": "text", "text": text})),
        other => *other = text.into(),
    }
}
