//! Images in prompts as a manifest declares them.

use serde::Deserialize;

use super::{Cutter, Grid, Image, Size, SquareEncoder, Tiles, Tiling, VisionEncoder, text_only};
use crate::decoder::{SoftPart, SoftPrompt};
use qhx_op::text::not_taken;
use qhx_op::{Error, Host, OpDescription, Piece, Placement, Result, Segment};

/// The table of a bundle whose host embeds patches.
const TABLES: &str = "/artifacts/vision/patch_embed";

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
    /// A prompt that begins a text sees itself as a whole, and has no tokens around it but those that stand here.
    prefix: bool,
    /// Tokens behind an image where no template wrote the prompt.
    closing: Vec<u32>,
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
    /// After a row of tokens of an image that keeps its shape, and after the last one.
    row: String,
    last: String,
}

/// A text, or a token.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Mark {
    Text(String),
    Token(u32),
}

/// Images of prompts: cut into tiles and encoded by a [`SquareEncoder`], or in their shape by a [`VisionEncoder`], with
/// texts around them, all as the manifest
/// declares it.
///
/// | in `params` | |
/// |---|---|
/// | `vision` | see [`SquareEncoder`], or [`VisionEncoder`] where the bundle has its tables |
/// | `tiles` | see [`Tiling`]; without it each image is one square |
/// | `image.token` | stands at each position of an image |
/// | `image.marker` | stands in a rendered conversation for an image; `token` by default |
/// | `image.before`, `image.after` | texts and numbers of tokens around an image |
/// | `image.tile` | text before a tile, in which `{row}`, `{column}` and `{index}` are its numbers, from 1 on |
/// | `image.line` | text after the tiles of a row |
/// | `image.thumbnail`, `image.single` | text before the whole image: behind its tiles, and alone |
/// | `image.row`, `image.last` | text after each row of tokens but the last, and after that |
/// | `image.together` | the positions of an image see each other |
/// | `image.prefix` | all tokens of a prompt that begins a text see each other; the tokenizer adds none around it |
/// | `image.closing` | numbers of tokens behind an image where no template wrote the prompt |
///
/// Texts that follow each other become tokens together.
#[derive(Debug)]
pub struct DeclaredImages {
    params: Params,
    /// None where the bundle lacks the optional graph.
    vision: Option<Encoder>,
}

#[derive(Debug)]
enum Encoder {
    /// Squares, to which images are stretched, or of which they are tiles.
    Square(Box<(SquareEncoder, Tiling, Cutter)>),
    /// Images of any shape, with texts behind the rows of their tokens.
    Shaped(Box<VisionEncoder>),
}

impl DeclaredImages {
    /// Opens what a bundle has for images. `width` are the values of a row of the decoder.
    ///
    /// # Errors
    /// When graph and parameters do not fit each other.
    pub fn open(host: &mut Host, width: usize) -> Result<Self> {
        // Where the host embeds patches, it has the tables for that.
        let shaped = host.value::<serde_json::Value>(TABLES)?.is_some();
        let vision = match shaped {
            true => {
                VisionEncoder::open(host, width)?.map(|encoder| Encoder::Shaped(encoder.into()))
            }
            false => match SquareEncoder::open(host, width)? {
                None => None,
                Some(encoder) => {
                    let cutter = Cutter::new(encoder.filter());
                    Some(Encoder::Square(Box::new((encoder, Tiling::read(host)?, cutter))))
                }
            },
        };
        let params = match vision {
            None => host.value("/params/image")?.unwrap_or_default(),
            Some(_) => {
                let _: u32 = host.require("/params/image/token")?;
                host.require("/params/image")?
            }
        };
        Ok(Self { params, vision })
    }

    /// True where all tokens of a prompt that begins a text see each other: see [`SoftPrompt::seen_whole`].
    pub fn prefix(&self) -> bool {
        self.params.prefix
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
        let Params { token, marker, .. } = self.params;
        let mut pieces = Vec::new();
        self.params.before.iter().for_each(|mark| push(&mut pieces, mark.piece()));
        match self.vision.as_ref().ok_or_else(text_only)? {
            Encoder::Square(square) => self.push_tiles(square, segment, &mut pieces)?,
            Encoder::Shaped(encoder) => {
                let grid = encoder.tokens(segment)?;
                for row in 0..grid.rows {
                    let part = part_of(row, grid.rows)?;
                    let positions = grid.columns;
                    pieces.push(Piece::Part { token, positions, frames: None, part });
                    let last = row + 1 == grid.rows;
                    let text = if last { &self.params.last } else { &self.params.row };
                    push(&mut pieces, Piece::Text(text.clone()));
                }
            }
        }
        self.params.after.iter().for_each(|mark| push(&mut pieces, mark.piece()));
        let closing = self.params.closing.clone();
        Ok(Placement { marker: marker.unwrap_or(token), pieces, closing, ..Placement::default() })
    }

    /// Adds the tiles of an image, and the whole image behind them.
    fn push_tiles(
        &self,
        (encoder, tiling, _): &(SquareEncoder, Tiling, Cutter),
        segment: &Segment<'_>,
        pieces: &mut Vec<Piece>,
    ) -> Result<()> {
        let token = self.params.token;
        let tiles = tiles(encoder, tiling, Image::of_segment(segment)?)?;
        let part = |index: u32, size: Size| {
            let positions = encoder.tokens_of(size)?;
            Ok::<_, Error>(Piece::Part { token, positions, frames: None, part: tiles.part(index) })
        };
        for ((row, column), index) in tiles.places().zip(0..) {
            let numbers = [("{row}", row), ("{column}", column), ("{index}", index + 1)];
            let text = numbers.iter().fold(self.params.tile.clone(), |text, (name, number)| {
                text.replace(name, &number.to_string())
            });
            push(pieces, Piece::Text(text));
            pieces.push(part(index, encoder.size())?);
            if column == tiles.columns {
                push(pieces, Piece::Text(self.params.line.clone()));
            }
        }
        if tiles.thumbnail {
            let before = if tiles.rows > 0 { &self.params.thumbnail } else { &self.params.single };
            push(pieces, Piece::Text(before.clone()));
            pieces.push(part(tiles.parts() - 1, tiles.whole)?);
        }
        Ok(())
    }

    /// The prompt of these segments, its images encoded.
    ///
    /// # Errors
    /// When an image cannot be resized, or the graph fails.
    pub fn prompt(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<SoftPrompt> {
        let Self { params: Params { token, together, .. }, vision } = self;
        let (token, together) = (*token, *together);
        let (mut last, mut seen) = (None, None);
        SoftPrompt::of(segments, |segment| {
            let (encoder, tiling, cutter) = match vision.as_mut().ok_or_else(text_only)? {
                Encoder::Square(square) => &mut **square,
                Encoder::Shaped(encoder) => {
                    let (count, rows) = shaped(host, encoder, segment, &mut seen)?;
                    return Ok(SoftPart { token, count, rows, together });
                }
            };
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

/// An image that was encoded: where its pixels are, its tokens, and their rows.
type Seen = Option<(*const u8, Grid, Vec<f32>)>;

/// The rows of an image, or of one row of its tokens, and how many they are. An image whose rows follow each other is
/// encoded once.
fn shaped(
    host: &mut Host,
    encoder: &mut VisionEncoder,
    segment: &Segment<'_>,
    seen: &mut Seen,
) -> Result<(usize, Vec<f32>)> {
    let (whole, row) = match *segment {
        Segment::Tile { rgb, width, height, index, of } => {
            (Segment::Image { rgb, width, height }, Some((index, of)))
        }
        other => (other, None),
    };
    let Segment::Image { rgb, .. } = whole else {
        return Err(Error::prompt(format!("{}, expected an image", qhx_op::text::kind(segment))));
    };
    let grid = encoder.tokens(&whole)?;
    if seen.as_ref().is_none_or(|(place, known, _)| *place != rgb.as_ptr() || *known != grid) {
        let features = encoder.encode(host, &whole, grid)?;
        *seen = Some((rgb.as_ptr(), grid, features.embeds));
    }
    let Some((_, _, rows)) = seen else { return Ok((0, Vec::new())) };
    let Some((index, of)) = row else { return Ok((grid.patches(), rows.clone())) };
    let each = rows.len() / grid.rows.max(1);
    match rows.chunks_exact(each.max(1)).nth(usize::from(index)) {
        Some(row) if usize::from(of) == grid.rows => Ok((grid.columns, row.to_vec())),
        _ => Err(Error::prompt(format!(
            "part {index} of {of} of an image with {} rows of tokens, expected one for each row",
            grid.rows
        ))),
    }
}

/// Which part a row of an image is; none where it has one row.
fn part_of(row: usize, rows: usize) -> Result<Option<(u16, u16)>> {
    match (u16::try_from(row), u16::try_from(rows)) {
        _ if rows == 1 => Ok(None),
        (Ok(row), Ok(rows)) => Ok(Some((row, rows))),
        _ => {
            Err(Error::prompt(format!("an image of {rows} rows of tokens, expected at most 65535")))
        }
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
