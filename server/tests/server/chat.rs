//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::bundles::{
    Running, golden, language, options, runtime, shared, with_sampling, with_template,
};
use crate::client::{Response, with};

const ROUTE: &str = "/v1/chat/completions";

/// A greedy request of the language model, with more.
fn body(text: &str, more: Value) -> Value {
    let messages = json!([{"role": "user", "content": text}]);
    with(json!({"model": "language", "messages": messages, "temperature": 0}), more)
}

fn ask(text: &str, more: Value) -> Value {
    shared().client.ask(ROUTE, &body(text, more))
}

fn streamed(text: &str, mut more: Value) -> Response {
    more["stream"] = true.into();
    shared().client.post(ROUTE, &body(text, more)).status(200)
}

/// The content of the choice `index` in chunks.
fn joined(chunks: &[Value], index: usize, field: &str) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let of_index = choices.filter(|choice| choice["index"] == index);
    of_index.filter_map(|choice| choice["delta"][field].as_str()).collect()
}

#[test]
fn an_answer_is_that_of_the_reference() {
    for chat in ["sky", "cook", "bread"] {
        let (system, user, answer) = golden("llama3-tiny", chat);
        let mut messages = vec![json!({"role": "user", "content": user})];
        if let Some(system) = system {
            // Both names of it.
            messages.insert(0, json!({"role": "developer", "content": system}));
        }
        let body = json!({"model": "language", "messages": messages, "temperature": 0});
        let json = shared().client.ask(ROUTE, &body);
        assert_eq!(json["object"], "chat.completion");
        let choice = &json["choices"][0];
        assert_eq!(choice["message"]["content"], answer);
        assert_eq!(choice["message"]["role"], "assistant");
        assert_eq!(choice["finish_reason"], "stop");
        let usage = &json["usage"];
        let count = |name: &str| usage[name].as_u64().unwrap();
        assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));
    }
}

#[test]
fn what_a_request_leaves_out_is_as_the_bundle_has_it() {
    let path = with_sampling("sampled", json!({"temperature": 1.8, "top_k": 30}));
    let mut running = Running::start(options([("language", &*path)]));
    let content = |running: &Running, more: Value| {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body = with(json!({"messages": messages, "seed": 3, "max_tokens": 12}), more);
        let json = running.client.ask(ROUTE, &body);
        json["choices"][0]["message"]["content"].clone()
    };
    let shared = |more| content(shared(), more);
    let asked = shared(json!({"model": "language", "temperature": 1.8, "top_k": 30}));
    assert_eq!(content(&running, json!({})), asked);
    // Without its own, the temperature is 1.
    assert_ne!(shared(json!({"model": "language"})), asked);
    let greedy = shared(json!({"model": "language", "temperature": 0}));
    assert_eq!(content(&running, json!({"temperature": 0})), greedy);
    assert_eq!(content(&running, json!({"top_k": 1})), greedy);
    let response = running.client.post("/v1/responses", &json!({"input": "Hello", "seed": 3}));
    assert_eq!(response.status(200).json()["temperature"], json!(1.8_f32));
    let completion = |running: &Running, more: Value| {
        let body = with(json!({"prompt": "Hello", "seed": 3, "model": "language"}), more);
        let json = running.client.ask("/v1/completions", &body);
        json["choices"][0]["text"].clone()
    };
    let same = json!({"temperature": 1.8, "top_k": 30});
    assert_eq!(completion(&running, json!({})), completion(self::shared(), same));
    running.end();
}

#[test]
fn a_stream_has_the_same_text_in_chunks_of_one_form() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let response = streamed(&user, json!({"stream_options": {"include_usage": true}}));
    assert!(response.header("content-type").unwrap().starts_with("text/event-stream"));
    assert_eq!(response.events().last().map(String::as_str), Some("[DONE]"));
    let chunks = response.chunks();
    assert_eq!(joined(&chunks, 0, "content"), answer);
    let roles = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["role"] == "assistant");
    assert_eq!(roles.count(), 1);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    for field in ["id", "created", "model", "object"] {
        assert!(chunks.iter().all(|chunk| chunk[field] == chunks[0][field]), "{field}");
    }
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    let (usage, others) = chunks.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    assert!(others.iter().all(|chunk| chunk["usage"].is_null()));
    assert_eq!(others.last().unwrap()["choices"][0]["finish_reason"], "stop");
    let without = streamed(&user, json!({})).chunks();
    assert!(without.iter().all(|chunk| chunk.get("usage").is_none()), "nobody asked for it");
}

#[test]
fn stop_texts_are_cut_in_both_forms() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let before = answer.split_once(", because").unwrap().0;
    for stop in [json!(", because"), json!(["never", ", because"])] {
        let json = ask(&user, json!({"stop": stop}));
        assert_eq!(json["choices"][0]["message"]["content"], before);
        assert_eq!(json["choices"][0]["finish_reason"], "stop");
        let chunks = streamed(&user, json!({"stop": stop})).chunks();
        assert_eq!(joined(&chunks, 0, "content"), before);
    }
}

#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let (begin, rest) = answer.split_at("By day the sky is blue".len());
    let messages =
        json!([{"role": "user", "content": user}, {"role": "assistant", "content": begin}]);
    let more = json!({"messages": messages, "continue_final_message": true});
    let json = ask("", more.clone());
    assert_eq!(json["choices"][0]["message"]["content"], rest);
    let count = shared().client.post("/tokenize", &body("", more.clone())).json()["count"].clone();
    assert_eq!(json["usage"]["prompt_tokens"], count, "nothing stands behind the message");
    let chunks = streamed("", more).chunks();
    assert_eq!(joined(&chunks, 0, "content"), rest);
    let client = &shared().client;
    for (more, param) in [
        (json!({"messages": messages, "add_generation_prompt": true}), "add_generation_prompt"),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"messages": messages, "response_format": {"type": "json_object"}}), "messages"),
    ] {
        assert_eq!(client.post(ROUTE, &body("a", more)).status(400).error()["param"], param);
    }
}

/// The same for an app without a server.
#[test]
fn the_librarys_chat_goes_on_with_an_answer_that_was_cut() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let model = runtime().load(&qhx::Bundle::open(language()).unwrap()).unwrap();
    let mut chat = qhx::Chat::new(model).unwrap().with_request(qhx::Request::chat([]).max_new(6));
    let cut = chat.send(user.as_str()).unwrap().finish().unwrap();
    assert!(answer.starts_with(&cut.text) && cut.text.len() < answer.len(), "{}", cut.text);
    let mut chat = chat.with_request(qhx::Request::chat([]).max_new(40));
    let rest = chat.resume(qhx::CancelToken::new()).unwrap().finish().unwrap();
    assert_eq!([cut.text, rest.text].concat(), answer);
    assert_eq!(chat.messages()[1..], [qhx::Message::assistant(answer.as_str())]);
    // An answer that somebody else began.
    chat.begin(None).unwrap();
    let nothing = chat.resume(qhx::CancelToken::new()).map(|_| ()).unwrap_err();
    assert!(nothing.message().contains("nothing to go on with"), "{nothing}");
    chat.push(qhx::Message::user(user));
    chat.push(qhx::Message::assistant("By day the sky is blue"));
    chat.resume(qhx::CancelToken::new()).unwrap().finish().unwrap();
    assert_eq!(chat.messages()[1..], [qhx::Message::assistant(answer)]);
}

#[test]
fn a_bias_decides_which_tokens_are_chosen() {
    let (_, user, _) = golden("llama3-tiny", "sky");
    let encode = |text: &str| {
        let body = json!({"model": "language", "prompt": text, "add_special_tokens": false});
        let tokens = shared().client.post("/tokenize", &body).json()["tokens"].clone();
        tokens.as_array().unwrap()[0].to_string()
    };
    let (stars, day) = (encode(" stars"), encode("By"));
    let ask = |bias: Value| ask(&user, json!({"max_tokens": 3, "logit_bias": bias}));
    let text = |json: Value| json["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let thrice = text(ask(json!({stars: 100})));
    let words: Vec<_> = thrice.split_whitespace().collect();
    assert!(words.len() == 3 && words.iter().all(|word| "stars".starts_with(word)), "{thrice}");
    assert!(!text(ask(json!({day: -100}))).starts_with("By"));
    for (bias, param) in [
        (json!({"By": 1}), json!("logit_bias")),
        (json!({"1": 101}), json!("logit_bias.1")),
        (json!({"4294967295": 1}), Value::Null),
    ] {
        let error = shared().client.post(ROUTE, &body("a", json!({"logit_bias": bias})));
        let error = error.refuses(400, "param", param);
        assert!(error["message"].as_str().unwrap().contains("logit_bias"), "{error}");
    }
}

#[test]
fn an_answer_that_is_cut_says_so() {
    let (_, user, _) = golden("llama3-tiny", "sky");
    for field in ["max_tokens", "max_completion_tokens"] {
        let json = ask(&user, json!({field: 3}));
        assert_eq!(json["choices"][0]["finish_reason"], "length");
        assert_eq!(json["usage"]["completion_tokens"], 3);
    }
}

#[test]
fn a_seed_makes_choices_repeatable() {
    let more = json!({"seed": 7, "n": 3, "temperature": 1.5, "max_tokens": 12});
    let texts = |json: &Value| {
        let choices = json["choices"].as_array().unwrap().iter();
        choices.map(|choice| choice["message"]["content"].clone()).collect::<Vec<_>>()
    };
    let first = ask("Hello", more.clone());
    assert_eq!(texts(&first), texts(&ask("Hello", more.clone())));
    assert_eq!(texts(&first).len(), 3);
    assert_ne!(texts(&first)[0], texts(&first)[1], "each choice is drawn by itself");
    let indices: Vec<_> =
        first["choices"].as_array().unwrap().iter().map(|c| &c["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let chunks = streamed("Hello", more).chunks();
    let streamed: Vec<_> = (0..3).map(|at| joined(&chunks, at, "content")).collect();
    assert_eq!(texts(&first), streamed);
    assert_eq!(first["usage"]["completion_tokens"], 36);
}

#[test]
fn penalties_and_filters_reach_the_sampler() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let text = |more| ask(&user, more)["choices"][0]["message"]["content"].clone();
    let drawn = |more| text(with(json!({"seed": 1, "temperature": 2, "max_tokens": 60}), more));
    let plain = drawn(json!({}));
    assert_eq!(plain, drawn(json!({})));
    for penalty in ["frequency_penalty", "presence_penalty"] {
        assert_ne!(drawn(json!({penalty: 2})), plain, "{penalty}");
    }
    assert_eq!(text(json!({"temperature": 2, "top_k": 1})), answer);
    assert_eq!(text(json!({"temperature": 2, "top_p": 0})), answer);
}

#[test]
fn logprobs_have_each_token_and_the_likeliest() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let more = json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 6});
    let json = ask(&user, more.clone());
    let tokens = json["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 6);
    let bytes = tokens.iter().flat_map(|token| token["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert!(answer.as_bytes().starts_with(&bytes), "{tokens:?}");
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        // Greedy: the token is the likeliest.
        assert_eq!(top[0]["logprob"], token["logprob"]);
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let chunks = streamed(&user, more).chunks();
    let choices =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
    let streamed: Vec<_> = choices.flatten().collect();
    assert_eq!(streamed.len(), tokens.len());
    for (streamed, token) in streamed.into_iter().zip(tokens) {
        assert_eq!(streamed["bytes"], token["bytes"]);
        assert_eq!(streamed["top_logprobs"].as_array().unwrap().len(), 2);
        // Rounding depends on how much of the prompt was there already.
        let off = streamed["logprob"].as_f64().unwrap() - token["logprob"].as_f64().unwrap();
        assert!(off.abs() < 1e-4, "{streamed} {token}");
    }
    assert!(ask(&user, json!({}))["choices"][0]["logprobs"].is_null());
}

#[test]
fn an_answer_is_json_of_the_schema() {
    let schema = json!({
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "black"]}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["colour", "n"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "sky", "schema": schema, "strict": true}});
    let more = json!({"response_format": format, "max_tokens": 40});
    let text = ask("What colour is the sky?", more.clone());
    let content = text["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let answer: Value = serde_json::from_str(&content).unwrap();
    assert!(["blue", "black"].contains(&answer["colour"].as_str().unwrap()), "{answer}");
    assert!(answer["n"].is_u64());
    let chunks = streamed("What colour is the sky?", more).chunks();
    assert_eq!(joined(&chunks, 0, "content"), content);
    let any = ask("Hello", json!({"response_format": {"type": "json_object"}, "max_tokens": 3}));
    assert!(any["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'));
    let wrong = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}});
    let param = "response_format.json_schema.schema";
    shared().client.post(ROUTE, &body("Hello", wrong)).refuses(400, "param", param);
}

/// A template that writes calls between tags.
const TAGGED: &str = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}\
    {% for message in messages %}[{{ message.role }}]{{ message.content }}\
    {% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}\
    {% endfor %}";

fn tools() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"], "additionalProperties": false});
    json!([{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": city}}])
}

fn calling() -> &'static Running {
    static CALLING: std::sync::OnceLock<Running> = std::sync::OnceLock::new();
    CALLING.get_or_init(|| {
        let bundle = with_template("calling", TAGGED);
        Running::start(options([("language", bundle.as_path())]))
    })
}

#[test]
fn tools_are_called_where_they_must_be() {
    let client = &calling().client;
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})]
    {
        let mut more = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 60});
        // The tiny model would go on to call.
        more["parallel_tool_calls"] = false.into();
        let json = client.ask(ROUTE, &body("Rain in Bonn?", more.clone()));
        let choice = &json["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{json}");
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(
            (&call["type"], &call["function"]["name"]),
            (&json!("function"), &json!("weather"))
        );
        assert_eq!(call["function"]["arguments"], "{\"city\":\"Bonn\"}");
        assert!(choice["message"]["content"].is_null());
        let mut more = more;
        more["stream"] = true.into();
        let chunks = client.post(ROUTE, &body("Rain in Bonn?", more)).status(200).chunks();
        let calls: Vec<_> = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .collect();
        assert_eq!(calls[0]["index"], 0);
        assert_eq!(calls[0]["function"]["arguments"], "{\"city\":\"Bonn\"}");
        assert_eq!(joined(&chunks, 0, "content"), "");
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn calls_that_were_cut_are_reported_as_cut() {
    let client = &calling().client;
    let call =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}\n</tool_call>";
    let count = json!({"prompt": call, "add_special_tokens": false});
    let count = client.post("/tokenize", &count).json()["count"].clone();
    for (several, finish) in [(true, "length"), (false, "tool_calls")] {
        let more = json!({
            "tools": tools(),
            "tool_choice": "required",
            "parallel_tool_calls": several,
            // One call ends by itself.
            "max_tokens": if several { count.clone() } else { json!(150) },
        });
        let json = client.ask(ROUTE, &body("Rain in Bonn?", more));
        assert!(json["usage"]["completion_tokens"].as_u64() <= Some(count.as_u64().unwrap() + 1));
        let choice = &json["choices"][0];
        assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{json}");
        assert_eq!(choice["finish_reason"], finish, "{json}");
    }
    // A part of one is no text.
    let more = json!({"tools": tools(), "tool_choice": "required", "max_tokens": 9});
    let choice = client.ask(ROUTE, &body("Rain in Bonn?", more))["choices"][0].clone();
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!(""), &json!("length"))
    );
}

#[test]
fn tools_may_be_left_alone_and_results_come_back() {
    let client = &calling().client;
    for choice in ["auto", "none"] {
        let more = json!({"tools": tools(), "tool_choice": choice, "max_tokens": 5});
        let json = client.ask(ROUTE, &body("Hello", more));
        assert!(!json["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{json}");
    }
    // The template sees the call and its result.
    let call = json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Bonn\"}"}});
    let messages = json!([
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
    ]);
    let tokens = client.ask("/tokenize", &json!({"messages": messages}));
    let text = "[user]Rain?[assistant]weather(Bonn)[tool]Sun.";
    let body = json!({"prompt": text, "add_special_tokens": false});
    assert_eq!(tokens["tokens"], client.post("/tokenize", &body).json()["tokens"]);
    client.post(ROUTE, &body_with_tools("nothing")).refuses(400, "param", "tool_choice");
}

/// Tools and a format at once: a call, or an answer of the format.
#[test]
fn an_answer_with_tools_and_a_format_is_of_one_of_them() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let client = &calling().client;
    let brace = json!({"prompt": "{\"", "add_special_tokens": false});
    let brace = client.post("/tokenize", &brace).json()["tokens"][0].to_string();
    for (bias, calls) in [(100, false), (-100, true)] {
        let more = json!({"tools": tools(), "response_format": format, "max_tokens": 60,
                          "parallel_tool_calls": false, "logit_bias": {(brace.clone()): bias}});
        let answer = client.ask(ROUTE, &body("Rain in Bonn?", more.clone()));
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["tool_calls"].is_array(), calls, "{answer}");
        if !calls {
            let content = message["content"].as_str().unwrap();
            let content: Value = serde_json::from_str(content).unwrap();
            assert!(content["n"] == 1 || content["n"] == 2, "{answer}");
        }
        let must = with(more, json!({"tool_choice": "required"}));
        let answer = client.ask(ROUTE, &body("Rain in Bonn?", must));
        assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "weather");
    }
}

/// System messages move to the place where the template takes them.
#[test]
fn messages_of_the_system_may_stand_anywhere() {
    let first = "{% for message in messages %}{% if message.role == 'system' and not loop.first %}\
        {{ raise_exception('first') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}";
    let never = "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('none') }}\
        {% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}";
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "And?"},
    ]);
    for (name, template, text) in [
        ("first", first, "[system]Be brief.\n\nBe kind.[user]Hello[assistant]Hi.[user]And?"),
        ("never", never, "[user]Be brief.\n\nBe kind.\n\nHello[assistant]Hi.[user]And?"),
    ] {
        let bundle = with_template(name, template);
        let running = Running::start(options([("language", bundle.as_path())]));
        let client = &running.client;
        let tokens = |body: Value| client.ask("/tokenize", &body)["tokens"].clone();
        let expected = tokens(json!({"prompt": text, "add_special_tokens": false}));
        assert_eq!(tokens(json!({"messages": messages})), expected, "{name}");
        let chat = json!({"messages": messages, "max_tokens": 3});
        let usage = &client.ask(ROUTE, &chat)["usage"];
        assert_eq!(usage["prompt_tokens"], expected.as_array().unwrap().len(), "{name}");
    }
}

fn body_with_tools(name: &str) -> Value {
    let choice = json!({"type": "function", "function": {"name": name}});
    body("Hello", json!({"tools": tools(), "tool_choice": choice}))
}

#[test]
fn reasoning_stands_apart_from_the_answer() {
    // The template opens it, and the grammar of nothing closes it: a model that writes `</think>` is forced to.
    let opened = with_template(
        "thinking",
        "{% if messages[0].content == '?' %}{{ raise_exception('no probes') }}{% endif %}\
         {% for message in messages %}{{ message.content }}{% endfor %}{% if enable_thinking is not defined or \
         enable_thinking %}<think>\n{% endif %}",
    );
    let running = Running::start(options([("language", opened.as_path())]));
    let ask =
        |more| running.client.post(ROUTE, &body("The capital of France is", more)).status(200);
    let json = ask(json!({"max_tokens": 4})).json();
    let message = &json["choices"][0]["message"];
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{json}");
    assert_eq!(message["content"], "");
    assert_eq!(json["usage"]["completion_tokens_details"]["reasoning_tokens"], 4);
    let chunks = ask(json!({"max_tokens": 4, "stream": true})).chunks();
    assert_eq!(
        joined(&chunks, 0, "reasoning_content"),
        message["reasoning_content"].as_str().unwrap()
    );
    // Stop texts act behind it.
    let stopped = ask(json!({"max_tokens": 4, "stop": ["a", "e", "i", "o", " "]})).json();
    assert_eq!(stopped["choices"], json["choices"]);
    for off in [
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"reasoning_effort": "none"}),
        json!({"response_format": {"type": "json_object"}}),
    ] {
        let mut more = off;
        more["max_tokens"] = 4.into();
        let json = ask(more).json();
        let message = &json["choices"][0]["message"];
        assert!(message.get("reasoning_content").is_none(), "{json}");
        assert!(!message["content"].as_str().unwrap().is_empty(), "{json}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let client = &shared().client;
    for (more, param) in [
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"stop": [1]}), "stop"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"functions": [{"name": "a"}]}), "functions"),
        (json!({"modalities": ["audio"]}), "modalities"),
        (json!({"guided_json": {"type": "object"}}), "guided_json"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids"),
        (json!({"messages": "hello"}), "messages"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "pirate", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": 1}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
        (json!({"model": "encoder"}), "model"),
        (json!({"model": null}), "model"),
    ] {
        let wrong = with(body("Hello", json!({})), more.clone());
        let error = client.post(ROUTE, &wrong);
        let error =
            if param == "model" && more["model"].is_null() { error } else { error.status(400) };
        if error.status == 400 {
            assert_eq!(error.error()["param"], param, "{more}");
            assert_eq!(error.error()["type"], "invalid_request_error");
        }
    }
    let unknown = json!({"unheard_of": {"a": [1]}, "user": "me", "store": true, "max_tokens": 1, "functions": [], "min_tokens": 0});
    ask("Hello", unknown);
}

#[test]
fn a_prompt_that_is_too_long_is_refused() {
    let long = "The old lighthouse stood on the north side. ".repeat(40);
    let longer = "x".repeat(4 << 20);
    for (text, stream) in [(&long, false), (&long, true), (&longer, false)] {
        let body = body(text, json!({"stream": stream}));
        shared().client.post(ROUTE, &body).refuses(400, "code", "context_length_exceeded");
    }
}

#[test]
fn nothing_is_fetched_or_read_for_a_client() {
    for url in ["file:///etc/passwd", "http://localhost/a.png", "/etc/passwd", "../a.png", ""] {
        let image = json!({"type": "image_url", "image_url": {"url": url}});
        let messages = json!([{"role": "user", "content": [image]}]);
        let body = body("", json!({"messages": messages}));
        let error = shared().client.post(ROUTE, &body).refuses(400, "code", "unsupported_url");
        assert_eq!(error["param"], "messages[0].content[0].image_url");
    }
}
