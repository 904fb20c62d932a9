//! Llama-like tiny models from checkpoint to text, against goldens that `transformers` made.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::ErrorKind;
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::{DraftCounts, Model, Prompt, Request, Speculate};
use qhx_core::op::{Segment, Task};
use qhx_forge::calibrate::{CalibrateOptions, Reader, calibrate};
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Precision, Silent};
use qhx_tests::forged::Forged;
use qhx_tests::replay::{
    accepted_exact, alike, generate, greedy_exact, speculative_exact, step_exact, within,
};
use qhx_tests::restarting::Restarting;
use qhx_tests::tiny;
use qhx_tests::{backends, has, registered, replay, says, suite};
use qhx_tiers::tier;

const TINY_MODELS: [&str; 4] = ["llama3-tiny", "mistral-tiny", "qwen3-tiny", "qwen2-tiny"];
/// Widths of prompt graphs: the prompts of the goldens lie below, between and above them.
const WIDTHS: [usize; 2] = [12, 48];

/// Forges a checkpoint for the CPU, unless `change` sets other options.
fn bundle(checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(checkpoint, |options| {
        options.max_ctx = Some(200);
        options.prefill = Some(WIDTHS.to_vec());
        change(options);
    })
}

/// Executions of a graph so far.
fn executions(model: &Model, graph: &str) -> u64 {
    replay::executions(model, |name| name == graph)
}

#[test]
fn cpu_equals_the_reference_for_prompts_of_any_width() {
    for tiny in TINY_MODELS {
        let (checkpoint, goldens) = tiny::model(tiny);
        let cases: Vec<_> = goldens.cases.iter().collect();
        for shards in [1, 2] {
            let bundle = bundle(&checkpoint, |o| o.shards = shards);
            let mut model = bundle.on_cpu();
            let label = format!("{tiny}, {shards} shards");
            greedy_exact(&mut model, &cases, &label);
            within(step_exact(&mut model, &goldens, &cases, &label), 1e-3, &label);
        }
    }
}

#[test]
fn a_bundle_without_prompt_graphs_says_the_same_token_by_token() {
    let (checkpoint, goldens) = tiny::model("mistral-tiny");
    let bundle = bundle(&checkpoint, |o| o.prefill = Some(Vec::new()));
    let mut model = bundle.on_cpu();
    greedy_exact(&mut model, &goldens.all(), "no prompt graphs");
}

#[test]
fn a_prompt_takes_the_passes_that_cost_least() {
    let checkpoint = tiny::fixture("mistral-tiny");
    let bundle = bundle(&checkpoint, |_| ());
    let mut model = bundle.on_cpu();
    let counts = |model: &Model| {
        ["decode", "prefill12", "prefill48", "lmhead"].map(|graph| executions(model, graph))
    };
    for (tokens, expected) in [
        (1, [1, 0, 0, 1]),
        (2, [0, 1, 0, 1]),
        (12, [0, 1, 0, 1]),
        // 12 and a step: less padding than 48 rows.
        (13, [1, 1, 0, 1]),
        (48, [0, 0, 1, 1]),
        (49, [1, 0, 1, 1]),
        (100, [0, 1, 2, 1]),
        (200, [0, 1, 4, 1]),
    ] {
        let before = counts(&model);
        let op = model.op_mut();
        op.reset().unwrap();
        op.prefill(&[Segment::Tokens(&vec![7; tokens])]).unwrap();
        assert_eq!(op.position(), tokens);
        let after = counts(&model);
        let found: Vec<_> = after.iter().zip(before).map(|(a, b)| a - b).collect();
        assert_eq!(found, expected, "{tokens} tokens");
    }
    let error = model.op_mut().prefill(&[Segment::Tokens(&[7])]).unwrap_err();
    says(&error, ErrorKind::Prompt, &["200"]);
}

/// Plays every conversation; each turn but the first reuses what the earlier one left.
fn play_all(model: &mut Model, goldens: &tiny::Goldens, label: &str) {
    for chat in &goldens.chat {
        model.reset().unwrap();
        for (index, turn) in chat.turns.iter().enumerate() {
            let prompt = chat.prompt(index);
            let (steps, heads) = (executions(model, "decode"), executions(model, "lmhead"));
            let generation = generate(model, &Request::greedy(prompt, turn.output_ids.len()));
            let label = format!("{label}, {}, turn {index}", chat.id);
            assert_eq!(generation.prompt_tokens, turn.prompt_ids.len(), "{label}");
            assert_eq!(generation.tokens, turn.output_ids, "{label}");
            assert_eq!(generation.text, turn.text, "{label}");
            if index > 0 {
                let reusable = turn.reusable(&chat.turns[index - 1]);
                assert_eq!(generation.reused_tokens, reusable, "{label}");
                eprintln!(
                    "{label}: {} of {} prompt tokens reused, prefill {:.1} ms",
                    generation.reused_tokens,
                    generation.prompt_tokens,
                    generation.timings.prefill.as_secs_f64() * 1e3
                );
            }
            let stepped = (executions(model, "decode") - steps) as usize;
            assert!(stepped <= turn.output_ids.len(), "{label}: {stepped} decode steps");
            // One at the end of the prompt, and one a step: the prompt is consumed in one piece.
            let heads = (executions(model, "lmhead") - heads) as usize;
            assert_eq!(heads, turn.output_ids.len(), "{label}: executions of the head");
        }
    }
}

#[test]
fn a_second_turn_reuses_the_longest_common_prefix() {
    for tiny in TINY_MODELS {
        let (checkpoint, goldens) = tiny::model(tiny);
        let bundle = bundle(&checkpoint, |_| ());
        let mut model = bundle.on_cpu();
        play_all(&mut model, &goldens, tiny);
    }
}

/// Against the log-softmax of the reference's logits, and with draft tokens as without.
#[test]
fn log_probabilities_equal_those_of_the_reference() {
    let (checkpoint, goldens) = tiny::model("mistral-tiny");
    let bundle = bundle(&checkpoint, |o| o.prefill = Some(vec![4]));
    let mut model = bundle.on_cpu();
    for case in &goldens.cases {
        let prompt = Prompt::Tokens(case.prompt_ids.clone());
        let request = Request::greedy(prompt, case.output_ids.len()).logprobs(5);
        let found = generate(&mut model, &request);
        assert_eq!(found.tokens, case.output_ids, "{}", case.id);
        assert_eq!(found.logprobs.len(), found.tokens.len(), "{}", case.id);
        for (step, logits) in case.logits_steps.iter().zip(goldens.logits(case)) {
            let (token, found) = (case.output_ids[*step], &found.logprobs[*step]);
            let total = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
            let mut expected: Vec<_> =
                logits.iter().map(|x| f64::from(*x) - total).enumerate().collect();
            expected.sort_by(|a, b| b.1.total_cmp(&a.1));
            assert_eq!(found.top[0], (token, found.logprob), "{}, step {step}", case.id);
            for ((_, found), (_, expected)) in found.top.iter().zip(&expected) {
                let difference = (f64::from(*found) - expected).abs();
                assert!(difference < 2e-2, "{}, step {step}: {found} {expected}", case.id);
            }
        }
        let drafted = generate(&mut model, &request.clone().speculate(draft_tokens("3")));
        for (one, other) in found.logprobs.iter().zip(&drafted.logprobs) {
            assert!((one.logprob - other.logprob).abs() < 2e-2, "{}: {one:?} {other:?}", case.id);
        }
        let without = Request::greedy(request.prompt, 1);
        assert!(generate(&mut model, &without).logprobs.is_empty());
    }
}

fn draft_tokens(count: &str) -> Speculate {
    count.parse().unwrap()
}

/// By prompt lookup: over graphs of 4 and of 12 rows, in one and two shards, and in conversations.
#[test]
fn draft_tokens_leave_the_answer_of_plain_decoding() {
    let mut accepted = 0;
    for (tiny, shards) in TINY_MODELS.into_iter().zip([2, 1, 1, 1]) {
        let (checkpoint, goldens) = tiny::model(tiny);
        let cases: Vec<_> = goldens.cases.iter().collect();
        let bundle = bundle(&checkpoint, |o| {
            o.shards = shards;
            o.prefill = Some(vec![4, 12]);
        });
        let mut model = bundle.on_cpu();
        assert_eq!(model.info().verification.widths, [4, 12]);
        for mode in ["1", "3", "20", "auto"] {
            let label = format!("{tiny}, {mode} draft tokens");
            let found = speculative_exact(&mut model, &cases, draft_tokens(mode), &label);
            eprintln!("{label}: {found:?}");
            accepted += found.accepted;
        }
        for (rows, right) in [(4, 1), (4, 3), (12, 5), (12, 12)] {
            let case = cases.iter().find(|case| case.output_ids.len() > right).unwrap();
            let found = accepted_exact(&mut model, case, rows, right);
            eprintln!("{tiny}, {right} of {rows} kept: {found:?}");
            assert!(found.largest <= 1e-4, "{tiny}, {right} of {rows} kept: {found:?}");
        }
    }
    assert!(accepted > 10, "{accepted} draft tokens were accepted");
}

/// A bundle that is its own draft is always right; one of another tokenizer, or of another task, is refused.
#[test]
fn a_draft_model_changes_no_token() {
    let (checkpoint, goldens) = tiny::model("mistral-tiny");
    let cases: Vec<_> = goldens.cases.iter().take(3).collect();
    let narrow = |o: &mut ForgeOptions| o.prefill = Some(vec![4]);
    let bundle = bundle(&checkpoint, narrow);
    let open = || bundle.on_cpu();
    let mut model = open();
    model.set_draft(open()).unwrap();
    for mode in ["3", "auto"] {
        let found = speculative_exact(&mut model, &cases, draft_tokens(mode), "its own draft");
        assert_eq!(found.drafted, found.accepted, "{mode}: {found:?}");
        assert!(mode == "auto" || found.drafted > 10, "{mode}: {found:?}");
    }
    let other = self::bundle(&tiny::fixture("qwen3-tiny"), narrow);
    let error = model.set_draft(other.on_cpu()).unwrap_err();
    says(&error, ErrorKind::Usage, &["tokenizer.json differs from"]);
    let encoder = self::bundle(&tiny::fixture("embed-mistral-tiny"), |o| {
        (o.task, o.prefill) = (Some(Task::Embed), None);
    });
    let encoder = encoder.on_cpu();
    has(model.set_draft(encoder).unwrap_err().message(), &["does not generate"]);
    // What was refused takes nothing away.
    let found = speculative_exact(&mut model, &cases, draft_tokens("3"), "the first draft");
    assert!(found.accepted > 10, "{found:?}");
}

/// Rows of caches, rotary tables and the draft's state are overwritten then.
#[test]
fn a_restart_that_overwrites_all_buffers_changes_no_token() {
    let (checkpoint, goldens) = tiny::model("mistral-tiny");
    let case = &goldens.cases[0];
    let bundle = bundle(&checkpoint, |o| o.prefill = Some(vec![4]));
    let backend = Restarting::new(backends::cpu());
    let open = || tiny::open(&bundle.manifest, backend.clone()).unwrap();
    let (mut plain, mut drafted) = (open(), open());
    drafted.set_draft(open()).unwrap();
    let play = |model: &mut Model, mode: &str, nth: u64| {
        model.reset().unwrap();
        backend.restart_at(nth);
        let found =
            speculative_exact(model, &[case], draft_tokens(mode), &format!("{mode}, at {nth}"));
        (found.drafted, u64::MAX - backend.left())
    };
    for (model, mode) in [(&mut plain, "off"), (&mut drafted, "3")] {
        let (drafted, executions) = play(model, mode, u64::MAX);
        assert!(executions > 8, "{mode}: {executions} executions");
        for nth in [1, executions / 2, executions] {
            play(model, mode, nth);
        }
        assert_eq!(play(model, mode, u64::MAX).0, drafted, "{mode}: the draft goes on");
    }
}

#[test]
fn a_bundle_that_verifies_nothing_decodes_plainly() {
    for (tiny, prefill, words) in [
        ("mistral-tiny", Some(Vec::new()), "no graphs that take several tokens"),
        ("phimoe-6", Some(Vec::new()), "no graphs that take several tokens"),
    ] {
        let (checkpoint, goldens) = tiny::model(tiny);
        let cases: Vec<_> = goldens.cases.iter().take(2).collect();
        let bundle = bundle(&checkpoint, |o| o.prefill = prefill);
        let mut model = bundle.on_cpu();
        has(&model.info().verification.refusal.clone().unwrap(), &[words]);
        let found = speculative_exact(&mut model, &cases, draft_tokens("auto"), tiny);
        assert_eq!(found, DraftCounts::default(), "{tiny}");
    }
}

#[test]
fn logits_beyond_the_embedding_table_are_never_chosen() {
    for tiny in ["mistral-tiny", "qwen35-tied", "phimoe-6"] {
        let bundle = bundle(&tiny::fixture(tiny), |o| o.prefill = None);
        let mut manifest = bundle.json();
        let hidden = manifest["params"]["hidden"].as_u64().unwrap();
        let vocab = manifest["params"].as_object_mut().unwrap().remove("vocab").unwrap();
        let rows = vocab.as_u64().unwrap() / 2;
        bundle.edit(|whole| whole.clone_from(&manifest));
        let embed = &manifest["artifacts"]["embed"];
        let embed = embed["path"].as_str().or(embed.as_str()).unwrap();
        let table = bundle.manifest.with_file_name(embed);
        let table = std::fs::File::options().write(true).open(table).unwrap();
        let width = table.metadata().unwrap().len() / vocab.as_u64().unwrap() / hidden;
        table.set_len(rows * hidden * width).unwrap();

        let mut model = bundle.on_cpu();
        let mut request = Request::greedy(Prompt::Tokens(vec![1, 2, 3]), 40);
        request.ignore_eos = true;
        generate(&mut model, &request);
        // So hot that every token is about as likely.
        request.sampling.temperature = 100.0;
        request.sampling.seed = Some(1);
        let tokens = generate(&mut model, &request).tokens;
        assert_eq!(tokens.len(), 40, "{tiny}");
        assert!(tokens.iter().all(|&id| u64::from(id) < rows), "{tiny}: {tokens:?}");
    }
}

fn htp(target: &str, change: impl FnOnce(&mut ForgeOptions)) -> impl FnOnce(&mut ForgeOptions) {
    let compiler = backends::compiler(target);
    move |options| {
        options.compiler = Some(compiler);
        change(options);
    }
}

#[tier(qnn)]
fn htp_fp16_equals_the_reference() {
    let backend = backends::qnn();
    // The usual run has two of them on other targets alone, below.
    let below = |tiny: &str| ["mistral-tiny", "qwen3-tiny"].contains(&tiny);
    for tiny in TINY_MODELS.into_iter().filter(|tiny| tiny::full_matrix() || !below(tiny)) {
        let checkpoint = tiny::fixture(tiny);
        let goldens = tiny::goldens(&checkpoint).brief();
        // The shortest, and the longest: below and above the width of every prompt graph.
        let mut cases: Vec<_> = goldens.cases.iter().collect();
        cases.sort_by_key(|case| case.prompt_ids.len());
        let shortest = if tiny::full_matrix() { 3 } else { 2 };
        cases.drain(shortest..cases.len() - 1);
        let bundle = bundle(&checkpoint, htp("v81", |_| ()));
        let mut model = bundle.open(Arc::clone(&backend));
        greedy_exact(&mut model, &cases, tiny);
        alike(step_exact(&mut model, &goldens, &cases[..2], tiny), 0.999, tiny);
        if tiny == TINY_MODELS[0] {
            play_all(&mut model, &goldens, tiny);
        }
    }
}

#[tier(qnn)]
fn htp_fp16_shards_and_other_targets_equal_the_reference() {
    let backend = backends::qnn();
    for (tiny, target, shards) in
        [("llama3-tiny", "v81", 2), ("mistral-tiny", "v79", 1), ("qwen3-tiny", "v75", 1)]
    {
        let (checkpoint, goldens) = tiny::model(tiny);
        let brief = tiny::goldens(&checkpoint).brief();
        let contexts = if target == "v75" { vec![16] } else { Vec::new() };
        let change = |o: &mut ForgeOptions| (o.shards, o.contexts) = (shards, contexts.clone());
        let bundle = bundle(&checkpoint, htp(target, change));
        let mut model = bundle.open(Arc::clone(&backend));
        let label = format!("{tiny} {target} {shards} shards");
        let cases: Vec<_> =
            brief.cases.iter().take(if tiny::full_matrix() { 2 } else { 1 }).collect();
        greedy_exact(&mut model, &cases, &label);
        if target == "v79" {
            let case = &goldens.cases[0];
            let found = speculative_exact(&mut model, &[case], draft_tokens("3"), &label);
            let kept = accepted_exact(&mut model, case, 4, 2);
            eprintln!("{label}: {found:?}, logits after two of four {kept:?}");
            assert!(kept.cosine >= 0.999, "{label}: {kept:?}");
        }
        if !contexts.is_empty() {
            let ran = ["decode16", "decode"].map(|graph| executions(&model, graph));
            assert!(ran.iter().all(|count| *count > 0), "{label}: {ran:?}");
        }
        if shards > 1 {
            // Prompt graphs, hidden states from shard to shard, caches.
            registered::copies_nothing(&bundle.manifest, &replay::shortest(&goldens, 1), &label);
        }
    }
}

#[tier(qnn)]
fn htp_w8a16_passes_the_tolerant_gate() {
    let backend = backends::qnn();
    for tiny in &TINY_MODELS[..if tiny::full_matrix() { 3 } else { 1 }] {
        let checkpoint = tiny::fixture(tiny);
        let goldens = tiny::goldens(&checkpoint).brief();
        let int8 = htp("v81", |o| {
            o.precision = Precision::W8A16;
            o.prefill = Some(vec![WIDTHS[0]]);
        });
        let bundle = bundle(&checkpoint, int8);
        let mut model = bundle.open(Arc::clone(&backend));
        let cases: Vec<_> =
            goldens.cases.iter().filter(|c| c.prompt_ids.len() < 20).take(3).collect();
        suite::passes(&mut model, &cases, usize::MAX, &format!("{tiny} w8a16"));
    }
}

/// Tiny models whose layers all become 4-bit blocks. The bars are half as much again as what was measured, of the
/// layers and with a head of 4 bits, too; docs/performance.md has all tiny models.
#[test]
fn four_bit_weights_keep_the_answers_and_stay_near_f16() {
    for (tiny, bars) in [("llama3-blocks", [9.3e-4, 1.3e-3]), ("qwen35-blocks", [3.5e-4, 5.7e-4])] {
        let folder = tiny::fixture(tiny);
        let goldens = tiny::goldens(&folder);
        let cases: Vec<_> = goldens.cases.iter().collect();
        let texts = cases.iter().map(|case| format!("{}{}", case.prompt, case.text)).collect();
        let wanted = CalibrateOptions { texts, tokens: 400, target: None };
        let mut heads = Vec::new();
        for (head, bar) in [Precision::W8A16, Precision::W4A16].into_iter().zip(bars) {
            let label = format!("{tiny}, head {}", head.suffix());
            let bundle = bundle(&folder, |o| {
                (o.precision, o.head, o.prefill) = (Precision::W4A16, Some(head), Some(Vec::new()));
            });
            let mut model = bundle.on_cpu();
            greedy_exact(&mut model, &cases, &label);
            let data = bundle.manifest.with_file_name("onnx").join("lmhead.onnx_data");
            heads.push(std::fs::metadata(data).unwrap().len());

            let checkpoint = Checkpoint::open(&folder).unwrap();
            let out = tempfile::tempdir().unwrap();
            // Of the precisions as a whole, not layer by layer.
            let options =
                ForgeOptions { head: Some(head), ..ForgeOptions::new(out.path().join("out")) };
            let open = |manifest: &Path| -> qhx_base::Result<Box<dyn Reader>> {
                Ok(Box::new(tiny::open(manifest, backends::cpu())?))
            };
            let found =
                calibrate(&checkpoint, recipe, &options, &wanted, &open, &mut Silent).unwrap();
            let (_, quality) =
                found.precisions.into_iter().find(|(p, _)| *p == Precision::W4A16).unwrap();
            eprintln!("{label}: perplexity in f16 {}, {quality:?}", found.perplexity);
            assert!(quality.divergence < bar, "{label}: {quality:?}");
            assert!(
                quality.divergence > bar / 10.0,
                "{label}: the weights were not quantised: {quality:?}"
            );
        }
        // For each 32 weights 16 bytes, a scale and an offset, in place of 32 and a scale.
        assert!(heads[1] * 5 < heads[0] * 4, "{tiny}: bytes of the heads {heads:?}");
    }
}

/// Any other checkpoint with goldens, such as one that `tests/oracle/train.py` made.
#[tier(by_hand = "QHX_TEST_LLAMA")]
fn checkpoint_of_the_environment_equals_the_reference() {
    let checkpoint = PathBuf::from(std::env::var_os("QHX_TEST_LLAMA").unwrap());
    let goldens = tiny::goldens(&checkpoint);
    let cases: Vec<_> = goldens.cases.iter().collect();
    for shards in [1, 2] {
        let bundle = bundle(&checkpoint, |o| o.shards = shards);
        let mut model = bundle.on_cpu();
        greedy_exact(&mut model, &cases, "cpu");
        within(step_exact(&mut model, &goldens, &cases, "cpu"), 1e-3, "cpu");
    }
}

#[tier(qnn, by_hand = "QHX_TEST_LLAMA")]
fn htp_is_exact_with_a_checkpoint_of_the_environment() {
    let checkpoint = PathBuf::from(std::env::var_os("QHX_TEST_LLAMA").unwrap());
    let goldens = tiny::goldens(&checkpoint);
    let bundle = bundle(&checkpoint, htp("v81", |_| ()));
    let mut model = bundle.open(backends::qnn());
    greedy_exact(&mut model, &goldens.all(), "htp");
}

#[test]
fn graphs_that_do_not_fit_the_op_are_named() {
    let checkpoint = tiny::fixture("mistral-tiny");
    let bundle = bundle(&checkpoint, |_| ());
    let text = std::fs::read_to_string(&bundle.manifest).unwrap();
    for (from, to, words) in [
        ("\"decode\": \"decode\"", "\"decode\": \"prefill12\"", ["prefill12", "12 rows"]),
        ("\"lmhead\": \"lmhead\"", "\"lmhead\": \"nohead\"", ["nohead", "lmhead"]),
        ("\"max_ctx\": 200", "\"max_ctx\": 201", ["201", "200"]),
        ("\"n_layers\": 4", "\"n_layers\": 5", ["layer 4", "past_k_4"]),
        ("\"hidden\": 80", "\"hidden\": 96", ["x f32[1, 80]", "96"]),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&bundle.manifest, text.replace(from, to)).unwrap();
        let error = bundle.refusal().to_string();
        has(&error, &words);
    }
}
