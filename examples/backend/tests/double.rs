//! The backend as a workspace uses it.

use std::sync::Arc;

use double_backend::{Block, DoubleBackend, ELEMENTS};
use qhx_exec::backend::{Backend as _, ContextSource};
use qhx_exec::{BufferId, CancelToken, ErrorKind, GraphId, Port, Workspace};

fn open() -> (Workspace, GraphId) {
    let backend = Arc::new(DoubleBackend);
    let context = backend.open_context(&ContextSource::default()).unwrap();
    let mut workspace = Workspace::new(backend, CancelToken::new());
    workspace.add_context("part", &context).unwrap();
    let graph = workspace.find_graph("part/double").unwrap().unwrap();
    (workspace, graph)
}

fn write(workspace: &mut Workspace, buffer: BufferId, values: [f32; ELEMENTS]) {
    let bytes = values.map(f32::to_le_bytes).concat();
    workspace.bytes_mut(buffer).unwrap()[..bytes.len()].copy_from_slice(&bytes);
}

fn read(workspace: &Workspace, buffer: BufferId) -> Vec<f32> {
    let values = workspace.bytes(buffer).unwrap().chunks_exact(4);
    values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn a_graph_doubles_in_memory_of_the_backend() {
    let (mut workspace, graph) = open();
    let [x, y] = [(); 2].map(|()| workspace.allocate(4 * ELEMENTS).unwrap());
    assert!(workspace.memory(x).unwrap().owner::<Block>().is_some());
    assert_eq!(read(&workspace, y), [0.0; ELEMENTS]);
    workspace.bind(graph, Port::Input(0), x, 0).unwrap();
    workspace.bind(graph, Port::Output(0), y, 0).unwrap();
    write(&mut workspace, x, [1.0, -2.0, 0.5, 3.0]);
    workspace.execute(graph).unwrap();
    assert_eq!(read(&workspace, y), [2.0, -4.0, 1.0, 6.0]);
    // Into the bytes that it reads.
    workspace.bind(graph, Port::Output(0), x, 0).unwrap();
    workspace.execute(graph).unwrap();
    assert_eq!(read(&workspace, x), [2.0, -4.0, 1.0, 6.0]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (mut workspace, graph) = open();
    let short = workspace.allocate(4 * ELEMENTS - 1).unwrap();
    let error = workspace.bind(graph, Port::Input(0), short, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Graph);
    let source = ContextSource { binary: Some("a.bin".into()), ..ContextSource::default() };
    assert!(!DoubleBackend.accepts(&source));
    assert!(DoubleBackend.open_context(&source).is_err());
}
