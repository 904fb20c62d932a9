//! Threads that compute one graph together.
//!
//! Between two matmuls of a decode step are some microseconds of other work. A thread of rayon that finds nothing to do
//! for so long goes to sleep, and to wake it takes longer than its share of the next matmul. So a graph takes the idle
//! threads of its pool for as long as it executes: they look for its next piece of work until it ends. A thread that
//! comes late or never is not waited for, only one that has begun a piece of work.

#![expect(unsafe_code, reason = "hands borrowed work to threads that stay for several pieces")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// How work is spread over threads.
pub(crate) enum Team {
    /// By nobody: the thread that has the work does it.
    Alone,
    /// By a thread to those that [`Team::gather`] took.
    Gathered(Board),
}

/// Where the thread that executes a graph posts its work.
pub(crate) struct Board {
    threads: usize,
    /// Number of the job in the upper half, then pieces that were taken, then all pieces. Who adds one took a piece.
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
/// Looks for work before the processor is offered to others.
const LOOKS: usize = 256;

impl Team {
    /// Calls `work` on a thread of the rayon pool that this is called in, with the pool's idle threads as its team.
    pub(crate) fn gather<T: Send>(work: impl FnOnce(&Self) -> T + Send) -> T {
        let threads = rayon::current_num_threads();
        let team = Self::Gathered(Board {
            threads,
            ticket: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            ended: AtomicBool::new(false),
        });
        let Self::Gathered(board) = &team else { return work(&team) };
        rayon::in_place_scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| board.help());
            }
            // Also when `work` panics, or the scope would wait for ever.
            let _end = End(board);
            work(&team)
        })
    }

    pub(crate) fn threads(&self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Gathered(board) => board.threads,
        }
    }

    /// Calls `f` with each of them, on several threads.
    pub(crate) fn each<T: Send>(&self, all: Vec<T>, f: impl Fn(T) + Sync) {
        match self {
            Self::Gathered(board) if board.threads > 1 && all.len() > 1 => {
                let all: Vec<_> = all.into_iter().map(|one| Mutex::new(Some(one))).collect();
                board.each(all.len(), &|index| {
                    let taken = all.get(index).and_then(|one| one.lock().ok()?.take());
                    if let Some(one) = taken {
                        f(one);
                    }
                });
            }
            Self::Gathered(_) | Self::Alone => all.into_iter().for_each(f),
        }
    }

    /// Computes parts of `to` of `part` elements each. `f` gets where a part begins.
    pub(crate) fn parts<T: Send>(
        &self,
        to: &mut [T],
        part: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        if to.len() <= part {
            return f(0, to);
        }
        let parts = to.chunks_mut(part).enumerate().collect();
        self.each(parts, |(index, out): (usize, &mut [T])| f(index * part, out));
    }
}

struct End<'a>(&'a Board);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
    }
}

impl Board {
    /// Calls `piece` with each number below `count`, and returns when all calls have.
    fn each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
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
    fn take(&self) -> bool {
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

    fn help(&self) {
        let mut looks = 0;
        while !self.ended.load(Ordering::Acquire) {
            if self.take() {
                looks = 0;
            } else {
                wait(&mut looks);
            }
        }
    }
}

/// A moment in which another thread gets on, or another program if it takes long.
fn wait(looks: &mut usize) {
    if *looks < LOOKS {
        *looks += 1;
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn every_piece_is_computed_once() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        pool.install(|| {
            Team::gather(|team| {
                for count in [1, 2, 7, 100, 70_000] {
                    let mut values = vec![0u32; count];
                    team.parts(&mut values, 1, |at, out| out[0] += at as u32 + 1);
                    assert!(values.iter().enumerate().all(|(at, value)| *value == at as u32 + 1));
                }
            });
        });
    }

    #[test]
    fn graphs_at_once_share_a_pool() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let sum = AtomicU32::new(0);
        let run = || {
            for _ in 0..200 {
                pool.install(|| {
                    Team::gather(|team| {
                        for _ in 0..20 {
                            team.each((0..8).collect(), |n| {
                                sum.fetch_add(n, Ordering::Relaxed);
                            });
                        }
                    });
                });
            }
        };
        std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(run))));
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 200 * 20 * 28);
    }

    #[test]
    fn a_panic_reaches_who_posted_the_work() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let found = catch_unwind(AssertUnwindSafe(|| {
            pool.install(|| {
                Team::gather(|team| team.each((0..64).collect(), |n: i32| assert!(n < 63)));
            });
        }));
        assert!(found.is_err());
        // The threads are free again.
        pool.install(|| Team::gather(|team| team.each(vec![1, 2], |_| {})));
    }
}
