//! Each format as its models write it.

use serde_json::json;

use super::*;
use crate::{ChatTemplate, Message, RenderOptions};

fn tools() -> Vec<Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {}},
        "required": ["days"],
    });
    Tool::list(
        &json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]),
    )
    .unwrap()
}

fn calls(format: CallFormat, answer: &str) -> Value {
    serde_json::to_value(format.calls(answer, &tools())).unwrap()
}

fn weather(arguments: Value) -> Value {
    json!({"name": "weather", "arguments": arguments})
}

#[test]
fn hermes_calls_are_read() {
    let answer = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"</tool_call>\"}}\n\
                  </tool_call>\n<tool_call>{\"name\": \"weather\", \"arguments\": \"{\\\"days\\\": 2}\"}</tool_call>";
    let expected = json!([weather(json!({"city": "</tool_call>"})), weather(json!({"days": 2}))]);
    assert_eq!(calls(CallFormat::Tagged, answer), expected);
    assert_eq!(calls(CallFormat::Tagged, "<tool_call>\n{\"name\": \"wea"), json!([]));
    assert_eq!(calls(CallFormat::Tagged, "none"), json!([]));
}

#[test]
fn calls_in_elements_are_read_by_the_tools_types() {
    let answer = "<think>so</think>\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n\
                  <parameter=days>\n3\n</parameter>\n<parameter=exact>\n{\"a\": [1]}\n</parameter>\n</function>\n\
                  </tool_call>\n<tool_call>\n<function=weather>\n</function>\n</tool_call>";
    let expected =
        json!(
            [weather(json!({"city": "12", "days": 3, "exact": {"a": [1]}})), weather(json!({})),]
        );
    assert_eq!(calls(CallFormat::Elements, answer), expected);
    let cut = "<tool_call>\n<function=weather>\n<parameter=city>\nParis";
    assert_eq!(calls(CallFormat::Elements, cut), json!([]));
}

#[test]
fn llama_calls_are_read() {
    let one = "{\"name\": \"weather\", \"parameters\": {\"days\": 1}}";
    let call = weather(json!({"days": 1}));
    assert_eq!(calls(CallFormat::Bare, one), json!([call]));
    let several = format!("<|python_tag|>{one}; {one}<|eom_id|>");
    assert_eq!(calls(CallFormat::Bare, &several), json!([call, call]));
    assert_eq!(calls(CallFormat::Bare, "It rains."), json!([]));
    assert_eq!(calls(CallFormat::Bare, "{\"days\": 1}"), json!([]));
}

#[test]
fn mistral_calls_are_read() {
    let call = weather(json!({"days": 1}));
    let list = "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"days\": 1}, \"id\": \"000000001\"}]</s>";
    assert_eq!(calls(CallFormat::Listed, list), json!([call]));
    let newer = "[TOOL_CALLS]weather[ARGS]{\"days\": 1}[TOOL_CALLS]weather{\"days\": 1}</s>";
    assert_eq!(calls(CallFormat::Listed, newer), json!([call, call]));
}

#[test]
fn calls_as_python_writes_them_are_read() {
    let answer = "<|tool_call_start|>[weather(city='O\\'Hare, \"B\"', days=-3), weather(exact={'a': [True, None, 1.5e3]}), \
                  weather()]<|tool_call_end|>Done.<|im_end|>";
    let expected = json!([
        weather(json!({"city": "O'Hare, \"B\"", "days": -3})),
        weather(json!({"exact": {"a": [true, null, 1500.0]}})),
        weather(json!({})),
    ]);
    assert_eq!(calls(CallFormat::Python, answer), expected);
    for broken in
        ["[weather(city=)]", "[weather(city 1)]", "[weather(", "weather(days=1", "[weather() x]"]
    {
        let answer = format!("<|tool_call_start|>{broken}<|tool_call_end|>");
        assert_eq!(calls(CallFormat::Python, &answer), json!([]), "{broken}");
    }
    let deep = format!("<|tool_call_start|>[f(a={})]<|tool_call_end|>", "[".repeat(100_000));
    assert_eq!(calls(CallFormat::Python, &deep), json!([]));
}

#[test]
fn the_format_is_the_templates() {
    for (source, format) in [
        ("{% for tool in tools %}<tool_call>\n{\"name\": ", Some(CallFormat::Tagged)),
        ("tools: <tool_call>\n<function=example>", Some(CallFormat::Elements)),
        ("{% if tools %}{\"name\": \"f\", \"parameters\": ", Some(CallFormat::Bare)),
        ("{{ '[TOOL_CALLS] [' }}", None),
        ("{% if tool_calls %}[TOOL_CALLS]", Some(CallFormat::Listed)),
        ("tools <|tool_call_start|>", Some(CallFormat::Python)),
        ("{% for message in messages %}", None),
    ] {
        assert_eq!(CallFormat::of_template(source), format, "{source}");
    }
}

#[test]
fn a_list_of_tools_names_what_is_wrong() {
    for (list, expected) in [
        (json!({}), "it is no list"),
        (json!([]), "it is empty"),
        (json!([{"type": "function"}]), "tool 0 has no name"),
        (json!([{"name": "a b"}]), "\"a b\" is no name: expected letters, digits, _ and -"),
        (json!([{"name": "a"}, {"function": {"name": "a"}}]), "there are two tools \"a\""),
        (
            json!([{"name": "a", "parameters": 3}]),
            "the parameters of \"a\" are 3, expected a schema",
        ),
    ] {
        let error = Tool::list(&list).unwrap_err();
        assert_eq!(error.message(), format!("the list of tools: {expected}"));
    }
    let order: Vec<_> =
        tools()[0].arguments().iter().map(|(name, ..)| (*name).to_owned()).collect();
    assert_eq!(order, ["days", "city", "exact"]);
}

#[test]
fn a_bare_object_that_is_a_call_of_a_tool_is_one() {
    let call = json!([weather(json!({"days": 1}))]);
    for format in [CallFormat::Tagged, CallFormat::Elements, CallFormat::Listed, CallFormat::Python]
    {
        for answer in [
            "{\"name\": \"weather\", \"arguments\": {\"days\": 1}}",
            "\n{\"parameters\": {\"days\": 1}, \"name\": \"weather\"}\n",
            "<think>\n{}\n</think>\n\n{\"name\": \"weather\", \"arguments\": {\"days\": 1}}",
        ] {
            assert_eq!(calls(format, answer), call, "{format:?} of {answer}");
        }
        for answer in [
            "{\"name\": \"tides\", \"arguments\": {\"days\": 1}}",
            "{\"name\": \"weather\", \"days\": 1}",
            "{\"name\": \"weather\", \"arguments\": {\"days\": 1}, \"id\": 1}",
            "{\"name\": \"weather\", \"arguments\": {\"days\": 1}} or so",
            "{\"name\": \"weather\", \"arguments\": 1}",
        ] {
            assert_eq!(calls(format, answer), json!([]), "{format:?} of {answer}");
        }
    }
}

/// A template that knows no tools, and wants users and assistants to take turns.
#[test]
fn tools_are_described_to_a_model_whose_template_knows_none() {
    let source = "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] or \
        not loop.first and m.role == loop.previtem.role %}{{ raise_exception(m.role) }}{% endif %}\
        [{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
        {{ part.text }}|{% endfor %}{% endif %}{% endfor %}";
    let template = ChatTemplate::from_jinja(source, "", "").unwrap();
    assert_eq!(template.call_format(), Some(CallFormat::Tagged));
    let render = |messages: Value, tools: Value| {
        let mut options = RenderOptions::default();
        options.arguments.insert("messages".to_owned(), messages);
        options.arguments.insert("tools".to_owned(), tools);
        template.render(&[Message::new("user", "Hi")], &options).unwrap()
    };
    let function = json!({"name": "weather", "description": "Tells it"});
    let tool = json!({"type": "function", "function": function});
    let asked = json!([{"role": "user", "content": "Rain?"}]);
    assert_eq!(render(asked.clone(), Value::Null), "[user]Rain?");
    assert_eq!(render(asked.clone(), json!([])), "[user]Rain?");
    let prompt = render(asked.clone(), json!([tool]));
    let marks = "<tool_call>\n{\"name\": ";
    for words in ["\"name\":\"weather\"", "\"Tells it\"", marks, "\n\nRain?"] {
        assert!(prompt.starts_with("[user]You can call") && prompt.contains(words), "{prompt}");
    }
    let system = json!([{"role": "system", "content": "Be brief."}, asked[0]]);
    let prompt = render(system, json!([tool]));
    assert!(prompt.starts_with("[system]Be brief.\n\nYou can call"), "{prompt}");
    assert!(prompt.ends_with("[user]Rain?"), "{prompt}");
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "Rain?"}]}]);
    assert!(render(parts, json!([tool])).ends_with("</tool_call>\n\n|Rain?|"));
    // Calls and results are texts, and what the user says behind results is one message with them.
    let call = |name: &str| json!({"function": {"name": name, "arguments": {"a": 1}}});
    let messages = json!([
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Well", "tool_calls": [call("weather"), call("time")]},
        {"role": "tool", "content": "Sun."},
        {"role": "tool", "content": "Noon."},
        {"role": "user", "content": "So?"},
    ]);
    let written = |name: &str| {
        format!("<tool_call>\n{{\"name\":\"{name}\",\"arguments\":{{\"a\":1}}}}\n</tool_call>")
    };
    let calls = format!("{}\n{}", written("weather"), written("time"));
    let result = |text: &str| format!("<tool_response>\n{text}\n</tool_response>");
    let results = format!("{}\n{}", result("Sun."), result("Noon."));
    assert_eq!(
        render(messages, Value::Null),
        format!("[user]Rain?[assistant]Well\n{calls}[user]{results}\nSo?")
    );
    let read = CallFormat::Tagged.calls(&calls, &[]);
    assert_eq!((read.len(), &read[0].arguments), (2, &json!({"a": 1})));
}
