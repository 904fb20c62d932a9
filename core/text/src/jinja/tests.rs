//! Templates against what Jinja2 makes of them; `tests/oracle/templates.py` says how the expected texts are made.

use std::time::{Duration, Instant};

use qhx_base::{ErrorKind, Result};
use serde_json::{Map, Value};

use super::{JinjaTemplate, Template};
use crate::{Message, RenderOptions};

fn fixture() -> Value {
    serde_json::from_slice(&std::fs::read(qhx_paths::fixture("templates.json")).unwrap()).unwrap()
}

fn render(source: &str, context: &Map<String, Value>) -> Result<String> {
    let messages: Vec<Message> = match context.get("messages") {
        Some(messages) => serde_json::from_value(messages.clone()).unwrap(),
        None => vec![Message::new("user", "Hello")],
    };
    let template = Template { source: source.to_owned(), tokens: Map::new() };
    let options = RenderOptions { arguments: context.clone(), ..RenderOptions::default() };
    JinjaTemplate::here(template, "x.jinja")?.render(&messages, &options)
}

#[test]
fn constructs_render_as_in_jinja2() {
    let fixture = fixture();
    let context = fixture["context"].as_object().unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 80, "{}", cases.len());
    let mut wrong = String::new();
    for case in cases {
        let (source, expected) =
            (case["template"].as_str().unwrap(), case["expected"].as_str().unwrap());
        let found = render(source, context).unwrap_or_else(|e| e.to_string());
        if found != expected {
            wrong += &format!("\ntemplate {source}\nexpected {expected}\nfound    {found}\n");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn what_jinja2_refuses_is_an_error_that_names_the_template() {
    let fixture = fixture();
    let context = fixture["context"].as_object().unwrap();
    for source in fixture["refused"].as_array().unwrap() {
        let source = source.as_str().unwrap();
        match render(source, context) {
            Ok(text) => panic!("{source} gives {text:?}"),
            Err(error) => assert!(error.message().starts_with("x.jinja: "), "{source}: {error}"),
        }
    }
    for (source, name) in [
        ("{{ raise_exception('Only user turns!') }}", "Only user turns!"),
        ("{{ 'a'|unheard_of }}", "unheard_of"),
        ("{{ 'a' is unheard_of }}", "unheard_of"),
        ("{{ unheard_of() }}", "unheard_of"),
        ("{{ 'a'.unheard_of() }}", "unheard_of"),
        ("{{ 'a'|tojson(unheard_of=1) }}", "unheard_of"),
    ] {
        let error = render(source, context).unwrap_err();
        assert!(error.message().contains(name), "{source}: {error}");
    }
}

#[test]
fn slices_take_what_python_takes() {
    for (source, expected) in [
        ("{{ 'aü🙂'[::-1] }}{{ ''[::-1] }}", "🙂üa"),
        ("{{ [0, 1, 2, 3, 4][-2:0:-2] }}", "[3, 1]"),
        ("{{ [0, 1, 2, 3, 4][10:-10:-1] }}", "[4, 3, 2, 1, 0]"),
        ("{{ [0, 1, 2, 3, 4][-10:10:9223372036854775807] }}", "[0]"),
        ("{{ [0, 1, 2, 3, 4][-9223372036854775807:9223372036854775807:2] }}", "[0, 2, 4]"),
        ("{{ (1, 2, 3)[::-1] }}{{ (1, 2)[:1] }}{{ (1,) }}{{ () }}", "(3, 2, 1)(1,)(1,)()"),
    ] {
        assert_eq!(render(source, &Map::new()).unwrap(), expected, "{source}");
    }
    assert!(render("{{ [1, 2][::0] }}", &Map::new()).is_err());
}

#[test]
fn arguments_reach_the_template() {
    let arguments = serde_json::json!({"reasoning_effort": "high", "thinking": true});
    let text = render("{{ reasoning_effort }}{{ thinking }}", arguments.as_object().unwrap());
    assert_eq!(text.unwrap(), "highTrue");
}

#[test]
fn methods_of_mappings_come_before_their_keys() {
    let context = serde_json::json!({"x": {"items": [1], "get": 2, "a": 3}, "y": {"a": 3}});
    for (source, expected) in [
        ("{{ x.items is callable }}{{ y.values is defined }}", "TrueTrue"),
        ("{{ x.get('a') }}{{ (x.get)('a') }}{{ x['items'] }}", "33[1]"),
        ("{% for k, v in x.items() %}{{ k }}{% endfor %}", "itemsgeta"),
        ("{{ x.pop is defined }}{{ y.a }}", "False3"),
        ("{% set n = namespace(items=1) %}{% set n.items = 4 %}{{ n.items }}", "4"),
    ] {
        assert_eq!(render(source, context.as_object().unwrap()).unwrap(), expected, "{source}");
    }
}

/// Reference: `_alias_reasoning_fields` of `transformers` 5.23.
#[test]
fn reasoning_has_the_names_that_templates_read() {
    let source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}";
    for (message, expected) in [
        (serde_json::json!({"reasoning": "r"}), "r|r"),
        (serde_json::json!({"thinking": "t", "reasoning": "r"}), "t|t"),
        (serde_json::json!({"reasoning_content": "c", "thinking": "t"}), "c|t"),
        (serde_json::json!({"reasoning_content": null, "thinking": "t"}), "t|t"),
        (serde_json::json!({"content": "x"}), "|"),
    ] {
        let template = Template { source: source.to_owned(), tokens: Map::new() };
        let mut options = RenderOptions::default();
        options.arguments.insert("messages".to_owned(), serde_json::json!([message]));
        let template = JinjaTemplate::here(template, "x.jinja").unwrap();
        let text = template.render(&[Message::new("user", "Hello")], &options).unwrap();
        assert_eq!(text, expected, "{message}");
    }
}

#[test]
fn digits_outside_of_places_are_no_widths() {
    let text = render("{{ '15551234567 {:>3}|%4d'.format(1) % 2 }}", &Map::new());
    assert_eq!(text.unwrap(), "15551234567   1|   2");
}

/// Each of these once ended the process, or would take all its memory or time.
#[test]
fn hostile_templates_end_with_an_error_in_this_process_too() {
    let chain = |part: &str, n: usize| format!("{{{{ {} }}}}", part.repeat(n));
    let in_loop = |body: &str| {
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range(90000) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let doubled = |statement: &str| format!("{{% set s = 'x' %}}{}", statement.repeat(60));
    for source in [
        format!("{{{{ {}1 }}}}", "not ".repeat(6000)),
        format!("{{{{ {}1 }}}}", "-".repeat(20_000)),
        chain("a.", 8000),
        format!("{{{{ 1{} }}}}", "|string".repeat(4000)),
        format!("{{{{ a{} }}}}", "[0]".repeat(8000)),
        format!("{{{{ a{} }}}}", "()".repeat(8000)),
        format!("{{{{ 1{} }}}}", " + 1".repeat(8000)),
        format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(8000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        "{% if true %}".repeat(10_000),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(20_000)),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns == ns }}".to_owned(),
        "{% set ns = namespace() %}{% set other = namespace(a=ns) %}{{ other }}".to_owned(),
        in_loop("{% set ns.x = [ns.x] %}"),
        in_loop("{% set ns.x = {'a': ns.x} %}"),
        in_loop("{% set ns.x = ns.x + ns.x + [1] %}"),
        in_loop("{% set ns.x = [ns.x, ns.x] %}"),
        doubled("{% set s = s + s %}"),
        doubled("{% set s = s ~ s %}"),
        doubled("{% set s = [s, s]|join %}"),
        doubled("{% set s %}{{ s }}{{ s }}{% endset %}"),
        "{{ [1]|batch(1000000000, 'x') }}".to_owned(),
        "{{ [1]|slice(1000000000, 'x') }}".to_owned(),
        "{{ 'x' * 999999999999 }}".to_owned(),
        "{{ 'x'|center(9999999999) }}".to_owned(),
        "{{ 'x'.ljust(9999999999) }}".to_owned(),
        "{{ 'x'.zfill(9999999999) }}".to_owned(),
        "{{ '%9999999999d' % 1 }}".to_owned(),
        "{{ ('%99999d' * 400000) % numbers }}".to_owned(),
        "{{ ('{0:99999}' * 400000).format(1) }}".to_owned(),
        "{{ '{:99999999999}'.format(1) }}".to_owned(),
        "{{ ('{0}' * 400000).format('x' * 10000000) }}".to_owned(),
        "{{ ('{a}' * 400000).format(a='x' * 10000000) }}".to_owned(),
        "{{ ('%(a)s' * 400000) % {'a': 'x' * 10000000} }}".to_owned(),
        "{{ 'x\\ny'|indent(9999999999) }}".to_owned(),
        "{{ [1]|tojson(indent=9999999999)|length }}{{ raise_exception('bounded') }}".to_owned(),
        "{{ ('x' * 10000000).replace('', 'y' * 10000) }}".to_owned(),
        "{{ range(1000000000) }}".to_owned(),
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
            .to_owned(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned(),
        "{{ messages[0].__class__.__mro__ }}".to_owned(),
        "{% include 'chat_template' %}".to_owned(),
        "{{ __mod__(1, 0) }}".to_owned(),
    ] {
        let shown = &source[..source.len().min(60)];
        let start = Instant::now();
        let error = match render(&source, &Map::new()) {
            Ok(text) => panic!("{shown} gives {} bytes", text.len()),
            Err(error) => error,
        };
        assert!(
            matches!(error.kind(), ErrorKind::Artifact | ErrorKind::Prompt),
            "{shown}: {error}"
        );
        assert!(error.message().starts_with("x.jinja: "), "{shown}: {error}");
        assert!(
            error.message().len() < 4000,
            "{shown}: {} bytes of message",
            error.message().len()
        );
        assert!(start.elapsed() < Duration::from_secs(30), "{shown}: {:?}", start.elapsed());
    }
}
