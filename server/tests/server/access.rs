//! Access: keys, and requests that are refused before they reach a model.

use serde_json::json;

use crate::bundles::{Running, language, options, shared};
use crate::client::Client;

fn keyed() -> Running {
    Running::start(options([("language", language())]).api_keys(["s3cret".to_owned()]))
}

#[test]
fn a_key_is_asked_for_in_either_header() {
    let running = keyed();
    let client = &running.client;
    client.get("/health").status(200);
    client.get("/").status(200);
    for wrong in [
        client.clone(),
        client.clone().with("authorization", "Bearer wrong"),
        client.clone().with("authorization", "Basic s3cret"),
        client.clone().with("x-api-key", "s3cret!"),
        client.clone().with("x-api-key", ""),
    ] {
        for path in ["/v1/models", "/metrics", "/nowhere"] {
            let refused = wrong.get(path);
            assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
            let error = refused.refuses(401, "code", "invalid_api_key");
            assert_eq!(error["type"], "authentication_error");
        }
    }
    client.clone().with("authorization", "Bearer s3cret").get("/v1/models").status(200);
    client.clone().with("authorization", "bearer  s3cret").get("/v1/models").status(200);
    client.clone().with("x-api-key", "s3cret").get("/metrics").status(200);
}

#[test]
fn keys_come_from_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "# of the team\n one \n\ntwo\n").unwrap();
    let options = qhx_server::ServerOptions::default().api_key_file(file.path()).unwrap();
    assert_eq!(options.api_keys, ["one", "two"]);
    assert!(!format!("{options:?}").contains("two"), "keys are not shown");
    std::fs::write(file.path(), "# none\n").unwrap();
    let error = qhx_server::ServerOptions::default().api_key_file(file.path()).unwrap_err();
    assert!(error.message().ends_with("found no key, expected one a line"), "{error}");
}

#[test]
fn pages_of_other_origins_are_not_answered() {
    let client = &shared().client;
    let own = format!("http://{}", client.address);
    client.clone().with("origin", &own).get("/v1/models").status(200);
    let foreign = client.clone().with("origin", "https://example.org");
    let response = foreign.get("/v1/models").status(403);
    assert_eq!(response.error()["code"], "origin_not_allowed");
    assert_eq!(response.header("access-control-allow-origin"), None);
    let rebound = client.raw(b"GET /v1/models HTTP/1.1\r\nhost: evil.example:80\r\n\r\n").unwrap();
    assert_eq!(rebound.status, 403);
    let allowing = Running::start(options([("a", language())]).allow_origin("https://example.org"));
    let allowed = allowing.client.clone().with("origin", "https://example.org");
    let response = allowed.get("/v1/models").status(200);
    assert_eq!(response.header("access-control-allow-origin"), Some("https://example.org"));
    let preflight = allowed.send("OPTIONS", "/v1/models", b"").status(204);
    assert!(preflight.header("access-control-allow-headers").unwrap().contains("authorization"));
    allowing.client.clone().with("origin", "https://other.org").get("/v1/models").status(403);
}

#[test]
fn a_foreign_name_is_refused_on_every_address_without_a_key() {
    let everywhere = |options: qhx_server::ServerOptions| options.listen([0, 0, 0, 0].into(), 0);
    let ask = |running: &Running, host: &str| {
        let origin = format!("origin: http://{host}\r\n");
        let head = format!("GET /v1/models HTTP/1.1\r\nhost: {host}\r\n{origin}\r\n");
        running.client.raw(head.as_bytes()).unwrap()
    };
    let running = Running::start(everywhere(options([("a", language())])));
    let error = ask(&running, "evil.example:8080").refuses(403, "code", "host_not_allowed");
    assert!(error["message"].as_str().unwrap().contains("--allow-host"), "{error}");
    for own in ["localhost:8080", "192.168.1.7", "[::1]:1"] {
        ask(&running, own).status(200);
    }
    let named = everywhere(options([("a", language())])).allow_host("models.example");
    let named = Running::start(named);
    ask(&named, "models.example:8080").status(200);
    ask(&named, "evil.example").status(403);
    // Who has the key is no page of somebody else.
    let keyed = everywhere(options([("a", language())])).api_keys(["k".to_owned()]);
    let keyed = Running::start(keyed);
    assert_eq!(ask(&keyed, "any.example").status(401).error()["code"], "invalid_api_key");
}

#[test]
fn the_log_says_why_a_request_was_refused() {
    let running = Running::start(options([("language", language())]));
    let ask = |body: &serde_json::Value| running.client.post("/v1/completions", body).status(400);
    let long = "a private word ".repeat(400);
    let error = ask(&json!({"prompt": long})).error();
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("--max-ctx"), "{error}");
    let line = running.line_with("POST /v1/completions 400");
    assert!(line.contains("context_length_exceeded: ") && line.contains("--max-ctx"), "{line}");
    ask(&json!({"prompt": "a", "temperature": "a private word"}));
    let line = running.line_with("invalid_value");
    assert!(line.ends_with("invalid_value: temperature: expected a number from 0 to 2"), "{line}");
    assert!(!running.lines.lock().unwrap().concat().contains("private"));
}

#[test]
fn every_refusal_has_the_same_form() {
    let client = &shared().client;
    let code = |response: crate::client::Response| response.error()["code"].clone();
    assert_eq!(code(client.get("/nowhere").status(404)), "not_found");
    assert_eq!(code(client.get("/v1/chat/completions").status(405)), "method_not_allowed");
    assert_eq!(code(client.post("/v1/models", &json!({})).status(405)), "method_not_allowed");
    let chat = "/v1/chat/completions";
    let json = client.clone().with("content-type", "application/json");
    assert_eq!(code(client.send("POST", chat, b"{}").status(415)), "unsupported_media_type");
    let form = client.clone().with("content-type", "application/x-www-form-urlencoded");
    assert_eq!(code(form.send("POST", chat, b"a=b").status(415)), "unsupported_media_type");
    for body in [&b""[..], b"{", b"[]", b"null", b"{\"a\": NaN}", b"{\"a\": 1e999}", b"\xff"] {
        assert_eq!(code(json.send("POST", chat, body).status(400)), "malformed_json");
    }
    let deep = [b"{\"messages\":".repeat(100_000), b"1".to_vec()].concat();
    assert_eq!(code(json.send("POST", chat, &deep).status(400)), "malformed_json");
}

#[test]
fn requests_have_ids_and_a_line_each() {
    let running = shared();
    let named: Client = running.client.clone().with("x-request-id", "mine-1.a_b");
    let response = named.get("/v1/models").status(200);
    assert_eq!(response.header("x-request-id"), Some("mine-1.a_b"));
    assert!(running.line_with("mine-1.a_b").starts_with("mine-1.a_b GET /v1/models 200 "));
    let bad = running.client.clone().with("x-request-id", "a b\u{e4}");
    let id = bad.get("/health").header("x-request-id").unwrap().to_owned();
    assert!(id.starts_with("req_"), "{id}");
    let model = "forged\nreq_0 GET / 200\u{1b}[2J\u{9b}31m\u{202e}";
    let body = json!({"model": model, "messages": [{"role": "user", "content": "a secret"}]});
    let agent = named.with("user-agent", "forged (req_1 GET / 200)");
    agent.post("/v1/chat/completions", &body).refuses(404, "code", "model_not_found");
    let line = running.line_with("forged");
    assert!(line.contains("forged\\nreq_0") || line.contains("forged\\\\nreq_0"), "{line}");
    let odd = |c: char| c.is_control() || c == '\u{202e}';
    assert!(!line.contains(odd) && !line.contains("secret"), "{line:?}");
    assert!(!line.contains("req_1"), "{line}");
    let raw = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-request-id: \x1b[2J\r\nconnection: close\r\n\r\n";
    let response = running.client.raw(raw).unwrap();
    assert!(
        response.header("x-request-id").is_none_or(|id| id.starts_with("req_")),
        "{response:?}"
    );
}

#[test]
fn prompts_are_logged_where_that_is_asked_for() {
    let running = Running::start(options([("language", language())]).log_prompts(true));
    let body = json!({"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 1});
    running.client.post("/v1/chat/completions", &body).status(200);
    let line = running.line_with("POST /v1/chat/completions 200");
    assert!(line.contains("Hello there"), "{line}");
}
