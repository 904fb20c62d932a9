//! The op over scripted graphs: two layers with three experts each, rows of two values.

use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensors};
use qhx_op::{ErrorCode, GraphInfo, Result, Segment};
use serde_json::{Value, json};

use crate::Generate;

const ROOM: usize = 9;

/// Attention and router of a layer.
fn layer(name: &str, layer: usize, rows: usize) -> GraphInfo {
    let [k, v] = ["k", "v"].map(|kind| format!("{kind}_{layer}"));
    let past = [format!("past_{k}"), format!("past_{v}")];
    let new = [format!("new_{k}"), format!("new_{v}")];
    let inputs = tensors(rows, [("x", 2), ("cos", 1), ("sin", 1), ("cmask", ROOM + rows)]);
    let outputs = tensors(rows, [("y", 2), ("z", 2), ("router", 3)]);
    let inputs = [inputs, tensors(ROOM, past.each_ref().map(|name| (name.as_str(), 1)))].concat();
    let new = tensors(rows, new.each_ref().map(|name| (name.as_str(), 1)));
    graph(name, inputs, [outputs, new].concat())
}

/// Token t has scores that choose its experts: see `SCORES`. Hidden states pass the layers' graphs; an expert adds the
/// number of itself in all layers, which is its weights, to the first value. Logits are the hidden state and 0.
fn run(step: &mut Step<'_>) -> Result<()> {
    let x = step.input("x")?;
    let rows = x.chunks_exact(2);
    match step.graph() {
        "ffn2" => {
            let of = |input: &str| step.input(input).map(|values| values[0]);
            let sum = of("m1")? * of("a_gate")? + of("m2")? * of("b_gate")?;
            step.set("y", &[sum, 0.0])
        }
        "ffn_pf" => {
            let weight = step.input("gate")?[0];
            step.set("y", &rows.flat_map(|_| [weight, 0.0]).collect::<Vec<_>>())
        }
        "lmhead_ar1" => step.set("logits", &[x[0], x[1], 0.0]),
        _ => {
            let scores = rows.map(|row| SCORES[row[1] as usize]).collect::<Vec<_>>();
            step.set("y", &x)?;
            step.set("z", &x)?;
            step.set("router", &scores.concat())
        }
    }
}

/// Scores of a token, by the second value of its row: its own number.
const SCORES: [[f32; 3]; 3] = [[1.0, 9.0, 4.0], [9.0, 1.0, 4.0], [f32::NAN, 0.0, 0.0]];

fn opened(params: Value, plan: Value, without: &[&str]) -> Result<OpenOp> {
    // The weights of expert e of layer l are 10 · l + e + 1.
    let weights = [1, 2, 3, 11, 12, 13].map(|weight| [weight; 6]).concat();
    let op = OpHarness::new()
        .manifest(json!({
            "artifacts": {"embed": {"path": "embed", "dtype": "f32"}},
            "params": params,
            "plan": {"params": plan}
        }))
        .floats("embed", &[0.0, 0.0, 0.0, 1.0, 0.0, 2.0])
        .file("experts_i8.bin", weights)
        .floats("experts_scale.f32", &[1.0; 24])
        .script(run);
    let ffn2 = [
        tensors(1, [("x", 2), ("m1", 1), ("m2", 1)]),
        tensors(1, [("a_gate", 2), ("a_up", 2), ("b_gate", 2), ("b_up", 2)]),
        tensors(2, [("a_down", 1), ("b_down", 1)]),
    ];
    let ffn_pf =
        [tensors(4, [("x", 2)]), tensors(1, [("gate", 2), ("up", 2)]), tensors(2, [("down", 1)])];
    let graphs = [
        layer("a0", 0, 1),
        layer("a1", 1, 1),
        layer("pf0", 0, 4),
        layer("pf1", 1, 4),
        graph("ffn2", ffn2.concat(), tensors(1, [("y", 2)])),
        graph("ffn_pf", ffn_pf.concat(), tensors(4, [("y", 2)])),
        graph("lmhead_ar1", tensors(1, [("x", 2)]), tensors(1, [("logits", 3)])),
    ];
    let graphs = graphs.into_iter().filter(|graph| !without.contains(&graph.name.as_str()));
    op.graphs(graphs).open::<Generate>()
}

fn params() -> Value {
    json!({"n_layers": 2, "n_experts": 3, "head_dim": 2})
}

#[test]
fn a_token_goes_to_its_two_experts_of_each_layer() {
    let mut op = opened(params(), json!({}), &[]).unwrap();
    // Experts 1 and 2, and 0 and 2, all counting whole.
    assert_eq!(op.decode(0).unwrap(), [5.0 + 25.0, 0.0, 0.0]);
    assert_eq!(op.decode(1).unwrap(), [4.0 + 24.0, 1.0, 0.0]);
    // The manifest's noise lets scores close to the largest share in the multipliers.
    let mut params = params();
    params["router_jitter_noise"] = 0.3.into();
    let shared = opened(params, json!({}), &[]).unwrap().decode(0).unwrap()[0];
    let part = 1.0 / (1.0 + (4f32 - 9.0).exp());
    assert!((shared - (part * 14.0 + 16.0)).abs() < 1e-4, "{shared}");
}

#[test]
fn a_prompt_goes_to_each_chosen_expert_once() {
    let mut op = opened(params(), json!({}), &[]).unwrap();
    let logits = op.prefill(&[Segment::Tokens(&[1, 1, 0])]).unwrap();
    assert_eq!(logits, [30.0, 0.0, 0.0], "as token by token");
    let counts = ["pf0", "pf1", "ffn_pf", "ffn2", "lmhead_ar1"].map(|name| op.executions(name));
    assert_eq!(counts, [1, 1, 6, 0, 1]);
    // Scores that are no numbers choose nothing, and the state stays.
    let error = op.decode(2).unwrap_err();
    assert_eq!((error.code(), op.position()), (ErrorCode::EXECUTE, 3), "{error}");
    assert!(error.message().contains("scores at position 3 are NaN"), "{error}");
    assert_eq!(op.decode(0).unwrap(), [30.0, 0.0, 0.0]);
}

#[test]
fn layers_see_the_last_positions_of_the_window() {
    for (window, seen) in [(Value::Null, 4), (json!(0), 4), (json!(3), 3)] {
        let mut params = params();
        params["sliding_window"] = window;
        let mut op = opened(params, json!({}), &[]).unwrap();
        op.prefill(&[Segment::Tokens(&[0, 1, 0])]).unwrap();
        op.decode(1).unwrap();
        let mask = op.bound("a1", "cmask").unwrap();
        assert_eq!(mask.iter().filter(|value| **value == 0.0).count(), seen);
    }
}

#[test]
fn prefill_graphs_are_all_there_or_none() {
    let mut op = opened(params(), json!({}), &["pf0", "pf1", "ffn_pf"]).unwrap();
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 0])]).unwrap(), [30.0, 0.0, 0.0]);
    assert_eq!(op.executions("ffn2"), 3, "nobody wants the first token's last layer");
    let six = json!({"n_layers": 6});
    for (params, plan, without, expected) in [
        (params(), json!({}), "pf1", "\"pf0\", \"ffn_pf\" are, \"pf1\" are missing"),
        (six, json!({"decode": ["a0", "a1"]}), "", "/plan/params/decode: 2 graphs, expected 6"),
        (params(), json!({"decode": "b*"}), "", "manifest /plan/params/decode: graph \"b0\""),
        (json!({}), json!({"decode": "b*"}), "", "/plan/params/decode: no graph is named or there"),
        (json!({"n_experts": 4, "head_dim": 2}), json!({}), "", "params.n_experts is 4"),
    ] {
        let error = opened(params, plan, &[without]).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}
