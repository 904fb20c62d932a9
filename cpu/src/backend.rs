//! The backend and its contexts.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{Backend, BackendInfo, Batch, Context, ContextSource, Graph, Opened};
use qhx_types::GraphInfo;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::graph::{CpuBatch, CpuGraph};
use crate::model::{DataFiles, LoadedModel};
use crate::options::CpuOptions;

/// Executes graphs on the CPU. All contexts share its threads.
#[derive(Clone)]
pub struct CpuBackend {
    options: CpuOptions,
    threads: Arc<ThreadPool>,
}

impl CpuBackend {
    /// A backend with its own threads; without a number of them, with those that all such backends share.
    ///
    /// # Errors
    /// For 0 threads or more than 1024, and when the system gives none.
    pub fn new(options: CpuOptions) -> Result<Self> {
        if let Some(threads @ (0 | 1025..)) = options.threads {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("option threads: expected a number from 1 to 1024, found {threads}"),
            )
            .hint("leave it out for one thread per core"));
        }
        let threads = match options.threads {
            Some(count) => Arc::new(pool(count)?),
            None => shared_pool()?,
        };
        Ok(Self { options, threads })
    }
}

fn pool(count: usize) -> Result<ThreadPool> {
    let named = ThreadPoolBuilder::new().num_threads(count).thread_name(|n| format!("qhx-cpu-{n}"));
    named.build().map_err(|e| {
        Error::caused(ErrorKind::Io, format_args!("starting {count} threads of the CPU backend"), e)
    })
}

/// One thread per physical core, for as long as a backend has them.
fn shared_pool() -> Result<Arc<ThreadPool>> {
    static SHARED: Mutex<Weak<ThreadPool>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = shared.upgrade() {
        return Ok(pool);
    }
    let pool = Arc::new(pool(num_cpus::get_physical().max(1))?);
    *shared = Arc::downgrade(&pool);
    Ok(pool)
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
        let activations = format!("activations: {}", self.options.activations.name());
        let caches = format!("caches: {}", self.options.caches.name());
        BackendInfo {
            name: "cpu".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            details: vec![threads, activations, caches],
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
            .hint("forge the bundle with --onnx, or run it with the qnn backend"));
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
            tracing::debug!(graph = name, path = %path.display(), "opened a graph");
            models.push(Arc::new(model));
        }
        let infos = models.iter().map(|m| Arc::clone(&m.info)).collect();
        Ok(Arc::new(CpuContext { models, infos, threads: Arc::clone(&self.threads) }))
    }
}

struct CpuContext {
    models: Vec<Arc<LoadedModel>>,
    infos: Vec<Arc<GraphInfo>>,
    threads: Arc<ThreadPool>,
}

impl Context for CpuContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.infos
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let model = self.models.get(index).ok_or_else(|| {
            let count = self.models.len();
            Error::new(ErrorKind::Internal, format!("graph {index} of {count} does not exist"))
        })?;
        Ok(Box::new(CpuGraph::new(Arc::clone(model), Arc::clone(&self.threads))?))
    }

    fn open_batch(&self, index: usize) -> Result<Option<Box<dyn Batch>>> {
        let model =
            self.models.get(index).filter(|model| model.program.reads_weights_for_one_row());
        let batch = model.map(|model| CpuBatch::new(Arc::clone(model), Arc::clone(&self.threads)));
        Ok(batch.transpose()?.map(|batch| Box::new(batch) as Box<dyn Batch>))
    }

    fn resident_bytes(&self) -> u64 {
        let mut seen = HashSet::new();
        self.models.iter().map(|model| model.weight_bytes(&mut seen)).sum()
    }
}
