//! `OWNER/NAME[@REVISION][/FOLDER]`: what users call a repository, or a folder in it.

use std::fmt;
use std::str::FromStr;

use qhx_base::{Error, error};
use serde::{Deserialize, Serialize};

pub(crate) use qhx_base::snapshot::is_commit;

/// Longest part of a name. The hub's own limit is 96.
const MAX_PART: usize = 96;

/// A repository of a hub, a revision of it and a folder or file in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub struct Name {
    /// User or organization that owns it.
    pub owner: String,
    /// Name without the owner.
    pub name: String,
    /// Branch, tag or commit.
    pub revision: Option<String>,
    /// Folder or file within, with `/` between parts.
    pub folder: Option<String>,
}

impl Name {
    /// `OWNER/NAME`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The revision, `main` where none is named.
    pub fn revision_or_main(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The revision is a commit, whose content never changes.
    pub fn is_pinned(&self) -> bool {
        is_commit(self.revision_or_main())
    }

    /// The same revision of the repository, and this folder in it.
    #[must_use]
    pub fn within(mut self, folder: &str) -> Self {
        self.folder = Some(folder.to_owned()).filter(|folder| !folder.is_empty());
        self
    }

    /// The same repository at this revision, without a folder.
    #[must_use]
    pub fn at(mut self, revision: &str) -> Self {
        (self.revision, self.folder) = (Some(revision.to_owned()), None);
        self
    }

    /// The name of its folder in a cache.
    pub(crate) fn cache_folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// The name of a folder in a cache.
    pub(crate) fn of_cache_folder(folder: &str) -> Option<Self> {
        let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{owner}/{name}").parse().ok()
    }
}

pub(crate) fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// True for a path that stays in its folder on every system: parts of ordinary names between `/`.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let is_safe = |part: &str| {
        let bad = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
        !part.is_empty()
            && part.len() < 255
            && !part.contains(bad)
            && !part.ends_with(['.', ' '])
            && !is_reserved(part)
    };
    path.len() < 1024 && path.split('/').all(is_safe)
}

/// Names that are devices on Windows, with any extension.
fn is_reserved(part: &str) -> bool {
    let stem = part.split('.').next().unwrap_or_default().trim_end();
    let digit = |rest: &str| rest.len() == 1 && rest.bytes().all(|b| b.is_ascii_digit());
    let upper = stem.to_ascii_uppercase();
    ["CON", "PRN", "AUX", "NUL"].contains(&upper.as_str())
        || ["COM", "LPT"].iter().any(|name| upper.strip_prefix(name).is_some_and(digit))
}

fn is_part(part: &str) -> bool {
    part.len() <= MAX_PART
        && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && part.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && !part.contains("--")
        && !part.contains("..")
        && !part.ends_with(".git")
}

fn is_revision(text: &str) -> bool {
    let is_part =
        |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    is_safe_path(text)
        && !text.starts_with('-')
        && !text.contains("..")
        && !text.contains(['~', '^', ' ', '@', '%'])
        && text.split('/').all(is_part)
}

/// The revision that `text` begins with, and the folder behind it. Of a revision with `/` in its name only those of the
/// hub itself are distinguished from folders (`refs/pr/1`); in others it is written `%2F`.
fn revision(text: &str) -> (String, Option<&str>) {
    let parts = if text.starts_with("refs/") { 3 } else { 1 };
    let end = text.match_indices('/').nth(parts - 1).map(|(at, _)| at);
    let (revision, folder) = match end.and_then(|at| text.split_at_checked(at)) {
        Some((revision, folder)) => (revision, folder.strip_prefix('/')),
        None => (text, None),
    };
    (revision.replace("%2F", "/").replace("%2f", "/"), folder)
}

impl FromStr for Name {
    type Err = Error;

    /// A name such as `owner/name`, `owner/name@v1.2`, `owner/name@main/v81-w8`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            error!(Usage, "{text:?} is no name of a repository")
                .hint("expected OWNER/NAME, OWNER/NAME@REVISION or OWNER/NAME/FOLDER")
        };
        let (owner, rest) = text.split_once('/').ok_or_else(wrong)?;
        let end = rest.find(['@', '/']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at_checked(end).ok_or_else(wrong)?;
        let (revision, folder) = match rest.strip_prefix('@') {
            Some(rest) => {
                let (revision, folder) = revision(rest);
                (Some(revision), folder)
            }
            None => (None, rest.strip_prefix('/')),
        };
        // A slash at the end is what completion writes.
        let folder = folder.map(|folder| folder.strip_suffix('/').unwrap_or(folder));
        let folder = folder.filter(|folder| !folder.is_empty());
        let valid = is_part(owner)
            && is_part(name)
            && revision.as_deref().is_none_or(is_revision)
            && folder.is_none_or(is_safe_path);
        if !valid {
            return Err(wrong());
        }
        let (owner, name) = (owner.to_owned(), name.to_owned());
        Ok(Self { owner, name, revision, folder: folder.map(str::to_owned) })
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.to_string()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        if let Some(revision) = &self.revision {
            let hub = revision.starts_with("refs/");
            let text = if hub { revision.clone() } else { revision.replace('/', "%2F") };
            write!(f, "@{text}")?;
        }
        self.folder.iter().try_for_each(|folder| write!(f, "/{folder}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_alike() {
        let parts = |text: &str| {
            let name: Name = text.parse().unwrap();
            assert_eq!(name.to_string(), text.trim_end_matches('/'));
            (name.repository(), name.revision, name.folder)
        };
        let some = |text: &str| Some(text.to_owned());
        for (text, revision, folder) in [
            ("a/b", None, None),
            ("a/b/", None, None),
            ("a/b@v1.0", some("v1.0"), None),
            ("a/b/v81-w8/vlm", None, some("v81-w8/vlm")),
            ("a/b@main/v81", some("main"), some("v81")),
            ("a/b@refs/pr/3/v81", some("refs/pr/3"), some("v81")),
            ("a/b@x%2Fy/v81", some("x/y"), some("v81")),
        ] {
            assert_eq!(parts(text), ("a/b".to_owned(), revision, folder), "{text}");
        }
    }

    #[test]
    fn what_leaves_a_folder_is_no_name() {
        for text in [
            "a",
            "/a",
            "a/",
            "/a/b",
            "./a",
            "../a",
            "a/..",
            "~/b",
            "a/b/../c",
            "a/b/./c",
            "a//b",
            "a/b//c",
            "a--b/c",
            "a/b--c",
            "a/b@",
            "a/b@../x",
            "a/b@-x",
            "a/b@.x",
            "a/b@x/../y",
            "a/b/c\\d",
            "a/b/c:d",
            "a/b/nul.bin",
            "a/b/COM1",
            "a/b/x.",
            "a/b@x.lock",
            "a/b/\u{1b}",
            "C:/b",
            "a/b.git",
            "ä/b",
        ] {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
        assert!(format!("a/{}", "b".repeat(97)).parse::<Name>().is_err());
    }
}
