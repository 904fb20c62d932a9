//! The tokenizer of a GGUF file as the `tokenizer.json` and `tokenizer_config.json` that it was made of.
//!
//! Two kinds: `llama`, merges of SentencePiece in the order of the tokens' scores, and `gpt2`, merges of bytes that are
//! listed. How the latter splits a text into words is a name in the file (`tokenizer.ggml.pre`), which stands for
//! patterns in the code of llama.cpp (`llama-vocab.cpp`). `gemma4` has listed merges over the texts of `llama`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use qhx_base::artifacts::Mapped;
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use super::file::File;

/// Max tokens, and max merges; the largest vocabularies have a tenth of that.
const MAX_TOKENS: usize = 1 << 22;
/// Longest token whose merges are looked for, in bytes; SentencePiece makes none of more than 16 characters by itself.
const MAX_MERGED: usize = 256;
/// A space within tokens of SentencePiece.
const SPACE: &str = "▁";
/// Tokens that end a turn in a conversation, which a file names beside the end of a text by their text alone.
const TURN_ENDS: [&str; 6] =
    ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>"];
/// Control tokens at which llama.cpp ends an answer as well (`llama-vocab.cpp`, `special_eog_ids`). Without that type,
/// some of these texts are plain words, such as the HTML tag `</s>` of Gemma's vocabulary.
const CONTROL_ENDS: [&str; 15] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_utterance>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
];
/// Pairs of tokens of formats in which `<|end|>` ends a message within an answer.
const MESSAGES_WITHIN: [[&str; 2]; 2] = [["<|return|>", "<|call|>"], ["<|flush|>", "<|calls|>"]];
/// Tokens of Phi-3's vocabulary after which white space stays; its other special tokens take it along.
const PHI3_PLAIN: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Types of tokens (`llama_token_type`).
mod kind {
    pub(super) const UNKNOWN: u32 = 2;
    pub(super) const CONTROL: u32 = 3;
    pub(super) const USER_DEFINED: u32 = 4;
    pub(super) const UNUSED: u32 = 5;
    pub(super) const BYTE: u32 = 6;
}

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
/// Marks, spaces and lines, as all patterns since that of GPT-4 have them.
const REST: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words in which an upper-case letter begins another one.
const CASED: [&str; 2] = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
];

/// The files of a tokenizer.
#[derive(Debug, Clone)]
pub(crate) struct Embedded {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`, the chat template included.
    pub config: Json,
}

/// The tokenizer of the file; none where it has none. Errors say what cannot be read.
pub(super) fn of(file: &File, map: &Mapped) -> Result<Option<Embedded>, String> {
    let Some(model) = file.text(&key("model")) else { return Ok(None) };
    let vocabulary = Vocabulary::read(file, map)?;
    let rules = match model {
        "llama" => Rules::sentence_pieces(file.flag(&key("add_space_prefix")).unwrap_or(true)),
        "gpt2" => Rules::bytes(file.text(&key("pre")).unwrap_or_default())?,
        "gemma4" => Rules::sentence_pieces(false),
        other => {
            return Err(format!(
                "its tokenizer is of the kind {other:?} (tokenizer.ggml.model), expected \"llama\", \"gpt2\" or \
                 \"gemma4\""
            ));
        }
    };
    let listed = texts(file, map, &key("merges"))?;
    let merges = match (model, &listed) {
        ("llama", _) => vocabulary.merges(&scores(file, map, vocabulary.tokens.len())?),
        (_, Some(listed)) => listed.iter().map(|merge| pair(merge)).collect::<Result<_, _>>()?,
        (_, None) => return Err("it has a tokenizer without merges".to_owned()),
    };
    let special = |name: &str| {
        let id = file.size(&key(&format!("{name}_token_id")))?;
        Some((id, *vocabulary.tokens.get(id)?))
    };
    let bos = special("bos").filter(|_| file.flag(&key("add_bos_token")).unwrap_or(rules.bos));
    let eos = special("eos").filter(|_| file.flag(&key("add_eos_token")).unwrap_or(false));
    let unknown = rules.byte_fallback.then(|| vocabulary.unknown()).flatten();
    let document = Document {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: vocabulary.added(takes_space(file, model)),
        normalizer: rules.normalizer,
        pre_tokenizer: rules.pre_tokenizer,
        post_processor: around(bos, eos),
        decoder: rules.decoder,
        model: Model {
            kind: "BPE",
            dropout: None,
            unk_token: unknown,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: rules.byte_fallback,
            byte_fallback: rules.byte_fallback,
            ignore_merges: rules.ignore_merges,
            vocab: vocabulary.ids(rules.byte_fallback),
            merges,
        },
    };
    let tokenizer = serde_json::to_vec(&document).map_err(|e| e.to_string())?;
    let mut config = Map::new();
    config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
    for (ours, theirs) in [
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ] {
        if let Some((_, token)) = special(theirs) {
            config.insert(ours.to_owned(), json!(token));
        }
    }
    config.insert("add_bos_token".to_owned(), json!(bos.is_some()));
    config.insert("add_eos_token".to_owned(), json!(eos.is_some()));
    if let Some(template) = template(file, map)? {
        config.insert("chat_template".to_owned(), json!(template));
    }
    Ok(Some(Embedded { tokenizer, config: Json::Object(config) }))
}

/// The chat template; none where there is none. Errors when it is no text.
pub(super) fn template<'a>(file: &'a File, map: &'a Mapped) -> Result<Option<&'a str>, String> {
    match file.long_text(map, "tokenizer.chat_template") {
        None => Ok(None),
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err("its tokenizer.chat_template is no text in UTF-8".to_owned()),
        },
    }
}

/// The ids of the tokens that end a text or a turn, each once, that of a text first.
pub(super) fn ends(file: &File, map: &Mapped) -> Vec<usize> {
    let keys = ["eos", "eot", "eom"].map(|name| key(&format!("{name}_token_id")));
    let tokens = file.texts(map, &key("tokens")).unwrap_or_default();
    let kinds = file.numbers(map, &key("token_type")).unwrap_or_default();
    let of = |id: usize, names: &[&str]| {
        tokens.get(id).is_some_and(|token| names.iter().any(|name| name.as_bytes() == *token))
    };
    let control = |id: usize| kinds.get(id) == Some(&f64::from(kind::CONTROL));
    let ends = |id: &usize| of(*id, &TURN_ENDS) || control(*id) && of(*id, &CONTROL_ENDS);
    let mut found: Vec<usize> = Vec::new();
    let keyed = keys.iter().filter_map(|key| file.size(key));
    for id in keyed.chain((0..tokens.len()).filter(ends)) {
        if !found.contains(&id) {
            found.push(id);
        }
    }
    let has = |name: &str| found.iter().any(|id| of(*id, &[name]));
    if MESSAGES_WITHIN.iter().any(|pair| pair.iter().all(|name| has(name))) {
        found.retain(|id| !of(*id, &["<|end|>"]));
    }
    found
}

/// True where special tokens take the white space behind them along (`rstrip`): no key says so. llama.cpp knows Phi-3
/// by its name.
fn takes_space(file: &File, model: &str) -> bool {
    let architecture = file.text("general.architecture").unwrap_or_default();
    model == "llama" && matches!(architecture, "phi3" | "phimoe")
}

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// A list of texts; none where there is no such key.
fn texts<'a>(file: &File, map: &'a Mapped, key: &str) -> Result<Option<Vec<&'a str>>, String> {
    let Some(list) = file.texts(map, key) else { return Ok(None) };
    if list.len() > MAX_TOKENS {
        return Err(format!("{key} has {} entries, expected at most {MAX_TOKENS}", list.len()));
    }
    let texts = list.into_iter().enumerate().map(|(index, bytes)| {
        std::str::from_utf8(bytes)
            .map_err(|_| format!("entry {index} of {key} is no text in UTF-8"))
    });
    texts.collect::<Result<_, _>>().map(Some)
}

/// The scores of `count` tokens.
fn scores(file: &File, map: &Mapped, count: usize) -> Result<Vec<f64>, String> {
    let key = key("scores");
    let scores = file.numbers(map, &key).unwrap_or_default();
    if scores.len() != count || scores.iter().any(|score| score.is_nan()) {
        return Err(format!(
            "{key} has {} numbers, expected one for each of {count} tokens",
            scores.len()
        ));
    }
    Ok(scores)
}

/// The two tokens of a listed merge. The first of them may begin with the space between them.
fn pair(merge: &str) -> Result<(&str, &str), String> {
    let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
    let halves = at.and_then(|at| Some((merge.get(..at)?, merge.get(at + 1..)?)));
    halves.ok_or_else(|| format!("the merge {merge:?} is no pair of tokens"))
}

/// The tokens, and the type of each.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<u32>,
}

impl<'a> Vocabulary<'a> {
    fn read(file: &File, map: &'a Mapped) -> Result<Self, String> {
        let tokens = texts(file, map, &key("tokens"))?.unwrap_or_default();
        if tokens.is_empty() {
            return Err("it has a tokenizer without tokens".to_owned());
        }
        let kinds = file.numbers(map, &key("token_type"));
        let kinds = kinds.unwrap_or_else(|| vec![1.0; tokens.len()]);
        if kinds.len() != tokens.len() {
            return Err(format!(
                "tokenizer.ggml.token_type has {} entries, expected one for each of {} tokens",
                kinds.len(),
                tokens.len()
            ));
        }
        Ok(Self { tokens, kinds: kinds.into_iter().map(|kind| kind as u32).collect() })
    }

    fn entries(&self) -> impl Iterator<Item = (usize, &'a str, u32)> {
        let entries = self.tokens.iter().zip(&self.kinds).enumerate();
        entries.map(|(id, (token, kind))| (id, *token, *kind))
    }

    /// The token for what no other one is.
    fn unknown(&self) -> Option<&'a str> {
        self.entries().find(|(_, _, found)| *found == kind::UNKNOWN).map(|(_, token, _)| token)
    }

    /// Tokens with their ids. What llama.cpp adds to list as many tokens as the embedding has rows is left out.
    fn ids(&self, unused: bool) -> BTreeMap<&'a str, usize> {
        let mut ids = BTreeMap::new();
        for (id, token, found) in self.entries() {
            if unused || found != kind::UNUSED {
                ids.entry(token).or_insert(id);
            }
        }
        ids
    }

    /// Tokens that are found in a text before anything else. With `takes_space` they are Phi-3's, see
    /// [`takes_space`].
    fn added(&self, takes_space: bool) -> Vec<Added<'a>> {
        let mut first: HashMap<&str, usize> = HashMap::new();
        let mut added = Vec::new();
        for (id, content, found) in self.entries() {
            let once = *first.entry(content).or_insert(id) == id;
            let special = matches!(found, kind::UNKNOWN | kind::CONTROL);
            if once && !content.is_empty() && (special || found == kind::USER_DEFINED) {
                let stripped = (special || content == "</s>") && !PHI3_PLAIN.contains(&content);
                added.push(Added {
                    id,
                    content,
                    single_word: false,
                    lstrip: false,
                    rstrip: takes_space && stripped,
                    normalized: false,
                    special,
                });
            }
        }
        added
    }

    /// The merges that SentencePiece makes: any two tokens that are a third one, the best of which comes first, and
    /// those of longer parts before those of shorter ones.
    fn merges(&self, scores: &[f64]) -> Vec<(&'a str, &'a str)> {
        let ids = self.ids(true);
        let mut merges = Vec::new();
        for ((_, token, found), score) in self.entries().zip(scores) {
            let made = !matches!(found, kind::UNKNOWN | kind::CONTROL | kind::BYTE);
            if !made || token.len() > MAX_MERGED {
                continue;
            }
            let first = merges.len();
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(l), Some(r)) = (ids.get(left), ids.get(right)) {
                    merges.push(((*l, *r), *score, left, right));
                }
            }
            if let Some(own) = merges.get_mut(first..) {
                own.sort_by_key(|(ids, ..)| *ids);
            }
        }
        let chars = |text: &str| Reverse(text.chars().count());
        merges.sort_by(|(_, a, a_left, a_right), (_, b, b_left, b_right)| {
            let longer = || (chars(a_left), chars(a_right)).cmp(&(chars(b_left), chars(b_right)));
            b.total_cmp(a).then_with(longer)
        });
        merges.into_iter().map(|(_, _, left, right)| (left, right)).collect()
    }
}

/// Processing of a text besides merging, for one kind of tokenizer.
struct Rules {
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
    byte_fallback: bool,
    ignore_merges: bool,
    /// True if a text begins with a BOS token when the file does not say.
    bos: bool,
}

impl Rules {
    /// Spaces are a letter, and what is no token is bytes. `prefix`: a text begins with a space.
    fn sentence_pieces(prefix: bool) -> Self {
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let spaces = replace(" ", SPACE);
        let mut decoders =
            vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
        let (normalizer, pre_tokenizer) = match prefix {
            true => {
                decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
                let prepend = json!({"type": "Prepend", "prepend": SPACE});
                (json!({"type": "Sequence", "normalizers": [prepend, spaces]}), Json::Null)
            }
            false => (spaces, split(&json!({"String": " "}), "MergedWithPrevious")),
        };
        Self {
            normalizer,
            pre_tokenizer,
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            byte_fallback: true,
            ignore_merges: false,
            bos: true,
        }
    }

    /// Words are bytes; `name` says what a word is.
    fn bytes(name: &str) -> Result<Self, String> {
        let words =
            |letters: &str, numbers: &str| format!(r"{CONTRACTIONS}|{letters}|{numbers}|{REST}");
        let letters = r"[^\r\n\p{L}\p{N}]?\p{L}+";
        let llama = || words(letters, r"\p{N}{1,3}");
        let (mut nfc, mut ignore_merges, mut bos, mut digits) = (false, false, false, false);
        let pattern = match name {
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" => {
                (ignore_merges, bos) = (true, true);
                Some(llama())
            }
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => Some(llama()),
            "qwen2" | "deepseek-r1-qwen" | "stablelm2" | "hunyuan" => {
                nfc = name == "qwen2";
                Some(words(letters, r"\p{N}"))
            }
            "qwen35" => {
                nfc = true;
                let marks = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
                Some(format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{marks}"
                ))
            }
            "tekken" => {
                (ignore_merges, bos) = (true, true);
                let [lower, upper] = CASED;
                Some(format!(r"{lower}|{upper}|\p{{N}}|{}", REST.replace(r"[\r\n]*", r"[\r\n/]*")))
            }
            "gpt-4o" => {
                let [lower, upper] = CASED.map(|word| format!("{word}{CONTRACTIONS}?"));
                let rest = REST.replace(r"[\r\n]*", r"[\r\n/]*");
                Some(format!(r"{lower}|{upper}|\p{{N}}{{1,3}}|{rest}"))
            }
            "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "granite-docling" => None,
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" => {
                digits = true;
                None
            }
            other => {
                return Err(format!(
                    "its tokenizer splits texts by the unknown rules {other:?} (tokenizer.ggml.pre), expected those of \
                     llama-bpe, qwen2, qwen35, gpt-2, gpt-4o, tekken, smollm, refact or others of these patterns"
                ));
            }
        };
        let bytes = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let first = match &pattern {
            Some(pattern) => Some(split(&json!({"Regex": pattern}), "Isolated")),
            None => digits.then(|| json!({"type": "Digits", "individual_digits": true})),
        };
        let parts: Vec<Json> = first.into_iter().chain([bytes(pattern.is_none())]).collect();
        Ok(Self {
            normalizer: if nfc { json!({"type": "NFC"}) } else { Json::Null },
            pre_tokenizer: json!({"type": "Sequence", "pretokenizers": parts}),
            decoder: bytes(true),
            byte_fallback: false,
            ignore_merges,
            bos,
        })
    }
}

fn split(pattern: &Json, behavior: &str) -> Json {
    json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false})
}

/// Template of the tokens around a text.
fn around(bos: Option<(usize, &str)>, eos: Option<(usize, &str)>) -> Json {
    let special = |token: Option<(usize, &str)>, side: u32| {
        token.map(|(_, token)| json!({"SpecialToken": {"id": token, "type_id": side}}))
    };
    let text = |name: &str, side: u32| {
        let own = json!({"Sequence": {"id": name, "type_id": side}});
        [special(bos, side), Some(own), special(eos, side)].into_iter().flatten()
    };
    let tokens = [bos, eos].into_iter().flatten().map(|(id, token)| {
        (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}))
    });
    json!({
        "type": "TemplateProcessing",
        "single": text("A", 0).collect::<Vec<_>>(),
        "pair": text("A", 0).chain(text("B", 1)).collect::<Vec<_>>(),
        "special_tokens": tokens.collect::<Map<_, _>>(),
    })
}

/// `tokenizer.json`.
#[derive(Serialize)]
struct Document<'a> {
    version: &'a str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<Added<'a>>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: Model<'a>,
}

#[derive(Serialize)]
struct Added<'a> {
    id: usize,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    dropout: Option<()>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<()>,
    end_of_word_suffix: Option<()>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: BTreeMap<&'a str, usize>,
    merges: Vec<(&'a str, &'a str)>,
}
