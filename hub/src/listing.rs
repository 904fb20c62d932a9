//! The files of a revision, as the hub lists them.

use qhx_base::{Result, error};
use serde::Deserialize;

use crate::blob::BlobId;
use crate::name::{Name, is_commit};

/// Longest list that is read.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// The files of a revision.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Listing {
    /// The name that was asked for.
    pub name: Name,
    /// The commit that its revision leads to.
    pub commit: String,
    /// All files of the commit.
    pub files: Vec<RemoteFile>,
}

/// A file of a hub.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteFile {
    /// Path in the repository, as the hub gives it.
    pub path: String,
    /// Length. `None` where the hub does not say.
    pub bytes: Option<u64>,
    /// Name of its content. `None` where the hub does not say.
    pub blob: Option<BlobId>,
}

#[derive(Deserialize)]
struct Document {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Reads what the hub's API gives.
    pub(crate) fn parse(name: &Name, bytes: &[u8]) -> Result<Self> {
        let wrong = |what: String| {
            let hint = "is HF_ENDPOINT a hub, and no page that asks for a login stands between?";
            error!(Io, "the list of files of {name}: {what}").hint(hint)
        };
        let document: Document =
            serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()).with_source(e))?;
        if !is_commit(&document.sha) {
            return Err(wrong(format!(
                "commit {:?}, expected 40 hexadecimal digits",
                document.sha
            )));
        }
        if name.is_pinned() && name.revision_or_main() != document.sha {
            return Err(wrong(format!("commit {}, which was not asked for", document.sha)));
        }
        let files = document.siblings.into_iter().map(Sibling::file).collect();
        Ok(Self { name: name.clone(), commit: document.sha, files })
    }

    /// Paths of all files.
    pub fn paths(&self) -> impl Iterator<Item = &str> + Clone {
        self.files.iter().map(|file| file.path.as_str())
    }
}

impl Sibling {
    fn file(self) -> RemoteFile {
        let (bytes, blob) = match self.lfs {
            Some(Lfs { sha256, size }) => (size.or(self.size), sha256),
            None => (self.size, self.blob_id),
        };
        let blob = blob.and_then(|name| BlobId::named(&name));
        RemoteFile { path: self.rfilename, bytes, blob }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_gives_lengths_and_hashes() {
        let (small, large) = ("a".repeat(40), "b".repeat(64));
        let text = serde_json::json!({"sha": "c".repeat(40), "siblings": [
            {"rfilename": "a.json", "size": 7, "blobId": small},
            {"rfilename": "b.bin", "size": 9, "blobId": small, "lfs": {"sha256": large, "size": 9}},
            {"rfilename": "c"}]});
        let name: Name = "o/n".parse().unwrap();
        let listing = Listing::parse(&name, text.to_string().as_bytes()).unwrap();
        let file = |path: &str, bytes, blob: Option<&str>| RemoteFile {
            path: path.to_owned(),
            bytes,
            blob: blob.and_then(BlobId::named),
        };
        let expected = [
            file("a.json", Some(7), Some(&small)),
            file("b.bin", Some(9), Some(&large)),
            file("c", None, None),
        ];
        assert_eq!(listing.files, expected);
        let pinned: Name = format!("o/n@{}", "d".repeat(40)).parse().unwrap();
        let error = Listing::parse(&pinned, text.to_string().as_bytes()).unwrap_err();
        assert!(error.message().ends_with("which was not asked for"), "{error}");
    }

    #[test]
    fn what_is_no_list_is_an_error() {
        let name: Name = "o/n".parse().unwrap();
        for text in ["", "<html>login</html>", "{}", r#"{"sha": "../../x"}"#, r#"{"sha": 1}"#] {
            let error = Listing::parse(&name, text.as_bytes()).unwrap_err();
            assert!(error.message().starts_with("the list of files of o/n: "), "{error}");
        }
    }
}
