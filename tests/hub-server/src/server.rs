//! Connections: a thread for each, which answers one request.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::repo::Repo;
use crate::upload::{self, Storage};
use crate::{answer, tls};

/// Failure of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The connection ends after this number of bytes of the content.
    Cut(u64),
    /// The connection stays open after this number of bytes, and nothing more comes.
    Stall(u64),
    /// This status, with these lines of headers.
    Status(u16, String),
    /// The first byte of the content is another one.
    WrongBytes,
    /// The whole file, whatever range was asked for.
    IgnoreRange,
    /// This number of bytes at a time, with a pause between.
    Slow(usize, Duration),
    /// A redirect to the same path at this address, as to another host.
    Redirect(String),
    /// More bytes than there are.
    Longer(usize),
}

/// A request that arrived.
#[derive(Debug, Clone)]
pub struct Request {
    /// `GET`, `HEAD`, `POST` or `PUT`.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Request {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The first byte of the range that is asked for.
    pub fn from(&self) -> Option<u64> {
        let range = self.header("range")?.strip_prefix("bytes=")?;
        range.split('-').next()?.parse().ok()
    }
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub repos: Mutex<Vec<Repo>>,
    /// For a part of a path: the fault, and the number of times that it still happens.
    faults: Mutex<Vec<(String, Fault, usize)>>,
    requests: Mutex<Vec<Request>>,
    pub storage: Mutex<Storage>,
    /// Bytes of contents that arrived.
    pub received: AtomicU64,
    /// Bytes of files that were written to connections.
    pub sent: AtomicU64,
    pub stopped: AtomicBool,
}

impl State {
    /// Takes the fault of a request for this path.
    pub(crate) fn take_fault(&self, path: &str) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let (_, fault, left) =
            faults.iter_mut().find(|(part, _, left)| *left > 0 && path.contains(part.as_str()))?;
        *left -= 1;
        Some(fault.clone())
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A hub, until it is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves these repositories at a free port of loopback.
    ///
    /// # Panics
    /// When loopback has no port.
    pub fn start(repos: impl Into<Vec<Repo>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State { repos: Mutex::new(repos.into()), ..State::default() });
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.stopped.load(Ordering::Acquire) {
                    break;
                }
                let (Ok(stream), state) = (stream, Arc::clone(&shared)) else { continue };
                // Whoever asked may be gone.
                std::thread::spawn(move || serve(&stream, &state));
            }
        });
        Self { address, state, thread: Some(thread) }
    }

    /// The value of `HF_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Same as [`Server::endpoint`] over TLS, for clients that trust [`crate::CERTIFICATE`].
    pub fn tls_endpoint(&self) -> String {
        tls::before(self.address)
    }

    /// Publishes a revision: branches of this name lead to it from now on.
    pub fn publish(&self, repo: Repo) {
        let mut repos = lock(&self.state.repos);
        for old in repos.iter_mut().filter(|old| old.id == repo.id) {
            old.refs.retain(|name| !repo.refs.contains(name));
        }
        repos.push(repo);
    }

    /// The next `times` requests whose path contains `path` fail so.
    pub fn fault(&self, path: &str, fault: Fault, times: usize) {
        lock(&self.state.faults).push((path.to_owned(), fault, times));
    }

    /// Takes all faults back.
    pub fn heal(&self) {
        lock(&self.state.faults).clear();
    }

    /// Lets whoever has this token write. Files that are longer than `part` come in parts of as many bytes.
    pub fn writable(&self, token: &str, part: Option<usize>) {
        let mut storage = lock(&self.state.storage);
        storage.token = Some(token.to_owned());
        storage.part = part;
    }

    /// Bytes of contents that arrived so far.
    pub fn received(&self) -> u64 {
        self.state.received.load(Ordering::Acquire)
    }

    /// The files of a repository's branch `main`.
    pub fn files(&self, id: &str) -> Vec<crate::File> {
        let repos = lock(&self.state.repos);
        repos
            .iter()
            .find(|repo| repo.is(id, "main"))
            .map(|repo| repo.files.clone())
            .unwrap_or_default()
    }

    /// Requests that arrived so far.
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.state.requests).clone()
    }

    /// Bytes of files that were sent so far.
    pub fn sent(&self) -> u64 {
        self.state.sent.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::Release);
        // Wakes the thread that waits for connections.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn serve(stream: &TcpStream, state: &State) {
    let mut reader = BufReader::new(stream);
    let mut lines = reader.by_ref().lines();
    let Some(Ok(first)) = lines.next() else { return };
    let mut words = first.split(' ').map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return };
    let headers: Vec<(String, String)> = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        })
        .collect();
    let request = Request { method, path, headers };
    lock(&state.requests).push(request.clone());
    // The reader may have gone.
    let _ = if ["POST", "PUT"].contains(&request.method.as_str()) {
        let length = request.header("content-length").and_then(|length| length.parse().ok());
        let mut body = Vec::new();
        match reader.take(length.unwrap_or(0)).read_to_end(&mut body) {
            Ok(read) if Some(read as u64) == length => {}
            // Whoever sent it is gone.
            _ => return,
        }
        upload::answer(stream, &request, &body, state)
    } else {
        answer::answer(stream, &request, state)
    };
}
