//! Matmuls with int8 weights that are graph inputs: the compiled graph agrees with its ONNX reference graph.

use half::f16;
use qhx_exec::GraphId;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, INT8_STEP};
use qhx_qnn::{Library, Target};
use qhx_tiers::tier;
use qhx_types::Port;

use crate::support::{Compiled, error, numbers};
use crate::tier::opened;

/// Rows, inner size, outputs, and whether the weight is `[outputs, inner]`.
type Case = (usize, usize, usize, bool);

const CASES: [Case; 11] = [
    (1, 92, 52, true),
    (1, 52, 92, true),
    (1, 92, 52, false),
    (1, 108, 28, true),
    (1, 28, 108, true),
    (1, 1024, 448, true),
    (1, 1024, 448, false),
    (7, 92, 52, true),
    (64, 92, 52, true),
    (64, 52, 92, true),
    (1, 90, 53, true),
];

fn graph((rows, inner, outputs, transposed): Case) -> Graph {
    let mut b = GraphBuilder::new("int8");
    let x = b.input("x", Elem::Activation, &[rows, inner]).unwrap();
    let shape = if transposed { [outputs, inner] } else { [inner, outputs] };
    let w = b.input("w", Elem::Int8, &shape).unwrap();
    let scale = b.input("scale", Elem::Activation, &[1, outputs]).unwrap();
    let sums = b.matmul(x, w, transposed).unwrap();
    let y = b.mul(sums, scale).unwrap();
    b.output("y", y).unwrap();
    b.finish().unwrap()
}

/// Executes the graph with x, w and scale.
fn run(mut compiled: Compiled, x: &[f32], w: &[i8], scale: &[f32]) -> Vec<f32> {
    for (index, tensor) in compiled.info(0).inputs.iter().enumerate() {
        match tensor.name.as_str() {
            "x" => compiled.write(0, index, x),
            "scale" => compiled.write(0, index, scale),
            _ => {
                // At an odd offset of a larger block, as in a mapped table.
                let workspace = &mut compiled.workspace;
                let buffer = workspace.allocate(3 + w.len()).unwrap();
                let bytes = &mut workspace.bytes_mut(buffer).unwrap()[3..];
                bytes.iter_mut().zip(w).for_each(|(byte, w)| *byte = w.cast_unsigned());
                workspace.bind(GraphId(0), Port::Input(index), buffer, 3).unwrap();
            }
        }
    }
    compiled.workspace.execute(GraphId(0)).unwrap();
    compiled.read(0, 0)
}

#[test]
fn int8_inputs_agree_with_the_reference_graph() {
    agree(None);
}

#[tier(qnn)]
fn int8_inputs_on_the_npu_agree_with_the_reference_graph() {
    agree(Some(opened()));
}

/// On the CPU, and on the NPU where one is given.
#[expect(clippy::print_stderr, reason = "a test says what it measured")]
fn agree(library: Option<Library>) {
    let mut wrong = Vec::new();
    for (seed, case) in (0..).zip(CASES) {
        let (rows, inner, outputs, transposed) = case;
        let graph = graph(case);
        let x = numbers(seed, rows * inner);
        let w = numbers(99 + seed, inner * outputs);
        let w: Vec<i8> = w.iter().map(|v| (v * 127.0).round() as i8).collect();
        let scale = numbers(7, outputs);
        let scale: Vec<f32> = scale.iter().map(|v| f16::from_f32(0.1 + v * v).to_f32()).collect();
        let mut expected = vec![0f32; rows * outputs];
        for r in 0..rows {
            for o in 0..outputs {
                let weight = |k: usize| {
                    f32::from(w[if transposed { o * inner + k } else { k * outputs + o }])
                };
                let sum: f32 = (0..inner).map(|k| x[r * inner + k] * weight(k) * INT8_STEP).sum();
                expected[r * outputs + o] = sum * scale[o];
            }
        }
        let mut note = |what: &str, compiled: Compiled, max: f64| {
            let error = error(&run(compiled, &x, &w, &scale), &expected);
            eprintln!("{what} {case:?}: {error:.2e}");
            if error > max {
                wrong.push(format!("{what} {case:?}: {error}"));
            }
        };
        note("cpu", Compiled::on_cpu(&graph), 1e-5);
        let Some(library) = &library else { continue };
        for target in Target::ALL {
            let compiled = Compiled::new(library, target, &[std::slice::from_ref(&graph)]);
            note(&target.to_string(), compiled, 4e-3);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
