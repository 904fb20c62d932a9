//! Reads checked values from the configuration of a checkpoint.

use half::{bf16, f16};
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::Value;

use super::attention::Heads;

/// Larger than any size of a model, small enough that a few multiplied do not overflow.
const MAX_SIZE: u64 = 1 << 24;
/// More layers than any model has.
const MAX_LAYERS: usize = 4096;

/// True where two values are the same, 1 and 1.0 among them.
pub(crate) fn same(a: &Value, b: &Value) -> bool {
    a == b || a.is_number() && a.as_f64() == b.as_f64()
}

/// A part of `config.json`, the decoder's as a rule. A key may be a path, `rope_parameters.rope_theta`; a value of
/// null counts as absent. Errors name the file, the key, what was found and what was expected.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    value: &'a Value,
    /// Prefix of keys in messages: `vision_config`, or nothing.
    place: &'a str,
}

impl<'a> Reader<'a> {
    /// A reader of the decoder's part, [`Checkpoint::text_config`].
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, value: checkpoint.text_config(), place: "" }
    }

    /// A reader of the whole file, for keys beside `text_config`.
    pub fn whole(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, value: checkpoint.config(), place: "" }
    }

    /// A reader of the object `key` of the whole file, such as `vision_config`.
    ///
    /// # Errors
    /// When there is none.
    pub fn part(checkpoint: &'a Checkpoint, key: &'a str) -> Result<Self> {
        let whole = Self::whole(checkpoint);
        match whole.get(key) {
            Some(value) if value.is_object() => Ok(Self { checkpoint, value, place: key }),
            Some(value) => Err(whole.bad(key, value, "an object")),
            None => Err(whole.fault(format!("{key} is missing, expected an object"))),
        }
    }

    /// The value of a key; none when it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.find(key).filter(|v| !v.is_null())
    }

    /// True when the key is there, its value null or not.
    pub fn has(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    fn find(&self, key: &str) -> Option<&'a Value> {
        key.split('.').try_fold(self.value, |value, part| value.get(part))
    }

    /// The first of several keys that is there, with its value: spellings of one thing, the preferred first.
    pub fn first<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, &'a Value)> {
        keys.iter().find_map(|key| Some((*key, self.get(key)?)))
    }

    /// A size, an integer above 0, that must be there.
    ///
    /// # Errors
    /// When it is absent, or no size.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.maybe_size(key)?
            .ok_or_else(|| self.fault(format!("{key} is missing, expected a size")))
    }

    /// A size; none when it is absent or null.
    ///
    /// # Errors
    /// When it is no size.
    pub fn maybe_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n)).map(|n| n as usize);
        match size {
            Some(size) => Ok(Some(size)),
            None => Err(self.bad(key, value, &format!("a number from 1 to {MAX_SIZE}"))),
        }
    }

    /// A size, or `default`, that of the configuration class.
    ///
    /// # Errors
    /// When it is no size.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.maybe_size(key)?.unwrap_or(default))
    }

    /// A size of at most `max`.
    ///
    /// # Errors
    /// When it is absent, no size, or larger.
    pub fn bounded(&self, key: &str, max: usize) -> Result<usize> {
        let size = self.size(key)?;
        if size > max {
            return Err(self.fault(format!("{key} is {size}, expected at most {max}")));
        }
        Ok(size)
    }

    /// The number of layers, `num_hidden_layers`.
    ///
    /// # Errors
    /// When it is absent, or not in range.
    pub fn layers(&self) -> Result<usize> {
        self.bounded("num_hidden_layers", MAX_LAYERS)
    }

    /// The same, or `default`, that of the configuration class.
    ///
    /// # Errors
    /// When it is not in range.
    pub fn layers_or(&self, default: usize) -> Result<usize> {
        self.layers_of("num_hidden_layers", default)
    }

    /// The same under another key.
    ///
    /// # Errors
    /// When it is not in range.
    pub fn layers_of(&self, key: &str, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |_| self.bounded(key, MAX_LAYERS))
    }

    /// The kind of each layer, by its name under `key`; none when the key is absent or null.
    ///
    /// # Errors
    /// When the list has another length, or an unknown name.
    pub fn kinds<T: Copy>(
        &self,
        key: &str,
        layers: usize,
        names: &[(&str, T)],
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array();
        let list = list.ok_or_else(|| self.bad(key, value, "a list with a name for each layer"))?;
        if list.len() != layers {
            return Err(self.fault(format!(
                "{key} has {} entries, expected {layers} (num_hidden_layers)",
                list.len()
            )));
        }
        let kind = |found: &Value| {
            let named = names.iter().find(|(name, _)| found == name).map(|(_, kind)| *kind);
            named.ok_or_else(|| {
                let names: Vec<_> = names.iter().map(|(name, _)| format!("{name:?}")).collect();
                self.bad(key, found, &names.join(" or "))
            })
        };
        list.iter().map(kind).collect::<Result<_>>().map(Some)
    }

    /// A switch that is off when absent.
    ///
    /// # Errors
    /// When it is neither true nor false.
    pub fn flag(&self, key: &str) -> Result<bool> {
        self.flag_or(key, false)
    }

    /// A switch, or the default of the configuration class.
    ///
    /// # Errors
    /// When it is neither true nor false.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.bad(key, value, "true or false")),
        }
    }

    /// A positive number that f32 holds, under the first of the keys that is there.
    ///
    /// # Errors
    /// When it is no such number.
    pub fn positive(&self, keys: &[&str]) -> Result<Option<f64>> {
        let Some((key, value)) = self.first(keys) else { return Ok(None) };
        match value
            .as_f64()
            .filter(|v| (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(v))
        {
            Some(number) => Ok(Some(number)),
            None => Err(self.bad(key, value, "a positive number")),
        }
    }

    /// The epsilon of norms, above 0 and below 1, under the first of the keys that is there, or that of the
    /// configuration class.
    ///
    /// # Errors
    /// When it is out of range.
    pub fn epsilon(&self, keys: &[&str], default: f32) -> Result<f32> {
        let Some((key, value)) = self.first(keys) else { return Ok(default) };
        match value.as_f64().filter(|e| *e > 0.0 && *e < 1.0) {
            Some(eps) => Ok(eps as f32),
            None => Err(self.bad(key, value, "a number between 0 and 1")),
        }
    }

    /// Checks that a key has the value `expected`, if it is there.
    ///
    /// # Errors
    /// When it has another one.
    pub fn only(&self, key: &str, expected: &Value) -> Result<()> {
        match self.get(key) {
            Some(found) if !same(found, expected) => {
                Err(self.bad(key, found, &expected.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// `num_attention_heads`, `num_key_value_heads` and `head_dim`, checked. `groups` and `dim` are what the
    /// configuration class has where the last two are absent; without them, one group for each head, and heads
    /// that together are `hidden` wide. A `num_key_value_heads` of null means one group for each head.
    ///
    /// # Errors
    /// When one is no size, or they do not divide each other.
    pub fn heads(&self, hidden: usize, groups: Option<usize>, dim: Option<usize>) -> Result<Heads> {
        let query = self.size("num_attention_heads")?;
        let default = groups.filter(|_| !self.has("num_key_value_heads")).unwrap_or(query);
        let groups = self.size_or("num_key_value_heads", default)?;
        if !query.is_multiple_of(groups) {
            return Err(self.fault(format!(
                "num_attention_heads and num_key_value_heads are {query} and {groups}, expected \
                 a multiple and its divisor"
            )));
        }
        let dim = self.size_or("head_dim", dim.unwrap_or(hidden / query))?;
        if dim < 2 || !dim.is_multiple_of(2) {
            return Err(self.fault(format!("head_dim is {dim}, expected an even number")));
        }
        Ok(Heads { query, groups, dim })
    }

    /// Base of the rotary embedding, or that of the configuration class.
    ///
    /// # Errors
    /// When it is no positive number, or frequencies are scaled.
    pub fn rope_theta(&self, default: f64) -> Result<f64> {
        self.rope_theta_of(&["default"], default)
    }

    /// Same as [`Reader::rope_theta`], with other names of rope types that mean no scaling.
    ///
    /// # Errors
    /// Errors of [`Reader::rope_theta`].
    pub fn rope_theta_of(&self, types: &[&str], default: f64) -> Result<f64> {
        // The old spelling, where it says something, replaces the new one.
        let place = self.rope_key();
        let spellings = ["rope_type", "type"].map(|key| format!("{place}.{key}"));
        let kind = self.first(&[&spellings[0], &spellings[1]]);
        let known = |kind: &Value| kind.as_str().is_some_and(|kind| types.contains(&kind));
        if let Some((key, kind)) = kind.filter(|(_, kind)| !known(kind)) {
            return Err(self.bad(key, kind, "\"default\""));
        }
        let theta = self.positive(&[&format!("{place}.rope_theta"), "rope_theta"])?;
        Ok(theta.unwrap_or(default))
    }

    /// Key of the rotary embedding's parameters: `rope_scaling` where that is set, as in older checkpoints, else
    /// `rope_parameters`.
    pub fn rope_key(&self) -> &'static str {
        if self.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" }
    }

    /// `value` in the type that the model runs in, that of its weights, as the scaled embeddings of Gemma round it: the
    /// `dtype`, which a nested configuration may have at the top level alone, or `default`.
    ///
    /// # Errors
    /// When that is none of bfloat16, float16 and float32.
    pub fn in_model_type(&self, value: f32, default: &str) -> Result<f32> {
        let (whole, keys) = (Self::whole(self.checkpoint), ["dtype", "torch_dtype"]);
        let found = self.first(&keys).or(whole.first(&keys));
        match found.map_or(Some(default), |(_, dtype)| dtype.as_str()) {
            Some("bfloat16") => Ok(bf16::from_f32(value).to_f32()),
            Some("float16") => Ok(f16::from_f32(value).to_f32()),
            Some("float32") => Ok(value),
            _ => {
                let (key, dtype) = found.unwrap_or((keys[0], &Value::Null));
                Err(self.bad(key, dtype, "\"bfloat16\", \"float16\" or \"float32\""))
            }
        }
    }

    /// `tie_word_embeddings`, where in nested configurations the top level governs the head; or how the
    /// configuration class has it.
    ///
    /// # Errors
    /// When it is neither true nor false.
    pub fn tied(&self, default: bool) -> Result<bool> {
        let (whole, key) = (Self::whole(self.checkpoint), "tie_word_embeddings");
        let own = self.flag_or(key, default)?;
        if whole.has(key) { whole.flag_or(key, default) } else { Ok(own) }
    }

    /// The number of a token of a vocabulary of `vocab` under the first of the keys that is there, or `default`, that of
    /// the configuration class.
    ///
    /// # Errors
    /// When it is no such number.
    pub fn token(&self, keys: &[&str], default: u64, vocab: usize) -> Result<u64> {
        let Some((key, value)) = self.first(keys) else { return Ok(default) };
        let token = value.as_u64().filter(|token| *token < vocab as u64);
        token.ok_or_else(|| self.bad(key, value, &format!("a token below {vocab} (vocab_size)")))
    }

    /// The error for the value of a key that is not what was expected.
    pub fn bad(&self, key: &str, found: &Value, expected: &str) -> Error {
        self.fault(format!("{key} is {found}, expected {expected}"))
    }

    /// An error of the configuration file.
    pub fn fault(&self, what: String) -> Error {
        let path = self.checkpoint.config_path();
        let place = if self.place.is_empty() { String::new() } else { format!("{}: ", self.place) };
        Error::new(ErrorKind::Artifact, format!("{}: {place}{what}", path.display()))
    }
}
