//! The towers of SigLIP (Zhai et al. 2023, arXiv 2303.15343): blocks over rows with learned positions, and with them
//! the vision tower over one square image, with its patch embedding in the graph.

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, TensorId, UnaryOp};
use qhx_graph::weight::{read, row_order};
use qhx_kit::vision::Grid;
use serde_json::{Value, json};

use super::attention::{Attend, Attention, Heads};
use super::layers::{Layers, filters};
use super::processor::Processor;
use super::reader::Reader;
use super::square::Square;
use crate::recipe::{Precision, Recipe, RecipeOptions};
use crate::registry::RecipeOption;

/// The option that says how the weights of a vision tower are stored, for [`Siglip::read`].
pub const VISION_WEIGHTS: RecipeOption = RecipeOption {
    name: "vision",
    values: &["fp16", "w8a16"],
    help: "precision of the vision tower's weights",
};

/// The option that says how the weights of an encoder of audio are stored, for [`encoder_precision`].
pub const ENCODER_WEIGHTS: RecipeOption = RecipeOption {
    name: "encoder",
    values: &["fp16", "w8a16"],
    help: "precision of the encoder's weights; fp16 by default where the bundle is for an NPU, which takes more than \
           twice as long with int8, and as --precision says where it is for the CPU alone",
};

/// The precision of an encoder of audio, and a note where it is not that of the bundle.
pub fn encoder_precision(options: &RecipeOptions) -> (Precision, Option<String>) {
    let chosen = ENCODER_WEIGHTS.chosen_precision(options);
    let default = if options.cpu_only { options.precision } else { Precision::Fp16 };
    let precision = chosen.unwrap_or(default);
    let note = (chosen.is_none() && precision != options.precision).then(|| {
        "the encoder's weights stay f16: an NPU takes more than twice as long with int8; --recipe-option encoder=w8a16 \
         halves them"
            .to_owned()
    });
    (precision, note)
}

/// More values than any table of positions has.
const MAX_POSITIONS: usize = 1 << 26;
/// The part of a configuration that is the vision tower's.
const VISION_CONFIG: &str = "vision_config";

/// Defaults of a configuration class for the keys that `vision_config` leaves out.
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

/// The blocks of a tower (`SiglipEncoder` of `transformers`), of images or of texts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks<'a> {
    /// Projections and norms, in the tower's precision and with its epsilon.
    pub layers: Layers<'a>,
    /// Prefix of the names of the tower's tensors.
    place: &'a str,
    /// Elements of a row.
    pub hidden: usize,
    intermediate: usize,
    pub count: usize,
    pub heads: Heads,
    activation: Activation,
}

/// Activation between the projections of a block's MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activation {
    Gelu,
    GeluTanh,
    /// `x · σ(1.702 x)`
    QuickGelu,
}

impl Activation {
    const NAMES: [(&'static str, Self); 3] = [
        ("gelu_pytorch_tanh", Self::GeluTanh),
        ("quick_gelu", Self::QuickGelu),
        ("gelu", Self::Gelu),
    ];

    fn build(self, b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
        match self {
            Self::Gelu => b.gelu(x),
            Self::GeluTanh => b.gelu_tanh(x),
            Self::QuickGelu => {
                let scaled = b.scale(x, 1.702)?;
                let gate = b.unary(UnaryOp::Sigmoid, scaled)?;
                b.mul(x, gate)
            }
        }
    }
}

impl<'a> Blocks<'a> {
    /// Reads `part` of the configuration and checks it.
    pub fn read(
        checkpoint: &'a Checkpoint,
        part: &'a str,
        place: &'a str,
        defaults: &SiglipSizes,
        precision: Precision,
    ) -> Result<Self> {
        Reader::part(checkpoint, part)?.only("hidden_act", &json!("gelu_pytorch_tanh"))?;
        Self::read_clip(checkpoint, part, place, defaults, precision, (1e-6, "gelu_pytorch_tanh"))
    }

    /// The same of CLIP, whose towers have other activations; the defaults of epsilon and activation are its own.
    pub fn read_clip(
        checkpoint: &'a Checkpoint,
        part: &'a str,
        place: &'a str,
        defaults: &SiglipSizes,
        precision: Precision,
        (eps, activation): (f32, &str),
    ) -> Result<Self> {
        let reader = Reader::part(checkpoint, part)?;
        let named = reader.get("hidden_act");
        let name = named.map_or(Some(activation), Value::as_str).unwrap_or_default();
        let found = Activation::NAMES.iter().find(|(known, _)| *known == name);
        let Some((_, activation)) = found.copied() else {
            let names = Activation::NAMES.map(|(name, _)| name).join(", ");
            return Err(reader.bad("hidden_act", named.unwrap_or(&Value::Null), &names));
        };
        let hidden = reader.size_or("hidden_size", defaults.hidden)?;
        let query = reader.size_or("num_attention_heads", defaults.heads)?;
        if !hidden.is_multiple_of(query) {
            return Err(reader.fault(format!(
                "hidden_size is {hidden}, expected a multiple of num_attention_heads, {query}"
            )));
        }
        let eps = reader.epsilon(&["layer_norm_eps"], eps)?;
        Ok(Self {
            layers: Layers::new(checkpoint, precision, eps),
            place,
            hidden,
            intermediate: reader.size_or("intermediate_size", defaults.intermediate)?,
            count: reader.layers_or(defaults.layers)?,
            heads: Heads { query, groups: query, dim: hidden / query },
            activation,
        })
    }

    /// The name of a tensor.
    pub fn tensor(&self, part: &str) -> String {
        format!("{}.{part}", self.place)
    }

    /// Rows with learned positions added: those of `order`, one for each row.
    pub fn positioned(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        order: Arc<[u32]>,
    ) -> Result<TensorId> {
        let shape = [order.len(), self.hidden];
        let name = self.tensor("embeddings.position_embedding.weight");
        let table = self.layers.checkpoint.matrix(&name, shape)?;
        let Some(len) = order.len().checked_mul(self.hidden).filter(|len| *len <= MAX_POSITIONS)
        else {
            let what = format!(
                "tensor {name}: hidden_size, image_size and patch_size make it {shape:?}, expected at most \
                 {MAX_POSITIONS} values"
            );
            return Err(Error::new(ErrorKind::Artifact, what));
        };
        let mut values = vec![0f32; len];
        read(&*row_order(table, order), 0, &mut values)?;
        let positions = b.constant("positions", Elem::Activation, &shape, values)?;
        b.add(x, positions)
    }

    /// Rows `[rows, hidden]` through all blocks.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        mut h: TensorId,
        attend: &Attend,
    ) -> Result<TensorId> {
        let layers = &self.layers;
        for index in 0..self.count {
            let part = |part: &str| self.tensor(&format!("encoder.layers.{index}.{part}"));
            b.scope(format!("l{index}_attn"));
            let attention = Attention {
                bias: [true; 3],
                out: "out_proj",
                out_bias: true,
                turned: false,
                cached: false,
                ..Attention::new(part("self_attn"), index, self.heads)
            };
            let normed = layers.layer_norm(b, h, &part("layer_norm1"))?;
            let mixed = layers.attention(b, normed, &attention, attend)?;
            h = b.add(h, mixed)?;
            b.scope(format!("l{index}_mlp"));
            let normed = layers.layer_norm(b, h, &part("layer_norm2"))?;
            let out = self.mlp(b, normed, &part("mlp"))?;
            h = b.add(h, out)?;
        }
        Ok(h)
    }

    /// `SiglipMLP` at `name`.
    pub fn mlp(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let parts = ["fc1", "fc2"].map(|part| format!("{name}.{part}"));
        let parts = parts.each_ref().map(String::as_str);
        self.layers.feed_forward(b, x, parts, self.intermediate, |b, x| self.activation.build(b, x))
    }
}

/// The tower (`SiglipVisionModel` of `transformers` without its head, and `Idefics3VisionTransformer` on images of
/// `image_size`, which is the same) of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Siglip<'a> {
    blocks: Blocks<'a>,
    square: Square,
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
        let blocks = Blocks::read(checkpoint, VISION_CONFIG, place, &defaults, precision)?;
        let reader = Reader::part(checkpoint, VISION_CONFIG)?;
        reader.only("num_channels", &json!(3))?;
        let image = reader.size_or("image_size", defaults.image)?;
        let patch = reader.size_or("patch_size", defaults.patch)?;
        Ok(Self { blocks, square: Square::new(&reader, image, patch)? })
    }

    /// The same where `block` by `block` patches become one token, and stand together in the graph's rows.
    ///
    /// # Errors
    /// When they do not cover an image.
    pub fn in_blocks(self, block: usize) -> Result<Self> {
        Ok(Self { square: self.square.in_blocks(block)?, ..self })
    }

    /// Patches of an image.
    pub fn grid(&self) -> Grid {
        self.square.grid()
    }

    /// Pixels of an image's side.
    pub fn image_size(&self) -> usize {
        self.square.image_size()
    }

    /// Elements of a row.
    pub fn hidden(&self) -> usize {
        self.blocks.hidden
    }

    /// Projections and norms of what stands behind the tower, in its precision and with its epsilon.
    pub fn layers(&self) -> Layers<'a> {
        self.blocks.layers
    }

    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        self.square.tokens()
    }

    /// [`Square::joined`] of the tower's rows.
    ///
    /// # Errors
    /// When `rows` are not the tower's.
    pub fn joined(&self, b: &mut GraphBuilder, rows: TensorId) -> Result<TensorId> {
        self.square.joined(b, rows)
    }

    /// [`Square::pooled`] of the tower's rows.
    ///
    /// # Errors
    /// When `rows` are not the tower's.
    pub fn pooled(&self, b: &mut GraphBuilder, rows: TensorId) -> Result<TensorId> {
        self.square.pooled(b, rows)
    }

    /// [`Square::add`] with the tower's graph. `connect` makes rows as wide as the decoder's of the tower's rows
    /// `[patches, hidden]`.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape, the processor does what the host does not, and those of
    /// `connect`.
    pub fn add(
        &self,
        recipe: &mut Recipe,
        processor: &Processor,
        connect: impl FnOnce(&mut GraphBuilder, TensorId) -> Result<TensorId>,
    ) -> Result<()> {
        self.square.add(recipe, processor, self.layers().precision, |b, pixels| {
            let rows = self.rows(b, pixels)?;
            b.scope("connector");
            connect(b, rows)
        })
    }

    /// Patches `pixels` to the tower's rows.
    fn rows(&self, b: &mut GraphBuilder, pixels: TensorId) -> Result<TensorId> {
        let Self { blocks, square } = *self;
        let checkpoint = blocks.layers.checkpoint;
        b.scope("embeddings");
        let name = blocks.tensor("embeddings.patch_embedding");
        let side = square.patch_size();
        let (weight, bias) = filters(checkpoint, &name, &[blocks.hidden, 3, side, side])?;
        let embedded = b.linear("patches", pixels, weight, Some(bias))?;
        let h = blocks.positioned(b, embedded, square.order()?)?;
        let h = blocks.build(b, h, &Attend::whole(square.grid().patches()))?;
        b.scope("post");
        blocks.layers.layer_norm(b, h, &blocks.tensor("post_layernorm"))
    }
}
