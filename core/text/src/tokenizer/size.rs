//! Maximum length of a text of at most n tokens.
//!
//! Tokenizing takes seconds for ten megabytes, and gigabytes of memory for more. In most cases the length alone shows
//! that a text cannot fit a context: a token covers only so many bytes. This does not hold for some tokenizers, such as
//! those that make one token of any unknown word. They refuse a text only from a length on that no context was made
//! for.

use serde_json::{Map, Value};

use super::super::stream;
use super::vet::{Vetted, byte_level, each};

/// Bytes of a text that are tokenized at all. The library needs about 150 bytes of memory for
/// each, and more where the normalizer makes the text longer.
const MAX_TEXT: usize = 16 << 20;

/// The same after normalization.
const MAX_NORMALIZED: usize = 256 << 20;

/// Texts of this many bytes are tokenized whatever the context is, where tokens have no bound.
const ALWAYS: usize = 1 << 20;

/// Bytes that a token may cover on average there, as a multiple of the longest token.
const GENEROUS: usize = 16;

/// Number of bytes of text that tokens cover.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// Bytes of text that one token covers at most, or generously where `exact` is false.
    token: usize,
    /// No text of more bytes a token exists.
    exact: bool,
    /// White space may come to no token, so that only other characters are counted.
    skips_space: bool,
    /// Bytes that are tokenized at all.
    max_bytes: usize,
}

impl Size {
    /// The sizes of a tokenizer. `has` is whether its vocabulary has a token.
    pub fn of(vetted: &Vetted, has: impl Fn(&str) -> bool) -> Self {
        let document = &vetted.document;
        let mut skips_space = vetted.strips;
        let mut token = Some(vetted.longest);
        each(&document.normalizer, &mut |component| {
            let shrinks = shrinks(component, &mut skips_space);
            token = token.zip(shrinks).map(|(token, times)| token.saturating_mul(times));
        });
        each(&document.pre_tokenizer, &mut |component| {
            if !keeps(component, &mut skips_space) {
                token = None;
            }
        });
        if !tokens_cover_all(vetted, has) {
            token = None;
        }
        Self {
            token: token.unwrap_or(vetted.longest.saturating_mul(GENEROUS)),
            exact: token.is_some(),
            skips_space,
            max_bytes: MAX_TEXT.min(MAX_NORMALIZED / vetted.growth.max(1)),
        }
    }

    /// Why a text cannot be `tokens` tokens or fewer, if its length shows it.
    pub fn exceeds(&self, text: &str, tokens: usize) -> Option<String> {
        if text.len() > self.max_bytes {
            return Some(format!(
                "a text of {} bytes, at most {} are tokenized at once",
                text.len(),
                self.max_bytes
            ));
        }
        let limit = self.limit(tokens);
        if text.len() <= limit {
            return None;
        }
        let counted = if self.skips_space {
            text.chars().filter(|c| !c.is_whitespace()).map(char::len_utf8).sum()
        } else {
            text.len()
        };
        (counted > limit).then(|| {
            if self.exact {
                let fewest = counted.div_ceil(self.token);
                format!("a text of {} bytes is at least {fewest} tokens", text.len())
            } else {
                format!("a text of {} bytes for {tokens} tokens", text.len())
            }
        })
    }

    /// Number of bytes of a text that are enough for its first, or last, `tokens` tokens.
    pub fn enough(&self, tokens: usize) -> usize {
        // Twice as much, so that the cut is far from the last token that stays.
        self.limit(tokens).saturating_mul(2).max(ALWAYS / 16).min(self.max_bytes)
    }

    fn limit(&self, tokens: usize) -> usize {
        let limit = self.token.saturating_mul(tokens);
        if self.exact { limit } else { limit.max(ALWAYS) }
    }
}

fn kind(component: &Map<String, Value>) -> &str {
    component.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Maximum number of bytes that a normalizer makes one of; `None` if it drops characters.
fn shrinks(component: &Map<String, Value>, skips_space: &mut bool) -> Option<usize> {
    match kind(component) {
        "Prepend" | "ByteLevel" => Some(1),
        // Four bytes of a mathematical letter become one; compositions make less of a difference.
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => Some(4),
        "Strip" => {
            *skips_space = true;
            Some(1)
        }
        "Replace" => {
            let pattern = component.get("pattern")?.get("String")?.as_str()?;
            let content = component.get("content")?.as_str()?;
            (!content.is_empty()).then(|| pattern.len().div_ceil(content.len()).max(1))
        }
        _ => None,
    }
}

/// False where a pre-tokenizer drops more than white space.
fn keeps(component: &Map<String, Value>, skips_space: &mut bool) -> bool {
    match kind(component) {
        "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" | "FixedLength" => true,
        "Split" | "Punctuation" => {
            component.get("behavior").and_then(Value::as_str) != Some("Removed")
        }
        "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer" => {
            *skips_space = true;
            true
        }
        _ => false,
    }
}

/// True when every byte of a text is in some token no longer than the longest of the vocabulary.
fn tokens_cover_all(vetted: &Vetted, has: impl Fn(&str) -> bool) -> bool {
    let model = &vetted.document.model;
    let fallback = || {
        model.byte_fallback == Some(true)
            && (0..=u8::MAX).all(|byte| has(&format!("<0x{byte:02X}>")))
    };
    match model.kind.as_deref() {
        Some("BPE") => {
            let alphabet = || {
                // The characters of the byte-level alphabet; see `stream::level_byte`.
                let level = |c: &char| stream::level_byte(*c).is_some();
                (0x21..0x144).filter_map(char::from_u32).filter(level).all(|c| has(&c.to_string()))
            };
            // One unknown character is one token, of four bytes at most.
            let unknown = model.unk_token.is_some() && model.fuse_unk != Some(true);
            unknown || fallback() || (byte_level(&vetted.document) && alphabet())
        }
        Some("Unigram") => fallback(),
        _ => false,
    }
}
