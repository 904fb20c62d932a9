//! The manifest's `chat` that the forge writes: the text around the turns, so that nothing is left to be completed.

use std::collections::BTreeSet;

use qhx_text::forms::CHATML;
use serde_json::{Map, Value, json};

/// Text before the answer of a model that could think but should not.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use qhx_core::manifest::{Manifest, SCHEMA_VERSION};
    use qhx_text::{ChatTemplate, Message, RenderOptions};

    use super::*;

    /// A conversation as the manifest's `chat` renders it.
    fn rendered(chat: &Value, thinking: Option<bool>) -> String {
        let document = json!({"schema_version": SCHEMA_VERSION, "host_only": true, "artifacts": {}, "chat": chat});
        let manifest = Manifest::from_value(Path::new("m.json"), document, None).unwrap();
        let messages = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
            .map(|(role, content)| Message::new(role, content));
        let options = RenderOptions { enable_thinking: thinking, ..RenderOptions::default() };
        let chat = manifest.chat.unwrap();
        ChatTemplate::from_markers(&chat, None).unwrap().render(&messages, &options).unwrap()
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
