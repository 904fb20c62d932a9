//! Repositories of a hub.

use qhx_base::hash::hex;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// A file of a repository.
#[derive(Debug, Clone)]
pub struct File {
    /// Path in the repository.
    pub path: String,
    /// Content of the file.
    pub bytes: Vec<u8>,
    /// It is stored by its SHA-256 (LFS), not as a blob of Git.
    pub lfs: bool,
    /// The length that the API claims, where that is not the file's.
    pub claimed: Option<u64>,
}

impl File {
    /// The name of its blob in caches.
    pub fn etag(&self) -> String {
        if self.lfs {
            return hex(Sha256::digest(&self.bytes));
        }
        let mut hash = Sha1::new();
        hash.update(format!("blob {}\0", self.bytes.len()));
        hash.update(&self.bytes);
        hex(hash.finalize())
    }

    fn json(&self) -> Value {
        let bytes = self.claimed.unwrap_or(self.bytes.len() as u64);
        let mut json = json!({"rfilename": self.path, "size": bytes, "blobId": self.etag()});
        if self.lfs {
            json["blobId"] = json!("0".repeat(40));
            json["lfs"] = json!({"sha256": self.etag(), "size": bytes, "pointerSize": 134});
        }
        json
    }
}

/// One revision of a repository. The branch `main` is the revision that was given last.
#[derive(Debug, Clone)]
pub struct Repo {
    /// `OWNER/NAME`.
    pub id: String,
    /// The commit: 40 hexadecimal digits.
    pub commit: String,
    /// Branches and tags that lead to it.
    pub refs: Vec<String>,
    /// Its files.
    pub files: Vec<File>,
    /// Only this token may read it.
    pub token: Option<String>,
}

impl Repo {
    /// A revision without files, on the branch `main`. The commit is one digit, 40 times.
    pub fn new(id: &str, digit: char) -> Self {
        let commit = digit.to_string().repeat(40);
        Self {
            id: id.to_owned(),
            commit,
            refs: vec!["main".to_owned()],
            files: Vec::new(),
            token: None,
        }
    }

    /// Adds a small file, a blob of Git.
    #[must_use]
    pub fn file(mut self, path: &str, bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        self.files.push(File { path: path.to_owned(), bytes, lfs: false, claimed: None });
        self
    }

    /// Adds a large file.
    #[must_use]
    pub fn lfs(mut self, path: &str, bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        self.files.push(File { path: path.to_owned(), bytes, lfs: true, claimed: None });
        self
    }

    /// Adds the files of a folder, in a folder of the repository: those of 1 KiB and more as large ones.
    ///
    /// # Panics
    /// When the folder cannot be read.
    #[must_use]
    pub fn folder(mut self, name: &str, folder: &std::path::Path) -> Self {
        let mut entries: Vec<_> = std::fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        entries.sort();
        for path in entries {
            let last = path.file_name().expect("a name").to_string_lossy().into_owned();
            let name = if name.is_empty() { last } else { format!("{name}/{last}") };
            if path.is_dir() {
                self = self.folder(&name, &path);
                continue;
            }
            let bytes = std::fs::read(&path).expect("a file");
            self =
                if bytes.len() >= 1024 { self.lfs(&name, bytes) } else { self.file(&name, bytes) };
        }
        self
    }

    /// Adds a branch or tag.
    #[must_use]
    pub fn tagged(mut self, name: &str) -> Self {
        self.refs.push(name.to_owned());
        self
    }

    /// Only this token may read it.
    #[must_use]
    pub fn gated(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// The API claims this length of a file.
    ///
    /// # Panics
    /// When there is no such file.
    #[must_use]
    pub fn claiming(mut self, path: &str, bytes: u64) -> Self {
        let file = self.files.iter_mut().find(|file| file.path == path).expect("the file");
        file.claimed = Some(bytes);
        self
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes.len() as u64).sum()
    }

    pub(crate) fn is(&self, id: &str, revision: &str) -> bool {
        self.id == id && (self.commit == revision || self.refs.iter().any(|name| name == revision))
    }

    pub(crate) fn json(&self) -> Value {
        let files: Vec<_> = self.files.iter().map(File::json).collect();
        json!({"_id": "1", "id": self.id, "modelId": self.id, "sha": self.commit, "private": false,
            "gated": false, "disabled": false, "tags": [], "downloads": 0, "likes": 0,
            "siblings": files})
    }
}
