//! Memory that graphs read and write.
//!
//! A [`Buffer`] is the one owner of a block with a stable address: who has it reads the bytes through
//! `&` and writes them through `&mut`, like a `Vec`. A [`Memory`] is a handle to a block, a buffer's
//! or that of a mapped file: it keeps the block alive and lets nobody touch its bytes without
//! `unsafe`. Graphs keep the handle of everything bound to them, so that a pointer handed to a
//! library cannot dangle.
//!
//! Today a block lies on the heap or in a mapped file; memory registered with a device becomes
//! another storage without a change of this interface.

#![expect(unsafe_code, reason = "owns raw memory that foreign libraries write to")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::artifacts::Mapped;
use crate::{Error, ErrorKind, Result};

/// Alignment of buffers: the widest vector load and the cache line of the device.
pub const ALIGNMENT: usize = 128;

/// A writable block of memory with one owner. It cannot be cloned; [`Buffer::memory`] is what
/// graphs are bound to.
pub struct Buffer(Memory);

/// A handle to a block that graphs read and write. Clones lead to the same block.
#[derive(Clone)]
pub struct Memory(Arc<Storage>);

enum Storage {
    Heap { pointer: NonNull<u8>, layout: Layout, len: usize },
    Mapped(Mapped),
}

// SAFETY: the storage is plain bytes without ties to a thread. Its bytes are reached through the
// one `Buffer`, whose borrows exclude each other, or through `unsafe` functions of `Memory`.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Buffer {
    /// `len` bytes, all zero.
    ///
    /// Memory that the system does not have is an error, and so are sizes that no memory has.
    pub fn zeroed(len: usize) -> Result<Self> {
        let fail = || {
            Error::new(ErrorKind::Graph, format!("a buffer of {len} bytes cannot be allocated"))
                .hint("the model needs more memory than there is; a smaller context needs less")
        };
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT).map_err(|_| fail())?;
        // SAFETY: the layout has a size of at least one byte.
        let pointer = unsafe { alloc_zeroed(layout) };
        let pointer = NonNull::new(pointer).ok_or_else(fail)?;
        Ok(Self(Memory(Arc::new(Storage::Heap { pointer, layout, len }))))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this is the block's one owner, so that the borrow excludes other safe access, and
        // who executes a graph has promised that no such borrow is alive.
        unsafe { self.0.bytes() }
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { self.0.bytes_mut() }
    }

    /// The handle that graphs are bound to.
    pub fn memory(&self) -> &Memory {
        &self.0
    }

    /// Gives up the only safe way to the bytes: whoever has the handle answers for them.
    pub(crate) fn into_memory(self) -> Memory {
        self.0
    }
}

impl Memory {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &*self.0 {
            Storage::Heap { len, .. } => *len,
            Storage::Mapped(mapped) => mapped.len(),
        }
    }

    /// True for a block of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// False for a mapped file, which a graph may read and nobody may write.
    pub fn is_writable(&self) -> bool {
        matches!(&*self.0, Storage::Heap { .. })
    }

    /// The address of the first byte. Valid as long as a handle to the block lives.
    pub fn as_ptr(&self) -> *mut u8 {
        match &*self.0 {
            Storage::Heap { pointer, .. } => pointer.as_ptr(),
            Storage::Mapped(mapped) => mapped.as_ptr().cast_mut(),
        }
    }

    /// The bytes.
    ///
    /// # Safety
    /// Nothing writes the block while the slice lives.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: pointer and length describe a live block; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// The bytes, for writing. A mapped file answers with an empty slice.
    ///
    /// # Safety
    /// Nothing else reads or writes the block while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "exclusive access is the caller's contract")]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        let len = if self.is_writable() { self.len() } else { 0 };
        // SAFETY: pointer and length describe a live block; the caller excludes all other access.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), len) }
    }
}

impl From<Mapped> for Memory {
    /// A mapped file, which graphs may read.
    fn from(mapped: Mapped) -> Self {
        Self(Arc::new(Storage::Mapped(mapped)))
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Self::Heap { pointer, layout, .. } = self {
            // SAFETY: allocated in `Buffer::zeroed` with this layout and freed only here.
            unsafe { dealloc(pointer.as_ptr(), *layout) }
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buffer").field(&self.0).finish()
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("len", &self.len())
            .field("writable", &self.is_writable())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_does_not_exist_is_an_error_that_says_how_much() {
        // More than any address space, more than any allocation, and just more than there is.
        for len in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096, 1 << 57] {
            let error = Buffer::zeroed(len).unwrap_err();
            let expected = format!("a buffer of {len} bytes cannot be allocated");
            assert!(error.message().starts_with(&expected), "{error}");
            assert!(error.hint_text().is_some());
        }
    }
}
