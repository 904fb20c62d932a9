//! The tokenizer's files, and what the manifest says of chat.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use qhx_core::{Error, ErrorKind, Result, files};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::bundle::Staging;
use crate::checkpoint::Checkpoint;
use crate::progress::Progress;

/// Longest file that is read; tokenizers of large vocabularies are tens of megabytes.
const MAX_BYTES: u64 = 256 << 20;
const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
/// Where newer checkpoints keep the chat template.
const TEMPLATE: &str = "chat_template.jinja";

/// The only key of `tokenizer.json` that is read here.
#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

/// Copies the tokenizer's files, names them in `artifacts`, and returns the value of `chat`.
///
/// A chat template that lies in a file of its own is put into the copied `tokenizer_config.json`. A
/// synthetic model gets a tokenizer of its `vocab`, see [`numbers`].
pub(crate) fn copy(
    checkpoint: &Checkpoint,
    vocab: usize,
    staging: &mut Staging,
    artifacts: &mut Map<String, Value>,
    progress: &mut dyn Progress,
) -> Result<Value> {
    if checkpoint.seed().is_some() {
        staging.write(TOKENIZER, numbers(vocab).as_bytes())?;
        artifacts.insert("tokenizer".to_owned(), json!(TOKENIZER));
        return Ok(json!(false));
    }
    let dir = checkpoint.dir();
    let path = dir.join(TOKENIZER);
    let bytes = files::read(ErrorKind::Artifact, &path, MAX_BYTES).map_err(|e| {
        e.hint("save the tokenizer with transformers' AutoTokenizer (the fast one) beside the checkpoint")
    })?;
    let tokenizer: Tokenizer = serde_json::from_slice(&bytes).map_err(|e| {
        Error::new(ErrorKind::Artifact, format!("{}: not a tokenizer: {e}", path.display()))
    })?;
    staging.copy(&path, TOKENIZER)?;
    artifacts.insert("tokenizer".to_owned(), json!(TOKENIZER));

    let path = dir.join(CONFIG);
    let mut template = false;
    if path.exists() {
        let bytes = files::read(ErrorKind::Artifact, &path, MAX_BYTES)?;
        let mut config: Value = serde_json::from_slice(&bytes).map_err(|e| {
            Error::new(ErrorKind::Artifact, format!("{}: not JSON: {e}", path.display()))
        })?;
        template = config.get("chat_template").is_some_and(|t| !t.is_null());
        let beside = dir.join(TEMPLATE);
        match config.as_object_mut() {
            Some(config) if !template && beside.exists() => {
                let text = files::read_text(ErrorKind::Artifact, &beside, MAX_BYTES)?;
                config.insert("chat_template".to_owned(), json!(text));
                template = true;
                staging.write_json(CONFIG, &json!(config))?;
            }
            _ => staging.copy(&path, CONFIG)?,
        }
        artifacts.insert("tokenizer_config".to_owned(), json!(CONFIG));
    } else {
        progress
            .note("the checkpoint has no tokenizer_config.json: no chat template in the bundle");
    }
    let tokens = tokenizer.added_tokens.into_iter().map(|t| t.content).collect();
    Ok(chat(&tokens, template))
}

/// A `tokenizer.json` in which the text of a token is its number, so that `17 4 99` is the prompt of
/// these three tokens.
fn numbers(vocab: usize) -> String {
    let mut text = String::from(
        r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
"pre_tokenizer":{"type":"WhitespaceSplit"},"post_processor":null,"decoder":null,
"model":{"type":"WordLevel","unk_token":"0","vocab":{"0":0"#,
    );
    for token in 1..vocab {
        // Writing to a string cannot fail.
        let _ = write!(text, ",\n\"{token}\":{token}");
    }
    text.push_str("}}}\n");
    text
}

/// ChatML markers where the tokenizer has them, `false` for a model without any chat format.
fn chat(tokens: &BTreeSet<String>, template: bool) -> Value {
    let has = |token: &str| tokens.contains(token);
    if has("<|im_start|>") && has("<|im_end|>") {
        let answer = "<|im_start|>assistant\n";
        let mut assistant = Map::new();
        assistant.insert("gen_prefill".to_owned(), json!(answer));
        if has("<think>") && has("</think>") {
            let closed = format!("{answer}<think>\n\n</think>\n\n");
            assistant.insert("no_think_prefill".to_owned(), json!(closed));
        }
        return json!({"bos": [], "assistant": assistant});
    }
    if template { json!({"style": "jinja"}) } else { json!(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_follows_the_tokenizers_markers() {
        let set = |tokens: &[&str]| tokens.iter().map(|t| (*t).to_owned()).collect();
        let full = chat(&set(&["<|im_start|>", "<|im_end|>", "<think>", "</think>"]), true);
        assert_eq!(
            full["assistant"]["no_think_prefill"],
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        );
        let plain = chat(&set(&["<|im_start|>", "<|im_end|>"]), true);
        assert_eq!(plain["assistant"], json!({"gen_prefill": "<|im_start|>assistant\n"}));
        assert_eq!(chat(&set(&[]), true), json!({"style": "jinja"}));
        assert_eq!(chat(&set(&[]), false), json!(false));
    }
}
