//! A server whose catalog copies folders: the page's tests add and remove models with it.
//!
//! `catalog_server FOLDER [--serve NAME=BUNDLE]… [--index NAME=BUNDLE]…` serves some bundles, and offers others, which
//! it copies into FOLDER. Names that begin with `broken` fail.

#![expect(clippy::print_stdout, reason = "the address is the program's result")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qhx::{BackendChoice, CancelToken, Error, ErrorKind, PluginOptions, Result, Runtime};
use qhx_server::{Catalog, CatalogEntry, CatalogProgress, Server, ServerOptions};
use serde_json::{Value, json};

// The host-ops of the tiny models, linked in.
use qhx_ops_gemma4 as _;
use qhx_ops_llama as _;
use qhx_ops_qwen3vl as _;
use qhx_ops_qwen35 as _;
use qhx_ops_speech as _;

/// Parts of a copy.
const PARTS: u64 = 20;

/// Time that each part takes.
const PART: Duration = Duration::from_millis(75);

#[derive(Debug)]
struct Copies {
    folder: PathBuf,
    /// Names, and the folders of their bundles.
    index: Vec<(String, PathBuf)>,
}

impl Copies {
    fn find(&self, name: &str) -> Result<&Path> {
        let found = self.index.iter().find(|(known, _)| known == name);
        found
            .map(|(_, from)| from.as_path())
            .ok_or_else(|| Error::new(ErrorKind::Usage, format!("{name:?} is not in the index")))
    }
}

fn size(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.path().is_dir() {
        true => size(&entry.path()),
        false => entry.metadata().map_or(0, |file| file.len()),
    };
    entries.flatten().map(size).sum()
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target)?;
        } else {
            fs::copy(path, target)?;
        }
    }
    Ok(())
}

impl Catalog for Copies {
    fn entries(&self) -> Result<Vec<CatalogEntry>> {
        let entry = |(name, from): &(String, PathBuf)| {
            let (to, bytes) = (self.folder.join(name), size(from));
            let entry = CatalogEntry::new(name)
                .title(format!("{} (tiny)", name.replace('-', " ")))
                .licence("Apache-2.0".to_owned())
                .fetch_bytes(bytes);
            let note = name.starts_with("broken").then(|| "asks for accepted terms".to_owned());
            let does: &[&str] = match name.as_str() {
                name if name.contains("seeing") => &["text", "image"],
                name if name.contains("kokoro") => &["speak"],
                name if name.contains("whisper") => &["transcribe"],
                _ => &["text"],
            };
            let entry = entry.does(does.iter().copied()).note(note).disk_bytes(bytes);
            entry.here(to.exists()).bundle(to.exists().then_some(to))
        };
        Ok(self.index.iter().map(entry).collect())
    }

    fn obtain(
        &self,
        name: &str,
        progress: &(dyn Fn(CatalogProgress<'_>) + Sync),
        cancel: &CancelToken,
    ) -> Result<PathBuf> {
        let (from, to) = (self.find(name)?, self.folder.join(name));
        if to.exists() {
            return Ok(to);
        }
        let bytes = size(from);
        for part in 0..PARTS {
            cancel.check()?;
            let done = bytes * part / PARTS;
            progress(CatalogProgress { step: "fetching", done, total: Some(bytes) });
            std::thread::sleep(PART);
            if part > PARTS / 4 && name.starts_with("broken") {
                let error =
                    Error::new(ErrorKind::Io, format!("{name}: its terms are not accepted"));
                return Err(error.hint("accept them on the model's page, then pull it again"));
            }
        }
        copy(from, &to).map_err(|e| Error::io(ErrorKind::Io, &to, e))?;
        Ok(to)
    }

    fn remove(&self, name: &str) -> Result<u64> {
        self.find(name)?;
        let to = self.folder.join(name);
        let bytes = size(&to);
        fs::remove_dir_all(&to).map_err(|e| Error::io(ErrorKind::Io, &to, e))?;
        Ok(bytes)
    }

    fn doctor(&self) -> Result<Value> {
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "healthy": true,
            "checks": [
                {
                    "name": "platform", "health": "ok", "found": "linux x86_64",
                    "details": {"cores": 2, "builtin_ops": ["gemma4", "llama", "speech"]},
                },
                {"name": "cpu backend", "health": "ok", "found": env!("CARGO_PKG_VERSION")},
                {
                    "name": "qnn backend", "health": "missing",
                    "found": "no libraries are given or installed",
                    "hint": "run `qhx libraries install`, or give --htp FILE --qnn-system FILE",
                },
            ],
            "environment": {"QHX_CACHE_DIR": self.folder},
        }))
    }
}

fn main() -> Result<()> {
    let usage = || Error::new(ErrorKind::Usage, "expected FOLDER [--serve|--index NAME=BUNDLE]…");
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or_else(usage)?);
    let runtime = Runtime::builder()
        .backend(BackendChoice::Cpu)
        .plugins(PluginOptions::default().only_named(true))
        .build();
    let mut options =
        ServerOptions::default().runtime(runtime.clone()).listen([127, 0, 0, 1].into(), 0);
    let mut index = Vec::new();
    while let Some(option) = arguments.next() {
        let named = arguments.next().ok_or_else(usage)?;
        let (name, path) = named.split_once('=').ok_or_else(usage)?;
        match option.as_str() {
            "--serve" => options = options.bundle_as(name, runtime.bundle(path, None)?),
            "--index" => index.push((name.to_owned(), path.into())),
            _ => return Err(usage()),
        }
    }
    let server = Server::bind(options.catalog(Copies { folder, index }))?;
    println!("http://{}", server.address());
    server.run(&CancelToken::new())
}
