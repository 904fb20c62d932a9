//! The files of processors: of images, videos and audio.

use std::path::Path;

use qhx_base::{Error, ErrorKind};
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{Recipe, RecipeOptions};
use qhx_forge::registry::recipe;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{copy, edit_json, read_json, recipe_options, says, set_json};

fn recipe_of(dir: &Path, choices: &[(&str, &str)]) -> Result<Recipe, Error> {
    let options = RecipeOptions { prefill: Some(Vec::new()), ..recipe_options(200, choices) };
    recipe(&Checkpoint::open(dir)?, &options)
}

/// Puts an object into `processor_config.json`.
fn nest(dir: &TempDir, part: &str, value: Value) {
    let path = dir.path().join("processor_config.json");
    if !path.exists() {
        std::fs::write(&path, "{}").unwrap();
    }
    edit_json(&path, |whole| whole[part] = value);
}

#[test]
fn processors_are_read_where_transformers_5_saves_them() {
    for model in ["qwen3vl-tiny", "qwen35-vision"] {
        let dir = copy(model);
        let mut image = read_json(&dir.path().join("preprocessor_config.json"));
        image["image_mean"] = json!([0.25, 0.5, 0.75]);
        image["size"] = json!({"shortest_edge": 512, "longest_edge": 2048});
        let mut video = read_json(&dir.path().join("video_preprocessor_config.json"));
        video["size"]["longest_edge"] = json!(4096);
        nest(&dir, "image_processor", image);
        nest(&dir, "video_processor", video);
        // The nested objects count before the files of their own, and without these.
        for files in ["there", "not there"] {
            let recipe = recipe_of(dir.path(), &[("image-patches", "48")]).unwrap();
            let vision = &recipe.params["vision"];
            assert_eq!(vision["image_mean"], json!([0.25, 0.5, 0.75]), "{model}, files {files}");
            assert_eq!([&vision["min_pixels"], &vision["max_pixels"]], [&json!(512), &json!(2048)]);
            assert_eq!(vision["video_max_pixels"], json!(4096), "{model}, files {files}");
            for file in ["preprocessor_config.json", "video_preprocessor_config.json"] {
                drop(std::fs::remove_file(dir.path().join(file)));
            }
        }
        std::fs::remove_file(dir.path().join("processor_config.json")).unwrap();
        let made = recipe_of(dir.path(), &[("image-patches", "48")]);
        let words =
            "neither processor_config.json with image_processor nor preprocessor_config.json";
        assert_eq!(says(made, words).kind(), ErrorKind::Artifact);
    }
}

#[test]
fn the_processor_says_how_many_mels_there_are() {
    let dir = copy("gemma4-tiny");
    let path = dir.path().join("processor_config.json");
    // Both leave eleven columns, which the model's 44 channels stand for.
    for mels in [41, 43, 44] {
        set_json(&path, "feature_extractor.feature_size", json!(mels));
        let recipe = recipe_of(dir.path(), &[("towers", "audio"), ("audio-tokens", "12")]).unwrap();
        assert_eq!(recipe.params["audio"]["front_end"]["filters"]["mels"], json!(mels));
        let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
        let tower = graphs.into_iter().find(|graph| graph.name() == "audio_enc").unwrap();
        let mel = tower.tensors().iter().find(|tensor| tensor.name == "mel").unwrap();
        assert_eq!(mel.shape, [48, mels]);
    }
    set_json(&path, "feature_extractor.feature_size", json!(48));
    let words = "feature_size is 48, expected 41 to 44";
    says(recipe_of(dir.path(), &[("towers", "audio")]), words);
    std::fs::remove_file(&path).unwrap();
    for tower in ["audio", "vision"] {
        let words = "neither processor_config.json with";
        says(recipe_of(dir.path(), &[("towers", tower)]), words);
    }
    assert!(recipe_of(dir.path(), &[("towers", "none")]).is_ok());
}
