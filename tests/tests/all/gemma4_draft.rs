//! Draft tokens of Gemma 4's assistant, which reads the caches of the model, against goldens of `transformers`.
//!
//! The fixture has two checkpoints, trained for `gemma4-tiny`: one gives logits of all tokens, one those of the best
//! clusters of tokens.

use std::path::{Path, PathBuf};

use qhx::golden::Golden;
use qhx_base::ErrorKind;
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::Model;
use qhx_core::op::Segment;
use qhx_forge::plan::plan;
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::forged::{Forged, set};
use qhx_tests::replay::{play_speculative, speculative_exact};
use qhx_tests::tiny;
use qhx_tests::{backends, files, plugin_files};
use qhx_tiers::tier;
use serde_json::{Value, json};

use crate::gemma4::{TINY, bundle, goldens, try_bundle};
use crate::mtp::{self, Goldens};

const HEADS: [&str; 2] = ["plain", "ordered"];

fn head(name: &str) -> PathBuf {
    tiny::fixture("gemma4-assistant").join(name)
}

/// Graphs of four rows verify what the assistant of a folder drafts.
fn with(folder: &Path) -> impl Fn(&mut ForgeOptions) {
    let folder = folder.to_str().unwrap().to_owned();
    move |options| {
        set(options, &[("verify", "4"), ("draft-head", &folder)]);
    }
}

/// The assistant of a folder in contexts of three sizes, so that texts begin in one and end in another.
fn drafting(name: &str) -> Forged {
    bundle(|o| {
        o.contexts = vec![16, 64];
        with(&head(name))(o);
    })
}

#[test]
fn drafts_of_an_assistant_are_those_of_transformers() {
    let target = goldens();
    for name in HEADS {
        let head = Goldens::of(head(name));
        let longest = mtp::cases(&target, &head).iter().map(|case| case.prompt_ids.len()).max();
        assert!(longest.unwrap() > 64, "a text leaves the smaller contexts, and the window of 13");
        mtp::equals_the_reference(&mut drafting(name).on_cpu(), &target, &head);
    }
}

#[test]
fn an_assistant_leaves_the_answers_of_plain_decoding() {
    let target = goldens();
    let all: Vec<_> = target.cases.iter().collect();
    for name in HEADS {
        let head = Goldens::of(head(name));
        let mut model = drafting(name).on_cpu();
        let speculate = "2".parse().unwrap();
        speculative_exact(&mut model, &all, speculate, name);
        let counts = speculative_exact(&mut model, &mtp::cases(&target, &head), speculate, name);
        let rate = counts.accepted as f64 / counts.drafted as f64;
        let [first, both] = head.accepted;
        eprintln!("{name}: {counts:?}, rate {rate:.3}, goldens {first:.3} and {both:.3}");
        assert!((rate - (first + both) / 2.0).abs() < 0.2, "{name}: {rate}");
        for chat in &target.chat {
            play_speculative(&mut model, chat, speculate);
        }
    }
}

#[test]
fn golden_steps_execute_graphs_that_draft_and_verify() {
    for name in HEADS {
        let mut model = drafting(name).on_cpu();
        let golden = Golden::make(&mut model, true, &mut |_| ()).unwrap();
        let idle = crate::golden::idle(&model);
        assert!(idle.is_empty(), "{name}: {idle:?}");
        let drafts: Vec<_> = golden.steps.iter().filter(|step| !step.drafted.is_empty()).collect();
        assert_eq!(drafts.len(), 3, "{name}: one for each context");
        for step in drafts {
            let report = golden.check(&mut model, step).unwrap();
            assert!(report.passed && report.cosine > 0.99999, "{name}: {report:?}");
            // Behind another draft token; the verified tokens are the same.
            let mut other = step.clone();
            other.drafted[0] ^= 1;
            let report = golden.check(&mut model, &other).unwrap();
            assert!(!report.passed, "{name}: {report:?}");
        }
    }
}

#[test]
fn an_assistant_follows_the_state() {
    let bundle = drafting("ordered");
    let (target, head) = (goldens(), Goldens::of(head("ordered")));
    mtp::follows_the_state([bundle.on_cpu(), bundle.on_cpu()], &target, &head);
    // Of a text that was cut the hidden state is gone, until the next token.
    let (mut model, case) = (bundle.on_cpu(), &target.cases[0]);
    let op = model.op_mut();
    op.drafting(true).unwrap();
    op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
    op.truncate(4).unwrap();
    assert!(op.draft(case.prompt_ids[4]).is_err());
    op.decode(case.prompt_ids[4]).unwrap();
    op.draft(case.prompt_ids[5]).unwrap();
}

/// A copy of an assistant whose configuration and tensors are changed.
fn edited(
    name: &str,
    config: impl Fn(&mut Value),
    tensor: impl Fn(&str, &mut Vec<u8>, &mut Vec<usize>) -> bool,
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    plugin_files::copy_folder(&head(name), folder.path());
    files::edit(&folder.path().join("config.json"), config);
    files::edit_tensors(&folder.path().join("model.safetensors"), |tensors| {
        tensors.retain_mut(|(name, _, shape, data)| tensor(name, data, shape));
    });
    folder
}

#[test]
fn assistants_that_do_not_fit_are_refused_by_name() {
    let refused = |folder: &Path, what: &str, kind: ErrorKind| {
        let error = try_bundle(&tiny::fixture(TINY), with(folder)).err().unwrap();
        assert!(error.to_string().contains(what), "{what}: {error}");
        assert_eq!(error.kind(), kind, "{error}");
    };
    let all = |_: &str, _: &mut Vec<u8>, _: &mut Vec<usize>| true;
    let text = |key: &'static str, value: Value| {
        move |config: &mut Value| config["text_config"][key] = value.clone()
    };
    let same = |_: &mut Value| {};
    let backbone = |config: &mut Value| config["backbone_hidden_size"] = json!(1536);
    let other =
        |config: &mut Value| config["architectures"] = json!(["Gemma4UnifiedAssistantForCausalLM"]);
    let file = ErrorKind::Artifact;
    refused(edited("plain", backbone, all).path(), "backbone_hidden_size is 1536", file);
    refused(edited("plain", other, all).path(), "Gemma4UnifiedAssistant", file);
    let heads = text("per_layer_config", json!({"1": {"head_dim": 20}}));
    refused(edited("plain", heads, all).path(), "head_dim of full_attention layers", file);
    let window = text("sliding_window", json!(12));
    refused(edited("plain", window, all).path(), "text_config.sliding_window is 12", file);
    let wide = text("use_double_wide_mlp", json!(true));
    refused(edited("plain", wide, all).path(), "use_double_wide_mlp", file);
    let uncut = |name: &str, _: &mut Vec<u8>, _: &mut Vec<usize>| name != "post_projection.weight";
    refused(edited("plain", same, uncut).path(), "post_projection", file);
    let short = |name: &str, data: &mut Vec<u8>, shape: &mut Vec<usize>| {
        if name == "pre_projection.weight" {
            data.truncate(data.len() / 2);
            shape[0] /= 2;
        }
        true
    };
    refused(edited("plain", same, short).path(), "pre_projection", file);
    // The second token in the place of the first; a token that the vocabulary has not; none.
    let order = |first: fn(&mut Vec<u8>, &mut Vec<usize>)| {
        move |name: &str, data: &mut Vec<u8>, shape: &mut Vec<usize>| {
            if name == "masked_embedding.token_ordering" {
                first(data, shape);
            }
            true
        }
    };
    let twice = order(|data, _| data.copy_within(8..16, 0));
    refused(edited("ordered", same, twice).path(), "twice", file);
    let beyond = order(|data, _| data[..8].copy_from_slice(&490i64.to_le_bytes()));
    refused(edited("ordered", same, beyond).path(), "has the value 490", file);
    let fewer = order(|data, shape| {
        data.truncate(480 * 8);
        shape[0] = 480;
    });
    refused(edited("ordered", same, fewer).path(), "has shape [480]", file);
    let centroids = |config: &mut Value| config["num_centroids"] = json!(48);
    refused(edited("ordered", centroids, all).path(), "num_centroids is 48", file);
    refused(Path::new("no/such/folder"), "no/such/folder", file);
    let unverified = try_bundle(&tiny::fixture(TINY), |options| {
        with(&head("plain"))(options);
        options.recipe_options.remove("verify");
    });
    let error = unverified.err().unwrap();
    assert!(error.to_string().contains("verify"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Usage);
}

/// An assistant of the published size reads the caches of the layers 13 and 14 of E2B, and has a head of its own.
#[test]
fn an_assistant_of_the_published_size_can_be_planned() {
    let configs = qhx_paths::workspace().join("tests/configs");
    let checkpoint = Checkpoint::synthetic(&configs.join("gemma-4-e2b.json"), 1).unwrap();
    let mut options = ForgeOptions::new("bundle");
    (options.precision, options.max_ctx) = (Precision::W8A16, Some(2048));
    (options.prefill, options.contexts) = (Some(Vec::new()), vec![512]);
    options.share_weights = true;
    with(&configs.join("drafts/gemma-4-e2b-assistant.json"))(&mut options);
    let (plan, recipe) = plan(&checkpoint, recipe, &options, true).unwrap();
    assert_eq!(recipe.plan_params["draft_head"], json!(["draft", "draft512"]));
    assert_eq!(recipe.params["draft_head"], json!({"top_clusters": 32}));
    let shape = |key: &str, name: &str| {
        let mut graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
        let graph = graphs.find(|graph| graph.name() == key).unwrap();
        let tensor = graph.tensors().iter().find(|t| t.name == name).unwrap();
        tensor.shape.clone()
    };
    assert_eq!(shape("draft", "past_k_14"), [1, 2048, 512]);
    assert_eq!(shape("draft512", "past_k_14"), [1, 512, 512]);
    assert_eq!(shape("draft", "past_v_13"), [1, 512, 256]);
    assert_eq!(shape("draft", "h"), [1, 1536]);
    assert_eq!(shape("draft", "logits"), [1, 262_144]);
    assert_eq!(shape("draft", "centroids"), [1, 2048]);
    let bytes = plan.contexts.iter().find(|context| context.key == "draft").unwrap().weight_bytes;
    // 67 million weights of the head, 11 million of the layers.
    assert!((70_000_000..90_000_000).contains(&bytes), "{bytes}");
}

#[tier(qnn)]
fn htp_answers_are_the_same_with_an_assistant() {
    let (target, head) = (goldens().brief(), Goldens::of(head("ordered")));
    let cases = mtp::cases(&target, &head);
    let compiler = backends::compiler("v81");
    let bundle = bundle(|o| {
        (o.prefill, o.compiler) = (Some(Vec::new()), Some(compiler));
        with(&self::head("ordered"))(o);
    });
    let mut model = bundle.open(backends::qnn());
    let drafts = |model: &mut Model, label: &str| {
        let counts = speculative_exact(model, &cases[..1], "2".parse().unwrap(), label);
        eprintln!("{label}: {counts:?}");
        assert!(3 * counts.accepted > counts.drafted, "{counts:?}");
    };
    drafts(&mut model, "v81");
    // Prompts there, draft tokens and answers on the CPU.
    model.decode_on(Some(backends::cpu()), "asked for").unwrap();
    drafts(&mut model, "v81, tokens on the CPU");
}
