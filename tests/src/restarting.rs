//! A backend whose device restarts: at some execution, every open context is gone, and what was bound is overwritten.

#![expect(unsafe_code, reason = "implements Graph, whose execute is unsafe to call")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{Backend, BackendInfo, Context, ContextSource, Graph};
use qhx_exec::{Buffer, Memory};
use qhx_types::{GraphInfo, Port};

/// Wraps a backend.
#[derive(Debug)]
pub struct Restarting {
    inner: Arc<dyn Backend>,
    device: Arc<Device>,
}

#[derive(Debug)]
struct Device {
    /// Executions until it restarts.
    left: AtomicU64,
    /// Number of executions directly after that one which restart it as well.
    again: AtomicU64,
    /// Restarts so far.
    era: AtomicU64,
    opened: AtomicU64,
    /// Memory bound since the last restart, by address.
    bound: Mutex<BTreeMap<usize, Memory>>,
}

impl Device {
    fn bind(&self, memory: &Memory) {
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.entry(memory.as_ptr() as usize).or_insert_with(|| memory.clone());
    }

    /// Leaves bytes everywhere that are no number in any floating point format.
    ///
    /// # Safety
    /// The contract of [`Graph::execute`], for all graphs.
    unsafe fn crash(&self) {
        let bound = std::mem::take(&mut *self.bound.lock().unwrap_or_else(PoisonError::into_inner));
        for memory in bound.values().filter(|memory| memory.is_writable()) {
            // SAFETY: the caller's: nobody else reads or writes it now.
            unsafe { memory.bytes_mut() }.fill(0xff);
        }
    }

    fn lost(&self) -> Error {
        Error::new(ErrorKind::DeviceLost, "the connection to the DSP broke").with_code(1007)
    }
}

impl Restarting {
    /// A backend that does not restart until it is told to.
    pub fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        let [left, again, era, opened] = [u64::MAX, 0, 0, 0].map(AtomicU64::new);
        let bound = Mutex::default();
        Arc::new(Self { inner, device: Arc::new(Device { left, again, era, opened, bound }) })
    }

    /// Its device restarts at the `nth` execution from now on.
    pub fn restart_at(&self, nth: u64) {
        self.device.left.store(nth, Ordering::Relaxed);
    }

    /// Its device restarts at each of the next `times` executions over contexts that are not lost.
    pub fn restart_times(&self, times: u64) {
        self.device.again.store(times.saturating_sub(1), Ordering::Relaxed);
        self.restart_at(1);
    }

    /// Executions that are left until it restarts.
    pub fn left(&self) -> u64 {
        self.device.left.load(Ordering::Relaxed)
    }

    /// Contexts opened so far.
    pub fn opened(&self) -> u64 {
        self.device.opened.load(Ordering::Relaxed)
    }
}

impl Backend for Restarting {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        self.inner.accepts(source)
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        let (device, inner) = (Arc::clone(&self.device), self.inner.open_context(source)?);
        device.opened.fetch_add(1, Ordering::Relaxed);
        let era = device.era.load(Ordering::Relaxed);
        Ok(Arc::new(Restarted { inner, device, era }))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.inner.allocate(bytes)
    }
}

struct Restarted<T> {
    inner: T,
    device: Arc<Device>,
    era: u64,
}

impl Context for Restarted<Arc<dyn Context>> {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        self.inner.graphs()
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let inner = self.inner.open_graph(index)?;
        Ok(Box::new(Restarted { inner, device: Arc::clone(&self.device), era: self.era }))
    }
}

impl Graph for Restarted<Box<dyn Graph>> {
    fn info(&self) -> &Arc<GraphInfo> {
        self.inner.info()
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        self.device.bind(memory);
        self.inner.bind(port, memory, offset)
    }

    unsafe fn execute(&mut self) -> Result<()> {
        if self.device.era.load(Ordering::Relaxed) != self.era {
            return Err(self.device.lost());
        }
        if self.device.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            let again = self.device.again.load(Ordering::Relaxed);
            self.device.again.store(again.saturating_sub(1), Ordering::Relaxed);
            self.device.left.store(if again > 0 { 1 } else { u64::MAX }, Ordering::Relaxed);
            self.device.era.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller's contract, for the buffers of a model that executes one graph at a time.
            unsafe { self.device.crash() };
            return Err(self.device.lost());
        }
        // SAFETY: the caller's contract is that of the graph behind this one.
        unsafe { self.inner.execute() }
    }
}
