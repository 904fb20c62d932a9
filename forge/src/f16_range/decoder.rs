//! Headroom of a decoder's values in f16. The decoder reads texts on the CPU in f32, and the largest magnitudes of the
//! values that the NPU computes in f16 are recorded layer by layer. Values that do not fit are folded.

use std::borrow::Cow;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{BinaryOp, Elem, Graph, Node, Op, Origin, ReduceOp, TensorId, UnaryOp};
use qhx_graph::onnx::Known;
use qhx_graph::progress::Progress;

use super::rescale::{Fold, MAX_SHIFT, fold};
use super::vision::Residual;
use crate::calibrate::{self, CalibrateOptions, OpenBundle};
use crate::chain::{DECODERS, HEAD};
use crate::forge::forge_known;
use crate::options::ForgeOptions;
use crate::plan::plan;
use crate::recipe::{Precision, Recipe, RecipeOptions, Task};
use crate::registry::task;

/// The largest number of f16.
pub const F16_MAX: f32 = 65_504.0;
/// Largest magnitude after folding, which leaves room for other texts.
const FOLDED: f32 = F16_MAX / 8.0;
/// The cap of the logits would hold for what is measured, too.
const SOFTCAP: &str = "final_logit_softcapping";

/// The largest magnitude of one kind of values in a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Peak {
    /// `layers.3`; empty outside of layers.
    pub layer: String,
    /// `residual`, `product` (of gate and up), `score` or the name of the projection whose outputs they are, such as
    /// `up_proj`.
    pub kind: String,
    /// Over all tokens of the texts.
    pub largest: f32,
}

impl Peak {
    /// Factor by which it could grow and still fit in f16.
    pub fn headroom(&self) -> f32 {
        F16_MAX / self.largest
    }
}

/// Result of measuring the headroom.
#[derive(Debug, Clone)]
pub struct Headroom {
    /// Tokens that were read.
    pub tokens: usize,
    /// Without folds, in the order in which the model computes.
    pub peaks: Vec<Peak>,
    /// Folds that make all values fit, beside the folds of the options; an error that names the layer where nothing
    /// helps.
    pub folds: Result<Vec<Fold>>,
}

/// Reads texts with the checkpoint in f16 weights, and finds what has to be folded. The bundle is made in a folder
/// beside `options.out` and removed.
///
/// # Errors
/// When the bundle cannot be made or run, its graphs do not show what they compute, and the texts have too few tokens.
pub fn headroom(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    wanted: &CalibrateOptions,
    open: OpenBundle<'_>,
    progress: &mut dyn Progress,
) -> Result<Headroom> {
    let made_for = task(checkpoint, options.task)?;
    if made_for != Task::Generate {
        let class = checkpoint.architecture().unwrap_or_default();
        let what = format!(
            "the largest values of {class} are not measured on texts: its bundle has the task {}, expected generate",
            made_for.name()
        );
        return Err(Error::new(ErrorKind::Usage, what).hint("give --check without texts"));
    }
    let texts = calibrate::tokens(checkpoint, options, wanted)?;
    let folder = calibrate::scratch(&options.out)?;
    let out = folder.path().join("bundle");
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let made = ForgeOptions {
        precision: Precision::Fp16,
        // All layers in one graph, also of a family whose step is a chain of several.
        shards: 1,
        // One token a step: rows behind the last token would be measured, too.
        prefill: Some(Vec::new()),
        ..calibrate::measured(options, &out, longest)
    };
    let shown = |checkpoint: &Checkpoint, wanted: &RecipeOptions| {
        shown(calibrate::joined(recipe(checkpoint, wanted)?))
    };
    progress.stage("measure the largest values", 0);
    let (_, planned) = plan(checkpoint, |c, o| Ok(calibrate::joined(recipe(c, o)?)), &made, false)?;
    let graph = decoder(&planned)?;
    let places = places(&graph);
    let mut largest = vec![0f32; places.len()];
    let mut quiet = calibrate::Quiet(progress);
    let report = forge_known(checkpoint, shown, &made, &mut Known::default(), &mut quiet)?;
    let mut model = open(&report.manifest)?;
    let mut tokens = 0;
    for text in &texts {
        model.reset()?;
        model.read(text, &mut |scores| {
            progress.stop_if_cancelled()?;
            let found = scores.len().checked_sub(largest.len()).and_then(|at| scores.get(at..));
            for (largest, found) in largest.iter_mut().zip(found.unwrap_or_default()) {
                // NaN would be lost in `f32::max`.
                *largest = if found.is_finite() { largest.max(*found) } else { f32::INFINITY };
            }
            tokens += 1;
            Ok(())
        })?;
    }
    drop(model);
    let mut peaks: Vec<Peak> = Vec::new();
    for (Place { layer, kind, .. }, &largest) in places.iter().zip(&largest) {
        match peaks.iter_mut().find(|peak| peak.layer == *layer && peak.kind == *kind) {
            Some(peak) => peak.largest = peak.largest.max(largest),
            None => peaks.push(Peak { layer: layer.clone(), kind: kind.clone(), largest }),
        }
    }
    let folds = folds(&graph, &places, &largest, &options.folds);
    Ok(Headroom { tokens, peaks, folds })
}

/// The one graph of a step, which ends with the logits, with the nodes that its composites stand for.
fn decoder(recipe: &Recipe) -> Result<Cow<'_, Graph>> {
    let name = recipe.plan_params.get(DECODERS[0]).and_then(|name| name.as_str());
    let mut graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let found = graphs.find(|graph| Some(graph.name()) == name);
    let whole = found.filter(|_| !recipe.plan_params.contains_key(HEAD)).ok_or_else(|| {
        let what =
            format!("the largest values of {} are not measured on texts: its step is several graphs, as those of experts \
             are, expected one that ends with the logits", recipe.family);
        Error::new(ErrorKind::Usage, what).hint("give --check without texts")
    })?;
    whole.decomposed()
}

/// A tensor that is measured.
struct Place {
    id: TensorId,
    layer: String,
    kind: String,
}

/// The tensors of a graph that may be large: outputs of projections, their products, scores and hidden states.
fn places(graph: &Graph) -> Vec<Place> {
    let tensor = |id: &TensorId| graph.tensors().get(id.index());
    let computed = |id: &TensorId| graph.producer(*id).is_some();
    let readers = |id: TensorId| graph.nodes().iter().filter(move |node| node.inputs.contains(&id));
    let mut hidden: Vec<TensorId> = graph.inputs().to_vec();
    hidden.retain(|id| tensor(id).is_some_and(|tensor| tensor.name == "x"));
    let mut layer = String::new();
    let mut found = Vec::new();
    for node in graph.nodes() {
        let of_hidden = node.inputs.iter().any(|id| hidden.contains(id));
        let kind = match &node.op {
            Op::Linear => weight(graph, node).map(|name| {
                let (place, kind) = name.rsplit_once('.').unwrap_or(("", name));
                let number =
                    place.split_once("layers.").and_then(|(_, rest)| rest.split('.').next());
                layer = number.map_or_else(String::new, |number| format!("layers.{number}"));
                kind
            }),
            Op::Binary(BinaryOp::Add) if of_hidden && node.inputs.iter().any(computed) => {
                hidden.push(node.output);
                Some("residual")
            }
            Op::Binary(BinaryOp::Mul) if of_hidden && !node.inputs.iter().all(computed) => {
                hidden.push(node.output);
                None
            }
            Op::Reshape | Op::Cast if of_hidden => {
                hidden.push(node.output);
                None
            }
            Op::Binary(BinaryOp::Mul)
                if node.inputs.iter().all(computed)
                    && readers(node.output).any(|reader| reader.op == Op::Linear) =>
            {
                Some("product")
            }
            Op::MatMul { .. } if is_score(graph, node.output) => Some("score"),
            _ => None,
        };
        let fits = tensor(&node.output).is_some_and(|tensor| tensor.elem == Elem::Activation);
        if let Some(kind) = kind.filter(|_| fits) {
            found.push(Place { id: node.output, layer: layer.clone(), kind: kind.to_owned() });
        }
    }
    found
}

/// The name of a projection's weight.
fn weight<'a>(graph: &'a Graph, node: &Node) -> Option<&'a str> {
    let tensor = graph.tensors().get(node.inputs.get(1)?.index())?;
    let Origin::Weight(weight) = &tensor.origin else { return None };
    let name = weight.source().name();
    Some(name.strip_suffix(".weight").unwrap_or(name))
}

/// True for what a softmax reads, scaled and masked.
fn is_score(graph: &Graph, mut id: TensorId) -> bool {
    loop {
        let mut readers = graph.nodes().iter().filter(|node| node.inputs.contains(&id));
        match readers.next() {
            Some(Node { op: Op::Softmax, .. }) => return true,
            Some(Node {
                op: Op::Binary(_) | Op::Unary(_) | Op::Reshape | Op::Concat { .. },
                output,
                ..
            }) => {
                id = *output;
            }
            _ => return false,
        }
    }
}

/// The recipe with the largest magnitude at each place behind the logits.
fn shown(mut recipe: Recipe) -> Result<Recipe> {
    let graph = decoder(&recipe)?;
    let (name, places) = (graph.name().to_owned(), places(&graph));
    let missing = || Error::new(ErrorKind::Graph, format!("graph {name:?}: no output logits"));
    let (mut b, logits) = GraphBuilder::reopen(graph.into_owned(), "logits").ok_or_else(missing)?;
    b.scope("shown");
    let mut row = vec![logits];
    for Place { id, .. } in places {
        let count = b.tensor(id)?.elements();
        let size = b.unary(UnaryOp::Abs, id)?;
        let size = b.reshape(size, &[1, count])?;
        row.push(b.reduce(ReduceOp::Max, size, 1)?);
    }
    let row = b.concat(&row, 1)?;
    b.output("logits", row)?;
    let shown = b.finish()?;
    recipe.params.remove(SOFTCAP);
    let mut graphs = recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs);
    if let Some(graph) = graphs.find(|graph| graph.name() == name) {
        *graph = shown;
    }
    Ok(recipe)
}

/// Folds that make all values fit, beside `given`.
fn folds(graph: &Graph, places: &[Place], largest: &[f32], given: &[Fold]) -> Result<Vec<Fold>> {
    let mut folds = given.to_vec();
    let mut before = None;
    loop {
        let folded = fold(graph, &folds, 0, false)?;
        let shift = |place: &Place| match folded.restored.get(place.id.index()) {
            Some(false) => folded.shifts.get(place.id.index()).copied().unwrap_or(0),
            _ => 0,
        };
        let mut sizes = places.iter().zip(largest);
        let beyond = sizes.find_map(|(place, largest)| {
            let size = largest * 2f32.powi(-shift(place));
            (size > Residual::LIMIT).then_some((place, size))
        });
        let Some((place, size)) = beyond else { return Ok(folds.split_off(given.len())) };
        let now = Some((place.id, shift(place)));
        let part = cause(graph, place.id).filter(|_| now != before && size.is_finite());
        before = now;
        let Some(part) = part else { return Err(beyond_help(place, size)) };
        let more = (size / FOLDED).log2().ceil() as u32;
        match folds.iter_mut().skip(given.len()).find(|fold| fold.part == part) {
            Some(fold) => fold.shift += more,
            None => folds.push(Fold { part: part.to_owned(), shift: more }),
        }
        if folds.iter().any(|fold| fold.shift > MAX_SHIFT) {
            return Err(beyond_help(place, size));
        }
    }
}

/// The projection whose outputs have to become smaller so that a tensor does.
fn cause(graph: &Graph, id: TensorId) -> Option<&str> {
    let node = graph.producer(id)?;
    let linear = |id: &&TensorId| graph.producer(**id).is_some_and(|node| node.op == Op::Linear);
    match &node.op {
        Op::Linear => weight(graph, node),
        Op::MatMul { .. } | Op::Softmax => None,
        _ => {
            let first = node.inputs.iter().find(linear).or(node.inputs.first())?;
            cause(graph, *first)
        }
    }
}

fn beyond_help(place: &Place, size: f32) -> Error {
    let Place { layer, kind, .. } = place;
    let at = if layer.is_empty() { kind.clone() } else { format!("{layer}: {kind}") };
    Error::new(
        ErrorKind::Artifact,
        format!(
            "{at} reaches {size}, and no power of two in a weight keeps it below {}; the NPU computes in f16, which ends \
             at {F16_MAX}",
            Residual::LIMIT
        ),
    )
    .hint("make a bundle for the CPU only (`--cpu-only`), which computes in f32")
}
