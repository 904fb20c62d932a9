//! Results of measuring a model, as values: they go into options, and from there into weights and the manifest.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::{Storage, Weight, weighted};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::Serialize;
use serde_json::{Value, json};

use crate::recipe::Recipe;

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

/// For each input of a weight, by its name, the sum of the squares of what the weight was multiplied with.
pub type Columns = BTreeMap<String, Arc<[f32]>>;

/// Writes columns as safetensors.
///
/// # Errors
/// When the file cannot be written.
pub fn write_columns(path: &Path, columns: &Columns) -> Result<()> {
    let views = columns.iter().map(|(name, values)| {
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
    let floats = |(name, view): (&str, TensorView<'_>)| {
        let (quads, rest) = view.data().as_chunks();
        match (view.dtype(), rest) {
            (Dtype::F32, []) => {
                Ok((name.to_owned(), quads.iter().map(|quad| f32::from_le_bytes(*quad)).collect()))
            }
            _ => Err(damaged(name)),
        }
    };
    tensors.iter().map(floats).collect()
}

/// Gives the inputs of a recipe's weights their worth where values are quantized.
pub(crate) fn weigh(recipe: &mut Recipe, columns: &Columns) {
    for graph in recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs) {
        graph.store(|weight| {
            let source = weight.source();
            let quantizes = matches!(weight.storage(), Storage::Blocks(_));
            let name = source.name();
            let worth = columns.get(name.strip_suffix(".weight").unwrap_or(name))?;
            let fits = quantizes && worth.len() == weight.cols() && source.block_form().is_none();
            let weighted = || weighted(Arc::clone(source), Arc::clone(worth));
            fits.then(|| Weight::new(weighted(), weight.storage()))
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
