//! JSON files of checkpoints.

use std::path::Path;

use qhx_base::files;
use qhx_base::{ErrorKind, Result};
use serde_json::Value;

use crate::artifact;

/// Longest JSON file that is read, the index of a very large model included.
pub const MAX_JSON: u64 = 64 << 20;

/// Reads a JSON value. Infinity, which Python writes and JSON does not have, becomes the object that `transformers`
/// writes instead: `{"__float__": "Infinity"}`.
pub fn read_json_value(path: &Path) -> Result<Value> {
    files::read_json(ErrorKind::Artifact, path, MAX_JSON).or_else(|error| {
        let text = files::read(ErrorKind::Artifact, path, MAX_JSON)?;
        let text = String::from_utf8(text).ok().map(|text| without_infinity(&text));
        text.and_then(|text| serde_json::from_str(&text).ok()).ok_or(error)
    })
}

/// The text with an object for each Infinity outside of strings.
fn without_infinity(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    let mut within = false;
    // Between quotes, without those that a backslash escapes.
    for part in text.split_inclusive('"') {
        match within {
            true => found.push_str(part),
            false => found.push_str(&part.replace("Infinity", INFINITY)),
        }
        let before = part.strip_suffix('"').unwrap_or(part);
        let escapes = before.len() - before.trim_end_matches('\\').len();
        within ^= part.ends_with('"') && !(within && escapes % 2 == 1);
    }
    found
}

/// An infinity as `transformers` writes it.
const INFINITY: &str = r#"{"__float__": "Infinity"}"#;

/// Reads a JSON object.
pub fn read_json(path: &Path) -> Result<Value> {
    let value = read_json_value(path)?;
    if !value.is_object() {
        return Err(artifact(path, "expected a JSON object"));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::without_infinity;

    #[test]
    fn an_infinity_outside_of_strings_becomes_an_object() {
        let text = r#"{"a": [0.0, Infinity], "b": "\"Infinity", "c\\": Infinity}"#;
        let found: serde_json::Value = serde_json::from_str(&without_infinity(text)).unwrap();
        assert_eq!(found["a"][1]["__float__"], "Infinity");
        assert_eq!(found["b"], "\"Infinity");
        assert_eq!(found["c\\"]["__float__"], "Infinity");
    }
}
