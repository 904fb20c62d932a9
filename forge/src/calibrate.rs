//! Quality that low-bit weights cost a model, measured on a calibration set: the same model is made for the CPU with
//! f16 weights and with quantized ones, and both read the texts.
//!
//! The sensitivity of a layer is measured with that layer quantized and everything else f16. Sensitive layers are
//! kept in the next higher precision, as few as a target allows; each choice is measured, not added up.
//!
//! A bundle with f16 weights is made once. What differs from it by few weights is its graphs again, which read these
//! from a small file and all others from the file that is there. The graphs take many tokens at once and give the
//! logits of each.

mod joined;
mod text;

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::Model;
use qhx_graph::onnx::{self, Known};
use qhx_graph::progress::Progress;
use tempfile::TempDir;

use crate::forge::forge_known;
pub use crate::measured::Quality;
use crate::names;
use crate::options::ForgeOptions;
use crate::overrides::{Override, quantized};
use crate::plan::plan;
use crate::recipe::{Precision, Recipe, RecipeOptions, Task};
use crate::registry::task;
pub(crate) use joined::{Making, joined, open_joined};
pub use text::read_texts;

/// The file of weights that differ from those of the f16 bundle. No graph has such a name.
const CHANGED: &str = "changed-weights";

/// Tokens that are compared unless another number is given.
pub const DEFAULT_TOKENS: usize = 256;

/// Calibration set and target of a measurement.
#[derive(Debug, Clone)]
pub struct CalibrateOptions {
    /// Texts like those that the model is for.
    pub texts: Vec<String>,
    /// Tokens of them that are compared at most. All logits of the f16 model are kept in memory: four bytes for each
    /// token of the vocabulary.
    pub tokens: usize,
    /// Layers are kept in the next higher precision until the divergence from f16 is at most this, in nats.
    pub target: Option<f64>,
}

/// Result of a calibration.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// Positions that were compared.
    pub tokens: usize,
    /// Perplexity of the f16 model.
    pub perplexity: f64,
    /// The model as each precision makes it.
    pub precisions: Vec<(Precision, Quality)>,
    /// Each layer, and each weight outside of layers such as the head, alone in the bundle's precision.
    pub layers: Vec<(String, Quality)>,
    /// The matrices of one kind in all layers, such as `down_proj`, alone in the bundle's precision.
    pub groups: Vec<(String, Quality)>,
    /// Weights kept in the higher precision to meet the target, the most sensitive first.
    pub kept: Vec<Override>,
    /// The model with these; none without a target.
    pub chosen: Option<Quality>,
    /// False when even all layers in the higher precision miss the target.
    pub reached: bool,
}

/// Reads tokens with a bundle.
pub trait Reader {
    /// Forgets all tokens.
    ///
    /// # Errors
    /// When the model cannot be reset.
    fn reset(&mut self) -> Result<()>;

    /// Takes tokens, and hands the scores of all tokens that may be next to `take`, for each of them in order.
    ///
    /// # Errors
    /// Errors of `take`, and when the model fails or returns scores that are not numbers.
    fn read(&mut self, tokens: &[u32], take: &mut dyn FnMut(Vec<f32>) -> Result<()>) -> Result<()>;
}

impl Reader for Model {
    fn reset(&mut self) -> Result<()> {
        Self::reset(self)
    }

    fn read(
        &mut self,
        mut tokens: &[u32],
        take: &mut dyn FnMut(Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        let op = self.op_mut();
        let cap = op.info().softcap;
        // Graphs that give the logits of all rows; where there are none, one token a step.
        let widths = op.info().verification.widths.clone();
        while !tokens.is_empty() {
            let full = widths.iter().rev().find(|width| **width <= tokens.len());
            let count = full.or(widths.first()).map_or(1, |width| *width.min(&tokens.len()));
            let (step, rest) = tokens.split_at(count.max(1));
            if let [token] = step {
                op.decode(*token)?;
                take(op.logits()?.capped(cap))?;
            } else {
                op.verify(step)?;
                for row in 0..step.len() {
                    op.row_logits(row)?;
                    take(op.logits()?.capped(cap))?;
                }
                op.accept(step.len())?;
            }
            tokens = rest;
        }
        Ok(())
    }
}

/// Opens the bundle of a manifest for the CPU, with its host-op.
pub type OpenBundle<'a> = &'a dyn Fn(&Path) -> Result<Box<dyn Reader>>;

/// Measures a checkpoint in the precisions below f16, and layer by layer in that of `options`, unless that is f16.
/// Bundles are made in a folder beside `options.out`, one at a time, and removed: that with f16 weights takes the most
/// room, and beside it lie the quantized weights of one layer or kind.
///
/// # Errors
/// When a bundle cannot be made or run, the texts have too few tokens, or the options contradict each other.
pub fn calibrate(
    checkpoint: &Checkpoint,
    recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
    options: &ForgeOptions,
    wanted: &CalibrateOptions,
    open: OpenBundle<'_>,
    progress: &mut dyn Progress,
) -> Result<Calibration> {
    check(checkpoint, options, wanted)?;
    let texts = tokens(checkpoint, options, wanted)?;
    let folder = scratch(&options.out)?;
    let out = folder.path().join("bundle");
    let low = options.precision;
    let mut bench = Bench {
        checkpoint,
        recipe: &recipe,
        options,
        out: &out,
        open,
        texts,
        reference: Vec::new(),
        joined: true,
    };
    let (_, planned) = plan(checkpoint, &recipe, &bench.options(low, &[]), false)?;
    let names = quantized(&planned);
    let base = bench.base(!names.is_empty(), progress)?;
    let mut found = Calibration {
        tokens: bench.reference.len(),
        perplexity: base.quality.perplexity,
        precisions: Vec::new(),
        layers: Vec::new(),
        groups: Vec::new(),
        kept: Vec::new(),
        chosen: None,
        reached: true,
    };
    let higher = Precision::ALL.into_iter().take_while(|p| *p != low).last();
    if higher.is_some() {
        let (layers, groups) = units(&names);
        for (parts, list) in [(layers, &mut found.layers), (groups, &mut found.groups)] {
            for part in parts {
                let quality = bench.alone(&part, &base, progress)?;
                list.push((part, quality));
            }
        }
    }
    // Its place is needed for the next ones.
    bench.remove()?;
    for precision in Precision::ALL.into_iter().filter(|p| *p != Precision::Fp16) {
        let own = if precision == low { &options.weights[..] } else { &[] };
        let quality = bench.measure(precision.name(), precision, own, progress)?;
        found.precisions.push((precision, quality));
    }
    let Some(higher) = higher else { return Ok(found) };
    if let Some(target) = wanted.target {
        bench.choose(&mut found, higher, target, progress)?;
    }
    Ok(found)
}

/// A folder beside `out` that is removed again.
pub(crate) fn scratch(out: &Path) -> Result<TempDir> {
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(|e| Error::io(ErrorKind::Io, parent, e))?;
    let mut folder = tempfile::Builder::new();
    let folder = folder.prefix(".qhx-calibrate-").tempdir_in(parent);
    folder.map_err(|e| Error::io(ErrorKind::Io, parent, e))
}

/// The options of a bundle in `out` that reads texts of at most `longest` tokens instead of that of `options`.
pub(crate) fn measured(options: &ForgeOptions, out: &Path, longest: usize) -> ForgeOptions {
    ForgeOptions {
        overwrite: true,
        name: Some("model".to_owned()),
        max_ctx: Some(longest),
        recipe_options: options.recipe_options.clone(),
        ignore_tensors: options.ignore_tensors.clone(),
        ..ForgeOptions::new(out)
    }
}

/// Errors when there is nothing to measure.
fn check(checkpoint: &Checkpoint, options: &ForgeOptions, wanted: &CalibrateOptions) -> Result<()> {
    let fail = |what: &str, hint: &str| Err(Error::new(ErrorKind::Usage, what).hint(hint));
    if task(checkpoint, options.task)? != Task::Generate {
        return fail(
            "calibrating compares the next tokens of a model, and this task gives none",
            "give --task generate, where the model's class has it",
        );
    }
    if checkpoint.seed().is_some() {
        return fail(
            "calibrating a model whose weights are drawn at random says nothing",
            "give a checkpoint",
        );
    }
    match wanted.target {
        Some(target) if !(target.is_finite() && target > 0.0) => {
            fail("a target that is not above 0 cannot be reached", "such as 0.01, in nats")
        }
        Some(_) if options.precision == Precision::Fp16 => {
            fail("a target for f16 weights: nothing is quantized", "give a lower --precision")
        }
        _ => Ok(()),
    }
}

/// The tokens of the texts, as many as are wanted; texts without a second token are left out.
pub(crate) fn tokens(
    checkpoint: &Checkpoint,
    options: &ForgeOptions,
    wanted: &CalibrateOptions,
) -> Result<Vec<Vec<u32>>> {
    let tokenizer = checkpoint.tokenizer()?;
    let longest = options.for_recipe(checkpoint)?.max_ctx;
    let mut left = wanted.tokens;
    let mut texts = Vec::new();
    for text in &wanted.texts {
        let mut tokens = tokenizer.encode(text, true)?;
        // The last one is predicted and not consumed.
        tokens.truncate(left.saturating_add(1).min(longest));
        if tokens.len() > 1 {
            left = left.saturating_sub(tokens.len() - 1);
            texts.push(tokens);
        }
    }
    if texts.is_empty() {
        let what = format!("{} texts, none of which has two tokens", wanted.texts.len());
        return Err(Error::new(ErrorKind::Prompt, what)
            .hint("give some hundred tokens of text like that which the model is for"));
    }
    Ok(texts)
}

/// Layers and weights outside of layers; kinds of matrices in layers.
fn units(names: &[String]) -> (Vec<String>, Vec<String>) {
    let (mut layers, mut groups) = (Vec::new(), Vec::new());
    let add = |list: &mut Vec<String>, part: String| {
        if !list.contains(&part) {
            list.push(part);
        }
    };
    for name in names {
        let name = name.strip_suffix(".weight").unwrap_or(name);
        let layer = name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
        match layer {
            Some((number, _)) => {
                add(&mut layers, format!("layers.{number}"));
                let kind = name.rsplit('.').next().unwrap_or(name);
                add(&mut groups, kind.to_owned());
            }
            None => add(&mut layers, name.to_owned()),
        }
    }
    (layers, groups)
}

/// True for what the head reads: its own weight or the embedding table.
fn is_head(part: &str) -> bool {
    part.ends_with("lm_head") || part.ends_with("embed_tokens")
}

/// Makes bundles and reads texts with them.
struct Bench<'a, R> {
    checkpoint: &'a Checkpoint,
    recipe: &'a R,
    /// Options of the final bundle.
    options: &'a ForgeOptions,
    /// Folder for the bundles.
    out: &'a Path,
    open: OpenBundle<'a>,
    texts: Vec<Vec<u32>>,
    /// Logarithms of the f16 model's probabilities, of each position.
    reference: Vec<Vec<f32>>,
    /// The head is a part of the graphs before it, as long as the host-op takes that.
    joined: bool,
}

/// A bundle with f16 weights.
struct Base {
    manifest: PathBuf,
    /// Weights as its files store them.
    known: Known,
    quality: Quality,
}

impl<R: Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>> Bench<'_, R> {
    fn options(&self, precision: Precision, weights: &[Override]) -> ForgeOptions {
        let longest = self.texts.iter().map(Vec::len).max().unwrap_or(0);
        ForgeOptions {
            precision,
            head: self.options.head.filter(|_| precision != Precision::Fp16),
            weights: weights.to_vec(),
            columns: self.options.columns.clone(),
            activations: self.options.activations,
            ..measured(self.options, self.out, longest)
        }
    }

    /// The options of a bundle of which `part` alone has low-bit weights, or nothing if none is given.
    fn options_of(&self, part: Option<&str>) -> ForgeOptions {
        let low = self.options.precision;
        let rest = Override { part: String::new(), precision: Precision::Fp16 };
        let one = part.map(|part| Override { part: part.to_owned(), precision: low });
        let weights: Vec<_> = std::iter::once(rest).chain(one).collect();
        // The head's own precision would count for f16 weights, too.
        let head = self.options.head.filter(|_| part.is_some_and(is_head));
        ForgeOptions { head, ..self.options(low, &weights) }
    }

    /// The recipe, with the logits of all rows where that can be.
    fn recipe(&self) -> impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe> {
        move |checkpoint: &Checkpoint, options: &RecipeOptions| {
            let recipe = (self.recipe)(checkpoint, options)?;
            Ok(if self.joined { joined(recipe) } else { recipe })
        }
    }

    /// Makes a bundle and opens it.
    fn make(
        &mut self,
        options: &ForgeOptions,
        progress: &dyn Progress,
    ) -> Result<(PathBuf, Known, Box<dyn Reader>)> {
        let (mut manifest, mut known) = (PathBuf::new(), Known::default());
        let make = |recipe: Making<'_>| {
            known = Known::default();
            let mut quiet = Quiet(progress);
            let report = forge_known(self.checkpoint, recipe, options, &mut known, &mut quiet)?;
            manifest.clone_from(&report.manifest);
            Ok(report.manifest)
        };
        let model = open_joined(self.recipe, &mut self.joined, make, self.open)?;
        Ok((manifest, known, model))
    }

    fn remove(&self) -> Result<()> {
        std::fs::remove_dir_all(self.out).map_err(|e| Error::io(ErrorKind::Io, self.out, e))
    }

    /// Makes the bundle with f16 weights that others are compared with. Its graphs are those of the low precision, if
    /// that quantizes any.
    fn base(&mut self, quantized: bool, progress: &mut dyn Progress) -> Result<Base> {
        let what = "f16";
        progress.stage(&format!("calibrate {what}"), 0);
        let options =
            if quantized { self.options_of(None) } else { self.options(Precision::Fp16, &[]) };
        let (manifest, known, model) = self.make(&options, progress)?;
        let quality = self.read(what, model, progress)?;
        Ok(Base { manifest, known, quality })
    }

    /// Measures the model of which `part` alone has low-bit weights: graphs in the place of those of `base`.
    fn alone(&mut self, part: &str, base: &Base, progress: &mut dyn Progress) -> Result<Quality> {
        progress.stage(&format!("calibrate {part}"), 0);
        let options = self.options_of(Some(part));
        let (_, recipe) = plan(self.checkpoint, self.recipe(), &options, false)?;
        let graphs: Vec<_> = recipe.contexts.iter().flat_map(|context| &context.graphs).collect();
        let mut known = base.known.clone();
        let folder = base.manifest.with_file_name(names::ONNX);
        let data = onnx::write_beside(&graphs, &folder, CHANGED, &mut known, &mut Quiet(progress))?;
        let model = (self.open)(&base.manifest)?;
        let quality = self.read(part, model, progress)?;
        if let Some(data) = data {
            std::fs::remove_file(&data).map_err(|e| Error::io(ErrorKind::Io, &data, e))?;
        }
        Ok(quality)
    }

    /// Makes a bundle, measures it and removes it.
    fn measure(
        &mut self,
        what: &str,
        precision: Precision,
        weights: &[Override],
        progress: &mut dyn Progress,
    ) -> Result<Quality> {
        progress.stage(&format!("calibrate {what}"), 0);
        let options = self.options(precision, weights);
        let (_, _, model) = self.make(&options, progress)?;
        let quality = self.read(what, model, progress)?;
        self.remove()?;
        Ok(quality)
    }

    /// Reads the texts; what comes first is what others are compared with.
    fn read(
        &mut self,
        what: &str,
        mut model: Box<dyn Reader>,
        progress: &dyn Progress,
    ) -> Result<Quality> {
        let first = self.reference.is_empty();
        let mut tally = Tally::default();
        for text in &self.texts {
            let against = if first {
                Against::Kept(&mut self.reference)
            } else {
                Against::Known(self.reference.get(tally.count..).unwrap_or_default())
            };
            tally.read(what, &mut *model, text, against, progress)?;
        }
        Ok(tally.quality())
    }

    /// Keeps as few of the most sensitive layers in the precision `higher` as the target allows. The head has an option
    /// of its own.
    fn choose(
        &mut self,
        found: &mut Calibration,
        higher: Precision,
        target: f64,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let low = self.options.precision;
        let mut order: Vec<_> = found.layers.iter().filter(|(part, _)| !is_head(part)).collect();
        order.sort_by(|(_, a), (_, b)| b.divergence.total_cmp(&a.divergence));
        let order: Vec<_> = order
            .into_iter()
            .map(|(part, _)| Override { part: part.clone(), precision: higher })
            .collect();
        let mut measure = |count: usize| {
            let kept = order.get(..count).unwrap_or_default();
            let weights = [&self.options.weights[..], kept].concat();
            self.measure(&format!("with {count} parts {}", higher.name()), low, &weights, progress)
        };
        let whole = found.precisions.iter().find(|(precision, _)| *precision == low);
        let (mut min, mut max) = (0, 0);
        let mut quality = match whole {
            Some((_, quality)) => *quality,
            None => measure(0)?,
        };
        if quality.divergence > target {
            max = order.len();
            quality = measure(max)?;
            found.reached = quality.divergence <= target;
            while found.reached && max - min > 1 {
                let middle = min.midpoint(max);
                let tried = measure(middle)?;
                if tried.divergence <= target {
                    (max, quality) = (middle, tried);
                } else {
                    min = middle;
                }
            }
        }
        found.kept = order.get(..max).unwrap_or_default().to_vec();
        found.chosen = Some(quality);
        Ok(())
    }
}

/// Counterpart of a text's positions.
pub(crate) enum Against<'a> {
    /// Nothing: their logarithms of probabilities are appended.
    Kept(&'a mut Vec<Vec<f32>>),
    /// Logarithms of probabilities, one array a position.
    Known(&'a [Vec<f32>]),
}

/// Sums over positions.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    divergence: f64,
    same: usize,
    surprise: f64,
    /// Positions.
    pub count: usize,
}

impl Tally {
    /// Adds the positions of a text.
    pub fn read(
        &mut self,
        what: &str,
        model: &mut dyn Reader,
        text: &[u32],
        mut against: Against<'_>,
        progress: &dyn Progress,
    ) -> Result<()> {
        model.reset()?;
        let Some((_, read)) = text.split_last() else { return Ok(()) };
        let mut next = text.iter().skip(1).enumerate();
        model.read(read, &mut |mut scores| {
            progress.stop_if_cancelled()?;
            let Some((position, next)) = next.next() else { return Ok(()) };
            log_softmax(&mut scores);
            let likely = scores.get(*next as usize).copied().unwrap_or(f32::NEG_INFINITY);
            if !likely.is_finite() {
                let position = self.count;
                return Err(Error::new(
                    ErrorKind::Runtime,
                    format!("{what}: no finite probability of token {next} at position {position}"),
                )
                .hint("weights of this precision give no numbers here; choose a higher one"));
            }
            self.surprise -= f64::from(likely);
            self.count += 1;
            match &mut against {
                Against::Kept(kept) => {
                    kept.push(scores);
                    self.same += 1;
                }
                Against::Known(known) => {
                    if let Some(expected) = known.get(position) {
                        self.divergence += divergence_of(expected, &scores);
                        self.same += usize::from(likeliest(expected) == likeliest(&scores));
                    }
                }
            }
            Ok(())
        })
    }

    /// Means.
    pub fn quality(&self) -> Quality {
        let count = self.count.max(1) as f64;
        Quality {
            // Rounding may leave a little less than nothing.
            divergence: (self.divergence / count).max(0.0),
            agreement: self.same as f64 / count,
            perplexity: (self.surprise / count).exp(),
        }
    }
}

/// Makes logarithms of probabilities of logits.
fn log_softmax(logits: &mut [f32]) {
    let peak = logits.iter().fold(f32::NEG_INFINITY, |peak, logit| peak.max(*logit));
    let total: f64 = logits.iter().map(|logit| f64::from(logit - peak).exp()).sum();
    let shift = f64::from(peak) + total.ln();
    logits.iter_mut().for_each(|logit| *logit = (f64::from(*logit) - shift) as f32);
}

/// The Kullback-Leibler divergence of `found` from `expected`, both logarithms of probabilities, in nats.
fn divergence_of(expected: &[f32], found: &[f32]) -> f64 {
    let pairs = expected.iter().zip(found).map(|(p, q)| (f64::from(*p), f64::from(*q)));
    pairs.filter(|(p, _)| p.is_finite()).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// The first place of the largest value.
fn likeliest(scores: &[f32]) -> Option<usize> {
    let first = |best: Option<(usize, f32)>, (index, score): (usize, &f32)| match best {
        Some((_, max)) if *score <= max => best,
        _ => Some((index, *score)),
    };
    scores.iter().enumerate().fold(None, first).map(|(index, _)| index)
}

/// Progress of a bundle that is only measured: nothing is reported, and it can be stopped.
pub(crate) struct Quiet<'a>(pub &'a dyn Progress);

impl Progress for Quiet<'_> {
    fn stage(&mut self, _what: &str, _total: u64) {}
    fn advance(&mut self, _done: u64) {}
    fn note(&mut self, _message: &str) {}

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

#[cfg(test)]
mod tests;
