//! Keeps compiling and executing apart within one process.
//!
//! The library fails and crashes now and then when one thread compiles graphs while another
//! executes some, a lock around each call notwithstanding: a context under composition does not
//! bear it that others execute between two of its calls. So the rule spans the whole of a
//! composition: from the making of a context for compiling until it is freed, no other thread
//! opens, executes or frees anything that is executed. It waits until the composition is over;
//! a composition waits until those calls are through. Compositions go side by side, and so do
//! executions.
//!
//! A thread's own calls come one after the other, so that it may execute while it composes. A
//! composition stays on its thread ([`Composing`] is not `Send`), which keeps that true. Two
//! threads that both compose and both execute would wait for each other for ever: there the call
//! fails.
//!
//! The calls in question are made in [`super::context`], [`super::backend`] and [`super::compose`]
//! only, each under this gate, so that safe code has no way around it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::{Error, ErrorKind, Result};

#[derive(Debug, Default)]
struct State {
    /// Compositions of all threads.
    composing: usize,
    /// Threads that wait to compose: no other call begins before them.
    waiting: usize,
    /// Calls of all threads under way.
    calls: usize,
}

static STATE: Mutex<State> = Mutex::new(State { composing: 0, waiting: 0, calls: 0 });
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// Compositions of this thread.
    static OWN: Cell<usize> = const { Cell::new(0) };
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// A composition of this thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct Composing(PhantomData<*const ()>);

impl Composing {
    /// Waits until no call is under way.
    pub(crate) fn begin() -> Self {
        let mut state = lock();
        state.waiting += 1;
        while state.calls > 0 {
            state = wait(state);
        }
        state.waiting -= 1;
        state.composing += 1;
        OWN.set(OWN.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for Composing {
    fn drop(&mut self) {
        lock().composing -= 1;
        OWN.set(OWN.get() - 1);
        CHANGED.notify_all();
    }
}

/// A call under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Call(PhantomData<*const ()>);

impl Call {
    /// Waits until no other thread composes. Fails where this thread composes, too.
    pub(crate) fn enter() -> Result<Self> {
        let own = OWN.get();
        let mut state = lock();
        while state.composing > own || (own == 0 && state.waiting > 0) {
            if own > 0 {
                return Err(Error::new(
                    ErrorKind::Context,
                    "two threads compile graphs, and one of them wants to execute some: \
                     the QNN library crashes when both happen at once",
                )
                .hint("drop the thread's Composer first, or compile in a process of its own"));
            }
            state = wait(state);
        }
        state.calls += 1;
        Ok(Self(PhantomData))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = lock();
        state.calls -= 1;
        if state.calls == 0 {
            CHANGED.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    /// What `work` answers with, on a thread of its own.
    fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
        let (send, receive) = channel();
        std::thread::spawn(move || send.send(work()));
        receive
    }

    /// The gate is the process's, so that one test walks through all of it.
    #[test]
    fn compositions_and_calls_of_different_threads_wait_for_each_other() {
        const SHORT: Duration = Duration::from_millis(50);
        const LONG: Duration = Duration::from_secs(20);
        let composing = Composing::begin();
        // Another composition, and calls of this thread, go on.
        elsewhere(|| drop(Composing::begin())).recv_timeout(LONG).unwrap();
        drop(Call::enter().unwrap());
        // A call of another thread waits until the composition is over.
        let call = elsewhere(|| Call::enter().map(drop));
        assert!(call.recv_timeout(SHORT).is_err());
        drop(composing);
        call.recv_timeout(LONG).unwrap().unwrap();
        // A composition waits for the calls under way; a new call waits for the composition.
        let first = Call::enter().unwrap();
        elsewhere(|| Call::enter().map(drop)).recv_timeout(LONG).unwrap().unwrap();
        let composition = elsewhere(|| drop(Composing::begin()));
        assert!(composition.recv_timeout(SHORT).is_err());
        let late = elsewhere(|| Call::enter().map(drop));
        assert!(late.recv_timeout(SHORT).is_err());
        drop(first);
        composition.recv_timeout(LONG).unwrap();
        late.recv_timeout(LONG).unwrap().unwrap();
        // Two threads that compose and execute would wait for each other.
        let (stop, until) = channel::<()>();
        let (send, begun) = channel();
        let other = std::thread::spawn(move || {
            let _composing = Composing::begin();
            send.send(()).unwrap();
            until.recv().unwrap_err();
        });
        begun.recv_timeout(LONG).unwrap();
        let composing = Composing::begin();
        let error = Call::enter().unwrap_err();
        assert!(error.message().contains("two threads compile"), "{error}");
        drop(stop);
        other.join().unwrap();
        Call::enter().unwrap();
        drop(composing);
    }
}
