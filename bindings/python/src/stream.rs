//! A generation that goes on as it is asked to.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pyo3::{PyResult, Python};
use qhx::{CancelToken, Model};

use crate::fault::{Fault, Result, raised};
use crate::media::Item;
use crate::request::Asked;
use crate::turns::{LOOK, Shared, receive};

/// What the thread of a stream sends.
enum Event {
    /// The prompt is tokenized and checked.
    Begun,
    /// A piece of the answer.
    Text(String),
    /// The end: the answer as JSON.
    Over(Result<String>),
}

impl Event {
    fn is_over(&self) -> bool {
        matches!(self, Self::Over(_))
    }
}

/// An open stream. It ends when it is dropped.
pub(crate) struct Stream {
    shared: Arc<Shared>,
    ticket: CancelToken,
    /// Until the end.
    pipe: Mutex<Option<Pipe>>,
    result: Mutex<Option<String>>,
}

struct Pipe {
    /// Asks for a piece. Where it is dropped, no more are wanted.
    demand: Sender<()>,
    events: Receiver<Event>,
}

impl Stream {
    /// Begins a generation, and returns when its prompt is checked.
    pub(crate) fn open(
        py: Python<'_>,
        shared: &Arc<Shared>,
        asked: Asked,
        items: Vec<Item>,
    ) -> PyResult<Self> {
        let turn = shared.turn(py, true)?;
        let ticket = turn.ticket().clone();
        let (demand, demands) = mpsc::channel();
        let started = turn.start(
            move |engine, ticket, events| {
                let answer = run(engine.model_mut(), asked, &items, ticket, &demands, events)?;
                Ok(Event::Over(Ok(answer)))
            },
            |fault| Event::Over(Err(fault)),
        );
        let mut events = raised(py, started)?;
        match receive(py, &mut events, &ticket, Event::is_over) {
            Ok(Event::Over(result)) => {
                // Cancelled before it began.
                let result = Mutex::new(Some(raised(py, result)?));
                Ok(Self { shared: Arc::clone(shared), ticket, pipe: Mutex::new(None), result })
            }
            Ok(_) => {
                let (pipe, result) = (Some(Pipe { demand, events }), Mutex::new(None));
                Ok(Self { shared: Arc::clone(shared), ticket, pipe: Mutex::new(pipe), result })
            }
            Err(interrupt) => {
                shared.leave(&ticket);
                Err(interrupt)
            }
        }
    }

    /// The next piece of the answer; `None` at its end.
    pub(crate) fn next(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let mut pipe = match self.pipe.try_lock() {
            Ok(pipe) => pipe,
            Err(TryLockError::Poisoned(pipe)) => pipe.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let message = "the stream is being read already";
                let busy = Fault::busy(message, "read a stream from one thread at a time");
                return raised(py, Err(busy));
            }
        };
        let Some(Pipe { demand, events }) = &mut *pipe else { return Ok(None) };
        // Where the thread ended by itself, its last event is there.
        let _ = demand.send(());
        match receive(py, events, &self.ticket, Event::is_over) {
            Ok(Event::Over(result)) => {
                *pipe = None;
                self.hold(raised(py, result)?);
                Ok(None)
            }
            Ok(Event::Text(text)) => Ok(Some(text)),
            Ok(Event::Begun) => Ok(Some(String::new())),
            Err(interrupt) => {
                *pipe = None;
                self.shared.leave(&self.ticket);
                Err(interrupt)
            }
        }
    }

    /// Ends it where it is, within one graph execution. Of another thread that reads it, too.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.ticket.cancel();
        let Ok(mut pipe) = self.pipe.try_lock() else { return Ok(()) };
        let Some(Pipe { demand, mut events }) = pipe.take() else { return Ok(()) };
        drop(demand);
        self.shared.leave(&self.ticket);
        loop {
            match receive(py, &mut events, &self.ticket, Event::is_over)? {
                Event::Over(result) => {
                    // What went wrong at the end of what nobody wants is not raised.
                    if let Ok(answer) = result {
                        self.hold(answer);
                    }
                    return Ok(());
                }
                Event::Begun | Event::Text(_) => {}
            }
        }
    }

    fn hold(&self, answer: String) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }

    /// The answer as JSON, once it is at its end.
    pub(crate) fn result(&self) -> Option<String> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.pipe.get_mut().unwrap_or_else(PoisonError::into_inner).is_some() {
            self.ticket.cancel();
            self.shared.leave(&self.ticket);
        }
    }
}

/// Generates on the thread of a stream, a piece for each demand.
fn run(
    model: &mut Model,
    asked: Asked,
    items: &[Item],
    ticket: &CancelToken,
    demands: &Receiver<()>,
    events: &Sender<Event>,
) -> Result<String> {
    let question = asked.question(model, items, ticket)?;
    let mut run = model.start(&question.request)?;
    // Where nobody waits for an event, the demands end, too.
    let _ = events.send(Event::Begun);
    loop {
        match demands.recv_timeout(LOOK) {
            Ok(()) => match run.next() {
                Some(text) => drop(events.send(Event::Text(text?))),
                None => break,
            },
            Err(RecvTimeoutError::Timeout) if !ticket.is_cancelled() => {}
            Err(_) => {
                run.stop()?;
                break;
            }
        }
    }
    let generation = run.finish()?;
    Ok(question.answer(&model.texts(), &generation)?)
}
