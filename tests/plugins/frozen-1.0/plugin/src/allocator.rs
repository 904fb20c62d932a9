//! An allocator that puts a mark before every block and stops the program when it is asked to free
//! a block without one: memory of the host's must never be freed here.

use std::alloc::{GlobalAlloc, Layout, System};

struct Marked;

const MARK: u64 = 0x5158_4652_4f5a_454e;

fn with_mark(layout: Layout) -> Option<(Layout, usize)> {
    let (whole, offset) = Layout::new::<u64>().extend(layout).ok()?;
    Some((whole.pad_to_align(), offset))
}

// SAFETY: blocks come from the system allocator, larger by the mark that stands at their start.
unsafe impl GlobalAlloc for Marked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((whole, offset)) = with_mark(layout) else { return std::ptr::null_mut() };
        // SAFETY: not empty, since the mark is in it.
        let block = unsafe { System.alloc(whole) };
        if block.is_null() {
            return block;
        }
        // SAFETY: the mark and then `layout` lie in the block.
        unsafe {
            block.cast::<u64>().write(MARK);
            block.add(offset)
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let Some((whole, offset)) = with_mark(layout) else { std::process::abort() };
        // SAFETY: a block of `alloc`, or one that must be recognised as foreign; there, too, the
        // bytes before it belong to its allocator.
        let block = unsafe { pointer.sub(offset) };
        // SAFETY: as above.
        if unsafe { block.cast::<u64>().read() } != MARK {
            std::process::abort();
        }
        // SAFETY: allocated with this layout.
        unsafe {
            block.cast::<u64>().write(0);
            System.dealloc(block, whole);
        }
    }
}

#[global_allocator]
static ALLOCATOR: Marked = Marked;
