//! Several sessions of one bundle.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_core::engine::{Model, Prompt, Request, Run};
use qhx_exec::backend::Backend;
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
