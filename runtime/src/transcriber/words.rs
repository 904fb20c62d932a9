//! Words of tokens, each of which has its times.

use qhx_base::{Result, bail};
use qhx_core::engine::FinishReason;

use super::{Chunk, Times, Transcriber};

/// Codes of languages that are written without spaces.
const SPACELESS: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];
/// Punctuation that is a word of its own before it belongs to another.
const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
/// Punctuation that belongs to the word behind it, and to the one in front of it.
const OPENING: &str = "\"'“¡¿([{-";
const CLOSING: &str = "\"'.。,，!！?？:：”)]}、";

impl Transcriber {
    /// The words of a chunk, where they are asked for.
    pub(super) fn timed(&self, whole: &Chunk, times: &[[f64; 2]]) -> Result<Vec<Chunk>> {
        if self.options.times != Times::Word {
            return Ok(Vec::new());
        }
        if times.is_empty() && !whole.ids.is_empty() {
            bail!(Usage, "times of words: the host-op gives no times of its tokens");
        }
        self.words(&whole.ids, times)
    }

    /// The words of tokens that a recogniser found: what stands between spaces. A token that is nothing but a space
    /// belongs to the word behind it, at the end to the word before it: the tokens of all words have the whole text.
    pub(super) fn words(&self, ids: &[u32], times: &[[f64; 2]]) -> Result<Vec<Chunk>> {
        let (mut words, mut before) = (Vec::<Chunk>::new(), String::new());
        for (count, (&id, &[from, to])) in ids.iter().zip(times).enumerate() {
            let text = self.decoded(ids.get(..=count).unwrap_or(ids))?;
            let more = text.strip_prefix(before.as_str()).unwrap_or_default().to_owned();
            let begins =
                more.starts_with(char::is_whitespace) || before.ends_with(char::is_whitespace);
            match words.last_mut().filter(|word| !begins || word.text.is_empty()) {
                Some(word) => {
                    word.text.push_str(more.trim());
                    (word.end, word.tokens) = (to, word.tokens + 1);
                    word.ids.push(id);
                }
                None => words.push(word(more.trim(), [from, to], vec![id])),
            }
            before = text;
        }
        if let Some(space) = words.pop_if(|word| word.text.is_empty())
            && let Some(word) = words.last_mut()
        {
            word.tokens += space.tokens;
            word.ids.extend(space.ids);
        }
        Ok(words)
    }

    /// The words of tokens that were aligned with audio: `_combine_tokens_into_words` of `transformers`. Punctuation
    /// belongs to the word beside it; without spaces between words, each character is one.
    pub(super) fn aligned_words(
        &self,
        ids: &[u32],
        times: &[[f64; 2]],
        language: Option<&str>,
    ) -> Result<Vec<Chunk>> {
        let spaces = language.is_none_or(|code| !SPACELESS.contains(&code));
        let words = merged(ids, spaces, |ids| self.decoded(ids))?;
        let (mut found, mut done) = (Vec::new(), 0);
        for (text, count) in words {
            let range = done..done + count;
            done += count;
            let (Some(ids), Some([[from, _], .., [_, to]] | [[from, to]])) =
                (ids.get(range.clone()), times.get(range))
            else {
                continue;
            };
            if !text.trim().is_empty() {
                found.push(word(text.trim(), [*from, *to], ids.to_vec()));
            }
        }
        Ok(found)
    }
}

fn word(text: &str, [start, end]: [f64; 2], ids: Vec<u32>) -> Chunk {
    let (text, tokens) = (text.to_owned(), ids.len());
    Chunk { start, end, text, finish_reason: FinishReason::Eos, tokens, ids, scores: None }
}

/// A text, and the number of its tokens.
type Counted = (String, usize);

/// Words with their punctuation and the spaces in front of them.
fn merged(
    ids: &[u32],
    spaces: bool,
    decode: impl Fn(&[u32]) -> Result<String>,
) -> Result<Vec<Counted>> {
    let mut words: Vec<Counted> = Vec::new();
    for (text, count) in characters(ids, decode)? {
        let begins = !spaces || text.starts_with(' ') || PUNCTUATION.contains(text.trim());
        match words.last_mut().filter(|_| !begins) {
            Some(word) => {
                word.0.push_str(&text);
                word.1 += count;
            }
            None => words.push((text, count)),
        }
    }
    let mut behind = words.len().saturating_sub(1);
    for at in (0..behind).rev() {
        if words[at].0.starts_with(' ') && OPENING.contains(words[at].0.trim()) {
            let (text, count) = std::mem::take(&mut words[at]);
            words[behind].0.insert_str(0, &text);
            words[behind].1 += count;
        } else {
            behind = at;
        }
    }
    let mut before = 0;
    for at in 1..words.len() {
        if !words[before].0.ends_with(' ') && CLOSING.contains(words[at].0.as_str()) {
            let (text, count) = std::mem::take(&mut words[at]);
            words[before].0.push_str(&text);
            words[before].1 += count;
        } else {
            before = at;
        }
    }
    words.retain(|(text, _)| !text.is_empty());
    Ok(words)
}

/// The shortest runs of tokens whose characters are complete.
fn characters(ids: &[u32], decode: impl Fn(&[u32]) -> Result<String>) -> Result<Vec<Counted>> {
    const BROKEN: char = char::REPLACEMENT_CHARACTER;
    let whole: Vec<char> = decode(ids)?.chars().collect();
    let (mut found, mut first, mut offset) = (Vec::new(), 0, 0);
    for end in 1..=ids.len() {
        let text = decode(ids.get(first..end).unwrap_or_default())?;
        let broken = text.chars().position(|c| c == BROKEN);
        // What is broken in the whole does not become complete.
        let stays = |at: usize| whole.get(offset + at).is_none_or(|c| *c == BROKEN);
        if broken.is_none_or(stays) {
            offset += text.chars().count();
            found.push((text, end - first));
            first = end;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use qhx_text::Tokenizer;
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Goldens {
        merged: Vec<Merged>,
    }

    #[derive(Deserialize)]
    struct Merged {
        spaces: bool,
        ids: Vec<u32>,
        words: Vec<Counted>,
    }

    /// Words as `transformers` merges them (`tests/oracle/whisper_words.py`).
    #[test]
    fn punctuation_belongs_to_the_word_beside_it() {
        let folder = qhx_paths::fixture("whisper-tiny");
        let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
        let goldens = std::fs::read(folder.join("words.json")).unwrap();
        let Goldens { merged: all } = serde_json::from_slice(&goldens).unwrap();
        assert!(all.iter().any(|one| !one.spaces) && all.iter().any(|one| one.spaces));
        for Merged { spaces, ids, words } in all {
            assert_eq!(merged(&ids, spaces, |ids| tokenizer.decode(ids)).unwrap(), words);
        }
        assert!(merged(&[], true, |ids| tokenizer.decode(ids)).unwrap().is_empty());
    }
}
