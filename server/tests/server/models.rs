//! Models: the ones that are served, and the ones that are loaded.

use std::path::Path;
use std::time::{Duration, Instant};

use qhx::Bundle;
use serde_json::json;

use crate::bundles::{Running, copy, encoder, folder, golden, keeping, language, options, shared};

#[test]
fn models_are_listed_and_found_by_name() {
    let client = &shared().client;
    let list = client.get("/v1/models").status(200).json();
    assert_eq!(list["object"], "list");
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|one| &one["id"]).collect();
    assert_eq!(names, ["language", "encoder", "recurrent"]);
    let one = client.get("/v1/models/encoder").status(200).json();
    assert_eq!((&one["id"], &one["object"]), (&json!("encoder"), &json!("model")));
    assert_eq!(one["abilities"], json!(["embed"]));
    for name in ["nothing", "../language", "%2e%2e%2flanguage", "language/..", "a%00b", "%0d%0a"] {
        client.get(&format!("/v1/models/{name}")).refuses(404, "code", "model_not_found");
    }
    for name in ["../language", "language\0", "/etc/passwd", "language/../language", "LANGUAGE"] {
        let body = json!({"model": name, "prompt": "a"});
        for route in ["/v1/completions", "/tokenize"] {
            client.post(route, &body).refuses(404, "code", "model_not_found");
        }
    }
}

#[test]
fn health_and_metrics_answer() {
    let client = &shared().client;
    assert_eq!(client.get("/health").status(200).json(), json!({"status": "ok"}));
    let metrics = client.get("/metrics").status(200);
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let text = metrics.text();
    assert!(text.contains("# TYPE qhx_requests_total counter"), "{text}");
    assert!(text.contains("qhx_requests_total{route=\"GET /health\",status=\"200\"}"), "{text}");
    // What is not there has one label, whatever its name.
    client.get("/nowhere%22%0a").status(404);
    let text = client.get("/metrics").text();
    assert!(text.contains("{route=\"GET (unknown)\",status=\"404\"}"), "{text}");
}

#[test]
fn a_text_and_a_conversation_are_tokenized() {
    let client = &shared().client;
    let body = json!({"model": "language", "prompt": "The capital of France is"});
    let text = client.ask("/tokenize", &body);
    assert_eq!(text["count"], 10);
    assert_eq!(text["tokens"].as_array().unwrap().len(), 10);
    assert_eq!(text["max_model_len"], 200);
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"model": "language", "messages": messages});
    let chat = client.ask("/tokenize", &body);
    assert!(chat["count"].as_u64().unwrap() > 3, "{chat}");
    client.post("/tokenize", &json!({"model": "language"})).refuses(400, "param", "prompt");
}

#[test]
fn models_take_turns_within_the_memory_budget() {
    let running =
        Running::start(options([("a", language()), ("b", encoder()), ("c", language())]).memory(1));
    let loaded = || {
        let list = running.client.get("/v1/models").json();
        let all = list["data"].as_array().unwrap().iter();
        let loaded = all.filter(|one| one["loaded"] == true);
        loaded.map(|one| one["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(loaded(), Vec::<String>::new(), "of several, each is loaded when it is asked for");
    for model in ["a", "c", "a"] {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2});
        running.client.post("/v1/chat/completions", &body).status(200);
        assert_eq!(loaded(), [model]);
    }
    assert!(running.client.get("/metrics").text().contains("qhx_model_loads_total 3\n"));
}

/// Bytes of loaded models, from the metrics.
fn loaded_bytes(running: &Running) -> u64 {
    let metrics = running.client.get("/metrics").text();
    let line = metrics.lines().find_map(|line| line.strip_prefix("qhx_models_loaded_bytes "));
    line.expect("there is a line").parse().expect("a number")
}

/// Bytes of two models with a session each, without a budget.
fn both(a: &Path, b: &Path) -> u64 {
    let running = Running::start(options([("a", a), ("b", b)]));
    for model in ["a", "b"] {
        running.client.post("/tokenize", &json!({"model": model, "prompt": "a"})).status(200);
    }
    loaded_bytes(&running)
}

#[test]
fn models_count_with_the_files_that_they_open() {
    // A file of another architecture, say.
    let crowded = folder().join("crowded");
    copy(language().parent().unwrap(), &crowded);
    std::fs::write(crowded.join("other.bin"), vec![0; 1 << 20]).unwrap();
    let (plain, crowded) = (language(), crowded.join("language.json"));
    assert_eq!(both(&crowded, encoder()), both(plain, encoder()));
}

#[test]
fn kept_states_leave_less_memory_to_other_models() {
    let (a, b) = (language(), encoder());
    let memory = both(a, b);
    let options = options([("a", a), ("b", b)]).runtime(keeping()).parallel(1).memory(memory);
    let running = Running::start(options);
    for model in ["a", "b"] {
        running.client.post("/tokenize", &json!({"model": model, "prompt": "a"})).status(200);
    }
    assert_eq!(loaded_bytes(&running), memory);
    for name in ["sky", "bread"] {
        let messages = json!([{"role": "user", "content": golden("llama3-tiny", name).1}]);
        let body = json!({"model": "a", "messages": messages, "max_tokens": 40});
        running.client.post("/v1/chat/completions", &body).status(200);
    }
    // The session is given back behind the answer.
    let soon = Instant::now() + Duration::from_secs(60);
    let loaded = || running.client.get("/v1/models").json()["data"][1]["loaded"] == true;
    while loaded() && Instant::now() < soon {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!loaded(), "{} bytes", loaded_bytes(&running));
}

#[test]
fn a_model_has_several_names_and_answers_for_others() {
    let served = || options([("language", language())]).alias("gpt-4o");
    let options = served().bundle_as("encoder", Bundle::open(encoder()).unwrap());
    let running = Running::start(options.any_model(true));
    let client = &running.client;
    let entry = &client.get("/v1/models").json()["data"][0];
    assert_eq!((&entry["id"], &entry["aliases"]), (&json!("language"), &json!(["gpt-4o"])));
    // Before it is loaded.
    assert_eq!(entry["loaded"], false);
    assert_eq!((&entry["max_model_len"], &entry["modalities"]), (&json!(200), &json!(["text"])));
    let answer = |name: &str| {
        let body = json!({"model": name, "prompt": "a", "max_tokens": 2, "temperature": 0});
        client.ask("/v1/completions", &body)
    };
    let own = answer("language");
    for name in ["gpt-4o", "claude-sonnet"] {
        let found = answer(name);
        assert_eq!((&found["model"], &found["choices"]), (&json!("language"), &own["choices"]));
    }
    let vectors = json!({"model": "text-embedding-3-small", "input": "a"});
    assert_eq!(client.ask("/v1/embeddings", &vectors)["model"], "encoder");
    let plain = Running::start(served());
    let other = json!({"model": "claude-sonnet", "prompt": "a"});
    plain.client.post("/v1/completions", &other).refuses(404, "code", "model_not_found");
    plain.client.get("/v1/models/gpt-4o").status(200);
}

#[test]
fn two_bundles_need_two_names() {
    let error = qhx_server::Server::bind(options([("a", language()), ("a", language())]));
    let error = error.unwrap_err();
    assert_eq!(error.message(), "two bundles have the name \"a\"");
}
