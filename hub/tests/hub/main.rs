//! Downloads from a hub on loopback, which fails as it is asked to.

mod cache;
mod faults;
mod index;
mod layout;
mod publish;
mod refused;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use qhx_base::{CancelToken, Result};
use qhx_hub::{DownloadProgress, Found, Hub, HubOptions, Name, Pulled, Selection, Want};
use qhx_hub_server::{Repo, Server};

/// Bytes that look like weights.
pub(crate) fn weights(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// A bundle for v79 and one for v81, whose tables are the same.
pub(crate) fn repo() -> Repo {
    let mut repo = Repo::new("o/n", 'a').file("README.md", "a bundle");
    for (arch, seed) in [("v79", 1), ("v81", 2)] {
        repo = repo
            .file(&format!("{arch}/m.json"), format!("{{\"arch\": \"{arch}\"}}"))
            .lfs(&format!("{arch}/decode.bin"), weights(300_000, seed))
            .lfs(&format!("{arch}/tables/embed.bin"), weights(100_000, 3));
    }
    repo
}

pub(crate) fn is_manifest(name: &str) -> bool {
    name.ends_with(".json")
}

/// A hub that does not wait long.
pub(crate) fn options(server: &Server, cache: &Path) -> HubOptions {
    HubOptions::new(cache).endpoint(server.endpoint()).retries(3, Duration::from_millis(5))
}

/// A server of a repository, an empty cache, and a hub over both.
pub(crate) fn started(repo: Repo) -> (Server, tempfile::TempDir, Hub) {
    let (server, cache) = (Server::start([repo]), tempfile::tempdir().expect("a folder"));
    let hub = Hub::new(options(&server, cache.path()));
    (server, cache, hub)
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

pub(crate) fn select(hub: &Hub, text: &str) -> Result<Selection> {
    let name = name(text);
    let want = Want { folder: name.folder.clone(), ..Want::default() };
    want.select(&hub.resolve(&name, &CancelToken::new())?, is_manifest)
}

/// Downloads a bundle, and notes what is reported.
pub(crate) fn pull_noting(hub: &Hub, text: &str, notes: &Mutex<Vec<String>>) -> Result<Pulled> {
    let report = |progress: DownloadProgress<'_>| {
        let mut notes = notes.lock().expect("notes");
        match progress {
            DownloadProgress::Lost(bytes) if bytes > 0 => notes.push(format!("lost {bytes}")),
            DownloadProgress::Kept(bytes) if bytes > 0 => notes.push(format!("kept {bytes}")),
            DownloadProgress::Retry { path, error, .. } => {
                notes.push(format!("retry {path}: {error}"))
            }
            _ => {}
        }
    };
    hub.download(&select(hub, text)?, &report, &CancelToken::new())
}

pub(crate) fn pull(hub: &Hub, text: &str) -> Result<Pulled> {
    pull_noting(hub, text, &Mutex::default())
}

pub(crate) fn find(hub: &Hub, text: &str) -> Result<Option<Found>> {
    let name = name(text);
    let want = Want { folder: name.folder.clone(), ..Want::default() };
    hub.cache().find(&name, &want, is_manifest, &CancelToken::new())
}

/// Files below a folder, without notes and locks: path, or path and where its link leads.
pub(crate) fn tree(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inner) = folders.pop() {
        for entry in std::fs::read_dir(inner).expect("a folder") {
            let path = entry.expect("an entry").path();
            let shown = path.strip_prefix(folder).expect("below").display().to_string();
            if shown.contains(".qhx") || shown.starts_with(".locks") {
                continue;
            }
            match std::fs::read_link(&path) {
                Ok(target) => found.push(format!("{shown} -> {}", target.display())),
                Err(_) if path.is_dir() => folders.push(path),
                Err(_) => found.push(shown),
            }
        }
    }
    found.sort();
    found
}
