//! The tokenizer's files, and what the manifest says of chat.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result, files};
use qhx_checkpoint::Inside;
use qhx_checkpoint::TEXT_FILES;
use qhx_checkpoint::tokenizer::{MAX_BYTES, Source, TOKENIZER, normalized, source};
use qhx_checkpoint::{Checkpoint, read_json};
use qhx_core::manifest::{Manifest, SCHEMA_VERSION};
use qhx_core::sampling::SamplingParams;
use qhx_graph::progress::Progress;
use qhx_text::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::bundle::Staging;
use crate::chat;

const CONFIG: &str = "tokenizer_config.json";
/// The key of the chat template in `tokenizer_config.json`.
const TEMPLATE: &str = "chat_template";
/// Files of the chat template in newer checkpoints; the first that is there counts.
const TEMPLATES: [&str; 2] = ["additional_chat_templates/default.jinja", "chat_template.jinja"];
/// Keys of `generation_config.json` about sampling.
const SAMPLING: [&str; 5] = ["temperature", "top_k", "top_p", "min_p", PENALTY];
const PENALTY: &str = "repetition_penalty";
/// File of the special tokens in older checkpoints.
const SPECIAL: &str = "special_tokens_map.json";

/// The only key of `tokenizer.json` that is read here.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

/// Copies the tokenizer's files, names them in `artifacts`, and returns the value of `chat`.
///
/// A chat template and special tokens that lie in files of their own are put into the copied `tokenizer_config.json`,
/// see [`copy_config`]. A synthetic model gets a tokenizer of its `vocab`, see [`numbers`]. Errors when qhx itself
/// would refuse one of the files.
pub(crate) fn copy(
    checkpoint: &Checkpoint,
    changes: Changes<'_>,
    vocab: usize,
    staging: &mut Staging,
    artifacts: &mut Map<String, Value>,
    progress: &mut dyn Progress,
) -> Result<Value> {
    artifacts.insert("tokenizer".to_owned(), json!(TOKENIZER));
    if checkpoint.seed().is_some() {
        staging.write(TOKENIZER, numbers(vocab).as_bytes())?;
        Tokenizer::from_file(&staging.root().join(TOKENIZER))?;
        return Ok(json!(false));
    }
    let dir = checkpoint.dir();
    let Source { path, bytes, config } = source(checkpoint)?;
    let bytes = normalized(&path, bytes, changes.normalizers)?;
    let bytes = with_shown(&path, bytes, changes.shown)?;
    let tokenizer = Tokenizer::from_bytes(&path, &bytes)?;
    let beyond = tokenizer.ids().filter(|id| *id as usize >= vocab).count();
    if beyond > 0 {
        progress.note(&format!(
            "{} has {beyond} tokens beyond the {vocab} of the model: a text with one of these cannot be used",
            path.display()
        ));
    }
    let added: TokenizerFile = serde_json::from_slice(&bytes).map_err(|e| {
        Error::caused(ErrorKind::Artifact, format_args!("{}: not a tokenizer", path.display()), e)
    })?;
    staging.write(TOKENIZER, &bytes)?;

    if let Some(adapter) = checkpoint.texts() {
        let taken = TEXT_FILES.into_iter().filter(|name| adapter.join(name).exists());
        let taken: Vec<_> = taken.collect();
        progress.note(&format!(
            "{} of the adapter {} are taken",
            taken.join(", "),
            adapter.display()
        ));
    }
    let template = copy_config(checkpoint, config, changes.template, staging)?;
    match template {
        None => progress.note(
            "the checkpoint has neither tokenizer_config.json nor chat_template.jinja: no chat \
             template in the bundle",
        ),
        Some(_) => {
            artifacts.insert("tokenizer_config".to_owned(), json!(CONFIG));
        }
    }
    let tokens = added.added_tokens.into_iter().map(|t| t.content).collect();
    let chat = chat::of_tokens(&tokens, template == Some(true));
    check_template(staging.root(), artifacts, &chat, &tokenizer)
        .map_err(|e| e.context(dir.display()))?;
    Ok(chat)
}

/// Changes of a recipe to the files of the tokenizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Changes<'a> {
    /// Come before the tokenizer's own.
    pub normalizers: &'a [Value],
    /// Special tokens that become ordinary ones.
    pub shown: &'a [String],
    /// Chat template where the checkpoint has none.
    pub template: Option<&'a str>,
}

/// A `tokenizer.json` in which these added tokens are not special.
fn with_shown(path: &Path, bytes: Vec<u8>, shown: &[String]) -> Result<Vec<u8>> {
    if shown.is_empty() {
        return Ok(bytes);
    }
    let failed = |e| Error::caused(ErrorKind::Artifact, path.display(), e);
    let mut file: Value = serde_json::from_slice(&bytes).map_err(failed)?;
    for token in file["added_tokens"].as_array_mut().into_iter().flatten() {
        if shown.iter().any(|shown| token["content"] == *shown) {
            token["special"] = json!(false);
        }
    }
    serde_json::to_vec(&file).map_err(failed)
}

/// True if the checkpoint comes with a chat template, like those that are tuned to answer.
pub(crate) fn has_chat_template(checkpoint: &Checkpoint) -> Result<bool> {
    for dir in checkpoint.text_dirs() {
        if configuration(dir)?.is_some_and(|found| is_set(&found.config, TEMPLATE)) {
            return Ok(true);
        }
    }
    let configured = checkpoint.dir().join(CONFIG).exists();
    Ok(!configured && checkpoint.inside().is_some_and(Inside::has_chat_template))
}

fn is_set(config: &Value, key: &str) -> bool {
    config.get(key).is_some_and(|value| !value.is_null())
}

/// Copies `tokenizer_config.json` with the chat template and the special tokens that `transformers` would take: that of
/// an adapter, of the folder, or `embedded` in a GGUF file. Says whether there is a template; none when there is
/// nothing to copy. Where an adapter's has no template, it is that of the model, and where neither has one `template`.
fn copy_config(
    checkpoint: &Checkpoint,
    embedded: Option<Value>,
    template: Option<&str>,
    staging: &Staging,
) -> Result<Option<bool>> {
    let mut found = Vec::new();
    for dir in checkpoint.text_dirs() {
        found.extend(configuration(dir)?);
    }
    if found.is_empty() || checkpoint.texts().is_some() {
        found.extend(embedded.map(|config| Configuration { config, unchanged: None }));
    }
    let mut found = found.into_iter();
    let Some(Configuration { mut config, unchanged }) = found.next() else { return Ok(None) };
    if !is_set(&config, TEMPLATE)
        && let Some(other) = found.find(|other| is_set(&other.config, TEMPLATE))
    {
        config[TEMPLATE] = other.config[TEMPLATE].clone();
        staging.write_json(CONFIG, &config)?;
    } else if let Some(template) = template.filter(|_| !is_set(&config, TEMPLATE)) {
        config[TEMPLATE] = json!(template);
        staging.write_json(CONFIG, &config)?;
    } else if let Some(path) = unchanged {
        staging.write(CONFIG, &files::read(ErrorKind::Artifact, &path, MAX_BYTES)?)?;
    } else {
        staging.write_json(CONFIG, &config)?;
    }
    Ok(Some(is_set(&config, TEMPLATE)))
}

/// A `tokenizer_config.json` with what other files of its folder add to it.
struct Configuration {
    config: Value,
    /// The file, where nothing is added.
    unchanged: Option<PathBuf>,
}

/// The configuration of a folder; none where there is none.
///
/// A template in a file of its own counts before that of the configuration. A configuration without
/// `added_tokens_decoder` is of the older form, which has its special tokens in `special_tokens_map.json`.
fn configuration(dir: &Path) -> Result<Option<Configuration>> {
    let [path, special] = [CONFIG, SPECIAL].map(|name| dir.join(name));
    let template = TEMPLATES.iter().map(|name| dir.join(name)).find(|path| path.exists());
    let found = if path.exists() { Some(read_json(&path)?) } else { None };
    if found.is_none() && template.is_none() {
        return Ok(None);
    }
    let mut config = found.clone().unwrap_or_else(|| json!({}));
    if let Some(config) = config.as_object_mut() {
        if !config.contains_key("added_tokens_decoder")
            && special.exists()
            && let Value::Object(tokens) = read_json(&special)?
        {
            config.extend(tokens);
        }
        if let Some(template) = template {
            let text = files::read_text(ErrorKind::Artifact, &template, MAX_BYTES)?;
            config.insert(TEMPLATE.to_owned(), json!(text));
        }
    }
    let unchanged = (found.as_ref() == Some(&config)).then_some(path);
    Ok(Some(Configuration { config, unchanged }))
}

/// Reads the chat template of the folder `root` as qhx does when it opens the bundle.
fn check_template(
    root: &Path,
    artifacts: &Map<String, Value>,
    chat: &Value,
    tokenizer: &Tokenizer,
) -> Result<()> {
    let document = json!({
        "schema_version": SCHEMA_VERSION,
        "host_only": true,
        "artifacts": artifacts,
        "chat": chat,
    });
    let manifest = Manifest::from_value(&root.join("manifest.json"), document, None)?;
    manifest.chat_template(&manifest.open_artifacts(), Some(tokenizer)).map(drop)
}

/// `eos_token_id` and `bos_token_id` for the manifest, each from the first configuration that has it. Errors
/// when one is not the id of one of the `vocab` tokens.
pub(crate) fn token_ids(checkpoint: &Checkpoint, vocab: usize) -> Result<Map<String, Value>> {
    let generation = checkpoint.dir().join("generation_config.json");
    let paths = [
        (&*generation, checkpoint.generation_config()),
        (checkpoint.config_path(), checkpoint.text_config()),
        (checkpoint.config_path(), checkpoint.config()),
    ];
    let is_token = |id: &Value| id.as_u64().is_some_and(|id| id < vocab as u64);
    let mut ids = Map::new();
    for (key, many) in [("eos_token_id", true), ("bos_token_id", false)] {
        let found = paths.iter().filter_map(|(path, config)| Some((path, config.get(key)?)));
        let Some((path, value)) = found.into_iter().find(|(_, value)| !value.is_null()) else {
            continue;
        };
        let fits = match value.as_array() {
            Some(list) => many && list.iter().all(is_token),
            None => is_token(value),
        };
        if !fits {
            let list = if many { ", or a list of such" } else { "" };
            return Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: {key} is {value}, expected the number of one of the model's {vocab} tokens{list}",
                    path.display()
                ),
            )
            .hint("the file may belong to another model; correct the id, or remove it"));
        }
        ids.insert(key.to_owned(), value.clone());
    }
    if let Some(end) = adapter_end(checkpoint)? {
        let found = ids.remove("eos_token_id");
        let mut ends = match found {
            Some(Value::Array(ends)) => ends,
            found => found.into_iter().collect(),
        };
        if !ends.contains(&json!(end)) {
            ends.push(json!(end));
        }
        let ends = if let [one] = &*ends { one.clone() } else { Value::Array(ends) };
        ids.insert("eos_token_id".to_owned(), ends);
    }
    Ok(ids)
}

/// The token by which an adapter that comes with a tokenizer ends its answers, be it another one than the model's.
fn adapter_end(checkpoint: &Checkpoint) -> Result<Option<u32>> {
    let Some(found) = checkpoint.texts().map(configuration).transpose()?.flatten() else {
        return Ok(None);
    };
    let token = found.config.get("eos_token");
    let text = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
    let Some(text) = text else { return Ok(None) };
    Ok(checkpoint.tokenizer()?.token_to_id(text))
}

/// `params.sampling` of the manifest: how `generation_config.json` has tokens chosen, or the metadata of a GGUF file.
/// None where it asks for greedy answers, or says nothing. Errors when a number is out of range.
pub(crate) fn sampling(checkpoint: &Checkpoint) -> Result<Option<Value>> {
    let generation = checkpoint.generation_config();
    let given = |key: &&str| generation.get(key).is_some_and(|value| !value.is_null());
    let keys: Vec<&str> = SAMPLING.into_iter().filter(given).collect();
    let samples = generation.get("do_sample").and_then(Value::as_bool);
    // The penalty alone draws nothing.
    if samples == Some(false) || samples.is_none() && keys.iter().all(|key| *key == PENALTY) {
        return Ok(None);
    }
    let mut sampling = Map::new();
    sampling.insert("temperature".to_owned(), json!(1.0));
    for key in keys {
        let value = &generation[key];
        let value = match value.as_f64() {
            // Some write -1 where all tokens are to be kept, and 1e-6 for greedy answers.
            Some(k) if key == "top_k" && k < 0.0 => json!(0),
            Some(t) if key == "temperature" && (0.0..1e-4).contains(&t) => json!(0.0),
            _ => value.clone(),
        };
        sampling.insert(key.to_owned(), value);
    }
    match SamplingParams::default().with(&sampling) {
        Ok(_) => Ok(Some(Value::Object(sampling))),
        Err(e) => {
            let file = match checkpoint.inside() {
                Some(inside) => inside.path().to_owned(),
                None => checkpoint.dir().join("generation_config.json"),
            };
            Err(Error::new(ErrorKind::Artifact, format!("{}: {}", file.display(), e.message()))
                .hint("correct the number, or remove it"))
        }
    }
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
