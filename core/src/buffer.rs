//! Memory that graphs read and write.
//!
//! A [`Buffer`] is a reference-counted block with a stable address: graphs keep a clone of every
//! buffer bound to them, so that a pointer handed to a library cannot dangle. Today the block lies
//! on the heap or in a mapped file; memory registered with a device becomes another storage
//! without a change of this interface.

#![expect(unsafe_code, reason = "owns raw memory that foreign libraries write to")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::artifacts::Mapped;
use crate::{Error, ErrorKind, Result};

/// Alignment of heap buffers: the widest vector load and the cache line of the device.
pub const ALIGNMENT: usize = 128;

/// A block of memory that graphs read and write. Cloning shares the block.
#[derive(Clone)]
pub struct Buffer(Arc<Storage>);

enum Storage {
    Heap { pointer: NonNull<u8>, layout: Layout, len: usize },
    Mapped(Mapped),
}

// SAFETY: the storage is plain bytes. Concurrent access is excluded by the callers of `bytes` and
// `bytes_mut`, whose contract is stated there.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Buffer {
    /// `len` zeroed bytes on the heap.
    pub fn heap(len: usize) -> Result<Self> {
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT).map_err(|_| {
            Error::new(ErrorKind::Graph, format!("a buffer of {len} bytes cannot be allocated"))
        })?;
        // SAFETY: the layout has a size of at least one byte.
        let pointer = unsafe { alloc_zeroed(layout) };
        let pointer = NonNull::new(pointer).unwrap_or_else(|| handle_alloc_error(layout));
        Ok(Self(Arc::new(Storage::Heap { pointer, layout, len })))
    }

    /// A read-only view of a mapped file.
    pub fn mapped(mapped: Mapped) -> Self {
        Self(Arc::new(Storage::Mapped(mapped)))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &*self.0 {
            Storage::Heap { len, .. } => *len,
            Storage::Mapped(mapped) => mapped.len(),
        }
    }

    /// True for a buffer of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// False for a mapped file, which a graph may read and nobody may write.
    pub fn is_writable(&self) -> bool {
        matches!(&*self.0, Storage::Heap { .. })
    }

    /// The address of the first byte. Valid as long as a clone of the buffer lives.
    pub fn as_ptr(&self) -> *mut u8 {
        match &*self.0 {
            Storage::Heap { pointer, .. } => pointer.as_ptr(),
            Storage::Mapped(mapped) => mapped.as_ptr().cast_mut(),
        }
    }

    /// True when both are the same block.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The bytes.
    ///
    /// # Safety
    /// Nothing may write the block while the slice lives: no `bytes_mut`, no executing graph that
    /// has the buffer bound as an output.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: pointer and length describe a live block; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// The bytes, for writing. A read-only buffer answers with an empty slice.
    ///
    /// # Safety
    /// Nothing else may read or write the block while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive access is the caller's contract")]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        let len = if self.is_writable() { self.len() } else { 0 };
        // SAFETY: pointer and length describe a live block; the caller excludes all other access.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), len) }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Self::Heap { pointer, layout, .. } = self {
            // SAFETY: allocated in `Buffer::heap` with this layout and freed only here.
            unsafe { dealloc(pointer.as_ptr(), *layout) }
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len())
            .field("writable", &self.is_writable())
            .finish()
    }
}
