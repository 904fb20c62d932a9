//! PhiMoE tiny models from checkpoint to text, against goldens that `transformers` made: tokens, logits, and
//! where every token goes in every layer.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_core::engine::{FinishReason, Model, Prompt, Request};
use qhx_core::op::Segment;
use qhx_forge::ForgeOptions;
use qhx_tests::forged::{Forged, set};
use qhx_tests::replay::{self, accepted_exact, generate, same_text, speculative_exact, step_exact};
use qhx_tests::tiny::{self, Case, Goldens};
use qhx_tests::{backends, files, has, log, says};
use qhx_tiers::tier;
use serde_json::{Map, Value, json};

/// Experts on a grid that int8 holds exactly, six of them; and sixteen as training left them.
const TINY_MODELS: [&str; 2] = ["phimoe-6", "phimoe-16"];
/// Tokens of the prompt graphs: the prompts of the goldens have 3, 30, more than this, and others.
const WINDOW: usize = 64;

/// Weight inputs of the graphs of experts.
const INT8: &str = "w8a16";
const F16: &str = "fp16";

fn experts(options: &mut ForgeOptions, inputs: &str) {
    set(options, &[("experts", inputs)]);
}

/// The only file of a bundle whose name ends so.
fn file(bundle: &Forged, end: &str) -> PathBuf {
    let mut found = all_files(bundle, |name| name.ends_with(end));
    assert_eq!(found.len(), 1, "{end}: {found:?}");
    found.remove(0)
}

fn all_files(bundle: &Forged, is: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let root = bundle.manifest.parent().unwrap();
    let folders = [root.join("onnx"), root.to_owned()];
    let entries = folders.iter().filter_map(|f| fs::read_dir(f).ok()).flatten();
    let mut files: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    files.retain(|path| is(path.file_name().unwrap().to_str().unwrap()));
    files.sort();
    files
}

/// Puts the prompt graphs into contexts that may be left out, as published bundles have them.
fn set_prompts_apart(bundle: &Forged) {
    bundle.edit(|manifest| {
        let contexts = manifest["artifacts"]["contexts"].as_object_mut().unwrap();
        let mut apart = Map::new();
        for (key, context) in contexts.iter_mut() {
            if key == "ffn_pf" {
                context["optional"] = "prefill".into();
                continue;
            }
            let graphs = std::mem::take(context["onnx"].as_object_mut().unwrap());
            let (prompts, own): (Map<_, _>, _) =
                graphs.into_iter().partition(|(name, _)| name.starts_with("pf"));
            context["onnx"] = Value::Object(own);
            if !prompts.is_empty() {
                let context = json!({"onnx": prompts, "optional": "prefill"});
                apart.insert(key.replace("a_", "pf_"), context);
            }
        }
        contexts.append(&mut apart);
    });
}

/// Removes the prompt graphs of a bundle.
fn remove_prompt_graphs(bundle: &Forged) -> usize {
    let is =
        |name: &str| name.contains(".onnx") && (name.starts_with("pf") || name.contains("_pf"));
    let files = all_files(bundle, is);
    files.iter().for_each(|file| fs::remove_file(file).unwrap());
    files.len()
}

fn bundle(checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    let bundle = Forged::of(checkpoint, |options| {
        options.name = Some("tiny".to_owned());
        options.max_ctx = Some(200);
        options.prefill = Some(vec![WINDOW]);
        change(options);
    });
    bundle.edit(|m| m["plan"]["params"]["trace_routing"] = true.into());
    bundle
}

/// Experts of a token in each layer, as far as they are known.
type Routed = Vec<Option<[(usize, f32); 2]>>;

/// Experts of each token of a text, from the lines of the log; position by position.
fn routes(lines: &[String], layers: usize) -> Vec<Routed> {
    let mut found: Vec<Routed> = Vec::new();
    for line in lines.iter().filter_map(|line| line.strip_prefix("routing: position ")) {
        let words = line.replace([':', ','], "");
        let words: Vec<_> = words.split_whitespace().collect();
        let [position, "layer", layer, "expert", a, "x", m1, "expert", b, "x", m2] = words[..]
        else {
            panic!("{line:?}")
        };
        let (position, layer): (usize, usize) = (position.parse().unwrap(), layer.parse().unwrap());
        let choice = |e: &str, m: &str| (e.parse().unwrap(), m.parse().unwrap());
        if found.len() <= position {
            found.resize(position + 1, vec![None; layers]);
        }
        found[position][layer] = Some([choice(a, m1), choice(b, m2)]);
    }
    found
}

/// Checks how often a prompt of N tokens went through the prefill graphs, and how many of its tokens went by steps:
/// what is left of it behind full chunks, where that is little.
fn check_ways(tokens: usize, prompt_graphs: bool, [batches, steps]: [usize; 2], label: &str) {
    let (full, left) = if prompt_graphs { (tokens / WINDOW, tokens % WINDOW) } else { (0, tokens) };
    let stepped = [batches, steps] == [full, left] && (left < 16 || !prompt_graphs);
    let batched = [batches, steps] == [full + 1, 0] && left > 1 && prompt_graphs;
    assert!(stepped || batched, "{label}: {batches} batches and {steps} steps for {tokens} tokens");
}

/// Which graphs ran since `before`, in times all layers: those for prompts, and for one token.
fn ran(model: &Model, layers: usize, before: [u64; 2]) -> [usize; 2] {
    let now = ["pf", "a"].map(|prefix| executions(model, prefix));
    [0, 1].map(|at| (now[at] - before[at]) as usize / layers)
}

/// Every case from its text: tokens, text, reason, the way that the prompt took, and where every token
/// went in every layer. Returns the largest difference of a multiplier.
fn equals_the_reference(
    model: &mut Model,
    goldens: &Goldens,
    cases: &[&Case],
    prompt_graphs: bool,
    label: &str,
) -> f64 {
    let (mut multipliers, mut recorded) = (Vec::new(), Vec::new());
    for case in cases {
        let label = format!("{label}, {}", case.id);
        model.reset().unwrap();
        let request = Request::greedy(Prompt::Text(case.prompt.clone()), case.output_ids.len());
        let before = ["pf", "a"].map(|prefix| executions(model, prefix));
        let (generation, lines) = log::capture(|| generate(model, &request));
        let prompt = case.prompt_ids.len();
        assert_eq!(generation.prompt_tokens, prompt, "{label}");

        let expected = goldens.routing(case);
        let layers = expected[0].len();
        let [batches, steps] = ran(model, layers, before);
        let of_prompt = [batches, steps - (expected.len() - prompt)];
        check_ways(prompt, prompt_graphs, of_prompt, &label);
        let found = routes(&lines, layers);
        for (position, (found, expected)) in found.iter().zip(&expected).enumerate() {
            for (layer, (found, expected)) in found.iter().zip(expected).enumerate() {
                let Some(found) = found else {
                    // Nobody asks for what the last experts make of a token before the last.
                    let left_out = layer + 1 == layers && position + 1 < prompt;
                    assert!(left_out, "{label}: position {position}, layer {layer}");
                    continue;
                };
                for (found, expected) in found.iter().zip(expected) {
                    let place = format!("{label}: position {position}, layer {layer}");
                    assert_eq!(found.0, expected.0, "{place}");
                    multipliers.push(found.1);
                    recorded.push(expected.1);
                }
            }
        }
        assert_eq!(found.len(), expected.len(), "{label}: tokens that were routed");
        assert_eq!(generation.tokens, case.output_ids, "{label}");
        same_text(&generation.text, &case.text, &label);
        let expected = if case.finish == "eos" { FinishReason::Eos } else { FinishReason::Length };
        assert_eq!(generation.finish_reason, expected, "{label}");
    }
    Distance::of(&multipliers, &recorded).unwrap().largest
}

fn largest(found: &[f32], expected: &[f32]) -> f64 {
    Distance::of(found, expected).unwrap().largest
}

/// Largest distance of logits from the recorded ones, prompts and steps as far as there are any.
fn distance(model: &mut Model, goldens: &Goldens, cases: &[&Case]) -> Distance {
    let recorded = |case: &&Case| {
        let steps = case.logits_steps.last().unwrap() + 1;
        Case { output_ids: case.output_ids[..steps].to_vec(), ..(*case).clone() }
    };
    let cases: Vec<_> = cases.iter().map(recorded).collect();
    step_exact(model, goldens, &cases.iter().collect::<Vec<_>>(), "logits")
}

#[test]
fn the_goldens_have_prompts_of_every_kind() {
    for tiny in TINY_MODELS {
        let goldens = tiny::goldens(&tiny::fixture(tiny));
        let lengths: Vec<_> = goldens.cases.iter().map(|c| c.prompt_ids.len()).collect();
        assert!(lengths.contains(&3) && lengths.contains(&30), "{tiny}: {lengths:?}");
        assert!(lengths.iter().any(|&n| n > WINDOW), "{tiny}: {lengths:?}");
    }
}

#[test]
fn cpu_equals_the_reference_in_both_forms() {
    for tiny in TINY_MODELS {
        let (checkpoint, goldens) = tiny::model(tiny);
        let cases: Vec<_> = goldens.cases.iter().collect();
        for (inputs, shards, prefill) in
            [(INT8, 2, vec![WINDOW]), (F16, 1, vec![WINDOW]), (INT8, 3, vec![])]
        {
            let label = format!("{tiny} {inputs} {shards} shards, prompt graphs {prefill:?}");
            let prompt_graphs = !prefill.is_empty();
            let bundle = bundle(&checkpoint, |o| {
                (o.shards, o.prefill) = (shards, Some(prefill));
                experts(o, inputs);
            });
            let mut model = bundle.on_cpu();
            let apart = equals_the_reference(&mut model, &goldens, &cases, prompt_graphs, &label);
            let Distance { largest, cosine, .. } = distance(&mut model, &goldens, &cases);
            eprintln!(
                "{label}: logits differ by at most {largest:.2e}, cosine {cosine:.6}, \
                 multipliers by {apart:.2e}"
            );
            if tiny == TINY_MODELS[0] {
                assert!(largest <= 1e-3 && apart <= 1e-4, "{label}: {largest}, {apart}");
            } else {
                // What rounding the experts to int8 costs.
                assert!(cosine >= 0.999 && apart <= 0.02, "{label}: {cosine}, {apart}");
            }
        }
    }
}

/// Plays the conversations; tokens, text, what the state of earlier turns saved, and what ran.
fn play_all(model: &mut Model, goldens: &Goldens, prompt_graphs: bool, label: &str) {
    for chat in &goldens.chat {
        model.reset().unwrap();
        for (index, turn) in chat.turns.iter().enumerate() {
            let label = format!("{label}, {} turn {index}", chat.id);
            let prompt = chat.prompt(index);
            assert_eq!(model.encode_prompt(&prompt).unwrap(), turn.prompt_ids, "{label}");
            let heads = executions(model, "lmhead");
            let before = ["pf", "a"].map(|prefix| executions(model, prefix));
            let generation = generate(model, &Request::greedy(prompt, turn.output_ids.len()));
            assert_eq!(generation.tokens, turn.output_ids, "{label}");
            same_text(&generation.text, &turn.text, &label);
            let earlier = index.checked_sub(1).map(|index| &chat.turns[index]);
            let reusable = earlier.map_or(0, |earlier| turn.reusable(earlier));
            assert_eq!(generation.reused_tokens, reusable, "{label}");
            let layers = goldens.routing(&goldens.cases[0])[0].len();
            let [batches, steps] = ran(model, layers, before);
            let of_prompt = [batches, steps - (generation.tokens.len() - 1)];
            check_ways(turn.prompt_ids.len() - reusable, prompt_graphs, of_prompt, &label);
            let heads = (executions(model, "lmhead") - heads) as usize;
            assert_eq!(heads, turn.output_ids.len(), "{label}: executions of the head");
        }
    }
}

#[test]
fn later_turns_of_conversations_are_batched_too() {
    for tiny in TINY_MODELS {
        let checkpoint = tiny::fixture(tiny);
        let bundle = bundle(&checkpoint, |_| ());
        let mut model = bundle.on_cpu();
        play_all(&mut model, &tiny::goldens(&checkpoint), true, tiny);
    }
}

/// Logits behind each prompt of a conversation and behind the first token of its answer, where each turn consumes only
/// what it adds, against those that the reference computes over all of the text at once. Returns the distance and what
/// each turn ran.
fn turns(model: &mut Model, folder: &Path, goldens: &Goldens) -> (Distance, Vec<[usize; 2]>) {
    let recorded = folder.join("turns.safetensors");
    let chat = goldens.chat.iter().find(|chat| chat.id == "sky").unwrap();
    let layers = goldens.routing(&goldens.cases[0])[0].len();
    let (mut distances, mut all, mut consumed) = (Vec::new(), Vec::new(), Vec::new());
    model.op_mut().reset().unwrap();
    for (index, turn) in chat.turns.iter().enumerate() {
        let before = ["pf", "a"].map(|prefix| executions(model, prefix));
        let op = model.op_mut();
        assert!(turn.prompt_ids.starts_with(&consumed), "turn {index}");
        op.prefill(&[Segment::Tokens(&turn.prompt_ids[consumed.len()..])]).unwrap();
        let mut found = op.logits().unwrap().to_f32();
        op.decode(turn.output_ids[0]).unwrap();
        found.extend(op.logits().unwrap().to_f32());
        let (_, expected) = files::tensor(&recorded, &format!("sky.{index}"));
        distances.push(Distance::of(&found, &expected).unwrap());
        all.push(ran(model, layers, before));
        consumed.clone_from(&turn.prompt_ids);
        consumed.push(turn.output_ids[0]);
    }
    model.reset().unwrap();
    (distances.into_iter().reduce(Distance::worse).unwrap(), all)
}

#[test]
fn later_turns_in_several_chunks_give_the_logits_of_one_pass() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let bundle = bundle(&checkpoint, |o| o.prefill = Some(vec![10, 20]));
    let mut model = bundle.on_cpu();
    let (Distance { largest, .. }, ran) = turns(&mut model, &checkpoint, &goldens);
    assert!(largest <= 1e-3, "{largest}");
    // 14 tokens; 49 as twice 20 and nine; 41 as twice 20 and one.
    assert_eq!(ran, [[1, 1], [3, 1], [2, 2]]);
    let layers = goldens.routing(&goldens.cases[0])[0].len() as u64;
    assert_eq!(executions(&model, "pf10_"), layers);
}

#[test]
fn draft_tokens_of_a_model_with_experts_leave_its_answer() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let case = |id: &str| goldens.cases.iter().find(|case| case.id == id).unwrap();
    let cases = [case("long"), case("list")];
    let bundle = bundle(&checkpoint, |o| o.prefill = Some(vec![8]));
    let mut model = bundle.on_cpu();
    assert_eq!(model.info().verification.widths, [8]);
    let drafts = speculative_exact(&mut model, &cases, "3".parse().unwrap(), "three draft tokens");
    assert!(drafts.verifications > 0, "{drafts:?}");
    for right in [1, 5, 8] {
        let found = accepted_exact(&mut model, cases[0], 8, right);
        assert!(found.largest <= 1e-3, "{right} of 8 accepted: {found:?}");
    }
}

#[test]
fn markers_of_the_manifest_render_what_the_template_does() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let bundle = bundle(&checkpoint, |o| o.prefill = Some(vec![]));
    files::edit(&file(&bundle, "tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("chat_template").unwrap();
    });
    bundle.edit(|m| {
        let markers = |role: &str| serde_json::json!({"prefix": format!("<|{role}|>\n"), "suffix": "<|end|>\n"});
        let roles = ["system", "user", "assistant"].map(|role| (role.to_owned(), markers(role)));
        m["chat"] = Value::Object(roles.into_iter().collect());
    });
    play_all(&mut bundle.on_cpu(), &goldens, false, "markers");
}

/// Number of executions of graphs whose names begin with `prefix`.
fn executions(model: &Model, prefix: &str) -> u64 {
    replay::executions(model, |graph| graph.starts_with(prefix))
}

#[test]
fn each_expert_runs_over_the_tokens_of_a_prompt_that_chose_it() {
    // Twice what an expert gets of 64 tokens with two experts each, of six and of sixteen, in steps of eight.
    for (tiny, rows) in TINY_MODELS.into_iter().zip([48, 16]) {
        let (checkpoint, goldens) = tiny::model(tiny);
        let case = goldens.cases.iter().find(|c| c.id == "thirty").unwrap();
        let routing = goldens.routing(case);
        let mut used: BTreeMap<(usize, usize), u64> = BTreeMap::new();
        for token in &routing[..case.prompt_ids.len()] {
            for (layer, choices) in token.iter().enumerate() {
                choices
                    .iter()
                    .for_each(|(expert, _)| *used.entry((layer, *expert)).or_default() += 1);
            }
        }
        let layers = routing[0].len() as u64;
        let bundle = bundle(&checkpoint, |_| ());
        let mut model = bundle.on_cpu();
        let op = model.op_mut();
        op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
        assert_eq!(executions(&model, "pf"), layers);
        let expected: u64 = used.values().map(|tokens| tokens.div_ceil(rows)).sum();
        assert_eq!(executions(&model, "ffn_pf"), expected);
        assert_eq!((executions(&model, "a"), executions(&model, "ffn2")), (0, 0));
        assert_eq!(executions(&model, "lmhead"), 1);
        model.op_mut().decode(case.output_ids[0]).unwrap();
        assert_eq!((executions(&model, "a"), executions(&model, "ffn2")), (layers, layers));
    }
}

#[test]
fn prompts_longer_than_the_prompt_graphs_are_batched_in_parts() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let words = goldens.cases.iter().flat_map(|case| &case.prompt_ids).copied();
    let prompt: Vec<u32> = words.cycle().take(2 * WINDOW + 10).collect();
    let logits = |prefill: Vec<usize>| {
        let bundle = bundle(&checkpoint, |o| o.prefill = Some(prefill));
        let mut model = bundle.on_cpu();
        model.op_mut().prefill(&[Segment::Tokens(&prompt)]).unwrap();
        let layers = goldens.routing(&goldens.cases[0])[0].len() as u64;
        let steps = ["pf", "a", "ffn2", "lmhead"].map(|prefix| executions(&model, prefix));
        (model.op_mut().logits().unwrap().to_f32(), steps, layers)
    };
    let (stepped, steps, layers) = logits(vec![]);
    // Nobody asks for what the last experts make of a token before the last.
    let tokens = prompt.len() as u64;
    assert_eq!(steps, [0, tokens * layers, tokens * (layers - 1) + 1, 1]);
    let (batched, steps, _) = logits(vec![WINDOW]);
    assert_eq!(steps, [3 * layers, 0, 0, 1], "the last ten are a batch, too");
    assert!(largest(&stepped, &batched) <= 1e-3, "both ways alike");
}

#[test]
fn without_prefill_graphs_only_the_timings_differ() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let cases: Vec<_> = goldens.cases.iter().filter(|c| c.prompt_ids.len() < WINDOW).collect();
    let bundle = bundle(&checkpoint, |o| o.shards = 2);
    set_prompts_apart(&bundle);
    let removed = remove_prompt_graphs(&bundle);
    assert_eq!(removed, 5, "the weights are those of decode, and stay");
    let mut model = bundle.on_cpu();
    equals_the_reference(&mut model, &goldens, &cases, false, "files removed");
}

#[test]
fn missing_prefill_graphs_are_named() {
    let checkpoint = tiny::fixture(TINY_MODELS[0]);
    for missing in ["pf2.onnx", "ffn_pf.onnx"] {
        let bundle = bundle(&checkpoint, |o| o.shards = 2);
        set_prompts_apart(&bundle);
        fs::remove_file(file(&bundle, missing)).unwrap();
        says(
            &bundle.refusal(),
            ErrorKind::Artifact,
            &[missing, "is missing", "\"prefill\" is there"],
        );
    }
    // Taken out of the manifest instead.
    let bundle = bundle(&checkpoint, |o| o.shards = 2);
    set_prompts_apart(&bundle);
    bundle.edit(|m| {
        m["artifacts"]["contexts"].as_object_mut().unwrap().remove("pf_hi").unwrap();
    });
    says(&bundle.refusal(), ErrorKind::Graph, &["\"pf0\"", "\"pf2\"", "in part"]);
}

#[test]
fn tables_of_experts_that_do_not_fit_are_named() {
    let checkpoint = tiny::fixture(TINY_MODELS[0]);
    let bundle = bundle(&checkpoint, |_| ());
    let [weights, scales] = ["experts_i8.bin", "experts_scale.f32"].map(|end| file(&bundle, end));
    let (whole, of_scales) = (fs::read(&weights).unwrap(), fs::read(&scales).unwrap());
    let length = whole.len().to_string();

    fs::write(&weights, &whole[..whole.len() - 1000]).unwrap();
    let found = (whole.len() - 1000).to_string();
    says(&bundle.refusal(), ErrorKind::Artifact, &["experts_i8.bin", &found, &length, "truncated"]);
    fs::write(&weights, [&whole[..], &[0; 7]].concat()).unwrap();
    says(&bundle.refusal(), ErrorKind::Artifact, &["experts_i8.bin", &length, "another bundle"]);
    fs::write(&weights, &whole).unwrap();

    fs::write(&scales, &of_scales[4..]).unwrap();
    let length = of_scales.len().to_string();
    says(&bundle.refusal(), ErrorKind::Artifact, &["experts_scale.f32", &length, "truncated"]);
    let mut bad = of_scales.clone();
    bad[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&scales, bad).unwrap();
    says(&bundle.refusal(), ErrorKind::Artifact, &["experts_scale.f32", "scale 10", "NaN"]);
    fs::write(&scales, &of_scales).unwrap();

    // Scores for experts that the table does not have.
    bundle.edit(|m| m["params"]["n_experts"] = 5.into());
    says(&bundle.refusal(), ErrorKind::Graph, &["n_experts is 5", "router", "6"]);
    bundle.edit(|m| m["params"]["n_experts"] = 6.into());
    fs::remove_file(&scales).unwrap();
    says(
        &bundle.refusal(),
        ErrorKind::Artifact,
        &["experts_scale.f32", "/artifacts/experts/scales"],
    );
}

#[test]
fn plans_and_sizes_that_do_not_fit_are_named() {
    let checkpoint = tiny::fixture(TINY_MODELS[0]);
    let bundle = bundle(&checkpoint, |_| ());
    let whole = bundle.json();
    let set = |pointer: &str, value: Value| {
        bundle.edit(|manifest| {
            manifest.clone_from(&whole);
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            manifest.pointer_mut(parent).unwrap()[key] = value;
        });
        bundle.refusal().to_string()
    };
    for (pointer, value, words) in [
        ("/plan/params/decode", "b*".into(), &["/plan/params/decode", "b0", "a/a0"][..]),
        ("/plan/params/decode", "a".into(), &["/plan/params/decode", "one *"]),
        ("/plan/params/decode", vec!["a1", "a0", "a2", "a3"].into(), &["a1", "new_k_0"]),
        ("/plan/params/decode", vec!["a0"].into(), &["1 graphs, expected 4"]),
        ("/plan/params/ffn", "ffn_pf".into(), &["ffn_pf", "a_up"]),
        ("/plan/params/lmhead", "head".into(), &["/plan/params/lmhead", "\"head\""]),
        ("/plan/params/int8_step", 0.into(), &["plan.params.int8_step", "found 0", "more than 0"]),
        ("/plan/params/tensors", serde_json::json!({"x": "z"}), &["\"a0\"", "\"z\""]),
        ("/params/n_layers", 5.into(), &["a4"]),
        ("/params/hidden", 96.into(), &["84", "96", "params.hidden"]),
        ("/params/max_ctx", 201.into(), &["201", "200"]),
        ("/params/head_dim", 10.into(), &["cos", "\"a0\""]),
    ] {
        let error = set(pointer, value);
        has(&error, words);
    }
}

#[test]
fn a_sliding_window_hides_what_lies_before_it() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let case = goldens.cases.iter().find(|c| c.id == "thirty").unwrap();
    let logits = |window: usize, prefill: Vec<usize>| {
        let bundle = bundle(&checkpoint, |o| o.prefill = Some(prefill));
        bundle.edit(|m| m["params"]["sliding_window"] = window.into());
        let mut model = bundle.on_cpu();
        let op = model.op_mut();
        op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
        op.decode(case.output_ids[0]).unwrap();
        // Back and again: the mask opens what it had closed.
        op.truncate(10).unwrap();
        for token in &case.prompt_ids[10..] {
            op.decode(*token).unwrap();
        }
        op.logits().unwrap().to_f32()
    };
    let all = logits(200, vec![]);
    let expected = &goldens.logits(case)[0];
    assert!(largest(&all, expected) <= 1e-3);
    let narrow = logits(7, vec![]);
    assert!(largest(&narrow, expected) > 0.1, "the window hides something");
    let batched = logits(7, vec![WINDOW]);
    assert!(largest(&narrow, &batched) <= 1e-3, "both ways alike");
}

#[test]
fn a_prompt_beyond_the_context_is_refused() {
    let checkpoint = tiny::fixture(TINY_MODELS[0]);
    let bundle = bundle(&checkpoint, |_| ());
    let mut model = bundle.on_cpu();
    assert_eq!(model.info().max_ctx, 200);
    let mut request = Request::greedy(Prompt::Tokens(vec![300; 198]), 100);
    request.ignore_eos = true;
    let generation = generate(&mut model, &request);
    assert_eq!(generation.finish_reason, FinishReason::Length);
    assert_eq!(generation.tokens.len(), 3);
    let error = replay::complete(&mut model, &[300; 201], 1).unwrap_err();
    says(&error, ErrorKind::Prompt, &["201", "200"]);
}

#[tier(qnn)]
fn htp_fp16_equals_the_reference_in_both_forms() {
    let backend = backends::qnn();
    let full = tiny::full_matrix();
    for (tiny, target, inputs, shards, most) in [
        (TINY_MODELS[0], "v81", INT8, 2, if full { 6 } else { 3 }),
        (TINY_MODELS[1], "v81", F16, 1, if full { 5 } else { 0 }),
        (TINY_MODELS[0], "v79", F16, 1, 2),
        (TINY_MODELS[1], "v75", INT8, 2, 2),
    ] {
        if most == 0 {
            continue;
        }
        let (checkpoint, goldens) = tiny::model(tiny);
        let first = ["three", "thirty", "long", "tiny", "france"];
        let rank = |case: &&Case| first.iter().position(|id| *id == case.id).unwrap_or(9);
        let mut cases: Vec<_> = goldens.cases.iter().collect();
        cases.sort_by_key(rank);
        cases.truncate(most);
        let label = format!("{tiny} {target} {inputs} {shards} shards");
        let bundle = bundle(&checkpoint, |o| {
            o.shards = shards;
            experts(o, inputs);
            o.compiler = Some(backends::compiler(target));
        });
        let mut model = bundle.open(Arc::clone(&backend));
        let apart = equals_the_reference(&mut model, &goldens, &cases, true, &label);
        let Distance { largest, cosine, .. } = distance(&mut model, &goldens, &cases[..2]);
        eprintln!("{label}: logits {largest:.2e}, cosine {cosine:.6}, multipliers {apart:.2e}");
        assert!(cosine >= 0.999 && apart <= 0.02, "{label}: {cosine}, {apart}");
        // Of one model the reference has turns.
        if most > 2 && tiny == TINY_MODELS[0] {
            let (Distance { cosine, .. }, ran) = turns(&mut model, &checkpoint, &goldens);
            assert!(cosine >= 0.999, "{label}, turns: {cosine}");
            for (tokens, [batches, steps]) in [14, 49, 41].into_iter().zip(ran) {
                check_ways(tokens, true, [batches, steps - 1], &label);
            }
            let long = goldens.cases.iter().find(|case| case.id == "long").unwrap();
            assert!(long.prompt_ids.len() > WINDOW);
            let one = [&Case {
                output_ids: long.output_ids[..2].to_vec(),
                logits_steps: vec![0, 1],
                ..long.clone()
            }];
            let Distance { cosine, .. } = distance(&mut model, &goldens, &one);
            assert!(cosine >= 0.999, "{label}, a prompt in two chunks: {cosine}");
            let brief = tiny::goldens(&checkpoint).brief();
            let case = brief.cases.iter().find(|case| case.id == cases[0].id).unwrap();
            let Distance { cosine, .. } = replay::hands_over(&mut model, &brief, case, &label);
            assert!(cosine >= 0.999, "{label}, tokens on the CPU: {cosine}");
        }
    }
}

/// Any other checkpoint with goldens, such as one that `tests/oracle/train.py unseen-phimoe` made.
#[tier(by_hand = "QHX_TEST_PHIMOE")]
fn checkpoint_of_the_environment_equals_the_reference() {
    let checkpoint = PathBuf::from(std::env::var_os("QHX_TEST_PHIMOE").unwrap());
    let goldens = tiny::goldens(&checkpoint);
    for inputs in [INT8, F16] {
        let cpu = bundle(&checkpoint, |o| experts(o, inputs));
        let mut model = cpu.on_cpu();
        equals_the_reference(&mut model, &goldens, &goldens.all(), true, "cpu");
    }
}

#[tier(qnn, by_hand = "QHX_TEST_PHIMOE")]
fn htp_is_exact_with_a_checkpoint_of_the_environment() {
    let checkpoint = PathBuf::from(std::env::var_os("QHX_TEST_PHIMOE").unwrap());
    let goldens = tiny::goldens(&checkpoint);
    for inputs in [INT8, F16] {
        let npu = bundle(&checkpoint, |o| {
            experts(o, inputs);
            o.compiler = Some(backends::compiler("v81"));
        });
        let mut model = npu.open(backends::qnn());
        equals_the_reference(&mut model, &goldens, &goldens.all(), true, "htp");
    }
}
