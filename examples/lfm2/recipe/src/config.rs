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
        let value = checkpoint.config();
        let fault = |what: String| {
            let path = checkpoint.dir().join("config.json");
            Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
        };
        let present = |key: &str| value.get(key).filter(|v| !v.is_null());
        let size = |key: &str, default: Option<u64>| {
            let found = present(key).map_or(default, Value::as_u64);
            found.filter(|n| (1..=MAX_SIZE).contains(n)).map(|n| n as usize).ok_or_else(|| {
                let found = value.get(key).unwrap_or(&Value::Null);
                fault(format!("{key} is {found}, expected a number from 1 to {MAX_SIZE}"))
            })
        };
        let number = |pointers: &[&str], default: f64| {
            let found = pointers.iter().find_map(|p| value.pointer(p)).filter(|v| !v.is_null());
            found
                .map_or(Some(default), Value::as_f64)
                .filter(|n| n.is_finite() && *n > 0.0)
                .ok_or_else(|| fault(format!("{} is not a positive number", pointers.join(" or "))))
        };
        let flag = |keys: &[&str], default: bool| {
            keys.iter().find_map(|key| value.get(key)).and_then(Value::as_bool).unwrap_or(default)
        };

        let (hidden, heads) = (size("hidden_size", None)?, size("num_attention_heads", None)?);
        let kv_heads = size("num_key_value_heads", None)?;
        if hidden % heads != 0 || heads % kv_heads != 0 {
            return Err(fault(format!(
                "hidden_size {hidden}, num_attention_heads {heads} and num_key_value_heads \
                 {kv_heads}: expected each to be a multiple of the next"
            )));
        }
        let head_dim = size("head_dim", Some((hidden / heads) as u64))?;
        if head_dim % 2 != 0 {
            return Err(fault(format!("head_dim is {head_dim}, expected an even number")));
        }
        let layers = size("num_hidden_layers", None)?;
        let list = present("layer_types").and_then(Value::as_array);
        let indices = present("full_attn_idxs").and_then(Value::as_array);
        let attention: Vec<bool> = match (list, indices) {
            (Some(list), _) => list.iter().map(|kind| *kind == "full_attention").collect(),
            (None, Some(indices)) => {
                (0..layers as u64).map(|i| indices.iter().any(|n| *n == i)).collect()
            }
            (None, None) => vec![true; layers],
        };
        if attention.len() != layers {
            return Err(fault(format!(
                "layer_types has {} entries, expected {layers} (num_hidden_layers)",
                attention.len()
            )));
        }
        let rope = value.pointer("/rope_parameters/rope_type").and_then(Value::as_str);
        if let Some(kind) = rope.filter(|kind| *kind != "default") {
            return Err(fault(format!(
                "rope_parameters.rope_type is {kind:?}, expected \"default\""
            )));
        }
        let kernel = size("conv_L_cache", Some(3))?;
        if kernel < 2 {
            return Err(fault(format!("conv_L_cache is {kernel}, expected at least 2")));
        }
        // `Lfm2MLP`: two thirds, times a factor, rounded up to a multiple.
        let wide = match present("block_ff_dim") {
            Some(_) => size("block_ff_dim", None)?,
            None => size("intermediate_size", None)?,
        };
        let intermediate = if flag(&["block_auto_adjust_ff_dim"], true) {
            let multiple = size("block_multiple_of", Some(256))?;
            let factor = number(&["/block_ffn_dim_multiplier"], 1.0)?;
            ((factor * (2 * wide / 3) as f64) as usize).next_multiple_of(multiple)
        } else {
            wide
        };
        Ok(Self {
            hidden,
            vocab: size("vocab_size", None)?,
            intermediate,
            attention,
            heads,
            kv_heads,
            head_dim,
            rope_theta: number(&["/rope_parameters/rope_theta", "/rope_theta"], 1e6)?,
            kernel,
            conv_bias: flag(&["conv_bias"], false),
            eps: number(&["/norm_eps", "/block_norm_eps"], 1e-5)? as f32,
            max_positions: present("max_position_embeddings")
                .map(|_| size("max_position_embeddings", None))
                .transpose()?,
            tied: flag(&["tie_embedding", "tie_word_embeddings"], true),
        })
    }
}
