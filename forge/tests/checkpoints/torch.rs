//! Weights in files of `torch.save`, which torch wrote (`tests/oracle/torch_files.py`).

use std::path::Path;

use qhx_checkpoint::Checkpoint;
use qhx_paths::fixture;
use safetensors::SafeTensors;

use crate::{copy, edit_json, refused};

const INDEX: &str = "pytorch_model.bin.index.json";
const FIRST: &str = "pytorch_model-00001-of-00002.bin";

/// The model of `lora/base`, whose weights are in two shards of torch.
fn sharded() -> tempfile::TempDir {
    let dir = copy("torch-files");
    let config = fixture("lora/base/config.json");
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    dir
}

/// The values of every tensor that `stored` has, of a checkpoint.
fn same_values(found: &Checkpoint, stored: &Path) {
    let bytes = std::fs::read(stored).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for (name, view) in tensors.tensors() {
        let len = view.shape().iter().product();
        let mut values = vec![0f32; len];
        let rows = found.rows(name.trim_start_matches("model."), view.shape()).unwrap();
        rows.read_f32(0, &mut values).unwrap();
        let own = Checkpoint::open(stored.parent().unwrap()).unwrap();
        let mut expected = vec![0f32; len];
        let rows = own.rows(name.trim_start_matches("model."), view.shape()).unwrap();
        rows.read_f32(0, &mut expected).unwrap();
        assert_eq!(values, expected, "{name}");
    }
}

#[test]
fn shards_of_torch_are_the_checkpoints_weights() {
    let dir = sharded();
    assert!(Checkpoint::has_weights(dir.path()));
    let found = Checkpoint::open(dir.path()).unwrap();
    same_values(&found, &fixture("lora/base/model.safetensors"));
    // One file has no index.
    std::fs::rename(dir.path().join(FIRST), dir.path().join("pytorch_model.bin")).unwrap();
    let found = Checkpoint::open(dir.path()).unwrap();
    assert!(found.has("embed_tokens.weight") || found.has("lm_head.weight"));
}

#[test]
fn shards_of_torch_that_do_not_fit_say_why() {
    let dir = sharded();
    edit_json(&dir.path().join(INDEX), |index| index["weight_map"]["x"] = FIRST.into());
    refused(dir.path(), &format!("tensor x, which {INDEX} puts there, is missing"));
    let dir = sharded();
    std::fs::remove_file(dir.path().join(FIRST)).unwrap();
    refused(dir.path(), &format!("{FIRST}: missing"));
    let dir = sharded();
    let file = dir.path().join(FIRST);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    refused(dir.path(), &format!("{FIRST}: not a ZIP archive"));
    // What Git LFS leaves in its place.
    std::fs::write(&file, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    refused(dir.path(), "Git LFS pointer");
}
