//! The backend and its contexts.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{
    Backend, BackendInfo, Context, ContextSource, Graph, GraphExecutor, Opened,
};
use qhx_types::GraphInfo;
use rten::ThreadPool;

use crate::graph::CpuGraph;
use crate::model::{DataFiles, LoadedModel};

/// Type that activations are rounded to in matmuls with int8 and 4-bit weights, where the processor has integer
/// instructions. Sums and everything between matmuls are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// 16 bits with a scale for each 32 columns: more exact than the f16 of an NPU, except for columns less than a
    /// thirtieth of the largest of their 32.
    #[default]
    Int16,
    /// 8 bits with a scale for each 32 columns, as llama.cpp does: faster, and less exact than f16.
    Int8,
}

impl Activations {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Int16, Self::Int8];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int16 => "int16",
            Self::Int8 => "int8",
        }
    }
}

impl FromStr for Activations {
    type Err = String;

    /// A choice by its name.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| "expected int16 or int8".to_owned())
    }
}

/// Type that key/value caches are stored as, where only attention reads them. Caches of int8 stay int8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Caches {
    /// Each key and value as it was computed.
    #[default]
    F32,
    /// The type on an NPU: half the memory, and half the bytes that a token reads of it. A number's error is up to
    /// 4.9e-4 of it, and one beyond 65504 becomes infinite.
    F16,
}

impl Caches {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::F32, Self::F16];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }
}

impl FromStr for Caches {
    type Err = String;

    /// A choice by its name.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| "expected f32 or f16".to_owned())
    }
}

/// Options for executing graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Threads of one graph; as many as there are physical cores where it is not given.
    pub threads: Option<usize>,
    /// For graphs that rten executes, keep copies of the weights in the layout of its matmuls: twice the memory, faster
    /// for graphs of many rows, of no use for a single row. Graphs that are programs have no such copies.
    pub prepack: bool,
    /// Type that activations are rounded to in matmuls with int8 and 4-bit weights. Graphs that rten executes, and
    /// processors without instructions for integers, have f32.
    pub activations: Activations,
    /// Type that key/value caches are stored as. Graphs that rten executes have f32.
    pub caches: Caches,
}

/// Executes graphs on the CPU. All contexts share its threads.
#[derive(Clone)]
pub struct CpuBackend {
    options: CpuOptions,
    threads: Option<Arc<ThreadPool>>,
}

impl CpuBackend {
    /// A backend with its own threads. Errors for 0 threads.
    pub fn new(options: CpuOptions) -> Result<Self> {
        if let Some(threads @ (0 | 1025..)) = options.threads {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("option threads: expected a number from 1 to 1024, found {threads}"),
            )
            .hint("leave it out for one thread per core"));
        }
        let threads = options.threads.map(|n| Arc::new(ThreadPool::with_num_threads(n)));
        Ok(Self { options, threads })
    }
}

impl fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuBackend").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Backend for CpuBackend {
    fn info(&self) -> BackendInfo {
        let threads = match self.options.threads {
            Some(n) => format!("threads: {n}"),
            None => "threads: one per physical core".to_owned(),
        };
        let prepack = format!("prepacked weights: {}", self.options.prepack);
        let activations = format!("activations: {}", self.options.activations.name());
        let caches = format!("caches: {}", self.options.caches.name());
        BackendInfo {
            name: "cpu".to_owned(),
            version: format!("{} on rten 0.27", env!("CARGO_PKG_VERSION")),
            details: vec![threads, prepack, activations, caches],
        }
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        !source.onnx.is_empty()
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        self.open(source, &mut DataFiles::new())
    }

    /// Files of weights that several contexts name are mapped once.
    fn open_contexts(&self, sources: &[ContextSource]) -> Result<Vec<Opened>> {
        let mut files = DataFiles::new();
        sources.iter().map(|source| Opened::by(|| self.open(source, &mut files))).collect()
    }
}

impl CpuBackend {
    /// Opens a context with the files of `files`, and adds its own.
    fn open(&self, source: &ContextSource, files: &mut DataFiles) -> Result<Arc<dyn Context>> {
        if source.onnx.is_empty() {
            return Err(Error::new(
                ErrorKind::Context,
                format!("context {:?} has no ONNX files, which the CPU backend runs", source.key),
            )
            .hint("forge the bundle with ONNX, or run it with the qnn backend"));
        }
        let mut models: Vec<Arc<LoadedModel>> = Vec::with_capacity(source.onnx.len());
        for (name, path) in &source.onnx {
            if models.iter().any(|m| m.info.name == *name) {
                let key = &source.key;
                let message = format!("context {key:?} names the graph {name:?} twice");
                return Err(Error::new(ErrorKind::Context, message));
            }
            let model = LoadedModel::open(name, path, source, &self.options, files)
                .map_err(|e| e.context(format_args!("context {:?}", source.key)))?;
            let by = model.executed_by().to_string();
            tracing::debug!(graph = name, path = %path.display(), by, "opened an ONNX graph");
            models.push(Arc::new(model));
        }
        let infos = models.iter().map(|m| Arc::clone(&m.info)).collect();
        Ok(Arc::new(CpuContext { models, infos, threads: self.threads.clone() }))
    }
}

struct CpuContext {
    models: Vec<Arc<LoadedModel>>,
    infos: Vec<Arc<GraphInfo>>,
    threads: Option<Arc<ThreadPool>>,
}

impl Context for CpuContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.infos
    }

    fn executors(&self) -> Vec<GraphExecutor> {
        self.models.iter().map(|model| model.executed_by()).collect()
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let model = self.models.get(index).ok_or_else(|| {
            let count = self.models.len();
            Error::new(ErrorKind::Internal, format!("graph {index} of {count} does not exist"))
        })?;
        Ok(Box::new(CpuGraph::new(Arc::clone(model), self.threads.clone())?))
    }

    fn resident_bytes(&self) -> u64 {
        let mut seen = HashSet::new();
        self.models.iter().map(|model| model.weight_bytes(&mut seen)).sum()
    }
}
