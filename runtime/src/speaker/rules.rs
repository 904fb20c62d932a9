//! English letters to phonemes by rules, for words that no lexicon has.
//!
//! Each place of a word takes the longest spelling of the table that stands there. The result is understood and is no
//! dictionary's: English spelling does not say how a word sounds.

/// Spellings and their sounds; `^` is the beginning of a word, `$` its end, `C` any consonant, which is not consumed.
const SPELLINGS: [(&str, &str); 118] = [
    ("aCe$", "A"),
    ("eCe$", "i"),
    ("iCe$", "I"),
    ("oCe$", "O"),
    ("uCe$", "ju"),
    ("yCe$", "I"),
    ("^kn", "n"),
    ("^gn", "n"),
    ("^wr", "ɹ"),
    ("^ps", "s"),
    ("^x", "z"),
    ("^y", "j"),
    ("^the$", "ðə"),
    ("^a$", "ə"),
    ("tion", "ʃən"),
    ("sion", "ʒən"),
    ("cian", "ʃən"),
    ("ture", "ʧəɹ"),
    ("ough", "O"),
    ("augh", "ɔ"),
    ("eigh", "A"),
    ("igh", "I"),
    ("tch", "ʧ"),
    ("dge", "ʤ"),
    ("sch", "sk"),
    ("ould", "ʊd"),
    ("alk", "ɔk"),
    ("all", "ɔl"),
    ("ing$", "ɪŋ"),
    ("ous$", "əs"),
    ("able$", "əbəl"),
    ("ible$", "əbəl"),
    ("ful$", "fəl"),
    ("less$", "ləs"),
    ("Cle$", "əl"),
    ("es$", "z"),
    ("ed$", "d"),
    ("er$", "əɹ"),
    ("or$", "əɹ"),
    ("ar$", "ɑɹ"),
    ("ly$", "li"),
    ("y$", "i"),
    ("e$", ""),
    ("o$", "O"),
    ("a$", "ə"),
    ("i$", "i"),
    ("mb$", "m"),
    ("gh$", ""),
    ("ck", "k"),
    ("ch", "ʧ"),
    ("sh", "ʃ"),
    ("th", "θ"),
    ("ph", "f"),
    ("wh", "w"),
    ("qu", "kw"),
    ("gh", "ɡ"),
    ("ng", "ŋ"),
    ("nk", "ŋk"),
    ("sc", "s"),
    ("ai", "A"),
    ("ay", "A"),
    ("au", "ɔ"),
    ("aw", "ɔ"),
    ("ea", "i"),
    ("ee", "i"),
    ("ei", "A"),
    ("ey", "i"),
    ("eu", "ju"),
    ("ew", "u"),
    ("ie", "i"),
    ("oa", "O"),
    ("oi", "Y"),
    ("oy", "Y"),
    ("oo", "u"),
    ("ou", "W"),
    ("ow", "O"),
    ("ue", "u"),
    ("ui", "u"),
    ("ar", "ɑɹ"),
    ("er", "ɜɹ"),
    ("ir", "ɜɹ"),
    ("or", "ɔɹ"),
    ("ur", "ɜɹ"),
    ("ce", "s"),
    ("ci", "sɪ"),
    ("cy", "si"),
    ("ge", "ʤ"),
    ("gi", "ʤɪ"),
    ("gy", "ʤi"),
    ("a", "æ"),
    ("b", "b"),
    ("c", "k"),
    ("d", "d"),
    ("e", "ɛ"),
    ("é", "A"),
    ("f", "f"),
    ("g", "ɡ"),
    ("h", "h"),
    ("i", "ɪ"),
    ("j", "ʤ"),
    ("k", "k"),
    ("l", "l"),
    ("m", "m"),
    ("n", "n"),
    ("o", "ɑ"),
    ("p", "p"),
    ("q", "k"),
    ("r", "ɹ"),
    ("s", "s"),
    ("t", "t"),
    ("u", "ʌ"),
    ("v", "v"),
    ("w", "w"),
    ("x", "ks"),
    ("y", "ɪ"),
    ("z", "z"),
    ("'", ""),
    ("-", " "),
];
/// Names of letters, for words of capitals.
const LETTERS: [&str; 26] = [
    "ˈA",
    "bˈi",
    "sˈi",
    "dˈi",
    "ˈi",
    "ˈɛf",
    "ʤˈi",
    "ˈAʧ",
    "ˈI",
    "ʤˈA",
    "kˈA",
    "ˈɛl",
    "ˈɛm",
    "ˈɛn",
    "ˈO",
    "pˈi",
    "kjˈu",
    "ˈɑɹ",
    "ˈɛs",
    "tˈi",
    "jˈu",
    "vˈi",
    "dˈʌbəlju",
    "ˈɛks",
    "wˈI",
    "zˈi",
];
const VOWELS: &str = "AIOWYiuæɑɔəɛɜɪʊʌ";

/// Phonemes of a word of Latin letters, with the stress on its first full vowel.
pub(super) fn phonemes(word: &str) -> String {
    let plain: Vec<char> = word.chars().flat_map(char::to_lowercase).map(plain).collect();
    let capitals = word.chars().all(|c| c.is_ascii_uppercase());
    if capitals && (2..=5).contains(&plain.len()) && !plain.iter().any(|c| "aeiouy".contains(*c)) {
        let name =
            |letter: &char| LETTERS.get((*letter as usize).checked_sub('a' as usize)?).copied();
        return plain.iter().filter_map(name).collect();
    }
    let (mut sounds, mut at) = (String::new(), 0);
    while at < plain.len() {
        let fits = |(spelling, _): &&(&str, &str)| consumed(spelling, &plain, at).is_some();
        let longest =
            SPELLINGS.iter().filter(fits).max_by_key(|(spelling, _)| spelling.chars().count());
        let Some((spelling, sound)) = longest else {
            at += 1;
            continue;
        };
        // One sound for a doubled consonant.
        let double = at > 0 && plain[at] == plain[at - 1] && !"aeiou".contains(plain[at]);
        if !(double && spelling.len() == 1) {
            sounds.push_str(sound);
        }
        at += consumed(spelling, &plain, at).unwrap_or(1).max(1);
    }
    let full = sounds.find(|c| VOWELS.contains(c) && c != 'ə');
    match full {
        Some(at) if !sounds.contains('ˈ') => sounds.insert(at, 'ˈ'),
        _ => {}
    }
    sounds
}

/// Number of letters that a spelling takes at a position of a word; `None` if it does not fit.
fn consumed(spelling: &str, word: &[char], at: usize) -> Option<usize> {
    let (mut place, mut taken) = (at, 0);
    // Behind a consonant that only has to be there, the rest is looked at, too, and left for its own rules.
    let mut seen = false;
    for expected in spelling.chars() {
        match expected {
            '^' if at == 0 => {}
            '$' if place == word.len() => {}
            'C' if word.get(place).is_some_and(|c| !"aeiouyé".contains(*c)) => {
                seen = true;
                place += 1;
            }
            letter if word.get(place) == Some(&letter) => {
                place += 1;
                taken += usize::from(!seen);
            }
            _ => return None,
        }
    }
    Some(taken)
}

/// A Latin letter without its mark; é, which is said where e is not, stays.
fn plain(letter: char) -> char {
    const MARKED: [(&str, char); 11] = [
        ("àáâãäåā", 'a'),
        ("çćč", 'c'),
        ("èêëēě", 'e'),
        ("ìíîïī", 'i'),
        ("ñńň", 'n'),
        ("òóôõöøō", 'o'),
        ("ùúûüūů", 'u'),
        ("ýÿ", 'y'),
        ("šśß", 's'),
        ("žźż", 'z'),
        ("’", '\''),
    ];
    MARKED.iter().find(|(marked, _)| marked.contains(letter)).map_or(letter, |(_, plain)| *plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_sound_as_their_spelling_says() {
        for (word, expected) in [
            ("cat", "kˈæt"),
            ("make", "mˈAk"),
            ("station", "stˈæʃən"),
            ("night", "nˈIt"),
            ("happy", "hˈæpi"),
            ("knee", "nˈi"),
            ("the", "ðə"),
            ("café", "kˈæfA"),
            ("HTML", "ˈAʧtˈiˈɛmˈɛl"),
            ("thing", "θˈɪŋ"),
        ] {
            assert_eq!(phonemes(word), expected, "{word}");
        }
    }
}
