//! From a conversation to a prompt.

use std::fmt;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result, bail, error, files};
use serde_json::{Map, Value, json};

use super::jinja::{JinjaTemplate, MAX_SOURCE, Template};
use super::markers::Markers;
use super::message::{Message, RenderOptions};
use super::spec::{ChatSpec, ChatStyle};
use super::tools::generic;
use super::{CallFormat, ReasoningMarks, Tokenizer};

/// Bytes that `tokenizer_config.json` and `special_tokens_map.json` may have: published ones have up to one million.
const MAX_CONFIG: u64 = 16 << 20;

/// Stands behind the content of a message that is not over while the conversation is rendered. Its characters are for
/// use within a program, and its space shows whether the template trims contents.
const MARK: &str = "\u{fdd0}open\u{fdd1} ";

/// Finds the files that say how a model wants conversations written.
pub trait TemplateFiles {
    /// `tokenizer_config.json`, where there is one.
    ///
    /// # Errors
    /// When the file may not be opened, or is declared and missing.
    fn config(&self) -> Result<Option<PathBuf>>;

    /// The file `name` beside the tokenizer, or beside its configuration.
    ///
    /// # Errors
    /// When the file may not be opened.
    fn beside(&self, name: &str) -> Result<Option<PathBuf>>;
}

/// Chat template of a model.
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
    /// The template of a bundle: Jinja, otherwise the markers. `None` for a model that only completes text.
    ///
    /// `chat_template.jinja` beside the tokenizer takes precedence over `tokenizer_config.json`, as in `transformers`.
    /// A program that has installed a [`ChildProgram`](qhx_base::child::ChildProgram) compiles and renders there.
    ///
    /// # Errors
    /// When the template is missing or invalid.
    pub fn open(
        spec: Option<&ChatSpec>,
        files: &dyn TemplateFiles,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Self>> {
        let style = spec.map_or(ChatStyle::Auto, |spec| spec.style);
        if style == ChatStyle::None {
            return Ok(None);
        }
        if style != ChatStyle::Markers {
            if let Some(template) = jinja(files)? {
                return Ok(Some(Self(Form::Jinja(Box::new(template)))));
            }
            if style == ChatStyle::Jinja {
                return Err(error!(
                    Manifest,
                    "/chat/style: \"jinja\", but there is no chat_template.jinja, and \
                     tokenizer_config.json has no chat_template"
                )
                .hint("add the tokenizer_config.json of the model, or use \"markers\""));
            }
        }
        spec.map(|spec| Self::from_markers(spec, tokenizer)).transpose()
    }

    /// A template of markers. The tokenizer spells markers given as token ids. A marker that is not given is missed
    /// when a conversation needs it.
    ///
    /// # Errors
    /// When a marker has a token that the tokenizer does not know.
    pub fn from_markers(spec: &ChatSpec, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        Markers::new(spec, tokenizer).map(|markers| Self(Form::Markers(Box::new(markers))))
    }

    /// A template in Jinja with the special tokens that it may name. It is compiled and rendered in this process.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn from_jinja(source: &str, bos_token: &str, eos_token: &str) -> Result<Self> {
        let tokens = [("bos_token", bos_token), ("eos_token", eos_token)];
        let tokens =
            tokens.map(|(name, token)| (name.to_owned(), token.into())).into_iter().collect();
        let template = Template { source: source.to_owned(), tokens };
        let template = JinjaTemplate::here(template, "chat template")?;
        Ok(Self(Form::Jinja(Box::new(template))))
    }

    /// The format in which it asks for calls of tools. Where it knows none, or no format that is known here, the
    /// conversation itself tells about tools, and asks for [`CallFormat::TAGGED`]. `None` for markers.
    pub fn call_format(&self) -> Option<CallFormat> {
        match &self.0 {
            Form::Jinja(template) => {
                Some(CallFormat::of_template(template.source()).unwrap_or(generic::FORMAT))
            }
            Form::Markers(_) => None,
        }
    }

    /// The marks around the reasoning of its answers; `None` where it knows none.
    pub fn reasoning(&self) -> Option<ReasoningMarks> {
        match &self.0 {
            Form::Jinja(template) => ReasoningMarks::of_template(template.source()),
            Form::Markers(_) => None,
        }
    }

    /// The prompt. It holds its special tokens as text: encode it with
    /// [`Tokenizer::encode`] and `add_special` off. Where an answer is asked for and the last message is the
    /// assistant's, the prompt ends with the content of that message, which the answer goes on with.
    ///
    /// # Errors
    /// When the template refuses the conversation, exceeds a limit, or leaves out the message to go on with.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        if messages.is_empty() {
            bail!(Prompt, "the conversation has no messages");
        }
        if options.add_generation_prompt && Message::goes_on(messages) {
            return self.render_open(messages, options);
        }
        self.render_whole(messages, options)
    }

    fn render_whole(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        match &self.0 {
            Form::Jinja(template) => template.render(messages, options),
            Form::Markers(markers) => markers.render(messages, options),
        }
    }

    /// A conversation whose last message is not over, as `continue_final_message` of `transformers` has it: rendered
    /// with a mark behind the message's content, and cut there.
    fn render_open(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let (mut messages, mut arguments) = (messages.to_vec(), options.arguments.clone());
        if let Some(last) = messages.last_mut() {
            last.content = last.content.with_text(MARK);
        }
        if let Some(Value::Array(all)) = arguments.get_mut("messages")
            && let Some(Value::Object(last)) = all.last_mut()
        {
            if last.get("tool_calls").and_then(Value::as_array).is_some_and(|all| !all.is_empty()) {
                return Err(error!(
                    Prompt,
                    "the last message asks for calls of tools: nothing can be added to it"
                )
                .hint("add what the calls gave, as messages of the role tool"));
            }
            let content = last.entry("content").or_insert(Value::Null);
            match content {
                Value::String(text) => text.push_str(MARK),
                Value::Array(parts) => match parts.last_mut().and_then(|part| part.get_mut("text"))
                {
                    Some(Value::String(text)) => text.push_str(MARK),
                    _ => parts.push(json!({"type": "text", "text": MARK})),
                },
                other => *other = MARK.into(),
            }
        }
        let content = messages.last().map_or("", |last| last.content.texts().last().unwrap_or(""));
        let content = content.strip_suffix(MARK).unwrap_or_default().to_owned();
        let options = RenderOptions { add_generation_prompt: false, arguments, ..options.clone() };
        let mut text = self.render_whole(&messages, &options)?;
        // A template that trims contents takes the space of the mark, but not the one before it.
        let (mark, space) = MARK.split_at(MARK.len() - 1);
        let Some(end) = text.rfind(mark) else {
            let message = "the chat template leaves the last message out, so that the model cannot go on with it";
            return Err(Error::new(ErrorKind::Prompt, message)
                .hint("end the conversation with a message of the user"));
        };
        let trimmed = !text[end + mark.len()..].starts_with(space);
        text.truncate(end);
        let blank = &content[content.trim_end().len()..];
        if trimmed && text.ends_with(blank) {
            text.truncate(end - blank.len());
        }
        Ok(text)
    }
}

/// Reads the Jinja template of a bundle, when it has one.
fn jinja(files: &dyn TemplateFiles) -> Result<Option<JinjaTemplate>> {
    let config_path = files.config()?;
    let config = config_path.as_deref().map(json).transpose()?.unwrap_or_default();
    let mut found = None;
    // What lies in the folder of further templates has a name, and `default` is the one that is meant: `transformers`
    // reads them after `chat_template.jinja`, which has that name, too.
    for file in ["additional_chat_templates/default.jinja", "chat_template.jinja"] {
        if let Some(path) = files.beside(file)? {
            found = Some((text(&path)?, path));
            break;
        }
    }
    if let (None, Some(path)) = (&found, &config_path) {
        found = named_template(path, &config)?.map(|source| (source, path.clone()));
    }
    let Some((source, path)) = found else { return Ok(None) };
    let mut tokens = config;
    // A configuration without this key is of the older form, which keeps the tokens in a file of their own.
    if tokens.get("added_tokens_decoder").is_none()
        && let Some(path) = files.beside("special_tokens_map.json")?
    {
        let map = json(&path)?;
        if tokens.is_null() {
            tokens = map;
        } else if let (Value::Object(tokens), Value::Object(map)) = (&mut tokens, map) {
            tokens.extend(map);
        }
    }
    let template = Template { source, tokens: special_tokens(&tokens) };
    JinjaTemplate::open(template, &format!("{}: chat template", path.display())).map(Some)
}

fn json(path: &Path) -> Result<Value> {
    files::read_json(ErrorKind::Artifact, path, MAX_CONFIG)
}

fn text(path: &Path) -> Result<String> {
    files::read_text(ErrorKind::Artifact, path, MAX_SOURCE as u64)
}

/// `chat_template`: a string, or a list of `{name, template}` of which `default` is meant.
fn named_template(path: &Path, config: &Value) -> Result<Option<String>> {
    let wrong = |found: &str| {
        Err(error!(
            Artifact,
            "{}: /chat_template: expected a string or a list of {{\"name\", \"template\"}}, \
                 found {found}",
            path.display()
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

/// The special tokens that are set, by the names that templates use. A token is a string, or an object with `content`.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let token = |value: &Value| {
        let token = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        token.map(Value::from)
    };
    let names = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
    let mut tokens: Map<String, Value> = names
        .iter()
        .map(|name| format!("{name}_token"))
        .filter_map(|name| config.get(&name).and_then(token).map(|token| (name, token)))
        .collect();
    if let Some(Value::Array(more)) = config.get("additional_special_tokens") {
        let more = more.iter().filter_map(token).collect();
        tokens.insert("additional_special_tokens".to_owned(), Value::Array(more));
    }
    tokens
}
