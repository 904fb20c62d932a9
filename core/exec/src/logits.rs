//! Logits as a graph wrote them.

use half::f16;
use half::slice::HalfFloatSliceExt as _;

/// Logits of the last position, in the graph's own precision.
#[derive(Debug, Clone, Copy)]
pub enum Logits<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Single precision.
    F32(&'a [f32]),
}

impl Logits<'_> {
    /// Number of logits.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy in single precision.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F16(values) => values.to_f32_vec(),
            Self::F32(values) => values.to_vec(),
        }
    }

    /// Copies them in single precision.
    ///
    /// # Panics
    /// Unless `target` has as many values.
    pub fn copy_to_f32(&self, target: &mut [f32]) {
        match self {
            Self::F16(values) => values.convert_to_f32_slice(target),
            Self::F32(values) => target.copy_from_slice(values),
        }
    }

    /// The scores, in single precision: `c · tanh(logits / c)` for a softcap of c (arXiv 2408.00118, section 2), else
    /// the logits.
    pub fn capped(&self, cap: Option<f32>) -> Vec<f32> {
        let mut values = self.to_f32();
        softcap(&mut values, cap);
        values
    }
}

/// Makes scores of logits, see [`Logits::capped`].
pub fn softcap(values: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        values.iter_mut().for_each(|value| *value = cap * (*value / cap).tanh());
    }
}
