//! Format of a file, by its first bytes.

use qhx_base::Result;

use crate::Source;

/// A format that is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Png,
    Jpeg,
    Webp,
    Gif,
    Wav,
    Flac,
    Ogg,
    Mp3,
    Adts,
    Mp4,
    Webm,
}

/// Kind of media that a file is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Image,
    Audio,
    Video,
}

impl Kind {
    fn expected(self) -> &'static str {
        match self {
            Self::Image => "an image (PNG, JPEG, WebP, GIF)",
            Self::Audio => "audio (WAV, FLAC, MP3, AAC, M4A, Ogg, WebM)",
            Self::Video => "a video (a folder of images, an animated GIF, PNG or WebP)",
        }
    }

    fn fix(self) -> &'static str {
        match self {
            Self::Image => "convert it to PNG",
            Self::Audio => "convert it to WAV: ffmpeg -i FILE out.wav",
            Self::Video => {
                "turn it into a folder of images: ffmpeg -i FILE -vf fps=2 FOLDER/%05d.png"
            }
        }
    }
}

impl Format {
    /// The name that users know.
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::Webp => "WebP",
            Self::Gif => "GIF",
            Self::Wav => "WAV",
            Self::Flac => "FLAC",
            Self::Ogg => "Ogg",
            Self::Mp3 => "MP3",
            Self::Adts => "AAC",
            Self::Mp4 => "MP4",
            Self::Webm => "WebM",
        }
    }

    /// The format of a file that begins with `head`.
    pub fn of(head: &[u8]) -> Option<Self> {
        match head {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::Webp),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Some(Self::Wav),
            [b'f', b'L', b'a', b'C', ..] => Some(Self::Flac),
            [b'O', b'g', b'g', b'S', ..] => Some(Self::Ogg),
            [0x1a, 0x45, 0xdf, 0xa3, ..] => Some(Self::Webm),
            // HEIC and AVIF are images in the same container.
            [_, _, _, _, b'f', b't', b'y', b'p', ..] if !infer::is_image(head) => Some(Self::Mp4),
            // A frame of AAC: all twelve bits of the sync word, and layer 0.
            [0xff, second, ..] if second & 0xf6 == 0xf0 => Some(Self::Adts),
            // A frame of layer III, with or without checksum, of MPEG 1, 2 or 2.5.
            [0xff, second, ..] if second & 0xe6 == 0xe2 => Some(Self::Mp3),
            _ => None,
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::Png | Self::Jpeg | Self::Webp | Self::Gif => Kind::Image,
            Self::Wav
            | Self::Flac
            | Self::Ogg
            | Self::Mp3
            | Self::Adts
            | Self::Mp4
            | Self::Webm => Kind::Audio,
        }
    }

    /// The format of a file that begins with `head`, if it may serve as `wanted`.
    ///
    /// # Errors
    ///
    /// The file is of another kind, or of no kind that is decoded: the message says of which.
    pub fn expect(source: &Source, head: &[u8], wanted: Kind) -> Result<Self> {
        let refused = |found: &str, fix: &str| {
            let expected = wanted.expected();
            Err(source.refused(format!("found {found}, expected {expected}")).hint(fix))
        };
        match Self::of(head) {
            Some(format) if format.kind() == wanted => Ok(format),
            Some(format) if wanted == Kind::Video && format.kind() == Kind::Image => Ok(format),
            // These hold videos, too.
            Some(Self::Mp4 | Self::Webm) => refused(&describe(head), wanted.fix()),
            Some(format) => {
                let (what, fix) = match format.kind() {
                    Kind::Audio => ("audio", "give it as audio"),
                    _ => ("an image", "give it as an image"),
                };
                refused(&format!("{what} ({})", format.name()), fix)
            }
            None => {
                let found = describe(head);
                refused(
                    &found,
                    if found == "text" { "is this the file that was meant?" } else { wanted.fix() },
                )
            }
        }
    }
}

/// Description of a file that is not decoded.
fn describe(head: &[u8]) -> String {
    if head.starts_with(b"RF64") {
        return "an RF64 file (WAV for more than 4 GB)".to_owned();
    }
    if let Some(kind) = infer::get(head) {
        return format!("a file of type {}", kind.mime_type());
    }
    let whole = match std::str::from_utf8(head) {
        Ok(text) => text,
        // The last character may go on behind the head.
        Err(e) if e.error_len().is_none() => {
            std::str::from_utf8(head.get(..e.valid_up_to()).unwrap_or_default()).unwrap_or_default()
        }
        Err(_) => "",
    };
    if !whole.is_empty() && !whole.contains(|c: char| c.is_control() && !c.is_whitespace()) {
        return "text".to_owned();
    }
    let first: Vec<String> = head.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("a file of unknown type that begins with the bytes {}", first.join(" "))
}
