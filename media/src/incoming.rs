//! Audio that another program writes while it is read.

use std::fmt;
use std::io::{Cursor, Read};

use qhx_base::{Error, ErrorKind, Result};

use crate::format::Format;
use crate::source::HEAD;
use crate::{Audio, AudioReader, AudioRules, Limits, Source, decode_audio, frames};

/// Audio from a pipe, by its first bytes.
pub enum Incoming<'a> {
    /// A WAV file, which is decoded as it comes.
    Wave(Box<AudioReader<'a>>),
    /// A file of another format, read to its end.
    Whole(Audio),
    /// Anything else, its first bytes included: samples without a header.
    Samples(Box<dyn Read + Send + 'a>),
}

impl fmt::Debug for Incoming<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wave(reader) => f.debug_tuple("Wave").field(reader).finish(),
            Self::Whole(audio) => f.debug_tuple("Whole").field(audio).finish(),
            Self::Samples(_) => f.write_str("Samples"),
        }
    }
}

impl<'a> Incoming<'a> {
    /// Looks at what comes from `input`, which is `name` in messages. Waits for the first bytes, and for those of a
    /// WAV file's header.
    ///
    /// # Errors
    /// Errors of [`AudioReader::stream`] and of [`decode_audio`].
    pub fn open(
        name: &str,
        mut input: impl Read + Send + 'a,
        rules: &AudioRules,
        limits: &Limits,
    ) -> Result<Self> {
        let failed = |e| Error::caused(ErrorKind::Io, name, e);
        let mut head = Vec::new();
        input.by_ref().take(12).read_to_end(&mut head).map_err(failed)?;
        let format = Format::of(&head);
        if format == Some(Format::Wav) {
            let input = Cursor::new(head).chain(input);
            return AudioReader::stream(name, input, rules).map(|reader| Self::Wave(reader.into()));
        }
        let samples = match format {
            _ if head.starts_with(b"ID3") => false,
            // Samples may begin as a frame does, but not as several.
            Some(Format::Mp3 | Format::Adts) => {
                let more = (HEAD - head.len()) as u64;
                input.by_ref().take(more).read_to_end(&mut head).map_err(failed)?;
                !frames::follow_one_another(&head, format == Some(Format::Adts))
            }
            format => format.is_none(),
        };
        if samples {
            return Ok(Self::Samples(Box::new(Cursor::new(head).chain(input))));
        }
        let most = limits.bytes.saturating_add(1).saturating_sub(head.len() as u64);
        input.take(most).read_to_end(&mut head).map_err(failed)?;
        let source = Source::Bytes { name: name.to_owned(), bytes: head };
        decode_audio(&source, rules, limits).map(Self::Whole)
    }
}
