//! Sizes and constants of a model.

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use super::classes::{Class, Gated, Head, Positions};
use crate::kit::{Heads, Reader};
use crate::recipes::encoder::{ACTIVATIONS, Dense};

/// Spellings of keys: that of BERT, that of GPT-2, which NomicBERT has, and that of DistilBERT.
const HIDDEN: [&str; 3] = ["hidden_size", "n_embd", "dim"];
const INTERMEDIATE: [&str; 3] = ["intermediate_size", "n_inner", "hidden_dim"];
const LAYERS: [&str; 3] = ["num_hidden_layers", "n_layer", "n_layers"];
const HEADS: [&str; 3] = ["num_attention_heads", "n_head", "n_heads"];
const LENGTH: [&str; 2] = ["max_position_embeddings", "n_positions"];
const ACTIVATION: [&str; 3] = ["hidden_act", "activation_function", "activation"];
/// More layers than any model has.
const MAX_LAYERS: usize = 4096;
/// Gated activations as NomicBERT names them.
const GLU: [(&str, &str); 2] = [("swiglu", "silu"), ("geglu", "gelu")];

/// Rotary positions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rope {
    pub theta: f64,
    /// Divisor of the frequencies.
    pub factor: f64,
}

impl Rope {
    /// `params.rope_scaling` of the manifest; none where frequencies stay.
    pub fn scaling(self) -> Option<Value> {
        (self.factor != 1.0).then(|| json!({"rope_type": "linear", "factor": self.factor}))
    }
}

/// Sizes and constants of a model; where a key is absent, those of its configuration class.
#[derive(Debug)]
pub(super) struct Config {
    pub class: &'static Class,
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: Heads,
    pub eps: f32,
    /// Tokens of the longest text.
    pub positions: usize,
    /// Row of the table of positions that the first token has: RoBERTa counts from behind its padding token.
    first: usize,
    pub types: usize,
    pub rope: Option<Rope>,
    /// Numbers of the table for distances.
    pub buckets: usize,
    pub activation: String,
    pub gated: Option<Gated>,
}

impl Config {
    pub fn read(checkpoint: &Checkpoint, class: &'static Class) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        for key in ["is_decoder", "add_cross_attention"] {
            reader.only(key, &json!(false))?;
        }
        let size = |keys: &[&str], default: usize| {
            reader.first(keys).map_or(Ok(default), |(key, _)| reader.size(key))
        };
        let declared = reader.get("position_embedding_type");
        let positions = match (declared.map(|kind| (kind, kind.as_str())), class.positions) {
            (None, own) => own,
            (Some((_, Some("absolute"))), Positions::Table | Positions::BehindPadding) => {
                class.positions
            }
            // NomicBERT and GTE know no other; Jina writes it for its own layout of XLM-RoBERTa.
            (Some((_, Some("rope" | "rotary"))), own)
                if class.theta > 0.0 && own != Positions::Table =>
            {
                Positions::Rotary
            }
            (Some((found, _)), _) => {
                return Err(reader.bad("position_embedding_type", found, "the class's own"));
            }
        };
        let hidden = size(&HIDDEN, 768)?;
        let query = size(&HEADS, 12)?;
        if !hidden.is_multiple_of(query) || !(hidden / query).is_multiple_of(2) {
            let keys =
                [HIDDEN, HEADS].map(|keys| reader.first(&keys).map_or(keys[0], |(key, _)| key));
            return Err(reader.fault(format!(
                "{} is {hidden}, expected an even multiple of {}, {query}",
                keys[0], keys[1]
            )));
        }
        reader.only("head_dim", &json!(hidden / query))?;
        let dim = hidden / query;
        let (length_key, rows) = match reader.first(&LENGTH) {
            Some((key, _)) => (key, reader.size(key)?),
            None => (LENGTH[0], 512),
        };
        let (first, length) = match positions {
            Positions::BehindPadding => behind_padding(&reader, class, length_key, rows)?,
            _ => (0, rows),
        };
        let rope = match positions {
            Positions::Rotary => Some(rope(&reader, class, dim)?),
            _ => None,
        };
        // Longer texts would have frequencies that depend on their length.
        let trained = reader.maybe_size("max_trained_positions")?;
        let trained = trained.filter(|_| reader.get("rotary_scaling_factor").is_some());
        let (activation, gated) = activation(&reader, class)?;
        let layers = match reader.first(&LAYERS) {
            Some((key, _)) => reader.bounded(key, MAX_LAYERS)?,
            None => return Err(reader.fault(format!("{} is missing, expected a size", LAYERS[0]))),
        };
        let types = match reader.get("type_vocab_size").and_then(Value::as_u64) {
            Some(0) => 0,
            _ if class.types == 0 => 0,
            _ => reader.size_or("type_vocab_size", class.types)?,
        };
        Ok(Self {
            class,
            hidden,
            vocab: reader.size("vocab_size")?,
            intermediate: size(&INTERMEDIATE, 4 * hidden)?,
            layers,
            heads: Heads { query, groups: query, dim },
            eps: reader.epsilon(&["layer_norm_eps", "layer_norm_epsilon"], class.eps)?,
            positions: trained.map_or(length, |trained| trained.min(length)),
            first,
            types,
            rope,
            buckets: reader.size_or("relative_attention_num_buckets", 32)?,
            activation,
            gated,
        })
    }

    /// Rows of the table of positions that tokens have.
    pub fn places(&self) -> Range<usize> {
        self.first..self.first + self.positions
    }

    /// The head of a reranker.
    pub fn head(&self) -> [Dense<'static>; 2] {
        let (names, activation) = match self.class.head {
            Head::Dense => (["classifier.dense", "classifier.out_proj"], "tanh"),
            Head::Pooler => (["pooler.dense", "classifier"], "tanh"),
            Head::PreClassifier => (["pre_classifier", "classifier"], "relu"),
        };
        let dense = |name, outputs, activation| Dense {
            name,
            shape: [outputs, self.hidden],
            bias: true,
            activation,
            temperature: 1.0,
            norm: None,
        };
        [dense(names[0], self.hidden, activation), dense(names[1], 1, "identity")]
    }
}

/// The row of the first token's position, and how many follow.
fn behind_padding(
    reader: &Reader<'_>,
    class: &Class,
    key: &str,
    rows: usize,
) -> Result<(usize, usize)> {
    let first = match reader.get("pad_token_id").filter(|_| !class.relative) {
        None => class.padding + 1,
        Some(padding) => match padding.as_u64().filter(|padding| *padding < rows as u64) {
            Some(padding) => padding as usize + 1,
            None => return Err(reader.bad("pad_token_id", padding, "a row of positions")),
        },
    };
    match rows.checked_sub(first).filter(|positions| *positions > 0) {
        Some(positions) => Ok((first, positions)),
        None => Err(reader.fault(format!(
            "{key} is {rows}, expected more than {first}, from which pad_token_id has positions begin"
        ))),
    }
}

/// Rotary positions of heads of `dim`.
fn rope(reader: &Reader<'_>, class: &Class, dim: usize) -> Result<Rope> {
    let place = reader.rope_key();
    let [kind, kind2, theta, factor, mixed] =
        ["rope_type", "type", "rope_theta", "factor", "mixed_b"]
            .map(|key| format!("{place}.{key}"));
    let base = reader.positive(&[&theta, "rope_theta", "rotary_emb_base"])?.unwrap_or(class.theta);
    let found = reader.first(&[&kind, &kind2]);
    let Some((key, kind)) = found.filter(|(_, kind)| *kind != "default") else {
        return Ok(Rope { theta: base, factor: 1.0 });
    };
    let factor = reader.positive(&[&factor])?;
    match (kind.as_str(), factor) {
        (Some("linear"), Some(factor)) => Ok(Rope { theta: base, factor }),
        // `NTKScalingRotaryEmbedding` of the layout's own code: the longest wave grows by the factor, the shortest by
        // its part of a pair.
        (Some("ntk"), Some(factor)) => {
            reader.only(&mixed, &Value::Null)?;
            Ok(Rope { theta: base * factor, factor: factor.powf(2.0 / dim as f64) })
        }
        _ => Err(reader.bad(key, kind, "\"default\", or \"linear\" or \"ntk\" with a factor")),
    }
}

/// Activation of the feed-forward, and the gate that it has.
fn activation(reader: &Reader<'_>, class: &Class) -> Result<(String, Option<Gated>)> {
    let found = reader.first(&ACTIVATION);
    let Some((key, value)) = found else { return Ok((class.activation.to_owned(), class.gated)) };
    let name = value.as_str().unwrap_or_default();
    let glu = GLU.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours);
    match glu {
        Some(own) if class.gated.is_some() => Ok((own.to_owned(), class.gated)),
        // A model of NomicBERT's own code without a gate has another feed-forward.
        None if ACTIVATIONS.contains(&name)
            && !(key == "activation_function" && class.gated.is_some()) =>
        {
            Ok((name.to_owned(), class.gated))
        }
        _ => Err(reader.bad(
            key,
            value,
            &format!("\"swiglu\", \"geglu\", or one of {}", ACTIVATIONS.join(", ")),
        )),
    }
}
