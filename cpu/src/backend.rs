//! The backend and its contexts.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{
    Backend, BackendInfo, Context, ContextSource, Graph, GraphExecutor, Opened,
};
use qhx_types::GraphInfo;
use rten::ThreadPool;

use crate::graph::CpuGraph;
use crate::model::{DataFiles, LoadedModel};
use crate::options::CpuOptions;

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
