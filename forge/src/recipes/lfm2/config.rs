//! The keys of `config.json` that shape the graphs, checked.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::kit::{Experts, Heads, Reader};

/// Sizes and constants of a model.
#[derive(Debug)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    /// For each layer whether it is attention; the others are short convolutions.
    pub attention: Vec<bool>,
    pub heads: Heads,
    pub rope_theta: f64,
    pub kernel: usize,
    pub conv_bias: bool,
    pub eps: f32,
    pub tied: bool,
    /// Longest context, where the checkpoint says so.
    pub max_positions: Option<usize>,
    /// Experts of `Lfm2MoeForCausalLM`.
    pub sparse: Option<Sparse>,
}

/// The layers with experts, which are all but the first ones.
#[derive(Debug)]
pub(super) struct Sparse {
    pub experts: Experts,
    /// Layers without experts.
    pub dense: usize,
    /// `expert_bias` is added to the probabilities that choose experts.
    pub bias: bool,
    /// `params.router` of the manifest.
    pub router: Value,
}

impl Sparse {
    fn read(reader: &Reader<'_>, hidden: usize) -> Result<Self> {
        let dense = match reader.get("num_dense_layers") {
            Some(none) if *none == 0 => 0,
            _ => reader.size_or("num_dense_layers", 2)?,
        };
        let layers = reader.layers()?;
        if dense >= layers {
            return Err(reader.fault(format!(
                "num_dense_layers is {dense}, expected less than num_hidden_layers, {layers}"
            )));
        }
        let normalize = reader.flag_or("norm_topk_prob", true)?;
        let scale = reader.positive(&["routed_scaling_factor"])?.unwrap_or(1.0);
        Ok(Self {
            experts: Experts::read(reader, hidden)?,
            dense,
            bias: reader.flag_or("use_expert_bias", true)?,
            router: json!({"rule": "sigmoid", "normalize": normalize, "scale": scale}),
        })
    }
}

impl Config {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        let hidden = reader.size("hidden_size")?;
        let kernel = reader.size_or("conv_L_cache", 3)?;
        if kernel < 2 {
            return Err(reader.fault(format!("conv_L_cache is {kernel}, expected at least 2")));
        }
        let with_experts = checkpoint.architecture() == Some("Lfm2MoeForCausalLM");
        Ok(Self {
            hidden,
            vocab: reader.size("vocab_size")?,
            intermediate: match with_experts {
                true => reader.size("intermediate_size")?,
                false => intermediate(&reader)?,
            },
            attention: attention(&reader)?,
            heads: reader.heads(hidden, None, None)?,
            rope_theta: reader.rope_theta(1e6)?,
            kernel,
            conv_bias: reader.flag("conv_bias")?,
            eps: reader.epsilon(&["norm_eps", "block_norm_eps"], 1e-5)?,
            tied: reader.flag_or("tie_embedding", reader.tied(true)?)?,
            max_positions: reader.maybe_size("max_position_embeddings")?,
            sparse: with_experts.then(|| Sparse::read(&reader, hidden)).transpose()?,
        })
    }
}

/// `layer_types`, or `full_attn_idxs` in older checkpoints; without either all are attention.
fn attention(reader: &Reader<'_>) -> Result<Vec<bool>> {
    let layers = reader.layers()?;
    let names = [("full_attention", true), ("conv", false)];
    if let Some(kinds) = reader.kinds("layer_types", layers, &names)? {
        return Ok(kinds);
    }
    let key = "full_attn_idxs";
    let Some(value) = reader.get(key) else { return Ok(vec![true; layers]) };
    let list = value.as_array().ok_or_else(|| reader.bad(key, value, "a list of layers"))?;
    Ok((0..layers as u64).map(|layer| list.iter().any(|index| *index == layer)).collect())
}

/// Larger than any MLP.
const MAX_WIDTH: f64 = (1 << 24) as f64;

/// `Lfm2MLP`: two thirds of the given width, times a factor, rounded up to a multiple.
fn intermediate(reader: &Reader<'_>) -> Result<usize> {
    let key = reader.first(&["block_ff_dim"]).map_or("intermediate_size", |(key, _)| key);
    let wide = reader.size(key)?;
    if !reader.flag_or("block_auto_adjust_ff_dim", true)? {
        return Ok(wide);
    }
    let multiple = reader.size_or("block_multiple_of", 256)?;
    let factor = reader.positive(&["block_ffn_dim_multiplier"])?.unwrap_or(1.0);
    let width = factor * (2 * wide / 3) as f64;
    if width > MAX_WIDTH {
        return Err(reader.fault(format!(
            "block_ffn_dim_multiplier is {factor}, expected an MLP of at most {MAX_WIDTH} rows"
        )));
    }
    Ok((width as usize).next_multiple_of(multiple))
}
