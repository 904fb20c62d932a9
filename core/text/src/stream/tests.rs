//! Streamed text against what the library makes of all the tokens at once.

use serde_json::{Value, json};

use super::super::samples::{
    BYTE, REPLACEMENT_ID, byte_fallback, byte_fallback_json, byte_level, fixture, llama_decoder,
    open, unigram, word_piece,
};
use super::*;
use crate::samples::Rng;

fn stream(detokenizer: &mut Detokenizer, ids: &[u32]) -> Vec<String> {
    let mut pieces: Vec<_> =
        ids.iter().map(|&id| detokenizer.push(id).unwrap().to_owned()).collect();
    pieces.push(detokenizer.finish().unwrap().to_owned());
    pieces
}

fn after(tokenizer: &Tokenizer, prompt: &[u32], answer: &[u32]) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer);
    detokenizer.start(prompt).unwrap();
    stream(&mut detokenizer, answer).concat()
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(|b| BYTE + u32::from(b)).collect()
}

/// The text of an answer behind a prompt: what it adds to, or changes in, the prompt's own text.
/// `None` where the library cannot decode the tokens at all.
fn added(tokenizer: &Tokenizer, prompt: &[u32], whole: &[u32]) -> Option<String> {
    let (before, whole) = (tokenizer.decode(prompt).ok()?, tokenizer.decode(whole).ok()?);
    let common = before.chars().zip(whole.chars()).take_while(|(a, b)| a == b);
    Some(whole[common.map(|(a, _)| a.len_utf8()).sum::<usize>()..].to_owned())
}

/// Byte tokens that are not UTF-8 as tokens that are U+FFFD, so that the library leaves the
/// characters beside them alone.
fn without_broken_bytes(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    let mut clean = Vec::new();
    let mut run: Vec<u8> = Vec::new();
    for id in ids.iter().map(Some).chain([None]) {
        let token = id.and_then(|&id| tokenizer.visible_token(id));
        if id.is_some() && token.is_none() {
            continue;
        }
        if let Some(byte) = token.as_deref().and_then(byte_token) {
            run.push(byte);
            continue;
        }
        for chunk in run.utf8_chunks() {
            clean.extend(bytes(chunk.valid()));
            clean.extend(chunk.invalid().iter().map(|_| REPLACEMENT_ID));
        }
        run.clear();
        clean.extend(id);
    }
    clean
}

/// Thousands of random texts, half of them behind a prompt.
fn fuzz(tokenizer: &Tokenizer, seed: u64, draw: impl Fn(&mut Rng, &mut Vec<u32>), byte_runs: bool) {
    let mut rng = Rng::new(seed);
    let mut compared = 0;
    for round in 0..4_000 {
        let mut text = |max: u64| {
            let mut ids = Vec::new();
            for _ in 0..rng.below(max) {
                draw(&mut rng, &mut ids);
            }
            ids
        };
        let (prompt, answer) =
            if round % 2 == 0 { (Vec::new(), text(24)) } else { (text(12), text(12)) };
        let whole = [&prompt[..], &answer].concat();
        let expected = if byte_runs {
            let clean = |ids: &[u32]| without_broken_bytes(tokenizer, ids);
            added(tokenizer, &clean(&prompt), &clean(&whole))
        } else {
            added(tokenizer, &prompt, &whole)
        };
        let Some(expected) = expected else { continue };
        compared += 1;
        let streamed = after(tokenizer, &prompt, &answer);
        assert_eq!(streamed, expected, "{prompt:?} then {answer:?}");
    }
    assert!(compared > 2_000, "{compared}");
}

#[test]
fn answers_stream_as_transformers_decodes_them() {
    let tokenizer = byte_level();
    let goldens: Value =
        serde_json::from_slice(&std::fs::read(fixture("goldens.json")).unwrap()).unwrap();
    for case in goldens["cases"].as_array().unwrap() {
        let ids = |key: &str| serde_json::from_value::<Vec<u32>>(case[key].clone()).unwrap();
        let streamed = after(&tokenizer, &ids("prompt_ids"), &ids("output_ids"));
        assert_eq!(streamed, case["text"].as_str().unwrap());
    }
}

#[test]
fn a_character_comes_out_whole() {
    let tokenizer = byte_fallback();
    let mut detokenizer = Detokenizer::new(&tokenizer);
    let ids = [&[4], bytes("é").as_slice(), &[5], &bytes("你🙂"), &[6]].concat();
    let pieces = stream(&mut detokenizer, &ids);
    let expected = ["Hello", "", "é", " world", "", "", "你", "", "", "", "🙂", "!", ""];
    assert_eq!(pieces, expected);
}

#[test]
fn several_tokens_that_end_inside_a_character_lose_none() {
    // A token of the second half of one character and the first of the next, again and again.
    let mut document: Value =
        serde_json::from_slice(&std::fs::read(fixture("tokenizer.json")).unwrap()).unwrap();
    let level = |bytes: &[u8]| -> String {
        let c = |b: &u8| (0..0x144).filter_map(char::from_u32).find(|&c| level_byte(c) == Some(*b));
        bytes.iter().map(|b| c(b).unwrap()).collect()
    };
    let (first, between, last) = ([0xf0, 0x9f], [0x8d, 0x95, 0xf0, 0x9f], [0x8d, 0x95]);
    let vocab = document["model"]["vocab"].as_object_mut().unwrap();
    let next = vocab.values().filter_map(Value::as_u64).max().unwrap() + 100;
    for (i, token) in [&first[..], &between, &last].into_iter().enumerate() {
        vocab.insert(level(token), json!(next + i as u64));
    }
    let next = next as u32;
    let ids = [&[next][..], &[next + 1; 6], &[next + 2]].concat();
    let tokenizer = open(&document);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "🍕".repeat(7));
    let pieces = stream(&mut Detokenizer::new(&tokenizer), &ids);
    assert_eq!(pieces, [&[""][..], &["🍕"; 7], &[""]].concat());
}

#[test]
fn spaces_are_those_of_the_whole_text() {
    let tokenizer = byte_fallback();
    let mut detokenizer = Detokenizer::new(&tokenizer);
    assert_eq!(stream(&mut detokenizer, &[4, 5, 2, 5]), ["Hello", " world", "", " world", ""]);
    assert_eq!(after(&tokenizer, &[1, 4], &[5]), " world", "it continues the prompt");
    assert_eq!(after(&tokenizer, &[1], &[5]), "world", "nothing stands before it");
    // Only the first of several spaces is dropped.
    assert_eq!(stream(&mut detokenizer, &[3, 3, 5]), ["", " ", " world", ""]);
    assert_eq!(after(&unigram(), &[], &[2, 2, 3]), "  the");
}

#[test]
fn a_prompt_that_ends_in_byte_tokens_keeps_the_next_space() {
    let tokenizer = byte_fallback();
    let prompt = [&[4], bytes("🍕🍕").as_slice()].concat();
    assert_eq!(after(&tokenizer, &prompt, &[5]), " world");
    // The answer makes the prompt's character whole, or leaves it broken as the prompt shows it.
    assert_eq!(after(&tokenizer, &prompt[..7], &[&prompt[7..], &[5]].concat()), "🍕 world");
    assert_eq!(after(&tokenizer, &prompt[..7], &[5]), " world");
    assert_eq!(after(&tokenizer, &prompt[..7], &[]), "");
}

#[test]
fn bytes_that_are_no_character_come_out_as_replacements() {
    let tokenizer = byte_fallback();
    let mut detokenizer = Detokenizer::new(&tokenizer);
    // As many as the library makes: one for each byte of a byte fallback.
    assert_eq!(
        stream(&mut detokenizer, &[4, BYTE + 0xf0, BYTE + 0x9f]).concat(),
        "Hello\u{fffd}\u{fffd}"
    );
    // Text goes on after bytes that never make sense, and characters beside them stay.
    let mut ids = vec![BYTE + 0x80; 50];
    ids.extend([BYTE + 0xc3, BYTE + 0xa9, 5]);
    let text = stream(&mut detokenizer, &ids).concat();
    assert_eq!(text, "\u{fffd}".repeat(50) + "é world");
    assert_eq!(stream(&mut detokenizer, &[REPLACEMENT_ID, 6]), ["\u{fffd}", "!", ""]);
}

#[test]
fn what_is_held_back_does_not_grow() {
    for (tokenizer, ids) in [
        (byte_fallback(), vec![BYTE + 0xf0; 1000]),
        (byte_fallback(), bytes(&"🍕".repeat(300))),
        (byte_fallback(), vec![3; 1000]),
        (byte_level(), (0..1000).map(|i| i % 300).collect()),
        (unigram(), vec![2; 1000]),
    ] {
        let mut detokenizer = Detokenizer::new(&tokenizer);
        for id in ids {
            detokenizer.push(id).unwrap();
            assert!(detokenizer.held() < 4, "{detokenizer:?}");
        }
    }
}

#[test]
fn byte_level_tokens_stream_to_their_decoding() {
    let tokenizer = byte_level();
    let some = tokenizer.encode("é 你好🙂🍕 naïve — a b", false).unwrap();
    fuzz(
        &tokenizer,
        7,
        |rng, ids| match rng.below(4) {
            // Bytes of real characters, so that some become complete.
            0 => ids.extend(&some[rng.below(some.len() as u64) as usize..]),
            1 => ids.push(some[rng.below(some.len() as u64) as usize]),
            // Special tokens and ids that are no token are among these.
            _ => ids.push(rng.below(440) as u32),
        },
        false,
    );
}

fn draw_bytes(rng: &mut Rng, ids: &mut Vec<u32>) {
    match rng.below(6) {
        0 => ids.extend(bytes(["é", "你", "🙂", " ", "a"][rng.below(5) as usize])),
        1 => ids.extend(&bytes("🙂你")[..rng.below(7) as usize]),
        2 => ids.push(BYTE + rng.below(260) as u32),
        _ => ids.push(rng.below(u64::from(BYTE)) as u32),
    }
}

#[test]
fn byte_fallback_tokens_stream_to_their_decoding() {
    fuzz(&byte_fallback(), 8, draw_bytes, true);
}

#[test]
fn unigram_tokens_stream_to_their_decoding() {
    fuzz(&unigram(), 9, |rng, ids| ids.push(rng.below(14) as u32), false);
}

#[test]
fn word_pieces_stream_to_their_decoding() {
    fuzz(&word_piece(), 10, |rng, ids| ids.push(rng.below(20) as u32), false);
}

#[test]
fn other_decoders_stream_to_their_decoding() {
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"});
    let strip = |start: u32, stop: u32| json!({"type": "Strip", "content": " ", "start": start, "stop": stop});
    let sequence = |decoders: &[&Value]| json!({"type": "Sequence", "decoders": decoders});
    let (bytes, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    let ctc =
        json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "▁", "cleanup": true});
    for decoder in [
        json!(null),
        fuse.clone(),
        ctc,
        sequence(&[&replace, &bytes, &fuse]),
        sequence(&[&bytes, &fuse, &replace, &strip(2, 0)]),
        sequence(&[&llama_decoder(), &metaspace]),
        // The library panics where it strips the end of fewer than two characters.
        sequence(&[&replace, &fuse, &strip(0, 2)]),
        sequence(&[&bytes, &metaspace]),
        json!({"type": "BPEDecoder", "suffix": "▁"}),
        json!({"type": "BPEDecoder", "suffix": "o"}),
    ] {
        let mut document = byte_fallback_json();
        document["decoder"] = decoder.clone();
        let tokenizer = open(&document);
        let by_bytes = decoder.to_string().contains("ByteFallback");
        let draw = |rng: &mut Rng, ids: &mut Vec<u32>| {
            if by_bytes { draw_bytes(rng, ids) } else { ids.push(rng.below(12) as u32) }
        };
        fuzz(&tokenizer, 11, draw, by_bytes);
    }
}
