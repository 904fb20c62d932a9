//! Contents of a bundle or a context binary, as values.

mod missing;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx::Runtime;
use qhx::folders::{self, TargetFolder};
use qhx::hub;
use qhx::libraries::{LibraryFiles, how_to_get};
use qhx::{Bundle, not_forged};
use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result, files};
use qhx_exec::backend::Context;
use qhx_qnn::{BinaryInfo, Destination, SystemLibrary, Target, Verdict, verdict};
use qhx_types::GraphInfo;
use serde::Serialize;

pub use missing::MissingPart;

/// Contents of an inspected path.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Contents {
    /// A bundle.
    Bundle(BundleContents),
    /// A folder with the bundles of several architectures.
    Folder(FolderContents),
    /// A context binary.
    Binary(BinaryContents),
}

/// Reads what a bundle or a context binary holds, without a device and without loading weights. Where there is no
/// libQnnSystem, a bundle's context binaries are left out, and a note says so.
///
/// ```no_run
/// use qhx_tools::inspect::{Contents, inspect};
///
/// if let Contents::Bundle(bundle) = inspect(&qhx::Runtime::default(), "qwen35/v81")? {
///     println!("{} has {} contexts", bundle.model, bundle.contexts.len());
/// }
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// When there is neither at `path`, when a context binary alone cannot be read, and when a library or plugin that
/// is named cannot be loaded. What a bundle lacks is in its notes.
pub fn inspect(runtime: &Runtime, path: impl AsRef<Path>) -> Result<Contents> {
    let path = &hub::resolve_for(path.as_ref(), || runtime.device_arch())?;
    let bundles = folders::targets(path);
    if !bundles.is_empty() {
        return Ok(Contents::Folder(FolderContents::of(bundles)));
    }
    if !is_context_binary(path) {
        return bundle(path, runtime).map(Contents::Bundle);
    }
    if let Some(error) = not_forged(path) {
        return Err(error);
    }
    let files = runtime.libraries();
    let system = match files.system()? {
        Some(system) => system,
        None => files
            .require("reading a context binary")
            .and_then(|l| SystemLibrary::open(&l.system))?,
    };
    read_binary(&system, path, &Mapped::open(path)?).map(Contents::Binary)
}

/// Bundles of several architectures, and which of them devices take.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct FolderContents {
    /// The bundles, the oldest architecture first.
    pub bundles: Vec<TargetFolder>,
    /// The devices of all architectures.
    pub devices: Vec<DeviceChoice>,
}

/// Bundle that a device takes from those of several architectures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceChoice {
    /// The device's architecture: `v79`.
    pub target: String,
    /// Architecture of the bundle that it takes: 73 for v73. `None` where it runs none.
    pub takes: Option<u32>,
}

impl FolderContents {
    fn of(bundles: Vec<TargetFolder>) -> Self {
        let devices = Target::ALL.map(|target| DeviceChoice {
            target: target.to_string(),
            takes: folders::choose(&bundles, Some(target.arch)).ok().map(|taken| taken.arch),
        });
        Self { bundles, devices: devices.into() }
    }
}

/// Verdict on running a bundle's context binaries on the devices of an architecture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TargetRun {
    /// The device's architecture: `v79`.
    pub target: String,
    /// `optimal`, `supported` (at less than full speed) or `refused`.
    pub runs: &'static str,
    /// Why it is not optimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Hint on what would run, or run at full speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl TargetRun {
    /// Verdicts on the binaries of one bundle: the worst for each device. Empty without binaries.
    fn of(binaries: &[&BinaryInfo]) -> Vec<Self> {
        if binaries.is_empty() {
            return Vec::new();
        }
        let run = |target: Target| {
            let verdicts = binaries.iter().map(|binary| verdict(binary, &Destination::of(target)));
            let mut worst =
                Self { target: target.to_string(), runs: "optimal", reason: None, hint: None };
            for found in verdicts {
                let (runs, reason, hint) = match found {
                    Verdict::Optimal => continue,
                    Verdict::Supported { .. } if worst.runs != "optimal" => continue,
                    Verdict::Supported { reason, hint } => ("supported", reason, hint),
                    Verdict::Refused { reason, hint } => ("refused", reason, hint),
                };
                worst = Self { runs, reason: Some(reason), hint: Some(hint), ..worst };
                if runs == "refused" {
                    break;
                }
            }
            worst
        };
        Target::ALL.map(run).into()
    }
}

/// Contents of a bundle.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BundleContents {
    /// The manifest's file.
    pub manifest: PathBuf,
    /// The folder that its paths resolve against.
    pub root: PathBuf,
    /// Name of the model.
    pub model: String,
    /// Its family, where the manifest has one.
    pub family: Option<String>,
    /// Hexagon architecture that the bundle is for: 81 for v81.
    pub dsp_arch: Option<u32>,
    /// Name of the host-op; `None` where the plan has none.
    pub host_op: Option<String>,
    /// Figures of the model.
    pub params: ModelFigures,
    /// Names of its voices, where it speaks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub voices: Vec<String>,
    /// The bundle's files beside those of contexts.
    pub files: Vec<SizedFile>,
    /// The contexts, in the manifest's order.
    pub contexts: Vec<ContextContents>,
    /// Cost of the weights to the model's predictions, where the forge measured it: `model.receipt` of the manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Box<serde_json::Value>>,
    /// Verdicts on its context binaries for devices of each architecture, if they could be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<TargetRun>,
    /// Parts that it lacks to run, with likely fixes, for people; empty where its host-op opens over its graphs. `None`
    /// where graphs could not be read, and nothing else is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<Vec<MissingPart>>,
    /// Problems of the bundle, such as files that could not be read, for people.
    pub notes: Vec<String>,
    /// The kind of error of the first file that is there and cannot be read.
    #[serde(skip)]
    pub unread: Option<ErrorKind>,
}

/// Figures of a model, as its manifest has them.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ModelFigures {
    /// Values of a hidden state.
    pub hidden: Option<usize>,
    /// Tokens of the vocabulary.
    pub vocab: Option<usize>,
    /// Layers of the decoder.
    pub n_layers: Option<usize>,
    /// Positions of the context.
    pub max_ctx: Option<usize>,
    /// Tokens that end a text.
    pub eos_token_id: Vec<u32>,
}

/// A file and its length.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct SizedFile {
    /// Purpose of the file in the bundle.
    pub role: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Its length; `None` when it is missing.
    pub bytes: Option<u64>,
}

impl SizedFile {
    fn of(role: &'static str, path: PathBuf) -> Self {
        Self { role, bytes: std::fs::metadata(&path).ok().map(|m| m.len()), path }
    }
}

/// A context: its files, and what they hold.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct ContextContents {
    /// Key in the manifest.
    pub key: String,
    /// Its files.
    pub files: Vec<SizedFile>,
    /// Contents of its context binary, if that could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binary: Option<BinaryContents>,
    /// Graphs as ONNX, where the context binary could not be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub onnx: Vec<GraphInfo>,
}

/// Contents of a context binary.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BinaryContents {
    /// The file.
    pub path: PathBuf,
    /// Release of QAIRT that made it, where its build says so.
    pub qairt: Option<String>,
    /// True if graphs share weights.
    pub shares_weights: bool,
    /// Its metadata.
    #[serde(flatten)]
    pub info: BinaryInfo,
}

/// A file that is not JSON by its name or its first byte.
fn is_context_binary(path: &Path) -> bool {
    if !path.is_file() || path.extension().is_some_and(|e| e == "json") {
        return false;
    }
    let mut head = [0; 64];
    let file = files::open(ErrorKind::Artifact, path).ok();
    let read = file.and_then(|mut f| f.read(&mut head).ok()).unwrap_or(0);
    let first = head.iter().take(read).find(|b| !b.is_ascii_whitespace());
    first != Some(&b'{')
}

fn read_binary(system: &SystemLibrary, path: &Path, file: &Mapped) -> Result<BinaryContents> {
    let info = BinaryInfo::open(system, file, qhx::cache::contexts_tried().as_deref())?;
    Ok(BinaryContents {
        path: path.to_owned(),
        qairt: info.qairt(),
        shares_weights: info.shares_weights(),
        info,
    })
}

fn bundle(path: &Path, runtime: &Runtime) -> Result<BundleContents> {
    let bundle = Bundle::open_with_root(path, None)?;
    let manifest = bundle.manifest();
    let artifacts = manifest.open_artifacts();
    let (mut notes, mut unread, mut unread_contexts) = (Vec::new(), None, Vec::new());
    let system = match runtime.libraries().system() {
        Ok(Some(system)) => Some(system),
        Ok(None) => {
            notes.push(format!(
                "no libQnnSystem is given or installed: context binaries are not read ({})",
                how_to_get()
            ));
            None
        }
        Err(e) if *runtime.libraries() != LibraryFiles::default() => return Err(e),
        Err(e) => {
            notes.push(format!("context binaries are not read: {}", e.message()));
            None
        }
    };
    let mut contexts = Vec::new();
    for entry in &manifest.artifacts.contexts {
        let mut note = |e: Error| {
            unread.get_or_insert(e.kind());
            unread_contexts.push(MissingPart::from(&e));
            notes.push(format!("context {:?}: {}", entry.key, e.message()));
        };
        let mut context = ContextContents { key: entry.key.clone(), ..ContextContents::default() };
        let source = manifest.context_source(&artifacts, &entry.key).map_err(&mut note);
        if let Ok(source) = source {
            let binary = source.binary.iter().map(|path| ("context binary", path));
            let files = binary.chain(source.onnx.iter().map(|(_, path)| ("onnx", path)));
            context.files = files.map(|(role, path)| SizedFile::of(role, path.clone())).collect();
            if let (Some(system), Some(path)) = (&system, &source.binary) {
                let read = source.open(path).and_then(|file| read_binary(system, path, &file));
                context.binary = read.map_err(&mut note).ok();
            }
            if context.binary.is_none() && !source.onnx.is_empty() {
                let opened = qhx::backends::cpu(Some(1)).and_then(|cpu| cpu.open_context(&source));
                let graphs = |opened: Arc<dyn Context>| {
                    opened.graphs().iter().map(|g| (**g).clone()).collect()
                };
                context.onnx = opened.map(graphs).map_err(&mut note).unwrap_or_default();
            }
        }
        contexts.push(context);
    }
    let table = &manifest.artifacts;
    let listed = [
        ("embedding table", table.embed.as_ref().map(|e| &e.path)),
        ("tokenizer", table.tokenizer.as_ref()),
        ("tokenizer config", table.tokenizer_config.as_ref()),
    ];
    let files: Vec<_> = listed
        .into_iter()
        .filter_map(|(role, path)| Some(SizedFile::of(role, manifest.root.join(path?))))
        .collect();
    let params = &manifest.params;
    let missing =
        missing::missing(&bundle, &runtime.plugins()?, &files, &contexts, unread_contexts);
    let binaries = contexts.iter().filter_map(|context| Some(&context.binary.as_ref()?.info));
    let targets = TargetRun::of(&binaries.collect::<Vec<_>>());
    let receipt = manifest.receipt().map_err(|e| notes.push(e.report().to_string()));
    Ok(BundleContents {
        missing,
        receipt: receipt.ok().flatten().cloned().map(Box::new),
        unread,
        targets,
        root: manifest.root.clone(),
        model: manifest.model.name.clone(),
        family: manifest.model.family.clone(),
        dsp_arch: manifest.model.dsp_arch,
        host_op: manifest
            .host_op()
            .map(str::to_owned)
            .map_err(|e| notes.push(e.message().to_owned()))
            .ok(),
        voices: params.speech.as_ref().map_or_else(Vec::new, |speech| speech.voices.clone()),
        params: ModelFigures {
            hidden: params.hidden,
            vocab: params.vocab,
            n_layers: params.n_layers,
            max_ctx: params.max_ctx,
            eos_token_id: params.eos_token_id.clone(),
        },
        files,
        contexts,
        manifest: manifest.path.clone(),
        notes,
    })
}
