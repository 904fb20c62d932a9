//! Memory that is registered with contexts, over the provider in between.

use std::sync::{Mutex, PoisonError};

use qhx_base::Error;
use qhx_exec::Memory;
use qhx_fake_device::{Control, Plan, Report, Then};
use qhx_qnn::MemoryMode;

use crate::between::{backend_over, fake};
use crate::*;

/// Bytes of a run's input and output.
const X: usize = 2 * K;
const Y: usize = 2 * N;

fn options(control: &Control, memory: MemoryMode) -> QnnOptions {
    QnnOptions { memory, cdsprpc: Some(control.path().to_owned()), ..QnnOptions::default() }
}

fn count(report: &Report, call: &str) -> u64 {
    report.calls.get(call).copied().unwrap_or_default()
}

/// Runs the graph once and compares with what f64 computes.
fn check(session: &mut Session, seed: u32, weight_seed: u32) {
    let (input, x) = f16s(&numbers(seed, K));
    let y = read_f16s(&session.run(0, &input));
    assert!(error(&y, &product(&x, &weight(weight_seed).1)) < 5e-3, "seed {seed}");
}

#[tier(qnn)]
fn buffers_are_registered_once_and_take_turns_without_a_call() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 5);
    let backend = backend_over(&control, &real, options(&control, MemoryMode::Registered));
    assert!(backend.memory().starts_with("registered, through "), "{}", backend.memory());
    let mut session = Session::open(backend, &binary);
    check(&mut session, 1, 5);
    let graph = GraphId(0);
    // As a state does that has two places.
    let places = [session.inputs[0], session.workspace.allocate(X).unwrap()];
    session.workspace.bind(graph, Port::Input(0), places[1], 0).unwrap();
    let open = control.report().unwrap();
    assert_eq!((count(&open, "memRegister"), open.registered), (3, 3));
    control.set(&Plan::default()).unwrap();
    for seed in 2..8 {
        let place = places[seed as usize % 2];
        session.workspace.bind(graph, Port::Input(0), place, 0).unwrap();
        session.inputs[0] = place;
        check(&mut session, seed, 5);
    }
    let report = control.report().unwrap();
    assert_eq!((report.total, report.executions), (6, 6), "only executions: {report:?}");
    assert_eq!((report.bytes.raw, report.bytes.registered), (0, 6 * (X + Y) as u64));

    // Several tensors in one buffer: at offsets, each with a handle of its own.
    let both = session.workspace.allocate(X + Y + 2).unwrap();
    session.workspace.bind(graph, Port::Input(0), both, Y).unwrap();
    session.workspace.bind(graph, Port::Output(0), both, 0).unwrap();
    let (input, x) = f16s(&numbers(9, K));
    session.workspace.bytes_mut(both).unwrap()[Y..Y + X].copy_from_slice(&input);
    session.workspace.execute(graph).unwrap();
    let bytes = session.workspace.bytes(both).unwrap();
    assert!(error(&read_f16s(&bytes[..Y]), &product(&x, &weight(5).1)) < 5e-3);
    assert_eq!(bytes[X + Y..], [0, 0]);
    assert_eq!(count(&control.report().unwrap(), "memRegister"), 2);

    drop(session);
    let closed = control.report().unwrap();
    assert!(closed.alive.is_empty() && closed.violations.is_empty(), "{closed:?}");
    let at = |call: &str| closed.order.iter().position(|name| name == call).unwrap();
    assert!(at("memDeRegister") < at("contextFree"), "{:?}", closed.order);
}

#[tier(qnn)]
fn memory_goes_with_what_used_it_and_the_context_stays() {
    let (real, control) = fake();
    let (_folder, source) = file(&linear_binary(&real, Target::V81, 6));
    let backend: Arc<dyn Backend> =
        backend_over(&control, &real, options(&control, MemoryMode::Registered));
    let contexts = [(); 2].map(|()| backend.open_context(&source).unwrap());
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    // What one graph writes the other may read: one buffer, registered with both contexts.
    for (index, context) in contexts.iter().enumerate() {
        workspace.add_context(&format!("part {index}"), context).unwrap();
    }
    let shared = workspace.allocate(X.max(Y)).unwrap();
    for graph in [GraphId(0), GraphId(1)] {
        for port in [Port::Input(0), Port::Output(0)] {
            workspace.bind(graph, port, shared, 0).unwrap();
        }
        workspace.execute(graph).unwrap();
    }
    let open = control.report().unwrap();
    assert_eq!((open.alive["memory"], open.alive["rpcmem"], open.bytes.raw), (4, 1, 0), "{open:?}");
    let [first, second] = contexts;
    drop(first);
    drop(workspace);
    let left = control.report().unwrap();
    assert_eq!((left.alive.get("memory"), left.alive.get("rpcmem")), (None, None), "{left:?}");
    assert_eq!(left.alive["context"], 1);
    drop((second, backend));
    let closed = control.report().unwrap();
    assert!(closed.alive.is_empty() && closed.violations.is_empty(), "{closed:?}");
}

#[tier(qnn)]
fn what_cannot_be_registered_is_copied_or_an_error() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 7);
    let open =
        |memory| Session::open(backend_over(&control, &real, options(&control, memory)), &binary);
    // The second is the output's.
    let plan = Plan::at("memRegister", 2, Then::Fail(8003));
    control.set(&plan).unwrap();
    let (mut session, lines) = listen(|| open(MemoryMode::Auto));
    for seed in 1..4 {
        check(&mut session, seed, 7);
    }
    let report = control.report().unwrap();
    assert_eq!((report.bytes.raw, report.bytes.registered), (3 * Y as u64, 3 * X as u64));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("\"y\"") && lines[0].contains("8003"), "{lines:?}");
    drop(session);

    control.set(&Plan { no_registered_memory: true, ..Plan::default() }).unwrap();
    let (mut session, lines) = listen(|| open(MemoryMode::Auto));
    check(&mut session, 1, 7);
    let report = control.report().unwrap();
    assert_eq!((count(&report, "memRegister"), report.bytes.registered), (1, 0));
    assert_eq!(lines.len(), 1, "{lines:?}");
    drop(session);

    let mut plan = plan;
    plan.rules[0].times = 2;
    control.set(&plan).unwrap();
    let error = bind_all(&control, &real, &binary).unwrap_err();
    assert_eq!(error.code(), Some(8003), "{error}");
    assert!(error.message().contains("\"y\"") && error.message().contains("linear"), "{error}");
    let closed = control.report().unwrap();
    assert!(closed.alive.is_empty() && closed.violations.is_empty(), "{closed:?}");
}

/// Binds a graph's tensors where nothing but registered memory will do.
fn bind_all(control: &Control, real: &Library, binary: &[u8]) -> Result<(), Error> {
    let backend = backend_over(control, real, options(control, MemoryMode::Registered));
    let (_folder, source) = file(binary);
    let mut graph = backend.open_context(&source)?.open_graph(0)?;
    let memories: Vec<Memory> =
        [X, Y].iter().map(|&n| backend.allocate(n).unwrap().memory().clone()).collect();
    graph.bind(Port::Input(0), &memories[0], 0)?;
    graph.bind(Port::Output(0), &memories[1], 0).inspect_err(|_| {
        // Nor is it raw from the second try on.
        assert_eq!(graph.bind(Port::Output(0), &memories[1], 0).unwrap_err().code(), Some(8003));
    })
}

#[tier(qnn)]
fn without_libcdsprpc_memory_is_raw_with_the_reason() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 8);
    let nowhere = |memory| QnnOptions {
        cdsprpc: Some("/nowhere/libcdsprpc.so".into()),
        ..options(&control, memory)
    };
    let backend = backend_over(&control, &real, nowhere(MemoryMode::Auto));
    let info = backend.info();
    assert!(
        info.details.iter().any(|line| line.starts_with("memory: raw: /nowhere/libcdsprpc.so: ")),
        "{info:?}"
    );
    let mut session = Session::open(backend, &binary);
    check(&mut session, 1, 8);
    let report = control.report().unwrap();
    assert_eq!((count(&report, "memRegister"), report.bytes.raw), (0, (X + Y) as u64));
    drop(session);

    let library = Library::open(control.path(), Some(real.system().path())).unwrap();
    let error = QnnBackend::with_library(&library, nowhere(MemoryMode::Registered)).unwrap_err();
    assert!(error.message().contains("/nowhere/libcdsprpc.so"), "{error}");
    assert!(error.hint_text().is_some_and(|hint| hint.contains("--memory raw")), "{error}");

    let backend = backend_over(&control, &real, options(&control, MemoryMode::Raw));
    assert_eq!(backend.memory(), "raw: asked for");
    check(&mut Session::open(backend, &binary), 2, 8);
    assert_eq!(control.report().unwrap().bytes.registered, 0);
}

/// The warnings of this crate that `work` leads to on this thread.
pub fn listen<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let lines = || LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines().clear();
    let warnings = Heard {
        enabled: |metadata| {
            *metadata.level() <= tracing::Level::WARN && metadata.target().starts_with("qhx_")
        },
        event: |event| LINES.lock().unwrap_or_else(PoisonError::into_inner).push(message(event)),
    };
    let result = tracing::subscriber::with_default(warnings, work);
    (result, lines().clone())
}
