//! The bundle's manifest, schema version 1. Every key is described in `docs/manifest.md`.
//!
//! Keys that the core needs are typed here. Keys it does not know stay in [`Manifest::raw`], which the host-op receives
//! whole.

mod chat;
#[cfg(unix)]
#[cfg(test)]
mod links;
mod read;
mod reader;
mod receipt;
mod select;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::sampling::SamplingParams;
use qhx_base::artifacts::Artifacts;
use qhx_base::{Error, ErrorKind, Result, bail, error, files};
use qhx_exec::backend::ContextSource;
use qhx_types::DType;

pub use qhx_text::{ChatSpec, ChatStyle, Marker, Piece, RoleMarkers};
pub use receipt::files_hash;
pub use select::{NOT_MANIFESTS, candidates, is_candidate, select};

/// The `schema_version` that this crate reads.
pub const SCHEMA_VERSION: u64 = 1;

/// Longest manifest that is read. Published ones are a few kilobytes.
pub const MAX_BYTES: u64 = 16 << 20;

/// A run plan: which files make up a model and which host-op drives it.
#[derive(Debug, Clone)]
pub struct Manifest {
    /// The file that was read.
    pub path: PathBuf,
    /// The folder that the manifest's paths resolve against.
    pub root: PathBuf,
    /// The folder that no file of the bundle may lie outside of, links resolved: the manifest's
    /// own, the one that was given to read it, or that of the repository in a cache of a hub.
    pub bounds: PathBuf,
    /// `model`.
    pub model: Model,
    /// `params`.
    pub params: Params,
    /// `artifacts`.
    pub artifacts: ArtifactTable,
    /// `plan`.
    pub plan: Plan,
    /// `chat`.
    pub chat: Option<ChatSpec>,
    /// `fixture_dir`: a sub-folder of weights that the host-op reads.
    pub fixture_dir: Option<String>,
    /// `host_only` is `true`: the bundle has no contexts. Any other form stays in `raw`.
    pub host_only: bool,
    /// The whole document, unknown keys included.
    pub raw: Value,
}

/// `model`: what the bundle declares about itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Model {
    /// Name for people; the manifest's file name where the key is missing.
    pub name: String,
    /// Model family.
    pub family: Option<String>,
    /// Hexagon architecture that the context binaries were compiled for: 81 for `"v81"` or `81`.
    pub dsp_arch: Option<u32>,
    /// The other keys.
    pub rest: Map<String, Value>,
}

/// `params`: sizes of the model. All are optional; a graph's own shapes decide.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Params {
    /// Width of the hidden state.
    pub hidden: Option<usize>,
    /// Number of tokens.
    pub vocab: Option<usize>,
    /// Number of layers.
    pub n_layers: Option<usize>,
    /// Positions of the KV cache.
    pub max_ctx: Option<usize>,
    /// Tokens that end the answer: one id or a list of ids.
    pub eos_token_id: Vec<u32>,
    /// The token that texts begin with.
    pub bos_token_id: Option<u32>,
    /// Prompt and tokens that ask the model to transcribe audio.
    pub transcription: Option<Transcription>,
    /// Prompt that asks the model whether a document answers a query.
    pub rerank: Option<Rerank>,
    /// Input form of a text for a model that speaks.
    pub speech: Option<Speech>,
    /// `sampling`: how the tokens of answers are chosen in conversations, unless a caller says otherwise.
    pub sampling: Option<SamplingParams>,
    /// The other keys.
    pub rest: Map<String, Value>,
}

/// `params.transcription`: what asks the model to transcribe audio that stands before it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Transcription {
    /// `prompt`: the text behind the audio; or, where it has `{audio}` in it, the whole prompt, in which the audio
    /// stands there. Then `{language}`, `{into}`, `{punctuation}` and `{prompt}` in it become what is asked for.
    pub prompt: String,
    /// `chat`: both are a user's message of a conversation.
    pub chat: bool,
    /// `languages`: the token behind the audio, or the text, that says what is spoken, by the language's code.
    pub languages: BTreeMap<String, Spelling>,
    /// `language`: the code of the language that is taken where none is given, of a model that cannot hear it.
    pub language: Option<String>,
    /// `tasks`: the token behind that, or the text, which says what is wanted, by its name, `transcribe` or
    /// `translate`.
    pub tasks: BTreeMap<String, Spelling>,
    /// `punctuation`: the texts that ask for punctuation and capitals, and for none. `None` where the model has no
    /// choice.
    pub punctuation: Option<[String; 2]>,
    /// `tokens_per_second`: the most tokens that a second of audio gives, those that begin an answer included.
    pub tokens_per_second: Option<f64>,
    /// `answer`: what an answer begins with, where it says what is spoken.
    pub answer: Option<AnswerHead>,
    /// `times`: tokens that are times.
    pub times: Option<TimeTokens>,
    /// `no_speech`: the token that stands first where nobody speaks.
    pub no_speech: Option<u32>,
    /// `previous`: the token in front of what was said before.
    pub previous: Option<u32>,
    /// `window`: seconds of audio that the model takes at once, where its host-op answers by itself.
    pub window: Option<f64>,
    /// `context`: seconds of audio at the beginning and at the end of a window that only give context to the rest of
    /// it, where windows overlap. For host-ops that give the times of their tokens.
    pub context: Option<[f64; 2]>,
}

impl Transcription {
    /// True where tokens, the host-op or a whole prompt ask for the words, and no text of a caller's does.
    pub fn asks_by_itself(&self) -> bool {
        self.times.is_some() || self.window.is_some() || self.prompt.contains("{audio}")
    }
}

/// A token, or a text that is tokenized where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Spelling {
    /// A token.
    Token(u32),
    /// A text.
    Text(String),
}

impl Spelling {
    /// The token, where it is one.
    pub fn token(&self) -> Option<u32> {
        match self {
            Self::Token(token) => Some(*token),
            Self::Text(_) => None,
        }
    }

    /// The text; empty where it is a token.
    pub fn text(&self) -> &str {
        match self {
            Self::Token(_) => "",
            Self::Text(text) => text,
        }
    }
}

/// `params.transcription.answer`: an answer begins with the name of a language between two texts. Where a language is
/// asked for, the same stands at the end of the prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerHead {
    /// `before`: the text in front of the name.
    pub before: String,
    /// `behind`: the text behind it.
    pub behind: String,
    /// `token`: the token of that text, behind which the words are.
    pub token: u32,
}

/// `params.transcription.times`: tokens that are times, in steps of as many seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TimeTokens {
    /// `first`: that of 0 s. All from it on are times.
    pub first: u32,
    /// `none`: the token that asks for no times.
    pub none: u32,
    /// `end`: the token that ends an answer; tokens of text are below it.
    pub end: u32,
    /// `step`: seconds from one to the next.
    pub step: f64,
}

/// `params.rerank`: how the model is asked whether a document answers a query, and what says so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rerank {
    /// `prompt`: a text with `{query}` and `{document}`, and `{instruction}` where there is one. Empty where both are a
    /// pair of texts, laid out by the tokenizer.
    pub prompt: String,
    /// `instruction`: what a document is looked for to do, unless a caller says it.
    pub instruction: String,
    /// Model output that becomes the score.
    pub verdict: Verdict,
}

/// `params.speech`: how a text is put for a model that speaks: as the number of a voice, the speed in thousandths, and
/// the numbers of its phonemes. The host-op's own keys stand beside these.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Speech {
    /// `voices`: their names, in the order of their numbers.
    pub voices: Vec<String>,
    /// `symbols`: the number of each phoneme, a text of one character as a rule.
    pub symbols: BTreeMap<String, u32>,
    /// `limit`: phonemes that the host-op takes at once.
    pub limit: usize,
    /// `script`: what makes phonemes of a text, for each voice.
    pub scripts: Vec<Script>,
    /// `noise`: usual deviations of the noise of a host-op that takes them, and a seed, behind voice and speed: that of
    /// frames, and that of durations.
    pub noise: Option<[f32; 2]>,
    /// `speeds`: the usual speed of each voice, by which the one that is asked for is multiplied; 1 unless given.
    pub speeds: Vec<f32>,
    /// `counted`: the number of characters of the text stands behind the speed, for a host-op that chooses by it.
    pub counted: bool,
}

/// Step from a text to the phonemes of a voice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Script {
    /// A lexicon, and rules of English letters for words that it lacks.
    #[default]
    Lexicon,
    /// `by` is `espeak`: the program of that name.
    Espeak {
        /// `voice`: the name that the program has for the language.
        voice: String,
        /// `joined` is true for phonemes of two letters in symbols of one, as Kokoro has them.
        joined: bool,
        /// `spaced` is true for spaces around punctuation, and for a comma at the end where there is none, as KittenTTS
        /// has them.
        spaced: bool,
    },
    /// `by` is `letters`: the characters of the text are the symbols.
    Letters {
        /// `lower`: in lower case.
        lower: bool,
        /// `roman`: texts of other scripts were romanised before.
        roman: bool,
    },
    /// `by` is `phonemes`: nothing here, texts are given as phonemes.
    Phonemes {
        /// `of`: the language or the phonemizer.
        of: String,
    },
}

/// Model output that says how well a document answers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Logits of two tokens, for a language model.
    Tokens {
        /// `yes`: the token of a document that answers.
        yes: String,
        /// `no`: the token of one that does not.
        no: String,
    },
    /// Value of a model with a head of one value, a bundle of the task score.
    Head {
        /// `activation` is `sigmoid`, which makes the value a score from 0 to 1, and not `identity`.
        sigmoid: bool,
    },
}

impl Default for Verdict {
    fn default() -> Self {
        Self::Head { sigmoid: true }
    }
}

/// `artifacts`: the files of the bundle.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArtifactTable {
    /// `contexts`, in the manifest's order.
    pub contexts: Vec<ContextEntry>,
    /// `embed`: the token embedding table.
    pub embed: Option<EmbedEntry>,
    /// `tokenizer`: a `tokenizer.json`.
    pub tokenizer: Option<String>,
    /// `tokenizer_config`: a `tokenizer_config.json`.
    pub tokenizer_config: Option<String>,
    /// `golden`: prompts with expected logits or vectors.
    pub golden: Option<String>,
    /// `files`: length and hash by path.
    pub files: BTreeMap<String, FileEntry>,
    /// The other keys.
    pub rest: Map<String, Value>,
}

/// `artifacts.contexts.<key>`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ContextEntry {
    /// The key.
    pub key: String,
    /// `bin`: a QNN context binary.
    pub bin: Option<String>,
    /// `onnx`: name and file of every graph.
    pub onnx: Vec<(String, String)>,
    /// `optional`: name of a set of contexts without which the bundle works, too.
    pub optional: Option<String>,
    /// `us`: graphs of the context binary, and the microseconds that one execution takes.
    pub us: Vec<(String, f64)>,
    /// The other keys.
    pub rest: Map<String, Value>,
}

/// `artifacts.embed`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbedEntry {
    /// The file: rows of `hidden` elements, one row a token, little-endian, no header.
    pub path: String,
    /// Element type; `f16` unless the manifest declares otherwise.
    pub dtype: DType,
}

/// `artifacts.files.<path>`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileEntry {
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: Option<String>,
    /// Length in bytes.
    pub bytes: Option<u64>,
}

/// `plan`: which host-op runs, and with what.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// `params`: an object that only the host-op interprets.
    pub params: Value,
    /// `steps`.
    pub steps: Vec<Step>,
}

/// `plan.steps[]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// `host`: name of a host-op.
    pub host: Option<String>,
    /// The other keys.
    pub rest: Map<String, Value>,
}

impl Manifest {
    /// Reads the manifest that `path` means: a file, a folder, or a name in a folder ([`select`]).
    ///
    /// # Errors
    /// When there is no such manifest, or it is invalid.
    pub fn load(path: &Path) -> Result<Self> {
        Self::load_with_root(path, None)
    }

    /// Same as [`Manifest::load`], with the folder that the manifest's paths resolve against. Without one it is the
    /// manifest's own folder, or the sub-folder of it that `artifacts_root` names.
    ///
    /// # Errors
    /// Errors of [`Manifest::load`], and when the folder of the paths is not there.
    pub fn load_with_root(path: &Path, root: Option<&Path>) -> Result<Self> {
        let file = select(path)?;
        let bytes = files::read(ErrorKind::Manifest, &file, MAX_BYTES)?;
        let manifest = reader::parse(&file, &bytes)
            .and_then(|document| {
                Self::from_value(&file, document, root).map_err(|e| e.context(file.display()))
            })
            .map_err(|e| other_candidates(e, path, &file))?;
        if !manifest.root.is_dir() {
            return Err(error!(
                Manifest,
                "{}: the artifacts root is not a folder",
                manifest.root.display()
            )
            .hint("give the folder that holds the context binaries"));
        }
        let resolve = |folder: &Path| {
            folder.canonicalize().map_err(|e| Error::io(ErrorKind::Manifest, folder, e))
        };
        let bounds = resolve(&manifest.bounds)?;
        if !resolve(&manifest.root)?.starts_with(&bounds) {
            return Err(files::leaves(&manifest.root, &bounds)
                .context(format_args!("{}: /artifacts_root", file.display()))
                .hint("give the folder on the command line as ARTIFACTS_ROOT instead"));
        }
        Ok(manifest)
    }

    /// Reads a document as if it lay in the file `path`, which need not exist.
    ///
    /// # Errors
    /// When the document is no valid manifest.
    pub fn from_value(path: &Path, document: Value, root: Option<&Path>) -> Result<Self> {
        read::manifest(path, document, root)
    }

    /// The host-op that `plan.steps` selects.
    ///
    /// # Errors
    /// When `plan.steps` selects no host-op, or more than one.
    pub fn host_op(&self) -> Result<&str> {
        let mut hosts = self.plan.steps.iter().filter_map(|s| s.host.as_deref());
        let Some(first) = hosts.next() else {
            return Err(error!(
                Manifest,
                "{}: /plan/steps: no step names a host-op",
                self.path.display()
            )
            .hint("expected \"plan\": {\"steps\": [{\"host\": \"name_of_the_op\"}]}"));
        };
        if let Some(other) = hosts.find(|h| *h != first) {
            bail!(
                Manifest,
                "{}: /plan/steps: two host-ops, {first:?} and {other:?}; expected one",
                self.path.display()
            );
        }
        Ok(first)
    }

    /// The bundle's files, below [`Manifest::root`].
    pub fn open_artifacts(&self) -> Artifacts {
        Artifacts::within(&self.root, &self.bounds)
    }

    /// The entry of a context.
    ///
    /// # Errors
    /// When the manifest has no context with this key.
    pub fn context(&self, key: &str) -> Result<&ContextEntry> {
        self.artifacts.contexts.iter().find(|c| c.key == key).ok_or_else(|| {
            let known: Vec<_> = self.artifacts.contexts.iter().map(|c| c.key.as_str()).collect();
            error!(Manifest, "{}: /artifacts/contexts has no {key:?}", self.path.display())
                .hint(format!("it has {}", known.join(", ")))
        })
    }

    /// The files of a context, for [`qhx_exec::backend::Backend::open_context`].
    ///
    /// Every path is checked against the path rule. A bundle need not carry both forms: it is an
    /// error when no file of the context exists, and otherwise the backend that needs a missing
    /// one reports it.
    ///
    /// # Errors
    /// When the context is unknown, a path breaks the path rule, or none of its files exists.
    pub fn context_source(&self, artifacts: &Artifacts, key: &str) -> Result<ContextSource> {
        let entry = self.context(key)?;
        let base = format!("/artifacts/contexts/{}", key.replace('~', "~0").replace('/', "~1"));
        let mut present = false;
        let mut missing = None;
        let mut resolve = |pointer: String, path: &str| match artifacts.resolve(&pointer, path) {
            Ok(resolved) => {
                present = true;
                Ok(resolved)
            }
            Err(e) if e.kind() == ErrorKind::Artifact => {
                missing.get_or_insert(e);
                Ok(artifacts.root().join(path))
            }
            Err(e) => Err(e),
        };
        let within = Some(artifacts.bounds().to_owned());
        let us = entry.us.clone();
        let key = key.to_owned();
        let seen = artifacts.seen().clone();
        let mut source = ContextSource { key, within, seen, us, ..ContextSource::default() };
        if let Some(bin) = &entry.bin {
            source.binary = Some(resolve(format!("{base}/bin"), bin)?);
        }
        for (graph, path) in &entry.onnx {
            source.onnx.push((graph.clone(), resolve(format!("{base}/onnx/{graph}"), path)?));
        }
        match missing {
            Some(e) if !present => Err(e),
            _ => Ok(source),
        }
    }

    /// Path of the tokenizer.
    ///
    /// # Errors
    /// When the manifest has no tokenizer, or its path breaks the path rule.
    pub fn tokenizer_path(&self, artifacts: &Artifacts) -> Result<PathBuf> {
        let Some(path) = &self.artifacts.tokenizer else {
            return Err(error!(Manifest, "{}: /artifacts/tokenizer: missing", self.path.display())
                .hint("name the bundle's tokenizer.json, or give token ids as the prompt"));
        };
        artifacts.resolve("/artifacts/tokenizer", path)
    }

    /// Path of `tokenizer_config.json`: as the manifest declares, or beside the tokenizer when there is one.
    ///
    /// # Errors
    /// When the path breaks the path rule, or the declared file does not exist.
    pub fn tokenizer_config_path(&self, artifacts: &Artifacts) -> Result<Option<PathBuf>> {
        if let Some(path) = &self.artifacts.tokenizer_config {
            return artifacts.resolve("/artifacts/tokenizer_config", path).map(Some);
        }
        let Some(tokenizer) = &self.artifacts.tokenizer else { return Ok(None) };
        let beside = Path::new(tokenizer).with_file_name("tokenizer_config.json");
        let Some(beside) = beside.to_str() else { return Ok(None) };
        match artifacts.resolve("/artifacts/tokenizer", beside) {
            Ok(path) => Ok(Some(path)),
            Err(e) if e.kind() == ErrorKind::Artifact => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Error of a folder's first candidate, with a hint at the others, which may be what was meant.
fn other_candidates(error: Error, given: &Path, chosen: &Path) -> Error {
    if !given.is_dir() {
        return error;
    }
    let mut others = candidates(given).unwrap_or_default();
    others.retain(|p| p != chosen);
    if others.is_empty() {
        return error;
    }
    error.hint(format!(
        "the alphabetically first file of the folder was taken; give another one by name: {}",
        select::names(&others)
    ))
}
