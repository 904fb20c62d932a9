//! Files of `sentence-transformers` beside an encoder.

use qhx_base::ErrorKind;
use qhx_checkpoint::Checkpoint;
use qhx_forge::ForgeOptions;
use qhx_forge::plan::{Plan, plan};
use qhx_forge::recipe::{RecipeOptions, Task};
use qhx_forge::registry::{recipe, task};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{copy, copy_all, copy_files, edit_json, recipe_options, says, set_json};

/// A copy of the encoder, with the folder of its pooling.
fn encoder() -> TempDir {
    copy_all("embed-mistral-tiny")
}

fn embedding() -> RecipeOptions {
    RecipeOptions { task: Task::Embed, ..recipe_options(64, &[]) }
}

#[test]
fn what_an_encoder_does_not_apply_is_refused_by_name() {
    type Edit = fn(&mut Value);
    let (modules, pooling) = ("modules.json", "1_Pooling/config.json");
    let cnn: Edit = |list| {
        let cnn = json!({"idx": 3, "name": "3", "path": "3_CNN", "type": "sentence_transformers.models.CNN"});
        list.as_array_mut().unwrap().push(cnn);
    };
    let edits: [(&str, Edit, &str); 7] = [
        (modules, cnn, "models.CNN"),
        (modules, |list| drop(list.as_array_mut().unwrap().remove(1)), "models.Normalize"),
        (modules, |list| list.as_array_mut().unwrap().truncate(1), "no Pooling"),
        (modules, |list| list[1]["path"] = json!("../1_Pooling"), "expected the name of a folder"),
        (pooling, |c| c["pooling_mode"] = json!(["mean", "median"]), "pooling_mode is \"median\""),
        (pooling, |c| c["pooling_mode_median_tokens"] = json!(true), "median_tokens is on"),
        (pooling, |c| c["include_prompt"] = json!(false), "include_prompt"),
    ];
    for (file, edit, words) in edits {
        let dir = encoder();
        let apply = || recipe(&Checkpoint::open(dir.path()).unwrap(), &embedding());
        apply().unwrap();
        edit_json(&dir.path().join(file), edit);
        assert_eq!(says(apply(), words).kind(), ErrorKind::Artifact);
        says(apply(), file);
    }
}

/// The plan of a folder, and the pooling of its bundle.
fn pooled(dir: &TempDir, pooling: Option<&str>) -> Result<(Plan, Value), qhx_base::Error> {
    let mut options = ForgeOptions::new("out");
    options.task = Some(Task::Embed);
    options.recipe_options.extend(pooling.map(|way| ("pooling".to_owned(), way.to_owned())));
    let (plan, made) = plan(&Checkpoint::open(dir.path())?, recipe, &options, false)?;
    Ok((plan, made.plan_params["pooling"].clone()))
}

#[test]
fn an_encoder_without_a_pooling_is_the_mean_with_a_note() {
    let dir = copy("embed-bert-tiny");
    std::fs::remove_file(dir.path().join("modules.json")).unwrap();
    let (plan, way) = pooled(&dir, None).unwrap();
    assert_eq!(way, "mean");
    assert!(plan.notes()[0].contains("--recipe-option pooling=cls"), "{:?}", plan.notes());
    let (plan, way) = pooled(&dir, Some("cls")).unwrap();
    assert_eq!((way, plan.recipe_notes.len()), (json!("cls"), 0));
    says(pooled(&dir, Some("median")), "\"median\", expected one of cls, max, mean");
    // What is named counts before what the files say.
    assert_eq!(pooled(&encoder(), Some("last")).unwrap().1, "last");
}

#[test]
fn a_causal_model_without_a_pooling_is_refused() {
    let dir = copy("qwen3-tiny");
    let error = says(pooled(&dir, None), "how the rows of a text become a vector");
    assert!(error.hint_text().unwrap().contains("--recipe-option pooling=last"), "{error:?}");
    assert_eq!(pooled(&dir, Some("last")).unwrap().1, "last");
    let mut options = ForgeOptions::new("out");
    options.recipe_options.insert("pooling".to_owned(), "last".to_owned());
    let error = plan(&Checkpoint::open(dir.path()).unwrap(), recipe, &options, false).unwrap_err();
    assert!(error.hint_text().unwrap().contains("--task embed"), "{error:?}");
}

#[test]
fn a_class_with_one_task_has_that_by_default() {
    for (model, expected) in [
        ("embed-bert-tiny", Task::Embed),
        ("rerank-bert-tiny", Task::Score),
        ("siglip-fixed", Task::Embed),
        ("whisper-tiny", Task::Transcribe),
        ("qwen3-tiny", Task::Generate),
    ] {
        let found = task(&Checkpoint::open(&qhx_paths::fixture(model)).unwrap(), None).unwrap();
        assert_eq!(found, expected, "{model}");
    }
    let bert = Checkpoint::open(&qhx_paths::fixture("embed-bert-tiny")).unwrap();
    let (made, _) = plan(&bert, recipe, &ForgeOptions::new("out"), false).unwrap();
    assert_eq!((made.task, made.max_ctx), (Task::Embed, 96));
    let words = "a BertModel has no recipe for the task generate";
    let error = says(task(&bert, Some(Task::Generate)), words);
    assert_eq!(error.hint_text(), Some("give --task embed, or no --task"));
    // A decoder whose folder is that of sentence-transformers.
    let dir = copy("qwen3-tiny");
    std::fs::write(dir.path().join("modules.json"), "[]").unwrap();
    assert_eq!(task(&Checkpoint::open(dir.path()).unwrap(), None).unwrap(), Task::Embed);
}

/// The encoder with modules behind its pooling.
fn with_modules() -> TempDir {
    let dir = encoder();
    let from = qhx_paths::fixture("embed-modules");
    std::fs::copy(from.join("modules.json"), dir.path().join("modules.json")).unwrap();
    for folder in ["1_Pooling", "2_Dense", "3_LayerNorm", "4_Dense"] {
        let to = dir.path().join(folder);
        std::fs::create_dir_all(&to).unwrap();
        copy_files(&from.join(folder), &to);
    }
    dir
}

#[test]
fn modules_that_torch_saved_are_read() {
    let dir = with_modules();
    let weights = || {
        let made = recipe(&Checkpoint::open(dir.path()).unwrap(), &embedding()).unwrap();
        let tables = made.tables.iter().find(|tables| tables.key == "modules").unwrap();
        let mut files = vec![Vec::new(); tables.files.len()];
        let mut targets: Vec<&mut dyn std::io::Write> = Vec::new();
        targets.extend(files.iter_mut().map(|file| file as &mut dyn std::io::Write));
        tables.source.write(&mut targets, &mut qhx_forge::Silent).unwrap();
        files
    };
    let safe = weights();
    let folder = dir.path().join("4_Dense");
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    let saved = qhx_paths::fixture("torch-files/dense.bin");
    std::fs::copy(saved, folder.join("pytorch_model.bin")).unwrap();
    assert!(weights() == safe);
}

#[test]
fn modules_that_do_not_fit_are_refused_by_name() {
    for (folder, keys, value, words) in [
        ("2_Dense", "in_features", json!(92), "in_features is 92, expected 276"),
        ("2_Dense", "out_features", json!(21), "config.json asks for [21, 276]"),
        (
            "2_Dense",
            "activation_function",
            json!("torch.nn.modules.activation.ELU"),
            "ELU\", expected Identity",
        ),
        ("2_Dense", "activation_function", json!("my.Tanh"), "\"my.Tanh\", expected Identity"),
        ("2_Dense", "use_residual", json!(true), "use_residual is true, expected false"),
        ("2_Dense", "module_input_name", json!("token_embeddings"), "is \"token_embeddings\""),
        ("3_LayerNorm", "dimension", json!(7), "dimension is 7, expected 20"),
    ] {
        let dir = with_modules();
        let apply = || recipe(&Checkpoint::open(dir.path()).unwrap(), &embedding());
        let made = apply().unwrap();
        assert_eq!(made.plan_params["pooling"], json!(["max", "mean_sqrt_len", "weighted_mean"]));
        assert_eq!(made.plan_params["modules"].as_array().unwrap().len(), 4);
        set_json(&dir.path().join(folder).join("config.json"), keys, value);
        assert_eq!(says(apply(), words).kind(), ErrorKind::Artifact);
        says(apply(), folder);
    }
}
