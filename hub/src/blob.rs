//! Names of file contents: the SHA-256 of large files, the hash of Git of small ones.

use qhx_base::hash::hex;
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::name::is_hex;

/// Name of a file's content, and of its file in a cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlobId {
    /// SHA-256 of the content, 64 hexadecimal digits.
    Sha256(String),
    /// SHA-1 of the content behind the header of a Git blob, 40 hexadecimal digits.
    Git(String),
}

impl BlobId {
    /// The content with this name.
    pub fn named(name: &str) -> Option<Self> {
        match name.len() {
            _ if !is_hex(name) => None,
            64 => Some(Self::Sha256(name.to_owned())),
            40 => Some(Self::Git(name.to_owned())),
            _ => None,
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Sha256(name) | Self::Git(name) => name,
        }
    }

    /// Algorithm of the hash.
    pub(crate) fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "sha256",
            Self::Git(_) => "git blob",
        }
    }

    /// Begins to hash a content of `bytes` bytes.
    pub(crate) fn hasher(&self, bytes: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Box::default()),
            Self::Git(_) => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {bytes}\0"));
                Hasher::Git(Box::new(hash))
            }
        }
    }
}

/// A hash under way.
#[derive(Clone)]
pub(crate) enum Hasher {
    Sha256(Box<Sha256>),
    Git(Box<Sha1>),
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::Git(hash) => hash.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> String {
        match self {
            Self::Sha256(hash) => hex(hash.finalize()),
            Self::Git(hash) => hex(hash.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_is_called_as_git_calls_it() {
        // `printf 'hello\n' | git hash-object --stdin`
        let id = BlobId::named("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        let mut hash = id.hasher(6);
        hash.update(b"hello\n");
        assert_eq!(hash.finish(), id.as_str());
        for name in ["", "..", "CE013625030BA8DBA906F756967F9E9CA394464A", "ce01"] {
            assert_eq!(BlobId::named(name), None, "{name}");
        }
    }
}
