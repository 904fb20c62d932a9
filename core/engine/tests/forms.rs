//! Prompts of a manifest's `chat` that declares only what an answer begins with.

use std::path::Path;

use serde_json::{Value, json};

use qhx_core::manifest::{Manifest, SCHEMA_VERSION};
use qhx_text::forms::complete;
use qhx_text::{ChatTemplate, Message, RenderOptions};

/// A conversation as the manifest's `chat` renders it after [`complete`].
fn rendered(chat: &Value, thinking: Option<bool>) -> String {
    let document =
        json!({"schema_version": SCHEMA_VERSION, "host_only": true, "artifacts": {}, "chat": chat});
    let manifest = Manifest::from_value(Path::new("m.json"), document, None).expect("a manifest");
    let mut chat = manifest.chat.expect("a chat");
    complete(&mut chat);
    let messages = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
        .map(|(role, content)| Message::new(role, content));
    let options = RenderOptions { enable_thinking: thinking, ..RenderOptions::default() };
    let template = ChatTemplate::from_markers(&chat, None).expect("a template");
    template.render(&messages, &options).expect("a prompt")
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
fn another_form_shows_by_its_header() {
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
