//! Clients that are slow, leave, or send what they should not.

use std::io::{BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::time::Duration;

use serde_json::json;

use crate::bundles::{Running, language, options, shared};
use crate::client::{read, with};

#[test]
fn a_body_beyond_the_limit_is_refused() {
    let running = Running::start(options([("language", language())]).max_body(1 << 20));
    let json = running.client.clone().with("content-type", "application/json");
    let error = json.send("POST", "/v1/chat/completions", &vec![b' '; 4 << 20]);
    error.refuses(413, "code", "request_too_large");
    // What is far beyond is not even read.
    let head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: 104857600\r\n\r\n";
    assert_eq!(running.client.raw(head).unwrap().status, 413);
    running.client.get("/health").status(200);
}

#[test]
fn a_client_that_is_slow_keeps_nobody_waiting() {
    let limit = Duration::from_millis(300);
    let running = Running::start(options([("language", language())]).read_limit(limit));
    let mut head = running.client.connect();
    head.write_all(b"GET /health HT").unwrap();
    let mut body = running.client.connect();
    body.write_all(
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: 10\r\n\r\n{",
    )
    .unwrap();
    running.client.get("/health").status(200);
    let response = read(&mut BufReader::new(body)).unwrap();
    response.refuses(408, "code", "request_timeout");
    let mut rest = Vec::new();
    let _ = head.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("200 OK"), "the head never came");
}

#[test]
fn a_client_that_closes_its_side_has_left() {
    let running = Running::start(options([("language", language())]).parallel(1));
    let body = json!({
        "messages": [{"role": "user", "content": "Hello"}],
        "n": 16,
        "temperature": 2,
    });
    let stream = running.client.post_open("/v1/chat/completions", &body);
    running.client.until("qhx_requests_running 1");
    stream.get_ref().shutdown(Shutdown::Write).unwrap();
    let line = running.line_with("POST /v1/chat/completions");
    assert!(line.contains("POST /v1/chat/completions 499"), "{line}");
}

/// Lets this process have as many connections as it may.
fn many_files() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    }
}

#[test]
fn sockets_that_do_not_read_keep_nobody_waiting() {
    many_files();
    let limit = Duration::from_secs(2);
    let running = Running::start(options([("language", language())]).write_limit(limit));
    let client = &running.client;
    let pages = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(60);
    // Until the server reads no more.
    let greedy = |_| {
        let mut stream = client.connect_narrow();
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write_all(&pages);
        stream
    };
    let sockets: Vec<_> = (0..1100).map(greedy).collect();
    for _ in 0..3 {
        client.get("/health").status(200);
    }
    // They are given up, so that everything else is answered, too.
    while client.get("/v1/models").status != 200 {
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(sockets);
}

#[test]
fn bodies_wait_until_there_is_memory_for_them() {
    let limit = Duration::from_millis(300);
    let options = options([("language", language())]).read_limit(limit).parallel(1);
    let running = Running::start(options.request_memory(256 << 10));
    let client = &running.client;
    let large = json!({"prompt": "Hello", "unknown": " ".repeat(100_000)});
    let more = json!({"n": 16, "max_tokens": 180, "temperature": 2, "stream": true});
    let first = client.post_open("/v1/completions", &with(large.clone(), more));
    client.until("qhx_requests_running 1");
    // The first one has nearly all of it until its work is over. Small ones need none.
    client.post("/tokenize", &large).refuses(503, "code", "no_memory");
    client.post("/tokenize", &json!({"prompt": "Hello"})).status(200);
    drop(first);
    while client.post("/tokenize", &large).status != 200 {
        std::thread::sleep(Duration::from_millis(2));
    }
    // A body of many small values takes more than its length; one that takes more than there is waits until it is alone.
    let values = format!("{{\"prompt\": \"Hello\", \"unknown\": [{}1]}}", "[],".repeat(40_000));
    let json = client.clone().with("content-type", "application/json");
    json.send("POST", "/tokenize", values.as_bytes()).status(200);
}

#[test]
fn a_text_that_is_only_counted_is_bounded() {
    let client = &shared().client;
    let long = "long words ".repeat(100_000);
    let messages = json!([{"role": "user", "content": long}]);
    for (route, body) in [
        ("/tokenize", json!({"model": "language", "prompt": long})),
        ("/tokenize", json!({"model": "language", "messages": messages})),
        ("/v1/messages/count_tokens", json!({"model": "language", "messages": messages})),
    ] {
        client.post(route, &body).refuses(400, "code", "context_length_exceeded");
    }
    // What is longer than the context is counted.
    let body = json!({"model": "language", "prompt": "long ".repeat(1000)});
    let counted = client.ask("/tokenize", &body);
    assert!(counted["count"].as_u64().unwrap() > 1000, "{counted}");
}

#[test]
fn a_thousand_connections_are_answered() {
    many_files();
    let running = Running::start(options([("language", language())]));
    let client = &running.client;
    // They say nothing, and keep nobody from being answered.
    let idle: Vec<_> = (0..1000).map(|_| client.connect()).collect();
    let streams: Vec<_> = (0..1000).map(|_| client.open("GET", "/health", b"")).collect();
    for mut stream in streams {
        assert_eq!(read(&mut stream).unwrap().status, 200);
    }
    drop(idle);
    // Who does not fit the queue is refused at once, and everybody else gets the same text.
    let body = json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 1});
    let streams: Vec<_> = (0..1000).map(|_| client.post_open("/v1/completions", &body)).collect();
    let mut answered = 0;
    for mut stream in streams {
        let response = read(&mut stream).unwrap();
        let full = [(429, "queue_full"), (503, "too_many_connections")];
        if let Some((_, code)) = full.iter().find(|(status, _)| *status == response.status) {
            assert_eq!(response.error()["code"], *code);
            continue;
        }
        assert_eq!(response.status(200).json()["choices"][0]["text"], " P");
        answered += 1;
    }
    assert!(answered >= 64, "{answered} of 1000");
}

#[test]
fn a_body_of_unknown_length_is_cut_at_the_limit() {
    let running = Running::start(options([("language", language())]).max_body(1 << 20));
    let mut stream = running.client.connect();
    stream
        .write_all(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
            transfer-encoding: chunked\r\n\r\n",
        )
        .unwrap();
    let chunk = [b"100000\r\n".to_vec(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
    // 100 MB: the server stops to read long before.
    let sent = (0..100).take_while(|_| stream.write_all(&chunk).is_ok()).count();
    assert!(sent < 100, "{sent} MiB were taken");
    running.client.get("/health").status(200);
}

#[test]
fn what_is_no_request_is_refused() {
    let client = &shared().client;
    for bytes in [&b"\x16\x03\x01\x02\x00\x01\r\n\r\n"[..], b"GET / HTTP/9.9\r\n\r\n"] {
        let refused = client.raw(bytes);
        assert!(refused.as_ref().is_ok_and(|r| r.status == 400) || refused.is_err());
    }
    let mut long = b"GET /".to_vec();
    long.extend(vec![b'a'; 1 << 20]);
    let _ = client.raw(&long);
    client.get("/health").status(200);
}
