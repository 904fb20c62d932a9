//! `/v1/messages` and `/v1/messages/count_tokens`.

use serde_json::{Value, json};

use crate::bundles::{Running, golden, language, options, shared, with_template};
use crate::client::{Response, with};

const ROUTE: &str = "/v1/messages";

fn body(text: &str, more: Value) -> Value {
    let messages = json!([{"role": "user", "content": text}]);
    let greedy = json!({"model": "language", "max_tokens": 60, "temperature": 0});
    with(with(greedy, json!({"messages": messages})), more)
}

/// The names of events, and their data.
fn events(response: &Response) -> Vec<(String, Value)> {
    let text = response.text();
    let events = text.split("\n\n").filter(|event| event.starts_with("event: "));
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data = data.strip_prefix("data: ").expect("data");
        let json: Value = serde_json::from_str(data).expect("the data is JSON");
        let name = name.strip_prefix("event: ").expect("a name").to_owned();
        assert_eq!(json["type"], name);
        (name, json)
    };
    events.map(event).collect()
}

#[test]
fn an_answer_is_a_message() {
    let (system, user, answer) = golden("llama3-tiny", "cook");
    for system in [json!(system), json!([{"type": "text", "text": system}])] {
        let json = shared().client.post(ROUTE, &body(&user, json!({"system": system})));
        let json = json.status(200).json();
        assert_eq!(json["content"], json!([{"type": "text", "text": answer}]));
        assert_eq!((&json["type"], &json["role"]), (&json!("message"), &json!("assistant")));
        assert_eq!(json["stop_reason"], "end_turn");
        let usage = &json["usage"];
        let read = usage["cache_read_input_tokens"].as_u64().unwrap();
        assert!(usage["input_tokens"].as_u64().unwrap() + read > 10, "{usage}");
    }
    let cut = shared().client.post(ROUTE, &body(&user, json!({"max_tokens": 2}))).json();
    assert_eq!(cut["stop_reason"], "max_tokens");
}

#[test]
fn the_stop_sequence_that_ended_an_answer_is_named() {
    let (_, user, _) = golden("llama3-tiny", "cook");
    let reason = |more: Value| {
        let json = shared().client.ask(ROUTE, &body(&user, more));
        (json["stop_reason"].clone(), json["stop_sequence"].clone())
    };
    let stopped = (json!("stop_sequence"), json!(" "));
    assert_eq!(reason(json!({"stop_sequences": [" "]})), stopped);
    assert_eq!(reason(json!({"stop_sequences": ["never", " ", "x y"]})), stopped);
    let ended = (json!("end_turn"), Value::Null);
    assert_eq!(reason(json!({"stop_sequences": ["never", "x y"]})), ended);
    // The end of a form is the answer's own.
    let format = json!({"type": "json_schema", "schema": {"enum": [7]}});
    for more in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
        let mut more = more;
        more["stop_sequences"] = json!(["never"]);
        assert_eq!(reason(more), ended);
    }
}

#[test]
fn a_message_goes_on_where_the_assistant_began_it() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let (begin, rest) = answer.split_at("By day the sky is blue".len());
    let begin = json!([{"type": "text", "text": begin}]);
    let messages =
        json!([{"role": "user", "content": user}, {"role": "assistant", "content": begin}]);
    let json = shared().client.ask(ROUTE, &body("", json!({"messages": messages})));
    assert_eq!(json["content"], json!([{"type": "text", "text": rest}]));
    let call = json!([{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]);
    let messages =
        json!([{"role": "user", "content": user}, {"role": "assistant", "content": call}]);
    let error =
        shared().client.post(ROUTE, &body("", json!({"messages": messages}))).status(400).error();
    assert!(error["message"].as_str().unwrap().contains("calls of tools"), "{error}");
}

#[test]
fn events_come_in_their_order() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let response = shared().client.post(ROUTE, &body(&user, json!({"stream": true}))).status(200);
    let events = events(&response);
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    let last = ["content_block_stop", "message_delta", "message_stop"];
    assert_eq!(names[names.len() - 3..], last);
    assert!(names[2..names.len() - 3].iter().all(|name| *name == "content_block_delta"));
    let text: String =
        events.iter().filter_map(|(_, event)| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, answer);
    assert_eq!(events[0].1["message"]["content"], json!([]));
    let delta = &events[events.len() - 2].1;
    assert_eq!(delta["delta"]["stop_reason"], "end_turn");
    assert!(delta["usage"]["output_tokens"].as_u64().unwrap() > 5);
}

#[test]
fn tools_are_called_and_their_results_come_back() {
    let template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}\
        {% for message in messages %}[{{ message.role }}]{{ message.content }}\
        {% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}";
    let bundle = with_template("messages-calling", template);
    let running = Running::start(options([("language", bundle.as_path())]));
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"], "additionalProperties": false});
    let tools = json!([
        {"name": "weather", "description": "The weather", "input_schema": schema},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ]);
    let more =
        json!({"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let json = running.client.ask(ROUTE, &body("Rain?", more.clone()));
    assert_eq!(json["stop_reason"], "tool_use", "{json}");
    let call = &json["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("weather")));
    assert_eq!(call["input"], json!({"city": "Bonn"}));
    let mut streamed = more.clone();
    streamed["stream"] = true.into();
    let events = events(&running.client.post(ROUTE, &body("Rain?", streamed)));
    let json: String =
        events.iter().filter_map(|(_, event)| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(json, "{\"city\":\"Bonn\"}");
    let block = events.iter().find(|(name, _)| name == "content_block_start").unwrap();
    assert_eq!(block.1["content_block"]["name"], "weather");
    let result = json!({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sun."}]});
    let messages = json!([
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
    ]);
    let count = |messages: &Value| {
        let body = json!({"model": "language", "messages": messages});
        let route = "/v1/messages/count_tokens";
        running.client.ask(route, &body)["input_tokens"].clone()
    };
    let text = "[user]Rain?[assistant]weather[tool]Sun.[user]Thanks.";
    let body = json!({"prompt": text, "add_special_tokens": false});
    assert_eq!(count(&messages), running.client.post("/tokenize", &body).json()["count"]);
}

#[test]
fn what_is_wrong_is_named() {
    for (more, param) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": [{"role": "tool", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"tools": [{"name": "a"}]}), "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "maybe"}}), "tool_choice.type"),
        (json!({"system": 1}), "system"),
        (json!({"mcp_servers": [{"url": "a"}]}), "mcp_servers"),
    ] {
        let response = shared().client.post(ROUTE, &body("Hello", more.clone())).status(400);
        assert_eq!(response.error()["param"], param, "{more}");
        // What the official client looks for.
        assert_eq!(response.json()["type"], "error");
    }
    let image =
        json!({"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}});
    let messages = json!([{"role": "user", "content": [image]}]);
    let error = shared().client.post(ROUTE, &body("", json!({"messages": messages})));
    assert_eq!(error.status(400).error()["code"], "unsupported_url");
}

#[test]
fn errors_have_the_types_of_the_interface() {
    let client = &shared().client;
    let kind = |response: crate::client::Response| response.error()["type"].clone();
    let message = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"model": "nothing", "messages": message, "max_tokens": 1});
    assert_eq!(kind(client.post("/v1/messages", &body).status(404)), "not_found_error");
    let openai = kind(client.post("/v1/chat/completions", &body).status(404));
    assert_eq!(openai, "invalid_request_error");
    let limit = std::time::Duration::from_millis(1);
    let slow = Running::start(options([("a", language())]).max_body(1 << 10).time_limit(limit));
    let body = json!({"messages": message, "max_tokens": 1});
    let late = slow.client.post("/v1/messages", &body).status(504);
    assert_eq!(late.json()["type"], "error");
    assert_eq!(kind(late), "timeout_error");
    let large = json!({"messages": " ".repeat(2 << 10)});
    assert_eq!(kind(slow.client.post("/v1/messages", &large).status(413)), "request_too_large");
}
