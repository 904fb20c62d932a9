//! Uploads: a repository that is made, contents for the storage, and the commit that makes files visible.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::{io, thread};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use qhx_base::hash::hex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::answer::plain;
use crate::repo::{File, Repo};
use crate::server::{Fault, Request, State, lock};

/// Contents that arrived, and how they are to come.
#[derive(Debug, Default)]
pub(crate) struct Storage {
    /// Token that may write; nobody may without one.
    pub token: Option<String>,
    /// Bytes of a part, for files that are longer.
    pub part: Option<usize>,
    /// By SHA-256.
    contents: BTreeMap<String, Vec<u8>>,
    /// By SHA-256 and number.
    parts: BTreeMap<(String, usize), Vec<u8>>,
    /// Repositories without files.
    empty: Vec<String>,
    commits: usize,
}

type Reply = (u16, Value);

/// Answers a request that writes. `body` is what came of it.
pub(crate) fn answer(
    stream: &TcpStream,
    request: &Request,
    body: &[u8],
    state: &State,
) -> io::Result<()> {
    let path = request.path.split('?').next().unwrap_or_default().to_owned();
    let fault = state.take_fault(&path);
    match fault {
        Some(Fault::Status(status, headers)) => return plain(stream, status, &headers, "fault"),
        Some(Fault::Slow(_, time)) => thread::sleep(time),
        // It ends as it began.
        Some(Fault::Cut(_)) => return Ok(()),
        _ => {}
    }
    let signed = path.starts_with("/storage/");
    let mut storage = lock(&state.storage);
    let given = request.header("authorization").map(str::to_owned);
    let allowed =
        storage.token.as_ref().is_some_and(|token| given == Some(format!("Bearer {token}")));
    let (status, reply) = match (signed, allowed) {
        // A signed address: the token is not for it.
        (true, _) if given.is_some() => (400, json!({"error": "a token was sent to the storage"})),
        (true, _) => return store(stream, &path, body, &mut storage, state, &request.method),
        (false, false) => (if given.is_some() { 403 } else { 401 }, json!({"error": "no"})),
        (false, true) => {
            let host = request.header("host").unwrap_or_default().to_owned();
            change(&path, body, &mut storage, state, &host)
        }
    };
    plain(stream, status, "Content-Type: application/json\r\n", &reply.to_string())
}

fn change(path: &str, body: &[u8], storage: &mut Storage, state: &State, host: &str) -> Reply {
    let document: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |key: &str| document[key].as_str().unwrap_or_default().to_owned();
    if path == "/api/repos/create" {
        let id = format!("{}/{}", text("organization"), text("name"));
        let there = lock(&state.repos).iter().any(|repo| repo.id == id);
        if there || storage.empty.contains(&id) {
            return (409, json!({"error": "it is there"}));
        }
        storage.empty.push(id);
        return (200, json!({"url": path}));
    }
    if let Some((id, "main")) = parts(path, "/preupload/") {
        let files = document["files"].as_array().cloned().unwrap_or_default();
        let mode = |file: &Value| {
            let large = file["size"].as_u64().unwrap_or(0) >= 1024;
            let sample = BASE64.decode(file["sample"].as_str().unwrap_or_default());
            assert!(sample.is_ok_and(|sample| sample.len() <= 512), "{id}: {file}");
            json!({"path": file["path"], "uploadMode": if large { "lfs" } else { "regular" },
                "shouldIgnore": file["path"].as_str().is_some_and(|path| path.ends_with(".tmp"))})
        };
        return (200, json!({"files": files.iter().map(mode).collect::<Vec<_>>()}));
    }
    if path.ends_with(".git/info/lfs/objects/batch") {
        let objects = document["objects"].as_array().cloned().unwrap_or_default();
        let objects = objects.iter().map(|object| storage.place(object, host));
        return (200, json!({"transfer": "basic", "objects": objects.collect::<Vec<_>>()}));
    }
    if path.ends_with("/verify") {
        let there = storage.contents.contains_key(&text("oid"));
        return (if there { 200 } else { 404 }, json!({}));
    }
    match parts(path, "/commit/") {
        Some((id, "main")) => commit(id, body, storage, state),
        _ => (404, json!({"error": "there is no such address"})),
    }
}

fn parts<'a>(path: &'a str, word: &str) -> Option<(&'a str, &'a str)> {
    path.strip_prefix("/api/models/")?.split_once(word)
}

impl Storage {
    /// Place of an object; none where it is there.
    fn place(&self, object: &Value, host: &str) -> Value {
        let oid = object["oid"].as_str().unwrap_or_default();
        let size = usize::try_from(object["size"].as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
        if self.contents.contains_key(oid) {
            return json!({"oid": oid, "size": size});
        }
        let verify = json!({"href": format!("http://{host}/{oid}/verify"), "header": {}});
        let href = format!("http://{host}/storage/{oid}");
        let upload = match self.part.filter(|part| size > *part) {
            None => json!({"href": href, "header": {"X-Signed": "yes"}}),
            Some(part) => {
                let mut header = json!({"chunk_size": part.to_string()});
                for number in 1..=size.div_ceil(part) {
                    header[number.to_string()] = json!(format!("{href}/{number}"));
                }
                json!({"href": format!("{href}/complete"), "header": header})
            }
        };
        json!({"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}})
    }
}

/// A content, a part of one, or the end of its parts.
fn store(
    stream: &TcpStream,
    path: &str,
    body: &[u8],
    storage: &mut Storage,
    state: &State,
    method: &str,
) -> io::Result<()> {
    let mut words = path.trim_start_matches("/storage/").split('/');
    let oid = words.next().unwrap_or_default().to_owned();
    let what = words.next();
    let mut etag = String::new();
    let whole = match (method, what.map(str::parse::<usize>)) {
        ("PUT", None) => {
            state.received.fetch_add(body.len() as u64, Ordering::AcqRel);
            Some(body.to_vec())
        }
        ("PUT", Some(Ok(number))) => {
            state.received.fetch_add(body.len() as u64, Ordering::AcqRel);
            storage.parts.insert((oid.clone(), number), body.to_vec());
            etag = format!("ETag: \"part-{number}\"\r\n");
            None
        }
        _ => {
            let document: Value = serde_json::from_slice(body).unwrap_or_default();
            let listed = document["parts"].as_array().cloned().unwrap_or_default();
            let numbers = listed.iter().filter_map(|part| part["partNumber"].as_u64());
            let numbers = numbers.filter_map(|number| usize::try_from(number).ok());
            let part = |number| storage.parts.get(&(oid.clone(), number)).cloned();
            Some(numbers.filter_map(part).flatten().collect())
        }
    };
    if let Some(whole) = whole {
        if hex(Sha256::digest(&whole)) != oid {
            return plain(stream, 400, "", "another content");
        }
        storage.contents.insert(oid, whole);
    }
    plain(stream, 200, &etag, "")
}

fn commit(id: &str, body: &[u8], storage: &mut Storage, state: &State) -> Reply {
    storage.commits += 1;
    let commit = format!("{:040x}", 0xf0 + storage.commits);
    let mut repos = lock(&state.repos);
    let before = repos.iter().find(|repo| repo.is(id, "main"));
    let mut files = before.map(|repo| repo.files.clone()).unwrap_or_default();
    for line in body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Value = serde_json::from_slice(line).unwrap_or_default();
        let value = &line["value"];
        let path = value["path"].as_str().unwrap_or_default().to_owned();
        let (bytes, lfs) = match line["key"].as_str() {
            Some("file") => {
                let content = value["content"].as_str().unwrap_or_default();
                (BASE64.decode(content).unwrap_or_default(), false)
            }
            Some("lfsFile") => {
                let oid = value["oid"].as_str().unwrap_or_default();
                let Some(content) = storage.contents.get(oid) else {
                    return (400, json!({"error": format!("{path}: there is no {oid}")}));
                };
                (content.clone(), true)
            }
            _ => continue,
        };
        files.retain(|file| file.path != path);
        files.push(File { path, bytes, lfs, claimed: None });
    }
    for repo in repos.iter_mut().filter(|repo| repo.id == id) {
        repo.refs.clear();
    }
    repos.push(Repo { files, commit: commit.clone(), ..Repo::new(id, 'f') });
    (200, json!({"commitOid": commit, "commitUrl": format!("/{id}/commit/{commit}")}))
}
