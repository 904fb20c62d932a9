//! Checks of a `tokenizer.json`, made before the library reads it.
//!
//! The library trusts its files: a header of four bytes decides about gigabytes, and a normalizer
//! runs over the added tokens while the file is read. A process cannot survive running out of
//! memory, so sizes are bounded here, far above those of published tokenizers.

use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use qhx_base::files;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::model::Read;

/// Bytes of a file. The largest published ones have 35 MB; the library needs up to some dozen
/// times as much memory while it reads.
const MAX_FILE: usize = 64 << 20;

/// Bytes of one token. The library keeps a node a byte, or a copy for each unfinished word.
const MAX_TOKEN: usize = 16 << 10;

/// Bytes of a pattern.
const MAX_PATTERN: usize = 64 << 10;

/// Components of one part, such as the members of a `Sequence`.
const MAX_COMPONENTS: usize = 256;

/// Maximum nesting of a `Sequence` in a `Sequence`.
const MAX_DEPTH: usize = 16;

/// Maximum factor by which normalizers together lengthen a text. The normalizers of published models reach 44 at most.
const MAX_NORMALIZED: usize = 4096;

/// The same of decoders and a token.
const MAX_DECODED: usize = 256;

/// Tokens that the post-processor may add to a text.
const MAX_ADDED: usize = 1024;

/// Characters of a word that WordPiece compares with its vocabulary, which takes their cube in time.
/// Published tokenizers have 100 or 200.
const MAX_WORD: u64 = 1000;

/// A `tokenizer.json` in as much detail as bounds need, and its model if [`Read`] understands it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    #[serde(default = "version")]
    pub version: Value,
    #[serde(default)]
    pub normalizer: Value,
    #[serde(default)]
    pub pre_tokenizer: Value,
    #[serde(default)]
    pub post_processor: Value,
    #[serde(default)]
    pub decoder: Value,
    #[serde(default)]
    pub added_tokens: Vec<Keyed<Added>>,
    #[serde(default)]
    pub truncation: Value,
    #[serde(default)]
    pub padding: Value,
    pub model: Read,
}

/// The version of a file that names none, which is the only one.
pub(super) fn version() -> Value {
    Value::from("1.0")
}

/// An added token. What the library alone reads may be anything here.
#[derive(Deserialize)]
pub(super) struct Added {
    #[serde(default)]
    id: Value,
    content: Option<String>,
    #[serde(default)]
    single_word: Value,
    lstrip: Option<bool>,
    rstrip: Option<bool>,
    #[serde(default)]
    normalized: Value,
    #[serde(default)]
    special: Value,
}

impl Added {
    fn content(&self) -> &str {
        self.content.as_deref().unwrap_or_default()
    }

    /// True if it takes the white space beside it.
    fn strips(&self) -> bool {
        self.lstrip == Some(true) || self.rstrip == Some(true)
    }

    /// The token as the library reads it; `None` where it refuses it.
    pub fn token(&self) -> Option<AddedToken> {
        self.id.as_u64().filter(|id| *id <= u64::from(u32::MAX))?;
        Some(AddedToken {
            content: self.content.clone()?,
            single_word: self.single_word.as_bool()?,
            lstrip: self.lstrip?,
            rstrip: self.rstrip?,
            normalized: self.normalized.as_bool()?,
            special: self.special.as_bool()?,
        })
    }
}

/// A struct that is a map in a file, as the library expects; serde by itself reads lists as well.
pub(super) struct Keyed<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Keyed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Keyed<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Keyed<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Keyed)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// Bounds on the work on a text.
pub(super) struct Vetted {
    pub document: Document,
    /// Maximum factor by which the normalizer lengthens a text.
    pub growth: usize,
    /// The longest token in bytes, and where tokens are written in the byte-level alphabet in
    /// characters of it.
    pub longest: usize,
    /// Some added token takes the white space around it.
    pub strips: bool,
}

/// Why a file is refused.
pub(super) enum Refusal {
    /// It is no such file.
    Foreign(String),
    /// It begins with this byte order mark.
    Marked(&'static str),
    /// It asks for more than is allowed.
    Excessive(String),
}

/// Reads a file's bounds and refuses what is beyond them.
pub(super) fn vet(bytes: &[u8]) -> Result<Vetted, Refusal> {
    if bytes.len() > MAX_FILE {
        return Err(Refusal::Excessive(format!(
            "{} bytes, a tokenizer may have {MAX_FILE}",
            bytes.len()
        )));
    }
    if let Some(mark) = files::byte_order_mark(bytes) {
        return Err(Refusal::Marked(mark));
    }
    // Text that is known to be UTF-8 is not checked token by token.
    let document = match std::str::from_utf8(bytes) {
        Ok(text) => serde_json::from_str(text),
        Err(_) => serde_json::from_slice(bytes),
    };
    let Keyed(document) = document.map_err(|e| Refusal::Foreign(e.to_string()))?;
    bounds(document).map_err(Refusal::Excessive)
}

fn bounds(document: Document) -> Result<Vetted, String> {
    let vocab = &document.model.longest;
    let contents = || document.added_tokens.iter().map(|Keyed(token)| token.content().len());
    let added = contents().max().unwrap_or_default();
    for (what, longest) in [("/model/vocab", vocab.bytes), ("/added_tokens", added)] {
        if longest > MAX_TOKEN {
            return Err(format!(
                "{what}: a token of {longest} bytes, at most {MAX_TOKEN} are allowed"
            ));
        }
    }
    let word = document.model.max_input_chars_per_word;
    if word > MAX_WORD {
        let key = "/model/max_input_chars_per_word";
        return Err(format!("{key}: {word}, at most {MAX_WORD} are allowed"));
    }
    let Document { normalizer, pre_tokenizer, decoder, post_processor, .. } = &document;
    let growth = Part::new("what the normalizer makes of a text", MAX_NORMALIZED)
        .growth("/normalizer", normalizer)?;
    Part::new("what the pre-tokenizer makes of a text", MAX_NORMALIZED)
        .growth("/pre_tokenizer", pre_tokenizer)?;
    Part::new("what the decoder makes of a token", MAX_DECODED).growth("/decoder", decoder)?;
    Part::new("what the post-processor makes of a text", 1)
        .growth("/post_processor", post_processor)?;

    // The library normalizes the added tokens, too.
    let all: usize = contents().sum();
    if growth > 64 && all.saturating_mul(growth) > MAX_FILE {
        return Err(format!(
            "/added_tokens: {all} bytes, which the normalizer may make {growth} times as many"
        ));
    }
    let tokens = if byte_level(&document) { vocab.chars } else { vocab.bytes };
    Ok(Vetted {
        growth,
        longest: tokens.max(added.saturating_mul(growth)).max(char::MAX.len_utf8()),
        strips: document.added_tokens.iter().any(|Keyed(token)| token.strips()),
        document,
    })
}

/// True when text becomes bytes of the byte-level alphabet before it becomes tokens.
pub(super) fn byte_level(document: &Document) -> bool {
    let mut found = false;
    for part in [&document.normalizer, &document.pre_tokenizer] {
        each(part, &mut |component| {
            found |= component.get("type").and_then(Value::as_str) == Some("ByteLevel");
        });
    }
    found
}

/// Keys under which a component lists others.
pub(super) const MEMBERS: [&str; 4] = ["normalizers", "pretokenizers", "processors", "decoders"];

/// Calls `visit` with each component of a part that is no list of others.
pub(super) fn each(part: &Value, visit: &mut dyn FnMut(&Map<String, Value>)) {
    let Value::Object(component) = part else { return };
    let mut members = MEMBERS.iter().filter_map(|key| component.get(*key)?.as_array()).peekable();
    if members.peek().is_none() {
        visit(component);
    }
    for member in members.flatten() {
        each(member, visit);
    }
}

/// One part of the file, component by component.
struct Part {
    result: &'static str,
    max_growth: usize,
    components: usize,
    growth: usize,
    added: usize,
}

impl Part {
    fn new(result: &'static str, max_growth: usize) -> Self {
        Self { result, max_growth, components: 0, growth: 1, added: 0 }
    }

    /// Factor by which all components of the part together may lengthen a text.
    fn growth(mut self, path: &str, value: &Value) -> Result<usize, String> {
        self.add(path, value, 0).map(|()| self.growth)
    }

    fn add(&mut self, path: &str, value: &Value, depth: usize) -> Result<(), String> {
        let Value::Object(component) = value else { return Ok(()) };
        self.components += 1;
        if depth > MAX_DEPTH {
            return Err(format!("{path}: nested more than {MAX_DEPTH} deep"));
        }
        if self.components > MAX_COMPONENTS {
            return Err(format!("{path}: one of more than {MAX_COMPONENTS} components"));
        }
        self.component(path, component)?;
        for key in MEMBERS {
            let members = component.get(key).and_then(Value::as_array);
            for (i, member) in members.into_iter().flatten().enumerate() {
                self.add(&format!("{path}/{key}/{i}"), member, depth + 1)?;
            }
        }
        Ok(())
    }

    /// Checks a component by its keys, because `type` is optional in old files.
    fn component(&mut self, path: &str, component: &Map<String, Value>) -> Result<(), String> {
        let text = |key: &str| component.get(key).and_then(Value::as_str);
        let mut factor = 1;
        if let Some(pattern) = component.get("pattern") {
            let literal = pattern.get("String").and_then(Value::as_str);
            let regex = pattern.get("Regex").and_then(Value::as_str);
            let length = literal.or(regex).map_or(0, str::len);
            if length > MAX_PATTERN {
                return Err(format!(
                    "{path}/pattern: {length} bytes, at most {MAX_PATTERN} are allowed"
                ));
            }
            if let Some(content) = text("content") {
                // A regular expression may match nothing between any two characters.
                factor = match literal.map_or(0, str::len) {
                    0 => 1 + content.len(),
                    matched => content.len().div_ceil(matched),
                };
            }
        }
        if let Some(prefix) = text("prepend") {
            // It stands before each piece between two added tokens.
            factor = 1 + prefix.len();
        }
        if let Some(charsmap) = text("precompiled_charsmap") {
            // The shortest thing replaced that makes it longer in practice has three bytes.
            factor = longest_replacement(charsmap)
                .map_err(|why| format!("{path}/precompiled_charsmap: {why}"))?
                .div_ceil(3);
        }
        self.growth = self.growth.saturating_mul(factor.max(1));
        if self.growth > self.max_growth {
            return Err(format!(
                "{path}: {} may become {} times as long with it, at most {} times are allowed",
                self.result, self.growth, self.max_growth
            ));
        }
        if component.get("length").and_then(Value::as_u64) == Some(0) {
            return Err(format!("{path}/length: 0, pieces have at least one character"));
        }
        self.template(path, component)
    }

    /// Bounds what a `TemplateProcessing` adds to a text.
    fn template(&mut self, path: &str, component: &Map<String, Value>) -> Result<(), String> {
        let pieces = component.get("single").and_then(Value::as_array);
        let mut texts = 0;
        for (i, piece) in pieces.into_iter().flatten().enumerate() {
            texts += usize::from(piece.get("Sequence").is_some());
            if piece.pointer("/Sequence/id").and_then(Value::as_str) == Some("B") {
                return Err(format!("{path}/single/{i}: B, but one text alone is A"));
            }
            let Some(id) = piece.pointer("/SpecialToken/id").and_then(Value::as_str) else {
                continue;
            };
            let special = component.get("special_tokens").and_then(|tokens| tokens.get(id));
            let Some(special) = special else {
                return Err(format!("{path}/single/{i}: {id:?} is not among special_tokens"));
            };
            let ids = special.get("ids").and_then(Value::as_array).map_or(0, Vec::len);
            self.added = self.added.saturating_add(ids);
        }
        if texts > 1 {
            return Err(format!("{path}/single: the text {texts} times, expected once"));
        }
        if self.added > MAX_ADDED {
            return Err(format!(
                "{path}: {} tokens are added to a text, at most {MAX_ADDED} are allowed",
                self.added
            ));
        }
        Ok(())
    }
}

/// The longest text that a table of SentencePiece puts in the place of another, in bytes.
///
/// Source of the layout: `spm_precompiled` 0.1.4: the bytes of the trie as a little-endian u32,
/// the trie, then texts that each end with a zero byte.
fn longest_replacement(charsmap: &str) -> Result<usize, String> {
    let table = base64::engine::general_purpose::STANDARD
        .decode(charsmap)
        .map_err(|e| format!("not base64: {e}"))?;
    let Some((header, rest)) = table.split_first_chunk::<4>() else {
        return Err(format!("{} bytes, its header alone has 4", table.len()));
    };
    let trie = u32::from_le_bytes(*header) as usize;
    if trie == 0 || trie > rest.len() {
        return Err(format!(
            "its header says that {trie} bytes follow as a trie, there are {}",
            rest.len()
        ));
    }
    Ok(rest[trie..].split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or_default())
}
