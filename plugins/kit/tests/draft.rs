//! The drafting head of the kit's decoder, on scripted graphs: which pairs it sees, and what it costs.

#![allow(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use qhx_kit::decoder::{Decoder, DecoderGraphs};
use qhx_kit::fill::CausalMask;
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensor};
use qhx_op::{DType, Generator, GraphInfo, Host, Op, OpDescription, OpenInfo, Result, Segment};
use serde_json::{Value, json};

struct TinyModel(Decoder);

impl Op for TinyModel {
    fn describe() -> OpDescription {
        OpDescription {
            name: "tiny".into(),
            params_schema: schema::decoder([]),
            ..OpDescription::default()
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        Decoder::builder("tiny", graphs, state).mask(mask).open(host).map(Self)
    }

    fn info(&self) -> OpenInfo {
        self.0.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.0)
    }
}

const F32: DType = DType::F32;
const ROOM: usize = 12;

/// Hidden states are tokens. The head's cache has 100 · hidden state + token for each pair, and its own hidden state is
/// the sum of those that a row sees.
fn run(step: &mut Step<'_>) -> Result<()> {
    let x = step.input("x")?;
    if step.graph() == "head" {
        return step.set("logits", &[x[0], x[1], 7.0]);
    }
    let first = |rows: &[f32]| rows.iter().step_by(2).copied().collect::<Vec<_>>();
    let Ok(h) = step.input("h") else {
        step.set("new_k_0", &first(&x))?;
        return step.set("y", &x);
    };
    let pairs: Vec<_> = first(&h).iter().zip(first(&x)).map(|(h, x)| 100.0 * h + x).collect();
    let seen = [step.input("past_k_1")?, pairs.clone()].concat();
    let sum = |mask: &[f32]| -> f32 {
        mask.iter().zip(&seen).filter(|(mask, _)| **mask == 0.0).map(|(_, pair)| pair).sum()
    };
    let masks = step.input("cmask")?;
    let y: Vec<_> = masks.chunks_exact(seen.len()).flat_map(|mask| [sum(mask), 5.0]).collect();
    step.set("new_k_1", &pairs)?;
    step.set("y", &y)
}

fn layer(name: &str, rows: usize, cache: &str) -> GraphInfo {
    graph(
        name,
        [
            tensor("x", F32, [rows, 2]),
            tensor("cmask", F32, [rows, ROOM + rows]),
            tensor(&format!("past_k_{cache}"), F32, [ROOM, 1]),
        ],
        [tensor("y", F32, [rows, 2]), tensor(&format!("new_k_{cache}"), F32, [rows, 1])],
    )
}

fn drafts(name: &str, rows: usize) -> GraphInfo {
    let mut graph = layer(name, rows, "1");
    graph.inputs.push(tensor("h", F32, [rows, 2]));
    graph
}

fn harness(params: Value) -> OpHarness {
    let rows = (0..3_u8).map(f32::from).flat_map(|t| [t, -t]);
    let table: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
    OpHarness::new()
        .manifest(json!({
            "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
            "params": {"n_layers": 1},
            "plan": {"params": params}
        }))
        .file("embed.bin", table)
        .graphs([layer("one", 1, "0"), layer("four", 4, "0")])
        .graphs([drafts("draft1", 1), drafts("draft4", 4)])
        .graph(graph("head", [tensor("x", F32, [1, 2])], [tensor("logits", F32, [1, 3])]))
        .script(run)
}

fn open() -> OpenOp {
    let params = json!({
        "decode": "one", "prefill": "four", "lmhead": "head", "draft_head": ["draft4", "draft1"]
    });
    harness(params).open::<TinyModel>().unwrap()
}

/// The pairs of these tokens, as the cache has them.
fn pairs(tokens: &[u32]) -> f32 {
    tokens.windows(2).map(|pair| (100 * pair[0] + pair[1]) as f32).sum()
}

fn ran(op: &OpenOp) -> [usize; 2] {
    ["draft1", "draft4"].map(|graph| op.executions(graph))
}

#[test]
fn a_head_sees_the_pairs_of_the_text_and_of_its_drafts() {
    let mut op = open();
    assert!(op.info().drafts);
    op.drafting(true).unwrap();
    op.prefill(&[Segment::Tokens(&[1, 2, 1])]).unwrap();
    assert_eq!(ran(&op), [0, 0], "pairs wait until they are needed");
    let text = pairs(&[1, 2, 1, 2]);
    assert_eq!(op.draft(2).unwrap(), [text, 5.0, 7.0]);
    // Its own hidden state, and the token that was drafted.
    assert_eq!(op.draft(0).unwrap()[0], text + 100.0 * text);
    assert_eq!((ran(&op), op.position()), ([1, 1], 3));
    op.decode(2).unwrap();
    assert_eq!(op.draft(1).unwrap()[0], pairs(&[1, 2, 1, 2, 1]), "drafts are forgotten");
    op.verify(&[1, 0]).unwrap();
    op.accept(1).unwrap();
    assert_eq!(op.draft(2).unwrap()[0], pairs(&[1, 2, 1, 2, 1, 2]), "and what was not accepted");
    assert_eq!(ran(&op), [1, 3]);
}

#[test]
fn a_head_goes_where_the_state_goes() {
    let mut op = open();
    op.drafting(true).unwrap();
    op.prefill(&[Segment::Tokens(&[1, 2, 1, 2])]).unwrap();
    let (saved, state) = (op.snapshot().unwrap(), op.export_state().unwrap());
    let expected = pairs(&[1, 2, 1, 2, 1]);
    op.reset().unwrap();
    op.prefill(&[Segment::Tokens(&[2, 2, 2, 2])]).unwrap();
    assert_eq!(op.draft(2).unwrap()[0], pairs(&[2; 5]));
    op.restore(saved).unwrap();
    assert_eq!(op.draft(1).unwrap()[0], expected);
    let mut other = open();
    other.drafting(true).unwrap();
    other.import_state(4, &state).unwrap();
    assert_eq!(other.draft(1).unwrap()[0], expected);
    // Of all that it may be cut down to, the decoder's own part is a state.
    let states = (0..state.len()).filter(|&end| other.import_state(4, &state[..end]).is_ok());
    assert_eq!(states.count(), 1);
    // Cut back into pairs that are in the cache: the last hidden state is gone, and with it the pair at the cut.
    op.truncate(2).unwrap();
    op.prefill(&[Segment::Tokens(&[1, 1])]).unwrap();
    assert_eq!(op.draft(0).unwrap()[0], pairs(&[1, 2]) + pairs(&[1, 1, 0]));
    // Into pairs that wait: nothing is missing.
    op.prefill(&[Segment::Tokens(&[2, 2])]).unwrap();
    op.truncate(5).unwrap();
    op.decode(1).unwrap();
    assert_eq!(op.draft(0).unwrap()[0], pairs(&[1, 2]) + pairs(&[1, 1, 2, 1, 0]));
}

#[test]
fn a_head_costs_nothing_until_it_is_asked_for() {
    let mut op = open();
    op.prefill(&[Segment::Tokens(&[1, 2, 1, 2, 1, 2])]).unwrap();
    assert!(op.draft(1).is_err(), "it saw no text");
    assert_eq!(ran(&op), [0, 0]);
    // From here on: it begins behind what it did not see.
    op.drafting(true).unwrap();
    (0..6).for_each(|_| drop(op.decode(1).unwrap()));
    assert_eq!(ran(&op), [0, 1], "as many pairs as its widest graph takes");
    assert!(op.draft(1).is_err(), "the context is full");
    op.drafting(false).unwrap();
    op.reset().unwrap();
    op.prefill(&[Segment::Tokens(&[1, 2, 1, 2, 1, 2])]).unwrap();
    assert_eq!(ran(&op), [0, 1]);
}

#[test]
fn a_head_that_does_not_fit_is_named() {
    let fails = |harness: OpHarness, what: &str| {
        let error = harness.open::<TinyModel>().unwrap_err();
        assert!(error.message().contains(what), "{error}");
    };
    let params = |heads: Value| json!({"decode": "one", "lmhead": "head", "draft_head": heads});
    fails(harness(params(json!("draft4"))), "expected one among them that takes 1");
    fails(harness(params(json!("gone"))), "gone");
    fails(harness(params(json!("one"))), "has no input \"h\"");
    let wide = |mut graph: GraphInfo, tensors: fn(&mut GraphInfo) -> &mut Vec<_>, name: &str| {
        tensors(&mut graph).retain(|one: &qhx_op::TensorInfo| one.name != name);
        tensors(&mut graph).push(tensor(name, F32, [1, 3]));
        harness(params(json!("bad"))).graph(graph)
    };
    fails(wide(drafts("bad", 1), |graph| &mut graph.inputs, "h"), "expected 1 rows of 2 values");
    fails(wide(drafts("bad", 1), |graph| &mut graph.outputs, "y"), "expected 1 rows of 2 values");
    let mut op = harness(json!({"decode": "one", "lmhead": "head"})).open::<TinyModel>().unwrap();
    assert!(!op.info().drafts);
    assert!(op.drafting(true).is_err() && op.draft(1).is_err());
}
