//! The Qwen3-VL recipe: the ONNX reference graphs of its vision graphs give the features of `transformers`, for a fixed
//! size and for any grid; both spellings of the configuration make the same graphs; impossible options are refused.
#![expect(clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{Precision, Recipe, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::progress::Silent;
use qhx_paths::fixture;
use qhx_types::MASK_VALUE;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;

mod common;

use common::graphs::Onnx;
use common::{copy, edit_json, read_json, recipe_options, says};

const MODEL: &str = "qwen3vl-tiny";
/// Qwen2.5-VL.
const WINDOWED: &str = "qwen25vl-unseen";
const HIDDEN: usize = 60;
const PATCH_VALUES: usize = 3 * 2 * 8 * 8;
const SIDE: usize = 7;
const QUARTER: usize = 5;

fn options(choices: &[(&str, &str)]) -> RecipeOptions {
    recipe_options(200, choices)
}

fn recipe_of(folder: &Path, choices: &[(&str, &str)]) -> Recipe {
    recipe(&Checkpoint::open(folder).unwrap(), &options(choices)).unwrap()
}

fn refused(choices: &[(&str, &str)]) -> String {
    let checkpoint = Checkpoint::open(&fixture(MODEL)).unwrap();
    recipe(&checkpoint, &options(choices)).unwrap_err().report().to_string()
}

fn graphs(recipe: &Recipe) -> impl Iterator<Item = &Graph> {
    recipe.contexts.iter().flat_map(|context| &context.graphs)
}

/// Row and column of a patch: squares of two by two in raster order.
fn place(patch: usize, columns: usize) -> [usize; 2] {
    let (square, inner) = (patch / 4, patch % 4);
    let across = columns / 2;
    [square / across * 2 + inner / 2, square % across * 2 + inner % 2]
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// The tables of the host: patch embedding, its bias, positions.
struct Tables(Vec<Vec<f32>>);

impl Tables {
    fn of(recipe: &Recipe) -> Self {
        let mut files = vec![Vec::new(); 3];
        {
            let mut targets: Vec<&mut dyn std::io::Write> =
                files.iter_mut().map(|file| file as &mut dyn std::io::Write).collect();
            recipe.tables[0].source.write(&mut targets, &mut Silent).unwrap();
        }
        Self(files.iter().map(|bytes| floats(bytes)).collect())
    }

    /// Patches of u8 levels to rows for the vision graph.
    fn embed(&self, pixels: &[u8], [rows, columns]: [usize; 2]) -> Vec<f32> {
        let [weight, bias, positions] = self.0.as_slice() else { panic!("three tables") };
        let mut out = Vec::new();
        for (patch, levels) in pixels.chunks_exact(PATCH_VALUES).enumerate() {
            let values: Vec<f32> = levels.iter().map(|&v| (f32::from(v) - 127.5) / 127.5).collect();
            let [row, column] = place(patch, columns);
            let scale =
                |index: usize, count: usize| (index * (SIDE - 1)) as f32 / (count - 1) as f32;
            let (y, x) = (scale(row, rows), scale(column, columns));
            for channel in 0..HIDDEN {
                let filter = &weight[channel * PATCH_VALUES..][..PATCH_VALUES];
                let sum: f32 = filter.iter().zip(&values).map(|(w, v)| w * v).sum();
                let mut position = 0.0;
                for (down, fy) in [(0, 1.0 - y.fract()), (1, y.fract())] {
                    for (right, fx) in [(0, 1.0 - x.fract()), (1, x.fract())] {
                        let row = (y as usize + down).min(SIDE - 1);
                        let column = (x as usize + right).min(SIDE - 1);
                        position += fy * fx * positions[(row * SIDE + column) * HIDDEN + channel];
                    }
                }
                out.push(sum + bias[channel] + position);
            }
        }
        out
    }
}

/// Max difference of the features of all images of a mode from those of `transformers`.
fn worst(recipe: &Recipe, mode: &str) -> f64 {
    let dir = fixture(MODEL);
    let goldens = read_json(&dir.join("goldens.json"));
    let recorded = std::fs::read(dir.join("goldens.safetensors")).unwrap();
    let recorded = SafeTensors::deserialize(&recorded).unwrap();
    let tables = Tables::of(recipe);
    let out = tempfile::tempdir().unwrap();
    let mut worst = 0f64;
    let graphs: Vec<_> = graphs(recipe).filter(|g| g.name().starts_with("vision")).collect();
    for image in goldens["images"].as_array().unwrap() {
        if image["mode"] != mode {
            continue;
        }
        let id = format!("{}.{mode}", image["id"].as_str().unwrap());
        let grid: [usize; 2] = serde_json::from_value(image["grid"].clone()).unwrap();
        let patches = grid[0] * grid[1];
        let rows = |graph: &Graph| graph.info(Elem::onnx).inputs[0].shape[0];
        let graph = graphs.iter().find(|graph| rows(graph) >= patches).unwrap();
        let (rows, graph) = (rows(graph), Onnx::new(graph, out.path()));
        let pixels = recorded.tensor(&format!("{id}.pixels")).unwrap();
        let mut x = tables.embed(pixels.data(), grid);
        // What lies in the rows after the last patch must not matter.
        x.resize(rows * HIDDEN, 0.7);
        let mut tables = [vec![0.3f32; rows * 2 * QUARTER], vec![0.3f32; rows * 2 * QUARTER]];
        for patch in 0..patches {
            for (axis, at) in place(patch, grid[1]).into_iter().enumerate() {
                for i in 0..QUARTER {
                    let angle = at as f32 * 1e4f32.powf(-((2 * i) as f32) / (2 * QUARTER) as f32);
                    let index = patch * 2 * QUARTER + axis * QUARTER + i;
                    (tables[0][index], tables[1][index]) = (angle.cos(), angle.sin());
                }
            }
        }
        let [cos, sin] = tables;
        let mask = (0..rows).map(|row| if row < patches { 0.0 } else { MASK_VALUE }).collect();
        let values = [("x", x), ("cos", cos), ("sin", sin), ("cmask", mask)];
        let input = |name: &str| values.iter().find(|(known, _)| *known == name).unwrap().1.clone();
        let inputs: Vec<_> = graph.info.inputs.iter().map(|tensor| input(&tensor.name)).collect();
        let outputs = graph.run(&inputs);
        assert_eq!(outputs.len(), 4);
        for (tensor, value) in graph.info.outputs.iter().zip(outputs) {
            let expected = recorded.tensor(&format!("{id}.{}", tensor.name)).unwrap();
            let expected = floats(expected.data());
            let found = Distance::of(&value[..expected.len()], &expected).unwrap();
            worst = worst.max(found.largest);
        }
    }
    worst
}

#[test]
fn features_of_stretched_images_equal_the_reference() {
    let recipe = recipe_of(&fixture(MODEL), &[("image-size", "48")]);
    assert_eq!(recipe.params["vision"]["image_size"], 48);
    let worst = worst(&recipe, "fixed");
    println!("features differ by at most {worst:.2e}");
    assert!(worst < 1e-4, "features differ by {worst}");
}

#[test]
fn features_of_images_of_any_shape_equal_the_reference() {
    let recipe = recipe_of(&fixture(MODEL), &[("image-patches", "48,24, 32")]);
    let names: Vec<_> = graphs(&recipe).map(Graph::name).take(3).collect();
    assert_eq!(names, ["vision24", "vision32", "vision48"]);
    assert_eq!(recipe.params["vision"]["max_pixels"], 48 * 64);
    let worst = worst(&recipe, "native");
    println!("features differ by at most {worst:.2e}");
    assert!(worst < 1e-4, "features differ by {worst}");
}

/// The contexts and their precisions.
fn keys(recipe: &Recipe) -> Vec<(String, Precision)> {
    recipe.contexts.iter().map(|context| (context.key.clone(), context.precision)).collect()
}

#[test]
fn vision_tower_and_head_have_precisions_of_their_own() {
    let precisions = |choices: &[(&str, &str)]| {
        let all = [&[("image-size", "48")], choices].concat();
        let recipe = recipe_of(&fixture(MODEL), &all);
        keys(&recipe)
    };
    let keyed = |key: &str, precision| (key.to_owned(), precision);
    let (f16, int8) = (Precision::Fp16, Precision::W8A16);
    let found = precisions(&[]);
    assert_eq!(found[0], keyed("vision", f16));
    assert_eq!(found[found.len() - 1], keyed("lmhead", f16));
    let chosen =
        RecipeOptions { head: Some(int8), ..options(&[("image-size", "48"), ("vision", "w8a16")]) };
    let checkpoint = Checkpoint::open(&fixture(MODEL)).unwrap();
    let found = keys(&recipe(&checkpoint, &chosen).unwrap());
    assert_eq!(found[0], keyed("vision", int8));
    assert_eq!(found[1], keyed("decode", f16));
    assert_eq!(found[found.len() - 1], keyed("lmhead", int8));
    let recipe = recipe_of(&fixture(MODEL), &[("image-size", "48"), ("vision", "w8a16")]);
    let worst = worst(&recipe, "fixed");
    assert!((1e-3..1.0).contains(&worst), "features differ by {worst}");
}

/// The configuration as `transformers` 5 writes it.
fn respelled() -> TempDir {
    let dir = copy(MODEL);
    edit(dir.path(), |config| {
        let text = config["text_config"].as_object_mut().unwrap();
        let mut rope = text.remove("rope_scaling").unwrap();
        rope["rope_theta"] = text.remove("rope_theta").unwrap();
        text.insert("rope_parameters".to_owned(), rope);
        let vision = &mut config["vision_config"];
        vision["model_type"] = json!("qwen3_vl_vision");
        vision["rope_parameters"] = json!({"rope_type": "axial", "rope_theta": 10000.0});
    });
    dir
}

fn edit(dir: &Path, change: impl FnOnce(&mut Value)) {
    edit_json(&dir.join("config.json"), change);
}

#[test]
fn both_spellings_of_the_configuration_say_the_same() {
    let dir = respelled();
    let choices = [("image-size", "48")];
    let (old, new) = (recipe_of(&fixture(MODEL), &choices), recipe_of(dir.path(), &choices));
    assert_eq!(old.params, new.params);
    let shapes = |recipe: &Recipe| graphs(recipe).map(|g| g.info(Elem::onnx)).collect::<Vec<_>>();
    assert_eq!(shapes(&old), shapes(&new));
}

#[test]
fn what_a_configuration_lacks_or_contradicts_is_named() {
    for (pointer, value, words) in [
        ("/text_config/rope_theta", Value::Null, "rope_theta is missing"),
        ("/text_config/rope_scaling/mrope_section", Value::Null, "mrope_section is missing"),
        ("/text_config/rope_scaling/mrope_section", json!([5, 3, 3]), "add up to 10"),
        ("/image_token_id", json!(436), "image_token_id is 436"),
        ("/vision_config", Value::Null, "vision_config is missing"),
        ("/vision_config/num_heads", json!(4), "a width of 60 and 4 heads, expected"),
        ("/vision_config/num_position_embeddings", json!(50), "expected a square"),
        ("/vision_config/deepstack_visual_indexes", json!([1, 7]), "below 7"),
        ("/vision_config/deepstack_visual_indexes", json!([1, 1]), "different"),
        ("/vision_config/out_hidden_size", json!(60), "out_hidden_size is 60, expected 104"),
    ] {
        let dir = copy(MODEL);
        edit(dir.path(), |config| *config.pointer_mut(pointer).unwrap() = value);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        says(recipe(&checkpoint, &options(&[("image-size", "48")])), words);
    }
}

/// The published spelling is flat, and its rope of the type "mrope".
#[test]
fn both_spellings_of_qwen2_5_vl_say_the_same() {
    let [published, dir] = [(); 2].map(|()| {
        let dir = copy(WINDOWED);
        edit(dir.path(), |config| config["max_position_embeddings"] = json!(200));
        dir
    });
    edit(dir.path(), |config| {
        let mut rope = config["rope_scaling"].take();
        let mut text = config.clone();
        rope["type"] = json!("default");
        rope["rope_theta"] = text["rope_theta"].take();
        text["rope_parameters"] = rope;
        text["layer_types"] = json!(vec!["full_attention"; 3]);
        config["text_config"] = text;
        for key in ["rope_theta", "rope_scaling", "hidden_size"] {
            config[key] = Value::Null;
        }
        config["vision_config"]["in_channels"] = json!(3);
    });
    let choices = [("image-patches", "96")];
    let (old, new) = (recipe_of(published.path(), &choices), recipe_of(dir.path(), &choices));
    assert_eq!(old.params, new.params);
    assert_eq!(old.params["rope_scaling"]["mrope_interleaved"], false);
    assert_eq!(old.params["vision"]["window"], 4);
    let shapes = |recipe: &Recipe| graphs(recipe).map(|g| g.info(Elem::onnx)).collect::<Vec<_>>();
    assert_eq!(shapes(&old), shapes(&new));
    let vision = graphs(&old).next().unwrap().info(Elem::onnx);
    assert!(vision.inputs.iter().any(|input| input.name == "windows" && input.shape == [96, 1]));
}

#[test]
fn what_qwen2_5_vl_cannot_be_is_named() {
    for (pointer, value, words) in [
        ("/use_sliding_window", json!(true), "use_sliding_window is true"),
        ("/rope_scaling/type", json!("yarn"), "rope_scaling.type is \"yarn\""),
        ("/rope_scaling/mrope_section", json!([4, 4, 2]), "add up to 9"),
        ("/vision_config/window_size", json!(11), "window_size is 11, expected at least 12"),
        ("/vision_config/fullatt_block_indexes", json!([3]), "numbers of blocks below 3"),
        ("/vision_config/tokens_per_second", json!(0), "tokens_per_second is 0"),
        ("/vision_config/out_hidden_size", json!(55), "out_hidden_size is 55"),
        ("/vision_config/hidden_act", json!("gelu"), "expected \"silu\""),
    ] {
        let dir = copy(WINDOWED);
        edit(dir.path(), |config| *config.pointer_mut(pointer).unwrap() = value);
        says(recipe(&Checkpoint::open(dir.path()).unwrap(), &options(&[])), words);
    }
}

#[test]
fn what_qwen2_vl_cannot_be_is_named() {
    for (pointer, value, words) in [
        ("/vision_config/hidden_act", json!("gelu"), "expected \"quick_gelu\""),
        ("/vision_config/hidden_size", json!(40), "hidden_size is 40, expected 24"),
        ("/vision_config/embed_dim", json!(48), "[48"),
        ("/vision_config/mlp_ratio", json!(3), "[120, 40]"),
        ("/vision_config/depth", json!(5), "visual.blocks.4"),
        ("/use_sliding_window", json!(true), "use_sliding_window is true"),
    ] {
        let dir = copy("vision/qwen2vl");
        edit(dir.path(), |config| *config.pointer_mut(pointer).unwrap() = value);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        says(recipe(&checkpoint, &recipe_options(192, &[("image-size", "48")])), words);
    }
}

#[test]
fn sizes_that_no_graph_can_have_are_refused() {
    for (choices, words) in [
        (&[("image-size", "50")][..], "a multiple of 16"),
        (&[("image-size", "many")], "\"many\""),
        (&[("image-size", "48"), ("image-patches", "32")], "both set"),
        (&[("image-patches", "32,33")], "multiples of 4"),
        (&[("image-patches", "")], "expected numbers from 1 to 65536"),
        // 200 positions, and not one for a question.
        (&[("image-patches", "32,800")], "takes 200 tokens"),
        (&[], "takes 1024 tokens"),
    ] {
        let report = refused(choices);
        assert!(report.contains(words), "{choices:?}: {report}\n  does not say {words:?}");
    }
}

/// Qwen3.5 has a tower of the same kind, if the checkpoint holds one.
#[test]
fn qwen35_has_vision_graphs_unless_they_are_left_out() {
    let recipe = |name: &str, choices: &[(&str, &str)]| {
        recipe(&Checkpoint::open(&fixture(name)).unwrap(), &options(choices))
    };
    let names = |recipe: &Recipe| graphs(recipe).map(Graph::name).collect::<Vec<_>>().join(" ");
    let whole = recipe("qwen35-vision", &[]).unwrap();
    assert_eq!(names(&whole), "vision decode prefill16 prefill128 lmhead");
    // Images of 512 pixels a side would take 1024 tokens. Ten by ten leave half of the context.
    assert_eq!(whole.params["vision"]["image_size"], 160);
    assert_eq!(whole.params["rope_scaling"]["mrope_section"], json!([3, 2, 2]));
    let text = recipe("qwen35-vision", &[("vision", "none")]).unwrap();
    assert_eq!(names(&text), "decode prefill16 prefill128 lmhead");
    assert!(text.tables.is_empty() && !text.params.contains_key("rope_scaling"));
    for (name, choices, words) in [
        ("qwen35-tied", &[("image-size", "48")][..], "image-size is set, but the checkpoint has"),
        ("qwen35-vision", &[("vision", "none"), ("image-patches", "48")], "but vision is none"),
    ] {
        says(recipe(name, choices), words);
    }
}
