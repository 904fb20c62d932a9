//! Keeps compiling and executing apart within one process.
//!
//! The library fails and crashes now and then when one thread compiles graphs while another
//! executes some, a lock around each call notwithstanding. Why is not known. It was seen when
//! others executed, or opened or closed a device, between two calls of a composition. So the rule
//! spans the whole of a composition: from the making of a context for compiling until it is freed,
//! no other thread composes, opens, executes or closes anything. Executions go side by side.
//!
//! | who | takes |
//! |---|---|
//! | a composition, and opening or closing a device | [`Exclusive`] |
//! | opening or closing a context that is executed | [`Exclusive`] on the emulator, [`Shared`] on a device: [`loading`] |
//! | opening or executing a graph, registering memory | [`Shared`] |
//!
//! The emulator runs what a device runs in the DSP's own process. There it crashes in two of five runs when two
//! threads read contexts at a time: one starts the threads of a graph, another reads a graph's nodes.
//!
//! A thread's own calls come one after the other, so that it may execute while it composes, and
//! compose several contexts at once. A composition stays on its thread ([`Exclusive`] is not
//! `Send`), which keeps that true, and no thread waits for itself.
//!
//! The calls in question are made in this module's siblings only, each under this gate, so that
//! safe code has no way around it.

use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use super::library::EMULATES;

#[derive(Debug)]
struct State {
    /// The thread that has the library for itself, and how often.
    owner: Option<(ThreadId, usize)>,
    /// Threads that wait to own it: no other thread's shared call begins before them.
    waiting: usize,
    /// Shared calls of all threads under way.
    calls: usize,
}

static STATE: Mutex<State> = Mutex::new(State { owner: None, waiting: 0, calls: 0 });
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// The library for this thread alone, until it is dropped.
#[derive(Debug)]
pub(crate) struct Exclusive(PhantomData<*const ()>);

impl Exclusive {
    /// Waits until no other thread uses the library. Not to be asked for within a [`Shared`] call.
    pub(crate) fn begin() -> Self {
        let this = std::thread::current().id();
        let mut state = lock();
        if let Some((owner, depth)) = &mut state.owner
            && *owner == this
        {
            *depth += 1;
            return Self(PhantomData);
        }
        state.waiting += 1;
        while state.owner.is_some() || state.calls > 0 {
            state = wait(state);
        }
        state.waiting -= 1;
        state.owner = Some((this, 1));
        Self(PhantomData)
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        let mut state = lock();
        state.owner = match state.owner {
            Some((owner, depth)) if depth > 1 => Some((owner, depth - 1)),
            _ => None,
        };
        if state.owner.is_none() {
            CHANGED.notify_all();
        }
    }
}

/// A call that goes beside others of its kind, until it is dropped.
#[derive(Debug)]
pub(crate) struct Shared(PhantomData<*const ()>);

impl Shared {
    /// Waits until no other thread has the library for itself.
    pub(crate) fn enter() -> Self {
        let this = std::thread::current().id();
        let mut state = lock();
        loop {
            let free = match state.owner {
                Some((owner, _)) => owner == this,
                None => state.waiting == 0,
            };
            if free {
                state.calls += 1;
                return Self(PhantomData);
            }
            state = wait(state);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut state = lock();
        state.calls -= 1;
        if state.calls == 0 {
            CHANGED.notify_all();
        }
    }
}

/// Guard for opening or closing a context of the library, held until it is dropped.
#[derive(Debug)]
pub(crate) enum Loading {
    Alone(Exclusive),
    Beside(Shared),
}

/// Waits until a context may be opened or closed. Not to be asked for within a [`Shared`] call.
pub(crate) fn loading() -> Loading {
    match EMULATES {
        true => Loading::Alone(Exclusive::begin()),
        false => Loading::Beside(Shared::enter()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    use super::*;

    /// Result of `work`, run on a thread of its own.
    fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
        let (send, receive) = channel();
        std::thread::spawn(move || send.send(work()));
        receive
    }

    /// The gate is the process's, so that one test walks through all of it.
    #[test]
    fn what_is_exclusive_and_what_is_shared_wait_for_each_other() {
        const SHORT: Duration = Duration::from_millis(50);
        const LONG: Duration = Duration::from_secs(20);
        let exclusive = || elsewhere(|| drop(Exclusive::begin()));
        let shared = || elsewhere(|| drop(Shared::enter()));
        // The owner goes on, as often as it likes.
        let (first, second) = (Exclusive::begin(), Exclusive::begin());
        drop(Shared::enter());
        drop(first);
        // Another thread waits until all of it is over.
        let (composes, executes) = (exclusive(), shared());
        assert!(composes.recv_timeout(SHORT).is_err() && executes.recv_timeout(SHORT).is_err());
        drop(second);
        composes.recv_timeout(LONG).unwrap();
        executes.recv_timeout(LONG).unwrap();
        // Shared calls go side by side. What is exclusive waits for them, and later ones for it.
        let call = Shared::enter();
        shared().recv_timeout(LONG).unwrap();
        let composes = exclusive();
        // A busy machine may start the thread late.
        let begun = Instant::now();
        while lock().waiting == 0 {
            assert!(begun.elapsed() < LONG, "nothing waits");
            std::thread::yield_now();
        }
        assert!(composes.recv_timeout(SHORT).is_err());
        let late = shared();
        assert!(late.recv_timeout(SHORT).is_err());
        drop(call);
        composes.recv_timeout(LONG).unwrap();
        late.recv_timeout(LONG).unwrap();
    }
}
