//! Every operator of a tape against rten's.

use std::collections::HashMap;

use rten::{Model as Reference, ModelOptions, Value, ValueView};
use rten_onnx::onnx::ModelProto;
use rten_tensor::prelude::*;
use rten_tensor::{Tensor, TensorView};

use self::onnx::{FLOAT, INT8, INT32, Model};
use super::{Given, Scratch, Tape};

#[expect(dead_code, reason = "other tests need more of it")]
#[path = "../../tests/onnx/mod.rs"]
pub(super) mod onnx;

/// So large that two threads compute it.
const X: [usize; 3] = [2, 96, 160];

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7919 % 1009) as f32 - 504.0) / 200.0).collect()
}

/// The model over `x`, `i` and `c`, with these outputs of f32.
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

    fn result(mut self, name: &str, shape: &[u64]) -> Self {
        self.model = self.model.output(name, FLOAT, shape);
        self.outputs.push((name.to_owned(), shape.to_vec()));
        self
    }

    /// What only is between.
    fn inner(mut self, f: impl FnOnce(Model) -> Model) -> Self {
        self.model = f(self.model);
        self
    }

    fn check(self) {
        let bytes = self.model.build();
        let (x, i, c) = (numbers(X.iter().product()), [1, -1, 0], [-128i8, -1, 0, 1, 2, 127]);
        let parsed = ModelProto::parse_buf(&bytes).unwrap();
        let tape =
            Tape::compile(&parsed, &HashMap::new()).expect("every operator is one of a tape");
        let mut scratch = Scratch::default();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let inputs = [Given::F32(&x), Given::I32(&i), Given::I8(&c)];
        // What the first execution left behind does not reach the second.
        for _ in 0..2 {
            pool.install(|| tape.run(&inputs, &mut scratch)).unwrap();
        }
        let mut options = ModelOptions::with_all_ops();
        options.enable_optimization(false);
        let reference = options.load(bytes).unwrap();
        let expected = run(&reference, &x, &i, &c);
        for (index, ((name, shape), expected)) in self.outputs.iter().zip(expected).enumerate() {
            let Value::FloatTensor(expected) = expected else { panic!("{name} is not f32") };
            let expected: Tensor<f32> = expected;
            let sizes: Vec<u64> = expected.shape().iter().map(|n| *n as u64).collect();
            assert_eq!(&sizes, shape, "{name}");
            let mut found = vec![f32::NAN; expected.len()];
            tape.output(index, &scratch, &mut found).unwrap();
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
    for op in ["Neg", "Exp", "Sigmoid", "Tanh", "Relu", "Erf", "Reciprocal"] {
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
fn what_is_no_tape_is_left_to_rten() {
    let compiled = |model: Model| {
        let bytes = model.output("y", FLOAT, &[2]).build();
        Tape::compile(&ModelProto::parse_buf(&bytes).unwrap(), &HashMap::new()).is_some()
    };
    let model = || Model::default().input("x", FLOAT, &[2]).weights("w", &[3], &[1.0; 3]);
    assert!(compiled(model().node("Neg", &["x"], &["y"])));
    // An operator, a shape, a type and a value that it does not know.
    assert!(!compiled(model().node("Cosh", &["x"], &["y"])));
    assert!(!compiled(model().node("Add", &["x", "w"], &["y"])));
    assert!(!compiled(Model::default().input("x", FLOAT, &[3]).node("Neg", &["x"], &["y"])));
    assert!(!compiled(Model::default().input("x", INT32, &[2]).node("Neg", &["x"], &["y"])));
    assert!(!compiled(model().node("Neg", &["z"], &["y"])));
    // What nobody reads may be anything.
    assert!(compiled(model().node("Cosh", &["x"], &["z"]).node("Neg", &["x"], &["y"])));
}

#[test]
fn an_index_outside_of_a_table_is_refused() {
    let model = Model::default()
        .input("i", INT32, &[1])
        .weights("table", &[3, 2], &numbers(6))
        .node_with("Gather", &["table", "i"], &["y"], &[("axis", 0)])
        .output("y", FLOAT, &[1, 2]);
    let parsed = ModelProto::parse_buf(&model.build()).unwrap();
    let tape = Tape::compile(&parsed, &HashMap::new()).unwrap();
    for index in [3, -4, i32::MIN] {
        let error = tape.run(&[Given::I32(&[index])], &mut Scratch::default()).unwrap_err();
        assert_eq!(error.message(), format!("index {index} of a table of 3 rows"));
    }
}

#[test]
fn a_value_that_fits_in_no_memory_is_refused_before_any_is_touched() {
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
        Tape::compile(&parsed, &HashMap::new())
    };
    let tape = sum(3).expect("its size can be counted");
    let x = vec![0.0; 1 << 24];
    let inputs = [&x[..1 << 12], &x[..1 << 12], &x[..]].map(Given::F32);
    let mut scratch = Scratch::default();
    let error = tape.run(&inputs, &mut scratch).unwrap_err();
    let size = "a value of 281474976710656 elements of f32 takes 1125899906842624 bytes";
    assert_eq!(error.message(), size);
    assert!(scratch.buffers.iter().all(Vec::is_empty), "memory was touched on the way");
    assert!(sum(4).is_none(), "more elements than there are addresses");
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
    let tape = Tape::compile(&parsed, &HashMap::new()).unwrap();
    assert!(tape.is_given_weights() && tape.instructions.len() == 1, "nothing is made f32 before");
    let x = numbers((count * columns) as usize);
    let w: Vec<i8> = (0..rows * columns).map(|at| (at * 37 % 255) as i8).collect();
    let mut scratch = Scratch::default();
    tape.run(&[Given::F32(&x), Given::I8(&w)], &mut scratch).unwrap();
    let mut found = vec![f32::NAN; (count * rows) as usize];
    tape.output(0, &scratch, &mut found).unwrap();
    let row = |all: usize, each: u64| all * each as usize..(all + 1) * each as usize;
    for (at, found) in found.iter().enumerate() {
        let (m, n) = (at / rows as usize, at % rows as usize);
        let pairs = x[row(m, columns)].iter().zip(&w[row(n, columns)]);
        let terms = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w) * 0.25);
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
        assert!((f64::from(*found) - sum).abs() <= 1e-6 * size, "{at}: {found}, not {sum}");
    }
}
