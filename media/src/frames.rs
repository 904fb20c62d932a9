//! Check for a whole last frame of an MP3 or AAC file: their decoders pass over one that is not.

use std::io::{BufRead as _, BufReader, Read, Seek, SeekFrom};

/// Kilobits per second of layer III, of MPEG 1 and of MPEG 2 and 2.5, by the header's code.
const RATES: [[u64; 15]; 2] = [
    [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
    [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
];
/// Samples per second of MPEG 1, by the header's code.
const HERTZ: [u64; 3] = [44_100, 48_000, 32_000];

/// Bytes that the last frame of the stream of MP3, or AAC if `adts`, from `start` on lacks; 0 where it is whole, and
/// where the frames do not follow one another to the end, which is the decoder's to judge.
///
/// # Errors
///
/// I/O errors of the file.
pub(crate) fn missing(
    file: &mut (impl Read + Seek),
    start: u64,
    adts: bool,
) -> std::io::Result<u64> {
    let whole = if adts { 6 } else { 4 };
    let begins = |second: u8| if adts { second & 0xf6 == 0xf0 } else { second & 0xe6 == 0xe2 };
    file.seek(SeekFrom::Start(start))?;
    let mut file = BufReader::with_capacity(1 << 16, file);
    loop {
        let mut header = [0; 6];
        let mut read = 0;
        while let Some(rest) = header.get_mut(read..whole).filter(|rest| !rest.is_empty()) {
            match file.read(rest)? {
                0 => break,
                more => read += more,
            }
        }
        let [sync, second, ..] = header;
        if read < whole {
            // The beginning of a header, or the end.
            let begun = read > 0 && sync == 0xff && (read == 1 || begins(second));
            return Ok(if begun { (whole - read) as u64 } else { 0 });
        }
        let Some(length) = length(header, adts) else { return Ok(0) };
        let mut left = length.saturating_sub(whole as u64);
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

/// Frames one behind the other that are no coincidence.
const ENOUGH: usize = 3;

/// True if `bytes` begin with frames of MP3, or AAC if `adts`, that follow one another.
pub(crate) fn follow_one_another(mut bytes: &[u8], adts: bool) -> bool {
    (0..ENOUGH).all(|_| {
        let header = bytes.first_chunk().copied();
        let length = header.and_then(|header| length(header, adts)).unwrap_or(0);
        bytes = usize::try_from(length).ok().and_then(|length| bytes.get(length..)).unwrap_or(&[]);
        length > 0
    })
}

/// Bytes of the frame with this header.
fn length(header: [u8; 6], adts: bool) -> Option<u64> {
    let [sync, second, third, fourth, fifth, sixth] = header;
    if !adts {
        return layer_iii([sync, second, third, fourth]);
    }
    let [high, middle, low] = [fourth & 3, fifth, sixth >> 5].map(u64::from);
    (sync == 0xff && second & 0xf6 == 0xf0).then_some(high << 11 | middle << 3 | low)
}

/// Bytes of the frame with this header, where it is one of layer III.
fn layer_iii([sync, version, rates, _]: [u8; 4]) -> Option<u64> {
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
