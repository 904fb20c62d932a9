//! `/v1/responses`.

use serde_json::{Value, json};

use crate::bundles::{Running, golden, options, shared, with_template};
use crate::client::with;

const ROUTE: &str = "/v1/responses";

fn body(input: Value, more: Value) -> Value {
    with(json!({"model": "language", "input": input, "temperature": 0}), more)
}

#[test]
fn an_answer_is_a_response() {
    let (system, user, answer) = golden("llama3-tiny", "cook");
    let message = json!({"role": "user", "content": [{"type": "input_text", "text": user}]});
    for input in [json!(user), json!([message])] {
        let more = json!({"instructions": system, "metadata": {"a": "b"}});
        let json = shared().client.ask(ROUTE, &body(input, more));
        assert_eq!((&json["object"], &json["status"]), (&json!("response"), &json!("completed")));
        let item = &json["output"][0];
        assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
        assert_eq!(item["content"][0]["type"], "output_text");
        assert_eq!(item["content"][0]["text"], answer);
        assert_eq!(json["metadata"], json!({"a": "b"}));
        let usage = &json["usage"];
        let details = &usage["input_tokens_details"];
        assert!(details["cached_tokens"].is_u64() && details["cache_write_tokens"].is_u64());
        let count = |name: &str| usage[name].as_u64().unwrap();
        assert_eq!(count("total_tokens"), count("input_tokens") + count("output_tokens"));
    }
    let cut =
        shared().client.post(ROUTE, &body(json!(user), json!({"max_output_tokens": 2}))).json();
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
}

#[test]
fn a_last_item_of_the_assistant_is_continued() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let (begin, rest) = answer.split_at("By day the sky is blue".len());
    let input = json!([{"role": "user", "content": user}, {"role": "assistant", "content": begin}]);
    let json = shared().client.ask(ROUTE, &body(input, json!({})));
    assert_eq!(json["output"][0]["content"][0]["text"], rest);
}

#[test]
fn a_stream_has_numbered_events_and_stable_ids() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let more = json!({"stream": true});
    let events = shared().client.post(ROUTE, &body(json!(user), more)).status(200).chunks();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at);
    }
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let first = ["created", "in_progress", "output_item.added", "content_part.added"];
    assert_eq!(kinds[..4], first.map(|kind| format!("response.{kind}")));
    let last = ["output_text.done", "content_part.done", "output_item.done", "completed"];
    assert_eq!(kinds[kinds.len() - 4..], last.map(|kind| format!("response.{kind}")));
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, answer);
    let whole = &events.last().unwrap()["response"];
    assert_eq!(whole["output"][0]["content"][0]["text"], answer);
    assert_eq!(events[0]["response"]["id"], whole["id"]);
    let item = &whole["output"][0]["id"];
    let ids = events.iter().filter_map(|event| event.get("item_id"));
    assert!(ids.clone().count() > 5 && ids.into_iter().all(|id| id == item));
    assert_eq!(events[2]["item"]["id"], *item);
}

#[test]
fn log_probabilities_stand_beside_the_text() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    for (more, top) in [
        (json!({"top_logprobs": 2}), 2),
        (json!({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}), 0),
    ] {
        let json = shared().client.ask(ROUTE, &body(json!(user), more.clone()));
        let part = json["output"][0]["content"][0].clone();
        let logprobs = part["logprobs"].as_array().unwrap();
        let text: String = logprobs.iter().map(|one| one["token"].as_str().unwrap()).collect();
        // Bytes of a character that is several tokens are none alone.
        assert!(text.starts_with(&answer[..40]), "{text}");
        assert!(logprobs.iter().all(|one| one["top_logprobs"].as_array().unwrap().len() == top));
        let streamed = body(json!(user), with(more, json!({"stream": true})));
        let events = shared().client.post(ROUTE, &streamed).status(200).chunks();
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let streamed: Vec<_> =
            deltas.flat_map(|event| event["logprobs"].as_array().unwrap()).collect();
        assert!(!streamed.is_empty() && streamed.iter().zip(logprobs).all(|(a, b)| *a == b));
    }
}

#[test]
fn a_text_is_of_its_format() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    let more = json!({"text": {"format": format}, "max_output_tokens": 20});
    let json = shared().client.ask(ROUTE, &body(json!("Hello"), more));
    let text = json["output"][0]["content"][0]["text"].as_str().unwrap();
    let answer: Value = serde_json::from_str(text).unwrap();
    assert!(answer["n"] == 1 || answer["n"] == 2, "{text}");
}

#[test]
fn tools_of_other_servers_are_left_out() {
    let plain = shared().client.ask(ROUTE, &body(json!("Hello"), json!({})));
    let foreign =
        ["web_search", "image_generation", "namespace", "code_interpreter", "local_shell"];
    let foreign = foreign.map(|kind| json!({"type": kind, "name": "x", "tools": []}));
    let input = json!([{"type": "web_search_call", "id": "ws_1", "status": "completed"},
                       {"role": "user", "content": "Hello"}]);
    let asked = shared().client.ask(ROUTE, &body(input, json!({"tools": foreign})));
    let text = |answer: &Value| answer["output"][0]["content"][0]["text"].clone();
    assert_eq!(text(&asked), text(&plain));
}

/// A custom tool, whose input is a text: here an empty one, as a bias has the model close it at once.
#[test]
fn custom_tools_are_called_with_a_text() {
    let template = "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}{% endfor %}\
        {# <tool_call> #}{% for message in messages %}[{{ message.role }}]{{ message.content }}\
        {% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.input }}\
        {% endfor %}{% endfor %}";
    let bundle = with_template("custom", template);
    let running = Running::start(options([("language", bundle.as_path())]));
    let client = &running.client;
    let tokens = |body: Value| client.ask("/tokenize", &body)["tokens"].clone();
    let quote = tokens(json!({"prompt": "\"", "add_special_tokens": false}));
    let bias = json!({quote[0].to_string(): 100});
    let tool = json!({"type": "custom", "name": "patch", "description": "Changes a file",
                      "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}});
    let more = json!({"tools": [tool], "tool_choice": "required", "parallel_tool_calls": false,
                      "logit_bias": bias, "max_output_tokens": 60});
    let answer = client.ask(ROUTE, &body(json!("Go"), more.clone()));
    let item = &answer["output"][0];
    assert_eq!((&item["type"], &item["name"]), (&json!("custom_tool_call"), &json!("patch")));
    assert_eq!(item["input"], "", "{answer}");
    let events =
        client.post(ROUTE, &body(json!("Go"), with(more.clone(), json!({"stream": true}))));
    let events = events.status(200).chunks();
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert!(kinds.contains(&"response.custom_tool_call_input.done"), "{kinds:?}");
    // In chats the fields stand in `custom`.
    let own = with(tool.clone(), json!({"type": null}));
    let chat = json!({
        "messages": [{"role": "user", "content": "Go"}], "temperature": 0, "logit_bias": bias,
        "tools": [{"type": "custom", "custom": own}], "tool_choice": "required",
        "parallel_tool_calls": false, "max_tokens": 60,
    });
    let answer = client.ask("/v1/chat/completions", &chat);
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["custom"], json!({"name": "patch", "input": ""}), "{answer}");
    // The model reads the form of the input, and the calls before.
    let call = json!({"id": "c", "type": "custom", "custom": {"name": "patch", "input": "xx"}});
    let messages = json!([
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
    ]);
    let read = tokens(json!({"messages": messages, "tools": [tool]}));
    let text = "patchChanges a file\n\nThe input has this lark form:\nstart: /x+/[assistant]patch:xx[tool]Done.";
    assert_eq!(read, tokens(json!({"prompt": text, "add_special_tokens": false})));
}

#[test]
fn what_is_wrong_is_named() {
    for (input, more, param) in [
        (json!(null), json!({}), "input"),
        (json!(1), json!({}), "input"),
        (json!([{"type": "smell"}]), json!({}), "input[0].type"),
        (json!([{"type": "function_call", "name": "a"}]), json!({}), "input[0].call_id"),
        (json!("a"), json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!("a"), json!({"conversation": "conv_1"}), "conversation"),
        (json!("a"), json!({"truncation": "middle"}), "truncation"),
        (json!("a"), json!({"max_tool_calls": -1}), "max_tool_calls"),
        (json!("a"), json!({"top_logprobs": 21}), "top_logprobs"),
        (json!("a"), json!({"tools": [{"type": "telepathy"}]}), "tools[0].type"),
        (json!("a"), json!({"tools": [{"type": "custom"}]}), "tools[0].name"),
        (
            json!([{"type": "custom_tool_call", "call_id": "c", "name": "n"}]),
            json!({}),
            "input[0].input",
        ),
        (json!("a"), json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
    ] {
        shared().client.post(ROUTE, &body(input, more)).refuses(400, "param", param);
    }
}
