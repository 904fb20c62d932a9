//! The commands of every program with recipes: forging itself, `plan`, `estimate`, and a process for each context.
//!
//! `qhx forge` has them as its own; a program around a recipe of another crate gets them with [`main`].

mod args;
mod compiler;
mod golden;
mod main;
mod prepare;
mod progress;
mod show_calibration;
mod show_estimate;
mod show_headroom;
mod show_plan;
mod show_receipt;
mod subprocess;
mod targets;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx::golden::Golden;
use qhx::libraries::{Libraries, how_to_get};
use qhx_checkpoint::Checkpoint;
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_media::{ImageRules, Limits, Source};
use qhx_terminal::output::Output;
use qhx_terminal::{Status, Terminal, say};
use serde_json::{Value, json};

use crate::bundle::check_place;
use crate::calibrate::{Calibration, DEFAULT_TOKENS, OpenBundle, Reader, calibrate};
use crate::compile::Compiler;
use crate::estimate::{EstimateOptions, record};
use crate::f16_range::measure::{Columns, Measured, OpenModel, Peak, measure, write_columns};
use crate::forge::{AddGolden, forge_golden};
use crate::options::{CheckBackends, ForgeOptions};
use crate::receipt::{Receipt, Reference, TOKENS};
use crate::registry;
use crate::{Activations, Fold, Override, Precision, Progress, Report, Task};
use args::ForgeCommand;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::engine::Model;
use qhx_qnn::{Library, Platform, QnnBackend, QnnOptions};
use qhx_types::Media;
use subprocess::{Estimates, SubprocessCompiler};
use targets::{Place, TargetChoice, places, unfinished};

pub use args::ForgeArgs;
pub use compiler::compiler;
pub use main::main;
pub use prepare::{PrepareArgs, prepare};
pub use progress::ForgeProgress;

/// The program that the commands are part of.
#[derive(Debug, Clone)]
pub struct Program {
    /// Command that people type to forge: `qhx forge`.
    pub name: String,
    /// The file that is started again for each context. None: contexts are compiled in this process.
    pub file: Option<PathBuf>,
    /// The words between the file and a command of the forge.
    pub words: &'static [&'static str],
    /// Reads the arguments of a process that forges, its file first.
    pub parse: fn(&[OsString]) -> Result<ForgeArgs, clap::Error>,
}

/// Runs the command that the arguments ask for. `open` opens bundles that are made, to be measured and for their golden
/// steps; without it [`ForgeArgs::calibrates`] is an error, and bundles have no golden steps.
///
/// # Errors
/// When arguments contradict each other, and those of the command.
pub fn run(
    args: &ForgeArgs,
    program: &Program,
    open: Option<OpenModel<'_>>,
    mut terminal: Terminal<'_>,
) -> Result<Status> {
    match &args.command {
        Some(ForgeCommand::Plan(plan)) => return show_plan::run(plan, terminal),
        Some(ForgeCommand::Estimate(estimate)) => return show_estimate::run(estimate, terminal),
        Some(ForgeCommand::CompileContext(context)) => {
            return subprocess::run(context, program, terminal);
        }
        None => {}
    }
    let Some(out) = &args.out else {
        return Err(Error::new(ErrorKind::Usage, "no folder for the bundle is named"));
    };
    if let Some(folder) = &args.checkpoint {
        is_checkpoint(folder)?;
    }
    let compiles = !args.cpu_only && !args.portable;
    let libraries = match (!compiles, &args.shape.target[..]) {
        (true, _) => None,
        (false, []) => args.libraries.files().find()?,
        (false, targets) => {
            let names: Vec<_> = targets.iter().map(|choice| choice.name()).collect();
            Some(args.libraries.files().require(&format!("--target {}", names.join(",")))?)
        }
    };
    if libraries.is_none() && compiles {
        say!("note: no QNN libraries are given or installed; {}", how_to_get());
    }
    for (asked, option) in [
        (args.check.is_some(), "--check"),
        (args.estimate, "--estimate"),
        (args.shape.for_emulator && !args.portable, "--for-emulator"),
    ] {
        if asked && libraries.is_none() {
            args.libraries.files().require(option)?;
        }
    }
    let places = match &libraries {
        Some(libraries) => places(args.shape.targets(), out, libraries)?,
        None => Vec::new(),
    };
    let checkpoint = args.checkpoint()?;
    // What a later one would be refused for is known before hours of compiling.
    for place in &places {
        check_place(&place.out, args.overwrite)?;
    }
    let mut shape = args.shape.options(out, None)?;
    let mut found = Found::default();
    if args.receipt.is_some() || own_check(args) {
        // Asked for, so that a program without host-ops says that it cannot.
        drop(opened(open, "--check=TEXTS and --receipt")?);
    }
    let (mut headroom, mut texts) = (None, None);
    if let Some(open) = open.filter(|_| args.measures()) {
        let (measured, reference) = found.measure(args, &checkpoint, &shape, open, &terminal)?;
        if own_check(args) && !args.json {
            show_headroom::show(&measured, terminal.output)?;
        } else {
            show_headroom::say_nearest(&measured);
        }
        found.folds = measured.folds.clone()?;
        found.columns.clone_from(&measured.columns);
        texts = reference;
        headroom = Some(measured);
    }
    shape.columns.clone_from(&found.columns);
    let ranges = headroom.is_some() || args.synthetic.is_some();
    if shape.activations == Activations::Int16 && !ranges {
        let what = "--activations int16 needs the range of activations, and nothing is measured";
        return Err(Error::new(ErrorKind::Usage, what).hint("leave --no-measure out"));
    }
    let calibration = match args.calibration()? {
        None => None,
        Some(wanted) => Some(measured(("--calibrate", open), &terminal, |open, progress| {
            calibrate(&checkpoint, registry::recipe, &shape, &wanted, open, progress)
        })?),
    };
    let kept = calibration.iter().flat_map(|found| &found.kept);
    found.kept = kept.cloned().collect();
    if let (Some(open), Some(texts)) = (open, texts) {
        let nearest = headroom.as_ref().and_then(Measured::nearest).cloned();
        found.receipt(&checkpoint, &shape, &texts, nearest, open, &terminal)?;
    }
    let (calibration, headroom) = (calibration.as_ref(), headroom.as_ref());
    found.write()?;
    let golden = open.filter(|_| args.makes_golden_steps());
    let work =
        Work { args, program, checkpoint: &checkpoint, calibration, headroom, found, golden };
    let Some(libraries) = &libraries else { return work.bundle(out, None, &mut terminal) };
    if let [one] = &places[..] {
        return work.bundle(&one.out, Some((libraries, one)), &mut terminal);
    }
    let mut status = Status::Done;
    for (index, place) in places.iter().enumerate() {
        match work.bundle(&place.out, Some((libraries, place)), &mut terminal) {
            Ok(Status::Done) => {}
            Ok(other) => status = other,
            Err(error) => return Err(unfinished(error, &places, index, out)),
        }
    }
    Ok(status)
}

/// True where the largest values of each layer are asked for.
fn own_check(args: &ForgeArgs) -> bool {
    matches!(args.check, Some(Some(_)))
}

/// An error of measuring, with a way around it.
fn unmeasured(error: Error) -> Error {
    let hint = "--no-measure makes the bundle without measuring";
    let hint = error.hint_text().map_or(hint.to_owned(), |own| format!("{own}; {hint}"));
    error.context("measuring before the bundle is made").hint(hint)
}

/// Settings that were measured to be better than those of the command line.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Weights in a higher precision.
    kept: Vec<Override>,
    /// Powers of two in weights.
    folds: Vec<Fold>,
    /// Worth of weights' inputs.
    columns: Columns,
    /// The columns in a file, for the processes that compile.
    file: Option<tempfile::NamedTempFile>,
    receipt: Option<Receipt>,
}

impl Found {
    /// Measures the checkpoint: with texts, those of the program unless there are others, and with what else its graphs
    /// are for. Returns the texts of a receipt, where there is to be one.
    fn measure(
        &self,
        args: &ForgeArgs,
        checkpoint: &Checkpoint,
        shape: &ForgeOptions,
        open: OpenModel<'_>,
        terminal: &Terminal<'_>,
    ) -> Result<(Measured, Option<Reference>)> {
        let _working = terminal.interrupts.working();
        let mut progress = ForgeProgress::new(terminal.interrupts.token().clone());
        let task = registry::task(checkpoint, args.shape.task)?;
        let generates = task == Task::Generate;
        let longest = shape.for_recipe(checkpoint)?.max_ctx;
        let encoded = |(own, texts): (bool, Vec<(String, String)>)| {
            let texts = texts.iter().map(|(kind, text)| (&**kind, &**text));
            let most = if own { TOKENS } else { DEFAULT_TOKENS };
            Reference::new(checkpoint, texts, most.min(longest.saturating_sub(1)))
                .map_err(unmeasured)
        };
        let takes_text = generates || task == Task::Embed;
        let mut texts =
            takes_text.then(|| encoded((!own_check(args), args.texts()?))).transpose()?;
        let other = matches!(args.receipt, Some(Some(_))) && generates;
        let mut others = other.then(|| encoded((false, args.receipt_texts()?))).transpose()?;
        let both = texts.iter().chain(&others).map(Reference::longest);
        let positions = both.max().unwrap_or(TOKENS);
        let image = args.image.as_deref().map(image).transpose()?;
        let quiet = ForgeProgress::quiet(terminal.interrupts.token().clone());
        let mut read = |model: &mut Model| {
            match &mut texts {
                Some(texts) if generates => texts.read(model, &quiet)?,
                Some(texts) => texts.texts().try_for_each(|text| model.embed(text).map(drop))?,
                None => {}
            }
            if !takes_text || !model.op().description.modalities.is_empty() {
                Golden::make(model, true, &mut |_| ())?;
            }
            match &image {
                Some(image) if generates => {
                    let op = model.op_mut();
                    op.reset()?;
                    op.prefill(&[image.segment()])?;
                }
                Some(image) => drop(model.embed_media(image)?),
                None => {}
            }
            if let Some(others) = &mut others {
                model.reopen_with_tap(None)?;
                others.read(model, &quiet)?;
            }
            Ok(())
        };
        let found = measure(
            checkpoint,
            registry::recipe,
            shape,
            positions,
            (open, &mut read),
            &mut progress,
        );
        let found = found.map_err(unmeasured)?;
        let wanted = generates && (shape.precision != Precision::Fp16 || args.receipt.is_some());
        Ok((found, others.or(texts).filter(|_| wanted)))
    }

    /// Compares the bundle that these settings make with the model in f16 weights.
    fn receipt(
        &mut self,
        checkpoint: &Checkpoint,
        shape: &ForgeOptions,
        reference: &Reference,
        nearest: Option<Peak>,
        open: OpenModel<'_>,
        terminal: &Terminal<'_>,
    ) -> Result<()> {
        let _working = terminal.interrupts.working();
        let mut progress = ForgeProgress::new(terminal.interrupts.token().clone());
        let open = |manifest: &Path| Ok(Box::new(open(manifest)?) as Box<dyn Reader>);
        let mut wanted = reference.options(shape);
        self.add_to(&mut wanted);
        let receipt =
            reference.receipt(checkpoint, registry::recipe, &wanted, nearest, &open, &mut progress);
        self.receipt = Some(receipt.map_err(unmeasured)?);
        Ok(())
    }

    /// Adds the settings to options.
    fn add_to(&self, options: &mut ForgeOptions) {
        options.weights.extend(self.kept.iter().cloned());
        options.folds.extend(self.folds.iter().cloned());
        options.columns.clone_from(&self.columns);
        options.receipt.clone_from(&self.receipt);
    }

    /// Puts the columns into a file.
    fn write(&mut self) -> Result<()> {
        if self.columns.is_empty() {
            return Ok(());
        }
        let named = tempfile::Builder::new().prefix(".qhx-columns-").tempfile();
        let file = named.map_err(|e| Error::io(ErrorKind::Io, Path::new("columns"), e))?;
        write_columns(file.path(), &self.columns)?;
        self.file = Some(file);
        Ok(())
    }

    /// The same as words of a command line.
    fn words(&self) -> Vec<OsString> {
        let kept = self.kept.iter().map(|one| ["--weights".into(), one.to_string().into()]);
        let folds = self.folds.iter().map(|one| ["--fold".into(), one.to_string().into()]);
        let columns = self.file.iter().map(|file| ["--columns".into(), file.path().into()]);
        kept.chain(folds).chain(columns).flatten().collect()
    }
}

/// Inputs that the bundles of all targets share.
struct Work<'a> {
    args: &'a ForgeArgs,
    program: &'a Program,
    checkpoint: &'a Checkpoint,
    calibration: Option<&'a Calibration>,
    headroom: Option<&'a Measured>,
    found: Found,
    /// Opens bundles for their golden steps.
    golden: Option<OpenModel<'a>>,
}

impl Work<'_> {
    /// Makes the bundle of one target in `out`, or one without context binaries, and prints what it is.
    fn bundle(
        &self,
        out: &Path,
        compiled: Option<(&Libraries, &Place)>,
        terminal: &mut Terminal<'_>,
    ) -> Result<Status> {
        let Self { args, program, checkpoint, .. } = *self;
        let mut shape = args.shape.options(out, compiled.map(|(_, place)| place.target))?;
        self.found.add_to(&mut shape);
        let check = match compiled {
            Some((libraries, _)) if args.check.is_some() => {
                Some(check_backends(libraries.clone(), terminal.process.threads()))
            }
            _ => None,
        };
        let estimates = Estimates::default();
        let compiler = match compiled {
            Some((libraries, place)) => {
                let compiler: Arc<dyn Compiler> = Arc::new(compiler(libraries, place.target)?);
                let target = place.choice;
                Some(in_subprocesses(compiler, program, target, &self.found, &estimates, terminal))
            }
            None => None,
        };
        let options = ForgeOptions {
            overwrite: args.overwrite,
            name: args.name.clone(),
            compiler,
            onnx: args.onnx,
            portable: args.portable,
            check,
            ..shape
        };
        let report = {
            let _working = terminal.interrupts.working();
            let mut progress = ForgeProgress::new(terminal.interrupts.token().clone());
            let golden = self.golden.map(|open| {
                move |manifest: &Path, bytes: u64, progress: &mut dyn Progress| {
                    golden::add(manifest, bytes, open, progress)
                }
            });
            let golden = golden.as_ref().map(|add| add as AddGolden<'_>);
            forge_golden(checkpoint, registry::recipe, &options, golden, &mut progress)?
        };
        self.print(&report, terminal.output)?;
        let several = report.contexts.iter().any(|context| context.graphs.len() > 1);
        if Platform::is_emulated() && compiled.is_some() && options.share_weights && several {
            say!("it loads on devices; --for-emulator makes one that the emulator loads, too");
        }
        if let (true, Some((libraries, place))) = (args.estimate, compiled) {
            let wanted = EstimateOptions { corner: args.corner, ..EstimateOptions::default() };
            let compiler = (libraries, place.target);
            // Those of contexts that an earlier attempt compiled are not there.
            let known = std::mem::take(&mut *estimates.lock());
            let form =
                if args.json { show_estimate::Form::Json } else { show_estimate::Form::Text };
            let graphs = show_estimate::show(
                checkpoint, &options, &wanted, compiler, &known, form, terminal,
            )?;
            record(&report.manifest, &graphs)?;
        }
        let worst = report.check.iter().filter(|row| !row.agrees()).count();
        if worst > 0 {
            say!("the check found {worst} outputs that differ from their ONNX reference graphs");
            return Ok(Status::Found);
        }
        Ok(Status::Done)
    }

    fn print(&self, report: &Report, output: &mut Output) -> Result<()> {
        let Self { args, calibration, headroom, .. } = *self;
        for context in &report.contexts {
            if !context.wider_weights.is_empty() {
                let wider = context.wider_weights.iter();
                let wider: Vec<_> =
                    wider.map(|(name, storage)| format!("{name} ({storage})")).collect();
                say!(
                    "note: context {:?}: the shapes of {} weights do not fit its precision: {}",
                    context.key,
                    wider.len(),
                    wider.join(", ")
                );
            }
        }
        if args.json {
            let mut json = report_json(report);
            if let Some(found) = calibration {
                json["calibration"] = show_calibration::calibration_json(found);
            }
            if let Some(receipt) = &self.found.receipt {
                json["receipt"] = receipt.to_json();
            }
            if let Some(found) = headroom {
                json["headroom"] = show_headroom::headroom_json(found);
            }
            return output.json(&json);
        }
        let what = match &report.dsp_arch {
            Some(arch) => format!("context binaries for {arch}"),
            None if args.portable => "portable, see `qhx prepare`".to_owned(),
            None => "ONNX graphs for the CPU only".to_owned(),
        };
        say!(
            "{}: {} contexts, {}, {:.1} MiB",
            report.family,
            report.contexts.len(),
            what,
            report.bytes as f64 / f64::from(1 << 20)
        );
        if let Some(longest) = report.longest.filter(|longest| *longest > report.max_ctx) {
            say!("context {} of the model's {longest}: --max-ctx", report.max_ctx);
        }
        output.line(&report.manifest.display().to_string())?;
        if let Some(found) = calibration {
            show_calibration::show(found, output)?;
        }
        if let Some(receipt) = self.found.receipt.as_ref().filter(|_| args.receipt.is_some()) {
            show_receipt::show(receipt, output)?;
        }
        for row in &report.check {
            output.line(&format!(
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
}

/// Measures with bundles that `option` asks for.
fn measured<T>(
    (option, open): (&str, Option<OpenModel<'_>>),
    terminal: &Terminal<'_>,
    work: impl FnOnce(OpenBundle<'_>, &mut ForgeProgress) -> Result<T>,
) -> Result<T> {
    let open = opened(open, option)?;
    let _working = terminal.interrupts.working();
    work(&open, &mut ForgeProgress::new(terminal.interrupts.token().clone()))
}

/// Function that opens the bundles that `option` measures.
fn opened<'a>(
    open: Option<OpenModel<'a>>,
    option: &str,
) -> Result<impl Fn(&Path) -> Result<Box<dyn Reader>> + 'a> {
    let Some(open) = open else {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("{option} runs the bundle, and this program has recipes without host-ops"),
        )
        .hint("name the plugin of the host-op with --plugin, or give --weights or --fold"));
    };
    Ok(move |manifest: &Path| Ok(Box::new(open(manifest)?) as Box<dyn Reader>))
}

/// The same compiler, each context in a process of its own, where there is a file to start. `found` is what those
/// processes cannot know of the command line; `estimates` gets theirs, where the command line asks for some.
fn in_subprocesses(
    compiler: Arc<dyn Compiler>,
    program: &Program,
    target: TargetChoice,
    found: &Found,
    estimates: &Estimates,
    terminal: &Terminal<'_>,
) -> Arc<dyn Compiler> {
    match &program.file {
        Some(file) => {
            let process = terminal.process;
            let compiler = SubprocessCompiler::new(compiler, file, program, target, found, process);
            Arc::new(compiler.estimating(estimates.clone()))
        }
        None => compiler,
    }
}

/// Decodes an image by the default rules of host-ops.
fn image(file: &Path) -> Result<Media> {
    let source = Source::File(file.to_owned());
    qhx_media::decode_image(&source, &ImageRules::default(), &Limits::default())?.into_media()
}

fn check_backends(libraries: Libraries, threads: Option<usize>) -> CheckBackends {
    CheckBackends {
        qnn: Box::new(move || {
            let library = Library::open(&libraries.htp, Some(&libraries.system))?;
            Ok(Arc::new(QnnBackend::with_library(&library, QnnOptions::default())?))
        }),
        cpu: Box::new(move || {
            let options = CpuOptions { threads, ..CpuOptions::exact() };
            Ok(Arc::new(CpuBackend::new(options)?))
        }),
        seed: 1,
    }
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
                "wider_weights": c
                    .wider_weights
                    .iter()
                    .map(|(name, storage)| json!({"name": name, "storage": storage.to_string()}))
                    .collect::<Vec<_>>(),
            })
        })
        .collect();
    let check = report.check.iter().map(|row| {
        let mut json = json!(row);
        json["agrees"] = json!(row.agrees());
        json
    });
    json!({
        "manifest": report.manifest,
        "family": report.family,
        "dsp_arch": report.dsp_arch,
        "bytes": report.bytes,
        "contexts": contexts,
        "check": check.collect::<Vec<_>>(),
    })
}

/// Refuses what is neither a folder nor a file that is a model before libraries are opened for it.
fn is_checkpoint(path: &Path) -> Result<()> {
    if path.is_dir() || args::is_file(path) {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Artifact, format!("{}: not a folder", path.display()));
    if let Some((_, name)) = path.to_str().and_then(repository).filter(|_| !path.exists()) {
        let fetch = format!("hf download {} --local-dir {name}", path.display());
        return Err(error.hint(format!("nothing is downloaded here; fetch it first: {fetch}")));
    }
    if path.extension().is_some_and(|end| end == "json") && path.is_file() {
        let path = path.display();
        return Err(error.hint(format!(
            "a configuration alone is planned by `qhx forge plan {path}`; --synthetic {path} draws weights for it"
        )));
    }
    Err(error.hint(
        "expected the folder of a Hugging Face checkpoint, with config.json, or a .gguf, .onnx or .nemo file",
    ))
}

/// Owner and name of what may be a repository of the Hugging Face hub.
fn repository(text: &str) -> Option<(&str, &str)> {
    let is_name = |part: &str| {
        let inside = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(inside)
    };
    text.split_once('/').filter(|(owner, name)| is_name(owner) && is_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_fetched_first() {
        let error = is_checkpoint(Path::new("Qwen/Qwen3.5-0.8B")).unwrap_err();
        let hint = error.hint_text().unwrap_or_default();
        assert!(hint.contains("hf download Qwen/Qwen3.5-0.8B --local-dir Qwen3.5-0.8B"), "{hint}");
        for path in ["/a/b", "a", "a/b/c", "../b", "~/b"] {
            assert_eq!(repository(path), None, "{path}");
        }
    }
}
