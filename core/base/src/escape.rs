//! Text of files, made safe to show: nothing in it steers a terminal, ends a line or fills the screen.
//!
//! Names in manifests, plugins and templates are untrusted input. [`crate::Error`] passes all that it is given through
//! [`shown`], so that no message can forget to; a program does the same with what else it prints of such names.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Characters from which on a text is cut by [`shown`].
pub const MAX_SHOWN: usize = 2_000;

/// Characters that stay of the beginning and of the end of a text that is cut. With the words between
/// them they are fewer than [`MAX_SHOWN`]: a text that was cut once is not cut again.
const HEAD: usize = 1_400;
const TAIL: usize = 500;

/// True for what is written as an escape: control characters (C0, DEL, C1), separators of lines and
/// paragraphs, and the marks that change the direction of writing.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// The text on one line, with escapes such as `\n` and `\u{1b}` for characters that steer a terminal.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Same as [`escaped`], without the middle of a text of more than [`MAX_SHOWN`] characters.
pub fn shown(text: &str) -> Cow<'_, str> {
    match middle(text) {
        None => bounded(escaped(text)),
        // What is left out is not looked at.
        Some((head, tail)) => {
            let left_out = text.len() - head.len() - tail.len();
            bounded(Cow::Owned(join(&escaped(head), left_out, &escaped(tail))))
        }
    }
}

/// Cuts what escapes have made long.
fn bounded(text: Cow<'_, str>) -> Cow<'_, str> {
    match middle(&text) {
        None => text,
        Some((head, tail)) => Cow::Owned(join(head, text.len() - head.len() - tail.len(), tail)),
    }
}

fn join(head: &str, left_out: usize, tail: &str) -> String {
    let mut joined = String::with_capacity(head.len() + tail.len() + 40);
    joined.push_str(head);
    // Writing to a string does not fail.
    let _ = write!(joined, " … ({left_out} bytes left out) … ");
    joined.push_str(tail);
    joined
}

/// Beginning and end of a text that is too long.
fn middle(text: &str) -> Option<(&str, &str)> {
    // A character is a byte at least.
    if text.len() <= MAX_SHOWN || text.chars().nth(MAX_SHOWN).is_none() {
        return None;
    }
    let (head, _) = text.char_indices().nth(HEAD)?;
    let (tail, _) = text.char_indices().nth_back(TAIL - 1)?;
    Some((text.get(..head)?, text.get(tail..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_written_as_an_escape() {
        for (text, safe) in [
            ("plain ü 漢 🍕 \"quoted\" C:\\x", "plain ü 漢 🍕 \"quoted\" C:\\x"),
            ("\u{1b}[2J\rerror: x\nerror: y\t", "\\u{1b}[2J\\rerror: x\\nerror: y\\t"),
            ("\u{9b}2J\u{7f}\0", "\\u{9b}2J\\u{7f}\\u{0}"),
            ("a\u{202e}b\u{2066}c\u{2028}d\u{200f}", "a\\u{202e}b\\u{2066}c\\u{2028}d\\u{200f}"),
        ] {
            assert_eq!(escaped(text), safe);
            assert_eq!(shown(text), safe);
            assert_eq!(shown(&shown(text)), safe, "twice is once");
        }
    }

    #[test]
    fn long_texts_keep_their_ends() {
        let exact = "ü".repeat(MAX_SHOWN);
        assert_eq!(shown(&exact), exact);
        for filler in ["x", "漢", "\u{1b}"] {
            let long = format!("file.json: {} is not a role", filler.repeat(10_000_000));
            let cut = shown(&long);
            assert!(cut.chars().count() <= MAX_SHOWN, "{}", cut.chars().count());
            assert!(cut.starts_with("file.json: ") && cut.ends_with(" is not a role"), "{cut}");
            assert!(cut.contains(" bytes left out) … "), "{cut}");
            assert_eq!(shown(&cut), cut, "twice is once");
        }
    }
}
