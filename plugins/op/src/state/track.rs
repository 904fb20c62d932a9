//! Where tokens and images stand for a rotary embedding of three axes (M-RoPE).

use crate::{Error, Result};

/// Positions in time, height and width of each slot of a cache, where images stand among text
/// (`Qwen3VLModel.get_rope_index` of `transformers`).
///
/// Text counts on by one on all axes. An image of `rows` by `columns` tokens at position s has s in
/// time, s + row in height and s + column in width, and the text behind it goes on at
/// s + max(rows, columns): slots and positions part. So this belongs to the state:
/// [`super::StateCarrier::track`] is truncated, saved and restored with it.
#[derive(Debug, Default)]
pub struct PositionTrack {
    images: Vec<Placed>,
}

/// An image in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    slot: usize,
    /// Position in time; those in height and width begin with it.
    first: usize,
    columns: usize,
    /// Tokens of it that are there.
    tokens: usize,
}

impl Placed {
    fn end(self) -> usize {
        self.slot + self.tokens
    }

    /// How far the text behind it moves on.
    fn extent(self) -> usize {
        self.tokens.div_ceil(self.columns).max(self.tokens.min(self.columns))
    }
}

impl PositionTrack {
    /// The positions of a slot in time, height and width. Allocates nothing.
    pub fn at(&self, slot: usize) -> [usize; 3] {
        let before = self.images.partition_point(|image| image.slot <= slot);
        let Some(image) = self.images[..before].last() else { return [slot; 3] };
        if slot < image.end() {
            let token = slot - image.slot;
            let (row, column) = (token / image.columns, token % image.columns);
            return [image.first, image.first + row, image.first + column];
        }
        [image.first + image.extent() + slot - image.end(); 3]
    }

    /// Puts an image of `rows` by `columns` tokens into the slots from `slot` on.
    ///
    /// # Errors
    /// When there is one already behind that, or when it has no tokens.
    pub fn place(&mut self, slot: usize, rows: usize, columns: usize) -> Result<()> {
        let free = self.images.last().is_none_or(|last| last.end() <= slot);
        let tokens = rows.checked_mul(columns).filter(|tokens| *tokens > 0 && free);
        let tokens = tokens.ok_or_else(|| {
            Error::prompt(format!(
                "an image of {rows} by {columns} tokens at slot {slot}: expected one with tokens, \
                 behind those that are there"
            ))
        })?;
        let [first, ..] = self.at(slot);
        self.images.push(Placed { slot, first, columns, tokens });
        Ok(())
    }

    /// Forgets all slots from `slot` on. Of an image that is cut through, the first tokens stay.
    pub(super) fn truncate(&mut self, slot: usize) {
        self.images.retain(|image| image.slot < slot);
        if let Some(last) = self.images.last_mut() {
            last.tokens = last.tokens.min(slot - last.slot);
        }
    }

    /// Slot, tokens and columns of each image. Where they stand follows from that.
    pub(super) fn images(&self) -> impl Iterator<Item = [usize; 3]> {
        self.images.iter().map(|image| [image.slot, image.tokens, image.columns])
    }

    /// The track of such images, all of which lie below slot `end`; `None` when they cannot be those of a track.
    pub(super) fn of(images: &[[usize; 3]], end: usize) -> Option<Self> {
        let mut track = Self::default();
        for &[slot, tokens, columns] in images {
            let free = track.images.last().is_none_or(|last| last.end() <= slot);
            let within = slot.checked_add(tokens).is_some_and(|last| last <= end);
            if !free || !within || tokens == 0 || columns == 0 {
                return None;
            }
            let [first, ..] = track.at(slot);
            track.images.push(Placed { slot, first, columns, tokens });
        }
        Some(track)
    }

    /// Becomes what `saved` is, without allocating where there is room.
    pub(super) fn copy_from(&mut self, saved: &Self) {
        self.images.clone_from(&saved.images);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(track: &PositionTrack, slots: std::ops::Range<usize>) -> Vec<[usize; 3]> {
        slots.map(|slot| track.at(slot)).collect()
    }

    #[test]
    fn text_goes_on_behind_the_longer_side_of_an_image() {
        let mut track = PositionTrack::default();
        assert_eq!(all(&track, 0..2), [[0; 3], [1; 3]]);
        track.place(2, 2, 3).unwrap();
        let image = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]];
        assert_eq!(all(&track, 2..8), image);
        assert_eq!(all(&track, 8..10), [[5; 3], [6; 3]]);
        // Higher than wide, with one token of text between.
        track.place(9, 2, 1).unwrap();
        assert_eq!(all(&track, 8..13), [[5, 5, 5], [6, 6, 6], [6, 7, 6], [8; 3], [9; 3]]);
        for (slot, rows, columns) in [(10, 1, 1), (11, 0, 4), (20, usize::MAX, 2)] {
            assert!(track.place(slot, rows, columns).is_err(), "{slot} {rows} {columns}");
        }
        assert_eq!(track.at(12), [9; 3]);
    }

    #[test]
    fn what_is_truncated_is_forgotten() {
        let mut track = PositionTrack::default();
        track.place(1, 2, 2).unwrap();
        track.place(6, 1, 2).unwrap();
        track.truncate(6);
        assert_eq!(track.at(6), [4; 3]);
        // Three of four tokens reach as far down as all; one does not.
        track.truncate(4);
        assert_eq!(all(&track, 3..5), [[1, 2, 1], [3; 3]]);
        track.truncate(2);
        assert_eq!(track.at(2), [2; 3]);
        track.truncate(1);
        assert_eq!(track.at(5), [5; 3]);
    }
}
