//! The keys of `config.json` that shape the graphs, checked.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use crate::kit::{ExpertForm, Experts, Heads, Reader};

/// More experts than any model has.
const MAX_EXPERTS: usize = 4096;

/// Sizes and constants of a model. Defaults are those of the configuration class, which writes every
/// key that differs from them.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    /// Width of an expert.
    pub width: usize,
    pub experts: usize,
    pub layers: usize,
    pub heads: Heads,
    pub rope_theta: f64,
    pub attention_bias: bool,
    pub head_bias: bool,
    pub eps: f32,
    pub jitter: f64,
    pub tied: bool,
    pub max_positions: Option<usize>,
    /// Positions that a token sees, itself included.
    pub window: Option<usize>,
}

impl Config {
    /// Sizes of the experts, of which sparsemixer chooses two.
    pub fn experts(&self) -> Experts {
        let Self { hidden, width, experts: count, .. } = *self;
        Experts { hidden, width, count, a_token: 2, gated: true, form: ExpertForm::default() }
    }

    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        if let Some(k) = reader.get("num_experts_per_tok").filter(|v| **v != 2) {
            return Err(reader.bad("num_experts_per_tok", k, "2, which sparsemixer chooses"));
        }
        let hidden = reader.size("hidden_size")?;
        let experts = match reader.get("num_local_experts") {
            Some(_) => reader.bounded("num_local_experts", MAX_EXPERTS)?,
            None => 16,
        };
        if experts < 2 {
            return Err(reader.fault(format!("num_local_experts is {experts}, expected 2 or more")));
        }
        let jitter = match reader.get("router_jitter_noise") {
            None => 0.01,
            Some(value) => value
                .as_f64()
                .filter(|v| (0.0..1.0).contains(v))
                .ok_or_else(|| reader.bad("router_jitter_noise", value, "a number from 0 to 1"))?,
        };
        Ok(Self {
            hidden,
            vocab: reader.size("vocab_size")?,
            width: reader.size("intermediate_size")?,
            experts,
            layers: reader.layers()?,
            heads: reader.heads(hidden, None, None)?,
            rope_theta: rope(&reader)?,
            attention_bias: reader.flag("attention_bias")?,
            head_bias: reader.flag("lm_head_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-5)?,
            jitter,
            tied: reader.tied(false)?,
            max_positions: reader.maybe_size("max_position_embeddings")?,
            window: reader.maybe_size("sliding_window")?,
        })
    }
}

/// Base of the rotary embedding, which turns whole heads.
fn rope(reader: &Reader<'_>) -> Result<f64> {
    let key = format!("{}.partial_rotary_factor", reader.rope_key());
    let fraction = reader.first(&[&key, "partial_rotary_factor"]);
    if let Some((_, fraction)) = fraction.filter(|(_, v)| v.as_f64() != Some(1.0)) {
        return Err(reader.bad("partial_rotary_factor", fraction, "1"));
    }
    reader.rope_theta(1e6)
}
