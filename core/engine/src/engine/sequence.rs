//! Contents that a state stands for: tokens, and among them images, audio and videos.

use std::ops::Range;

use qhx_types::Media;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// An image, audio clip or video, or some frames of a video, by content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    id: [u8; 32],
    frames: Option<(usize, usize)>,
    /// Which of how many pieces of an image.
    part: Option<(u16, u16)>,
}

impl Key {
    pub(super) fn new(
        media: &Media,
        frames: Option<(usize, usize)>,
        part: Option<(u16, u16)>,
    ) -> Self {
        Self { id: media.id(), frames, part }
    }
}

/// The positions that an image, audio clip or video takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Span {
    pub start: usize,
    pub positions: usize,
    pub key: Key,
}

impl Span {
    /// The position after its last.
    pub(super) fn end(&self) -> usize {
        self.start + self.positions
    }
}

/// Positions in order: a token at each, and where spans lie, the token that stands for them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sequence {
    pub tokens: Vec<u32>,
    /// In order; they do not overlap. The last may reach beyond the tokens, where only the beginning
    /// of it was consumed.
    pub spans: Vec<Span>,
    /// Hash of [`Request::salt`](super::Request::salt): sequences of another one have no positions in common.
    pub salt: Option<[u8; 32]>,
    /// The state of it, or of its first positions, was imported.
    #[serde(skip)]
    pub imported: bool,
}

impl Sequence {
    /// The same positions for requests with a salt.
    pub(super) fn salted(self, salt: Option<&str>) -> Self {
        Self { salt: salt.map(|salt| Sha256::digest(salt).into()), ..self }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Positions that both begin with. A span counts whole or not at all.
    pub(super) fn common(&self, other: &Self) -> usize {
        if self.salt != other.salt {
            return 0;
        }
        let equal = self.tokens.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count();
        let spans = self.spans.iter().zip(&other.spans).take_while(|(a, b)| a == b).count();
        let next = [self.spans.get(spans), other.spans.get(spans)];
        let next = next.into_iter().flatten().map(|span| span.start).min();
        let equal = next.map_or(equal, |start| equal.min(start));
        other.floor(equal)
    }

    /// The last position up to `position` that does not lie within a span.
    pub(super) fn floor(&self, position: usize) -> usize {
        let within = |span: &&Span| span.start < position && position < span.end();
        self.spans.iter().find(within).map_or(position, |span| span.start)
    }

    /// Says what is wrong with one that was read: spans that overlap, or begin where nothing is.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let mut free = 0;
        for span in &self.spans {
            let end = span.start.checked_add(span.positions);
            if span.start < free || span.start >= self.len() || end.is_none() {
                return Err(format!("what is no text does not lie behind each other: {span:?}"));
            }
            free = span.end();
        }
        Ok(())
    }

    /// True when `other` begins with all of it.
    pub(super) fn begins(&self, other: &Self) -> bool {
        self.common(other) == self.len()
    }

    /// Forgets all positions from `position` on.
    pub(super) fn truncate(&mut self, position: usize) {
        self.tokens.truncate(position);
        self.spans.retain(|span| span.start < position);
    }

    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.imported = false;
    }

    /// Adds the positions `range` of another one, which has the same positions before them.
    pub(super) fn extend(&mut self, other: &Self, range: Range<usize>) {
        self.salt = other.salt;
        self.tokens.extend_from_slice(&other.tokens[range.clone()]);
        let spans = other.spans.iter().filter(|span| range.contains(&span.start));
        self.spans.extend(spans.copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sequence of tokens, with images of four positions at some places.
    fn sequence(tokens: &[u32], images: &[(usize, u8)]) -> Sequence {
        let span = |&(start, id): &(usize, u8)| Span {
            start,
            positions: 4,
            key: Key { id: [id; 32], frames: None, part: None },
        };
        let spans = images.iter().map(span).collect();
        Sequence { tokens: tokens.to_vec(), spans, ..Sequence::default() }
    }

    #[test]
    fn sequences_of_two_salts_have_nothing_in_common() {
        let of = |salt: Option<&str>| sequence(&[1, 2, 3], &[]).salted(salt);
        let salts = [None, Some(""), Some("a"), Some("b")];
        for (a, b) in salts.iter().flat_map(|a| salts.map(|b| (*a, b))) {
            let common = if a == b { 3 } else { 0 };
            assert_eq!(of(a).common(&of(b)), common, "{a:?} and {b:?}");
        }
        let mut empty = Sequence::default();
        empty.extend(&of(Some("a")), 0..2);
        assert_eq!(empty.common(&of(Some("a"))), 2);
    }

    #[test]
    fn an_image_is_common_whole_or_not_at_all() {
        let a = sequence(&[1, 9, 9, 9, 9, 2, 3], &[(1, 5)]);
        let common = |b: &Sequence| (a.common(b), b.common(&a));
        assert_eq!(common(&a), (7, 7));
        assert_eq!(common(&sequence(&[1, 9, 9, 9, 9, 2, 4], &[(1, 5)])), (6, 6));
        let other_image = sequence(&[1, 9, 9, 9, 9, 2, 3], &[(1, 6)]);
        assert_eq!(common(&other_image), (1, 1), "equal placeholders, another image");
        let no_image = sequence(&[1, 9, 9, 9, 9, 2, 3], &[]);
        assert_eq!(common(&no_image), (1, 1), "tokens as they stand for an image");
        let further = sequence(&[1, 9, 9, 9, 9, 2, 3, 9, 9, 9, 9], &[(1, 5), (7, 6)]);
        assert_eq!(common(&further), (7, 7));
        let mut broken_off = a.clone();
        broken_off.truncate(3);
        assert_eq!((broken_off.common(&a), broken_off.len()), (1, 3), "a part of the image");
        assert!(!broken_off.begins(&a) && a.begins(&further) && !further.begins(&a));
        broken_off.truncate(1);
        assert_eq!(broken_off, sequence(&[1], &[]));
        broken_off.extend(&a, 1..7);
        assert_eq!(broken_off, a);
        assert_eq!([0, 1, 2, 4, 5].map(|n| a.floor(n)), [0, 1, 1, 1, 5]);
    }
}
