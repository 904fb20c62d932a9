//! SHA-256 of files, which bundles and lock files carry.

use std::fmt::Write as _;
use std::io::{ErrorKind as IoKind, Read};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::{Error, ErrorKind, Result};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;

/// SHA-256 of what `file`, opened at `path`, still holds, in lower-case hexadecimal. `each` is called with the length
/// of every chunk before it is hashed: its error ends the work.
///
/// # Errors
/// An error of kind `kind` if the file cannot be read, or the error of `each`.
pub fn sha256(
    kind: ErrorKind,
    path: &Path,
    mut file: impl Read,
    mut each: impl FnMut(usize) -> Result<()>,
) -> Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = match file.read(&mut buffer) {
            Err(e) if e.kind() == IoKind::Interrupted => continue,
            read => read.map_err(|e| Error::io(kind, path, e))?,
        };
        each(read)?;
        match buffer.get(..read) {
            Some(part @ [_, ..]) => hash.update(part),
            _ => return Ok(hex(hash.finalize())),
        }
    }
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_longer_than_a_chunk_is_hashed_whole() {
        let hash = |bytes: &[u8], read: &mut usize| {
            sha256(ErrorKind::Io, Path::new("f"), bytes, |more| {
                *read += more;
                Ok(())
            })
        };
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash(b"abc", &mut 0).unwrap(), abc);
        let long = vec![b'a'; CHUNK + 5];
        let mut read = 0;
        assert_eq!(hash(&long, &mut read).unwrap(), hex(Sha256::digest(&long)));
        assert_eq!(read, long.len());
    }

    #[test]
    fn an_error_of_the_caller_ends_the_hashing() {
        let cancelled = |_| Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        let error = sha256(ErrorKind::Io, Path::new("f"), &b"abc"[..], cancelled).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
    }
}
