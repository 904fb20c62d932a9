//! The queue, turns, cancelling, the end.

use std::io::Read as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::bundles::{Running, language, options, recurrent, shared};
use crate::client::{events, head, with};

/// Goes on for as long as the context has room.
fn long(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body =
        json!({"messages": messages, "temperature": 1.5, "seed": 3, "n": 16, "stream": true});
    with(body, more)
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_back() {
    let running = Running::start(options([("a", language())]).parallel(1).queue(1));
    let first = running.client.post_open("/v1/chat/completions", &long(json!({})));
    // Until the worker has it, it waits, too.
    let busy = || running.client.get("/metrics").text().contains("qhx_requests_running 1\n");
    while !busy() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let second = running.client.post_open("/v1/chat/completions", &long(json!({})));
    running.client.until("qhx_requests_waiting 1");
    let refused = running.client.post("/v1/chat/completions", &long(json!({}))).status(429);
    assert_eq!(refused.error()["code"], "queue_full");
    assert_eq!(refused.header("retry-after"), Some("2"));
    // Models, health and token counts answer meanwhile.
    running.client.get("/health").status(200);
    running.client.get("/v1/models/a").status(200);
    running.client.post("/tokenize", &json!({"prompt": "Hello"})).status(200);
    assert!(busy(), "the first one is still under way");
    drop((first, second));
    // Both have left, so that there is room again.
    let short = long(json!({"n": 1, "max_tokens": 1, "stream": false}));
    while running.client.get("/metrics").text().contains("qhx_requests_waiting 1\n") {
        std::thread::sleep(Duration::from_millis(2));
    }
    running.client.post("/v1/chat/completions", &short).status(200);
}

#[test]
fn a_client_that_leaves_frees_the_device() {
    let running = Running::start(options([("a", language())]).parallel(1));
    let mut stream = running.client.post_open("/v1/chat/completions", &long(json!({})));
    let (status, _) = head(&mut stream).unwrap();
    assert_eq!(status, 200);
    let mut some = [0; 64];
    stream.read_exact(&mut some).unwrap();
    drop(stream);
    let line = running.line_with("POST /v1/chat/completions");
    let short = long(json!({"n": 1, "max_tokens": 1, "stream": false}));
    running.client.post("/v1/chat/completions", &short).status(200);
    // The first one was cut short: 16 answers have more.
    assert!(!line.contains("+3200"), "{line}");
    assert!(running.client.get("/metrics").text().contains("qhx_requests_running 0\n"));
}

#[test]
fn requests_take_turns_and_each_gets_its_own_answer() {
    let client = &shared().client;
    let ask = |model: &str, text: &str| {
        let messages = json!([{"role": "user", "content": text}]);
        let body = json!({"model": model, "messages": messages, "temperature": 0});
        client.ask("/v1/chat/completions", &body)["choices"][0]["message"]["content"].clone()
    };
    let questions = [
        ("language", "What colour is the sky?"),
        ("language", "Which bread is good with soup?"),
        ("recurrent", "What colour is the sky?"),
        ("recurrent", "Which bread is good with soup?"),
    ];
    let alone = questions.map(|(model, text)| ask(model, text));
    std::thread::scope(|scope| {
        let asking = |at: usize| {
            let (model, text) = questions[at % 4];
            scope.spawn(move || ask(model, text))
        };
        let answers: Vec<_> = (0..16).map(asking).collect();
        for (at, answer) in answers.into_iter().enumerate() {
            assert_eq!(answer.join().unwrap(), alone[at % 4], "{:?}", questions[at % 4]);
        }
    });
}

#[test]
fn a_conversation_goes_on_from_what_is_there() {
    let running = Running::start(options([("a", recurrent())]));
    let mut messages = vec![json!({"role": "user", "content": "What colour is the sky?"})];
    let ask = |messages: &Vec<Value>| {
        let body = json!({"messages": messages, "temperature": 0});
        running.client.ask("/v1/chat/completions", &body)
    };
    let first = ask(&messages);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    // Somebody else asks between.
    ask(&vec![json!({"role": "user", "content": "Which bread is good with soup?"})]);
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "And at night?"}));
    let second = ask(&messages);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0, "{second}");
    let content = &second["choices"][0]["message"]["content"];
    assert_eq!(content, "At night it is black, with stars ✨ and sometimes a pale moon.");
}

#[test]
fn a_stream_in_which_nothing_happens_has_comments() {
    let running = Running::start(
        options([("a", language())]).parallel(1).heartbeat(Duration::from_millis(1)),
    );
    let _first = running.client.post_open("/v1/chat/completions", &long(json!({"n": 4})));
    running.client.until("qhx_requests_running 1");
    // It waits for the first one.
    let stream = running.client.post("/v1/chat/completions", &long(json!({"n": 1})));
    let text = stream.status(200).text();
    assert!(text.contains(": ping\n\n"), "{text}");
    assert_eq!(events(&text).last().map(String::as_str), Some("[DONE]"));
}

#[test]
fn a_request_has_limited_time() {
    let limit = Duration::from_millis(1);
    let running = Running::start(options([("a", language())]).time_limit(limit));
    let body = long(json!({"stream": false}));
    running.client.post("/v1/chat/completions", &body).refuses(504, "code", "timeout");
}

#[test]
fn a_server_that_stops_finishes_what_is_under_way() {
    let mut running = Running::start(options([("a", language())]));
    let body = long(json!({"n": 4}));
    let mut stream = running.client.post_open("/v1/chat/completions", &body);
    let (status, headers) = head(&mut stream).unwrap();
    assert_eq!((status, headers.is_empty()), (200, false));
    running.end();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
    assert!(std::net::TcpStream::connect(running.client.address).is_err(), "nobody listens");
}

#[test]
fn a_client_that_does_not_read_is_ended_in_time() {
    let limit = Duration::from_secs(4);
    let options = options([("a", language())]).parallel(1).time_limit(limit);
    let running = Running::start(options);
    // More than the sockets hold, and it would take minutes.
    let prompts = vec!["The capital of France is"; 1000];
    let body = json!({"prompt": prompts, "n": 16, "logprobs": 20, "max_tokens": 100, "stream": true, "seed": 1});
    let stalled = running.client.post_unread("/v1/completions", &body);
    running.client.until("qhx_requests_running 1");
    let short = long(json!({"n": 1, "max_tokens": 1, "stream": false}));
    let ask = || running.client.post("/v1/chat/completions", &short).status;
    let refused = (0..10).take_while(|_| ask() != 200).count();
    assert!(refused <= 2, "the worker came free after {refused} requests that waited for its end");
    drop(stalled);
}

#[test]
fn a_client_that_fills_the_queue_keeps_no_other_out() {
    let keys = ["one", "two"].map(str::to_owned);
    let running = Running::start(options([("a", language())]).parallel(1).queue(2).api_keys(keys));
    let [one, two] = ["one", "two"].map(|key| running.client.clone().with("x-api-key", key));
    let waiting = |count: usize| {
        let line = format!("qhx_requests_waiting {count}\n");
        while !two.get("/metrics").text().contains(&line) {
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let path = "/v1/chat/completions";
    let first = one.post_open(path, &long(json!({})));
    two.until("qhx_requests_running 1");
    let second = one.post_open(path, &long(json!({})));
    waiting(1);
    let mut third = one.post_open(path, &long(json!({})));
    waiting(2);
    one.post(path, &long(json!({}))).status(429);
    let short = long(json!({"n": 1, "max_tokens": 1, "stream": false}));
    let other = two.post_open(path, &short);
    // The one that came last goes.
    assert_eq!(crate::client::read(&mut third).unwrap().status(429).error()["code"], "queue_full");
    drop((first, second));
    let mut other = other;
    crate::client::read(&mut other).unwrap().status(200);
}

#[test]
fn sessions_that_nobody_uses_are_closed_but_one() {
    let bytes = |running: &Running| {
        let metrics = running.client.get("/metrics").text();
        let line = metrics.lines().find_map(|line| line.strip_prefix("qhx_models_loaded_bytes "));
        line.unwrap().parse::<u64>().unwrap()
    };
    // Conversations that have nothing in common have a session each.
    let two = |running: &Running| {
        for text in ["A loaf of bread", "Rain in the night"] {
            let messages = json!([{"role": "user", "content": text}]);
            let body = json!({"messages": messages, "max_tokens": 1});
            running.client.post("/v1/chat/completions", &body).status(200);
        }
    };
    let running = Running::start(options([("a", language())]));
    let one = bytes(&running);
    two(&running);
    assert!(bytes(&running) > one, "sessions count");
    let idle = Duration::from_millis(200);
    let running = Running::start(options([("a", language())]).session_idle(idle));
    two(&running);
    while bytes(&running) > one {
        std::thread::sleep(Duration::from_millis(20));
    }
}
