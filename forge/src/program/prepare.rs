//! `qhx prepare`: compiles a portable bundle for the chip that it runs on, each context in a process of its own.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use qhx::Bundle;
use qhx::libraries::Libraries;
use qhx::prepared::{self, Prepared, Unfit};
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_qnn::Platform;
use qhx_terminal::args::LibraryArgs;
use qhx_terminal::say;
use qhx_terminal::{Status, Terminal};
use serde_json::{Value, json};

use super::progress::ForgeProgress;
use super::subprocess::{SubprocessCompiler, serve};
use super::targets::{self, THIS, TargetChoice};
use super::{Program, compiler};
use crate::bundle::unfinished;
use crate::compile::Compiler;
use crate::prepare::{PrepareOptions, check_portable, graphs};

const EXAMPLES: &str = "\
Examples:
  qhx prepare qwen35/portable
  qhx prepare qwen35/portable --target v79
  qhx generate qwen35/portable 'The capital of France is'";

/// Compile a portable bundle for the chip of this machine
///
/// Takes a bundle of `qhx forge --portable`, which has ONNX graphs and no context binaries, and compiles it once with
/// the QNN libraries of this machine. The result is a bundle in BUNDLE/prepared, or in the user's cache folder where
/// that cannot be written; commands that open BUNDLE take it from there as long as it fits the chip and the libraries.
/// Finished contexts stay when the command is stopped, and the same command goes on from there. Prints the path of the
/// prepared bundle's manifest.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PrepareArgs {
    /// Folder of the portable bundle, or its manifest
    pub(crate) bundle: PathBuf,
    /// What to compile for: a Hexagon architecture (v68, v69, v73, v75, v79, v81), a chip such as SC8380XP or x-elite,
    /// or `this` for the one that the command runs on
    #[arg(long, value_name = "TARGET", value_parser = targets::parse, default_value = THIS)]
    pub(crate) target: TargetChoice,
    /// Remove what was prepared of this bundle and is used no more: by libraries or a qhx of another version, of an
    /// earlier bundle in the same place, or not to its end. Without it they are listed
    #[arg(long)]
    pub(crate) prune: bool,
    /// Compile one context into a file, for `qhx prepare`
    #[arg(long, hide = true, num_args = 2, value_names = ["KEY", "FILE"])]
    pub(crate) compile: Option<Vec<OsString>>,
    /// With --compile: the context's graphs hold weights together
    #[arg(long, hide = true, requires = "compile")]
    pub(crate) share_weights: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// The libraries that compile.
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Runs the command.
///
/// # Errors
/// When the bundle is not portable, there are no libraries, and those of [`crate::prepare::prepare`].
pub fn prepare(args: &PrepareArgs, program: &Program, terminal: Terminal<'_>) -> Result<Status> {
    let bundle = Bundle::open(&args.bundle)?;
    let manifest = bundle.manifest();
    check_portable(manifest)?;
    let libraries = args.libraries.files().require("qhx prepare")?;
    let target = args.target.target(&libraries)?;
    let compiler = compiler(&libraries, target)?;
    if let Some([key, file]) = args.compile.as_deref() {
        let key = key.to_string_lossy();
        return serve(terminal, |messages| {
            let graphs = graphs(manifest, &key)?;
            compiler.compile(&key, &graphs, args.share_weights, Path::new(file), messages)
        });
    }
    let record = Prepared::new(manifest, target, libraries.open()?.build_id())?;
    let key = record.key()?;
    let folders: Vec<_> = prepared::folders(manifest).iter().map(|dir| dir.join(&key)).collect();
    let whole = |folder: &&PathBuf| {
        let is_of = |manifest: &Manifest| Prepared::of(manifest).as_ref() == Some(&record);
        Manifest::load(folder).is_ok_and(|there| is_of(&there) && prepared::is_whole(&there))
    };
    let (manifest_file, contexts) = match folders.iter().find(whole) {
        Some(there) => {
            say!("prepared already");
            (Manifest::load(there)?.path, Vec::new())
        }
        None => {
            let out = prepared::writable(manifest)?.join(&key);
            let compiler =
                in_subprocesses(Arc::new(compiler), args, program, &libraries, &terminal);
            let record = serde_json::to_value(&record)
                .map_err(|e| Error::caused(ErrorKind::Internal, "record", e))?;
            let share_weights = target.shares_weights() && !Platform::is_emulated();
            let options = PrepareOptions { out, key: key.clone(), record, share_weights };
            let _working = terminal.interrupts.working();
            let mut progress = ForgeProgress::new(terminal.interrupts.token().clone());
            let report = crate::prepare::prepare(manifest, &*compiler, &options, &mut progress)?;
            (report.manifest, report.contexts)
        }
    };
    let outdated = prepared::outdated(manifest, &record)?;
    let beside = folders.first().and_then(|folder| folder.parent()).unwrap_or(Path::new("."));
    let cleared = clear(outdated, unfinished(beside, &key), args.prune);
    if args.json {
        terminal.output.json(&json!({
            "manifest": manifest_file,
            "target": {"arch": target.arch, "soc": target.soc, "vtcm_mb": target.vtcm_mb},
            "contexts": contexts,
            "unused": cleared,
        }))?;
    } else {
        terminal.output.line(&manifest_file.display().to_string())?;
    }
    Ok(Status::Done)
}

/// Prepared bundles and half-made ones that are of no more use: listed, or removed with `prune`.
fn clear(outdated: Vec<Unfit>, unfinished: Vec<PathBuf>, prune: bool) -> Vec<Value> {
    let unfinished = unfinished.into_iter().map(|path| (path, "not finished".to_owned()));
    let all = outdated.into_iter().map(|one| (one.folder, one.reason)).chain(unfinished);
    let mut listed = Vec::new();
    for (folder, reason) in all {
        let shown = folder.display();
        let removed = prune.then(|| std::fs::remove_dir_all(&folder));
        match &removed {
            Some(Ok(())) => say!("removed {shown}: {reason}"),
            Some(Err(e)) => say!("note: {shown}: {reason}, and cannot be removed: {e}"),
            None => say!("note: {shown} is not used: {reason}; --prune removes it"),
        }
        let removed = matches!(removed, Some(Ok(())));
        listed.push(json!({"folder": folder, "reason": reason, "removed": removed}));
    }
    listed
}

/// The same compiler, each context in a process of its own, where there is a file to start.
fn in_subprocesses(
    compiler: Arc<dyn Compiler>,
    args: &PrepareArgs,
    program: &Program,
    libraries: &Libraries,
    terminal: &Terminal<'_>,
) -> Arc<dyn Compiler> {
    let Some(file) = &program.file else { return compiler };
    let process = terminal.process;
    let before = ["prepare", "--compile"].map(OsString::from).to_vec();
    let mut behind: Vec<OsString> = vec!["-v".into(); process.verbose.into()];
    behind.extend(["--target".into(), args.target.name().into()]);
    behind.extend(["--htp".into(), libraries.htp.clone().into()]);
    behind.extend(["--qnn-system".into(), libraries.system.clone().into()]);
    if let Some(filter) = &process.log {
        behind.extend(["--log".into(), filter.into()]);
    }
    behind.extend(["--".into(), args.bundle.clone().into()]);
    Arc::new(SubprocessCompiler::with_command(compiler, file, program, before, behind))
}
