//! `qhx forge`: makes a bundle from a checkpoint.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use qhx_core::qnn::{Library, QnnBackend, QnnOptions, Target};
use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::{CheckBackends, ForgeOptions, Precision, Report, Task, forge};
use serde_json::{Value, json};

use crate::app::{App, Status};
use crate::args::LibraryArgs;
use crate::backends::{self, Libraries};
use crate::progress::ForgeProgress;

const EXAMPLES: &str = "\
Examples:
  qhx forge Qwen3.5-0.8B --out qwen35/v81
  qhx forge Qwen3.5-0.8B --out qwen35/v79-w8 --target v79 --precision w8a16 --check
  qhx forge Qwen3.5-4B --out qwen35-4b/v81 --shards 2 --max-ctx 2048
  qhx forge Qwen3.5-0.8B --out qwen35/cpu --cpu-only
  qhx forge Llama-3.2-1B --out llama/v81 --prefill 32,128
  qhx forge nv-embedcode-7b-v1 --task embed --shards 4 --precision w8a16 --out embedcode/v81";

/// Make a bundle from a Hugging Face checkpoint
///
/// Reads config.json, the safetensors and tokenizer.json of a folder, and writes context binaries
/// for one Hexagon architecture, the same graphs as ONNX for the CPU, the embedding table, the
/// tokenizer and the manifest. The folder appears when everything is written. Prints the path of
/// the manifest.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ForgeArgs {
    /// Folder of the checkpoint
    pub checkpoint: PathBuf,
    /// Folder of the bundle
    #[arg(short, long, value_name = "DIR")]
    pub out: PathBuf,
    /// Hexagon architecture of the context binaries [default: v81 when there are QNN libraries]
    #[arg(long, value_enum, value_name = "ARCH")]
    pub target: Option<TargetChoice>,
    /// What the bundle is to do
    #[arg(long, value_enum, default_value_t)]
    pub task: TaskChoice,
    /// Precision of the decoder's weights
    #[arg(long, value_enum, default_value_t)]
    pub precision: PrecisionChoice,
    /// Number of contexts that the decoder's layers are spread over
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub shards: usize,
    /// Positions of the KV cache, or of the texts of an encoder [default: 1024, an encoder 512, or
    /// fewer when the model has fewer]
    #[arg(long, value_name = "N")]
    pub max_ctx: Option<usize>,
    /// Tokens that a graph for prompts takes at once; several are separated by commas, 0 makes none
    /// [default: 128 where the family has such graphs]
    #[arg(long, value_name = "P", value_delimiter = ',')]
    pub prefill: Option<Vec<usize>>,
    /// Keep weights that prompt and decode graphs have in common once. Such context binaries load on
    /// devices, not in the emulator
    #[arg(long, conflicts_with_all = ["cpu_only", "check"])]
    pub share_weights: bool,
    /// Compare each context binary with its ONNX graph on random inputs and print the cosines
    #[arg(long, conflicts_with = "cpu_only")]
    pub check: bool,
    /// Make no context binaries, even where there are QNN libraries
    #[arg(long, conflicts_with = "target")]
    pub cpu_only: bool,
    /// Write no ONNX graphs: the bundle then runs on the NPU only
    #[arg(long, conflicts_with_all = ["cpu_only", "check"])]
    pub no_onnx: bool,
    /// Name of the model and of the files [default: the checkpoint's folder]
    #[arg(long)]
    pub name: Option<String>,
    /// Replace a bundle that is there already
    #[arg(long)]
    pub overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Architectures that can be compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TargetChoice {
    /// Snapdragon 8 Gen 3
    V75,
    /// Snapdragon 8 Elite
    V79,
    /// Snapdragon 8 Elite Gen 5
    V81,
}

impl TargetChoice {
    fn target(self) -> Target {
        match self {
            Self::V75 => Target::V75,
            Self::V79 => Target::V79,
            Self::V81 => Target::V81,
        }
    }
}

/// Tasks of bundles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum TaskChoice {
    /// Text
    #[default]
    Generate,
    /// One vector for each text
    Embed,
}

impl TaskChoice {
    fn task(self) -> Task {
        match self {
            Self::Generate => Task::Generate,
            Self::Embed => Task::Embed,
        }
    }
}

/// Precisions of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum PrecisionChoice {
    /// f16 weights
    #[default]
    Fp16,
    /// int8 weights with one scale per output channel, f16 activations; the head stays f16
    W8a16,
}

impl PrecisionChoice {
    fn precision(self) -> Precision {
        match self {
            Self::Fp16 => Precision::Fp16,
            Self::W8a16 => Precision::W8A16,
        }
    }
}

/// A compiler for `target` over libraries.
pub(crate) fn compiler(
    libraries: &Libraries,
    target: Target,
    share_weights: bool,
) -> Result<Arc<dyn Compiler>> {
    let compiler = QnnCompiler::new(libraries.open()?, target);
    Ok(Arc::new(compiler.share_weights(share_weights)))
}

/// Runs the command.
pub(crate) fn run(args: &ForgeArgs, app: &mut App) -> Result<Status> {
    is_checkpoint(&args.checkpoint)?;
    let libraries = match (args.cpu_only, args.target) {
        (true, _) => None,
        (false, Some(target)) => {
            Some(args.libraries.require(&format!("--target {}", target.target()))?)
        }
        (false, None) => args.libraries.find()?,
    };
    let needy = [
        ("--check", args.check),
        ("--no-onnx", args.no_onnx),
        ("--share-weights", args.share_weights),
    ];
    if libraries.is_none()
        && let Some((option, _)) = needy.into_iter().find(|(_, given)| *given)
    {
        args.libraries.require(option)?;
    }
    let target = args.target.map_or(Target::V81, TargetChoice::target);
    let check = match (&libraries, args.check) {
        (Some(libraries), true) => Some(check_backends(libraries.clone(), app.global.threads())),
        _ => None,
    };
    let options = ForgeOptions {
        overwrite: args.overwrite,
        name: args.name.clone(),
        task: args.task.task(),
        precision: args.precision.precision(),
        shards: args.shards,
        max_ctx: args.max_ctx,
        prefill: args
            .prefill
            .as_ref()
            .map(|list| list.iter().copied().filter(|p| *p > 0).collect()),
        share_weights: args.share_weights,
        compiler: libraries
            .as_ref()
            .map(|l| compiler(l, target, args.share_weights))
            .transpose()?,
        onnx: !args.no_onnx,
        check,
        ..ForgeOptions::new(&args.out)
    };
    let report = {
        let _working = app.interrupts.working();
        let mut progress = ForgeProgress::new(app.interrupts.token().clone());
        forge(&args.checkpoint, &options, &mut progress)?
    };
    print(&report, args, app)?;
    let worst = report.check.iter().filter(|row| !row.agrees()).count();
    if worst > 0 {
        eprintln!("the check found {worst} outputs that differ from their ONNX twins");
        return Ok(Status::Found);
    }
    Ok(Status::Done)
}

fn check_backends(libraries: Libraries, threads: Option<usize>) -> CheckBackends {
    CheckBackends {
        qnn: Box::new(move || {
            let library = Library::open(&libraries.htp, Some(&libraries.system))?;
            Ok(Arc::new(QnnBackend::with_library(&library, QnnOptions::default())?))
        }),
        cpu: Box::new(move || backends::cpu(threads)),
        seed: 1,
    }
}

fn print(report: &Report, args: &ForgeArgs, app: &mut App) -> Result<()> {
    for context in &report.contexts {
        if !context.float_weights.is_empty() {
            eprintln!(
                "note: context {:?}: {} weights stay f16, as int8 does not fit their shape: {}",
                context.key,
                context.float_weights.len(),
                context.float_weights.join(", ")
            );
        }
    }
    if args.json {
        return app.output.json(&report_json(report));
    }
    let what = match &report.dsp_arch {
        Some(arch) => format!("context binaries for {arch}"),
        None => "ONNX graphs for the CPU only".to_owned(),
    };
    eprintln!(
        "{}: {} contexts, {}, {:.1} MiB",
        report.family,
        report.contexts.len(),
        what,
        report.bytes as f64 / f64::from(1 << 20)
    );
    app.output.line(&report.manifest.display().to_string())?;
    for row in &report.check {
        app.output.line(&format!(
            "check {} {} {}: cosine {:.6}, largest error {:.2e}{}",
            row.context,
            row.graph,
            row.output,
            row.cosine,
            row.error,
            if row.agrees() { "" } else { "  DIFFERS" }
        ))?;
    }
    Ok(())
}

fn report_json(report: &Report) -> Value {
    let contexts: Vec<_> = report
        .contexts
        .iter()
        .map(|c| {
            json!({
                "key": c.key,
                "graphs": c.graphs,
                "binary_bytes": c.binary_bytes,
                "float_weights": c.float_weights,
            })
        })
        .collect();
    let check: Vec<_> = report
        .check
        .iter()
        .map(|row| {
            json!({
                "context": row.context,
                "graph": row.graph,
                "output": row.output,
                "cosine": row.cosine,
                "error": row.error,
                "agrees": row.agrees(),
            })
        })
        .collect();
    json!({
        "manifest": report.manifest,
        "family": report.family,
        "dsp_arch": report.dsp_arch,
        "bytes": report.bytes,
        "contexts": contexts,
        "check": check,
    })
}

/// Refuses what is not a folder before libraries are opened for it.
fn is_checkpoint(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Artifact, format!("{}: not a folder", path.display()))
        .hint("expected the folder of a Hugging Face checkpoint, with config.json"))
}
