//! Which layers an entry of `targets` or `ignore` of compressed-tensors is about.

use std::fmt;
use std::sync::Arc;

use fancy_regex::Regex;
use serde_json::Value;

use super::Read;

/// A class, a name, or a regular expression that a name begins with.
#[derive(Debug, Clone)]
pub(super) enum Target {
    /// `Linear`: all layers that are read here.
    Linear,
    Name(String),
    /// After `re:`.
    Pattern(String, Arc<Regex>),
}

impl Target {
    /// The entries of a list. Errors when one cannot be read.
    pub fn list(value: Option<&Value>) -> Read<Vec<Self>> {
        let Some(value) = value else { return Ok(Vec::new()) };
        let wrong = || {
            format!("quantization_config: a list of layers is {value}, expected a list of names")
        };
        value
            .as_array()
            .ok_or_else(wrong)?
            .iter()
            .map(|one| Self::of(one.as_str().ok_or_else(wrong)?))
            .collect()
    }

    fn of(text: &str) -> Read<Self> {
        let Some(pattern) = text.strip_prefix("re:") else {
            return Ok(if text == "Linear" { Self::Linear } else { Self::Name(text.to_owned()) });
        };
        // As Python's `match`, which begins at the beginning and ends anywhere.
        let regex = Regex::new(&format!("^(?:{pattern})")).map_err(|e| {
            format!("quantization_config: {text:?} is no regular expression that is read ({e})")
        })?;
        Ok(Self::Pattern(text.to_owned(), Arc::new(regex)))
    }

    /// True when it is about this layer by its name. A name that a backtracking expression takes too long for is none.
    pub fn names(&self, layer: &str) -> bool {
        match self {
            Self::Linear => false,
            Self::Name(name) => name == layer,
            Self::Pattern(_, regex) => regex.is_match(layer).unwrap_or(false),
        }
    }

    /// Rank of the most specific target that matches a layer: a name, an expression, a class. None if no target
    /// matches.
    pub fn rank(targets: &[Self], layer: &str) -> Option<usize> {
        let rank = |target: &Self| match target {
            Self::Name(_) if target.names(layer) => Some(0),
            Self::Pattern(..) if target.names(layer) => Some(1),
            Self::Linear => Some(2),
            _ => None,
        };
        targets.iter().filter_map(rank).min()
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linear => f.write_str("Linear"),
            Self::Name(text) | Self::Pattern(text, _) => f.write_str(text),
        }
    }
}
