//! A vision graph that takes one square image and embeds its patches itself.

use std::time::Instant;

use serde::Deserialize;

use super::{Filter, Image, Normalisation, PatchLayout, Patchify, Resizer, Size};
use crate::OneOrMany;
use crate::fill::FloatInput;
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
}

fn one() -> u32 {
    1
}

/// A vision tower whose graph takes the patches of one square image, as the forge's `Siglip` makes one.
///
/// | in the manifest | |
/// |---|---|
/// | `plan.params.vision` | the graph |
/// | `params.vision` | `image_size`, `patch_size`, `merge_size`, `resample`, `image_mean`, `image_std` |
///
/// The graph takes `pixels` `[patches, 3 · patch_size²]`, normalised, in blocks of `merge_size` by `merge_size`
/// patches, and gives `embeds` `[tokens, width]`.
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
    span: SpanId,
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
        let patchify = Patchify::new(patch as usize, block as usize, PatchLayout::ChannelsFirst)?;
        let grid = patchify.grid(size)?;
        let input = host.input(graph, "pixels")?;
        let output = host.output(graph, "embeds")?;
        let expected = (grid.patches(), patchify.patch_len(1));
        let (_, found) = host.rows_of(graph, output)?;
        if host.rows_of(graph, input)? != expected || found != width {
            return Err(Error::graph(format!(
                "graph {:?}: tensors {} and {}: expected {} patches of {} values, as params.{VISION} has it, and rows as \
                 wide as the decoder's, {width}",
                host.graph(graph).name,
                host.tensor(graph, input),
                host.tensor(graph, output),
                expected.0,
                expected.1
            )));
        }
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
            span: host.span(VISION),
        }))
    }

    /// The size that the graph takes.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Filter that resizes images.
    pub fn filter(&self) -> Filter {
        self.filter
    }

    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        self.embeds.len / self.width
    }

    /// Rows of an image for the decoder, `[tokens, width]`. An image of another size is stretched to
    /// [`SquareEncoder::size`]. Dumps `pixel_values` and `embeds`.
    ///
    /// # Errors
    /// When the image cannot be resized, or the graph fails.
    pub fn encode(&mut self, host: &mut Host, image: Image<'_>) -> Result<Vec<f32>> {
        let start = Instant::now();
        let shown = self.resizer.resize(image, self.size)?;
        let grid = self.patchify.write(&[shown], &self.normalisation, &mut self.patches)?;
        let values = self.patches.len() / grid.patches();
        host.dump_values("pixel_values", &self.patches, &[grid.patches(), values])?;
        self.pixels.write(host, &self.patches)?;
        host.execute(self.graph)?;
        let mut embeds = vec![0.0; self.embeds.len];
        self.embeds.to_f32(host, 0, &mut embeds)?;
        host.end(self.span, start);
        host.dump_values("embeds", &embeds, &[self.tokens(), self.width])?;
        Ok(embeds)
    }
}
