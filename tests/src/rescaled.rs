//! Tiny models some of whose weights are larger or smaller by powers of two, exactly so in bf16.

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::{plugin_files, tiny};

/// A copy of a tiny model with each tensor times 2 to the power that `power` gives for its name, if any: some tensor
/// has one, which may be 0.
pub fn rescaled(tiny: &str, power: impl Fn(&str) -> Option<i32>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    plugin_files::copy_folder(&tiny::fixture(tiny), folder.path());
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{e}"));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{e}"));
    let mut changed = 0;
    let scaled = file.tensors().into_iter().map(|(name, tensor)| {
        let power = power(&name);
        let data: Vec<u8> = match power {
            None => tensor.data().to_vec(),
            Some(power) => {
                assert_eq!(tensor.dtype(), Dtype::BF16, "{name}");
                changed += 1;
                let scale = |b: &[u8]| {
                    let value = bf16::from_le_bytes([b[0], b[1]]).to_f32() * 2f32.powi(power);
                    bf16::from_f32(value).to_le_bytes()
                };
                tensor.data().chunks_exact(2).flat_map(scale).collect()
            }
        };
        (name, tensor.dtype(), tensor.shape().to_vec(), data)
    });
    let scaled: Vec<_> = scaled.collect();
    assert!(changed > 0, "{tiny}: no tensor has such a name");
    let views = scaled.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap_or_else(|e| panic!("{e}")))
    });
    let bytes = safetensors::serialize(views, None).unwrap_or_else(|e| panic!("{e}"));
    std::fs::write(path, bytes).unwrap_or_else(|e| panic!("{e}"));
    folder
}
