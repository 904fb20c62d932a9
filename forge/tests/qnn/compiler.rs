//! Compiler tests: weights it cannot take, several graphs, and when it is stopped.

use std::sync::Arc;

use qhx_base::ErrorKind;
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::recipe::Precision;
use qhx_forge::{Progress, Silent};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::quantize::{Bits, QuantizedForm};
use qhx_graph::weight::{Range, Storage, Weight, held};
use qhx_qnn::Target;
use qhx_tiers::tier;

use crate::ops::all_ops;
use crate::support::{Compiled, Stored, errors, numbers, reference, weight};
use crate::tier::opened;

#[tier(qnn)]
fn graphs_of_one_context_keep_their_own_weights() {
    let library = opened();
    let graph = |name: &str, rows: usize, seed: u32| {
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, 16]).unwrap();
        let y = b.linear("lin", x, weight(seed, [12, 16], Storage::Float), None).unwrap();
        b.output("y", y).unwrap();
        b.finish().unwrap()
    };
    let graphs = [graph("prefill", 5, 20), graph("decode", 1, 21)];
    let mut compiled = Compiled::new(&library, Target::V81, &[&graphs]);
    for (id, graph) in (0..).zip(&graphs) {
        assert_eq!(compiled.info(id).name, graph.name());
        let x = vec![numbers(22, compiled.info(id).inputs[0].elements())];
        let error = crate::support::error(&compiled.run(id, &x)[0], &reference(graph, &x)[0]);
        assert!(error < 2e-3, "{}: {error}", graph.name());
    }
}

/// The context `key` of these graphs is refused with all words, and no binary is left.
#[track_caller]
fn refused(key: &str, graphs: &[Graph], kind: ErrorKind, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("refused.bin");
    let compiler = QnnCompiler::new(opened(), Target::V81);
    let error = compiler.compile(key, graphs, false, &out, &mut Silent).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(words.iter().all(|words| error.message().contains(words)), "{words:?}: {error}");
    assert!(!out.exists());
}

#[tier(qnn)]
fn two_graphs_of_one_name_in_a_context_are_refused() {
    let words = "context \"twice\": two graphs are called \"ops\"";
    refused("twice", &[all_ops(), all_ops()], ErrorKind::Graph, &[words]);
}

/// The NPU computes in f16, also with the values of int8 weights.
#[tier(qnn)]
fn weights_beyond_f16_are_refused_in_every_form() {
    let four = Storage::Blocks(QuantizedForm::symmetric(Bits::Four, 32));
    for storage in [Storage::Float, Storage::Int8, four] {
        let mut values = numbers(7, 40 * 64);
        (values[130], values[2000]) = (70_000.0, -1e9);
        let weight = Weight::new(held("fixed.weight", [40, 64], values), storage);
        let mut b = GraphBuilder::new("large");
        let x = b.input("x", Elem::Activation, &[1, 64]).unwrap();
        let y = b.linear("lin", x, weight, None).unwrap();
        b.output("y", y).unwrap();
        let element = "element 130 is 70000, and f16 holds at most 65504; 2 of 2560";
        let words = ["tensor fixed.weight: ", element, "1000000000"];
        refused("large", &[b.finish().unwrap()], ErrorKind::Artifact, &words);
    }
}

#[tier(qnn)]
fn int8_weights_with_an_odd_number_of_inputs_are_refused() {
    let mut b = GraphBuilder::new("odd");
    let x = b.input("x", Elem::Activation, &[1, 66]).unwrap();
    let y = b.linear("lin", x, weight(30, [40, 66], Storage::Int8), None).unwrap();
    b.output("y", y).unwrap();
    let words = ["fixed.weight has 66 inputs"];
    refused("odd", &[b.finish().unwrap()], ErrorKind::Graph, &words);
}

/// Weights that the forge quantizes and weights that a checkpoint holds, each with the same values on both sides.
#[tier(qnn)]
fn weights_in_blocks_agree_with_the_reference_graph() {
    let library = opened();
    let form = |bits, block, offsets| QuantizedForm { bits, block, offsets };
    for (target, rows) in [(Target::V81, 1), (Target::V79, 3)] {
        let mut b = GraphBuilder::new("blocks");
        let wide = b.input("x", Elem::Activation, &[rows, 64]).unwrap();
        let odd = b.input("z", Elem::Activation, &[rows, 40]).unwrap();
        let mut outputs = Vec::new();
        let own =
            |shape| Precision::W4A16.weight(weight(5, shape, Storage::Float).source().clone());
        outputs.push(b.linear("own", wide, own([36, 64]), Some(numbers(4, 36))).unwrap());
        outputs.push(b.linear("rows", odd, own([20, 40]), None).unwrap());
        for (index, form) in [
            form(Bits::Four, 32, true),
            form(Bits::Four, 64, true),
            form(Bits::Eight, 32, false),
            form(Bits::Eight, 16, true),
        ]
        .into_iter()
        .enumerate()
        {
            let weight =
                Precision::W4A16.weight(Arc::new(Stored { shape: [36, 64], form: Some(form) }));
            assert_eq!(weight.storage(), Storage::Blocks(form));
            let bias = (index % 2 == 0).then(|| numbers(6, 36));
            outputs.push(b.linear(&format!("stored_{index}"), wide, weight, bias).unwrap());
        }
        for (index, &id) in outputs.iter().enumerate() {
            b.output(&format!("out_{index}"), id).unwrap();
        }
        let graph = b.finish().unwrap();
        let inputs = [numbers(10, rows * 64), numbers(11, rows * 40)];
        let found = errors(&library, target, &graph, &inputs);
        assert!(found.iter().all(|error| *error < 2e-3), "{target}: {found:?}");
    }
}

/// One row, few and many, with and without a bias; two weights share what they are multiplied with.
#[tier(qnn)]
fn products_of_16_bit_integers_agree_with_the_reference_graph() {
    let library = opened();
    for (target, rows) in [(Target::V79, 1), (Target::V73, 3), (Target::V81, 20)] {
        let mut b = GraphBuilder::new("integers");
        let x = b.input("x", Elem::Activation, &[rows, 128]).unwrap();
        let range = Range { inputs: 0.5, outputs: 8.0 };
        let own = |seed| {
            let source = weight(seed, [192, 128], Storage::Float).source().clone();
            Precision::W4A16.weight(source).with_range(range)
        };
        let y = b.linear("biased", x, own(5), Some(numbers(4, 192))).unwrap();
        let z = b.linear("plain", x, own(6), None).unwrap();
        b.output("out_0", y).unwrap();
        b.output("out_1", z).unwrap();
        let mut graph = b.finish().unwrap();
        let inputs = [numbers(10, rows * 128)];
        let found = errors(&library, target, &graph, &inputs);
        assert!(found.iter().all(|error| *error < 2e-3), "{target}: {found:?}");
        // What is beyond the range is clamped: the integers are these.
        let small = Range { inputs: 0.05, outputs: 8.0 };
        graph.store(|weight| Some(weight.clone().with_range(small)));
        let found = errors(&library, target, &graph, &inputs);
        assert!(found.iter().all(|error| *error > 0.1), "{target}: {found:?}");
    }
}

#[derive(Default)]
struct Cancel {
    total: u64,
    done: Vec<u64>,
    after: usize,
}

impl Progress for Cancel {
    fn stage(&mut self, _what: &str, total: u64) {
        self.total = total;
    }

    fn advance(&mut self, done: u64) {
        self.done.push(done);
    }

    fn note(&mut self, _message: &str) {}

    fn cancelled(&self) -> bool {
        self.done.len() > self.after
    }
}

#[tier(qnn)]
fn a_cancelled_compilation_leaves_nothing() {
    let library = opened();
    let compiler = QnnCompiler::new(library, Target::V81);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("ops.bin");
    let mut progress = Cancel { after: usize::MAX, ..Cancel::default() };
    let graphs = [all_ops()];
    compiler.compile("ops", &graphs, false, &out, &mut progress).unwrap();
    assert_eq!(progress.done.last(), Some(&progress.total));
    assert_eq!(progress.total, graphs[0].weight_bytes());
    std::fs::remove_file(&out).unwrap();
    let mut progress = Cancel { after: 1, ..Cancel::default() };
    let error = compiler.compile("ops", &graphs, false, &out, &mut progress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(progress.done.len(), 2);
    assert!(!out.exists());
}
