//! From a conversation to a prompt.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Tokenizer;
use super::jinja::JinjaTemplate;
use super::markers::Markers;
use crate::artifacts::{Artifacts, Mapped};
use crate::manifest::{ChatSpec, ChatStyle, Manifest};
use crate::{Error, ErrorKind, Result};

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// How a conversation is rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenderOptions {
    /// End with what an answer begins with, so that the model answers.
    pub add_generation_prompt: bool,
    /// Whether the model should think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, enable_thinking: None }
    }
}

/// How a model wants conversations written.
pub struct ChatTemplate(Form);

enum Form {
    Jinja(Box<JinjaTemplate>),
    Markers(Box<Markers>),
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match &self.0 {
            Form::Jinja(_) => "jinja",
            Form::Markers(_) => "markers",
        };
        f.debug_tuple("ChatTemplate").field(&form).finish()
    }
}

impl ChatTemplate {
    /// The template of a bundle: Jinja from `tokenizer_config.json` (or `chat_template.jinja`
    /// beside it), otherwise the manifest's markers. `None` for a model that only completes text.
    pub fn open(
        manifest: &Manifest,
        artifacts: &Artifacts,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Self>> {
        let spec = manifest.chat.as_ref();
        let style = spec.map_or(ChatStyle::Auto, |spec| spec.style);
        if style == ChatStyle::None {
            return Ok(None);
        }
        if style != ChatStyle::Markers {
            if let Some(template) = jinja(manifest, artifacts)? {
                return Ok(Some(Self(Form::Jinja(Box::new(template)))));
            }
            if style == ChatStyle::Jinja {
                return Err(Error::new(
                    ErrorKind::Manifest,
                    "/chat/style: \"jinja\", but tokenizer_config.json has no chat_template",
                )
                .hint("add the tokenizer_config.json of the model, or use \"markers\""));
            }
        }
        spec.map(|spec| Self::from_markers(spec, tokenizer)).transpose()
    }

    /// A template of the manifest's markers. The tokenizer spells markers given as token ids.
    pub fn from_markers(spec: &ChatSpec, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        Markers::new(spec, tokenizer).map(|markers| Self(Form::Markers(Box::new(markers))))
    }

    /// A template in Jinja with the special tokens that it may name.
    pub fn from_jinja(source: &str, bos_token: &str, eos_token: &str) -> Result<Self> {
        let template = JinjaTemplate::new(source, bos_token, eos_token)?;
        Ok(Self(Form::Jinja(Box::new(template))))
    }

    /// The prompt. It holds its special tokens as text: encode it with
    /// [`Tokenizer::encode`] and `add_special` off.
    pub fn render(&self, messages: &[Message], options: RenderOptions) -> Result<String> {
        if messages.is_empty() {
            return Err(Error::new(ErrorKind::Prompt, "the conversation has no messages"));
        }
        match &self.0 {
            Form::Jinja(template) => template.render(messages, options),
            Form::Markers(markers) => markers.render(messages, options),
        }
    }
}

/// Reads the Jinja template of a bundle, when it has one.
fn jinja(manifest: &Manifest, artifacts: &Artifacts) -> Result<Option<JinjaTemplate>> {
    let config_path = manifest.tokenizer_config_path(artifacts)?;
    let mut config = Value::Null;
    if let Some(path) = &config_path {
        let file = Mapped::open(path)?;
        config = serde_json::from_slice(file.bytes()).map_err(|e| {
            Error::new(ErrorKind::Artifact, format!("{}: not valid JSON: {e}", path.display()))
        })?;
    }
    let path = config_path.as_deref().unwrap_or(Path::new("tokenizer_config.json"));
    let mut source = named_template(path, &config)?;
    let mut origin = path.to_owned();
    if source.is_none()
        && let Some(beside) = beside_tokenizer(manifest, artifacts)?
    {
        let file = Mapped::open(&beside)?;
        let text = std::str::from_utf8(file.bytes()).map_err(|e| {
            Error::new(ErrorKind::Artifact, format!("{}: not UTF-8: {e}", beside.display()))
        })?;
        source = Some(text.to_owned());
        origin = beside;
    }
    let Some(source) = source else { return Ok(None) };
    let token = |key| special_token(&config, key);
    JinjaTemplate::new(&source, token("bos_token"), token("eos_token"))
        .map(Some)
        .map_err(|e| e.context(origin.display()))
}

fn beside_tokenizer(
    manifest: &Manifest,
    artifacts: &Artifacts,
) -> Result<Option<std::path::PathBuf>> {
    let Some(tokenizer) = &manifest.artifacts.tokenizer else { return Ok(None) };
    let beside = Path::new(tokenizer).with_file_name("chat_template.jinja");
    match artifacts.resolve("/artifacts/tokenizer", &beside.to_string_lossy()) {
        Ok(path) => Ok(Some(path)),
        Err(e) if e.kind() == ErrorKind::Artifact => Ok(None),
        Err(e) => Err(e),
    }
}

/// `chat_template`: a string, or a list of `{name, template}` of which `default` is meant.
fn named_template(path: &Path, config: &Value) -> Result<Option<String>> {
    let wrong = |found: &str| {
        Err(Error::new(
            ErrorKind::Artifact,
            format!(
                "{}: /chat_template: expected a string or a list of {{\"name\", \"template\"}}, \
                 found {found}",
                path.display()
            ),
        ))
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(list)) => {
            let default = list
                .iter()
                .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
                .or(list.first());
            match default.and_then(|entry| entry.get("template")).and_then(Value::as_str) {
                Some(source) => Ok(Some(source.to_owned())),
                None => wrong("a list without a \"default\" template"),
            }
        }
        Some(_) => wrong("something else"),
    }
}

/// A special token is a string, or an object with `content`.
fn special_token<'a>(config: &'a Value, key: &str) -> &'a str {
    let token = config.get(key);
    token
        .and_then(Value::as_str)
        .or_else(|| token.and_then(|t| t.get("content")).and_then(Value::as_str))
        .unwrap_or_default()
}
