//! What `sentence-transformers` has beside an encoder.

use qhx_core::ErrorKind;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::recipe::{RecipeOptions, Task};
use qhx_forge::registry::recipe;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{copy, edit_json};

/// A copy of the encoder, with the folder of its pooling.
fn encoder() -> TempDir {
    let dir = copy("embed-mistral-tiny");
    let pooling = "1_Pooling/config.json";
    std::fs::create_dir(dir.path().join("1_Pooling")).unwrap();
    let from = qhx_paths::fixture("embed-mistral-tiny").join(pooling);
    std::fs::copy(from, dir.path().join(pooling)).unwrap();
    dir
}

#[test]
fn what_an_encoder_does_not_apply_is_refused_by_name() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit, &str); 3] = [
        (
            "modules.json",
            |modules| {
                let dense = json!({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"});
                modules.as_array_mut().unwrap().push(dense);
            },
            "models.Dense",
        ),
        (
            "1_Pooling/config.json",
            |pooling| pooling["include_prompt"] = json!(false),
            "include_prompt",
        ),
        ("tokenizer_config.json", |config| config["add_eos_token"] = json!(true), "add_eos_token"),
    ];
    for (file, edit, words) in edits {
        let dir = encoder();
        let options =
            RecipeOptions { shards: 1, max_ctx: 64, task: Task::Embed, ..RecipeOptions::default() };
        let apply = || recipe(&Checkpoint::open(dir.path()).unwrap(), &options);
        apply().unwrap();
        edit_json(&dir.path().join(file), edit);
        let error = apply().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact);
        assert!(error.message().contains(words), "{error}");
        assert!(error.message().contains(file), "{error}");
    }
}
