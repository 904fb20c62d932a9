//! A tokenizer keeps words that it has tokenized, and the memory for them does not grow for ever.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use qhx_text::Tokenizer;

/// Bytes of memory that this process has in use.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// Tokenizes `count` words that were not seen before.
fn new_words(tokenizer: &Tokenizer, seen: &mut usize, count: usize) {
    for _ in 0..count {
        // 120 letters, of which some 1 KB is kept.
        let letters = |digit: u8| char::from(b'a' + digit - b'0');
        let word: String = format!("{seen}").bytes().map(letters).collect();
        tokenizer.encode(&word.repeat(15), false).unwrap();
        *seen += 1;
    }
}

#[test]
fn tokenized_words_are_kept_within_bounds() {
    let file = qhx_paths::fixture("qwen35-tied").join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&file).unwrap();
    let mut seen = 10_000_000;
    let start = resident();
    // The first 10,000 are kept.
    new_words(&tokenizer, &mut seen, 10_000);
    let full = resident();
    assert!(full - start > 6 << 20, "{} bytes: the words are kept", full - start);
    new_words(&tokenizer, &mut seen, 10_000);
    let grown = resident().saturating_sub(full);
    assert!(grown < 3 << 20, "10,000 more words take {grown} bytes");
}
