//! Opening libraries.

use std::path::Path;

use qhx_base::ErrorKind;
use qhx_fake_device::{Plan, Then};
use qhx_qnn::{BinaryInfo, Device, LogLevel, SystemLibrary};

use crate::between::{backend_over, fake};
use crate::*;

#[tier(qnn)]
fn the_libraries_do_not_pass_for_one_another() {
    let library = opened();
    let error = SystemLibrary::open(library.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Runtime);
    assert!(error.message().contains("QnnSystemInterface_getProviders"), "{error}");
    let error = Library::open(library.system().path(), Some(library.system().path())).unwrap_err();
    assert!(error.message().contains("QnnInterface_getProviders"), "{error}");
}

#[tier(qnn)]
fn a_missing_library_is_named() {
    let library = opened();
    let error = Library::open(Path::new("/nowhere/libQnnHtp.so"), Some(library.system().path()))
        .unwrap_err();
    assert!(error.message().starts_with("/nowhere/libQnnHtp.so"), "{error}");
    let error = Library::open(library.path(), Some(Path::new("/nowhere/sys.so"))).unwrap_err();
    assert!(error.message().starts_with("/nowhere/sys.so"), "{error}");
}

#[tier(qnn)]
fn a_device_for_an_unknown_architecture_is_refused() {
    let library = opened();
    let unknown = Target { arch: 12, soc: 9999, vtcm_mb: None };
    let error = Device::open(&library, LogLevel::Error, Some(unknown)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Runtime);
    assert!(error.message().contains("for v12"), "{error}");
    assert!(error.code().is_some());
}

#[tier(qnn)]
fn the_platform_is_described() {
    let library = opened();
    let platform = Device::open(&library, LogLevel::Error, None).unwrap().platform().unwrap();
    assert!(platform.arch.is_some_and(|arch| (68..200).contains(&arch)), "{platform:?}");
    assert!(platform.cores > 0 && platform.soc.is_some());
}

#[tier(qnn)]
fn the_library_has_words_for_its_codes() {
    let library = opened();
    let words = library.message(qhx_qnn::codes::Code(5005)).unwrap();
    assert!(!words.is_empty());
}

#[tier(qnn)]
fn contexts_opened_side_by_side_keep_their_order() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let source = |seed: u32, bytes: &[u8]| file_in(folder.path(), &seed.to_string(), bytes);
    let seeds = [21, 22, 23];
    let mut sources: Vec<_> = seeds
        .iter()
        .map(|&seed| source(seed, &linear_binary(&library, Target::V81, seed)))
        .collect();
    let (input, x) = f16s(&numbers(1, K));
    for threads in [1, 3] {
        let options = QnnOptions { open_threads: Some(threads), ..QnnOptions::default() };
        let backend: Arc<dyn Backend> = backend(&library, options);
        let opened = backend.open_contexts(&sources).unwrap();
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        for (index, (opened, seed)) in opened.iter().zip(seeds).enumerate() {
            assert!(!opened.time.is_zero());
            workspace.add_context(&seed.to_string(), &opened.context).unwrap();
            let graph = GraphId(index as u32);
            let [from, to] = [2 * K, 2 * N].map(|bytes| workspace.allocate(bytes).unwrap());
            workspace.bind(graph, Port::Input(0), from, 0).unwrap();
            workspace.bind(graph, Port::Output(0), to, 0).unwrap();
            workspace.bytes_mut(from).unwrap().copy_from_slice(&input);
            workspace.execute(graph).unwrap();
            let y = read_f16s(workspace.bytes(to).unwrap());
            assert!(error(&y, &product(&x, &weight(seed).1)) < 5e-3, "{seed}, {threads} threads");
        }
    }
    // One that is no binary is reported by name, and the others are closed again.
    sources[1] = source(22, b"no context binary");
    for threads in [1, 3] {
        let options = QnnOptions { open_threads: Some(threads), ..QnnOptions::default() };
        let error = backend(&library, options).open_contexts(&sources).unwrap_err();
        assert!(error.message().contains("22.bin"), "{error}");
    }
}

/// A context whose graph keeps more than the tightly coupled memory holds: every matmul needs the whole of a square
/// matrix of `side`.
fn spilling_binary(library: &Library, side: usize) -> Vec<u8> {
    binary(library, Target::V81, "spills", |graph| {
        let square = &[side, side][..];
        let x = graph.tensor(TensorSpec::input("x", DType::F16, square)).unwrap();
        let mut previous = x;
        for step in 0..3 {
            let spec = |name| match step {
                2 => TensorSpec::output("y", DType::F16, square),
                _ => TensorSpec::native(name, DType::F16, square),
            };
            let name = format!("y{step}");
            let y = graph.tensor(spec(&name)).unwrap();
            graph.node(&name, "MatMul", &[], &[previous, x], &[y]).unwrap();
            previous = y;
        }
    })
}

/// The emulator refuses to share the buffer: the provider in between takes the option out and checks it.
#[tier(qnn)]
fn contexts_share_the_spill_fill_buffer_of_the_neediest() {
    let (real, control) = fake();
    let folder = tempfile::tempdir().unwrap();
    let source = |key: &str, bytes: &[u8]| file_in(folder.path(), key, bytes);
    let sources = [
        source("none", &linear_binary(&real, Target::V81, 21)),
        source("less", &spilling_binary(&real, 1408)),
        source("most", &spilling_binary(&real, 1536)),
    ];
    let needs = |source: &ContextSource| {
        let bytes = std::fs::read(source.binary.as_ref().unwrap()).unwrap();
        let info = BinaryInfo::read(real.system(), &source.key, &bytes).unwrap();
        info.graphs[0].figures.unwrap().spill_fill_bytes.unwrap()
    };
    let [none, less, most] = sources.each_ref().map(needs);
    assert!(none == 0 && 0 < less && less < most, "{none}, {less}, {most}");
    let options = || QnnOptions { share_spill_fill: Some(true), ..QnnOptions::default() };

    // Where the library takes it: the neediest has the buffer, and again after a restart.
    let mut plan = Plan::at("graphExecute", 2, Then::Restart(1007));
    plan.spill_fill = true;
    control.set(&plan).unwrap();
    let backend: Arc<dyn Backend> = backend_over(&control, &real, options());
    let opened = backend.open_contexts(&sources).unwrap();
    let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
    for (source, opened) in sources.iter().zip(&opened) {
        workspace.add_source(source, &opened.context).unwrap();
    }
    drop(opened);
    for (port, bytes) in [(Port::Input(0), 2 * K), (Port::Output(0), 2 * N)] {
        let buffer = workspace.allocate(bytes).unwrap();
        workspace.bind(GraphId(0), port, buffer, 0).unwrap();
    }
    assert_eq!(control.report().unwrap().spill_fill, [1, 2]);
    workspace.execute(GraphId(0)).unwrap();
    workspace.execute(GraphId(0)).unwrap_err();
    drop(workspace);
    let opened = backend.open_contexts(&sources).unwrap();
    assert_eq!(control.report().unwrap().spill_fill, [2, 4]);
    drop((opened, backend));
    control.closed("a shared buffer");

    // Where it does not, each has its own.
    control.set(&Plan::default()).unwrap();
    let opened = backend_over(&control, &real, options()).open_contexts(&sources).unwrap();
    assert_eq!((opened.len(), control.report().unwrap().spill_fill), (3, [0, 0]));
    drop(opened);
    control.closed("buffers of their own");
}
