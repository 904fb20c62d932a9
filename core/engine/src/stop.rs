//! End of an answer: stop tokens and stop strings over streamed text.

use qhx_base::{Result, error};
use qhx_text::{Beginning, ReasoningMarks};

/// Ends an answer at a token id or at a string. Strings act behind the reasoning, where an answer begins with one.
///
/// Text goes through [`StopFilter::push`] in chunks. What may be the beginning of a stop string is
/// held back until it is one or is not, so that no part of a stop string is ever emitted. Where
/// several stop strings occur, the one that ends first counts; the result does not depend on how
/// the text is split into chunks.
#[derive(Debug, Clone)]
pub struct StopFilter {
    strings: Vec<String>,
    tokens: Vec<u32>,
    held: String,
    stopped: Option<usize>,
    place: Place,
    marks: ReasoningMarks,
}

/// Part of the answer that the text is in, as far as stop strings go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Reasoning may begin: what came is held back.
    Start,
    /// In the reasoning; what is held came out already, and may begin the mark of its end.
    Reasoning,
    /// Behind the reasoning, before the first text.
    Blank,
    /// The part in which stop strings act.
    Text,
}

impl StopFilter {
    /// Checks that each string can be a stop text.
    ///
    /// # Errors
    /// For an empty string, which would stop everything.
    pub fn check(strings: &[String]) -> Result<()> {
        if strings.iter().any(String::is_empty) {
            return Err(error!(Usage, "option stop: a stop string is empty")
                .hint("leave the option out to stop at the model's own end token only"));
        }
        Ok(())
    }

    /// Stops at any of these.
    ///
    /// # Errors
    /// Errors of [`StopFilter::check`].
    pub fn new(strings: Vec<String>, mut tokens: Vec<u32>) -> Result<Self> {
        Self::check(&strings)?;
        tokens.sort_unstable();
        tokens.dedup();
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        Ok(Self {
            strings,
            tokens,
            held: String::with_capacity(longest + 256),
            stopped: None,
            place: Place::Text,
            marks: ReasoningMarks::default(),
        })
    }

    /// The same for an answer with such a beginning and these marks of reasoning. A string with the mark that ends
    /// reasoning acts from the first token on.
    #[must_use]
    pub fn beginning(mut self, beginning: Beginning, marks: ReasoningMarks) -> Self {
        self.marks = marks;
        let ends_reasoning = |string: &String| string.contains(marks.close);
        self.place = match beginning {
            Beginning::Text => Place::Text,
            _ if self.strings.is_empty() || self.strings.iter().any(ends_reasoning) => Place::Text,
            Beginning::Reasoning => Place::Reasoning,
            Beginning::Either => Place::Start,
        };
        self
    }

    /// True when the answer ends at this token, which is not part of the text.
    pub fn is_stop_token(&self, token: u32) -> bool {
        self.tokens.binary_search(&token).is_ok()
    }

    /// Takes text and appends to `out` what can be emitted. True once a stop string was found;
    /// text after that is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stopped.is_some() {
            return true;
        }
        self.held.push_str(text);
        if self.place != Place::Text && !self.passes(text.len(), out) {
            return false;
        }
        let found = self.strings.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        if let Some((_, start, index)) = found.min() {
            out.push_str(&self.held[..start]);
            self.held.clear();
            self.stopped = Some(index);
            return true;
        }
        let keep = self.undecided();
        let emit = self.held.len() - keep;
        out.push_str(&self.held[..emit]);
        self.held.drain(..emit);
        false
    }

    /// Emits the reasoning, and what is blank behind it. True once stop strings act, on what is held then. The last
    /// `new` bytes of it came now.
    fn passes(&mut self, new: usize, out: &mut String) -> bool {
        let ReasoningMarks { open, close, .. } = self.marks;
        if self.place == Place::Start {
            let begin = self.held.trim_start();
            if begin.len() < open.len() && open.starts_with(begin) {
                return false;
            }
            if !begin.starts_with(open) {
                self.place = Place::Text;
                return true;
            }
            out.push_str(&self.held);
            self.place = Place::Reasoning;
        } else if self.place == Place::Reasoning {
            out.push_str(&self.held[self.held.len() - new..]);
        }
        if self.place == Place::Reasoning {
            let Some(at) = self.held.find(close) else {
                let keep = self.held.len().saturating_sub(close.len() - 1);
                let keep = (keep..).find(|&at| self.held.is_char_boundary(at)).unwrap_or(0);
                self.held.drain(..keep);
                return false;
            };
            let behind = self.held.len() - at - close.len();
            out.truncate(out.len() - behind);
            self.held.drain(..at + close.len());
            self.place = Place::Blank;
        }
        let blank = self.held.len() - self.held.trim_start().len();
        out.push_str(&self.held[..blank]);
        self.held.drain(..blank);
        if !self.held.is_empty() {
            self.place = Place::Text;
        }
        self.place == Place::Text
    }

    /// Appends what was held back to `out`: the answer ended for another reason.
    pub fn finish(&mut self, out: &mut String) {
        if self.place != Place::Reasoning {
            out.push_str(&self.held);
        }
        self.held.clear();
    }

    /// True where the answer may end at this string.
    pub fn has(&self, string: &str) -> bool {
        self.strings.iter().any(|stop| stop == string)
    }

    /// The stop string that ended the answer.
    pub fn stopped_at(&self) -> Option<&str> {
        self.stopped.and_then(|index| self.strings.get(index)).map(String::as_str)
    }

    /// Length of the longest end of the held text that begins a stop string.
    ///
    /// A stop string begins with the first byte of a character, so the cut is between characters.
    fn undecided(&self) -> usize {
        let held = self.held.as_bytes();
        let begun = |stop: &String| {
            let longest = held.len().min(stop.len() - 1);
            (1..=longest).rev().find(|&n| held[held.len() - n..] == stop.as_bytes()[..n])
        };
        self.strings.iter().filter_map(begun).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use qhx_base::ErrorKind;

    use super::*;

    fn filter(strings: &[&str]) -> StopFilter {
        StopFilter::new(strings.iter().map(|s| (*s).to_owned()).collect(), vec![9, 2, 9]).unwrap()
    }

    /// Emitted text after each chunk, and whether it stopped.
    fn run(filter: &mut StopFilter, pieces: &[&str]) -> (Vec<String>, bool) {
        let mut stopped = false;
        let emitted = pieces.iter().map(|piece| {
            let mut out = String::new();
            stopped |= filter.push(piece, &mut out);
            out
        });
        (emitted.collect(), stopped)
    }

    #[test]
    fn a_beginning_is_held_back_and_released_when_it_was_none() {
        let mut stop = filter(&["\nUser:"]);
        let (emitted, stopped) = run(&mut stop, &["Hi", "\nUs", "ual", "\n", "User: x", "more"]);
        assert_eq!(emitted, ["Hi", "", "\nUsual", "", "", ""]);
        assert!(stopped);
        assert_eq!(stop.stopped_at(), Some("\nUser:"));
        let mut out = String::new();
        stop.finish(&mut out);
        assert_eq!(out, "", "nothing of the stop string comes out at the end");
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        let mut stop = filter(&["###"]);
        let (emitted, stopped) = run(&mut stop, &["a##"]);
        assert_eq!((emitted[0].as_str(), stopped), ("a", false));
        let mut out = String::new();
        stop.finish(&mut out);
        assert_eq!(out, "##");
    }

    #[test]
    fn repeated_beginnings_and_wide_characters() {
        let (emitted, stopped) = run(&mut filter(&["aab"]), &["aaa", "ab"]);
        assert_eq!((emitted.concat().as_str(), stopped), ("aa", true));
        let (emitted, _) = run(&mut filter(&["é!"]), &["caf", "é", "?", "é!"]);
        assert_eq!(emitted, ["caf", "", "é?", ""]);
    }

    #[test]
    fn the_result_does_not_depend_on_the_chunks() {
        let stops = ["abc", "b", "日本", "xx"];
        let texts = ["aabcb", "zabz", "ac日本abc", "日x本xx", "axbxab", "ccc"];
        for text in texts {
            for stop in [&stops[..1], &stops[1..2], &stops[..2], &stops[2..], &stops[..]] {
                let all = |pieces: &[&str]| {
                    let mut filter = filter(stop);
                    let (emitted, stopped) = run(&mut filter, pieces);
                    let mut text = emitted.concat();
                    filter.finish(&mut text);
                    (text, stopped, filter.stopped_at().map(str::to_owned))
                };
                let whole = all(&[text]);
                let characters: Vec<_> = text.split("").collect();
                assert_eq!(all(&characters), whole, "{text:?} with {stop:?}");
                for cut in (1..text.len()).filter(|&i| text.is_char_boundary(i)) {
                    assert_eq!(all(&[&text[..cut], &text[cut..]]), whole, "{text:?} at {cut}");
                }
                assert!(stop.iter().all(|s| !whole.0.contains(s)), "{whole:?}");
            }
        }
    }

    #[test]
    fn strings_act_behind_the_reasoning() {
        use Beginning::{Either, Reasoning, Text};
        let cases = [
            (Reasoning, "a\n\nb</think>\n\nYes.\n\nNo.", "a\n\nb</think>\n\nYes.", true),
            (Reasoning, "a\n\nb", "a\n\nb", false),
            (Either, " <think>\n\n</think>\n\nYes\n\n", " <think>\n\n</think>\n\nYes", true),
            (Either, "\nYes\n\nNo", "\nYes", true),
            (Either, "<thing>\n\n", "<thing>", true),
            (Either, "<thi", "<thi", false),
            (Text, "<think>\n\n</think>", "<think>", true),
        ];
        for (beginning, text, expected, stops) in cases {
            let characters: Vec<_> = text.split("").collect();
            for pieces in [&[text][..], &characters] {
                let mut filter = filter(&["\n\n"]).beginning(beginning, ReasoningMarks::default());
                let (emitted, stopped) = run(&mut filter, pieces);
                let mut found = emitted.concat();
                if !stopped {
                    filter.finish(&mut found);
                }
                assert_eq!((found.as_str(), stopped), (expected, stops), "{beginning:?} {text:?}");
            }
        }
        // Other marks.
        let marks = ReasoningMarks::of_template("<|channel>thought\n<channel|>").unwrap();
        let mut stop = filter(&["b"]).beginning(Either, marks);
        let (emitted, stopped) = run(&mut stop, &["<|channel>", "ab", "<channel|>", "\n ab"]);
        assert_eq!((emitted.concat().as_str(), stopped), ("<|channel>ab<channel|>\n a", true));
        // Whoever wants the reasoning alone.
        let mut stop = filter(&["</think>"]).beginning(Reasoning, ReasoningMarks::default());
        assert!(run(&mut stop, &["a</think>"]).1);
    }

    #[test]
    fn tokens_stop_too_and_an_empty_string_is_refused() {
        let stop = filter(&[]);
        assert!(stop.is_stop_token(9) && stop.is_stop_token(2) && !stop.is_stop_token(3));
        let error = StopFilter::new(vec![String::new()], vec![]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}
