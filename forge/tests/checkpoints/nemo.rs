//! Checkpoints of NeMo: what archives and configurations cannot be is named.

use std::path::Path;

use qhx_checkpoint::Checkpoint;
use qhx_forge::registry::recipe;
use serde_json::{Value, json};

use crate::common::{copy, copy_all, edit_json, recipe_options, says};

const ARCHIVE: &str = "canary-flash-tiny";
const SPEECH_LM: &str = "canary-qwen-tiny";

fn made(folder: &Path) -> qhx_base::Result<()> {
    let checkpoint = Checkpoint::open(folder)?;
    recipe(&checkpoint, &recipe_options(60, &[("windows", "1")])).map(drop)
}

/// Puts another text in the place of `from`, where it stands first, with spaces behind it.
fn put(bytes: &mut [u8], from: &str, to: &str) {
    let to = format!("{to:width$}", width = from.len());
    assert_eq!(from.len(), to.len(), "{to}");
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
}

/// A file alone, and the folder that holds it, are the same.
#[test]
fn an_archive_is_a_checkpoint() {
    let dir = copy(ARCHIVE);
    made(dir.path()).unwrap();
    let file = dir.path().join(format!("{ARCHIVE}.nemo"));
    made(&file).unwrap();
    let [folder, file] = [dir.path(), &file].map(|path| Checkpoint::open(path).unwrap());
    assert_eq!(folder.config(), file.config());
    assert_eq!(file.config()["languages"], json!(["en", "de", "es", "fr"]));
    assert_eq!(file.config()["encoder_projection"], json!(true));
}

#[test]
fn archives_that_are_damaged_or_of_other_models_are_refused() {
    let change = |change: &dyn Fn(&mut Vec<u8>)| {
        let dir = copy(ARCHIVE);
        let file = dir.path().join(format!("{ARCHIVE}.nemo"));
        let mut bytes = std::fs::read(&file).unwrap();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        made(dir.path())
    };
    for (from, to, words) in [
        (
            "prompt_format: canary2",
            "prompt_format: canary1",
            "prompt_format is \"canary1\", expected \"canary2\"",
        ),
        (
            "models.EncDecMultiTaskModel",
            "models.EncDecCTCModelBPE",
            "expected EncDecMultiTaskModel",
        ),
        (
            "subsampling: dw_striding",
            "subsampling: dw_strided",
            "encoder.subsampling is \"dw_strided\"",
        ),
        ("self_attention_model: rel_pos", "self_attention_model: abs_pos", "expected \"rel_pos\""),
        ("conv_norm_type: batch_norm", "conv_norm_type: layer_norm", "expected \"batch_norm\""),
        ("normalize: per_feature", "normalize: all_feature", "expected \"per_feature\""),
        ("hidden_act: relu", "hidden_act: gelu", "expected \"relu\""),
        ("pre_ln: true", "pre_ln: null", "pre_ln is false, expected true"),
        ("mlp.layer0.bias", "mlp.layer0.dice", "no tensor proj_out.bias"),
        ("d_model: 36", "d_model: 42", "has shape ["),
        ("n_layers: 2", "n_layers: 3", "layers.2"),
        ("d_model: 36", "d_model: *a", "model_config.yaml"),
        ("inner_size: 60", "inner_size: -6", "inner_size is -6, expected a size"),
        ("type: agg", "type: wpe", "tokenizer.type is \"wpe\", expected \"bpe\""),
        ("model_path: nemo:", "model_path: file:", "expected the name of a file of the archive"),
    ] {
        says(change(&|bytes| put(bytes, from, to)), words);
    }
    says(change(&|bytes| bytes.truncate(60_000)), ".nemo");
    says(change(&|bytes| bytes.truncate(0)), ".nemo");
    says(change(&|bytes| bytes[..2].copy_from_slice(&[0x1f, 0x8b])), "gzip -dc");
    says(change(&|bytes| bytes.fill(b'x')), "no whole tar archive");
    // Wherever a file is cut, something says so.
    for length in (512..200_000).step_by(37 * 512) {
        assert!(change(&|bytes| bytes.truncate(length)).is_err(), "{length}");
    }
}

/// What is published names its decoder, and may not hold its configuration.
#[test]
fn a_decoder_that_is_missing_or_of_another_kind_is_named() {
    let edited = |key: &str, value: Value| {
        let dir = copy_all(SPEECH_LM);
        edit_json(&dir.path().join("config.json"), |config| {
            *config.pointer_mut(key).unwrap() = value;
        });
        made(dir.path())
    };
    made(copy_all(SPEECH_LM).path()).unwrap();
    says(
        made(copy(SPEECH_LM).path()),
        "put config.json of Qwen/Qwen3-1.7B into the folder llm_backbone",
    );
    for (key, value, words) in [
        ("/prompt_format", json!("llama3"), "prompt_format is \"llama3\", expected \"qwen\""),
        ("/perception/output_dim", json!(48), "perception.output_dim is 48, expected 44"),
        ("/perception/encoder/subsampling", json!("vggnet"), "subsampling is \"vggnet\""),
        ("/perception/encoder/n_layers", json!(3), "layers.2"),
        ("/perception/modality_adapter/_target_", json!("x.Qformer"), "expected IdentityConnector"),
        ("/lora/r", json!(0), "lora.r is 0"),
        ("/lora", Value::Null, "is of an adapter, and config.json has no lora"),
    ] {
        says(edited(key, value), words);
    }
}
