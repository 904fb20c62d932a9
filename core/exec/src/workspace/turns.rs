//! Turns of workspaces over the same contexts, which execute one at a time, and steps that several of them take
//! together.
//!
//! Who waits longest is next. A workspace that has its turn with a graph that is executed for several sequences at once
//! ([`Batch`]) takes those along that wait with the same graph: sequences join and leave between executions, and prompts
//! of others get their turns between them. It waits a moment for sequences that were among the last ones, whose host
//! work is short beside an execution, but never while a graph of another kind waits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qhx_base::Result;

use crate::Memory;
use crate::backend::Batch;

/// Part of an execution's time that is waited for sequences that were among the last ones.
const PATIENCE: u32 = 4;
/// Maximum time to wait for them.
const LONGEST_WAIT: Duration = Duration::from_millis(20);

/// A graph that is executed for several sequences at once.
pub(super) struct BatchedGraph {
    /// Its place in the order in which the graphs of a step are executed.
    order: (usize, usize),
    max: usize,
    batch: Mutex<Box<dyn Batch>>,
    /// Sequences of the last execution.
    expected: AtomicUsize,
    /// Nanoseconds of the last execution.
    took: AtomicU64,
}

impl BatchedGraph {
    pub(super) fn new(order: (usize, usize), batch: Box<dyn Batch>) -> Self {
        let (max, batch) = (batch.max(), Mutex::new(batch));
        Self { order, max, batch, expected: AtomicUsize::new(1), took: AtomicU64::new(0) }
    }

    fn patience(&self) -> Duration {
        let took = Duration::from_nanos(self.took.load(Ordering::Relaxed));
        (took / PATIENCE).min(LONGEST_WAIT)
    }

    /// Takes note of an execution.
    pub(super) fn executed(&self, sequences: usize, took: Duration) {
        self.expected.store(sequences, Ordering::Relaxed);
        self.took.store(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn batch(&self) -> MutexGuard<'_, Box<dyn Batch>> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a workspace has bound to the ports of a graph that others are executed with.
#[derive(Default)]
pub(super) struct Ports(Mutex<Vec<Option<(Memory, usize)>>>);

impl Ports {
    pub(super) fn new(count: usize) -> Self {
        Self(Mutex::new(vec![None; count]))
    }

    pub(super) fn bind(&self, port: usize, memory: &Memory, offset: usize) {
        if let Some(place) = self.lock().get_mut(port) {
            match place {
                Some((bound, at)) if bound.is_same(memory) => *at = offset,
                _ => *place = Some((memory.clone(), offset)),
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Option<(Memory, usize)>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An execution that took place.
#[derive(Clone)]
pub(super) struct Taken {
    pub elapsed: Duration,
    /// Sequences that it was for.
    pub sequences: usize,
    pub result: Result<()>,
}

/// A workspace's part in executions for several sequences.
#[derive(Clone)]
pub(super) struct Together {
    pub graph: Arc<BatchedGraph>,
    pub ports: Arc<Ports>,
}

/// Place of a workspace in the queue.
#[derive(Default)]
pub(super) struct Seat {
    state: Mutex<SeatState>,
    called: Condvar,
}

#[derive(Default)]
enum SeatState {
    #[default]
    Waits,
    /// It is the workspace's turn.
    Leads,
    /// Another workspace has executed the graph for it, or failed to.
    Done(Taken),
    /// An execution with others failed: it is to be executed alone.
    Alone,
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, SeatState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, state: SeatState) {
        *self.lock() = state;
        self.called.notify_one();
    }
}

struct Waiter {
    seat: Arc<Seat>,
    together: Option<Together>,
    /// Others that came later were called before it.
    passed_over: bool,
}

impl Waiter {
    fn is_of(&self, graph: &Arc<BatchedGraph>) -> bool {
        self.together.as_ref().is_some_and(|together| Arc::ptr_eq(&together.graph, graph))
    }

    fn order(&self) -> Option<(usize, usize)> {
        self.together.as_ref().map(|together| together.graph.order)
    }
}

#[derive(Default)]
struct Queue {
    busy: bool,
    waiting: VecDeque<Waiter>,
}

impl Queue {
    /// Who is next: the first, or, where that has a graph of a step with others, one whose step with them is not as far,
    /// so that they get into step. Nobody is passed over twice.
    fn next(&mut self) -> Option<Waiter> {
        let first = self.waiting.front_mut()?;
        let behind = first.order().filter(|_| !std::mem::replace(&mut first.passed_over, true));
        let index = behind.and_then(|order| {
            let earlier = |waiter: &Waiter| waiter.order().is_some_and(|other| other < order);
            self.waiting.iter().position(earlier)
        });
        self.waiting.remove(index.unwrap_or(0))
    }
}

/// The queue of all workspaces over the same contexts.
#[derive(Default)]
pub(super) struct Turns {
    queue: Mutex<Queue>,
    /// Notified when a workspace begins to wait.
    arrived: Condvar,
}

/// Outcome of waiting for a turn.
pub(super) enum Turn<'a> {
    /// It has come.
    Leads(Leading<'a>),
    /// The graph was executed with that of another workspace.
    Done(Taken),
    /// An execution with others failed: a turn alone is to be asked for.
    Alone,
}

impl Turns {
    /// Waits until no other workspace executes, or until one has executed the graph of `together` along with its own.
    pub(super) fn enter(&self, seat: &Arc<Seat>, together: Option<&Together>) -> Turn<'_> {
        let mut queue = self.lock();
        if !queue.busy {
            queue.busy = true;
            return Turn::Leads(Leading { turns: self });
        }
        *seat.lock() = SeatState::Waits;
        let (seat_of, together) = (Arc::clone(seat), together.cloned());
        queue.waiting.push_back(Waiter { seat: seat_of, together, passed_over: false });
        drop(queue);
        self.arrived.notify_all();
        let mut state = seat.lock();
        loop {
            match std::mem::take(&mut *state) {
                SeatState::Waits => {
                    state = seat.called.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                SeatState::Leads => return Turn::Leads(Leading { turns: self }),
                SeatState::Done(taken) => return Turn::Done(taken),
                SeatState::Alone => return Turn::Alone,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The turn of a workspace, which ends when this is dropped.
pub(super) struct Leading<'a> {
    turns: &'a Turns,
}

impl Leading<'_> {
    /// Takes those along that wait with the same graph.
    pub(super) fn gather(&self, graph: &Arc<BatchedGraph>) -> Company {
        let expected = graph.expected.load(Ordering::Relaxed).min(graph.max);
        let mut queue = self.turns.lock();
        if expected > 1 {
            let until = Instant::now() + graph.patience();
            loop {
                let here = queue.waiting.iter().filter(|waiter| waiter.is_of(graph)).count();
                let others = queue.waiting.iter().any(|waiter| waiter.together.is_none());
                let left = until.saturating_duration_since(Instant::now());
                if here + 1 >= expected || others || left.is_zero() {
                    break;
                }
                let waited = self.turns.arrived.wait_timeout(queue, left);
                queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let mut members = Vec::new();
        while members.len() + 1 < graph.max
            && let Some(index) = queue.waiting.iter().position(|waiter| waiter.is_of(graph))
        {
            members.extend(queue.waiting.remove(index));
        }
        Company { members }
    }
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        let mut queue = self.turns.lock();
        match queue.next() {
            Some(next) => next.seat.call(SeatState::Leads),
            None => queue.busy = false,
        }
    }
}

/// Workspaces that wait until another one has executed a graph for them. Those that nothing was reported to when this
/// is dropped execute alone.
pub(super) struct Company {
    members: Vec<Waiter>,
}

impl Company {
    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Their ports.
    pub(super) fn ports(&self) -> impl Iterator<Item = &Ports> {
        self.members.iter().filter_map(|waiter| Some(&*waiter.together.as_ref()?.ports))
    }

    /// Reports an execution to all of them.
    pub(super) fn done(mut self, taken: &Taken) {
        for member in self.members.drain(..) {
            member.seat.call(SeatState::Done(taken.clone()));
        }
    }
}

impl Drop for Company {
    fn drop(&mut self) {
        for member in self.members.drain(..) {
            member.seat.call(SeatState::Alone);
        }
    }
}
