//! Tokenizer and templates against what `tokenizers` and `transformers` answer.

use std::path::Path;

use serde_json::{Value, json};

use super::samples::{byte_level as tokenizer, fixture};
use super::*;
use crate::manifest::Manifest;
use crate::{ErrorKind, Result};

fn fixture_json(file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(file)).unwrap()).unwrap()
}

#[test]
fn prompts_tokenize_as_in_transformers() {
    let (tokenizer, goldens) = (tokenizer(), fixture_json("goldens.json"));
    let cases = goldens["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        let prompt = case["prompt"].as_str().unwrap();
        assert_eq!(tokenizer.encode(prompt, true).unwrap(), ids, "{prompt:?}");
        let output: Vec<u32> = serde_json::from_value(case["output_ids"].clone()).unwrap();
        assert_eq!(tokenizer.decode(&output).unwrap(), case["text"].as_str().unwrap());
    }
}

#[test]
fn files_that_are_no_tokenizer_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for contents in ["", "{}", "version https://git-lfs.github.com/spec/v1", "{\"model\": 3}"] {
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, contents).unwrap();
        let error = Tokenizer::from_file(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact);
        assert!(error.message().contains("tokenizer.json: not a tokenizer"), "{error}");
    }
    let error = Tokenizer::from_file(&dir.path().join("absent.json")).unwrap_err();
    assert!(error.message().contains("absent.json"), "{error}");
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
    ChatTemplate::open(&manifest, &manifest.open_artifacts(), Some(&tokenizer))
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
        let error = ChatTemplate::open(&manifest, &manifest.open_artifacts(), None).unwrap_err();
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
    let (tokenizer, goldens) = (tokenizer(), fixture_json("goldens.json"));
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
        assert_eq!(prompt, case["rendered"].as_str().unwrap(), "{case}");
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(&prompt, false).unwrap(), ids);
    }
    let error =
        template.render(&[Message::new("tool", "x")], &RenderOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Prompt);
    assert!(error.message().contains("unexpected role: tool"), "{error}");
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

fn jinja(source: &str) -> Result<String> {
    ChatTemplate::from_jinja(source, "<s>", "</s>")?
        .render(&conversation(), &RenderOptions::default())
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

#[test]
fn templates_have_what_transformers_gives_them() {
    let cases = [
        ("{{ bos_token }}{{ messages[1:]|length }}{{ eos_token }}", "<s>3</s>"),
        ("{{ ' a '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'ab'.startswith('a') }}", "abTrue"),
        ("{{ 'x'.upper() }}{{ 'ab'.replace('a', 'c') }}{{ messages[0].get('role') }}", "Xcbsystem"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}\
          {% endfor %}",
            "SB",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}\
          {{ ns.n }}",
            "4",
        ),
        ("  {% if true %}\n x\n  {% endif %}\ny\n", " x\ny"),
        ("{{ messages[0]|tojson }}", r#"{"role": "system", "content": "S"}"#),
        ("{{ tools is none }}{{ enable_thinking is defined }}", "TrueFalse"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}", "[1]"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            "SABC",
        ),
        ("{{ strftime_now('%Y')|int > 2024 }}", "True"),
    ];
    for (source, expected) in cases {
        assert_eq!(jinja(source).unwrap(), expected, "{source}");
    }
    let error = jinja("{{ raise_exception('Only user turns!') }}").unwrap_err();
    assert!(error.message().contains("Only user turns!"), "{error}");
}

#[test]
fn hostile_templates_end_with_an_error() {
    let deep = format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000));
    let nested = "{% if true %}".repeat(10_000);
    let sources = [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 999999999999 }}",
        "{% include 'chat_template' %}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].__class__.__mro__ }}",
        "{% for",
        &format!("{{{{ {deep} }}}}"),
        &nested,
    ];
    for source in sources {
        let shown = &source[..source.len().min(60)];
        let error = jinja(source).err().unwrap_or_else(|| panic!("accepted: {shown}"));
        assert!(error.message().starts_with("chat template: "), "{shown}: {error}");
    }
}
