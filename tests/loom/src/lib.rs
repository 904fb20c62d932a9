//! The thread team's board under loom: each order in which its threads may run, and each value that their orderings let
//! them see.
//!
//! loom compiles the board over atomics of its own. Data that pieces read and write lie in its cells, which panic where
//! an access is not ordered after another one.

#![cfg(test)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

#[path = "../../../cpu/src/team/board.rs"]
mod board;

use board::Board;

/// Synchronization primitives of the board.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

    /// Another thread gets on.
    pub(super) fn wait(_looks: &mut usize) {
        loom::thread::yield_now();
    }
}

/// Something that one thread at a time may use.
struct Slot(UnsafeCell<usize>);

// SAFETY: loom panics at two accesses of which neither is ordered after the other.
#[expect(unsafe_code, reason = "what loom watches is shared without a lock")]
unsafe impl Sync for Slot {}
// SAFETY: a number.
#[expect(unsafe_code, reason = "as above")]
unsafe impl Send for Slot {}

#[expect(unsafe_code, reason = "as above")]
impl Slot {
    fn new(value: usize) -> Self {
        Self(UnsafeCell::new(value))
    }

    fn get(&self) -> usize {
        // SAFETY: loom checks the access.
        self.0.with(|value| unsafe { *value })
    }

    fn set(&self, value: usize) {
        // SAFETY: as above.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}

/// Posts jobs of a number of pieces to threads that do as `helpers` say, one job after the other. Each piece reads what
/// was written before its job was posted, and writes what is read when the job is done.
fn explore(helpers: &'static [fn(&Board)], jobs: &'static [usize], preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let board = Arc::new(Board::new());
        let start = |help: &fn(&Board)| {
            let (board, help) = (Arc::clone(&board), *help);
            thread::spawn(move || help(&board))
        };
        let threads: Vec<_> = helpers.iter().map(start).collect();
        let given = Slot::new(0);
        for (number, count) in jobs.iter().enumerate() {
            given.set(number + 1);
            let results: Vec<Slot> = (0..*count).map(|_| Slot::new(0)).collect();
            board.each(*count, &|piece| {
                let before = results[piece].get();
                results[piece].set(before + given.get() * 10 + piece);
            });
            for (piece, result) in results.iter().enumerate() {
                // Computed, and once.
                assert_eq!(result.get(), (number + 1) * 10 + piece);
            }
        }
        board.end();
        threads.into_iter().for_each(|thread| thread.join().expect("a helper ends"));
    });
}

/// Looks for work once. Two threads that look until the end would only look at each other doing so.
fn once(board: &Board) {
    board.take();
}

#[test]
fn a_helper_gets_each_job_whole_until_the_end() {
    explore(&[Board::help], &[2, 2], 3);
}

#[test]
fn helpers_never_take_a_piece_twice() {
    explore(&[once, once], &[3], 3);
}

#[test]
fn a_helper_that_comes_late_takes_the_job_of_its_ticket() {
    explore(&[once, once], &[1, 2], 2);
}
