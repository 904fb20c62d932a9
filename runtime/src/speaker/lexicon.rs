//! Pronunciations of words.

use std::collections::HashMap;
use std::path::Path;

use qhx_base::{Error, ErrorKind, Result, error, files};
use serde_json::{Map, Value};

/// Longest file that is read; the largest published one has 6 MB.
const MAX_BYTES: u64 = 64 << 20;
/// Endings that a word's lexicon entry need not have, the longest first, and what they sound like behind voiced,
/// voiceless and like consonants.
const ENDINGS: [(&str, [&str; 3]); 6] = [
    ("'s", ["z", "s", "ᵻz"]),
    ("es", ["z", "s", "ᵻz"]),
    ("s", ["z", "s", "ᵻz"]),
    ("ed", ["d", "t", "ᵻd"]),
    ("d", ["d", "t", "ᵻd"]),
    ("ing", ["ɪŋ", "ɪŋ", "ɪŋ"]),
];

/// Words and their phonemes: a JSON object of them, as the dictionaries of `misaki` (`us_gold.json`, `gb_silver.json`)
/// are. The phonemes of a word are a text, or an object of such by part of speech, of which `DEFAULT` is taken.
#[derive(Debug, Clone, Default)]
pub struct Lexicon {
    words: HashMap<String, String>,
}

impl Lexicon {
    /// Reads a file.
    ///
    /// # Errors
    /// When it is no such file.
    pub fn read(file: &Path) -> Result<Self> {
        let bytes = files::read(ErrorKind::Usage, file, MAX_BYTES)?;
        let words: Map<String, Value> = serde_json::from_slice(&bytes).map_err(|e| {
            let what = format!("{}: no lexicon, expected a JSON object of words", file.display());
            Error::caused(ErrorKind::Usage, what, e)
        })?;
        let text = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Object(by_part) => {
                let default = by_part.get("DEFAULT").and_then(Value::as_str);
                default.or_else(|| by_part.values().find_map(Value::as_str)).map(str::to_owned)
            }
            _ => None,
        };
        let words: HashMap<_, _> =
            words.into_iter().filter_map(|(word, value)| Some((word, text(&value)?))).collect();
        if words.is_empty() {
            return Err(error!(Usage, "{}: a lexicon without words", file.display())
                .hint("expected {\"word\": \"phonemes\"}, as us_gold.json of misaki"));
        }
        Ok(Self { words })
    }

    /// Takes the words of another one first.
    pub fn add(&mut self, other: Self) {
        self.words.extend(other.words);
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// True without words.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Pronunciation of a word, or of its lower-case form, or of that with one of the usual endings.
    pub fn get(&self, word: &str) -> Option<String> {
        let lower = word.to_lowercase();
        let known = |word: &str| self.words.get(word);
        if let Some(found) = known(word).or_else(|| known(&lower)) {
            return Some(found.clone());
        }
        ENDINGS.iter().find_map(|(ending, sounds)| {
            let stem = lower.strip_suffix(ending).filter(|stem| stem.chars().count() > 1)?;
            let doubled = || {
                let last = stem.chars().next_back()?;
                stem.strip_suffix(last).filter(|stem| stem.ends_with(last)).and_then(known)
            };
            let silent = || known(&format!("{stem}e"));
            let found = match *ending {
                "ing" | "ed" => known(stem).or_else(silent).or_else(doubled),
                _ => known(stem),
            }?;
            Some(format!("{found}{}", ending_of(found, ending, sounds)))
        })
    }
}

/// Sound of an ending after these phonemes.
fn ending_of<'a>(stem: &str, ending: &str, [voiced, voiceless, apart]: &[&'a str; 3]) -> &'a str {
    let last = stem.chars().next_back().unwrap_or_default();
    let like = if ending.ends_with('s') { "szʃʒʧʤ" } else { "td" };
    match last {
        last if like.contains(last) => apart,
        last if "ptkfθsʃʧ".contains(last) => voiceless,
        _ => voiced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_with_endings_and_in_other_case() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gold.json");
        let text = r#"{"cat": "kˈæt", "bake": "bˈAk", "dog": "dˈɔɡ", "stop": "stˈɑp", "want": "wˈɑnt",
            "read": {"DEFAULT": "ɹˈid", "VBD": "ɹˈɛd"}, "Polish": "pˈOlɪʃ", "none": null}"#;
        std::fs::write(&file, text).unwrap();
        let lexicon = Lexicon::read(&file).unwrap();
        for (word, expected) in [
            ("cat", "kˈæt"),
            ("CATS", "kˈæts"),
            ("dog's", "dˈɔɡz"),
            ("baking", "bˈAkɪŋ"),
            ("stopped", "stˈɑpt"),
            ("wanted", "wˈɑntᵻd"),
            ("read", "ɹˈid"),
            ("Polish", "pˈOlɪʃ"),
        ] {
            assert_eq!(lexicon.get(word).as_deref(), Some(expected), "{word}");
        }
        for word in ["none", "bird", "s", "polish"] {
            assert_eq!(lexicon.get(word), None, "{word}");
        }
        std::fs::write(&file, "[1]").unwrap();
        let error = Lexicon::read(&file).unwrap_err().to_string();
        assert!(error.contains("gold.json") && error.contains("no lexicon"), "{error}");
    }
}
