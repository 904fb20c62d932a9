//! The file of external data of some graphs, in which equal tensors lie once.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use sha2::{Digest, Sha256};

/// Tensors begin at multiples of this.
const ALIGN: u64 = 64;

/// A file that is made when the first tensor is written.
pub(super) struct DataFile {
    path: PathBuf,
    file: Option<BufWriter<File>>,
    length: u64,
    /// Hash of the tensor that is being written.
    hash: Sha256,
    /// Offset and length of each tensor by the hash of its bytes.
    stored: HashMap<[u8; 32], [u64; 2]>,
}

impl DataFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None, length: 0, hash: Sha256::new(), stored: HashMap::new() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the tensor whose bytes `fill` writes, and returns its offset and length. Where the file has these
    /// bytes already, it has them once.
    pub(super) fn append(
        &mut self,
        fill: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<[u64; 2]> {
        let before = self.length;
        let padding = before.next_multiple_of(ALIGN) - before;
        self.write(&[0; ALIGN as usize][..padding as usize])?;
        let offset = self.length;
        self.hash.reset();
        fill(self)?;
        let place = [offset, self.length - offset];
        let digest = self.hash.finalize_reset().into();
        if let Some(earlier) = self.stored.get(&digest) {
            let earlier = *earlier;
            self.length = before;
            let start = SeekFrom::Start(before);
            self.file()?.seek(start).map_err(|e| self.failed(e))?;
            return Ok(earlier);
        }
        self.stored.insert(digest, place);
        Ok(place)
    }

    /// Writes a part of a tensor.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file()?.write_all(bytes).map_err(|e| self.failed(e))?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Finishes the file and returns its path; with no tensors there is none.
    pub(super) fn finish(mut self) -> Result<Option<PathBuf>> {
        let Some(file) = self.file.take() else { return Ok(None) };
        // What was written twice is still there after the end.
        let end = |file: File| file.set_len(self.length);
        let written = file.into_inner().map_err(std::io::IntoInnerError::into_error).and_then(end);
        written.map_err(|e| self.failed(e))?;
        Ok(Some(self.path))
    }

    fn file(&mut self) -> Result<&mut BufWriter<File>> {
        let file = match self.file.take() {
            Some(file) => file,
            None => BufWriter::with_capacity(
                1 << 20,
                File::create(&self.path).map_err(|e| Error::io(ErrorKind::Io, &self.path, e))?,
            ),
        };
        Ok(self.file.insert(file))
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::io(ErrorKind::Io, &self.path, error)
            .hint("is there room on the disk for the weights of the ONNX reference graph?")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_tensors_lie_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut data = DataFile::new(folder.path().join("data"));
        let mut put = |bytes: &[u8]| {
            data.append(|file| bytes.chunks(2).try_for_each(|part| file.write(part))).unwrap()
        };
        assert_eq!(put(b"abc"), [0, 3]);
        assert_eq!(put(b"defg"), [64, 4]);
        assert_eq!(put(b"abc"), [0, 3]);
        assert_eq!(put(b"ab"), [128, 2]);
        assert_eq!(put(b"defg"), [64, 4]);
        let path = data.finish().unwrap().unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(bytes.len(), 130);
        assert_eq!(
            (&bytes[..3], &bytes[64..68], &bytes[128..]),
            (&b"abc"[..], &b"defg"[..], &b"ab"[..])
        );
    }

    #[test]
    fn no_tensors_are_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        assert_eq!(DataFile::new(path.clone()).finish().unwrap(), None);
        assert!(!path.exists());
    }
}
