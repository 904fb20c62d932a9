//! The encoder over graphs of a few rows.

use qhx_op::harness::{OpHarness, OpenOp, Step, graph, tensor};

use super::*;

const F32: DType = DType::F32;

/// A part over `rows` positions of two values.
fn part(name: &str, rows: usize) -> GraphInfo {
    let table = |name: &str| tensor(name, F32, [rows, 1]);
    graph(
        name,
        [tensor("x", F32, [rows, 2]), table("cos"), table("sin"), tensor("cmask", F32, [1, rows])],
        [tensor("y", F32, [rows, 2])],
    )
}

/// A part adds to each row how many positions are visible.
fn run(step: &mut Step<'_>) -> Result<()> {
    let visible = step.input("cmask")?.iter().filter(|value| **value == 0.0).count();
    let rows: Vec<_> = step.input("x")?.iter().map(|value| value + visible as f32).collect();
    step.set("y", &rows)
}

fn opened(params: serde_json::Value) -> Result<OpenOp> {
    // Token t is [t, -t].
    let harness = OpHarness::new()
        .manifest(json!({
            "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
            "params": {"head_dim": 2, "rope_theta": 1e4},
            "plan": {"params": params}
        }))
        .floats("embed.bin", &[0.0, 0.0, 1.0, -1.0, 2.0, -2.0])
        .script(run);
    let graphs = [("a", 6), ("b", 6), ("a4", 4), ("b4", 4), ("a2", 2), ("b2", 2)];
    harness.graphs(graphs.map(|(name, rows)| part(name, rows))).open::<EmbedSharded>()
}

#[test]
fn a_text_takes_the_graphs_of_the_shortest_length_that_holds_it() {
    let mut op = opened(json!({
        "parts": ["a", "b"], "buckets": ["a4", "b4", "a2", "b2"], "normalize": false
    }))
    .unwrap();
    assert_eq!((op.info().max_ctx, op.info().embedding_dim), (6, 2));
    for (tokens, used) in [
        (&[1, 2][..], ["a2", "b2"]),
        (&[2], ["a2", "b2"]),
        (&[1, 2, 0], ["a4", "b4"]),
        (&[1, 1, 1, 1, 2], ["a", "b"]),
        (&[1, 2, 0, 1], ["a4", "b4"]),
    ] {
        let names = ["a", "b", "a4", "b4", "a2", "b2"];
        let counts = |op: &OpenOp| names.map(|name| op.executions(name));
        let before = counts(&op);
        // The mean of the rows, and the visible positions once for each part.
        let count = tokens.len() as f32;
        let mean = tokens.iter().sum::<u32>() as f32 / count;
        let vector = op.embed(&[Segment::Tokens(tokens)]).unwrap();
        let expected = [mean + 2.0 * count, 2.0 * count - mean];
        let near = vector.iter().zip(expected).all(|(v, e)| (v - e).abs() < 1e-5);
        assert!(near && vector.len() == 2, "{tokens:?}: {vector:?}, expected {expected:?}");
        for ((name, after), before) in names.iter().zip(counts(&op)).zip(before) {
            assert_eq!(after - before, usize::from(used.contains(name)), "{tokens:?}, {name}");
        }
    }
    let error = op.embed(&[Segment::Tokens(&[1; 7])]).unwrap_err();
    assert!(error.message().contains("7 tokens, the encoder takes at most 6"), "{error}");
}

/// An encoder in one part with a row of the mask for each of six positions. A row becomes the sum of those that it
/// sees, weighted by their positions so that none stands for another, and of its own rotary table.
fn separating(pooling: &str, causal: bool) -> OpenOp {
    let graph = |name: &str, rows: usize| {
        let table = |name: &str| tensor(name, F32, [rows, 1]);
        let inputs = [
            tensor("x", F32, [rows, 2]),
            table("cos"),
            table("sin"),
            tensor("cmask", F32, [rows, rows]),
        ];
        graph(name, inputs, [tensor("y", F32, [rows, 2])])
    };
    OpHarness::new()
        .manifest(json!({
            "artifacts": {"embed": {"path": "embed.bin", "dtype": "f32"}},
            "params": {"head_dim": 2, "rope_theta": 1e4},
            "plan": {"params": {
                "parts": "enc", "buckets": "enc3", "pooling": pooling, "causal": causal, "normalize": false
            }}
        }))
        .floats("embed.bin", &[0.0, 0.0, 1.0, -1.0, 2.0, 5.0])
        .graph(graph("enc", 6))
        .graph(graph("enc3", 3))
        .script(|step| {
            let (x, mask, sin) = (step.input("x")?, step.input("cmask")?, step.input("sin")?);
            let mut y = Vec::new();
            for (row, mask) in mask.chunks(sin.len()).enumerate() {
                let seen = |column: usize| -> f32 {
                    let keys = x.chunks(2).zip(mask).filter(|(_, mask)| **mask == 0.0);
                    keys.map(|(key, _)| key[column]).sum()
                };
                y.extend([seen(0) + 100.0 * sin[row], seen(1) + x[2 * row]]);
            }
            step.set("y", &y)
        })
        .open::<EmbedSharded>()
        .unwrap()
}

#[test]
fn texts_in_one_graph_are_as_if_each_were_alone() {
    let texts: [&[u32]; 3] = [&[1, 2], &[2], &[2, 1, 1]];
    for pooling in POOLINGS {
        for causal in [false, true] {
            let mut op = separating(pooling, causal);
            let rows: Vec<usize> = op.info().packing.buckets.iter().map(|b| b.rows).collect();
            assert_eq!(rows, [3, 6]);
            assert!(op.info().packing.buckets[0].cost < op.info().packing.buckets[1].cost);
            let alone = texts.map(|text| op.embed(&[Segment::Tokens(text)]).unwrap());
            assert_eq!(op.executions("enc"), 0);
            // In either order, and a text alone after others.
            for order in [[0, 1, 2], [2, 0, 1]] {
                let together = op.embed_many(&order.map(|text| texts[text])).unwrap();
                let expected: Vec<f32> = order.iter().flat_map(|&t| alone[t].clone()).collect();
                assert_eq!(together, expected, "{pooling}, causal {causal}, {order:?}");
            }
            assert_eq!(op.executions("enc"), 2, "once for all");
            assert_eq!(op.embed(&[Segment::Tokens(texts[2])]).unwrap(), alone[2]);
            assert_eq!(op.embed_many(&texts[..2]).unwrap(), alone[..2].concat());
            assert_eq!(op.executions("enc"), 2, "three tokens need the shorter graph");
        }
    }
}

#[test]
fn vectors_of_several_ways_to_pool_stand_one_after_the_other() {
    // Tokens 1, 2, 1 are rows [1, -1], [2, -2], [1, -1], to which each of two parts adds 3.
    let expected = [
        ("mean", [22.0 / 3.0, 14.0 / 3.0]),
        ("last", [7.0, 5.0]),
        ("cls", [7.0, 5.0]),
        ("max", [8.0, 5.0]),
        ("mean_sqrt_len", [22.0 / 3f32.sqrt(), 14.0 / 3f32.sqrt()]),
        ("weighted_mean", [(7.0 + 16.0 + 21.0) / 6.0, (5.0 + 8.0 + 15.0) / 6.0]),
    ];
    let graphs = json!(["a4", "b4", "a2", "b2"]);
    let open = |pooling: serde_json::Value| {
        let params = json!({
            "parts": ["a", "b"], "buckets": graphs, "normalize": false, "pooling": pooling
        });
        opened(params)
    };
    let all = expected.map(|(name, _)| name);
    let mut op = open(json!(all)).unwrap();
    assert_eq!(op.info().embedding_dim, 12);
    let vector = op.embed(&[Segment::Tokens(&[1, 2, 1])]).unwrap();
    let numbers: Vec<f32> = expected.iter().flat_map(|(_, vector)| *vector).collect();
    let near = vector.iter().zip(&numbers).all(|(v, e)| (v - e).abs() < 1e-5);
    assert!(near && vector.len() == 12, "{vector:?}, expected {numbers:?}");
    for none in [json!([]), json!("median"), json!(["mean", "median"])] {
        assert!(open(none.clone()).is_err(), "{none}");
    }
}

#[test]
fn modules_behind_pooling_change_width_and_values() {
    let open = |inputs: usize, bytes: usize| {
        let numbers = [1f32, 0.0, 0.0, 1.0, 1.0, 1.0];
        let weight: Vec<u8> = numbers.into_iter().flat_map(f32::to_le_bytes).take(bytes).collect();
        let modules = json!([
            {"kind": "dense", "inputs": inputs, "outputs": 3, "weight": "w", "bias": null, "activation": "relu"},
            {"kind": "normalize"}
        ]);
        OpHarness::new()
            .manifest(json!({
                "artifacts": {
                    "embed": {"path": "embed.bin", "dtype": "f32"},
                    "modules": {"w": {"path": "w.bin", "dtype": "f32"}}
                },
                "params": {"head_dim": 2, "rope_theta": 1e4},
                "plan": {"params": {"parts": "a", "normalize": false, "modules": modules}}
            }))
            .floats("embed.bin", &[0.0, 0.0, 1.0, -1.0])
            .file("w.bin", weight)
            .script(run)
            .graph(part("a", 4))
            .open::<EmbedSharded>()
    };
    let mut op = open(2, 24).unwrap();
    assert_eq!(op.info().embedding_dim, 3);
    // The row [1, -1] and one visible position: [2, 0] becomes [2, 0, 2].
    let vector = op.embed(&[Segment::Tokens(&[1])]).unwrap();
    let half = 0.5f32.sqrt();
    assert!(vector.iter().zip([half, 0.0, half]).all(|(v, e)| (v - e).abs() < 1e-6), "{vector:?}");
    let error = open(3, 24).unwrap_err();
    assert!(error.message().contains("3 inputs gets vectors of 2"), "{error}");
    let error = open(2, 20).unwrap_err();
    assert!(error.message().contains("w.bin: 20 bytes, expected 6 f32 values"), "{error}");
}

#[test]
fn texts_that_do_not_fit_together_are_an_error() {
    let mut op = separating("mean", false);
    for texts in [&[&[1u32; 4][..], &[1; 3]][..], &[&[1], &[]], &[]] {
        let error = op.embed_many(texts).unwrap_err();
        assert!(error.message().contains("at most 6 tokens at once"), "{error}");
    }
    assert!(op.embed_many(&[&[1], &[7]]).unwrap_err().message().contains("token 7"));
    // Masks of one row cannot keep texts apart: bundles that have them embed one text at a time.
    let mut op = opened(json!({"parts": ["a", "b"], "buckets": ["a4", "b4", "a2", "b2"]})).unwrap();
    assert!(op.info().packing.buckets.is_empty());
    assert!(op.embed_many(&[&[1], &[1]]).is_err());
}

#[test]
fn lengths_no_shorter_and_parts_without_names_are_errors() {
    let error = opened(json!({"parts": ["a4", "b4"], "buckets": ["a", "b"]})).unwrap_err();
    let expected = "/plan/params/buckets: graph \"a\" takes 6 rows, expected fewer than the 4";
    assert!(error.message().contains(expected), "{error}");
    let error = opened(json!({"parts": ["a", "b"], "buckets": ["a4"]})).unwrap_err();
    let expected = "graph \"b4\" of context \"b4\" takes or gives the same rows";
    assert!(error.message().contains(expected), "{error}");
}
