//! Memory that graphs read and write.
//!
//! A [`Buffer`] is the one owner of a block with a stable address: who has it reads the bytes through
//! `&` and writes them through `&mut`, like a `Vec`. A [`Memory`] is a handle to a block, a buffer's
//! or that of a mapped file: it keeps the block alive and lets nobody touch its bytes without
//! `unsafe`. Graphs keep the handle of everything bound to them, so that a pointer handed to a
//! library cannot dangle.
//!
//! # Guard pages
//! A library that is handed a buffer may write more than the file it loaded admits to. Every buffer
//! therefore ends at a page that nobody may touch: a write behind the end raises SIGSEGV there (on
//! Windows an access violation) and does not reach other memory. Buffers begin at multiples of
//! [`ALIGNMENT`], so that up to `ALIGNMENT - 1` bytes behind the end are not guarded where the
//! length is no multiple of it. A buffer takes whole pages, one more of address space, and two of
//! the system's mappings.
//!
//! # Storage
//! A block lies in pages of its own, in a mapped file, or in memory that a backend made
//! ([`crate::backend::Backend::allocate`]). The last has no guard page here: its backend declares what an
//! overrun does. Who reads and writes does not notice which it is.

#![expect(unsafe_code, reason = "owns raw memory that foreign libraries write to")]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};

/// Alignment of buffers: the widest vector load and the cache line of the device.
pub const ALIGNMENT: usize = 128;

/// A writable block of memory with one owner. It cannot be cloned; [`Buffer::memory`] is what
/// graphs are bound to.
pub struct Buffer(Memory);

/// A handle to a block that graphs read and write. Clones lead to the same block.
#[derive(Clone)]
pub struct Memory(Arc<Storage>);

enum Storage {
    /// The last page is the guard; `pointer` leads into the pages before.
    Pages {
        pointer: NonNull<u8>,
        len: usize,
        _pages: region::Allocation,
    },
    Mapped(Mapped),
    Backend {
        pointer: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    },
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
    ///
    /// # Errors
    /// When the system does not have the memory, or no memory has this size.
    pub fn zeroed(len: usize) -> Result<Self> {
        let fail = |why: &dyn fmt::Display| {
            let message = format!("a buffer of {len} bytes cannot be allocated: {why}");
            Error::new(ErrorKind::Graph, message)
                .hint("the model needs more memory than there is; a smaller context needs less")
        };
        let guard = region::page::size();
        let body = len.max(1).checked_next_multiple_of(ALIGNMENT);
        let sizes = body.and_then(|body| {
            let usable = body.checked_next_multiple_of(guard)?;
            let total = usable.checked_add(guard).filter(|&n| n <= isize::MAX as usize)?;
            Some((body, usable, total))
        });
        let Some((body, usable, total)) = sizes else {
            return Err(fail(&"it is larger than memory can be"));
        };
        let mut pages =
            region::alloc(total, region::Protection::READ_WRITE).map_err(|e| fail(&e))?;
        let base: *mut u8 = pages.as_mut_ptr();
        // SAFETY: the page behind the first `usable` bytes belongs to the allocation, and nothing
        // leads to it.
        unsafe { region::protect(base.wrapping_add(usable), guard, region::Protection::NONE) }
            .map_err(|e| fail(&e))?;
        // The body's end is the guard's beginning. Fresh pages of the system are zero.
        let pointer =
            NonNull::new(base.wrapping_add(usable - body)).ok_or_else(|| fail(&"NULL"))?;
        Ok(Self(Memory(Arc::new(Storage::Pages { pointer, len, _pages: pages }))))
    }

    /// A buffer over memory that `owner` frees when it is dropped.
    ///
    /// # Safety
    /// `pointer` leads to `len` initialised bytes, aligned to [`ALIGNMENT`], that live as long as
    /// `owner` and are reached through this buffer alone.
    pub unsafe fn owned_by(
        owner: Box<dyn Any + Send + Sync>,
        pointer: NonNull<u8>,
        len: usize,
    ) -> Self {
        Self(Memory(Arc::new(Storage::Backend { pointer, len, owner })))
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
    pub fn into_memory(self) -> Memory {
        self.0
    }
}

impl Memory {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &*self.0 {
            Storage::Pages { len, .. } | Storage::Backend { len, .. } => *len,
            Storage::Mapped(mapped) => mapped.len(),
        }
    }

    /// True for a block of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// False for a mapped file, which a graph may read and nobody may write.
    pub fn is_writable(&self) -> bool {
        !matches!(&*self.0, Storage::Mapped(_))
    }

    /// True when both lead to the same block.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Value that a backend keeps with memory of its own making, if it is a `T`.
    pub fn owner<T: Any>(&self) -> Option<&T> {
        match &*self.0 {
            Storage::Backend { owner, .. } => owner.downcast_ref(),
            Storage::Pages { .. } | Storage::Mapped(_) => None,
        }
    }

    /// The address of the first byte. Valid as long as a handle to the block lives.
    pub fn as_ptr(&self) -> *mut u8 {
        match &*self.0 {
            Storage::Pages { pointer, .. } | Storage::Backend { pointer, .. } => pointer.as_ptr(),
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

    /// The bytes, for writing. A mapped file returns an empty slice.
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
    fn memory_that_does_not_exist_is_an_error_with_its_size() {
        // More than any address space, more than any allocation, and just more than there is.
        for len in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096, 1 << 57] {
            let error = Buffer::zeroed(len).unwrap_err();
            let expected = format!("a buffer of {len} bytes cannot be allocated: ");
            assert!(error.message().starts_with(&expected), "{error}");
            assert!(error.hint_text().is_some());
        }
    }

    /// Runs a test of this module in a process of its own, which `variable` tells apart. `None` in that process.
    ///
    /// The mappings of a process are read in several calls, between which other tests map and unmap memory.
    fn alone(test: &str, variable: &str) -> Option<std::process::Output> {
        if std::env::var_os(variable).is_some() {
            return None;
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("buffer::tests::{test}")]).env(variable, "1");
        Some(command.output().unwrap())
    }

    #[test]
    fn a_buffer_is_zero_aligned_and_ends_at_a_guard_page() {
        let test = "a_buffer_is_zero_aligned_and_ends_at_a_guard_page";
        if let Some(output) = alone(test, "QHX_TEST_GUARD_PAGE") {
            assert!(output.status.success(), "{output:?}");
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
            return;
        }
        let page = region::page::size();
        for len in [0, 1, 127, 128, 129, page - 1, page, page + 1, 5 * page + 300] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            assert_eq!(buffer.bytes().len(), len);
            assert!(buffer.bytes().iter().all(|b| *b == 0));
            buffer.bytes_mut().fill(7);
            let start = buffer.memory().as_ptr().addr();
            assert!(start.is_multiple_of(ALIGNMENT));
            let guard = (start + len.max(1)).next_multiple_of(ALIGNMENT);
            assert!(guard.is_multiple_of(page), "{len}: the end is {} off", guard % page);
            let last = region::query((guard - 1) as *const u8).unwrap();
            let behind = region::query(guard as *const u8).unwrap();
            assert_eq!(last.protection(), region::Protection::READ_WRITE);
            assert_eq!(behind.protection(), region::Protection::NONE, "{len}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_write_behind_the_end_ends_the_process() {
        use std::os::unix::process::ExitStatusExt as _;
        let test = "a_write_behind_the_end_ends_the_process";
        let Some(output) = alone(test, "QHX_TEST_OVERRUN") else {
            let buffer = Buffer::zeroed(2 * ALIGNMENT).unwrap();
            let end = buffer.memory().as_ptr().wrapping_add(2 * ALIGNMENT);
            // SAFETY: none: this is what a library does whose file understates an output. The page
            // is the buffer's guard, so that the process ends here.
            unsafe { end.write_volatile(1) };
            return;
        };
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    }
}
