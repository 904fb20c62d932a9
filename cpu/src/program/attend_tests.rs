//! Attention over a cache as one instruction, against rten.

use std::collections::HashMap;

use rten::{ModelOptions, Value, ValueView};
use rten_onnx::onnx::ModelProto;
use rten_tensor::TensorView;
use rten_tensor::prelude::*;

use super::tests::onnx::{FLOAT, Model};
use super::{Input, Instruction, Program, Scratch};
use crate::kernels::tests::numbers;

/// What is added to hidden scores, as ops fill it.
const HIDDEN: f32 = -30_000.0;

/// Heads of keys, queries for each, tokens, rows of the cache, elements of a head.
type Sizes = [usize; 5];

const SIZES: [Sizes; 6] = [
    [2, 3, 1, 200, 16],
    [1, 1, 1, 1, 5],
    [1, 8, 1, 2100, 32],
    [3, 2, 4, 70, 24],
    [2, 4, 37, 300, 16],
    [1, 2, 130, 64, 64],
];

fn shapes([g, r, n, c, d]: Sizes) -> Vec<(&'static str, Vec<usize>)> {
    let cache = vec![g, c, d];
    let mask = if n == 1 { vec![1, 1, c + n] } else { vec![1, 1, n, c + n] };
    let own = vec![g, n, d];
    vec![
        ("q", vec![g, r * n, d]),
        ("k", own.clone()),
        ("v", own),
        ("past_k", cache.clone()),
        ("past_v", cache),
        ("cmask", mask),
    ]
}

/// The nodes that the forge writes.
fn model(sizes: Sizes) -> Model {
    let [g, r, n, c, d] = sizes;
    let model = shapes(sizes).iter().fold(Model::default(), |model, (name, shape)| {
        model.input(name, FLOAT, &shape.iter().map(|n| *n as u64).collect::<Vec<_>>())
    });
    let int = |value: usize| value as i64;
    let model = model
        .integers("zero", &[0])
        .integers("two", &[2])
        .integers("middle", &[int(c)])
        .integers("end", &[int(c + n)])
        .integers("apart", &[int(g), int(r), int(n), int(c + n)])
        .integers("joined", &[int(g), int(r * n), int(c + n)])
        .transpose("past_k", "old.bt", &[0, 2, 1])
        .transpose("k", "own.bt", &[0, 2, 1])
        .node("MatMul", &["q", "own.bt"], &["own"])
        .node("MatMul", &["q", "old.bt"], &["old"])
        .node_with("Concat", &["old", "own"], &["all"], &[("axis", 2)]);
    let model = match n {
        1 => model.node("Add", &["all", "cmask"], &["sum"]),
        _ => model.node("Reshape", &["all", "apart"], &["all4"]).node(
            "Add",
            &["all4", "cmask"],
            &["sum"],
        ),
    };
    let model = model.node_with("Softmax", &["sum"], &["soft"], &[("axis", u64::MAX)]);
    let model = match n {
        1 => model.node("Identity", &["soft"], &["unused"]),
        _ => model.node("Reshape", &["soft", "joined"], &["weights"]),
    };
    let weights = if n == 1 { "soft" } else { "weights" };
    let own = if n == 1 { "Mul" } else { "MatMul" };
    let out = [g, r * n, d].map(|n| n as u64);
    model
        .node("Slice", &[weights, "middle", "end", "two"], &["own_w"])
        .node(own, &["own_w", "v"], &["own_y"])
        .node("Slice", &[weights, "zero", "middle", "two"], &["old_w"])
        .node("MatMul", &["old_w", "past_v"], &["old_y"])
        .node("Add", &["old_y", "own_y"], &["y"])
        .output("y", FLOAT, &out)
}

/// Numbers for each input.
fn values(sizes: Sizes, mask: &[f32]) -> Vec<Vec<f32>> {
    let sizes = shapes(sizes);
    let sizes = sizes.iter().map(|(_, shape)| shape.iter().product::<usize>());
    let mut all: Vec<_> = sizes.enumerate().map(|(at, len)| numbers(len, at as u32)).collect();
    all[5].copy_from_slice(mask);
    all
}

/// The mask in which a token sees what `sees` says: its number, and a position of the cache. Own tokens are causal.
fn mask([_, _, n, c, _]: Sizes, sees: impl Fn(usize, usize) -> bool) -> Vec<f32> {
    let shown = |token: usize, at: usize| if at < c { sees(token, at) } else { at - c <= token };
    let all = (0..n).flat_map(|token| (0..c + n).map(move |at| (token, at)));
    all.map(|(token, at)| if shown(token, at) { 0.0 } else { HIDDEN }).collect()
}

/// Whether a token sees a position of the cache.
type Sees = Box<dyn Fn(usize, usize) -> bool>;

/// Nothing but the own tokens, the beginning, a window, the two ends of a ring, everything, every third.
fn masks(sizes: Sizes) -> Vec<Vec<f32>> {
    let c = sizes[3];
    let all: [Sees; 6] = [
        Box::new(|_, _| false),
        Box::new(move |_, at| at < c / 3 + 1),
        Box::new(move |token, at| at > c / 2 + token && at < c - 1),
        Box::new(move |token, at| at < c / 5 || at > c - c / 5 + token),
        Box::new(|_, _| true),
        Box::new(|_, at| at % 3 == 0),
    ];
    all.iter().map(|sees| mask(sizes, sees)).collect()
}

fn compiled(sizes: Sizes) -> Program {
    let parsed = ModelProto::parse_buf(&model(sizes).build()).unwrap();
    let program = Program::compile(&parsed, &HashMap::new()).unwrap();
    let attends = |one: &&Instruction| matches!(one, Instruction::Attend { .. });
    assert_eq!(program.instructions.iter().filter(attends).count(), 1);
    program
}

fn run(program: &Program, scratch: &mut Scratch, values: &[Vec<f32>], threads: usize) -> Vec<f32> {
    let inputs: Vec<_> = values.iter().map(|values| Input::F32(values)).collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| program.run(&inputs, scratch)).unwrap();
    let mut found = vec![f32::INFINITY; program.results[0].len];
    program.output(0, scratch, &mut found).unwrap();
    found
}

fn reference(sizes: Sizes, values: &[Vec<f32>]) -> Vec<f32> {
    let model = ModelOptions::with_all_ops().load(model(sizes).build()).unwrap();
    let shapes = shapes(sizes);
    let views = shapes.iter().zip(values).map(|((_, shape), values)| {
        ValueView::FloatTensor(TensorView::try_from_data(shape.as_slice(), &values[..]).unwrap())
    });
    let inputs = model.input_ids().iter().copied().zip(views.map(Into::into)).collect();
    let mut found = model.run(inputs, model.output_ids(), None).unwrap();
    let Some(Value::FloatTensor(y)) = found.pop() else { panic!("y is not f32") };
    y.iter().copied().collect()
}

fn near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found.is_nan() && expected.is_nan();
        let near = (found - expected).abs() <= 2e-6;
        assert!(near || same, "{what}, {at}: {found}, not {expected}");
    }
}

#[test]
fn attention_computes_what_its_nodes_do() {
    for sizes in SIZES {
        let program = compiled(sizes);
        let mut scratch = Scratch::default();
        for (index, mask) in masks(sizes).iter().enumerate() {
            let values = values(sizes, mask);
            let found = run(&program, &mut scratch, &values, 2);
            near(&found, &reference(sizes, &values), &format!("{sizes:?}, mask {index}"));
            // Who computes does not matter.
            assert_eq!(run(&program, &mut Scratch::default(), &values, 1), found);
        }
    }
}

#[test]
fn hidden_cache_rows_may_hold_anything() {
    for sizes @ [g, _, n, c, d] in SIZES {
        let program = compiled(sizes);
        for mask in masks(sizes) {
            let mut values = values(sizes, &mask);
            let clean = run(&program, &mut Scratch::default(), &values, 2);
            let width = c + n;
            let hidden = |at: usize| mask.chunks(width).all(|row| row[at] == HIDDEN);
            for at in (0..c).filter(|at| hidden(*at)) {
                for head in 0..g {
                    let row = (head * c + at) * d..(head * c + at + 1) * d;
                    values[3][row.clone()].fill(f32::NAN);
                    values[4][row].fill(f32::INFINITY);
                }
            }
            assert_eq!(run(&program, &mut Scratch::default(), &values, 2), clean, "{sizes:?}");
        }
    }
}

#[test]
fn scores_without_a_finite_largest_are_as_those_of_rten() {
    let sizes @ [_, _, n, c, _] = [2, 2, 3, 70, 16];
    let program = compiled(sizes);
    let width = c + n;
    for (value, added) in [
        // Nothing is shown, by numbers and by −∞; a position adds no number; all add the same.
        (HIDDEN, HIDDEN),
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
        (0.0, f32::NAN),
        (0.0, f32::NEG_INFINITY),
        (-5_000.0, -5_000.0),
    ] {
        let mut mask = vec![0.0; n * width];
        mask[width..2 * width].fill(value);
        mask[width + 7] = added;
        let values = values(sizes, &mask);
        let found = run(&program, &mut Scratch::default(), &values, 2);
        near(&found, &reference(sizes, &values), &format!("{value}, {added}"));
    }
    // A key that is shown and holds no number reaches every token that sees it.
    let mut values = values(sizes, &vec![0.0; n * width]);
    values[3][5] = f32::NAN;
    let found = run(&program, &mut Scratch::default(), &values, 2);
    near(&found, &reference(sizes, &values), "a key of NaN");
}

#[test]
fn memory_of_attention_does_not_grow_with_the_context() {
    let bytes = |sizes: Sizes| {
        let mut scratch = Scratch::default();
        let program = compiled(sizes);
        run(&program, &mut scratch, &values(sizes, &mask(sizes, |_, at| at < 10)), 1);
        scratch.buffers.iter().map(Vec::len).sum::<usize>() + scratch.sums.len()
    };
    assert_eq!(bytes([2, 2, 20, 100, 16]), bytes([2, 2, 20, 5000, 16]));
}
