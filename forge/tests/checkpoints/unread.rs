//! Tensors that no graph and no table reads.

use std::path::Path;

use qhx_base::{Error, ErrorKind};
use qhx_checkpoint::Checkpoint;
use qhx_forge::plan::{Plan, plan};
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Task};
use qhx_graph::graph::Origin;
use qhx_paths::fixture;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use super::quantized::as_gptq;
use super::{copy, edit_json, says};

type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// Rewrites the tensors of a checkpoint of one file.
fn edit_tensors(dir: &Path, edit: impl FnOnce(&mut Vec<Stored>)) {
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut stored: Vec<Stored> = all
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    edit(&mut stored);
    let views = stored.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
}

fn vector(name: &str, len: usize, value: f32) -> Stored {
    (name.to_owned(), Dtype::F32, vec![len], value.to_le_bytes().repeat(len))
}

fn planned(dir: &Path, edit: impl FnOnce(&mut ForgeOptions)) -> Result<Plan, Error> {
    let mut options = ForgeOptions { max_ctx: Some(64), ..ForgeOptions::new("out") };
    options.prefill = Some(Vec::new());
    edit(&mut options);
    let checkpoint = Checkpoint::open(dir)?;
    plan(&checkpoint, recipe, &options, false).map(|(plan, _)| plan)
}

const BIAS: &str = "model.layers.0.self_attn.q_proj.bias";
const NORM: &str = "model.layers.1.mlp.norm.weight";

#[test]
fn tensors_that_nothing_reads_are_refused_by_name() {
    let dir = copy("llama3-tiny");
    edit_tensors(dir.path(), |all| all.extend([vector(BIAS, 8, 0.5), vector(NORM, 8, 1.0)]));
    for words in ["no graph and no table", "layers.*.self_attn.q_proj.bias", "layers.*.mlp.norm"] {
        assert_eq!(says(planned(dir.path(), |_| {}), words).kind(), ErrorKind::Artifact);
    }
    let plan = planned(dir.path(), |options| {
        options.ignore_tensors = vec!["q_proj.bias".to_owned(), "layers.1.mlp.norm".to_owned()];
    });
    assert_eq!(plan.unwrap().left_out, [BIAS, NORM]);
}

#[test]
fn a_layer_too_few_is_refused() {
    let dir = copy("llama3-tiny");
    edit_json(&dir.path().join("config.json"), |config| {
        config["num_hidden_layers"] = json!(config["num_hidden_layers"].as_u64().unwrap() - 1);
    });
    says(planned(dir.path(), |_| {}), "model.layers.*.mlp.down_proj.weight");
}

#[test]
fn a_bias_of_zeros_is_none() {
    let dir = copy("llama3-tiny");
    edit_tensors(dir.path(), |all| all.push(vector(BIAS, 8, 0.0)));
    assert_eq!(planned(dir.path(), |_| {}).unwrap().left_out, [BIAS]);
}

#[test]
fn buffers_of_rotary_embeddings_are_left_out() {
    let dir = copy("llama3-tiny");
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    edit_tensors(dir.path(), |all| all.push(vector(name, 8, 0.5)));
    assert_eq!(planned(dir.path(), |_| {}).unwrap().left_out, [name]);
}

#[test]
fn a_head_beside_a_tied_embedding_is_what_counts() {
    let dir = copy("qwen35-tied");
    edit_tensors(dir.path(), |all| {
        let (_, dtype, shape, mut data) =
            all.iter().find(|(name, ..)| name == "model.embed_tokens.weight").unwrap().clone();
        data.reverse();
        data.iter_mut().for_each(|byte| *byte &= 0x3f);
        all.push(("lm_head.weight".to_owned(), dtype, shape, data));
    });
    assert!(planned(dir.path(), |_| {}).unwrap().left_out.is_empty());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let options = ForgeOptions { prefill: Some(Vec::new()), ..ForgeOptions::new("out") };
    let (_, made) = plan(&checkpoint, recipe, &options, false).unwrap();
    let graphs = made.contexts.iter().flat_map(|context| &context.graphs);
    let head = graphs.into_iter().find(|graph| graph.name() == "lmhead").unwrap();
    let names = head.tensors().iter().filter_map(|tensor| match &tensor.origin {
        Origin::Weight(weight) => Some(weight.source().name()),
        _ => None,
    });
    let names: Vec<_> = names.collect();
    assert_eq!(names, ["lm_head.weight"]);
}

#[test]
fn recipes_read_every_tensor_or_leave_it_out_by_name() {
    for (model, left_out) in [
        ("llama3-tiny", None),
        ("mistral-tiny", None),
        ("qwen2-tiny", None),
        ("qwen3-tiny", None),
        ("phimoe-6", None),
        ("phimoe-16", None),
        ("qwen35-tied", None),
        ("qwen35-untied", None),
        ("qwen35-vision", Some("model.visual.")),
        ("qwen3vl-tiny", None),
        ("gemma4-tiny", Some("_tower.")),
        ("gemma4-unseen", Some("_tower.")),
    ] {
        let all = planned(&fixture(model), |options| {
            if model == "qwen3vl-tiny" {
                options.recipe_options.insert("image-patches".to_owned(), "48".to_owned());
            }
        });
        let all = all.unwrap();
        let shared = |name: &String| model.starts_with("gemma4") && name.contains("self_attn.");
        assert!(all.left_out.iter().all(shared), "{model}: {:?}", all.left_out);
        let Some(tower) = left_out else { continue };
        let option = if model.starts_with("gemma4") { "towers" } else { "vision" };
        let text = planned(&fixture(model), |options| {
            options.recipe_options.insert(option.to_owned(), "none".to_owned());
        });
        assert!(text.unwrap().left_out.iter().any(|name| name.contains(tower)), "{model}");
    }
    let (quantized, _) = as_gptq("llama3-blocks");
    assert!(planned(quantized.path(), |_| {}).unwrap().left_out.is_empty());
    let embed = planned(&fixture("llama3-tiny"), |options| {
        options.task = Some(Task::Embed);
        options.recipe_options.insert("pooling".to_owned(), "last".to_owned());
        options.prefill = None;
    });
    assert!(embed.unwrap().left_out.iter().all(|name| name == "lm_head.weight"));
}
