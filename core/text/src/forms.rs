//! Forms of chat templates: the text around the turns, which published bundles leave out.
//!
//! The runtime renders what the manifest's `chat` declares. A manifest that declares only what an answer begins with
//! implies the rest; [`complete`] adds it.

use crate::spec::{ChatSpec, Marker, Piece, RoleMarkers};

/// The text before and after the content of each role.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Texts that tell the form from others.
    signs: &'static [&'static str],
    /// Texts around the system message.
    pub system: [&'static str; 2],
    /// Texts around a user's message.
    pub user: [&'static str; 2],
    /// Texts around an answer.
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

/// Gives the roles of a manifest's `chat` the markers that it leaves out. The markers that it has tell the form;
/// without any sign of one it is ChatML.
///
/// If only a prefill spells the assistant's header, such as `<|assistant|>` without a line break, earlier answers have
/// the header as it is spelled there.
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
