//! The keys of `config.json` that shape the graphs, checked.

use qhx_core::Result;
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::recipes::reader::Reader;

/// More layers than any model has.
const MAX_LAYERS: usize = 4096;
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
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
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
    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        if let Some(act) = reader.get("hidden_act").filter(|v| *v != "silu") {
            return Err(reader.bad("hidden_act", act, "\"silu\""));
        }
        if let Some(k) = reader.get("num_experts_per_tok").filter(|v| **v != 2) {
            return Err(reader.bad("num_experts_per_tok", k, "2, which sparsemixer chooses"));
        }
        let bounded = |key: &str, most: usize| {
            let size = reader.size(key)?;
            if size > most {
                return Err(reader.fault(format!("{key} is {size}, expected at most {most}")));
            }
            Ok(size)
        };
        let heads = reader.size("num_attention_heads")?;
        let kv_heads = reader.maybe_size("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(reader.fault(format!(
                "num_attention_heads and num_key_value_heads are {heads} and {kv_heads}, expected \
                 a multiple and its divisor"
            )));
        }
        let hidden = reader.size("hidden_size")?;
        let head_dim = reader.maybe_size("head_dim")?.unwrap_or(hidden / heads);
        if head_dim < 2 || !head_dim.is_multiple_of(2) {
            return Err(reader.fault(format!("head_dim is {head_dim}, expected an even number")));
        }
        let experts = match reader.get("num_local_experts") {
            Some(_) => bounded("num_local_experts", MAX_EXPERTS)?,
            None => 16,
        };
        if experts < 2 {
            return Err(reader.fault(format!("num_local_experts is {experts}, expected 2 or more")));
        }
        let between = |key: &str, default: f64| match reader.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|v| (0.0..1.0).contains(v))
                .ok_or_else(|| reader.bad(key, value, "a number from 0 to 1")),
        };
        let tied = reader.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false);
        let config = Self {
            hidden,
            vocab: reader.size("vocab_size")?,
            width: reader.size("intermediate_size")?,
            experts,
            layers: bounded("num_hidden_layers", MAX_LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            rope_theta: rope(&reader)?,
            attention_bias: reader.flag("attention_bias")?,
            head_bias: reader.flag("lm_head_bias")?,
            eps: between("rms_norm_eps", 1e-5)? as f32,
            jitter: between("router_jitter_noise", 0.01)?,
            tied,
            max_positions: reader.maybe_size("max_position_embeddings")?,
            window: reader.maybe_size("sliding_window")?,
        };
        config.check_biases(&reader)?;
        Ok(config)
    }

    /// A bias that the configuration does not foresee would be left out, and the result wrong.
    fn check_biases(&self, reader: &Reader<'_>) -> Result<()> {
        for (name, foreseen, key) in [
            ("layers.0.self_attn.q_proj.bias", self.attention_bias, "attention_bias"),
            ("layers.0.self_attn.k_proj.bias", self.attention_bias, "attention_bias"),
            ("layers.0.self_attn.v_proj.bias", self.attention_bias, "attention_bias"),
            ("layers.0.self_attn.o_proj.bias", self.attention_bias, "attention_bias"),
            ("lm_head.bias", self.head_bias, "lm_head_bias"),
        ] {
            if !foreseen && reader.checkpoint.has(name) {
                return Err(reader.fault(format!(
                    "the checkpoint holds {name}, which this configuration does not use; expected \
                     {key}: true, or a checkpoint without it"
                )));
            }
        }
        Ok(())
    }
}

/// Theta. Frequencies that are scaled are refused by name.
fn rope(reader: &Reader<'_>) -> Result<f64> {
    let (name, place) = match reader.get("rope_scaling") {
        Some(old) => ("rope_scaling", Some(old)),
        None => ("rope_parameters", reader.get("rope_parameters")),
    };
    let inner = |key: &str| place.and_then(|p| p.get(key)).filter(|v| !v.is_null());
    let kind = inner("rope_type").or(inner("type")).and_then(Value::as_str).unwrap_or("default");
    if kind != "default" {
        return Err(reader.fault(format!("{name}: rope type {kind:?}, expected \"default\"")));
    }
    let fraction = inner("partial_rotary_factor").or(reader.get("partial_rotary_factor"));
    if let Some(fraction) = fraction.filter(|v| v.as_f64() != Some(1.0)) {
        return Err(reader.bad("partial_rotary_factor", fraction, "1"));
    }
    match inner("rope_theta").or(reader.get("rope_theta")) {
        Some(value) => reader.positive("rope_theta", value),
        None => Ok(1e6),
    }
}
