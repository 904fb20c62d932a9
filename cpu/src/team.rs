//! Threads that compute one graph together.
//!
//! Between two matmuls of a decode step are some microseconds of other work. A thread of rayon that finds nothing to do
//! for so long goes to sleep, and to wake it takes longer than its share of the next matmul. So a graph takes the idle
//! threads of its pool for as long as it executes: they look for its next piece of work until it ends. A thread that
//! comes late or never is not waited for, only one that has begun a piece of work.

mod board;

use std::sync::Mutex;

use board::Board;

/// Types that the board synchronizes with.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

    /// Looks for work before the processor is offered to others.
    const LOOKS: usize = 256;

    /// A moment in which another thread gets on, or another program if it takes long.
    pub(super) fn wait(looks: &mut usize) {
        if *looks < LOOKS {
            *looks += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// Threads that share work.
pub(crate) enum Team {
    /// No others: the thread that has the work does it.
    Alone,
    /// Threads that [`Team::gather`] took, which get work from one of them.
    Gathered {
        /// Board on which it posts its work.
        board: Board,
        /// All threads.
        threads: usize,
    },
}

impl Team {
    /// Calls `work` on a thread of the rayon pool that this is called in, with the pool's idle threads as its team.
    pub(crate) fn gather<T: Send>(work: impl FnOnce(&Self) -> T + Send) -> T {
        let threads = rayon::current_num_threads();
        let team = Self::Gathered { board: Board::new(), threads };
        let Self::Gathered { board, .. } = &team else { return work(&team) };
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
            Self::Gathered { threads, .. } => *threads,
        }
    }

    /// Calls `f` with each of them, on several threads.
    pub(crate) fn each<T: Send>(&self, all: Vec<T>, f: impl Fn(T) + Sync) {
        match self {
            Self::Gathered { board, threads: 2.. } if all.len() > 1 => {
                let all: Vec<_> = all.into_iter().map(|one| Mutex::new(Some(one))).collect();
                board.each(all.len(), &|index| {
                    let taken = all.get(index).and_then(|one| one.lock().ok()?.take());
                    if let Some(one) = taken {
                        f(one);
                    }
                });
            }
            Self::Gathered { .. } | Self::Alone => all.into_iter().for_each(f),
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
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicU32, Ordering};

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
