//! A dense layer in f32 on the host: the embedding of patches, a projection of features.

#![expect(unsafe_code, reason = "matrixmultiply takes pointers and strides")]

use super::parallel_chunks;
use qhx_op::{Error, Host, Result};

/// Rows that one of several threads multiplies at a time: few enough that fast and slow cores finish together. Weights
/// are packed again for each such part, so that one thread alone takes all rows at once.
const ROWS: usize = 256;

/// A dense layer: `outputs` rows of `inputs` weights, as PyTorch stores them, and perhaps a bias.
#[derive(Clone, Copy)]
pub struct Linear<'a> {
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    inputs: usize,
    outputs: usize,
}

impl std::fmt::Debug for Linear<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Linear")
            .field("inputs", &self.inputs)
            .field("outputs", &self.outputs)
            .field("bias", &self.bias.is_some())
            .finish()
    }
}

impl<'a> Linear<'a> {
    /// `weight` has `outputs · inputs` numbers, `bias` `outputs`.
    ///
    /// # Errors
    /// When they have not.
    pub fn new(
        weight: &'a [f32],
        bias: Option<&'a [f32]>,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self> {
        let expected = outputs.checked_mul(inputs).filter(|&count| count > 0);
        if expected != Some(weight.len()) {
            return Err(Error::artifact(format!(
                "weights of a dense layer: {} numbers, expected {outputs} rows of {inputs}",
                weight.len()
            )));
        }
        if let Some(bias) = bias
            && bias.len() != outputs
        {
            return Err(Error::artifact(format!(
                "bias of a dense layer: {} numbers, expected {outputs}",
                bias.len()
            )));
        }
        Ok(Self { weight, bias, inputs, outputs })
    }

    /// Writes `weight · row + bias` for each row of `source` into the same row of `target`, on the host's threads.
    ///
    /// # Errors
    /// Unless `source` is rows of `inputs` numbers, and `target` as many of `outputs`.
    pub fn write(&self, host: &Host, source: &[f32], target: &mut [f32]) -> Result<()> {
        self.run(host, source, target, 0.0)
    }

    /// Same as [`Linear::write`], but adds to the values of `target`, such as learned positions.
    ///
    /// # Errors
    /// Errors of [`Linear::write`].
    pub fn add(&self, host: &Host, source: &[f32], target: &mut [f32]) -> Result<()> {
        self.run(host, source, target, 1.0)
    }

    fn run(&self, host: &Host, source: &[f32], target: &mut [f32], keep: f32) -> Result<()> {
        let Self { inputs, outputs, .. } = *self;
        let rows = source.len() / inputs;
        if rows * inputs != source.len() || rows.checked_mul(outputs) != Some(target.len()) {
            return Err(Error::prompt(format!(
                "a dense layer from {inputs} to {outputs} numbers: found {} numbers and room for \
                 {}, expected whole rows, as many of each",
                source.len(),
                target.len()
            )));
        }
        let part = match host.threads() {
            0 | 1 => rows.max(1),
            threads => rows.div_ceil(threads).clamp(1, ROWS),
        };
        parallel_chunks(host, target, part * outputs, |index, target| {
            let source = &source[index * part * inputs..][..target.len() / outputs * inputs];
            self.multiply(source, target, keep);
        })
    }

    /// Whole rows of both.
    fn multiply(&self, source: &[f32], target: &mut [f32], keep: f32) {
        let Self { weight, bias, inputs, outputs } = *self;
        let mut keep = keep;
        if let Some(bias) = bias {
            for row in target.chunks_exact_mut(outputs) {
                for (to, bias) in row.iter_mut().zip(bias) {
                    *to = if keep == 0.0 { *bias } else { *to + bias };
                }
            }
            keep = 1.0;
        }
        let rows = target.len() / outputs;
        debug_assert_eq!((source.len(), target.len()), (rows * inputs, rows * outputs));
        // SAFETY: `source` is `rows` rows of `inputs` elements, `target` `rows` rows of `outputs`, and
        // `weight` `outputs` rows of `inputs`, which is read transposed; so every element that the
        // sizes and strides name lies in its slice. `target` is borrowed mutably, and aliases neither.
        unsafe {
            matrixmultiply::sgemm(
                rows,
                inputs,
                outputs,
                1.0,
                source.as_ptr(),
                inputs as isize,
                1,
                weight.as_ptr(),
                1,
                inputs as isize,
                keep,
                target.as_mut_ptr(),
                outputs as isize,
                1,
            );
        }
    }
}
