//! The tokenizer of a checkpoint: a file of its folder, or in a GGUF file.

use std::path::{Path, PathBuf};

use qhx_base::files;
use qhx_base::{Error, ErrorKind, Result};
use qhx_text::Tokenizer;
use serde_json::{Value, json};

use super::{Checkpoint, read_json};
use crate::import::gguf::Embedded;

/// Longest file that is read; tokenizers of large vocabularies are tens of megabytes.
pub const MAX_BYTES: u64 = 256 << 20;
/// The name of a tokenizer's file.
pub const TOKENIZER: &str = "tokenizer.json";

impl Checkpoint {
    /// The tokenizer: the `tokenizer.json` of [`Checkpoint::dir`], or that within a GGUF file or an archive.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let source = source(self)?;
        Tokenizer::from_bytes(&source.path, &source.bytes)
    }
}

/// A tokenizer that a bundle is made with.
#[derive(Debug)]
pub struct Source {
    /// Path of the tokenizer, for messages.
    pub path: PathBuf,
    /// `tokenizer.json`.
    pub bytes: Vec<u8>,
    /// `tokenizer_config.json`, where the tokenizer is not of the folder.
    pub config: Option<Value>,
}

/// The checkpoint's tokenizer: that of an adapter, of the folder, or else that within a GGUF file or an archive.
pub fn source(checkpoint: &Checkpoint) -> Result<Source> {
    if let Some(path) = checkpoint.text_file(TOKENIZER) {
        let bytes = files::read(ErrorKind::Artifact, &path, MAX_BYTES)?;
        let bytes = with_ends(checkpoint, &path, bytes)?;
        let bytes = with_locator(checkpoint, &path, bytes)?;
        return Ok(Source { path, bytes, config: None });
    }
    let path = checkpoint.dir().join(TOKENIZER);
    if let Some(inside) = checkpoint.inside()
        && let Some(Embedded { tokenizer, config }) = inside.tokenizer()?
    {
        let path = inside.path().to_owned();
        return Ok(Source { path, bytes: tokenizer, config: Some(config) });
    }
    if let Some(bytes) = &checkpoint.archived {
        let path = checkpoint.config_path().to_owned();
        return Ok(Source { path, bytes: bytes.to_vec(), config: Some(json!({})) });
    }
    let hint = match checkpoint.inside() {
        Some(inside) => format!("the GGUF file has no tokenizer: {}", inside.wanted(TOKENIZER)),
        None => {
            "save the tokenizer with transformers' AutoTokenizer (the fast one) beside the checkpoint"
                .to_owned()
        }
    };
    Err(Error::new(ErrorKind::Artifact, format!("{}: missing", path.display())).hint(hint))
}

/// A `tokenizer.json` with normalizers before its own.
pub fn normalized(path: &Path, bytes: Vec<u8>, normalizers: &[Value]) -> Result<Vec<u8>> {
    if normalizers.is_empty() {
        return Ok(bytes);
    }
    let broken = |e| {
        Error::caused(ErrorKind::Artifact, format_args!("{}: not a tokenizer", path.display()), e)
    };
    let mut document: Value = serde_json::from_slice(&bytes).map_err(broken)?;
    let own = Some(document["normalizer"].take()).filter(|own| !own.is_null());
    let all: Vec<_> = normalizers.iter().cloned().chain(own).collect();
    document["normalizer"] = json!({"type": "Sequence", "normalizers": all});
    serde_json::to_vec(&document).map_err(broken)
}

/// `tokenizer.json` with the token of audio, `audio_locator_tag`, behind its own, as NeMo adds it to a decoder's.
fn with_locator(checkpoint: &Checkpoint, path: &Path, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let tag = checkpoint.config().get("audio_locator_tag").and_then(Value::as_str);
    let Some(tag) = tag.filter(|tag| !tag.is_empty()) else { return Ok(bytes) };
    let tokenizer = Tokenizer::from_bytes(path, &bytes)?;
    if tokenizer.token_to_id(tag).is_some() {
        return Ok(bytes);
    }
    let broken = |e| {
        Error::caused(ErrorKind::Artifact, format_args!("{}: not a tokenizer", path.display()), e)
    };
    let mut document: Value = serde_json::from_slice(&bytes).map_err(broken)?;
    let mut added = document["added_tokens"].as_array().cloned().unwrap_or_default();
    added.push(json!({
        "id": tokenizer.vocab_size(), "content": tag, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    }));
    document["added_tokens"] = Value::Array(added);
    serde_json::to_vec(&document).map_err(broken)
}

/// `tokenizer.json` with a post-processor that puts around texts what `add_bos_token` and `add_eos_token` of
/// `tokenizer_config.json` ask for, where its own does not.
fn with_ends(checkpoint: &Checkpoint, path: &Path, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let read = |name: &str| match checkpoint.text_file(name) {
        Some(path) => read_json(&path),
        None => Ok(Value::Null),
    };
    let config = read("tokenizer_config.json")?;
    let asked = ["add_bos_token", "add_eos_token"].map(|key| config.get(key) == Some(&json!(true)));
    if asked == [false, false] {
        return Ok(bytes);
    }
    let files = [config, read("special_tokens_map.json")?];
    let tokenizer = Tokenizer::from_bytes(path, &bytes)?;
    let token = |key: &str| {
        let named = files.iter().find_map(|file| file.get(key).filter(|token| !token.is_null()))?;
        let text = named.as_str().or_else(|| named.get("content")?.as_str())?;
        Some((text.to_owned(), tokenizer.token_to_id(text)?))
    };
    let (plain, whole) = (tokenizer.encode("a", false)?, tokenizer.encode("a", true)?);
    let tokens = [("bos_token", asked[0], whole.first()), ("eos_token", asked[1], whole.last())];
    let tokens = tokens.map(|(key, asked, at)| {
        let token = token(key);
        let there = token.as_ref().is_some_and(|(_, id)| Some(id) == at);
        (key, token, asked, there)
    });
    if tokens.iter().all(|(_, _, asked, there)| *there || !asked) {
        return Ok(bytes);
    }
    let refused = |what: String| {
        let config = checkpoint.dir().join("tokenizer_config.json");
        Error::new(ErrorKind::Artifact, format!("{}: {what}", config.display())).hint(
            "save the tokenizer so that the post-processor of tokenizer.json adds the token, and take the key out",
        )
    };
    if let Some((key, ..)) = tokens.iter().find(|(_, token, asked, _)| *asked && token.is_none()) {
        return Err(refused(format!(
            "add_{key} is true, but {key} is no token of {}",
            path.display()
        )));
    }
    let now = tokens.each_ref().map(|(_, token, _, there)| token.as_ref().filter(|_| *there));
    let ids = |token: Option<&(String, u32)>| token.map(|(_, id)| *id);
    let known = ids(now[0]).into_iter().chain(plain).chain(ids(now[1]));
    if !known.eq(whole.iter().copied()) {
        return Err(refused(format!(
            "add_bos_token or add_eos_token is true, but the post-processor of {} puts other tokens around texts",
            path.display()
        )));
    }
    let [bos, eos] = tokens
        .each_ref()
        .map(|(_, token, asked, there)| token.as_ref().filter(|_| *asked || *there));
    let sequence = |id: &str, kind: u8| {
        let end = |token: Option<&(String, u32)>| {
            token.map(|(text, _)| json!({"SpecialToken": {"id": text, "type_id": kind}}))
        };
        let text = json!({"Sequence": {"id": id, "type_id": kind}});
        [end(bos), Some(text), end(eos)].into_iter().flatten().collect::<Vec<_>>()
    };
    let pair = [sequence("A", 0), sequence("B", 1)].concat();
    let special = bos
        .iter()
        .chain(&eos)
        .map(|(text, id)| (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]})));
    let broken = |e| {
        Error::caused(ErrorKind::Artifact, format_args!("{}: not a tokenizer", path.display()), e)
    };
    let mut document: Value = serde_json::from_slice(&bytes).map_err(broken)?;
    document["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": pair,
        "special_tokens": special.collect::<serde_json::Map<_, _>>(),
    });
    serde_json::to_vec(&document).map_err(broken)
}
