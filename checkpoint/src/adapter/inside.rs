//! Adapters that stand in a checkpoint beside the weights that they change: parametrizations of torch, several for each
//! weight, as in Jina's embedding models, and those of PEFT.

use std::sync::Arc;

use super::merged::Change;
use crate::artifact;
use crate::checkpoint::Checkpoint;
use qhx_base::Result;

/// Ends of names: the weight, and the two factors of what is added to it.
const WEIGHT: &str = ".weight.original";
const FACTORS: [&str; 2] = [".weight.0.lora_A", ".weight.0.lora_B"];

/// Ends of names of PEFT's factors.
const PEFT: [&str; 2] = [".lora_A.default.weight", ".lora_B.default.weight"];

impl Checkpoint {
    /// The same checkpoint with the factors of PEFT in it merged into their weights, `scale` times what they add.
    ///
    /// # Errors
    /// When a factor has no other or no weight, or another shape than these.
    pub(crate) fn with_factors_inside(&self, scale: f32) -> Result<Self> {
        let mut changed = self.clone();
        for down in self.keys().filter(|key| key.ends_with(PEFT[0])) {
            let start = down.strip_suffix(PEFT[0]).unwrap_or(down);
            let (up, weight) = (format!("{start}{}", PEFT[1]), format!("{start}.weight"));
            let shape = |key: &str| self.stored(key).map(|(_, shape)| shape).unwrap_or_default();
            let (a, b, whole) = (shape(down), shape(&up), shape(&weight));
            let rank = a.first().copied().unwrap_or_default();
            let (&[rows, cols], true) =
                (&*whole, a == [rank, whole.get(1).copied().unwrap_or_default()])
            else {
                let what = format!(
                    "tensor {down} has shape {a:?} beside {weight} of {whole:?}, expected a factor of it"
                );
                return Err(
                    artifact(self.path(), what).hint("the adapter is for a model of other sizes")
                );
            };
            if b != [rows, rank] {
                let what = format!("tensor {up} has shape {b:?}, expected {:?}", [rows, rank]);
                return Err(
                    artifact(self.path(), what).hint("the adapter is for a model of other sizes")
                );
            }
            let change = Change {
                left: Arc::from(self.floats(&up, [rows, rank])?),
                right: Arc::from(self.floats(down, [rank, cols])?),
                rank,
                rows,
                cols,
                scale,
                magnitude: None,
            };
            changed.change(weight, |changes, key| changes.of.entry(key).or_default().push(change));
        }
        Ok(changed)
    }

    /// The same checkpoint with the adapter `chosen` of those in it merged into its weights, `scale` times what it
    /// adds; without one, the weights as they are. Adapters are numbered in the order of their tensors' first axis.
    ///
    /// # Errors
    /// When there is no such adapter, or the shapes of its tensors do not fit.
    pub fn with_adapter_inside(&self, chosen: Option<usize>, scale: f32) -> Result<Self> {
        let mut changed = self.clone();
        let fail = |key: &str, what: String| {
            artifact(self.path(), format_args!("tensor {key} {what}"))
                .hint("the adapters are for a model of other sizes")
        };
        for key in self.keys().filter(|key| key.ends_with(WEIGHT)) {
            let start = key.strip_suffix(WEIGHT).unwrap_or(key);
            let [down, up] = FACTORS.map(|end| format!("{start}{end}"));
            let shape = |key: &str| self.stored(key).map(|(_, shape)| shape).unwrap_or_default();
            let (weight, a, b) = (shape(key), shape(&down), shape(&up));
            let (&[rows, cols], &[count, a0, a1], &[others, b0, b1]) = (&*weight, &*a, &*b) else {
                return Err(fail(
                    key,
                    format!("has {a:?} and {b:?} beside it, expected two factors"),
                ));
            };
            self.reads(&down);
            self.reads(&up);
            let Some(chosen) = chosen else { continue };
            // Of a table of embeddings the factors are the other way around.
            let (left, right, rank) = match ([a0, a1, b0, b1], count == others && chosen < count) {
                ([rank, inputs, outputs, also], true)
                    if rank == also && inputs == cols && outputs == rows =>
                {
                    (&up, &down, rank)
                }
                ([inputs, rank, also, outputs], true)
                    if rank == also && inputs == rows && outputs == cols =>
                {
                    (&down, &up, rank)
                }
                _ => {
                    let what = format!(
                        "of {weight:?} has factors of {a:?} and {b:?}, expected those of more than {chosen} adapters"
                    );
                    return Err(fail(key, what));
                }
            };
            let part = |key: &str, size: usize| {
                let all = self.floats(key, [count, size])?;
                let part = all.get(chosen * size..(chosen + 1) * size).unwrap_or_default();
                Ok(Arc::<[f32]>::from(part))
            };
            let change = Change {
                left: part(left, rows * rank)?,
                right: part(right, rank * cols)?,
                rank,
                rows,
                cols,
                scale,
                magnitude: None,
            };
            changed.change(key.to_owned(), |changes, key| {
                changes.of.entry(key).or_default().push(change);
            });
        }
        Ok(changed)
    }
}
