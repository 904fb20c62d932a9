//! The compact model beside the one of the `tokenizers` crate.

use std::collections::BTreeMap;
use std::path::Path;

use qhx_base::ErrorKind;
use serde_json::{Value, json};
use tokenizers::{Model as _, OffsetType};

use super::super::model::Model;
use super::super::{Inner, Tokenizer, guarded};
use crate::samples::{Rng, added, byte_fallback_json, fixture, open};

/// What the library makes of a file.
fn library(bytes: &[u8]) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(bytes).unwrap()
}

fn is_compact(tokenizer: &Tokenizer) -> bool {
    matches!(tokenizer.inner.get_model(), Model::Bpe(_))
}

fn pick<'a>(rng: &mut Rng, from: &'a [String]) -> &'a str {
    &from[rng.below(from.len() as u64) as usize]
}

fn flip(rng: &mut Rng) -> bool {
    rng.below(2) == 0
}

/// Characters of the vocabularies, and some that are only in texts.
const KNOWN: [&str; 9] = ["a", "b", "c", "é", "▁", "🙂", "你", "<", "0"];
const UNKNOWN: [&str; 5] = ["x", "ß", "好", "🙃", "\u{1}"];

/// A vocabulary with merges by chance, and the model's rules by chance.
fn model(rng: &mut Rng) -> Value {
    let prefix = ["", "", "##"][rng.below(3) as usize];
    let suffix = ["", "", "</w>"][rng.below(3) as usize];
    let mut tokens: Vec<String> = KNOWN.map(str::to_owned).to_vec();
    if !prefix.is_empty() {
        tokens.extend(KNOWN.map(|token| format!("{prefix}{token}")));
    }
    if !suffix.is_empty() {
        tokens.extend(KNOWN.map(|token| format!("{prefix}{token}{suffix}")));
    }
    if flip(rng) {
        // Merged with it, a token stays as it is.
        tokens.push(String::new());
    }
    let mut merges = Vec::new();
    for _ in 0..rng.below(60) {
        let (left, right) = (pick(rng, &tokens).to_owned(), pick(rng, &tokens).to_owned());
        let Some(end) = right.strip_prefix(prefix) else { continue };
        let whole = format!("{left}{end}");
        if whole.len() > 30 {
            continue;
        }
        if !tokens.contains(&whole) {
            tokens.push(whole.clone());
        }
        // The same token in other ways.
        for (at, _) in whole.char_indices().skip(1) {
            let (one, other) = whole.split_at(at);
            let other = format!("{prefix}{other}");
            if tokens.iter().any(|t| t == one) && tokens.contains(&other) && flip(rng) {
                merges.push((one.to_owned(), other));
            }
        }
        merges.push((left, right));
    }
    for at in (1..merges.len()).rev() {
        merges.swap(at, rng.below(at as u64 + 1) as usize);
    }
    tokens.push("<unk>".to_owned());
    // Sometimes a byte is missing, and then no character becomes bytes.
    let bytes = (rng.below(4).min(2) * 128).saturating_sub(rng.below(2));
    tokens.extend((0..=255_u8).take(bytes as usize).map(|byte| format!("<0x{byte:02X}>")));
    for at in (1..tokens.len()).rev() {
        tokens.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let mut id = 0;
    let mut with_id = |token: String| {
        // Some ids have no token.
        id += 1 + u32::from(rng.below(5) == 0);
        (token, json!(id))
    };
    let vocab: serde_json::Map<_, _> = tokens.into_iter().map(&mut with_id).collect();
    let merges = match flip(rng) {
        true => merges.iter().map(|(left, right)| json!([left, right])).collect::<Vec<_>>(),
        false => merges.iter().map(|(left, right)| json!(format!("{left} {right}"))).collect(),
    };
    let affix = |affix: &str| if affix.is_empty() { Value::Null } else { affix.into() };
    let unknown = ["<unk>", "<unk>", "", "<none>"][rng.below(4) as usize];
    json!({"type": "BPE", "dropout": null,
           "unk_token": if flip(rng) { json!(unknown) } else { Value::Null },
           "continuing_subword_prefix": affix(prefix), "end_of_word_suffix": affix(suffix),
           "fuse_unk": flip(rng), "byte_fallback": flip(rng), "ignore_merges": flip(rng),
           "vocab": vocab, "merges": merges})
}

fn text(rng: &mut Rng) -> String {
    let length = if rng.below(20) == 0 { 300 } else { rng.below(24) };
    let characters: Vec<_> = KNOWN.into_iter().chain(KNOWN).chain(UNKNOWN).collect();
    (0..length).map(|_| characters[rng.below(characters.len() as u64) as usize]).collect()
}

#[test]
fn tokens_of_compact_tables_are_those_of_the_library() {
    let mut rng = Rng::new(7);
    let (mut same, mut failed, mut merged) = (0, 0, 0);
    for _ in 0..300 {
        let mut document = byte_fallback_json();
        document["model"] = model(&mut rng);
        document["truncation"] = Value::Null;
        document["padding"] = Value::Null;
        document["added_tokens"] = json!([added(1, "<s>"), added(2, "b🙂")]);
        let bytes = serde_json::to_vec(&document).unwrap();
        let (ours, library) = (open(&document), library(&bytes));
        assert!(is_compact(&ours), "{document}");
        let model = ours.inner.get_model();
        assert_eq!(ours.inner.get_vocab(true), library.get_vocab(true));
        assert_eq!(ours.vocab_size(), library.get_vocab_size(true));
        for id in 0..700 {
            assert_eq!(ours.id_to_token(id), library.id_to_token(id));
        }
        for _ in 0..40 {
            let text = text(&mut rng);
            // Twice, for the words that are kept.
            for _ in 0..2 {
                let tokens = model.tokenize(&text);
                match (tokens, library.get_model().tokenize(&text)) {
                    (Ok(found), Ok(expected)) => {
                        assert_eq!(found, expected, "{text:?} {document}");
                        same += found.len();
                        merged += usize::from(found.len() < text.chars().count());
                    }
                    (Err(found), Err(expected)) => {
                        assert_eq!(found.to_string(), expected.to_string());
                        failed += 1;
                    }
                    (found, expected) => panic!("{found:?} {expected:?} {text:?} {document}"),
                }
            }
            let Ok(expected) = library.encode(text.as_str(), true) else { continue };
            let found = ours.encoding(&text, true, OffsetType::Byte).unwrap();
            assert_eq!(found.get_ids(), expected.get_ids(), "{text:?} {document}");
            assert_eq!(found.get_offsets(), expected.get_offsets(), "{text:?} {document}");
            let ids = found.get_ids();
            let decoded = ours.decode_with_special(ids).unwrap();
            assert_eq!(decoded, library.decode(ids, false).unwrap(), "{ids:?} {document}");
        }
    }
    assert!(same > 50_000 && failed > 100 && merged > 3000, "{same} {failed} {merged}");
}

#[test]
fn a_real_byte_level_file_is_compact_and_the_same() {
    let bytes = std::fs::read(fixture("tokenizer.json")).unwrap();
    let (ours, library) = (crate::samples::byte_level(), library(&bytes));
    assert!(is_compact(&ours));
    let text = include_str!("tests.rs");
    let found = ours.encoding(text, true, OffsetType::Byte).unwrap();
    let expected = library.encode(text, true).unwrap();
    assert_eq!(found.get_ids(), expected.get_ids());
    assert_eq!(found.get_tokens(), expected.get_tokens());
    assert_eq!(found.get_offsets(), expected.get_offsets());
}

/// A file with this text as its model.
fn file(model: &str) -> String {
    format!(r#"{{"version": "1.0", "added_tokens": [], "model": {model}}}"#)
}

#[test]
fn forms_of_a_model_are_read_as_by_the_library() {
    const VOCAB: &str = r#""vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3}"#;
    const MERGES: &str = r#""merges": [["a", "b"], ["ab", "a"]]"#;
    // True where the model is one in compact tables.
    for (model, compact) in [
        (format!("{VOCAB}, {MERGES}"), true),
        (format!("{MERGES}, {VOCAB}"), true),
        (format!(r#"{VOCAB}, {MERGES}, "type": "BPE", "dropout": 0.0"#), true),
        (format!(r#"{VOCAB}, {MERGES}, "dropout": 1"#), false),
        (format!(r#"{VOCAB}, {MERGES}, "comment": {{"a": [1]}}, "type": "BPE""#), false),
        (format!(r##"{VOCAB}, "merges": ["#version: 0.2", "a b", "ab a"]"##), true),
        (format!(r#"{VOCAB}, "merges": []"#), true),
        // The last one of the same pair counts, so that the other merge comes first.
        (format!(r#"{VOCAB}, "merges": ["a b", "b a", "a b"]"#).replace("\"aba\"", "\"ba\""), true),
        (r#""type": "BPE", "vocab": {"\u0061": 1, "\"": 0}, "merges": []"#.to_owned(), true),
        (r#""vocab": {"a": 1, "a": 2, "b": 0}, "merges": []"#.to_owned(), false),
        (r#""vocab": {"a": 4294967295, "b": 0}, "merges": []"#.to_owned(), false),
        (r#""vocab": {}, "merges": []"#.to_owned(), true),
        (r#""vocab": {"": 0, " ": 1}, "merges": ["  "]"#.replace("\"  \"", "[\"\",\" \"]"), true),
        (
            r###""vocab": {"a": 0, "##b": 1, "ab": 2}, "merges": ["a ##b"],
                 "continuing_subword_prefix": "##""###
                .to_owned(),
            true,
        ),
        (
            // Tokens as long as the prefix add nothing, so that a merge of other tokens makes the token that a merge
            // before it made.
            r#""continuing_subword_prefix": "@@@@@@", "byte_fallback": true, "vocab": {"l": 0,
                 "@@@@@@r": 1, "lr": 2, "<0x40>": 3, "<0xC3>": 4, "<0xA9>": 5, "@@@@@@q": 6},
                 "merges": ["@@@@@@r <0x40>", "l @@@@@@r", "<0xC3> <0xA9>", "lr <0xC3>"]"#
                .to_owned(),
            true,
        ),
    ] {
        let file = file(&format!("{{{model}}}"));
        let library = library(file.as_bytes());
        let ours = Tokenizer::from_bytes(Path::new("t"), file.as_bytes()).unwrap();
        assert_eq!(is_compact(&ours), compact, "{model}");
        let sorted = |vocab: std::collections::HashMap<String, u32>| {
            vocab.into_iter().collect::<BTreeMap<_, _>>()
        };
        assert_eq!(sorted(ours.inner.get_vocab(true)), sorted(library.get_vocab(true)));
        for text in ["ababa", "bab", "aab", "\"a", "  a", "lréq"] {
            let (found, expected) = (ours.encode(text, true), library.encode(text, true));
            assert_eq!(found.unwrap(), expected.unwrap().get_ids(), "{model} {text}");
        }
    }
}

#[test]
fn a_model_that_is_wrong_is_refused_with_its_place() {
    let vocab = r#""type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}"#;
    let merges = |merges: &str| format!("{{{vocab}, \"merges\": {merges}}}");
    let tokens = |vocab: &str| format!(r#"{{"type": "BPE", "vocab": {vocab}, "merges": []}}"#);
    for (model, words) in [
        (merges(r#"["a b", "a c"]"#), "/model/merges/1: the token \"c\" is not in the vocabulary"),
        (merges(r#"[["b", "a"]]"#), "/model/merges/0: the token \"ba\" is not in the vocabulary"),
        (merges(r#"["a b c"]"#), "/model/merges/0: expected two tokens and one space between"),
        (merges(r#"["ab"]"#), "/model/merges/0: expected two tokens"),
        (merges(r#"["a b", ["a", "b"]]"#), "/model/merges/1: texts and pairs of tokens mixed"),
        (merges(r#"[["a"]]"#), "invalid length 1, expected two tokens"),
        (merges(r#"[["a", "b", "ab"]]"#), "invalid length 3, expected two tokens"),
        (merges("[3]"), "expected a pair of tokens"),
        (merges("{}"), "expected merges"),
        (merges("[], \"merges\": []"), "duplicate field `merges`"),
        (
            merges(&format!("[], \"end_of_word_suffix\": \"{}\"", "x".repeat(300))),
            "end_of_word_suffix has 300 bytes, at most 256 are allowed",
        ),
        (format!("{{{vocab}}}"), "/model: type \"BPE\" is not understood: Missing vocab/merges"),
        (tokens(r#"{"a": 4294967296}"#), "invalid value: integer `4294967296`, expected u32"),
        (tokens(r#"{"a": -1}"#), "invalid value: integer `-1`, expected u32"),
        (tokens(r#"{"a": 1.5}"#), "expected u32"),
        (tokens(r#"{"a": null}"#), "expected u32"),
        (tokens("3"), "expected tokens with their ids or scores"),
        (tokens(&format!("{{\"{}\": 0}}", "é".repeat(5 << 20))), "a token of 10485760 bytes"),
        (
            format!(r#"{{"continuing_subword_prefix": "bb", {vocab}, "merges": ["a b"]}}"#),
            "/model/merges/0: the right token is shorter than continuing_subword_prefix",
        ),
        ("[\"BPE\"]".to_owned(), "expected a model"),
    ] {
        let file = file(&model);
        // One that is too much, or has a key twice, is refused by us alone.
        let ours = words.contains("bytes") || words.contains("duplicate");
        let library = guarded(|| Ok(serde_json::from_str::<Inner>(&file)?));
        assert!(ours || library.is_err(), "{words}");
        let found = refused(&file);
        assert!(found.contains(words), "{found}, expected {words}");
    }
    for (file, words) in [
        (r#"[]"#.to_owned(), "expected a map"),
        (file(&merges("[]")).replace("1.0", "2.0"), "Unknown tokenizer version '2.0'"),
        (file(&merges("[]")).replace("\"1.0\"", "null"), "expected a string"),
        (file(&merges("[]")).replace("version", "versions"), "unknown field `versions`"),
        (file(&merges("[]")).replace("[],", "[[\"a\"]],"), "expected a map"),
    ] {
        let found = refused(&file);
        assert!(found.contains(words), "{found}, expected {words}");
    }
}

fn refused(file: &str) -> String {
    let error = Tokenizer::from_bytes(Path::new("t"), file.as_bytes()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.hint_text().is_some(), "{error}");
    let message = error.message().to_owned();
    assert!(message.len() < 300, "{message}");
    message
}
