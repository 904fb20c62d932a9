//! Prompts on one backend, tokens on another.

use qhx_base::ErrorKind;
use qhx_core::engine::{Generation, Model, Prompt, Request};
use qhx_tests::replay::{self, generate, play};
use qhx_tests::tiny::{self, CPU, Variant};
use qhx_tests::{backends, files, says};
use qhx_tiers::tier;

/// Caches, recurrent states, rings.
const TINY_MODELS: [&str; 3] = ["mistral-tiny", "qwen35-tied", "gemma4-tiny"];

/// With prefill graphs, for which prompts are worth moving.
fn open(tiny: &str) -> Model {
    let variant = Variant { prefill: &[24], ..CPU };
    tiny::open(&tiny::bundle(&tiny::fixture(tiny), variant), backends::cpu()).unwrap()
}

/// The same with tokens on a backend of their own.
fn open_handing_over(tiny: &str) -> Model {
    let mut model = open(tiny);
    model.decode_on(Some(backends::cpu()), "asked for").unwrap();
    model
}

fn of_tokens(ids: &[u32], count: usize) -> Request {
    Request::greedy(Prompt::Tokens(ids.to_vec()), count).ignore_eos(true)
}

/// Number of hand-overs of the state in a generation.
fn times(generation: &Generation) -> u64 {
    let moved = generation.timings.hand_overs;
    assert_eq!(moved.count > 0, moved.bytes > 0, "{moved:?}");
    moved.count
}

#[test]
fn conversations_are_the_same_over_two_backends() {
    for tiny in TINY_MODELS {
        let goldens = tiny::goldens(&tiny::fixture(tiny));
        let (mut one, mut two) = (open(tiny), open_handing_over(tiny));
        for chat in &goldens.chat {
            let (alone, handed) = (play(&mut one, chat), play(&mut two, chat));
            for (alone, handed) in alone.iter().zip(&handed) {
                assert_eq!(handed.reused_tokens, alone.reused_tokens, "{tiny}, {}", chat.id);
                assert_eq!(times(alone), 0);
            }
            assert!(times(&handed[0]) == 1, "{tiny}, {}", chat.id);
        }
        let distance = replay::hands_over(&mut one, &goldens, &goldens.cases[0], tiny);
        assert!(distance.largest <= 1e-3, "{tiny}: {distance:?}");
    }
}

#[test]
fn only_long_prompts_take_the_state_back() {
    for tiny in TINY_MODELS {
        let (mut one, mut two) = (open(tiny), open_handing_over(tiny));
        let mut ids: Vec<u32> = (0..40).map(|at| 20 + at % 7).collect();
        // A prompt, one with 5 tokens more, one with 40.
        for (more, expected) in [(0, 1), (5, 0), (40, 2)] {
            ids.extend((0..more).map(|at| 30 + at % 5));
            let [alone, handed] =
                [&mut one, &mut two].map(|model| generate(model, &of_tokens(&ids, 4)));
            assert_eq!(handed.tokens, alone.tokens, "{tiny}, {more} tokens more");
            assert_eq!(handed.reused_tokens, alone.reused_tokens, "{tiny}, {more} tokens more");
            assert_eq!(times(&handed), expected, "{tiny}, {more} tokens more");
            ids.extend(handed.tokens);
        }
        // Cut back, or from a snapshot.
        let [alone, handed] =
            [&mut one, &mut two].map(|model| generate(model, &of_tokens(&ids[..60], 4)));
        assert_eq!(handed.tokens, alone.tokens, "{tiny}, cut back");
    }
}

#[test]
fn draft_tokens_are_verified_where_tokens_are_consumed() {
    let (mut one, mut two) = (open("mistral-tiny"), open_handing_over("mistral-tiny"));
    // It repeats itself.
    let ids: Vec<u32> = (0..40).map(|at| 20 + at % 7).collect();
    let plain = generate(&mut one, &of_tokens(&ids, 24));
    let request = of_tokens(&ids, 24).speculate("4".parse().unwrap());
    let drafted = generate(&mut two, &request);
    assert_eq!(drafted.tokens, plain.tokens);
    assert!(drafted.timings.drafts.verifications > 0, "{:?}", drafted.timings.drafts);
    assert_eq!(times(&drafted), 1);
}

#[test]
fn sessions_and_saved_states_hand_over_too() {
    let tiny = "qwen35-tied";
    let (mut one, mut two) = (open(tiny), open_handing_over(tiny));
    let ids: Vec<u32> = (0..36).map(|at| 20 + at % 7).collect();
    let mut other = two.new_session().unwrap();
    let [alone, first, second] =
        [&mut one, &mut two, &mut other].map(|model| generate(model, &of_tokens(&ids, 6)));
    assert_eq!(first.tokens, alone.tokens);
    assert_eq!((times(&first), second.tokens), (1, first.tokens.clone()));
    let mut third = two.new_session().unwrap();
    third.import_state(&two.export_state().unwrap()).unwrap();
    let ids = [&ids[..], &alone.tokens].concat();
    let [alone, moved] = [&mut one, &mut third].map(|model| generate(model, &of_tokens(&ids, 6)));
    assert_eq!((moved.tokens, moved.reused_tokens), (alone.tokens, alone.reused_tokens));
}

#[tier(qnn)]
fn prompts_on_the_npu_tokens_on_the_cpu() {
    let checkpoint = tiny::fixture("mistral-tiny");
    let manifest = tiny::bundle(&checkpoint, Variant { target: Some("v81"), ..CPU });
    let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
    let goldens = tiny::goldens(&checkpoint).brief();
    let cases = replay::shortest(&goldens, 1);
    let distance = replay::hands_over(&mut model, &goldens, cases[0], "mistral-tiny");
    assert!(distance.cosine >= 0.999, "{distance:?}");

    // The same bundle without its ONNX graphs.
    let binaries = manifest.with_file_name("binaries.json");
    std::fs::copy(&manifest, &binaries).unwrap();
    files::edit(&binaries, |json| {
        for (_, context) in json["artifacts"]["contexts"].as_object_mut().unwrap() {
            context.as_object_mut().unwrap().remove("onnx").unwrap();
        }
    });
    let mut model = tiny::open(&binaries, backends::qnn()).unwrap();
    let error = model.decode_on(Some(backends::cpu()), "asked for").unwrap_err();
    std::fs::remove_file(&binaries).unwrap();
    says(&error, ErrorKind::Artifact, &["has no graphs that cpu executes"]);
    assert!(error.hint_text().unwrap().contains("--onnx"), "{error}");
    let found = generate(&mut model, &of_tokens(&cases[0].prompt_ids, 1));
    assert_eq!(found.tokens, cases[0].output_ids[..1], "the model is as before");
}
