//! Positions of tokens and images for a rotary embedding of three axes (M-RoPE).

use qhx_op::{Error, Result};

/// Positions in time, height and width of each slot of a cache, where images stand among text
/// (`Qwen3VLModel.get_rope_index` of `transformers`).
///
/// Text counts on by one on all axes. An image of `rows` by `columns` tokens at position s has s in
/// time, s + row in height and s + column in width, and the text behind it goes on at
/// s + max(rows, columns): slots and positions part. So this belongs to the state:
/// [`super::StateCarrier::track`] is truncated, saved and restored with it.
///
/// A video whose patches in time follow each other without text between ([`PositionTrack::place_video`]) has s + ⌊k ·
/// step⌋ in time in its k-th patch, and text goes on behind the largest position of any axis, as the model was trained
/// (`get_rope_index` of `transformers` 4.57; since 5.0 that counts rows and columns alone, and text behind a long video
/// stands before the video's last frames).
#[derive(Debug, Default)]
pub struct PositionTrack {
    images: Vec<Placed>,
}

/// An image in the cache.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Placed {
    slot: usize,
    /// Position in time; those in height and width begin with it.
    first: usize,
    rows: usize,
    columns: usize,
    /// Tokens of it that are there.
    tokens: usize,
    /// Distance of patches in time.
    step: f32,
}

/// Tolerance by which a position in time may fall short of a whole number because `step` is rounded.
const ROUNDING: f32 = 1e-4;
/// Patches in time are never further apart: more positions than a context has.
const MAX_STEP: f32 = 1e6;

impl Placed {
    fn end(self) -> usize {
        self.slot + self.tokens
    }

    /// Offset of one of its tokens from `first`, in time, height and width.
    fn offset(self, token: usize) -> [usize; 3] {
        let (patch, within) =
            (token / (self.rows * self.columns), token % (self.rows * self.columns));
        let time = (patch as f32 * self.step + ROUNDING) as usize;
        [time, within / self.columns, within % self.columns]
    }

    /// Distance by which the text behind it moves on.
    fn extent(self) -> usize {
        let [time, ..] = self.offset(self.tokens - 1);
        let rows = self.tokens.div_ceil(self.columns).min(self.rows);
        (time + 1).max(rows).max(self.tokens.min(self.columns))
    }
}

impl PositionTrack {
    /// The positions of a slot in time, height and width. Allocates nothing.
    pub fn at(&self, slot: usize) -> [usize; 3] {
        let before = self.images.partition_point(|image| image.slot <= slot);
        let Some(image) = self.images[..before].last() else { return [slot; 3] };
        if slot < image.end() {
            return image.offset(slot - image.slot).map(|offset| image.first + offset);
        }
        [image.first + image.extent() + slot - image.end(); 3]
    }

    /// Puts an image of `rows` by `columns` tokens into the slots from `slot` on.
    ///
    /// # Errors
    /// When there is one already behind that, or when it has no tokens.
    pub fn place(&mut self, slot: usize, rows: usize, columns: usize) -> Result<()> {
        self.place_video(slot, [1, rows, columns], 0.0)
    }

    /// Puts a video of `patches` in time, each of `rows` by `columns` tokens, into the slots from `slot` on. Its
    /// patches are `step` positions apart in time.
    ///
    /// # Errors
    /// When there is an image or a video already behind that, when it has no tokens, or when `step` is no such number.
    pub fn place_video(
        &mut self,
        slot: usize,
        [patches, rows, columns]: [usize; 3],
        step: f32,
    ) -> Result<()> {
        let tokens = rows.checked_mul(columns).and_then(|tokens| tokens.checked_mul(patches));
        let placed = self.put([slot, tokens.unwrap_or(0), columns], rows, step);
        placed.ok_or_else(|| {
            Error::prompt(format!(
                "an image or video of {patches} by {rows} by {columns} tokens, {step} apart in time, at slot {slot}: \
                 expected one with tokens, behind those that are there"
            ))
        })
    }

    fn put(&mut self, [slot, tokens, columns]: [usize; 3], rows: usize, step: f32) -> Option<()> {
        let free = self.images.last().is_none_or(|last| last.end() <= slot);
        let whole = slot.checked_add(tokens).is_some() && rows.checked_mul(columns)? > 0;
        if !free || !whole || tokens == 0 || !(0.0..=MAX_STEP).contains(&step) {
            return None;
        }
        let [first, ..] = self.at(slot);
        self.images.push(Placed { slot, first, rows, columns, tokens, step });
        Some(())
    }

    /// Forgets all slots from `slot` on. Of an image that is cut through, the first tokens stay.
    pub(super) fn truncate(&mut self, slot: usize) {
        self.images.retain(|image| image.slot < slot);
        if let Some(last) = self.images.last_mut() {
            last.tokens = last.tokens.min(slot - last.slot);
        }
    }

    /// Slot, tokens and columns of each image. Where they stand follows from that, and of videos from [`Self::videos`].
    pub(super) fn images(&self) -> impl Iterator<Item = [usize; 3]> {
        self.images.iter().map(|image| [image.slot, image.tokens, image.columns])
    }

    /// Videos of several patches in time among the images: the index among [`Self::images`], the rows of a patch, and
    /// the bits of the distance of patches.
    pub(super) fn videos(&self) -> impl Iterator<Item = [usize; 3]> {
        let video = |image: &&Placed| image.rows * image.columns < image.tokens;
        let all = self.images.iter().enumerate();
        all.filter(move |(_, image)| video(image))
            .map(|(index, image)| [index, image.rows, image.step.to_bits() as usize])
    }

    /// The track of such images and videos, all of which lie below slot `end`; `None` when they cannot be those of a
    /// track.
    pub(super) fn of(images: &[[usize; 3]], videos: &[[usize; 3]], end: usize) -> Option<Self> {
        let mut track = Self::default();
        for (index, &[slot, tokens, columns]) in images.iter().enumerate() {
            let video = videos.iter().find(|[image, ..]| *image == index);
            let (rows, step) = match video {
                Some(&[_, rows, bits]) => (rows, f32::from_bits(u32::try_from(bits).ok()?)),
                None => (tokens.checked_div(columns)?.max(1) + 1, 0.0),
            };
            track.put([slot, tokens, columns], rows, step)?;
            if track.images.last()?.end() > end {
                return None;
            }
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
    fn a_video_goes_on_in_time_and_text_behind_all_of_it() {
        let mut track = PositionTrack::default();
        // Three patches of one row and two columns, 4/3 apart: ⌊0⌋, ⌊1.33⌋, ⌊2.67⌋; nearly 4 is 4.
        track.place_video(1, [4, 1, 2], 1.333_333_2).unwrap();
        let times = all(&track, 1..9).into_iter().map(|[time, ..]| time).collect::<Vec<_>>();
        assert_eq!(times, [1, 1, 2, 2, 3, 3, 5, 5]);
        assert_eq!(all(&track, 7..10), [[5, 1, 1], [5, 1, 2], [6; 3]]);
        let (images, videos): (Vec<_>, Vec<_>) =
            (track.images().collect(), track.videos().collect());
        let again = PositionTrack::of(&images, &videos, 9).unwrap();
        assert_eq!(all(&again, 0..12), all(&track, 0..12));
        assert!(PositionTrack::of(&images, &videos, 8).is_none());
        assert!(PositionTrack::of(&images, &[[0, 0, 0]], 9).is_none());
        assert!(PositionTrack::of(&images, &[[0, 1, f32::NAN.to_bits() as usize]], 9).is_none());
        track.truncate(6);
        assert_eq!(all(&track, 5..7), [[3, 1, 1], [4; 3]]);
        assert!(track.place_video(6, [2, 1, 1], -1.0).is_err());
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
