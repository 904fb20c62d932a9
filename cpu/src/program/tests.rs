//! Every op of a graph as instructions, against rten over the ONNX form of the same graph.

use qhx_base::Result;
use qhx_graph::Silent;
use qhx_graph::builder::{GraphBuilder, batched, sequence_port};
use qhx_graph::graph::{
    AttentionInputs, BinaryOp, Elem as GraphElem, Graph, INT8_STEP, Op, ReduceOp, TensorId, UnaryOp,
};
use qhx_graph::onnx;
use qhx_graph::quantize::{Bits, Quantized, QuantizedForm};
use qhx_graph::weight::{Storage, Weight, held, held_blocks};
use qhx_types::{DType, TensorInfo};
use rten::{Model, ModelOptions, Value, ValueView};
use rten_tensor::TensorView;
use rten_tensor::prelude::*;

use super::{Input, Instruction, Program, Scratch};
use crate::options::Caches;

/// So large that two threads compute it.
const X: [usize; 3] = [2, 96, 160];

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7919 % 1009) as f32 - 504.0) / 200.0).collect()
}

/// A graph in files, as a program and as rten reads it.
pub(super) struct Both {
    pub(super) program: Program,
    reference: Model,
}

impl Both {
    pub(super) fn new(graph: &Graph, caches: Caches) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let written = onnx::write(graph, folder.path(), &mut Silent).unwrap();
        let graph = onnx::read(&written.model, folder.path()).unwrap();
        let mut options = ModelOptions::with_all_ops();
        options.enable_optimization(false);
        let reference = options.load_file(&written.model).unwrap();
        Self { program: Program::compile(&graph, caches).unwrap(), reference }
    }

    /// The outputs by rten, as f32 or the bits of i32.
    pub(super) fn reference(&self, inputs: &[Input<'_>]) -> Vec<Vec<f32>> {
        let infos = self.program.inputs.iter().zip(inputs);
        let views = infos.map(|(info, input)| {
            let shape = info.shape.as_slice();
            match *input {
                Input::F32(x) => ValueView::FloatTensor(TensorView::from_data(shape, x)),
                Input::I32(x) => ValueView::Int32Tensor(TensorView::from_data(shape, x)),
                Input::I8(x) => ValueView::Int8Tensor(TensorView::from_data(shape, x)),
                Input::F16(_) => panic!("rten has no f16"),
            }
        });
        let inputs =
            self.reference.input_ids().iter().copied().zip(views.map(Into::into)).collect();
        let found = self.reference.run(inputs, self.reference.output_ids(), None).unwrap();
        let values = found.into_iter().map(|value| match value {
            Value::FloatTensor(found) => found.iter().copied().collect(),
            Value::Int32Tensor(found) => {
                found.iter().map(|n| f32::from_bits(n.cast_unsigned())).collect()
            }
            _ => panic!("an output is neither f32 nor i32"),
        });
        values.collect()
    }

    /// The outputs by instructions on `threads` threads.
    pub(super) fn run(
        &self,
        inputs: &[Input<'_>],
        scratch: &mut Scratch,
        threads: usize,
    ) -> Vec<Vec<f32>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| self.program.run(inputs, scratch)).unwrap();
        let outputs = self.program.outputs.iter().enumerate().map(|(index, info)| {
            let mut found = vec![f32::NAN; info.elements()];
            self.program.output(index, scratch, &mut found).unwrap();
            found
        });
        outputs.collect()
    }

    /// Compares all outputs, which may differ by `most` of their size.
    fn check(&self, inputs: &[Input<'_>], most: f32) {
        let mut scratch = Scratch::default();
        // What the first execution left behind does not reach the second.
        self.run(inputs, &mut scratch, 2);
        let found = self.run(inputs, &mut scratch, 2);
        for ((info, found), expected) in
            self.program.outputs.iter().zip(found).zip(self.reference(inputs))
        {
            assert_eq!(found.len(), expected.len(), "{info}");
            let size = expected.iter().fold(1f32, |most, y| most.max(y.abs()));
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let size = if most > 1e-4 { size } else { expected.abs().max(1.0) };
                let near = info.dtype == DType::F32 && (found - expected).abs() <= most * size;
                let same =
                    found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(near || same, "{info} at {at}: {found}, not {expected}");
            }
        }
    }

    fn is(&self, kind: impl Fn(&Instruction) -> bool) -> usize {
        self.program.instructions.iter().filter(|one| kind(one)).count()
    }
}

/// A graph over `x`, and `i` `[3]` of integers, whose outputs are named after what computes them.
struct Case {
    b: GraphBuilder,
    x: TensorId,
    i: TensorId,
}

impl Case {
    fn new() -> Self {
        let mut b = GraphBuilder::new("g");
        let x = b.input("x", GraphElem::Activation, &X).unwrap();
        let i = b.input("i", GraphElem::I32, &[3]).unwrap();
        Self { b, x, i }
    }

    fn constant(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let values = numbers(shape.iter().product());
        self.b.constant(name, GraphElem::Activation, shape, values).unwrap()
    }

    fn output(&mut self, name: &str, make: impl FnOnce(&mut GraphBuilder) -> Result<TensorId>) {
        let y = make(&mut self.b).unwrap();
        self.b.output(name, y).unwrap();
    }

    fn check(self, most: f32) {
        let mut b = self.b;
        // All inputs are read.
        b.output("read_x", self.x).unwrap();
        b.output("read_i", self.i).unwrap();
        let both = Both::new(&b.finish().unwrap(), Caches::F32);
        let x = numbers(X.iter().product());
        both.check(&[Input::F32(&x), Input::I32(&[1, 2, 0])], most);
    }
}

#[test]
fn elements_by_themselves() {
    use UnaryOp::*;
    let mut case = Case::new();
    let (x, i) = (case.x, case.i);
    let turned = case.b.transpose(x, &[2, 0, 1]).unwrap();
    for op in [Abs, Neg, Exp, Sigmoid, Silu, Sin, Tanh, Relu, Gelu, GeluTanh] {
        case.output(&format!("{op:?}"), |b| b.unary(op, x));
        case.output(&format!("{op:?}_turned"), |b| b.unary(op, turned));
    }
    let positive = case.b.unary(Abs, x).unwrap();
    for op in [Log, Rsqrt] {
        case.output(&format!("{op:?}"), |b| b.unary(op, positive));
    }
    case.output("clamp", |b| b.clamp(x, -1.0, 0.75));
    case.output("clamp_above", |b| b.clamp(x, f32::NEG_INFINITY, 0.75));
    case.output("float", |b| b.cast(i, GraphElem::F32));
    case.output("whole", |b| b.cast(x, GraphElem::I32));
    case.output("same", |b| b.cast(x, GraphElem::F32));
    case.check(1e-5);
}

#[test]
fn elements_in_pairs() {
    use BinaryOp::*;
    let mut case = Case::new();
    let x = case.x;
    let row = case.constant("row", &[1, 1, 160]);
    let column = case.constant("column", &[1, 96, 1]);
    let one = case.b.scalar(x, 0.75).unwrap();
    let away = case.b.transpose(x, &[2, 0, 1]).unwrap();
    let back = case.b.transpose(away, &[1, 2, 0]).unwrap();
    let turned = case.b.transpose(x, &[0, 2, 1]).unwrap();
    let negative = case.b.unary(UnaryOp::Neg, turned).unwrap();
    for op in [Add, Sub, Mul, Div, Max, Min] {
        for (name, a, b) in [
            ("itself", x, x),
            ("row", x, row),
            ("column", column, x),
            ("one", x, one),
            ("of_one", one, x),
            ("back", x, back),
            ("turned", turned, negative),
            ("outer", row, column),
        ] {
            case.output(&format!("{op:?}_{name}"), |builder| builder.binary(op, a, b));
        }
    }
    case.check(1e-5);
}

#[test]
fn other_orders_and_parts() {
    let mut case = Case::new();
    let x = case.x;
    let turned = case.b.transpose(x, &[0, 2, 1]).unwrap();
    let end = case.b.slice(x, 2, 110, 160).unwrap();
    let begin = case.b.slice(x, 1, 0, 10).unwrap();
    let corner = case.b.slice(end, 1, 0, 10).unwrap();
    let corner_turned = case.b.transpose(corner, &[0, 2, 1]).unwrap();
    let negative = case.b.unary(UnaryOp::Neg, corner).unwrap();
    case.output("reshaped", |b| b.reshape(x, &[4, 48, 160]));
    case.output("copied", |b| b.reshape(turned, &[192, 160]));
    case.output("wide", |b| b.concat(&[end, x, end], 2));
    case.output("long", |b| b.concat(&[begin, x], 1));
    case.output("deep", |b| b.concat(&[x, x], 0));
    case.output("turned_twice", |b| b.concat(&[corner_turned, corner_turned], 2));
    case.output("corners", |b| b.concat(&[corner, negative], 1));
    case.output("turned", |_| Ok(corner_turned));
    let rows = case.b.reshape(x, &[192, 160]).unwrap();
    let i = case.i;
    case.output("rows", |b| b.gather(rows, i, 0));
    case.check(1e-5);
}

#[test]
fn rows_and_columns() {
    let mut case = Case::new();
    let x = case.x;
    let turned = case.b.transpose(x, &[0, 2, 1]).unwrap();
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
        for axis in 0..3 {
            case.output(&format!("{op:?}_{axis}"), |b| b.reduce(op, x, axis));
        }
    }
    case.output("softmax", |b| b.softmax(x));
    case.output("softmax_turned", |b| b.softmax(turned));
    let [weight, bias, other] = ["weight", "bias", "other"].map(|name| case.constant(name, &[160]));
    case.output("layer_norm", |b| b.layer_norm(x, 1e-5, weight, bias));
    case.output("rms_norm", |b| b.rms_norm(x, 1e-6, other));
    case.output("squares", |b| b.matmul(x, turned, false));
    case.output("squares_by_rows", |b| b.matmul(x, x, true));
    case.output("squares_of_columns", |b| b.matmul(turned, x, false));
    case.check(2e-5);
}

#[test]
fn i32_is_computed_and_moved() {
    use BinaryOp::*;
    let mut b = GraphBuilder::new("g");
    let wide = b.input("wide", GraphElem::I32, &[2, 3]).unwrap();
    let row = b.input("row", GraphElem::I32, &[1, 3]).unwrap();
    for op in [Add, Sub, Mul, Div, Max, Min] {
        let y = b.binary(op, wide, row).unwrap();
        b.output(&format!("{op:?}"), y).unwrap();
    }
    let sum = b.add(wide, row).unwrap();
    let all = b.concat(&[sum, wide], 0).unwrap();
    let flat = b.reshape(all, &[12]).unwrap();
    let part = b.slice(flat, 0, 3, 9).unwrap();
    let turned = b.transpose(wide, &[1, 0]).unwrap();
    let picks = b.input("picks", GraphElem::I32, &[4]).unwrap();
    let rows = b.gather(all, picks, 0).unwrap();
    for (name, y) in [("part", part), ("turned", turned), ("rows", rows)] {
        b.output(name, y).unwrap();
    }
    let both = Both::new(&b.finish().unwrap(), Caches::F32);
    let (wide, row) = ([7, -9, 1_234_567, 0, 5, 99], [-3, 2, 1]);
    both.check(&[Input::I32(&wide), Input::I32(&row), Input::I32(&[3, 0, 0, 2])], 0.0);
}

#[test]
fn an_integer_divided_by_0_is_an_error() {
    let mut b = GraphBuilder::new("g");
    let i = b.input("i", GraphElem::I32, &[3]).unwrap();
    let y = b.div(i, i).unwrap();
    b.output("y", y).unwrap();
    let program = Program::compile(&b.finish().unwrap(), Caches::F32).unwrap();
    let error = program.run(&[Input::I32(&[1, 0, 2])], &mut Scratch::default()).unwrap_err();
    assert_eq!(error.message(), "an integer is divided by 0");
    program.run(&[Input::I32(&[1, 3, i32::MIN])], &mut Scratch::default()).unwrap();
}

/// A weight of these values.
pub(super) fn weight(shape: [usize; 2], values: Vec<f32>, storage: Storage) -> Weight {
    Weight::new(held("matrix", shape, values), storage)
}

/// A weight of integers with a scale for each block, and an offset where the form has them.
fn quantized(shape: [usize; 2], form: QuantizedForm) -> Weight {
    let mut all = Quantized::zeroed(form, shape[0] * shape[1]);
    let (low, high) = form.bits.range();
    let span = i64::from(high) - i64::from(low) + 1;
    let integer = |at: usize| ((at * 37 % 1009) as i64 % span + i64::from(low)) as i8;
    all.values.iter_mut().enumerate().for_each(|(at, q)| *q = integer(at));
    all.scales.iter_mut().enumerate().for_each(|(at, s)| *s = (1 + at % 7) as f32 / 64.0);
    all.offsets.iter_mut().enumerate().for_each(|(at, o)| *o = (at % 5) as f32 - 1.5);
    Weight::new(held_blocks("matrix", shape, all), Storage::Blocks(form))
}

#[test]
fn weights_of_every_form_are_multiplied() {
    const SHAPE: [usize; 2] = [70, 160];
    // With integers the other factor is rounded to 16 bits.
    let rounded = 4e-4;
    let halves = |values: Vec<f32>| values.iter().map(|x| (x * 64.0).round() / 64.0).collect();
    let float = |values| weight(SHAPE, values, Storage::Float);
    let blocks = |bits, block, offsets| quantized(SHAPE, QuantizedForm { bits, block, offsets });
    let all = numbers(SHAPE.iter().product());
    // Not values of f16.
    let fine = all.iter().map(|x| x / 3.0).collect();
    let (four, eight) = (Bits::Four, Bits::Eight);
    for (name, weight, most) in [
        ("f32", float(fine), 1e-5),
        ("f16", float(halves(all.clone())), 1e-5),
        ("int8", weight(SHAPE, all, Storage::Int8), rounded),
        ("4 bits", blocks(four, 32, false), rounded),
        ("4 bits with offsets", blocks(four, 32, true), rounded),
        ("4 bits in long blocks", blocks(four, 160, true), rounded),
        ("4 bits in short blocks", blocks(four, 16, true), 1e-4),
        ("8 bits", blocks(eight, 32, false), rounded),
        ("8 bits with offsets", blocks(eight, 32, true), rounded),
        ("8 bits in rows", blocks(eight, 160, true), rounded),
        ("8 bits in short blocks", blocks(eight, 8, false), 1e-4),
    ] {
        let mut b = GraphBuilder::new("g");
        let x = b.input("x", GraphElem::Activation, &[5, SHAPE[1]]).unwrap();
        let plain = b.linear("plain", x, weight.clone(), None).unwrap();
        let biased = b.linear("biased", x, weight, Some(numbers(SHAPE[0]))).unwrap();
        b.output("y", plain).unwrap();
        b.output("z", biased).unwrap();
        let both = Both::new(&b.finish().unwrap(), Caches::F32);
        assert_eq!(both.program.instructions.len(), 1, "{name}: both are multiplied at once");
        both.check(&[Input::F32(&numbers(5 * SHAPE[1]))], most);
    }
}

/// Weight of a shape, rows by columns.
type WeightOf = dyn Fn([usize; 2]) -> Weight;

/// A step of one row by a weight of every form, over an attention of few positions.
fn steps() -> Vec<(&'static str, Graph)> {
    const COLUMNS: usize = 160;
    let blocks =
        |bits, offsets| move |shape| quantized(shape, QuantizedForm { bits, block: 32, offsets });
    let stored =
        |storage| move |shape: [usize; 2]| weight(shape, numbers(shape[0] * shape[1]), storage);
    let forms: [(&str, &WeightOf); 6] = [
        ("floats", &stored(Storage::Float)),
        ("int8", &stored(Storage::Int8)),
        ("8 bits", &blocks(Bits::Eight, false)),
        ("8 bits with offsets", &blocks(Bits::Eight, true)),
        ("4 bits", &blocks(Bits::Four, false)),
        ("4 bits with offsets", &blocks(Bits::Four, true)),
    ];
    let step = |weight: &WeightOf| {
        let mut b = GraphBuilder::new("g");
        let x = b.input("x", GraphElem::Activation, &[1, COLUMNS]).unwrap();
        let past = ["past_k", "past_v"]
            .map(|name| b.input(name, GraphElem::Activation, &[2, 40, 32]).unwrap());
        let mask = b.input("cmask", GraphElem::Activation, &[1, 1, 41]).unwrap();
        let ones = vec![1.0; COLUMNS];
        let ones = b.constant("norm", GraphElem::Activation, &[COLUMNS], ones).unwrap();
        let normed = b.rms_norm(x, 1e-6, ones).unwrap();
        let [q, k, v] = [("q", 128), ("k", 64), ("v", 64)].map(|(name, rows)| {
            let y = b.linear(name, normed, weight([rows, COLUMNS]), None).unwrap();
            b.reshape(y, &[2, rows / 64, 32]).unwrap()
        });
        let inputs =
            AttentionInputs { past: Some(past), mask: Some(mask), ..AttentionInputs::new(q, k, v) };
        let y = b.attention(inputs).unwrap();
        let y = b.reshape(y, &[1, 128]).unwrap();
        let y = b.linear("o", y, weight([COLUMNS, 128]), Some(numbers(COLUMNS))).unwrap();
        let y = b.add(x, y).unwrap();
        for (name, value) in [("y", y), ("new_k", k)] {
            b.output(name, value).unwrap();
        }
        b.finish().unwrap()
    };
    forms.into_iter().map(|(name, weight)| (name, step(weight))).collect()
}

/// The program of a graph that was written and read.
fn program(graph: &Graph) -> Program {
    let folder = tempfile::tempdir().unwrap();
    let written = onnx::write(graph, folder.path(), &mut Silent).unwrap();
    Program::compile(&onnx::read(&written.model, folder.path()).unwrap(), Caches::F32).unwrap()
}

#[test]
fn a_graph_for_several_sequences_gives_each_its_bits() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for (name, graph) in steps() {
        let several = batched(&graph, 3, "several").unwrap();
        let linear =
            |graph: &Graph| graph.nodes().iter().filter(|node| node.op == Op::Linear).count();
        assert_eq!(linear(&several), linear(&graph), "{name}: weights are read once");
        let (one, several) = (program(&graph), program(&several));
        let values: Vec<Vec<_>> = (0..3)
            .map(|sequence| {
                let own =
                    |info: &TensorInfo| numbers(info.elements() + sequence)[sequence..].to_vec();
                one.inputs.iter().map(own).collect()
            })
            .collect();
        // The values of a port, of all sequences one behind the other or of one of them.
        let values_of = |name: &str, all: &[Vec<Vec<f32>>], infos: &[TensorInfo]| -> Vec<f32> {
            let of_one = |port: usize, sequence: usize| all[sequence][port].clone();
            let joint = infos.iter().position(|info| info.name == name);
            let each = || {
                let ports = infos.iter().enumerate();
                let mut all =
                    ports.flat_map(|(port, info)| (0..3).map(move |s| (port, s, &info.name)));
                let found = all.find(|(_, sequence, of)| sequence_port(of, *sequence) == name);
                found.map(|(port, sequence, _)| of_one(port, sequence)).unwrap()
            };
            joint.map_or_else(each, |port| (0..3).flat_map(|s| of_one(port, s)).collect())
        };
        let run = |program: &Program, inputs: &[Vec<f32>]| -> Vec<Vec<f32>> {
            let inputs: Vec<_> = inputs.iter().map(|x| Input::F32(x)).collect();
            let mut scratch = Scratch::default();
            pool.install(|| program.run(&inputs, &mut scratch)).unwrap();
            let output = |(index, info): (usize, &TensorInfo)| {
                let mut found = vec![f32::NAN; info.elements()];
                program.output(index, &scratch, &mut found).unwrap();
                found
            };
            program.outputs.iter().enumerate().map(output).collect()
        };
        let names =
            |infos: &[TensorInfo]| infos.iter().map(|info| info.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&several.outputs), ["y", "new_k"], "{name}: rows of all are one output");
        let all: Vec<_> =
            several.inputs.iter().map(|info| values_of(&info.name, &values, &one.inputs)).collect();
        let alone: Vec<_> = values.iter().map(|values| run(&one, values)).collect();
        for (info, found) in several.outputs.iter().zip(run(&several, &all)) {
            assert_eq!(found, values_of(&info.name, &alone, &one.outputs), "{name}: {info}");
        }
    }
}

#[test]
fn sequences_together_get_the_bits_of_each_alone() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for (name, graph) in steps() {
        let program = program(&graph);
        assert!(program.reads_weights_for_one_row(), "{name}");
        let own = |sequence: usize| -> Vec<Vec<f32>> {
            let values = |info: &TensorInfo| {
                let all = numbers(info.elements() + 31 * sequence);
                let mut all = all[31 * sequence..].to_vec();
                // One that is no number has company, too, and so has one that is too small for a scale.
                match sequence {
                    2 if info.name == "x" => all[7] = f32::NAN,
                    5 if info.name == "x" => all.iter_mut().for_each(|x| *x *= 1e-38),
                    _ => {}
                }
                all
            };
            program.inputs.iter().map(values).collect()
        };
        let values: Vec<_> = (0..8).map(own).collect();
        let inputs: Vec<Vec<_>> =
            values.iter().map(|all| all.iter().map(|x| Input::F32(x)).collect()).collect();
        let outputs = |scratch: &Scratch| -> Vec<Vec<u32>> {
            let bits = |(index, info): (usize, &TensorInfo)| {
                let mut found = vec![0.0; info.elements()];
                program.output(index, scratch, &mut found).unwrap();
                found.iter().map(|y| y.to_bits()).collect()
            };
            program.outputs.iter().enumerate().map(bits).collect()
        };
        let alone: Vec<_> = inputs
            .iter()
            .map(|inputs| {
                let mut scratch = Scratch::default();
                pool.install(|| program.run(inputs, &mut scratch)).unwrap();
                outputs(&scratch)
            })
            .collect();
        for count in 2..=8 {
            for first in 0..=8 - count {
                let mut scratches: Vec<_> = (0..count).map(|_| Scratch::default()).collect();
                let inputs = &inputs[first..][..count];
                pool.install(|| program.run_together(inputs, &mut scratches)).unwrap();
                for (scratch, alone) in scratches.iter().zip(&alone[first..]) {
                    assert!(outputs(scratch) == *alone, "{name}: {count} from {first} on");
                }
            }
        }
    }
}

#[test]
fn large_constants_are_multiplied_as_weights() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", GraphElem::Activation, &[96, 160]).unwrap();
    let large =
        b.constant("large", GraphElem::Activation, &[160, 512], numbers(160 * 512)).unwrap();
    let deep = b.constant("deep", GraphElem::Activation, &[512, 160], numbers(160 * 512)).unwrap();
    for (name, by, turned) in [("by_large", large, false), ("by_deep", deep, true)] {
        let y = b.matmul(x, by, turned).unwrap();
        b.output(name, y).unwrap();
    }
    let both = Both::new(&b.finish().unwrap(), Caches::F32);
    assert_eq!(both.program.weights().count(), 2);
    both.check(&[Input::F32(&numbers(96 * 160))], 2e-5);
}

#[test]
fn composites_are_one_instruction_each() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", GraphElem::Activation, &[1, 64]).unwrap();
    let weight = b.constant("weight", GraphElem::Activation, &[64], numbers(64)).unwrap();
    let normed = b.rms_norm(x, 1e-6, weight).unwrap();
    let gate = b.silu(normed).unwrap();
    let gate = b.gelu(gate).unwrap();
    let gate = b.gelu_tanh(gate).unwrap();
    let q = b.reshape(gate, &[2, 2, 16]).unwrap();
    let own = b.slice(q, 1, 0, 1).unwrap();
    let past =
        ["past_k", "past_v"].map(|name| b.input(name, GraphElem::Activation, &[2, 8, 16]).unwrap());
    let mask = b.input("mask", GraphElem::Activation, &[1, 1, 9]).unwrap();
    let inputs =
        AttentionInputs { past: Some(past), mask: Some(mask), ..AttentionInputs::new(q, own, own) };
    let y = b.attention(inputs).unwrap();
    b.output("y", y).unwrap();
    let both = Both::new(&b.finish().unwrap(), Caches::F32);
    assert_eq!(both.is(|one| matches!(one, Instruction::RmsNorm { .. })), 1);
    assert_eq!(both.is(|one| matches!(one, Instruction::Attend { .. })), 1);
    // Three functions, and the part of `q` as keys and as values, once each.
    assert_eq!(both.is(|one| matches!(one, Instruction::Unary { .. })), 5);
    assert_eq!(both.program.instructions.len(), 8, "with what the mask shows");
}

#[test]
fn an_index_outside_of_a_table_is_refused() {
    let mut b = GraphBuilder::new("g");
    let i = b.input("i", GraphElem::I32, &[1]).unwrap();
    let table = b.constant("table", GraphElem::Activation, &[3, 2], numbers(6)).unwrap();
    let y = b.gather(table, i, 0).unwrap();
    b.output("y", y).unwrap();
    let program = Program::compile(&b.finish().unwrap(), Caches::F32).unwrap();
    for index in [3, -4, i32::MIN] {
        let error = program.run(&[Input::I32(&[index])], &mut Scratch::default()).unwrap_err();
        assert_eq!(error.message(), format!("index {index} of a table of 3 rows"));
    }
}

#[test]
fn a_value_beyond_all_memory_is_refused() {
    // The sum of the first two takes 64 MB, which every machine has.
    let sizes = [1 << 12, 1 << 12, 1 << 24];
    let mut b = GraphBuilder::new("g");
    // Every input is one more dimension of their sum.
    let inputs = [0, 1, 2].map(|at| {
        let shape: Vec<_> = (0..3).map(|n| if n == at { sizes[n] } else { 1 }).collect();
        b.input(&format!("x{at}"), GraphElem::Activation, &shape).unwrap()
    });
    let sum = b.add(inputs[0], inputs[1]).unwrap();
    let sum = b.add(sum, inputs[2]).unwrap();
    b.output("y", sum).unwrap();
    let program =
        Program::compile(&b.finish().unwrap(), Caches::F32).expect("its size can be counted");
    let x = vec![0.0; 1 << 24];
    let inputs = [&x[..1 << 12], &x[..1 << 12], &x[..]].map(Input::F32);
    let mut scratch = Scratch::default();
    let error = program.run(&inputs, &mut scratch).unwrap_err();
    let size = "a value of 281474976710656 elements of f32 takes 1125899906842624 bytes";
    assert_eq!(error.message(), size);
    assert!(scratch.buffers.iter().all(Vec::is_empty), "memory was touched on the way");
}

#[test]
fn int8_of_an_input_is_multiplied_as_it_is() {
    let (rows, columns, count) = (70, 96, 11);
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", GraphElem::Activation, &[count, columns]).unwrap();
    let w = b.input("w", GraphElem::Int8, &[rows, columns]).unwrap();
    let y = b.matmul(x, w, true).unwrap();
    b.output("y", y).unwrap();
    let program = Program::compile(&b.finish().unwrap(), Caches::F32).unwrap();
    assert_eq!(program.instructions.len(), 1, "nothing is made f32 before");
    let x = numbers(count * columns);
    let w: Vec<i8> = (0..rows * columns).map(|at| (at * 37 % 255) as i8).collect();
    let mut scratch = Scratch::default();
    program.run(&[Input::F32(&x), Input::I8(&w)], &mut scratch).unwrap();
    let mut found = vec![f32::NAN; count * rows];
    program.output(0, &scratch, &mut found).unwrap();
    for (at, found) in found.iter().enumerate() {
        let (m, n) = (at / rows, at % rows);
        let pairs = x[m * columns..][..columns].iter().zip(&w[n * columns..]);
        let terms = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w) * f64::from(INT8_STEP));
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
        assert!((f64::from(*found) - sum).abs() <= 1e-6 * size, "{at}: {found}, not {sum}");
    }
}
