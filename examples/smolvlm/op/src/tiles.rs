//! Resizing an image and cutting it into tiles, and the texts before them: `Idefics3ImageProcessor` and
//! `Idefics3Processor` of `transformers`, which SmolVLM's equal.

use qhx_kit::vision::{Filter, Image, Resizer, Size};
use qhx_op::{Error, Host, Result};
use serde::Deserialize;

/// Stands before each tile, and behind the last.
pub const AROUND: &str = "<fake_token_around_image>";
/// Says that the whole image follows.
const WHOLE: &str = "<global-img>";
/// A resized image has no longer side.
const MAX_SIDE: u32 = 4096;

/// `params.tiles` of the manifest, and the square that the vision graph takes.
#[derive(Debug, Clone, Copy)]
pub struct Tiling {
    /// The longer side of an image before it is cut.
    longest_edge: u32,
    /// Images are cut; otherwise each is stretched to one square.
    split: bool,
    tile: Size,
}

/// An image in tiles.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// The size that the image is resized to first, in its shape.
    shape: Size,
    /// The size that is cut: whole tiles.
    cut: Size,
    /// Tiles from top to bottom and from left to right; none of an image that is not cut.
    rows: u32,
    columns: u32,
}

impl Tiling {
    pub fn read(host: &Host, tile: Size) -> Result<Self> {
        #[derive(Deserialize)]
        struct Params {
            longest_edge: u32,
            split: bool,
        }
        let Params { longest_edge, split } = host.require("/params/tiles")?;
        if longest_edge == 0 {
            return Err(Error::manifest(
                "manifest params.tiles.longest_edge is 0, expected a number of pixels",
            ));
        }
        Ok(Self { longest_edge, split, tile })
    }

    /// The tiles of an image of this size.
    ///
    /// # Errors
    /// When there are more than a prompt can count.
    pub fn grid(&self, size: Size) -> Result<Grid> {
        let (tile, shape) = (self.tile.width, self.shape(size));
        let whole = |side: u32| side.div_ceil(tile) * tile;
        let Size { width, height } = shape;
        let aspect = f64::from(width) / f64::from(height);
        let cut = if width >= height {
            let width = whole(width);
            Size { width, height: whole(((f64::from(width) / aspect) as u32).max(1)) }
        } else {
            let height = whole(height);
            Size { width: whole(((f64::from(height) * aspect) as u32).max(1)), height }
        };
        if !self.split || cut == self.tile {
            return Ok(Grid { shape, cut: self.tile, rows: 0, columns: 0 });
        }
        let (rows, columns) = (cut.height / tile, cut.width / tile);
        if u64::from(rows) * u64::from(columns) >= u64::from(u16::MAX) {
            return Err(Error::prompt(format!(
                "an image of {size} pixels becomes {rows} rows of {columns} tiles, expected fewer than 65535; \
                 params.tiles.longest_edge of the manifest is too large"
            )));
        }
        Ok(Grid { shape, cut, rows, columns })
    }

    /// The size whose longer side is `longest_edge`; the shorter one is even.
    fn shape(&self, size: Size) -> Size {
        let long = self.longest_edge;
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
}

impl Grid {
    /// Tiles, and the whole image.
    fn parts(&self) -> u32 {
        self.rows * self.columns + 1
    }

    /// Which part of how many; none where the image is not cut.
    pub fn part(&self, index: usize) -> Option<(u16, u16)> {
        let numbers = (u16::try_from(index).ok()?, u16::try_from(self.parts()).ok()?);
        (self.rows > 0).then_some(numbers)
    }

    /// Text before each part.
    pub fn texts(&self) -> impl Iterator<Item = String> {
        let Self { rows, columns, .. } = *self;
        let cells = (1..=rows).flat_map(move |row| (1..=columns).map(move |column| (row, column)));
        let tile = |(row, column)| {
            let line = if column == 1 && row > 1 { "\n" } else { "" };
            format!("{line}{AROUND}<row_{row}_col_{column}>")
        };
        let lines = if rows > 0 { "\n\n" } else { "" };
        cells.map(tile).chain([format!("{lines}{AROUND}{WHOLE}")])
    }
}

/// Resizes images and cuts them. Results lie in it until the next call.
#[derive(Debug)]
pub struct Cutter {
    /// To its shape, and to whole tiles.
    resizers: [Resizer; 2],
    /// The image in whole tiles.
    cut: Vec<u8>,
    tile: Vec<u8>,
}

impl Cutter {
    pub fn new(filter: Filter) -> Self {
        let resizers = [(); 2].map(|()| Resizer::new(filter));
        Self { resizers, cut: Vec::new(), tile: Vec::new() }
    }

    /// An image that is not cut, for a graph that stretches it to its square.
    ///
    /// # Errors
    /// When the image is one that is cut.
    pub fn whole<'a>(&'a mut self, image: Image<'a>, tiling: &Tiling) -> Result<Image<'a>> {
        let grid = tiling.grid(image.size())?;
        if grid.rows > 0 {
            return Err(Error::prompt(format!(
                "an image of {} in one piece, expected its {} tiles: the runtime is older than tiles",
                image.size(),
                grid.parts()
            )));
        }
        self.resizers[0].resize(image, grid.shape)
    }

    /// Makes an image the one that [`Cutter::tile`] cuts.
    pub fn resize(&mut self, image: Image<'_>, grid: &Grid) -> Result<()> {
        let [shape, cut] = &mut self.resizers;
        let cut = cut.resize(shape.resize(image, grid.shape)?, grid.cut)?;
        self.cut.clear();
        self.cut.extend_from_slice(cut.rgb());
        Ok(())
    }

    /// A part of `size`; the last is the whole image, to be stretched.
    pub fn tile(&mut self, grid: &Grid, size: Size, [index, of]: [u16; 2]) -> Result<Image<'_>> {
        let (index, of) = (u32::from(index), u32::from(of));
        if grid.rows == 0 || of != grid.parts() || index >= of {
            return Err(Error::prompt(format!(
                "part {index} of {of} of an image, expected one of {}",
                grid.parts()
            )));
        }
        let image = Image::new(&self.cut, grid.cut.width, grid.cut.height)?;
        if index + 1 == of {
            return Ok(image);
        }
        let (row, column) = (index / grid.columns, index % grid.columns);
        image.crop([column * size.width, row * size.height], size, &mut self.tile)
    }
}
