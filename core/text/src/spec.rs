//! The strings around the turns of a conversation, as a bundle declares them.

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

/// Text before and after that of one role. `None`: the manifest does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoleMarkers {
    /// Before the text.
    pub prefix: Option<Marker>,
    /// After the text.
    pub suffix: Option<Marker>,
}

/// Choice of markers or the tokenizer's Jinja template for rendering the conversation.
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
