//! `qhx forge`: makes a bundle from a checkpoint, or says beforehand what it will be.

pub(crate) mod args;
pub(crate) mod compiler;
mod estimate;
mod plan;
mod subprocess;

use std::path::Path;
use std::sync::Arc;

use qhx_core::qnn::{Library, QnnBackend, QnnOptions};
use qhx_core::{Error, ErrorKind, Result};
use qhx_forge::compile::Compiler;
use qhx_forge::estimate::EstimateOptions;
use qhx_forge::{CheckBackends, ForgeOptions, Report, forge_checkpoint, recipes};
use serde_json::{Value, json};

use crate::app::App;
use crate::backends;
use crate::program::this_program;
use crate::progress::ForgeProgress;
use crate::runtime::Libraries;
use crate::status::Status;
use args::{ForgeArgs, ForgeCommand};
use compiler::compiler;
use subprocess::SubprocessCompiler;

/// Runs the command.
pub(crate) fn run(args: &ForgeArgs, app: &mut App) -> Result<Status> {
    match &args.command {
        Some(ForgeCommand::Plan(plan)) => return plan::run(plan, app),
        Some(ForgeCommand::Estimate(estimate)) => return estimate::run(estimate, app),
        Some(ForgeCommand::CompileContext(context)) => return subprocess::run(context, app),
        None => {}
    }
    let Some(out) = &args.out else {
        return Err(Error::new(ErrorKind::Usage, "no folder for the bundle is given"));
    };
    if let Some(folder) = &args.checkpoint {
        is_checkpoint(folder)?;
    }
    let libraries = match (args.cpu_only, args.shape.target) {
        (true, _) => None,
        (false, Some(target)) => {
            Some(args.libraries.require(&format!("--target {}", target.target()))?)
        }
        (false, None) => args.libraries.find()?,
    };
    for (asked, option) in [
        (args.check, "--check"),
        (args.no_onnx, "--no-onnx"),
        (args.estimate, "--estimate"),
        (args.shape.share_weights, "--share-weights"),
    ] {
        if asked && libraries.is_none() {
            args.libraries.require(option)?;
        }
    }
    let checkpoint = args.checkpoint()?;
    let target = args.shape.target();
    let check = match (&libraries, args.check) {
        (Some(libraries), true) => Some(check_backends(libraries.clone(), app.global.threads())),
        _ => None,
    };
    let options = ForgeOptions {
        overwrite: args.overwrite,
        name: args.name.clone(),
        compiler: libraries
            .as_ref()
            .map(|l| compiler(l, target, args.shape.share_weights).map(|c| in_subprocesses(c, app)))
            .transpose()?,
        onnx: !args.no_onnx,
        check,
        ..args.shape.options(out)
    };
    let report = {
        let _working = app.interrupts.working();
        let mut progress = ForgeProgress::new(app.interrupts.token().clone());
        forge_checkpoint(&checkpoint, recipes::recipe, &options, &mut progress)?
    };
    print(&report, args, app)?;
    if let (true, Some(libraries)) = (args.estimate, &libraries) {
        let wanted = EstimateOptions { corner: args.corner, traces: None };
        estimate::show(&checkpoint, &options, &wanted, (libraries, target), args.json, app)?;
    }
    let worst = report.check.iter().filter(|row| !row.agrees()).count();
    if worst > 0 {
        say!("the check found {worst} outputs that differ from their ONNX twins");
        return Ok(Status::Found);
    }
    Ok(Status::Done)
}

/// The same compiler, each context in a process of its own, where there is a `qhx` to be one.
fn in_subprocesses(compiler: Arc<dyn Compiler>, app: &App) -> Arc<dyn Compiler> {
    match this_program() {
        Some(program) => Arc::new(SubprocessCompiler::new(compiler, program, &app.global)),
        None => compiler,
    }
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
            say!(
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
    say!(
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
