//! Inputs and outputs in memory that is registered with the contexts that use it.
//!
//! Memory of the heap ("raw") is copied to the DSP and back for each execution. Registered memory the
//! DSP reads and writes where it lies. Each [`Buffer`] of the QNN backend is one allocation of
//! [`Rpcmem`], and a tensor in it is registered once with each context that it is bound in, when it is
//! bound there first. From then on binding exchanges handles: no call, no allocation, no search where
//! two buffers take turns.
//!
//! # One allocation for each buffer
//! Several tensors of one buffer share its allocation, at offsets. Buffers share none: the DSP reaches
//! whole allocations, so that an output that is longer than its file admits to ends at its own buffer,
//! as it does on the heap at the guard page. A buffer takes whole pages, a file descriptor, and a
//! mapping on the DSP that is made when it is registered and not while tokens are.
//!
//! # Order
//! A handle belongs to a context. It is given back before its context is freed ([`Registrations::close`])
//! and before its memory is, whichever goes first: who has the entry has the allocation.

#![expect(unsafe_code, reason = "registers memory with the library's contexts")]

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::{Buffer, Memory};
use qhx_qnn_sys::{self as sys, Handle, HtpMemDescriptor, MemDescriptor, MemValue, Tensor};
use serde::{Deserialize, Serialize};

use super::codes;
use super::device::{Device, Raw, freed};
use super::gate::Shared;
use super::library::Library;
use super::rpcmem::{Allocation, Rpcmem};

/// Memory that the inputs and outputs of graphs lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// Registered where the device can do that, otherwise raw.
    #[default]
    Auto,
    /// In memory that host and DSP share. What cannot be registered is an error.
    Registered,
    /// On the heap; QNN copies it for each execution.
    Raw,
}

impl MemoryMode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Registered, Self::Raw];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Registered => "registered",
            Self::Raw => "raw",
        }
    }
}

impl FromStr for MemoryMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new(ErrorKind::Usage, format!("memory {name:?}, expected one of {names}"))
        })
    }
}

/// Makes the buffers of a backend, and finds tensors their places in them.
pub(crate) struct DeviceMemory {
    mode: MemoryMode,
    rpcmem: Option<Rpcmem>,
    /// Why there is no `rpcmem`.
    why: String,
    /// The library has reported that it registers no memory.
    refused: AtomicBool,
}

impl DeviceMemory {
    /// Opens libcdsprpc, at `path` if that is given, unless memory is to be raw.
    pub(crate) fn open(
        mode: MemoryMode,
        path: Option<&Path>,
        library: &Library,
        emulated: bool,
    ) -> Result<Self> {
        let opened = match mode {
            MemoryMode::Raw => Err("asked for".to_owned()),
            _ => {
                let table = library.table();
                let can = library
                    .need(table.mem_register, "memRegister")
                    .and_then(|_| library.need(table.mem_deregister, "memDeRegister"));
                match can.and_then(|_| Rpcmem::open(path)) {
                    Ok(rpcmem) => Ok(rpcmem),
                    Err(error) if mode == MemoryMode::Registered => {
                        return Err(error.context("--memory registered"));
                    }
                    Err(error) => {
                        let message = error.message();
                        if emulated {
                            tracing::debug!("memory is not registered: {message}");
                        } else {
                            tracing::warn!(
                                "memory is not registered, inputs and outputs are copied: {message}"
                            );
                        }
                        Err(message.to_owned())
                    }
                }
            }
        };
        let (rpcmem, why) = match opened {
            Ok(rpcmem) => (Some(rpcmem), String::new()),
            Err(why) => (None, why),
        };
        Ok(Self { mode, rpcmem, why, refused: AtomicBool::new(false) })
    }

    /// In a few words, what it does and why.
    pub(crate) fn describe(&self) -> String {
        match &self.rpcmem {
            Some(_) if self.refused.load(Ordering::Relaxed) => {
                "raw: the library registers none".to_owned()
            }
            Some(rpcmem) => format!("registered, through {}", rpcmem.path().display()),
            None => format!("raw: {}", self.why),
        }
    }

    /// `bytes` of zeroed memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let Some(rpcmem) = self.rpcmem.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed))
        else {
            return Buffer::zeroed(bytes);
        };
        match rpcmem.allocate(bytes) {
            Ok(allocation) => {
                let pointer = allocation.pointer();
                let block = Box::new(Block { allocation, contexts: Mutex::default() });
                // SAFETY: the allocation has that many zeroed bytes from the beginning of a page on,
                // the block frees it, and nobody else has the pointer.
                Ok(unsafe { Buffer::owned_by(block, pointer, bytes) })
            }
            Err(error) if self.mode == MemoryMode::Registered => Err(error),
            Err(error) => {
                tracing::warn!("{}; the buffer is raw, QNN copies it", error.message());
                Buffer::zeroed(bytes)
            }
        }
    }

    /// Place of a tensor of `bytes` bytes that begins at `offset` in `memory`, for the library: a handle where the
    /// memory can be registered, and otherwise its address.
    pub(crate) fn place(
        &self,
        context: &Arc<Registrations>,
        memory: &Memory,
        offset: usize,
        tensor: &Tensor,
        bytes: usize,
    ) -> Result<Place> {
        let raw = Place::Raw(memory.as_ptr().wrapping_add(offset));
        let Some(block) = memory.owner::<Block>() else { return Ok(raw) };
        if self.refused.load(Ordering::Relaxed) {
            return Ok(raw);
        }
        let must = self.mode == MemoryMode::Registered;
        match context.register(block, offset, tensor, bytes, must) {
            Ok(Some(handle)) => Ok(Place::Registered(handle)),
            Ok(None) => Ok(raw),
            Err(error) if self.mode == MemoryMode::Registered => Err(error),
            Err(error) => {
                if error.code() == Some(sys::STATUS_NOT_SUPPORTED.into()) {
                    self.refused.store(true, Ordering::Relaxed);
                    tracing::warn!("no memory is registered: {}", error.message());
                } else {
                    tracing::warn!("{}; the buffer is raw, QNN copies it", error.message());
                }
                Ok(raw)
            }
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceMemory").field(&self.describe()).finish()
    }
}

/// Access of the library to a tensor's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// By address; it copies them.
    Raw(*mut u8),
    /// By the handle of registered memory.
    Registered(Handle),
}

impl Place {
    /// Writes the place into a tensor of `bytes` bytes.
    pub(crate) fn write(self, tensor: &mut Tensor, bytes: u32) {
        match self {
            Self::Raw(pointer) => {
                tensor.mem_type = sys::MEM_RAW;
                tensor.data = pointer.cast();
                tensor.data_size = bytes;
            }
            Self::Registered(handle) => {
                tensor.mem_type = sys::MEM_HANDLE;
                tensor.data = handle;
                tensor.data_size = 0;
            }
        }
    }
}

/// The owner of a buffer's memory.
struct Block {
    allocation: Arc<Allocation>,
    /// Contexts that it is registered with.
    contexts: Mutex<Vec<Weak<Registrations>>>,
}

impl Drop for Block {
    fn drop(&mut self) {
        let contexts = self.contexts.get_mut().unwrap_or_else(PoisonError::into_inner);
        for context in contexts.iter().filter_map(Weak::upgrade) {
            let _call = Shared::enter();
            context.remove(|entry| Arc::ptr_eq(&entry.allocation, &self.allocation));
        }
    }
}

/// Memory registered with one context.
pub(crate) struct Registrations {
    context: Raw,
    device: Device,
    entries: Mutex<Vec<Entry>>,
    /// The context is freed.
    closed: AtomicBool,
}

struct Entry {
    allocation: Arc<Allocation>,
    offset: usize,
    bytes: usize,
    data_type: u32,
    /// `None`: the library would not.
    handle: Option<Raw>,
}

/// The code for memory that is registered already.
const ALREADY_REGISTERED: u64 = 8002;

impl Registrations {
    /// Nothing is registered yet.
    pub(crate) fn new(context: Raw, device: Device) -> Arc<Self> {
        Arc::new(Self {
            context,
            device,
            entries: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of a tensor in a block; `None` where the library refused it before. Where it `must` be
    /// registered, the library is asked each time.
    fn register(
        self: &Arc<Self>,
        block: &Block,
        offset: usize,
        tensor: &Tensor,
        bytes: usize,
        must: bool,
    ) -> Result<Option<Handle>> {
        let _call = Shared::enter();
        let mut entries = self.entries();
        if self.closed.load(Ordering::Acquire) {
            // Nothing is executed in it any more.
            return Ok(None);
        }
        let allocation = &block.allocation;
        let (data_type, mut known, mut longer) = (tensor.data_type, false, None);
        for entry in entries.iter().filter(|e| Arc::ptr_eq(&e.allocation, allocation)) {
            known = true;
            let Some(handle) = entry.handle else { return Ok(None) };
            if entry.offset == offset {
                if (entry.bytes, entry.data_type) == (bytes, data_type) {
                    return Ok(Some(handle.0));
                }
                if entry.bytes >= bytes {
                    longer = Some(handle);
                }
            }
        }
        if !known {
            let mut contexts = block.contexts.lock().unwrap_or_else(PoisonError::into_inner);
            contexts.retain(|context| context.strong_count() > 0);
            contexts.push(Arc::downgrade(self));
        }
        let handle = match (self.call(allocation, offset, tensor), longer) {
            // Some libraries distinguish handles by where memory begins alone: one handle then serves the
            // rows of a prompt's graph and the decoder's one.
            (Err(error), Some(longer)) if error.code() == Some(ALREADY_REGISTERED) => {
                return Ok(Some(longer.0));
            }
            (answer, _) => answer,
        };
        let entry = |handle| {
            let allocation = Arc::clone(allocation);
            Entry { allocation, offset, bytes, data_type, handle }
        };
        if handle.is_ok() || !must {
            entries.push(entry(handle.as_ref().ok().copied()));
        }
        handle.map(|handle| Some(handle.0))
    }

    fn call(&self, allocation: &Allocation, offset: usize, tensor: &Tensor) -> Result<Raw> {
        let library = self.device.library();
        let register = library.need(library.table().mem_register, "memRegister")?;
        let place = HtpMemDescriptor {
            kind: sys::HTP_MEM_SHARED_BUFFER,
            size: allocation.size() as u64,
            fd: allocation.fd(),
            offset: offset as u64,
        };
        let descriptor = MemDescriptor {
            rank: tensor.rank,
            dimensions: tensor.dimensions,
            shape_config: std::ptr::null(),
            data_type: tensor.data_type,
            mem_type: sys::MEM_CUSTOM,
            value: MemValue { custom: &raw const place },
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: contract: handles, arguments, answers; the allocation outlives its entry.
        let status = unsafe { register(self.context.0, &raw const descriptor, 1, &raw mut handle) };
        if status == 0 {
            return Ok(Raw(handle));
        }
        // SAFETY: contract: texts; the name is the graph's.
        let name = unsafe { super::library::text(tensor.name) };
        let size = allocation.size();
        let attempt = format!("registering {size} bytes of shared memory for tensor {name:?}");
        Err(codes::error(ErrorKind::Graph, attempt, status))
    }

    /// Gives everything back. For the context's last moment: nothing is registered afterwards.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.remove(|_| true);
    }

    fn remove(&self, which: impl Fn(&Entry) -> bool) {
        let mut entries = self.entries();
        let removed: Vec<Entry> = entries.extract_if(.., |entry| which(entry)).collect();
        let handles: Vec<Handle> = removed.iter().filter_map(|e| e.handle).map(|h| h.0).collect();
        let count = u32::try_from(handles.len()).unwrap_or(u32::MAX);
        if let (Some(deregister), 1..) = (self.device.library().table().mem_deregister, count) {
            // SAFETY: contract: handles (the context lives: it empties this list before it is freed),
            // arguments.
            freed("registered memory", unsafe { deregister(handles.as_ptr(), count) });
        }
        // Now the allocations may go.
        drop(removed);
    }
}

impl fmt::Debug for Registrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrations")
            .field("count", &self.entries().len())
            .finish_non_exhaustive()
    }
}
