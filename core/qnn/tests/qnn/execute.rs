//! Loading and executing through the backend trait.

use std::sync::Arc;

use qhx_base::{CancelToken, ErrorKind};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{Buffer, GraphId, Memory, Workspace};
use qhx_qnn::compose::TensorSpec;
use qhx_qnn::{PerfMode, Priority, ProfileLevel, QnnOptions, Target};
use qhx_types::{DType, Port};

use crate::*;

#[tier(qnn)]
fn an_f16_graph_computes_what_f64_computes_on_every_target() {
    let library = opened();
    let (input, x) = f16s(&numbers(1, K));
    let (_, w) = weight(2);
    for target in Target::ALL {
        let binary = linear_binary(&library, target, 2);
        let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
        let y = read_f16s(&session.run(0, &input));
        let error = error(&y, &product(&x, &w));
        assert!(error < 2e-3, "{target}: {error}");
    }
}

#[tier(qnn)]
fn int8_weights_with_f16_activations_keep_their_scales() {
    let library = opened();
    let (input, x) = f16s(&numbers(3, K));
    let (bytes, quantization, w) = int8_weight(4);
    for target in Target::ALL {
        let binary = binary(&library, target, "w8", |graph| {
            let x = graph.tensor(TensorSpec::input("x", DType::F16, &[1, K])).unwrap();
            let spec = TensorSpec::constant("w", DType::SFixed8, &[N, K], &bytes);
            let w8 = graph.tensor(spec.quantized(quantization.clone())).unwrap();
            let y = graph.tensor(TensorSpec::output("y", DType::F16, &[1, N])).unwrap();
            graph.node("y", "FullyConnected", &[], &[x, w8], &[y]).unwrap();
        });
        let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
        let y = read_f16s(&session.run(0, &input));
        let error = error(&y, &product(&self::f16s(&numbers(3, K)).1, &w));
        assert!(error < 3e-3, "{target}: {error}");
    }
    assert_eq!(x.len(), K);
}

#[tier(qnn)]
fn binding_another_buffer_changes_what_is_read_and_written() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 5);
    let (first, _) = f16s(&numbers(6, K));
    let (second, x) = f16s(&numbers(7, K));
    let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
    let before = session.run(0, &first);
    // A larger buffer, bound behind its beginning.
    let other = session.workspace.allocate(256 + 2 * K).unwrap();
    session.workspace.bytes_mut(other).unwrap()[256..].copy_from_slice(&second);
    session.workspace.bind(GraphId(0), Port::Input(0), other, 256).unwrap();
    let output = session.workspace.allocate(2 * N).unwrap();
    session.workspace.bind(GraphId(0), Port::Output(0), output, 0).unwrap();
    session.workspace.execute(GraphId(0)).unwrap();
    assert_eq!(session.workspace.bytes(session.outputs[0]).unwrap(), before);
    let y = read_f16s(session.workspace.bytes(output).unwrap());
    assert!(error(&y, &product(&x, &weight(5).1)) < 2e-3);
}

#[tier(qnn)]
fn memory_that_does_not_fit_a_tensor_is_refused() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 8);
    let backend = backend(&library, QnnOptions::default());
    let (folder, source) = file(&binary);
    let context = backend.open_context(&source).unwrap();
    let mut graph = context.open_graph(0).unwrap();
    let small = Buffer::zeroed(2 * K - 1).unwrap();
    let error = graph.bind(Port::Input(0), small.memory(), 0).unwrap_err();
    assert_eq!(
        error.message(),
        "graph \"linear\": tensor x f16[1, 64] needs 128 bytes, the buffer has 127"
    );
    let exact = Buffer::zeroed(2 * K).unwrap();
    let exact = exact.memory();
    graph.bind(Port::Input(0), exact, 0).unwrap();
    assert!(graph.bind(Port::Input(0), exact, 1).is_err());
    assert!(graph.bind(Port::Input(0), exact, usize::MAX).is_err());
    assert!(graph.bind(Port::Input(1), exact, 0).is_err());
    assert!(graph.bind(Port::Output(7), exact, 0).is_err());
    let mapped = qhx_base::artifacts::Mapped::open(source.binary.as_ref().unwrap()).unwrap();
    let error = graph.bind(Port::Output(0), &Memory::from(mapped), 0).unwrap_err();
    assert!(error.message().contains("read-only"), "{error}");
    drop(folder);
}

#[tier(qnn)]
fn a_graph_outlives_the_backend_and_the_file() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 9);
    let (folder, source) = file(&binary);
    let backend: Arc<dyn Backend> = backend(&library, QnnOptions::default());
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    {
        let context = backend.open_context(&source).unwrap();
        assert_eq!(context.resident_bytes(), binary.len() as u64);
        workspace.add_context("part", &context).unwrap();
    }
    drop((backend, folder));
    let (input, x) = f16s(&numbers(10, K));
    let from = workspace.allocate(2 * K).unwrap();
    let to = workspace.allocate(2 * N).unwrap();
    workspace.bytes_mut(from).unwrap().copy_from_slice(&input);
    workspace.bind(GraphId(0), Port::Input(0), from, 0).unwrap();
    workspace.bind(GraphId(0), Port::Output(0), to, 0).unwrap();
    workspace.execute(GraphId(0)).unwrap();
    let y = read_f16s(workspace.bytes(to).unwrap());
    assert!(error(&y, &product(&x, &weight(9).1)) < 2e-3);
}

#[tier(qnn)]
fn a_thread_per_context_and_a_thread_per_graph_agree() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 11);
    let backend: Arc<dyn Backend> = backend(&library, QnnOptions::default());
    let (folder, source) = file(&binary);
    // Two threads with contexts of their own, two with graphs of one shared context.
    let shared = backend.open_context(&source).unwrap();
    let (_, w) = weight(11);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (backend, shared, source, w) = (&backend, &shared, &source, &w);
            scope.spawn(move || {
                let own = backend.open_context(source).unwrap();
                let context = if thread < 2 { &own } else { shared };
                let mut graph = context.open_graph(0).unwrap();
                let mut input = Buffer::zeroed(2 * K).unwrap();
                let output = Buffer::zeroed(2 * N).unwrap();
                graph.bind(Port::Input(0), input.memory(), 0).unwrap();
                graph.bind(Port::Output(0), output.memory(), 0).unwrap();
                for round in 0..20 {
                    let (bytes, x) = f16s(&numbers(100 * thread + round, K));
                    input.bytes_mut().copy_from_slice(&bytes);
                    execute(&mut *graph);
                    let y = read_f16s(output.bytes());
                    let error = error(&y, &product(&x, w));
                    assert!(error < 2e-3, "thread {thread}, round {round}: {error}");
                }
            });
        }
    });
    drop(folder);
}

#[tier(qnn)]
fn twenty_cycles_of_everything() {
    let library = opened();
    let binary = linear_binary(&library, Target::V79, 12);
    let (input, x) = f16s(&numbers(13, K));
    let expected = product(&x, &weight(12).1);
    let options = QnnOptions {
        perf: PerfMode::Balanced,
        priority: Priority::High,
        profile: ProfileLevel::Basic,
        ..QnnOptions::default()
    };
    for cycle in 0..20 {
        let backend = backend(&library, options.clone());
        let mut session = Session::open(backend, &binary);
        let error = error(&read_f16s(&session.run(0, &input)), &expected);
        assert!(error < 2e-3, "cycle {cycle}: {error}");
    }
}

#[tier(qnn)]
fn a_profile_names_what_took_how_long() {
    let library = opened();
    let binary = linear_binary(&library, Target::V81, 14);
    let (input, _) = f16s(&numbers(15, K));
    let options = QnnOptions { profile: ProfileLevel::Detailed, ..QnnOptions::default() };
    let backend = backend(&library, options);
    let mut session = Session::open(Arc::clone(&backend) as Arc<dyn Backend>, &binary);
    session.run(0, &input);
    session.run(0, &input);
    let records = backend.take_profile();
    let graphs: Vec<_> = records.iter().map(|r| r.graph.as_deref()).collect();
    assert_eq!(graphs, [None, Some("linear"), Some("linear")]);
    assert!(records[0].events.iter().any(|e| e.name == "load" && e.unit == "us" && e.value > 0));
    for record in &records[1..] {
        assert_eq!(record.context, "part");
        let executed: Vec<_> = record.events.iter().filter(|e| e.name == "execute").collect();
        assert_eq!(executed.len(), 1, "events of one call only: {:?}", record.events);
        let cycles = record.events.iter().find(|e| e.kind == 3003).unwrap();
        assert!(cycles.events.iter().any(|e| e.unit == "cycles"), "{cycles:?}");
    }
    assert!(backend.take_profile().is_empty());
    assert!(serde_json::to_string(&records).unwrap().contains("\"unit\":\"us\""));
}

#[tier(qnn)]
fn a_source_without_a_binary_is_not_for_this_backend() {
    let library = opened();
    let backend = backend(&library, QnnOptions::default());
    let source = ContextSource { key: "cpu-only".to_owned(), ..ContextSource::default() };
    assert!(!backend.accepts(&source));
    let error = backend.open_context(&source).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Context);
    assert!(error.message().contains("cpu-only"));
}

#[tier(qnn)]
fn the_backend_describes_itself() {
    let library = opened();
    let info = backend(&library, QnnOptions::default()).info();
    assert_eq!(info.name, "qnn");
    assert!(info.version.contains(library.build_id()) && !library.build_id().is_empty());
    assert!(info.details.iter().any(|line| line.contains("core interface 2.")));
    assert_eq!(library.provider(), "HTP_QTI_AISW");
    assert!(info.details.contains(&"power mode: burst".to_owned()), "{info:?}");
}

#[tier(qnn)]
fn every_power_vote_is_accepted() {
    let library = opened();
    let backend = backend(&library, QnnOptions::default());
    for mode in PerfMode::ALL {
        backend.set_perf(mode).unwrap();
        assert_eq!(mode.name().parse::<PerfMode>().unwrap(), mode);
    }
    let silent = QnnOptions { perf: PerfMode::DeviceDefault, ..QnnOptions::default() };
    let info = crate::backend(&library, silent).info();
    assert!(info.details.contains(&"power mode: left to the device".to_owned()), "{info:?}");
}

#[tier(qnn)]
fn an_int32_input_is_passed_by_its_own_type() {
    let library = opened();
    let (table, rows) = f16s(&numbers(16, 8 * 32));
    let binary = binary(&library, Target::V81, "gather", |graph| {
        let index = graph.tensor(TensorSpec::input("index", DType::I32, &[2])).unwrap();
        let table = graph.tensor(TensorSpec::constant("t", DType::F16, &[8, 32], &table)).unwrap();
        let y = graph.tensor(TensorSpec::output("y", DType::F16, &[2, 32])).unwrap();
        let axis = [("axis", crate::Param::I32(0))];
        graph.node("y", "Gather", &axis, &[table, index], &[y]).unwrap();
    });
    let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
    let (_, info) = session.workspace.graph(GraphId(0)).unwrap();
    assert_eq!(info.inputs[0].dtype, DType::I32);
    let input: Vec<u8> = [5i32, 2].iter().flat_map(|i| i.to_le_bytes()).collect();
    let y = read_f16s(&session.run(0, &input));
    assert_eq!(y[..32], rows[5 * 32..6 * 32]);
    assert_eq!(y[32..], rows[2 * 32..3 * 32]);
}

#[expect(unsafe_code, reason = "drives a graph without a workspace")]
fn execute(graph: &mut dyn qhx_exec::backend::Graph) {
    // SAFETY: every port is bound and no slice of a buffer is alive.
    unsafe { graph.execute() }.unwrap();
}
