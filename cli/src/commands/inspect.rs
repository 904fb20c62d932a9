//! `qhx inspect`: what a bundle or a context binary holds.

use std::path::{Path, PathBuf};

use clap::Args;
use qhx::Bundle;
use qhx_core::artifacts::Mapped;
use qhx_core::backend::{Context, GraphExecutor};
use qhx_core::op::OpProvider as _;
use qhx_core::qnn::{BinaryInfo, BinaryTensor, SystemLibrary};
use qhx_core::{DType, ErrorKind, GraphInfo, Result, TensorInfo, files};
use serde::Serialize;

use crate::Status;
use crate::app::App;
use crate::args::LibraryArgs;
use crate::output::Report;

const EXAMPLES: &str = "\
Examples:
  qhx inspect qwen35/v81
  qhx inspect qwen35/v81/qwen35_decode_f16.bin
  qhx inspect qwen35/v81 --json | jq '.contexts[].binary.dsp_arch'";

/// Show a bundle's manifest and contexts, or one context binary
///
/// Reading a context binary needs libQnnSystem only, and no device. Without it, file sizes and the
/// bundle's ONNX graphs are shown.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InspectArgs {
    /// A bundle or a context binary
    #[arg(value_name = "BUNDLE|FILE.bin")]
    pub path: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

#[derive(Debug, Serialize)]
struct BundleReport {
    manifest: PathBuf,
    root: PathBuf,
    model: String,
    family: Option<String>,
    dsp_arch: Option<u32>,
    host_op: Option<String>,
    params: ParamsReport,
    files: Vec<SizedFile>,
    contexts: Vec<ContextReport>,
    notes: Vec<String>,
    /// The first file that is there and cannot be read.
    #[serde(skip)]
    unread: Option<ErrorKind>,
}

#[derive(Debug, Serialize)]
struct ParamsReport {
    hidden: Option<usize>,
    vocab: Option<usize>,
    n_layers: Option<usize>,
    max_ctx: Option<usize>,
    eos_token_id: Vec<u32>,
}

#[derive(Debug, Serialize)]
struct SizedFile {
    role: &'static str,
    path: PathBuf,
    /// `None` when the file is missing.
    bytes: Option<u64>,
}

impl SizedFile {
    fn of(role: &'static str, path: PathBuf) -> Self {
        Self { role, bytes: std::fs::metadata(&path).ok().map(|m| m.len()), path }
    }
}

#[derive(Debug, Serialize)]
struct ContextReport {
    key: String,
    files: Vec<SizedFile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    binary: Option<BinaryReport>,
    /// Graphs as ONNX, where the context binary could not be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    onnx: Vec<OnnxReport>,
}

/// A graph as ONNX, and what executes it on the CPU.
#[derive(Debug, Serialize)]
struct OnnxReport {
    #[serde(flatten)]
    graph: GraphInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    executor: Option<GraphExecutor>,
}

#[derive(Debug, Serialize)]
struct BinaryReport {
    path: PathBuf,
    qairt: Option<String>,
    shares_weights: bool,
    #[serde(flatten)]
    info: BinaryInfo,
}

/// Runs the command.
pub(crate) fn run(args: &InspectArgs, app: &mut App) -> Result<Status> {
    if is_context_binary(&args.path) {
        if let Some(error) = qhx::not_forged(&args.path) {
            return Err(error);
        }
        let system = match args.libraries.files().system()? {
            Some(system) => system,
            None => args
                .libraries
                .files()
                .require("reading a context binary")
                .and_then(|l| SystemLibrary::open(&l.system))?,
        };
        let report = read_binary(&system, &args.path, &Mapped::open(&args.path)?)?;
        if args.json {
            app.output.json_pretty(&report)?;
        } else {
            let mut text = Report::default();
            write_binary(&mut text, &report);
            app.output.report(&text)?;
        }
        return Ok(Status::Done);
    }
    let report = bundle(args, app)?;
    if args.json {
        app.output.json_pretty(&report)?;
    } else {
        app.output.report(&bundle_text(&report))?;
    }
    for note in &report.notes {
        say!("note: {note}");
    }
    Ok(report.unread.map_or(Status::Done, Status::Reported))
}

/// A file that is not JSON by its name or its first byte.
fn is_context_binary(path: &Path) -> bool {
    use std::io::Read as _;
    if !path.is_file() || path.extension().is_some_and(|e| e == "json") {
        return false;
    }
    let mut head = [0; 64];
    let file = files::open(ErrorKind::Artifact, path).ok();
    let read = file.and_then(|mut f| f.read(&mut head).ok()).unwrap_or(0);
    let first = head.iter().take(read).find(|b| !b.is_ascii_whitespace());
    first != Some(&b'{')
}

fn read_binary(system: &SystemLibrary, path: &Path, file: &Mapped) -> Result<BinaryReport> {
    let info = BinaryInfo::open(system, file, qhx::cache::contexts_tried().as_deref())?;
    Ok(BinaryReport {
        path: path.to_owned(),
        qairt: info.qairt(),
        shares_weights: info.shares_weights(),
        info,
    })
}

fn bundle(args: &InspectArgs, app: &App) -> Result<BundleReport> {
    let bundle = Bundle::open(&args.path)?;
    let manifest = bundle.manifest();
    let artifacts = manifest.open_artifacts();
    let (mut notes, mut unread) = (Vec::new(), None);
    let system = match args.libraries.files().system() {
        Ok(Some(system)) => Some(system),
        Ok(None) => {
            notes.push(format!(
                "no libQnnSystem is given or installed: context binaries are not read ({})",
                qhx::libraries::how_to_get()
            ));
            None
        }
        Err(e) if args.libraries.system.is_some() || args.libraries.htp.is_some() => return Err(e),
        Err(e) => {
            notes.push(format!("context binaries are not read: {}", e.message()));
            None
        }
    };
    let mut contexts = Vec::new();
    for entry in &manifest.artifacts.contexts {
        let source = match manifest.context_source(&artifacts, &entry.key) {
            Ok(source) => source,
            Err(e) => {
                unread.get_or_insert(e.kind());
                notes.push(format!("context {:?}: {}", entry.key, e.message()));
                contexts.push(ContextReport {
                    key: entry.key.clone(),
                    files: Vec::new(),
                    binary: None,
                    onnx: Vec::new(),
                });
                continue;
            }
        };
        let mut files: Vec<_> =
            source.binary.iter().map(|p| SizedFile::of("context binary", p.clone())).collect();
        files.extend(source.onnx.iter().map(|(_, p)| SizedFile::of("onnx", p.clone())));
        let mut binary = None;
        if let (Some(system), Some(path)) = (&system, &source.binary) {
            match source.open(path).and_then(|file| read_binary(system, path, &file)) {
                Ok(report) => binary = Some(report),
                Err(e) => {
                    unread.get_or_insert(e.kind());
                    notes.push(format!("context {:?}: {}", entry.key, e.message()));
                }
            }
        }
        let mut onnx = Vec::new();
        if binary.is_none() && !source.onnx.is_empty() {
            match qhx::backends::cpu(Some(1)).and_then(|cpu| cpu.open_context(&source)) {
                Ok(context) => onnx = onnx_reports(&*context),
                Err(e) => {
                    unread.get_or_insert(e.kind());
                    notes.push(format!("context {:?}: {}", entry.key, e.message()));
                }
            }
        }
        contexts.push(ContextReport { key: entry.key.clone(), files, binary, onnx });
    }
    let table = &manifest.artifacts;
    let listed = [
        ("embedding table", table.embed.as_ref().map(|e| &e.path)),
        ("tokenizer", table.tokenizer.as_ref()),
        ("tokenizer config", table.tokenizer_config.as_ref()),
    ];
    let files = listed
        .into_iter()
        .filter_map(|(role, path)| Some(SizedFile::of(role, manifest.root.join(path?))))
        .collect();
    let params = &manifest.params;
    let plugins = app.plugins()?;
    if let Ok(entry) = manifest.host_op().and_then(|name| plugins.find(name))
        && let Err(error) = plugins.check_params(&entry, manifest)
    {
        notes.push(error.report().to_string());
    }
    Ok(BundleReport {
        unread,
        root: manifest.root.clone(),
        model: manifest.model.name.clone(),
        family: manifest.model.family.clone(),
        dsp_arch: manifest.model.dsp_arch,
        host_op: manifest
            .host_op()
            .map(str::to_owned)
            .map_err(|e| notes.push(e.message().to_owned()))
            .ok(),
        params: ParamsReport {
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

fn onnx_reports(context: &dyn Context) -> Vec<OnnxReport> {
    let mut executors = context.executors().into_iter();
    let graphs = context.graphs().iter();
    graphs
        .map(|graph| OnnxReport { graph: (**graph).clone(), executor: executors.next() })
        .collect()
}

fn bundle_text(report: &BundleReport) -> Report {
    let mut text = Report::default();
    let or_none = |v: Option<String>| v.unwrap_or_else(|| "(not said)".to_owned());
    let number = |v: Option<usize>| or_none(v.map(|n| n.to_string()));
    let mut row = |key: &str, value: String| text.line(format_args!("{key:10} {value}"));
    row("model", report.model.clone());
    row("family", or_none(report.family.clone()));
    row("host-op", or_none(report.host_op.clone()));
    row("dsp arch", or_none(report.dsp_arch.map(|a| format!("v{a}"))));
    row("layers", number(report.params.n_layers));
    row("hidden", number(report.params.hidden));
    row("vocab", number(report.params.vocab));
    row("max ctx", number(report.params.max_ctx));
    row("manifest", report.manifest.display().to_string());
    write_files(&mut text, "", &report.files);
    for context in &report.contexts {
        text.line(format_args!(""));
        text.line(format_args!("context {:?}", context.key));
        write_files(&mut text, "  ", &context.files);
        match &context.binary {
            Some(binary) => write_binary(&mut text, binary),
            None => {
                for graph in &context.onnx {
                    write_graph(&mut text, graph);
                }
            }
        }
    }
    text
}

fn write_files(text: &mut Report, indent: &str, files: &[SizedFile]) {
    for file in files {
        let size = file.bytes.map_or_else(|| "MISSING".to_owned(), size);
        text.line(format_args!("{indent}{}: {} ({size})", file.role, file.path.display()));
    }
}

fn write_binary(text: &mut Report, report: &BinaryReport) {
    let info = &report.info;
    let arch = info.dsp_arch.map_or_else(|| "unknown".to_owned(), |a| format!("v{a}"));
    let soc = info.soc_model.map_or_else(|| "unknown".to_owned(), |s| s.to_string());
    text.line(format_args!(
        "  {}, arch {arch}, soc {soc}, QAIRT {} (build {}), blob version {}{}",
        size(info.file_bytes),
        report.qairt.as_deref().unwrap_or("unknown"),
        info.build_id.escape_debug(),
        info.blob_version,
        if report.shares_weights { ", shared weights" } else { "" }
    ));
    for graph in &info.graphs {
        text.line(format_args!("  graph {:?}", graph.name));
        for (port, tensors) in [("in ", &graph.inputs), ("out", &graph.outputs)] {
            for tensor in tensors {
                text.line(format_args!("    {port} {}", binary_tensor(tensor)));
            }
        }
        if let Some(figures) = &graph.figures {
            let parts = [
                ("constants", figures.const_bytes),
                ("ops", figures.op_data_bytes),
                ("in and out", figures.io_tensor_bytes),
                ("spill and fill", figures.spill_fill_bytes),
                ("shared weights", figures.shared_weight_bytes),
            ];
            let parts: Vec<_> = parts
                .iter()
                .filter_map(|(name, bytes)| Some(format!("{name} {}", size((*bytes)?))))
                .collect();
            text.line(format_args!("    {}", parts.join(", ")));
        }
    }
}

fn binary_tensor(tensor: &BinaryTensor) -> String {
    let dtype = match tensor.dtype {
        Some(dtype) => dtype.name().to_owned(),
        None => format!("type {:#x}", tensor.dtype_code),
    };
    let format =
        if tensor.format == 0 { String::new() } else { format!(", format {}", tensor.format) };
    line(&tensor.name, &dtype, &tensor.shape, tensor.dtype, &format)
}

fn write_graph(text: &mut Report, report: &OnnxReport) {
    let OnnxReport { graph, executor } = report;
    text.line(format_args!("  graph {:?} (ONNX)", graph.name));
    if let Some(executor) = executor {
        text.line(format_args!("    executed on the CPU by {executor}"));
    }
    for (port, tensors) in [("in ", &graph.inputs), ("out", &graph.outputs)] {
        for TensorInfo { name, dtype, shape, .. } in tensors {
            let tensor = line(name, dtype.name(), shape, Some(*dtype), "");
            text.line(format_args!("    {port} {tensor}"));
        }
    }
}

fn line(name: &str, dtype: &str, shape: &[usize], known: Option<DType>, more: &str) -> String {
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
    let bytes = elements.zip(known).and_then(|(n, d)| n.checked_mul(d.size() as u64));
    let bytes = bytes.map_or_else(String::new, |b| format!(", {}", size(b)));
    format!("{} {dtype}{shape:?}{bytes}{more}", name.escape_debug())
}

/// A number of bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
