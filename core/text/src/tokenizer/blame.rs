//! Which part of a `tokenizer.json` the library does not understand.
//!
//! The library tries every sort of component in turn and reports only that none fits.

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper,
};

use super::guarded;
use super::vet::MEMBERS;

/// Why a value is no component of some sort.
type Check = fn(&Value) -> Result<(), String>;

fn check<T: DeserializeOwned>(value: &Value) -> Result<(), String> {
    guarded(|| T::deserialize(value).map(drop).map_err(Into::into))
}

const PARTS: [(&str, Check); 5] = [
    ("normalizer", check::<NormalizerWrapper>),
    ("pre_tokenizer", check::<PreTokenizerWrapper>),
    ("post_processor", check::<PostProcessorWrapper>),
    ("decoder", check::<DecoderWrapper>),
    ("model", check::<ModelWrapper>),
];

/// The part of a file that the library refused, and why; `error` is what it reported about the file.
pub(super) fn blame(bytes: &[u8], error: &str) -> String {
    let Ok(document) = serde_json::from_slice::<Value>(bytes) else { return error.to_owned() };
    for (name, check) in PARTS {
        let part = &document[name];
        if part.is_null() {
            continue;
        }
        if let Err(why) = check(part) {
            return describe(&format!("/{name}"), part, check, &why);
        }
    }
    let tokens = document["added_tokens"].as_array();
    for (i, token) in tokens.into_iter().flatten().enumerate() {
        if let Err(why) = check::<AddedToken>(token) {
            return format!("/added_tokens/{i}: {why}");
        }
    }
    error.to_owned()
}

/// Goes down to the member that is to blame.
fn describe(path: &str, component: &Value, check: Check, why: &str) -> String {
    for key in MEMBERS {
        let members = component.get(key).and_then(Value::as_array);
        for (i, member) in members.into_iter().flatten().enumerate() {
            if let Err(why) = check(member) {
                return describe(&format!("{path}/{key}/{i}"), member, check, &why);
            }
        }
    }
    let kind = match component.get("type") {
        Some(kind) => format!("type {kind}"),
        None => "a component without a type".to_owned(),
    };
    // Serde's words for "nothing fits" name no key.
    let unknown = why.contains("untagged enum") || why.contains("inconsistent");
    let why = if unknown { "no such component, or not with these keys" } else { why };
    format!("{path}: {kind} is not understood: {why}")
}
