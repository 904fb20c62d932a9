//! Checked RGB8 pixels.

use super::Size;
use qhx_op::{Error, Result, Segment};

/// Pixels of an image, red, green and blue, in rows from the top; at least one pixel.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    rgb: &'a [u8],
    size: Size,
}

impl std::fmt::Debug for Image<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("size", &self.size).finish_non_exhaustive()
    }
}

impl<'a> Image<'a> {
    /// An image of RGB8 pixels.
    ///
    /// # Errors
    /// Unless `rgb` has three bytes for each of `width · height` pixels, and there are some.
    pub fn new(rgb: &'a [u8], width: u32, height: u32) -> Result<Self> {
        let size = Size { width, height };
        if size.area() == 0 {
            return Err(Error::prompt(format!(
                "an image of {size} pixels has none; expected at least 1×1"
            )));
        }
        if size.rgb_len() != Some(rgb.len()) {
            return Err(Error::prompt(format!(
                "an image of {size} pixels has {} bytes, expected three for each pixel",
                rgb.len()
            )));
        }
        Ok(Self { rgb, size })
    }

    /// The image of a segment, of a tile the whole image.
    ///
    /// # Errors
    /// When the segment is none, or is malformed.
    pub fn of_segment(segment: &Segment<'a>) -> Result<Self> {
        match *segment {
            Segment::Image { rgb, width, height } | Segment::Tile { rgb, width, height, .. } => {
                Self::new(rgb, width, height)
            }
            _ => Err(Error::prompt("a segment is not an image, but one was expected")),
        }
    }

    /// Three bytes a pixel.
    pub fn rgb(&self) -> &'a [u8] {
        self.rgb
    }

    /// Pixels.
    pub fn size(&self) -> Size {
        self.size
    }

    /// The part of `size` pixels whose first column is `left` and whose first row is `top`, copied into `part`.
    ///
    /// # Errors
    /// When the image has no such part.
    pub fn crop<'p>(
        &self,
        [left, top]: [u32; 2],
        size: Size,
        part: &'p mut Vec<u8>,
    ) -> Result<Image<'p>> {
        let ends = [left.checked_add(size.width), top.checked_add(size.height)];
        let fits = |end: Option<u32>, side| end.is_some_and(|end| end <= side);
        if size.area() == 0 || !fits(ends[0], self.size.width) || !fits(ends[1], self.size.height) {
            return Err(Error::prompt(format!(
                "{size} pixels from column {left} and row {top} on of an image of {}: expected a part of it",
                self.size
            )));
        }
        part.clear();
        for row in top..top + size.height {
            let bytes = self.row_from(row as usize, left as usize);
            part.extend_from_slice(&bytes[..size.width as usize * 3]);
        }
        Image::new(part, size.width, size.height)
    }

    /// The bytes of row `y`, from column `x` on.
    ///
    /// # Panics
    /// When the image has no such pixel.
    pub(super) fn row_from(&self, y: usize, x: usize) -> &'a [u8] {
        let width = self.size.width as usize;
        &self.rgb[(y * width + x) * 3..(y + 1) * width * 3]
    }
}
