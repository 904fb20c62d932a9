//! The graph of a vision tower that embeds the patches of one square image, as `qhx_kit::vision::SquareEncoder` runs
//! it.

use std::sync::Arc;

use qhx_base::{Error, Result};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, ReduceOp, TensorId};
use qhx_kit::vision::Grid;
use serde_json::{Map, Value, json};

use super::contexts::object;
use super::processor::Processor;
use super::reader::Reader;
use crate::recipe::{ContextPlan, Precision, Recipe, from_kit};

/// The graph, its context and the set of contexts that texts alone do without; what the manifest declares about images.
const VISION: &str = "vision";
/// Pixels of a side, at most.
const MAX_SIDE: usize = 1 << 14;

/// One square image: its patches, and what they become.
#[derive(Debug, Clone, Copy)]
pub struct Square {
    /// Pixels of the side of an image, and of a patch.
    image: usize,
    patch: usize,
    /// Patches of a side that become one token: as many stand together, one block behind the other.
    block: usize,
    /// Patches that the graph takes.
    patches: usize,
}

impl Square {
    /// An image of `image` by `image` pixels in patches of `patch` by `patch`; `reader` is that of the tower.
    ///
    /// # Errors
    /// When they do not divide each other.
    pub fn new(reader: &Reader<'_>, image: usize, patch: usize) -> Result<Self> {
        if patch == 0 || !image.is_multiple_of(patch) || image > MAX_SIDE {
            return Err(reader.fault(format!(
                "image_size and patch_size are {image} and {patch}, expected a multiple and its divisor, and at most \
                 {MAX_SIDE} pixels"
            )));
        }
        Ok(Self { image, patch, block: 1, patches: (image / patch).pow(2) })
    }

    /// The same where `block` by `block` patches become one token, and stand together in the graph's rows.
    ///
    /// # Errors
    /// When they do not cover an image.
    pub fn in_blocks(self, block: usize) -> Result<Self> {
        self.grid().blocks(block).map_err(from_kit)?;
        Ok(Self { block, ..self })
    }

    /// Patches of an image.
    pub fn grid(&self) -> Grid {
        let side = self.image / self.patch;
        Grid { rows: side, columns: side }
    }

    /// Pixels of an image's side.
    pub fn image_size(&self) -> usize {
        self.image
    }

    /// The same for images that keep their shape, of which one may have up to `patches` patches.
    ///
    /// # Errors
    /// When these are fewer than those of the square, or no whole blocks.
    pub fn for_patches(self, reader: &Reader<'_>, patches: usize) -> Result<Self> {
        if patches < self.patches || !patches.is_multiple_of(self.block * self.block) {
            return Err(reader.fault(format!(
                "images of up to {patches} patches, expected at least the {} of a tile, and a multiple of {} squared",
                self.patches, self.block
            )));
        }
        Ok(Self { patches, ..self })
    }

    /// Patches that the graph takes.
    pub fn patches(&self) -> usize {
        self.patches
    }

    /// Tokens that the graph makes: those of an image.
    pub fn tokens(&self) -> usize {
        self.patches / (self.block * self.block)
    }

    /// Pixels of a patch's side.
    pub fn patch_size(&self) -> usize {
        self.patch
    }

    /// Values of a patch.
    pub fn patch_len(&self) -> usize {
        3 * self.patch * self.patch
    }

    /// Where each row of the graph lies in the image, whose patches are counted row by row.
    ///
    /// # Errors
    /// When blocks do not cover an image.
    pub fn order(&self) -> Result<Arc<[u32]>> {
        let grid = self.grid();
        let order = grid.order(self.block).map_err(from_kit)?;
        Ok(order.map(|(row, column)| (row * grid.columns + column) as u32).collect())
    }

    /// The rows of each block as one row, `[tokens, block² · width]`: the pixel shuffle of Idefics 3 and InternVL.
    ///
    /// # Errors
    /// When `rows` are not those of patches.
    pub fn joined(&self, b: &mut GraphBuilder, rows: TensorId) -> Result<TensorId> {
        let width = b.width(rows)?;
        b.reshape(rows, &[self.tokens(), self.block * self.block * width])
    }

    /// The mean of the rows of each block, `[tokens, width]`: average pooling.
    ///
    /// # Errors
    /// When `rows` are not those of patches.
    pub fn pooled(&self, b: &mut GraphBuilder, rows: TensorId) -> Result<TensorId> {
        let (tokens, width) = (self.tokens(), b.width(rows)?);
        let blocks = b.reshape(rows, &[tokens, self.block * self.block, width])?;
        let means = b.reduce(ReduceOp::Mean, blocks, 1)?;
        b.reshape(means, &[tokens, width])
    }

    /// Puts the graph `vision` before the contexts of a recipe, and `params.vision`: what the host needs to know to cut
    /// an image into patches. `make` makes rows as wide as the decoder's of the patches, the blocks one behind the
    /// other and the patches of each row by row.
    ///
    /// | tensor | shape | |
    /// |---|---|---|
    /// | `pixels` | `[patches, 3 · patch²]` | normalised; channel, row, column |
    /// | → `embeds` | `[tokens, decoder's hidden]` | rows in place of the embedding table's |
    ///
    /// # Errors
    /// When the processor does what the host does not, and those of `make`.
    pub fn add(
        &self,
        recipe: &mut Recipe,
        processor: &Processor,
        precision: Precision,
        make: impl FnOnce(&mut GraphBuilder, TensorId) -> Result<TensorId>,
    ) -> Result<()> {
        let mut b = GraphBuilder::new(VISION);
        let shape = [self.patches, self.patch_len()];
        let pixels = b.input("pixels", Elem::Activation, &shape)?;
        let embeds = make(&mut b, pixels)?;
        b.output("embeds", embeds)?;
        let context = ContextPlan::new(VISION.to_owned(), precision, vec![b.finish()?]);
        recipe.contexts.insert(0, ContextPlan { optional: Some(VISION.to_owned()), ..context });
        recipe.plan_params.insert(VISION.to_owned(), json!(VISION));
        recipe.params.insert(VISION.to_owned(), Value::Object(self.params(processor)?));
        Ok(())
    }

    /// `params.vision` of the manifest.
    fn params(&self, processor: &Processor) -> Result<Map<String, Value>> {
        processor.usual_steps()?;
        let [mean, std] = processor.mean_std()?;
        let mut params = object(json!({
            "image_size": self.image,
            "patch_size": self.patch,
            "merge_size": self.block,
            "image_mean": mean,
            "image_std": std,
        }));
        params.extend(processor.resample()?.map(|name| ("resample".to_owned(), json!(name))));
        Ok(params)
    }
}

/// Names of a tensor of a checkpoint that sees: of its decoder as `transformers` 5 and 4 save them, and beside it head
/// and tower; in the tower of older checkpoints is one module more.
pub fn tower_names(name: &str) -> Vec<String> {
    let inner =
        name.strip_prefix("vision_tower.").map(|rest| format!("vision_tower.vision_model.{rest}"));
    let prefixes =
        ["model.", "model.language_model.", "language_model.model.", "language_model.", ""];
    let every = |name: &str| prefixes.map(|prefix| format!("{prefix}{name}"));
    every(name).into_iter().chain(inner.iter().flat_map(|name| every(name))).collect()
}

/// A number of pixels or tiles of a processor's file, or the default of its class.
///
/// # Errors
/// When it is no number from 1 to 16384.
pub fn processor_size(processor: &Processor, pointer: &str, default: usize) -> Result<usize> {
    let Some(value) = processor.get(pointer) else { return Ok(default) };
    let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
    let expected =
        || -> Error { processor.bad(pointer, &format!("a number from 1 to {MAX_SIDE}")) };
    size.filter(|size| (1..=MAX_SIDE).contains(size)).ok_or_else(expected)
}
