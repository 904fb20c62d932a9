//! Files of SentencePiece (`sentencepiece_model.proto`) as one `tokenizer.json`.

use std::collections::HashSet;

use qhx_graph::onnx::Message;
use serde_json::json;

use super::Read;

/// Pieces that a vocabulary may have.
const MAX_PIECES: usize = 1 << 20;
/// Types of pieces.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// A piece of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) text: String,
    score: f32,
    kind: u64,
}

impl Piece {
    /// True for a piece that is no text: `<|en|>`, `<pad>`.
    fn is_special(&self) -> bool {
        let marked = self.text.starts_with('<') && self.text.ends_with('>');
        matches!(self.kind, UNKNOWN | CONTROL) || self.kind == USER_DEFINED && marked
    }
}

/// The pieces of a file, in the order of their numbers.
pub(super) fn read(mut model: Message) -> Read<Vec<Piece>> {
    let mut pieces = Vec::new();
    while let Some(field) = model.next_field()? {
        if field.number != 1 {
            continue;
        }
        if pieces.len() == MAX_PIECES {
            return Err(format!("more than {MAX_PIECES} pieces"));
        }
        let mut piece = model.within(field.bytes);
        let mut found = Piece { text: String::new(), score: 0.0, kind: 1 };
        while let Some(field) = piece.next_field()? {
            match field.number {
                1 => piece.text(field.bytes)?.clone_into(&mut found.text),
                2 => {
                    let score = piece.float(field.bytes).filter(|score| score.is_finite());
                    found.score = score.ok_or("a score that is no number")?;
                }
                3 => found.kind = field.integer,
                _ => {}
            }
        }
        pieces.push(found);
    }
    if pieces.is_empty() {
        return Err("no pieces, expected a model of SentencePiece".to_owned());
    }
    Ok(pieces)
}

/// A tokenizer of the pieces, whose numbers are those in the list. Texts come out as NeMo has them. Where vocabularies
/// of several languages stand behind each other, a text that goes in is cut by all of them at once, since nothing says
/// its language: recognisers only take special tokens.
pub(super) fn tokenizer(pieces: &[Piece]) -> Read<Vec<u8>> {
    let (mut vocab, mut added, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    for (id, piece) in pieces.iter().enumerate() {
        let mut text = piece.text.clone();
        if piece.is_special() {
            // Each language has an unknown piece of its own.
            if !seen.insert(&piece.text) {
                text = format!("{text}{id}");
            }
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true,
            }));
        }
        vocab.push(json!([text, piece.score]));
    }
    let unknown = pieces.iter().position(|piece| piece.kind == UNKNOWN);
    let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
    let document = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": spaces, "post_processor": null, "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": false},
    });
    serde_json::to_vec(&document).map_err(|e| e.to_string())
}
