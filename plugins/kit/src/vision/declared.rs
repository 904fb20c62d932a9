//! Images in prompts as a manifest declares them.

use serde::Deserialize;

use super::{Cutter, Image, Size, SquareEncoder, Tiles, Tiling, text_only};
use crate::decoder::{SoftPart, SoftPrompt};
use qhx_op::text::not_taken;
use qhx_op::{Error, Host, OpDescription, Piece, Placement, Result, Segment};

/// `params.image` of the manifest.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Params {
    /// Stands at each position of an image.
    token: u32,
    /// Stands in a rendered conversation; `token` by default.
    marker: Option<u32>,
    /// The positions of an image see each other.
    together: bool,
    before: Vec<Mark>,
    after: Vec<Mark>,
    /// Before a tile.
    tile: String,
    /// After the tiles of a row.
    line: String,
    /// Before the whole image behind its tiles.
    thumbnail: String,
    /// Before an image that is not cut.
    single: String,
}

/// A text, or a token.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Mark {
    Text(String),
    Token(u32),
}

/// Images of prompts: cut into tiles, encoded by a [`SquareEncoder`], and with texts around them, all as the manifest
/// declares it.
///
/// | in `params` | |
/// |---|---|
/// | `vision` | see [`SquareEncoder`] |
/// | `tiles` | see [`Tiling`]; without it each image is one square |
/// | `image.token` | stands at each position of an image |
/// | `image.marker` | stands in a rendered conversation for an image; `token` by default |
/// | `image.before`, `image.after` | texts and numbers of tokens around an image |
/// | `image.tile` | text before a tile, in which `{row}`, `{column}` and `{index}` are its numbers, from 1 on |
/// | `image.line` | text after the tiles of a row |
/// | `image.thumbnail`, `image.single` | text before the whole image: behind its tiles, and alone |
/// | `image.together` | the positions of an image see each other |
///
/// Texts that follow each other become tokens together.
#[derive(Debug)]
pub struct DeclaredImages {
    params: Params,
    /// None where the bundle lacks the optional graph.
    vision: Option<(SquareEncoder, Tiling, Cutter)>,
}

impl DeclaredImages {
    /// Opens what a bundle has for images. `width` are the values of a row of the decoder.
    ///
    /// # Errors
    /// When graph and parameters do not fit each other.
    pub fn open(host: &mut Host, width: usize) -> Result<Self> {
        let Some(encoder) = SquareEncoder::open(host, width)? else {
            return Ok(Self { params: Params::default(), vision: None });
        };
        let _: u32 = host.require("/params/image/token")?;
        let params = host.require("/params/image")?;
        let cutter = Cutter::new(encoder.filter());
        Ok(Self { params, vision: Some((encoder, Tiling::read(host)?, cutter)) })
    }

    /// The tokens that stand for images, for [`qhx_op::OpenInfo::placeholders`].
    pub fn placeholders(&self) -> Vec<u32> {
        self.vision.iter().map(|_| self.params.token).collect()
    }

    /// The place of an image in a prompt of the op that `describe` gives.
    ///
    /// # Errors
    /// When the segment is no image, or the bundle takes none of its size.
    pub fn place(
        &self,
        describe: impl FnOnce() -> OpDescription,
        segment: &Segment<'_>,
    ) -> Result<Placement> {
        let Segment::Image { .. } = segment else {
            return Err(not_taken(&describe(), segment));
        };
        let (encoder, tiling, _) = self.vision.as_ref().ok_or_else(text_only)?;
        let Params { token, marker, .. } = self.params;
        let tiles = tiles(encoder, tiling, Image::of_segment(segment)?)?;
        let part = |index: u32, size: Size| {
            let positions = encoder.tokens_of(size)?;
            Ok::<_, Error>(Piece::Part { token, positions, frames: None, part: tiles.part(index) })
        };
        let mut pieces = Vec::new();
        self.params.before.iter().for_each(|mark| push(&mut pieces, mark.piece()));
        for ((row, column), index) in tiles.places().zip(0..) {
            let numbers = [("{row}", row), ("{column}", column), ("{index}", index + 1)];
            let text = numbers.iter().fold(self.params.tile.clone(), |text, (name, number)| {
                text.replace(name, &number.to_string())
            });
            push(&mut pieces, Piece::Text(text));
            pieces.push(part(index, encoder.size())?);
            if column == tiles.columns {
                push(&mut pieces, Piece::Text(self.params.line.clone()));
            }
        }
        if tiles.thumbnail {
            let before = if tiles.rows > 0 { &self.params.thumbnail } else { &self.params.single };
            push(&mut pieces, Piece::Text(before.clone()));
            pieces.push(part(tiles.parts() - 1, tiles.whole)?);
        }
        self.params.after.iter().for_each(|mark| push(&mut pieces, mark.piece()));
        Ok(Placement { marker: marker.unwrap_or(token), pieces, ..Placement::default() })
    }

    /// The prompt of these segments, its images encoded.
    ///
    /// # Errors
    /// When an image cannot be resized, or the graph fails.
    pub fn prompt(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<SoftPrompt> {
        let Self { params: Params { token, together, .. }, vision } = self;
        let (token, together) = (*token, *together);
        let mut last = None;
        SoftPrompt::of(segments, |segment| {
            let (encoder, tiling, cutter) = vision.as_mut().ok_or_else(text_only)?;
            let image = Image::of_segment(segment)?;
            let tiles = tiles(encoder, tiling, image)?;
            let shown = match *segment {
                Segment::Tile { rgb, index, of, .. } => {
                    // The tiles of an image have it in common: it is resized once.
                    if !last.is_some_and(|last| std::ptr::eq(last, rgb)) {
                        cutter.resize(image, &tiles)?;
                    }
                    last = Some(rgb);
                    cutter.tile(image, &tiles, encoder.size(), [index, of])?
                }
                _ => cutter.whole(image, &tiles)?,
            };
            let count = encoder.tokens_of(shown.size())?;
            let rows = encoder.encode(host, shown)?;
            Ok(SoftPart { token, count, rows, together })
        })
    }
}

/// The tiles of an image.
fn tiles(encoder: &SquareEncoder, tiling: &Tiling, image: Image<'_>) -> Result<Tiles> {
    tiling.tiles(image.size(), encoder.size(), encoder.unit())
}

impl Mark {
    fn piece(&self) -> Piece {
        match self {
            Self::Text(text) => Piece::Text(text.clone()),
            Self::Token(token) => Piece::Tokens(vec![*token]),
        }
    }
}

/// Adds a piece; a text belongs to the one before it.
fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    match (pieces.last_mut(), piece) {
        (_, Piece::Text(text)) if text.is_empty() => {}
        (Some(Piece::Text(before)), Piece::Text(text)) => before.push_str(&text),
        (_, piece) => pieces.push(piece),
    }
}
