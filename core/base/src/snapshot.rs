//! Location of a path in a hub cache: `models--OWNER--NAME/snapshots/COMMIT/…`, whose files are links to
//! `models--OWNER--NAME/blobs`.

use std::path::{Component, Path, PathBuf};

/// Digits of a commit.
const COMMIT: usize = 40;

/// A path in a cache of a hub.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The folder of the repository, `models--OWNER--NAME`.
    pub repository: PathBuf,
    /// The commit that the path belongs to.
    pub commit: String,
    /// The path within the snapshot, with `/` between parts; empty for the snapshot itself.
    pub inner: String,
}

/// Location of `path` in a hub cache, by the names of its folders. `None` for any other path.
pub fn locate(path: &Path) -> Option<Snapshot> {
    let absolute = std::path::absolute(path).ok()?;
    let mut folders = absolute.ancestors();
    let snapshot = folders.find(|folder| is_snapshot(folder))?;
    let inner = absolute.strip_prefix(snapshot).ok()?.components();
    let inner: Option<Vec<_>> = inner
        .map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .collect();
    Some(Snapshot {
        repository: snapshot.parent()?.parent()?.to_owned(),
        commit: snapshot.file_name()?.to_str()?.to_owned(),
        inner: inner?.join("/"),
    })
}

fn is_snapshot(folder: &Path) -> bool {
    let mut names = folder.ancestors().map(|folder| folder.file_name()?.to_str());
    let mut next = || names.next().flatten().unwrap_or_default();
    is_commit(next()) && next() == "snapshots" && next().starts_with("models--")
}

/// 40 hexadecimal digits.
pub fn is_commit(text: &str) -> bool {
    text.len() == COMMIT && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_recognised_by_their_folders() {
        let commit = "a".repeat(COMMIT);
        let root = std::path::absolute("hub").unwrap().join("models--o--n");
        let snapshot = root.join("snapshots").join(&commit);
        for (path, inner) in [("", ""), ("v81", "v81"), ("v81/vlm/m.json", "v81/vlm/m.json")] {
            let found = locate(&snapshot.join(path)).unwrap();
            assert_eq!((found.repository, found.commit.as_str()), (root.clone(), commit.as_str()));
            assert_eq!(found.inner, inner);
        }
        for path in ["snapshots/main/m.json", "blobs/x", "snapshots"] {
            assert_eq!(locate(&root.join(path)), None, "{path}");
        }
        assert_eq!(locate(&root.with_file_name("o").join("snapshots").join(&commit)), None);
        assert_eq!(locate(&snapshot.join("..").join("x")), None);
    }
}
