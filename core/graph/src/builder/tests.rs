//! Shapes, names and errors of the builder.

use qhx_base::{ErrorKind, Result};

use super::GraphBuilder;
use crate::graph::{AttentionInputs, Conv1d, Conv2d, Elem, Node, Op, ReduceOp, TensorId, UnaryOp};
use crate::weight::{Storage, Weight, held};

fn builder() -> (GraphBuilder, TensorId) {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", Elem::Activation, &[1, 6]).unwrap();
    (b, x)
}

#[test]
fn shapes_follow_the_ops() {
    let (mut b, x) = builder();
    let heads = b.reshape(x, &[3, 2]).unwrap();
    let wide = b.concat(&[heads, heads], 1).unwrap();
    let columns = b.slice(wide, 1, 1, 3).unwrap();
    let transposed = b.transpose(columns, &[1, 0]).unwrap();
    let output = b.matmul(transposed, columns, false).unwrap();
    let row = b.reduce(ReduceOp::Max, output, 0).unwrap();
    let scaled = b.div(output, row).unwrap();
    assert_eq!(b.shape(scaled).unwrap(), [2, 2]);
    b.output("y", scaled).unwrap();
    let info = b.finish().unwrap().info(Elem::qnn);
    assert_eq!(info.outputs[0].to_string(), "y f16[2, 2]");
}

#[test]
fn errors_name_the_node_and_what_it_found() {
    let (mut b, x) = builder();
    b.scope("l7_attn");
    let y = b.input("y", Elem::F32, &[1, 6]).unwrap();
    for (error, words) in [
        (b.add(x, y).unwrap_err(), "add \"l7_attn_add_0\": found x activation[1, 6], y f32[1, 6]"),
        (b.reshape(x, &[4, 2]).unwrap_err(), "as many elements as [4, 2]"),
        (b.slice(x, 1, 4, 9).unwrap_err(), "an axis 1 with elements 4..9"),
        (b.slice(x, 2, 0, 1).unwrap_err(), "an axis 2"),
        (b.concat(&[x, y], 0).unwrap_err(), "one element type"),
        (b.concat(&[x, x], 5).unwrap_err(), "an axis 5"),
        (b.concat(&[], 0).unwrap_err(), "no inputs"),
        (b.transpose(x, &[0, 0]).unwrap_err(), "[0, 0] permutes"),
        (b.matmul(x, x, false).unwrap_err(), "inner sizes"),
        (b.reduce(ReduceOp::Sum, x, 2).unwrap_err(), "an axis 2"),
        (b.reshape(x, &[1, 1, 1, 6, 1]).unwrap_err(), "1 to 4 dimensions"),
        (b.input("x", Elem::F32, &[1]).unwrap_err(), "the name is taken"),
        (b.input("a b", Elem::F32, &[1]).unwrap_err(), "ASCII letters"),
        (b.input("z", Elem::F32, &[0]).unwrap_err(), "shape [0]"),
        (b.input("z", Elem::F32, &[usize::MAX, 2]).unwrap_err(), "dimensions"),
    ] {
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Graph, "{text}");
        assert!(text.contains(words), "{text:?} does not say {words:?}");
        assert!(text.starts_with("graph \"g\""), "{text}");
    }
    assert!(b.finish().unwrap_err().to_string().contains("no output"));
}

#[test]
fn one_value_may_be_two_outputs_and_an_input_may_be_one() {
    let (mut b, x) = builder();
    let y = b.unary(UnaryOp::Exp, x).unwrap();
    b.output("y", y).unwrap();
    b.output("again", y).unwrap();
    b.output("through", x).unwrap();
    let graph = b.finish().unwrap();
    let names: Vec<_> = graph.info(Elem::onnx).outputs.into_iter().map(|t| t.name).collect();
    assert_eq!(names, ["y", "again", "through"]);
    assert!(graph.outputs().iter().all(|&id| graph.producer(id).is_some()));
}

#[test]
fn scalars_are_shared() {
    let (mut b, x) = builder();
    let one = b.scalar(x, 2.0).unwrap();
    assert_eq!(one, b.scalar(x, 2.0).unwrap());
    assert_ne!(one, b.scalar(x, 3.0).unwrap());
}

/// A weight of zeros.
fn weight(rows: usize, cols: usize) -> Weight {
    stored(rows, cols, Storage::Float)
}

fn stored(rows: usize, cols: usize, storage: Storage) -> Weight {
    Weight::new(held("zeros", [rows, cols], vec![0.0; rows * cols]), storage)
}

#[test]
fn convolutions_have_the_shapes_of_torch() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", Elem::Activation, &[2, 6, 13, 9]).unwrap();
    let wide = Conv2d { stride: [2, 3], padding: [[1, 1], [0, 2]], ..Conv2d::new([3, 3]) };
    let far = Conv2d { dilation: [2, 1], groups: 6, ..Conv2d::new([3, 2]) };
    for (name, out, cols, conv, shape) in [
        ("wide", 4, 6 * 9, wide, [2, 4, 7, 3]),
        ("far", 12, 6, far, [2, 12, 9, 8]),
        ("all", 1, 6 * 13 * 9, Conv2d::new([13, 9]), [2, 1, 1, 1]),
    ] {
        let y = b.conv2d(name, x, weight(out, cols), None, conv).unwrap();
        assert_eq!(b.shape(y).unwrap(), shape, "{name}");
    }
    let t = b.input("t", Elem::Activation, &[1, 5, 31]).unwrap();
    let y = b.conv1d("causal", t, weight(3, 5 * 4), None, Conv1d::causal(4)).unwrap();
    assert_eq!(b.shape(y).unwrap(), [1, 3, 31]);
    let plain = Conv2d::new([3, 3]);
    for (x, weight, bias, conv, words) in [
        (x, weight(4, 6 * 9), None, Conv2d { stride: [0, 1], ..plain }, "stride: [0, 1]"),
        (x, weight(4, 6 * 9), None, Conv2d { groups: 4, ..plain }, "multiples of the groups"),
        (x, weight(5, 3 * 9), None, Conv2d { groups: 2, ..plain }, "multiples of the groups"),
        (x, weight(4, 6 * 8), None, plain, "a weight [4, 48]"),
        (x, weight(4, 6 * 14), None, Conv2d::new([14, 1]), "fits into the padded input"),
        (x, weight(4, 6 * 9), None, Conv2d { padding: [[0, 3], [0, 0]], ..plain }, "zeros only"),
        (x, weight(4, 6 * 9), None, Conv2d { dilation: [usize::MAX, 2], ..plain }, "fits into"),
        (x, weight(4, 6 * 9), Some(vec![0.0; 5]), plain, "bias of 5 values, expected 4"),
        (t, weight(4, 6 * 9), None, plain, "input is t activation[1, 5, 31]"),
        (x, stored(4, 6 * 9, Storage::Int8), None, plain, "an int8 weight, expected floats"),
    ] {
        let text = b.conv2d("bad", x, weight, bias, conv).unwrap_err().to_string();
        assert!(text.contains(words), "{text:?} does not say {words:?}");
        assert!(text.starts_with("graph \"g\": conv2d \"bad"), "{text}");
    }
}

#[test]
fn gathered_indices_take_the_place_of_their_axis() {
    let mut b = GraphBuilder::new("g");
    let cube = b.input("cube", Elem::Activation, &[4, 11, 6]).unwrap();
    let list = b.input("list", Elem::I32, &[5]).unwrap();
    let grid = b.input("grid", Elem::I32, &[3, 2]).unwrap();
    let table = b.table("table", weight(11, 8)).unwrap();
    for (x, indices, axis, shape) in [
        (cube, list, 0, &[5, 11, 6][..]),
        (cube, list, 1, &[4, 5, 6]),
        (cube, grid, 1, &[4, 3, 2, 6]),
        (cube, grid, 2, &[4, 11, 3, 2]),
        (table, grid, 0, &[3, 2, 8]),
    ] {
        let y = b.gather(x, indices, axis).unwrap();
        assert_eq!(b.shape(y).unwrap(), shape, "axis {axis}");
    }
    let square = b.input("square", Elem::I32, &[1, 1, 5]).unwrap();
    for (error, words) in [
        (b.gather(cube, list, 3), "an axis 3"),
        (b.gather(cube, cube, 0), "i32 indices"),
        (b.gather(cube, square, 0), "at most 4 dimensions"),
        (b.gather(table, list, 1), "a weight as second input of linear and conv2d"),
        (b.add(table, table), "a weight as second input of linear and conv2d"),
    ] {
        let text = error.unwrap_err().to_string();
        assert!(text.contains(words), "{text:?} does not say {words:?}");
    }
}

#[test]
fn bounds_are_in_order() {
    let (mut b, x) = builder();
    for (min, max) in [(1.0, 0.5), (f32::NAN, 1.0), (f32::INFINITY, f32::INFINITY)] {
        let error = b.clamp(x, min, max).unwrap_err().to_string();
        assert!(error.contains("bounds in order"), "{error}");
    }
    b.clamp(x, f32::NEG_INFINITY, 0.5).unwrap();
}

#[test]
fn what_nothing_reads_is_named() {
    /// Builds on input x.
    type Build<'b> = &'b dyn Fn(&mut GraphBuilder, TensorId) -> Result<TensorId>;
    let cases: [(Build<'_>, &str); 4] = [
        (&|b, x| b.input("cos", Elem::F32, &[1, 3]).and(Ok(x)), "the input cos f32[1, 3]"),
        (
            &|b, x| b.row("gain", vec![1.0; 3]).and(Ok(x)),
            "the constant l2_mlp_gain activation[1, 3]",
        ),
        (
            &|b, x| b.table("rows", weight(3, 4)).and(Ok(x)),
            "the weight l2_mlp_rows activation[3, 4]",
        ),
        (
            &|b, x| {
                let half = b.scale(x, 0.5)?;
                b.relu(half).and(Ok(x))
            },
            "the output of relu l2_mlp_relu_1 activation[1, 6]",
        ),
    ];
    for (build, words) in cases {
        let (mut b, x) = builder();
        b.scope("l2_mlp");
        let y = build(&mut b, x).unwrap();
        b.output("y", y).unwrap();
        let error = b.finish().unwrap_err();
        assert_eq!(error.message(), format!("graph \"g\": nothing reads {words}"));
        assert!(error.hint_text().is_some_and(|hint| hint.contains("leave it out")), "{error}");
    }
}

#[test]
fn tensors_of_another_builder_are_refused() {
    let (mut b, x) = builder();
    let (mut other, theirs) = builder();
    assert_ne!(x, theirs);
    for error in [
        b.add(x, theirs).unwrap_err(),
        b.output("y", theirs).unwrap_err(),
        b.rms_norm(x, 1e-6, theirs).unwrap_err(),
        b.concat(&[x, theirs], 0).unwrap_err(),
    ] {
        assert_eq!(error.message(), "graph \"g\": tensor 0 belongs to another graph", "{error}");
    }
    let y = other.relu(theirs).unwrap();
    other.output("y", y).unwrap();
    let graph = other.finish().unwrap();
    assert!(graph.tensor(y).is_ok() && graph.tensor(x).is_err());
    assert!(graph.producer(y).is_some());
}

#[test]
fn scopes_nest_and_end() {
    let (mut b, x) = builder();
    b.scope("l3");
    let inner = b.scoped("attn", |b| b.scoped("q", |b| b.relu(x))).unwrap();
    let outer = b.relu(inner).unwrap();
    assert!(b.scoped("bad", |b| b.slice(x, 9, 0, 1)).is_err());
    let last = b.relu(outer).unwrap();
    let names = [inner, outer, last].map(|id| b.tensor(id).unwrap().name.clone());
    assert_eq!(names, ["l3_attn_q_relu_0", "l3_relu_1", "l3_relu_2"]);
    // An output has the name that it is given; its node keeps the scope.
    b.output("y", last).unwrap();
    let graph = b.finish().unwrap();
    assert_eq!(graph.producer(last).unwrap().name, "l3_relu_2");
}

/// A graph of an attention over a cache, between two other nodes.
fn attention(rows: usize) -> Result<crate::graph::Graph> {
    let mut b = GraphBuilder::new("g");
    b.scope("l0");
    let mut input = |name: &str, shape: &[usize]| b.input(name, Elem::Activation, shape);
    let [q, k, v] =
        [input("q", &[2, 2 * rows, 4])?, input("k", &[2, rows, 4])?, input("v", &[2, rows, 4])?];
    let past = [input("past_k", &[2, 5, 4])?, input("past_v", &[2, 5, 4])?];
    let width = 5 + rows;
    let mask = match rows {
        1 => input("mask", &[1, 1, width])?,
        _ => input("mask", &[1, 1, rows, width])?,
    };
    let q = b.scale(q, 0.5)?;
    let inputs =
        AttentionInputs { past: Some(past), mask: Some(mask), ..AttentionInputs::new(q, k, v) };
    let y = b.capped_attention(inputs, 30.0)?;
    let y = b.unary(UnaryOp::Neg, y)?;
    b.output("y", y)?;
    b.finish()
}

#[test]
fn attention_is_one_node_and_stands_for_others() {
    for (rows, between) in [
        (1, &["add_6", "softmax_7", "slice_8", "mul_9", "slice_10", "matmul_11", "add_12"][..]),
        (
            3,
            &[
                "reshape_6",
                "add_7",
                "softmax_8",
                "reshape_9",
                "slice_10",
                "matmul_11",
                "slice_12",
                "matmul_13",
                "add_14",
            ],
        ),
    ] {
        let graph = attention(rows).unwrap();
        let names = |graph: &crate::graph::Graph| -> Vec<String> {
            let names = graph.nodes().iter().map(|node| node.name.replace("l0_", ""));
            names.collect()
        };
        let last = format!("neg_{}", 6 + between.len());
        assert_eq!(names(&graph), ["mul_0", "attention_1", &last]);
        let parts = graph.decomposed().unwrap();
        let before = ["mul_0", "matmul_1", "matmul_2", "concat_3", "tanh_4", "mul_5"];
        assert_eq!(names(&parts), [&before, between, &[&*last]].concat());
        // Its cap has the name that it would have where it is read.
        let scalars = parts.tensors().iter().filter(|t| t.name.starts_with("scalar_"));
        let scalars: Vec<_> = scalars.map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(scalars, ["scalar_6", "scalar_12"]);
        let ends = |graph: &crate::graph::Graph| {
            let info = graph.info(Elem::qnn);
            format!("{:?} {:?}", info.inputs, info.outputs)
        };
        assert_eq!(ends(&graph), ends(&parts));
        // Two groups; the keys of the cache are what the queries are multiplied with.
        let groups = graph.decomposed_by_groups().unwrap();
        let turned = |node: &&Node| matches!(node.op, Op::Transpose { .. });
        let of_caches = groups.nodes().iter().filter(turned).count();
        assert_eq!(
            (of_caches, graph.is_step(&graph.nodes()[1])),
            if rows == 1 { (2, true) } else { (0, false) }
        );
        assert_eq!(ends(&graph), ends(&groups));
        assert!(parts.decomposed().unwrap().nodes().len() == parts.nodes().len());
        let kept = graph.decomposed_where(|node| node.name.is_empty()).unwrap();
        assert_eq!(names(&kept), names(&graph));
    }
}

#[test]
fn attention_of_other_sizes_is_refused() {
    let mut b = GraphBuilder::new("g");
    let mut input = |name: &str, elem, shape: &[usize]| b.input(name, elem, shape).unwrap();
    let act = Elem::Activation;
    let q = input("q", act, &[2, 6, 4]);
    let k = input("k", act, &[2, 3, 4]);
    let [odd, narrow] = [input("odd", act, &[2, 4, 4]), input("narrow", act, &[2, 3, 5])];
    let cache = input("cache", act, &[2, 7, 4]);
    let short = input("short", act, &[2, 8, 4]);
    let int8 = input("int8", Elem::Int8Cache, &[2, 7, 4]);
    let scales = input("scales", act, &[2, 1, 7]);
    let [mask, wide] = [input("mask", act, &[1, 1, 3, 10]), input("wide", act, &[1, 1, 2, 10])];
    let whole = AttentionInputs::new(q, k, k);
    let over = AttentionInputs { past: Some([cache; 2]), ..whole };
    let bytes = AttentionInputs { past: Some([int8; 2]), scales: Some([scales; 2]), ..whole };
    for fits in [whole, over, bytes, AttentionInputs { mask: Some(mask), ..over }] {
        b.attention(fits).unwrap();
    }
    for wrong in [
        AttentionInputs::new(q, odd, odd),
        AttentionInputs::new(q, narrow, narrow),
        AttentionInputs::new(q, k, narrow),
        AttentionInputs { past: Some([cache, short]), ..whole },
        AttentionInputs { past: Some([int8; 2]), ..whole },
        AttentionInputs { scales: Some([scales; 2]), ..over },
        AttentionInputs { scales: Some([scales; 2]), ..whole },
        AttentionInputs { mask: Some(wide), ..over },
        AttentionInputs { mask: Some(mask), ..whole },
        AttentionInputs { cap: Some(q), ..whole },
    ] {
        let error = b.attention(wrong).unwrap_err();
        assert!(error.message().contains("queries [groups, n · rows, dim]"), "{error}");
    }
}
