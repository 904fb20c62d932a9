//! The whole way: a checkpoint folder in, a bundle folder out.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, read_json};
use qhx_core::manifest::{Manifest, Verdict, files_hash};
use qhx_exec::backend::ContextSource;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::onnx;
use qhx_graph::onnx::Known;
use qhx_graph::progress::Progress;
use qhx_graph::quantize::{BLOCK, Bits};
use qhx_graph::weight::{RowSource, Storage, table_fits_f16};
use qhx_qnn::Platform;
use qhx_types::DType;
use serde_json::{Map, Value, json};

use crate::bundle::{Fingerprint, Staging, check_apart, replace_json};
use crate::check::{CheckRow, compare};
use crate::compile::Compiler;
use crate::kit::MAX_MASK;
use crate::model_name::ModelName;
use crate::options::{CheckBackends, ForgeOptions};
use crate::plan::plan;
use crate::recipe::{Activations, Precision, Recipe, RecipeOptions, Tables, Task};
use crate::registry::{longest, recipe, task};
use crate::{names, rerank, text};

/// One context of a made bundle.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextReport {
    /// Key in the manifest.
    pub key: String,
    /// Names of its graphs.
    pub graphs: Vec<String>,
    /// Bytes of the context binary; none for a bundle that runs on the CPU only.
    pub binary_bytes: Option<u64>,
    /// Weights that are stored in a higher precision than was asked for, see
    /// [`crate::recipe::ContextPlan::wider_weights`].
    pub wider_weights: Vec<(String, Storage)>,
}

/// Result of making a bundle.
#[derive(Debug, Clone)]
pub struct Report {
    /// The bundle's manifest.
    pub manifest: PathBuf,
    /// Model family.
    pub family: String,
    /// Architecture of the context binaries; none for a bundle that runs on the CPU only.
    pub dsp_arch: Option<String>,
    /// The contexts.
    pub contexts: Vec<ContextReport>,
    /// Positions of the KV cache, or of the texts of an encoder.
    pub max_ctx: usize,
    /// Positions that the model was made for, where it says so.
    pub longest: Option<usize>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Results of the check; empty when none was asked for.
    pub check: Vec<CheckRow>,
}

/// Warning about floats on v68: Qualcomm's provider for ONNX Runtime refuses them there (onnxruntime-qnn, pull request
/// 708). The emulator computes them.
const NO_FLOATS: &str = "v68 has no arithmetic in floats by Qualcomm's own account, and activations are f16 in every \
     precision: the emulator runs such a bundle, a device may fail to";
/// The key of the manifest that marks a portable bundle.
pub(crate) const PORTABLE: &str = "portable";
/// Hint that the same command resumes from finished files, for messages.
pub(crate) const GO_ON: &str = "the same command goes on from there";

/// Makes a bundle of the checkpoint in the folder `checkpoint`.
///
/// The bundle appears at `options.out` at once when everything is written; after an error or a
/// cancellation nothing is there. A folder that is not a bundle is never replaced.
///
/// # Errors
/// When the checkpoint cannot be read, has no recipe or does not fit it, when options contradict each other, when a
/// graph cannot be compiled or a file not be written, and `Cancelled` when `progress` stops it.
pub fn forge(
    checkpoint: &Path,
    options: &ForgeOptions,
    progress: &mut dyn Progress,
) -> Result<Report> {
    forge_with(checkpoint, recipe, options, progress)
}

/// Same as [`forge`], with a recipe of the caller's, whatever the checkpoint's model class.
///
/// # Errors
/// Errors of [`forge`].
pub fn forge_with(
    checkpoint: &Path,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    progress: &mut dyn Progress,
) -> Result<Report> {
    forge_checkpoint(&Checkpoint::open(checkpoint)?, recipe, options, progress)
}

/// Same as [`forge_with`], with an opened checkpoint, which may be [synthetic](Checkpoint::synthetic).
///
/// # Errors
/// Errors of [`forge`].
pub fn forge_checkpoint(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    progress: &mut dyn Progress,
) -> Result<Report> {
    forge_known(checkpoint, recipe, options, &mut Known::default(), progress)
}

/// Adds files to a bundle that has its ONNX reference graphs and is not in its place yet. Called with the manifest, and
/// with the bytes of the bundle.
pub(crate) type AddGolden<'a> = &'a dyn Fn(&Path, u64, &mut dyn Progress) -> Result<()>;

/// Same as [`forge_checkpoint`], with the golden steps that `golden` adds. After an error of `golden` the bundle is
/// there, without them.
///
/// # Errors
/// Errors of [`forge`], and of `golden`.
#[cfg(feature = "program")]
pub(crate) fn forge_golden(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    golden: Option<AddGolden<'_>>,
    progress: &mut dyn Progress,
) -> Result<Report> {
    make(checkpoint, recipe, options, golden, &mut Known::default(), progress)
}

/// Same as [`forge_checkpoint`]; `known` gets the weights of the ONNX graphs that are written.
///
/// # Errors
/// Errors of [`forge`].
pub(crate) fn forge_known(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    known: &mut Known,
    progress: &mut dyn Progress,
) -> Result<Report> {
    make(checkpoint, recipe, options, None, known, progress)
}

/// Errors when the options contradict each other.
fn check_options(checkpoint: &Checkpoint, options: &ForgeOptions) -> Result<()> {
    let head = options.rerank.as_ref().map(|r| matches!(r.verdict, Verdict::Head { .. }));
    let scores = task(checkpoint, options.task)? == Task::Score;
    if head.is_some_and(|head| head != scores) {
        return Err(Error::new(
            ErrorKind::Usage,
            "what says how a reranker is asked has yes and no for a language model, and activation for the task score",
        )
        .hint("give the file of the other kind, or another --task"));
    }
    if options.portable && options.compiler.is_some() {
        return Err(Error::new(ErrorKind::Usage, "a portable bundle has no context binaries")
            .hint("give no target"));
    }
    if options.portable && options.activations == Activations::Int16 {
        let what =
            "a portable bundle holds no range of its activations, which 16-bit integers need";
        return Err(Error::new(ErrorKind::Usage, what).hint("give a target, or f16 activations"));
    }
    if options.check.is_some() && options.compiler.is_none() {
        return Err(Error::new(
            ErrorKind::Usage,
            "the check compares context binaries with their ONNX reference graphs, and none are made",
        )
        .hint("give the QNN libraries, or drop the check"));
    }
    Ok(())
}

fn make(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    golden: Option<AddGolden<'_>>,
    known: &mut Known,
    progress: &mut dyn Progress,
) -> Result<Report> {
    check_options(checkpoint, options)?;
    let ModelName { shown, file: name } = ModelName::of(checkpoint, options.name.as_deref())?;
    check_apart(checkpoint, &options.out)?;
    let (plan, recipe) = plan(checkpoint, recipe, options, options.for_npu())?;
    let fingerprint = fingerprint(checkpoint, &plan, &format!("{name} {shown}"), options).hex();
    let mut staging = Staging::open(&options.out, options.overwrite, &fingerprint, progress)?;
    progress.total(plan.bytes());
    if let Some(warning) = plan.warning() {
        progress.note(&warning);
    }
    plan.notes().iter().for_each(|note| progress.note(note));
    if options.compiler.as_ref().is_some_and(|c| c.dsp_arch() == "v68") {
        progress.note(NO_FLOATS);
    }
    if options.precision == Precision::Fp16 && checkpoint.has_quantized_weights() {
        progress.note("the checkpoint's quantized weights are dequantized to f16; --precision w4a16 keeps them");
    }
    if let Some(note) = rounded(checkpoint, &recipe) {
        progress.note(&note);
    }
    if options.activations == Activations::Int16 {
        progress.note(&of_integers(&recipe));
    }
    if let Some(note) = wide_mask(&recipe).filter(|_| options.for_npu()) {
        progress.note(&note);
    }
    let names = [&*name, &*shown];
    let has_onnx = options.has_onnx(options.compiler.is_some());
    let onnx = has_onnx || options.check.is_some() || golden.is_some();
    let made = fill(checkpoint, &recipe, names, (options, onnx), &mut staging, known, progress);
    let mut artifacts = match made {
        Ok(artifacts) => artifacts,
        Err(error) => return Err(stopped(error, &mut staging)),
    };
    let check = match &options.check {
        Some(check) => checked(&recipe, &mut artifacts, (options, check), &staging, progress),
        None => Ok(Vec::new()),
    };
    let check = check.and_then(|rows| {
        if let Some(golden) = golden {
            golden(&staging.root().join(&artifacts.manifest), staging.total()?, progress)?;
        }
        Ok(rows)
    });
    let check = match check {
        Err(error) if error.kind() == ErrorKind::Cancelled => {
            return Err(stopped(error, &mut staging));
        }
        other => other,
    };
    if !has_onnx {
        remove_onnx(&staging, &artifacts.manifest)?;
    }
    let bytes = staging.publish()?;
    let check = check?;
    Ok(Report {
        manifest: options.out.join(artifacts.manifest),
        family: recipe.family,
        dsp_arch: options.compiler.as_ref().map(|c| c.dsp_arch().to_owned()),
        contexts: artifacts.contexts,
        max_ctx: plan.max_ctx,
        longest: longest(checkpoint, plan.task),
        bytes,
        check,
    })
}

/// Which quantized weights of the checkpoint graphs hold as integers of another form than its own.
fn rounded(checkpoint: &Checkpoint, recipe: &Recipe) -> Option<String> {
    let mut names: BTreeMap<&str, (&'static str, Storage)> = BTreeMap::new();
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    for weight in graphs.flat_map(Graph::weights) {
        let source = weight.source();
        let storage = weight.storage();
        let kept = source.block_form() == storage.form(weight.cols());
        if let (false, Storage::Int8 | Storage::Blocks(_), Some(form)) =
            (kept, storage, checkpoint.form(source.name()))
        {
            names.insert(source.name(), (form, storage));
        }
    }
    let mut forms: BTreeMap<String, usize> = BTreeMap::new();
    for (form, storage) in names.values() {
        *forms.entry(format!("{form} to {storage}")).or_default() += 1;
    }
    let forms: Vec<_> = forms.iter().map(|(form, count)| format!("{form} ({count})")).collect();
    (!forms.is_empty()).then(|| {
        format!(
            "quantized weights of forms that graphs do not have are dequantized and rounded: {}; all others keep \
             their integers",
            forms.join(", ")
        )
    })
}

/// Note on the number of weights that are multiplied with 16-bit integers.
fn of_integers(recipe: &Recipe) -> String {
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let weights = graphs.flat_map(Graph::weights).filter(
        |weight| matches!(weight.storage(), Storage::Blocks(form) if form.bits == Bits::Four),
    );
    let all: BTreeMap<&str, bool> =
        weights.map(|weight| (weight.source().name(), weight.range().is_some())).collect();
    let count = all.values().filter(|of_integers| **of_integers).count();
    format!(
        "{count} of {} 4-bit weights are multiplied with 16-bit integers; the others have blocks of the checkpoint, \
         rows that are no multiple of 64, or values that vary too much",
        all.len()
    )
}

/// Note about the largest mask of a prefill graph; none where it is within [`MAX_MASK`].
fn wide_mask(recipe: &Recipe) -> Option<String> {
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let masks = graphs.flat_map(|graph| {
        let inputs = graph.info(Elem::qnn).inputs.into_iter();
        let masks = inputs.filter(|input| input.name.starts_with("cmask"));
        masks.filter_map(|mask| Some((mask.try_byte_len().ok()?, graph.name().to_owned())))
    });
    let (bytes, graph) = masks.max().filter(|(bytes, _)| *bytes > MAX_MASK)?;
    Some(format!(
        "the mask of graph {graph:?} has {bytes} bytes: libraries were seen to add more than {MAX_MASK} wrongly on v79 \
         and v81, without an error, so the graph adds it in parts; the golden steps show on the device whether that is \
         right, and fewer rows (--prefill) or positions (--max-ctx) do without"
    ))
}

/// The error that ended the work, with what stays of it.
pub(crate) fn stopped(error: Error, staging: &mut Staging) -> Error {
    // What is wrong with the input would be wrong with it again.
    let passing = [ErrorKind::Cancelled, ErrorKind::Io, ErrorKind::Runtime];
    staging.keep(passing.contains(&error.kind()));
    match staging.kept() {
        Some(folder) => {
            let rest = format!("what is finished stays in {}; {GO_ON}", folder.display());
            let hint = error.hint_text().map_or(rest.clone(), |h| format!("{h}; {rest}"));
            error.hint(hint)
        }
        None => error,
    }
}

/// Hash of all that the files of a bundle depend on, but for the graphs.
fn fingerprint(
    checkpoint: &Checkpoint,
    plan: &crate::plan::Plan,
    name: &str,
    options: &ForgeOptions,
) -> Fingerprint {
    let mut fingerprint = Fingerprint::default();
    let compiler = options.compiler.as_ref();
    for text in [
        env!("CARGO_PKG_VERSION"),
        &format!("{}", onnx::VERSION),
        &checkpoint.identity(),
        name,
        plan.task.name(),
        &format!("{} {:?}", options.precision.name(), options.head),
        &format!(
            "{} {} {:?} {:?} {:?} {:?} {:?} {}",
            plan.shards,
            plan.max_ctx,
            options.prefill,
            options.contexts,
            options.batch,
            options.caches,
            options.activations,
            options.onnx
        ),
        &options.portable.to_string(),
        &options.share_weights.to_string(),
        &format!("{:?} {:?} {:?}", options.recipe_options, options.weights, options.folds),
        compiler.map_or("", |c| c.dsp_arch()),
        &format!("{:?}", compiler.and_then(|c| c.soc_model())),
        &compiler.map_or_else(String::new, |c| c.version()),
    ] {
        fingerprint.add(text.as_bytes());
    }
    for (name, inputs) in &options.columns {
        fingerprint.add(name.as_bytes());
        fingerprint.add(bytemuck::cast_slice(&inputs.squares));
        fingerprint.add(format!("{:?}", inputs.range).as_bytes());
    }
    fingerprint
}

/// Contents of the staging folder.
struct Artifacts {
    manifest: String,
    contexts: Vec<ContextReport>,
    sources: Vec<ContextSource>,
}

/// Makes every artifact that is not there yet, and the manifest, with the ONNX reference graphs if `onnx`. The names
/// are that of files and that which is shown.
fn fill(
    checkpoint: &Checkpoint,
    recipe: &Recipe,
    [name, shown]: [&str; 2],
    (options, onnx): (&ForgeOptions, bool),
    staging: &mut Staging,
    known: &mut Known,
    progress: &mut dyn Progress,
) -> Result<Artifacts> {
    // First, and before hours of compiling, what may be refused at once.
    let declared = recipe.params.get("vocab").and_then(Value::as_u64).map(|n| n as usize);
    let vocab = recipe.embed.as_ref().map(|table| table.shape()[0]).or(declared);
    let vocab = vocab.ok_or_else(|| {
        let what =
            "the recipe has neither an embedding table nor params.vocab, expected one of them";
        Error::new(ErrorKind::Internal, what)
    })?;
    let mut of_text = text::token_ids(checkpoint, vocab)?;
    if task(checkpoint, options.task)? == Task::Generate {
        let sampling = text::sampling(checkpoint)?;
        of_text.extend(sampling.map(|sampling| ("sampling".to_owned(), sampling)));
    }
    let mut text_artifacts = Map::new();
    let chat = match recipe.tokenizer {
        true => {
            let changes = text::Changes {
                normalizers: &recipe.normalizers,
                shown: &recipe.shown_tokens,
                template: recipe.chat_template,
            };
            text::copy(checkpoint, changes, vocab, staging, &mut text_artifacts, progress)?
        }
        false => json!(false),
    };
    let mut contexts = Map::new();
    let mut reports = Vec::new();
    let mut sources = Vec::new();
    for plan in &recipe.contexts {
        let mut entry = Map::new();
        let mut report = ContextReport {
            key: plan.key.clone(),
            graphs: plan.graphs.iter().map(|g| g.name().to_owned()).collect(),
            binary_bytes: None,
            wider_weights: plan.wider_weights(),
        };
        let mut source = ContextSource { key: plan.key.clone(), ..ContextSource::default() };
        if let Some(compiler) = &options.compiler {
            progress.stop_if_cancelled()?;
            let file = names::context_file(name, plan);
            let graphs: Vec<_> = plan.compiled().cloned().collect();
            let graphs = (&graphs[..], options.share_weights);
            binary(&**compiler, &plan.key, graphs, &file, staging, progress)?;
            report.binary_bytes = staging.bytes(&file);
            source.binary = Some(staging.root().join(&file));
            entry.insert("bin".to_owned(), json!(file));
        }
        if onnx {
            progress.stop_if_cancelled()?;
            onnx_graphs(&plan.graphs, staging, known, progress)?;
            let mut files = Map::new();
            for graph in &plan.graphs {
                let file = names::onnx_file(graph.name());
                source.onnx.push((graph.name().to_owned(), staging.root().join(&file)));
                files.insert(graph.name().to_owned(), json!(file));
            }
            entry.insert("onnx".to_owned(), Value::Object(files));
        }
        if let Some(set) = &plan.optional {
            entry.insert("optional".to_owned(), json!(set));
        }
        contexts.insert(plan.key.clone(), Value::Object(entry));
        reports.push(report);
        sources.push(source);
    }
    let mut artifacts = Map::new();
    artifacts.insert("contexts".to_owned(), Value::Object(contexts));
    if let Some(table) = &recipe.embed {
        let entry = embed((table, recipe), name, options, staging, progress)?;
        artifacts.insert("embed".to_owned(), entry);
    }
    for table in &recipe.tables {
        artifacts.insert(table.key.clone(), tables(table, name, staging, progress)?);
    }
    artifacts.append(&mut text_artifacts);
    if options.portable {
        progress.note("nothing is compiled: `qhx prepare` does that where the bundle runs");
    } else if options.compiler.is_none() {
        progress.note(
            "nothing is compiled: the bundle has no context binaries and runs on the CPU backend only",
        );
    }
    let mut manifest = manifest(recipe, of_text, shown, options);
    artifacts.insert("files".to_owned(), staging.hash(progress)?);
    manifest.insert("artifacts".to_owned(), Value::Object(artifacts));
    manifest.insert(
        "plan".to_owned(),
        json!({"params": recipe.plan_params, "steps": [{"host": recipe.host_op}]}),
    );
    manifest.insert("chat".to_owned(), chat);
    let manifest_file = format!("{name}.json");
    let mut manifest = Value::Object(manifest);
    bind_receipt(&mut manifest);
    staging.write_json(&manifest_file, &manifest)?;
    check_manifest(&staging.root().join(&manifest_file))
        .map_err(|e| e.context("the bundle that was made cannot be opened"))?;
    progress.stop_if_cancelled()?;
    Ok(Artifacts { manifest: manifest_file, contexts: reports, sources })
}

/// Binds the receipt of a manifest to the files that it lists, but for golden steps.
pub(crate) fn bind_receipt(document: &mut Value) {
    let artifacts = &document["artifacts"];
    let files = artifacts["files"].as_object().into_iter().flatten();
    let files = files.filter(|(path, _)| artifacts["golden"].as_str() != Some(path));
    let hash =
        files_hash(files.filter_map(|(path, file)| Some((&**path, file["sha256"].as_str()?))));
    if let Some(receipt) = document.pointer_mut("/model/receipt") {
        receipt["files"] = json!(hash);
    }
}

/// Compares the compiled graphs with their ONNX reference graphs. The emulator does not load contexts whose graphs
/// share weights: it gets some that do not, which are no part of the bundle.
fn checked(
    recipe: &Recipe,
    artifacts: &mut Artifacts,
    (options, check): (&ForgeOptions, &CheckBackends),
    staging: &Staging,
    progress: &mut dyn Progress,
) -> Result<Vec<CheckRow>> {
    if let (true, Some(compiler)) = (Platform::is_emulated(), &options.compiler) {
        let sources = artifacts.sources.iter_mut().zip(&recipe.contexts);
        for (source, plan) in sources.filter(|(_, plan)| options.shares(plan)) {
            let file = staging.scratch().join(format!("{}.bin", plan.key));
            // There if an earlier attempt was stopped.
            let _ = std::fs::remove_file(&file);
            compiler.compile(&plan.key, &plan.graphs, false, &file, progress)?;
            source.binary = Some(file);
        }
    }
    compare(&artifacts.sources, check, progress)
}

/// Removes the ONNX reference graphs from a bundle that needed them only while it was made.
fn remove_onnx(staging: &Staging, manifest: &str) -> Result<()> {
    let folder = staging.root().join(names::ONNX);
    if !folder.exists() {
        return Ok(());
    }
    std::fs::remove_dir_all(&folder).map_err(|e| Error::io(ErrorKind::Io, &folder, e))?;
    let path = staging.root().join(manifest);
    let mut document = read_json(&path)?;
    let artifacts = &mut document["artifacts"];
    if let Some(files) = artifacts["files"].as_object_mut() {
        files.retain(|file, _| !Path::new(file).starts_with(names::ONNX));
    }
    let contexts = artifacts["contexts"].as_object_mut().into_iter().flatten();
    for entry in contexts.filter_map(|(_, context)| context.as_object_mut()) {
        entry.remove("onnx");
    }
    bind_receipt(&mut document);
    replace_json(&path, &document)
}

/// Reads the manifest as qhx does, and looks for the files that it names.
pub(crate) fn check_manifest(path: &Path) -> Result<()> {
    let manifest = Manifest::load(path)?;
    manifest.host_op()?;
    let artifacts = manifest.open_artifacts();
    for context in &manifest.artifacts.contexts {
        manifest.context_source(&artifacts, &context.key)?;
    }
    Ok(())
}

/// Makes an artifact unless an earlier attempt has finished it.
pub(crate) fn artifact(
    staging: &mut Staging,
    name: &str,
    fingerprint: &str,
    files: &[String],
    progress: &mut dyn Progress,
    make: impl FnOnce(&mut Staging, &mut dyn Progress) -> Result<()>,
) -> Result<()> {
    let reused = staging.has(name, fingerprint);
    if !reused {
        staging.clear(name, files);
        make(staging, progress)?;
        let there: Vec<_> = files.iter().filter(|f| staging.path(f).is_err()).cloned().collect();
        staging.finish(name, fingerprint, &there, progress)?;
    }
    let bytes = files.iter().filter_map(|file| staging.bytes(file)).sum();
    progress.finished(bytes, reused);
    Ok(())
}

/// Compiles the graphs of a context, which share weights or not, into a file, unless an earlier attempt did; returns
/// whether that was so.
pub(crate) fn binary(
    compiler: &dyn Compiler,
    key: &str,
    (graphs, share_weights): (&[Graph], bool),
    file: &str,
    staging: &mut Staging,
    progress: &mut dyn Progress,
) -> Result<bool> {
    let (origin, files) = (describe(graphs), [file.to_owned()]);
    let kept = staging.has(file, &origin);
    artifact(staging, file, &origin, &files, progress, |staging, progress| {
        let path = staging.path(file)?;
        let written = compiler.compile(key, graphs, share_weights, &path, progress);
        written.map(drop).map_err(|e| e.context(format_args!("context {key:?}")))
    })?;
    Ok(kept)
}

/// Writes the ONNX reference graphs of a context. Their weights lie in one file, which has the first one's name.
fn onnx_graphs(
    graphs: &[Graph],
    staging: &mut Staging,
    known: &mut Known,
    progress: &mut dyn Progress,
) -> Result<()> {
    let dir = staging.folder(names::ONNX)?;
    let mut files: Vec<String> = graphs.iter().map(|g| names::onnx_file(g.name())).collect();
    let (Some(first), Some(graph)) = (files.first().cloned(), graphs.first()) else {
        return Ok(());
    };
    files.push(names::onnx_data_file(&first));
    artifact(staging, &first, &describe(graphs), &files, progress, |_, progress| {
        let graphs: Vec<_> = graphs.iter().collect();
        onnx::write_beside(&graphs, &dir, graph.name(), known, progress).map(drop)
    })
}

/// Hash of what graphs compute.
pub(crate) fn describe<'a>(graphs: impl IntoIterator<Item = &'a Graph>) -> String {
    let mut fingerprint = Fingerprint::default();
    for graph in graphs {
        graph.describe(|bytes| fingerprint.add(bytes));
    }
    fingerprint.hex()
}

/// The keys of the manifest that stand before `artifacts`.
fn manifest(
    recipe: &Recipe,
    of_text: Map<String, Value>,
    name: &str,
    options: &ForgeOptions,
) -> Map<String, Value> {
    let mut params = recipe.params.clone();
    params.extend(of_text);
    if let Some(asked) = &options.rerank {
        params.insert("rerank".to_owned(), rerank::to_json(asked));
    }
    let compiler = options.compiler.as_ref();
    let mut model = Map::new();
    model.insert("name".to_owned(), json!(name));
    model.insert("family".to_owned(), json!(recipe.family));
    model.insert("dsp_arch".to_owned(), json!(compiler.map(|c| c.dsp_arch())));
    if let Some(soc) = compiler.and_then(|c| c.soc_model()) {
        model.insert("soc_model".to_owned(), json!(soc));
    }
    model.insert("precision".to_owned(), json!(options.precision.name()));
    if !options.weights.is_empty() {
        let weights = options.weights.iter();
        let weights = weights.map(|one| (one.part.clone(), json!(one.precision.name())));
        model.insert("weights".to_owned(), Value::Object(weights.collect()));
    }
    if !options.folds.is_empty() {
        let folds = options.folds.iter().map(|fold| (fold.part.clone(), json!(fold.shift)));
        model.insert("folds".to_owned(), Value::Object(folds.collect()));
    }
    if let Some(receipt) = &options.receipt {
        model.insert("receipt".to_owned(), receipt.to_json());
    }
    model.insert("made_by".to_owned(), json!(concat!("qhx-forge ", env!("CARGO_PKG_VERSION"))));
    if let Some(compiler) = compiler {
        model.insert("compiled_by".to_owned(), json!(compiler.version()));
    }
    let mut manifest = Map::new();
    manifest.insert("schema_version".to_owned(), json!(qhx_core::manifest::SCHEMA_VERSION));
    manifest.insert("model".to_owned(), Value::Object(model));
    if options.portable {
        manifest.insert(PORTABLE.to_owned(), json!({"version": onnx::VERSION}));
    }
    manifest.insert("params".to_owned(), Value::Object(params));
    manifest
}

/// Writes the embedding table of a recipe: in 8 bits beside a tied head of 8 bits, or else f16, unless that would
/// change floating point that the CPU backend is to agree on with the reference.
fn embed(
    (table, recipe): (&Arc<dyn RowSource>, &Recipe),
    name: &str,
    options: &ForgeOptions,
    staging: &mut Staging,
    progress: &mut dyn Progress,
) -> Result<Value> {
    let exact = options.has_onnx(options.compiler.is_some());
    let dtype = if recipe.has_int8_table() {
        DType::I8
    } else if !exact || table_fits_f16(&**table)? {
        DType::F16
    } else {
        DType::F32
    };
    let for_npu = options.for_npu();
    let file = names::embed_file(name, dtype);
    let origin = format!("{} {:?} {dtype}", table.name(), table.shape());
    let files = std::slice::from_ref(&file);
    artifact(staging, &file, &origin, files, progress, |staging, progress| {
        staging.write_table(&file, table, dtype, for_npu, progress)
    })?;
    let block = (dtype == DType::I8).then_some(BLOCK);
    Ok(table_entry(&file, Some(dtype).filter(|dtype| *dtype != DType::F16), block))
}

/// Writes further files and returns the object that names them.
fn tables(
    tables: &Tables,
    name: &str,
    staging: &mut Staging,
    progress: &mut dyn Progress,
) -> Result<Value> {
    let files: Vec<_> = tables.files.iter().map(|t| names::table_file(name, &t.name)).collect();
    artifact(staging, &tables.key, &tables.key, &files, progress, |staging, progress| {
        progress.stage(&tables.key, tables.source.bytes());
        let mut writers = Vec::new();
        for file in &files {
            let path = staging.path(file)?;
            let target = File::create(&path).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
            writers.push((path, BufWriter::with_capacity(1 << 20, target)));
        }
        let mut targets: Vec<&mut dyn Write> = Vec::new();
        targets.extend(writers.iter_mut().map(|(_, writer)| writer as &mut dyn Write));
        tables.source.write(&mut targets, progress)?;
        for (path, mut writer) in writers {
            writer.flush().map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
        }
        Ok(())
    })?;
    let fields =
        tables.files.iter().zip(files).map(|(table, file)| {
            (table.field.clone(), table_entry(&file, table.dtype, table.block))
        });
    Ok(Value::Object(fields.collect()))
}

/// Manifest entry of a table: its path alone where it is f16 or undeclared.
fn table_entry(file: &str, dtype: Option<DType>, block: Option<usize>) -> Value {
    match (dtype, block) {
        (Some(dtype), Some(block)) => json!({"path": file, "dtype": dtype, "block": block}),
        (Some(dtype), None) => json!({"path": file, "dtype": dtype}),
        (None, _) => json!(file),
    }
}
