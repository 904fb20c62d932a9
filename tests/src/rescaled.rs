//! Tiny models some of whose weights are larger or smaller by powers of two, exactly so in bf16.

use half::bf16;
use safetensors::Dtype;

use crate::{files, plugin_files, tiny};

/// A copy of a tiny model with each tensor times 2 to the power that `power` gives for its name, if any: some tensor
/// has one, which may be 0.
pub fn rescaled(tiny: &str, power: impl Fn(&str) -> Option<i32>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    plugin_files::copy_folder(&tiny::fixture(tiny), folder.path());
    files::edit_tensors(&folder.path().join("model.safetensors"), |tensors| {
        let mut changed = 0;
        for (name, dtype, _, data) in tensors {
            let Some(power) = power(name) else { continue };
            assert_eq!(*dtype, Dtype::BF16, "{name}");
            changed += 1;
            for bytes in data.as_chunks_mut().0 {
                let value = bf16::from_le_bytes(*bytes).to_f32() * 2f32.powi(power);
                *bytes = bf16::from_f32(value).to_le_bytes();
            }
        }
        assert!(changed > 0, "{tiny}: no tensor has such a name");
    });
    folder
}
