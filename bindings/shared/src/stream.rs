//! A generation that goes on as it is asked to.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use qhx::{CancelToken, Model};

use crate::fault::{Fault, Result, Waited};
use crate::media::Item;
use crate::request::{Answer, RequestJson};
use crate::turns::{Caller, LOOK, Shared, receive};

/// Message from the thread of a stream.
enum Event {
    /// The prompt is tokenized and checked.
    Begun,
    /// A piece of the answer.
    Text(String),
    /// The end, with the answer.
    Over(Result<Answer>),
}

impl Event {
    fn is_over(&self) -> bool {
        matches!(self, Self::Over(_))
    }
}

/// An open stream. It ends when it is dropped.
#[derive(Debug)]
pub struct Stream {
    shared: Arc<Shared>,
    ticket: CancelToken,
    /// Until the end.
    pipe: Mutex<Option<Pipe>>,
    result: Mutex<Option<Answer>>,
}

#[derive(Debug)]
struct Pipe {
    /// Asks for a piece. Where it is dropped, no more are wanted.
    demand: Sender<()>,
    events: Receiver<Event>,
}

impl Stream {
    /// Begins a generation that `ticket` cancels, and returns when its prompt is checked.
    ///
    /// # Errors
    /// When the model is in use by a stream or closed, or the request makes no sense.
    pub fn open<C: Caller>(
        caller: &C,
        shared: &Arc<Shared>,
        ticket: &CancelToken,
        asked: RequestJson,
        items: Vec<Item>,
    ) -> Waited<Self, C::Stop> {
        let (demand, demands) = mpsc::channel();
        let mut events = shared.turn(caller, ticket, true)?.start(
            move |engine, ticket, events| {
                let answer = run(engine.model_mut(), asked, &items, ticket, &demands, events)?;
                Ok(Event::Over(Ok(answer)))
            },
            |fault| Event::Over(Err(fault)),
        )?;
        let first = receive(caller, &mut events, ticket, Event::is_over);
        let (pipe, result) = match first.inspect_err(|_| shared.leave(ticket))? {
            // Cancelled before it began.
            Event::Over(result) => (None, Some(result?)),
            Event::Begun | Event::Text(_) => (Some(Pipe { demand, events }), None),
        };
        Ok(Self {
            shared: Arc::clone(shared),
            ticket: ticket.clone(),
            pipe: Mutex::new(pipe),
            result: Mutex::new(result),
        })
    }

    /// The next piece of the answer; `None` at its end.
    ///
    /// # Errors
    /// When the host-op fails, another thread reads it now, or this is a fork of the process that opened the model.
    pub fn next<C: Caller>(&self, caller: &C) -> Waited<Option<String>, C::Stop> {
        self.shared.check_process()?;
        let mut pipe = match self.pipe.try_lock() {
            Ok(pipe) => pipe,
            Err(TryLockError::Poisoned(pipe)) => pipe.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let message = "the stream is being read already";
                let busy = Fault::busy(message, "read a stream from one thread at a time");
                return Err(busy.into());
            }
        };
        let Some(Pipe { demand, events }) = &mut *pipe else { return Ok(None) };
        // Where the thread ended by itself, its last event is there.
        let _ = demand.send(());
        match receive(caller, events, &self.ticket, Event::is_over) {
            Ok(Event::Over(result)) => {
                *pipe = None;
                self.hold(result?);
                Ok(None)
            }
            Ok(Event::Text(text)) => Ok(Some(text)),
            Ok(Event::Begun) => Ok(Some(String::new())),
            Err(stop) => {
                *pipe = None;
                self.shared.leave(&self.ticket);
                Err(stop)
            }
        }
    }

    /// Ends it where it is, within one graph execution. Of another thread that reads it, too.
    ///
    /// # Errors
    /// When the caller is to stop before it has ended, and in a fork of the process that opened the model.
    pub fn close<C: Caller>(&self, caller: &C) -> Waited<(), C::Stop> {
        self.shared.check_process()?;
        self.ticket.cancel();
        let Ok(mut pipe) = self.pipe.try_lock() else { return Ok(()) };
        let Some(Pipe { demand, mut events }) = pipe.take() else { return Ok(()) };
        drop(demand);
        self.shared.leave(&self.ticket);
        loop {
            match receive(caller, &mut events, &self.ticket, Event::is_over)? {
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

    fn hold(&self, answer: Answer) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }

    /// The answer, once it is at its end.
    ///
    /// # Errors
    /// In a fork of the process that opened the model.
    pub fn result(&self) -> Result<Option<Answer>> {
        self.shared.check_process()?;
        Ok(self.result.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some(pipe) = self.pipe.get_mut().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        if self.shared.is_here() {
            self.ticket.cancel();
            self.shared.leave(&self.ticket);
        } else {
            // Its channels may be locked by a thread that a fork does not have.
            std::mem::forget(pipe);
        }
    }
}

/// Generates on the thread of a stream, a piece for each demand.
fn run(
    model: &mut Model,
    asked: RequestJson,
    items: &[Item],
    ticket: &CancelToken,
    demands: &Receiver<()>,
    events: &Sender<Event>,
) -> Result<Answer> {
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
    Ok(question.answer(&model.texts(), generation)?)
}
