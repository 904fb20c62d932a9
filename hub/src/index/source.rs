//! Origin of an index: the program itself, a file, or a URL whose content is signed or known by its hash.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use jiff::Timestamp;
use minisign_verify::{PublicKey, Signature};
use qhx_base::{CancelToken, Error, ErrorKind, Result, error, files, hash::hex, setters};
use sha2::{Digest as _, Sha256};

use super::{Index, MAX_BYTES, is_sha256};
use crate::http::{Client, Failure};
use crate::options::HubOptions;
use crate::wait::interruptible;

/// Longest signature or public key that is read.
const MAX_SIGNATURE: u64 = 4096;
/// End of the name of a signature.
const SIGNATURE: &str = ".minisig";

/// Place of an index.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexSource {
    /// A file on this machine.
    File(PathBuf),
    /// A URL, and the SHA-256 of its content where that is known.
    Url {
        /// Address without a fragment.
        url: String,
        /// 64 hexadecimal digits.
        sha256: Option<String>,
    },
}

impl FromStr for IndexSource {
    type Err = Error;

    /// A path, or a URL such as `https://host/models.json#sha256=…`.
    fn from_str(text: &str) -> Result<Self, Error> {
        if !text.starts_with("http://") && !text.starts_with("https://") {
            return Ok(Self::File(PathBuf::from(text)));
        }
        let Some((url, fragment)) = text.split_once('#') else {
            return Ok(Self::Url { url: text.to_owned(), sha256: None });
        };
        let sha256 = fragment.strip_prefix("sha256=").map(str::to_ascii_lowercase);
        let sha256 = sha256.filter(|hash| is_sha256(hash)).ok_or_else(|| {
            error!(
                Usage,
                "{url}: fragment {fragment:?}, expected sha256= and 64 hexadecimal digits"
            )
        })?;
        Ok(Self::Url { url: url.to_owned(), sha256: Some(sha256) })
    }
}

impl fmt::Display for IndexSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Url { url, .. } => f.write_str(url),
        }
    }
}

/// Options of an index: where it comes from, and who signs it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct IndexOptions {
    /// Place of the index; `None` for the one that comes with the program.
    pub source: Option<IndexSource>,
    /// Public key of minisign: its text in Base64, or the path of its file.
    pub key: Option<String>,
    /// Folder that keeps what came from URLs.
    pub cache: PathBuf,
}

/// An index that was read, and what there is to say about it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loaded {
    /// The index.
    pub index: Index,
    /// Remarks for the user: it is a kept copy, expired, or older than the program's.
    pub notes: Vec<String>,
}

impl IndexOptions {
    /// The index that comes with the program.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self { source: None, key: None, cache: cache.into() }
    }

    setters! {
        /// Place of the index.
        source(source: impl Into<Option<IndexSource>>) => source = source.into(),
        /// Public key of minisign: its text in Base64, or the path of its file.
        key(key: impl Into<Option<String>>) => key = key.into(),
    }

    /// Reads the index. One from a URL has to be signed, or its hash be known; a copy of it is kept, and taken if the
    /// host cannot be reached.
    ///
    /// # Errors
    /// When it cannot be read, is no index, has another signature or hash, or is older than the kept copy.
    pub fn load(&self, hub: &HubOptions, cancel: &CancelToken) -> Result<Loaded> {
        let key = self.key.as_deref().map(public_key).transpose()?;
        let (bytes, mut notes, from) = match &self.source {
            None => return Ok(Loaded { index: Index::builtin().clone(), notes: Vec::new() }),
            Some(IndexSource::File(path)) => {
                (file(path, key.as_ref())?, Vec::new(), path.display().to_string())
            }
            Some(IndexSource::Url { url, sha256 }) => {
                let remote = Remote { url, sha256: sha256.as_deref(), key: key.as_ref() };
                let (bytes, notes) = remote.bytes(hub, &self.cache, cancel)?;
                (bytes, notes, url.clone())
            }
        };
        let index = Index::parse(&from, &bytes)?;
        let today = Timestamp::now().to_string();
        let today = today.get(..10).unwrap_or_default();
        if let Some(expires) = index.expires.as_deref().filter(|_| index.is_expired(today)) {
            notes.push(format!("{from} expired on {expires}: look for a newer one"));
        } else if index.date < Index::builtin().date {
            let own = &Index::builtin().date;
            notes.push(format!("{from} is of {}, the program's own index of {own}", index.date));
        }
        Ok(Loaded { index, notes })
    }
}

/// An index of a URL.
struct Remote<'a> {
    url: &'a str,
    sha256: Option<&'a str>,
    key: Option<&'a PublicKey>,
}

impl Remote<'_> {
    fn bytes(
        &self,
        hub: &HubOptions,
        cache: &Path,
        cancel: &CancelToken,
    ) -> Result<(Vec<u8>, Vec<String>)> {
        if self.sha256.is_none() && self.key.is_none() {
            return Err(error!(Usage, "{}: an index from a URL needs a signature or a hash", self.url)
                .hint("give the author's public key with --index-key, or the hash behind the URL: #sha256=…"));
        }
        let name = hex(Sha256::digest(self.url.as_bytes()));
        let kept = cache.join(format!("{name}.json"));
        let here = self.kept(&kept);
        if hub.offline {
            return here
                .ok_or_else(|| {
                    error!(
                        Io,
                        "{}: no copy of it is kept, and nothing is fetched offline", self.url
                    )
                    .hint("unset HF_HUB_OFFLINE to fetch it")
                })
                .map(|bytes| (bytes, Vec::new()));
        }
        // The hash says what it is: there is nothing newer.
        if let (Some(_), Some(bytes)) = (self.sha256, &here) {
            return Ok((bytes.clone(), Vec::new()));
        }
        let fetched = self.fetch(hub, cancel);
        let (bytes, signature) = match (fetched, here) {
            (Ok(fetched), here) => {
                self.refuse_older(&fetched.0, here.as_deref())?;
                fetched
            }
            (Err(Failure::Final(e)), _) => return Err(e),
            (Err(failure), None) => return Err(failure.into_error()),
            (Err(failure), Some(bytes)) => {
                let error = failure.into_error();
                return Ok((
                    bytes,
                    vec![format!("a kept copy of the index is taken: {}", error.message())],
                ));
            }
        };
        self.keep(&kept, &bytes, signature.as_deref())?;
        Ok((bytes, Vec::new()))
    }

    /// The kept copy, if it is still what it was.
    fn kept(&self, path: &Path) -> Option<Vec<u8>> {
        let bytes = files::read(ErrorKind::Io, path, MAX_BYTES).ok()?;
        let signature = files::read_text(ErrorKind::Io, &beside(path), MAX_SIGNATURE).ok();
        self.check(&bytes, signature.as_deref()).ok().map(|()| bytes)
    }

    fn fetch(
        &self,
        hub: &HubOptions,
        cancel: &CancelToken,
    ) -> Result<(Vec<u8>, Option<String>), Failure> {
        // No token: the index is no hub's.
        let mut options = hub.clone();
        options.token = None;
        options.endpoint = origin(self.url)?;
        let client = Client::new(&options)?;
        let mut outcome = Ok((Vec::new(), None));
        interruptible(client.agent(), cancel, || {
            outcome = self.ask(&client);
            Ok(())
        })?;
        let (bytes, signature) = outcome?;
        self.check(&bytes, signature.as_deref())?;
        Ok((bytes, signature))
    }

    fn ask(&self, client: &Client) -> Result<(Vec<u8>, Option<String>), Failure> {
        let read = |url: &str, limit: u64| -> Result<Vec<u8>, Failure> {
            let body =
                client.get(url, None)?.into_body().into_with_config().limit(limit).read_to_vec();
            body.map_err(|e| match e {
                ureq::Error::BodyExceedsLimit(_) => {
                    error!(Artifact, "{url}: longer than {limit} bytes").into()
                }
                e => Failure::Passing(Error::caused(ErrorKind::Io, url, e), None),
            })
        };
        let bytes = read(self.url, MAX_BYTES)?;
        if self.key.is_none() {
            return Ok((bytes, None));
        }
        let url = format!("{}{SIGNATURE}", self.url);
        let signature = read(&url, MAX_SIGNATURE).map_err(|failure| match failure {
            Failure::Final(e) if e.code() == Some(404) => unsigned(self.url, &url).into(),
            failure => failure,
        })?;
        let signature = String::from_utf8(signature).map_err(|_| no_signature(&url))?;
        Ok((bytes, Some(signature)))
    }

    fn check(&self, bytes: &[u8], signature: Option<&str>) -> Result<()> {
        if let Some(expected) = self.sha256 {
            let found = hex(Sha256::digest(bytes));
            if found != expected {
                return Err(error!(Artifact, "{}: sha256 {found}, expected {expected}", self.url)
                    .hint("the index was changed after the hash was made: ask its author"));
            }
        }
        let Some(key) = self.key else { return Ok(()) };
        let place = format!("{}{SIGNATURE}", self.url);
        let signature = signature.ok_or_else(|| unsigned(self.url, &place))?;
        verify(self.url, &place, bytes, signature, key)
    }

    /// Refuses an index that is older than the copy that was taken before.
    fn refuse_older(&self, bytes: &[u8], kept: Option<&[u8]>) -> Result<()> {
        let Some(kept) = kept.and_then(|kept| Index::parse(self.url, kept).ok()) else {
            return Ok(());
        };
        let fetched = Index::parse(self.url, bytes)?;
        if fetched.date < kept.date {
            let (found, newest) = (fetched.date, kept.date);
            return Err(error!(
                Artifact,
                "{}: it is of {found}, and one of {newest} was taken before", self.url
            )
            .hint("an old index may be replayed to hide an update: ask its author"));
        }
        Ok(())
    }

    fn keep(&self, path: &Path, bytes: &[u8], signature: Option<&str>) -> Result<()> {
        let write = |path: &Path, bytes: &[u8]| {
            let folder = path.parent().unwrap_or(path);
            std::fs::create_dir_all(folder)?;
            let mut new = tempfile::NamedTempFile::new_in(folder)?;
            std::io::Write::write_all(&mut new, bytes)?;
            new.persist(path).map(drop).map_err(|e| e.error)
        };
        let written = match signature {
            Some(signature) => write(&beside(path), signature.as_bytes()),
            None => Ok(()),
        };
        written.and_then(|()| write(path, bytes)).map_err(|e| Error::io(ErrorKind::Io, path, e))
    }
}

/// Reads a file, and its signature where a key is given.
fn file(path: &Path, key: Option<&PublicKey>) -> Result<Vec<u8>> {
    let bytes = files::read(ErrorKind::Io, path, MAX_BYTES)?;
    if let Some(key) = key {
        let place = beside(path);
        let (from, shown) = (path.display().to_string(), place.display().to_string());
        if !place.exists() {
            return Err(unsigned(&from, &shown));
        }
        let signature = files::read_text(ErrorKind::Io, &place, MAX_SIGNATURE)?;
        verify(&from, &shown, &bytes, &signature, key)?;
    }
    Ok(bytes)
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SIGNATURE);
    PathBuf::from(name)
}

fn unsigned(from: &str, place: &str) -> Error {
    error!(Artifact, "{from}: it is not signed: there is no {place}")
        .hint("ask its author for the signature, or take the index by its hash: URL#sha256=…")
}

fn no_signature(place: &str) -> Error {
    error!(Artifact, "{place}: it is no signature of minisign")
}

fn verify(from: &str, place: &str, bytes: &[u8], signature: &str, key: &PublicKey) -> Result<()> {
    let signature = Signature::decode(signature).map_err(|e| no_signature(place).with_source(e))?;
    key.verify(bytes, &signature, false).map_err(|e| {
        error!(Artifact, "{from}: its signature is not of this key, or it was changed: {e}")
            .with_source(e)
            .hint("compare the key with the one that the author published")
    })
}

/// A key of its text, or of the file that a path names.
fn public_key(text: &str) -> Result<PublicKey> {
    if let Ok(key) = PublicKey::from_base64(text.trim()) {
        return Ok(key);
    }
    let path = Path::new(text);
    let read = files::read_text(ErrorKind::Usage, path, MAX_SIGNATURE).map_err(|e| {
        e.context("the index's public key")
            .hint("expected minisign's public key in Base64, or its file")
    })?;
    PublicKey::decode(read.trim()).or_else(|_| PublicKey::from_base64(read.trim())).map_err(|e| {
        error!(Usage, "{}: it is no public key of minisign: {e}", path.display()).with_source(e)
    })
}

/// Scheme and host of a URL.
fn origin(url: &str) -> Result<String> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    let host = rest.split('/').next().unwrap_or(rest);
    if host.is_empty() || host.contains('@') {
        return Err(error!(Usage, "{url:?}: the index's URL has no host, or a password"));
    }
    Ok(format!("{scheme}://{host}"))
}
