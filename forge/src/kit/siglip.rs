//! The vision tower of SigLIP (Zhai et al. 2023, arXiv 2303.15343) over one square image, with patch embedding and
//! learned positions in the graph.

use qhx_core::Result;
use qhx_op::vision::Grid;
use serde_json::{Map, Value, json};

use super::attention::{Attend, Attention, Heads};
use super::contexts::object;
use super::layers::Layers;
use super::processor::Processor;
use super::reader::Reader;
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{Elem, ReduceOp, TensorId};
use crate::recipe::{ContextPlan, Precision, Recipe, from_kit};
use crate::registry::RecipeOption;
use crate::weight::{Storage, Weight, read, row_order};

/// The option that says how the weights of a vision tower are stored, for [`Siglip::read`].
pub const VISION_WEIGHTS: RecipeOption = RecipeOption {
    name: "vision",
    values: &["fp16", "w8a16"],
    help: "precision of the vision tower's weights",
};

/// The graph, its context and the set of contexts that texts alone do without; what the manifest declares about images.
const VISION: &str = "vision";

/// What a configuration class has where `vision_config` leaves a key out.
#[derive(Debug, Clone, Copy)]
pub struct SiglipSizes {
    /// `hidden_size`
    pub hidden: usize,
    /// `intermediate_size`
    pub intermediate: usize,
    /// `num_hidden_layers`
    pub layers: usize,
    /// `num_attention_heads`
    pub heads: usize,
    /// `image_size`
    pub image: usize,
    /// `patch_size`
    pub patch: usize,
}

/// The tower (`SiglipVisionModel` of `transformers` without its head, and `Idefics3VisionTransformer` on images of
/// `image_size`, which is the same) of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Siglip<'a> {
    layers: Layers<'a>,
    place: &'a str,
    sizes: SiglipSizes,
    /// Patches of a side that become one token: as many stand together, one block behind the other.
    block: usize,
}

impl<'a> Siglip<'a> {
    /// Reads `vision_config` and checks it. `place` is where the tower's tensors are, such as `vision_tower`.
    ///
    /// # Errors
    /// When a key is malformed, or sizes do not divide each other.
    pub fn read(
        checkpoint: &'a Checkpoint,
        place: &'a str,
        defaults: SiglipSizes,
        precision: Precision,
    ) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("gelu_pytorch_tanh"))?;
        reader.only("num_channels", &json!(3))?;
        let size = |key: &str, default| reader.size_or(key, default);
        let sizes = SiglipSizes {
            hidden: size("hidden_size", defaults.hidden)?,
            intermediate: size("intermediate_size", defaults.intermediate)?,
            layers: size("num_hidden_layers", defaults.layers)?,
            heads: size("num_attention_heads", defaults.heads)?,
            image: size("image_size", defaults.image)?,
            patch: size("patch_size", defaults.patch)?,
        };
        let SiglipSizes { hidden, heads, image, patch, layers, .. } = sizes;
        if !hidden.is_multiple_of(heads) || layers > 4096 {
            return Err(reader.fault(format!(
                "hidden_size, num_attention_heads and num_hidden_layers are {hidden}, {heads} and {layers}, expected a \
                 multiple and its divisor, and at most 4096 layers"
            )));
        }
        if !image.is_multiple_of(patch) || image > 1 << 14 {
            return Err(reader.fault(format!(
                "image_size and patch_size are {image} and {patch}, expected a multiple and its divisor, and at most \
                 16384 pixels"
            )));
        }
        let eps = reader.epsilon(&["layer_norm_eps"], 1e-6)?;
        Ok(Self { layers: Layers::new(checkpoint, precision, eps), place, sizes, block: 1 })
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
        let side = self.sizes.image / self.sizes.patch;
        Grid { rows: side, columns: side }
    }

    /// Pixels of an image's side.
    pub fn image_size(&self) -> usize {
        self.sizes.image
    }

    /// Elements of a row.
    pub fn hidden(&self) -> usize {
        self.sizes.hidden
    }

    /// Projections and norms of what stands behind the tower, in its precision and with its epsilon.
    pub fn layers(&self) -> Layers<'a> {
        self.layers
    }

    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        self.grid().patches() / (self.block * self.block)
    }

    /// The rows of each block as one row, `[tokens, block² · hidden]`: the pixel shuffle of Idefics 3.
    ///
    /// # Errors
    /// When `rows` are not the tower's.
    pub fn joined(&self, b: &mut GraphBuilder, rows: TensorId) -> Result<TensorId> {
        b.reshape(rows, &[self.tokens(), self.block * self.block * self.hidden()])
    }

    /// The mean of the rows of each block, `[tokens, hidden]`: average pooling.
    ///
    /// # Errors
    /// When `rows` are not the tower's.
    pub fn pooled(&self, b: &mut GraphBuilder, rows: TensorId) -> Result<TensorId> {
        let (tokens, hidden) = (self.tokens(), self.hidden());
        let blocks = b.reshape(rows, &[tokens, self.block * self.block, hidden])?;
        let means = b.reduce(ReduceOp::Mean, blocks, 1)?;
        b.reshape(means, &[tokens, hidden])
    }

    /// Puts the graph `vision` before the contexts of a recipe, and `params.vision`: what the host needs to know to cut
    /// an image into patches. `connect` makes rows as wide as the decoder's of the tower's rows `[patches, hidden]`, the
    /// blocks one behind the other and the patches of each row by row.
    ///
    /// | tensor | shape | |
    /// |---|---|---|
    /// | `pixels` | `[patches, 3 · patch²]` | normalised; channel, row, column |
    /// | → `embeds` | `[tokens, decoder's hidden]` | rows in place of the embedding table's |
    ///
    /// `qhx_op::vision::SquareEncoder` runs it.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape, the processor does what the host does not, and those of `connect`.
    pub fn add(
        &self,
        recipe: &mut Recipe,
        processor: &Processor,
        connect: impl FnOnce(&mut GraphBuilder, TensorId) -> Result<TensorId>,
    ) -> Result<()> {
        let mut b = GraphBuilder::new(VISION);
        let rows = self.rows(&mut b)?;
        b.scope("connector");
        let embeds = connect(&mut b, rows)?;
        b.output("embeds", embeds)?;
        let context = ContextPlan::new(VISION.to_owned(), self.layers.precision, vec![b.finish()?]);
        recipe.contexts.insert(0, ContextPlan { optional: Some(VISION.to_owned()), ..context });
        recipe.plan_params.insert(VISION.to_owned(), json!(VISION));
        recipe.params.insert(VISION.to_owned(), Value::Object(self.params(processor)?));
        Ok(())
    }

    /// `params.vision` of the manifest.
    fn params(&self, processor: &Processor) -> Result<Map<String, Value>> {
        for key in ["/do_resize", "/do_rescale", "/do_normalize"] {
            processor.only(key, &json!(true))?;
        }
        let resample = match processor.get("/resample").map(Value::as_u64) {
            None => None,
            Some(Some(1)) => Some("lanczos"),
            Some(Some(2)) => Some("bilinear"),
            Some(Some(3)) => Some("bicubic"),
            Some(_) => {
                return Err(processor.bad("/resample", "1 (Lanczos), 2 (bilinear) or 3 (bicubic)"));
            }
        };
        let scale = processor.get("/rescale_factor");
        if scale.is_some_and(|scale| scale.as_f64().is_none_or(|s| (s * 255.0 - 1.0).abs() > 1e-6))
        {
            return Err(processor.bad("/rescale_factor", "1/255"));
        }
        let half = |key| Ok(processor.triple(key)?.unwrap_or([0.5; 3]));
        let (mean, std): ([f64; 3], [f64; 3]) = (half("/image_mean")?, half("/image_std")?);
        if std.contains(&0.0) {
            return Err(processor.bad("/image_std", "no zeros"));
        }
        let mut params = object(json!({
            "image_size": self.sizes.image,
            "patch_size": self.sizes.patch,
            "merge_size": self.block,
            "image_mean": mean,
            "image_std": std,
        }));
        params.extend(resample.map(|name| ("resample".to_owned(), json!(name))));
        Ok(params)
    }

    /// Patches `pixels` to the tower's rows.
    fn rows(&self, b: &mut GraphBuilder) -> Result<TensorId> {
        let SiglipSizes { hidden, intermediate, layers: depth, heads, patch, .. } = self.sizes;
        let (layers, checkpoint) = (self.layers, self.layers.checkpoint);
        let patches = self.grid().patches();
        let tensor = |part: &str| format!("{}.{part}", self.place);
        let pixels = b.input("pixels", Elem::Activation, &[patches, 3 * patch * patch])?;
        b.scope("embeddings");
        let name = tensor("embeddings.patch_embedding");
        let weight = checkpoint.rows(&format!("{name}.weight"), &[hidden, 3, patch, patch])?;
        let bias = checkpoint.values(&format!("{name}.bias"), &[hidden])?;
        let embedded =
            b.linear("patches", pixels, Weight::new(weight, Storage::Float), Some(bias))?;
        let positions = b.constant(
            "positions",
            Elem::Activation,
            &[patches, hidden],
            self.positions(&tensor("embeddings.position_embedding.weight"))?,
        )?;
        let mut h = b.add(embedded, positions)?;
        let heads = Heads { query: heads, groups: heads, dim: hidden / heads };
        for index in 0..depth {
            let part = |part: &str| tensor(&format!("encoder.layers.{index}.{part}"));
            b.scope(format!("v{index}_attn"));
            let attention = Attention {
                bias: [true; 3],
                out: "out_proj",
                out_bias: true,
                turned: false,
                cached: false,
                ..Attention::new(part("self_attn"), index, heads)
            };
            let normed = layers.layer_norm(b, h, &part("layer_norm1"))?;
            let mixed = layers.attention(b, normed, &attention, &Attend::whole(patches))?;
            h = b.add(h, mixed)?;
            b.scope(format!("v{index}_mlp"));
            let normed = layers.layer_norm(b, h, &part("layer_norm2"))?;
            let names = [&*part("mlp.fc1"), &part("mlp.fc2")];
            let out =
                layers.feed_forward(b, normed, names, intermediate, GraphBuilder::gelu_tanh)?;
            h = b.add(h, out)?;
        }
        b.scope("post");
        layers.layer_norm(b, h, &tensor("post_layernorm"))
    }

    /// The learned positions in the order of the patches.
    fn positions(&self, name: &str) -> Result<Vec<f32>> {
        let (grid, hidden) = (self.grid(), self.sizes.hidden);
        let table = self.layers.checkpoint.matrix(name, [grid.patches(), hidden])?;
        let order = grid.order(self.block).map_err(from_kit)?;
        let order = order.map(|(row, column)| (row * grid.columns + column) as u32).collect();
        let mut values = vec![0f32; grid.patches() * hidden];
        read(&*row_order(table, order), 0, &mut values)?;
        Ok(values)
    }
}
