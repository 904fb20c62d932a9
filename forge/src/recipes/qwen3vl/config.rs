//! The keys of `config.json` that shape the graphs, checked. Published checkpoints (4.57) spell the rotary embedding
//! as `rope_theta` and `rope_scaling`, those that `transformers` 5 writes as `rope_parameters`.

use qhx_core::Result;
use serde_json::{Value, json};

use crate::checkpoint::Checkpoint;
use crate::kit::{Heads, Reader};

/// Base of the vision tower's rotary embedding where no key says it.
const VISION_THETA: f64 = 1e4;

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: Heads,
    pub rope_theta: f64,
    /// Pairs of a head that turn by time, row and column; interleaved.
    pub section: [usize; 3],
    pub bias: bool,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: Option<usize>,
    /// `image_token_id` and the other tokens around pictures and videos, with their keys.
    pub tokens: [(&'static str, usize); 4],
    pub vision: Vision,
}

/// The vision tower.
#[derive(Debug, Clone)]
pub(super) struct Vision {
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
}

/// What a vision graph takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patches {
    /// A square of so many by so many patches; its rotary tables are constants.
    Square(usize),
    /// Any grid of at most so many patches; rotary tables and a mask are inputs.
    AtMost(usize),
}

impl Patches {
    /// Rows of the graph.
    pub const fn count(self) -> usize {
        match self {
            Self::Square(side) => side * side,
            Self::AtMost(count) => count,
        }
    }
}

impl Config {
    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        let whole = Reader::whole(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        let hidden = reader.size("hidden_size")?;
        let layers = reader.layers()?;
        let heads = reader.heads(hidden, None, None)?;
        let rope_theta = reader.rope_theta(0.0)?;
        if rope_theta == 0.0 {
            return Err(reader.fault("rope_theta is missing, expected a number".to_owned()));
        }
        let id = |key: &'static str| whole.size(key).map(|id| (key, id));
        let config = Self {
            hidden,
            vocab: reader.size("vocab_size")?,
            intermediate: reader.size("intermediate_size")?,
            layers,
            heads,
            rope_theta,
            section: section(&reader, heads.dim / 2)?,
            bias: reader.flag("attention_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(false),
            max_positions: reader.maybe_size("max_position_embeddings")?,
            tokens: [
                id("image_token_id")?,
                id("video_token_id")?,
                id("vision_start_token_id")?,
                id("vision_end_token_id")?,
            ],
            vision: Vision::read(checkpoint, hidden, layers)?,
        };
        if let Some((key, id)) = config.tokens.iter().find(|(_, id)| *id >= config.vocab) {
            return Err(whole
                .fault(format!("{key} is {id}, expected less than vocab_size {}", config.vocab)));
        }
        Ok(config)
    }
}

/// `mrope_section`, which adds up to half a head.
fn section(reader: &Reader<'_>, half: usize) -> Result<[usize; 3]> {
    let key = format!("{}.mrope_section", reader.rope_key());
    let Some(value) = reader.get(&key) else {
        return Err(reader.fault(format!("{key} is missing, expected three numbers")));
    };
    let numbers: Option<Vec<usize>> = value.as_array().and_then(|list| {
        list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    });
    let section = numbers.and_then(|numbers| <[usize; 3]>::try_from(numbers).ok());
    let fits =
        |s: &[usize; 3]| s.iter().try_fold(0usize, |sum, n| sum.checked_add(*n)) == Some(half);
    section.filter(fits).ok_or_else(|| {
        reader.bad(&key, value, &format!("three numbers that add up to {half}, half of head_dim"))
    })
}

impl Vision {
    fn read(checkpoint: &Checkpoint, out: usize, layers: usize) -> Result<Self> {
        let reader = Reader::part(checkpoint, "vision_config")?;
        reader.only("hidden_act", &json!("gelu_pytorch_tanh"))?;
        reader.only("in_channels", &json!(3))?;
        reader.only("out_hidden_size", &json!(out))?;
        let (hidden, heads) = (reader.size("hidden_size")?, reader.size("num_heads")?);
        if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
            return Err(reader.fault(format!(
                "hidden_size and num_heads are {hidden} and {heads}, expected heads whose width is a multiple of 4"
            )));
        }
        let positions = reader.size("num_position_embeddings")?;
        let side = positions.isqrt();
        if side * side != positions {
            return Err(
                reader.fault(format!("num_position_embeddings is {positions}, expected a square"))
            );
        }
        let depth = reader.bounded("depth", 4096)?;
        let theta = reader.positive(&["rope_parameters.rope_theta", "rope_theta"])?;
        Ok(Self {
            hidden,
            intermediate: reader.size("intermediate_size")?,
            depth,
            heads,
            patch: reader.bounded("patch_size", 256)?,
            temporal: reader.bounded("temporal_patch_size", 16)?,
            merge: reader.bounded("spatial_merge_size", 16)?,
            side,
            deepstack: deepstack(&reader, depth, layers)?,
            rope_theta: theta.unwrap_or(VISION_THETA),
        })
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

/// `deepstack_visual_indexes`: different blocks, at most as many as the decoder has layers.
fn deepstack(reader: &Reader<'_>, depth: usize, layers: usize) -> Result<Vec<usize>> {
    let key = "deepstack_visual_indexes";
    let none = Value::Array(Vec::new());
    let value = reader.get(key).unwrap_or(&none);
    let blocks: Option<Vec<usize>> = value.as_array().and_then(|list| {
        list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    });
    let different = |list: &Vec<usize>| (1..list.len()).all(|i| !list[..i].contains(&list[i]));
    blocks
        .filter(|list| list.len() <= layers && list.iter().all(|i| *i < depth) && different(list))
        .ok_or_else(|| {
            reader.bad(
                key,
                value,
                &format!("at most {layers} different numbers of blocks below {depth}"),
            )
        })
}
