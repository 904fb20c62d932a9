//! The keys of `config.json` that shape the decoder, checked. Both spellings are read: that of published
//! checkpoints (`global_head_dim`), and the one that `transformers` 5 writes (`per_layer_config`).

use std::ops::Range;

use qhx_base::{Error, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::kit::{Heads, Reader};

/// Sizes and constants of AltUp, LAuReL and sparse MLPs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AltUp {
    /// Streams of hidden states.
    pub streams: usize,
    /// The corrected first stream is scaled before it gates per-layer inputs.
    pub scaled: bool,
    /// Rank of LAuReL.
    pub rank: usize,
    /// Share of a layer's gates that become zero.
    pub sparsity: Vec<f64>,
}

impl AltUp {
    pub fn read(reader: &Reader<'_>, layers: usize) -> Result<Self> {
        reader.only("altup_active_idx", &json!(0))?;
        let key = "activation_sparsity_pattern";
        let sparsity = match reader.get(key) {
            // `Gemma3nTextConfig`: the first ten layers of more than ten.
            None => (0..layers).map(|i| if layers > 10 && i < 10 { 0.95 } else { 0.0 }).collect(),
            Some(value) => {
                let share = |value: &Value| value.as_f64().filter(|s| (0.0..1.0).contains(s));
                let list: Option<Vec<_>> =
                    value.as_array().and_then(|list| list.iter().map(share).collect());
                list.filter(|list| list.len() == layers)
                    .ok_or_else(|| reader.bad(key, value, "a share below 1 for each layer"))?
            }
        };
        Ok(Self {
            streams: reader.size_or("altup_num_inputs", 4)?,
            scaled: reader.flag_or("altup_correct_scale", true)?,
            rank: reader.size_or("laurel_rank", 64)?,
            sparsity,
        })
    }
}

/// Sizes and constants of a decoder; where a key is absent, those of `Gemma4TextConfig`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    pub hidden: usize,
    pub vocab: usize,
    /// Width of the MLP of layers with keys of their own.
    pub intermediate: usize,
    /// The MLP of layers without keys of their own is twice as wide.
    pub double_wide: bool,
    /// For each layer whether it slides over the last positions; the others see all of them.
    pub sliding: Vec<bool>,
    /// Positions that a sliding layer sees, the current one included.
    pub window: usize,
    /// Layers at the end that read the keys and values of a donor.
    pub shared: usize,
    /// Heads of full and of sliding layers.
    pub heads: [Heads; 2],
    /// Ropes of full and of sliding layers.
    pub ropes: [Rope; 2],
    /// Values of a per-layer input.
    pub ple: usize,
    /// Row of the per-layer table that stands at positions of images and audio.
    pub pad: usize,
    /// c in `c · tanh(logits / c)`.
    pub softcap: Option<f64>,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: usize,
    /// Rows of the per-layer table; tokens behind them have its first row.
    pub ple_vocab: usize,
    /// What layers of Gemma 3n have besides.
    pub altup: Option<AltUp>,
}

/// Rotary embedding of one kind of layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rope {
    pub theta: f64,
    /// Share of the pairs that turn, where not all do (`proportional`).
    pub share: Option<f64>,
}

impl Config {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        refuse_variants(&reader)?;
        if reader.get("hidden_size_per_layer_input").is_some_and(|width| width == 0) {
            return Err(larger(&reader, "hidden_size_per_layer_input", "no per-layer inputs"));
        }
        let ple = reader.size_or("hidden_size_per_layer_input", 256)?;
        Self::with(&reader, ple, shared)
    }

    /// Configuration of a drafting head (`Gemma4AssistantConfig`): it has no per-layer inputs, and no keys of its own.
    pub fn assistant(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        refuse_variants(&reader)?;
        reader.only("hidden_size_per_layer_input", &json!(0))?;
        reader.only("use_double_wide_mlp", &json!(false))?;
        Self::with(&reader, 0, |_, sliding| Ok(sliding.len()))
    }

    /// With per-layer inputs of `ple` values, and as many layers without keys as `shared` says of their kinds.
    fn with(
        reader: &Reader<'_>,
        ple: usize,
        shared: impl Fn(&Reader<'_>, &[bool]) -> Result<usize>,
    ) -> Result<Self> {
        reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
        reader.only("attention_bias", &json!(false))?;
        let sliding = sliding(reader, reader.layers_or(30)?)?;
        let shared = shared(reader, &sliding)?;
        let heads = heads(reader, &sliding)?;
        let vocab = reader.size_or("vocab_size", 262_144)?;
        reader.only("vocab_size_per_layer_input", &json!(if ple > 0 { vocab } else { 0 }))?;
        let pad = reader.get("pad_token_id").map_or(Some(0), Value::as_u64);
        let pad = pad.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab);
        Ok(Self {
            hidden: reader.size_or("hidden_size", 2304)?,
            vocab,
            intermediate: reader.size_or("intermediate_size", 9216)?,
            double_wide: reader.flag("use_double_wide_mlp")?,
            window: reader.size_or("sliding_window", 512)?,
            shared,
            heads,
            ropes: [
                rope(reader, "full_attention", 1e6, Some(0.25))?,
                rope(reader, "sliding_attention", 1e4, None)?,
            ],
            ple,
            pad: pad.ok_or_else(|| {
                reader.fault(format!("pad_token_id is no token, expected 0 to {}", vocab - 1))
            })?,
            softcap: reader.positive(&["final_logit_softcapping"])?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(true)?,
            max_positions: reader.size_or("max_position_embeddings", 131_072)?,
            ple_vocab: vocab,
            altup: None,
            sliding,
        })
    }

    /// Configuration of Gemma 3n (`Gemma3nTextConfig`).
    pub fn gemma3n(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
        reader.only("attention_bias", &json!(false))?;
        let names = [("sliding_attention", true), ("full_attention", false)];
        let layers = reader.layers_or(35)?;
        let sliding = match reader.kinds("layer_types", layers, &names)? {
            Some(kinds) => kinds,
            None => (1..=layers).map(|layer| !layer.is_multiple_of(5)).collect(),
        };
        let hidden = reader.size_or("hidden_size", 2048)?;
        let heads = match reader.get("num_attention_heads") {
            Some(_) => reader.heads(hidden, Some(2), Some(256))?,
            None => Heads { query: 8, groups: 2, dim: 256 },
        };
        let theta = |kind: &str, old: &str, default: f64| -> Result<Rope> {
            reader.only(&format!("rope_parameters.{kind}.rope_type"), &json!("default"))?;
            let theta = reader.positive(&[&format!("rope_parameters.{kind}.rope_theta"), old])?;
            Ok(Rope { theta: theta.unwrap_or(default), share: None })
        };
        reader.only("rope_scaling", &Value::Null)?;
        let vocab = reader.size_or("vocab_size", 262_400)?;
        Ok(Self {
            hidden,
            vocab,
            intermediate: common_width(&reader)?,
            double_wide: false,
            window: reader.size_or("sliding_window", 512)?,
            shared: match reader.has("num_kv_shared_layers") {
                true => shared(&reader, &sliding)?,
                false => return Err(reader.fault("num_kv_shared_layers is not there".to_owned())),
            },
            heads: checked(&reader, [heads; 2])?,
            ropes: [
                theta("full_attention", "rope_theta", 1e6)?,
                theta("sliding_attention", "rope_local_base_freq", 1e4)?,
            ],
            ple: reader.size_or("hidden_size_per_layer_input", 256)?,
            pad: 0,
            softcap: reader.positive(&["final_logit_softcapping"])?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(true)?,
            max_positions: reader.size_or("max_position_embeddings", 32_768)?,
            ple_vocab: reader.bounded("vocab_size_per_layer_input", vocab)?,
            altup: Some(AltUp::read(&reader, layers)?),
            sliding,
        })
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.sliding.len()
    }

    /// The first layer that reads a donor's keys and values; the number of layers where none does.
    pub fn first_shared(&self) -> usize {
        self.layers() - self.shared
    }

    /// Layers that a prefill graph computes whole: where layers share keys and values, the last one that has some gives
    /// these alone.
    pub fn attending_prompts(&self) -> usize {
        self.first_shared() - usize::from(self.shared > 0)
    }

    /// The layer whose keys and values `layer` reads, itself where it has its own: the last of the same kind before
    /// [`Config::first_shared`] (`Gemma4TextConfig.kv_sharing_modes`).
    pub fn donor(&self, layer: usize) -> usize {
        let kind = self.sliding.get(layer);
        let before = 0..self.first_shared().min(layer + 1);
        before.rev().find(|donor| self.sliding.get(*donor) == kind).unwrap_or(layer)
    }

    /// The last layer with keys of its own among those that slide, or those that do not.
    pub fn last_own(&self, slides: bool) -> Option<usize> {
        (0..self.first_shared()).rev().find(|layer| self.sliding.get(*layer) == Some(&slides))
    }

    /// Width of a layer's MLP.
    pub fn mlp_width(&self, layer: usize) -> usize {
        let wide = self.double_wide && layer >= self.first_shared();
        if wide { 2 * self.intermediate } else { self.intermediate }
    }

    /// The layers of each of `count` parts. Layers that read a donor's keys are in parts of their own, since prompts
    /// skip them; 3 parts of E4B's 42 layers are the published `[0, 12)`, `[12, 24)` and `[24, 42)`.
    pub fn parts(&self, count: usize) -> Vec<Range<usize>> {
        let (layers, own) = (self.layers(), self.first_shared());
        let even = |from: usize, to: usize, parts: usize| {
            let start = move |part: usize| from + part * (to - from) / parts;
            (0..parts).map(move |part| start(part)..start(part + 1))
        };
        if count < 2 || self.shared == 0 {
            return even(0, layers, count.max(1)).collect();
        }
        // Rounded to the next number; at least one part each, and no more than there are layers.
        let rounded = (2 * count * self.shared + layers) / (2 * layers);
        let behind = rounded.clamp(count.saturating_sub(own).max(1), (count - 1).min(self.shared));
        even(0, own, count - behind).chain(even(own, layers, behind)).collect()
    }
}

/// Errors for what the larger models of the family have.
fn refuse_variants(reader: &Reader<'_>) -> Result<()> {
    if reader.flag("enable_moe_block")? {
        return Err(larger(reader, "enable_moe_block", "experts"));
    }
    if reader.flag("attention_k_eq_v")? {
        return Err(larger(reader, "attention_k_eq_v", "keys that are values, too"));
    }
    if reader.get("use_bidirectional_attention").is_some() {
        return Err(larger(reader, "use_bidirectional_attention", "attention in both directions"));
    }
    Ok(())
}

fn larger(reader: &Reader<'_>, key: &str, is: &str) -> Error {
    reader.fault(format!(
        "{key}: {is}, as in the 26B and 31B models; there is a recipe for E2B and E4B only"
    ))
}

/// `intermediate_size`: a number, or the same one for each layer.
fn common_width(reader: &Reader<'_>) -> Result<usize> {
    let key = "intermediate_size";
    let Some(Value::Array(list)) = reader.get(key) else { return reader.size_or(key, 16_384) };
    let width = list.first().and_then(Value::as_u64).and_then(|width| usize::try_from(width).ok());
    let same = list.iter().all(|width| Some(width) == list.first());
    width.filter(|width| same && (1..=1 << 20).contains(width)).ok_or_else(|| {
        let found = reader.get(key).unwrap_or(&Value::Null);
        reader.bad(key, found, "one width for all layers")
    })
}

/// `layer_types`, or else all layers but each sixth slide. The last is always full.
fn sliding(reader: &Reader<'_>, layers: usize) -> Result<Vec<bool>> {
    let names = [("sliding_attention", true), ("full_attention", false)];
    let mut kinds = match reader.kinds("layer_types", layers, &names)? {
        Some(kinds) => kinds,
        None => (1..=layers).map(|layer| !layer.is_multiple_of(6)).collect(),
    };
    if let Some(last) = kinds.last_mut() {
        *last = false;
    }
    Ok(kinds)
}

fn shared(reader: &Reader<'_>, sliding: &[bool]) -> Result<usize> {
    let value = reader.get("num_kv_shared_layers");
    let shared = value.map_or(Some(0), Value::as_u64).and_then(|n| usize::try_from(n).ok());
    let own = shared.and_then(|shared| sliding.len().checked_sub(shared)).filter(|own| *own > 0);
    let (Some(shared), Some(own)) = (shared, own) else {
        return Err(reader.fault(format!(
            "num_kv_shared_layers is {}, expected fewer than the {} layers",
            value.unwrap_or(&Value::Null),
            sliding.len()
        )));
    };
    let (before, behind) = sliding.split_at(own);
    match behind.iter().find(|kind| !before.contains(kind)) {
        None => Ok(shared),
        Some(kind) => Err(reader.fault(format!(
            "num_kv_shared_layers is {shared}, but none of the {own} layers before them is a {} layer, whose keys \
             and values the others would read",
            if *kind { "sliding_attention" } else { "full_attention" }
        ))),
    }
}

/// Heads of full and of sliding layers.
fn heads(reader: &Reader<'_>, sliding: &[bool]) -> Result<[Heads; 2]> {
    let common = match reader.get("num_attention_heads") {
        Some(_) => reader.heads(reader.size_or("hidden_size", 2304)?, Some(4), Some(256))?,
        None => Heads { query: 8, groups: 4, dim: 256 },
    };
    let full = Heads { dim: reader.size_or("global_head_dim", 512)?, ..common };
    let each = match reader.get("per_layer_config") {
        None => return checked(reader, [full, common]),
        Some(Value::Object(each)) => each,
        Some(other) => return Err(reader.bad("per_layer_config", other, "an object")),
    };
    let mut found: [Option<Heads>; 2] = [None; 2];
    for (layer, slides) in sliding.iter().enumerate() {
        // Keys are numbers of layers, with zeros in front where there are ten or more.
        let own = each.iter().find(|(key, _)| key.parse() == Ok(layer));
        let mut heads = common;
        for (name, target) in
            [("head_dim", &mut heads.dim), ("num_key_value_heads", &mut heads.groups)]
        {
            let Some((key, _)) = own.filter(|(_, own)| own.get(name).is_some()) else { continue };
            *target = reader.size_or(&format!("per_layer_config.{key}.{name}"), *target)?;
        }
        let kind = &mut found[usize::from(*slides)];
        if kind.is_some_and(|kind| kind != heads) {
            return Err(reader.fault(format!(
                "per_layer_config: layer {layer} has other heads than the layers of its kind before it; expected the \
                 same for all full and for all sliding layers"
            )));
        }
        *kind = Some(heads);
    }
    checked(reader, found.map(|heads| heads.unwrap_or(common)))
}

fn checked(reader: &Reader<'_>, heads: [Heads; 2]) -> Result<[Heads; 2]> {
    for Heads { query, groups, dim } in heads {
        if !query.is_multiple_of(groups) || dim < 2 || !dim.is_multiple_of(2) {
            return Err(reader.fault(format!(
                "{query} heads of {dim} values over {groups} of keys, expected a multiple and an even width"
            )));
        }
    }
    Ok(heads)
}

fn rope(reader: &Reader<'_>, kind: &str, theta: f64, share: Option<f64>) -> Result<Rope> {
    let at = |key: &str| format!("rope_parameters.{kind}.{key}");
    let theta = reader.positive(&[&at("rope_theta")])?.unwrap_or(theta);
    let says = reader.get(&format!("rope_parameters.{kind}")).is_some();
    let share = match reader.get(&at("rope_type")).and_then(Value::as_str) {
        None if !says => share,
        None | Some("default") => None,
        Some("proportional") => {
            Some(reader.positive(&[&at("partial_rotary_factor")])?.unwrap_or(1.0))
        }
        Some(other) => {
            return Err(reader.bad(
                &at("rope_type"),
                &json!(other),
                "\"default\" or \"proportional\"",
            ));
        }
    };
    if share.is_some_and(|share| share > 1.0) {
        return Err(reader.fault(format!("{} is above 1", at("partial_rotary_factor"))));
    }
    reader.only(&at("factor"), &json!(1.0))?;
    Ok(Rope { theta, share })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration of `layers` layers, each `full`-th of which is full.
    fn config(layers: usize, full: usize, shared: usize) -> Config {
        let heads = Heads { query: 8, groups: 2, dim: 256 };
        let rope = Rope { theta: 1e4, share: None };
        Config {
            hidden: 64,
            vocab: 100,
            intermediate: 128,
            double_wide: true,
            sliding: (1..=layers).map(|layer| !layer.is_multiple_of(full)).collect(),
            window: 512,
            shared,
            heads: [heads; 2],
            ropes: [rope; 2],
            ple: 16,
            pad: 0,
            softcap: None,
            eps: 1e-6,
            tied: true,
            max_positions: 512,
            ple_vocab: 100,
            altup: None,
        }
    }

    #[test]
    fn parts_and_donors_are_those_of_the_published_bundle() {
        let e4b = config(42, 6, 18);
        assert_eq!(e4b.parts(3), [0..12, 12..24, 24..42]);
        assert_eq!((e4b.donor(24), e4b.donor(29), e4b.donor(40)), (22, 23, 22));
        assert_eq!((e4b.donor(5), e4b.donor(22)), (5, 22));
        assert_eq!((e4b.mlp_width(23), e4b.mlp_width(24)), (128, 256));
        let e2b = config(35, 5, 20);
        assert_eq!((e2b.donor(15), e2b.donor(19)), (13, 14));
    }

    #[test]
    fn any_number_of_parts_covers_all_layers() {
        for (layers, shared) in [(42, 18), (35, 20), (9, 4), (7, 1), (6, 5), (5, 0)] {
            let config = config(layers, 2, shared);
            for count in 1..=layers {
                let parts = config.parts(count);
                assert_eq!(parts.len(), count, "{layers} {shared}");
                assert!(parts.iter().all(|part| !part.is_empty()), "{parts:?}");
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
                assert_eq!((parts[0].start, parts[count - 1].end), (0, layers));
                let split = parts.iter().any(|part| part.end == config.first_shared());
                assert!(split || count == 1, "{parts:?}");
            }
        }
    }
}
