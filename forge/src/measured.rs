//! Results of measuring a model, as values: they go into options, and from there into weights and the manifest.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::{Range, Storage, Weight, weighted};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::Serialize;
use serde_json::{Value, json};

use crate::qnn::integers::multiplies;
use crate::recipe::{Activations, Recipe};

/// The largest number of f16.
pub const F16_MAX: f32 = 65_504.0;

/// The largest magnitude of one kind of values in a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peak {
    /// `layers.3` of a decoder, `visual.blocks.3` of another graph; empty outside of layers.
    pub layer: String,
    /// `residual`, `product` (of gate and up), `score` or the name of the projection whose outputs they are, such as
    /// `up_proj`.
    pub kind: String,
    /// Over all that was read.
    pub largest: f32,
}

impl Peak {
    /// Factor by which it could grow and still fit in f16.
    pub fn headroom(&self) -> f32 {
        F16_MAX / self.largest
    }
}

/// Inputs of a weight, as they were measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// For each, the sum of the squares of what the weight was multiplied with.
    pub squares: Arc<[f32]>,
    /// Range of inputs and results, where 16-bit integers can stand for them.
    pub range: Option<Range>,
}

/// Inputs of weights by the weights' names.
pub type Columns = BTreeMap<String, Inputs>;

/// Ends the name of a range.
const RANGE: &str = ":range";

/// Writes columns as safetensors.
///
/// # Errors
/// When the file cannot be written.
pub fn write_columns(path: &Path, columns: &Columns) -> Result<()> {
    let ranges = columns.iter().filter_map(|(name, inputs)| {
        let range = inputs.range?;
        Some((format!("{name}{RANGE}"), [range.inputs, range.outputs]))
    });
    let ranges: BTreeMap<_, _> = ranges.collect();
    let squares = columns.iter().map(|(name, inputs)| (name, &*inputs.squares));
    let all = squares.chain(ranges.iter().map(|(name, range)| (name, &range[..])));
    let views = all.map(|(name, values)| {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        TensorView::new(Dtype::F32, vec![values.len()], bytes).map(|view| (name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>();
    let written = views.and_then(|views| safetensors::serialize_to_file(views, None, path));
    written.map_err(|e| Error::caused(ErrorKind::Io, path.display().to_string(), e))
}

/// Reads what [`write_columns`] wrote.
///
/// # Errors
/// When the file cannot be read, or holds something else.
pub fn read_columns(path: &Path) -> Result<Columns> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(ErrorKind::Io, path, e))?;
    let damaged = |what: &str| {
        let what = format!("{}: {what}, expected sums for the inputs of weights", path.display());
        Error::new(ErrorKind::Artifact, what)
    };
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| damaged(&e.to_string()))?;
    let mut columns = Columns::new();
    let mut ranges = Vec::new();
    for (name, view) in tensors.iter() {
        let (quads, rest) = view.data().as_chunks();
        let values = quads.iter().map(|quad| f32::from_le_bytes(*quad));
        match (view.dtype(), rest, name.strip_suffix(RANGE)) {
            (Dtype::F32, [], None) => {
                let inputs = Inputs { squares: values.collect(), range: None };
                columns.insert(name.to_owned(), inputs);
            }
            (Dtype::F32, [], Some(of)) => ranges.push((of, values.collect::<Vec<f32>>())),
            _ => return Err(damaged(name)),
        }
    }
    for (name, range) in ranges {
        match (columns.get_mut(name), &range[..]) {
            (Some(to), &[inputs, outputs]) => to.range = Some(Range { inputs, outputs }),
            _ => return Err(damaged(name)),
        }
    }
    Ok(columns)
}

/// Gives a recipe's weights what was measured: inputs have their worth where values are quantized, and 4-bit weights a
/// range where 16-bit integers are asked for. Without any measurement, as for estimates, all have the same range.
pub(crate) fn weigh(recipe: &mut Recipe, columns: &Columns, activations: Activations) {
    let assumed = Range { inputs: 8.0, outputs: 8.0 };
    let assumed = Some(assumed).filter(|_| columns.is_empty());
    for graph in recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs) {
        graph.store(|weight| {
            let source = weight.source();
            let quantizes = matches!(weight.storage(), Storage::Blocks(_));
            let name = source.name();
            let found = columns.get(name.strip_suffix(".weight").unwrap_or(name));
            let fits = |worth: &Arc<[f32]>| {
                quantizes && worth.len() == weight.cols() && source.block_form().is_none()
            };
            let worth = found.map(|inputs| &inputs.squares).filter(|worth| fits(worth));
            let range = found.map_or(assumed, |inputs| inputs.range);
            let range = range.filter(|_| activations == Activations::Int16 && multiplies(weight));
            if worth.is_none() && range.is_none() {
                return None;
            }
            let source = match worth {
                Some(worth) => weighted(Arc::clone(source), Arc::clone(worth)),
                None => Arc::clone(source),
            };
            let weight = Weight::new(source, weight.storage());
            Some(match range {
                Some(range) => weight.with_range(range),
                None => weight,
            })
        });
    }
}

/// Distance of a model's next-token predictions from those of the same model in f16.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quality {
    /// Mean Kullback-Leibler divergence from f16, in nats.
    #[serde(rename = "kl")]
    pub divergence: f64,
    /// Share of positions at which the likeliest token is the same.
    pub agreement: f64,
    /// Exponential of the mean negative log likelihood of the texts' own tokens.
    pub perplexity: f64,
}

/// Quality of a bundle, and the headroom of its values in f16.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Receipt {
    /// Positions that were compared.
    pub tokens: usize,
    /// For each kind of text: distance from f16 weights.
    pub texts: Vec<TextQuality>,
    /// Bytes of the graphs' weights as a device reads them, each weight once.
    pub weight_bytes: u64,
    /// The value that comes nearest to the end of f16.
    pub nearest: Option<Peak>,
}

/// Distance of the predictions on a text from those of f16 weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextQuality {
    /// Kind of the text.
    pub kind: String,
    /// Perplexity with f16 weights.
    pub f16_perplexity: f64,
    /// The same with the bundle's weights, and their distance.
    #[serde(flatten)]
    pub quality: Quality,
}

impl Receipt {
    /// Mean divergence of the texts, which count alike.
    pub fn divergence(&self) -> f64 {
        let sum: f64 = self.texts.iter().map(|text| text.quality.divergence).sum();
        sum / self.texts.len().max(1) as f64
    }

    /// As one JSON value, for the manifest.
    pub fn to_json(&self) -> Value {
        let mut receipt = json!({
            "tokens": self.tokens,
            "weight_bytes": self.weight_bytes,
            "kl": self.divergence(),
            "texts": self.texts,
        });
        if let Some(peak) = &self.nearest {
            receipt["headroom"] = json!({
                "factor": peak.headroom(), "layer": peak.layer, "kind": peak.kind,
            });
        }
        receipt
    }
}
