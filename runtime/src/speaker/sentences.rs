//! A text in sentences, while it is written.

/// Ends of sentences where a space follows.
const ENDS: &str = ".!?…";
/// Ends of sentences whatever follows.
const WHOLE_ENDS: &str = "。！？";
/// Characters that may stand between the end of a sentence and the space behind it.
const CLOSING: &str = "\"'”’»)]";
/// Characters of a sentence. A longer one is cut at a space.
const MAX_CHARACTERS: usize = 1000;

/// Cuts a text that comes piece by piece into its sentences, each as soon as it is whole.
///
/// ```
/// let mut splitter = qhx::SentenceSplitter::default();
/// assert!(splitter.push("It rains. It").eq(["It rains."]));
/// assert!(splitter.push(" pours, 3.5 inches").next().is_none());
/// assert_eq!(splitter.finish().as_deref(), Some("It pours, 3.5 inches"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SentenceSplitter {
    rest: String,
}

impl SentenceSplitter {
    /// Adds a piece of the text; returns the sentences that are whole now.
    pub fn push(&mut self, piece: &str) -> impl Iterator<Item = String> + use<> {
        self.rest.push_str(piece);
        let mut whole = Vec::new();
        let mut start = 0;
        while let Some(len) = self.rest.get(start..).and_then(end) {
            whole.push(self.rest[start..start + len].trim().to_owned());
            start += len;
        }
        self.rest.drain(..start);
        whole.into_iter().filter(|sentence| !sentence.is_empty())
    }

    /// The rest of the text, once there is no more of it; none where that is blank.
    pub fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.rest);
        Some(rest.trim().to_owned()).filter(|rest| !rest.is_empty())
    }
}

/// Bytes of the sentence that a text begins with; none where it may go on.
fn end(text: &str) -> Option<usize> {
    let mut space = None;
    let (mut ended, mut blank) = (false, false);
    for (count, (at, character)) in text.char_indices().enumerate() {
        if ended && character.is_whitespace() {
            return Some(at);
        }
        if character == '\n' && blank {
            return Some(at);
        }
        if character.is_whitespace() {
            space = Some(at);
        }
        blank = character == '\n' || blank && character.is_whitespace();
        if WHOLE_ENDS.contains(character) {
            return Some(at + character.len_utf8());
        }
        ended = ENDS.contains(character) || ended && CLOSING.contains(character);
        if count >= MAX_CHARACTERS {
            return Some(space.filter(|at| *at > 0).unwrap_or(at));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Vec<String> {
        let mut splitter = SentenceSplitter::default();
        let mut sentences: Vec<_> = splitter.push(text).collect();
        sentences.extend(splitter.finish());
        sentences
    }

    #[test]
    fn texts_are_cut_behind_sentences() {
        for (text, expected) in [
            ("It rains. It pours.", &["It rains.", "It pours."][..]),
            ("It costs 3.5 or \"more!\" Yes", &["It costs 3.5 or \"more!\"", "Yes"]),
            ("One line\nand the next\n \nA paragraph", &["One line\nand the next", "A paragraph"]),
            ("雨。風", &["雨。", "風"]),
            (" \n\n ", &[]),
        ] {
            assert_eq!(whole(text), expected, "{text:?}");
        }
    }

    #[test]
    fn pieces_of_any_size_give_the_same_sentences() {
        let text = "Wait… then? No. ßtrange “quotes.” End";
        let mut splitter = SentenceSplitter::default();
        let mut sentences = Vec::new();
        for character in text.chars() {
            sentences.extend(splitter.push(character.encode_utf8(&mut [0; 4])));
        }
        sentences.extend(splitter.finish());
        assert_eq!(sentences, whole(text));
        assert_eq!(sentences.len(), 5);
    }

    #[test]
    fn endless_sentences_are_cut_at_spaces() {
        let sentences = whole(&"word ".repeat(1000));
        assert_eq!(sentences.len(), 5, "{}", sentences.len());
        assert!(sentences.iter().all(|sentence| sentence.split(' ').all(|word| word == "word")));
        assert_eq!(whole(&"x".repeat(2500)).concat().len(), 2500);
    }
}
