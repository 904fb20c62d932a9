//! The keys of `config.json` that shape the graphs, checked.

use qhx_core::Result;
use serde_json::{Value, json};

use crate::checkpoint::Checkpoint;
use crate::kit::{Experts, Heads, Reader};

/// `rope_theta` of the classes when no key says it.
const ROPE_THETA: f64 = 1e4;

/// Which of the classes a checkpoint is; they differ in defaults, biases and norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Kind {
    /// By the name of the model class: `MistralForCausalLM`, `LlamaBidirectionalModel`, ….
    pub fn of(class: &str) -> Option<Self> {
        [
            ("Llama", Self::Llama),
            ("Mistral", Self::Mistral),
            ("Qwen2", Self::Qwen2),
            ("Qwen3", Self::Qwen3),
        ]
        .into_iter()
        .find(|(prefix, _)| class.starts_with(prefix))
        .map(|(_, kind)| kind)
    }

    /// `model.family` of the manifest.
    pub const fn family(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub kind: Kind,
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: Heads,
    pub rope_theta: f64,
    /// `params.rope_scaling` of the manifest, where frequencies are scaled.
    pub rope_scaling: Option<Value>,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    pub qk_norm: bool,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: Option<usize>,
    /// Min number of positions that a causal layer sees, where one slides.
    pub window: Option<usize>,
    /// Of classes with experts.
    pub sparse: Option<Sparse>,
}

/// The layers with experts.
#[derive(Debug, Clone)]
pub(super) struct Sparse {
    pub experts: Experts,
    /// For each layer whether it has some.
    pub layers: Vec<bool>,
    /// `norm_topk_prob`
    pub normalize: bool,
}

impl Sparse {
    /// Reads and checks the keys of `Qwen3MoeConfig`.
    fn read(reader: &Reader<'_>, hidden: usize, layers: usize) -> Result<Self> {
        let step = reader.size_or("decoder_sparse_step", 1)?;
        let dense = match reader.get("mlp_only_layers") {
            None => Vec::new(),
            Some(list) => {
                let number = |value: &Value| value.as_u64().filter(|n| *n < layers as u64);
                let numbers = list.as_array().map(|list| list.iter().map(number));
                let numbers = numbers.and_then(|list| list.collect::<Option<Vec<_>>>());
                let expected = || format!("a list of layers below {layers}");
                numbers.ok_or_else(|| reader.bad("mlp_only_layers", list, &expected()))?
            }
        };
        let sparse =
            |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&(layer as u64));
        let layers: Vec<_> = (0..layers).map(sparse).collect();
        if !layers.contains(&true) {
            return Err(reader.fault(
                "decoder_sparse_step and mlp_only_layers leave no layer with experts, expected one or more".to_owned(),
            ));
        }
        let normalize = reader.flag("norm_topk_prob")?;
        Ok(Self { experts: Experts::read(reader, hidden)?, layers, normalize })
    }
}

impl Config {
    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint, kind: Kind) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        let hidden = reader.size("hidden_size")?;
        let layers = reader.layers()?;
        let groups = match kind {
            Kind::Llama => None,
            Kind::Mistral => Some(8),
            Kind::Qwen2 | Kind::Qwen3 => Some(32),
        };
        let dim = (kind == Kind::Qwen3).then_some(128);
        let attention_bias = kind != Kind::Mistral && reader.flag("attention_bias")?;
        let max_positions = reader.maybe_size("max_position_embeddings")?;
        let (rope_theta, rope_scaling) = rope(&reader, max_positions)?;
        let with_experts = checkpoint.architecture().is_some_and(|class| class.contains("Moe"));
        let sparse = with_experts.then(|| Sparse::read(&reader, hidden, layers));
        Ok(Self {
            kind,
            hidden,
            vocab: reader.size("vocab_size")?,
            // Without a dense layer nobody needs it.
            intermediate: match with_experts {
                true => reader.size_or("intermediate_size", 1)?,
                false => reader.size("intermediate_size")?,
            },
            layers,
            heads: reader.heads(hidden, groups, dim)?,
            rope_theta,
            rope_scaling,
            qkv_bias: kind == Kind::Qwen2 || attention_bias,
            o_bias: kind != Kind::Qwen2 && attention_bias,
            mlp_bias: kind == Kind::Llama && reader.flag("mlp_bias")?,
            qk_norm: kind == Kind::Qwen3,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            tied: reader.tied(false),
            max_positions,
            window: window(&reader, kind, layers)?,
            sparse: sparse.transpose()?,
        })
    }
}

/// Theta, and the manifest's `rope_scaling` where frequencies are scaled.
fn rope(reader: &Reader<'_>, max_positions: Option<usize>) -> Result<(f64, Option<Value>)> {
    let name = reader.rope_key();
    let inner = |key: &str| reader.get(&format!("{name}.{key}"));
    let theta = reader.positive(&[&format!("{name}.rope_theta"), "rope_theta"])?;
    let theta = theta.unwrap_or(ROPE_THETA);
    let kind = inner("rope_type").or(inner("type")).and_then(Value::as_str).unwrap_or("default");
    let number = |key: &str| {
        let key = format!("{name}.{key}");
        let found = reader.positive(&[&key])?;
        found.ok_or_else(|| reader.fault(format!("{key} is missing, expected a number")))
    };
    let scaling = match kind {
        "default" => None,
        "linear" => Some(json!({"rope_type": "linear", "factor": number("factor")?})),
        "llama3" => {
            let original = match (inner("original_max_position_embeddings"), max_positions) {
                (None, Some(positions)) => positions as f64,
                _ => number("original_max_position_embeddings")?,
            };
            let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
            if high <= low {
                return Err(reader.fault(format!(
                    "{name}: low_freq_factor {low} and high_freq_factor {high}, expected the \
                     second to be larger"
                )));
            }
            Some(json!({
                "rope_type": "llama3",
                "factor": number("factor")?,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }))
        }
        other => {
            return Err(reader.fault(format!(
                "{name}: rope type {other:?}, expected \"default\", \"linear\" or \"llama3\""
            )));
        }
    };
    Ok((theta, scaling))
}

/// Min number of positions that a layer sees, where one slides.
fn window(reader: &Reader<'_>, kind: Kind, layers: usize) -> Result<Option<usize>> {
    let window = reader.maybe_size("sliding_window")?;
    match kind {
        Kind::Llama => Ok(None),
        Kind::Mistral if !reader.has("sliding_window") => Ok(Some(4096)),
        Kind::Mistral => Ok(window),
        Kind::Qwen2 | Kind::Qwen3 => {
            if !reader.flag("use_sliding_window")? {
                return Ok(None);
            }
            let slides = match reader.get("layer_types").and_then(Value::as_array) {
                Some(types) => types.iter().any(|t| t == "sliding_attention"),
                None => reader.maybe_size("max_window_layers")?.unwrap_or(28) < layers,
            };
            Ok(window.or(Some(4096)).filter(|_| slides))
        }
    }
}
