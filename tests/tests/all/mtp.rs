//! Draft tokens of a drafting head (MTP), against goldens of the layer that `transformers` has for it.
//!
//! The fixture has the head alone, trained for `qwen35-tied`: the tests put the two together as published checkpoints
//! have them.

use std::fs;
use std::path::{Path, PathBuf};

use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_core::engine::speculate::PromptLookup;
use qhx_core::engine::{Model, Prompt, Request, Speculate};
use qhx_core::op::{HostOp, Segment};
use qhx_tests::forged::{Forged, set};
use qhx_tests::replay::{self, generate, speculative_exact};
use qhx_tests::tiny::{self, Bundles, CPU, Case, Variant};
use qhx_tests::{backends, files, plugin_files};
use qhx_tiers::tier;
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::{Value, json};

const TARGET: &str = "qwen35-tied";
const PREFILL: Variant = Variant { prefill: &[4, 16], ..CPU };

/// `goldens.json` of a head.
#[derive(Deserialize)]
pub(crate) struct Goldens {
    /// Fraction of positions where the first draft token is right, and where the first two are.
    pub accepted: [f64; 2],
    pub cases: Vec<Drafts>,
    #[serde(skip)]
    folder: PathBuf,
}

#[derive(Deserialize)]
pub(crate) struct Drafts {
    pub id: String,
    /// Behind each of the first tokens of the answer.
    pub drafts: Vec<[u32; 2]>,
}

impl Goldens {
    fn read() -> Self {
        Self::of(tiny::fixture("qwen35-mtp"))
    }

    /// Goldens of a folder.
    pub fn of(folder: PathBuf) -> Self {
        let read: Self = files::json(&folder.join("goldens.json"));
        Self { folder, ..read }
    }

    /// Logits of the draft tokens of a case, one row for each.
    fn logits(&self, id: &str) -> Vec<Vec<f32>> {
        let (shape, values) = files::tensor(&self.folder.join("goldens.safetensors"), id);
        values.chunks_exact(shape[2]).map(<[f32]>::to_vec).collect()
    }
}

/// The checkpoint with its head, in two files, as `edit` leaves its configuration; without the tensor `missing`.
fn checkpoint(folder: &Path, missing: &str, edit: impl FnOnce(&mut Value)) -> PathBuf {
    plugin_files::copy_folder(&tiny::fixture(TARGET), folder);
    let files = ["model-1.safetensors", "mtp.safetensors"].map(|file| folder.join(file));
    fs::rename(folder.join("model.safetensors"), &files[0]).unwrap();
    fs::copy(tiny::fixture("qwen35-mtp").join("mtp.safetensors"), &files[1]).unwrap();
    let mut map = serde_json::Map::new();
    for file in files {
        let bytes = fs::read(&file).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let names = tensors.names().into_iter().filter(|name| *name != missing);
        let file = file.file_name().unwrap().to_str().unwrap();
        map.extend(names.map(|name| (name.to_owned(), json!(file))));
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    files::edit(&folder.join("config.json"), |config| {
        config["mtp_num_hidden_layers"] = json!(1);
        edit(config);
    });
    folder.to_owned()
}

/// The bundle with its head.
fn bundle(variant: Variant) -> PathBuf {
    static CHECKPOINT: Bundles<()> = Bundles::new();
    tiny::bundle(&CHECKPOINT.get((), |folder| checkpoint(folder, "", |_| {})), variant)
}

fn open() -> Model {
    tiny::open(&bundle(PREFILL), backends::cpu()).unwrap()
}

/// The cases of the target that the head has goldens of.
pub(crate) fn cases<'a>(target: &'a tiny::Goldens, head: &Goldens) -> Vec<&'a Case> {
    let case = |id: &str| target.cases.iter().find(|case| case.id == id).unwrap();
    head.cases.iter().map(|drafts| case(&drafts.id)).collect()
}

/// The logits of two draft tokens behind `token`.
fn draft_two(op: &mut dyn HostOp, token: u32, first: u32) -> [Vec<f32>; 2] {
    [token, first].map(|token| {
        op.draft(token).unwrap_or_else(|e| panic!("{e}"));
        op.logits().unwrap().to_f32()
    })
}

fn close(found: &[f32], expected: &[f32], label: &str) {
    let distance = Distance::of(found, expected).unwrap();
    assert!(distance.largest <= 1e-4, "{label}: {distance:?}");
}

/// Compares the logits of two draft tokens at each position that there are goldens of.
pub(crate) fn equals_the_reference(model: &mut Model, target: &tiny::Goldens, head: &Goldens) {
    // Tokens that the model consumes between two drafts: one by one, or some of a verified step.
    for accepted in [1, 2] {
        for (case, golden) in cases(target, head).into_iter().zip(&head.cases) {
            let expected = head.logits(&case.id);
            let op = model.op_mut();
            op.reset().unwrap();
            op.drafting(true).unwrap();
            op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
            for step in (0..golden.drafts.len()).step_by(accepted) {
                let token = case.output_ids[step];
                let found = draft_two(op, token, golden.drafts[step][0]);
                for (index, found) in found.iter().enumerate() {
                    let label = format!("{}, step {step}, draft {index}", case.id);
                    close(found, &expected[2 * step + index], &label);
                }
                if accepted == 1 {
                    op.decode(token).unwrap();
                } else {
                    op.verify(&case.output_ids[step..step + 4]).unwrap();
                    op.accept(accepted).unwrap();
                }
            }
        }
    }
}

#[test]
fn drafts_are_those_of_transformers() {
    equals_the_reference(&mut open(), &tiny::goldens(&tiny::fixture(TARGET)), &Goldens::read());
}

#[test]
fn a_head_drafts_without_a_second_bundle() {
    let (target, head) = (tiny::goldens(&tiny::fixture(TARGET)), Goldens::read());
    let cases = cases(&target, &head);
    let tokens: usize = cases.iter().map(|case| case.output_ids.len()).sum();
    let mut model = open();
    let counts = speculative_exact(&mut model, &cases, "2".parse().unwrap(), "two draft tokens");
    let rate = counts.accepted as f64 / counts.drafted as f64;
    let [first, both] = head.accepted;
    eprintln!("{counts:?} of {tokens} tokens, rate {rate:.3}, goldens {first:.3} and {both:.3}");
    assert!((rate - (first + both) / 2.0).abs() < 0.2, "{rate}");
    // Without the head, prompt lookup finds less in these texts, which do not repeat themselves.
    model.set_drafter(Box::new(PromptLookup::new()));
    let lookup = speculative_exact(&mut model, &cases, "2".parse().unwrap(), "prompt lookup");
    assert!(counts.accepted > 3 * lookup.accepted, "{counts:?}, {lookup:?}");
}

#[test]
fn a_seed_gives_the_same_answer_with_a_head() {
    let target = tiny::goldens(&tiny::fixture(TARGET));
    let mut model = open();
    let request = || {
        let prompt = Prompt::Tokens(target.cases[0].prompt_ids.clone());
        let mut request = Request::greedy(prompt, 40);
        (request.sampling.temperature, request.sampling.seed) = (1.2, Some(5));
        request
    };
    let ran = |model: &Model| replay::executions(model, |graph| graph.starts_with("mtp"));
    let plain = generate(&mut model, &request().speculate(Speculate::Off));
    assert_eq!(ran(&model), 0, "a head that is switched off runs");
    // By default drafts are made as far as they pay, by times that vary: how many are accepted is not for a test.
    for (asked, least) in [(request().speculate("3".parse().unwrap()), 1), (request(), 0)] {
        let before = ran(&model);
        model.reset().unwrap();
        let drafted = generate(&mut model, &asked);
        assert_eq!(drafted.tokens, plain.tokens, "{:?}", asked.speculate);
        assert!(drafted.timings.drafts.accepted >= least, "{:?}", asked.speculate);
        assert!(ran(&model) > before, "{:?}", asked.speculate);
    }
}

#[test]
fn a_head_follows_the_state() {
    let target = tiny::goldens(&tiny::fixture(TARGET));
    follows_the_state([open(), open()], &target, &Goldens::read());
}

/// Draft tokens of one model after the state was saved and taken back, and of another that imports it.
pub(crate) fn follows_the_state(
    [mut model, mut other]: [Model; 2],
    target: &tiny::Goldens,
    head: &Goldens,
) {
    let (case, golden) = (cases(target, head)[0], &head.cases[0]);
    let expected = head.logits(&case.id);
    let check = |op: &mut dyn HostOp, label: &str| {
        let found = draft_two(op, case.output_ids[3], golden.drafts[3][0]);
        close(&found[0], &expected[6], label);
        close(&found[1], &expected[7], label);
    };
    let op = model.op_mut();
    op.drafting(true).unwrap();
    op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap();
    case.output_ids[..3].iter().for_each(|&token| op.decode(token).unwrap());
    check(op, "as it came");
    let saved = op.snapshot().unwrap();
    let state = op.export_state().unwrap();
    op.reset().unwrap();
    op.prefill(&[Segment::Tokens(&target.cases[1].prompt_ids)]).unwrap();
    op.restore(saved).unwrap();
    check(op, "from a snapshot");
    let position = op.position();
    let other = other.op_mut();
    other.drafting(true).unwrap();
    other.import_state(position, &state).unwrap();
    check(other, "imported");
    for cut in [1, 9, 30, 60] {
        let damaged = &state[..state.len() - cut];
        assert!(other.import_state(position, damaged).is_err(), "{cut} bytes less");
    }
    // Switched off, it drafts for no text.
    other.drafting(false).unwrap();
    assert!(other.draft(case.output_ids[3]).is_err());
}

#[test]
fn checkpoints_whose_head_is_unusable_are_refused() {
    let forged = |name: &str, missing: &str, option: Option<&str>, edit: fn(&mut Value)| {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(&folder.path().join(name), missing, edit);
        let bundle = Forged::try_of(&source, |options| {
            (options.max_ctx, options.prefill) = (Some(32), Some(Vec::new()));
            let given = option.map(|option| ("mtp", option));
            set(options, given.as_slice());
        })?;
        Ok::<_, qhx_base::Error>(bundle.json()["plan"]["params"]["draft_head"].clone())
    };
    let same = |_: &mut Value| {};
    assert_eq!(forged("off", "", Some("off"), same).unwrap(), Value::Null);
    assert_eq!(forged("auto", "", None, same).unwrap(), json!("mtp1"));
    assert_eq!(forged("gone", "mtp.fc.weight", Some("off"), same).unwrap(), Value::Null);
    let two = |config: &mut Value| config["mtp_num_hidden_layers"] = json!(2);
    let own = |config: &mut Value| config["mtp_use_dedicated_embeddings"] = json!(true);
    for (missing, edit, what, kind) in [
        ("", two as fn(&mut Value), "2 layers", ErrorKind::Usage),
        ("", own, "mtp_use_dedicated_embeddings", ErrorKind::Usage),
        ("mtp.fc.weight", same, "mtp.fc.weight", ErrorKind::Usage),
        ("mtp.layers.0.self_attn.k_norm.weight", same, "k_norm", ErrorKind::Artifact),
    ] {
        let error = forged("bad", missing, Some("on"), edit).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(error.kind(), kind, "{error}");
    }
}

#[tier(qnn)]
fn htp_answers_are_the_same_with_a_head() {
    let (target, head) = (tiny::goldens(&tiny::fixture(TARGET)).brief(), Goldens::read());
    let cases = cases(&target, &head);
    let variant = Variant { target: Some("v81"), ..PREFILL };
    let backend = backends::qnn();
    let mut model = tiny::open(&bundle(variant), backend).unwrap();
    let speculate: Speculate = "2".parse().unwrap();
    let counts = speculative_exact(&mut model, &cases[..2], speculate, "v81");
    eprintln!("v81: {counts:?}");
    assert!(3 * counts.accepted > counts.drafted, "{counts:?}");
    // Prompts there, draft tokens and answers on the CPU.
    model.decode_on(Some(backends::cpu()), "asked for").unwrap();
    let handed = speculative_exact(&mut model, &cases[..1], speculate, "v81, tokens on the CPU");
    assert!(3 * handed.accepted > handed.drafted, "{handed:?}");
    replay::greedy_exact(&mut model, &cases[..1], "v81");
}
