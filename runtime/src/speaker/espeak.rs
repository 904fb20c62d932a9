//! Phonemes by the program `espeak-ng`, which is called where it is installed.

use std::io::{ErrorKind as IoKind, Write as _};
use std::process::{Command, Stdio};

use qhx_base::{Error, ErrorKind, Result, error};

use crate::vars::ESPEAK;

/// The program, and the older one of the same arguments.
const PROGRAMS: [&str; 2] = ["espeak-ng", "espeak"];
/// Punctuation that stays, where a space or the end follows. The program itself drops it.
const MARKS: &str = ".,:;!?…。，：；！？";
/// The same of voices that know more of it.
const MORE_MARKS: &str = "—“”«»\"()¡¿";
/// Marks of other scripts, and those that voices know.
const LATIN_MARKS: [(char, char); 8] = [
    ('。', '.'),
    ('，', ','),
    ('：', ':'),
    ('；', ';'),
    ('！', '!'),
    ('？', '?'),
    ('«', '“'),
    ('»', '”'),
];
/// Marks of which one is the last of a text, where spaces stand around them.
const ENDS: [char; 6] = ['.', '!', '?', ',', ';', ':'];
/// Mark between the letters of one phoneme.
const TIE: char = '^';
/// Phonemes of two letters as one symbol, as Kokoro has them.
const JOINED: [(&str, &str); 11] = [
    ("a^ɪ", "I"),
    ("a^ʊ", "W"),
    ("d^z", "ʣ"),
    ("d^ʒ", "ʤ"),
    ("e^ɪ", "A"),
    ("o^ʊ", "O"),
    ("ə^ʊ", "Q"),
    ("s^s", "S"),
    ("t^s", "ʦ"),
    ("t^ʃ", "ʧ"),
    ("ɔ^ɪ", "Y"),
];

/// Phonemes of a sentence with its punctuation, by the program's voice of this name.
pub(super) fn phonemes(sentence: &str, voice: &str, joined: bool, spaced: bool) -> Result<String> {
    let mut phonemes = String::new();
    for (words, marks) in parts(sentence, joined || spaced) {
        if !words.is_empty() {
            if !phonemes.is_empty() {
                phonemes.push(' ');
            }
            let spoken = run(&words, voice, joined)?;
            phonemes.push_str(&if joined { join(&spoken) } else { spoken });
        }
        phonemes.push_str(&marks);
    }
    Ok(if spaced { apart(&phonemes) } else { phonemes })
}

/// A text with a comma behind it where no mark is the last.
pub(super) fn ended(text: &str) -> String {
    let text = text.trim();
    if text.ends_with(ENDS) { text.to_owned() } else { format!("{text},") }
}

/// Words and marks with a space between any two.
fn apart(phonemes: &str) -> String {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let mut spaced = String::new();
    let mut within = false;
    for character in phonemes.chars() {
        let word = is_word(character);
        let joins = word && within || spaced.is_empty() || spaced.ends_with(' ');
        if !joins {
            spaced.push(' ');
        }
        within = word;
        if !character.is_whitespace() {
            spaced.push(character);
        }
    }
    spaced.trim_end().to_owned()
}

/// Words, and the marks behind them, in order.
fn parts(sentence: &str, more: bool) -> Vec<(String, String)> {
    let mut parts = vec![(String::new(), String::new())];
    let mut characters = sentence.chars().peekable();
    while let Some(character) = characters.next() {
        let next = characters.peek().copied();
        // A point within a number, say, is the program's.
        let ends = next.is_none_or(|next| !next.is_alphanumeric()) || !character.is_ascii();
        let mark = MARKS.contains(character) && ends || more && MORE_MARKS.contains(character);
        let latin = LATIN_MARKS.iter().find(|(mark, _)| *mark == character);
        let last = parts.len() - 1;
        let (words, marks) = &mut parts[last];
        match mark {
            true => marks.push(latin.map_or(character, |(_, latin)| *latin)),
            false if marks.is_empty() => words.push(plain(character)),
            false if character.is_whitespace() => {}
            false => parts.push((plain(character).to_string(), String::new())),
        }
    }
    for (words, _) in &mut parts {
        *words = words.trim().to_owned();
    }
    parts
}

/// A character that means nothing but itself to the program, which takes phonemes between brackets.
fn plain(character: char) -> char {
    if character.is_control() || "[]<>".contains(character) { ' ' } else { character }
}

/// Phonemes of words without punctuation.
fn run(words: &str, voice: &str, tied: bool) -> Result<String> {
    let named = std::env::var_os(ESPEAK);
    let programs = match &named {
        Some(program) => vec![program.as_os_str()],
        None => PROGRAMS.iter().map(|name| std::ffi::OsStr::new(*name)).collect(),
    };
    for program in programs {
        let mut command = Command::new(program);
        command.args(["-q", "--ipa", "-b", "1", "-v", voice, "--stdin"]);
        if tied {
            command.arg(format!("--tie={TIE}"));
        }
        let started =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = match started {
            Err(e) if e.kind() == IoKind::NotFound => continue,
            started => started.map_err(|e| failed(program, e))?,
        };
        if let Some(mut input) = child.stdin.take() {
            // A program that reads nothing says why, or nothing.
            let _ = input.write_all(words.as_bytes());
        }
        let output = child.wait_with_output().map_err(|e| failed(program, e))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("no message").to_owned();
            return Err(error!(
                Internal,
                "{} has no phonemes in the language {voice:?}: {said}",
                program.display()
            )
            .hint("`espeak-ng --voices` lists its languages; a newer version may have more"));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<_> =
            text.lines().map(without_flags).filter(|line| !line.is_empty()).collect();
        return Ok(lines.join(" "));
    }
    Err(error!(Usage, "the voice takes phonemes of espeak-ng, which is not installed").hint(format!(
        "install it (apt install espeak-ng, brew install espeak-ng, winget install eSpeak-NG.eSpeak-NG), name it in \
         {ESPEAK}, or give the text as phonemes: --phonemes"
    )))
}

fn failed(program: &std::ffi::OsStr, e: std::io::Error) -> Error {
    Error::caused(ErrorKind::Io, program.display().to_string(), e)
}

/// A line without the marks of words of another language, such as `(en)`, and without joiners.
fn without_flags(line: &str) -> String {
    let mut depth = 0usize;
    let kept = line.chars().filter(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '\u{200d}' => {}
            _ => return depth == 0,
        }
        false
    });
    kept.collect::<String>().trim().to_owned()
}

/// Phonemes with ties as the symbols of Kokoro.
fn join(phonemes: &str) -> String {
    let joined = JOINED.iter().fold(phonemes.to_owned(), |text, (from, to)| text.replace(from, to));
    joined.replace([TIE, '-'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn punctuation_stays_between_words() {
        let found = |text, more| {
            let parts = parts(text, more).into_iter();
            parts.map(|(words, marks)| format!("{words}|{marks}")).collect::<Vec<_>>()
        };
        assert_eq!(found("It costs 3.5, or [[more]]!", false), ["It costs 3.5|,", "or   more|!"]);
        assert_eq!(found("“Oui”, dit-il…", true), ["|“", "Oui|”,", "dit-il|…"]);
        assert_eq!(found("雨。", false), ["雨|."]);
    }

    #[test]
    fn marks_stand_apart_and_one_is_the_last() {
        assert_eq!(apart("həlˈoʊ, wˈɜːld!?"), "həlˈoʊ , wˈɜːld ! ?");
        assert_eq!(apart("“ɐ” ɹˈʌn"), "“ ɐ ” ɹˈʌn");
        assert_eq!([" a run ", "a run!"].map(ended), ["a run,", "a run!"]);
    }

    #[test]
    fn lines_of_the_program_become_symbols() {
        assert_eq!(without_flags(" (en)hɛlˈoʊ(fr) bɔ̃ʒˈuʁ "), "hɛlˈoʊ bɔ̃ʒˈuʁ");
        assert_eq!(join("t^ʃˈa^ʊ d^ʒ-a^b"), "ʧˈW ʤab");
    }
}
