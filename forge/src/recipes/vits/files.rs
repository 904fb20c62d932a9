//! The symbols of a voice and how a text becomes them: of the file beside a voice of Piper, and of the files of
//! `VitsTokenizer`.

use std::collections::BTreeMap;

use qhx_base::{Error, ErrorKind, Result, files};
use qhx_checkpoint::Checkpoint;
use serde_json::{Map, Value, json};

use super::config::Config;
use crate::kit::Reader;

/// Tokens in front of the symbols: voice, speed, noise of frames, noise of durations, seed.
pub(super) const VOICES: usize = 5;
/// Longest file of symbols that is read.
const MAX_BYTES: u64 = 4 << 20;
/// Letters of a phoneme.
const MAX_LETTERS: usize = 4;

/// Symbols of a voice.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) voices: Vec<String>,
    pub(super) symbols: BTreeMap<String, u32>,
    /// `params.speech.script`: what makes symbols of a text.
    pub(super) kind: Value,
    /// Symbols in front of a text and behind it.
    pub(super) front: Vec<u32>,
    pub(super) back: Vec<u32>,
    /// Symbol behind each one of a text.
    pub(super) blank: Option<u32>,
}

impl Script {
    /// Of the file beside a voice of Piper.
    pub(super) fn of_piper(checkpoint: &Checkpoint, config: &Config) -> Result<Self> {
        let reader = Reader::whole(checkpoint);
        let key = "phoneme_id_map";
        let found = reader.get(key).unwrap_or(&Value::Null);
        let map: Option<BTreeMap<String, Vec<u32>>> = serde_json::from_value(found.clone()).ok();
        let one = |(symbol, ids): (String, Vec<u32>)| match ids[..] {
            [id] if (id as usize) < config.tokens => Some((symbol, id)),
            _ => None,
        };
        let symbols: Option<BTreeMap<String, u32>> =
            map.and_then(|map| map.into_iter().map(one).collect());
        let Some(mut symbols) = symbols else {
            let what = format!(
                "{key}: expected an object of phonemes with one number each below {}",
                config.tokens
            );
            return Err(reader.fault(what));
        };
        let mut border = |symbol: &str| {
            let id = symbols.remove(symbol);
            id.ok_or_else(|| {
                reader.fault(format!("{key} has no {symbol:?}, expected '_', '^' and '$'"))
            })
        };
        let (blank, first, last) = (border("_")?, border("^")?, border("$")?);
        let clusters = reader
            .get("vowel_clusters")
            .is_some_and(|found| found.as_array().is_some_and(|l| !l.is_empty()));
        symbols.retain(|symbol, _| {
            let letters = symbol.chars().count();
            letters == 1 || clusters && letters <= MAX_LETTERS
        });
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let kind = text(reader.get("phoneme_type")).unwrap_or_else(|| "espeak".to_owned());
        let kind = match kind.as_str() {
            "espeak" => {
                let voice = text(reader.get("espeak").and_then(|espeak| espeak.get("voice")));
                let voice =
                    voice.ok_or_else(|| reader.fault("espeak.voice is missing".to_owned()))?;
                json!({"by": "espeak", "voice": voice})
            }
            "text" => json!({"by": "letters"}),
            other => json!({"by": "phonemes", "of": other}),
        };
        let voices =
            match config.speakers {
                1 => vec![
                    text(reader.get("dataset"))
                        .filter(|name| !name.is_empty())
                        .unwrap_or("default".to_owned()),
                ],
                count => {
                    let named: BTreeMap<String, u32> = reader
                        .get("speaker_id_map")
                        .and_then(|map| serde_json::from_value(map.clone()).ok())
                        .unwrap_or_default();
                    let mut voices: Vec<String> = (0..count).map(|at| at.to_string()).collect();
                    for (name, id) in named {
                        match voices.get_mut(id as usize) {
                            Some(voice) => *voice = name,
                            None => return Err(reader.fault(format!(
                                "speaker_id_map: {name:?} has the number {id} of {count} speakers"
                            ))),
                        }
                    }
                    voices
                }
            };
        Ok(Self {
            voices,
            symbols,
            kind,
            front: vec![first, blank],
            back: vec![last],
            blank: Some(blank),
        })
    }

    /// Of the files of `VitsTokenizer`, `vocab.json` and `tokenizer_config.json`.
    pub(super) fn of_tokenizer(checkpoint: &Checkpoint, config: &Config) -> Result<Self> {
        let voices = match config.speakers {
            1 => vec!["default".to_owned()],
            count => (0..count).map(|at| at.to_string()).collect(),
        };
        if checkpoint.seed().is_some() {
            let symbols = [("a".to_owned(), 0)].into();
            return Ok(Self {
                voices,
                symbols,
                kind: json!({"by": "letters"}),
                front: vec![0],
                back: vec![],
                blank: Some(0),
            });
        }
        let path = checkpoint.dir().join("vocab.json");
        let map: BTreeMap<String, u32> = files::read_json(ErrorKind::Artifact, &path, MAX_BYTES)?;
        if let Some((symbol, id)) = map.iter().find(|(_, id)| **id as usize >= config.tokens) {
            let what = format!(
                "{}: {symbol:?} has the number {id}, expected numbers below vocab_size, {}",
                path.display(),
                config.tokens
            );
            return Err(Error::new(ErrorKind::Artifact, what));
        }
        let path = checkpoint.dir().join("tokenizer_config.json");
        let settings: Map<String, Value> = match path.exists() {
            true => files::read_json(ErrorKind::Artifact, &path, MAX_BYTES)?,
            false => Map::new(),
        };
        let flag = |key: &str, default: bool| {
            settings.get(key).and_then(Value::as_bool).unwrap_or(default)
        };
        let kind = match flag("phonemize", true) {
            // As the class does, whatever the language.
            true => json!({"by": "espeak", "voice": "en-us"}),
            false => {
                let mut kind = json!({"by": "letters", "lower": flag("normalize", true)});
                if flag("is_uroman", false) {
                    kind["roman"] = true.into();
                }
                kind
            }
        };
        let symbols = map.into_iter().filter(|(symbol, _)| symbol.chars().count() == 1).collect();
        let (front, blank) =
            if flag("add_blank", true) { (vec![0], Some(0)) } else { (vec![], None) };
        Ok(Self { voices, symbols, kind, front, back: vec![], blank })
    }
}
