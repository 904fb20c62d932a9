//! Two things about MP4 and WebM files that symphonia does not say: whether the file is whole, and which of the audio
//! is not to be heard.

use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};

/// Boxes or elements that are looked at; a file of 24 hours has fewer.
const MAX_PARTS: usize = 1 << 24;

/// Findings about a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Bytes that its last part lacks.
    pub missing: u64,
    /// The edit of an MP4 file's first audio track.
    pub edit: Option<Edit>,
    /// Nanoseconds at the end of a WebM file's audio that are padding.
    pub padding: u64,
}

/// Part of a track that is to be heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Edit {
    /// Start in the track's own units of time.
    pub start: u64,
    /// Length, in units of a second divided by `scale`; 0 where it is not known.
    pub length: u64,
    pub scale: u32,
}

/// Walks the parts of a file of `len` bytes from `start` on.
struct Walk<R> {
    file: BufReader<R>,
    at: u64,
    len: u64,
}

impl<R: Read + Seek> Walk<R> {
    fn new(mut file: R, start: u64, len: u64) -> std::io::Result<Self> {
        file.seek(SeekFrom::Start(start))?;
        Ok(Self { file: BufReader::new(file), at: start, len })
    }

    fn bytes<const N: usize>(&mut self) -> std::io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> std::io::Result<u32> {
        Ok(u32::from_be_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> std::io::Result<u64> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    /// Goes to `to`; the number of bytes that are missing up to there.
    fn pass(&mut self, to: u64) -> std::io::Result<u64> {
        let by = to.min(self.len).saturating_sub(self.at);
        self.file.seek_relative(i64::try_from(by).unwrap_or(i64::MAX))?;
        self.at += by;
        Ok(to.saturating_sub(self.len))
    }
}

/// Findings of a walk that ended in the middle of a part where the file does.
fn ended(walked: std::io::Result<()>, mut found: Findings) -> std::io::Result<Findings> {
    match walked {
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => found.missing = found.missing.max(1),
        walked => walked?,
    }
    Ok(found)
}

/// Findings about an MP4 file.
///
/// # Errors
///
/// I/O errors of the file.
pub(crate) fn mp4(file: impl Read + Seek, start: u64, len: u64) -> std::io::Result<Findings> {
    let (mut walk, mut found) = (Walk::new(file, start, len)?, Findings::default());
    let walked = boxes(&mut walk, &mut found);
    ended(walked, found)
}

fn boxes(walk: &mut Walk<impl Read + Seek>, found: &mut Findings) -> std::io::Result<()> {
    let (mut scale, mut edit, mut done) = (0, None, false);
    for _ in 0..MAX_PARTS {
        if walk.at >= walk.len {
            break;
        }
        let begin = walk.at;
        let short = walk.u32()?;
        let name = walk.bytes::<4>()?;
        let size = match short {
            // To the end of the file.
            0 => walk.len - begin,
            1 => walk.u64()?,
            short => u64::from(short),
        };
        let end = begin.saturating_add(size);
        if end < walk.at {
            // The demuxer says what is wrong.
            break;
        }
        if end > walk.len {
            found.missing = end - walk.len;
            break;
        }
        match &name {
            b"moov" | b"edts" | b"mdia" => continue,
            b"trak" => {
                edit = None;
                continue;
            }
            // Version and flags, then times of creation and change, then units of time in a second.
            b"mvhd" => {
                let times = if walk.u32()? >> 24 == 1 { 16 } else { 8 };
                walk.pass(walk.at + times)?;
                scale = walk.u32()?;
            }
            b"elst" if !done => {
                let long = walk.u32()? >> 24 == 1;
                for _ in 0..walk.u32()?.min(8) {
                    let (length, start) = match long {
                        true => (walk.u64()?, walk.u64()?.cast_signed()),
                        false => (walk.u32()?.into(), walk.u32()?.cast_signed().into()),
                    };
                    // The rate.
                    walk.u32()?;
                    // Below 0 nothing is heard for a time.
                    if let (Ok(start), None) = (u64::try_from(start), edit) {
                        edit = Some(Edit { start, length, scale });
                    }
                }
            }
            b"hdlr" if !done => {
                walk.u64()?;
                if &walk.bytes::<4>()? == b"soun" {
                    (found.edit, done) = (edit, true);
                }
            }
            _ => {}
        }
        walk.pass(end)?;
    }
    Ok(())
}

/// Findings about a WebM or Matroska file, whose segment and clusters may declare no sizes, as those of a recording.
///
/// # Errors
///
/// I/O errors of the file.
pub(crate) fn webm(file: impl Read + Seek, start: u64, len: u64) -> std::io::Result<Findings> {
    let (mut walk, mut found) = (Walk::new(file, start, len)?, Findings::default());
    let walked = elements(&mut walk, &mut found);
    ended(walked, found)
}

fn elements(walk: &mut Walk<impl Read + Seek>, found: &mut Findings) -> std::io::Result<()> {
    const SEGMENT: u64 = 0x1853_8067;
    const CLUSTER: u64 = 0x1f43_b675;
    const BLOCK_GROUP: u64 = 0xa0;
    const DISCARD_PADDING: u64 = 0x75a2;
    for _ in 0..MAX_PARTS {
        if walk.at >= walk.len {
            break;
        }
        let Some((name, _)) = number(walk, true)? else { break };
        let Some((size, unknown)) = number(walk, false)? else { break };
        let within = matches!(name, SEGMENT | CLUSTER | BLOCK_GROUP);
        if unknown {
            // Any other one has an end that only a demuxer finds.
            if within { continue } else { break }
        }
        let end = walk.at.saturating_add(size);
        if end > walk.len {
            found.missing = end - walk.len;
            break;
        }
        if within {
            continue;
        }
        if name == DISCARD_PADDING && size <= 8 {
            let mut value = 0i64;
            for at in 0..size {
                let [byte] = walk.bytes()?;
                value =
                    if at == 0 { byte.cast_signed().into() } else { value << 8 | i64::from(byte) };
            }
            found.padding = u64::try_from(value).unwrap_or(0);
        }
        walk.pass(end)?;
    }
    Ok(())
}

/// A number of EBML, with its marker if `marked`, and true if its bits are all set, which stands for no number. `None`
/// if there is none.
fn number(walk: &mut Walk<impl Read + Seek>, marked: bool) -> std::io::Result<Option<(u64, bool)>> {
    let [first] = walk.bytes()?;
    let more = first.leading_zeros();
    if more == 8 {
        return Ok(None);
    }
    let mut value = u64::from(if marked { first } else { first & (0x7f >> more) });
    for _ in 0..more {
        let [byte] = walk.bytes()?;
        value = value << 8 | u64::from(byte);
    }
    Ok(Some((value, !marked && value == (1 << (7 * (more + 1))) - 1)))
}
