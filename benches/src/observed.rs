//! Keeps what graphs wrote: rows of tokens in their order, states as they are now.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use half::f16;
use qhx_exec::workspace::Tap;
use qhx_types::{DType, Port, TensorInfo};

/// Values of a tensor.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values {
    /// Values that belong together: those of a token, or all of a state.
    pub width: usize,
    /// All of them.
    pub values: Vec<f32>,
}

/// Written values by tensor name.
pub type Written = BTreeMap<String, Values>;

/// Outputs that the graphs of a model wrote.
#[derive(Debug, Clone, Default)]
pub struct Observed(Arc<Mutex<Written>>);

impl Observed {
    /// Keeps the outputs of each execution.
    pub fn tap(&self) -> Tap {
        let written = Arc::clone(&self.0);
        Arc::new(move |executed| {
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            let info = executed.info();
            for (index, tensor) in info.outputs.iter().enumerate() {
                let bytes = executed.bytes(Port::Output(index));
                if let Some(values) = bytes.and_then(|bytes| floats(tensor.dtype, bytes)) {
                    keep(&mut written, &info.name, tensor, values);
                }
            }
        })
    }

    /// Values written since the last call.
    pub fn take(&self) -> Written {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Values of f16 or f32; none of other types.
fn floats(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    Some(match dtype {
        DType::F16 => bytes.as_chunks().0.iter().map(|v| f16::from_le_bytes(*v).to_f32()).collect(),
        DType::F32 => bytes.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect(),
        _ => return None,
    })
}

/// `y` has the rows of tokens along its first axis, `new_*` along the second. Both go below the rows that are there.
/// Anything else takes the place of what was there. The rows of each part of a model, `decode_p2` or `prefill128_p2`,
/// are kept apart.
fn keep(written: &mut Written, graph: &str, tensor: &TensorInfo, values: Vec<f32>) {
    let part = graph.rsplit_once("_p").map(|(_, part)| part);
    let part = part.filter(|part| part.bytes().all(|b| b.is_ascii_digit()));
    let name = match part {
        Some(part) if tensor.name == "y" => format!("y_p{part}"),
        _ => tensor.name.clone(),
    };
    let kept = written.entry(name).or_default();
    match tensor.shape[..] {
        [_, hidden] if tensor.name == "y" => {
            kept.width = hidden;
            kept.values.extend(values);
        }
        [heads, rows, width] if tensor.name.starts_with("new_") => {
            kept.width = heads * width;
            for row in 0..rows {
                for head in 0..heads {
                    let first = (head * rows + row) * width;
                    kept.values.extend_from_slice(&values[first..first + width]);
                }
            }
        }
        _ => *kept = Values { width: values.len(), values },
    }
}
