//! Reads checked values from a configuration file of a checkpoint.

use qhx_core::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::checkpoint::Checkpoint;

/// Larger than any size of a model, small enough that products of a few do not overflow.
const MAX_SIZE: u64 = 1 << 24;

/// The decoder's part of `config.json`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    pub checkpoint: &'a Checkpoint,
    pub value: &'a Value,
}

impl<'a> Reader<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, value: checkpoint.text_config() }
    }

    /// The value of a key; none when it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// A size that must be there.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.maybe_size(key)?
            .ok_or_else(|| self.fault(format!("{key} is missing, expected a size")))
    }

    /// A size; none when it is absent or null.
    pub fn maybe_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n)).map(|n| n as usize);
        match size {
            Some(size) => Ok(Some(size)),
            None => Err(self.bad(key, value, &format!("a number from 1 to {MAX_SIZE}"))),
        }
    }

    /// A switch that is off when absent.
    pub fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.bad(key, value, "true or false")),
        }
    }

    /// A finite positive number, found under `key` in `value`.
    pub fn positive(&self, key: &str, value: &Value) -> Result<f64> {
        value
            .as_f64()
            .filter(|v| v.is_finite() && *v > 0.0)
            .ok_or_else(|| self.bad(key, value, "a positive number"))
    }

    pub fn bad(&self, key: &str, found: &Value, expected: &str) -> Error {
        self.fault(format!("{key} is {found}, expected {expected}"))
    }

    pub fn fault(&self, what: String) -> Error {
        let path = self.checkpoint.config_path();
        Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
    }
}
