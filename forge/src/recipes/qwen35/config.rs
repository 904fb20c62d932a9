//! The keys of `config.json` that shape the graphs, checked.

use qhx_core::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::checkpoint::Checkpoint;

/// Larger than any size of a model, small enough that products of a few do not overflow.
const MAX_SIZE: u64 = 1 << 24;
/// More layers than any model has.
const MAX_LAYERS: usize = 4096;

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerKind {
    /// GatedDeltaNet.
    Linear,
    /// Gated softmax attention.
    Full,
}

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: Vec<LayerKind>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
    pub rope_theta: f64,
    pub attention_bias: bool,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub kernel: usize,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: Option<usize>,
}

impl Config {
    /// Channels of the convolution: queries, keys and values of the delta rule.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader { checkpoint, value: checkpoint.text_config() };
        let head_dim = reader.size("head_dim", Some(256))?;
        // Both keys may also stand at top level, where older checkpoints have them.
        let rope = reader.value.get("rope_parameters").unwrap_or(&Value::Null);
        let rope = |key: &str, default: f64| match rope.get(key).or(reader.value.get(key)) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|v| v.is_finite() && *v > 0.0)
                .ok_or_else(|| reader.bad(key, value, "a positive number")),
        };
        let rope_theta = rope("rope_theta", 1e4)?;
        let factor = rope("partial_rotary_factor", 0.25)?;
        let rotary_dim = (head_dim as f64 * factor) as usize;
        if factor > 1.0 || rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
            return Err(reader.fault(format!(
                "partial_rotary_factor {factor} of head_dim {head_dim} turns {rotary_dim} elements, expected an even number of 2 to {head_dim}"
            )));
        }
        let kind = reader.value.pointer("/rope_parameters/rope_type").and_then(Value::as_str);
        if let Some(kind) = kind.filter(|k| *k != "default") {
            return Err(reader.fault(format!("rope_type is {kind:?}, expected \"default\"")));
        }
        if let Some(act) = reader.value.get("hidden_act").filter(|v| *v != "silu") {
            return Err(reader.bad("hidden_act", act, "\"silu\""));
        }
        // In the nested form the top level governs the head.
        let top = checkpoint.config();
        let tied = [top, reader.value].into_iter().find_map(|v| v.get("tie_word_embeddings"));
        let eps = reader.value.get("rms_norm_eps").map_or(Some(1e-6), Value::as_f64);
        let config = Self {
            hidden: reader.size("hidden_size", None)?,
            vocab: reader.size("vocab_size", None)?,
            intermediate: reader.size("intermediate_size", None)?,
            layers: reader.layers()?,
            heads: reader.size("num_attention_heads", None)?,
            kv_heads: reader.size("num_key_value_heads", None)?,
            head_dim,
            rotary_dim,
            rope_theta,
            attention_bias: reader.value.get("attention_bias") == Some(&Value::Bool(true)),
            key_heads: reader.size("linear_num_key_heads", Some(16))?,
            value_heads: reader.size("linear_num_value_heads", Some(32))?,
            key_dim: reader.size("linear_key_head_dim", Some(128))?,
            value_dim: reader.size("linear_value_head_dim", Some(128))?,
            kernel: reader.size("linear_conv_kernel_dim", Some(4))?,
            eps: eps.filter(|e| *e > 0.0 && *e < 1.0).ok_or_else(|| {
                reader.fault("rms_norm_eps: expected a number between 0 and 1".to_owned())
            })? as f32,
            // `PretrainedConfig` of the class has `tie_word_embeddings = False`.
            tied: tied.and_then(Value::as_bool).unwrap_or(false),
            max_positions: match reader.value.get("max_position_embeddings") {
                None | Some(Value::Null) => None,
                Some(_) => Some(reader.size("max_position_embeddings", None)?),
            },
        };
        for (whole, part, names) in [
            (config.heads, config.kv_heads, "num_attention_heads and num_key_value_heads"),
            (
                config.value_heads,
                config.key_heads,
                "linear_num_value_heads and linear_num_key_heads",
            ),
        ] {
            if whole % part != 0 {
                return Err(reader.fault(format!(
                    "{names} are {whole} and {part}, expected a multiple and its divisor"
                )));
            }
        }
        if config.kernel < 2 {
            return Err(reader.fault("linear_conv_kernel_dim is 1, expected at least 2".to_owned()));
        }
        Ok(config)
    }
}

struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    value: &'a Value,
}

impl Reader<'_> {
    fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match (self.value.get(key), default) {
            (None | Some(Value::Null), Some(default)) => Ok(default),
            (None | Some(Value::Null), None) => {
                Err(self.fault(format!("{key} is missing, expected a size")))
            }
            (Some(value), _) => value
                .as_u64()
                .filter(|n| (1..=MAX_SIZE).contains(n))
                .map(|n| n as usize)
                .ok_or_else(|| self.bad(key, value, &format!("a number from 1 to {MAX_SIZE}"))),
        }
    }

    fn layers(&self) -> Result<Vec<LayerKind>> {
        let count = self.size("num_hidden_layers", None)?;
        if count > MAX_LAYERS {
            return Err(
                self.fault(format!("num_hidden_layers is {count}, expected at most {MAX_LAYERS}"))
            );
        }
        let Some(list) = self.value.get("layer_types").filter(|v| !v.is_null()) else {
            let interval = self.size("full_attention_interval", Some(4))?;
            let kind = |i: usize| {
                if (i + 1).is_multiple_of(interval) { LayerKind::Full } else { LayerKind::Linear }
            };
            return Ok((0..count).map(kind).collect());
        };
        let list = list.as_array().map_or(&[][..], Vec::as_slice);
        if list.len() != count {
            return Err(self.fault(format!(
                "layer_types has {} entries, expected {count} (num_hidden_layers)",
                list.len()
            )));
        }
        list.iter()
            .map(|kind| match kind.as_str() {
                Some("linear_attention") => Ok(LayerKind::Linear),
                Some("full_attention") => Ok(LayerKind::Full),
                _ => {
                    Err(self.bad("layer_types", kind, "\"linear_attention\" or \"full_attention\""))
                }
            })
            .collect()
    }

    fn bad(&self, key: &str, found: &Value, expected: &str) -> Error {
        self.fault(format!("{key} is {found}, expected {expected}"))
    }

    fn fault(&self, what: String) -> Error {
        let path = self.checkpoint.config_path();
        Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
    }
}
