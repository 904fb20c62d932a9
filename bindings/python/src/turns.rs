//! Who may use a model now, and how a call waits for work.
//!
//! The work is done on a thread of its own. The calling thread waits without the interpreter's lock, and looks for
//! signals meanwhile: Ctrl-C cancels the work, and is raised when that has ended. A second Ctrl-C is raised at once.

use std::process;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use pyo3::{PyErr, PyResult, Python};
use qhx::{CancelToken, Engine, Error, ErrorKind, caught};

use crate::fault::{Fault, Result, raised};

/// How long a call waits before it looks for signals.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// What a model is doing.
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
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    engine: Mutex<Opened>,
    /// The process that opened it: threads are lost in a fork.
    process: u32,
}

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
        let broken = self.broken;
        let result = caught(|| {
            if broken {
                engine.model_mut().reopen()?;
            }
            work(engine)
        });
        self.broken = result.as_ref().is_err_and(Fault::is_panic);
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
    pub(crate) fn new(engine: Engine) -> Arc<Self> {
        let state = State { phase: Phase::Idle, ticket: CancelToken::new(), closed: false };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            engine: Mutex::new(Opened { engine: Some(engine), broken: false }),
            process: process::id(),
        })
    }

    /// True while something is done, or a stream is open.
    pub(crate) fn is_busy(&self) -> bool {
        lock(&self.state).phase != Phase::Idle
    }

    /// Cancels what is done now. False where that is nothing.
    pub(crate) fn cancel(&self) -> bool {
        let state = lock(&self.state);
        state.ticket.cancel();
        state.phase != Phase::Idle
    }

    /// Waits for a turn. While a stream is open, there is none.
    pub(crate) fn turn(self: &Arc<Self>, py: Python<'_>, streams: bool) -> PyResult<Turn> {
        let me = thread::current().id();
        let phase = if streams { Phase::Streaming } else { Phase::Working(Some(me)) };
        self.wait(py, |state| match state.phase {
            _ if state.closed => Some(Err(closed())),
            Phase::Idle => {
                state.phase = phase;
                state.ticket = CancelToken::new();
                Some(Ok(state.ticket.clone()))
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
        .map(|ticket| Turn { shared: Arc::clone(self), ticket })
    }

    /// Waits until `look` returns something.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        mut look: impl FnMut(&mut State) -> Option<Result<T>> + Send,
    ) -> PyResult<T> {
        if self.process != process::id() {
            let message = "the model was opened in another process, of which this one was forked";
            return raised(py, Err(Fault::usage(message)));
        }
        loop {
            let found = py.detach(|| {
                let mut state = lock(&self.state);
                look(&mut state).or_else(|| {
                    let waited = self.changed.wait_timeout(state, LOOK);
                    look(&mut waited.unwrap_or_else(PoisonError::into_inner).0)
                })
            });
            match found {
                Some(found) => return raised(py, found),
                None => py.check_signals()?,
            }
        }
    }

    /// What is done with this ticket ends by itself, and no thread waits for it: others wait for their turn, instead of
    /// being refused.
    pub(crate) fn leave(&self, ticket: &CancelToken) {
        let mut state = lock(&self.state);
        if state.phase != Phase::Idle && state.ticket == *ticket {
            state.phase = Phase::Working(None);
        }
    }

    /// Cancels what is done, waits for its end and frees the engine. Nothing can be done any more.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        {
            let mut state = lock(&self.state);
            state.closed = true;
            state.ticket.cancel();
        }
        self.wait(py, |state| (state.phase == Phase::Idle).then_some(Ok(())))?;
        py.detach(|| lock(&self.engine).engine = None);
        Ok(())
    }
}

/// A turn, until it is dropped.
pub(crate) struct Turn {
    shared: Arc<Shared>,
    ticket: CancelToken,
}

impl Turn {
    /// Cancels what is done in it.
    pub(crate) fn ticket(&self) -> &CancelToken {
        &self.ticket
    }

    /// Does `work` on a thread of its own. What it sends and what it returns come from the receiver, the latter when the
    /// turn is over; `failed` makes the same of its error.
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

    /// As [`Turn::start`], and waits for the result.
    pub(crate) fn finish<T: Send + 'static>(
        self,
        py: Python<'_>,
        work: impl FnOnce(&mut Engine, &CancelToken) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let (shared, ticket) = (Arc::clone(&self.shared), self.ticket.clone());
        let started = self.start(|engine, ticket, _| work(engine, ticket).map(Ok), Err);
        let result = receive(py, &mut raised(py, started)?, &ticket, |_| true);
        raised(py, result.inspect_err(|_| shared.leave(&ticket))?)
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

/// Waits for a message of a thread. Ctrl-C cancels its work, and is raised with the message that is its last; a second
/// one is raised at once.
pub(crate) fn receive<M: Send>(
    py: Python<'_>,
    messages: &mut Receiver<M>,
    ticket: &CancelToken,
    is_last: impl Fn(&M) -> bool,
) -> PyResult<M> {
    let mut interrupt: Option<PyErr> = None;
    loop {
        let waiting = &mut *messages;
        match (py.detach(move || waiting.recv_timeout(LOOK)), interrupt) {
            (Ok(message), None) => return Ok(message),
            (Ok(message), Some(interrupt)) if is_last(&message) => return Err(interrupt),
            (Err(RecvTimeoutError::Disconnected), None) => {
                let lost = Error::new(ErrorKind::Internal, "the thread of the model is gone");
                return raised(py, Err(lost.into()));
            }
            (Err(RecvTimeoutError::Disconnected), Some(interrupt)) => return Err(interrupt),
            (_, before) => interrupt = before,
        }
        if let Err(signal) = py.check_signals() {
            ticket.cancel();
            if interrupt.is_some() {
                return Err(signal);
            }
            interrupt = Some(signal);
        }
    }
}
