//! A text as the phonemes of its sentences.

use qhx_base::{Error, Result, error};

use super::lexicon::Lexicon;
use super::{Spoken, numbers, rules};

/// Words without a lexicon entry that are reported.
const MAX_OUT_OF_LEXICON: usize = 100;
/// Ends of sentences; with their kind they stay.
const ENDS: &str = ".!?…";
/// Signs that are said.
const SIGNS: [(char, &str); 7] = [
    ('&', "and"),
    ('%', "percent"),
    ('@', "at"),
    ('+', "plus"),
    ('=', "equals"),
    ('$', "dollar"),
    ('€', "euro"),
];
/// Scripts that are not read, by where their characters are.
const SCRIPTS: [(u32, u32, &str); 13] = [
    (0x370, 0x3FF, "Greek"),
    (0x400, 0x52F, "Cyrillic"),
    (0x530, 0x58F, "Armenian"),
    (0x590, 0x5FF, "Hebrew"),
    (0x600, 0x6FF, "Arabic"),
    (0x900, 0x97F, "Devanagari"),
    (0xE00, 0xE7F, "Thai"),
    (0x10A0, 0x10FF, "Georgian"),
    (0x3040, 0x309F, "Hiragana"),
    (0x30A0, 0x30FF, "Katakana"),
    (0x3400, 0x9FFF, "Han"),
    (0xAC00, 0xD7AF, "Hangul"),
    (0x20000, 0x3FFFF, "Han"),
];

/// The sentences of a text as phonemes, with the punctuation that a voice follows.
pub(super) fn sentences(text: &str, lexicon: &Lexicon, spoken: &mut Spoken) -> Result<Vec<String>> {
    let (mut sentences, mut sentence) = (Vec::new(), String::new());
    let characters: Vec<char> = text.chars().collect();
    let mut at = 0;
    while let Some(&character) = characters.get(at) {
        let run = |fits: &dyn Fn(usize, char) -> bool| {
            let rest = characters[at..].iter().enumerate();
            at + rest.take_while(|(step, c)| fits(at + step, **c)).count()
        };
        let next_is =
            |at: usize, fits: fn(char) -> bool| characters.get(at + 1).copied().is_some_and(fits);
        if character.is_ascii_digit() {
            let end = run(&|at, c| {
                c.is_ascii_digit() || (",.".contains(c) && next_is(at, |c| c.is_ascii_digit()))
            });
            let number: String = characters[at..end].iter().collect();
            for word in numbers::words(&number).split(' ') {
                push_word(&mut sentence, word, lexicon, spoken);
            }
            at = end;
        } else if is_latin(character) {
            let end = run(&|at, c| is_latin(c) || ("'’-".contains(c) && next_is(at, is_latin)));
            let word: String = characters[at..end].iter().collect();
            push_word(&mut sentence, &word.replace('’', "'"), lexicon, spoken);
            at = end;
        } else {
            if let Some((_, word)) = SIGNS.iter().find(|(sign, _)| *sign == character) {
                push_word(&mut sentence, word, lexicon, spoken);
            } else if character.is_alphabetic() {
                return Err(foreign(character, at));
            } else if ENDS.contains(character) {
                sentence.push(character);
                if !next_is(at, |c| !c.is_whitespace()) {
                    sentences.push(std::mem::take(&mut sentence));
                }
            } else if character == '\n' && characters.get(at + 1) == Some(&'\n') {
                sentences.push(std::mem::take(&mut sentence));
            } else if ",;:—\"()“”".contains(character) {
                sentence.push(character);
            } else if !character.is_whitespace() && !spoken.left_out.contains(&character) {
                spoken.left_out.push(character);
            }
            at += 1;
        }
    }
    sentences.push(sentence);
    sentences.retain(|sentence| !sentence.trim().is_empty());
    Ok(sentences)
}

fn is_latin(character: char) -> bool {
    character.is_ascii_alphabetic()
        || (('\u{C0}'..='\u{24F}').contains(&character) && character.is_alphabetic())
}

/// Adds a word behind a space.
fn push_word(sentence: &mut String, word: &str, lexicon: &Lexicon, spoken: &mut Spoken) {
    if !sentence.is_empty() && !sentence.ends_with(['(', '“']) {
        sentence.push(' ');
    }
    match lexicon.get(word) {
        Some(known) => sentence.push_str(&known),
        None => {
            if spoken.out_of_lexicon.len() < MAX_OUT_OF_LEXICON
                && !spoken.out_of_lexicon.iter().any(|known| known == word)
            {
                spoken.out_of_lexicon.push(word.to_owned());
            }
            sentence.push_str(&rules::phonemes(word));
        }
    }
}

/// The error of a letter of another script.
fn foreign(character: char, at: usize) -> Error {
    let code = u32::from(character);
    let script = SCRIPTS.iter().find(|(first, last, _)| (*first..=*last).contains(&code));
    let script = script.map_or("another", |(_, _, name)| name);
    error!(
        Prompt,
        "character {} of the text is {character:?}, of {script} script, expected Latin letters",
        at + 1
    )
    .hint("give the phonemes of such a text instead (--phonemes on the command line)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> (Vec<String>, Spoken) {
        let mut spoken = Spoken::default();
        (sentences(text, &Lexicon::default(), &mut spoken).unwrap(), spoken)
    }

    #[test]
    fn texts_are_cut_into_sentences_with_their_punctuation() {
        let (found, spoken) = said("A cat, 12 dogs. It costs 1.5 & more! 😀");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("ə kˈæt, twˈ") && found[0].ends_with('.'), "{found:?}");
        assert!(found[1].contains("pˈYnt") && found[1].ends_with('!'), "{found:?}");
        assert_eq!(spoken.left_out, ['😀']);
        assert!(spoken.out_of_lexicon.contains(&"dogs".to_owned()), "{spoken:?}");
        assert!(said("  \n ").0.is_empty());
    }

    #[test]
    fn other_scripts_are_named() {
        for (text, what) in [
            ("Say дом", "character 5 of the text is 'д', of Cyrillic script"),
            ("漢字", "Han script"),
            ("한국", "Hangul script"),
        ] {
            let error = sentences(text, &Lexicon::default(), &mut Spoken::default()).unwrap_err();
            assert!(error.message().contains(what), "{error}");
        }
    }

    #[test]
    fn long_texts_take_no_longer_than_their_length() {
        let text = "word ".repeat(20_000);
        let (found, _) = said(&text);
        assert_eq!(found.len(), 1);
        let (found, _) = said(&"x".repeat(100_000));
        assert_eq!(found.len(), 1);
    }
}
