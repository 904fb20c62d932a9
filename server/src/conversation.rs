//! A conversation, whatever interface it came by: who said what, images and audio, calls of tools and what they gave.

use std::hash::{DefaultHasher, Hash, Hasher as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use qhx::{Attachment, CancelToken, ContentPart, Limits, Media, Message, Modality, Source};
use serde_json::{Map, Value, json};

use crate::custom_tools::CustomTools;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, wrong};
use crate::registry::Info;

/// Pixels of all images of a request: 64 million, 192 MB once they are decoded.
const MAX_PIXELS: u64 = 64_000_000;

/// Seconds of all audio of a request: 30 minutes, 110 MB of samples at 16 kHz.
const MAX_SECONDS: u32 = 1800;

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
    /// Reasoning of the model before its answer.
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
        let role = match fields.needed("role")? {
            "developer" => "system",
            "function" => "tool",
            role @ ("system" | "user" | "assistant" | "tool") => role,
            _ => return Err(fields.wrong("role", "system, developer, user, assistant or tool")),
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

    /// The message in the form of chat templates.
    fn template(&self) -> Value {
        let mut map = Map::new();
        map.insert("role".to_owned(), self.role.as_str().into());
        let content = match self.has_media() {
            true => self.parts.iter().map(Part::template).collect(),
            false => self.texts().into(),
        };
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

    /// Hash that distinguishes messages.
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

impl Part {
    /// The part in the form of chat templates: images and audio by their kind.
    fn template(&self) -> Value {
        match self {
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::Media(attachment) => json!({"type": attachment.modality.name()}),
        }
    }
}

impl Call {
    fn of_chat(value: &Value, place: &str) -> Result<Self> {
        let fields = Fields::of(value, place)?;
        if let Some(custom) = fields.object("custom")? {
            return Ok(Self {
                id: fields.text("id")?.unwrap_or_default().to_owned(),
                name: custom.needed("name")?.to_owned(),
                arguments: CustomTools::arguments(custom.needed("input")?),
            });
        }
        let function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
        let name = function.needed("name")?;
        Ok(Self {
            id: fields.text("id")?.unwrap_or_default().to_owned(),
            name: name.to_owned(),
            arguments: arguments(function.get("arguments")),
        })
    }

    /// The call as templates expect it: the arguments are an object.
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
    let kind = fields.needed("type")?;
    match kind {
        "text" | "input_text" | "output_text" => {
            let text = fields.needed("text")?;
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
            let data = audio.needed("data")?;
            base64_part(Modality::Audio, data, &audio.path("data"))
        }
        _ => Err(fields.wrong("type", "text, image_url or input_audio")),
    }
}

/// Content of a `data:` URL. Nothing is fetched or read for a client.
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

/// Content of a base64 text.
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
    /// The texts; where there are images and audio, too, the worker decodes them: see [`decoded`].
    pub messages: Vec<Message>,
    /// The same with all that only the template knows, where there is such.
    pub template: Option<Value>,
    /// A hash a message.
    pub history: Vec<u64>,
}

impl Conversation {
    /// A conversation with a model, which has to take what is attached.
    pub(crate) fn new(turns: &[Turn], info: &Info) -> Result<Self> {
        let parts = turns.iter().flat_map(|turn| &turn.parts);
        let attached = parts.filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Media(attachment) => Some(attachment.modality),
        });
        for modality in attached {
            if !info.modalities.contains(&modality) {
                let message = format!("the model does not take {}", modality.name());
                return Err(ApiError::bad("model", message).code("model_not_supported"));
            }
        }
        Ok(Self::of_texts(turns))
    }

    /// Without what is no text.
    pub(crate) fn of_texts(turns: &[Turn]) -> Self {
        let messages = turns.iter().map(|turn| Message::new(&*turn.role, turn.texts()));
        let template = turns.iter().any(Turn::has_more);
        Self {
            messages: messages.collect(),
            template: template.then(|| turns.iter().map(Turn::template).collect()),
            history: turns.iter().map(Turn::hash).collect(),
        }
    }
}

/// Bounds on all images and audio of a request.
pub(crate) fn request_limits() -> Limits {
    let mut limits = Limits::default();
    (limits.pixels, limits.seconds) = (MAX_PIXELS, MAX_SECONDS);
    limits
}

/// The messages of a conversation with its images and audio, which are decoded by the rules of the model and within
/// the limits of a request.
pub(crate) fn decoded(turns: &[Turn], info: &Info, ticket: &CancelToken) -> Result<Vec<Message>> {
    let mut limits = request_limits();
    let mut messages = Vec::with_capacity(turns.len());
    for turn in turns {
        if !turn.has_media() {
            messages.push(Message::new(&*turn.role, turn.texts()));
            continue;
        }
        let mut parts = Vec::with_capacity(turn.parts.len());
        for part in &turn.parts {
            parts.push(match part {
                Part::Text(text) => ContentPart::Text(text.clone()),
                Part::Media(attachment) => {
                    ticket.check()?;
                    ContentPart::Media(decode(attachment, info, &mut limits)?)
                }
            });
        }
        messages.push(Message::new(&*turn.role, parts));
    }
    Ok(messages)
}

/// Pixels or samples.
fn decode(attachment: &Attachment, info: &Info, limits: &mut Limits) -> Result<Media> {
    let (source, modality) = (&attachment.source, attachment.modality);
    let media = qhx_media::read(source, modality, &info.rules, limits).map_err(|e| {
        let message = match *limits == request_limits() {
            true => e.message().to_owned(),
            false => format!("{}, beside the others of this request", e.message()),
        };
        ApiError::malformed(message).param("messages").code("invalid_media")
    })?;
    limits.spend(&media);
    Ok(media)
}
