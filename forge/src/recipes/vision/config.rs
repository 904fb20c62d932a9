//! The keys of `config.json` that shape a vision tower and place images in a prompt, checked.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use serde_json::{Value, json};

use super::form::{Act, EPS, Form, PADDLE, PIXTRAL, QWEN2, QWEN2_5, QWEN3};
use crate::kit::Reader;

/// The epsilon of the tower's norms as a key of the configuration has it.
const EPS64: f64 = 1e-6;
/// Base of the tower's rotary embedding where no key has it.
const VISION_THETA: f64 = 1e4;

/// The vision tower.
#[derive(Debug, Clone)]
pub(in crate::recipes) struct Vision {
    /// Names and arithmetic of its class.
    pub form: &'static Form,
    pub hidden: usize,
    pub intermediate: usize,
    pub depth: usize,
    pub heads: usize,
    /// Pixels of a patch's side.
    pub patch: usize,
    /// Frames of a patch.
    pub temporal: usize,
    /// Patches of a side of the square that becomes one token.
    pub merge: usize,
    /// Side of the square table of learned positions.
    pub side: usize,
    /// Blocks after which features for the decoder's first layers are taken, by the number of their merger.
    pub deepstack: Vec<usize>,
    pub rope_theta: f64,
    /// Width of a row for the decoder.
    pub out: usize,
    /// `image_token_id` and the other tokens around images and videos, with their keys; none where the manifest has
    /// them elsewhere.
    pub tokens: Vec<(&'static str, usize)>,
    /// Activation of gated feed-forwards.
    pub act: Act,
    /// Epsilon of the merger's norm.
    pub merger_eps: f32,
    /// The merger's projections have biases.
    pub merger_bias: bool,
    /// Windows of Qwen2.5-VL, within which most blocks attend.
    pub windows: Option<Windows>,
    /// Positions of patches of a video in time, where all of them follow each other; none where each is an image with
    /// its time before it.
    pub in_time: Option<InTime>,
}

/// Attention windows of Qwen2.5-VL's blocks.
#[derive(Debug, Clone)]
pub(in crate::recipes) struct Windows {
    /// Patches of a window's side.
    pub side: usize,
    /// Blocks that attend to the whole image.
    pub full: Vec<usize>,
}

/// Distance of the patches of a video in time.
#[derive(Debug, Clone, Copy)]
pub(in crate::recipes) enum InTime {
    /// Positions that a second takes (Qwen2.5-VL).
    PerSecond(f64),
    /// Positions that a patch takes, whatever the frames' times (Qwen2-VL).
    Step(f64),
}

/// Patches that a vision graph takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patches {
    /// A square with this number of patches a side; its rotary tables are constants.
    Square(usize),
    /// Any grid of at most this number of patches; rotary tables and a mask are inputs.
    UpTo(usize),
}

impl Patches {
    /// Rows of the graph.
    pub const fn count(self) -> usize {
        match self {
            Self::Square(side) => side * side,
            Self::UpTo(count) => count,
        }
    }
}

/// `mrope_section`, which adds up to `half` of what turns of a head; that of the configuration class, if it has one.
pub(in crate::recipes) fn section(
    reader: &Reader<'_>,
    half: usize,
    default: Option<[usize; 3]>,
) -> Result<[usize; 3]> {
    let key = format!("{}.mrope_section", reader.rope_key());
    let default = default.map(|section| json!(section));
    let Some(value) = reader.get(&key).or(default.as_ref()) else {
        return Err(reader.fault(format!("{key} is missing, expected three numbers")));
    };
    let numbers: Option<Vec<usize>> = value.as_array().and_then(|list| {
        list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    });
    let section = numbers.and_then(|numbers| <[usize; 3]>::try_from(numbers).ok());
    let fits =
        |s: &[usize; 3]| s.iter().try_fold(0usize, |sum, n| sum.checked_add(*n)) == Some(half);
    section.filter(fits).ok_or_else(|| {
        reader.bad(
            &key,
            value,
            &format!("three numbers that add up to {half}, half of what turns of a head"),
        )
    })
}

impl Vision {
    /// Reads and checks. `out` is the width of the decoder's rows, `layers` are those that take rows of the tower's
    /// blocks (deepstack), `vocab` bounds the tokens.
    pub fn read(checkpoint: &Checkpoint, [out, layers, vocab]: [usize; 3]) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("gelu_pytorch_tanh"))?;
        let positions = reader.size("num_position_embeddings")?;
        let side = positions.isqrt();
        if side * side != positions {
            return Err(
                reader.fault(format!("num_position_embeddings is {positions}, expected a square"))
            );
        }
        let tower = Self::common(checkpoint, &reader, out, vocab)?;
        let deepstack = deepstack(&reader, tower.depth, layers)?;
        Ok(Self { side, deepstack, ..tower })
    }

    /// The same of Qwen2.5-VL. Defaults are those of `Qwen2_5_VLVisionConfig`.
    pub fn windowed(checkpoint: &Checkpoint, [out, vocab]: [usize; 2]) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("silu"))?;
        let tower = Self::common(checkpoint, &reader, out, vocab)?;
        let pixels = reader.size_or("window_size", 112)?;
        // Windows of whole merged squares, as `get_vision_window_index` makes them.
        let side = pixels / tower.merge / tower.patch * tower.merge;
        if side == 0 {
            return Err(reader.fault(format!(
                "window_size is {pixels}, expected at least {}, the side of a token",
                tower.patch * tower.merge
            )));
        }
        let standard = json!([7, 15, 23, 31]);
        let key = "fullatt_block_indexes";
        let full = blocks(&reader, key, reader.get(key).unwrap_or(&standard), [tower.depth; 2])?;
        let per_second = reader.positive(&["tokens_per_second"])?.unwrap_or(4.0);
        Ok(Self {
            form: &QWEN2_5,
            windows: Some(Windows { side, full }),
            in_time: Some(InTime::PerSecond(per_second)),
            ..tower
        })
    }

    /// The same of Qwen2-VL, whose `hidden_size` is the decoder's. Defaults are those of `Qwen2VLVisionConfig`.
    pub fn of_qwen2(checkpoint: &Checkpoint, [out, vocab]: [usize; 2]) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("quick_gelu"))?;
        reader.only("hidden_size", &json!(out))?;
        let hidden = reader.size_or("embed_dim", 1280)?;
        let inner = hidden.saturating_mul(reader.size_or("mlp_ratio", 4)?);
        let tower = Self::of_width(checkpoint, &reader, [hidden, inner, out, vocab])?;
        Ok(Self { form: &QWEN2, in_time: Some(InTime::Step(1.0)), ..tower })
    }

    /// The same of PaddleOCR-VL, which takes no videos. Defaults are those of `PaddleOCRVisionConfig`.
    pub fn of_paddle(checkpoint: &Checkpoint, [out, vocab]: [usize; 2]) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("gelu_pytorch_tanh"))?;
        reader.only("num_channels", &json!(3))?;
        reader.only("layer_norm_eps", &json!(EPS64))?;
        let (hidden, heads) =
            (reader.size_or("hidden_size", 1152)?, reader.size_or("num_attention_heads", 16)?);
        let patch = reader.size_or("patch_size", 14)?;
        let image = reader.size_or("image_size", 384)?;
        let merge = reader.size_or("spatial_merge_size", 2)?;
        if patch > 256 || merge > 16 || image / patch == 0 {
            return Err(reader.fault(format!(
                "image_size, patch_size and spatial_merge_size are {image}, {patch} and {merge}, expected patches of \
                 at most 256 pixels within an image, and at most 16 of them a side of a token"
            )));
        }
        check_heads(&reader, hidden, heads)?;
        let theta = reader.positive(&["rope_parameters.rope_theta", "rope_theta"])?;
        Ok(Self {
            form: &PADDLE,
            hidden,
            intermediate: reader.size_or("intermediate_size", 4304)?,
            depth: reader.layers_or(27)?,
            heads,
            patch,
            merge,
            side: image / patch,
            rope_theta: theta.unwrap_or(VISION_THETA),
            out,
            tokens: tokens(checkpoint, vocab, &[100_295, 100_296, 101_305, 101_306])?,
            merger_eps: 1e-5,
            ..Self::EMPTY
        })
    }

    /// Pixtral's tower and the projector of Mistral 3. Defaults are those of `Mistral3Config`.
    pub fn of_pixtral(checkpoint: &Checkpoint, out: usize) -> Result<Self> {
        let (reader, whole) =
            (Reader::part(checkpoint, "vision_config")?, Reader::whole(checkpoint));
        let act: Act = match reader.get("hidden_act").map(|act| (act, act.as_str())) {
            None | Some((_, Some("gelu"))) => GraphBuilder::gelu,
            Some((_, Some("silu"))) => GraphBuilder::silu,
            Some((act, _)) => return Err(reader.bad("hidden_act", act, "\"gelu\" or \"silu\"")),
        };
        reader.only("num_channels", &json!(3))?;
        whole.only("projector_hidden_act", &json!("gelu"))?;
        if let Some(layer) = whole.get("vision_feature_layer")
            && ![json!(-1), json!([-1])].contains(layer)
        {
            return Err(whole.bad("vision_feature_layer", layer, "-1, the last one"));
        }
        let (hidden, heads) =
            (reader.size_or("hidden_size", 1024)?, reader.size_or("num_attention_heads", 16)?);
        check_heads(&reader, hidden, heads)?;
        reader.only("head_dim", &json!(hidden / heads))?;
        let patch = reader.size_or("patch_size", 14)?;
        let merge = whole.size_or("spatial_merge_size", 2)?;
        if patch > 256 || merge > 16 {
            return Err(reader.fault(format!(
                "patch_size and spatial_merge_size are {patch} and {merge}, expected at most 256 and 16"
            )));
        }
        let theta = reader.positive(&["rope_parameters.rope_theta", "rope_theta"])?;
        Ok(Self {
            form: &PIXTRAL,
            hidden,
            intermediate: reader.size_or("intermediate_size", 4096)?,
            depth: reader.layers_or(24)?,
            heads,
            patch,
            merge,
            rope_theta: theta.unwrap_or(VISION_THETA),
            out,
            act,
            merger_eps: Reader::new(checkpoint).epsilon(&["rms_norm_eps"], 1e-5)?,
            merger_bias: whole.flag("multimodal_projector_bias")?,
            ..Self::EMPTY
        })
    }

    /// What most towers have, for those that say the rest.
    const EMPTY: Self = Self {
        form: &QWEN3,
        hidden: 0,
        intermediate: 0,
        depth: 0,
        heads: 1,
        patch: 0,
        temporal: 1,
        merge: 0,
        side: 1,
        deepstack: Vec::new(),
        rope_theta: VISION_THETA,
        out: 0,
        tokens: Vec::new(),
        act: GraphBuilder::silu,
        merger_eps: EPS,
        merger_bias: true,
        windows: None,
        in_time: None,
    };

    /// Tower with the settings that both share, without learned positions and further rows for the decoder.
    fn common(
        checkpoint: &Checkpoint,
        reader: &Reader<'_>,
        out: usize,
        vocab: usize,
    ) -> Result<Self> {
        reader.only("out_hidden_size", &json!(out))?;
        let (hidden, inner) = (reader.size("hidden_size")?, reader.size("intermediate_size")?);
        Self::of_width(checkpoint, reader, [hidden, inner, out, vocab])
    }

    fn of_width(
        checkpoint: &Checkpoint,
        reader: &Reader<'_>,
        [hidden, intermediate, out, vocab]: [usize; 4],
    ) -> Result<Self> {
        for key in ["in_channels", "in_chans"] {
            reader.only(key, &json!(3))?;
        }
        let heads = reader.size("num_heads")?;
        check_heads(reader, hidden, heads)?;
        let theta = reader.positive(&["rope_parameters.rope_theta", "rope_theta"])?;
        Ok(Self {
            hidden,
            intermediate,
            depth: reader.bounded("depth", 4096)?,
            heads,
            patch: reader.bounded("patch_size", 256)?,
            temporal: reader.bounded("temporal_patch_size", 16)?,
            merge: reader.bounded("spatial_merge_size", 16)?,
            rope_theta: theta.unwrap_or(VISION_THETA),
            out,
            tokens: tokens(checkpoint, vocab, &[])?,
            ..Self::EMPTY
        })
    }

    /// The side of a square of at most `max` pixels a side whose tokens leave half of a context of `max_ctx` free.
    pub fn side_within(&self, max: usize, max_ctx: usize) -> usize {
        let token = self.patch * self.merge;
        (max / token).min((max_ctx / 2).isqrt()).max(1) * token
    }

    /// True if images keep their shape unless a size is asked for.
    pub const fn shaped(&self) -> bool {
        !self.form.shapes.is_empty()
    }

    /// Elements of a head.
    pub const fn dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Patches that become one token.
    pub const fn unit(&self) -> usize {
        self.merge * self.merge
    }
}

/// Keys of the tokens around images and videos.
const TOKENS: [&str; 4] =
    ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"];

/// [`TOKENS`] with their values below `vocab`; of those that are absent the defaults of the class, if it has any.
fn tokens(
    checkpoint: &Checkpoint,
    vocab: usize,
    defaults: &[usize],
) -> Result<Vec<(&'static str, usize)>> {
    let whole = Reader::whole(checkpoint);
    let mut found = TOKENS.map(|key| (key, 0)).to_vec();
    for (index, (key, id)) in found.iter_mut().enumerate() {
        *id = match defaults.get(index) {
            Some(default) => whole.size_or(key, *default)?,
            None => whole.size(key)?,
        };
        if *id >= vocab {
            return Err(
                whole.fault(format!("{key} is {id}, expected less than vocab_size {vocab}"))
            );
        }
    }
    Ok(found)
}

/// Errors unless heads have a width that is a multiple of 4.
fn check_heads(reader: &Reader<'_>, hidden: usize, heads: usize) -> Result<()> {
    if hidden.is_multiple_of(heads) && (hidden / heads).is_multiple_of(4) {
        return Ok(());
    }
    Err(reader.fault(format!(
        "a width of {hidden} and {heads} heads, expected heads whose width is a multiple of 4"
    )))
}

/// `deepstack_visual_indexes`: different blocks, at most as many as the decoder has layers.
fn deepstack(reader: &Reader<'_>, depth: usize, layers: usize) -> Result<Vec<usize>> {
    let key = "deepstack_visual_indexes";
    let none = Value::Array(Vec::new());
    blocks(reader, key, reader.get(key).unwrap_or(&none), [depth, layers])
}

/// The different blocks, of `depth`, that the value of a key lists; at most `max`.
fn blocks(
    reader: &Reader<'_>,
    key: &str,
    value: &Value,
    [depth, max]: [usize; 2],
) -> Result<Vec<usize>> {
    let blocks: Option<Vec<usize>> = value.as_array().and_then(|list| {
        list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    });
    let different = |list: &Vec<usize>| (1..list.len()).all(|i| !list[..i].contains(&list[i]));
    blocks
        .filter(|list| list.len() <= max && list.iter().all(|i| *i < depth) && different(list))
        .ok_or_else(|| {
            let expected = format!("at most {max} different numbers of blocks below {depth}");
            reader.bad(key, value, &expected)
        })
}
