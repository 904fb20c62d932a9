//! A backend that keeps what the graphs of another one wrote: rows of tokens in their order, states as they are now.

#![expect(
    unsafe_code,
    reason = "implements Graph, whose execute is unsafe to call, and reads its outputs"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{Backend, BackendInfo, Context, ContextSource, Graph, Opened};
use qhx_exec::bindings::Bindings;
use qhx_exec::{Buffer, Memory};
use qhx_types::{DType, GraphInfo, Port, TensorInfo};

/// Values of a tensor.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values {
    /// Values that belong together: those of a token, or all of a state.
    pub width: usize,
    /// All of them.
    pub values: Vec<f32>,
}

/// Written values by tensor name.
pub type Written = BTreeMap<String, Values>;

/// Wraps a backend.
#[derive(Debug)]
pub struct Observed {
    inner: Arc<dyn Backend>,
    written: Arc<Mutex<Written>>,
}

impl Observed {
    /// Nothing was written yet.
    pub fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self { inner, written: Arc::default() })
    }

    /// Values written since the last call.
    pub fn take(&self) -> Written {
        std::mem::take(&mut *self.written.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wrap(&self, inner: Arc<dyn Context>) -> Arc<dyn Context> {
        Arc::new(ObservedContext { inner, written: Arc::clone(&self.written) })
    }
}

impl Backend for Observed {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        self.inner.accepts(source)
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        Ok(self.wrap(self.inner.open_context(source)?))
    }

    fn open_contexts(&self, sources: &[ContextSource]) -> Result<Vec<Opened>> {
        let opened = self.inner.open_contexts(sources)?;
        let wrap = |Opened { context, time }| Opened { context: self.wrap(context), time };
        Ok(opened.into_iter().map(wrap).collect())
    }

    fn is_out_of_memory(&self, error: &Error) -> bool {
        self.inner.is_out_of_memory(error)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.inner.allocate(bytes)
    }
}

struct ObservedContext {
    inner: Arc<dyn Context>,
    written: Arc<Mutex<Written>>,
}

impl Context for ObservedContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        self.inner.graphs()
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let inner = self.inner.open_graph(index)?;
        let bindings = Bindings::new(inner.info())?;
        Ok(Box::new(ObservedGraph { inner, bindings, written: Arc::clone(&self.written) }))
    }

    fn resident_bytes(&self) -> u64 {
        self.inner.resident_bytes()
    }
}

struct ObservedGraph {
    inner: Box<dyn Graph>,
    bindings: Bindings,
    written: Arc<Mutex<Written>>,
}

impl Graph for ObservedGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        self.inner.info()
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        self.bindings.bind(port, memory, offset)?;
        self.inner.bind(port, memory, offset)
    }

    unsafe fn execute(&mut self) -> Result<()> {
        // SAFETY: bound, exclusive: the caller's contract is that of the graph behind this one.
        unsafe { self.inner.execute()? };
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, tensor) in self.inner.info().outputs.iter().enumerate() {
            // SAFETY: confined: the graph behind this one has returned. exclusive: nobody else writes the output until
            // this call returns, too. The slice ends here.
            let values = floats(tensor, unsafe { self.bindings.output(index)? })?;
            keep(&mut written, &self.inner.info().name, tensor, values);
        }
        Ok(())
    }
}

fn floats(tensor: &TensorInfo, bytes: &[u8]) -> Result<Vec<f32>> {
    match tensor.dtype {
        DType::F16 => {
            let values = bytes.as_chunks().0.iter();
            Ok(values.map(|value| f16::from_le_bytes(*value).to_f32()).collect())
        }
        DType::F32 => {
            Ok(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
        }
        _ => Err(Error::new(ErrorKind::Graph, format!("tensor {tensor}: expected f16 or f32"))),
    }
}

/// `y` has the rows of tokens along its first axis, `new_*` along the second. Both go below the rows that are there.
/// Anything else takes the place of what was there. The rows of each part of a model, `decode_p2` or `prefill128_p2`,
/// are kept apart.
fn keep(written: &mut Written, graph: &str, tensor: &TensorInfo, values: Vec<f32>) {
    let part = graph.rsplit_once("_p").map(|(_, part)| part);
    let part = part.filter(|part| part.bytes().all(|b| b.is_ascii_digit()));
    let name = match part {
        Some(part) if tensor.name == "y" => format!("y_p{part}"),
        _ => tensor.name.clone(),
    };
    let kept = written.entry(name).or_default();
    match tensor.shape[..] {
        [_, hidden] if tensor.name == "y" => {
            kept.width = hidden;
            kept.values.extend(values);
        }
        [heads, rows, width] if tensor.name.starts_with("new_") => {
            kept.width = heads * width;
            for row in 0..rows {
                for head in 0..heads {
                    let first = (head * rows + row) * width;
                    kept.values.extend_from_slice(&values[first..first + width]);
                }
            }
        }
        _ => *kept = Values { width: values.len(), values },
    }
}
