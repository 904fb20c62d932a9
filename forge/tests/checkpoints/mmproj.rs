//! Vision towers in GGUF files of their own: tensors, configurations and processors are those of the checkpoints that
//! `tests/oracle/mmproj.py` made the files of.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use qhx_base::{Error, ErrorKind};
use qhx_checkpoint::Checkpoint;
use qhx_forge::registry::recipe;
use qhx_paths::fixture;
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

use super::{read_json, recipe_options, says};

/// Files of `fixtures/gguf`, under other names, in a folder of their own.
fn files(names: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in names {
        std::fs::copy(fixture("gguf").join(from), dir.path().join(to)).unwrap();
    }
    dir
}

const DECODER: (&str, &str) = ("qwen25vl.gguf", "model.gguf");
const TOWER: (&str, &str) = ("mmproj-qwen25vl.gguf", "mmproj-F16.gguf");

/// Every tensor of `stored`, f16 or bf16, has the very values in the checkpoint.
fn same_tensors(checkpoint: &Checkpoint, stored: &SafeTensors<'_>) {
    for (name, view) in stored.tensors() {
        let values: Vec<f32> = match view.dtype() {
            safetensors::Dtype::F16 => {
                let halves = view.data().as_chunks().0.iter();
                halves.map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect()
            }
            _ => {
                let halves = view.data().as_chunks().0.iter();
                halves.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()
            }
        };
        let mut found = vec![0f32; values.len()];
        let asked = name.trim_start_matches("model.");
        checkpoint.rows(asked, view.shape()).unwrap().read_f32(0, &mut found).unwrap();
        assert!(found == values, "{name}");
        if view.shape().len() == 1 {
            assert!(checkpoint.values(asked, view.shape()).unwrap() == values, "{name}");
        }
    }
}

/// The keys of `own` that `found` has, too, have the same values there.
fn same_keys(found: &Value, own: &Value, aside: &[&str]) {
    let mut same = 0;
    for (key, value) in found.as_object().unwrap() {
        if let Some(own) = own.get(key).filter(|own| !own.is_object() && !aside.contains(&&**key)) {
            assert_eq!(value, own, "{key}");
            same += 1;
        }
    }
    assert!(same > 8, "{same} keys");
}

#[test]
fn a_decoder_and_its_tower_beside_it_are_the_checkpoint() {
    let dir = files(&[DECODER, TOWER]);
    let checkpoint = Checkpoint::open(&dir.path().join(DECODER.1)).unwrap();
    let folder = fixture("qwen25vl-unseen");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    same_tensors(&checkpoint, &SafeTensors::deserialize(&bytes).unwrap());
    // Without a config.json: what the files say, and what published checkpoints have in common.
    let (found, own) = (checkpoint.config(), read_json(&folder.join("config.json")));
    same_keys(found, &own, &["attention_bias", "torch_dtype", "hidden_act"]);
    // Of the tiny model it is another one, which no key of the file says.
    same_keys(&found["vision_config"], &own["vision_config"], &["window_size"]);
    assert_eq!(found["vision_config"]["window_size"], 112);
    assert_eq!(found["rope_scaling"]["mrope_section"], own["rope_scaling"]["mrope_section"]);
    let recipe = recipe(&checkpoint, &recipe_options(128, &[("image-size", "48")])).unwrap();
    let params = &recipe.params["vision"];
    assert_eq!(recipe.family, "qwen2_5_vl");
    // The file has them as f32.
    let mean: [f32; 3] = serde_json::from_value(params["image_mean"].clone()).unwrap();
    assert_eq!(mean, [0.48145466, 0.4578275, 0.40821073]);
    assert_eq!(params["tokens_per_second"], 2.0);
}

/// Which of two classes the decoder belongs to follows from the tower, in files of either converter.
#[test]
fn a_tower_of_qwen2_vl_makes_the_checkpoint_that_class() {
    let folder = fixture("vision/qwen2vl");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let own = read_json(&folder.join("config.json"));
    let mut towers = Vec::new();
    for tower in ["mmproj-qwen2vl.gguf", "mmproj-qwen2vl-old.gguf"] {
        let dir = files(&[("qwen2vl.gguf", "model.gguf"), (tower, "mmproj.gguf")]);
        let checkpoint = Checkpoint::open(&dir.path().join("model.gguf")).unwrap();
        same_tensors(&checkpoint, &SafeTensors::deserialize(&bytes).unwrap());
        assert_eq!(checkpoint.architecture(), Some("Qwen2VLForConditionalGeneration"), "{tower}");
        towers.push(checkpoint.config()["vision_config"].clone());
        let recipe = recipe(&checkpoint, &recipe_options(128, &[("image-size", "48")])).unwrap();
        assert_eq!(recipe.family, "qwen2_vl");
        assert_eq!(recipe.params["vision"]["time_step"], 1.0);
    }
    assert_eq!(towers[0], towers[1]);
    same_keys(&towers[0], &own["vision_config"], &[]);
}

#[test]
fn a_tower_with_deepstack_is_the_checkpoint_s() {
    let dir = files(&[DECODER]);
    let path = fixture("gguf/mmproj-qwen3vl.gguf");
    // The decoder of another model: only the tower is looked at.
    let decoder = Checkpoint::open_gguf(&dir.path().join(DECODER.1), None).unwrap();
    let checkpoint = decoder.with_tower(&path).unwrap();
    let bytes = std::fs::read(path.with_extension("safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    assert!(stored.names().iter().any(|name| name.contains("deepstack_merger_list.1.")));
    same_tensors(&checkpoint, &stored);
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let own = metadata.metadata().as_ref().unwrap()["vision_config"].clone();
    let own: Value = serde_json::from_str(&own).unwrap();
    assert_eq!(checkpoint.config()["vision_config"], own);
}

#[test]
fn towers_that_do_not_fit_are_refused_by_name() {
    let opened = |names: &[(&str, &str)], tower: Option<&str>| -> Result<(), Error> {
        let dir = files(names);
        let path = dir.path().join(DECODER.1);
        let checkpoint = match tower {
            Some(tower) => {
                Checkpoint::open_gguf(&path, None)?.with_tower(&dir.path().join(tower))?
            }
            None => Checkpoint::open(&path)?,
        };
        recipe(&checkpoint, &recipe_options(1024, &[])).map(drop)
    };
    let second = (TOWER.0, "second.mmproj.gguf");
    let other = ("mmproj-qwen3vl.gguf", "mmproj-other.gguf");
    for (names, tower, words) in [
        (&[DECODER][..], None, "no file of its vision tower (mmproj) is beside it"),
        (&[DECODER, TOWER, second], None, "mmproj-F16.gguf, second.mmproj.gguf"),
        (&[DECODER], Some(DECODER.1), "\"qwen2vl\", expected \"clip\""),
        (&[DECODER, other], None, "hidden_act is \"gelu_pytorch_tanh\", expected \"silu\""),
        (&[(TOWER.0, DECODER.1)], None, "\"clip\" are not read"),
    ] {
        says(opened(names, tower), words);
    }
    let folder = fixture("qwen25vl-unseen");
    let tower = fixture("gguf").join(TOWER.0);
    let error = Checkpoint::open(&folder).unwrap().with_tower(&tower).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}

/// Writes the tower with `from` in its bytes replaced, which is as long.
fn changed(dir: &Path, from: &str, to: &str) -> PathBuf {
    let mut bytes = std::fs::read(fixture("gguf").join(TOWER.0)).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    let path = dir.join(TOWER.1);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn damaged_towers_are_refused_and_say_what_is_wrong() {
    let dir = files(&[DECODER]);
    let decoder = Checkpoint::open_gguf(&dir.path().join(DECODER.1), None).unwrap();
    for (from, to, words) in [
        ("qwen2.5vl_merger", "qwen9.9vl_merger", "a tower of the kind \"qwen9.9vl_merger\""),
        ("v.blk.0.attn_k.weight", "v.blk.0.attn_x.weight", "expected attn_q, attn_k, attn_v"),
        ("v.blk.1.ln1.weight", "v.blk.0.ln1.weight", "is there twice"),
        ("clip.vision.block_count", "clip.vision.block_c0unt", "no number clip.vision.block_count"),
    ] {
        let path = changed(dir.path(), from, to);
        says(decoder.clone().with_tower(&path), words);
    }
    let path = dir.path().join(TOWER.1);
    let whole = std::fs::read(fixture("gguf").join(TOWER.0)).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    says(decoder.with_tower(&path), "not a whole GGUF file");
}
