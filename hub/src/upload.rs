//! Puts files into a repository of a hub.
//!
//! Large files go to the hub's storage by the protocol of Git LFS, small ones within the commit. The storage is asked
//! first which contents it has: these are not sent again, whoever sent them. All files become visible in one commit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use qhx_base::hash::sha256;
use qhx_base::{CancelToken, Error, ErrorKind, Result, error, files};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::head::is_program_name;
use crate::http::{Client, Failure, encoded};
use crate::hub::{Hub, offline};
use crate::name::{Name, is_commit, is_safe_path};
use crate::wait::{interruptible, pause};

/// Bytes of the beginning of a file by which the hub judges how to store it.
const SAMPLE: usize = 512;
/// Longest file that goes within a commit.
const MAX_INLINE: u64 = 10 << 20;
/// Files of one question.
const BATCH: usize = 100;
/// Longest reply.
const MAX_REPLY: u64 = 16 << 20;
/// Most parts of a file.
const MAX_PARTS: u64 = 10_000;
/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(30);

const JSON: &str = "application/json";
const LFS: &str = "application/vnd.git-lfs+json";

/// A file on this machine, and its path in a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalFile {
    /// Path on this machine.
    pub path: PathBuf,
    /// Path in the repository, with `/` between parts.
    pub to: String,
}

/// Files to publish.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Publication {
    /// The repository; its revision is the branch, `main` by default.
    pub name: Name,
    /// The files.
    pub files: Vec<LocalFile>,
    /// Small files that are texts: path in the repository, and content.
    pub texts: BTreeMap<String, String>,
    /// First line of the commit's message.
    pub message: String,
    /// A repository that is made for it is private.
    pub private: bool,
}

impl Publication {
    /// Files for a repository, which becomes a public one if it is not there.
    pub fn new(name: Name, files: Vec<LocalFile>, message: impl Into<String>) -> Self {
        Self { name, files, texts: BTreeMap::new(), message: message.into(), private: false }
    }
}

/// A publication that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Published {
    /// The repository.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// Page of the repository.
    pub url: String,
    /// Number of files.
    pub files: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes of them that were sent; the storage had the rest.
    pub sent: u64,
}

/// Step of a publication.
#[derive(Debug)]
#[non_exhaustive]
pub enum UploadProgress<'a> {
    /// A file is hashed.
    Hash {
        /// Path in the repository.
        path: &'a str,
    },
    /// The files begin.
    Begin {
        /// Number of files.
        files: usize,
        /// Bytes of all.
        bytes: u64,
    },
    /// Bytes that the storage had.
    Kept(u64),
    /// Bytes that were sent.
    Sent(u64),
    /// A file failed, and is sent again after a pause.
    Retry {
        /// Path in the repository.
        path: &'a str,
        /// The failure.
        error: &'a Error,
        /// Length of the pause.
        wait: Duration,
    },
}

/// A file that was hashed.
struct Hashed<'a> {
    file: &'a LocalFile,
    bytes: u64,
    sha256: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mode {
    path: String,
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

#[derive(Deserialize)]
struct Modes {
    files: Vec<Mode>,
}

#[derive(Deserialize)]
struct Objects {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

impl Hub {
    /// Puts files into a repository, which is made if it is not there, in one commit. Contents that the hub's storage
    /// has are not sent: after an interruption the same call goes on with the files that are missing.
    ///
    /// # Errors
    /// When there is no token, the hub refuses it or cannot be reached, a file cannot be read or changes meanwhile, and
    /// when it is cancelled.
    pub fn publish(
        &self,
        publication: &Publication,
        progress: &dyn Fn(UploadProgress<'_>),
        cancel: &CancelToken,
    ) -> Result<Published> {
        if self.options().offline {
            return Err(offline(&publication.name));
        }
        let client = Client::new(self.options())?;
        if !client.has_token() {
            return Err(error!(Usage, "{}: publishing needs a token", publication.name).hint(
                "set HF_TOKEN to a token that may write; it is sent over https or loopback only",
            ));
        }
        let upload = Upload { hub: self, client: &client, publication, progress, cancel };
        interruptible(client.agent(), cancel, || upload.run())
    }
}

struct Upload<'a> {
    hub: &'a Hub,
    client: &'a Client,
    publication: &'a Publication,
    progress: &'a dyn Fn(UploadProgress<'_>),
    cancel: &'a CancelToken,
}

impl Upload<'_> {
    fn run(&self) -> Result<Published> {
        let Publication { name, files, texts, .. } = self.publication;
        let paths = files.iter().map(|file| &file.to).chain(texts.keys());
        if let Some(path) = paths.clone().find(|path| !is_safe_path(path)) {
            return Err(error!(Usage, "{path:?} cannot be a path of a repository"));
        }
        if let Some(file) = files.iter().find(|file| is_program_name(&file.to)) {
            return Err(error!(Usage, "{}: programs are not published", file.to)
                .hint("qhx pull fetches none: leave it out of the folder"));
        }
        let hashed = self.hash()?;
        let bytes = hashed.iter().map(|file| file.bytes).sum();
        self.make_repository()?;
        (self.progress)(UploadProgress::Begin { files: hashed.len() + texts.len(), bytes });
        let modes = self.modes(&hashed)?;
        let is_large =
            |file: &&Hashed<'_>| modes.get(&file.file.to).is_some_and(|mode| mode == "lfs");
        let (large, small): (Vec<_>, Vec<_>) = hashed.iter().partition(is_large);
        let mut sent = 0;
        // A content that several files have is sent once.
        let mut seen = BTreeSet::new();
        let contents: Vec<_> =
            large.iter().copied().filter(|file| seen.insert(file.sha256.as_str())).collect();
        let twice: u64 = large.iter().map(|file| file.bytes).sum::<u64>()
            - contents.iter().map(|file| file.bytes).sum::<u64>();
        (self.progress)(UploadProgress::Kept(twice));
        for part in contents.chunks(BATCH) {
            sent += self.send_large(part)?;
        }
        let commit = self.commit(&large, &small)?;
        sent += small.iter().map(|file| file.bytes).sum::<u64>();
        let repository = name.repository();
        let url = self.client.url(&repository);
        Ok(Published { repository, commit, url, files: hashed.len() + texts.len(), bytes, sent })
    }

    fn hash(&self) -> Result<Vec<Hashed<'_>>> {
        self.publication.files.iter().map(|file| self.hash_of(file)).collect()
    }

    fn hash_of<'b>(&self, file: &'b LocalFile) -> Result<Hashed<'b>> {
        let LocalFile { path, to } = file;
        (self.progress)(UploadProgress::Hash { path: to });
        let io = |e| Error::io(ErrorKind::Artifact, path, e);
        let open = File::open(path).map_err(io)?;
        let bytes = open.metadata().map_err(io)?.len();
        let sha256 = sha256(ErrorKind::Artifact, path, open, |_| self.cancel.check())?;
        Ok(Hashed { file, bytes, sha256 })
    }

    /// Posts, again after failures that may pass.
    fn post(&self, url: &str, media_type: &str, body: &[u8]) -> Result<Vec<u8>> {
        self.post_to(url, media_type, body, false)
    }

    fn post_to(&self, url: &str, media_type: &str, body: &[u8], signed: bool) -> Result<Vec<u8>> {
        self.again(url, || {
            let response = self.client.post(url, media_type, body, signed)?;
            let read = response.into_body().into_with_config().limit(MAX_REPLY).read_to_vec();
            read.map_err(|e| {
                Failure::Passing(Error::caused(ErrorKind::Io, "the hub's reply", e), None)
            })
        })
    }

    fn ask<T: DeserializeOwned>(&self, url: &str, media_type: &str, body: &Value) -> Result<T> {
        let reply = self.post(url, media_type, body.to_string().as_bytes())?;
        serde_json::from_slice(&reply).map_err(|e| {
            error!(Io, "{url}: a reply that is not understood: {e}")
                .with_source(e)
                .hint("is HF_ENDPOINT a hub, and no page that asks for a login stands between?")
        })
    }

    fn again<T>(&self, path: &str, mut work: impl FnMut() -> Result<T, Failure>) -> Result<T> {
        let options = self.hub.options();
        let mut failures = 0;
        loop {
            self.cancel.check()?;
            let (error, wait) = match work() {
                Ok(done) => return Ok(done),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error, wait)) => (error, wait),
                Err(Failure::Unreachable(error)) if failures == 0 => return Err(error),
                Err(Failure::Unreachable(error)) => (error, None),
            };
            failures += 1;
            if failures > options.attempts {
                return Err(error.hint("what was sent is kept: the same command goes on from it"));
            }
            let doubled = options.backoff.saturating_mul(1 << (failures - 1).min(10));
            let wait = wait.unwrap_or(doubled.min(MAX_PAUSE));
            (self.progress)(UploadProgress::Retry { path, error: &error, wait });
            pause(wait, self.cancel)?;
        }
    }

    fn make_repository(&self) -> Result<()> {
        let Publication { name, private, .. } = self.publication;
        let body = json!({
            "type": "model", "organization": name.owner, "name": name.name, "private": private,
        });
        let url = self.client.url("api/repos/create");
        match self.post(&url, JSON, body.to_string().as_bytes()) {
            // It is there.
            Err(e) if e.code() == Some(409) => Ok(()),
            Err(e) if matches!(e.code(), Some(401 | 403)) => {
                let repository = name.repository();
                Err(e.with_message(format!("{repository}: the hub does not let this token write there"))
                    .hint("compare the owner with the token's user, and the token's rights: it has to write"))
            }
            other => other.map(drop),
        }
    }

    /// Storage of each file: `lfs`, or `regular` within the commit.
    fn modes(&self, hashed: &[Hashed<'_>]) -> Result<BTreeMap<String, String>> {
        let name = &self.publication.name;
        let branch = encoded(name.revision_or_main());
        let url = self.client.url(&format!("api/models/{}/preupload/{branch}", name.repository()));
        let mut modes = BTreeMap::new();
        for part in hashed.chunks(BATCH) {
            let files = part.iter().map(|file| {
                let mut sample = Vec::new();
                let io = |e| Error::io(ErrorKind::Artifact, &file.file.path, e);
                let open = File::open(&file.file.path).map_err(io)?;
                open.take(SAMPLE as u64).read_to_end(&mut sample).map_err(io)?;
                let sample = BASE64.encode(sample);
                Ok(json!({"path": file.file.to, "size": file.bytes, "sample": sample}))
            });
            let files = files.collect::<Result<Vec<_>>>()?;
            let reply: Modes = self.ask(&url, JSON, &json!({"files": files}))?;
            for Mode { path, upload_mode, should_ignore } in reply.files {
                if should_ignore {
                    return Err(error!(Io, "{path}: the repository's .gitignore leaves it out")
                        .hint("remove the line there, or rename the file"));
                }
                modes.insert(path, upload_mode);
            }
        }
        for file in hashed {
            let large = file.bytes > MAX_INLINE;
            let mode = modes.entry(file.file.to.clone()).or_insert_with(|| "regular".to_owned());
            if large {
                *mode = "lfs".to_owned();
            }
        }
        Ok(modes)
    }

    /// Sends the contents that the storage does not have. Returns the bytes that were sent.
    fn send_large(&self, part: &[&Hashed<'_>]) -> Result<u64> {
        let repository = self.publication.name.repository();
        let url = self.client.url(&format!("{repository}.git/info/lfs/objects/batch"));
        let objects: Vec<_> =
            part.iter().map(|file| json!({"oid": file.sha256, "size": file.bytes})).collect();
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "hash_algo": "sha256",
            "objects": objects,
        });
        let reply: Objects = self.ask(&url, LFS, &body)?;
        let mut sent = 0;
        for file in part {
            let object = reply.objects.iter().find(|object| object.oid == file.sha256);
            let object = object
                .ok_or_else(|| error!(Io, "{}: the storage does not know of it", file.file.to))?;
            if let Some(ObjectError { message }) = &object.error {
                return Err(error!(Io, "{}: the storage refuses it: {message}", file.file.to));
            }
            let Some(upload) = object.actions.as_ref().and_then(|actions| actions.upload.as_ref())
            else {
                (self.progress)(UploadProgress::Kept(file.bytes));
                continue;
            };
            self.send(file, upload)?;
            sent += file.bytes;
            if let Some(verify) =
                object.actions.as_ref().and_then(|actions| actions.verify.as_ref())
            {
                let body = json!({"oid": file.sha256, "size": file.bytes}).to_string();
                self.post(&verify.href, LFS, body.as_bytes())?;
            }
        }
        Ok(sent)
    }

    fn send(&self, file: &Hashed<'_>, upload: &Action) -> Result<()> {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let header: BTreeMap<_, _> =
            upload.header.iter().map(|(name, value)| (name.clone(), text(value))).collect();
        let Some(size) = header.get("chunk_size") else {
            return self.send_part(file, &upload.href, &header, 0, file.bytes).map(drop);
        };
        let wrong = || error!(Io, "{}: the storage's parts are not understood", file.file.to);
        let size: u64 = size.parse().ok().filter(|size| *size > 0).ok_or_else(wrong)?;
        let count = file.bytes.div_ceil(size);
        if count > MAX_PARTS {
            return Err(wrong());
        }
        let mut addresses: Vec<(u64, &String)> =
            header.iter().filter_map(|(name, url)| Some((name.parse().ok()?, url))).collect();
        addresses.sort_unstable();
        if addresses.len() as u64 != count || addresses.iter().zip(1..).any(|((at, _), n)| *at != n)
        {
            return Err(wrong());
        }
        let mut parts = Vec::new();
        for (number, url) in addresses {
            let from = (number - 1) * size;
            let length = size.min(file.bytes - from);
            let etag = self.send_part(file, url, &BTreeMap::new(), from, length)?;
            let etag = etag.ok_or_else(wrong)?;
            parts.push(json!({"partNumber": number, "etag": etag}));
        }
        let body = json!({"oid": file.sha256, "parts": parts}).to_string();
        self.post_to(&upload.href, LFS, body.as_bytes(), true).map(drop)
    }

    /// Sends a part of a file. Returns the name that the storage gave it.
    fn send_part(
        &self,
        file: &Hashed<'_>,
        url: &str,
        header: &BTreeMap<String, String>,
        from: u64,
        length: u64,
    ) -> Result<Option<String>> {
        let LocalFile { path, to } = file.file;
        let io = |e| Error::io(ErrorKind::Artifact, path, e);
        self.again(to, || {
            let mut open = File::open(path).map_err(io)?;
            open.seek(SeekFrom::Start(from)).map_err(io)?;
            let mut reader = Counted { reader: open.take(length), upload: self, sent: 0 };
            let reply = self.client.put(url, header, &mut reader, length);
            if reader.sent < length && reply.is_ok() {
                return Err(
                    error!(Artifact, "{}: it became shorter meanwhile", path.display()).into()
                );
            }
            let reply = reply?;
            let etag = reply.headers().get("etag").and_then(|value| value.to_str().ok());
            Ok(etag.map(str::to_owned))
        })
    }

    /// Makes all files visible at once. Returns the commit.
    fn commit(&self, large: &[&Hashed<'_>], small: &[&Hashed<'_>]) -> Result<String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Reply {
            commit_oid: String,
        }
        let Publication { name, texts, message, .. } = self.publication;
        let mut lines =
            vec![json!({"key": "header", "value": {"summary": message, "description": ""}})];
        let inline = |path: &str, content: &[u8]| {
            let content = BASE64.encode(content);
            json!({"key": "file", "value": {"content": content, "path": path, "encoding": "base64"}})
        };
        for file in small {
            let content = files::read(ErrorKind::Artifact, &file.file.path, MAX_INLINE)?;
            lines.push(inline(&file.file.to, &content));
        }
        lines.extend(texts.iter().map(|(path, text)| inline(path, text.as_bytes())));
        lines.extend(large.iter().map(|file| {
            let (path, oid, size) = (&file.file.to, &file.sha256, file.bytes);
            json!({"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": oid, "size": size}})
        }));
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let branch = encoded(name.revision_or_main());
        let url = self.client.url(&format!("api/models/{}/commit/{branch}", name.repository()));
        let reply = self.post(&url, "application/x-ndjson", body.as_bytes())?;
        let reply: Option<Reply> = serde_json::from_slice(&reply).ok();
        let commit = reply.map(|reply| reply.commit_oid).filter(|commit| is_commit(commit));
        commit.ok_or_else(|| error!(Io, "{url}: the hub's reply names no commit"))
    }
}

/// Reader that reports what was read, and stops when it is cancelled.
struct Counted<'a> {
    reader: std::io::Take<File>,
    upload: &'a Upload<'a>,
    sent: u64,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.upload.cancel.check().map_err(std::io::Error::other)?;
        let read = self.reader.read(buffer)?;
        self.sent += read as u64;
        (self.upload.progress)(UploadProgress::Sent(read as u64));
        Ok(read)
    }
}
