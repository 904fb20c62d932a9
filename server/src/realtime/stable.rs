//! Partial transcripts: the text of a turn so far, of which only what stays is shown.

/// Text of a turn that is transcribed again and again while it goes on.
#[derive(Debug, Default, Clone)]
pub(super) struct Stable {
    /// The last transcript.
    before: String,
    /// Text that was shown.
    shown: String,
}

impl Stable {
    /// Takes the transcript of the turn so far. Returns the text that becomes stable: all of a transcript that is
    /// `settled`; or else words that it and the one before begin with, but for the last one, which may go on.
    pub(super) fn take(&mut self, transcript: &str, settled: bool) -> Option<String> {
        let common = if settled { transcript } else { common(&self.before, transcript) };
        let more = common.strip_prefix(self.shown.as_str()).unwrap_or_default().to_owned();
        transcript.clone_into(&mut self.before);
        self.shown.push_str(&more);
        Some(more).filter(|more| !more.is_empty())
    }

    /// The rest of the final transcript. `None` where it has none, or does not begin with what was shown.
    pub(super) fn rest<'a>(&self, transcript: &'a str) -> Option<&'a str> {
        transcript.strip_prefix(self.shown.as_str()).filter(|rest| !rest.is_empty())
    }
}

/// The beginning that two texts have in common, up to the end of a word: in front of a space, or behind a character
/// of a script without spaces.
fn common<'a>(a: &str, b: &'a str) -> &'a str {
    let same = a.chars().zip(b.char_indices()).take_while(|(a, (_, b))| a == b);
    let end = same.last().map_or(0, |(_, (at, last))| at + last.len_utf8());
    let spaceless = |c: char| matches!(c, '\u{e00}'..='\u{eff}' | '\u{1000}'..='\u{109f}' | '\u{3040}'..='\u{9fff}');
    let mut cut = 0;
    let head = b.get(..end).unwrap_or_default();
    for (at, character) in head.char_indices() {
        if character.is_whitespace() {
            cut = at;
        } else if spaceless(character) && at + character.len_utf8() < end {
            cut = at + character.len_utf8();
        }
    }
    b.get(..cut).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_that_stay_are_shown() {
        let mut stable = Stable::default();
        assert_eq!(stable.take("The bow", false), None);
        assert_eq!(stable.take("The boat leaves", false), Some("The".to_owned()));
        assert_eq!(stable.take("The boat leaves at", false), Some(" boat".to_owned()));
        // A change of mind shows nothing more, and what was shown stays.
        assert_eq!(stable.take("A boat leaves at", false), None);
        assert_eq!(stable.take("The boat leaves at noon", false), None);
        assert_eq!(stable.take("The boat leaves at noon.", false), Some(" leaves at".to_owned()));
        assert_eq!(stable.rest("The boat leaves at noon."), Some(" noon."));
        assert_eq!(stable.rest("The boats"), None);
        assert_eq!(Stable::default().rest("Yes."), Some("Yes."));
        assert_eq!(Stable::default().rest(""), None);
    }

    #[test]
    fn what_is_settled_is_shown_at_once() {
        let mut stable = Stable::default();
        assert_eq!(stable.take("The bo", true), Some("The bo".to_owned()));
        assert_eq!(stable.take("The boat", true), Some("at".to_owned()));
        assert_eq!(stable.take("The boat", true), None);
    }

    #[test]
    fn scripts_without_spaces_are_shown_by_characters() {
        let mut stable = Stable::default();
        assert_eq!(stable.take("今日は", false), None);
        assert_eq!(stable.take("今日は雨", false), Some("今日".to_owned()));
        assert_eq!(stable.take("今日は雨です", false), Some("は".to_owned()));
    }
}
