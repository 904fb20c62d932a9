//! Making context binaries.

use qhx_base::ErrorKind;
use qhx_qnn::compose::{CompilerValue, GraphConfig};
use qhx_qnn::{BinaryInfo, QnnOptions};
use qhx_types::quantized::{Bits, Multiples, QuantizedForm, QuantizedRef};
use qhx_types::{DType, Quantization};

use crate::*;

#[tier(qnn)]
fn constants_may_be_freed_as_soon_as_they_are_declared() {
    let library = opened();
    let mut context = Composer::new(&library, Target::V81, &[]).unwrap();
    let mut graph = context.graph("linear", &[]).unwrap();
    let x = graph.tensor(TensorSpec::input("x", DType::F16, &[1, K])).unwrap();
    let (mut bytes, w) = weight(30);
    let wt = graph.tensor(TensorSpec::constant("w", DType::F16, &[N, K], &bytes)).unwrap();
    bytes.fill(0xff);
    let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, N])).unwrap();
    graph.node("y", "FullyConnected", &[], &[x, wt], &[y]).unwrap();
    graph.finalize().unwrap();
    let binary = context.binary().unwrap();
    drop(context);
    let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
    let (input, x) = f16s(&numbers(31, K));
    assert!(error(&read_f16s(&session.run(0, &input)), &product(&x, &w)) < 2e-3);
}

#[tier(qnn)]
fn a_context_holds_several_graphs() {
    let library = opened();
    let mut context = Composer::new(&library, Target::V79, &[]).unwrap();
    for seed in [32, 33] {
        add(&mut context, &format!("g{seed}"), &[], |graph| {
            linear(graph, &weight(seed).0);
            assert_eq!(graph.node_count(), 1);
        });
    }
    assert_eq!(context.graphs(), ["g32", "g33"]);
    let binary = context.binary().unwrap();
    drop(context);
    let (input, x) = f16s(&numbers(34, K));
    for (index, seed) in [(0, 32), (1, 33)] {
        let backend = backend(&library, QnnOptions::default());
        let mut session = Session::open_graph(backend, &binary, index);
        let (_, info) = session.workspace.graph(qhx_exec::GraphId(index)).unwrap();
        assert_eq!(info.name, format!("g{seed}"));
        let error = error(&read_f16s(&session.run(index, &input)), &product(&x, &weight(seed).1));
        assert!(error < 2e-3, "g{seed}: {error}");
    }
}

#[tier(qnn)]
fn executions_of_other_threads_wait_for_a_composition() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 28);
    let backend: Arc<dyn Backend> = backend(&library, QnnOptions::default());
    let mut session = Session::open(Arc::clone(&backend), &binary);
    let (input, x) = f16s(&numbers(29, K));
    let expected = product(&x, &weight(28).1);
    let mut context = Composer::new(&library, Target::V79, &[]).unwrap();
    let (send, executed) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        send.send(session.run(0, &input)).unwrap();
        drop(session);
        send.send(Session::open(backend, &binary).run(0, &input)).unwrap();
    });
    let short = std::time::Duration::from_millis(200);
    assert!(executed.recv_timeout(short).is_err(), "executed beside a composition");
    add(&mut context, "linear", &[], |graph| linear(graph, &weight(30).0));
    assert!(executed.recv_timeout(short).is_err(), "executed beside a composition");
    drop(context);
    for y in executed {
        assert!(error(&read_f16s(&y), &expected) < 2e-3);
    }
    other.join().unwrap();
}

#[tier(qnn)]
fn threads_that_compile_and_threads_that_execute_take_turns() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 28);
    let backend: Arc<dyn Backend> = backend(&library, QnnOptions::default());
    let (_, w) = weight(28);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let library = &library;
            scope.spawn(move || {
                for round in 0..6 {
                    assert!(
                        !linear_binary(library, Target::V79, 50 + 10 * seed + round).is_empty()
                    );
                }
            });
        }
        for thread in 0..2 {
            let (backend, binary, w) = (&backend, &binary, &w);
            scope.spawn(move || {
                for open in 0..4 {
                    let mut session = Session::open(Arc::clone(backend), binary);
                    for round in 0..10 {
                        let (input, x) = f16s(&numbers(1000 * thread + 10 * open + round, K));
                        let found = error(&read_f16s(&session.run(0, &input)), &product(&x, w));
                        assert!(found < 2e-3, "thread {thread}, round {round}: {found}");
                    }
                }
            });
        }
    });
}

#[tier(qnn)]
fn contexts_for_different_chips_can_be_under_way_at_once() {
    let library = opened();
    let mut contexts: Vec<_> =
        Target::ALL.iter().map(|&t| Composer::new(&library, t, &[]).unwrap()).collect();
    for context in &mut contexts {
        add(context, "linear", &[], |graph| linear(graph, &weight(35).0));
    }
    for context in &contexts {
        let binary = context.binary().unwrap();
        let info = BinaryInfo::read(library.system(), "a.bin", &binary).unwrap();
        assert_eq!(info.dsp_arch, Some(context.target().arch));
    }
}

#[tier(qnn)]
fn parameters_of_every_kind_reach_the_op() {
    let library = opened();
    // Softmax over axis 1 of [1,4,8]: U32 and F32; ReduceSum: U32s and Bool; StridedSlice: I32s.
    let run = |op: &str, params: &[(&str, Param<'_>)], out: &[usize], input: &[f64]| {
        let binary = binary(&library, Target::V81, "g", |graph| {
            let x = graph.tensor(TensorSpec::input("x", DType::F16, &[1, 4, 8])).unwrap();
            let y = graph.tensor(TensorSpec::output("y", DType::F16, out)).unwrap();
            graph.node("y", op, params, &[x], &[y]).unwrap();
        });
        let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
        read_f16s(&session.run(0, &f16s(input).0))
    };
    let input = f16s(&numbers(36, 32)).1;
    let sums: Vec<f64> = (0..4).map(|r| input[8 * r..8 * r + 8].iter().sum()).collect();
    let axes = Param::U32s(&[1], &[2]);
    let keep = [("axes", axes), ("keep_dims", Param::Bool(true))];
    assert!(error(&run("ReduceSum", &keep, &[1, 4, 1], &input), &sums) < 2e-3);
    let drop = [("axes", axes), ("keep_dims", Param::Bool(false))];
    assert!(error(&run("ReduceSum", &drop, &[1, 4], &input), &sums) < 2e-3);

    let ranges = [0, 1, 1, 1, 3, 1, 2, 8, 2];
    let slice = [("ranges", Param::I32s(&[3, 3], &ranges))];
    let expected: Vec<f64> =
        [1, 2].iter().flat_map(|r| [2, 4, 6].map(|c| input[8 * r + c])).collect();
    assert_eq!(run("StridedSlice", &slice, &[1, 2, 3], &input), expected);

    let softmax = [("axis", Param::U32(2)), ("beta", Param::F32(3.0))];
    let expected: Vec<f64> = input
        .chunks(8)
        .flat_map(|row| {
            let exps: Vec<f64> = row.iter().map(|v| (3.0 * v).exp()).collect();
            let sum: f64 = exps.iter().sum();
            exps.into_iter().map(move |e| e / sum)
        })
        .collect();
    assert!(error(&run("Softmax", &softmax, &[1, 4, 8], &input), &expected) < 5e-3);
}

#[tier(qnn)]
fn an_unknown_op_is_named_with_its_node() {
    let library = opened();
    let mut context = Composer::new(&library, Target::V81, &[]).unwrap();
    let mut graph = context.graph("g", &[]).unwrap();
    let x = graph.tensor(TensorSpec::input("x", DType::F16, &[1, K])).unwrap();
    let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, K])).unwrap();
    let error = match graph.node("layer3.frob", "Frobnicate", &[], &[x], &[y]) {
        Err(error) => error,
        Ok(()) => graph.finalize().unwrap_err(),
    };
    assert_eq!(error.kind(), ErrorKind::Graph);
    assert!(error.message().contains("node \"layer3.frob\" (Frobnicate)"), "{error}");
}

#[tier(qnn)]
fn a_graph_that_does_not_compile_quotes_the_compiler() {
    let library = opened();
    let mut context = Composer::new(&library, Target::V81, &[]).unwrap();
    let mut graph = context.graph("g", &[]).unwrap();
    unary(&mut graph, "ElementWiseExp", &[], &[1, 1, 2, 2, 8, 16]);
    let error = graph.finalize().unwrap_err();
    assert!(error.message().contains("graph \"g\" (1 nodes) for v81: "), "{error}");
    assert!(error.message().contains("the library says: "), "{error}");
    // The context is not serialised with a graph missing.
    let error = context.binary().unwrap_err();
    assert!(error.message().contains("\"g\" was not finalised"), "{error}");
    assert!(context.graph("h", &[]).is_err());
}

#[tier(qnn)]
fn mistakes_are_found_before_the_library_sees_them() {
    let library = opened();
    let mut context = Composer::new(&library, Target::V81, &[]).unwrap();
    assert!(context.binary().unwrap_err().message().contains("no graph"));
    let mut first = context.graph("first", &[]).unwrap();
    let foreign = first.tensor(TensorSpec::input("x", DType::F16, &[1, K])).unwrap();
    let y = first.tensor(TensorSpec::output("y", DType::F16, &[1, K])).unwrap();
    first.node("y", "Relu", &[], &[foreign], &[y]).unwrap();
    first.finalize().unwrap();

    let mut graph = context.graph("second", &[]).unwrap();
    let short = graph.tensor(TensorSpec::constant("w", DType::F16, &[4, 4], &[0; 31])).unwrap_err();
    assert_eq!(
        short.message(),
        "graph \"second\": tensor w f16[4, 4]: 31 bytes given, 32 expected"
    );
    let scales = Quantization::PerAxis { axis: 0, scales: vec![1.0; 3], offsets: vec![] };
    let spec = TensorSpec::constant("q", DType::SFixed8, &[4, 4], &[0; 16]).quantized(scales);
    assert!(graph.tensor(spec).unwrap_err().message().contains("3 scales"));
    let huge = TensorSpec::input("h", DType::F16, &[usize::MAX, 4]);
    assert!(graph.tensor(huge).is_err());
    assert!(graph.tensor(TensorSpec::input("a\0b", DType::F16, &[1])).is_err());
    let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, K])).unwrap();
    let error = graph.node("n", "Relu", &[], &[foreign], &[y]).unwrap_err();
    assert!(error.message().contains("a tensor of another graph"), "{error}");
}

#[tier(qnn)]
fn options_of_a_graph_reach_the_compiler() {
    let library = opened();
    let level = |level| {
        let configs = [
            GraphConfig::OptimizationLevel(level),
            GraphConfig::VtcmMb(2),
            GraphConfig::HvxThreads(2),
        ];
        let binary = composed_linear(&library, Target::V81, &configs, 37).binary().unwrap();
        let info = BinaryInfo::read(library.system(), "a.bin", &binary).unwrap();
        let figures = info.graphs[0].figures.unwrap();
        assert_eq!(figures.hvx_threads, Some(2), "{figures:?}");
        assert!(figures.vtcm == Some(2) || figures.vtcm == Some(2 << 20), "{figures:?}");
        figures.optimization_level
    };
    assert_eq!(level(1), Some(1));
    assert_eq!(level(3), Some(3));
}

#[tier(qnn)]
fn a_key_of_the_compiler_carries_text() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let configs = [GraphConfig::Compiler {
        key: "sim_trace_final".to_owned(),
        value: CompilerValue::Text(path.display().to_string()),
    }];
    composed_linear(&library, Target::V81, &configs, 38);
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(!trace["traceEvents"].as_array().unwrap().is_empty());
}

#[tier(qnn)]
fn a_binary_written_to_a_file_is_the_binary() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part.bin");
    let mut context = Composer::new(&library, Target::V75, &[]).unwrap();
    assert!(context.write(&path).is_err() && !path.exists());
    add(&mut context, "linear", &[], |graph| linear(graph, &weight(39).0));
    let bytes = context.write(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes);
    let info =
        BinaryInfo::read(library.system(), "part.bin", &std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(info.dsp_arch, Some(75));
    // A file that is there is never replaced.
    let error = context.write(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes);
}

/// 4-bit integers in blocks, with and without offsets, one scale a row, and 8-bit integers in blocks.
#[tier(qnn)]
fn matmuls_with_quantized_weights_equal_f64() {
    let library = opened();
    let integers = |seed: u32, bits: Bits| -> Vec<i8> {
        let half = f64::from(1 << (bits.count() - 1));
        numbers(seed, N * K).iter().map(|v| (v * 2.0 * half).floor() as i8).collect()
    };
    // As f16, which is what the library makes of them. Q4_0 of GGUF has negative scales.
    let scales = |seed: u32, count| -> Vec<f32> {
        f16s(&numbers(seed, count)).1.iter().map(|&s| (s * 0.2) as f32).map(round).collect()
    };
    let cases = [
        (Bits::Four, 32, false),
        (Bits::Four, 16, true),
        (Bits::Four, K, false),
        (Bits::Eight, 32, false),
    ];
    for (target, rows) in [(Target::V81, 1), (Target::V79, 3), (Target::V75, 1)] {
        let mut context = Composer::new(&library, target, &[]).unwrap();
        let mut expected = Vec::new();
        for (index, (bits, block, shifted)) in (0..).zip(cases) {
            let (values, count) = (integers(40 + index, bits), N * K / block);
            let (scales, offsets) = (scales(50 + index, count), scales(60 + index, count));
            let offsets = if shifted { offsets } else { Vec::new() };
            let form = QuantizedForm { bits, block, offsets: shifted };
            let given = QuantizedRef { form, values: &values, scales: &scales, offsets: &offsets };
            let mut graph = context.graph(&format!("g{index}"), &[]).unwrap();
            let x = graph.tensor(TensorSpec::input("x", DType::F16, &[rows, K])).unwrap();
            let w = graph.tensor(TensorSpec::quantized_weights("w", &[N, K], given)).unwrap();
            let y = graph.tensor(TensorSpec::output("y", DType::F16, &[rows, N])).unwrap();
            // The library ends the process over this one.
            let error = graph.node("y", "MatMul", &[], &[x, w], &[y]).unwrap_err();
            assert!(error.message().contains("which only FullyConnected does"), "{error}");
            graph.node("y", "FullyConnected", &[], &[x, w], &[y]).unwrap();
            graph.finalize().unwrap();
            let real = values.iter().enumerate().map(|(i, &q)| {
                let offset = offsets.get(i / block).copied().unwrap_or(0.0);
                (f64::from(q) + f64::from(offset)) * f64::from(scales[i / block])
            });
            expected.push(real.collect::<Vec<f64>>());
        }
        let binary = context.binary().unwrap();
        drop(context);
        let (input, x) = f16s(&numbers(70, rows * K));
        for (index, weight) in (0..).zip(&expected) {
            let backend = backend(&library, QnnOptions::default());
            let found = read_f16s(&Session::open_graph(backend, &binary, index).run(index, &input));
            for (x, found) in x.chunks_exact(K).zip(found.chunks_exact(N)) {
                let error = error(found, &product(x, weight));
                assert!(error < 2e-3, "{target} {:?}: {error}", cases[index as usize]);
            }
        }
    }
}

/// 4-bit integers times multiples, over 16-bit integers, in a row of a tile and in rows of 64.
#[tier(qnn)]
fn filters_over_16_bit_integers_equal_f64() {
    let library = opened();
    for (target, rows) in [(Target::V79, 1), (Target::V73, 4), (Target::V81, 1)] {
        let numbers = |seed| numbers(seed, N * K);
        let values: Vec<i8> = numbers(80).iter().map(|v| (v * 16.0).floor() as i8).collect();
        let within = |v: &f64, from: f64, to: f64| from + (v + 0.5) * (to - from);
        let each = numbers(81).into_iter().take(N * K / 32);
        let blocks: Vec<u8> = each.map(|v| within(&v, 1.0, 16.99) as u8).collect();
        let rows_of = numbers(82).into_iter().take(N).map(|v| within(&v, 0.01, 0.02) as f32);
        let multiples = Multiples { rows: rows_of.collect(), blocks };
        let mut context = Composer::new(&library, target, &[]).unwrap();
        let mut graph = context.graph("g", &[]).unwrap();
        let step = |scale| Quantization::PerTensor { scale, offset: -32_768 };
        let (small, large) = (1.0 / 32_767.0, 80.0 / 32_767.0);
        let x =
            graph.tensor(TensorSpec::input("x", DType::F16, &[1, 1, rows * K / 64, 64])).unwrap();
        let mut whole = |name, shape: &[usize], scale| {
            let spec = TensorSpec::native(name, DType::UFixed16, shape);
            graph.tensor(spec.quantized(step(scale))).unwrap()
        };
        let integers = whole("integers", &[1, 1, rows * K / 64, 64], small);
        let row = whole("row", &[1, 1, rows, K], small);
        let product = whole("product", &[1, 1, rows, N], large);
        let dense = whole("dense", &[1, 1, rows * N / 16, 16], large);
        let w = TensorSpec::filter("w", &[1, 1, K, N], &values, &multiples);
        let w = graph.tensor(w).unwrap();
        let shape = [1, 1, rows * N / 16, 16];
        let y = graph.tensor(TensorSpec::output("y", DType::F16, &shape)).unwrap();
        graph.node("integers", "Quantize", &[], &[x], &[integers]).unwrap();
        graph.node("row", "Reshape", &[], &[integers], &[row]).unwrap();
        let params = [
            ("stride", Param::U32s(&[2], &[1, 1])),
            ("pad_amount", Param::U32s(&[2, 2], &[0; 4])),
            ("dilation", Param::U32s(&[2], &[1, 1])),
            ("group", Param::U32(1)),
        ];
        let refused = graph.node("p", "FullyConnected", &[], &[row, w], &[product]).unwrap_err();
        assert!(refused.message().contains("which only Conv2d does"), "{refused}");
        graph.node("product", "Conv2d", &params, &[row, w], &[product]).unwrap();
        graph.node("dense", "Reshape", &[], &[product], &[dense]).unwrap();
        graph.node("y", "Dequantize", &[], &[dense], &[y]).unwrap();
        graph.finalize().unwrap();
        let binary = context.binary().unwrap();
        drop(context);
        // The filter is [inputs, outputs], its multiples lie by outputs.
        let mut weight = vec![0f64; N * K];
        for (at, &q) in values.iter().enumerate() {
            let (input, output) = (at / N, at % N);
            let multiple = multiples.blocks[output * (K / 32) + input / 32];
            weight[output * K + input] =
                f64::from(q) * f64::from(multiple) * f64::from(multiples.rows[output]);
        }
        let (input, x) = f16s(&super::numbers(83, rows * K));
        let backend = backend(&library, QnnOptions::default());
        let found = read_f16s(&Session::open_graph(backend, &binary, 0).run(0, &input));
        for (x, found) in x.chunks_exact(K).zip(found.chunks_exact(N)) {
            let error = error(found, &super::product(x, &weight));
            assert!(error < 2e-3, "{target}: {error}");
        }
    }
}

fn round(value: f32) -> f32 {
    half::f16::from_f32(value).to_f32()
}

#[tier(qnn)]
fn weights_the_library_computes_wrongly_name_their_tensor() {
    let library = opened();
    let mut context = Composer::new(&library, Target::V81, &[]).unwrap();
    let mut graph = context.graph("odd", &[]).unwrap();
    let form = QuantizedForm::symmetric(Bits::Four, 12);
    let given = QuantizedRef { form, values: &[1; 12], scales: &[1.0], offsets: &[] };
    let error = graph.tensor(TensorSpec::quantized_weights("w", &[1, 12], given)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Graph);
    let words = "graph \"odd\": tensor \"w\": 12 inputs of 4 bits in blocks of 12: the NPU library";
    assert!(error.message().contains(words), "{error}");
}
