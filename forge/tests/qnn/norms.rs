//! Norms of rows of any size and tensors of any shape.

use half::f16;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Op};
use qhx_qnn::Target;
use qhx_tiers::tier;

use crate::support::{Compiled, error, errors, numbers, reference};
use crate::tier::opened;

#[tier(qnn)]
fn norms_of_huge_tiny_and_empty_rows_are_those_of_f32() {
    let library = opened();
    let mut b = GraphBuilder::new("norms");
    let x = b.input("x", Elem::Activation, &[6, 64]).unwrap();
    let gain = b.constant("gain", Elem::Activation, &[64], vec![1.0; 64]).unwrap();
    let rms = b.rms_norm(x, 1e-6, gain).unwrap();
    b.output("rms", rms).unwrap();
    let unit = b.l2_norm(x, 1e-6, 1.0).unwrap();
    b.output("unit", unit).unwrap();
    let graph = b.finish().unwrap();
    // Squares of the first overflow f16; those of the third and fourth are lost in it.
    let scales = [6e4, 300.0, 1e-3, 1e-4, 1.0, 0.0];
    let mut rows = numbers(40, 6 * 64);
    for (row, scale) in rows.chunks_exact_mut(64).zip(scales) {
        row.iter_mut().for_each(|v| *v = f16::from_f32(*v * scale).to_f32());
    }
    let inputs = [rows];
    let expected = reference(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        for (found, expected) in compiled.run(0, &inputs).iter().zip(&expected) {
            let rows = found.chunks_exact(64).zip(expected.chunks_exact(64)).zip(scales);
            for ((found, expected), scale) in rows {
                if scale == 0.0 {
                    assert!(found.iter().all(|v| *v == 0.0), "{target}: {found:?}");
                } else {
                    let error = error(found, expected);
                    assert!(error < 2e-3, "{target}, row times {scale}: {error}");
                }
            }
        }
    }
}

#[tier(qnn)]
fn norms_of_every_shape_agree_with_their_references() {
    let library = opened();
    let shapes: [&[usize]; 11] = [
        &[128],
        &[1, 4, 64, 128],
        &[2, 64, 32],
        &[64, 2, 20],
        &[64, 2, 32],
        &[64, 1, 20],
        &[20, 4, 64],
        &[8, 1, 16, 128],
        &[512, 128],
        &[130, 1000],
        &[1, 4096],
    ];
    for (index, shape) in shapes.into_iter().enumerate() {
        let mut b = GraphBuilder::new("norms");
        let x = b.input("x", Elem::Activation, shape).unwrap();
        let width = *shape.last().unwrap();
        let gain = b.row("gain", numbers(3, width)).unwrap();
        let y = b.rms_norm(x, 1e-6, gain).unwrap();
        b.output("y", y).unwrap();
        let graph = b.finish().unwrap();
        assert_eq!(graph.info(Elem::qnn).outputs[0].shape, shape);
        // The library gets rows, whatever the shape.
        let norm = graph.nodes().iter().find(|n| matches!(n.op, Op::RmsNorm { .. })).unwrap();
        assert_eq!(graph.tensor(norm.inputs[0]).unwrap().shape.len(), 2, "{shape:?}");
        let inputs = [numbers(40, shape.iter().product())];
        let target = Target::ALL[index % Target::ALL.len()];
        let found = errors(&library, target, &graph, &inputs);
        assert!(found[0] < 2e-3, "{target} {shape:?}: {found:?}");
    }
}

/// Rows far from zero, with one huge value, large and small: mean and squares in f16 would be wrong.
#[tier(qnn)]
fn layer_norms_of_any_rows_are_those_of_f32() {
    const WIDTH: usize = 130;
    let library = opened();
    let mut b = GraphBuilder::new("norms");
    let x = b.input("x", Elem::Activation, &[3, 2, WIDTH]).unwrap();
    let weight = b.row("weight", numbers(1, WIDTH).iter().map(|v| v + 1.0).collect()).unwrap();
    let bias = b.row("bias", numbers(2, WIDTH)).unwrap();
    let y = b.layer_norm(x, 1e-6, weight, bias).unwrap();
    b.output("y", y).unwrap();
    let graph = b.finish().unwrap();
    let mut rows = numbers(41, 6 * WIDTH);
    let moves = [(1.0, 0.0), (1.0, 60.0), (1.0, 100.0), (3000.0, 0.0), (1e-3, 0.0), (0.0, 7.0)];
    for (row, (scale, mean)) in rows.chunks_exact_mut(WIDTH).zip(moves) {
        row.iter_mut().for_each(|v| *v = f16::from_f32(*v * scale + mean).to_f32());
    }
    rows[3] = 20_000.0;
    let inputs = [rows];
    let expected = reference(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        let found = compiled.run(0, &inputs);
        let rows = found[0].chunks_exact(WIDTH).zip(expected[0].chunks_exact(WIDTH));
        for ((found, expected), moved) in rows.zip(moves) {
            let error = error(found, expected);
            assert!(error < 3e-3, "{target}, row of {moved:?}: {error}");
        }
    }
}
