//! Values of graphs while a model reads texts, sees and hears: the largest magnitudes of those that the NPU
//! computes in f16, layer by layer, and how much each input of a weight is worth. The CPU computes in f32 and with f16
//! weights. Values that do not fit are folded.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::Model;
use qhx_exec::graph_runner::decode;
use qhx_exec::workspace::{Executed, TAPPED};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{BinaryOp, Elem, Graph, Node, Op, Origin, ReduceOp, TensorId, UnaryOp};
use qhx_graph::onnx::Known;
use qhx_graph::progress::Progress;
use qhx_graph::weight::Range;
use qhx_types::Port;

use super::rescale::{Fold, MAX_SHIFT, fold_all};
use crate::calibrate::{self, Making, open_joined};
use crate::chain::{decoders, names_graph};
use crate::forge::forge_known;
pub use crate::measured::{Columns, F16_MAX, Inputs, Peak, read_columns, write_columns};
use crate::options::ForgeOptions;
use crate::plan::plan;
use crate::recipe::{Precision, Recipe, RecipeOptions, Task};
use crate::registry::task;

/// Largest magnitude that stays as it is. f16 ends at 65,504; the rest is for other texts and images.
const LIMIT: f32 = 30_000.0;
/// Largest magnitude after folding, which leaves room for other texts.
const FOLDED: f32 = F16_MAX / 8.0;
/// Positions of the bundle that is measured, unless the texts or an encoder need more: room for an image.
const MAX_CTX: usize = 1024;
/// The most that a value may be of the mean magnitude where 16-bit integers stand for it: of 2¹⁴ steps, which leave room
/// for twice as much, one is 0.012 of it then, and rounding has 0.29 of a step. Results have half of that, for they have
/// half the steps. A root mean square would follow the few values of some tokens that exceed all others.
const EVEN: f32 = 200.0;
/// Outputs that are added to graphs.
const PEAKS: &str = "tapped_peaks";
const SQUARES: &str = "tapped_squares";
const _: () = assert!(begins(PEAKS) && begins(SQUARES));

const fn begins(name: &str) -> bool {
    matches!(name.as_bytes().split_at_checked(TAPPED.len()), Some((start, _)) if start.len() == TAPPED.len())
}

/// Result of a measurement.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Without folds, in the order in which the model computes.
    pub peaks: Vec<Peak>,
    /// Folds that make all values fit, beside the folds of the options; an error that names the layer where nothing
    /// helps.
    pub folds: Result<Vec<Fold>>,
    /// Inputs of weights: their worth, and their range.
    pub columns: Columns,
}

/// Opens the bundle of a manifest for the CPU, with its host-op.
pub type OpenModel<'a> = &'a dyn Fn(&Path) -> Result<Model>;

/// Has a model read: texts, and what else its graphs are for.
pub type Read<'a> = &'a mut dyn FnMut(&mut Model) -> Result<()>;

/// Measures the checkpoint with f16 weights while `read` uses it, and finds what has to be folded. The bundle is made
/// in a folder beside `options.out` and removed. `longest` is the number of positions that `read` needs.
///
/// # Errors
/// When the bundle cannot be made or run, and errors of `read`.
pub fn measure(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    longest: usize,
    (open, read): (OpenModel<'_>, Read<'_>),
    progress: &mut dyn Progress,
) -> Result<Measured> {
    let folder = calibrate::scratch(&options.out)?;
    let out = folder.path().join("bundle");
    let own = options.for_recipe(checkpoint)?.max_ctx;
    let generates = task(checkpoint, options.task)? == Task::Generate;
    let made = ForgeOptions {
        task: options.task,
        precision: Precision::Fp16,
        // All layers in one graph, also of a family whose step is a chain of several.
        shards: 1,
        max_ctx: Some(if generates { own.min(MAX_CTX.max(longest)) } else { own }),
        ..calibrate::measured(options, &out, longest)
    };
    progress.stage("measure values in f32", 0);
    let mut measured = None;
    let make = |recipe: Making<'_>| {
        let whole = |checkpoint: &Checkpoint, wanted: &RecipeOptions| {
            decomposed(recipe(checkpoint, wanted)?)
        };
        let (_, planned) = plan(checkpoint, whole, &made, false)?;
        let graphs = tapped(&planned);
        let shown =
            |checkpoint: &Checkpoint, wanted: &RecipeOptions| shown(whole(checkpoint, wanted)?);
        let mut quiet = calibrate::Quiet(progress);
        let report = forge_known(checkpoint, shown, &made, &mut Known::default(), &mut quiet)?;
        measured = Some((planned, graphs));
        Ok(report.manifest)
    };
    // With the logits of all rows at once.
    let mut model = open_joined(&recipe, &mut { generates }, make, open)?;
    let sums: Arc<Mutex<Sums>> = Arc::default();
    let noted = Arc::clone(&sums);
    model.reopen_with_tap(Some(Arc::new(move |executed| {
        noted.lock().unwrap_or_else(PoisonError::into_inner).add(executed);
    })))?;
    read(&mut model)?;
    drop(model);
    let sums = std::mem::take(&mut *sums.lock().unwrap_or_else(PoisonError::into_inner));
    let mut found = Measured { peaks: Vec::new(), folds: Ok(Vec::new()), columns: Columns::new() };
    let Some((planned, graphs)) = measured else { return Ok(found) };
    for graph in &graphs {
        let Some(Sum { largest, squares, times }) = sums.0.get(&graph.name) else { continue };
        let (of_places, mut peaks) =
            largest.split_at_checked(graph.places.len()).unwrap_or((largest, &[]));
        for (Place { layer, kind, .. }, &largest) in graph.places.iter().zip(of_places) {
            match found.peaks.iter_mut().find(|peak| peak.layer == *layer && peak.kind == *kind) {
                Some(peak) => peak.largest = peak.largest.max(largest),
                None => {
                    let (layer, kind) = (layer.clone(), kind.clone());
                    found.peaks.push(Peak { layer, kind, largest });
                }
            }
        }
        let mut squares = &squares[..];
        for reading in &graph.readings {
            let weights = reading.weights.len();
            let (Some((own, rest)), Some(([peak, of_outputs @ ..], later))) =
                (squares.split_at_checked(reading.width), peaks.split_at_checked(1 + weights))
            else {
                break;
            };
            let Some(([input, sums @ ..], rest)) = rest.split_at_checked(1 + weights) else {
                break;
            };
            (squares, peaks) = (rest, later);
            let mean = |sum: &f32, width: usize| sum / (reading.rows * times * width) as f32;
            for ((name, outputs), (sum, output)) in
                reading.weights.iter().zip(sums.iter().zip(of_outputs))
            {
                let is_even = is_even(*peak, mean(input, reading.width))
                    && is_even(*output * 2.0, mean(sum, *outputs));
                let range = Range { inputs: *peak, outputs: *output };
                add_columns(&mut found.columns, name, own, Some(range).filter(|_| is_even));
            }
        }
    }
    found.folds = folds(&planned, &graphs, &sums, &options.folds);
    Ok(found)
}

impl Measured {
    /// The value that comes nearest to the end of f16.
    pub fn nearest(&self) -> Option<&Peak> {
        self.peaks.iter().max_by(|a, b| a.largest.total_cmp(&b.largest))
    }
}

fn add_columns(columns: &mut Columns, name: &str, squares: &[f32], range: Option<Range>) {
    let sum = match columns.get(name) {
        Some(known) if known.squares.len() == squares.len() => Inputs {
            squares: known.squares.iter().zip(squares).map(|(a, b)| a + b).collect(),
            range: known.range.zip(range).map(|(a, b)| Range {
                inputs: a.inputs.max(b.inputs),
                outputs: a.outputs.max(b.outputs),
            }),
        },
        _ => Inputs { squares: Arc::from(squares), range },
    };
    columns.insert(name.to_owned(), sum);
}

/// True where steps of 16-bit integers are small beside most values, whose mean magnitude is `mean`.
fn is_even(largest: f32, mean: f32) -> bool {
    largest.is_finite() && largest > 0.0 && largest <= EVEN * mean
}

/// The largest values, and the sums of squares and of magnitudes, of graphs by their names.
#[derive(Debug, Default)]
struct Sums(HashMap<String, Sum>);

/// Those of one graph, and how often it was executed.
#[derive(Debug, Default)]
struct Sum {
    largest: Vec<f32>,
    squares: Vec<f32>,
    times: usize,
}

impl Sums {
    fn add(&mut self, executed: &Executed<'_>) {
        let info = executed.info();
        let value = |name: &str| {
            let index = info.outputs.iter().position(|tensor| tensor.name == name)?;
            decode(info.outputs.get(index)?, executed.bytes(Port::Output(index))?).ok()
        };
        let (peaks, squares) =
            (value(PEAKS).unwrap_or_default(), value(SQUARES).unwrap_or_default());
        let Sum { largest, squares: sums, times } = self.0.entry(info.name.clone()).or_default();
        *times += 1;
        largest.resize(peaks.len(), 0.0);
        for (largest, found) in largest.iter_mut().zip(peaks) {
            // NaN would be lost in `f32::max`.
            *largest = if found.is_finite() { largest.max(found) } else { f32::INFINITY };
        }
        sums.resize(squares.len(), 0.0);
        sums.iter_mut().zip(squares).for_each(|(sum, found)| *sum += found);
    }
}

/// The recipe with the nodes that composites of its graphs stand for.
fn decomposed(mut recipe: Recipe) -> Result<Recipe> {
    for graph in recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs) {
        if let Cow::Owned(whole) = graph.decomposed()? {
            *graph = whole;
        }
    }
    Ok(recipe)
}

/// Measured tensors of a graph.
struct Tapped {
    name: String,
    places: Vec<Place>,
    readings: Vec<Reading>,
}

/// A tensor that weights are multiplied with.
struct Reading {
    id: TensorId,
    rows: usize,
    width: usize,
    /// Names of the weights, with the number of their outputs.
    weights: Vec<(String, usize)>,
    outputs: Vec<TensorId>,
}

fn tapped(recipe: &Recipe) -> Vec<Tapped> {
    let is_step = |name: &str| decoders(&recipe.plan_params).any(|list| names_graph(list, name));
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let tapped = graphs.map(|graph| Tapped {
        name: graph.name().to_owned(),
        places: places(graph, is_step(graph.name())),
        readings: readings(graph),
    });
    tapped.collect()
}

/// Tensors that weights are multiplied with, each once.
fn readings(graph: &Graph) -> Vec<Reading> {
    let mut found: Vec<Reading> = Vec::new();
    for node in graph.nodes() {
        let (Op::Linear, Some(&id), Some(name)) =
            (&node.op, node.inputs.first(), weight(graph, node))
        else {
            continue;
        };
        let shape = graph.tensor(id).ok().map(|tensor| &tensor.shape[..]).unwrap_or_default();
        let of_weight = graph.tensor(node.output).ok().and_then(|t| t.shape.last().copied());
        let (Some((&width, rows)), Some(outputs)) = (shape.split_last(), of_weight) else {
            continue;
        };
        let at = match found.iter().position(|reading| reading.id == id) {
            Some(at) => at,
            None => {
                let rows = rows.iter().product();
                let (weights, outputs) = (Vec::new(), Vec::new());
                found.push(Reading { id, rows, width, weights, outputs });
                found.len() - 1
            }
        };
        if let Some(reading) = found.get_mut(at) {
            reading.weights.push((name.to_owned(), outputs));
            reading.outputs.push(node.output);
        }
    }
    found
}

/// A tensor that is measured.
struct Place {
    id: TensorId,
    layer: String,
    kind: String,
}

/// The tensors of a graph that may be large: outputs of projections, their products, scores and hidden states. Layers
/// of a decoder's `step` are named by their number alone.
fn places(graph: &Graph, step: bool) -> Vec<Place> {
    let tensor = |id: &TensorId| graph.tensors().get(id.index());
    let computed = |id: &TensorId| graph.producer(*id).is_some();
    let readers = |id: TensorId| graph.nodes().iter().filter(move |node| node.inputs.contains(&id));
    let mut hidden: Vec<TensorId> = graph.inputs().to_vec();
    hidden.retain(|id| tensor(id).is_some_and(|tensor| tensor.name == "x"));
    // Other graphs begin with patches, frames or tokens, or norm the hidden states behind each sum.
    let seeds = !step;
    let projected = |id: &TensorId| is_projected(graph, *id);
    let mut layer = String::new();
    let mut found = Vec::new();
    for id in hidden.iter().filter(|_| seeds) {
        found.push(Place { id: *id, layer: layer.clone(), kind: "x".to_owned() });
    }
    for node in graph.nodes() {
        let of_hidden = node.inputs.iter().any(|id| hidden.contains(id));
        let kind = match &node.op {
            Op::Linear => weight(graph, node).map(|name| {
                layer = layer_of(name, step);
                name.rsplit('.').next().unwrap_or(name)
            }),
            Op::Binary(BinaryOp::Add)
                if of_hidden && node.inputs.iter().any(computed)
                    || seeds
                        && node.inputs.iter().all(computed)
                        && node.inputs.iter().any(projected) =>
            {
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

/// The layer of a weight: the words of its name up to the first number.
fn layer_of(name: &str, step: bool) -> String {
    let words: Vec<&str> = name.split('.').collect();
    let is_number = |word: &&str| word.bytes().all(|byte| byte.is_ascii_digit());
    match words.iter().position(is_number) {
        Some(at @ 1..) if step => words.get(at - 1..=at).unwrap_or_default().join("."),
        Some(at) => words.get(..=at).unwrap_or_default().join("."),
        None => String::new(),
    }
}

/// True for what a projection gives, be it normed, or scaled by weights.
fn is_projected(graph: &Graph, id: TensorId) -> bool {
    let computed = |id: &TensorId| graph.producer(*id).is_some();
    match graph.producer(id) {
        Some(Node { op: Op::Linear, .. }) => true,
        Some(node) => {
            let stored = |id: &TensorId| {
                let tensor = graph.tensors().get(id.index());
                tensor.is_some_and(|t| matches!(t.origin, Origin::Weight(_) | Origin::Constant(_)))
            };
            let through = match node.op {
                Op::Reshape | Op::Cast | Op::RmsNorm { .. } | Op::LayerNorm { .. } => true,
                Op::Binary(BinaryOp::Mul | BinaryOp::Add) => node.inputs.iter().any(stored),
                _ => false,
            };
            let first = node.inputs.iter().find(|id| computed(id)).filter(|_| through);
            first.is_some_and(|first| is_projected(graph, *first))
        }
        None => false,
    }
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

/// The recipe with outputs for what is measured.
fn shown(mut recipe: Recipe) -> Result<Recipe> {
    let measured = tapped(&recipe);
    let graphs = recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs);
    for (graph, Tapped { places, readings, .. }) in graphs.zip(&measured) {
        let mut b = GraphBuilder::extend(graph.clone());
        b.scope("tapped");
        let mut peaks = Vec::new();
        let mut squares = Vec::new();
        let places = places.iter().map(|place| place.id);
        let read = readings.iter().flat_map(|r| std::iter::once(r.id).chain(r.outputs.clone()));
        for id in places.chain(read) {
            let count = b.tensor(id)?.elements();
            let size = b.unary(UnaryOp::Abs, id)?;
            let size = b.reshape(size, &[1, count])?;
            peaks.push(b.reduce(ReduceOp::Max, size, 1)?);
        }
        output(&mut b, PEAKS, &peaks)?;
        for Reading { id, rows, width, outputs, .. } in readings {
            let x = b.reshape(*id, &[*rows, *width])?;
            let product = b.mul(x, x)?;
            squares.push(b.reduce(ReduceOp::Sum, product, 0)?);
            for id in std::iter::once(id).chain(outputs) {
                let count = b.tensor(*id)?.elements();
                let size = b.unary(UnaryOp::Abs, *id)?;
                let size = b.reshape(size, &[1, count])?;
                squares.push(b.reduce(ReduceOp::Sum, size, 1)?);
            }
        }
        output(&mut b, SQUARES, &squares)?;
        *graph = b.finish()?;
    }
    Ok(recipe)
}

/// Declares an output of these rows, one behind the other.
fn output(b: &mut GraphBuilder, name: &str, row: &[TensorId]) -> Result<()> {
    let row = match row {
        [] => return Ok(()),
        &[one] => one,
        several => b.concat(several, 1)?,
    };
    b.output(name, row)
}

/// Folds that make all values fit, beside `given`.
fn folds(recipe: &Recipe, graphs: &[Tapped], sums: &Sums, given: &[Fold]) -> Result<Vec<Fold>> {
    let mut folds = given.to_vec();
    let mut before = None;
    loop {
        let folded = fold_all(recipe, &folds)?;
        let mut beyond = None;
        for tapped in graphs {
            let (Some(folded), Some(Sum { largest, .. })) =
                (folded.get(&tapped.name), sums.0.get(&tapped.name))
            else {
                continue;
            };
            let shift = |place: &Place| match folded.restored.get(place.id.index()) {
                Some(false) => folded.shifts.get(place.id.index()).copied().unwrap_or(0),
                _ => 0,
            };
            beyond = tapped.places.iter().zip(largest).find_map(|(place, largest)| {
                let size = largest * 2f32.powi(-shift(place));
                (size > LIMIT).then(|| (tapped, place, size, shift(place)))
            });
            if beyond.is_some() {
                break;
            }
        }
        let Some((tapped, place, size, shift)) = beyond else {
            return Ok(folds.split_off(given.len()));
        };
        let now = Some((&tapped.name, place.id, shift));
        let mut all = recipe.contexts.iter().flat_map(|context| &context.graphs);
        let graph = all.find(|graph| graph.name() == tapped.name);
        let graph = graph.filter(|_| now != before && size.is_finite());
        before = now;
        let part = graph.and_then(|graph| cause(graph, place.id));
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
            LIMIT
        ),
    )
    .hint("make a bundle for the CPU only (`--cpu-only`), which computes in f32")
}
