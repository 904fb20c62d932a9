//! The one check of WAV headers that symphonia lacks.

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
