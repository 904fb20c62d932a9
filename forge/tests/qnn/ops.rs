//! Every op, on inputs of its own, against its ONNX reference graph.

use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{AttentionInputs, BinaryOp, Elem, Graph, ReduceOp, UnaryOp};
use qhx_graph::weight::Storage;
use qhx_paths::workspace;
use qhx_qnn::Target;
use qhx_tiers::tier;
use qhx_types::DType;

use crate::conv::{convolutions, gathers};
use crate::support::{Compiled, error, numbers, reference, weight};
use crate::tier::opened;

/// Each op on inputs of its own, each result an output.
pub(crate) fn all_ops() -> Graph {
    let mut b = GraphBuilder::new("ops");
    let x = b.input("x", Elem::Activation, &[3, 8]).unwrap();
    let s = b.input("state", Elem::F32, &[2, 4, 8]).unwrap();
    let r = b.input("row", Elem::Activation, &[1, 8]).unwrap();
    let i = b.input("index", Elem::I32, &[1, 8]).unwrap();
    let mut outputs = Vec::new();
    let bias = Some(numbers(1, 20));
    outputs.push(b.linear("lin", x, weight(2, [20, 8], Storage::Float), bias).unwrap());
    outputs.push(b.linear("plain", x, weight(3, [36, 8], Storage::Float), None).unwrap());
    let bias = Some(numbers(4, 36));
    outputs.push(b.linear("int8", x, weight(5, [36, 8], Storage::Int8), bias).unwrap());
    for op in [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max, BinaryOp::Min] {
        outputs.push(b.binary(op, x, r).unwrap());
        outputs.push(b.binary(op, r, x).unwrap());
    }
    let magnitude = b.unary(UnaryOp::Abs, x).unwrap();
    let half = b.scalar(x, 0.5).unwrap();
    let positive = b.add(magnitude, half).unwrap();
    outputs.push(b.div(r, positive).unwrap());
    for op in
        [UnaryOp::Neg, UnaryOp::Exp, UnaryOp::Sigmoid, UnaryOp::Silu, UnaryOp::Sin, UnaryOp::Tanh]
    {
        outputs.push(b.unary(op, x).unwrap());
    }
    for value in [x, s] {
        outputs.push(b.relu(value).unwrap());
        outputs.push(b.gelu(value).unwrap());
        outputs.push(b.gelu_tanh(value).unwrap());
        outputs.push(b.clamp(value, -0.3, 0.6).unwrap());
        outputs.push(b.clamp(value, f32::NEG_INFINITY, 0.25).unwrap());
    }
    outputs.push(b.unary(UnaryOp::Log, positive).unwrap());
    outputs.push(b.unary(UnaryOp::Rsqrt, positive).unwrap());
    for axis in 0..3 {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
            outputs.push(b.reduce(op, s, axis).unwrap());
        }
    }
    outputs.push(b.softmax(x).unwrap());
    outputs.push(b.softmax(s).unwrap());
    for value in [x, s] {
        let name = format!("gain_{}", value.index());
        let gain = b.constant(&name, Elem::Activation, &[8], numbers(6, 8)).unwrap();
        outputs.push(b.rms_norm(value, 1e-6, gain).unwrap());
        outputs.push(b.l2_norm(value, 1e-6, 0.7).unwrap());
        let shift = b.row(&format!("shift_{}", value.index()), numbers(7, 8)).unwrap();
        outputs.push(b.layer_norm(value, 1e-6, gain, shift).unwrap());
    }
    outputs.push(b.reshape(s, &[8, 8]).unwrap());
    outputs.push(b.transpose(s, &[2, 0, 1]).unwrap());
    outputs.push(b.concat(&[x, r, x], 0).unwrap());
    outputs.push(b.slice(s, 1, 1, 3).unwrap());
    outputs.push(b.matmul(s, s, true).unwrap());
    let transposed = b.transpose(s, &[0, 2, 1]).unwrap();
    outputs.push(b.matmul(s, transposed, false).unwrap());
    let cast = b.cast(s, Elem::Activation).unwrap();
    outputs.push(cast);
    let wide = b.cast(x, Elem::F32).unwrap();
    outputs.push(wide);
    // Through f32 and back, read again by a node.
    let back = b.cast(wide, Elem::Activation).unwrap();
    outputs.push(b.add(back, r).unwrap());
    let float = b.cast(i, Elem::Activation).unwrap();
    outputs.push(b.mul(float, r).unwrap());
    let two = b.scalar(i, 2.0).unwrap();
    outputs.push(b.mul(i, two).unwrap());
    outputs.push(b.attention(AttentionInputs::new(cast, cast, cast)).unwrap());
    let own = b.slice(cast, 1, 0, 1).unwrap();
    let inputs = AttentionInputs { past: Some([cast; 2]), ..AttentionInputs::new(cast, own, own) };
    outputs.push(b.capped_attention(inputs, 2.0).unwrap());
    // Handed through, and one value under two names.
    outputs.push(x);
    outputs.push(s);
    outputs.push(cast);
    for (index, id) in outputs.into_iter().enumerate() {
        b.output(&format!("out_{index}"), id).unwrap();
    }
    b.finish().unwrap()
}

#[tier(qnn)]
fn every_op_agrees_with_its_reference_on_every_target() {
    let library = opened();
    let graph = all_ops();
    let index: Vec<f32> = (0..8).map(|i| (i * 3 - 5) as f32).collect();
    let inputs = [numbers(10, 24), numbers(11, 64), numbers(12, 8), index];
    let expected = reference(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        assert_eq!(*compiled.info(0), graph.info(Elem::qnn));
        let found = compiled.run(0, &inputs);
        let mut wrong = Vec::new();
        for ((output, found), expected) in graph.outputs().iter().zip(&found).zip(&expected) {
            let error = error(found, expected);
            // The library's softmax is the coarsest op.
            if error > 4e-3 {
                wrong.push(format!("{:?}: {error}", graph.producer(*output).unwrap().op));
            }
        }
        assert!(wrong.is_empty(), "{target}: {wrong:#?}");
    }
}

#[test]
fn every_op_on_the_cpu_agrees_with_its_onnx() {
    for graph in [all_ops(), convolutions(), gathers()] {
        let mut compiled = Compiled::on_cpu(&graph);
        let mut inputs: Vec<Vec<f32>> = Vec::new();
        for (seed, tensor) in (10..).zip(&graph.info(Elem::onnx).inputs) {
            let count = tensor.elements();
            inputs.push(match tensor.dtype {
                // The shortest axis that is gathered from has four elements.
                DType::I32 => (0..count).map(|at| (at * 3 % 4) as f32).collect(),
                _ => numbers(seed, count),
            });
        }
        let expected = reference(&graph, &inputs);
        let found = compiled.run(0, &inputs);
        for ((output, found), expected) in graph.outputs().iter().zip(&found).zip(&expected) {
            let error = error(found, expected);
            assert!(error <= 1e-5, "{:?}: {error}", graph.producer(*output).map(|node| &node.op));
        }
    }
}

/// The page says of each operator what it becomes and how exact it is.
#[test]
fn the_page_of_operators_lists_them_all() {
    let page = std::fs::read_to_string(workspace().join("docs/operators.md")).unwrap();
    let cells = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" |"));
    let listed: Vec<_> = cells.map(|(cell, _)| cell).collect();
    for graph in [all_ops(), convolutions(), gathers()] {
        for node in graph.nodes() {
            let name = format!("`{}`", node.op.name());
            let found = listed.iter().any(|cell| cell.contains(&name));
            assert!(found, "{name} has no line in the table of docs/operators.md");
        }
    }
}
