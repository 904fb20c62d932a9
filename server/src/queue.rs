//! Jobs that wait for their turn.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use qhx::{
    Beginning, CancelToken, Generation, Ranked, Request, Role, Source, TokenLogprobs, Transcript,
};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::conversation::Turn;
use crate::error::ApiError;
use crate::memory::Memory;
use crate::registry::Served;

/// Work of a model for a request.
#[derive(Debug)]
pub(crate) struct Job {
    pub model: Arc<Served>,
    /// Client that asks. Turns go first to clients for whom less work is under way.
    pub client: u64,
    /// Stops it within one graph execution.
    pub ticket: CancelToken,
    pub work: Work,
    /// The conversation, a hash a message: which session has it in its state.
    pub history: Vec<u64>,
    pub updates: Outbox,
    #[expect(dead_code, reason = "held until the job is over")]
    pub memory: Memory,
}

/// Interval at which a waiting worker checks its ticket.
const LOOK: Duration = Duration::from_millis(100);

/// Takes the updates of a job.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub updates: mpsc::Sender<Update>,
    /// Runs the wait of a worker.
    pub runtime: Handle,
    /// Time for which a client may read nothing.
    pub patience: Duration,
    pub ticket: CancelToken,
}

impl Outbox {
    /// Sends an update. False once nobody waits for it any more, or the client has read nothing for too long.
    pub(crate) fn send(&self, update: Update) -> bool {
        // The last place is that of the end.
        if self.updates.capacity() > 1 {
            return self.updates.try_send(update).is_ok();
        }
        let until = Instant::now() + self.patience;
        while !self.ticket.is_cancelled() && Instant::now() < until {
            let room = async { timeout(LOOK, self.updates.reserve_many(2)).await };
            match self.runtime.block_on(room) {
                Ok(Ok(mut room)) => {
                    return room.next().map(|place| place.send(update)).is_some();
                }
                Ok(Err(_)) => return false,
                Err(_) => {}
            }
        }
        false
    }

    /// Sends the last update, unless nobody waits for it.
    pub(crate) fn end(&self, update: Update) {
        let _ = self.updates.try_send(update);
    }
}

/// Work of one job.
#[derive(Debug)]
pub(crate) enum Work {
    /// Choices, one after another.
    Generate {
        /// One a prompt.
        requests: Vec<Request>,
        /// Choices of each: where it has a seed, each has the next one.
        choices: usize,
        /// The conversation, where it has images or audio: they are decoded into the prompt when its turn has come.
        turns: Option<Vec<Turn>>,
    },
    /// Texts to vectors.
    Embed {
        inputs: Vec<EmbedInput>,
        /// Texts that are too long are cut.
        truncate: bool,
        /// Short texts share graphs.
        packs: bool,
    },
    Transcribe {
        source: Source,
        options: Box<qhx::TranscribeOptions>,
        /// The text comes as it is known.
        streams: bool,
    },
    /// A text to an audio file.
    Speak {
        text: String,
        options: qhx::SpeakOptions,
        /// Format of the whole; none where samples are sent as they are made.
        format: Option<qhx::AudioFormat>,
    },
    /// Relevance of documents to a query.
    Rank {
        query: String,
        documents: Vec<String>,
        /// Texts that are too long are cut.
        truncate: bool,
        /// Instruction in the place of the bundle's own.
        instruction: Option<String>,
    },
    /// Positions of a conversation that has more than text.
    Count { request: Box<Request>, turns: Vec<Turn> },
}

#[derive(Debug)]
pub(crate) enum EmbedInput {
    /// An image, as a client sent it.
    Image(Source),
    Text(String, Role),
    Tokens(Vec<u32>),
}

/// Something that came of a job.
#[derive(Debug)]
pub(crate) enum Update {
    /// The prompt of a choice is tokenized and fits the model.
    Started,
    /// The prompt of a choice is consumed.
    Prefilled {
        choice: usize,
        tokens: usize,
        reused: usize,
        /// Beginning of its answer.
        beginning: Beginning,
    },
    /// A token of a choice was chosen, or what was held back is shown.
    Token {
        choice: usize,
        id: Option<u32>,
        text: String,
        logprobs: Option<TokenLogprobs>,
    },
    /// A choice is over.
    Finished {
        choice: usize,
        generation: Box<Generation>,
    },
    Vectors {
        vectors: Vec<Vec<f32>>,
        tokens: usize,
    },
    /// A part of a transcript's text.
    Heard(String),
    Transcribed(Box<Transcript>),
    /// Samples of a part of a text, 16 bits each.
    Said {
        bytes: Vec<u8>,
        rate: u32,
    },
    /// The whole of a text in its format; nothing where its samples were sent.
    Spoken(Vec<u8>),
    Ranked {
        ranked: Vec<Ranked>,
        tokens: usize,
    },
    Counted(usize),
    Failed(ApiError),
}

/// Jobs in the order in which they came.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Jobs that may wait.
    max: usize,
    /// Cancels all jobs.
    pub cancel: CancelToken,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Job>,
    running: HashMap<u64, usize>,
    closed: bool,
}

impl Queue {
    pub(crate) fn new(max: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), max, cancel: CancelToken::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job, unless as many wait as may. Of those that wait, the last one of the client that has the most goes
    /// then for the first one of another, so that no client keeps the others out.
    pub(crate) fn push(&self, job: Job) -> Result<(), ApiError> {
        let mut state = self.lock();
        if state.closed {
            return Err(ApiError::stopping());
        }
        // Those whose clients have left wait for nothing.
        state.waiting.retain(|job| !job.ticket.is_cancelled());
        let mut refused = None;
        if state.waiting.len() >= self.max {
            let mut counts: HashMap<u64, usize> = HashMap::new();
            state.waiting.iter().for_each(|job| *counts.entry(job.client).or_default() += 1);
            let own = counts.get(&job.client).copied().unwrap_or_default();
            let most = counts.into_iter().max_by_key(|&(_, count)| count);
            let last = most.filter(|&(_, count)| count > own + 1).and_then(|(client, _)| {
                state.waiting.iter().rposition(|waiting| waiting.client == client)
            });
            let Some(last) = last else { return Err(self.full()) };
            refused = state.waiting.remove(last);
        }
        state.waiting.push_back(job);
        drop(state);
        self.changed.notify_one();
        if let Some(refused) = refused {
            refused.updates.end(Update::Failed(self.full()));
        }
        Ok(())
    }

    fn full(&self) -> ApiError {
        let message = format!("{} requests wait already; try again later", self.max);
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("queue_full")
    }

    /// Waits for the next job: of the clients of whom least is worked on, the one that came first. `None` once there
    /// will be no more.
    pub(crate) fn pop(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            let running = |job: &Job| state.running.get(&job.client).copied().unwrap_or_default();
            let waiting = state.waiting.iter().enumerate();
            let next = waiting.min_by_key(|(at, job)| (running(job), *at)).map(|(at, _)| at);
            if let Some(job) = next.and_then(|at| state.waiting.remove(at)) {
                *state.running.entry(job.client).or_default() += 1;
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a job of a client is over.
    pub(crate) fn done(&self, client: u64) {
        let mut state = self.lock();
        if let Some(running) = state.running.get_mut(&client) {
            *running -= 1;
            if *running == 0 {
                state.running.remove(&client);
            }
        }
    }

    /// Takes no more jobs; those that are there are done.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Number of jobs that wait, and of jobs under way.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        let waiting = state.waiting.iter().filter(|job| !job.ticket.is_cancelled()).count();
        (waiting, state.running.values().sum())
    }
}
