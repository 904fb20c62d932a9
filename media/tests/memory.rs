//! Memory that an image may make its decoder take, in a program of its own: the highest memory of a process counts all
//! tests.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]

mod common;

use common::fixture;
use qhx_media::{ImageRules, Limits, Source, decode_image};

/// The zlib stream of `1 + 258 · matches` zeros: fixed Huffman codes for a zero and for matches of 258 bytes.
fn zeros(matches: usize) -> Vec<u8> {
    let mut bits = vec![1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0];
    (0..matches).for_each(|_| bits.extend([1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]));
    bits.extend([0; 7]);
    let mut stream = vec![0x78, 0x9c];
    stream
        .extend(bits.chunks(8).map(|byte| byte.iter().rev().fold(0u8, |all, bit| all << 1 | bit)));
    // Adler-32 of zeros.
    let length = (1 + 258 * matches) as u32 % 65_521;
    stream.extend((length << 16 | 1).to_be_bytes());
    stream
}

fn highest_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn a_huge_colour_profile_takes_no_memory() {
    let mut png = std::fs::read(fixture("rgba.png")).unwrap();
    let mut chunk = b"iCCPicc\0\0".to_vec();
    chunk.extend(zeros(2_000_000));
    let mut framed = (chunk.len() as u32 - 4).to_be_bytes().to_vec();
    framed.extend(&chunk);
    framed.extend(crc32fast::hash(&chunk).to_be_bytes());
    // Behind the signature and IHDR.
    png.splice(33..33, framed);
    drop(chunk);
    let before = highest_memory();
    let source = Source::Bytes { name: "profile.png".to_owned(), bytes: png };
    let read = decode_image(&source, &ImageRules::default(), &Limits::default()).unwrap();
    assert!(read.width > 0);
    let taken = highest_memory() - before;
    assert!(taken < 128 << 20, "{} MiB for a profile of 492 MiB", taken >> 20);
}
