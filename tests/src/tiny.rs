//! Tiny model checkpoints with their goldens, and bundles forged of them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use qhx_base::{CancelToken, Result};
use qhx_core::dump::Dump;
use qhx_core::engine::{Message, Model, ModelOptions, Prompt};
use qhx_core::manifest::Manifest;
use qhx_exec::backend::Backend;
use qhx_forge::{ForgeOptions, Precision, Silent, forge};
pub use qhx_paths::fixture;
use qhx_plugins::{PluginOptions, Plugins};
use safetensors::SafeTensors;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::{files, plugin_files};

/// `goldens.json` of a fixture.
#[derive(Debug, Deserialize)]
pub struct Goldens {
    /// Prompts and what follows.
    pub cases: Vec<Case>,
    /// Conversations.
    pub chat: Vec<Chat>,
    /// Logits by `<case>.logits`.
    #[serde(skip)]
    logits: Vec<u8>,
}

/// A prompt and what follows, greedily.
#[derive(Debug, Clone, Deserialize)]
pub struct Case {
    /// Name.
    pub id: String,
    /// The text.
    pub prompt: String,
    /// Its tokens.
    pub prompt_ids: Vec<u32>,
    /// Tokens of the answer, the ending token included.
    pub output_ids: Vec<u32>,
    /// The same as text.
    pub text: String,
    /// `eos` or `length`.
    pub finish: String,
    /// Steps whose logits are recorded.
    pub logits_steps: Vec<usize>,
    /// True if only the beginning of the answer is left.
    #[serde(skip)]
    pub cut: bool,
}

/// A conversation.
#[derive(Debug, Deserialize)]
pub struct Chat {
    /// Name.
    pub id: String,
    /// System message.
    pub system: Option<String>,
    /// Argument of the template.
    pub enable_thinking: Option<bool>,
    /// Turns.
    pub turns: Vec<Turn>,
}

/// A question and its answer.
#[derive(Debug, Deserialize)]
pub struct Turn {
    /// The question.
    pub user: String,
    /// The whole conversation up to the answer.
    pub prompt_ids: Vec<u32>,
    /// The answer, the ending token included.
    pub output_ids: Vec<u32>,
    /// The answer.
    pub text: String,
    /// True if the prompt begins with all earlier prompts and answers; absent in the first turn.
    pub prefix_extends: Option<bool>,
}

impl Chat {
    /// The conversation up to the question of turn `index`, with the golden answers.
    pub fn prompt(&self, index: usize) -> Prompt {
        let mut messages: Vec<_> = self.system.iter().map(|s| Message::new("system", s)).collect();
        for turn in &self.turns[..index] {
            messages.push(Message::new("user", &turn.user));
            messages.push(Message::new("assistant", &turn.text));
        }
        messages.push(Message::new("user", &self.turns[index].user));
        Prompt::Chat { messages, thinking: self.enable_thinking }
    }
}

impl Case {
    /// True if the answer begins with this text, whose last character may be cut.
    pub fn begins_with(&self, text: &str) -> bool {
        self.text.trim_start().starts_with(text.trim_start().trim_end_matches('\u{fffd}'))
    }
}

/// Tokens of an answer that the emulator generates in the usual run.
const BRIEF: usize = 10;

impl Goldens {
    /// Cases for the emulator, which takes up to a second for a token: the beginning of each answer, and the shortest
    /// conversation. The whole matrix has all of them.
    pub fn brief(mut self) -> Self {
        if full_matrix() {
            return self;
        }
        for case in self.cases.iter_mut().filter(|case| case.output_ids.len() > BRIEF) {
            case.output_ids.truncate(BRIEF);
            case.logits_steps.retain(|step| *step < BRIEF);
            "length".clone_into(&mut case.finish);
            case.cut = true;
        }
        let length = |turn: &Turn| turn.prompt_ids.len() + turn.output_ids.len();
        self.chat.sort_by_key(|chat| chat.turns.last().map_or(0, length));
        self.chat.truncate(1);
        self
    }

    /// All cases.
    pub fn all(&self) -> Vec<&Case> {
        self.cases.iter().collect()
    }

    /// Logits after each recorded step of a case, `[steps][vocab]`.
    pub fn logits(&self, case: &Case) -> Vec<Vec<f32>> {
        let file = SafeTensors::deserialize(&self.logits).expect("goldens.safetensors is valid");
        let tensor = file.tensor(&format!("{}.logits", case.id)).expect("the case has logits");
        let values = files::floats(tensor.data());
        values.chunks_exact(tensor.shape()[1]).map(<[f32]>::to_vec).collect()
    }
}

impl Turn {
    /// Tokens of the prompt that need not be consumed again after `earlier`, where the state can be cut back
    /// anywhere: the common beginning, as far as it was consumed. The last token of an answer is chosen, but not
    /// consumed.
    pub fn reusable(&self, earlier: &Self) -> usize {
        let before = earlier.prompt_ids.iter().chain(&earlier.output_ids);
        let common = before.zip(&self.prompt_ids).take_while(|(a, b)| a == b).count();
        common.min(earlier.prompt_ids.len() + earlier.output_ids.len() - 1)
    }
}

/// Experts of a token: for each layer two experts with their multipliers.
pub type Routing = Vec<[(usize, f32); 2]>;

impl Goldens {
    /// Experts of every token of a case, prompt and answer but for the last token.
    pub fn routing(&self, case: &Case) -> Vec<Routing> {
        let file = SafeTensors::deserialize(&self.logits).expect("goldens.safetensors is valid");
        let tensor = |kind: &str| file.tensor(&format!("{}.{kind}", case.id)).expect("routing");
        let (experts, multipliers) = (tensor("experts"), tensor("multipliers"));
        let layers = experts.shape()[1];
        let multipliers = files::floats(multipliers.data());
        let choices: Vec<(usize, f32)> =
            experts.data().iter().map(|&e| usize::from(e)).zip(multipliers).collect();
        let tokens = choices.chunks_exact(2 * layers);
        tokens.map(|token| token.chunks_exact(2).map(|c| [c[0], c[1]]).collect()).collect()
    }
}

/// `goldens.json` of a fixture, as another type than [`Goldens`].
pub fn golden_json<T: DeserializeOwned>(name: &str) -> T {
    files::json(&fixture(name).join("goldens.json"))
}

/// Values of a tensor of a fixture's `goldens.safetensors`.
pub fn golden_tensor(name: &str, tensor: &str) -> Vec<f32> {
    files::tensor(&fixture(name).join("goldens.safetensors"), tensor).1
}

/// The folder of a tiny model, and its goldens.
pub fn model(name: &str) -> (PathBuf, Goldens) {
    let folder = fixture(name);
    let goldens = goldens(&folder);
    (folder, goldens)
}

/// Goldens of a checkpoint folder.
pub fn goldens(folder: &Path) -> Goldens {
    let mut goldens: Goldens = files::json(&folder.join("goldens.json"));
    goldens.logits =
        std::fs::read(folder.join("goldens.safetensors")).expect("goldens.safetensors");
    goldens
}

/// Options of a forged bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Architecture of the context binaries; `None` for the CPU only.
    pub target: Option<&'static str>,
    /// Precision of the decoder's weights.
    pub int8: bool,
    /// Contexts of the decoder.
    pub shards: usize,
    /// Tokens that prefill graphs take.
    pub prefill: &'static [usize],
}

/// For the CPU, in the checkpoint's precision, one shard, prompts token by token.
pub const CPU: Variant = Variant { target: None, int8: false, shards: 1, prefill: &[] };

/// True if every tiny model runs with every architecture, precision and number of shards on the emulator (`QHX_FULL=1`,
/// which `cargo xtask test --full` sets). Otherwise each family, precision and architecture runs with one tiny model at
/// least.
pub fn full_matrix() -> bool {
    std::env::var_os("QHX_FULL").is_some_and(|v| v == "1")
}

/// Architectures of the NPU that families are compared on: one, or with the full matrix the oldest as well.
pub fn targets() -> &'static [&'static str] {
    if full_matrix() { &["v81", "v73"] } else { &["v81"] }
}

/// Libraries of QNN, where `QHX_QNN_HTP` and `QHX_QNN_SYSTEM` name them. The latter lies beside the former by default.
pub fn qnn_tier() -> Option<(PathBuf, PathBuf)> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let htp = set("QHX_QNN_HTP")?;
    let system = set("QHX_QNN_SYSTEM").unwrap_or_else(|| htp.with_file_name("libQnnSystem.so"));
    Some((htp, system))
}

/// Libraries of QNN, for a test with `#[tier(qnn)]`.
pub fn qnn_libraries() -> (PathBuf, PathBuf) {
    qnn_tier().expect("qnn tier: QHX_QNN_HTP is not set")
}

/// Bundles that the tests of a process share, each made when it is first wanted. Others are made meanwhile.
#[derive(Debug)]
pub struct Bundles<K> {
    folder: OnceLock<tempfile::TempDir>,
    made: Mutex<Vec<(K, Arc<OnceLock<PathBuf>>)>>,
}

impl<K: PartialEq> Bundles<K> {
    /// None yet.
    #[expect(clippy::new_without_default, reason = "for a static, which needs a constant")]
    pub const fn new() -> Self {
        Self { folder: OnceLock::new(), made: Mutex::new(Vec::new()) }
    }

    /// The bundle of `key`, which `make` puts into the folder that it is given, and returns its manifest.
    pub fn get(&self, key: K, make: impl FnOnce(&Path) -> PathBuf) -> PathBuf {
        let folder = self.folder.get_or_init(|| tempfile::tempdir().expect("a temporary folder"));
        let (at, one) = {
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            let at = made.iter().position(|(other, _)| *other == key).unwrap_or(made.len());
            if at == made.len() {
                made.push((key, Arc::default()));
            }
            (at, Arc::clone(&made[at].1))
        };
        one.get_or_init(|| make(&folder.path().join(format!("bundle-{at}")))).clone()
    }
}

/// Forges a checkpoint once a process and returns the bundle.
pub fn bundle(checkpoint: &Path, variant: Variant) -> PathBuf {
    static MADE: Bundles<(PathBuf, Variant)> = Bundles::new();
    MADE.get((checkpoint.to_owned(), variant), |out| {
        let mut options = ForgeOptions::new(out);
        options.max_ctx = Some(200);
        options.shards = variant.shards;
        options.prefill = Some(variant.prefill.to_vec());
        options.precision = if variant.int8 { Precision::W8A16 } else { Precision::Fp16 };
        if let Some(target) = variant.target {
            options.compiler = Some(crate::backends::compiler(target));
            options.onnx = true;
        }
        let report = forge(checkpoint, &options, &mut Silent)
            .unwrap_or_else(|e| panic!("forging {}: {e}", checkpoint.display()));
        report.manifest
    })
}

/// The plugins under test: the libraries of the families, or what is linked in.
pub fn plugins() -> Plugins {
    let mut options = PluginOptions::default().only_named(true);
    if !cfg!(feature = "builtin-ops") {
        static FILES: OnceLock<Vec<PathBuf>> = OnceLock::new();
        let files = FILES.get_or_init(|| plugin_files::programs().split_off(1));
        options.files.extend_from_slice(files);
    }
    Plugins::discover(&options).expect("the plugin loads")
}

/// Opens a bundle on a backend.
pub fn open(manifest: &Path, backend: Arc<dyn Backend>) -> Result<Model> {
    open_by(manifest, backend, &plugins(), &CancelToken::new())
}

/// The same with the given plugins, and arrays dumped into a folder.
pub fn open_dumping(
    manifest: &Path,
    backend: Arc<dyn Backend>,
    plugins: &Plugins,
    dump: &Path,
) -> Model {
    crate::log::listen();
    let open = || {
        let options = ModelOptions::new(Manifest::load(manifest)?, backend, plugins);
        Model::open(options.threads(2).dump(Arc::new(Dump::create(dump)?)))
    };
    open().unwrap_or_else(|e| panic!("{}: {e}", manifest.display()))
}

/// The same, with memory for states of earlier conversations.
pub fn open_keeping(manifest: &Path, backend: Arc<dyn Backend>, bytes: usize) -> Result<Model> {
    crate::log::listen();
    let plugins = plugins();
    let options = ModelOptions::new(Manifest::load(manifest)?, backend, &plugins);
    Model::open(options.threads(2).keep_states(bytes))
}

/// The same, whose sessions take their steps together.
pub fn open_batching(manifest: &Path, backend: Arc<dyn Backend>) -> Result<Model> {
    crate::log::listen();
    let plugins = plugins();
    let options = ModelOptions::new(Manifest::load(manifest)?, backend, &plugins);
    Model::open(options.threads(2).batching(true))
}

/// Opens a bundle on a backend with the given plugins.
pub fn open_by(
    manifest: &Path,
    backend: Arc<dyn Backend>,
    plugins: &Plugins,
    cancel: &CancelToken,
) -> Result<Model> {
    crate::log::listen();
    Model::open(
        ModelOptions::new(Manifest::load(manifest)?, backend, plugins)
            .threads(2)
            .cancelled_by(cancel.clone()),
    )
}
