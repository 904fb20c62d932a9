//! The null backend: graphs of any declared shape that execute nothing.
//!
//! It measures what the host costs at the shapes of a published model, and with a script in place
//! of the arithmetic it tests host-ops without a device.

#![expect(unsafe_code, reason = "implements Graph, whose execute is unsafe to call")]

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::{GraphInfo, Port};

use crate::Memory;
use crate::backend::{Backend, BackendInfo, Context, ContextSource, Graph};
use crate::bindings::Bindings;

/// Script of a graph: reads its inputs, which are copies, and writes its outputs.
pub type Script = dyn FnMut(&GraphInfo, &[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send;

type Shared = Option<Arc<Mutex<Box<Script>>>>;

/// Contexts by manifest key, each with the graphs it declares.
#[derive(Clone)]
pub struct NullBackend {
    contexts: Vec<(String, Vec<Arc<GraphInfo>>)>,
    script: Shared,
    /// The script sees copies of the inputs; otherwise empty slices.
    inputs: bool,
}

impl NullBackend {
    /// Contexts whose graphs leave their outputs as they are.
    pub fn new(contexts: Vec<(String, Vec<GraphInfo>)>) -> Self {
        let share = |graphs: Vec<GraphInfo>| graphs.into_iter().map(Arc::new).collect();
        let contexts = contexts.into_iter().map(|(key, graphs)| (key, share(graphs))).collect();
        Self { contexts, script: None, inputs: true }
    }

    /// Runs `script` in place of every graph's arithmetic.
    #[must_use]
    pub fn with_script(
        mut self,
        script: impl FnMut(&GraphInfo, &[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send + 'static,
    ) -> Self {
        self.script = Some(Arc::new(Mutex::new(Box::new(script))));
        self
    }

    /// Runs `script`, which writes outputs and sees no inputs, in place of every graph's arithmetic.
    /// Nothing is copied, so that large inputs cost nothing.
    #[must_use]
    pub fn with_outputs(
        self,
        mut script: impl FnMut(&GraphInfo, &mut [&mut [u8]]) -> Result<()> + Send + 'static,
    ) -> Self {
        let scripted = self.with_script(move |info, _, outputs| script(info, outputs));
        Self { inputs: false, ..scripted }
    }
}

impl fmt::Debug for NullBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullBackend")
            .field("contexts", &self.contexts)
            .field("scripted", &self.script.is_some())
            .finish()
    }
}

impl Backend for NullBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "null".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            details: vec!["executes nothing".to_owned()],
        }
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        self.contexts.iter().any(|(key, _)| *key == source.key)
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        let Some((_, graphs)) = self.contexts.iter().find(|(key, _)| *key == source.key) else {
            let known: Vec<_> = self.contexts.iter().map(|(key, _)| key.as_str()).collect();
            return Err(Error::new(
                ErrorKind::Context,
                format!("the null backend declares no context {:?}", source.key),
            )
            .hint(format!("it declares {}", known.join(", "))));
        };
        let (graphs, script) = (graphs.clone(), self.script.clone());
        Ok(Arc::new(NullContext { graphs, script, inputs: self.inputs }))
    }
}

struct NullContext {
    graphs: Vec<Arc<GraphInfo>>,
    script: Shared,
    inputs: bool,
}

impl Context for NullContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.graphs
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let info = self.graphs.get(index).ok_or_else(|| {
            let count = self.graphs.len();
            Error::new(ErrorKind::Internal, format!("graph {index} of {count} does not exist"))
        })?;
        Ok(Box::new(NullGraph {
            info: Arc::clone(info),
            bindings: Bindings::new(info)?,
            script: self.script.clone(),
            inputs: self.inputs,
        }))
    }
}

struct NullGraph {
    info: Arc<GraphInfo>,
    bindings: Bindings,
    script: Shared,
    inputs: bool,
}

impl Graph for NullGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.info
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        self.bindings.bind(port, memory, offset)
    }

    unsafe fn execute(&mut self) -> Result<()> {
        let Some(script) = &self.script else { return Ok(()) };
        // Inputs are copied, so that a graph whose output lies in an input's buffer is defined.
        let mut inputs = Vec::new();
        for index in 0..self.info.inputs.len() {
            if !self.inputs {
                inputs.push(Vec::new());
                continue;
            }
            // SAFETY: contract of `crate::backend`: exclusive. The slice ends here.
            inputs.push(unsafe { self.bindings.input(index)? }.to_vec());
        }
        let mut ranges = Vec::new();
        for index in 0..self.info.outputs.len() {
            ranges.push(self.bindings.range(Port::Output(index))?);
        }
        for (i, a) in ranges.iter().enumerate() {
            if let Some(j) = ranges[..i].iter().position(|b| a.start < b.end && b.start < a.end) {
                let (a, b) = (&self.info.outputs[i].name, &self.info.outputs[j].name);
                let message = format!("outputs {b:?} and {a:?} are bound to the same memory");
                return Err(Error::new(ErrorKind::Graph, message));
            }
        }
        let mut outputs = Vec::new();
        for index in 0..self.info.outputs.len() {
            // SAFETY: contract of `crate::backend`: exclusive. The outputs' parts do not overlap, as
            // was just checked.
            outputs.push(unsafe { self.bindings.output(index)? });
        }
        let inputs: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
        let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
        script(&self.info, &inputs, &mut outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, Workspace};
    use qhx_base::CancelToken;
    use qhx_types::{DType, TensorInfo};

    fn graph() -> GraphInfo {
        GraphInfo::new(
            "double",
            [TensorInfo::new("x", DType::U8, [4])],
            [TensorInfo::new("y", DType::U8, [4]), TensorInfo::new("z", DType::U8, [2])],
        )
    }

    fn open(backend: NullBackend) -> (Workspace, crate::GraphId) {
        let source = ContextSource { key: "decode".to_owned(), ..ContextSource::default() };
        assert!(backend.accepts(&source));
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(Arc::new(backend), CancelToken::new());
        workspace.add_context("decode", &context).unwrap();
        let id = workspace.find_graph("double").unwrap().unwrap();
        (workspace, id)
    }

    fn backend() -> NullBackend {
        NullBackend::new(vec![("decode".to_owned(), vec![graph()])])
    }

    #[test]
    fn a_script_sees_inputs_and_writes_outputs_in_place() {
        let (mut workspace, graph) = open(backend().with_script(|info, inputs, outputs| {
            assert_eq!(info.name, "double");
            for (y, x) in outputs[0].iter_mut().zip(inputs[0]) {
                *y = 2 * x;
            }
            outputs[1].copy_from_slice(&inputs[0][..2]);
            Ok(())
        }));
        let shared = workspace.allocate(8).unwrap();
        workspace.bytes_mut(shared).unwrap()[..4].copy_from_slice(&[1, 2, 3, 4]);
        workspace.bind(graph, Port::Input(0), shared, 0).unwrap();
        workspace.bind(graph, Port::Output(0), shared, 0).unwrap();
        workspace.bind(graph, Port::Output(1), shared, 4).unwrap();
        workspace.execute(graph).unwrap();
        assert_eq!(workspace.bytes(shared).unwrap(), [2, 4, 6, 8, 1, 2, 0, 0]);

        workspace.bind(graph, Port::Output(1), shared, 3).unwrap();
        let error = workspace.execute(graph).unwrap_err();
        assert!(error.message().contains("\"y\" and \"z\" are bound to the same"), "{error}");
    }

    #[test]
    fn a_script_of_outputs_sees_no_inputs() {
        let (mut workspace, graph) = open(backend().with_outputs(|_, outputs| {
            outputs[1].fill(9);
            Ok(())
        }));
        let buffer = workspace.allocate(10).unwrap();
        for (port, offset) in [(Port::Input(0), 0), (Port::Output(0), 4), (Port::Output(1), 8)] {
            workspace.bind(graph, port, buffer, offset).unwrap();
        }
        workspace.execute(graph).unwrap();
        assert_eq!(workspace.bytes(buffer).unwrap(), [0, 0, 0, 0, 0, 0, 0, 0, 9, 9]);
    }

    #[test]
    fn without_a_script_nothing_is_written() {
        let (mut workspace, graph) = open(backend());
        let buffer = workspace.allocate(12).unwrap();
        workspace.bytes_mut(buffer).unwrap().fill(7);
        workspace.bind(graph, Port::Input(0), buffer, 0).unwrap();
        workspace.bind(graph, Port::Output(0), buffer, 4).unwrap();
        workspace.bind(graph, Port::Output(1), buffer, 8).unwrap();
        workspace.execute(graph).unwrap();
        assert_eq!(workspace.bytes(buffer).unwrap(), [7; 12]);
    }

    #[test]
    fn times_of_a_bundle_count_for_the_binary_alone() {
        let backend = Arc::new(backend());
        let mut source = ContextSource {
            key: "decode".to_owned(),
            us: vec![("other".to_owned(), 1.0), ("double".to_owned(), 2.5)],
            ..ContextSource::default()
        };
        for (binary, expected) in [(None, None), (Some("decode.bin".into()), Some(2.5))] {
            source.binary = binary;
            let context = backend.open_context(&source).unwrap();
            let backend = Arc::clone(&backend);
            let mut workspace = Workspace::new(backend, CancelToken::new());
            workspace.add_source(&source, &context).unwrap();
            let graph = workspace.find_graph("double").unwrap().unwrap();
            assert_eq!(workspace.graph_us(graph), expected);
        }
    }

    #[test]
    fn an_undeclared_context_is_named() {
        let source = ContextSource { key: "lmhead".to_owned(), ..ContextSource::default() };
        assert!(!backend().accepts(&source));
        let error = backend().open_context(&source).err().unwrap();
        assert!(error.message().contains("\"lmhead\""), "{error}");
        assert_eq!(error.hint_text(), Some("it declares decode"));
    }

    #[test]
    fn a_buffer_that_is_too_short_is_refused() {
        let mut bindings = Bindings::new(&graph()).unwrap();
        let buffer = Buffer::zeroed(6).unwrap();
        let error = bindings.bind(Port::Input(0), buffer.memory(), 3).unwrap_err();
        assert!(error.message().contains("\"x\": needs 4 bytes, the buffer has 3"), "{error}");
        assert!(bindings.bind(Port::Input(1), buffer.memory(), 0).is_err());
    }
}
