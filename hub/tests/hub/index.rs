//! An index from a URL: signed, known by its hash, kept, replayed.

use std::time::Duration;

use qhx_base::hash::hex;
use qhx_base::{CancelToken, Result};
use qhx_hub::HubOptions;
use qhx_hub::index::{IndexOptions, IndexSource, Loaded};
use qhx_hub_server::{Fault, Repo, Server};
use sha2::{Digest as _, Sha256};

const INDEX: &[u8] = include_bytes!("signed/models.json");
const SIGNATURE: &[u8] = include_bytes!("signed/models.json.minisig");
const OLD: &[u8] = include_bytes!("signed/old.json");
const OLD_SIGNATURE: &[u8] = include_bytes!("signed/old.json.minisig");
/// The key of the signatures.
const KEY: &str = "RWSnlyCuB9/rMKK3rvgHuEp3mIgNxGVI9wUAEi46wGV2eMeCys6wAT56";
const OTHER: &str = "RWTKLbQX0DS6Ukj+1VIpoAV9OfY7Ih+E9zw2xtqHWJAhViQp4Sg/p4os";

struct Host {
    server: Server,
    folder: tempfile::TempDir,
}

impl Host {
    fn new(index: &[u8], signature: Option<&[u8]>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { server: Server::start([repo('a', index, signature)]), folder }
    }

    fn url(&self, fragment: &str) -> String {
        format!("{}/o/index/resolve/main/models.json{fragment}", self.server.endpoint())
    }

    fn load(&self, url: &str, key: Option<&str>, offline: bool) -> Result<Loaded> {
        let hub = HubOptions::new(self.folder.path()).offline(offline);
        let source: IndexSource = url.parse()?;
        IndexOptions::new(self.folder.path().join("indexes"))
            .source(source)
            .key(key.map(str::to_owned))
            .load(&hub.retries(1, Duration::ZERO), &CancelToken::new())
    }
}

fn repo(digit: char, index: &[u8], signature: Option<&[u8]>) -> Repo {
    let repo = Repo::new("o/index", digit).file("models.json", index);
    match signature {
        Some(signature) => repo.file("models.json.minisig", signature),
        None => repo,
    }
}

#[test]
fn a_signed_index_is_taken_and_kept() {
    let host = Host::new(INDEX, Some(SIGNATURE));
    let url = host.url("");
    assert!(host.load(&url, Some(KEY), false).unwrap().index.entry("signed").is_some());
    assert!(host.load(&url, Some(KEY), true).unwrap().notes.is_empty(), "offline: the kept copy");
    host.server.fault("models.json", Fault::Status(503, String::new()), 9);
    let loaded = host.load(&url, Some(KEY), false).unwrap();
    assert!(loaded.notes[0].starts_with("a kept copy of the index is taken: "), "{loaded:?}");
}

#[test]
fn an_index_that_nobody_signed_is_refused() {
    for (index, signature, key, expected) in [
        (INDEX, None, Some(KEY), "it is not signed: there is no "),
        (INDEX, Some(SIGNATURE), None, "needs a signature or a hash"),
        (INDEX, Some(SIGNATURE), Some(OTHER), "its signature is not of this key"),
        (OLD, Some(SIGNATURE), Some(KEY), "its signature is not of this key"),
        (INDEX, Some(b"x".as_slice()), Some(KEY), "it is no signature of minisign"),
        (INDEX, Some(SIGNATURE), Some("nonsense"), "the index's public key: "),
    ] {
        let host = Host::new(index, signature);
        let error = host.load(&host.url(""), key, false).unwrap_err();
        assert!(error.message().contains(expected), "{expected}: {error}");
        assert!(error.hint_text().is_some() || expected.contains("no signature of"), "{error}");
        assert!(!host.folder.path().join("indexes").exists(), "{expected}: nothing is kept");
    }
}

#[test]
fn an_older_index_does_not_replace_a_newer_one() {
    let host = Host::new(INDEX, Some(SIGNATURE));
    let url = host.url("");
    host.load(&url, Some(KEY), false).unwrap();
    host.server.publish(repo('b', OLD, Some(OLD_SIGNATURE)));
    let error = host.load(&url, Some(KEY), false).unwrap_err();
    assert!(
        error.message().ends_with("it is of 2026-11-01, and one of 2026-12-01 was taken before")
    );
    assert!(host.load(&url, Some(KEY), true).unwrap().index.entry("signed").is_some());
}

#[test]
fn a_hash_stands_for_a_signature() {
    let host = Host::new(INDEX, None);
    let url = host.url(&format!("#sha256={}", hex(Sha256::digest(INDEX))));
    host.load(&url, None, false).unwrap();
    let asked = host.server.requests().len();
    host.load(&url, None, false).unwrap();
    assert_eq!(host.server.requests().len(), asked, "it cannot have changed");
    let wrong = host.url(&format!("#sha256={}", "0".repeat(64)));
    let error = host.load(&wrong, None, false).unwrap_err();
    assert!(error.message().contains(": sha256 "), "{error}");
    assert!(host.load(&host.url("#sha256=12"), None, false).is_err());
}

#[test]
fn a_token_of_the_hub_stays_at_home() {
    let host = Host::new(INDEX, Some(SIGNATURE));
    let hub = HubOptions::new(host.folder.path()).endpoint(host.server.endpoint());
    let source: IndexSource = host.url("").parse().unwrap();
    let options = IndexOptions::new(host.folder.path()).source(source).key(KEY.to_owned());
    options.load(&hub.token("secret".to_owned()), &CancelToken::new()).unwrap();
    assert!(host.server.requests().iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn a_file_needs_no_signature_unless_a_key_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("models.json");
    std::fs::write(&path, INDEX).unwrap();
    let load = |key: Option<&str>| {
        let options = IndexOptions::new(folder.path()).source(IndexSource::File(path.clone()));
        let hub = HubOptions::new(folder.path());
        options.key(key.map(str::to_owned)).load(&hub, &CancelToken::new())
    };
    load(None).unwrap();
    assert!(load(Some(KEY)).unwrap_err().message().contains("it is not signed"));
    std::fs::write(folder.path().join("models.json.minisig"), SIGNATURE).unwrap();
    load(Some(KEY)).unwrap();
    let key = folder.path().join("key.pub");
    std::fs::write(&key, include_bytes!("signed/key.pub")).unwrap();
    load(key.to_str()).unwrap();
}
