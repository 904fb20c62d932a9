//! Backends, which execute graphs.
//!
//! A [`Backend`] opens [`Context`]s; a context opens [`Graph`]s; a graph has memory bound to its
//! ports and executes. Nothing here knows a model family or a file format other than through
//! [`ContextSource`].
//!
//! # Contract
//! Two sides meet at [`Graph`]: the *implementation* of a backend, which hands addresses to a library
//! or reads and writes them itself, and the *caller* of [`Graph::execute`]. For safe code the caller
//! is [`crate::Workspace`]; whoever calls `execute` otherwise keeps the caller's clauses alone. SAFETY
//! comments cite the clauses by name.
//!
//! | clause | who | guarantees |
//! |---|---|---|
//! | *alive* | implementation | A graph keeps a [`Memory`] handle of everything bound to it, and everything that it executes in: context, device, library. An address that it handed on is valid until the port is bound again or the graph is dropped. |
//! | *sized* | implementation | [`Graph::bind`] is safe to call. No byte is touched and no address handed on before the implementation itself has checked that the port exists, that the tensor's bytes lie within the memory from the offset on, that they are aligned where it needs that, and that an output's memory may be written. |
//! | *confined* | implementation | It touches bound bytes within `execute` only, and no thread of it does so any more when `execute` returns, be it with an error. Inputs are read. Of an output no byte but the tensor's is written. |
//! | *bound* | caller | Every port is bound when `execute` is called. |
//! | *exclusive* | caller | While `execute` runs, nobody else writes what is bound to an input, or reads or writes what is bound to an output. The same bytes may be bound to an input and an output of one graph, whose implementation copes with that. |
//! | *threads* | both | A [`Backend`] and a [`Context`] are called from any threads at once. A [`Graph`] is called from one thread at a time, and not always the same one. |
//!
//! An implementation relies on nothing else. Names, shapes and sizes come from a file that may be
//! hostile, so that every multiplication of them is checked. Inputs may hold any bits. After an error the
//! outputs may hold any bits, too, and the graph may be executed again.

#![expect(unsafe_code, reason = "declares a function that is unsafe to call")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::artifacts::{FirstSeen, Mapped};
use qhx_base::{Error, Result};
use qhx_types::{GraphInfo, Port};
use serde::Serialize;

use crate::{Buffer, Memory};

/// The files from which a context can be opened. Each backend takes the form it knows.
#[derive(Debug, Clone, Default)]
pub struct ContextSource {
    /// Key of the context in the manifest, for messages.
    pub key: String,
    /// A compiled binary of the device's library.
    pub binary: Option<PathBuf>,
    /// ONNX files, one per graph. The name is that of the graph.
    pub onnx: Vec<(String, PathBuf)>,
    /// The folder that none of the files may lie outside of, links resolved; `None` for any.
    pub within: Option<PathBuf>,
    /// Identity of the files when they were opened first.
    pub seen: FirstSeen,
    /// Graphs of the binary, and the microseconds that one execution takes, as far as the manifest declares it.
    pub us: Vec<(String, f64)>,
}

impl ContextSource {
    /// Maps one of the files, or one that lies beside it.
    ///
    /// # Errors
    /// The file cannot be mapped, lies elsewhere, or is another one than when it was opened first.
    pub fn open(&self, path: &Path) -> Result<Mapped> {
        self.seen.check(match &self.within {
            Some(folder) => Mapped::open_within(path, folder)?,
            None => Mapped::open(path)?,
        })
    }
}

/// Description of a backend, for `qhx doctor` and `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct BackendInfo {
    /// A short name, such as `cpu`.
    pub name: String,
    /// Version and build of the library behind it.
    pub version: String,
    /// Anything else worth reading, one line each.
    pub details: Vec<String>,
}

impl BackendInfo {
    /// Type that matmuls with quantized weights round activations to, if a line `activations: TYPE` of the details says
    /// it: `auto`, `int16` or `int8` of the CPU backend.
    pub fn activations(&self) -> Option<&str> {
        self.details.iter().find_map(|line| line.strip_prefix("activations: "))
    }

    /// Type that caches of keys and values are stored as, if a line `caches: TYPE` of the details says it: `f16` or
    /// `f32` of the CPU backend.
    pub fn caches(&self) -> Option<&str> {
        self.details.iter().find_map(|line| line.strip_prefix("caches: "))
    }

    /// The name, and what sets its results apart from those of the same backend by default: `cpu, int8 activations, f32
    /// caches`.
    pub fn label(&self) -> String {
        let activations = self.activations().filter(|to| *to != "auto");
        let caches = self.caches().filter(|to| *to != "f16");
        let parts = [(activations, "activations"), (caches, "caches")];
        let parts =
            parts.map(|(to, what)| to.map(|to| format!(", {to} {what}")).unwrap_or_default());
        format!("{}{}", self.name, parts.concat())
    }
}

/// Executes graphs.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Name and version.
    fn info(&self) -> BackendInfo;

    /// True when `source` holds a form of context that this backend can open.
    fn accepts(&self, source: &ContextSource) -> bool;

    /// Opens a context: reads the file, checks that it can run here, and loads it.
    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>>;

    /// Opens contexts whose graphs are executed one at a time, as those of one [`crate::Workspace`] are.
    /// Answers in the order of `sources`. The backend may open them side by side, and have them share
    /// what only an execution needs.
    fn open_contexts(&self, sources: &[ContextSource]) -> Result<Vec<Opened>> {
        sources.iter().map(|source| Opened::by(|| self.open_context(source))).collect()
    }

    /// True for an error of [`Backend::open_context`] for which there was too little memory beside what is loaded: the
    /// context may open once another one is closed.
    fn is_out_of_memory(&self, error: &Error) -> bool {
        let _ = error;
        false
    }

    /// Device that executes the graphs, if its results may differ from one device to the next: a text that is the same
    /// for devices of one kind. `None` if the results are those of this program.
    fn device(&self) -> Option<String> {
        None
    }

    /// True where another processor computes what the device would: right answers, at rates that are not the device's.
    fn emulates(&self) -> bool {
        false
    }

    /// Conditions of the device that may explain a slow execution: the power vote, restarts, temperatures.
    fn conditions(&self) -> Vec<String> {
        Vec::new()
    }

    /// Allocates zeroed memory that graphs of this backend can read and write.
    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Buffer::zeroed(bytes)
    }
}

/// An opened context.
pub struct Opened {
    /// It.
    pub context: Arc<dyn Context>,
    /// Time that opening it took.
    pub time: Duration,
}

impl Opened {
    /// Opens a context and takes the time.
    ///
    /// # Errors
    /// The error of `open`.
    pub fn by(open: impl FnOnce() -> Result<Arc<dyn Context>>) -> Result<Self> {
        let start = Instant::now();
        Ok(Self { context: open()?, time: start.elapsed() })
    }
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("time", &self.time).finish_non_exhaustive()
    }
}

/// A loaded set of graphs.
pub trait Context: Send + Sync {
    /// The graphs in the context.
    fn graphs(&self) -> &[Arc<GraphInfo>];

    /// Opens the graph at `index` of [`Context::graphs`]. The graph keeps its context alive.
    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>>;

    /// Opens what executes the graph at `index` for several sequences at once, if there is something.
    fn open_batch(&self, index: usize) -> Result<Option<Box<dyn Batch>>> {
        let _ = index;
        Ok(None)
    }

    /// Bytes that the context holds in memory, as far as is known.
    fn resident_bytes(&self) -> u64 {
        0
    }
}

/// A graph with buffers bound to its ports.
pub trait Graph: Send {
    /// Names, dtypes and shapes of inputs and outputs.
    fn info(&self) -> &Arc<GraphInfo>;

    /// Binds the bytes of `memory` from `offset` on to a port. The graph keeps a handle.
    ///
    /// [`crate::Workspace::bind`] checks first, so that all backends refuse in the same words.
    /// Binding again replaces what was bound and neither copies nor allocates.
    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()>;

    /// Executes over the bound memory. Returns when the outputs are written.
    ///
    /// # Safety
    /// The caller guarantees *bound* and *exclusive* of the [module's contract](self#contract).
    unsafe fn execute(&mut self) -> Result<()>;
}

/// Memory and the byte in it that a port's tensor begins at, for each input and then each output of a graph; `None` where
/// nothing is bound.
pub type BoundPorts = [Option<(Memory, usize)>];

/// A graph that is executed for several sequences at once, in less time than one after the other. Each sequence has what
/// it has bound to the graph's ports, and gets what [`Graph::execute`] would give it alone.
pub trait Batch: Send {
    /// Maximum number of sequences of an execution.
    fn max(&self) -> usize;

    /// Executes over the memory of `sequences`, from two to [`Batch::max`]. Returns when all outputs are written. After an
    /// error the outputs of all of them may hold any bits.
    ///
    /// # Safety
    /// The caller guarantees *bound* and *exclusive* of the [module's contract](self#contract) for the memory of each
    /// sequence, and that no two sequences have memory in common that either writes.
    unsafe fn execute(&mut self, sequences: &[&BoundPorts]) -> Result<()>;
}
