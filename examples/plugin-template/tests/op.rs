//! The op against a scripted graph: a counter that adds up what it has seen.

use my_op::MyOp;
use qhx_op::harness::{OpHarness, graph, tensor};
use qhx_op::{DType, ErrorCode, Segment};
use serde_json::json;

/// Four tokens, rows of two values: token t is [t, 1].
fn harness() -> OpHarness {
    let table: Vec<u8> =
        (0..4u8).flat_map(|t| [f32::from(t), 1.0]).flat_map(f32::to_le_bytes).collect();
    OpHarness::new()
        .manifest(json!({
            "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
            "params": {"vocab": 4, "max_ctx": 6},
            "plan": {"params": {"decode": "decode"}}
        }))
        .file("embed.bin", table)
        .graph(graph(
            "decode",
            [tensor("x", DType::F32, [1, 2]), tensor("past_sum", DType::F32, [1])],
            [tensor("logits", DType::F32, [1, 4]), tensor("present_sum", DType::F32, [1])],
        ))
        .script(|step| {
            let (x, past) = (step.input("x")?, step.input("past_sum")?);
            let sum = past[0] + x[0];
            step.set("present_sum", &[sum])?;
            step.set("logits", &[sum, x[0], x[1], 0.0])
        })
}

#[test]
fn tokens_reach_the_graph_and_the_state_comes_back() {
    let mut op = harness().open::<MyOp>().unwrap();
    assert_eq!(op.info().vocab, 4);
    assert_eq!(op.prefill(&[Segment::Tokens(&[1, 3])]).unwrap(), [4.0, 3.0, 1.0, 0.0]);
    assert_eq!(op.decode(2).unwrap(), [6.0, 2.0, 1.0, 0.0]);
    assert_eq!((op.position(), op.executions("decode")), (3, 3));
    op.reset().unwrap();
    assert_eq!(op.decode(2).unwrap()[0], 2.0);
}

#[test]
fn a_snapshot_brings_the_state_back() {
    let mut op = harness().open::<MyOp>().unwrap();
    op.prefill(&[Segment::Tokens(&[3])]).unwrap();
    let saved = op.snapshot().unwrap();
    let first = op.decode(1).unwrap();
    op.restore(saved).unwrap();
    assert_eq!(op.position(), 1);
    assert_eq!(op.decode(1).unwrap(), first);
}

#[test]
fn a_cancelled_step_leaves_the_state_as_it_was() {
    let mut op = harness().open::<MyOp>().unwrap();
    op.prefill(&[Segment::Tokens(&[3])]).unwrap();
    op.cancel(true);
    assert_eq!(op.decode(1).unwrap_err().code(), ErrorCode::CANCELLED);
    op.cancel(false);
    assert_eq!(op.position(), 1);
    assert_eq!(op.decode(1).unwrap()[0], 4.0);
}

#[test]
fn what_does_not_fit_is_said() {
    let missing = OpHarness::new().manifest(json!({"plan": {"params": {"decode": "step"}}}));
    let error = missing.open::<MyOp>().unwrap_err();
    assert!(error.message().contains("\"step\""), "{error}");

    let mut op = harness().open::<MyOp>().unwrap();
    assert!(op.decode(4).unwrap_err().message().contains("vocabulary of 4"));
    let error = op.prefill(&[Segment::Tokens(&[0; 7])]).unwrap_err();
    assert!(error.message().contains("do not fit into the context of 6 tokens"), "{error}");
}
