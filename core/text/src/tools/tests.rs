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
    assert_eq!(calls(CallFormat::TAGGED, answer), expected);
    assert_eq!(calls(CallFormat::TAGGED, "<tool_call>\n{\"name\": \"wea"), json!([]));
    assert_eq!(calls(CallFormat::TAGGED, "none"), json!([]));
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
    assert_eq!(calls(CallFormat::ELEMENTS, answer), expected);
    let cut = "<tool_call>\n<function=weather>\n<parameter=city>\nParis";
    assert_eq!(calls(CallFormat::ELEMENTS, cut), json!([]));
}

#[test]
fn llama_calls_are_read() {
    let one = "{\"name\": \"weather\", \"parameters\": {\"days\": 1}}";
    let call = weather(json!({"days": 1}));
    assert_eq!(calls(CallFormat::BARE, one), json!([call]));
    let several = format!("<|python_tag|>{one}; {one}<|eom_id|>");
    assert_eq!(calls(CallFormat::BARE, &several), json!([call, call]));
    assert_eq!(calls(CallFormat::BARE, "It rains."), json!([]));
    assert_eq!(calls(CallFormat::BARE, "{\"days\": 1}"), json!([]));
}

#[test]
fn mistral_calls_are_read() {
    let call = weather(json!({"days": 1}));
    let list = "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"days\": 1}, \"id\": \"000000001\"}]</s>";
    assert_eq!(calls(CallFormat::LISTED, list), json!([call]));
    let newer = "[TOOL_CALLS]weather[ARGS]{\"days\": 1}[TOOL_CALLS]weather{\"days\": 1}</s>";
    assert_eq!(calls(CallFormat::LISTED, newer), json!([call, call]));
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
    assert_eq!(calls(CallFormat::PYTHON, answer), expected);
    for broken in
        ["[weather(city=)]", "[weather(city 1)]", "[weather(", "weather(days=1", "[weather() x]"]
    {
        let answer = format!("<|tool_call_start|>{broken}<|tool_call_end|>");
        assert_eq!(calls(CallFormat::PYTHON, &answer), json!([]), "{broken}");
    }
    let deep = format!("<|tool_call_start|>[f(a={})]<|tool_call_end|>", "[".repeat(100_000));
    assert_eq!(calls(CallFormat::PYTHON, &deep), json!([]));
}

#[test]
fn the_format_is_the_templates() {
    for (source, format) in [
        ("{% for tool in tools %}<tool_call>\n{\"name\": ", Some(CallFormat::TAGGED)),
        ("tools: <tool_call>\n<function=example>\n<parameter=a>", Some(CallFormat::ELEMENTS)),
        ("tools <|tool_list_start|>", Some(CallFormat::PYTHON)),
        ("tools: <function=example>{", None),
        ("{% if tools %}{\"name\": \"f\", \"parameters\": ", Some(CallFormat::BARE)),
        ("{{ '[TOOL_CALLS] [' }}", None),
        ("{% if tool_calls %}[TOOL_CALLS]", Some(CallFormat::LISTED)),
        ("tools <|tool_call_start|>", Some(CallFormat::PYTHON)),
        ("tools <|tool_call>call:", Some(CallFormat::PAIRS)),
        ("tools <tool_call>{{ name }}<arg_key>", Some(CallFormat::KEYS_AND_VALUES)),
        ("tools [TOOL_CALLS]{{ name }}[ARGS]", Some(CallFormat::NAMED)),
        ("tools <|tool_call|>[<|/tool_call|>", Some(CallFormat::ENCLOSED_LIST)),
        ("tools <|tool_call|>[", Some(CallFormat::MARKED_LIST)),
        ("{% for message in messages %}", None),
    ] {
        assert_eq!(CallFormat::of_template(source), format, "{source}");
    }
}

#[test]
fn the_page_lists_the_formats() {
    let page = qhx_paths::workspace().join("docs/structured-output.md");
    let page = std::fs::read_to_string(page).unwrap().replace("\\|", "|");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let listed = rows.filter_map(|(signs, _)| CallFormat::of_template(&format!("tool {signs}")));
    let listed: Vec<_> = listed.collect();
    assert_eq!(listed, CallFormat::ALL);
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
    for format in [CallFormat::TAGGED, CallFormat::ELEMENTS, CallFormat::LISTED, CallFormat::PYTHON]
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
    assert_eq!(template.call_format(), Some(CallFormat::TAGGED));
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
    let read = CallFormat::TAGGED.calls(&calls, &[]);
    assert_eq!((read.len(), &read[0].arguments), (2, &json!({"a": 1})));
}

/// The arguments of one call in pairs.
fn pairs(arguments: &str) -> Value {
    let answer = format!("<|tool_call>call:f{{{arguments}}}<tool_call|>");
    match CallFormat::PAIRS.calls(&answer, &[]).as_slice() {
        [call] => call.arguments.clone(),
        _ => Value::Null,
    }
}

#[test]
fn values_in_pairs_are_read() {
    for (arguments, expected) in [
        ("", json!({})),
        ("   ", json!({})),
        ("a:<|\"|>Paris<|\"|>", json!({"a": "Paris"})),
        ("a:<|\"|>Paris, France<|\"|>", json!({"a": "Paris, France"})),
        (
            "a:<|\"|>San Francisco<|\"|>,b:<|\"|>celsius<|\"|>",
            json!({"a": "San Francisco", "b": "celsius"}),
        ),
        ("n:42", json!({"n": 42})),
        ("n:3.25,m:-1e3", json!({"n": 3.25, "m": -1000.0})),
        ("left:108.,right:22.8", json!({"left": 108, "right": 22.8})),
        ("yes:true,no:false,none:null", json!({"yes": true, "no": false, "none": null})),
        ("a:{b:<|\"|>c<|\"|>}", json!({"a": {"b": "c"}})),
        ("a:{<|\"|>3<|\"|>:<|\"|>new text<|\"|>}", json!({"a": {"3": "new text"}})),
        ("a:{b:{<|\"|>3<|\"|>:<|\"|>t<|\"|>}}", json!({"a": {"b": {"3": "t"}}})),
        ("a:[<|\"|>x<|\"|>,<|\"|>y<|\"|>]", json!({"a": ["x", "y"]})),
        ("a:[42,true,3.5,[]]", json!({"a": [42, true, 3.5, []]})),
        (
            "a:[[<|\"|>a]b<|\"|>,<|\"|>c<|\"|>],<|\"|>tail<|\"|>]",
            json!({"a": [["a]b", "c"], "tail"]}),
        ),
        ("a:<|\"|>echo {hello, [world]}<|\"|>", json!({"a": "echo {hello, [world]}"})),
        ("a:<|\"|>say \"hi\"\nto</b>\\n<|\"|>", json!({"a": "say \"hi\"\nto</b>\\n"})),
        ("\"a\" : \"b\\n\", c : high", json!({"a": "b\n", "c": "high"})),
        ("key:", json!({"key": ""})),
        ("a:<|\"|>unterminated", Value::Null),
        ("a:[1,]trailing", Value::Null),
        (":[t:[]", Value::Null),
        ("a", Value::Null),
    ] {
        assert_eq!(pairs(arguments), expected, "{arguments}");
    }
    let deep = format!("a:{}", "[".repeat(100_000));
    assert_eq!(pairs(&deep), Value::Null);
}

#[test]
fn calls_in_pairs_are_read() {
    let read = |answer: &str| calls(CallFormat::PAIRS, answer);
    let call = |name: &str, city: &str| json!({"name": name, "arguments": {"city": city}});
    let written = |name: &str, city: &str| {
        format!("<|tool_call>call:{name}{{city:<|\"|>{city}<|\"|>}}<tool_call|>")
    };
    let (weather, time) = (written("weather", "London"), written("time", "London"));
    let both = json!([call("weather", "London"), call("time", "London")]);
    for answer in [
        format!("{weather}{time}"),
        format!("Let me check. {weather}\n{time}"),
        format!("<|channel>thought\nBoth?<channel|>{weather}{time}<|tool_response>"),
        format!("<|channel>thought\n{weather}<channel|>Well.{weather}{time}"),
        format!("{weather}{time}<turn|>").replace("<tool_call|>", ""),
        weather.replace("<|tool_call>", "<|tool_call>:") + &time,
        "<|channel>thought\nSo.<channel|>call:weather{city:<|\"|>London<|\"|>}".to_owned()
            + &written("time", "London"),
    ] {
        let expected =
            if answer.contains("So.") { json!([call("time", "London")]) } else { both.clone() };
        assert_eq!(read(&answer), expected, "{answer}");
    }
    for name in ["get-weather", "weather.get", "tools/weather:now"] {
        assert_eq!(read(&written(name, "Rome")), json!([call(name, "Rome")]), "{name}");
    }
    // Known tools are called without marks, too.
    for answer in [
        "<|channel>thought\nSo.\n<channel|>call:weather{city:<|\"|>Rome<|\"|>}",
        "some prose\ncall:weather{city:<|\"|>Rome<|\"|>}",
    ] {
        assert_eq!(read(answer), json!([call("weather", "Rome")]), "{answer}");
    }
    let whole = written("weather", "Rome");
    for end in (0..whole.len() - "<tool_call|>".len()).filter(|&at| whole.is_char_boundary(at)) {
        assert_eq!(read(&whole[..end]), json!([]), "{}", &whole[..end]);
    }
    for answer in [
        "Just text.",
        "<|tool_call>weather{city:1}<tool_call|>",
        "<|tool_call>call:bad name{a:1}<tool_call|>",
        "recall:weather{city:<|\"|>Rome<|\"|>}",
        "call:other{city:<|\"|>Rome<|\"|>}",
        "<|tool_call>this is none<tool_call|>",
    ] {
        assert_eq!(read(answer), json!([]), "{answer}");
    }
    let escaped = "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>";
    assert_eq!(calls(CallFormat::ESCAPED_PAIRS, escaped), json!([call("weather", "Rome")]));
}

#[test]
fn values_may_look_like_tags() {
    for (format, begin, end) in [
        (
            CallFormat::ELEMENTS,
            "<function=weather>\n<parameter=city>\n",
            "\n</parameter>\n</function>\n",
        ),
        (
            CallFormat::KEYS_AND_VALUES,
            "weather\n<arg_key>city</arg_key>\n<arg_value>",
            "</arg_value>\n",
        ),
    ] {
        for city in [
            "a</parameter>b</arg_value>c",
            "<b>\n</b>",
            "<function=weather>",
            "</tool_call>",
            "{\"a\": 1}",
            "12",
            "",
        ] {
            let answer = format!("Well.\n<tool_call>{begin}{city}{end}</tool_call>");
            assert_eq!(calls(format, &answer), json!([weather(json!({"city": city}))]), "{answer}");
            for at in (0..answer.len() - end.len() - "</tool_call>".len()).step_by(3) {
                assert_eq!(calls(format, &answer[..at]), json!([]), "{}", &answer[..at]);
            }
        }
        let answer =
            format!("<think>I call <tool_call> then.</think><tool_call>{begin}x{end}</tool_call>");
        assert_eq!(calls(format, &answer), json!([weather(json!({"city": "x"}))]));
        // Reasoning that was never closed.
        let answer = format!("<think>Hm.\n<tool_call>{begin}x{end}</tool_call>");
        assert_eq!(calls(format, &answer), json!([weather(json!({"city": "x"}))]));
    }
    let none = "<tool_call>weather</tool_call><tool_call>weather\n</tool_call>";
    assert_eq!(
        calls(CallFormat::KEYS_AND_VALUES, none),
        json!([weather(json!({})), weather(json!({}))])
    );
}

#[test]
fn lists_of_calls_are_read() {
    let call = json!([weather(json!({"days": 1}))]);
    let list = "[{\"name\": \"weather\", \"arguments\": {\"days\": 1}}]";
    for (format, answer) in [
        (CallFormat::ENCLOSED_LIST, format!("<|tool_call|>{list}<|/tool_call|>")),
        (CallFormat::MARKED_LIST, format!("<|tool_call|>{list}<|end_of_text|>")),
        (CallFormat::CAPITALS, format!("Sure.\n<TOOLCALL>{list}</TOOLCALL>")),
        (CallFormat::NAMED, "[TOOL_CALLS]weather[ARGS]{\"days\": 1}".to_owned()),
    ] {
        assert_eq!(calls(format, &answer), call, "{format:?}");
    }
}

#[test]
fn a_text_may_become_a_call_without_marks() {
    let tools = ["find", "find_all"].map(|name| Tool::new(name, Value::Null));
    for (text, expected) in [
        ("", None),
        (" {\n  \"na", None),
        ("{\"name\": \"fin", None),
        ("{ \"name\" : \"find_all\", ", Some(true)),
        ("{\"name\": \"Paris\"", Some(false)),
        ("The", Some(false)),
    ] {
        assert_eq!(CallFormat::TAGGED.begins_unmarked(text, &tools), expected, "{text:?}");
    }
    assert_eq!(CallFormat::TAGGED.begins_unmarked("{\"name\"", &[]), Some(false));
    for (text, expected) in [("cal", None), ("call:find{a", Some(true)), ("calling", Some(false))] {
        assert_eq!(CallFormat::PAIRS.begins_unmarked(text, &tools), expected, "{text:?}");
    }
}

/// A template that writes calls and their results within the model's turn, and knows no messages of tools.
#[test]
fn results_go_back_within_the_message_of_their_calls() {
    let source = "{% for m in messages %}<{{ m.role }}>{% for call in m.tool_calls or [] %}\
        <|tool_call>{{ call.function.name }}{% endfor %}{% for result in m.tool_responses or [] %}\
        ({{ result.name }}: {% if result.response is mapping %}{{ result.response.a }}{% else %}\
        '{{ result.response }}'{% endif %}){% endfor %}{{ m.content or '' }}{% endfor %}";
    let template = ChatTemplate::from_jinja(source, "", "").unwrap();
    assert_eq!(template.call_format(), Some(CallFormat::PAIRS));
    let render = |template: &ChatTemplate, messages: Value| {
        let mut options = RenderOptions::default();
        options.arguments.insert("messages".to_owned(), messages);
        template.render(&[Message::new("user", "Hi")], &options).unwrap()
    };
    let call =
        |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": {}}});
    let messages = json!([
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": null, "tool_calls": [call("1", "weather"), call("2", "time")]},
        {"role": "tool", "tool_call_id": "2", "content": "Noon."},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "{\"a\": 3}"}]},
        {"role": "assistant", "content": "", "tool_calls": [call("3", "time")]},
        {"role": "tool", "content": "One."},
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": "So?"},
    ]);
    let expected = "<user>Rain?<assistant><|tool_call>weather<|tool_call>time(time: 'Noon.')(weather: 3)\
        <assistant><|tool_call>time(time: 'One.')Sun.<user>So?";
    assert_eq!(render(&template, messages.clone()), expected);
    // A template that takes them gets them.
    let source =
        source.replace("<{{ m.role }}>", "<{{ m.role }}>{% if m.role == 'tool' %}!{% endif %}");
    let template = ChatTemplate::from_jinja(&source, "", "").unwrap();
    assert!(render(&template, messages).contains("<tool>!Noon.<tool>!"));
}
