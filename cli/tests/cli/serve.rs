//! `qhx serve`: the program around the server.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Child;
use std::time::Duration;

use wait_timeout::ChildExt as _;

use crate::run::{Program, bundle, folder, signal};

/// Starts the server on a free port, and waits for its address.
fn started(arguments: &[&str], folder: &std::path::Path) -> (Child, String) {
    let named = format!("model={}", bundle().display());
    let mut server =
        qhx!(folder, "serve", named, "--port", "0", "--backend", "cpu").args(arguments).start();
    let mut line = String::new();
    let stdout = server.stdout.as_mut().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    let address = line.trim_end().strip_prefix("http://").expect("an address").to_owned();
    (server, address)
}

fn get(address: &str, head: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {head}\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn what_is_under_way_ends_when_the_server_is_terminated() {
    let folder = folder();
    let (server, address) = started(&[], folder.path());
    let body = r#"{"prompt": "The capital", "n": 8, "max_tokens": 20, "seed": 1, "stream": true}"#;
    let mut stream = TcpStream::connect(&address).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
        content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut first = String::new();
    let mut stream = BufReader::new(stream);
    stream.read_line(&mut first).unwrap();
    assert!(first.starts_with("HTTP/1.1 200 "), "{first}");
    signal("-TERM", server.id());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(rest.matches("\"finish_reason\":\"").count(), 8, "{rest}");
    assert!(rest.contains("data: [DONE]"), "{rest}");
    let output = server.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(TcpStream::connect(&address).is_err(), "nobody listens");
}

#[test]
fn a_server_answers_until_it_is_asked_to_stop() {
    let folder = folder();
    std::fs::write(folder.path().join("keys"), "k1\n").unwrap();
    let (server, address) = started(&["--api-key-file", "keys"], folder.path());
    assert!(get(&address, "/health HTTP/1.1").contains("{\"status\":\"ok\"}"));
    assert!(get(&address, "/v1/models HTTP/1.1").starts_with("HTTP/1.1 401 "));
    let models = get(&address, "/v1/models HTTP/1.1\r\nx-api-key: k1");
    assert!(models.contains("\"id\":\"model\""), "{models}");
    signal("-TERM", server.id());
    let output = server.wait_with_output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{log}");
    assert!(log.contains(" GET /v1/models 401 ") && log.contains(" GET /v1/models 200 "), "{log}");
}

#[test]
fn what_cannot_be_served_says_why() {
    let folder = folder();
    let run = |arguments: &[&str]| Program::qhx(folder.path()).args(arguments).run();
    let bundle = bundle().to_string_lossy().into_owned();
    run(&["serve", &bundle, &bundle, "--backend", "cpu"])
        .fails(2, &["two bundles have the name \"tiny\"", "NAME=BUNDLE"]);
    assert_eq!(run(&["serve", "nowhere"]).code, 3);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    run(&["serve", &bundle, "--port", &port, "--backend", "cpu"])
        .fails(11, &["cannot be listened on"]);
}

#[test]
fn tokens_are_refused_on_an_npu_that_does_not_run_the_bundle() {
    let folder = folder();
    let program = |command: &[&str]| {
        let program = qhx!(folder, command[0], bundle());
        program.args(&command[1..]).args(["--backend", "cpu", "--decode-on", "npu"])
    };
    for command in [&["generate", "a"][..], &["chat"]] {
        program(command).run().fails(5, &["tokens on the NPU: backend cpu runs the bundle"]);
    }
    let mut server = program(&["serve", "--port", "0"]).start();
    let ended = server.wait_timeout(Duration::from_secs(60)).unwrap();
    let _ = server.kill();
    let mut said = String::new();
    server.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(ended.and_then(|status| status.code()), Some(5), "{said}");
}
