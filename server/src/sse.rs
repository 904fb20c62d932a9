//! Answers as streams: of server-sent events, or of lines of JSON.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use http_body::Frame;
use serde_json::Value;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::answer::{Answers, Step};
use crate::error::{ApiError, Result, broken};
use crate::generation_request::GenerationRequest;
use crate::pending::Pending;
use crate::queue::Update;
use crate::request;
use crate::request_metrics::Tally;

/// Keeps proxies from collecting a stream.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Events that are to be sent.
#[derive(Debug, Default)]
pub(crate) struct Events(VecDeque<Bytes>);

impl Events {
    pub(crate) fn data(&mut self, value: &Value) {
        self.0.push_back(format!("data: {value}\n\n").into());
    }

    pub(crate) fn named(&mut self, name: &str, value: &Value) {
        self.0.push_back(format!("event: {name}\ndata: {value}\n\n").into());
    }

    /// A line of JSON.
    pub(crate) fn line(&mut self, value: &Value) {
        self.0.push_back(format!("{value}\n").into());
    }

    pub(crate) fn bytes(&mut self, bytes: Vec<u8>) {
        self.0.push_back(bytes.into());
    }

    pub(crate) fn text(&mut self, text: &'static str) {
        self.0.push_back(Bytes::from_static(text.as_bytes()));
    }
}

/// Writer of a stream in the format of an interface.
pub(crate) trait Writer: Send + Unpin + 'static {
    /// Media type of the stream.
    const KIND: &'static str = "text/event-stream; charset=utf-8";
    /// Sent while nothing happens, to show that the connection is alive.
    const PING: Option<&'static str> = Some(": ping\n\n");
    /// Writes the first events.
    fn begin(&mut self, events: &mut Events);
    /// Writes the events of a step.
    fn step(&mut self, step: &Step, answers: &Answers, events: &mut Events);
    /// Writes the last events.
    fn end(&mut self, answers: &Answers, events: &mut Events);
    /// The end of a stream that failed.
    fn failed(&mut self, error: &ApiError, events: &mut Events);
}

/// Form of a job's updates in a stream.
pub(crate) trait Progress: Send + Unpin + 'static {
    /// Media type of the stream.
    const KIND: &'static str = "text/event-stream; charset=utf-8";
    /// Sent while nothing happens, to show that the connection is alive.
    const PING: Option<&'static str> = Some(": ping\n\n");
    /// Writes the events of an update, or, without one, of the end. True if the stream is over.
    ///
    /// # Errors
    /// When the job failed.
    fn take(&mut self, update: Option<Update>, events: &mut Events, tally: &Tally) -> Result<bool>;
    /// The end of a stream that failed.
    fn failed(&mut self, error: &ApiError, events: &mut Events);
}

/// Answers, and the writer of their events.
struct Writing<W> {
    answers: Answers,
    writer: W,
}

impl<W: Writer> Progress for Writing<W> {
    const KIND: &'static str = W::KIND;
    const PING: Option<&'static str> = W::PING;

    fn take(&mut self, update: Option<Update>, events: &mut Events, tally: &Tally) -> Result<bool> {
        let Self { answers, writer } = self;
        let step = match update {
            Some(update) => answers.take(update),
            None if answers.are_over() => {
                writer.end(answers, events);
                return Ok(true);
            }
            None => Err(broken()),
        };
        answers.note(tally);
        if let Some(step) = step? {
            writer.step(&step, answers, events);
            answers.note(tally);
        }
        Ok(false)
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        self.writer.failed(error, events);
    }
}

/// A stream under way. Once it is dropped, the work ends.
struct Stream<P> {
    pending: Pending,
    progress: P,
    events: Events,
    heartbeat: Interval,
    over: bool,
    tally: Arc<Tally>,
}

impl<P: Progress> Stream<P> {
    fn update(&mut self, update: Option<Update>) {
        let taken = self.progress.take(update, &mut self.events, &self.tally);
        self.over = taken.unwrap_or_else(|error| {
            let reason = error.reason();
            self.tally.update(|record| record.error = Some(reason));
            self.progress.failed(&error, &mut self.events);
            true
        });
    }
}

impl<P: Progress> http_body::Body for Stream<P> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        loop {
            if let Some(bytes) = this.events.0.pop_front() {
                this.heartbeat.reset();
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if this.over {
                return Poll::Ready(None);
            }
            if let Poll::Ready(update) = this.pending.poll_next(cx) {
                this.update(update);
            } else if this.heartbeat.poll_tick(cx).is_ready() {
                P::PING.into_iter().for_each(|ping| this.events.text(ping));
            } else {
                return Poll::Pending;
            }
        }
    }
}

/// The response that streams an answer. It begins once the prompt is known to fit, or after a heartbeat's time.
pub(crate) async fn stream<W: Writer>(
    context: &request::Context,
    asked: GenerationRequest,
    mut writer: W,
) -> Result<Response> {
    let GenerationRequest { mut pending, answers, .. } = asked;
    pending.begun(context.shared.options.heartbeat).await?;
    let mut events = Events::default();
    writer.begin(&mut events);
    Ok(respond(context, pending, Writing { answers, writer }, events))
}

/// The response that streams a job's updates, behind the first events.
pub(crate) fn respond<P: Progress>(
    context: &request::Context,
    pending: Pending,
    progress: P,
    events: Events,
) -> Response {
    let mut heartbeat = interval(context.shared.options.heartbeat);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeat.reset();
    let tally = Arc::clone(&context.tally);
    let stream = Stream { pending, progress, events, heartbeat, over: false, tally };
    let headers =
        [(header::CONTENT_TYPE, P::KIND), (header::CACHE_CONTROL, "no-cache"), (BUFFERING, "no")];
    (headers, Body::new(stream)).into_response()
}
