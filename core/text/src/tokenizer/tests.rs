//! Tokenizers that truncate, are too much, are not understood, or get too long a text.

use std::path::Path;

use base64::Engine as _;
use qhx_base::ErrorKind;
use serde_json::{Value, json};

use super::super::samples::{
    byte_fallback, byte_fallback_json, byte_level, open, unigram, word_piece,
};
use super::*;
use crate::samples::Rng;

fn refused(document: &Value) -> String {
    let bytes = serde_json::to_vec(document).unwrap();
    let error = Tokenizer::from_bytes(Path::new("tokenizer.json"), &bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.hint_text().is_some(), "{error}");
    let message = error.message().strip_prefix("tokenizer.json: ").unwrap().to_owned();
    assert!(message.len() < 300, "{message}");
    message
}

/// The sample tokenizer with another part.
fn with(part: &str, value: Value) -> Value {
    let mut document = byte_fallback_json();
    document[part] = value;
    document
}

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let ids = byte_fallback().encode("Hello!", true).unwrap();
    assert_eq!(ids[0], 1, "the post-processor's BOS");
    assert!(ids.len() > 3 && ids.len() < 40, "{ids:?}");
    assert_ne!(byte_fallback().encode("Hello!", false).unwrap()[0], 1);
}

#[test]
fn texts_are_truncated_as_by_the_tokenizers_package() {
    let tiny = qhx_paths::fixture("embed-mistral-tiny");
    let read = |file: &str| -> Value {
        serde_json::from_slice(&std::fs::read(tiny.join(file)).unwrap()).unwrap()
    };
    let (mut document, goldens) = (read("tokenizer.json"), read("truncation.json"));
    let cancel = CancelToken::new();
    let mut cut = 0;
    for group in goldens.as_array().unwrap() {
        document["post_processor"] = group["post_processor"].clone();
        let direction = if group["direction"] == "left" { "Left" } else { "Right" };
        document["truncation"] = json!({"direction": direction, "max_length": 5,
                                        "strategy": "LongestFirst", "stride": 0});
        let tokenizer = open(&document);
        for case in group["cases"].as_array().unwrap() {
            let (text, most) = (case["text"].as_str().unwrap(), case["max"].as_u64().unwrap());
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            let found = tokenizer.encode_truncated(text, most as usize, &cancel).unwrap();
            assert_eq!(found, ids, "{} {direction} {text:?} {most}", group["name"]);
            cut += usize::from(tokenizer.encode(text, true).unwrap().len() > ids.len());
        }
    }
    assert!(cut > 50, "{cut}");
}

#[test]
fn a_far_too_long_text_is_truncated_before_tokenizing() {
    let tokenizer = byte_level();
    let cancel = CancelToken::new();
    let text = "The capital of France is Paris. ".repeat(40_000);
    let few = tokenizer.encode(&text[..4000], true).unwrap();
    let found = tokenizer.encode_truncated(&text, 256, &cancel).unwrap();
    assert_eq!(found, few[..256]);
    let error = word_piece().encode_truncated("do", 1, &cancel).unwrap_err();
    assert!(error.message().contains("2 special tokens stand around each text"), "{error}");
}

#[test]
fn pairs_are_bounded_as_single_texts_are() {
    let (tokenizer, cancel) = (byte_level(), CancelToken::new());
    let text = "The capital of France is Paris. ".repeat(40_000);
    let short = &text[..4000];
    let cut = tokenizer.encode_pair_truncated(short, short, 256, &cancel).unwrap();
    assert_eq!(tokenizer.encode_pair_truncated(&text, &text, 256, &cancel).unwrap(), cut);
    for (first, second) in [("do", &*text), (&*text, "do")] {
        let error = tokenizer.encode_pair(first, second, 256, &cancel).unwrap_err();
        assert!(error.is_caused_by::<TooLong>(), "{error}");
    }
    cancel.cancel();
    let error = tokenizer.encode_pair_truncated(&text, &text, 1 << 20, &cancel).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
}

#[test]
fn files_that_ask_for_too_much_are_refused_by_the_component() {
    let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let sequence = |key: &str, members: Vec<Value>| json!({"type": "Sequence", key: members});
    let mut nested = replace("a", "b");
    for _ in 0..20 {
        nested = sequence("normalizers", vec![nested]);
    }
    let mut charsmap = u32::MAX.to_le_bytes().to_vec();
    charsmap.resize(10_900, 0);
    let charsmap = base64::engine::general_purpose::STANDARD.encode(charsmap);
    let template = |single: Value| {
        json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens":
            {"<s>": {"id": "<s>", "ids": vec![1; 600], "tokens": vec!["<s>"; 600]}}})
    };
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let vocab = |token: String| json!({"type": "BPE", "vocab": {token: 0}, "merges": []});

    for (part, value, words) in [
        (
            "normalizer",
            sequence("normalizers", vec![replace("a", "aaaaaaaaaa"); 12]),
            "/normalizer/normalizers/3: what the normalizer makes of a text may become 10000 times \
             as long with it, at most 4096",
        ),
        (
            "normalizer",
            json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x".repeat(5000)}),
            "/normalizer: what the normalizer makes",
        ),
        (
            "normalizer",
            json!({"type": "Prepend", "prepend": "▁".repeat(2000)}),
            "/normalizer: what the normalizer makes",
        ),
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": charsmap}),
            "/normalizer/precompiled_charsmap: its header says that 4294967295 bytes follow",
        ),
        ("normalizer", nested, "nested more than 16 deep"),
        (
            "pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "a".repeat(100_000)},
                   "behavior": "Isolated", "invert": false}),
            "/pre_tokenizer/pattern: 100000 bytes",
        ),
        (
            "pre_tokenizer",
            sequence(
                "pretokenizers",
                vec![
                    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
                    300
                ],
            ),
            "/pre_tokenizer/pretokenizers/255: one of more than 256 components",
        ),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "/pre_tokenizer/length: 0"),
        (
            "decoder",
            sequence("decoders", vec![replace("a", "aaaaaaaaaa"); 12]),
            "/decoder/decoders/2: what the decoder makes of a token",
        ),
        (
            "post_processor",
            template(json!([text, text])),
            "/post_processor/single: the text 2 times",
        ),
        (
            "post_processor",
            template(json!([special("<s>"), text, special("<s>")])),
            "/post_processor: 1200 tokens are added to a text",
        ),
        (
            "post_processor",
            template(json!([text, special("</s>")])),
            "/post_processor/single/1: \"</s>\" is not among special_tokens",
        ),
        ("model", vocab("x".repeat(20_000)), "/model/vocab: a token of 20000 bytes"),
        (
            "model",
            json!({"type": "WordPiece", "unk_token": "u", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 9_999, "vocab": {"u": 0}}),
            "/model/max_input_chars_per_word: 9999, at most 1000",
        ),
    ] {
        let found = refused(&with(part, value));
        assert!(found.contains(words), "{part}: {found}, expected {words}");
    }
}

#[test]
fn what_published_tokenizers_ask_for_is_accepted() {
    // T5: a table of SentencePiece (an empty trie here), white space stripped and joined.
    let mut charsmap = 4_u32.to_le_bytes().to_vec();
    charsmap.extend([0; 4]);
    charsmap.extend("صلى الله عليه وسلم\0".bytes());
    let charsmap = base64::engine::general_purpose::STANDARD.encode(charsmap);
    open(&with(
        "normalizer",
        json!({"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": charsmap},
            {"type": "Strip", "strip_left": false, "strip_right": true},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}]}),
    ));
    for tiny in ["llama3-tiny", "mistral-tiny", "phimoe-6", "qwen2-tiny", "qwen3-tiny", "lfm2-tiny"]
    {
        Tokenizer::from_file(&qhx_paths::fixture(tiny).join("tokenizer.json")).unwrap();
    }
    unigram();
    word_piece();
}

#[test]
fn a_part_that_is_not_understood_is_named() {
    let sequence =
        |member: Value| json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, member]});
    for (part, value, words) in [
        (
            "model",
            json!({"type": "Neural", "vocab": {}}),
            "/model: type \"Neural\" is not understood: no such component",
        ),
        ("model", json!({"vocab": 1.5}), "not a tokenizer"),
        ("model", json!({"type": "BPE", "vocab": {}}), "/model: type \"BPE\" is not understood: "),
        ("normalizer", json!({"type": "Upper"}), "/normalizer: type \"Upper\" is not understood"),
        (
            "normalizer",
            json!({"a": 1}),
            "/normalizer: a component without a type is not understood",
        ),
        ("pre_tokenizer", json!(3), "/pre_tokenizer: "),
        ("post_processor", json!({"type": "Nothing"}), "/post_processor: type \"Nothing\""),
        (
            "decoder",
            sequence(json!({"type": "Unspell"})),
            "/decoder/decoders/1: type \"Unspell\" is not understood",
        ),
        ("added_tokens", json!([{"id": 1, "content": "x"}]), "/added_tokens/0: missing field"),
    ] {
        let found = refused(&with(part, value));
        assert!(found.contains(words), "{part}: {found}");
        assert!(found.starts_with("not a tokenizer: "), "{found}");
        assert!(!found.contains("untagged"), "{found}");
    }
}

#[test]
fn a_text_is_too_long_by_its_length() {
    let cancel = CancelToken::new();
    let large = "word ".repeat(2_000_000);
    for tokenizer in [byte_level(), byte_fallback(), unigram(), word_piece()] {
        let error = tokenizer.encode_within(&large, true, 256, &cancel).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Prompt);
        assert!(error.message().contains("the context holds 256"), "{error}");
    }
    // Some size is too much for any context.
    let huge = " ".repeat(64 << 20);
    let error = byte_level().encode_within(&huge, true, usize::MAX, &cancel).unwrap_err();
    assert!(error.message().contains("at most 16777216 are tokenized at once"), "{error}");
}

#[test]
fn no_text_that_fits_is_too_long() {
    let mut roberta = byte_fallback_json();
    roberta["added_tokens"][0]["lstrip"] = json!(true);
    roberta["normalizer"] = json!({"type": "NFKC"});
    let mut shortening = byte_fallback_json();
    shortening["normalizer"] =
        json!({"type": "Replace", "pattern": {"String": "aaaa"}, "content": "a"});
    let mut removing = byte_fallback_json();
    removing["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": "a"},
                                       "behavior": "Removed", "invert": false});
    let tokenizers = [
        byte_level(),
        byte_fallback(),
        unigram(),
        word_piece(),
        open(&roberta),
        open(&shortening),
        open(&removing),
    ];
    let words = [
        "            ",
        "\n\n\n\n",
        "aaaaaaaa",
        "Hello",
        " world",
        "é",
        "e\u{301}",
        "𝐀𝐀𝐀𝐀",
        "\u{212a}",
        "🙂",
        "你好",
        "<s>",
        "<|im_start|>",
        "\u{1}\u{2}",
        "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq",
    ];
    let mut rng = Rng::new(3);
    for _ in 0..400 {
        let mut text = String::new();
        let favourite = words[rng.below(words.len() as u64) as usize];
        for _ in 0..rng.below(60) {
            let other = words[rng.below(words.len() as u64) as usize];
            text.push_str(if rng.below(3) == 0 { other } else { favourite });
        }
        for tokenizer in &tokenizers {
            let tokens = tokenizer.encode(&text, false).unwrap().len();
            assert_eq!(tokenizer.size.exceeds(&text, tokens), None, "{tokenizer:?} {text:?}");
        }
    }
}

#[test]
fn nobody_waits_for_a_long_text_once_cancelled() {
    let cancel = CancelToken::new();
    cancel.cancel();
    let text = "word ".repeat(100_000);
    let error = byte_level().encode_within(&text, true, 1 << 20, &cancel).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let error = byte_level().encode_truncated(&text, 1 << 20, &cancel).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    // The work itself ends, too: nothing goes on beside.
    for add_special in [false, true] {
        let error = byte_level().until(&cancel).encode(&text, add_special).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
    }
    let cancel = CancelToken::new();
    let ids = byte_level().encode_within(&text[..50_000], true, 1 << 20, &cancel).unwrap();
    assert_eq!(ids, byte_level().encode(&text[..50_000], true).unwrap());
}
