//! The board where the thread that executes a graph posts work, and from which its team takes it piece by piece.
//!
//! All that synchronizes them is here, over the atomics and the `wait` of the module `sync` beside this one: those of
//! the standard library, and in `tests/loom` those of loom, which tries all orders in which threads may run and
//! see each other's writes.

#![expect(unsafe_code, reason = "hands borrowed work to threads that stay for several pieces")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::sync::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, wait};

/// Board on which the thread that executes a graph posts its work.
pub(crate) struct Board {
    /// Number of the job in the upper half, then pieces that were taken, then all pieces. A thread takes a piece
    /// by adding one.
    ticket: AtomicU64,
    /// The job of that number. It lives until all of its pieces are done.
    job: AtomicPtr<Job>,
    ended: AtomicBool,
}

struct Job {
    /// Computes a piece. The lifetime is a lie, which [`Board::each`] makes good.
    piece: &'static (dyn Fn(usize) + Sync),
    done: AtomicUsize,
    panicked: AtomicBool,
}

/// Bits of the ticket that count pieces.
const PIECES: u32 = 16;

impl Board {
    /// Without work.
    pub(crate) fn new() -> Self {
        Self {
            ticket: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            ended: AtomicBool::new(false),
        }
    }

    /// Calls `piece` with each number below `count`, and returns when all calls have.
    pub(crate) fn each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        const MOST: usize = (1 << PIECES) - 1;
        for first in (0..count).step_by(MOST) {
            let count = MOST.min(count - first);
            let shifted = |index: usize| piece(first + index);
            let shifted: &(dyn Fn(usize) + Sync) = &shifted;
            // SAFETY: nobody calls it after this function, which waits for all who began, and by then all pieces are
            // taken.
            let lasting = unsafe {
                std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(
                    shifted,
                )
            };
            let job =
                Job { piece: lasting, done: AtomicUsize::new(0), panicked: AtomicBool::new(false) };
            self.post(&job, count);
        }
    }

    fn post(&self, job: &Job, count: usize) {
        // The pieces of the job before are all taken: nobody takes the pointer for theirs.
        self.job.store(std::ptr::from_ref(job).cast_mut(), Ordering::Release);
        let number = (self.ticket.load(Ordering::Relaxed) >> (2 * PIECES)).wrapping_add(1);
        let ticket = (number << (2 * PIECES)) | (count as u64);
        self.ticket.store(ticket, Ordering::Release);
        while self.take() {}
        let mut looks = 0;
        while job.done.load(Ordering::Acquire) < count {
            wait(&mut looks);
        }
        if job.panicked.load(Ordering::Relaxed) {
            resume_unwind(Box::new("a piece of work panicked"));
        }
    }

    /// Computes a piece, if one is left.
    pub(crate) fn take(&self) -> bool {
        const ONE: u64 = 1 << PIECES;
        let mask = ONE - 1;
        let ticket = self.ticket.load(Ordering::Acquire);
        let (taken, count) = ((ticket >> PIECES) & mask, ticket & mask);
        if taken >= count {
            return false;
        }
        let job = self.job.load(Ordering::Acquire);
        // Fails where another took the piece, and where the job is not the one of the ticket any more.
        let mine =
            self.ticket.compare_exchange(ticket, ticket + ONE, Ordering::AcqRel, Ordering::Relaxed);
        if mine.is_ok() {
            debug_assert!(!job.is_null(), "a ticket is seen before its job");
            // SAFETY: the job of the ticket lives until all pieces are done, of which this is one.
            let job = unsafe { &*job };
            let done = catch_unwind(AssertUnwindSafe(|| (job.piece)(taken as usize)));
            if done.is_err() {
                job.panicked.store(true, Ordering::Relaxed);
            }
            job.done.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// Takes pieces of all jobs until [`Board::end`].
    pub(crate) fn help(&self) {
        let mut looks = 0;
        while !self.ended.load(Ordering::Acquire) {
            if self.take() {
                looks = 0;
            } else {
                wait(&mut looks);
            }
        }
    }

    /// Sends away those who help.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }
}
