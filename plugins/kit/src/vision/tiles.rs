//! Tiles: how many an image becomes, of which size, and the pixels of each.

use serde::Deserialize;

use super::{Filter, Image, Resizer, Size};
use qhx_op::{Error, Host, Result};

/// A resized image of [`Tiling::LongestEdge`] has no longer side.
const MAX_SIDE: u32 = 4096;
/// More tiles than any rule asks for.
const MAX_TILES: u32 = 4096;

/// `params.tiles` of the manifest: how an image is cut.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(tag = "rule", rename_all = "snake_case")]
pub enum Tiling {
    /// It is not: each image is stretched to the square of the vision graph.
    #[default]
    Whole,
    /// The longer side becomes `longest_edge`, then both the next multiple of a tile's (`Idefics3ImageProcessor`). The
    /// whole image, made small, stands behind its tiles. Without `split` it stands there alone.
    LongestEdge {
        /// Pixels.
        longest_edge: u32,
        /// Images are cut.
        split: bool,
    },
    /// The image is stretched to the grid of `min` to `max` tiles that is most like its shape (`GotOcr2ImageProcessor`,
    /// as InternVL uses it), if that has several.
    Nearest {
        /// Fewest tiles.
        min: u32,
        /// Most tiles.
        max: u32,
        /// The whole image stands behind its tiles.
        thumbnail: bool,
        /// Where the whole image keeps its shape (`Lfm2VlImageProcessor`): how large it is.
        #[serde(default)]
        whole: Option<WholeImage>,
    },
}

/// An image that keeps its shape. Its sides are multiples of what becomes one token.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct WholeImage {
    /// Fewest pixels.
    min_pixels: u64,
    /// Most pixels.
    max_pixels: u64,
    /// An image of more than this many times the most is cut.
    tolerance: f64,
}

/// An image in tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// The size that the image gets before it is resized to another one.
    shape: Option<Size>,
    /// The size that is cut.
    cut: Size,
    /// Tiles from top to bottom.
    pub rows: u32,
    /// Tiles from left to right; none of an image that is not cut.
    pub columns: u32,
    /// Size of the whole image, which stands behind its tiles, or alone.
    pub whole: Size,
    /// The whole image stands behind its tiles.
    pub thumbnail: bool,
}

impl Tiling {
    /// Reads `params.tiles`.
    ///
    /// # Errors
    /// When numbers are out of range.
    pub fn read(host: &Host) -> Result<Self> {
        let tiling = host.value::<Self>("/params/tiles")?.unwrap_or_default();
        let fits = match tiling {
            Self::Whole => true,
            Self::LongestEdge { longest_edge, .. } => longest_edge > 0,
            Self::Nearest { min, max, whole, .. } => {
                let limits = whole.is_none_or(|whole| {
                    (1..=whole.max_pixels).contains(&whole.min_pixels) && whole.tolerance > 0.0
                });
                limits && (1..=MAX_TILES).contains(&max) && (1..=max).contains(&min)
            }
        };
        if fits {
            return Ok(tiling);
        }
        Err(Error::manifest(format!(
            "manifest params.tiles: {tiling:?}: expected positive numbers, the lower of two first, and at most \
             {MAX_TILES} tiles"
        )))
    }

    /// The tiles of an image of `size`. `tile` is a tile's size, and sides of a whole image that keeps its shape are
    /// multiples of `unit`.
    ///
    /// # Errors
    /// When there are more than a prompt can count.
    pub fn tiles(&self, size: Size, tile: Size, unit: u32) -> Result<Tiles> {
        let alone =
            Tiles { shape: None, cut: tile, rows: 0, columns: 0, whole: tile, thumbnail: true };
        let tiles = match *self {
            Self::Whole => alone,
            Self::LongestEdge { longest_edge, split } => {
                let shape = with_longest(size, longest_edge);
                let cut = if split { whole_tiles(shape, tile) } else { tile };
                let shape = Some(shape);
                let (rows, columns) = match cut == tile {
                    true => (0, 0),
                    false => (cut.height / tile.height, cut.width / tile.width),
                };
                Tiles { shape, cut, rows, columns, ..alone }
            }
            Self::Nearest { min, max, thumbnail, whole } => {
                let alone = match whole {
                    Some(whole) => Tiles { whole: whole.size(size, unit), ..alone },
                    None => alone,
                };
                if max == 1 || whole.is_some_and(|whole| !whole.is_cut(size, unit)) {
                    return Ok(alone);
                }
                let (columns, rows) = nearest(size, tile, min, max);
                if rows * columns == 1 {
                    return Ok(alone);
                }
                let cut = Size { width: columns * tile.width, height: rows * tile.height };
                Tiles { cut, rows, columns, thumbnail, ..alone }
            }
        };
        if u64::from(tiles.rows) * u64::from(tiles.columns) >= u64::from(u16::MAX) {
            return Err(Error::prompt(format!(
                "an image of {size} pixels becomes {} rows of {} tiles, expected fewer than 65535; params.tiles of the \
                 manifest has too large a number",
                tiles.rows, tiles.columns
            )));
        }
        Ok(tiles)
    }
}

/// The size whose longer side is `long`; the shorter one is even (`_resize_output_size_rescale_to_max_len`).
fn with_longest(size: Size, long: u32) -> Size {
    let aspect = f64::from(size.width) / f64::from(size.height);
    let even = |side: f64| (side as u32).next_multiple_of(2).max(1);
    let (mut width, mut height) = if size.width >= size.height {
        (long, even(f64::from(long) / aspect))
    } else {
        (even(f64::from(long) * aspect), long)
    };
    let aspect = f64::from(width) / f64::from(height);
    if width >= height && width > MAX_SIDE {
        (width, height) = (MAX_SIDE, (f64::from(MAX_SIDE) / aspect) as u32);
    } else if height > width && height > MAX_SIDE {
        (width, height) = ((f64::from(MAX_SIDE) * aspect) as u32, MAX_SIDE);
    }
    Size { width: width.max(1), height: height.max(1) }
}

/// The next size of whole tiles (`resize_for_vision_encoder`).
fn whole_tiles(size: Size, tile: Size) -> Size {
    let Size { width, height } = size;
    let aspect = f64::from(width) / f64::from(height);
    let across = |side: u32| side.div_ceil(tile.width) * tile.width;
    let down = |side: u32| side.div_ceil(tile.height) * tile.height;
    if width >= height {
        let width = across(width);
        Size { width, height: down(((f64::from(width) / aspect) as u32).max(1)) }
    } else {
        let height = down(height);
        Size { width: across(((f64::from(height) * aspect) as u32).max(1)), height }
    }
}

/// Columns and rows of the grid of `min` to `max` tiles whose shape is nearest to that of an image; of several, the
/// largest that has less than twice the image's pixels (`get_optimal_tiled_canvas`).
fn nearest(size: Size, tile: Size, min: u32, max: u32) -> (u32, u32) {
    let aspect = f64::from(size.width) / f64::from(size.height);
    let mut grids: Vec<_> = (1..=max)
        .flat_map(|columns| (1..=max / columns).map(move |rows| (columns, rows)))
        .filter(|(columns, rows)| columns * rows >= min)
        .collect();
    grids.sort_by_key(|(columns, rows)| columns * rows);
    let (mut best, mut least) = ((1, 1), f64::INFINITY);
    for (columns, rows) in grids {
        let apart = (aspect - f64::from(columns) / f64::from(rows)).abs();
        let area = tile.area() as f64 * f64::from(columns * rows);
        if apart < least {
            (best, least) = ((columns, rows), apart);
        } else if apart == least && size.area() as f64 > 0.5 * area {
            best = (columns, rows);
        }
    }
    best
}

impl WholeImage {
    /// `smart_resize` of `Lfm2VlImageProcessor`.
    fn size(&self, size: Size, unit: u32) -> Size {
        let (w, h, f) = (f64::from(size.width), f64::from(size.height), f64::from(unit));
        let (min, max) = (self.min_pixels as f64, self.max_pixels as f64);
        let near = |side: f64| f.max((side / f).round_ties_even() * f);
        let (mut width, mut height) = (near(w), near(h));
        if width * height > max {
            let beta = (h * w / max).sqrt();
            let below = |side: f64| f.max((side / beta / f).floor() * f);
            (width, height) = (below(w), below(h));
        } else if width * height < min {
            let beta = (min / (h * w)).sqrt();
            let above = |side: f64| (side * beta / f).ceil() * f;
            (width, height) = (above(w), above(h));
        }
        Size { width: width as u32, height: height as u32 }
    }

    /// `_is_image_too_large` of `Lfm2VlImageProcessor`. The least side there is half of `unit`, in published
    /// checkpoints, and can make a difference only to images of other than the least height.
    fn is_cut(&self, size: Size, unit: u32) -> bool {
        let f = f64::from(unit);
        let near = |side: u32| (f64::from(side) / f).round_ties_even().max(0.5) * f;
        near(size.width) * near(size.height) > self.max_pixels as f64 * self.tolerance
    }
}

impl Tiles {
    /// The tiles, and the whole image.
    pub fn parts(&self) -> u32 {
        self.rows * self.columns + u32::from(self.thumbnail)
    }

    /// Which part of how many; none where the image is not cut.
    pub fn part(&self, index: u32) -> Option<(u16, u16)> {
        let numbers = (u16::try_from(index).ok()?, u16::try_from(self.parts()).ok()?);
        (self.rows > 0).then_some(numbers)
    }

    /// Row and column of each tile, counted from 1.
    pub fn places(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let Self { rows, columns, .. } = *self;
        (1..=rows).flat_map(move |row| (1..=columns).map(move |column| (row, column)))
    }
}

/// Resizes images and cuts them. Results lie in it until the next call.
#[derive(Debug)]
pub struct Cutter {
    /// To the first size, to that which is cut, and to the whole image's.
    resizers: [Resizer; 3],
    /// The image that is cut.
    cut: Vec<u8>,
    tile: Vec<u8>,
}

impl Cutter {
    /// A cutter that resizes with `filter`.
    pub fn new(filter: Filter) -> Self {
        let resizers = [(); 3].map(|()| Resizer::new(filter));
        Self { resizers, cut: Vec::new(), tile: Vec::new() }
    }

    /// An image that is not cut.
    ///
    /// # Errors
    /// When the image is one that is cut, or cannot be resized.
    pub fn whole<'a>(&'a mut self, image: Image<'a>, tiles: &Tiles) -> Result<Image<'a>> {
        if tiles.rows > 0 {
            return Err(Error::prompt(format!(
                "an image of {} in one piece, expected its {} tiles: the runtime is older than tiles",
                image.size(),
                tiles.parts()
            )));
        }
        let [shape, _, whole] = &mut self.resizers;
        let image = match tiles.shape {
            Some(size) => shape.resize(image, size)?,
            None => image,
        };
        whole.resize(image, tiles.whole)
    }

    /// Makes an image the one that [`Cutter::tile`] cuts.
    ///
    /// # Errors
    /// When it cannot be resized.
    pub fn resize(&mut self, image: Image<'_>, tiles: &Tiles) -> Result<()> {
        let [shape, cut, _] = &mut self.resizers;
        let image = match tiles.shape {
            Some(size) => shape.resize(image, size)?,
            None => image,
        };
        let resized = cut.resize(image, tiles.cut)?;
        self.cut.clear();
        self.cut.extend_from_slice(resized.rgb());
        Ok(())
    }

    /// A part of `image`; the last is the whole image. Tiles are `tile` large.
    ///
    /// # Errors
    /// When there is no such part, or the image cannot be resized.
    pub fn tile<'a>(
        &'a mut self,
        image: Image<'a>,
        tiles: &Tiles,
        tile: Size,
        [index, of]: [u16; 2],
    ) -> Result<Image<'a>> {
        let (index, of) = (u32::from(index), u32::from(of));
        if tiles.rows == 0 || of != tiles.parts() || index >= of {
            return Err(Error::prompt(format!(
                "part {index} of {of} of an image, expected one of {}",
                tiles.parts()
            )));
        }
        let cut = Image::new(&self.cut, tiles.cut.width, tiles.cut.height)?;
        if index == tiles.rows * tiles.columns {
            // Of an image that gets another size first, what was cut is made small.
            let image = if tiles.shape.is_some() { cut } else { image };
            return self.resizers[2].resize(image, tiles.whole);
        }
        let (row, column) = (index / tiles.columns, index % tiles.columns);
        cut.crop([column * tile.width, row * tile.height], tile, &mut self.tile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn size(width: u32, height: u32) -> Size {
        Size { width, height }
    }

    /// Results of `get_optimal_tiled_canvas`.
    #[test]
    fn grids_are_those_of_the_nearest_shape() {
        let tile = size(448, 448);
        for (from, min, max, to) in [
            (size(448, 448), 1, 12, (1, 1)),
            (size(1280, 1024), 1, 12, (4, 3)),
            (size(1920, 1080), 1, 12, (4, 2)),
            (size(4000, 4000), 1, 12, (3, 3)),
            (size(900, 900), 1, 12, (2, 2)),
            (size(1, 1), 1, 12, (1, 1)),
            (size(20_000, 1), 1, 12, (12, 1)),
            (size(1, 20_000), 1, 12, (1, 12)),
            (size(1000, 500), 1, 12, (2, 1)),
            (size(2000, 1000), 1, 12, (4, 2)),
            (size(500, 400), 2, 10, (2, 2)),
        ] {
            assert_eq!(nearest(from, tile, min, max), to, "{from}");
        }
    }

    /// Results of `smart_resize` and `_is_image_too_large` of `Lfm2VlImageProcessor`.
    #[test]
    fn images_that_keep_their_shape_have_whole_tokens() {
        let whole = WholeImage { min_pixels: 65_536, max_pixels: 262_144, tolerance: 2.0 };
        for (from, to, cut) in [
            (size(512, 512), size(512, 512), false),
            (size(640, 480), size(576, 416), false),
            (size(1, 1), size(256, 256), false),
            (size(3000, 15), size(3008, 32), false),
            (size(20_000, 20), size(16_160, 32), true),
            (size(200, 20_000), size(32, 5120), true),
            (size(1000, 1000), size(512, 512), true),
        ] {
            assert_eq!((whole.size(from, 32), whole.is_cut(from, 32)), (to, cut), "{from}");
        }
    }
}
