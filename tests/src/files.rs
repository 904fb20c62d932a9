//! Files of tests: JSON, tensors, arrays of a dump.

use std::fs;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::de::DeserializeOwned;
use serde_json::Value;

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Reads a file of JSON.
pub fn json<T: DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&read(path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Changes a file of JSON.
pub fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = json(path);
    change(&mut value);
    fs::write(path, value.to_string()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// Values of f32, little-endian.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Shape and values of a tensor of f32 in a safetensors file.
pub fn tensor(file: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = read(file);
    let tensors = SafeTensors::deserialize(&bytes);
    let tensors = tensors.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    (tensor.shape().to_vec(), floats(tensor.data()))
}

/// A tensor of a safetensors file: name, element type, shape and bytes.
pub type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// Changes the tensors of a safetensors file.
pub fn edit_tensors(file: &Path, change: impl FnOnce(&mut Vec<Stored>)) {
    let fail = |e: safetensors::SafeTensorError| -> ! { panic!("{}: {e}", file.display()) };
    let bytes = read(file);
    let tensors = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| fail(e));
    let stored = |(name, view): (String, TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut tensors: Vec<Stored> = tensors.tensors().into_iter().map(stored).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap_or_else(|e| fail(e)))
    });
    let bytes = safetensors::serialize(views, None).unwrap_or_else(|e| fail(e));
    fs::write(file, bytes).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
}

/// Array number `index` of a name in the folder of a dump, if there are as many.
pub fn dumped(folder: &Path, name: &str, index: usize) -> Option<Vec<f32>> {
    let file = if index == 0 { format!("{name}.npy") } else { format!("{name}-{}.npy", index + 1) };
    let bytes = fs::read(folder.join(file)).ok()?;
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    Some(floats(&bytes[header..]))
}
