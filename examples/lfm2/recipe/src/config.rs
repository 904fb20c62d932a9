//! The keys of `config.json` that shape the graphs, checked.

use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::checkpoint::Checkpoint;
use serde_json::Value;

/// Larger than any size of a model, small enough that products of a few do not overflow.
const MAX_SIZE: u64 = 1 << 24;

/// Sizes and constants of a model.
#[derive(Debug)]
pub(crate) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    /// For each layer whether it is attention; the others are short convolutions.
    pub attention: Vec<bool>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rope_theta: f64,
    pub kernel: usize,
    pub conv_bias: bool,
    pub eps: f32,
    pub tied: bool,
    /// Longest context, where the checkpoint says so.
    pub max_positions: Option<usize>,
}

impl Config {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let keys = Keys { checkpoint };
        let hidden = keys.size("hidden_size", None)?;
        let heads = keys.size("num_attention_heads", None)?;
        let kv_heads = keys.size("num_key_value_heads", None)?;
        if hidden % heads != 0 || heads % kv_heads != 0 {
            return Err(keys.fault(format!(
                "hidden_size {hidden}, num_attention_heads {heads} and num_key_value_heads \
                 {kv_heads}: expected each to be a multiple of the next"
            )));
        }
        let head_dim = keys.size("head_dim", Some((hidden / heads) as u64))?;
        if head_dim % 2 != 0 {
            return Err(keys.fault(format!("head_dim is {head_dim}, expected an even number")));
        }
        let kernel = keys.size("conv_L_cache", Some(3))?;
        if kernel < 2 {
            return Err(keys.fault(format!("conv_L_cache is {kernel}, expected at least 2")));
        }
        let max_positions = "max_position_embeddings";
        Ok(Self {
            hidden,
            vocab: keys.size("vocab_size", None)?,
            intermediate: keys.intermediate()?,
            attention: keys.attention()?,
            heads,
            kv_heads,
            head_dim,
            rope_theta: keys.rope_theta()?,
            kernel,
            conv_bias: keys.flag(&["conv_bias"], false),
            eps: keys.number(&["/norm_eps", "/block_norm_eps"], 1e-5)? as f32,
            tied: keys.flag(&["tie_embedding", "tie_word_embeddings"], true),
            max_positions: match keys.present(max_positions) {
                Some(_) => Some(keys.size(max_positions, None)?),
                None => None,
            },
        })
    }
}

/// Reads values; an error names the file, what was found and what was expected.
struct Keys<'a> {
    checkpoint: &'a Checkpoint,
}

impl Keys<'_> {
    fn fault(&self, what: String) -> Error {
        let path = self.checkpoint.dir().join("config.json");
        Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.checkpoint.config().get(key).filter(|value| !value.is_null())
    }

    fn size(&self, key: &str, default: Option<u64>) -> Result<usize> {
        let found = self.present(key);
        let size = found.map_or(default, Value::as_u64);
        size.filter(|n| (1..=MAX_SIZE).contains(n)).map(|n| n as usize).ok_or_else(|| {
            let found = found.unwrap_or(&Value::Null);
            self.fault(format!("{key} is {found}, expected a number from 1 to {MAX_SIZE}"))
        })
    }

    fn number(&self, pointers: &[&str], default: f64) -> Result<f64> {
        let config = self.checkpoint.config();
        let found = pointers.iter().find_map(|p| config.pointer(p)).filter(|v| !v.is_null());
        let number = found.map_or(Some(default), Value::as_f64);
        number.filter(|n| n.is_finite() && *n > 0.0).ok_or_else(|| {
            self.fault(format!("{} is not a positive number", pointers.join(" or ")))
        })
    }

    fn flag(&self, keys: &[&str], default: bool) -> bool {
        keys.iter().find_map(|key| self.present(key)).and_then(Value::as_bool).unwrap_or(default)
    }

    fn rope_theta(&self) -> Result<f64> {
        let kind = self.checkpoint.config().pointer("/rope_parameters/rope_type");
        if let Some(kind) = kind.filter(|kind| *kind != "default") {
            return Err(self.fault(format!("rope_type is {kind}, expected \"default\"")));
        }
        self.number(&["/rope_parameters/rope_theta", "/rope_theta"], 1e6)
    }

    /// `layer_types`, or `full_attn_idxs` in older checkpoints; without either all are attention.
    fn attention(&self) -> Result<Vec<bool>> {
        let layers = self.size("num_hidden_layers", None)?;
        let list = |key: &str| self.present(key).and_then(Value::as_array);
        let attention: Vec<bool> = match (list("layer_types"), list("full_attn_idxs")) {
            (Some(list), _) => list.iter().map(|kind| *kind == "full_attention").collect(),
            (None, Some(indices)) => {
                (0..layers as u64).map(|i| indices.iter().any(|n| *n == i)).collect()
            }
            (None, None) => vec![true; layers],
        };
        if attention.len() != layers {
            return Err(self.fault(format!(
                "layer_types has {} entries, expected {layers} (num_hidden_layers)",
                attention.len()
            )));
        }
        Ok(attention)
    }

    /// `Lfm2MLP`: two thirds of the given width, times a factor, rounded up to a multiple.
    fn intermediate(&self) -> Result<usize> {
        let key = match self.present("block_ff_dim") {
            Some(_) => "block_ff_dim",
            None => "intermediate_size",
        };
        let wide = self.size(key, None)?;
        if !self.flag(&["block_auto_adjust_ff_dim"], true) {
            return Ok(wide);
        }
        let multiple = self.size("block_multiple_of", Some(256))?;
        let factor = self.number(&["/block_ffn_dim_multiplier"], 1.0)?;
        Ok(((factor * (2 * wide / 3) as f64) as usize).next_multiple_of(multiple))
    }
}
