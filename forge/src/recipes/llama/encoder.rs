//! What makes a checkpoint an encoder: the files of `sentence-transformers` beside it.
//!
//! Checkpoints of this kind are laid out in several ways; no single file is depended on.

use std::path::Path;

use qhx_core::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, read_json_value};

/// How a text becomes a vector.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Encoder {
    pub causal: bool,
    /// `mean`, `last` or `cls`.
    pub pooling: &'static str,
    pub normalize: bool,
    pub query_prefix: String,
    pub document_prefix: String,
}

impl Encoder {
    /// Reads what there is.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let dir = checkpoint.dir();
        let pooling = read(&dir.join("1_Pooling/config.json"))?;
        let modules = read(&dir.join("modules.json"))?;
        let prompts = read(&dir.join("config_sentence_transformers.json"))?;
        let prompt = |key: &str| {
            let value = prompts.as_ref().and_then(|p| p.get("prompts")).and_then(|p| p.get(key));
            value.and_then(Value::as_str).map(str::to_owned)
        };
        Ok(Self {
            causal: !bidirectional(checkpoint.config()),
            pooling: pool(checkpoint, pooling.as_ref())?,
            normalize: modules.is_none_or(|m| m.to_string().contains("Normalize")),
            query_prefix: prompt("query").unwrap_or_default(),
            document_prefix: prompt("document").or_else(|| prompt("passage")).unwrap_or_default(),
        })
    }
}

/// Longest text, in tokens, that `sentence-transformers` gives the checkpoint.
pub(super) fn max_text(checkpoint: &Checkpoint) -> Result<Option<usize>> {
    let file = read(&checkpoint.dir().join("sentence_bert_config.json"))?;
    let said = file.as_ref().and_then(|f| f.get("max_seq_length")).and_then(Value::as_u64);
    Ok(said.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0))
}

/// True when every token sees every other one.
pub(super) fn bidirectional(config: &Value) -> bool {
    let text = |pointer: &str| config.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let class = text("/architectures/0").to_ascii_lowercase();
    let kind = text("/model_type");
    config.get("is_causal") == Some(&Value::Bool(false))
        || class.contains("bidirectional")
        || kind == "mistralbidirectional"
        || kind.ends_with("_bidirec")
}

fn pool(checkpoint: &Checkpoint, file: Option<&Value>) -> Result<&'static str> {
    let on = |key: &str| file.and_then(|f| f.get(key)) == Some(&Value::Bool(true));
    for (key, name) in [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_cls_token", "cls"),
    ] {
        if on(key) {
            return Ok(name);
        }
    }
    let path = checkpoint.config_path();
    if file.is_some() {
        let path = checkpoint.dir().join("1_Pooling/config.json");
        return Err(Error::new(
            ErrorKind::Artifact,
            format!(
                "{}: none of pooling_mode_mean_tokens, pooling_mode_lasttoken and \
                 pooling_mode_cls_token is on; other ways to pool are not supported",
                path.display()
            ),
        ));
    }
    match checkpoint.config().get("pooling") {
        None | Some(Value::Null) => Ok("mean"),
        Some(value) => match value.as_str() {
            Some("avg" | "mean") => Ok("mean"),
            Some("last") => Ok("last"),
            Some("cls") => Ok("cls"),
            _ => Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: pooling is {value}, expected \"avg\", \"last\" or \"cls\"",
                    path.display()
                ),
            )),
        },
    }
}

/// A JSON file, if it is there.
fn read(path: &Path) -> Result<Option<Value>> {
    if !path.exists() {
        return Ok(None);
    }
    read_json_value(path).map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::bidirectional;

    #[test]
    fn any_of_the_known_signs_makes_an_encoder_bidirectional() {
        for config in [
            json!({"is_causal": false}),
            json!({"architectures": ["MistralBiDirectionalModel"]}),
            json!({"architectures": ["LlamaBidirectionalModel"]}),
            json!({"model_type": "mistralbidirectional"}),
            json!({"model_type": "llama_bidirec"}),
        ] {
            assert!(bidirectional(&config), "{config}");
        }
        assert!(!bidirectional(&json!({"architectures": ["MistralModel"], "is_causal": true})));
    }
}
