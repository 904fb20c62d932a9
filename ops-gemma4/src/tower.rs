//! A tower of the bundle: graphs that differ in how much they take, and the projector behind them.

use qhx_kit::OneOrMany;
use qhx_kit::kernels::Linear;
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result, View};
use serde::Deserialize;

/// The tokens around an image or a clip, and the one that stands at its positions.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct MediaTokens {
    pub token_id: u32,
    pub begin_token_id: u32,
    pub end_token_id: u32,
}

/// The graphs that `plan.params` names under `key`, those with the fewest rows of `input` first; none when the bundle
/// has no such tower.
pub(crate) fn graphs(host: &Host, key: &str, input: &str) -> Result<Option<Vec<(GraphId, usize)>>> {
    let pointer = format!("/plan/params/{key}");
    let Some(names) = host.value::<OneOrMany>(&pointer)? else { return Ok(None) };
    let present = names.present(host, &pointer)?;
    if present.is_empty() {
        return Ok(None);
    }
    let mut found = Vec::new();
    for graph in present {
        let (rows, _) = host.rows_of(graph, host.input(graph, input)?)?;
        found.push((graph, rows));
    }
    found.sort_by_key(|(_, rows)| *rows);
    Ok(Some(found))
}

/// A matrix of f32 in a file of the bundle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    buffer: BufferId,
    inputs: usize,
    outputs: usize,
}

impl Matrix {
    /// Maps the file at `pointer` in the manifest, `outputs` rows of `inputs` values.
    pub fn open(host: &mut Host, pointer: &str, outputs: usize, inputs: usize) -> Result<Self> {
        #[derive(Deserialize)]
        struct Entry {
            path: String,
            dtype: DType,
        }
        let Entry { path, dtype } = host.require(pointer)?;
        if dtype != DType::F32 {
            return Err(Error::manifest(format!(
                "manifest {pointer}/dtype: expected f32, found {dtype}"
            )));
        }
        let buffer = host.artifact(pointer, &path)?;
        let expected = outputs.checked_mul(inputs).and_then(|n| n.checked_mul(size_of::<f32>()));
        if expected != Some(host.len(buffer)) || expected == Some(0) {
            return Err(Error::artifact(format!(
                "{path}: {} bytes, expected {outputs} rows of {inputs} f32 values; the file may be truncated",
                host.len(buffer)
            )));
        }
        Ok(Self { buffer, inputs, outputs })
    }

    /// All values.
    pub fn values<'a>(&self, host: &'a Host) -> &'a [f32] {
        host.f32s(self.buffer)
    }

    /// `W·row` for each row of `source`.
    pub fn project(&self, host: &Host, source: &[f32]) -> Result<Vec<f32>> {
        let rows = source.len() / self.inputs.max(1);
        let mut target = vec![0.0; rows.saturating_mul(self.outputs)];
        Linear::new(self.values(host), None, self.inputs, self.outputs)?.write(
            host,
            source,
            &mut target,
        )?;
        Ok(target)
    }
}

/// RMSNorm without a weight of each row (arXiv 1910.07467).
pub(crate) fn normalise(rows: &mut [f32], width: usize, eps: f32) {
    for row in rows.chunks_exact_mut(width.max(1)) {
        let mean = row.iter().map(|v| v * v).sum::<f32>() / width as f32;
        let factor = 1.0 / (mean + eps).sqrt();
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

/// The first `count` values of what a graph gave, or all where there are fewer.
pub(crate) fn read(host: &Host, view: View, count: usize) -> Result<Vec<f32>> {
    let mut out = vec![0.0; count.min(view.len)];
    view.to_f32(host, 0, &mut out)?;
    Ok(out)
}

/// Checks that the output `y` of a graph has `rows` rows of `width` values, and binds it.
pub(crate) fn rows_out(host: &mut Host, graph: GraphId, rows: usize, width: usize) -> Result<View> {
    let port = host.output(graph, "y")?;
    check(host, graph, port, rows, width)?;
    host.view_for(graph, port)
}

/// Checks that a tensor has `rows` rows of `width` values.
pub(crate) fn check(
    host: &Host,
    graph: GraphId,
    port: Port,
    rows: usize,
    width: usize,
) -> Result<()> {
    if host.rows_of(graph, port)? == (rows, width) {
        return Ok(());
    }
    Err(host.misfit(graph, port, format_args!("expected {rows} rows of {width} values")))
}
