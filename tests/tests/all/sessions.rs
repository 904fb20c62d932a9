//! Several sessions of one bundle.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_core::engine::{Model, Prompt, Request, Run};
use qhx_exec::backend::Backend;
use qhx_forge::{ForgeOptions, Silent, forge};
use qhx_tests::backends;
use qhx_tests::replay::greedy_exact;
use qhx_tests::restarting::Restarting;
use qhx_tests::tiny::{self, Case, Variant};
use qhx_tiers::tier;

/// A small bundle without prompt graphs, for the CPU and maybe for a target.
fn bundle(target: Option<&'static str>) -> PathBuf {
    tiny::bundle(&tiny::fixture("mistral-tiny"), Variant { target, ..tiny::CPU })
}

/// Contexts of the bundle: decoder and head.
const CONTEXTS: u64 = 2;

/// Generates in two sessions of one model, on two threads.
fn side_by_side(backend: Arc<dyn Backend>, manifest: &Path, label: &str) {
    let goldens = tiny::goldens(&tiny::fixture("mistral-tiny"));
    let cases = qhx_tests::replay::shortest(&goldens, 4);
    let (first, second) = cases.split_at(2);
    let mut model = tiny::open(manifest, backend).unwrap();
    let mut other = model.new_session().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| greedy_exact(&mut other, first, label));
        greedy_exact(&mut model, second, label);
    });
    // Each has a state of its own, and outlives the other.
    drop(model);
    greedy_exact(&mut other, second, label);
}

#[test]
fn sessions_on_two_threads_say_what_each_says_alone() {
    let manifest = bundle(None);
    let backend = Restarting::new(backends::cpu());
    side_by_side(backend.clone(), &manifest, "two sessions on the CPU");
    assert_eq!(backend.opened(), CONTEXTS, "they share the contexts");
}

#[tier(qnn)]
fn sessions_share_the_contexts_on_the_npu() {
    let manifest = bundle(Some("v81"));
    side_by_side(backends::qnn(), &manifest, "two sessions on the HTP");
}

fn request(case: &Case) -> Request {
    Request::greedy(Prompt::Tokens(case.prompt_ids.clone()), case.output_ids.len())
}

#[test]
fn after_a_restart_each_session_goes_on_over_the_same_contexts() {
    let manifest = bundle(None);
    let goldens = tiny::goldens(&tiny::fixture("mistral-tiny"));
    let cases = qhx_tests::replay::shortest(&goldens, 2);
    let backend = Restarting::new(backends::cpu());
    let mut model = tiny::open(&manifest, backend.clone()).unwrap();
    let mut other = model.new_session().unwrap();

    let (of_model, of_other) = (request(cases[0]), request(cases[1]));
    let mut first = model.start(&of_model).unwrap();
    let mut second = other.start(&of_other).unwrap();
    let step = |run: &mut Run<'_>| assert!(run.next_event().unwrap().is_some());
    for run in [&mut first, &mut second] {
        (0..3).for_each(|_| step(run));
    }
    backend.restart_at(1);
    step(&mut first);
    for (run, case) in [(second, cases[1]), (first, cases[0])] {
        assert_eq!(run.finish().unwrap().tokens, case.output_ids);
    }
    assert_eq!(backend.opened(), 2 * CONTEXTS, "opened once more, for both");
}

#[test]
fn what_cancels_one_session_leaves_the_other() {
    let manifest = bundle(None);
    let goldens = tiny::goldens(&tiny::fixture("mistral-tiny"));
    let case = goldens.cases.first().unwrap();
    let mut model: Model = tiny::open(&manifest, backends::cpu()).unwrap();
    let mut other = model.new_session().unwrap();
    let (cancelled, kept) = (request(case), request(case));
    cancelled.cancel.cancel();
    assert!(model.start(&cancelled).unwrap().finish().unwrap().tokens.is_empty());
    assert_eq!(other.start(&kept).unwrap().finish().unwrap().tokens, case.output_ids);
}

#[tier(qnn)]
fn sessions_take_steps_together_on_the_npu() {
    for fixture in ["llama3-tiny", "qwen35-tied"] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = tiny::fixture(fixture);
        let mut options = ForgeOptions::new(folder.path().join("bundle"));
        options.max_ctx = Some(200);
        options.prefill = Some(vec![4]);
        options.batch = vec![2, 4];
        options.compiler = Some(backends::compiler("v81"));
        let manifest = forge(&checkpoint, &options, &mut Silent).unwrap().manifest;
        let goldens = tiny::goldens(&checkpoint);
        let cases = qhx_tests::replay::shortest(&goldens, 3);
        let first = tiny::open_batching(&manifest, backends::qnn()).unwrap();
        // Three sequences in graphs of four, and two in those of two.
        let mut sessions: Vec<_> = (0..3).map(|_| first.new_session().unwrap()).collect();
        std::thread::scope(|scope| {
            for (model, case) in sessions.iter_mut().zip(&cases) {
                scope.spawn(move || {
                    let tokens = model.start(&request(case)).unwrap().finish().unwrap().tokens;
                    assert_eq!(tokens, case.output_ids, "{fixture}");
                });
            }
        });
        let shared: u64 = sessions.iter().map(company).sum();
        assert!(shared > 0, "{fixture}: no step was for several sessions");
    }
}

/// Sequences of other sessions in a model's executions.
fn company(model: &Model) -> u64 {
    model.graph_stats().iter().map(|graph| graph.shared).sum()
}

#[test]
fn sessions_take_steps_together_and_say_what_each_says_alone() {
    for fixture in ["mistral-tiny", "qwen35-tied", "phimoe-16"] {
        let variant = Variant { prefill: &[4], int8: fixture == "qwen35-tied", ..tiny::CPU };
        let manifest = tiny::bundle(&tiny::fixture(fixture), variant);
        let goldens = tiny::goldens(&tiny::fixture(fixture));
        let mut alone = tiny::open(&manifest, backends::cpu()).unwrap();
        let answer = |model: &mut Model, case: &Case| {
            model.start(&request(case)).unwrap().finish().unwrap().tokens
        };
        let expected: Vec<_> = goldens.cases.iter().map(|case| answer(&mut alone, case)).collect();
        let cases: Vec<_> = goldens.cases.iter().zip(&expected).collect();
        let first = tiny::open_batching(&manifest, backends::cpu()).unwrap();
        let mut sessions: Vec<_> = (0..4).map(|_| first.new_session().unwrap()).collect();
        std::thread::scope(|scope| {
            for (thread, model) in sessions.iter_mut().enumerate() {
                let cases = &cases;
                // Each begins elsewhere, so that they join and leave at different steps.
                scope.spawn(move || {
                    for (case, expected) in cases.iter().cycle().skip(thread).take(cases.len()) {
                        assert_eq!(answer(model, case), **expected, "{fixture}");
                    }
                });
            }
        });
        let shared: u64 = sessions.iter().map(company).sum();
        assert!(shared > 0, "{fixture}: no step was for several sessions");
        assert_eq!(company(&alone), 0);
    }
}

#[test]
fn who_is_cancelled_among_others_costs_them_nothing() {
    let manifest = bundle(None);
    let goldens = tiny::goldens(&tiny::fixture("mistral-tiny"));
    let case = goldens.cases.iter().max_by_key(|case| case.output_ids.len()).unwrap();
    let first = tiny::open_batching(&manifest, backends::cpu()).unwrap();
    let mut sessions: Vec<_> = (0..3).map(|_| first.new_session().unwrap()).collect();
    std::thread::scope(|scope| {
        for (thread, model) in sessions.iter_mut().enumerate() {
            scope.spawn(move || {
                for _ in 0..4 {
                    let request = request(case);
                    let mut run = model.start(&request).unwrap();
                    if thread == 0 {
                        (0..5).for_each(|_| assert!(run.next_event().unwrap().is_some()));
                        request.cancel.cancel();
                    }
                    let tokens = run.finish().unwrap().tokens;
                    match thread {
                        0 => assert!(case.output_ids.starts_with(&tokens)),
                        _ => assert_eq!(tokens, case.output_ids),
                    }
                }
            });
        }
    });
}
