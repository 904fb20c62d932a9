//! The configuration of a checkpoint, `config.json`.

use std::collections::BTreeMap;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use super::CURVE;
use crate::kit::Reader;

/// Layers that a configuration may have.
pub(super) const MAX_LAYERS: usize = 64;

/// Fields of `config.json` that are read.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) hidden: usize,
    pub(super) style: usize,
    pub(super) layers: usize,
    /// Symbols of the vocabulary.
    pub(super) tokens: usize,
    pub(super) durations: usize,
    /// Symbols that a convolution of the text encoder sees; odd.
    pub(super) kernel: usize,
    /// Channels of the decoder, and those of the symbols that each of its blocks sees again.
    pub(super) wide: usize,
    pub(super) narrow: usize,
    /// Channels that the generator begins with.
    pub(super) initial: usize,
    pub(super) rates: [usize; 2],
    /// Kernels and dilations of the residual blocks.
    pub(super) blocks: Vec<(usize, [usize; 3])>,
    pub(super) fft: usize,
    pub(super) hop: usize,
    /// The Fourier transforms are convolutions, as the package exports them.
    pub(super) convolved: bool,
    pub(super) albert: Albert,
    pub(super) symbols: BTreeMap<String, u32>,
}

#[derive(Debug)]
pub(super) struct Albert {
    pub(super) width: usize,
    pub(super) embedding: usize,
    pub(super) heads: usize,
    pub(super) inner: usize,
    pub(super) layers: usize,
    pub(super) positions: usize,
}

impl Config {
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let whole = Reader::whole(checkpoint);
        let reader = Reader::part(checkpoint, "plbert")?;
        reader.only("hidden_act", &json!("gelu_new"))?;
        reader.only("num_hidden_groups", &json!(1))?;
        reader.only("inner_group_num", &json!(1))?;
        let albert = Albert {
            width: reader.size("hidden_size")?,
            embedding: reader.size_or("embedding_size", 128)?,
            heads: reader.size("num_attention_heads")?,
            inner: reader.size("intermediate_size")?,
            layers: reader.layers()?,
            positions: reader.bounded("max_position_embeddings", 1 << 14)?,
        };
        let net = Reader::part(checkpoint, "istftnet")?;
        let list = |key: &str| -> Result<Vec<usize>> {
            let found = net.get(key).unwrap_or(&Value::Null);
            let size =
                |value: &Value| value.as_u64().filter(|n| (1..=64).contains(n)).map(|n| n as usize);
            let sizes = found.as_array().and_then(|list| list.iter().map(size).collect());
            sizes.ok_or_else(|| net.bad(key, found, "a list of numbers from 1 to 64"))
        };
        let rates = list("upsample_rates")?;
        let kernels = list("upsample_kernel_sizes")?;
        let doubled = rates.iter().map(|rate| 2 * rate).eq(kernels.iter().copied());
        let (&[first, last], true) = (&rates[..], doubled) else {
            return Err(net.fault(format!(
                "upsample_rates {rates:?}, upsample_kernel_sizes {kernels:?}: expected two rates, and kernels of twice them"
            )));
        };
        let (fft, hop) =
            (net.bounded("gen_istft_n_fft", 4096)?, net.bounded("gen_istft_hop_size", 4096)?);
        let initial = net.bounded("upsample_initial_channel", 1 << 14)?;
        let key = "resblock_dilation_sizes";
        let found = net.get(key).unwrap_or(&Value::Null);
        let dilations: Option<Vec<[usize; 3]>> = serde_json::from_value(found.clone()).ok();
        let legal = |sizes: &Vec<[usize; 3]>| sizes.iter().flatten().all(|n| (1..=64).contains(n));
        let dilations =
            dilations.filter(legal).ok_or_else(|| net.bad(key, found, "lists of three numbers"))?;
        let kernels = list("resblock_kernel_sizes")?;
        if kernels.len() != dilations.len() {
            return Err(net.bad(key, found, "one list for each of resblock_kernel_sizes"));
        }
        let hidden = whole.bounded("hidden_dim", 1 << 14)?;
        let kernel = whole.bounded("text_encoder_kernel_size", 63)?;
        let tokens = whole.size("n_token")?;
        let found = whole.get("vocab").unwrap_or(&Value::Null);
        let symbols: Option<BTreeMap<String, u32>> = serde_json::from_value(found.clone()).ok();
        let symbols = symbols.filter(|symbols| symbols.values().all(|id| (*id as usize) < tokens));
        let symbols = symbols.ok_or_else(|| {
            whole.fault(format!(
                "vocab: expected an object of symbols with numbers below n_token, {tokens}"
            ))
        })?;
        let config = Self {
            hidden,
            style: whole.bounded("style_dim", 1 << 12)?,
            layers: whole.bounded("n_layer", MAX_LAYERS)?,
            tokens,
            durations: whole.bounded("max_dur", 1 << 12)?,
            kernel,
            wide: 2 * whole.bounded("max_conv_dim", 1 << 12)?,
            narrow: whole.bounded("dim_in", 1 << 12)?,
            initial,
            rates: [first, last],
            blocks: kernels.into_iter().zip(dilations).collect(),
            fft,
            hop,
            convolved: false,
            albert,
            symbols,
        };
        config.fits().map_err(|what| whole.fault(what))?;
        Ok(config)
    }

    /// Checks what the graphs need of sizes; says which do not fit.
    pub(super) fn fits(&self) -> std::result::Result<(), String> {
        let Self { hidden, kernel, initial, rates, ref blocks, fft, hop, ref albert, .. } = *self;
        let &Albert { width, heads, positions, .. } = albert;
        if !width.is_multiple_of(heads) || positions < 3 {
            return Err(format!(
                "hidden_size {width}, num_attention_heads {heads}, max_position_embeddings {positions}: expected a \
                 width that the heads divide, and 3 positions or more"
            ));
        }
        if rates[0] % 2 + rates[1] % 2 + fft % 2 + initial % 4 > 0 || fft == 0 || hop > fft {
            return Err(format!(
                "upsample_rates {rates:?}, gen_istft_n_fft {fft}, gen_istft_hop_size {hop}, upsample_initial_channel \
                 {initial}: expected even numbers, a hop of at most the transform, and channels that 4 divides"
            ));
        }
        if blocks.is_empty() || blocks.iter().any(|(kernel, _)| kernel % 2 == 0) {
            let kernels: Vec<_> = blocks.iter().map(|(kernel, _)| kernel).collect();
            return Err(format!(
                "resblock_kernel_sizes {kernels:?}: expected odd numbers, one at least"
            ));
        }
        if hidden % 2 > 0 || kernel % 2 == 0 {
            return Err(format!(
                "hidden_dim {hidden}, text_encoder_kernel_size {kernel}: expected an even and an odd number"
            ));
        }
        Ok(())
    }

    /// Samples of a frame.
    pub(super) fn samples(&self) -> usize {
        CURVE * self.rates[0] * self.rates[1] * self.hop
    }
}
