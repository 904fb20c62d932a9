//! Forms of chat templates: the text around the turns, which published bundles leave out.
//!
//! The runtime renders what the manifest's `chat` declares. A manifest that declares only what an answer begins with
//! implies the rest; [`complete`] adds it.

use crate::manifest::{ChatSpec, Marker, Piece, RoleMarkers};

/// The text before and after the content of each role.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Texts that tell the form from others.
    signs: &'static [&'static str],
    /// Of the system message.
    pub system: [&'static str; 2],
    /// Of a user's message.
    pub user: [&'static str; 2],
    /// Of an answer.
    pub assistant: [&'static str; 2],
}

/// ChatML: `<|im_start|>role`, a line break, the content, `<|im_end|>`.
pub const CHATML: Form = Form {
    signs: &["<|im_start|>"],
    system: ["<|im_start|>system\n", "<|im_end|>\n"],
    user: ["<|im_start|>user\n", "<|im_end|>\n"],
    assistant: ["<|im_start|>assistant\n", "<|im_end|>\n"],
};
/// A token for each role, `<|user|>`, and `<|end|>` behind the content.
pub const ROLE_TOKENS: Form = Form {
    signs: &["<|assistant|>", "<|user|>"],
    system: ["<|system|>\n", "<|end|>\n"],
    user: ["<|user|>\n", "<|end|>\n"],
    assistant: ["<|assistant|>\n", "<|end|>\n"],
};

/// Gives the roles of a manifest's `chat` the markers that it leaves out. The markers that it has tell the form; without
/// any sign of one it is ChatML.
///
/// Where only a prefill spells the assistant's header, such as `<|assistant|>` without a line break, earlier answers
/// have it as it is spelled there.
pub fn complete(chat: &mut ChatSpec) {
    let roles = [&chat.system, &chat.user, &chat.assistant];
    let around = roles.into_iter().flat_map(|role| [&role.prefix, &role.suffix]);
    let prefills = [&chat.gen_prefill, &chat.no_think_prefill];
    let given: Vec<&str> = around.chain(prefills).flatten().flatten().filter_map(text).collect();
    let is_of = |form: &&Form| form.signs.iter().any(|sign| given.iter().any(|t| t.contains(sign)));
    let form = [&CHATML, &ROLE_TOKENS].into_iter().find(is_of).unwrap_or(&CHATML);
    let header = form.assistant[0].trim_end();
    let spelled = prefills.into_iter().flatten().find_map(|prefill| {
        let rest = prefill.first().and_then(text)?.strip_prefix(header)?;
        let spaces = rest.len() - rest.trim_start().len();
        Some(format!("{header}{}", &rest[..spaces]))
    });
    fill(&mut chat.system, form.system);
    fill(&mut chat.user, form.user);
    fill(&mut chat.assistant, [spelled.as_deref().unwrap_or(form.assistant[0]), form.assistant[1]]);
}

fn text(piece: &Piece) -> Option<&str> {
    match piece {
        Piece::Text(text) => Some(text),
        Piece::Token(_) => None,
    }
}

fn fill(role: &mut RoleMarkers, [prefix, suffix]: [&str; 2]) {
    let marker = |text: &str| -> Marker { vec![Piece::Text(text.to_owned())] };
    role.prefix.get_or_insert_with(|| marker(prefix));
    role.suffix.get_or_insert_with(|| marker(suffix));
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::manifest::{Manifest, SCHEMA_VERSION};
    use crate::text::{ChatTemplate, Message, RenderOptions};

    /// A conversation as the manifest's `chat` renders it after [`complete`].
    fn rendered(chat: &Value, thinking: Option<bool>) -> String {
        let document = json!({"schema_version": SCHEMA_VERSION, "host_only": true, "artifacts": {}, "chat": chat});
        let manifest = Manifest::from_value(Path::new("m.json"), document, None).unwrap();
        let mut chat = manifest.chat.unwrap();
        complete(&mut chat);
        let messages = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
            .map(|(role, content)| Message::new(role, content));
        let options = RenderOptions { enable_thinking: thinking, ..RenderOptions::default() };
        ChatTemplate::from_markers(&chat, None).unwrap().render(&messages, &options).unwrap()
    }

    #[test]
    fn published_prefills_of_chatml_mean_the_same_however_they_are_written() {
        let turns = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n\
                     <|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n";
        let start = format!("{turns}<|im_start|>assistant\n");
        let no_think = format!("{start}<think>\n\n</think>\n\n");
        assert_eq!(rendered(&json!({}), None), start);
        for (gen_prefill, no_think_prefill) in [
            ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
            ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
            ("", "<think>\n\n</think>\n\n"),
        ] {
            let chat = json!({"assistant": {"gen_prefill": gen_prefill,
                                            "no_think_prefill": no_think_prefill}});
            assert_eq!(rendered(&chat, None), start, "{chat}");
            assert_eq!(rendered(&chat, Some(true)), start, "{chat}");
            assert_eq!(rendered(&chat, Some(false)), no_think, "{chat}");
        }
        for (gen_prefill, no_think_prefill) in [
            ("<think>\n", "<think>\n\n</think>\n\n"),
            ("<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
        ] {
            let chat = json!({"assistant": {"gen_prefill": gen_prefill,
                                            "no_think_prefill": no_think_prefill}});
            assert_eq!(rendered(&chat, Some(true)), format!("{start}<think>\n"), "{chat}");
            assert_eq!(rendered(&chat, Some(false)), no_think, "{chat}");
        }
    }

    #[test]
    fn another_form_is_told_by_its_header_and_spelled_as_there() {
        for header in ["<|assistant|>\n", "<|assistant|>"] {
            let expected = format!(
                "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n{header}B<|end|>\n<|user|>\nC<|end|>\n{header}"
            );
            assert_eq!(rendered(&json!({"assistant": {"gen_prefill": header}}), None), expected);
        }
        let own = json!({
            "system": {"prefix": "[S]", "suffix": "\n"},
            "user": {"prefix": "Q: ", "suffix": "\n"},
            "assistant": {"prefix": "A: ", "suffix": "\n", "gen_prefill": "A:"},
        });
        assert_eq!(rendered(&own, None), "[S]S\nQ: A\nA: B\nQ: C\nA: ");
    }
}
