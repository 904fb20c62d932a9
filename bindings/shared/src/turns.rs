//! Turns at using a model, and waiting for its work.
//!
//! The work is done on a thread of its own. The calling thread waits as its language has to ([`Caller`]), and looks
//! meanwhile whether it is to stop, as by Ctrl-C: that cancels the work, and is returned when the work has ended. A
//! second one is returned at once.

use std::process;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use qhx::{CancelToken, Engine, Error, ErrorKind, catch_panic};

use crate::fault::{Ended, Fault, Result, Waited};

/// A thread of a language, which calls.
pub trait Caller {
    /// Why it is to wait no longer.
    type Stop;

    /// Waits, without what other threads of the language need.
    fn blocking<T: Send>(&self, wait: impl FnOnce() -> T + Send) -> T;

    /// Looks whether it is to stop.
    ///
    /// # Errors
    /// When it is.
    fn look(&self) -> std::result::Result<(), Self::Stop>;
}

/// Interval at which a waiting call checks if it has to stop.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Activity of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing.
    Idle,
    /// Something that ends by itself, for this thread, which waits for it.
    Working(Option<ThreadId>),
    /// A stream is open, which ends when it is asked to.
    Streaming,
}

/// A model that one call at a time uses.
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    engine: Mutex<Opened>,
    /// The process that opened it: threads are lost in a fork.
    process: u32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("state", &lock(&self.state)).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Cancels what is done now.
    ticket: CancelToken,
    closed: bool,
}

/// The engine, until the model is closed.
pub(crate) struct Opened {
    engine: Option<Engine>,
    /// It panicked, and has to be opened again.
    broken: bool,
}

impl Opened {
    /// Does work with the engine, which is opened again where it panicked before.
    fn with<T>(&mut self, work: impl FnOnce(&mut Engine) -> Result<T>) -> Result<T> {
        let engine = self.engine.as_mut().ok_or_else(closed)?;
        let broken = &mut self.broken;
        let result = catch_panic(|| {
            if *broken {
                engine.model_mut().reopen()?;
                *broken = false;
            }
            work(engine)
        });
        self.broken |= result.as_ref().is_err_and(Fault::is_panic);
        result
    }
}

fn closed() -> Fault {
    Fault::usage("the model is closed")
}

/// Nothing behind these locks is left half done by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// A model that does nothing yet.
    pub fn new(engine: Engine) -> Arc<Self> {
        let state = State { phase: Phase::Idle, ticket: CancelToken::new(), closed: false };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            engine: Mutex::new(Opened { engine: Some(engine), broken: false }),
            process: process::id(),
        })
    }

    /// The state. In a fork another thread may have held its lock, and nobody gives it back there.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.check_process()?;
        Ok(lock(&self.state))
    }

    /// True in the process that opened the model.
    pub(crate) fn is_here(&self) -> bool {
        self.process == process::id()
    }

    /// Refused in a fork, before anything is locked.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_here() {
            return Ok(());
        }
        let message = "the model was opened in another process, of which this one was forked";
        Err(Error::new(ErrorKind::Usage, message).hint("open the model after the fork").into())
    }

    /// True while something is done, or a stream is open.
    ///
    /// # Errors
    /// In another process than that which opened it.
    pub fn is_busy(&self) -> Result<bool> {
        Ok(self.state()?.phase != Phase::Idle)
    }

    /// Cancels what is done now. False where that is nothing.
    ///
    /// # Errors
    /// In another process than that which opened it.
    pub fn cancel(&self) -> Result<bool> {
        let state = self.state()?;
        state.ticket.cancel();
        Ok(state.phase != Phase::Idle)
    }

    /// Waits for a turn, which `ticket` cancels, and the waiting for it. While a stream is open, there is none.
    pub(crate) fn turn<C: Caller>(
        self: &Arc<Self>,
        caller: &C,
        ticket: &CancelToken,
        streams: bool,
    ) -> Waited<Turn, C::Stop> {
        let me = thread::current().id();
        let phase = if streams { Phase::Streaming } else { Phase::Working(Some(me)) };
        self.wait(caller, |state| match state.phase {
            _ if state.closed => Some(Err(closed())),
            _ if ticket.is_cancelled() => Some(ticket.check().map_err(Fault::from)),
            Phase::Idle => {
                state.phase = phase;
                state.ticket = ticket.clone();
                Some(Ok(()))
            }
            Phase::Streaming => Some(Err(Fault::busy(
                "a stream of this model is open",
                "read it to its end, or close it: stream.close()",
            ))),
            Phase::Working(Some(thread)) if thread == me => Some(Err(Fault::busy(
                "this thread waits for the model already: a signal handler cannot use it",
                "set a flag in the handler, and use the model when the call has returned",
            ))),
            Phase::Working(_) => None,
        })
        .map(|()| Turn { shared: Arc::clone(self), ticket: ticket.clone() })
    }

    /// Waits until `look` returns something.
    fn wait<C: Caller, T: Send>(
        &self,
        caller: &C,
        mut look: impl FnMut(&mut State) -> Option<Result<T>> + Send,
    ) -> Waited<T, C::Stop> {
        self.check_process()?;
        loop {
            let found = caller.blocking(|| {
                let mut state = lock(&self.state);
                look(&mut state).or_else(|| {
                    let waited = self.changed.wait_timeout(state, LOOK);
                    look(&mut waited.unwrap_or_else(PoisonError::into_inner).0)
                })
            });
            match found {
                Some(found) => return found.map_err(Ended::Fault),
                None => caller.look().map_err(Ended::Stopped)?,
            }
        }
    }

    /// Marks the work of this ticket as ending by itself, with no thread waiting for it. Others then wait for their
    /// turn, instead of being refused.
    pub(crate) fn leave(&self, ticket: &CancelToken) {
        let mut state = lock(&self.state);
        if state.phase != Phase::Idle && state.ticket == *ticket {
            state.phase = Phase::Working(None);
        }
    }

    /// Cancels what is done, waits for its end and frees the engine. Nothing can be done any more.
    ///
    /// # Errors
    /// In another process than that which opened it.
    pub fn close<C: Caller>(&self, caller: &C) -> Waited<(), C::Stop> {
        {
            let mut state = self.state()?;
            state.closed = true;
            state.ticket.cancel();
        }
        self.wait(caller, |state| (state.phase == Phase::Idle).then_some(Ok(())))?;
        caller.blocking(|| lock(&self.engine).engine = None);
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.is_here() {
            // Freeing it would wait for threads that a fork does not have.
            let opened = self.engine.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(opened.engine.take());
        }
    }
}

/// A turn, until it is dropped.
pub(crate) struct Turn {
    shared: Arc<Shared>,
    ticket: CancelToken,
}

impl Turn {
    /// Does `work` on a thread of its own. What it sends and what it returns come from the receiver, the latter when
    /// the turn is over; `failed` makes the same of its error.
    pub(crate) fn start<M: Send + 'static>(
        self,
        work: impl FnOnce(&mut Engine, &CancelToken, &Sender<M>) -> Result<M> + Send + 'static,
        failed: impl FnOnce(Fault) -> M + Send + 'static,
    ) -> Result<Receiver<M>> {
        on_thread(move |send| {
            let worked = {
                let mut engine = lock(&self.shared.engine);
                engine.with(|engine| work(engine, &self.ticket, send))
            };
            drop(self);
            worked.unwrap_or_else(failed)
        })
    }

    /// Same as [`Turn::start`], and waits for the result.
    pub(crate) fn finish<C: Caller, T: Send + 'static>(
        self,
        caller: &C,
        work: impl FnOnce(&mut Engine, &CancelToken) -> Result<T> + Send + 'static,
    ) -> Waited<T, C::Stop> {
        let (shared, ticket) = (Arc::clone(&self.shared), self.ticket.clone());
        let mut started = self.start(|engine, ticket, _| work(engine, ticket).map(Ok), Err)?;
        let result = receive(caller, &mut started, &ticket, |_| true);
        result.inspect_err(|_| shared.leave(&ticket))?.map_err(Ended::Fault)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.shared.state).phase = Phase::Idle;
        self.shared.changed.notify_all();
    }
}

/// Does `work` on a thread of its own. What it sends and what it returns come from the receiver.
pub(crate) fn on_thread<M: Send + 'static>(
    work: impl FnOnce(&Sender<M>) -> M + Send + 'static,
) -> Result<Receiver<M>> {
    let (send, receive) = mpsc::channel();
    let work = move || {
        let last = work(&send);
        // Nobody may wait for it any more.
        let _ = send.send(last);
    };
    let started = thread::Builder::new().name("qhx".to_owned()).spawn(work);
    started.map_err(|e| Error::caused(ErrorKind::Io, "a thread cannot be started", e))?;
    Ok(receive)
}

/// Waits for a message of a thread. Where the caller is to stop, its work is cancelled, and that is returned with the
/// message that is its last; a second time at once.
pub(crate) fn receive<C: Caller, M: Send>(
    caller: &C,
    messages: &mut Receiver<M>,
    ticket: &CancelToken,
    is_last: impl Fn(&M) -> bool,
) -> Waited<M, C::Stop> {
    let mut stop: Option<C::Stop> = None;
    loop {
        let waiting = &mut *messages;
        match (caller.blocking(move || waiting.recv_timeout(LOOK)), stop) {
            (Ok(message), None) => return Ok(message),
            (Ok(message), Some(stop)) if is_last(&message) => return Err(Ended::Stopped(stop)),
            (Err(RecvTimeoutError::Disconnected), None) => {
                return Err(
                    Error::new(ErrorKind::Internal, "the thread of the model is gone").into()
                );
            }
            (Err(RecvTimeoutError::Disconnected), Some(stop)) => return Err(Ended::Stopped(stop)),
            (_, before) => stop = before,
        }
        if let Err(asked) = caller.look() {
            ticket.cancel();
            if stop.is_some() {
                return Err(Ended::Stopped(asked));
            }
            stop = Some(asked);
        }
    }
}
