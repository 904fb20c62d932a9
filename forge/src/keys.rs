//! Which keys of a `config.json` change what a model computes, by model class: those that are used, those that are
//! refused where they have other values than the listed ones, and those without influence.
//!
//! A list is named by its classes, and by the part of the configuration that it is for (`Class.vision_config`); those
//! of small letters are what others have in common. `tests/oracle/config_keys.py` compares `keys.json` with the classes
//! of `transformers`. Keys that no list has are taken: a class that does not know a key does not compute with it.

use std::collections::{BTreeMap, BTreeSet};

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use serde::Deserialize;
use serde_json::Value;

use crate::kit::{Reader, same};

const LISTS: &str = include_str!("keys.json");
/// The list for all classes that have one.
const ALL: &str = "*";
/// The part of a configuration that is its decoder's.
const TEXT: &str = "text_config";

#[derive(Deserialize)]
struct Keys {
    /// Further lists. Where two have a key, this one's counts.
    #[serde(default)]
    with: Vec<String>,
    #[serde(default)]
    used: BTreeSet<String>,
    /// Keys that graphs do not follow, with the values that need nothing of them.
    #[serde(default)]
    refused: BTreeMap<String, Vec<Value>>,
    #[serde(default)]
    neutral: BTreeSet<String>,
}

type Lists = BTreeMap<String, Keys>;

impl Keys {
    fn has(&self, key: &str) -> bool {
        self.used.contains(key) || self.refused.contains_key(key) || self.neutral.contains(key)
    }

    /// The list and those that it goes with, itself first.
    fn chain<'a>(&'a self, lists: &'a Lists) -> Vec<&'a Self> {
        let further = self.with.iter().filter_map(|name| lists.get(name));
        [vec![self], further.flat_map(|keys| keys.chain(lists)).collect()].concat()
    }
}

/// Errors when a key has a value that would change what the model computes and that no graph follows.
pub(crate) fn check(checkpoint: &Checkpoint, class: &str) -> Result<()> {
    let lists: Lists = serde_json::from_str(LISTS)
        .map_err(|e| Error::caused(ErrorKind::Internal, "forge/src/keys.json", e))?;
    for (name, own) in &lists {
        let (classes, part) = name.split_once('.').map_or((&**name, None), |(c, p)| (c, Some(p)));
        if !classes.split(' ').any(|name| name.eq_ignore_ascii_case(class)) {
            continue;
        }
        let reader = match part {
            None => Reader::whole(checkpoint),
            Some(TEXT) => Reader::new(checkpoint),
            Some(part) if checkpoint.config().get(part).is_some_and(Value::is_object) => {
                Reader::part(checkpoint, part)?
            }
            Some(_) => continue,
        };
        let chain = [own.chain(&lists), lists.get(ALL).into_iter().collect()].concat();
        for (place, keys) in chain.iter().enumerate() {
            let nearer = chain.get(..place).unwrap_or_default();
            for (key, taken) in &keys.refused {
                if !nearer.iter().any(|keys| keys.has(key)) {
                    check_key(&reader, class, key, taken)?;
                }
            }
        }
    }
    Ok(())
}

fn check_key(reader: &Reader<'_>, class: &str, key: &str, taken: &[Value]) -> Result<()> {
    let found = reader.get(key).filter(|found| !taken.iter().any(|taken| same(found, taken)));
    let Some(found) = found else { return Ok(()) };
    let taken: Vec<_> = taken.iter().map(Value::to_string).collect();
    let taken = if taken.is_empty() { "null".to_owned() } else { taken.join(" or ") };
    Err(reader.bad(key, found, &taken).hint(format!(
        "the key changes what a {class} computes, and the graphs would not follow it"
    )))
}
