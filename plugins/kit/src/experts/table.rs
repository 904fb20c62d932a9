//! The weights of all experts: a mapped file of int8 matrices, and one scale for each of their rows.
//!
//! `weights`: for each layer, for each expert: gate, up, down, without gaps, row-major as the graph's
//! inputs have them, `[outputs, inputs]`: gate and up `[width, hidden]`, down `[hidden, width]`. Where the graphs have
//! no input `gate`, there is none.
//! `scales`: f32 in the same order, one for each row. A weight is its integer times the row's scale.
//! `offsets`, where the matrices have biases: f32 in the order of the scales.
//! `bias`, where there is one: f32 `[layers, experts]`, what is added to the probabilities that choose an expert.
//! Layers are those with experts alone.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Deserialize;

use crate::kernels::f32_to_f16;
use qhx_op::{BufferId, DType, Error, Host, Result};

/// Pointer to the names of the files in the manifest.
const POINTER: &str = "/artifacts/experts";

/// `artifacts.experts`. The defaults are the names of the published bundles.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Files {
    weights: String,
    scales: String,
    bias: Option<String>,
    offsets: Option<String>,
}

impl Default for Files {
    fn default() -> Self {
        let [weights, scales] = ["experts_i8.bin", "experts_scale.f32"].map(str::to_owned);
        Self { weights, scales, bias: None, offsets: None }
    }
}

/// The matrices of a gated expert, in the order in which they lie in the files.
const MATRICES: [&str; 3] = ["gate", "up", "down"];

/// Sizes of the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub layers: usize,
    pub experts: usize,
    pub hidden: usize,
    /// Width of an expert's inner row.
    pub width: usize,
    /// Experts have a gate.
    pub gated: bool,
}

impl Sizes {
    /// The matrices of an expert, in the order in which they lie in the files.
    pub fn matrices(&self) -> &'static [&'static str] {
        if self.gated { &MATRICES } else { &MATRICES[1..] }
    }

    /// Rows and columns of a matrix.
    pub fn shape(&self, matrix: usize) -> [usize; 2] {
        if matrix + 1 == self.matrices().len() {
            [self.hidden, self.width]
        } else {
            [self.width, self.hidden]
        }
    }

    fn rows(&self) -> usize {
        (self.matrices().len() - 1) * self.width + self.hidden
    }

    /// Values of an expert, and rows; and of all. Errors when they do not fit.
    fn totals(&self) -> Result<(usize, usize)> {
        let count = self.layers.checked_mul(self.experts);
        let values = count
            .and_then(|n| n.checked_mul(self.matrices().len()))
            .and_then(|n| n.checked_mul(self.hidden.checked_mul(self.width)?));
        let rows = count.and_then(|n| n.checked_mul(self.rows()));
        values.zip(rows).ok_or_else(|| {
            Error::manifest(format!("manifest {POINTER}: {self:?} are more values than fit"))
        })
    }
}

/// The mapped files.
#[derive(Debug)]
pub(super) struct Table {
    pub sizes: Sizes,
    weights: BufferId,
    scales: BufferId,
    bias: Option<BufferId>,
    /// Biases of the matrices, in the order of the scales.
    offsets: Option<BufferId>,
    /// For each layer, for each expert, whether it was asked for; empty where none is.
    asked: Vec<AtomicBool>,
}

impl Table {
    /// Maps the files and checks their lengths.
    /// With `read_ahead` experts are asked for as a whole before the first of their bytes is read.
    pub fn open(host: &mut Host, sizes: Sizes, read_ahead: bool) -> Result<Self> {
        let files: Files = host.value(POINTER)?.unwrap_or_default();
        let (values, rows) = sizes.totals()?;
        let weights = host.artifact(&format!("{POINTER}/weights"), &files.weights)?;
        let scales = host.artifact(&format!("{POINTER}/scales"), &files.scales)?;
        let Sizes { layers, experts, hidden, width, .. } = sizes;
        let what =
            format!("{layers} layers of {experts} experts of width {width}, hidden {hidden}");
        check(host, weights, &files.weights, Some(values), &format!("{what}: int8 values"))?;
        check(host, scales, &files.scales, rows.checked_mul(4), &format!("{what}: f32 scales"))?;
        check_finite(host, scales, &files.scales, "scale")?;
        let bias = match &files.bias {
            None => None,
            Some(path) => {
                let bias = host.artifact(&format!("{POINTER}/bias"), path)?;
                let bytes = layers.checked_mul(experts).and_then(|n| n.checked_mul(4));
                check(host, bias, path, bytes, &format!("{what}: an f32 bias for each expert"))?;
                check_finite(host, bias, path, "bias")?;
                Some(bias)
            }
        };
        let offsets = match &files.offsets {
            None => None,
            Some(path) => {
                let offsets = host.artifact(&format!("{POINTER}/offsets"), path)?;
                let what = format!("{what}: an f32 bias for each row");
                check(host, offsets, path, rows.checked_mul(4), &what)?;
                check_finite(host, offsets, path, "bias")?;
                Some(offsets)
            }
        };
        let count = if read_ahead { layers * experts } else { 0 };
        Ok(Self {
            sizes,
            weights,
            scales,
            bias,
            offsets,
            asked: (0..count).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// Has the system read experts of a layer from the disk, those that were never asked for. Nothing happens for a
    /// layer that does not exist.
    pub fn ask(&self, host: &Host, layer: usize, experts: impl Iterator<Item = usize>) {
        for expert in experts {
            let asked = self.asked.get(layer * self.sizes.experts + expert);
            if asked.is_some_and(|asked| !asked.swap(true, Ordering::Relaxed)) {
                let first = self.weights(layer, expert, 0).start;
                let last = self.weights(layer, expert, self.sizes.matrices().len() - 1).end;
                host.read_ahead(self.weights, first..last);
            }
        }
    }

    /// Bias added to the probabilities of a layer's experts; `None` if the table has no biases.
    pub fn bias<'a>(&self, host: &'a Host, layer: usize) -> Option<&'a [f32]> {
        let first = layer * self.sizes.experts;
        host.f32s(self.bias?).get(first..first + self.sizes.experts)
    }

    /// The mapped weights and scales.
    pub fn buffers(&self) -> [BufferId; 2] {
        [self.weights, self.scales]
    }

    /// Bytes of a matrix in the weights. The indices are within the sizes.
    pub fn weights(&self, layer: usize, expert: usize, matrix: usize) -> Range<usize> {
        let matrix_len = self.sizes.hidden * self.sizes.width;
        let expert = layer * self.sizes.experts + expert;
        let start = (expert * self.sizes.matrices().len() + matrix) * matrix_len;
        start..start + matrix_len
    }

    /// Indices of a matrix's scales.
    pub fn scales(&self, layer: usize, expert: usize, matrix: usize) -> Range<usize> {
        let first = (layer * self.sizes.experts + expert) * self.sizes.rows();
        let start = first + matrix * self.sizes.width;
        start..start + self.sizes.shape(matrix)[0]
    }

    /// All scales divided by `step` in the element type of a graph's inputs, so that they can be bound
    /// where they lie.
    pub fn scaled(&self, host: &mut Host, step: f32, dtype: DType) -> Result<BufferId> {
        divided(host, self.scales, step, dtype)
    }

    /// All biases of the matrices in the element type of a graph's inputs, in the order of the scales; none where they
    /// have no biases.
    pub fn offsets(&self, host: &mut Host, dtype: DType) -> Result<Option<BufferId>> {
        self.offsets.map(|offsets| divided(host, offsets, 1.0, dtype)).transpose()
    }

    /// True where the matrices have biases.
    pub fn has_offsets(&self) -> bool {
        self.offsets.is_some()
    }
}

/// The f32 values of a buffer divided by `step`, in another buffer.
fn divided(host: &mut Host, values: BufferId, step: f32, dtype: DType) -> Result<BufferId> {
    let values: Vec<f32> = host.f32s(values).iter().map(|value| value / step).collect();
    let divided = host.allocate(values.len() * dtype.size())?;
    match dtype {
        DType::F16 => f32_to_f16(&values, host.f16s_mut(divided)),
        _ => host.f32s_mut(divided).copy_from_slice(&values),
    }
    Ok(divided)
}

/// Checks that all values of a file are finite numbers.
fn check_finite(host: &Host, buffer: BufferId, path: &str, what: &str) -> Result<()> {
    let bad = host.f32s(buffer).iter().enumerate().find(|(_, value)| !value.is_finite());
    bad.map_or(Ok(()), |(index, value)| {
        Err(Error::artifact(format!(
            "{path}: {what} {index} is {value}, expected a finite number; the file is damaged"
        )))
    })
}

fn check(
    host: &Host,
    buffer: BufferId,
    path: &str,
    expected: Option<usize>,
    what: &str,
) -> Result<()> {
    let found = host.len(buffer);
    if expected == Some(found) {
        return Ok(());
    }
    let expected = expected.map_or("more than fit".to_owned(), |bytes| bytes.to_string());
    let hint = if expected.parse().is_ok_and(|expected: usize| found < expected) {
        "the file may be truncated; download or copy it again"
    } else {
        "the file may belong to another bundle"
    };
    Err(Error::artifact(format!("{path}: {found} bytes, expected {expected} ({what}); {hint}")))
}
