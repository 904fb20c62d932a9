//! Graphs for several context sizes over one state: the choice by position, and that nobody notices it.

use std::path::{Path, PathBuf};

use qhx::golden::Golden;
use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_core::engine::Model;
use qhx_core::op::{HostOp, Segment};
use qhx_forge::{Caches, ForgeOptions, Silent, forge};
use qhx_tests::forged::{Forged, set};
use qhx_tests::images::Sights;
use qhx_tests::replay::{
    accepted_exact, executions, hands_over, play, shortest, speculative_exact, step_exact,
};
use qhx_tests::tiny::{self, Bundles};
use qhx_tests::{backends, files, says};
use qhx_tiers::tier;

/// In the middle of answers; prompts end before, between and behind them.
const CONTEXTS: [usize; 2] = [16, 32];
/// Rows of the prefill graphs.
const ROWS: usize = 12;
/// Logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-3;

/// A family: its tiny model, and what the names of its graphs for one token and for several begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Family {
    tiny: &'static str,
    stems: [&'static str; 2],
    shards: usize,
    recipe_options: &'static [(&'static str, &'static str)],
    caches: Caches,
}

const fn family(tiny: &'static str, shards: usize) -> Family {
    let (stems, caches) = (["decode", "prefill"], Caches::F16);
    Family { tiny, stems, shards, recipe_options: &[], caches }
}

/// Caches in two shards; recurrent states beside caches; rings and donors; experts in graphs of a layer each; and more
/// of the first and the last kind.
const FAMILIES: [Family; 6] = [
    family("mistral-tiny", 2),
    family("qwen35-tied", 1),
    Family { recipe_options: &[("towers", "none"), ("verify", "4")], ..family("gemma4-tiny", 0) },
    Family { stems: ["a", "pf"], ..family("phimoe-6", 2) },
    family("qwen3-tiny", 1),
    family("qwen3-moe", 1),
];
const DENSE: Family = FAMILIES[0];
/// Rows that are quantized when they are written.
const INT8: Family = Family { caches: Caches::Int8, ..DENSE };
const RECURRENT: Family = FAMILIES[1];
const RINGS: Family = FAMILIES[2];
/// It sees images.
const SEEING: Family =
    Family { recipe_options: &[("image-size", "48")], ..family("qwen3vl-tiny", 1) };

impl Family {
    fn checkpoint(self) -> PathBuf {
        tiny::fixture(self.tiny)
    }

    fn forge(self, out: &Path, change: impl FnOnce(&mut ForgeOptions)) -> PathBuf {
        let mut options = ForgeOptions::new(out);
        options.max_ctx = Some(200);
        options.contexts = CONTEXTS.to_vec();
        options.prefill = Some(vec![ROWS]);
        options.shards = self.shards;
        options.caches = self.caches;
        set(&mut options, self.recipe_options);
        change(&mut options);
        let report = forge(&self.checkpoint(), &options, &mut Silent);
        report.unwrap_or_else(|e| panic!("forging {}: {e}", self.tiny)).manifest
    }

    /// With prefill graphs for each context, or for the whole one alone.
    fn open(self, all: bool) -> Model {
        static MADE: Bundles<(Family, bool)> = Bundles::new();
        let make = |out: &Path| {
            let manifest = self.forge(out, |_| ());
            let within = |list: &mut serde_json::Value| match list {
                serde_json::Value::Array(names) => {
                    names
                        .retain(|name| name.as_str().is_some_and(|n| n.starts_with(self.stems[0])));
                }
                other => panic!("{other}"),
            };
            if !all {
                files::edit(&manifest, |whole| {
                    let lists = whole["plan"]["params"]["within"].as_array_mut().unwrap();
                    lists.iter_mut().for_each(within);
                });
            }
            manifest
        };
        tiny::open(&MADE.get((self, all), make), backends::cpu()).unwrap()
    }

    /// Executions of the graphs for one token, or for several, in the contexts of 16, of 32 and of 200 positions.
    fn executions(self, model: &Model, several: bool) -> [u64; 3] {
        let stem = self.stems[usize::from(several)];
        let stem = if several { format!("{stem}{ROWS}_") } else { stem.to_owned() };
        let within = CONTEXTS.map(|positions| {
            let name = format!("{stem}{positions}");
            let part = format!("{name}_");
            executions(model, |graph| graph == name || graph.starts_with(&part))
        });
        let all = executions(model, |graph| graph.starts_with(self.stems[usize::from(several)]));
        [within[0], within[1], all - within[0] - within[1]]
    }
}

#[test]
fn every_family_says_the_same_across_the_borders_of_contexts() {
    for family in FAMILIES {
        let tiny = family.tiny;
        let goldens = tiny::goldens(&family.checkpoint());
        let cases: Vec<_> = goldens.cases.iter().collect();
        let mut model = family.open(true);
        let Distance { largest, .. } = step_exact(&mut model, &goldens, &cases, tiny);
        assert!(largest <= CPU_DISTANCE, "{tiny}: logits differ by {largest}");
        let ran = [false, true].map(|several| family.executions(&model, several));
        // The short goldens of Qwen3-MoE are in two contexts.
        let missing = ran.iter().flatten().filter(|count| **count == 0).count();
        assert!(missing <= if tiny == "qwen3-moe" { 2 } else { 0 }, "{tiny}: {ran:?}");
        for chat in &goldens.chat {
            play(&mut model, chat);
        }
        let drafts = speculative_exact(&mut model, &cases, "3".parse().unwrap(), tiny);
        assert!(drafts.verifications > 0, "{tiny}: {drafts:?}");
    }
}

#[test]
fn golden_steps_execute_every_graph() {
    for family in [DENSE, INT8, RECURRENT, RINGS, FAMILIES[4], FAMILIES[5]] {
        let tiny = family.tiny;
        let mut model = family.open(true);
        let mut names = Vec::new();
        let golden = Golden::make(&mut model, false, &mut |name| names.push(name.to_owned()));
        let golden = golden.unwrap_or_else(|e| panic!("{tiny}: {e}"));
        let idle = crate::golden::idle(&model);
        assert!(idle.is_empty(), "{tiny}: {idle:?} are not executed by {names:?}");
        // A prompt of more than two chunks, and the last position of each context.
        assert!(names.contains(&format!("generate-{}", 2 * ROWS + 3)), "{tiny}: {names:?}");
        let ends = |verified: usize| {
            let steps = golden.steps.iter();
            let steps = steps.filter(|step| step.position > 0 && step.verified.len() == verified);
            let ends = steps.map(|step| step.position + step.tokens.len() + step.then.len());
            ends.map(|end| end + verified).collect::<Vec<_>>()
        };
        assert_eq!(ends(0), [16, 32, 200], "{tiny}");
        // Of the graph that verifies drafts alone: short prompts go through those of smaller contexts.
        let verified: &[usize] = if family == RINGS { &[200] } else { &[] };
        assert_eq!(ends(4), verified, "{tiny}: {names:?}");
        for step in &golden.steps {
            let report = golden.check(&mut model, step).unwrap();
            assert!(report.passed && report.cosine > 0.99999, "{tiny}: {report:?}");
        }
    }
}

#[test]
fn images_stand_across_the_borders_of_contexts() {
    let sights = Sights::of(&SEEING.checkpoint());
    let mut model = SEEING.open(true);
    let cases = sights.of_mode("fixed");
    let Distance { largest, .. } = sights.step_exact(&mut model, &cases, SEEING.tiny);
    assert!(largest <= CPU_DISTANCE, "logits differ by {largest}");
    let ran = [false, true].map(|several| SEEING.executions(&model, several));
    assert!(ran[1].iter().all(|count| *count > 0), "{ran:?}");
}

/// Tokens that a model has not seen in this order.
fn token(position: usize) -> u32 {
    20 + position as u32 % 5
}

/// Decodes up to a position; returns the logits there.
fn go(op: &mut dyn HostOp, end: usize) -> Vec<f32> {
    (op.position()..end).try_for_each(|position| op.decode(token(position))).unwrap();
    op.logits().unwrap().to_f32()
}

#[test]
fn each_step_goes_through_the_smallest_context() {
    for all in [true, false] {
        let family = Family { shards: 1, ..DENSE };
        let mut model = family.open(all);
        let op = model.op_mut();
        op.prefill(&[Segment::Tokens(&[7; ROWS])]).unwrap();
        go(op, 20);
        op.verify(&[1, 2, 3, 4]).unwrap();
        op.accept(2).unwrap();
        go(op, 30);
        op.verify(&[1, 2, 3]).unwrap();
        op.accept(0).unwrap();
        go(op, 40);
        assert_eq!(family.executions(&model, false), [4, 14, 8], "{all}");
        let expected = if all { [1, 1, 1] } else { [0, 0, 3] };
        assert_eq!(family.executions(&model, true), expected, "{all}");
    }
}

#[test]
fn a_state_goes_back_across_the_borders_of_contexts() {
    for family in [DENSE, INT8, RECURRENT, RINGS] {
        let tiny = family.tiny;
        let mut model = family.open(true);
        let op = model.op_mut();
        op.prefill(&[Segment::Tokens(&[7; ROWS])]).unwrap();
        let early = op.snapshot().unwrap();
        let at_20 = go(op, 20);
        let (later, state) = (op.snapshot().unwrap(), op.export_state().unwrap());
        let at_40 = go(op, 40);
        for (saved, position) in [(early, ROWS), (later, 20)] {
            op.restore(saved).unwrap();
            assert_eq!(op.position(), position, "{tiny}");
            assert_eq!(go(op, 40), at_40, "{tiny}, from the snapshot at {position}");
        }
        if op.info().can_truncate {
            op.truncate(14).unwrap();
            assert_eq!(go(op, 20), at_20, "{tiny}, cut back");
            assert_eq!(go(op, 40), at_40, "{tiny}, cut back");
        }
        // A session that has another layout so far.
        let mut other = model.new_session().unwrap();
        let op = other.op_mut();
        op.prefill(&[Segment::Tokens(&[9; 40])]).unwrap();
        op.import_state(20, &state).unwrap();
        assert_eq!(go(op, 40), at_40, "{tiny}, in another session");
    }
}

#[test]
fn tokens_of_another_backend_cross_the_borders_too() {
    for family in [DENSE, RECURRENT, RINGS] {
        let goldens = tiny::goldens(&family.checkpoint());
        let mut model = family.open(true);
        // A short prompt and one behind the first border.
        for case in [shortest(&goldens, 3)[2], &goldens.cases[5]] {
            let found = hands_over(&mut model, &goldens, case, family.tiny);
            assert!(found.largest <= CPU_DISTANCE, "{}: {found:?}", family.tiny);
        }
    }
}

#[test]
fn draft_tokens_stand_on_both_sides_of_a_border() {
    for family in [DENSE, RECURRENT, RINGS] {
        let goldens = tiny::goldens(&family.checkpoint());
        let mut model = family.open(true);
        // Of an answer the first tokens are prompt, up to two positions before the border.
        let begins = CONTEXTS[0] - 2;
        let mut cases = goldens.cases.iter();
        let mut case = cases.find(|c| (8..begins).contains(&c.prompt_ids.len())).unwrap().clone();
        let more = begins - case.prompt_ids.len();
        case.prompt_ids.extend(case.output_ids.drain(..more));
        for right in 1..=4 {
            let found = accepted_exact(&mut model, &case, 4, right);
            assert!(found.largest <= CPU_DISTANCE, "{}, {right}: {found:?}", family.tiny);
        }
    }
}

#[test]
fn contexts_that_are_none_are_refused() {
    for (tiny, contexts, expected) in [
        ("mistral-tiny", vec![32, 16], "--contexts 32,16 with --max-ctx 200: 16 is not above 32"),
        ("gemma4-tiny", vec![16, 16], "--contexts 16,16 with --max-ctx 200: 16 is not above 16"),
        ("qwen35-tied", vec![200], "--contexts 200 with --max-ctx 200: 200 is not below 200"),
        ("mistral-tiny", vec![0], "--contexts 0 with --max-ctx 200: 0 is not above 0"),
        ("whisper-tiny", vec![32], "--contexts 32: the graphs of a"),
    ] {
        let change = |o: &mut ForgeOptions| (o.max_ctx, o.contexts) = (Some(200), contexts);
        let error = Forged::try_of(&tiny::fixture(tiny), change).unwrap_err();
        says(&error, ErrorKind::Usage, &[expected]);
    }
}

/// The cache of a smaller context is part of the whole one, and its graphs are like those of the whole one.
#[test]
fn graphs_of_contexts_that_do_not_fit_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = DENSE.forge(&folder.path().join("bundle"), |options| options.shards = 1);
    for (within, expected) in [
        (serde_json::json!([["decode16", "lmhead"]]), "take 1 tokens have no output y"),
        (serde_json::json!([["decode17"]]), "/plan/params/within/0"),
        (serde_json::json!([[]]), "expected a string or at least 1 items"),
    ] {
        files::edit(&manifest, |whole| whole["plan"]["params"]["within"] = within);
        let error = tiny::open(&manifest, backends::cpu()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// On the emulator. In a usual run prompts go token by token.
#[tier(qnn)]
fn the_npu_crosses_the_borders_of_contexts() {
    let full = tiny::full_matrix();
    for &family in if full { &FAMILIES[..] } else { &FAMILIES[1..4] } {
        let tiny = family.tiny;
        let goldens = tiny::goldens(&family.checkpoint()).brief();
        let folder = tempfile::tempdir().unwrap();
        let manifest = family.forge(&folder.path().join("bundle"), |options| {
            options.compiler = Some(backends::compiler("v75"));
            options.contexts.truncate(1);
            options.prefill = Some(if full { vec![ROWS] } else { Vec::new() });
            options.recipe_options.remove("verify");
            options.shards = 1;
        });
        let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
        let before = |case: &&tiny::Case| case.prompt_ids.len() < CONTEXTS[0];
        let mut cases: Vec<_> = goldens.cases.iter().filter(before).collect();
        cases.sort_by_key(|case| std::cmp::Reverse(case.prompt_ids.len()));
        cases.truncate(if full { 3 } else { 1 });
        let Distance { cosine, .. } = step_exact(&mut model, &goldens, &cases, tiny);
        assert!(cosine >= 0.999, "{tiny}: cosine {cosine}");
        let [smaller, _, whole] = family.executions(&model, false);
        assert!(smaller > 0 && (whole > 0 || tiny == "qwen3-moe"), "{tiny}: {smaller}, {whole}");
    }
}
