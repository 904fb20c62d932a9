//! Ops where f16 or the library would lose or spoil values: exponentials, gates, masks.

use half::f16;
use qhx_checkpoint::Checkpoint;
use qhx_forge::registry::recipe;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, UnaryOp};
use qhx_graph::weight::Storage;
use qhx_qnn::Target;
use qhx_tiers::tier;

use crate::common::{copy, edit_tensor, recipe_options};
use crate::support::{Compiled, errors, inputs, numbers, reference, weight};
use crate::tier::opened;

/// The library's own exponential returns NaN for −89, −104 and 200, and for all that overflows f16.
#[tier(qnn)]
fn exponentials_are_finite_and_right_for_every_argument() {
    const ARGUMENTS: [f32; 18] = [
        -60_000.0, -200.0, -104.0, -89.0, -88.0, -40.0, -17.5, -10.0, -7.0, -3.5, -1.0, 0.0, 1.0,
        11.0, 12.0, 40.0, 200.0, 60_000.0,
    ];
    /// The largest f16 whose exponential f16 can hold.
    const LARGEST: f64 = 11.0859375;
    /// Half the distance between two small values of f16.
    const STEP: f64 = 6e-8;
    /// The value, and how far from it a result may be.
    type Function<'f> = &'f dyn Fn(f64) -> (f64, f64);
    let library = opened();
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    // Small values count as large ones do: a rate multiplies them, and their rounding.
    let lost = |x: f64| 2e-3 * softplus(x) + STEP;
    let plain = |expected: f64| 2e-3 * expected.max(0.1);
    let decay = |x: f64, rate: f64| {
        let expected = (-rate * softplus(x)).exp();
        (expected, plain(expected) + rate * lost(x) * expected)
    };
    let functions: [(&str, Function<'_>); 4] = [
        ("exp", &|x| (x.min(LARGEST).exp(), plain(x.min(LARGEST).exp()))),
        ("softplus", &|x| (softplus(x), lost(x))),
        ("decay", &|x| decay(x, 30.0)),
        // The product overflows f16.
        ("fast_decay", &|x| decay(x, 9000.0)),
    ];
    for (elem, target) in
        [Elem::Activation, Elem::F32].into_iter().flat_map(|e| Target::ALL.map(|t| (e, t)))
    {
        let mut b = GraphBuilder::new("exponentials");
        let x = b.input("x", elem, &[1, ARGUMENTS.len()]).unwrap();
        let exp = b.unary(UnaryOp::Exp, x).unwrap();
        b.output("exp", exp).unwrap();
        let softplus = b.softplus(x).unwrap();
        b.output("softplus", softplus).unwrap();
        for (name, rate) in [("decay", -30.0), ("fast_decay", -9000.0)] {
            let log = b.scale(softplus, rate).unwrap();
            let decay = b.unary(UnaryOp::Exp, log).unwrap();
            b.output(name, decay).unwrap();
        }
        let graph = b.finish().unwrap();
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        for (found, (name, function)) in
            compiled.run(0, &[ARGUMENTS.to_vec()]).iter().zip(functions)
        {
            for (x, found) in ARGUMENTS.into_iter().zip(found) {
                assert!(found.is_finite(), "{elem} {target}: {name}({x}) is {found}");
                let (expected, allowed) = function(f64::from(x));
                let close = (f64::from(*found) - expected).abs() <= allowed;
                assert!(close, "{elem} {target}: {name}({x}) is {found}, expected {expected}");
            }
        }
    }
}

/// Both forms of the GELU at some arguments, by `torch.nn.functional.gelu`.
const GELUS: [(f32, f32, f32); 5] = [
    (-3.0, -0.004_049_694, -0.003_637_392),
    (-1.0, -0.158_655_25, -0.158_808),
    (0.5, 0.345_731_23, 0.345_714),
    (1.0, 0.841_344_8, 0.841_192),
    (2.5, 2.484_475_9, 2.484_915_3),
];

/// `gelu` and `gelu_tanh` of rows `[3, width]`.
fn gelus(width: usize) -> Graph {
    let mut b = GraphBuilder::new("gelus");
    let x = b.input("x", Elem::Activation, &[3, width]).unwrap();
    let exact = b.gelu(x).unwrap();
    b.output("gelu", exact).unwrap();
    let tanh = b.gelu_tanh(x).unwrap();
    b.output("gelu_tanh", tanh).unwrap();
    b.finish().unwrap()
}

#[test]
fn reference_graphs_of_gelus_are_those_of_torch() {
    let x = GELUS.map(|(x, ..)| x).repeat(3);
    let [exact, tanh] = &reference(&gelus(GELUS.len()), &[x])[..] else { panic!("two outputs") };
    for (i, (x, gelu, gelu_tanh)) in GELUS.into_iter().enumerate() {
        assert!((exact[i] - gelu).abs() < 1e-6, "gelu({x}) is {}, expected {gelu}", exact[i]);
        let found = tanh[i];
        assert!((found - gelu_tanh).abs() < 1e-6, "gelu_tanh({x}) is {found}, not {gelu_tanh}");
    }
}

/// The library's own `Gelu` is off by 0.016 at 12, and makes 60,064 of 60,000.
#[tier(qnn)]
fn gelus_are_as_exact_as_f16() {
    const WIDTH: usize = 515;
    let library = opened();
    let graph = gelus(WIDTH);
    let mut x: Vec<f32> = (0..3 * WIDTH)
        .map(|i| f16::from_f32(i as f32 / (3 * WIDTH) as f32 * 24.0 - 12.0).to_f32())
        .collect();
    x[..8].copy_from_slice(&[-60_000.0, -2000.0, -300.0, -0.0, 0.0, 300.0, 2000.0, 60_000.0]);
    let inputs = [x];
    let expected = reference(&graph, &inputs);
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[std::slice::from_ref(&graph)]);
        let found = compiled.run(0, &inputs);
        for ((name, found), expected) in ["gelu", "gelu_tanh"].iter().zip(&found).zip(&expected) {
            for ((x, found), expected) in inputs[0].iter().zip(found).zip(expected) {
                assert!(found.is_finite(), "{target}: {name}({x}) is {found}");
                let allowed = 1e-3 + expected.abs() / 1024.0;
                let close = (found - expected).abs() <= allowed;
                assert!(close, "{target}: {name}({x}) is {found}, expected {expected}");
            }
        }
    }
}

/// A state that a token wipes out: `exp(A_log) · softplus(…)` is far above 88.
#[tier(qnn)]
fn a_state_that_decays_at_once_stays_finite() {
    let library = opened();
    let dir = copy("qwen35-tied");
    for layer in [0, 1, 3] {
        edit_tensor(dir.path(), &format!("layers.{layer}.linear_attn.A_log"), |dtype, bytes| {
            assert_eq!(dtype, "F32");
            let values = [4.6f32, 4.8, 5.0, 5.2, 5.4, 9.0].map(f32::to_le_bytes).concat();
            bytes[..values.len()].copy_from_slice(&values);
        });
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let recipe = recipe(&checkpoint, &recipe_options(64, &[])).unwrap();
    let graph = &recipe.contexts[0].graphs[0];
    let inputs = inputs(graph);
    for target in Target::ALL {
        let found = errors(&library, target, graph, &inputs);
        assert!(found.iter().all(|error| *error < 2e-2), "{target}: {found:?}");
    }
}

/// Rows of a cache that are hidden hold anything, so that their scores can be anything.
#[tier(qnn)]
fn hidden_scores_have_no_weight_whatever_they_are() {
    const WIDTH: usize = 65;
    let library = opened();
    let mut b = GraphBuilder::new("attend");
    let scores = b.input("scores", Elem::Activation, &[4, WIDTH]).unwrap();
    let mask = b.input("cmask", Elem::Activation, &[1, WIDTH]).unwrap();
    let sum = b.add(scores, mask).unwrap();
    let weights = b.softmax(sum).unwrap();
    b.output("weights", weights).unwrap();
    let graph = b.finish().unwrap();
    let mut compiled = Compiled::new(&library, Target::V81, &[std::slice::from_ref(&graph)]);
    let hidden = |i: usize| (10..WIDTH - 1).contains(&(i % WIDTH));
    let masks = (0..WIDTH).map(|i| if hidden(i) { qhx_types::MASK_VALUE } else { 0.0 }).collect();
    let mut inputs = [Vec::new(), masks];
    for score in [20_000.0, 100.0, 0.0, -20.0, -100.0, -1000.0, -30_000.0] {
        inputs[0] = numbers(30, 4 * WIDTH);
        (0..4 * WIDTH).filter(|&i| hidden(i)).for_each(|i| inputs[0][i] = score);
        let found = compiled.run(0, &inputs).remove(0);
        for (row, weights) in found.chunks(WIDTH).enumerate() {
            let sum: f32 = weights.iter().sum();
            assert!((sum - 1.0).abs() < 5e-3, "hidden scores of {score}, row {row}: sum {sum}");
            let leaked = weights.iter().enumerate().filter(|(i, w)| hidden(*i) && **w != 0.0);
            assert_eq!(leaked.count(), 0, "hidden scores of {score}, row {row}");
        }
    }
}

/// The library's `Sigmoid` is off by 0.4 % where it follows a matmul.
#[tier(qnn)]
fn a_sigmoid_after_a_matmul_is_as_exact_as_f16() {
    let library = opened();
    let mut b = GraphBuilder::new("gates");
    let x = b.input("x", Elem::Activation, &[1, 1024]).unwrap();
    let gate = b.linear("gate", x, weight(1, [1024, 1024], Storage::Float), None).unwrap();
    let sigmoid = b.unary(UnaryOp::Sigmoid, gate).unwrap();
    let gate = b.linear("swish", x, weight(3, [1024, 1024], Storage::Float), None).unwrap();
    let silu = b.silu(gate).unwrap();
    b.output("sigmoid", sigmoid).unwrap();
    b.output("silu", silu).unwrap();
    let graph = b.finish().unwrap();
    let inputs = [numbers(2, 1024).iter().map(|v| v * 0.3).collect::<Vec<_>>()];
    for target in Target::ALL {
        let found = errors(&library, target, &graph, &inputs);
        assert!(found.iter().all(|error| *error < 1.2e-3), "{target}: {found:?}");
    }
}
