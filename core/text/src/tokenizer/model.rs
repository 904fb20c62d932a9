//! Models of a `tokenizer.json`: the part of the file that has nearly all of its bytes, read in one pass.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::models::TrainerWrapper;
use tokenizers::{ModelWrapper, Token};

use super::bpe::{Bpe, Merge, Merges, Rules, Vocabulary};

/// The model of a tokenizer.
pub(super) enum Model {
    /// Byte pair encoding in compact tables.
    Bpe(Bpe),
    /// Any other model of the library.
    Library(ModelWrapper),
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ModelWrapper::deserialize(deserializer).map(Self::Library)
    }
}

/// Calls a function of whichever model it is.
macro_rules! either {
    ($model:expr, $name:ident => $call:expr) => {
        match $model {
            Model::Bpe($name) => $call,
            Model::Library($name) => $call,
        }
    };
}

impl tokenizers::Model for Model {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        either!(self, model => model.tokenize(word))
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        either!(self, model => model.token_to_id(token))
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        either!(self, model => model.id_to_token(id))
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        either!(self, model => model.get_vocab())
    }

    fn get_vocab_size(&self) -> usize {
        either!(self, model => model.get_vocab_size())
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        either!(self, model => model.save(folder, prefix))
    }

    fn get_trainer(&self) -> Self::Trainer {
        either!(self, model => model.get_trainer())
    }
}

/// The model of a file in as much detail as bounds need, and the model itself if it is one of byte pair encoding.
#[derive(Default)]
pub(super) struct Read {
    pub kind: Option<String>,
    pub longest: Longest,
    pub unk_token: Option<String>,
    pub fuse_unk: Option<bool>,
    pub byte_fallback: Option<bool>,
    pub max_input_chars_per_word: u64,
    /// `None` for what is left to the library: other models, a dropout, and all that it refuses.
    pub bpe: Option<Bpe>,
}

/// The lengths of the longest tokens of a vocabulary.
#[derive(Debug, Default)]
pub(super) struct Longest {
    pub bytes: usize,
    pub chars: usize,
}

impl Longest {
    fn add(&mut self, token: &str) {
        self.bytes = self.bytes.max(token.len());
        if token.len() > self.chars {
            self.chars = self.chars.max(token.chars().count());
        }
    }
}

/// Keys of a model that are understood here. One that stands twice is an error.
const KEYS: [&str; 11] = [
    PREFIX,
    "type",
    "vocab",
    "merges",
    "unk_token",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "dropout",
    "end_of_word_suffix",
    "max_input_chars_per_word",
];

const PREFIX: &str = "continuing_subword_prefix";

/// Bytes of what stands before or behind the parts of a word. Published tokenizers have at most four; each character
/// may become as many tokens.
const MAX_AFFIX: usize = 256;

impl<'de> Deserialize<'de> for Read {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ReadVisitor)
    }
}

struct ReadVisitor;

impl<'de> Visitor<'de> for ReadVisitor {
    type Value = Read;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Read, A::Error> {
        let (mut read, mut rules) = (Read::default(), Rules::default());
        let mut vocabulary: Option<Vocabulary> = None;
        let mut merges: Option<Vec<Merge>> = None;
        // Merges that stand before what they need.
        let mut later: Option<&RawValue> = None;
        let mut seen: Vec<&str> = Vec::with_capacity(KEYS.len());
        // The model is byte pair encoding, as far as it was read.
        let mut fits = true;
        while let Some(key) = map.next_key::<String>()? {
            let Some(key) = KEYS.into_iter().find(|known| *known == key) else {
                fits = false;
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            if seen.contains(&key) {
                return Err(A::Error::custom(format!("duplicate field `{key}`")));
            }
            seen.push(key);
            match key {
                "type" => {
                    read.kind = map.next_value()?;
                    fits &= read.kind.as_deref() == Some("BPE");
                }
                "vocab" => {
                    let (kept, longest) = (fits.then(Tokens::default), &mut read.longest);
                    let kept = map.next_value_seed(VocabSeed { kept, longest })?;
                    vocabulary = kept.and_then(|kept| Vocabulary::new(kept.text, &kept.ends));
                    fits &= vocabulary.is_some();
                }
                "merges" if !fits => drop(map.next_value::<IgnoredAny>()?),
                "merges" => match vocabulary.as_ref().filter(|_| seen.contains(&PREFIX)) {
                    Some(vocabulary) => {
                        let seed = MergesSeed { vocabulary, prefix: rules.prefix.len() };
                        merges = Some(map.next_value_seed(seed)?);
                    }
                    None => later = Some(map.next_value()?),
                },
                "unk_token" => {
                    read.unk_token = map.next_value()?;
                    rules.unknown = read.unk_token.clone();
                }
                "fuse_unk" => {
                    read.fuse_unk = map.next_value()?;
                    rules.fuse = read.fuse_unk == Some(true);
                }
                "byte_fallback" => {
                    read.byte_fallback = map.next_value()?;
                    rules.by_bytes = read.byte_fallback == Some(true);
                }
                "max_input_chars_per_word" => {
                    read.max_input_chars_per_word = map.next_value()?;
                    fits = false;
                }
                _ => {
                    let value: Value = map.next_value()?;
                    let text = || value.as_str().unwrap_or_default().to_owned();
                    let length = value.as_str().unwrap_or_default().len();
                    if length > MAX_AFFIX {
                        let found =
                            format!("{key} has {length} bytes, at most {MAX_AFFIX} are allowed");
                        return Err(A::Error::custom(found));
                    }
                    fits &= match key {
                        PREFIX => {
                            rules.prefix = text();
                            value.is_string()
                        }
                        "end_of_word_suffix" => {
                            rules.suffix = text();
                            value.is_string()
                        }
                        "ignore_merges" => {
                            rules.whole_words = value.as_bool().unwrap_or_default();
                            value.is_boolean()
                        }
                        // A dropout is random, and used in training alone.
                        _ => value.as_f64() == Some(0.0),
                    } || value.is_null();
                }
            }
        }
        let Some(vocabulary) = vocabulary.filter(|_| fits) else { return Ok(read) };
        if let Some(later) = later {
            let seed = MergesSeed { vocabulary: &vocabulary, prefix: rules.prefix.len() };
            let mut json = serde_json::Deserializer::from_str(later.get());
            merges = Some(seed.deserialize(&mut json).map_err(A::Error::custom)?);
        }
        let merges = merges.and_then(Merges::new);
        read.bpe = merges.map(|merges| Bpe::new(vocabulary, merges, rules));
        Ok(read)
    }
}

/// Tokens in a row, each with its end and its id.
#[derive(Default)]
struct Tokens {
    text: String,
    ends: Vec<(u32, u32)>,
}

/// Reader of a vocabulary: a map from tokens to ids, or a list of tokens with scores.
struct VocabSeed<'a> {
    /// The tokens, where they are kept.
    kept: Option<Tokens>,
    longest: &'a mut Longest,
}

impl<'de> DeserializeSeed<'de> for VocabSeed<'_> {
    type Value = Option<Tokens>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for VocabSeed<'_> {
    type Value = Option<Tokens>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tokens with their ids or scores")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_key_seed(TokenSeed(&mut self))?.is_some() {
            let Some(kept) = &mut self.kept else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            // A file has less than 2^32 bytes.
            kept.ends.push((kept.text.len() as u32, map.next_value()?));
        }
        Ok(self.kept)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while let Some((token, _)) = seq.next_element::<(String, IgnoredAny)>()? {
            self.longest.add(&token);
        }
        Ok(None)
    }
}

/// Reader of a token into the text of all.
struct TokenSeed<'a, 'b>(&'a mut VocabSeed<'b>);

impl<'de> DeserializeSeed<'de> for TokenSeed<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for TokenSeed<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E>(self, token: &str) -> Result<(), E> {
        self.0.longest.add(token);
        if let Some(kept) = &mut self.0.kept {
            kept.text.push_str(token);
        }
        Ok(())
    }
}

/// Reader of merges, as pairs of tokens or as texts of two tokens with a space between.
struct MergesSeed<'a> {
    vocabulary: &'a Vocabulary,
    /// Bytes of the prefix, which the right token of a merge loses.
    prefix: usize,
}

impl<'de> DeserializeSeed<'de> for MergesSeed<'_> {
    type Value = Vec<Merge>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for MergesSeed<'_> {
    type Value = Vec<Merge>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let MergesSeed { vocabulary, prefix } = self;
        let (mut both, mut ranked) = (Both::default(), Vec::new());
        // The token that the last merge makes, and its id: often the next merge makes it, too.
        let (mut last, mut id) = (Vec::new(), 0);
        let mut first = None;
        for place in 0.. {
            let Some(form) = seq.next_element_seed(&mut both)? else { break };
            let wrong = |why: &str| A::Error::custom(format!("/model/merges/{place}: {why}"));
            let paired = form == Form::Pair;
            if *first.get_or_insert(paired) != paired {
                return Err(wrong("texts and pairs of tokens mixed, expected one of them"));
            }
            match form {
                Form::Pair | Form::Text => {}
                Form::Comment => continue,
                Form::Foreign => return Err(wrong("expected two tokens and one space between")),
            }
            let known = |token: &[u8]| {
                vocabulary.id(token).ok_or_else(|| {
                    let token: String = String::from_utf8_lossy(token).chars().take(50).collect();
                    wrong(&format!("the token {token:?} is not in the vocabulary"))
                })
            };
            let (left, right) = both.bytes.split_at(both.left.min(both.bytes.len()));
            let (left, right, short) = (known(left)?, known(right)?, right.len() < prefix);
            if short {
                return Err(wrong("the right token is shorter than continuing_subword_prefix"));
            }
            both.bytes.drain(both.left..both.left + prefix);
            if ranked.is_empty() || last != both.bytes {
                id = known(&both.bytes)?;
                last.clone_from(&both.bytes);
            }
            ranked.push([left, right, id]);
        }
        ranked.shrink_to_fit();
        Ok(ranked)
    }
}

/// The two tokens of a merge in a row.
#[derive(Default)]
struct Both {
    bytes: Vec<u8>,
    /// Bytes of the left one.
    left: usize,
}

/// Form of an entry of merges.
#[derive(PartialEq)]
enum Form {
    Pair,
    Text,
    /// A text that is the first line of a `merges.txt`.
    Comment,
    /// A text that is not two tokens.
    Foreign,
}

impl<'de> DeserializeSeed<'de> for &mut Both {
    type Value = Form;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Form, D::Error> {
        self.bytes.clear();
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Both {
    type Value = Form;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pair of tokens, or a text of two")
    }

    fn visit_str<E>(self, text: &str) -> Result<Form, E> {
        if text.starts_with("#version") {
            return Ok(Form::Comment);
        }
        let Some((left, right)) = text.split_once(' ').filter(|(_, right)| !right.contains(' '))
        else {
            return Ok(Form::Foreign);
        };
        self.left = left.len();
        self.bytes.extend(left.bytes().chain(right.bytes()));
        Ok(Form::Text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Form, A::Error> {
        let few = |length| A::Error::invalid_length(length, &"two tokens");
        seq.next_element_seed(BytesSeed(&mut self.bytes))?.ok_or_else(|| few(0))?;
        self.left = self.bytes.len();
        seq.next_element_seed(BytesSeed(&mut self.bytes))?.ok_or_else(|| few(1))?;
        match seq.next_element::<IgnoredAny>()? {
            None => Ok(Form::Pair),
            Some(_) => Err(few(3)),
        }
    }
}

/// Reader of a token behind some bytes.
struct BytesSeed<'a>(&'a mut Vec<u8>);

impl<'de> DeserializeSeed<'de> for BytesSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for BytesSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E>(self, token: &str) -> Result<(), E> {
        self.0.extend_from_slice(token.as_bytes());
        Ok(())
    }
}
