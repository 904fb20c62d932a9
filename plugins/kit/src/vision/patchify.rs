//! Images cut into patches, the rows that a vision tower takes.

use super::{Image, Normalisation, Size};
use qhx_op::{Error, Result};

/// Order of the elements of a patch. The last word moves fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchLayout {
    /// Channel, time, row, column: a convolution's weight flattened (`Qwen2VLImageProcessor`).
    ChannelsFirst,
    /// Time, row, column, channel (`convert_image_to_patches` of Siglip 2 and Gemma 4).
    ChannelsLast,
}

/// Rows and columns of patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Patches from top to bottom.
    pub rows: usize,
    /// Patches from left to right.
    pub columns: usize,
}

impl Grid {
    /// Number of patches.
    pub fn patches(self) -> usize {
        self.rows.saturating_mul(self.columns)
    }

    /// The grid of blocks of `block` by `block` patches: what is left after merging or pooling them.
    ///
    /// # Errors
    /// Unless they cover the grid.
    pub fn blocks(self, block: usize) -> Result<Self> {
        let Self { rows, columns } = self;
        let whole = |side: usize| side.checked_rem(block) == Some(0);
        if !(whole(rows) && whole(columns)) || self.patches() == 0 {
            return Err(Error::prompt(format!(
                "an image of {rows} rows of {columns} patches: expected sides that are multiples \
                 of {block} patches"
            )));
        }
        Ok(Self { rows: rows / block, columns: columns / block })
    }

    /// Row and column of each patch, in the order in which [`Patchify::write`] puts them: blocks of `block` by `block`
    /// patches row by row, and within each its patches row by row. A block of 1 gives the patches of the whole image
    /// row by row.
    ///
    /// # Errors
    /// Errors of [`Grid::blocks`].
    pub fn order(self, block: usize) -> Result<impl Iterator<Item = (usize, usize)> + Clone> {
        let blocks = self.blocks(block)?;
        Ok((0..self.patches()).map(move |index| {
            let (outer, inner) = (index / (block * block), index % (block * block));
            let row = outer / blocks.columns * block + inner / block;
            let column = outer % blocks.columns * block + inner % block;
            (row, column)
        }))
    }
}

/// Converter of images to patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patchify {
    patch: usize,
    block: usize,
    layout: PatchLayout,
}

impl Patchify {
    /// Patches of `patch` by `patch` pixels. Blocks of `block` by `block` of them, which a model
    /// merges, stand together: see [`Grid::order`].
    ///
    /// # Errors
    /// When a size is 0, or too large.
    pub fn new(patch: usize, block: usize, layout: PatchLayout) -> Result<Self> {
        let side = patch.checked_mul(block);
        if !side.is_some_and(|side| (1..=1 << 16).contains(&side)) {
            return Err(Error::manifest(format!(
                "patches of {patch}×{patch} pixels in blocks of {block} by {block}: expected \
                 positive numbers, and blocks of at most 65536 pixels a side"
            )));
        }
        Ok(Self { patch, block, layout })
    }

    /// Patches of a side of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Pixels of a side of a block.
    pub fn block_side(&self) -> u32 {
        // Checked when it was made.
        (self.patch * self.block) as u32
    }

    /// The patches of an image.
    ///
    /// # Errors
    /// Unless its sides are multiples of a block's.
    pub fn grid(&self, size: Size) -> Result<Grid> {
        let unit = self.block_side();
        if size.area() == 0
            || !(size.width.is_multiple_of(unit) && size.height.is_multiple_of(unit))
        {
            return Err(Error::prompt(format!(
                "an image of {size} pixels: expected sides that are multiples of {unit}; resize \
                 it first"
            )));
        }
        let patches = |side: u32| side as usize / self.patch;
        Ok(Grid { rows: patches(size.height), columns: patches(size.width) })
    }

    /// Numbers of a patch that spans `frames` images.
    pub fn patch_len(&self, frames: usize) -> usize {
        frames.saturating_mul(3 * self.patch * self.patch)
    }

    /// Writes the patches of `frames`, one row each, into `target`.
    ///
    /// `frames` are the images of one patch in time, all of one size: two for a model whose patches
    /// span two frames, and the same one twice for a still image.
    ///
    /// # Errors
    /// Unless the sizes agree, [`Patchify::grid`] takes them, and `target` has [`Grid::patches`] ·
    /// [`Patchify::patch_len`] places.
    pub fn write(
        &self,
        frames: &[Image<'_>],
        normalisation: &Normalisation,
        target: &mut [f32],
    ) -> Result<Grid> {
        let Some((first, others)) = frames.split_first() else {
            return Err(Error::prompt("patches of no image"));
        };
        if let Some(other) = others.iter().find(|other| other.size() != first.size()) {
            return Err(Error::prompt(format!(
                "frames of {} and {} pixels in one patch: expected one size",
                first.size(),
                other.size()
            )));
        }
        let grid = self.grid(first.size())?;
        let len = self.patch_len(frames.len());
        if grid.patches().checked_mul(len) != Some(target.len()) {
            return Err(Error::prompt(format!(
                "room for {} numbers, expected {len} for each of the {} patches of an image of {} \
                 pixels",
                target.len(),
                grid.patches(),
                first.size()
            )));
        }
        let steps = self.steps(frames.len());
        for ((row, column), patch) in grid.order(self.block)?.zip(target.chunks_exact_mut(len)) {
            let corner = (row * self.patch, column * self.patch);
            self.fill(frames, normalisation, corner, steps, patch);
        }
        Ok(grid)
    }

    /// Distances of two channels, frames, lines and pixels of a patch.
    fn steps(&self, frames: usize) -> [usize; 4] {
        let (line, plane) = (self.patch, self.patch * self.patch);
        match self.layout {
            PatchLayout::ChannelsFirst => [frames * plane, plane, line, 1],
            PatchLayout::ChannelsLast => [1, 3 * plane, 3 * line, 3],
        }
    }

    /// Writes one patch, whose first pixel is in line `y` and column `x`.
    fn fill(
        &self,
        frames: &[Image<'_>],
        normalisation: &Normalisation,
        (y, x): (usize, usize),
        [channel_step, frame_step, line_step, pixel_step]: [usize; 4],
        patch: &mut [f32],
    ) {
        for channel in 0..3 {
            let levels = normalisation.channel(channel);
            for (index, frame) in frames.iter().enumerate() {
                for line in 0..self.patch {
                    let first = channel * channel_step + index * frame_step + line * line_step;
                    let (pixels, _) = frame.row_from(y + line, x).as_chunks::<3>();
                    let target = patch[first..].iter_mut().step_by(pixel_step).take(self.patch);
                    for (to, pixel) in target.zip(pixels) {
                        *to = levels[usize::from(pixel[channel])];
                    }
                }
            }
        }
    }
}
