//! Attention over a cache as one instruction, against rten.

use half::f16;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{AttentionInputs, Elem, Graph, INT8_STEP};
use qhx_types::{DType, MASK_VALUE, TensorInfo};

use super::tests::Both;
use super::{Input, Instruction, Scratch};
use crate::kernels::tests::numbers;
use crate::options::Caches;

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

/// The graph of an attention over caches of int8 or of floats; `read` has the keys of the cache as an output, too.
fn graph(sizes: Sizes, int8: bool, read: bool) -> Graph {
    let [g, _, _, c, _] = sizes;
    let mut b = GraphBuilder::new("g");
    let mut ids = Vec::new();
    for (name, shape) in shapes(sizes) {
        let cache = int8 && name.starts_with("past_");
        let elem = if cache { Elem::Int8Cache } else { Elem::Activation };
        ids.push(b.input(name, elem, &shape).unwrap());
    }
    let &[q, k, v, past_k, past_v, mask] = &ids[..] else { panic!("six inputs") };
    let scales = int8.then(|| {
        ["scale_k", "scale_v"].map(|name| b.input(name, Elem::Activation, &[g, 1, c]).unwrap())
    });
    let (past, mask) = (Some([past_k, past_v]), Some(mask));
    let inputs = AttentionInputs { past, scales, mask, ..AttentionInputs::new(q, k, v) };
    let y = b.attention(inputs).unwrap();
    b.output("y", y).unwrap();
    if read {
        b.output("same", past_k).unwrap();
    }
    b.finish().unwrap()
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
    all.map(|(token, at)| if shown(token, at) { 0.0 } else { MASK_VALUE }).collect()
}

/// Predicate: true if a token sees a position of the cache.
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

fn compiled(sizes: Sizes) -> Both {
    compiled_over(sizes, false)
}

fn compiled_over(sizes: Sizes, int8: bool) -> Both {
    let both = Both::new(&graph(sizes, int8, false), Caches::F32);
    let attends = |one: &&Instruction| matches!(one, Instruction::Attend { .. });
    assert_eq!(both.program.instructions.iter().filter(attends).count(), 1);
    both
}

fn run(both: &Both, scratch: &mut Scratch, values: &[Vec<f32>], threads: usize) -> Vec<f32> {
    let inputs: Vec<_> = values.iter().map(|values| Input::F32(values)).collect();
    both.run(&inputs, scratch, threads).swap_remove(0)
}

fn reference(both: &Both, values: &[Vec<f32>]) -> Vec<f32> {
    let inputs: Vec<_> = values.iter().map(|values| Input::F32(values)).collect();
    both.reference(&inputs).swap_remove(0)
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
        let both = compiled(sizes);
        let mut scratch = Scratch::default();
        for (index, mask) in masks(sizes).iter().enumerate() {
            let values = values(sizes, mask);
            let found = run(&both, &mut scratch, &values, 2);
            near(&found, &reference(&both, &values), &format!("{sizes:?}, mask {index}"));
            // Who computes does not matter.
            assert_eq!(run(&both, &mut Scratch::default(), &values, 1), found);
        }
    }
}

#[test]
fn hidden_cache_rows_may_hold_anything() {
    for sizes @ [g, _, n, c, d] in SIZES {
        let both = compiled(sizes);
        for mask in masks(sizes) {
            let mut values = values(sizes, &mask);
            let clean = run(&both, &mut Scratch::default(), &values, 2);
            let width = c + n;
            let hidden = |at: usize| mask.chunks(width).all(|row| row[at] == MASK_VALUE);
            for at in (0..c).filter(|at| hidden(*at)) {
                for head in 0..g {
                    let row = (head * c + at) * d..(head * c + at + 1) * d;
                    values[3][row.clone()].fill(f32::NAN);
                    values[4][row].fill(f32::INFINITY);
                }
            }
            assert_eq!(run(&both, &mut Scratch::default(), &values, 2), clean, "{sizes:?}");
        }
    }
}

/// With caches of f16 inputs that attention alone reads are f16.
#[test]
fn attention_over_f16_caches_is_that_of_the_rounded_numbers() {
    for sizes @ [_, _, n, c, d] in SIZES {
        let both = Both::new(&graph(sizes, false, false), Caches::F16);
        let types = |all: &[TensorInfo]| -> Vec<_> {
            all.iter().filter(|t| t.dtype == DType::F16).map(|t| t.name.clone()).collect()
        };
        assert_eq!(types(&both.program.inputs), ["past_k", "past_v"]);
        for (index, mask) in masks(sizes).iter().enumerate() {
            let mut values = values(sizes, mask);
            let past: Vec<Vec<u16>> = values[3..5]
                .iter_mut()
                .map(|cache| {
                    let halves: Vec<_> = cache.iter().map(|x| f16::from_f32(*x)).collect();
                    cache.iter_mut().zip(&halves).for_each(|(x, half)| *x = half.to_f32());
                    // What is hidden may be anything.
                    let hidden = |at: usize| mask.chunks(c + n).all(|row| row[at] == MASK_VALUE);
                    let bits = halves.iter().enumerate();
                    bits.map(|(at, x)| if hidden(at / d % c) { u16::MAX } else { x.to_bits() })
                        .collect()
                })
                .collect();
            let mut inputs: Vec<_> = values.iter().map(|values| Input::F32(values)).collect();
            (inputs[3], inputs[4]) = (Input::F16(&past[0]), Input::F16(&past[1]));
            let found = both.run(&inputs, &mut Scratch::default(), 2).swap_remove(0);
            // The tokens' own keys and values count as later tokens will read them.
            for own in &mut values[1..3] {
                own.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            }
            near(&found, &reference(&both, &values), &format!("{sizes:?}, mask {index}"));
        }
        // Here the keys are an output, too.
        let both = Both::new(&graph(sizes, false, true), Caches::F16);
        assert_eq!(types(&both.program.inputs), ["past_v"]);
    }
}

#[test]
fn scores_without_a_finite_largest_are_as_those_of_rten() {
    let sizes @ [_, _, n, c, _] = [2, 2, 3, 70, 16];
    let both = compiled(sizes);
    let width = c + n;
    for (value, added) in [
        // Nothing is shown, by numbers and by −∞; a position adds no number; all add the same.
        (MASK_VALUE, MASK_VALUE),
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
        (0.0, f32::NAN),
        (0.0, f32::NEG_INFINITY),
        (-5_000.0, -5_000.0),
    ] {
        let mut mask = vec![0.0; n * width];
        mask[width..2 * width].fill(value);
        mask[width + 7] = added;
        let values = values(sizes, &mask);
        let found = run(&both, &mut Scratch::default(), &values, 2);
        near(&found, &reference(&both, &values), &format!("{value}, {added}"));
    }
    // A key that is shown and holds no number reaches every token that sees it.
    let mut values = values(sizes, &vec![0.0; n * width]);
    values[3][5] = f32::NAN;
    let found = run(&both, &mut Scratch::default(), &values, 2);
    near(&found, &reference(&both, &values), "a key of NaN");
}

#[test]
fn memory_of_attention_does_not_grow_with_the_context() {
    let bytes = |sizes: Sizes| {
        let mut scratch = Scratch::default();
        let both = compiled(sizes);
        run(&both, &mut scratch, &values(sizes, &mask(sizes, |_, at| at < 10)), 1);
        scratch.buffers.iter().map(Vec::len).sum::<usize>() + scratch.attention.sums.len()
    };
    assert_eq!(bytes([2, 2, 20, 100, 16]), bytes([2, 2, 20, 5000, 16]));
}

/// Softmax attention of one head's query in f64, over rows of keys and values that it sees.
fn exact(q: &[f32], keys: &[Vec<f64>], values: &[Vec<f64>], mask: &[f32]) -> Vec<f64> {
    let dot = |key: &Vec<f64>| q.iter().zip(key).map(|(a, b)| f64::from(*a) * b).sum::<f64>();
    let scores: Vec<_> = keys.iter().zip(mask).map(|(k, m)| dot(k) + f64::from(*m)).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<_> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let column = |at: usize| weights.iter().zip(values).map(|(w, v)| w * v[at]).sum::<f64>() / sum;
    (0..q.len()).map(column).collect()
}

#[test]
fn attention_over_int8_caches_is_that_of_their_values() {
    for sizes @ [g, r, n, c, d] in SIZES {
        let both = compiled_over(sizes, true);
        let bytes = |seed: usize| -> Vec<i8> {
            (0..g * c * d)
                .map(|at| ((at * 37 + seed) % 255) as i16 - 127)
                .map(|q| q as i8)
                .collect()
        };
        let past = [bytes(3), bytes(91)];
        let scale = |seed| numbers(g * c, seed).iter().map(|x| x.abs() + 0.1).collect();
        let scales: [Vec<f32>; 2] = [11, 12].map(scale);
        for (index, mask) in masks(sizes).iter().enumerate() {
            let values = values(sizes, mask);
            let mut inputs: Vec<_> = values.iter().map(|values| Input::F32(values)).collect();
            (inputs[3], inputs[4]) = (Input::I8(&past[0]), Input::I8(&past[1]));
            inputs.extend(scales.iter().map(|scales| Input::F32(scales)));
            let found = both.run(&inputs, &mut Scratch::default(), 2).swap_remove(0);
            assert_eq!(both.run(&inputs, &mut Scratch::default(), 1).swap_remove(0), found);
            for (row, found) in found.chunks(d).enumerate() {
                let (head, token) = (row / (r * n), row % n);
                let rows = |own: &[f32], cache: usize| -> Vec<Vec<f64>> {
                    let old = (head * c..(head + 1) * c).map(|at| {
                        let scale = f64::from(scales[cache][at]) * f64::from(INT8_STEP);
                        past[cache][at * d..][..d].iter().map(|q| f64::from(*q) * scale).collect()
                    });
                    let own = own[head * n * d..][..n * d].chunks(d);
                    old.chain(own.map(|row| row.iter().map(|x| f64::from(*x)).collect())).collect()
                };
                let (keys, held) = (rows(&values[1], 0), rows(&values[2], 1));
                let mask = &mask[token * (c + n)..][..c + n];
                let expected = exact(&values[0][row * d..][..d], &keys, &held, mask);
                let size = expected.iter().fold(0f64, |most, y| most.max(y.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    let near = (f64::from(*found) - expected).abs() <= 1e-5 * size;
                    assert!(near, "{sizes:?}, mask {index}, row {row}: {found}, not {expected}");
                }
            }
        }
    }
}
