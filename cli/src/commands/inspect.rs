//! `qhx inspect`: what a bundle or a context binary holds.

use std::path::PathBuf;

use clap::Args;
use qhx::Runtime;
use qhx_base::Result;
use qhx_qnn::BinaryTensor;
use qhx_tools::inspect::{
    BinaryContents, BundleContents, Contents, FolderContents, MissingPart, SizedFile, TargetRun,
    inspect,
};
use qhx_types::{DType, GraphInfo, TensorInfo};

use crate::Status;
use crate::app::App;
use crate::args::LibraryArgs;
use crate::output::Report;

const EXAMPLES: &str = "\
Examples:
  qhx inspect qwen35/v81
  qhx inspect qwen35/v81 --all                         # every tensor, and why a device is refused
  qhx inspect qwen35                                   # of v73, v79 and v81: which device takes which
  qhx inspect qwen35/v81/qwen35_decode_f16.bin
  qhx inspect qwen35/v81 --json | jq '.contexts[].binary.dsp_arch'";

/// Show a bundle's manifest and contexts, or one context binary
///
/// A line for each context, which --all follows with graphs and tensors. Reading a context binary needs libQnnSystem
/// only, and no device. Without it, file sizes and the bundle's ONNX graphs are shown.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InspectArgs {
    /// A bundle or a context binary
    #[arg(value_name = "BUNDLE|FILE.bin")]
    pub path: PathBuf,
    /// List all contexts, the tensors of each graph, and what each device does with the bundle
    #[arg(long)]
    pub all: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Contexts, files and names of graphs that are listed without --all.
const LISTED: usize = 8;

/// Runs the command.
pub(crate) fn run(args: &InspectArgs, app: &mut App) -> Result<Status> {
    let runtime =
        Runtime::builder().libraries(args.libraries.files()).plugins(app.plugin_options());
    let contents = inspect(&runtime.build(), &args.path)?;
    if args.json {
        app.output.json_pretty(&contents)?;
    } else {
        let mut text = Report::default();
        match &contents {
            Contents::Bundle(bundle) => write_bundle(&mut text, bundle, args.all),
            Contents::Binary(binary) => {
                write_binary(&mut text, binary, args.all);
                if !args.all {
                    text.line(format_args!("(--all lists every tensor)"));
                }
            }
            Contents::Folder(folder) => write_folder(&mut text, folder),
            _ => {}
        }
        app.output.report(&text)?;
    }
    let Contents::Bundle(bundle) = contents else { return Ok(Status::Done) };
    for note in &bundle.notes {
        say!("note: {note}");
    }
    Ok(bundle.unread.map_or(Status::Done, Status::Reported))
}

fn write_folder(text: &mut Report, folder: &FolderContents) {
    for bundle in &folder.bundles {
        text.line(format_args!("bundle for v{}: {}", bundle.arch, bundle.path.display()));
    }
    for device in &folder.devices {
        let takes =
            device.takes.map_or_else(|| "none of them".to_owned(), |arch| format!("v{arch}"));
        text.line(format_args!("a {} device takes {takes}", device.target));
    }
}

fn write_targets(text: &mut Report, targets: &[TargetRun]) {
    if targets.is_empty() {
        return;
    }
    text.line(format_args!(""));
    text.line(format_args!("devices"));
    for TargetRun { target, runs, reason, .. } in targets {
        let how = match *runs {
            "optimal" => "full speed",
            runs => runs,
        };
        let reason = reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        text.line(format_args!("  {target} {how}{reason}"));
    }
}

fn write_bundle(text: &mut Report, report: &BundleContents, all: bool) {
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
    if !report.voices.is_empty() {
        row("voices", report.voices.join(", "));
    }
    let figure = |pointer: &str| report.receipt.as_ref()?.pointer(pointer)?.as_f64();
    if let (Some(kl), Some(tokens)) = (figure("/kl"), figure("/tokens")) {
        row("receipt", format!("KL {kl:.2e} from f16 weights on {tokens} tokens"));
    }
    if let Some(factor) = figure("/headroom/factor") {
        row("headroom", format!("{factor:.1}x in f16"));
    }
    row("manifest", report.manifest.display().to_string());
    if let Some(missing) = &report.missing {
        for MissingPart { what, hint, .. } in missing {
            row("missing", what.clone());
            if let Some(hint) = hint {
                row("", format!("hint: {hint}"));
            }
        }
        if missing.is_empty() {
            row("missing", "nothing".to_owned());
        }
    }
    if !all {
        return write_overview(text, report);
    }
    write_files(text, "", &report.files);
    for context in &report.contexts {
        text.line(format_args!(""));
        text.line(format_args!("context {:?}", context.key));
        write_files(text, "  ", &context.files);
        match &context.binary {
            Some(binary) => write_binary(text, binary, true),
            None => {
                for graph in &context.onnx {
                    write_graph(text, graph);
                }
            }
        }
    }
    write_targets(text, &report.targets);
}

/// The rest of a bundle on one screen.
fn write_overview(text: &mut Report, report: &BundleContents) {
    let (missing, there): (Vec<_>, Vec<_>) =
        report.files.iter().partition(|file| file.bytes.is_none());
    write_files(text, "", there.into_iter().take(LISTED));
    write_files(text, "", missing);
    text.line(format_args!(""));
    for context in report.contexts.iter().take(LISTED) {
        let mut graphs: Vec<&str> = Vec::new();
        let mut more = String::new();
        if let Some(BinaryContents { info, shares_weights, .. }) = &context.binary {
            graphs.extend(info.graphs.iter().map(|graph| &*graph.name));
            more += &info.dsp_arch.map_or_else(String::new, |arch| format!(", v{arch}"));
            more += if *shares_weights { ", shared weights" } else { "" };
        } else {
            graphs.extend(context.onnx.iter().map(|graph| &*graph.name));
        }
        let file = |file: &SizedFile| match file.bytes {
            Some(bytes) => format!("{} {}", file.role, size(bytes)),
            None => format!("{} {} MISSING", file.role, file.path.display()),
        };
        let files = some(context.files.iter().map(file));
        let graphs = some(graphs.iter().map(|name| name.escape_debug().to_string()));
        text.line(format_args!("context {:?}: {files}{more}; graphs {graphs}", context.key));
    }
    if let Some(left @ 1..) = report.contexts.len().checked_sub(LISTED) {
        text.line(format_args!("and {left} more contexts"));
    }
    let mut runs: Vec<(&str, Vec<&str>)> = Vec::new();
    for TargetRun { target, runs: how, .. } in &report.targets {
        match runs.iter_mut().find(|(known, _)| known == how) {
            Some((_, targets)) => targets.push(target),
            None => runs.push((how, vec![target])),
        }
    }
    if !runs.is_empty() {
        let runs = runs.iter().map(|(how, targets)| format!("{how} {}", targets.join(" ")));
        text.line(format_args!("devices    {}", runs.collect::<Vec<_>>().join(", ")));
    }
    text.line(format_args!("(--all lists every tensor)"));
}

/// Some words of a list, and how many there are besides.
fn some(words: impl ExactSizeIterator<Item = String>) -> String {
    let left = words.len().saturating_sub(LISTED);
    let listed = words.take(LISTED).collect::<Vec<_>>().join(", ");
    if left > 0 { format!("{listed} and {left} more") } else { listed }
}

fn write_files<'f>(
    text: &mut Report,
    indent: &str,
    files: impl IntoIterator<Item = &'f SizedFile>,
) {
    for file in files {
        let size = file.bytes.map_or_else(|| "MISSING".to_owned(), size);
        text.line(format_args!("{indent}{}: {} ({size})", file.role, file.path.display()));
    }
}

fn write_binary(text: &mut Report, report: &BinaryContents, all: bool) {
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
        if !all {
            let (inputs, outputs) = (graph.inputs.len(), graph.outputs.len());
            let name = &graph.name;
            text.line(format_args!("  graph {name:?}: {inputs} inputs, {outputs} outputs"));
            continue;
        }
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

fn write_graph(text: &mut Report, graph: &GraphInfo) {
    text.line(format_args!("  graph {:?} (ONNX)", graph.name));
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
