//! Objects behind a session's handle: a state, one generation at a time, its cancellation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::ThreadId;

use qhx::{CancelToken, Engine, catch_panic};

use crate::abi::Output;
use crate::callbacks::{self, Listener, Poll};
use crate::fault::{Fault, Result};
use crate::generate::generate;
use crate::input::Question;
use crate::model::Model;
use crate::output::Held;

/// A session.
pub(crate) struct Session {
    model: Arc<Model>,
    state: Mutex<State>,
    /// The generation under way: its ticket, and its thread.
    running: Mutex<Option<(CancelToken, ThreadId)>>,
    /// Its handle was freed.
    freed: AtomicBool,
}

struct State {
    /// There until the session ends.
    engine: Option<Engine>,
    held: Held,
    /// It panicked, and has to be opened again.
    broken: bool,
}

impl Session {
    pub(crate) fn new(model: Arc<Model>) -> Result<Self> {
        let state = State { engine: Some(model.take()?), held: Held::default(), broken: false };
        Ok(Self {
            model,
            state: Mutex::new(state),
            running: Mutex::new(None),
            freed: AtomicBool::new(false),
        })
    }

    fn running(&self) -> MutexGuard<'_, Option<(CancelToken, ThreadId)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, unless a generation has it.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(state)) => Ok(state.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let message =
                    "the session is in use: by a generation under way, or by another call";
                Err(Fault::busy(message.to_owned()))
            }
        }
    }

    /// Ends the generation under way.
    pub(crate) fn cancel(&self) {
        if let Some((ticket, _)) = &*self.running() {
            ticket.cancel();
        }
    }

    /// Forgets what was consumed.
    pub(crate) fn reset(&self) -> Result<()> {
        let mut state = self.state()?;
        state.held.clear();
        state.with_engine(|engine| Ok(engine.model_mut().reset()?))
    }

    /// Positions that were consumed.
    pub(crate) fn position(&self) -> Result<usize> {
        self.state()?.with_engine(|engine| Ok(engine.model_mut().op_mut().position()))
    }

    /// State of the positions consumed so far, as bytes that the session holds.
    pub(crate) fn export(&self) -> Result<(*const u8, usize)> {
        let mut state = self.state()?;
        // Two of them may be more than there is memory for. What was answered stays.
        state.held.hold_state(Vec::new());
        let bytes = state.with_engine(|engine| Ok(engine.model_mut().export_state()?))?;
        Ok(state.held.hold_state(bytes))
    }

    /// Goes on from such bytes, which may be those that the session holds.
    pub(crate) fn import(&self, bytes: &[u8]) -> Result<()> {
        self.state()?.with_engine(|engine| Ok(engine.model_mut().import_state(bytes)?))
    }

    /// Reads from the data held of the last answer.
    pub(crate) fn last<T>(&self, read: impl FnOnce(&Held) -> Result<T>) -> Result<T> {
        read(&self.state()?.held)
    }

    /// Refused where this thread is within a generation of the session.
    pub(crate) fn check_not_within(&self) -> Result<()> {
        match &*self.running() {
            Some((_, thread)) if *thread == std::thread::current().id() => Err(Fault::busy(
                "a callback of the session cannot free it: return from the generation first"
                    .to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Ends it: what another thread generates is cancelled and waited for.
    pub(crate) fn end(&self) {
        self.freed.store(true, Ordering::SeqCst);
        self.cancel();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.held.clear();
        if let Some(engine) = state.engine.take().filter(|_| !state.broken) {
            self.model.give_back(engine);
        }
    }

    /// Generates.
    pub(crate) fn generate(
        &self,
        question: Question,
        poll: Poll,
        listener: &mut Listener,
    ) -> Result<Output> {
        let mut state = self.state()?;
        let ticket = CancelToken::new();
        *self.running() = Some((ticket.clone(), std::thread::current().id()));
        let _running = Running(self);
        // Whoever frees it sets this first, and then cancels what runs.
        if self.freed.load(Ordering::SeqCst) {
            return Err(Fault::handle("the session was freed".to_owned()));
        }
        state.held.clear();
        let _asking = callbacks::asking(poll, &ticket);
        poll.ask(&ticket);
        let answer =
            state.with_engine(|engine| generate(engine, question, &ticket, poll, listener))?;
        Ok(state.held.hold(answer))
    }
}

/// A generation under way.
struct Running<'s>(&'s Session);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        *self.0.running() = None;
    }
}

impl State {
    /// Does work with the engine, opened again first where it panicked before.
    fn with_engine<T>(&mut self, work: impl FnOnce(&mut Engine) -> Result<T>) -> Result<T> {
        let freed = || Fault::handle("the session was freed".to_owned());
        let engine = self.engine.as_mut().ok_or_else(freed)?;
        let broken = &mut self.broken;
        let done = catch_panic(|| {
            if *broken {
                engine.model_mut().reopen()?;
                *broken = false;
            }
            work(engine)
        });
        self.broken |= done.as_ref().is_err_and(Fault::is_panic);
        done
    }
}
