//! Names of a model: the one that clients show, and the one in the names of its files.

use std::path::Path;

use qhx_base::{Error, ErrorKind, Result, snapshot};
use qhx_checkpoint::Checkpoint;
use serde_json::Value;

/// Longest name, in characters.
const MAX_LEN: usize = 100;
/// Names of folders and files that say nothing about the model in them.
const GENERIC: [&str; 14] = [
    "model",
    "models",
    "checkpoint",
    "checkpoints",
    "ckpt",
    "hf",
    "gguf",
    "final",
    "final_model",
    "output",
    "outputs",
    "merged",
    "merged_model",
    "snapshot",
];

/// The names of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelName {
    /// Name that clients show and ask for, `model.name` of the manifest: `Qwen/Qwen3-0.6B`.
    pub shown: String,
    /// Beginning of the names of files: `qwen3-0.6b`.
    pub file: String,
}

impl ModelName {
    /// Both are the name given, which must be fit for file names. Otherwise files are called after the checkpoint's
    /// folder or file, and the model is shown by its repository on a hub, by the metadata of a GGUF file, or by
    /// `_name_or_path` of a `config.json` whose folder says nothing else.
    pub fn of(checkpoint: &Checkpoint, given: Option<&str>) -> Result<Self> {
        if let Some(name) = given {
            return checked(name)
                .map(|name| Self { shown: name.to_owned(), file: name.to_owned() });
        }
        let own = own_name(checkpoint.path());
        let file = legal(&own.to_lowercase(), false);
        let file = if file.is_empty() || is_reserved(&file) { "model".to_owned() } else { file };
        let inside = checkpoint.inside().and_then(|inside| inside.model_name());
        let inside = inside.filter(|name| !is_generic(name));
        let shown =
            inside.or_else(|| on_hub(checkpoint.path())).or_else(|| in_config(checkpoint, &own));
        let shown = shown.map(|name| legal(&name, true)).filter(|name| !name.is_empty());
        Ok(Self { shown: shown.unwrap_or_else(|| file.clone()), file })
    }
}

fn checked(name: &str) -> Result<&str> {
    let is_legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let fits =
        (1..=MAX_LEN).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_legal);
    if fits && !is_reserved(name) {
        return Ok(name);
    }
    Err(Error::new(
        ErrorKind::Usage,
        format!("model name {name:?}: expected up to 100 letters, digits, '.', '_' and '-'"),
    )
    .hint("it may not begin with '.' or be the name of one of a checkpoint's JSON files"))
}

fn is_reserved(name: &str) -> bool {
    qhx_core::manifest::NOT_MANIFESTS.iter().any(|file| file.trim_end_matches(".json") == name)
}

/// True for what is no name of a model: a folder that many have, a number, a hash.
fn is_generic(name: &str) -> bool {
    let name = name.trim().to_lowercase();
    let rest = name.strip_prefix("checkpoint").unwrap_or(&name).trim_start_matches(['-', '_']);
    GENERIC.contains(&&*name)
        || rest.bytes().all(|b| b.is_ascii_digit() || b == b'.')
        || rest.len() >= 32 && rest.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The characters of a name that are fit for files and command lines; with `owner` also the `/` behind one.
fn legal(name: &str, owner: bool) -> String {
    let is_legal =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') || owner && c == '/';
    let name = name.trim().chars().take(MAX_LEN);
    let name: String = name.map(|c| if is_legal(c) { c } else { '-' }).collect();
    name.trim_start_matches(['.', '-', '/']).to_owned()
}

/// Name of a checkpoint by its path: its folder, its file without the end, or its repository in a cache of a hub.
fn own_name(path: &Path) -> String {
    // There the links lead to hashes.
    let cached = snapshot::locate(path);
    let is_file = path.is_file();
    let path = match cached {
        Some(_) if is_file => path.to_owned(),
        Some(place) => place.repository,
        None => path.canonicalize().unwrap_or_default(),
    };
    let name = if is_file { path.file_stem() } else { path.file_name() };
    let name = name.unwrap_or_default().to_string_lossy();
    repository(&name).map_or(&*name, |(_, name)| name).to_owned()
}

/// Owner and name of a repository's folder in a cache of a hub.
fn repository(folder: &str) -> Option<(&str, &str)> {
    folder.strip_prefix("models--")?.split_once("--")
}

/// `OWNER/NAME` of a checkpoint in a cache of a hub; with the name of its folder or file, where it is not the only one
/// there.
fn on_hub(path: &Path) -> Option<String> {
    let place = snapshot::locate(path)?;
    let folder = place.repository.file_name()?.to_str()?;
    let (owner, name) = repository(folder)?;
    let inner = match place.inner.as_str() {
        "" => String::new(),
        inner => format!("/{}", inner.trim_end_matches(".gguf")),
    };
    Some(format!("{owner}/{name}{inner}"))
}

/// `_name_or_path` of the configuration where it is a repository's: of the same name as the folder, or of a folder
/// whose name says nothing. Otherwise it may be that of the model that this one was trained from.
fn in_config(checkpoint: &Checkpoint, own: &str) -> Option<String> {
    let found = checkpoint.config().get("_name_or_path").and_then(Value::as_str)?;
    let (owner, name) = found.split_once('/')?;
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let fits = is_generic(own) || name.eq_ignore_ascii_case(own);
    (is_name(owner) && is_name(name) && fits).then(|| found.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name of a checkpoint in a folder of this name.
    fn shown(folder: &str, name_or_path: &str) -> String {
        let (root, base) = (tempfile::tempdir().unwrap(), qhx_paths::fixture("lora/base"));
        let dir = root.path().join(folder);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::copy(base.join("model.safetensors"), dir.join("model.safetensors")).unwrap();
        let config = std::fs::read_to_string(base.join("config.json")).unwrap();
        let config = config.replacen('{', &format!("{{\"_name_or_path\": {name_or_path:?},"), 1);
        std::fs::write(dir.join("config.json"), config).unwrap();
        ModelName::of(&Checkpoint::open(&dir).unwrap(), None).unwrap().shown
    }

    #[test]
    fn folders_that_say_nothing_leave_it_to_the_configuration() {
        assert_eq!(shown("checkpoint-500", "Org/Model-1B"), "Org/Model-1B");
        assert_eq!(shown("model-1b", "Org/Model-1B"), "Org/Model-1B");
        assert_eq!(shown("My-Tuned", "Org/Model-1B"), "my-tuned", "that is its base");
        assert_eq!(shown("checkpoint-500", "/home/me/run"), "checkpoint-500");
        let commit = "a".repeat(40);
        let cached = format!("models--Org--Model-1B/snapshots/{commit}");
        assert_eq!(shown(&cached, "Other/Base"), "Org/Model-1B");
    }

    #[test]
    fn names_that_say_nothing_are_known() {
        for name in ["model", "Checkpoint-500", "hf", "2024.1", &"0a".repeat(20), "checkpoint_"] {
            assert!(is_generic(name), "{name}");
        }
        for name in ["Qwen3-0.6B", "smollm2", "my-model", "merged-qwen", "deadbeef"] {
            assert!(!is_generic(name), "{name}");
        }
    }

    #[test]
    fn names_are_made_fit_for_command_lines() {
        assert_eq!(legal("SmolLM2 135M Instruct", true), "SmolLM2-135M-Instruct");
        assert_eq!(legal("Qwen/Qwen3-0.6B", true), "Qwen/Qwen3-0.6B");
        assert_eq!(legal("../a/b", false), "a-b");
    }
}
