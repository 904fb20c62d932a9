//! Which keys of a `config.json` change what a model computes, by model class: those that are used, those that are
//! refused where they have other values than the listed ones, and those without influence.
//!
//! `tests/oracle/config_keys.py` compares `keys.json` with the classes of `transformers`. Keys that no list has are taken:
//! a class that does not know a key does not compute with it.

use std::collections::BTreeMap;

use qhx_core::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::kit::Reader;

const LISTS: &str = include_str!("keys.json");
/// The list for all classes that have one.
const ALL: &str = "*";

#[derive(Deserialize)]
struct Keys {
    /// Keys that graphs do not follow, with the values that need nothing of them.
    #[serde(default)]
    refused: BTreeMap<String, Vec<Value>>,
}

/// Errors when a key has a value that would change what the model computes and that no graph follows.
pub(crate) fn check(checkpoint: &Checkpoint, class: &str) -> Result<()> {
    let lists: BTreeMap<String, Keys> = serde_json::from_str(LISTS)
        .map_err(|e| Error::caused(ErrorKind::Internal, "forge/src/keys.json", e))?;
    let own = lists.iter().find(|(name, _)| name.eq_ignore_ascii_case(class));
    let Some((_, own)) = own else { return Ok(()) };
    let reader = Reader::new(checkpoint);
    let all = lists.get(ALL).into_iter().chain([own]).flat_map(|keys| &keys.refused);
    for (key, taken) in all {
        let Some(found) = reader.get(key).filter(|value| !taken.contains(value)) else { continue };
        let taken: Vec<_> = taken.iter().map(Value::to_string).collect();
        let taken = if taken.is_empty() { "null".to_owned() } else { taken.join(" or ") };
        return Err(reader.bad(key, found, &taken).hint(format!(
            "the key changes what a {class} computes, and the graphs would not follow it"
        )));
    }
    Ok(())
}
