//! What executes graphs.
//!
//! A [`Backend`] opens [`Context`]s; a context opens [`Graph`]s; a graph has memory bound to its
//! ports and executes. Nothing here knows a model family or a file format other than through
//! [`ContextSource`].
//!
//! # Who may touch bound memory
//! A graph keeps handles ([`Memory`]) of what is bound to it and touches their bytes in
//! [`Graph::execute`] only, on the caller's word: every port is bound, and during the call nobody
//! else writes what is bound to an input, or reads or writes what is bound to an output. One graph
//! may have the same bytes bound as input and output. [`crate::Workspace`] keeps that word for
//! safe code; whoever calls `execute` otherwise keeps it alone.

#![expect(unsafe_code, reason = "declares the contract of executing over shared memory")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::artifacts::Mapped;
use crate::{Buffer, GraphInfo, Memory, Port, Result};

/// The files from which a context can be opened. Each backend takes the form it knows.
#[derive(Debug, Clone, Default)]
pub struct ContextSource {
    /// Key of the context in the manifest, for messages.
    pub key: String,
    /// QNN context binary.
    pub binary: Option<PathBuf>,
    /// ONNX files, one per graph. The name is that of the graph.
    pub onnx: Vec<(String, PathBuf)>,
    /// The folder that none of the files may lie outside of, links resolved; `None` for any.
    pub within: Option<PathBuf>,
}

impl ContextSource {
    /// Maps one of the files, or one that lies beside it.
    pub fn open(&self, path: &Path) -> Result<Mapped> {
        match &self.within {
            Some(folder) => Mapped::open_within(path, folder),
            None => Mapped::open(path),
        }
    }
}

/// What `qhx doctor` and `--json` say about a backend.
#[derive(Debug, Clone, Serialize)]
pub struct BackendInfo {
    /// `qnn`, `cpu` or `null`.
    pub name: String,
    /// Version and build of the library behind it.
    pub version: String,
    /// Anything else worth reading, one line each.
    pub details: Vec<String>,
}

/// Executes graphs.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Name and version.
    fn info(&self) -> BackendInfo;

    /// True when `source` holds a form of context that this backend can open.
    fn accepts(&self, source: &ContextSource) -> bool;

    /// Opens a context: reads the file, checks that it can run here, and loads it.
    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>>;

    /// Allocates zeroed memory that graphs of this backend can read and write.
    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Buffer::zeroed(bytes)
    }
}

/// A loaded set of graphs.
pub trait Context: Send + Sync {
    /// The graphs in the context.
    fn graphs(&self) -> &[Arc<GraphInfo>];

    /// Opens the graph at `index` of [`Context::graphs`]. The graph keeps its context alive.
    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>>;

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
    /// Called through [`crate::Workspace::bind`], which has checked length, alignment and
    /// writability. Binding again replaces what was bound and neither copies nor allocates.
    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()>;

    /// Executes over the bound memory. Returns when the outputs are written.
    ///
    /// # Safety
    /// The caller vouches for what the [module](self) says about bound memory.
    unsafe fn execute(&mut self) -> Result<()>;
}
