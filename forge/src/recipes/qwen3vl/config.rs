//! The keys of `config.json` that shape the graphs, checked. Published checkpoints (4.57) spell the rotary embedding
//! as `rope_theta` and `rope_scaling`, those that `transformers` 5 writes as `rope_parameters`.

use qhx_core::Result;
use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::kit::{Heads, Reader};
use crate::recipes::vision::{Vision, section};

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
    pub vision: Vision,
}

impl Config {
    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        let hidden = reader.size("hidden_size")?;
        let layers = reader.layers()?;
        let heads = reader.heads(hidden, None, None)?;
        let rope_theta = reader.rope_theta(0.0)?;
        if rope_theta == 0.0 {
            return Err(reader.fault("rope_theta is missing, expected a number".to_owned()));
        }
        let vocab = reader.size("vocab_size")?;
        Ok(Self {
            hidden,
            vocab,
            intermediate: reader.size("intermediate_size")?,
            layers,
            heads,
            rope_theta,
            section: section(&reader, heads.dim / 2, None)?,
            bias: reader.flag("attention_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(false),
            max_positions: reader.maybe_size("max_position_embeddings")?,
            vision: Vision::read(checkpoint, [hidden, layers, vocab])?,
        })
    }
}
