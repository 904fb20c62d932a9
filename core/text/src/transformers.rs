//! Tokenizer and templates against what `tokenizers` and `transformers` answer.

use qhx_base::{ErrorKind, Result};
use serde_json::Value;

use super::samples::{byte_level as tokenizer, fixture};
use super::*;

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

fn conversation() -> Vec<Message> {
    [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
        .map(|(role, content)| Message::new(role, content))
        .to_vec()
}

fn jinja(source: &str) -> Result<String> {
    ChatTemplate::from_jinja(source, "<s>", "</s>")?
        .render(&conversation(), &RenderOptions::default())
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

/// Expected prompts are those of `apply_chat_template` with `continue_final_message`.
#[test]
fn a_last_message_of_the_assistant_stays_open() {
    const PLAIN: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if \
                         add_generation_prompt %}[assistant]{% endif %}";
    let open = |source: &str, last: Message, arguments: Value| {
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        let options = RenderOptions { arguments, ..RenderOptions::default() };
        let messages = [conversation(), vec![last]].concat();
        ChatTemplate::from_jinja(source, "<s>", "</s>").unwrap().render(&messages, &options)
    };
    let trimmed = PLAIN.replace("m.content", "m.content | trim");
    let thinks = PLAIN.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')");
    for (source, content, end) in [
        (PLAIN, "It is (", "It is ("),
        (PLAIN, " It is \n", " It is \n"),
        (&trimmed, " It is \n", "It is"),
        (&trimmed, "A</s>[user]C", "A</s>[user]C"),
        (PLAIN, "", ""),
        (&trimmed, " ", ""),
        (&thinks, "<think>\nso\n</think>\n\nYes", "Yes"),
    ] {
        let text = open(source, Message::assistant(content), Value::Null).unwrap();
        let before = "[system]S</s>[user]A</s>[assistant]B</s>[user]C</s>[assistant]";
        assert_eq!(text, format!("{before}{end}"), "{content:?} in {source}");
    }
    let parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}";
    let last = vec![ContentPart::Text("It is".to_owned()), ContentPart::Text(" (".to_owned())];
    assert!(open(parts, Message::assistant(last), Value::Null).unwrap().ends_with("It is ("));
    let drops = PLAIN.replace("m.content", "'' if m.role == 'assistant' else m.content");
    let error = open(&drops, Message::assistant("It is"), Value::Null).unwrap_err();
    assert!(error.message().contains("leaves the last message out"), "{error}");
    let call = serde_json::json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]});
    let error = open(PLAIN, Message::assistant(""), call).unwrap_err();
    assert!(error.message().contains("asks for calls of tools"), "{error}");
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
