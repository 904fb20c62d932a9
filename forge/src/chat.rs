//! Chat templates in parts: the texts around the turns of each role, which differ between families of models.
//!
//! The runtime knows none of them. It renders what the manifest declares, so that a forge writes all parts into it. Bundles
//! that others published declare only what an answer begins with; [`complete`] adds what that implies.

use std::collections::BTreeSet;

use qhx_core::manifest::{ChatSpec, Marker, Piece, RoleMarkers};
use serde_json::{Map, Value, json};

/// A chat template in parts: the texts before and after a message of each role.
struct Form {
    /// Texts by which the template is recognised.
    signs: &'static [&'static str],
    system: [&'static str; 2],
    user: [&'static str; 2],
    assistant: [&'static str; 2],
}

/// ChatML.
const CHATML: Form = Form {
    signs: &["<|im_start|>"],
    system: ["<|im_start|>system\n", "<|im_end|>\n"],
    user: ["<|im_start|>user\n", "<|im_end|>\n"],
    assistant: ["<|im_start|>assistant\n", "<|im_end|>\n"],
};
/// The chat template of Phi-3.
const PHI3: Form = Form {
    signs: &["<|assistant|>", "<|user|>"],
    system: ["<|system|>\n", "<|end|>\n"],
    user: ["<|user|>\n", "<|end|>\n"],
    assistant: ["<|assistant|>\n", "<|end|>\n"],
};
/// What stands before an answer of a model that could think and is not to.
const NO_THOUGHT: &str = "<think>\n\n</think>\n\n";

/// The value of the manifest's `chat`: all parts of ChatML where the tokenizer's special `tokens` have them, `false`
/// for a model that has neither them nor a `template`.
pub(crate) fn of_tokens(tokens: &BTreeSet<String>, template: bool) -> Value {
    let has = |token: &str| tokens.contains(token);
    if !has("<|im_start|>") || !has("<|im_end|>") {
        return if template { json!({"style": "jinja"}) } else { json!(false) };
    }
    let form = CHATML;
    let markers = |[prefix, suffix]: [&str; 2]| json!({"prefix": prefix, "suffix": suffix});
    let mut assistant = Map::new();
    assistant.insert("prefix".to_owned(), json!(form.assistant[0]));
    assistant.insert("suffix".to_owned(), json!(form.assistant[1]));
    assistant.insert("gen_prefill".to_owned(), json!(form.assistant[0]));
    if has("<think>") && has("</think>") {
        let closed = format!("{}{NO_THOUGHT}", form.assistant[0]);
        assistant.insert("no_think_prefill".to_owned(), json!(closed));
    }
    json!({
        "bos": [],
        "system": markers(form.system),
        "user": markers(form.user),
        "assistant": assistant,
    })
}

/// Adds the parts of a chat template that the roles of a manifest's `chat` leave out. The parts that it has show which
/// template it is; without any sign of one it is ChatML.
///
/// Where only a prefill spells the assistant's header, such as `<|assistant|>` without a line break, earlier answers
/// have it as it is spelled there.
pub fn complete(chat: &mut ChatSpec) {
    let roles = [&chat.system, &chat.user, &chat.assistant];
    let around = roles.into_iter().flat_map(|role| [&role.prefix, &role.suffix]);
    let prefills = [&chat.gen_prefill, &chat.no_think_prefill];
    let given: Vec<&str> = around.chain(prefills).flatten().flatten().filter_map(text).collect();
    let is_of = |form: &&Form| form.signs.iter().any(|sign| given.iter().any(|t| t.contains(sign)));
    let form = [&CHATML, &PHI3].into_iter().find(is_of).unwrap_or(&CHATML);
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

    use qhx_core::manifest::{Manifest, SCHEMA_VERSION};
    use qhx_core::text::{ChatTemplate, Message, RenderOptions};

    use super::*;

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
    fn published_prefills_of_chatml_mean_the_same() {
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

    #[test]
    fn the_tokenizers_markers_tell_what_is_written() {
        let set = |tokens: &[&str]| tokens.iter().map(|t| (*t).to_owned()).collect();
        let full = of_tokens(&set(&["<|im_start|>", "<|im_end|>", "<think>", "</think>"]), true);
        let turns = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n\
                     <|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n\
                     <|im_start|>assistant\n";
        assert_eq!(rendered(&full, None), turns);
        assert_eq!(rendered(&full, Some(false)), format!("{turns}<think>\n\n</think>\n\n"));
        let plain = of_tokens(&set(&["<|im_start|>", "<|im_end|>"]), true);
        assert_eq!(rendered(&plain, Some(false)), turns, "it does not think");
        // Nothing is left for the program that opens the bundle.
        for role in ["system", "user", "assistant"] {
            assert!(plain[role]["prefix"].is_string() && plain[role]["suffix"].is_string());
        }
        assert_eq!(of_tokens(&set(&[]), true), json!({"style": "jinja"}));
        assert_eq!(of_tokens(&set(&[]), false), json!(false));
    }
}
