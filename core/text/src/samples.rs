//! Small tokenizers of every sort, for tests.

use std::path::{Path, PathBuf};

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use serde_json::{Map, Value, json};

use super::Tokenizer;

/// A file of the checkpoint whose tokenizer is a byte-level BPE.
pub fn fixture(file: &str) -> PathBuf {
    qhx_paths::fixture("qwen35-tied").join(file)
}

/// A byte-level BPE.
pub fn byte_level() -> Tokenizer {
    Tokenizer::from_file(&fixture("tokenizer.json")).unwrap()
}

/// The id of `<0x00>` in [`byte_fallback`] and its like.
pub const BYTE: u32 = 12;

/// The id of a token that is U+FFFD there.
pub const REPLACEMENT_ID: u32 = 8;

/// Opens a `tokenizer.json`.
pub fn open(document: &Value) -> Tokenizer {
    let bytes = serde_json::to_vec(document).unwrap();
    Tokenizer::from_bytes(Path::new("tokenizer.json"), &bytes).unwrap()
}

/// An entry of `added_tokens`.
pub fn added(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "special": true, "single_word": false,
           "lstrip": false, "rstrip": false, "normalized": false})
}

/// Decoder of Llama 2.
pub fn llama_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

/// A `tokenizer.json` in the manner of sentencepiece: a word begins with `▁`, other characters are
/// bytes. The post-processor puts `<s>` in front.
pub fn byte_fallback_json() -> Value {
    let mut vocab =
        ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "!", "a", "\u{fffd}", "▁▁▁", "▁🙂", ""]
            .map(str::to_owned)
            .to_vec();
    assert_eq!(vocab.len(), BYTE as usize);
    vocab.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let vocab: Map<_, _> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0,
                       "direction": "Right"},
        "padding": {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
        "added_tokens": [added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": llama_decoder(),
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true,
                  "byte_fallback": true, "ignore_merges": true, "vocab": vocab, "merges": []},
    })
}

/// [`byte_fallback_json`], opened.
pub fn byte_fallback() -> Tokenizer {
    open(&byte_fallback_json())
}

/// A Unigram model with `Metaspace`, in the manner of T5.
pub fn unigram() -> Tokenizer {
    let vocab: Vec<_> =
        ["<unk>", "<pad>", "▁", "▁the", "▁sun", "s", "▁▁", "é", "你", "🙂", ".", "a▁b", ""]
            .iter()
            .enumerate()
            .map(|(i, token)| json!([token, -(i as f64)]))
            .collect();
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                           "split": true});
    open(&json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(1, "<pad>")],
        "normalizer": null, "pre_tokenizer": metaspace, "post_processor": null,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false},
    }))
}

/// A WordPiece model, in the manner of BERT.
pub fn word_piece() -> Tokenizer {
    let vocab: Map<_, _> = [
        "[UNK]", "[CLS]", "[SEP]", "do", "not", "don", "'", "##t", "##s", "s", "!", ".", "n't",
        "你", "🙂", "##é", "##", "'m", "i",
    ]
    .iter()
    .enumerate()
    .map(|(id, token)| ((*token).to_owned(), json!(id)))
    .collect();
    open(&json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(1, "[CLS]"), added(2, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
    }))
}

/// Random numbers, the same in every run.
pub struct Rng(Xoshiro256PlusPlus);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}
