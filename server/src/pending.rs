//! A job that a client waits for.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::StatusCode;
use qhx::CancelToken;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, Receiver};
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use crate::error::{ApiError, Result, broken};
use crate::queue::{Job, Outbox, Update, Work};
use crate::registry::Served;
use crate::request::Context as GenerationRequest;

/// Updates that wait for a client to read them. Then the worker waits, too.
const UPDATES: usize = 4096;

/// A job that is waited for. It is cancelled once nobody waits any more.
pub(crate) struct Pending {
    updates: Receiver<Update>,
    peeked: Option<Update>,
    /// Time limit. The ticket ends the work by itself; this one answers the client.
    deadline: Pin<Box<Sleep>>,
    ticket: CancelToken,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.ticket.cancel();
    }
}

impl Pending {
    /// Gives a job to the workers. `ticket` is that of the work: see [`Context::ticket`](GenerationRequest::ticket).
    pub(crate) fn submit(
        asked: &GenerationRequest,
        model: &std::sync::Arc<Served>,
        history: Vec<u64>,
        ticket: CancelToken,
        work: Work,
    ) -> Result<Self> {
        let (sender, updates) = mpsc::channel(UPDATES);
        let shared = &asked.shared;
        let job = Job {
            model: std::sync::Arc::clone(model),
            client: asked.client,
            ticket: ticket.clone(),
            work,
            history,
            updates: Outbox {
                updates: sender,
                runtime: Handle::current(),
                patience: shared.options.write_limit,
                ticket: ticket.clone(),
            },
            memory: asked.memory.clone(),
        };
        // Before anything can fail: what is not waited for is not done.
        let deadline = Box::pin(sleep_until(Instant::now() + shared.options.time_limit));
        let pending = Self { updates, peeked: None, deadline, ticket };
        shared.queue.push(job).inspect_err(|e| {
            if e.status == StatusCode::TOO_MANY_REQUESTS {
                shared.metrics.refused.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        })?;
        Ok(pending)
    }

    /// Polls the next update; `None` once the job is over.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Update>> {
        if let Some(update) = self.peeked.take() {
            return Poll::Ready(Some(update));
        }
        if let Poll::Ready(update) = self.updates.poll_recv(cx) {
            return Poll::Ready(update);
        }
        if self.deadline.as_mut().poll(cx).is_ready() {
            self.ticket.cancel();
            return Poll::Ready(Some(Update::Failed(ApiError::timeout())));
        }
        Poll::Pending
    }

    /// Waits for the next update.
    pub(crate) async fn next(&mut self) -> Result<Option<Update>> {
        match poll_fn(|cx| self.poll_next(cx)).await {
            Some(Update::Failed(error)) => Err(error),
            update => Ok(update),
        }
    }

    /// Waits until the job has begun, that is until its prompt is known to fit, but no longer than `time`: what fails
    /// before has a status of its own, and is no end of a stream that has begun.
    pub(crate) async fn begun(&mut self, time: Duration) -> Result<()> {
        if let Ok(first) = timeout(time, self.next()).await {
            self.peeked = first?;
        }
        Ok(())
    }

    /// The only thing that comes of a job.
    pub(crate) async fn only(mut self) -> Result<Update> {
        self.next().await?.ok_or_else(broken)
    }
}
