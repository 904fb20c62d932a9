//! A small client, which can also send what no client should.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// A response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(of, _)| of.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("the body is UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// Asserts a status.
    #[track_caller]
    pub fn status(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    /// The error, of the one form that errors have.
    pub fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        let fields = ["message", "type", "param", "code"];
        let all = error.as_object().expect("there is an error");
        assert!(fields.iter().all(|field| all.contains_key(*field)), "{error}");
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        error
    }

    /// Asserts a status, and a field of the error, which it returns.
    #[track_caller]
    pub fn refuses(self, status: u16, field: &str, value: impl Into<Value>) -> Value {
        let error = self.status(status).error();
        assert_eq!(error[field], value.into(), "{error}");
        error
    }

    /// Asserts that the error's message has this part.
    #[track_caller]
    pub fn says(&self, part: &str) {
        let error = self.error();
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(part), "{part:?} is not in {error}");
    }

    /// The data of server-sent events.
    pub fn events(&self) -> Vec<String> {
        events(&self.text())
    }

    /// The events that are JSON.
    pub fn chunks(&self) -> Vec<Value> {
        let events = self.events();
        let json = events.iter().filter(|event| *event != "[DONE]");
        json.map(|event| serde_json::from_str(event).expect("an event is JSON")).collect()
    }
}

pub fn events(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
}

/// An object with more fields, which count where both have one.
pub fn with(mut object: Value, more: Value) -> Value {
    let fields = object.as_object_mut().expect("an object");
    fields.extend(more.as_object().expect("an object").clone());
    object
}

/// Sends requests to a server.
#[derive(Debug, Clone)]
pub struct Client {
    pub address: SocketAddr,
    headers: Vec<(String, String)>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, headers: Vec::new() }
    }

    /// With a header on each request.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        let json = self.clone().with("content-type", "application/json");
        json.send("POST", path, body.to_string().as_bytes())
    }

    /// The document that answers a request.
    #[track_caller]
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        self.post(path, body).status(200).json()
    }

    /// Waits until the metrics have a line.
    pub fn until(&self, line: &str) {
        let line = format!("{line}\n");
        while !self.get("/metrics").text().contains(&line) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn send(&self, method: &str, path: &str, body: &[u8]) -> Response {
        let mut stream = self.open(method, path, body);
        read(&mut stream).expect("there is a response")
    }

    /// Sends a request, and leaves the response to be read.
    pub fn open(&self, method: &str, path: &str, body: &[u8]) -> BufReader<TcpStream> {
        self.open_on(self.connect(), method, path, body)
    }

    fn open_on(
        &self,
        mut stream: TcpStream,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> BufReader<TcpStream> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.address);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\nconnection: close\r\n\r\n", body.len()));
        stream.write_all(head.as_bytes()).expect("the head is sent");
        stream.write_all(body).expect("the body is sent");
        BufReader::new(stream)
    }

    pub fn post_open(&self, path: &str, body: &Value) -> BufReader<TcpStream> {
        let json = self.clone().with("content-type", "application/json");
        json.open("POST", path, body.to_string().as_bytes())
    }

    /// [`Client::post_open`] of a client that does not read.
    pub fn post_unread(&self, path: &str, body: &Value) -> BufReader<TcpStream> {
        let json = self.clone().with("content-type", "application/json");
        json.open_on(self.connect_narrow(), "POST", path, body.to_string().as_bytes())
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a socket");
        stream
    }

    /// Connects with a small buffer for what comes, as a client that does not read has it.
    pub fn connect_narrow(&self) -> TcpStream {
        let stream = self.connect();
        socket2::SockRef::from(&stream).set_recv_buffer_size(4096).expect("a socket");
        stream
    }

    /// Sends bytes as they are.
    pub fn raw(&self, bytes: &[u8]) -> std::io::Result<Response> {
        let mut stream = self.connect();
        stream.write_all(bytes)?;
        read(&mut BufReader::new(stream))
    }
}

/// Reads a head: status and headers.
pub fn head(stream: &mut impl BufRead) -> std::io::Result<(u16, Vec<(String, String)>)> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| std::io::Error::other(format!("no status: {line:?}")))?;
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_owned(), value.to_owned()));
    }
    Ok((status, headers))
}

/// Reads a response.
pub fn read(stream: &mut impl BufRead) -> std::io::Result<Response> {
    let (status, headers) = head(stream)?;
    let mut response = Response { status, headers, body: Vec::new() };
    if response.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut size = String::new();
            stream.read_line(&mut size)?;
            let size = usize::from_str_radix(size.trim(), 16).map_err(std::io::Error::other)?;
            let mut chunk = vec![0; size + 2];
            stream.read_exact(&mut chunk)?;
            response.body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = response.header("content-length") {
        response.body = vec![0; length.parse().expect("a length")];
        stream.read_exact(&mut response.body)?;
    }
    Ok(response)
}
