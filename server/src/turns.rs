//! A conversation, whatever interface it came by: who said what, images and audio, calls of tools and what they gave.

use std::hash::{DefaultHasher, Hash, Hasher as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use qhx::{Attachment, ContentPart, Limits, Media, Message, Modality, Source};
use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::fields::{Fields, wrong};
use crate::registry::Info;

/// A message.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn {
    pub role: String,
    pub parts: Vec<Part>,
    /// Calls that the model asked for.
    pub calls: Vec<Call>,
    /// The call that this is the result of.
    pub call_id: Option<String>,
    pub name: Option<String>,
    /// What the model thought before it answered.
    pub reasoning: Option<String>,
}

/// A part of a message.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    Text(String),
    Media(Attachment),
}

/// A call of a tool in an earlier answer.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub id: String,
    pub name: String,
    pub arguments: Value,
}

impl Turn {
    pub(crate) fn text(role: &str, text: impl Into<String>) -> Self {
        Self { role: role.to_owned(), parts: vec![Part::Text(text.into())], ..Self::default() }
    }

    /// A message as OpenAI's chats have it.
    pub(crate) fn of_chat(value: &Value, place: &str) -> Result<Self> {
        let fields = Fields::of(value, place)?;
        let role = match fields.text("role")?.ok_or_else(|| fields.missing("role"))? {
            "developer" => "system",
            "function" => "tool",
            role @ ("system" | "user" | "assistant" | "tool") => role,
            _ => {
                let expected = "system, developer, user, assistant or tool";
                return Err(wrong(&fields.path("role"), expected, &value["role"]));
            }
        };
        let calls = fields.list("tool_calls")?.into_iter().flatten().enumerate();
        let calls = calls
            .map(|(at, call)| Call::of_chat(call, &format!("{}[{at}]", fields.path("tool_calls"))));
        let text = |name: &str| Ok::<_, ApiError>(fields.text(name)?.map(str::to_owned));
        Ok(Self {
            role: role.to_owned(),
            parts: parts(fields.get("content"), &fields.path("content"))?,
            calls: calls.collect::<Result<_>>()?,
            call_id: text("tool_call_id")?,
            name: text("name")?,
            reasoning: text("reasoning_content")?.or(text("reasoning")?),
        })
    }

    /// All of its texts.
    pub(crate) fn texts(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Media(_) => None,
        });
        texts.collect::<Vec<_>>().join("\n")
    }

    pub(crate) fn has_media(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Media(_)))
    }

    /// Has what a message of a role and a content cannot hold.
    fn has_more(&self) -> bool {
        !self.calls.is_empty()
            || self.call_id.is_some()
            || self.reasoning.is_some()
            || self.name.is_some()
    }

    /// As chat templates expect it; `content` is that of the message.
    fn template(&self, message: &Message) -> Value {
        let mut map = Map::new();
        map.insert("role".to_owned(), self.role.as_str().into());
        let content = serde_json::to_value(&message.content).unwrap_or_default();
        map.insert("content".to_owned(), content);
        let more = [
            ("tool_call_id", &self.call_id),
            ("name", &self.name),
            ("reasoning_content", &self.reasoning),
        ];
        for (name, value) in more {
            if let Some(value) = value {
                map.insert(name.to_owned(), value.as_str().into());
            }
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(Call::template);
            map.insert("tool_calls".to_owned(), calls.collect());
        }
        map.into()
    }

    /// What tells messages apart.
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.role, &self.call_id).hash(&mut hasher);
        for part in &self.parts {
            match part {
                Part::Text(text) => text.hash(&mut hasher),
                Part::Media(attachment) => match &attachment.source {
                    Source::Bytes { bytes, .. } => bytes.hash(&mut hasher),
                    other => other.to_string().hash(&mut hasher),
                },
            }
        }
        for call in &self.calls {
            (&call.name, call.arguments.to_string()).hash(&mut hasher);
        }
        hasher.finish()
    }
}

impl Call {
    fn of_chat(value: &Value, place: &str) -> Result<Self> {
        let fields = Fields::of(value, place)?;
        let function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
        let name = function.text("name")?.ok_or_else(|| function.missing("name"))?;
        Ok(Self {
            id: fields.text("id")?.unwrap_or_default().to_owned(),
            name: name.to_owned(),
            arguments: arguments(function.get("arguments")),
        })
    }

    /// As templates expect it: the arguments are an object.
    fn template(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        json!({"id": self.id, "type": "function", "function": function})
    }
}

/// Arguments of a call, which interfaces have as a text of JSON.
pub(crate) fn arguments(value: Option<&Value>) -> Value {
    match value {
        Some(Value::String(text)) => {
            serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()))
        }
        Some(other) => other.clone(),
        None => Map::new().into(),
    }
}

/// A content: a text, or a list of parts.
pub(crate) fn parts(value: Option<&Value>, place: &str) -> Result<Vec<Part>> {
    match value {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![Part::Text(text.clone())]),
        Some(Value::Array(list)) => {
            let part = |(at, value)| part(value, &format!("{place}[{at}]"));
            list.iter().enumerate().map(part).collect()
        }
        Some(other) => Err(wrong(place, "a string or a list of parts", other)),
    }
}

fn part(value: &Value, place: &str) -> Result<Part> {
    let fields = Fields::of(value, place)?;
    let kind = fields.text("type")?.ok_or_else(|| fields.missing("type"))?;
    match kind {
        "text" | "input_text" | "output_text" => {
            let text = fields.text("text")?.ok_or_else(|| fields.missing("text"))?;
            Ok(Part::Text(text.to_owned()))
        }
        "refusal" => Ok(Part::Text(fields.text("refusal")?.unwrap_or_default().to_owned())),
        "image_url" | "input_image" => {
            let url = match fields.get("image_url") {
                Some(Value::String(url)) => url.as_str(),
                Some(_) => {
                    let image = fields.object("image_url")?;
                    image.and_then(|image| image.text("url").transpose()).transpose()?.unwrap_or("")
                }
                None => return Err(fields.missing("image_url")),
            };
            url_part(Modality::Image, url, &fields.path("image_url"))
        }
        "input_audio" => {
            let audio = fields.object("input_audio")?.unwrap_or_else(|| fields.clone());
            let data = audio.text("data")?.ok_or_else(|| audio.missing("data"))?;
            base64_part(Modality::Audio, data, &audio.path("data"))
        }
        _ => {
            let expected = "text, image_url or input_audio";
            Err(wrong(&fields.path("type"), expected, &value["type"]))
        }
    }
}

/// What a `data:` URL holds. Nothing is fetched or read for a client.
pub(crate) fn url_part(modality: Modality, url: &str, place: &str) -> Result<Part> {
    let is_data = url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
    if !is_data {
        let what = "expected a data: URL; files and addresses are not read for clients";
        return Err(ApiError::bad(place, what).code("unsupported_url"));
    }
    let attachment = Attachment::new(modality, url)
        .map_err(|e| ApiError::bad(place, e.message()).code("invalid_value"))?;
    Ok(Part::Media(attachment))
}

/// What base64 stands for.
pub(crate) fn base64_part(modality: Modality, data: &str, place: &str) -> Result<Part> {
    let bytes = STANDARD
        .decode(data)
        .map_err(|e| ApiError::bad(place, format_args!("not base64: {e}")).code("invalid_value"))?;
    let source = Source::Bytes { name: place.to_owned(), bytes };
    Ok(Part::Media(Attachment::from_source(modality, source)))
}

/// A conversation as the engine takes it.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    pub messages: Vec<Message>,
    /// The same with all that only the template knows, where there is such.
    pub template: Option<Value>,
    /// A hash a message.
    pub history: Vec<u64>,
}

impl Conversation {
    /// Decodes images and audio by the rules of the model.
    pub(crate) fn new(turns: &[Turn], info: &Info) -> Result<Self> {
        let message = |turn: &Turn| {
            if !turn.has_media() {
                return Ok(Message::new(&*turn.role, turn.texts()));
            }
            let parts = turn.parts.iter().map(|part| match part {
                Part::Text(text) => Ok(ContentPart::Text(text.clone())),
                Part::Media(attachment) => decode(attachment, info).map(ContentPart::Media),
            });
            Ok(Message::new(&*turn.role, parts.collect::<Result<Vec<_>>>()?))
        };
        let messages = turns.iter().map(message).collect::<Result<Vec<_>>>()?;
        Ok(Self::of(turns, messages))
    }

    /// Without what is no text.
    pub(crate) fn of_texts(turns: &[Turn]) -> Self {
        let messages = turns.iter().map(|turn| Message::new(&*turn.role, turn.texts()));
        let messages = messages.collect();
        Self::of(turns, messages)
    }

    fn of(turns: &[Turn], messages: Vec<Message>) -> Self {
        let template = turns.iter().any(Turn::has_more).then(|| {
            turns.iter().zip(&messages).map(|(turn, message)| turn.template(message)).collect()
        });
        Self { messages, template, history: turns.iter().map(Turn::hash).collect() }
    }
}

/// Pixels or samples.
fn decode(attachment: &Attachment, info: &Info) -> Result<Media> {
    let modality = attachment.modality;
    if !info.modalities.contains(&modality) {
        let message = format!("the model does not take {}", modality.name());
        return Err(ApiError::bad("model", message).code("model_not_supported"));
    }
    qhx_media::read(&attachment.source, modality, &info.rules, &Limits::default()).map_err(|e| {
        ApiError::malformed(e.message().to_owned()).param("messages").code("invalid_media")
    })
}
