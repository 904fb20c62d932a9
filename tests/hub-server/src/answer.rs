//! Response to a request.

use std::io::{self, Write as _};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::repo::{File, Repo};
use crate::server::{Fault, Request, State, lock};

/// Writes the answer to a request.
pub(crate) fn answer(stream: &TcpStream, request: &Request, state: &State) -> io::Result<()> {
    let path = decoded(request.path.split('?').next().unwrap_or_default());
    let fault = state.take_fault(&path);
    match &fault {
        Some(Fault::Status(status, headers)) => return plain(stream, *status, headers, "fault"),
        Some(Fault::Redirect(to)) => {
            let location = format!("Location: {to}{}\r\n", request.path);
            return plain(stream, 302, &location, "");
        }
        _ => {}
    }
    let repos = lock(&state.repos).clone();
    let found = match path.strip_prefix("/api/models/") {
        Some(rest) => listing(rest, &repos),
        None => file(&path, &repos),
    };
    let Some((repo, file)) = found else {
        return plain(stream, 404, "X-Error-Code: EntryNotFound\r\n", "Entry not found");
    };
    if let Some(token) = &repo.token {
        let given = request.header("authorization");
        if given != Some(&format!("Bearer {token}")) {
            let status = if given.is_some() { 403 } else { 401 };
            return plain(stream, status, "X-Error-Code: GatedRepo\r\n", "gated");
        }
    }
    match file {
        None => {
            let body = repo.json().to_string();
            plain(stream, 200, "Content-Type: application/json\r\n", &body)
        }
        Some(file) => content(stream, request, state, (&repo, &file), fault),
    }
}

type Found = (Repo, Option<File>);

/// `OWNER/NAME/revision/REV`, or `OWNER/NAME`.
fn listing(path: &str, repos: &[Repo]) -> Option<Found> {
    let (id, revision) = path.split_once("/revision/").unwrap_or((path, "main"));
    let repo = repos.iter().find(|repo| repo.is(id, revision))?;
    Some((repo.clone(), None))
}

/// `/OWNER/NAME/resolve/REV/PATH`.
fn file(path: &str, repos: &[Repo]) -> Option<Found> {
    let (id, rest) = path.trim_start_matches('/').split_once("/resolve/")?;
    repos.iter().find_map(|repo| {
        let (revision, path) = rest.split_once('/')?;
        let file = repo.files.iter().find(|file| repo.is(id, revision) && file.path == path)?;
        Some((repo.clone(), Some(file.clone())))
    })
}

fn decoded(path: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        let digits: Option<Vec<u8>> = (byte == b'%').then(|| rest.by_ref().take(2).collect());
        let digits = digits.map(|digits| String::from_utf8_lossy(&digits).into_owned());
        let number = digits.and_then(|digits| u8::from_str_radix(&digits, 16).ok());
        bytes.push(number.unwrap_or(byte));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(crate) fn plain(
    mut stream: &TcpStream,
    status: u16,
    headers: &str,
    body: &str,
) -> io::Result<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {length}\r\n");
    stream.write_all(format!("{head}{headers}\r\n{body}").as_bytes())
}

fn content(
    mut stream: &TcpStream,
    request: &Request,
    state: &State,
    (repo, file): (&Repo, &File),
    fault: Option<Fault>,
) -> io::Result<()> {
    let mut bytes = file.bytes.clone();
    match fault {
        Some(Fault::WrongBytes) => bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1),
        Some(Fault::Longer(more)) => bytes.resize(bytes.len() + more, 0),
        _ => {}
    }
    let total = bytes.len();
    let from = request.from().filter(|_| fault != Some(Fault::IgnoreRange));
    let from = from.map(|from| usize::try_from(from).unwrap_or(usize::MAX));
    let mut head = match from {
        Some(from) if from >= total => {
            let range = format!("Content-Range: bytes */{total}\r\n");
            return plain(stream, 416, &range, "");
        }
        Some(from) => format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{}/{total}\r\n",
            total - 1
        ),
        None => "HTTP/1.1 200 OK\r\n".to_owned(),
    };
    let rest = bytes.get(from.unwrap_or(0)..).unwrap_or_default();
    head += &format!(
        "Content-Length: {}\r\nConnection: close\r\nETag: \"{}\"\r\nX-Repo-Commit: {}\r\n\
         Accept-Ranges: bytes\r\n\r\n",
        rest.len(),
        file.etag(),
        repo.commit
    );
    stream.write_all(head.as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    let (piece, pause) = match fault {
        Some(Fault::Slow(piece, pause)) => (piece, Some(pause)),
        _ => (1 << 16, None),
    };
    let (Some(Fault::Cut(end)) | Some(Fault::Stall(end))) = fault else {
        return send(stream, rest, state, piece, pause);
    };
    let part = rest.get(..usize::try_from(end).unwrap_or(usize::MAX)).unwrap_or(rest);
    send(stream, part, state, piece, None)?;
    if matches!(fault, Some(Fault::Stall(_))) {
        while !state.stopped.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

fn send(
    mut stream: &TcpStream,
    bytes: &[u8],
    state: &State,
    piece: usize,
    pause: Option<Duration>,
) -> io::Result<()> {
    for part in bytes.chunks(piece.max(1)) {
        stream.write_all(part)?;
        state.sent.fetch_add(part.len() as u64, Ordering::AcqRel);
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
    }
    Ok(())
}
