//! The tokenizer within a GGUF file: token for token that of the model, and refused where it cannot be.

use std::path::Path;

use qhx_base::{Error, ErrorKind};
use qhx_checkpoint::Checkpoint;
use qhx_paths::fixture;
use qhx_text::Tokenizer;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// A file of `tests/fixtures/gguf`, which holds nothing but a tokenizer: the configuration is another model's.
fn opened(path: &Path) -> Checkpoint {
    Checkpoint::open_gguf(path, Some(&fixture("quantised/awq"))).unwrap()
}

fn expected() -> Value {
    crate::read_json(&fixture("gguf/spm.json"))
}

/// Text `number` of `gguf_files.py`.
fn text(pieces: &[&str], number: u32) -> String {
    let mut state = number;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as usize % below
    };
    let count = 1 + draw(16);
    (0..count).map(|_| pieces[draw(pieces.len())]).collect()
}

#[test]
fn byte_level_tokens_of_gguf_are_tokenizer_jsons() {
    let expected = expected();
    let pieces: Vec<_> =
        expected["pieces"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for name in ["llama3-tiny", "qwen2-tiny", "qwen35-tied"] {
        let found = opened(&fixture(&format!("gguf/{name}.gguf"))).tokenizer().unwrap();
        let own = Tokenizer::from_file(&fixture(&format!("{name}/tokenizer.json"))).unwrap();
        let added = ["<|im_start|>user\n", "<|begin_of_text|>", "<|eot_id|>", "[PAD445]"];
        let pieces = [&pieces[..], &added].concat();
        for number in 0..2000 {
            let text = text(&pieces, number);
            let [found_ids, own_ids] = [&found, &own].map(|t| t.encode(&text, true).unwrap());
            assert_eq!(found_ids, own_ids, "{name}: {text:?}");
            let [found, own] = [&found, &own].map(|t| t.decode_with_special(&own_ids).unwrap());
            assert_eq!(found, own, "{name}: {text:?}");
        }
    }
}

#[test]
fn sentence_pieces_of_gguf_are_sentencepieces() {
    let expected = expected();
    let pieces: Vec<_> =
        expected["pieces"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for name in ["spm", "spm-plain"] {
        let tokenizer = opened(&fixture(&format!("gguf/{name}.gguf"))).tokenizer().unwrap();
        let mut hash = Sha256::new();
        for number in 0..expected["texts"].as_u64().unwrap() as u32 {
            let text = text(&pieces, number);
            let ids = tokenizer.encode(&text, true).unwrap();
            if let Some(first) = expected[name]["first"].get(number as usize) {
                assert_eq!(json!(ids), *first, "{name}: {text:?}");
            }
            ids.iter().chain([&u32::MAX]).for_each(|id| hash.update(id.to_le_bytes()));
        }
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(json!(hash), expected[name]["sha256"], "{name}");
    }
}

/// A file of `tests/fixtures/gguf` in which `from`, at its first place after `key`, is `to`.
fn edited(name: &str, key: &str, from: &[u8], to: &[u8]) -> Result<Tokenizer, Error> {
    let mut bytes = std::fs::read(fixture(&format!("gguf/{name}.gguf"))).unwrap();
    let place = |part: &[u8], after: usize| {
        after + bytes[after..].windows(part.len()).position(|w| w == part).unwrap()
    };
    let at = place(from, place(key.as_bytes(), 0));
    bytes[at..at + to.len()].copy_from_slice(to);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open_gguf(&path, Some(&fixture("quantised/awq")))?.tokenizer()
}

#[test]
fn tokenizers_that_cannot_be_read_say_why() {
    let (tokens, scores) = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores");
    for (found, words) in [
        (edited("qwen2-tiny", "ggml.pre", b"qwen2", b"qwen9"), "unknown rules \"qwen9\""),
        (edited("qwen2-tiny", "ggml.pre", b"qwen2", b"qwen9"), "Hugging Face checkpoint into "),
        (edited("spm", "ggml.model", b"llama", b"bert!"), "of the kind \"bert!\""),
        (edited("spm", tokens, b"<unk>", b"<u\xffk>"), "entry 0 of tokenizer.ggml.tokens is no"),
        (edited("spm", scores, b"scores", b"scorez"), "scores has 0 numbers, expected one for"),
        (
            edited("spm", scores, &(-2f32).to_le_bytes(), &f32::NAN.to_le_bytes()),
            "expected one for each",
        ),
        (edited("qwen2-tiny", "ggml.merges", b"h e", b"h\xc3\xa9"), "is no pair of tokens"),
        (edited("qwen2-tiny", "ggml.merges", b"h e", b"h \x05"), "not a tokenizer"),
        (edited("qwen2-tiny", "ggml.merges", b"merges", b"merge_"), "a tokenizer without merges"),
    ] {
        assert_eq!(crate::says(found, words).kind(), ErrorKind::Artifact);
    }
}

#[test]
fn bos_and_eos_that_are_asked_for_are_put_around_texts() {
    let expected = crate::read_json(&fixture("ends.json"));
    for case in expected["cases"].as_array().unwrap() {
        let dir = crate::copy(case["model"].as_str().unwrap());
        crate::edit_json(&dir.path().join("tokenizer_config.json"), |config| {
            for key in ["bos_token", "add_bos_token", "add_eos_token"] {
                config[key] = case[key].clone();
            }
        });
        let tokenizer = Checkpoint::open(dir.path()).unwrap().tokenizer().unwrap();
        let found = tokenizer.encode(expected["text"].as_str().unwrap(), true).unwrap();
        assert_eq!(json!(found), case["ids"], "{case}");
    }
    let dir = crate::copy("qwen2-tiny");
    crate::edit_json(&dir.path().join("tokenizer_config.json"), |config| {
        config["add_bos_token"] = json!(true);
    });
    crate::says(Checkpoint::open(dir.path()).unwrap().tokenizer(), "bos_token is no token of");
}
