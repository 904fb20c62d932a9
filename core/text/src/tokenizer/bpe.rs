//! Model of byte pair encoding in compact tables, which gives what the one of the `tokenizers` crate gives.
//!
//! That one keeps each token as two texts in two hash maps and reads all merges as pairs of texts first. For 262,144
//! tokens and 514,847 merges that is several times the time and the memory.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ahash::RandomState;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BpeTrainer, Error};
use tokenizers::{Model, Result, Token};

use super::index::Index;

/// Words that are kept with their tokens.
const MAX_WORDS: usize = 10_000;

/// Bytes from which on a word is not kept.
const LONG_WORD: usize = 256;

/// Parts of the words that are kept, each with its own lock, so that threads seldom want the same one.
const SHARES: usize = 16;

/// Stands for no number: no token of an id, no id of a byte, no neighbour.
const NONE: u32 = u32::MAX;

/// First byte of a token in the text of all, and its length.
type Span = (u32, u32);

/// Tokens and their ids.
pub(super) struct Vocabulary {
    /// All tokens in a row.
    text: String,
    /// Places of the tokens by their ids; the length is [`NONE`] where an id has no token.
    spans: Vec<Span>,
    index: Index,
    hashes: RandomState,
    count: usize,
}

/// The token of an id.
fn token<'a>(text: &'a str, spans: &[Span], id: u32) -> Option<&'a str> {
    let &(start, length) = spans.get(id as usize).filter(|span| span.1 != NONE)?;
    text.get(start as usize..start as usize + length as usize)
}

/// The keyed hash of some bytes: a file cannot choose tokens that collide.
fn hash(hashes: &RandomState, bytes: &[u8]) -> u64 {
    let mut hasher = hashes.build_hasher();
    hasher.write(bytes);
    hasher.finish()
}

impl Vocabulary {
    /// The vocabulary of tokens in a row, by the end of each and its id. `None` where an id or a token is there twice,
    /// or few of the ids have tokens: this is left to the library.
    pub fn new(text: String, tokens: &[(u32, u32)]) -> Option<Self> {
        let limit = tokens.iter().map(|&(_, id)| id as usize + 1).max().unwrap_or_default();
        if limit > 2 * tokens.len() + 1024 {
            return None;
        }
        let mut spans: Vec<Span> = vec![(0, NONE); limit];
        let mut start = 0;
        for &(end, id) in tokens {
            let span = spans.get_mut(id as usize).filter(|span| span.1 == NONE)?;
            *span = (start, end - start);
            start = end;
        }
        let (hashes, mut index) = (RandomState::new(), Index::new(tokens.len(), limit)?);
        for &(_, id) in tokens {
            let found = token(&text, &spans, id)?;
            let same = |other| token(&text, &spans, other) == Some(found);
            if index.enter(hash(&hashes, found.as_bytes()), id, same).is_some() {
                return None;
            }
        }
        Some(Self { text, spans, index, hashes, count: tokens.len() })
    }

    /// The id of a token.
    pub fn id(&self, bytes: &[u8]) -> Option<u32> {
        self.index.find(hash(&self.hashes, bytes), |id| {
            self.token(id).is_some_and(|token| token.as_bytes() == bytes)
        })
    }

    /// The token of an id.
    pub fn token(&self, id: u32) -> Option<&str> {
        token(&self.text, &self.spans, id)
    }

    /// All tokens with their ids.
    fn tokens(&self) -> impl Iterator<Item = (&str, u32)> {
        (0..).take(self.spans.len()).filter_map(|id| Some((self.token(id)?, id)))
    }
}

/// A merge: the ids of its left and right token, and of the one that they become.
pub(super) type Merge = [u32; 3];

/// Merges in the order of their ranks.
pub(super) struct Merges {
    ranked: Vec<Merge>,
    /// Ranks by the pairs that are merged. Of a pair that is listed twice the last one counts.
    index: Index,
    hashes: RandomState,
}

/// The pair of tokens that a merge takes, as one number.
fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Merges {
    /// Table of merges; `None` if they are too many.
    pub fn new(ranked: Vec<Merge>) -> Option<Self> {
        let (hashes, mut index) = (RandomState::new(), Index::new(ranked.len(), ranked.len())?);
        for (rank, [left, right, _]) in (0..).zip(&ranked) {
            let hash = hashes.hash_one(pair(*left, *right));
            index.enter(hash, rank, |other| takes(&ranked, other, *left, *right));
        }
        Some(Self { ranked, index, hashes })
    }

    /// The rank of the merge of two tokens.
    fn rank(&self, left: u32, right: u32) -> Option<u32> {
        let hash = self.hashes.hash_one(pair(left, right));
        self.index.find(hash, |rank| takes(&self.ranked, rank, left, right))
    }

    /// The token that a merge makes.
    fn whole(&self, rank: u32) -> Option<u32> {
        self.ranked.get(rank as usize).map(|merge| merge[2])
    }
}

/// True when the merge of a rank takes these tokens.
fn takes(ranked: &[Merge], rank: u32, left: u32, right: u32) -> bool {
    ranked.get(rank as usize).is_some_and(|merge| merge[..2] == [left, right])
}

/// What a model does beside merging.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// Stands before each character of a word but the first one.
    pub prefix: String,
    /// Stands behind the last character of a word.
    pub suffix: String,
    /// The token of characters that have none.
    pub unknown: Option<String>,
    /// Unknown characters in a row are one token.
    pub fuse: bool,
    /// Characters without a token become tokens of their bytes.
    pub by_bytes: bool,
    /// A word that is a token is not merged.
    pub whole_words: bool,
}

/// A token of a word, and its length in bytes.
type Piece = (u32, u32);

/// Words with their tokens.
type Words = HashMap<Box<str>, Box<[Piece]>, RandomState>;

/// Model of byte pair encoding.
pub(super) struct Bpe {
    vocabulary: Vocabulary,
    merges: Merges,
    rules: Rules,
    /// Ids of the tokens `<0x00>` to `<0xFF>`.
    bytes: Vec<u32>,
    /// Ids of ASCII characters.
    ascii: Vec<u32>,
    unknown: Option<u32>,
    words: Vec<Mutex<Words>>,
}

/// A token within a word that is being merged.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// Bytes of the word that it stands for; none once it was merged into the symbol on its left.
    length: u32,
    before: u32,
    after: u32,
}

impl Bpe {
    pub fn new(vocabulary: Vocabulary, merges: Merges, rules: Rules) -> Self {
        let id = |token: &str| vocabulary.id(token.as_bytes());
        let byte = |byte| id(&format!("<{byte:#04X}>")).unwrap_or(NONE);
        let ascii = |byte: u8| id(char::from(byte).encode_utf8(&mut [0; 4])).unwrap_or(NONE);
        Self {
            bytes: (0..=u8::MAX).map(byte).collect(),
            ascii: (0..0x80).map(ascii).collect(),
            unknown: rules.unknown.as_deref().and_then(id),
            words: (0..SHARES).map(|_| Mutex::default()).collect(),
            vocabulary,
            merges,
            rules,
        }
    }

    /// The id of a character at its place in a word, or the bytes that have none.
    fn character<'a>(
        &self,
        character: &'a str,
        (first, last): (bool, bool),
        affixed: &'a mut String,
    ) -> std::result::Result<u32, &'a [u8]> {
        let prefix = if first { "" } else { self.rules.prefix.as_str() };
        let suffix = if last { self.rules.suffix.as_str() } else { "" };
        let plain = prefix.is_empty() && suffix.is_empty();
        let bytes = match (character.as_bytes(), plain) {
            (&[byte], true) if byte.is_ascii() => {
                let id = self.ascii.get(usize::from(byte)).copied().filter(|id| *id != NONE);
                return id.ok_or(character.as_bytes());
            }
            (bytes, true) => bytes,
            (_, false) => {
                affixed.clear();
                affixed.extend([prefix, character, suffix]);
                affixed.as_bytes()
            }
        };
        self.vocabulary.id(bytes).ok_or(bytes)
    }

    /// The symbols of a word before anything is merged.
    fn symbols(&self, word: &str) -> Result<Vec<Symbol>> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        let mut add = |id: u32, length: u32| {
            let at = symbols.len() as u32;
            let before = at.checked_sub(1).unwrap_or(NONE);
            symbols.push(Symbol { id, length, before, after: at + 1 });
        };
        let mut affixed = String::new();
        // An unknown token that is not added yet: more characters may belong to it.
        let mut unknown: Option<Piece> = None;
        for (start, character) in word.char_indices() {
            let length = character.len_utf8();
            let place = (start == 0, start + length == word.len());
            let text = word.get(start..start + length).unwrap_or_default();
            let bytes = match self.character(text, place, &mut affixed) {
                Ok(id) => {
                    if let Some((id, length)) = unknown.take() {
                        add(id, length);
                    }
                    add(id, length as u32);
                    continue;
                }
                Err(bytes) => bytes,
            };
            let id = |byte: &u8| self.bytes.get(usize::from(*byte)).copied().unwrap_or(NONE);
            if self.rules.by_bytes && bytes.iter().all(|byte| id(byte) != NONE) {
                // As in the library, an unknown token before them comes behind them.
                bytes.iter().for_each(|byte| add(id(byte), 1));
                continue;
            }
            let Some(token) = &self.rules.unknown else { continue };
            let next = |before| Some((self.unknown?, before + length as u32));
            let found = match unknown {
                Some((_, before)) if self.rules.fuse => next(before),
                Some((id, before)) => {
                    add(id, before);
                    next(0)
                }
                None => next(0),
            };
            unknown = Some(found.ok_or_else(|| Error::UnkTokenOutOfVocabulary(token.clone()))?);
        }
        if let Some((id, length)) = unknown {
            add(id, length);
        }
        if let Some(last) = symbols.last_mut() {
            last.after = NONE;
        }
        Ok(symbols)
    }

    /// Merges a word's symbols: the merge of the lowest rank first, of the same rank from left to right.
    fn merge(&self, symbols: &mut [Symbol]) {
        // Ordered by the rank, and then by the place of the left symbol.
        let entry = |left: &Symbol, right: &Symbol, at: u32| {
            Some(Reverse(pair(self.merges.rank(left.id, right.id)?, at)))
        };
        let pairs = (0..).zip(symbols.windows(2));
        let pairs = pairs.filter_map(|(at, two)| entry(two.first()?, two.last()?, at));
        let mut queue: BinaryHeap<_> = pairs.collect::<Vec<_>>().into();
        while let Some(Reverse(next)) = queue.pop() {
            let (rank, at) = ((next >> 32) as u32, next as u32);
            let symbol = |at: u32| symbols.get(at as usize).copied().filter(|s| s.length > 0);
            let Some(left) = symbol(at) else { continue };
            let Some(right) = symbol(left.after) else { continue };
            let Some(whole) = self.merges.whole(rank) else { continue };
            // The symbols may be others by now. As in the library, they are merged if they become the same token.
            let fits = takes(&self.merges.ranked, rank, left.id, right.id) || {
                let now = self.merges.rank(left.id, right.id);
                now.and_then(|now| self.merges.whole(now)) == Some(whole)
            };
            if !fits {
                continue;
            }
            let length = left.length + right.length;
            let merged = Symbol { id: whole, length, after: right.after, ..left };
            if let Some(removed) = symbols.get_mut(left.after as usize) {
                removed.length = 0;
            }
            if let Some(after) = symbols.get_mut(right.after as usize) {
                after.before = at;
                queue.extend(entry(&merged, after, at));
            }
            if let Some(before) = symbols.get(left.before as usize) {
                queue.extend(entry(before, &merged, left.before));
            }
            if let Some(place) = symbols.get_mut(at as usize) {
                *place = merged;
            }
        }
    }

    /// The tokens of a word with their lengths.
    fn pieces(&self, word: &str) -> Result<Vec<Piece>> {
        let mut symbols = self.symbols(word)?;
        self.merge(&mut symbols);
        let kept = symbols.iter().filter(|symbol| symbol.length > 0);
        Ok(kept.map(|symbol| (symbol.id, symbol.length)).collect())
    }

    /// The tokens as the library wants them.
    fn tokens(&self, pieces: &[Piece]) -> Vec<Token> {
        let mut start = 0;
        let token = |&(id, length): &Piece| {
            let offsets = (start, start + length as usize);
            start = offsets.1;
            Token::new(id, self.vocabulary.token(id).unwrap_or_default().to_owned(), offsets)
        };
        pieces.iter().map(token).collect()
    }
}

impl Model for Bpe {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        if word.is_empty() {
            return Ok(Vec::new());
        }
        if self.rules.whole_words
            && let Some(id) = self.vocabulary.id(word.as_bytes())
        {
            return Ok(vec![Token::new(id, word.to_owned(), (0, word.len()))]);
        }
        if word.len() >= LONG_WORD {
            return Ok(self.tokens(&self.pieces(word)?));
        }
        let share = hash(&self.vocabulary.hashes, word.as_bytes()) as usize % SHARES;
        let words = self.words.get(share);
        // A thread that would have to wait for another one is faster without the words.
        let words = || words.and_then(|words| words.try_lock().ok());
        if let Some(words) = words()
            && let Some(pieces) = words.get(word)
        {
            return Ok(self.tokens(pieces));
        }
        let pieces = self.pieces(word)?;
        let tokens = self.tokens(&pieces);
        if let Some(mut words) = words()
            && words.len() < MAX_WORDS / SHARES
        {
            words.insert(word.into(), pieces.into());
        }
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.vocabulary.id(token.as_bytes())
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.vocabulary.token(id).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.vocabulary.tokens().map(|(token, id)| (token.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocabulary.count
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("a tokenizer that was read is not written".into())
    }

    fn get_trainer(&self) -> Self::Trainer {
        BpeTrainer::default().into()
    }
}
