//! Every operator of a program against rten's.

use std::collections::HashMap;

use rten::{Model as Reference, ModelOptions, Value, ValueView};
use rten_onnx::onnx::ModelProto;
use rten_tensor::prelude::*;
use rten_tensor::{Tensor, TensorView};

use self::onnx::{FLOAT, INT8, INT32, INT64, Model};
use super::{Input, Program, Scratch};
use crate::options::Caches;

#[expect(dead_code, reason = "other tests need more of it")]
#[path = "../../tests/onnx/mod.rs"]
pub(super) mod onnx;

/// So large that two threads compute it.
const X: [usize; 3] = [2, 96, 160];

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7919 % 1009) as f32 - 504.0) / 200.0).collect()
}

/// The model over `x`, `i` and `c`, with these outputs of f32 or i32.
struct Case {
    model: Model,
    outputs: Vec<(String, Vec<u64>)>,
}

impl Case {
    fn new() -> Self {
        let model = Model::default()
            .input("x", FLOAT, &X.map(|n| n as u64))
            .input("i", INT32, &[3])
            .input("c", INT8, &[2, 3])
            .weights("row", &[160], &numbers(160))
            .weights("column", &[96, 1], &numbers(96))
            .weights("one", &[], &[0.75])
            .weights("low", &[], &[-1.0])
            .weights("matrix", &[160, 5], &numbers(800));
        Self { model, outputs: Vec::new() }
    }

    fn op(
        mut self,
        op: &str,
        inputs: &[&str],
        name: &str,
        attributes: &[(&str, i64)],
        shape: &[u64],
    ) -> Self {
        let attributes: Vec<_> = attributes.iter().map(|(name, n)| (*name, *n as u64)).collect();
        self.model = self.model.node_with(op, inputs, &[name], &attributes);
        self.result(name, shape)
    }

    fn int_op(
        mut self,
        op: &str,
        inputs: &[&str],
        name: &str,
        attributes: &[(&str, u64)],
        shape: &[u64],
    ) -> Self {
        self.model = self.model.node_with(op, inputs, &[name], attributes);
        self.int_result(name, shape)
    }

    fn int_result(mut self, name: &str, shape: &[u64]) -> Self {
        self.model = self.model.output(name, INT32, shape);
        self.outputs.push((name.to_owned(), shape.to_vec()));
        self
    }

    fn result(mut self, name: &str, shape: &[u64]) -> Self {
        self.model = self.model.output(name, FLOAT, shape);
        self.outputs.push((name.to_owned(), shape.to_vec()));
        self
    }

    /// Adds nodes between inputs and results.
    fn inner(mut self, f: impl FnOnce(Model) -> Model) -> Self {
        self.model = f(self.model);
        self
    }

    fn check(self) {
        let bytes = self.model.build();
        let (x, i, c) = (numbers(X.iter().product()), [1, -1, 0], [-128i8, -1, 0, 1, 2, 127]);
        let parsed = ModelProto::parse_buf(&bytes).unwrap();
        let program = Program::compile(&parsed, &HashMap::new(), Caches::F32).unwrap();
        let mut scratch = Scratch::default();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let inputs = [Input::F32(&x), Input::I32(&i), Input::I8(&c)];
        // What the first execution left behind does not reach the second.
        for _ in 0..2 {
            pool.install(|| program.run(&inputs, &mut scratch)).unwrap();
        }
        let mut options = ModelOptions::with_all_ops();
        options.enable_optimization(false);
        let reference = options.load(bytes).unwrap();
        let expected = run(&reference, &x, &i, &c);
        for (index, ((name, shape), expected)) in self.outputs.iter().zip(expected).enumerate() {
            let expected: Tensor<f32> = match expected {
                Value::FloatTensor(expected) => expected,
                // Their bits are compared.
                Value::Int32Tensor(expected) => expected.map(|n| f32::from_bits(n.cast_unsigned())),
                _ => panic!("{name} is neither f32 nor i32"),
            };
            let sizes: Vec<u64> = expected.shape().iter().map(|n| *n as u64).collect();
            assert_eq!(&sizes, shape, "{name}");
            let mut found = vec![f32::NAN; expected.len()];
            program.output(index, &scratch, &mut found).unwrap();
            for (at, (found, expected)) in found.iter().zip(expected.iter()).enumerate() {
                let near = (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
                let same =
                    found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(near || same, "{name} at {at}: {found}, not {expected}");
            }
        }
    }
}

fn run(model: &Reference, x: &[f32], i: &[i32], c: &[i8]) -> Vec<Value> {
    let views = [
        ValueView::FloatTensor(TensorView::try_from_data(X.as_slice(), x).unwrap()),
        ValueView::Int32Tensor(TensorView::try_from_data([3].as_slice(), i).unwrap()),
        ValueView::Int8Tensor(TensorView::try_from_data([2, 3].as_slice(), c).unwrap()),
    ];
    let inputs = model.input_ids().iter().copied().zip(views.map(Into::into)).collect();
    model.run(inputs, model.output_ids(), None).unwrap()
}

const WHOLE: [u64; 3] = [2, 96, 160];

#[test]
fn elements_by_themselves() {
    let mut case = Case::new().op("Abs", &["x"], "abs", &[], &WHOLE);
    for op in ["Neg", "Exp", "Sigmoid", "Sin", "Tanh", "Relu", "Erf", "Reciprocal"] {
        case = case.op(op, &["x"], op, &[], &WHOLE);
    }
    case.op("Log", &["abs"], "log", &[], &WHOLE)
        .op("Sqrt", &["abs"], "sqrt", &[], &WHOLE)
        .op("Clip", &["x", "low", "one"], "clip", &[], &WHOLE)
        .op("Clip", &["x", "", "one"], "clip_above", &[], &WHOLE)
        .op("Identity", &["x"], "same", &[], &WHOLE)
        .op("Cast", &["i"], "cast", &[("to", 1)], &[3])
        .op("DequantizeLinear", &["c", "one"], "wide", &[], &[2, 3])
        .check();
}

#[test]
fn elements_in_pairs() {
    let mut case = Case::new().inner(|model| {
        model
            .transpose("x", "t", &[2, 0, 1])
            .transpose("t", "back", &[1, 2, 0])
            .transpose("x", "u", &[0, 2, 1])
            .node("Neg", &["u"], &["v"])
    });
    for op in ["Add", "Sub", "Mul", "Div", "Max", "Min"] {
        let name = |with: &str| format!("{op}_{with}");
        case = case
            .op(op, &["x", "x"], &name("itself"), &[], &WHOLE)
            .op(op, &["x", "row"], &name("row"), &[], &WHOLE)
            .op(op, &["column", "x"], &name("column"), &[], &WHOLE)
            .op(op, &["x", "one"], &name("one"), &[], &WHOLE)
            .op(op, &["one", "x"], &name("of_one"), &[], &WHOLE)
            .op(op, &["x", "back"], &name("back"), &[], &WHOLE)
            .op(op, &["u", "v"], &name("swapped"), &[], &[2, 160, 96])
            .op(op, &["row", "column"], &name("outer"), &[], &[96, 160]);
    }
    case.check();
}

#[test]
fn other_orders_and_parts() {
    Case::new()
        .inner(|model| {
            model
                .integers("shape", &[4, -1, 0])
                .integers("flat", &[192, 160])
                .integers("from", &[-50])
                .integers("to", &[9_000_000])
                .integers("zero", &[0])
                .integers("ten", &[10])
                .integers("one_axis", &[1])
                .integers("last", &[-1])
                .transpose("x", "t", &[0, 2, 1])
                .node("Slice", &["x", "from", "to", "last"], &["end"])
                .node("Slice", &["x", "zero", "ten", "one_axis"], &["begin"])
                .node("Slice", &["end", "zero", "ten", "one_axis"], &["corner"])
                .transpose("corner", "turned", &[0, 2, 1])
        })
        .op("Reshape", &["x", "shape"], "reshaped", &[], &[4, 48, 160])
        .op("Reshape", &["t", "flat"], "copied", &[], &[192, 160])
        .op("Neg", &["corner"], "negative", &[], &[2, 10, 50])
        .op("Concat", &["end", "x", "end"], "wide", &[("axis", 2)], &[2, 96, 260])
        .op("Concat", &["begin", "x"], "long", &[("axis", 1)], &[2, 106, 160])
        .op("Concat", &["x", "x"], "deep", &[("axis", 0)], &[4, 96, 160])
        .op("Concat", &["turned", "turned"], "turned_twice", &[("axis", -1)], &[2, 50, 20])
        .op("Concat", &["corner", "negative"], "corners", &[("axis", 1)], &[2, 20, 50])
        .op("Gather", &["x", "i"], "rows", &[("axis", 0)], &[3, 96, 160])
        .result("turned", &[2, 50, 10])
        .check();
}

#[test]
fn rows_and_columns() {
    let mut case = Case::new().inner(|model| {
        model
            .integers("first", &[0])
            .integers("middle", &[1])
            .integers("last", &[-1])
            .weights("bias", &[160], &numbers(160))
            .transpose("x", "t", &[0, 2, 1])
    });
    for op in ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"] {
        case = case
            .op(op, &["x", "first"], &format!("{op}_0"), &[("keepdims", 1)], &[1, 96, 160])
            .op(op, &["x", "middle"], &format!("{op}_1"), &[("keepdims", 0)], &[2, 160])
            .op(op, &["x", "last"], &format!("{op}_2"), &[("keepdims", 1)], &[2, 96, 1]);
    }
    case.op("Softmax", &["x"], "softmax", &[("axis", -1)], &WHOLE)
        .op("Softmax", &["t"], "softmax_turned", &[("axis", 2)], &[2, 160, 96])
        .op("LayerNormalization", &["x", "row", "bias"], "norm", &[("axis", -1)], &WHOLE)
        .op("LayerNormalization", &["x", "row"], "norm_alone", &[("axis", 2)], &WHOLE)
        .op("MatMul", &["x", "t"], "squares", &[], &[2, 96, 96])
        .op("MatMul", &["t", "x"], "turned", &[], &[2, 160, 160])
        .op("MatMul", &["x", "matrix"], "few", &[], &[2, 96, 5])
        .check();
}

#[test]
fn i32_is_computed_and_moved() {
    let mut case = Case::new().inner(|model| {
        model
            .integers("two_by_three", &[2, 3])
            .integers("first", &[0])
            .integers("zero", &[0])
            .integers("two", &[2])
            .ints("three", &[3], &[7, -9, 1_234_567])
            .ints("two_rows", &[2, 1], &[-3, 2])
            .ints("ones", &[2], &[1, 1])
            .node("Add", &["three", "i"], &["sum"])
    });
    for op in ["Add", "Sub", "Mul", "Div", "Max", "Min"] {
        case = case
            .int_op(op, &["three", "two_rows"], &format!("{op}_outer"), &[], &[2, 3])
            .int_op(op, &["i", "three"], op, &[], &[3]);
    }
    case.int_op("Concat", &["i", "sum"], "six", &[("axis", 0)], &[6])
        .int_op("Reshape", &["six", "two_by_three"], "pairs", &[], &[2, 3])
        .int_op("Slice", &["pairs", "zero", "two", "first"], "part", &[], &[2, 3])
        .int_op("Gather", &["pairs", "ones"], "rows", &[("axis", 0)], &[2, 3])
        .int_op("Identity", &["i"], "same", &[], &[3])
        .int_op("Cast", &["x"], "whole", &[("to", 6)], &[2, 96, 160])
        .op("Cast", &["sum"], "float", &[("to", 1)], &[3])
        .inner(|model| model.transpose("pairs", "turned", &[1, 0]))
        .int_result("turned", &[3, 2])
        .check();
}

#[test]
fn an_integer_divided_by_0_is_an_error() {
    let model = Model::default().input("i", INT32, &[3]).node("Div", &["i", "i"], &["y"]).output(
        "y",
        INT32,
        &[3],
    );
    let parsed = ModelProto::parse_buf(&model.build()).unwrap();
    let program = Program::compile(&parsed, &HashMap::new(), Caches::F32).unwrap();
    let error = program.run(&[Input::I32(&[1, 0, 2])], &mut Scratch::default()).unwrap_err();
    assert_eq!(error.message(), "an integer is divided by 0");
    program.run(&[Input::I32(&[1, 3, i32::MIN])], &mut Scratch::default()).unwrap();
}

#[test]
fn weights_within_the_model_are_multiplied() {
    let wide: Vec<f32> = numbers(160 * 512);
    Case::new()
        .inner(|model| {
            model
                .weights("w", &[96, 160], &numbers(96 * 160))
                .weights("b", &[96], &numbers(96))
                .weights("large", &[160, 512], &wide)
                .weights("deep", &[512, 160], &wide)
                .transpose("deep", "deep_turned", &[1, 0])
                .integers("flat", &[192, 160])
                .node("Reshape", &["x", "flat"], &["rows"])
                .node("Neg", &["w"], &["computed"])
                .transpose("computed", "turned", &[1, 0])
        })
        .op("Gemm", &["rows", "w", "b"], "linear", &[("transB", 1)], &[192, 96])
        .op("Gemm", &["rows", "computed", "b"], "by_computed", &[("transB", 1)], &[192, 96])
        .op("Gemm", &["rows", "turned"], "by_columns", &[], &[192, 96])
        .op("MatMul", &["x", "large"], "by_large", &[], &[2, 96, 512])
        .op("MatMul", &["x", "deep_turned"], "by_turned", &[], &[2, 96, 512])
        .check();
}

/// Error message of `compile` for a model with the output `y` `[2]`.
fn unsupported(model: Model) -> Option<String> {
    let bytes = model.output("y", FLOAT, &[2]).build();
    let program =
        Program::compile(&ModelProto::parse_buf(&bytes).unwrap(), &HashMap::new(), Caches::F32);
    program.err().map(|unsupported| unsupported.to_string())
}

#[test]
fn what_is_not_supported_is_named() {
    let model = || Model::default().input("x", FLOAT, &[2]).weights("w", &[3], &[1.0; 3]);
    assert_eq!(unsupported(model().node("Neg", &["x"], &["y"])), None);
    // An operator, a shape, a type and a value.
    let cases = [
        (
            model().node("Cosh", &["x"], &["y"]),
            "operator Cosh at node y: there are no instructions for it",
        ),
        (
            model().node("Neg", &["x"], &["z"]).node("Add", &["z", "w"], &["y"]),
            "operator Add at node y: its shapes are [2] and [3]",
        ),
        (
            Model::default().input("x", FLOAT, &[3]).node("Neg", &["x"], &["y"]),
            "output \"y\": it is declared twice, or as something else than what is computed",
        ),
        (
            Model::default().input("x", INT32, &[2]).node("Neg", &["x"], &["y"]),
            "operator Neg at node y: \"x\" is i32, not f32",
        ),
        (
            Model::default().input("x", INT64, &[2]).node("Neg", &["x"], &["y"]),
            "input \"x\": it is neither f32 nor i32, int8 or uint8",
        ),
        (
            model().node("Neg", &["z"], &["y"]),
            "operator Neg at node y: \"z\" is no value of f32 or i32",
        ),
        (
            model().node_with("MatMulNBits", &["x", "w", "w"], &["y"], &[("bits", 2)]),
            "operator MatMulNBits at node y: an operator of \"com.microsoft\"",
        ),
        (
            model().node_with("Softmax", &["x"], &["z"], &[("axis", 0)]).node(
                "ReduceSum",
                &["z"],
                &["y"],
            ),
            "operator ReduceSum at node y: it has 0 axes, not 1",
        ),
        (
            Model::default().input("x", FLOAT, &[1, 1, 2]).input("f", FLOAT, &[1, 1, 1]).node(
                "Conv",
                &["x", "f"],
                &["y"],
            ),
            "operator Conv at node y: its filters \"f\" are no constant",
        ),
    ];
    for (model, expected) in cases {
        assert_eq!(unsupported(model).as_deref(), Some(expected));
    }
    // What nobody reads may be anything.
    let unread = model().node("Cosh", &["x"], &["z"]).node("Neg", &["x"], &["y"]);
    assert_eq!(unsupported(unread), None);
}

#[test]
fn an_index_outside_of_a_table_is_refused() {
    let model = Model::default()
        .input("i", INT32, &[1])
        .weights("table", &[3, 2], &numbers(6))
        .node_with("Gather", &["table", "i"], &["y"], &[("axis", 0)])
        .output("y", FLOAT, &[1, 2]);
    let parsed = ModelProto::parse_buf(&model.build()).unwrap();
    let program = Program::compile(&parsed, &HashMap::new(), Caches::F32).unwrap();
    for index in [3, -4, i32::MIN] {
        let error = program.run(&[Input::I32(&[index])], &mut Scratch::default()).unwrap_err();
        assert_eq!(error.message(), format!("index {index} of a table of 3 rows"));
    }
}

#[test]
fn a_value_beyond_all_memory_is_refused() {
    // The sum of the first two takes 64 MB, which every machine has.
    let sizes: [u64; 4] = [1 << 12, 1 << 12, 1 << 24, 1 << 24];
    let sum = |sides: usize| {
        // Every input is one more dimension of their sum.
        let shape = |at: usize| {
            (0..sides).map(|n| if n == at { sizes[n] } else { 1 }).collect::<Vec<u64>>()
        };
        let model = (0..sides)
            .fold(Model::default(), |m, at| m.input(&format!("x{at}"), FLOAT, &shape(at)));
        let model = (1..sides).fold(model, |m, at| {
            let before = if at == 1 { "x0".to_owned() } else { format!("sum{}", at - 1) };
            m.node("Add", &[&before, &format!("x{at}")], &[&format!("sum{at}")])
        });
        let model = model.output(&format!("sum{}", sides - 1), FLOAT, &sizes[..sides]);
        let parsed = ModelProto::parse_buf(&model.build()).unwrap();
        Program::compile(&parsed, &HashMap::new(), Caches::F32)
    };
    let program = sum(3).expect("its size can be counted");
    let x = vec![0.0; 1 << 24];
    let inputs = [&x[..1 << 12], &x[..1 << 12], &x[..]].map(Input::F32);
    let mut scratch = Scratch::default();
    let error = program.run(&inputs, &mut scratch).unwrap_err();
    let size = "a value of 281474976710656 elements of f32 takes 1125899906842624 bytes";
    assert_eq!(error.message(), size);
    assert!(scratch.buffers.iter().all(Vec::is_empty), "memory was touched on the way");
    assert!(sum(4).is_err(), "more elements than there are addresses");
}

#[test]
fn int8_of_an_input_is_multiplied_as_it_is() {
    let (rows, columns, count) = (70, 96, 11);
    let model = Model::default()
        .input("x", FLOAT, &[count, columns])
        .input("w", INT8, &[rows, columns])
        .weights("step", &[], &[0.25])
        .node("DequantizeLinear", &["w", "step"], &["wide"])
        .transpose("wide", "turned", &[1, 0])
        .node("MatMul", &["x", "turned"], &["y"])
        .output("y", FLOAT, &[count, rows]);
    let parsed = ModelProto::parse_buf(&model.build()).unwrap();
    let program = Program::compile(&parsed, &HashMap::new(), Caches::F32).unwrap();
    assert_eq!(program.instructions.len(), 1, "nothing is made f32 before");
    let x = numbers((count * columns) as usize);
    let w: Vec<i8> = (0..rows * columns).map(|at| (at * 37 % 255) as i8).collect();
    let mut scratch = Scratch::default();
    program.run(&[Input::F32(&x), Input::I8(&w)], &mut scratch).unwrap();
    let mut found = vec![f32::NAN; (count * rows) as usize];
    program.output(0, &scratch, &mut found).unwrap();
    let row = |all: usize, each: u64| all * each as usize..(all + 1) * each as usize;
    for (at, found) in found.iter().enumerate() {
        let (m, n) = (at / rows as usize, at % rows as usize);
        let pairs = x[row(m, columns)].iter().zip(&w[row(n, columns)]);
        let terms = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w) * 0.25);
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
        assert!((f64::from(*found) - sum).abs() <= 1e-6 * size, "{at}: {found}, not {sum}");
    }
}
