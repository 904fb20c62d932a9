//! The `chat` key: the marker strings around the turns of a conversation, and the files of a chat template.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use super::Manifest;
use super::reader::Node;
use qhx_base::artifacts::Artifacts;
use qhx_base::{ErrorKind, Result};
use qhx_text::{
    ChatSpec, ChatStyle, ChatTemplate, Marker, Piece, RoleMarkers, TemplateFiles, Tokenizer,
};

/// Reads the value of `chat`: an object, or `false` for a model that does not chat.
pub(super) fn read(node: &Node<'_>) -> Result<ChatSpec> {
    if node.value().is_boolean() {
        let style = if node.bool()? { ChatStyle::Auto } else { ChatStyle::None };
        return Ok(ChatSpec { style, ..ChatSpec::default() });
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
    Ok(ChatSpec {
        style,
        bos: marker(node, "bos")?.unwrap_or_default(),
        system: role(node, "system")?,
        user: role(node, "user")?,
        assistant: role(node, "assistant")?,
        gen_prefill: prefill("gen_prefill")?,
        no_think_prefill: prefill("no_think_prefill")?,
    })
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

/// The files beside the tokenizer of a bundle.
struct Files<'a> {
    manifest: &'a Manifest,
    artifacts: &'a Artifacts,
}

impl TemplateFiles for Files<'_> {
    fn config(&self) -> Result<Option<PathBuf>> {
        self.manifest.tokenizer_config_path(self.artifacts)
    }

    fn beside(&self, name: &str) -> Result<Option<PathBuf>> {
        let files = &self.manifest.artifacts;
        let files = [
            ("/artifacts/tokenizer", &files.tokenizer),
            ("/artifacts/tokenizer_config", &files.tokenizer_config),
        ];
        for (place, file) in files {
            let Some(file) = file else { continue };
            let beside = Path::new(file).with_file_name(name);
            match self.artifacts.resolve(place, &beside.to_string_lossy()) {
                Ok(path) => return Ok(Some(path)),
                Err(e) if e.kind() == ErrorKind::Artifact => {}
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }
}

impl Manifest {
    /// The chat template of the bundle: Jinja, otherwise the manifest's markers. `None` for a model that only
    /// completes text.
    ///
    /// # Errors
    /// When the template is missing or invalid.
    pub fn chat_template(
        &self,
        artifacts: &Artifacts,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<ChatTemplate>> {
        ChatTemplate::open(self.chat.as_ref(), &Files { manifest: self, artifacts }, tokenizer)
    }
}
