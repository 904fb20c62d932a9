//! The chat template that the manifest's `chat` key declares, by its markers.

use qhx_base::{Error, Result, bail, error};

use super::Tokenizer;
use super::message::{Content, ContentPart, Message, RenderOptions};
use super::spec::{ChatSpec, Marker, Piece, RoleMarkers};

/// Texts around those of one role, as far as the manifest declares them.
#[derive(Debug)]
struct Role {
    name: &'static str,
    prefix: Option<String>,
    suffix: Option<String>,
}

/// All markers as text.
#[derive(Debug)]
pub(super) struct Markers {
    bos: String,
    roles: [Role; 3],
    /// Text that an answer begins with, and the one that it begins with when thinking is off.
    generation: Option<String>,
    generation_without_thinking: Option<String>,
}

impl Markers {
    pub(super) fn new(spec: &ChatSpec, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let text = |place: &str, marker: &Marker| spell(place, marker, tokenizer);
        let given = |role: &str, key: &str, marker: &Option<Marker>| {
            marker.as_ref().map(|m| text(&format!("/chat/{role}/{key}"), m)).transpose()
        };
        let role = |name: &'static str, markers: &RoleMarkers| {
            let prefix = given(name, "prefix", &markers.prefix)?;
            let suffix = given(name, "suffix", &markers.suffix)?;
            Ok::<_, Error>(Role { name, prefix, suffix })
        };
        let roles = [
            role("system", &spec.system)?,
            role("user", &spec.user)?,
            role("assistant", &spec.assistant)?,
        ];
        let thinking = given("assistant", "gen_prefill", &spec.gen_prefill)?;
        let without = given("assistant", "no_think_prefill", &spec.no_think_prefill)?;
        let prefix = roles[2].prefix.clone();
        let header = prefix.as_deref().unwrap_or_default().trim_end();
        // A prefill may repeat the prefix, also with other space after it.
        let body = |prefill: String| match prefill.strip_prefix(header) {
            Some(rest) if !header.is_empty() => rest.trim_start().to_owned(),
            _ => prefill,
        };
        let thinking = thinking.map(body);
        let begin = thinking.clone().unwrap_or_default();
        let without = without.map(body).map(|text| match text.starts_with(begin.trim_end()) {
            true => text,
            false => format!("{begin}{text}"),
        });
        let without = without.or(thinking.clone());
        let after_prefix = |body: Option<String>| match (&prefix, body) {
            (None, body) => body,
            (Some(prefix), body) => Some(format!("{prefix}{}", body.unwrap_or_default())),
        };
        Ok(Self {
            bos: text("/chat/bos", &spec.bos)?,
            generation: after_prefix(thinking),
            generation_without_thinking: after_prefix(without),
            roles,
        })
    }

    pub(super) fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let mut prompt = self.bos.clone();
        let mut media = options.media.iter();
        for (index, message) in messages.iter().enumerate() {
            let role = self.roles.iter().find(|r| r.name == message.role).ok_or_else(|| {
                error!(Prompt, "message {index}: role {:?} is unknown", message.role)
                    .hint("roles are system, user and assistant")
            })?;
            prompt.push_str(required(role.name, "prefix", &role.prefix)?);
            match &message.content {
                Content::Text(text) => prompt.push_str(text),
                Content::Parts(parts) => {
                    for part in parts {
                        match part {
                            ContentPart::Text(text) => prompt.push_str(text),
                            ContentPart::Media(_) => {
                                prompt.push_str(media.next().map_or("", String::as_str));
                            }
                        }
                    }
                }
            }
            prompt.push_str(required(role.name, "suffix", &role.suffix)?);
        }
        if options.add_generation_prompt {
            let thinks = options.enable_thinking != Some(false);
            let without = &self.generation_without_thinking;
            let begin = if thinks { &self.generation } else { without };
            prompt.push_str(required("assistant", "gen_prefill", begin)?);
        }
        Ok(prompt)
    }
}

/// A marker that the conversation needs.
fn required<'a>(role: &str, key: &str, marker: &'a Option<String>) -> Result<&'a str> {
    marker.as_deref().ok_or_else(|| {
        error!(
            Manifest,
            "manifest /chat/{role}/{key}: missing, and the bundle has no chat template, so \
                 this conversation cannot be rendered"
        )
        .hint(
            "give the marker (\"\" for none, see docs/manifest.md), or put the model's \
             chat_template.jinja beside the tokenizer",
        )
    })
}

/// A marker as text.
fn spell(place: &str, marker: &Marker, tokenizer: Option<&Tokenizer>) -> Result<String> {
    let mut text = String::new();
    for piece in marker {
        match piece {
            Piece::Text(piece) => text.push_str(piece),
            Piece::Token(id) => match tokenizer.and_then(|t| t.id_to_token(*id)) {
                Some(token) => text.push_str(&token),
                None => bail!(Manifest, "manifest {place}: the tokenizer has no token {id}"),
            },
        }
    }
    Ok(text)
}
