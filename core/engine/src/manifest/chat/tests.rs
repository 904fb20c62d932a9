//! Chat templates of bundles against what `transformers` renders.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::Manifest;
use qhx_base::{ErrorKind, Result};
use qhx_text::{ChatTemplate, Message, RenderOptions, Tokenizer};

/// A file of the checkpoint whose tokenizer is a byte-level BPE.
fn fixture(file: &str) -> PathBuf {
    qhx_paths::fixture("qwen35-tied").join(file)
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(&fixture("tokenizer.json")).unwrap()
}

fn goldens() -> Value {
    serde_json::from_slice(&std::fs::read(fixture("goldens.json")).unwrap()).unwrap()
}

fn manifest(dir: &Path, chat: Option<Value>) -> Manifest {
    let mut document = json!({
        "schema_version": 1,
        "artifacts": {"contexts": {"d": {"bin": "d.bin"}}, "tokenizer": "tokenizer.json"},
    });
    if let Some(chat) = chat {
        document["chat"] = chat;
    }
    Manifest::from_value(&dir.join("m.json"), document, None).unwrap()
}

fn open(dir: &Path, chat: Option<Value>) -> Result<Option<ChatTemplate>> {
    let manifest = manifest(dir, chat);
    let tokenizer = tokenizer();
    manifest.chat_template(&manifest.open_artifacts(), Some(&tokenizer))
}

#[test]
fn files_beside_the_tokenizer_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    for (file, bytes) in [
        ("chat_template.jinja", 2 << 20),
        ("special_tokens_map.json", 17 << 20),
        ("tokenizer_config.json", 17 << 20),
    ] {
        std::fs::write(dir.path().join("chat_template.jinja"), "x").unwrap();
        let path = dir.path().join(file);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        let mut manifest = manifest(dir.path(), None);
        if file == "tokenizer_config.json" {
            manifest.artifacts.tokenizer_config = Some(file.to_owned());
        }
        let error = manifest.chat_template(&manifest.open_artifacts(), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact, "{file}");
        assert!(error.message().contains(&format!("{file}: larger than")), "{error}");
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn conversations_render_as_in_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture(file), dir.path().join(file)).unwrap();
    }
    let template = open(dir.path(), None).unwrap().unwrap();
    let (tokenizer, goldens) = (tokenizer(), goldens());
    let cases = goldens["templates"].as_array().unwrap();
    assert!(cases.len() > 5);
    for case in cases {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let options = RenderOptions {
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            enable_thinking: case["enable_thinking"].as_bool(),
            ..RenderOptions::default()
        };
        let prompt = template.render(&messages, &options).unwrap();
        let rendered = case["rendered"].as_str().unwrap();
        if options.add_generation_prompt && Message::goes_on(&messages) {
            // There it begins another answer.
            let more = rendered.strip_prefix(&prompt).unwrap_or_else(|| panic!("{case}"));
            assert!(more.starts_with("<|im_end|>\n<|im_start|>assistant\n"), "{case}");
            continue;
        }
        assert_eq!(prompt, rendered, "{case}");
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(&prompt, false).unwrap(), ids);
    }
    let error =
        template.render(&[Message::new("robot", "x")], &RenderOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Prompt);
    assert!(error.message().contains("unexpected role: robot"), "{error}");
    assert!(template.render(&[], &RenderOptions::default()).is_err());
}

fn conversation() -> Vec<Message> {
    [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
        .map(|(role, content)| Message::new(role, content))
        .to_vec()
}

fn marked(chat: Value, thinking: Option<bool>) -> String {
    let dir = tempfile::tempdir().unwrap();
    let template = open(dir.path(), Some(chat)).unwrap().unwrap();
    let options = RenderOptions { enable_thinking: thinking, ..RenderOptions::default() };
    template.render(&conversation(), &options).unwrap()
}

/// Markers of a made-up form, with other ways to begin an answer where `assistant` gives them.
fn own_markers(assistant: Value) -> Value {
    let mut chat = json!({
        "bos": [428, "!"],
        "system": {"prefix": "[S]", "suffix": "\n"},
        "user": {"prefix": "Q: ", "suffix": "\n"},
        "assistant": {"prefix": "[A] \n", "suffix": "\n"},
    });
    let given = assistant.as_object().unwrap().clone();
    chat["assistant"].as_object_mut().unwrap().extend(given);
    chat
}

#[test]
fn markers_render_what_the_manifest_declares() {
    let turns = "<|endoftext|>![S]S\nQ: A\n[A] \nB\nQ: C\n";
    let start = format!("{turns}[A] \n");
    assert_eq!(marked(own_markers(json!({})), None), start);
    // However an author writes the prefills, they mean the same.
    for (gen_prefill, no_think_prefill) in [
        ("[A] \n", "<think>\n\n</think>"),
        ("[A]", "<think>\n\n</think>"),
        ("[A]\n", "[A] \n<think>\n\n</think>"),
        ("", "<think>\n\n</think>"),
    ] {
        let chat =
            own_markers(json!({"gen_prefill": gen_prefill, "no_think_prefill": no_think_prefill}));
        assert_eq!(marked(chat.clone(), None), start, "{chat}");
        assert_eq!(marked(chat.clone(), Some(true)), start, "{chat}");
        let without = format!("{start}<think>\n\n</think>");
        assert_eq!(marked(chat.clone(), Some(false)), without, "{chat}");
    }
    for (gen_prefill, no_think_prefill) in
        [("<think>\n", "<think>\n\n</think>"), ("[A] \n<think>\n", "\n</think>")]
    {
        let chat =
            own_markers(json!({"gen_prefill": gen_prefill, "no_think_prefill": no_think_prefill}));
        assert_eq!(marked(chat.clone(), Some(true)), format!("{start}<think>\n"), "{chat}");
        let without = format!("{start}<think>\n\n</think>");
        assert_eq!(marked(chat.clone(), Some(false)), without, "{chat}");
    }
    let chat = own_markers(json!({"gen_prefill": "[A] \n<think>\n"}));
    assert_eq!(marked(chat, Some(false)), format!("{start}<think>\n"), "nothing switches it off");
}

#[test]
fn a_marker_that_a_conversation_needs_is_missed_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let chat =
        json!({"user": {"prefix": "Q: ", "suffix": "\n"}, "assistant": {"gen_prefill": "A: "}});
    let template = open(dir.path(), Some(chat)).unwrap().unwrap();
    let options = RenderOptions::default();
    let render = |messages: &[Message]| template.render(messages, &options);
    let conversation = conversation();
    assert_eq!(render(&conversation[1..2]).unwrap(), "Q: A\nA: ");
    for (messages, missing) in
        [(&conversation[..], "/chat/system/prefix"), (&conversation[1..], "/chat/assistant/prefix")]
    {
        let error = render(messages).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Manifest);
        assert!(error.message().contains(&format!("{missing}: missing")), "{error}");
    }
    let template = open(dir.path(), Some(json!({}))).unwrap().unwrap();
    let error = template.render(&conversation, &options).unwrap_err();
    assert!(error.message().contains("/chat/system/prefix: missing"), "{error}");
}

#[test]
fn the_manifest_decides_the_style() {
    let dir = tempfile::tempdir().unwrap();
    assert!(open(dir.path(), None).unwrap().is_none(), "nothing says how to chat");
    let error = open(dir.path(), Some(json!({"style": "jinja"}))).unwrap_err();
    assert!(error.message().starts_with("/chat/style: \"jinja\", but"), "{error}");
    let error = open(dir.path(), Some(json!({"bos": [100000]}))).unwrap_err();
    assert!(error.message().contains("/chat/bos: the tokenizer has no token 100000"), "{error}");

    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "J{{ messages[0].content }}").unwrap();
    let render = |chat| {
        let template = open(dir.path(), chat).unwrap()?;
        Some(template.render(&[Message::new("user", "x")], &RenderOptions::default()).unwrap())
    };
    assert_eq!(render(None).as_deref(), Some("Jx"));
    // As in `transformers`, the file comes before the configuration.
    let config = json!({"chat_template": "C{{ bos_token }}", "added_tokens_decoder": {}, "bos_token": "<b>"});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(render(None).as_deref(), Some("Jx"));
    // `transformers` reads the further templates last, so that one of this name replaces the file's.
    let further = dir.path().join("additional_chat_templates");
    std::fs::create_dir(&further).unwrap();
    std::fs::write(further.join("default.jinja"), "D{{ messages[0].content }}").unwrap();
    assert_eq!(render(None).as_deref(), Some("Dx"));
    std::fs::remove_dir_all(&further).unwrap();
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    assert_eq!(render(None).as_deref(), Some("C<b>"));
    let list = json!({"bos_token": {"content": "<s>"}, "chat_template": [
        {"name": "tool_use", "template": "T"}, {"name": "default", "template": "{{ bos_token }}D"}]});
    std::fs::write(dir.path().join("tokenizer_config.json"), list.to_string()).unwrap();
    assert_eq!(render(None).as_deref(), Some("<s>D"));
    assert_eq!(render(Some(json!(false))), None);
    let mut markers = own_markers(json!({}));
    markers["style"] = json!("markers");
    markers["bos"] = json!([]);
    assert_eq!(render(Some(markers)).as_deref(), Some("Q: x\n[A] \n"));
}

#[test]
fn special_tokens_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
    write("tokenizer.json", "{}");
    write(
        "chat_template.jinja",
        "{{ bos_token }}{{ eos_token }}{{ additional_special_tokens }}{{ pad_token is defined }}",
    );
    let render = || {
        let template = open(dir.path(), None).unwrap().unwrap();
        template.render(&[Message::new("user", "x")], &RenderOptions::default()).unwrap()
    };
    assert_eq!(render(), "False");
    let map = json!({"eos_token": {"content": "</m>"}, "additional_special_tokens": ["<a>"]});
    write("special_tokens_map.json", &map.to_string());
    assert_eq!(render(), "</m>['<a>']False", "without a configuration");
    write(
        "tokenizer_config.json",
        r#"{"bos_token": "<c>", "eos_token": "</c>", "pad_token": null}"#,
    );
    assert_eq!(render(), "<c></m>['<a>']False", "the map comes before an old configuration");
    let config = json!({"added_tokens_decoder": {}, "bos_token": "<c>", "eos_token": "</c>"});
    write("tokenizer_config.json", &config.to_string());
    assert_eq!(render(), "<c></c>False", "a newer one says everything itself");
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "T");
    assert_eq!(render(), "<c></c>False", "one of another name is not the default");
}
