//! Check for a whole last frame of an MP3 file: its decoder passes over one that is not.

use std::io::{BufRead as _, BufReader, Read, Seek, SeekFrom};

/// Kilobits per second of layer III, of MPEG 1 and of MPEG 2 and 2.5, by the header's code.
const RATES: [[u64; 15]; 2] = [
    [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
    [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
];
/// Samples per second of MPEG 1, by the header's code.
const HERTZ: [u64; 3] = [44_100, 48_000, 32_000];

/// Bytes that the last frame of the MP3 stream from `start` on lacks; 0 where it is whole, and where the frames do not
/// follow one another to the end, which is the decoder's to judge.
///
/// # Errors
///
/// I/O errors of the file.
pub(crate) fn missing(file: &mut (impl Read + Seek), start: u64) -> std::io::Result<u64> {
    file.seek(SeekFrom::Start(start))?;
    let mut file = BufReader::with_capacity(1 << 16, file);
    loop {
        let mut header = [0; 4];
        let mut read = 0;
        while let Some(rest) = header.get_mut(read..).filter(|rest| !rest.is_empty()) {
            match file.read(rest)? {
                0 => break,
                more => read += more,
            }
        }
        let header = match (read, header) {
            (4, header) => header,
            // The beginning of a header, or the end.
            (read @ 1.., [0xff, second, ..]) if read == 1 || second & 0xe6 == 0xe2 => {
                return Ok(4 - read as u64);
            }
            _ => return Ok(0),
        };
        let Some(length) = length(header) else { return Ok(0) };
        let mut left = length.saturating_sub(4);
        while left > 0 {
            let held = file.fill_buf()?.len();
            if held == 0 {
                return Ok(left);
            }
            let passed = left.min(held as u64);
            file.consume(passed as usize);
            left -= passed;
        }
    }
}

/// Bytes of the frame with this header, where it is one of layer III.
fn length([sync, version, rates, _]: [u8; 4]) -> Option<u64> {
    if sync != 0xff || version & 0xe6 != 0xe2 {
        return None;
    }
    // Of two bits: 0 is MPEG 2.5, 1 reserved, 2 MPEG 2, 3 MPEG 1.
    let (table, divisor, slots) = match version >> 3 & 3 {
        3 => (0, 1, 144_000),
        2 => (1, 2, 72_000),
        0 => (1, 4, 72_000),
        _ => return None,
    };
    let kilobits = *RATES.get(table)?.get(usize::from(rates >> 4)).filter(|rate| **rate > 0)?;
    let hertz = HERTZ.get(usize::from(rates >> 2 & 3))? / divisor;
    Some(slots * kilobits / hertz + u64::from(rates >> 1 & 1))
}
