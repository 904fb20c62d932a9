//! Qwen3.5 tiny models from checkpoint to text, against goldens that `transformers` made; and one that sees.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use half::bf16;
use qhx_base::compare::Distance;
use qhx_base::{CancelToken, ErrorKind};
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::{Event, FinishReason, Model, Prompt, Request};
use qhx_core::op::{HostOp, Segment};
use qhx_exec::backend::Backend;
use qhx_forge::{ForgeOptions, Silent, forge, forge_checkpoint, registry};
use qhx_tests::forged::set;
use qhx_tests::images::{Sights, answer};
use qhx_tests::replay::{
    accepted_exact, alike, executions, generate, greedy_exact, play, shortest, speculative_exact,
    step_exact, within,
};
use qhx_tests::restarting::Restarting;
use qhx_tests::tiny::{self, Bundles, CPU, Case, Variant};
use qhx_tests::{backends, files, plugin_files, registered, replay, says, suite};
use qhx_tiers::tier;

const TINY_MODELS: [&str; 2] = ["qwen35-tied", "qwen35-untied"];
/// The tiny model that sees.
const SEEING: &str = "qwen35-vision";
/// Logits and features on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-3;

/// The first `most` cases, shortest first, step by step; the first `texts` of them as texts.
fn proves_equal(
    checkpoint: &Path,
    variant: Variant,
    backend: Arc<dyn Backend>,
    (max, texts): (usize, usize),
) {
    let goldens = tiny::goldens(checkpoint);
    let goldens = if variant.target.is_some() { goldens.brief() } else { goldens };
    let label = format!("{} {variant:?}", checkpoint.file_name().unwrap().display());
    let cases = shortest(&goldens, max);
    let mut model = tiny::open(&tiny::bundle(checkpoint, variant), backend)
        .unwrap_or_else(|e| panic!("{label}: {e}"));
    greedy_exact(&mut model, &cases[..texts.min(cases.len())], &label);
    let found = step_exact(&mut model, &goldens, &cases, &label);
    if variant.target.is_none() {
        return within(found, CPU_DISTANCE, &label);
    }
    alike(found, 0.999, &label);
    if variant.target == Some("v81") {
        // A prompt of one token is one for the CPU.
        let case = cases.iter().find(|case| case.prompt_ids.len() > 1).unwrap();
        alike(replay::hands_over(&mut model, &goldens, case, &label), 0.999, &label);
    }
}

#[test]
fn cpu_is_greedy_exact_with_one_and_two_shards() {
    for tiny in TINY_MODELS {
        for shards in [1, 2] {
            let variant = Variant { shards, ..CPU };
            proves_equal(&tiny::fixture(tiny), variant, backends::cpu(), (usize::MAX, usize::MAX));
        }
    }
}

/// Prompts in chunks of several widths, over one and two shards; conversations, with states that go back to snapshots.
#[test]
fn prompts_in_chunks_say_the_same() {
    for tiny in TINY_MODELS {
        for (shards, prefill) in [(1, &[16][..]), (2, &[3, 7, 70])] {
            let variant = Variant { shards, prefill, ..CPU };
            proves_equal(&tiny::fixture(tiny), variant, backends::cpu(), (usize::MAX, usize::MAX));
            let manifest = tiny::bundle(&tiny::fixture(tiny), variant);
            for chat in &tiny::goldens(&tiny::fixture(tiny)).chat {
                goes_on(&mut tiny::open(&manifest, backends::cpu()).unwrap(), chat);
            }
        }
    }
}

/// A tiny model whose heads forget nearly nothing and nearly all, in turns, with room for a long prompt.
fn extreme() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    plugin_files::copy_folder(&tiny::fixture(TINY_MODELS[0]), folder.path());
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let longer =
        text.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 400");
    assert_ne!(text, longer);
    std::fs::write(config, longer).unwrap();
    files::edit_tensors(&folder.path().join("model.safetensors"), |tensors| {
        let mut edited = 0;
        for (_, dtype, _, data) in tensors.iter_mut().filter(|(name, ..)| name.ends_with("A_log")) {
            let size = dtype.bitsize() / 8;
            for (head, value) in data.chunks_exact_mut(size).enumerate() {
                // The state after a token: all but e^-9 of it, or e^-148 times it and less.
                let log: f32 = if head % 2 == 0 { -9.0 } else { 5.0 };
                match size {
                    2 => value.copy_from_slice(&bf16::from_f32(log).to_le_bytes()),
                    _ => value.copy_from_slice(&log.to_le_bytes()),
                }
            }
            edited += 1;
        }
        assert!(edited > 1);
    });
    folder
}

/// Logits of two models after prompts of these lengths, and of one token behind them.
fn chunks_equal_steps(
    [chunks, steps]: [&mut Model; 2],
    prompts: &[Vec<u32>],
    label: &str,
) -> Distance {
    let mut worst = Distance::of(&[1.0], &[1.0]).unwrap();
    for prompt in prompts {
        let mut logits = [&mut *chunks, &mut *steps].map(|model| {
            let op = model.op_mut();
            op.reset().unwrap();
            op.prefill(&[Segment::Tokens(prompt)]).unwrap();
            let first = op.logits().unwrap().to_f32();
            op.decode(prompt[0]).unwrap();
            [first, op.logits().unwrap().to_f32()].concat()
        });
        assert!(logits.iter().flatten().all(|v| v.is_finite()), "{label}, {}", prompt.len());
        let steps = std::mem::take(&mut logits[1]);
        worst = worst.worse(Distance::of(&logits[0], &steps).unwrap());
    }
    eprintln!("{label}: {worst:?}");
    worst
}

fn forged(
    checkpoint: &Path,
    target: Option<&str>,
    prefill: &[usize],
) -> (tempfile::TempDir, PathBuf) {
    forged_of(&Checkpoint::open(checkpoint).unwrap(), target, prefill)
}

fn forged_of(
    checkpoint: &Checkpoint,
    target: Option<&str>,
    prefill: &[usize],
) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let mut options = ForgeOptions::new(folder.path().join("bundle"));
    // As much as the checkpoint takes, up to this.
    let max = |max_ctx: usize| {
        checkpoint.text_config()["max_position_embeddings"].as_u64().unwrap().min(max_ctx as u64)
            as usize
    };
    options.max_ctx = Some(max(320));
    options.prefill = Some(prefill.to_vec());
    options.compiler = target.map(backends::compiler);
    let report = forge_checkpoint(checkpoint, registry::recipe, &options, &mut Silent);
    let manifest = report.unwrap_or_else(|e| panic!("{e}")).manifest;
    (folder, manifest)
}

/// Whatever a chunk leaves over, and where one token is repeated: the state is what steps make of it.
#[test]
fn chunks_leave_the_state_that_steps_leave() {
    let case = tiny::goldens(&tiny::fixture(TINY_MODELS[0]))
        .cases
        .into_iter()
        .max_by_key(|c| c.prompt_ids.len())
        .unwrap();
    let text = |len: usize| case.prompt_ids.iter().copied().cycle().take(len).collect::<Vec<_>>();
    let lengths = [1, 7, 8, 9, 29].map(text);
    for (label, checkpoint) in [("as trained", None), ("extreme", Some(extreme()))] {
        let path = checkpoint
            .as_ref()
            .map_or_else(|| tiny::fixture(TINY_MODELS[0]), |c| c.path().to_owned());
        let mut prompts = lengths.to_vec();
        if checkpoint.is_some() {
            prompts.push(vec![case.prompt_ids[0]; 300]);
        }
        let (_folder, manifest) = forged(&path, None, &[]);
        let mut steps = tiny::open(&manifest, backends::cpu()).unwrap();
        for width in [8, 100] {
            let (_folder, manifest) = forged(&path, None, &[width]);
            let mut chunks = tiny::open(&manifest, backends::cpu()).unwrap();
            let Distance { largest, .. } =
                chunks_equal_steps([&mut chunks, &mut steps], &prompts, label);
            assert!(largest <= 1e-3, "{label}, chunks of {width}: {largest:e}");
        }
    }
}

/// A checkpoint of shapes that no tiny model has: odd numbers of heads, as many of keys as of values in the linear
/// layers, values wider than keys, and a head of its own. The weights are drawn.
fn unseen() -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu",
        "hidden_size": 104, "intermediate_size": 152, "num_hidden_layers": 5,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention",
                        "linear_attention"],
        "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 40,
        "linear_num_key_heads": 5, "linear_num_value_heads": 5, "linear_key_head_dim": 20,
        "linear_value_head_dim": 28, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.2},
        "max_position_embeddings": 320, "vocab_size": 211, "tie_word_embeddings": false
    });
    let file = folder.path().join("config.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let checkpoint = Checkpoint::synthetic(&file, 17).unwrap();
    (folder, checkpoint)
}

/// Prompts of 1, P − 1, P, P + 1 and 3P + 5 tokens.
fn around(rows: usize) -> Vec<Vec<u32>> {
    let text = |len: usize| (0..len).map(|i| ((i * i + 7 * i + 3) % 211) as u32).collect();
    [1, rows - 1, rows, rows + 1, 3 * rows + 5].map(text).to_vec()
}

fn prompt_graphs(model: &Model) -> u64 {
    executions(model, |graph| graph.starts_with("prefill"))
}

#[test]
fn chunks_of_an_unseen_checkpoint_equal_its_steps() {
    let (_config, checkpoint) = unseen();
    let (_folder, manifest) = forged_of(&checkpoint, None, &[]);
    let mut steps = tiny::open(&manifest, backends::cpu()).unwrap();
    for rows in [12, 70] {
        let (_folder, manifest) = forged_of(&checkpoint, None, &[rows]);
        let mut chunks = tiny::open(&manifest, backends::cpu()).unwrap();
        let label = format!("unseen, chunks of {rows}");
        let models = [&mut chunks, &mut steps];
        let Distance { largest, .. } = chunks_equal_steps(models, &around(rows), &label);
        assert!(largest <= 1e-4, "{label}: {largest:e}");
        // Three whole prompts in one each, the longest in three and its end in a fourth.
        assert!(prompt_graphs(&chunks) >= 6, "{label}");
    }
}

#[tier(qnn, full)]
fn htp_chunks_of_an_unseen_checkpoint_equal_its_steps() {
    let (_config, checkpoint) = unseen();
    let (_folder, manifest) = forged_of(&checkpoint, None, &[]);
    let mut steps = tiny::open(&manifest, backends::cpu()).unwrap();
    for target in ["v81", "v79", "v75"] {
        let (_folder, manifest) = forged_of(&checkpoint, Some(target), &[12]);
        let mut chunks = tiny::open(&manifest, backends::qnn()).unwrap();
        let models = [&mut chunks, &mut steps];
        let Distance { cosine, .. } = chunks_equal_steps(models, &around(12), target);
        assert!(cosine >= 0.999, "{target}: {cosine}");
        assert!(prompt_graphs(&chunks) >= 6, "{target}");
    }
}

/// On the emulator, against steps on the CPU.
#[tier(qnn)]
fn the_npu_takes_prompts_in_chunks() {
    let full = tiny::full_matrix();
    let checkpoint = extreme();
    let (_folder, manifest) = forged(checkpoint.path(), None, &[]);
    let mut steps = tiny::open(&manifest, backends::cpu()).unwrap();
    let targets = if full { &["v81", "v79", "v75"][..] } else { &["v81"] };
    for target in targets {
        let (_folder, manifest) = forged(checkpoint.path(), Some(target), &[8]);
        let mut chunks = tiny::open(&manifest, backends::qnn()).unwrap();
        let max = if full { 300 } else { 9 };
        let prompts = [vec![7; max], (0..13).map(|i| 20 + i * i).collect()];
        let Distance { cosine, .. } =
            chunks_equal_steps([&mut chunks, &mut steps], &prompts, target);
        assert!(cosine >= 0.999, "{target}: {cosine}");
        let goes_back = |chat: &&tiny::Chat| {
            full || chat.turns.iter().any(|turn| turn.prefix_extends == Some(false))
        };
        let prefill = if full { &[8, 24][..] } else { &[24] };
        let variant = Variant { target: Some(target), prefill, ..CPU };
        let manifest = tiny::bundle(&tiny::fixture(TINY_MODELS[0]), variant);
        let goldens = tiny::goldens(&tiny::fixture(TINY_MODELS[0]));
        let chats = goldens.chat.iter().filter(goes_back);
        for chat in chats.take(if full { usize::MAX } else { 1 }) {
            let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
            goes_on(&mut model, chat);
        }
        if full {
            for tiny in TINY_MODELS {
                proves_equal(&tiny::fixture(tiny), variant, backends::qnn(), (6, 6));
            }
        }
    }
}

#[tier(qnn)]
fn htp_fp16_is_greedy_exact_for_every_target() {
    let max = if tiny::full_matrix() { usize::MAX } else { 2 };
    for (index, tiny) in TINY_MODELS.into_iter().enumerate() {
        let forms =
            [("v81", 1, (max, 1)), ("v81", 2, (2, 0)), ("v79", 1, (2, 0)), ("v75", 1, (2, 0))];
        for (form, (target, shards, max)) in forms.into_iter().enumerate() {
            // The tiny models share the forms out, unless each is to have them all.
            if tiny::full_matrix() || form % TINY_MODELS.len() == index {
                let variant = Variant { target: Some(target), shards, ..CPU };
                proves_equal(&tiny::fixture(tiny), variant, backends::qnn(), max);
                if shards > 1 {
                    // States that are replaced: their two buffers take turns.
                    let (checkpoint, goldens) = tiny::model(tiny);
                    let cases = replay::shortest(&goldens, 1);
                    registered::copies_nothing(&tiny::bundle(&checkpoint, variant), &cases, tiny);
                }
            }
        }
    }
}

#[tier(qnn)]
fn w8a16_passes_the_tolerant_gate() {
    for tiny in if tiny::full_matrix() { &TINY_MODELS[..] } else { &TINY_MODELS[..1] } {
        let checkpoint = tiny::fixture(tiny);
        let variant = Variant { target: Some("v81"), int8: true, ..CPU };
        let mut model = tiny::open(&tiny::bundle(&checkpoint, variant), backends::qnn()).unwrap();
        let goldens = tiny::goldens(&checkpoint).brief();
        let cases: Vec<_> =
            goldens.cases.iter().filter(|c| c.prompt_ids.len() < 20).take(5).collect();
        suite::passes(&mut model, &cases, usize::MAX, &format!("{tiny} w8a16 v81"));
    }
}

/// Plays a conversation in chunks. Each turn goes on from the state that the one before left, or its snapshot.
fn goes_on(model: &mut Model, chat: &tiny::Chat) {
    let played = play(model, chat);
    assert!(played[1..].iter().all(|turn| turn.reused_tokens > 0), "{}: {played:?}", chat.id);
    assert!(prompt_graphs(model) > 0, "{}", chat.id);
}

#[test]
fn a_second_turn_consumes_only_what_is_new() {
    for tiny in TINY_MODELS {
        let (checkpoint, goldens) = tiny::model(tiny);
        let manifest = tiny::bundle(&checkpoint, CPU);
        for chat in &goldens.chat {
            let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
            let played = play(&mut model, chat);
            let (mut consumed, mut heads) = (0, 0);
            for (index, (turn, played)) in chat.turns.iter().zip(&played).enumerate() {
                let (prompt, reused) = (played.prompt_tokens, played.reused_tokens);
                if index > 0 {
                    // Where the template renders the earlier answer as it was generated, all that was consumed;
                    // the last token was chosen only. Otherwise the snapshot after the earlier question, before
                    // the last message was begun.
                    let earlier = &chat.turns[index - 1];
                    let message = earlier.prompt_ids[0];
                    let expected = if turn.prefix_extends == Some(true) {
                        earlier.prompt_ids.len() + earlier.output_ids.len() - 1
                    } else {
                        earlier.prompt_ids.iter().rposition(|&token| token == message).unwrap()
                    };
                    assert_eq!(reused, expected, "{tiny}, {}: turn {index} of {prompt}", chat.id);
                }
                consumed += prompt - reused + turn.output_ids.len() - 1;
                // One at the end of the prompt, one a step, and one where the prompt was cut to
                // save the state for the next turn.
                heads += 1 + turn.output_ids.len();
            }
            let executions =
                |model: &Model, graph: &str| executions(model, |name| name == graph) as usize;
            assert_eq!(executions(&model, "decode"), consumed, "every step is accounted for");
            assert_eq!(executions(&model, "lmhead"), heads, "as are those of the head");

            // The last turn alone, from nothing: the same tokens.
            let last = chat.turns.last().unwrap();
            let mut replay = tiny::open(&manifest, backends::cpu()).unwrap();
            let prompt = Prompt::Tokens(last.prompt_ids.clone());
            let request = Request::greedy(prompt, last.output_ids.len());
            assert_eq!(generate(&mut replay, &request).tokens, last.output_ids);
            // A prompt of which no state is saved is consumed in one piece.
            assert_eq!(executions(&replay, "lmhead"), last.output_ids.len());
        }
    }
}

#[test]
fn stop_texts_end_the_answer_and_do_not_appear_in_it() {
    let checkpoint = tiny::fixture("qwen35-tied");
    let mut model = tiny::open(&tiny::bundle(&checkpoint, CPU), backends::cpu()).unwrap();
    let mut request = Request::greedy(Prompt::Text("The capital of France is".into()), 32);
    request.stop = vec!["Seine".to_owned()];
    let mut streamed = String::new();
    let generation = model
        .generate(&request, &mut |event| {
            streamed.push_str(event.text().unwrap_or_default());
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Stop);
    assert_eq!(generation.text, " Paris. The river ");
    assert_eq!(streamed, generation.text);
}

#[test]
fn a_full_context_ends_with_length() {
    let checkpoint = tiny::fixture("qwen35-tied");
    let mut model = tiny::open(&tiny::bundle(&checkpoint, CPU), backends::cpu()).unwrap();
    let max_ctx = model.info().max_ctx;
    assert_eq!(max_ctx, 200);
    let mut request = Request::greedy(Prompt::Tokens(vec![5; max_ctx - 3]), 100);
    request.ignore_eos = true;
    let generation = generate(&mut model, &request);
    assert_eq!(generation.finish_reason, FinishReason::Length);
    assert_eq!(generation.tokens.len(), 4, "three more positions, and the token after the last");

    let error = replay::complete(&mut model, &vec![5; max_ctx + 1], 1).unwrap_err();
    says(&error, ErrorKind::Prompt, &["201", "200"]);
}

#[test]
fn cancelling_keeps_the_text_so_far_and_the_model_usable() {
    let (checkpoint, goldens) = tiny::model("qwen35-tied");
    let case = goldens.cases.iter().find(|c| c.id == "france").unwrap();
    let mut model = tiny::open(&tiny::bundle(&checkpoint, CPU), backends::cpu()).unwrap();
    let request = Request::greedy(Prompt::Text(case.prompt.clone()), 32);
    let mut seen = 0;
    let generation = model
        .generate(&request, &mut |event| {
            if let Event::Token { .. } = event {
                seen += 1;
                if seen == 5 {
                    request.cancel.cancel();
                }
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert_eq!(generation.tokens, case.output_ids[..5]);
    let whole = generate(&mut model, &request.cancelled_by(CancelToken::new()));
    assert_eq!(whole.tokens, case.output_ids);
}

#[test]
fn seeded_sampling_repeats_and_another_seed_differs() {
    let checkpoint = tiny::fixture("qwen35-tied");
    let mut model = tiny::open(&tiny::bundle(&checkpoint, CPU), backends::cpu()).unwrap();
    let mut sample = |seed: u64| {
        model.reset().unwrap();
        let mut request = Request::greedy(Prompt::Text("The".into()), 24);
        request.ignore_eos = true;
        request.sampling.temperature = 3.0;
        request.sampling.seed = Some(seed);
        generate(&mut model, &request).tokens
    };
    let (first, again, other) = (sample(7), sample(7), sample(8));
    assert_eq!(first, again);
    assert_ne!(first, other);
}

fn sights() -> &'static Sights {
    static SIGHTS: OnceLock<Sights> = OnceLock::new();
    SIGHTS.get_or_init(|| Sights::of(&tiny::fixture(SEEING)))
}

/// A bundle of the tiny model that sees, made once a process: it takes images in their shape (`native`), stretched
/// (`fixed`), or not at all (`none`).
fn seeing(mode: &'static str, target: Option<&'static str>) -> PathBuf {
    static MADE: Bundles<(&str, Option<&str>)> = Bundles::new();
    MADE.get((mode, target), |out| {
        let mut options = ForgeOptions::new(out);
        options.max_ctx = Some(200);
        // On the CPU prompts go in chunks, so that images begin and end within them.
        options.prefill = Some(if target.is_none() { vec![16] } else { Vec::new() });
        let (key, value) = match mode {
            "native" => ("image-patches", "24,32,48"),
            "fixed" => ("image-size", "48"),
            _ => ("vision", "none"),
        };
        set(&mut options, &[(key, value)]);
        options.compiler = target.map(backends::compiler);
        forge(&tiny::fixture(SEEING), &options, &mut Silent)
            .unwrap_or_else(|e| panic!("{mode}: {e}"))
            .manifest
    })
}

/// Features of all images of a mode, of the video where it keeps its shape, and all positions.
fn sees_as_the_reference(
    mode: &'static str,
    target: Option<&'static str>,
    backend: Arc<dyn Backend>,
) -> (f64, f64) {
    let folder = tempfile::tempdir().unwrap();
    let open = |name: &str| {
        let folder = folder.path().join(name);
        let (manifest, backend) = (seeing(mode, target), Arc::clone(&backend));
        (tiny::open_dumping(&manifest, backend, &tiny::plugins(), &folder), folder)
    };
    let (mut model, dumps) = open("positions");
    sights().same_positions(model.op_mut(), &dumps, mode);
    drop(model);
    let (mut model, dumps) = open("features");
    sights().features(model.op_mut(), &dumps, mode, None, mode == "native", 0)
}

#[test]
fn images_and_a_video_equal_the_reference() {
    for mode in ["native", "fixed"] {
        let (cosine, largest) = sees_as_the_reference(mode, None, backends::cpu());
        assert!(cosine >= 0.999_99 && largest <= CPU_DISTANCE, "{mode}: {cosine} {largest}");
        let mut model = tiny::open(&seeing(mode, None), backends::cpu()).unwrap();
        let cases = sights().of_mode(mode);
        assert!(cases.len() > 6);
        sights().greedy_exact(&mut model, &cases, mode);
        if mode == "native" {
            // Behind an image a draft token stands where the token would that is decoded.
            let found = sights().speculative_exact(&mut model, &cases, "3".parse().unwrap(), mode);
            assert!(found.drafted > 0, "{found:?}");
        }
        eprintln!("{mode}: features differ by at most {largest:.2e}, cosine {cosine:.8}");
        within(sights().step_exact(&mut model, &cases, mode), CPU_DISTANCE, mode);
    }
}

/// The template does not repeat in the second turn that the first was answered without thinking, so that the state goes
/// back to the snapshot after the question; and with it the positions behind the image.
#[test]
fn a_chat_goes_on_from_the_snapshot_after_its_image() {
    for mode in ["native", "fixed"] {
        let mut model = tiny::open(&seeing(mode, None), backends::cpu()).unwrap();
        let chat = sights().chat.iter().find(|chat| chat.mode == mode).unwrap();
        let mut reused = 0;
        for turn in &chat.turns {
            let prompt = sights().conversation(&turn.messages);
            assert_eq!(
                model.encode_prompt(&prompt).unwrap(),
                turn.golden.prompt_ids,
                "{}",
                chat.id
            );
            let generation = answer(&mut model, prompt, &turn.golden);
            assert_eq!(generation.tokens, turn.golden.output_ids, "{}", chat.id);
            assert_eq!(generation.reused_tokens, reused, "{}", chat.id);
            let ids = &turn.golden.prompt_ids;
            reused = ids.iter().rposition(|id| *id == ids[0]).unwrap();
        }
        let spans = model.span_stats();
        let looks = spans.into_iter().find(|span| span.name == "vision").map(|span| span.count);
        assert_eq!(looks, Some(1), "the image is seen once");
    }
}

/// Its states are replaced as a whole: a part of the draft tokens goes through the graphs once more.
#[test]
fn draft_tokens_leave_the_answer_of_plain_decoding() {
    let mut accepted = 0;
    for (tiny, shards, prefill) in [(TINY_MODELS[0], 1, &[4][..]), (TINY_MODELS[1], 2, &[3, 16])] {
        let (checkpoint, goldens) = tiny::model(tiny);
        let cases: Vec<_> = goldens.cases.iter().collect();
        let manifest = tiny::bundle(&checkpoint, Variant { shards, prefill, ..CPU });
        let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
        for mode in ["2", "auto"] {
            let speculate = mode.parse().unwrap();
            let found =
                speculative_exact(&mut model, &cases, speculate, &format!("{tiny}, {mode}"));
            eprintln!("{tiny}, {mode} draft tokens: {found:?}");
            accepted += found.accepted;
        }
        for right in [1, 2, 3] {
            let case = cases.iter().find(|case| case.output_ids.len() > 3).unwrap();
            let found = accepted_exact(&mut model, case, 3, right);
            eprintln!("{tiny}, {right} of 3 kept: {found:?}");
            // One that stays alone goes the plain way.
            let limit = if right == 1 { 0.0 } else { 1e-4 };
            assert!(found.largest <= limit, "{tiny}, {right} of 3 kept: {found:?}");
        }
    }
    assert!(accepted > 2, "{accepted} draft tokens were accepted");
}

#[test]
fn a_restart_of_the_dsp_changes_no_draft_token() {
    let (checkpoint, goldens) = tiny::model(TINY_MODELS[0]);
    let manifest = tiny::bundle(&checkpoint, Variant { prefill: &[4], ..CPU });
    let backend = Restarting::new(backends::cpu());
    let mut model = tiny::open(&manifest, backend.clone()).unwrap();
    let mut play = |case: &Case, nth: u64| {
        backend.restart_at(nth);
        let found =
            speculative_exact(&mut model, &[case], "3".parse().unwrap(), &format!("at {nth}"));
        (found.verifications, u64::MAX - backend.left())
    };
    // The answer with the most draft tokens.
    let passes = |case: &Case| (play(case, u64::MAX), case.id.clone());
    let ((passes, executions), id) = goldens.cases.iter().map(passes).max().unwrap();
    assert!(passes > 1 && executions > 8, "{id}: {passes} passes, {executions} executions");
    let case = goldens.cases.iter().find(|case| case.id == id).unwrap();
    for nth in (1..=executions).step_by(3) {
        play(case, nth);
    }
}

/// The engine keeps no image. That of the prompt under way is looked at again.
#[test]
fn a_restart_changes_no_token_of_a_chat_about_an_image() {
    let backend = Restarting::new(backends::cpu());
    let mut model = tiny::open(&seeing("native", None), backend.clone()).unwrap();
    let contexts = backend.opened();
    let chat = sights().chat.iter().find(|chat| chat.mode == "native").unwrap();
    let mut play = |restart: Option<(usize, u64)>| {
        model.reset().unwrap();
        for (index, turn) in chat.turns.iter().enumerate() {
            backend.restart_at(match restart {
                Some((at, nth)) if at == index => nth,
                _ => u64::MAX,
            });
            let generation =
                answer(&mut model, sights().conversation(&turn.messages), &turn.golden);
            assert_eq!(generation.tokens, turn.golden.output_ids, "{}, {restart:?}", chat.id);
        }
        u64::MAX - backend.left()
    };
    let executions = play(None);
    assert!(executions > 4, "{executions} in the second turn");
    for (restarts, at) in [(0, 1), (0, 4), (1, 1), (1, executions)].into_iter().enumerate() {
        play(Some(at));
        assert_eq!(backend.opened(), contexts * (restarts as u64 + 2), "{at:?}");
    }
}

/// Positions are a part of the state: one that is restored goes on where the images left it.
#[test]
fn a_restored_state_goes_on_behind_its_images() {
    let mut model = tiny::open(&seeing("native", None), backends::cpu()).unwrap();
    let case = sights().case("two-native-boat-tower");
    let media = sights().media(case);
    let parts = sights().segments(&case.golden.prompt_ids, &media);
    let first = parts.iter().position(|part| !matches!(part, Segment::Tokens(_))).unwrap() + 1;
    let op = model.op_mut();
    op.prefill(&parts[..first]).unwrap();
    let (between, snapshot) = (op.position(), op.snapshot().unwrap());
    let near = |op: &dyn HostOp, id: &str| {
        let found = op.logits().unwrap().to_f32();
        let distance = Distance::of(&found, &sights().logits(id)[0]).unwrap();
        assert!(distance.largest <= CPU_DISTANCE, "{id}: {distance:?}");
    };
    op.prefill(&parts[first..]).unwrap();
    near(op, &case.id);
    op.reset().unwrap();
    let text = sights().case("text-0");
    op.prefill(&[Segment::Tokens(&text.golden.prompt_ids)]).unwrap();
    near(op, &text.id);
    op.restore(snapshot).unwrap();
    assert_eq!(op.position(), between);
    op.prefill(&parts[first..]).unwrap();
    near(op, &case.id);
}

#[test]
fn a_bundle_without_the_tower_takes_text_only() {
    let mut model = tiny::open(&seeing("none", None), backends::cpu()).unwrap();
    let texts: Vec<_> = ["text-0", "sky"].map(|id| sights().case(id)).to_vec();
    sights().greedy_exact(&mut model, &texts, "text only");
    let error = model.encode_prompt(&sights().prompt(sights().case("native-boat"))).unwrap_err();
    says(&error, ErrorKind::Prompt, &["plan.params.vision"]);
}

#[tier(qnn, full)]
fn htp_sees_as_the_reference() {
    for (mode, target) in [("native", "v81"), ("fixed", "v79")] {
        let target = Some(target);
        let (cosine, largest) = sees_as_the_reference(mode, target, backends::qnn());
        let mut model = tiny::open(&seeing(mode, target), backends::qnn()).unwrap();
        let cases = sights().of_mode(mode);
        sights().greedy_exact(&mut model, &cases, mode);
        let logits = sights().step_exact(&mut model, &cases[..1], mode).largest;
        eprintln!(
            "{mode} {target:?}: logits differ by {logits:.2e}, features by {largest:.2e}, cosine {cosine:.7}"
        );
        assert!(cosine >= 0.9999, "{mode}: features have the cosine {cosine}");
    }
}
