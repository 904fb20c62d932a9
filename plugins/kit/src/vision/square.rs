//! A vision graph that takes one square image, or one of any shape up to as many patches, and embeds these itself.

use std::time::Instant;

use serde::Deserialize;

use super::{
    Filter, Image, Normalisation, PatchLayout, Patchify, Resizer, Size, resample_antialiased,
};
use crate::OneOrMany;
use crate::fill::{Embedding, FloatInput, MASK_VALUE};
use qhx_op::{Error, Host, Result, SpanId, View};

/// The key of the graph in `plan.params`, and of what the manifest declares in `params`.
const VISION: &str = "vision";
/// A side that the host reckons with is never longer.
const MAX_SIDE: u32 = 1 << 14;

/// `params.vision` of the manifest.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Params {
    /// Pixels of an image's side.
    image_size: u32,
    /// Pixels of a patch's side.
    patch_size: u32,
    /// Patches of a side that become one token: as many stand together.
    #[serde(default = "one")]
    merge_size: u32,
    #[serde(default)]
    resample: Filter,
    image_mean: [f64; 3],
    image_std: [f64; 3],
    /// Images keep their shape: patches of a side of the square of learned positions.
    position_side: Option<usize>,
    /// Colours of a pixel stand together in a patch.
    #[serde(default)]
    channels_last: bool,
}

fn one() -> u32 {
    1
}

/// A vision tower whose graph takes the patches of one square image, as the forge's `Siglip` makes one.
///
/// | in the manifest | |
/// |---|---|
/// | `plan.params.vision` | the graph |
/// | `params.vision` | `image_size`, `patch_size`, `merge_size`, `resample`, `image_mean`, `image_std`, `channels_last` |
///
/// The graph takes `pixels` `[patches, 3 · patch_size²]`, normalised, in blocks of `merge_size` by `merge_size`
/// patches, and gives `embeds` `[tokens, width]`.
///
/// Where `params.vision` has `position_side`, images keep their shape (NaFlex of SigLIP 2). The graph then takes an
/// image of any number of patches up to those of the square, and besides `pixels` the inputs `positions`
/// `[patches, hidden]`, which are resampled from the table `artifacts.positions.vision`, and `cmask` `[1, patches]`,
/// which hides the rows behind the image's own.
#[derive(Debug)]
pub struct SquareEncoder {
    graph: qhx_op::GraphId,
    pixels: FloatInput,
    embeds: View,
    /// Values of a row of the decoder.
    width: usize,
    size: Size,
    filter: Filter,
    patchify: Patchify,
    normalisation: Normalisation,
    resizer: Resizer,
    /// Patches of an image.
    patches: Vec<f32>,
    shaped: Option<Shaped>,
    span: SpanId,
}

/// What depends on the shape of an image.
#[derive(Debug)]
struct Shaped {
    /// Learned positions of a square, `[side², hidden]`, and its side.
    table: Vec<f32>,
    side: usize,
    positions: FloatInput,
    mask: FloatInput,
}

impl Shaped {
    fn open(host: &mut Host, graph: qhx_op::GraphId, side: usize, patches: usize) -> Result<Self> {
        let square = side.checked_mul(side).filter(|count| (1..1 << 20).contains(count));
        let square = square.ok_or_else(|| {
            Error::manifest(format!(
                "manifest params.{VISION}.position_side is {side}, expected patches of a side"
            ))
        })?;
        let (rows, hidden) = host.rows_of(graph, host.input(graph, "positions")?)?;
        let mask = FloatInput::require(host, graph, "cmask")?;
        if rows != patches || mask.len() != patches {
            return Err(Error::graph(format!(
                "graph {:?}: {rows} rows of positions and {} values of cmask, expected one for each of {patches} patches",
                host.graph(graph).name,
                mask.len()
            )));
        }
        let place = "/artifacts/positions/vision";
        let positions = Embedding::open_at(host, place, hidden, Some(square))?;
        let mut table = vec![0.0; square * hidden];
        for (row, to) in (0..).zip(table.chunks_exact_mut(hidden)) {
            positions.read(host, row, 0, to)?;
        }
        let positions = FloatInput::require(host, graph, "positions")?;
        Ok(Self { table, side, positions, mask })
    }
}

impl SquareEncoder {
    /// The parameter `vision` of `plan.params`, for [`qhx_op::OpDescription::params_schema`].
    pub fn schema() -> serde_json::Value {
        crate::schema::graphs(
            "Graph that makes rows of the patches of one square image. Without it the bundle takes text only.",
        )
    }

    /// Opens what a bundle has for images; none where it has no vision graph. `width` are the values of a row of the
    /// decoder.
    ///
    /// # Errors
    /// When graph and parameters do not fit each other.
    pub fn open(host: &mut Host, width: usize) -> Result<Option<Self>> {
        let pointer = format!("/plan/params/{VISION}");
        let Some(names) = host.value::<OneOrMany>(&pointer)? else { return Ok(None) };
        let graph = match names.present(host, &pointer)?.as_slice() {
            [] => return Ok(None),
            [graph] => *graph,
            several => {
                return Err(Error::manifest(format!(
                    "manifest {pointer}: {} graphs, expected one, which takes every image",
                    several.len()
                )));
            }
        };
        let params: Params = host.require(&format!("/params/{VISION}"))?;
        let Params { image_size: side, patch_size: patch, merge_size: block, .. } = params;
        if !(1..=MAX_SIDE).contains(&side) {
            return Err(Error::manifest(format!(
                "manifest params.{VISION}.image_size is {side}, expected 1 to {MAX_SIDE}"
            )));
        }
        let size = Size { width: side, height: side };
        let layout = match params.channels_last {
            true => PatchLayout::ChannelsLast,
            false => PatchLayout::ChannelsFirst,
        };
        let patchify = Patchify::new(patch as usize, block as usize, layout)?;
        let grid = patchify.grid(size)?;
        let input = host.input(graph, "pixels")?;
        let output = host.output(graph, "embeds")?;
        let (rows, values) = host.rows_of(graph, input)?;
        // Where images keep their shape, one of another may have more patches than a tile.
        let most = if params.position_side.is_some() { rows } else { grid.patches() };
        let expected = (grid.patches().max(most), patchify.patch_len(1));
        let (tokens, found) = host.rows_of(graph, output)?;
        let block = patchify.block() * patchify.block();
        if (rows, values) != expected || found != width || tokens * block != rows {
            return Err(Error::graph(format!(
                "graph {:?}: tensors {} and {}: expected {} patches of {} values, as params.{VISION} has it, and rows of their \
                 blocks as wide as the decoder's, {width}",
                host.graph(graph).name,
                host.tensor(graph, input),
                host.tensor(graph, output),
                expected.0,
                expected.1
            )));
        }
        let shaped = params.position_side;
        let shaped = shaped.map(|side| Shaped::open(host, graph, side, expected.0)).transpose()?;
        Ok(Some(Self {
            graph,
            pixels: FloatInput::require(host, graph, "pixels")?,
            embeds: host.view_for(graph, output)?,
            width,
            size,
            filter: params.resample,
            patchify,
            normalisation: Normalisation::mean_std(
                params.image_mean,
                params.image_std,
                1.0 / 255.0,
            )?,
            resizer: Resizer::new(params.resample),
            patches: vec![0.0; expected.0 * expected.1],
            shaped,
            span: host.span(VISION),
        }))
    }

    /// The size that the graph takes, that of a tile.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Pixels of a side of what becomes one token.
    pub fn unit(&self) -> u32 {
        self.patchify.block_side()
    }

    /// Filter that resizes images.
    pub fn filter(&self) -> Filter {
        self.filter
    }

    /// Tokens that the graph makes: those of an image of [`SquareEncoder::size`], unless images keep their shape.
    pub fn tokens(&self) -> usize {
        self.embeds.len / self.width
    }

    /// Tokens of an image of `size`: those of the square that it is stretched to, or its own where images keep their
    /// shape.
    ///
    /// # Errors
    /// When an image that keeps its shape has more patches than the graph takes, or no whole ones.
    pub fn tokens_of(&self, size: Size) -> Result<usize> {
        if self.shaped.is_none() {
            return Ok(self.tokens());
        }
        let patches = self.patchify.grid(size)?.patches();
        let most = self.patches.len() / self.patchify.patch_len(1);
        if patches > most {
            return Err(Error::prompt(format!(
                "an image that becomes one of {size} pixels has {patches} patches, expected at most {most}; cut it into \
                 pieces"
            )));
        }
        Ok(patches * self.tokens() / most)
    }

    /// Rows of an image for the decoder, `[tokens, width]`. An image of another size is stretched to
    /// [`SquareEncoder::size`] where images do not keep their shape. Dumps `pixel_values` and `embeds`.
    ///
    /// # Errors
    /// When the image cannot be resized, or the graph fails.
    pub fn encode(&mut self, host: &mut Host, image: Image<'_>) -> Result<Vec<f32>> {
        let start = Instant::now();
        let size = if self.shaped.is_some() { image.size() } else { self.size };
        let tokens = self.tokens_of(size)?;
        let shown = self.resizer.resize(image, size)?;
        let (grid, values) = (self.patchify.grid(size)?, self.patchify.patch_len(1));
        let (own, behind) = self.patches.split_at_mut(grid.patches() * values);
        self.patchify.write(&[shown], &self.normalisation, own)?;
        behind.fill(0.0);
        host.dump_values("pixel_values", own, &[grid.patches(), values])?;
        self.pixels.write(host, &self.patches)?;
        if let Some(Shaped { table, side, positions, mask }) = &self.shaped {
            let width = table.len() / (side * side);
            let mut rows = vec![0.0; positions.len()];
            let own = &mut rows[..grid.patches() * width];
            resample_antialiased(table, *side, width, grid, self.patchify.block(), own)?;
            positions.write(host, &rows)?;
            let mut hides = vec![MASK_VALUE; mask.len()];
            hides[..grid.patches()].fill(0.0);
            mask.write(host, &hides)?;
        }
        host.execute(self.graph)?;
        let mut embeds = vec![0.0; tokens * self.width];
        self.embeds.to_f32(host, 0, &mut embeds)?;
        host.end(self.span, start);
        host.dump_values("embeds", &embeds, &[tokens, self.width])?;
        Ok(embeds)
    }
}
