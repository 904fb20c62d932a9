//! The `chat` key: the marker strings around the turns of a conversation.

use super::reader::Node;
use crate::Result;

/// One piece of a marker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text, in which the tokenizer finds its special tokens.
    Text(String),
    /// A token by its id.
    Token(u32),
}

/// A marker: nothing, a string, a token id, or a list of these.
pub type Marker = Vec<Piece>;

/// What stands before and after the text of one role. `None`: the manifest does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoleMarkers {
    /// Before the text.
    pub prefix: Option<Marker>,
    /// After the text.
    pub suffix: Option<Marker>,
}

/// Whether the conversation is rendered from markers or by the tokenizer's Jinja template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ChatStyle {
    /// Jinja when there is a template beside the tokenizer, otherwise markers.
    #[default]
    Auto,
    /// Markers.
    Markers,
    /// Jinja.
    Jinja,
    /// The model does not chat: prompts are completed as they are.
    None,
}

/// The `chat` key of a manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatSpec {
    /// `chat.style`.
    pub style: ChatStyle,
    /// `chat.bos`: once, before the first turn.
    pub bos: Marker,
    /// `chat.system`.
    pub system: RoleMarkers,
    /// `chat.user`.
    pub user: RoleMarkers,
    /// `chat.assistant.prefix` and `.suffix`: around earlier answers.
    pub assistant: RoleMarkers,
    /// `chat.assistant.gen_prefill`: what the answer to generate begins with; without it, `assistant.prefix`.
    pub gen_prefill: Option<Marker>,
    /// `chat.assistant.no_think_prefill`: the same when thinking is off.
    pub no_think_prefill: Option<Marker>,
}

impl ChatSpec {
    /// Reads the value of `chat`: an object, or `false` for a model that does not chat.
    pub(super) fn read(node: &Node<'_>) -> Result<Self> {
        if node.value().is_boolean() {
            let style = if node.bool()? { ChatStyle::Auto } else { ChatStyle::None };
            return Ok(Self { style, ..Self::default() });
        }
        let style = match node.get("style")? {
            None => ChatStyle::Auto,
            Some(style) => match style.string()?.as_str() {
                "auto" => ChatStyle::Auto,
                "markers" => ChatStyle::Markers,
                "jinja" => ChatStyle::Jinja,
                "none" => ChatStyle::None,
                other => {
                    return Err(style.error(format_args!(
                        "expected \"auto\", \"markers\", \"jinja\" or \"none\", found {other:?}"
                    )));
                }
            },
        };
        let assistant = node.get("assistant")?;
        let prefill = |key| match &assistant {
            Some(assistant) => marker(assistant, key),
            None => Ok(None),
        };
        Ok(Self {
            style,
            bos: marker(node, "bos")?.unwrap_or_default(),
            system: role(node, "system")?,
            user: role(node, "user")?,
            assistant: role(node, "assistant")?,
            gen_prefill: prefill("gen_prefill")?,
            no_think_prefill: prefill("no_think_prefill")?,
        })
    }
}

fn role(node: &Node<'_>, key: &str) -> Result<RoleMarkers> {
    match node.get(key)? {
        None => Ok(RoleMarkers::default()),
        Some(role) => {
            Ok(RoleMarkers { prefix: marker(&role, "prefix")?, suffix: marker(&role, "suffix")? })
        }
    }
}

fn marker(node: &Node<'_>, key: &str) -> Result<Option<Marker>> {
    let Some(node) = node.get(key)? else { return Ok(None) };
    if node.value().is_array() {
        return node.elements()?.map(|e| piece(&e)).collect::<Result<_>>().map(Some);
    }
    Ok(Some(vec![piece(&node)?]))
}

fn piece(node: &Node<'_>) -> Result<Piece> {
    if let Some(text) = node.value().as_str() {
        return Ok(Piece::Text(text.to_owned()));
    }
    if node.value().is_u64() {
        return node.u32().map(Piece::Token);
    }
    Err(node.error(format_args!("expected a string or a token id, found {}", node.value())))
}
