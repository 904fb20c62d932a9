//! Parts of the kit on a scripted graph: caches that a prompt's graph fills without reading them, and
//! buffers filled by all threads.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use qhx_kit::OneOrMany;
use qhx_kit::state::StateCarrier;
use qhx_op::harness::{OpHarness, graph, tensor};
use qhx_op::{
    BufferId, DType, ErrorCode, Generator, GraphId, Host, Op, OpDescription, OpenInfo, Port,
    Result, Segment, View,
};
use serde_json::{Value, json};

struct TinyModel {
    graphs: [GraphId; 2],
    state: StateCarrier,
    source: BufferId,
    filled: [BufferId; 2],
}

const PIECE: usize = 8;

impl Op for TinyModel {
    fn describe() -> OpDescription {
        OpDescription { name: "tiny".into(), ..OpDescription::default() }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs =
            [host.require_graph("/step", "step")?, host.require_graph("/prompt", "prompt")?];
        let state = StateCarrier::new(host, &[&graphs[..1], &graphs[1..]])?;
        state.check_complete(host, 1)?;
        let logits = Port::Output(host.graph(graphs[0]).require_output("logits")?);
        host.allocate_for(graphs[0], logits)?;
        let source = host.allocate(32)?;
        let filled = [host.allocate(32)?, host.allocate(20)?];
        Ok(Self { graphs, state, source, filled })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { vocab: 13, max_ctx: 4, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for TinyModel {
    qhx_op::inner_generator!(state);

    /// Two tokens, of which the graph gives the cache's rows.
    fn prefill(&mut self, host: &mut Host, _: &[Segment<'_>]) -> Result<View> {
        host.execute(self.graphs[1])?;
        self.state.commit(host, 1, 2)?;
        self.decode(host, 0)
    }

    fn decode(&mut self, host: &mut Host, _: u32) -> Result<View> {
        host.execute(self.graphs[0])?;
        self.state.commit(host, 0, 1)?;
        host.f32s_mut(self.source).copy_from_slice(&[0., 1., 2., 3., 4., 5., 6., 7.]);
        // Advice changes nothing, whatever it names.
        for range in [0..32, 5..9, 31..usize::MAX, usize::MAX..usize::MAX, 0..0] {
            host.read_ahead(self.source, range);
        }
        host.parallel_fill(
            [self.source],
            &self.filled,
            PIECE,
            |[source], target, first, bytes| {
                let source: &[f32] = bytemuck::cast_slice(source);
                let out: &mut [f32] = bytemuck::cast_slice_mut(bytes);
                for (i, value) in out.iter_mut().enumerate() {
                    *value = source[first / 4 + i] + 10.0 * (target + 1) as f32;
                }
            },
        )?;
        let all: Vec<f32> = self.filled.iter().flat_map(|b| host.f32s(*b)).copied().collect();
        let logits = host.allocate(13 * 4)?;
        host.f32s_mut(logits).copy_from_slice(&all);
        Ok(View { buffer: logits, dtype: DType::F32, offset: 0, len: 13 })
    }
}

fn harness(rows: [usize; 3]) -> OpHarness {
    OpHarness::new()
        .graph(graph(
            "step",
            [tensor("past_k", DType::F32, [2, 4, 3])],
            [tensor("new_k", DType::F32, [2, 1, 3]), tensor("logits", DType::F32, [1, 13])],
        ))
        .graph(graph("prompt", [], [tensor("new_k", DType::F32, rows)]))
}

#[test]
fn a_graph_that_does_not_read_the_cache_fills_it() {
    let harness = harness([2, 2, 3]).script(|step| {
        if step.graph() == "prompt" {
            return step.set("new_k", &[1., 1., 1., 2., 2., 2., 3., 3., 3., 4., 4., 4.]);
        }
        let past = step.input("past_k")?;
        let mut expected = [0f32; 24];
        for (index, value) in [(0, 1.), (1, 2.), (4, 3.), (5, 4.)] {
            expected[3 * index..3 * index + 3].fill(value);
        }
        assert_eq!(past, expected);
        step.set("new_k", &[9.; 6])
    });
    let mut op = harness.open::<TinyModel>().unwrap();
    let filled = op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap();
    let expected = [10., 11., 12., 13., 14., 15., 16., 17., 20., 21., 22., 23., 24.];
    assert_eq!(filled, expected);
    assert_eq!(op.position(), 3);
}

#[test]
fn rows_that_do_not_fit_the_cache_are_refused() {
    for rows in [[2, 5, 3], [3, 2, 3], [2, 2, 4]] {
        let error = harness(rows).open::<TinyModel>().unwrap_err().to_string();
        assert!(error.contains("past_k") && error.contains("\"prompt\""), "{error}");
    }
}

/// Rows that a test puts into the cache of [`counting`], and the cache's content at the last step.
#[derive(Default, Clone)]
struct Rows {
    new: Rc<Cell<f32>>,
    past: Rc<RefCell<Vec<f32>>>,
}

/// A tiny model whose graph `step` gives rows that end with `Rows::new`.
fn counting() -> (OpHarness, Rows) {
    let rows = Rows::default();
    let shared = rows.clone();
    let harness = harness([2, 2, 3]).script(move |step| {
        if step.graph() == "step" {
            *shared.past.borrow_mut() = step.input("past_k")?;
            step.set("new_k", &[1., 1., 1., 1., 1., shared.new.get()])?;
        }
        Ok(())
    });
    (harness, rows)
}

/// The cache with the given last values of rows.
fn cache(rows: &[f32]) -> Vec<f32> {
    let mut all = vec![0.0; 24];
    for (row, value) in rows.iter().enumerate() {
        all[3 * row..3 * row + 3].fill(1.0);
        all[12 + 3 * row..12 + 3 * row + 3].copy_from_slice(&[1.0, 1.0, *value]);
    }
    all
}

/// The first rows of both blocks.
fn visible(cache: &[f32], rows: usize) -> Vec<f32> {
    [&cache[..3 * rows], &cache[12..12 + 3 * rows]].concat()
}

#[test]
fn a_row_that_is_not_finite_stays_out_of_the_cache() {
    let (harness, Rows { new, past }) = counting();
    let mut op = harness.open::<TinyModel>().unwrap();
    op.decode(0).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        new.set(bad);
        let error = op.decode(0).unwrap_err();
        assert_eq!(error.code(), ErrorCode::EXECUTE);
        let message = error.message();
        assert!(message.contains("\"step\": output new_k f32[2, 1, 3]"), "{message}");
        assert!(message.contains("at position 1,"), "{message}");
        assert_eq!(op.position(), 1, "the step was taken");
    }
    new.set(7.0);
    op.decode(0).unwrap();
    op.decode(0).unwrap();
    assert_eq!(*past.borrow(), cache(&[0.0, 7.0]));
}

#[test]
fn a_snapshot_in_reused_memory_holds_its_own_state() {
    let (harness, Rows { new, past }) = counting();
    let mut op = harness.open::<TinyModel>().unwrap();
    let step = |op: &mut qhx_op::harness::OpenOp, value| {
        new.set(value);
        op.decode(0).unwrap();
        past.borrow().clone()
    };
    step(&mut op, 1.0);
    let first = op.snapshot().unwrap();
    step(&mut op, 2.0);
    step(&mut op, 3.0);
    let longer = op.snapshot().unwrap();
    op.drop_snapshot(longer);
    op.restore(first).unwrap();
    step(&mut op, 4.0);
    let second = op.snapshot().unwrap();
    op.restore(first).unwrap();
    assert_eq!(visible(&step(&mut op, 5.0), 1), visible(&cache(&[1.0]), 1));
    op.restore(second).unwrap();
    assert_eq!(op.position(), 2);
    assert_eq!(visible(&step(&mut op, 6.0), 2), visible(&cache(&[1.0, 4.0]), 2));
    assert!(op.restore(longer).unwrap_err().message().contains("was dropped"));
}

#[test]
fn an_exported_state_is_imported_whole_or_not_at_all() {
    let (harness, Rows { new, past }) = counting();
    let mut op = harness.open::<TinyModel>().unwrap();
    for value in [1.0, 2.0] {
        new.set(value);
        op.decode(0).unwrap();
    }
    let state = op.export_state().unwrap();

    let (harness, Rows { new, past: past_there }) = counting();
    let mut other = harness.open::<TinyModel>().unwrap();
    new.set(9.0);
    other.decode(0).unwrap();
    let description = |changes: &[(&str, &str)]| {
        let text = String::from_utf8_lossy(&state).into_owned();
        let start = text.find('{').unwrap();
        let length = usize::from(state[8]);
        let mut changed = text[start..start + length].to_owned();
        for (from, to) in changes {
            changed = changed.replacen(from, to, 1);
        }
        let mut bytes = state[..8].to_vec();
        bytes.extend_from_slice(&(changed.len() as u64).to_le_bytes());
        bytes.extend_from_slice(changed.as_bytes());
        bytes.extend_from_slice(&state[16 + length..]);
        bytes
    };
    let cut = |length: usize| state[..length].to_vec();
    let mut not_finite = state.clone();
    let end = not_finite.len();
    not_finite[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    let bad: [(&str, usize, Vec<u8>); 13] = [
        ("expected 3", 3, state.clone()),
        ("does not begin", 2, Vec::new()),
        ("cut short before", 2, cut(12)),
        ("cut short within", 2, cut(40)),
        ("cut short", 2, cut(end - 1)),
        ("1 bytes follow", 2, [&state[..], &[0]].concat()),
        ("NaN", 2, not_finite),
        (
            "has 4 rows",
            5,
            description(&[
                ("\"position\":2", "\"position\":5"),
                ("\"written\":2", "\"written\":5"),
            ]),
        ),
        ("with 1 written", 2, description(&[("\"written\":2", "\"written\":1")])),
        ("found tensor", 2, description(&[("f32", "f16")])),
        ("found tensor", 2, description(&[("[2,12]", "[2,24]")])),
        ("its images", 2, description(&[("\"images\":[]", "\"images\":[[0,9,1]]")])),
        ("its description", 2, description(&[("\"images\":[]", "\"images\":[[0]]")])),
    ];
    for (expected, position, bytes) in bad {
        let error = other.import_state(position, &bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::PROMPT, "{error}");
        assert!(error.message().contains(expected), "{expected}: {error}");
        assert_eq!(other.position(), 1, "{expected}");
    }
    other.decode(0).unwrap();
    assert_eq!(visible(&past_there.borrow(), 1), visible(&cache(&[9.0]), 1));
    other.import_state(2, &state).unwrap();
    // As graphs in another precision give it.
    let mut halves = description(&[("f32", "f16"), ("[2,12]", "[2,6]")]);
    halves.truncate(halves.len() - 4 * 12);
    for value in [[1.0; 6], [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]].concat() {
        halves.extend_from_slice(&half::f16::from_f32(value).to_ne_bytes());
    }
    let (harness, Rows { past: past_in_f32, .. }) = counting();
    let mut third = harness.open::<TinyModel>().unwrap();
    third.import_state(2, &halves).unwrap();
    for (op, past) in [(&mut op, &past), (&mut other, &past_there), (&mut third, &past_in_f32)] {
        op.decode(0).unwrap();
        assert_eq!(visible(&past.borrow(), 2), visible(&cache(&[1.0, 2.0]), 2));
        assert_eq!(op.position(), 3);
    }
}

#[test]
fn names_of_no_graph_are_errors_unless_a_context_is_left_out() {
    const VISION: &str = "/plan/params/vision";
    let open = |names: Value, contexts: Value| {
        let manifest =
            json!({"plan": {"params": {"vision": names}}, "artifacts": {"contexts": contexts}});
        OpHarness::new().graph(graph("near", [], [])).manifest(manifest).run(|host| {
            let found = host.require::<OneOrMany>(VISION)?.present(host, VISION)?;
            Ok(found.iter().map(|graph| host.graph(*graph).name.clone()).collect::<Vec<_>>())
        })
    };
    let named = json!(["near", "far"]);
    let all = json!({"test": {"bin": "a.bin"}});
    let error = open(named.clone(), all).unwrap_err().to_string();
    assert!(error.contains(VISION) && error.contains("\"far\""), "{error}");

    let optional = |entry: Value| {
        let mut contexts = json!({"test": {"bin": "a.bin"}, "other": {"optional": "vision"}});
        contexts["other"].as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        contexts
    };
    let unlisted = open(named.clone(), optional(json!({"bin": "b.bin"})));
    assert_eq!(unlisted.unwrap(), ["near"], "nothing is listed");
    let listed = open(named.clone(), optional(json!({"onnx": {"far": "b.onnx"}})));
    assert_eq!(listed.unwrap(), ["near"]);
    let none = open(json!("other/far"), optional(json!({"bin": "b", "us": {"far": 3}})));
    assert!(none.unwrap().is_empty());
    for list in [json!({"onnx": {"fare": "b.onnx"}}), json!({"onnx": "other.onnx"})] {
        let error = open(named.clone(), optional(list)).unwrap_err();
        assert!(error.message().contains("\"far\""), "{error}");
    }
}
