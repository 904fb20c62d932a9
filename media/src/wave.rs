//! Headers of WAV files: a check that symphonia lacks, and the lengths that the writer of a pipe cannot know.

use std::io::{Read, Seek, SeekFrom};

/// Chunks before the samples that are looked at.
const CHUNKS: usize = 1024;
/// The code of formats with a channel mask, a bit for each loudspeaker.
const EXTENSIBLE: u16 = 0xfffe;

/// Error in the number of channels of a WAV file that begins at `start`, if there is one. symphonia gives channels that
/// the mask leaves out the bits above its highest one, of which there are 32 in all. A file that cannot be read has no
/// such error: the decoder reports it.
///
/// Leaves `file` at its beginning.
pub(crate) fn too_many_channels(file: &mut (impl Read + Seek), start: u64) -> Option<String> {
    let found = find(file, start).unwrap_or_default();
    file.seek(SeekFrom::Start(0)).ok()?;
    found
}

/// Bytes before the samples of a WAV file in a pipe that are read at most.
const HEADER: u64 = 1 << 20;
/// From here on, a number of bytes stands for one that is not known: sox writes 2 GiB less a page, arecord 2 GiB,
/// others 4 GiB less a byte or a header.
const UNKNOWN: u32 = (1 << 31) - (1 << 16);

/// Header of a WAV file that is still being written.
pub(crate) struct Header {
    /// All bytes before the samples, or what there is of them. A length that is not known is `u32::MAX`, which is what
    /// symphonia knows it by.
    pub bytes: Vec<u8>,
    /// True if the header declares how long the audio is.
    pub counted: bool,
}

/// Reads the header of a WAV file up to its samples.
///
/// # Errors
/// When `input` fails, or the samples do not begin within a MiB.
pub(crate) fn header(input: &mut impl Read) -> std::io::Result<Header> {
    let mut bytes = Vec::new();
    // "RIFF", a length and "WAVE"; then chunks.
    let mut more = 12;
    loop {
        if bytes.len() as u64 + more > HEADER {
            let what = "its samples do not begin within a MiB";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
        }
        let read = input.by_ref().take(more).read_to_end(&mut bytes)?;
        if (read as u64) < more {
            return Ok(Header { bytes, counted: true });
        }
        let start = bytes.len();
        input.by_ref().take(8).read_to_end(&mut bytes)?;
        let Some(&[a, b, c, d, ref length @ ..]) =
            bytes.get(start..).and_then(<[u8]>::first_chunk::<8>)
        else {
            return Ok(Header { bytes, counted: true });
        };
        let length = u32::from_le_bytes(*length);
        if [a, b, c, d] == *b"data" {
            // A writer that means to fill it in at the end leaves 0.
            let counted = (1..UNKNOWN).contains(&length);
            for at in [4, start + 4].into_iter().filter(|_| !counted) {
                if let Some(length) = bytes.get_mut(at..at + 4) {
                    length.fill(u8::MAX);
                }
            }
            return Ok(Header { bytes, counted });
        }
        more = u64::from(length) + u64::from(length % 2);
    }
}

fn find(file: &mut (impl Read + Seek), start: u64) -> std::io::Result<Option<String>> {
    // Behind "RIFF", a length and "WAVE".
    let mut at = start.saturating_add(12);
    for _ in 0..CHUNKS {
        file.seek(SeekFrom::Start(at))?;
        let mut head = [0; 8];
        file.read_exact(&mut head)?;
        let [a, b, c, d, length @ ..] = head;
        let length = u64::from(u32::from_le_bytes(length));
        match &[a, b, c, d] {
            b"data" => break,
            // Code, channels, rate, bytes per second, bytes per frame, bits, bytes that follow, valid bits, channel
            // mask.
            b"fmt " if length >= 40 => {
                let mut format = [0; 24];
                file.read_exact(&mut format)?;
                let [c0, c1, n0, n1, .., p0, p1, p2, p3] = format;
                let (code, channels) = (u16::from_le_bytes([c0, c1]), u16::from_le_bytes([n0, n1]));
                let mask = u32::from_le_bytes([p0, p1, p2, p3]);
                if code == EXTENSIBLE && !fit(channels, mask) {
                    return Ok(Some(format!(
                        "its header declares {channels} channels with the channel mask {mask:#x}"
                    )));
                }
            }
            _ => {}
        }
        at = at.saturating_add(8 + length + length % 2);
    }
    Ok(None)
}

/// True if channels beyond those of the mask find bits above its highest one.
fn fit(channels: u16, mask: u32) -> bool {
    let without = u32::from(channels).saturating_sub(mask.count_ones());
    without == 0 || without < u32::BITS && mask.leading_zeros() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_need_places() {
        assert!(fit(2, 3) && fit(1, 0) && fit(31, 0) && fit(2, u32::MAX) && fit(3, 1 << 30));
        assert!(!fit(32, 0) && !fit(u16::MAX, 3) && !fit(2, 1 << 31));
    }
}
