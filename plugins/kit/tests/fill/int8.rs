//! Caches of int8, whose rows are quantized when they are written.

use std::sync::{Arc, Mutex};

use qhx_kit::state::StateCarrier;
use qhx_op::harness::{OpHarness, graph, tensor};
use qhx_op::{DType, GraphId, Host, Quantization, Result, TensorInfo};

use crate::probe::{opened, probe};

/// Blocks, positions and values of a row.
const BLOCKS: usize = 2;
const CAPACITY: usize = 6;
const DIM: usize = 5;

/// Tensors that a graph declares: past, scale, new. On the NPU if `npu`, otherwise on the CPU.
fn tensors(npu: bool) -> [TensorInfo; 3] {
    let (past, float) = if npu { (DType::UFixed8, DType::F16) } else { (DType::I8, DType::F32) };
    let mut past = tensor("past_k", past, [BLOCKS, CAPACITY, DIM]);
    if npu {
        past.quantization = Quantization::PerTensor { scale: 1.0 / 128.0, offset: -128 };
    }
    let scale = tensor("scale_k", float, [BLOCKS, 1, CAPACITY]);
    [past, scale, tensor("new_k", float, [BLOCKS, 1, DIM])]
}

/// The new row of a step in a block: nothing, hardly anything, and much.
fn row(step: usize, block: usize) -> Vec<f32> {
    let size = [0.0, 0.003, 1.0, 40.0][(step + block) % 4];
    (0..DIM).map(|at| size * (((step * 7 + at * 3 + block) % 11) as f32 - 5.0)).collect()
}

/// Values that graphs read: those of each position in each block.
type Values = Vec<Vec<Vec<f32>>>;

fn values(bytes: &[u8], scales: &[f32], npu: bool) -> Values {
    let zero = if npu { 128 } else { 0 };
    let value = |byte: &u8, scale: f32| f32::from((byte ^ zero).cast_signed()) / 128.0 * scale;
    let blocks = bytes.chunks(CAPACITY * DIM).zip(scales.chunks(CAPACITY));
    let rows = |(rows, scales): (&[u8], &[f32])| {
        let rows = rows.chunks(DIM).zip(scales);
        rows.map(|(row, scale)| row.iter().map(|byte| value(byte, *scale)).collect()).collect()
    };
    blocks.map(rows).collect()
}

/// The positions hold the rows of these steps.
#[track_caller]
fn holds(found: &Values, steps: &[usize]) {
    for (block, rows) in found.iter().enumerate() {
        for (&step, found) in steps.iter().zip(rows) {
            let expected = row(step, block);
            let most = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                // Half a step, and what f16 rounds.
                let near = (found - expected).abs() <= most * (0.5 / 127.0 + 1e-3);
                assert!(near, "block {block}, step {step}: {found}, not {expected}");
            }
        }
    }
}

/// A state, and what its graph has read.
struct Cached {
    state: StateCarrier,
    graph: GraphId,
    /// The number of the step whose row comes next, and what was read.
    seen: Arc<Mutex<(usize, Values)>>,
}

impl Cached {
    /// Takes a step; returns what its graph has read.
    fn step(&mut self, host: &mut Host, number: usize) -> Values {
        self.seen.lock().unwrap().0 = number;
        host.execute(self.graph).unwrap();
        self.state.commit(host, 0, 1).unwrap();
        self.seen.lock().unwrap().1.clone()
    }
}

/// Runs `go` over a state whose cache is a ring where `window` is one.
fn with_cache(
    npu: bool,
    window: Option<usize>,
    go: impl FnOnce(&mut Host, Cached) + Send + 'static,
) {
    let seen = Arc::new(Mutex::new((0, Values::new())));
    let shared = Arc::clone(&seen);
    let [past, scale, new] = tensors(npu);
    let harness = OpHarness::new().graph(graph("a", [past, scale], [new])).script(move |step| {
        let mut seen = shared.lock().unwrap();
        seen.1 = values(step.input_bytes("past_k")?, &step.input("scale_k")?, npu);
        let rows: Vec<f32> = (0..BLOCKS).flat_map(|block| row(seen.0, block)).collect();
        step.set("new_k", &rows)
    });
    let mut op = probe(harness, move |host| {
        let graph = host.require_graph("/graphs", "a")?;
        let state = StateCarrier::with_rings(host, &[&[graph]], |_| window)?;
        state.check_complete(host, 0)?;
        assert_eq!(state.roles().collect::<Vec<_>>(), ["k"]);
        let float = if npu { 2 } else { 4 };
        assert_eq!(state.byte_len(host), BLOCKS * CAPACITY * (DIM + float));
        let mut once = Some((go, Cached { state, graph, seen }));
        Ok(Box::new(move |host, _| {
            let (go, cached) = once.take().unwrap();
            go(host, cached);
            Ok(())
        }))
    })
    .unwrap();
    op.decode(0).unwrap();
}

#[test]
fn rows_are_quantized_and_go_back_with_their_scales() {
    for npu in [false, true] {
        with_cache(npu, None, |host, mut cached| {
            (0..3).for_each(|number| drop(cached.step(host, number)));
            let early = cached.state.snapshot(host);
            holds(&cached.step(host, 3), &[0, 1, 2]);
            cached.state.truncate(1).unwrap();
            cached.step(host, 8);
            holds(&cached.step(host, 9), &[0, 8]);
            cached.state.restore(host, early).unwrap();
            cached.step(host, 10);
            holds(&cached.step(host, 11), &[0, 1, 2, 10]);
        });
    }
}

#[test]
fn a_ring_of_int8_goes_round() {
    with_cache(true, Some(CAPACITY), |host, mut cached| {
        (0..CAPACITY + 2).for_each(|number| drop(cached.step(host, number)));
        holds(&cached.step(host, 8), &[6, 7, 2, 3, 4, 5]);
    });
}

#[test]
fn a_state_of_int8_goes_to_the_other_backend() {
    for npu in [false, true] {
        let exported = Arc::new(Mutex::new(Vec::new()));
        let state = Arc::clone(&exported);
        with_cache(npu, None, move |host, mut cached| {
            (0..3).for_each(|number| drop(cached.step(host, number)));
            *state.lock().unwrap() = cached.state.export(host).unwrap();
        });
        with_cache(!npu, None, move |host, mut cached| {
            cached.step(host, 7);
            cached.state.import(host, 3, &exported.lock().unwrap()).unwrap();
            holds(&cached.step(host, 8), &[0, 1, 2]);
        });
    }
}

#[test]
fn a_state_of_floats_is_no_state_of_int8() {
    let exported = Arc::new(Mutex::new(Vec::new()));
    let state = Arc::clone(&exported);
    let shape = [BLOCKS, CAPACITY, DIM];
    let inputs = [tensor("past_k", DType::F32, shape)];
    let new = tensor("new_k", DType::F32, [BLOCKS, 1, DIM]);
    let harness = OpHarness::new().graph(graph("a", inputs, [new]));
    let floats = opened(harness, move |host| {
        let graph = host.require_graph("/graphs", "a")?;
        *state.lock().unwrap() = StateCarrier::new(host, &[&[graph]])?.export(host)?;
        Ok(())
    });
    floats.unwrap();
    with_cache(false, None, move |host, mut cached| {
        let error = cached.state.import(host, 0, &exported.lock().unwrap()).unwrap_err();
        let expected = "its cache past_k is f32, expected i8; caches of int8 and of floats do not become each other";
        assert!(error.message().contains(expected), "{error}");
    });
}

/// Error of opening a state over a graph of these tensors.
fn refused(inputs: Vec<TensorInfo>, new: TensorInfo) -> String {
    let mut graph = graph("a", [], [new]);
    graph.inputs = inputs;
    let open = |host: &mut Host| -> Result<()> {
        let graph = host.require_graph("/graphs", "a")?;
        StateCarrier::new(host, &[&[graph]]).map(drop)
    };
    opened(OpHarness::new().graph(graph), open).unwrap_err().message().to_owned()
}

#[test]
fn scales_that_do_not_fit_their_cache_are_named() {
    let [past, scale, new] = tensors(false);
    let expected =
        "expected an input scale_k of f16 or f32 with 2 by 6 scales, one for each row of past_k";
    let message = refused(vec![past.clone()], new.clone());
    assert!(message.contains("past_k i8[2, 6, 5] has no scales"), "{message}");
    assert!(message.contains(expected), "{message}");
    for wrong in [
        tensor("scale_k", DType::F32, [BLOCKS, 1, CAPACITY + 1]),
        tensor("scale_k", DType::F32, [CAPACITY, BLOCKS, 1]),
        tensor("scale_k", DType::F32, [BLOCKS, 2, CAPACITY]),
        tensor("scale_k", DType::I32, [BLOCKS, 1, CAPACITY]),
    ] {
        let message = refused(vec![past.clone(), wrong.clone()], new.clone());
        assert!(message.contains(&format!("found {wrong}; {expected}")), "{message}");
    }
    let values = tensor("past_k", DType::F32, [BLOCKS, CAPACITY, DIM]);
    let message = refused(vec![values, scale.clone()], new.clone());
    assert!(
        message.contains("scale_k f32[2, 1, 6] has scales of rows, but the cache"),
        "{message}"
    );
    let [mut past, scale, _] = tensors(true);
    past.quantization = Quantization::PerTensor { scale: 0.5, offset: -128 };
    let message = refused(vec![past, scale], new.clone());
    assert!(message.contains("has the encoding PerTensor { scale: 0.5"), "{message}");
    let rows = tensor("new_k", DType::I32, [BLOCKS, 1, DIM]);
    let [past, scale, _] = tensors(false);
    let message = refused(vec![past, scale], rows);
    assert!(message.contains("the dtypes differ"), "{message}");
}
