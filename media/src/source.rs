//! Source of an image or audio file, and its bytes.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use data_url::DataUrl;
use qhx_base::{Error, ErrorKind, Result, files};
use symphonia::core::io::MediaSource;

use crate::Limits;

/// First bytes by which formats are distinguished.
pub(crate) const HEAD: usize = 4096;

/// Source of an image, audio or video.
#[derive(Clone, PartialEq, Eq)]
pub enum Source {
    /// A file; for videos also a folder.
    File(PathBuf),
    /// Bytes of a file that lies in memory.
    Bytes {
        /// Name in messages.
        name: String,
        /// The file's bytes.
        bytes: Vec<u8>,
    },
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Bytes { name, bytes } => {
                f.debug_struct("Bytes").field("name", name).field("len", &bytes.len()).finish()
            }
        }
    }
}

/// Name of the source in messages: the path, or the name of the bytes.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Bytes { name, .. } => f.write_str(name),
        }
    }
}

impl Source {
    /// The source that a user wrote: a `data:` URL, or else a path.
    ///
    /// # Errors
    ///
    /// A URL without a comma, with a media type that is neither image, audio nor video, with text that is not base64,
    /// or with more bytes than the limit.
    pub fn parse(text: &str, limits: &Limits) -> Result<Self> {
        let scheme = text.trim_start().get(..5);
        if !scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:")) {
            return Ok(Self::File(PathBuf::from(text)));
        }
        let refused = |what: String| Error::new(ErrorKind::Prompt, format!("data URL: {what}"));
        let form = "the form is data:image/png;base64,iVBORw0…";
        let url = DataUrl::process(text)
            .map_err(|_| refused("no comma before the data".to_owned()).hint(form))?;
        let kind = url.mime_type();
        let media = ["image", "audio", "video"].contains(&kind.type_.as_str())
            || kind.matches("application", "octet-stream");
        if !media {
            let what = format!("media type {kind}, expected image/…, audio/… or video/…");
            return Err(refused(what).hint(form));
        }
        // The text takes at least as many bytes as what it stands for.
        if text.len() as u64 / 4 * 3 > limits.bytes {
            return Err(refused(format!("larger than {}", size(limits.bytes))));
        }
        let (bytes, _) = url.decode_to_vec().map_err(|e| {
            refused(format!("not base64: {e}"))
                .hint("was it cut off, or is it base64 of the kind for file names (- and _)?")
        })?;
        Ok(Self::Bytes { name: format!("data URL ({kind})"), bytes })
    }

    pub(crate) fn is_folder(&self) -> bool {
        matches!(self, Self::File(path) if path.is_dir())
    }

    /// All bytes.
    pub(crate) fn read(&self, limits: &Limits) -> Result<Cow<'_, [u8]>> {
        let bytes = match self {
            Self::File(path) => Cow::Owned(files::read(ErrorKind::Io, path, limits.bytes)?),
            Self::Bytes { bytes, .. } => Cow::Borrowed(bytes.as_slice()),
        };
        self.check_size(bytes.len() as u64, limits)?;
        Ok(bytes)
    }

    /// The bytes as a stream, and their number.
    pub(crate) fn open(&self, limits: &Limits) -> Result<Stream<'_>> {
        match self {
            Self::File(path) => {
                let file = files::open(ErrorKind::Io, path)?;
                let len = file.metadata().map_err(|e| Error::io(ErrorKind::Io, path, e))?.len();
                self.check_size(len, limits)?;
                Ok(Stream { bytes: Bytes::File(file), at: 0, len })
            }
            Self::Bytes { bytes, .. } => {
                let len = bytes.len() as u64;
                self.check_size(len, limits)?;
                Ok(Stream { bytes: Bytes::Memory(Cursor::new(bytes)), at: 0, len })
            }
        }
    }

    fn check_size(&self, bytes: u64, limits: &Limits) -> Result<()> {
        if bytes == 0 {
            return Err(self
                .refused("the file is empty (0 bytes)")
                .hint("copy or download it again"));
        }
        if bytes > limits.bytes {
            return Err(self.refused(format!("larger than {}", size(limits.bytes))));
        }
        Ok(())
    }

    /// An error about this source: `what`.
    pub(crate) fn refused(&self, what: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Prompt, format!("{self}: {what}"))
    }

    /// The error of a file that a decoder could not read to its end.
    pub(crate) fn broken(&self, format: &str, why: impl fmt::Display) -> Error {
        self.refused(format!("a broken or cut-off {format} file: {why}"))
            .hint("copy or download it again, or save it again with another program")
    }
}

/// Bytes as symphonia reads them.
pub(crate) struct Stream<'a> {
    bytes: Bytes<'a>,
    at: u64,
    /// Bytes that are read: all, or without the tags at the end.
    pub len: u64,
}

/// Bytes that come from elsewhere, once each.
pub(crate) struct Pipe<R>(Mutex<R>);

impl<R> Pipe<R> {
    pub fn new(input: R) -> Self {
        Self(Mutex::new(input))
    }
}

/// Reads of more bytes than symphonia buffers: it takes what they give for a whole packet.
const LARGE: usize = 32 << 10;

impl<R: Read> Read for Pipe<R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let input = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut filled = 0;
        while filled == 0 || buf.len() > LARGE {
            match input.read(buf.get_mut(filled..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(filled)
    }
}

impl<R> Seek for Pipe<R> {
    fn seek(&mut self, _: SeekFrom) -> std::io::Result<u64> {
        Err(std::io::ErrorKind::NotSeekable.into())
    }
}

impl<R: Read + Send> MediaSource for Pipe<R> {
    fn is_seekable(&self) -> bool {
        false
    }

    fn byte_len(&self) -> Option<u64> {
        None
    }
}

/// Bytes of an ID3v1 tag.
const ID3V1: u64 = 128;
/// Bytes of the footer of an APE tag.
const APE: u64 = 32;

impl Stream<'_> {
    /// Offset of the content behind tags of ID3, and its first bytes. The stream is at its beginning afterwards.
    pub fn head(&mut self, source: &Source) -> Result<(u64, Vec<u8>)> {
        self.read_head().map_err(|e| Error::caused(ErrorKind::Io, source, e))
    }

    fn read_head(&mut self) -> std::io::Result<(u64, Vec<u8>)> {
        let mut start = 0u64;
        let mut head = Vec::new();
        // Several tags are rare; more than a few are a trick.
        for _ in 0..4 {
            self.seek(SeekFrom::Start(start))?;
            head.clear();
            self.by_ref().take(HEAD as u64).read_to_end(&mut head)?;
            let [b'I', b'D', b'3', _, _, flags, sizes @ ..] = head.as_slice() else { break };
            let Some(sizes) = sizes.first_chunk::<4>() else { break };
            let size = sizes.iter().fold(0u64, |size, &byte| size << 7 | u64::from(byte & 0x7f));
            let footer = if flags & 0x10 == 0 { 0 } else { 10 };
            start = start.saturating_add(10 + size + footer);
        }
        self.seek(SeekFrom::Start(0))?;
        Ok((start, head))
    }

    /// Leaves out tags at the end (ID3v1, APE), which a decoder would take for audio. The stream is at its beginning
    /// afterwards.
    pub fn without_tags(&mut self, source: &Source) -> Result<()> {
        self.strip_tags().map_err(|e| Error::caused(ErrorKind::Io, source, e))
    }

    fn strip_tags(&mut self) -> std::io::Result<()> {
        if let Some(start) = self.len.checked_sub(ID3V1)
            && self.read_at::<3>(start)? == *b"TAG"
        {
            self.len = start;
        }
        if let Some(start) = self.len.checked_sub(APE) {
            let footer: [u8; 32] = self.read_at(start)?;
            let [b'A', b'P', b'E', b'T', b'A', b'G', b'E', b'X', rest @ ..] = footer else {
                return self.rewind();
            };
            let [_, _, _, _, s0, s1, s2, s3, _, _, _, _, _, _, _, flags, ..] = rest;
            // Its size counts the footer and not the header, which it may have.
            let header = if flags & 0x80 == 0 { 0 } else { APE };
            let size = u64::from(u32::from_le_bytes([s0, s1, s2, s3])) + header;
            self.len = self.len.saturating_sub(size.max(APE));
        }
        self.rewind()
    }

    /// The bytes at an offset of the stream.
    pub fn read_at<const N: usize>(&mut self, at: u64) -> std::io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.seek(SeekFrom::Start(at))?;
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

enum Bytes<'a> {
    File(File),
    Memory(Cursor<&'a Vec<u8>>),
}

impl Read for Stream<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let left = usize::try_from(self.len.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let max = left.min(buf.len());
        let buf = buf.get_mut(..max).unwrap_or_default();
        let read = match &mut self.bytes {
            Bytes::File(file) => file.read(buf),
            Bytes::Memory(bytes) => bytes.read(buf),
        }?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Stream<'_> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let to = match to {
            SeekFrom::End(offset) => {
                let at = self.len.checked_add_signed(offset);
                SeekFrom::Start(at.ok_or(std::io::ErrorKind::InvalidInput)?)
            }
            to => to,
        };
        self.at = match &mut self.bytes {
            Bytes::File(file) => file.seek(to),
            Bytes::Memory(bytes) => bytes.seek(to),
        }?;
        Ok(self.at)
    }
}

impl MediaSource for Stream<'_> {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.len)
    }
}

/// A number of bytes for people.
fn size(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{bytes} bytes"),
        mebibytes => format!("{mebibytes} MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Source> {
        Source::parse(text, &Limits::default())
    }

    #[test]
    fn an_argument_is_a_path_or_a_data_url() {
        assert_eq!(parsed("a/b.png").unwrap(), Source::File("a/b.png".into()));
        assert_eq!(parsed("data/b.png").unwrap(), Source::File("data/b.png".into()));
        let url = parsed("data:image/png;base64,iVBO\nRw0=").unwrap();
        assert_eq!(url.to_string(), "data URL (image/png)");
        let Source::Bytes { bytes, .. } = url else { panic!("{url:?}") };
        assert_eq!(bytes, b"\x89PNG\r");
        let Source::Bytes { bytes, .. } = parsed("DATA:audio/wav,RIFF%00").unwrap() else {
            panic!("not bytes")
        };
        assert_eq!(bytes, b"RIFF\0");
    }

    #[test]
    fn a_malformed_data_url_is_refused_with_a_reason() {
        let cases = [
            ("data:image/png;base64", "no comma"),
            ("data:text/html;base64,PGI+", "media type text/html, expected image/…"),
            ("data:,hello", "media type text/plain"),
            ("data:image/png;base64,iVBO!w0=", "not base64: symbol with codepoint 33"),
            ("data:image/png;base64,iVBOR", "not base64"),
            ("data:image/png;base64,iVBO-w0_", "not base64"),
        ];
        for (text, says) in cases {
            let error = parsed(text).unwrap_err();
            assert!(error.message().starts_with("data URL: "), "{error}");
            assert!(error.message().contains(says), "{text}: {error}");
            assert!(error.hint_text().is_some(), "{text}: {error}");
        }
        let limits = Limits { bytes: 1 << 20, ..Limits::default() };
        let large = format!("data:image/png;base64,{}", "A".repeat(2 << 20));
        let error = Source::parse(&large, &limits).unwrap_err();
        assert_eq!(error.message(), "data URL: larger than 1 MiB");
    }
}
