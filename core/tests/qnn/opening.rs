//! Opening libraries.

use std::path::Path;

use qhx_core::ErrorKind;
use qhx_core::qnn::{Device, LogLevel, SystemLibrary};

use crate::*;

#[test]
fn the_libraries_do_not_pass_for_one_another() {
    let Some(library) = tier() else { return };
    let error = SystemLibrary::open(library.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Runtime);
    assert!(error.message().contains("QnnSystemInterface_getProviders"), "{error}");
    let error = Library::open(library.system().path(), Some(library.system().path())).unwrap_err();
    assert!(error.message().contains("QnnInterface_getProviders"), "{error}");
}

#[test]
fn a_missing_library_is_named() {
    let Some(library) = tier() else { return };
    let error = Library::open(Path::new("/nowhere/libQnnHtp.so"), Some(library.system().path()))
        .unwrap_err();
    assert!(error.message().starts_with("/nowhere/libQnnHtp.so"), "{error}");
    let error = Library::open(library.path(), Some(Path::new("/nowhere/sys.so"))).unwrap_err();
    assert!(error.message().starts_with("/nowhere/sys.so"), "{error}");
}

#[test]
fn a_device_for_an_unknown_architecture_is_refused() {
    let Some(library) = tier() else { return };
    let unknown = Target { arch: 12, soc: 9999 };
    let error = Device::open(&library, LogLevel::Error, Some(unknown)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Runtime);
    assert!(error.message().contains("for v12"), "{error}");
    assert!(error.code().is_some());
}

#[test]
fn the_platform_is_described() {
    let Some(library) = tier() else { return };
    let platform = Device::open(&library, LogLevel::Error, None).unwrap().platform().unwrap();
    assert!(platform.arch.is_some_and(|arch| (68..200).contains(&arch)), "{platform:?}");
    assert!(platform.cores > 0 && platform.soc.is_some());
}

#[test]
fn the_library_has_words_for_its_codes() {
    let Some(library) = tier() else { return };
    let words = library.message(qhx_core::qnn::codes::Code(5005)).unwrap();
    assert!(!words.is_empty());
}

#[test]
fn contexts_opened_side_by_side_are_those_asked_for_in_that_order() {
    let Some(library) = tier() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = |seed: u32, bytes: &[u8]| {
        let path = folder.path().join(format!("{seed}.bin"));
        std::fs::write(&path, bytes).unwrap();
        ContextSource { key: seed.to_string(), binary: Some(path), ..ContextSource::default() }
    };
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
    // One that is no binary is told by name, and the others are closed again.
    sources[1] = source(22, b"no context binary");
    for threads in [1, 3] {
        let options = QnnOptions { open_threads: Some(threads), ..QnnOptions::default() };
        let error = backend(&library, options).open_contexts(&sources).unwrap_err();
        assert!(error.message().contains("22.bin"), "{error}");
    }
}
