//! Ollama's interface.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bundles::{Running, encoder, golden, language, options, shared};
use crate::client::{Response, with};

fn lines(response: &Response) -> Vec<Value> {
    assert_eq!(response.header("content-type"), Some("application/x-ndjson"));
    response.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn sky(more: Value) -> (Value, String) {
    let (_, question, text) = golden("llama3-tiny", "sky");
    let body = json!({
        "model": "language:latest",
        "messages": [{"role": "user", "content": question}],
        "options": {"temperature": 0},
    });
    (with(body, more), text)
}

#[test]
fn chats_have_the_answers_of_the_reference() {
    let client = &shared().client;
    let (body, text) = sky(json!({"stream": false}));
    let whole = client.ask("/api/chat", &body);
    assert_eq!(whole["message"], json!({"role": "assistant", "content": text}));
    assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!("stop")));
    let lines = lines(&client.post("/api/chat", &sky(json!({})).0).status(200));
    let (last, rest) = lines.split_last().unwrap();
    let said = |line: &Value| line["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(rest.iter().map(said).collect::<String>(), text);
    assert!(rest.len() > 2 && rest.iter().all(|line| line["done"] == false), "{rest:?}");
    for name in ["prompt_eval_count", "eval_count"] {
        assert_eq!(last[name], whole[name], "{name}");
        assert!(last[name].as_u64().unwrap() > 3, "{last}");
    }
    for name in ["total_duration", "prompt_eval_duration", "eval_duration"] {
        assert!(last[name].as_u64().unwrap() > 0, "{name}: {last}");
    }
    let cut = sky(json!({"stream": false, "options": {"temperature": 0, "num_predict": 3}})).0;
    let cut = client.ask("/api/chat", &cut);
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(3)));
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                        "additionalProperties": false});
    let formed = client.ask("/api/chat", &sky(json!({"stream": false, "format": schema})).0);
    let formed = formed["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(formed).unwrap()["a"].is_boolean(), "{formed}");
}

#[test]
fn texts_are_answered_or_continued() {
    let client = &shared().client;
    let (_, question, text) = golden("llama3-tiny", "sky");
    let body = json!({"model": "language", "prompt": question, "options": {"temperature": 0}});
    let answered = client.ask("/api/generate", &with(body.clone(), json!({"stream": false})));
    assert_eq!(answered["response"], text);
    let streamed = lines(&client.post("/api/generate", &body).status(200));
    let said = |line: &Value| line["response"].as_str().unwrap().to_owned();
    assert_eq!(streamed.iter().map(said).collect::<String>(), text);
    let prompt = "The capital of France is";
    let raw = json!({"model": "language", "prompt": prompt, "raw": true, "stream": false,
                     "options": {"temperature": 0, "num_predict": 8}});
    let raw = client.ask("/api/generate", &raw);
    let completed =
        json!({"model": "language", "prompt": prompt, "temperature": 0, "max_tokens": 8});
    let completed = client.ask("/v1/completions", &completed);
    assert_eq!(raw["response"], completed["choices"][0]["text"]);
    let loaded = client.ask("/api/generate", &json!({"model": "language"}));
    assert_eq!((&loaded["done_reason"], &loaded["response"]), (&json!("load"), &json!("")));
}

#[test]
fn vectors_are_those_of_the_other_route() {
    let client = &shared().client;
    let texts = ["def fib(n): return n", "a"];
    let found = client.ask("/api/embed", &json!({"model": "encoder", "input": texts}));
    let other = client.ask("/v1/embeddings", &json!({"model": "encoder", "input": texts}));
    for (index, vector) in found["embeddings"].as_array().unwrap().iter().enumerate() {
        assert_eq!(*vector, other["data"][index]["embedding"]);
    }
    let one = json!({"model": "encoder", "prompt": "a"});
    let one = client.ask("/api/embeddings", &one);
    assert_eq!(one["embedding"].as_array().unwrap().len(), 92);
}

#[test]
fn models_are_listed_as_ollama_does() {
    let client = &shared().client;
    assert!(client.get("/api/version").json()["version"].is_string());
    let tags = client.get("/api/tags").status(200).json();
    let names = tags["models"].as_array().unwrap().iter().map(|model| &model["name"]);
    assert_eq!(names.collect::<Vec<_>>(), ["language", "encoder", "recurrent"]);
    let first = &tags["models"][0];
    assert!(
        first["size"].as_u64().unwrap() > 1000 && first["digest"].as_str().unwrap().len() == 64
    );
    assert_eq!(first["details"]["family"], "llama");
    let shown = client.ask("/api/show", &json!({"model": "language"}));
    assert_eq!(shown["model_info"]["llama.context_length"], 200);
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    assert_eq!(
        client.ask("/api/show", &json!({"name": "encoder:latest"}))["capabilities"],
        json!(["embedding"])
    );
    let pulled = client.post("/api/pull", &json!({"model": "language"})).status(200);
    assert_eq!(lines(&pulled), [json!({"status": "success"})]);
}

#[test]
fn what_is_wrong_is_told_as_ollama_does() {
    let client = &shared().client;
    let tell = |path: &str, body: Value, status: u16, words: &str| {
        let error = client.post(path, &body).status(status).json();
        let text = error["error"].as_str().unwrap_or_else(|| panic!("{error}"));
        assert!(text.contains(words), "{text}");
    };
    let missing = json!({"model": "nothing", "messages": [{"role": "user", "content": "a"}]});
    tell("/api/chat", missing, 404, "the model \"nothing\" is not served");
    tell("/api/show", json!({"model": "../language"}), 404, "is not served");
    tell("/api/pull", json!({"model": "nothing"}), 404, "qhx pull");
    tell("/api/create", json!({"model": "new"}), 501, "none is made");
    for (more, words) in [
        (json!({"keep_alive": "soon"}), "keep_alive: expected seconds"),
        (json!({"think": 3}), "think: expected true, false or an effort"),
        (json!({"format": "xml"}), "format: expected \"json\" or a JSON schema"),
        (json!({"options": {"temperature": "hot"}}), "temperature: expected a number"),
        (json!({"messages": [{"role": "pirate", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "images": ["!"]}]}), "messages[0]"),
    ] {
        tell("/api/chat", sky(more).0, 400, words);
    }
    client.send("DELETE", "/api/delete", b"{}").status(400);
    // A form's type is curl's, and no type is a program's own.
    let body = json!({"model": "encoder", "input": "a"}).to_string();
    client.send("POST", "/api/embed", body.as_bytes()).status(200);
}

fn soon(what: &str, mut there: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !there() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn models_are_kept_as_long_as_a_request_says() {
    let running = Running::start(options([("language", language()), ("encoder", encoder())]));
    let client = &running.client;
    let loaded = || client.get("/api/ps").json()["models"].as_array().unwrap().len();
    let (body, text) = sky(json!({"stream": false, "keep_alive": 0}));
    let ask = |body: &Value| client.ask("/api/chat", body)["message"]["content"] == text;
    assert!(ask(&body));
    soon("the model is unloaded", || loaded() == 0);
    assert!(ask(&sky(json!({"stream": false, "keep_alive": "10m"})).0));
    let model = &client.get("/api/ps").json()["models"][0];
    assert_eq!((&model["name"], &model["context_length"]), (&json!("language"), &json!(200)));
    assert!(model["size_vram"].as_u64().unwrap() > 0, "{model}");
    client.ask("/api/generate", &json!({"model": "language", "keep_alive": 0}));
    soon("the model is unloaded", || loaded() == 0);
    client.ask("/api/generate", &json!({"model": "language", "keep_alive": -1}));
    assert!(client.get("/api/ps").json()["models"][0]["expires_at"].as_str().unwrap() > "22");

    let short = options([("language", language())]).keep_alive(Duration::from_millis(1));
    let running = Running::start(short);
    let loaded = || running.client.get("/v1/models").json()["data"][0]["loaded"] == true;
    soon("the model is unloaded", || !loaded());
    assert_eq!(running.client.ask("/api/chat", &body)["message"]["content"], text);
}
