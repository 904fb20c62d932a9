//! Objects of `quantization_config`, and what is wrong with their values.

use serde_json::Value;

use super::Read;

/// An object of the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Declared<'a>(pub &'a Value);

impl<'a> Declared<'a> {
    pub fn get(self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A text; empty without one.
    pub fn text(self, key: &str) -> &'a str {
        self.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn number(self, key: &str) -> Option<i64> {
        self.get(key).and_then(Value::as_i64)
    }

    /// Message about an invalid value of a key.
    pub fn bad(self, key: &str, expected: &str) -> String {
        let found = self.0.get(key).unwrap_or(&Value::Null);
        format!("quantization_config: {key} is {found}, expected {expected}")
    }

    /// Inputs of a group; none for all inputs of an output.
    pub fn group(self, keys: [&'static str; 2]) -> Read<Option<usize>> {
        let expected = "a multiple of 32, or -1";
        match keys.iter().find_map(|key| self.number(key)) {
            Some(-1) => Ok(None),
            Some(size) => match usize::try_from(size) {
                Ok(size) if size > 0 && size.is_multiple_of(32) => Ok(Some(size)),
                _ => Err(self.bad(keys[0], expected)),
            },
            None => Err(self.bad(keys[0], expected)),
        }
    }
}
