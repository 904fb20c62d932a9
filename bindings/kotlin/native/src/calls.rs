//! Models, and calls that can be cancelled.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use qhx::{CancelToken, Times, Transcript};
use qhx_bindings::{Answer, Caller, Fault, Item, Loaded, RequestJson, Stream, Vectors};

use crate::fault::Result;
use crate::handles::Table;

static MODELS: Table<Loaded> = Table::new("the model is closed");
static CALLS: Table<Call> = Table::new("the call has ended");

/// Something that is asked of a model, from before it begins.
struct Call {
    ticket: CancelToken,
    stream: OnceLock<Stream>,
}

/// A thread of the virtual machine: it may block, and is never to stop but by the call's ticket.
struct Thread;

impl Caller for Thread {
    type Stop = Infallible;

    fn blocking<T: Send>(&self, wait: impl FnOnce() -> T + Send) -> T {
        wait()
    }

    fn look(&self) -> std::result::Result<(), Infallible> {
        Ok(())
    }
}

/// A new call.
pub(crate) fn begin() -> i64 {
    CALLS.add(Call { ticket: CancelToken::new(), stream: OnceLock::new() })
}

/// Ends what a call does, within one graph execution; it does nothing where that has ended.
pub(crate) fn cancel(call: i64) {
    if let Ok(call) = CALLS.get(call) {
        call.ticket.cancel();
    }
}

/// Ends a call, and its stream where it is.
pub(crate) fn end(call: i64) -> Result<()> {
    let Some(call) = CALLS.remove(call) else { return Ok(()) };
    match call.stream.get() {
        Some(stream) => Ok(stream.close(&Thread)?),
        None => Ok(()),
    }
}

/// Loads a bundle. The call ends with it: what cancels loading would cancel all that the model does afterwards.
pub(crate) fn open(call: i64, bundle: String, options: String) -> Result<i64> {
    let ticket = CALLS.get(call)?.ticket.clone();
    let loaded = qhx_bindings::open(&Thread, PathBuf::from(bundle), options, &ticket)?;
    CALLS.remove(call);
    Ok(MODELS.add(loaded))
}

/// An open model.
pub(crate) fn model(model: i64) -> Result<Arc<Loaded>> {
    Ok(MODELS.get(model)?)
}

/// Cancels what a model does, waits for its end and frees it.
pub(crate) fn close(model: i64) -> Result<()> {
    let Ok(loaded) = MODELS.get(model) else { return Ok(()) };
    loaded.shared.close(&Thread)?;
    MODELS.remove(model);
    Ok(())
}

pub(crate) fn generate(
    model: i64,
    call: i64,
    asked: RequestJson,
    items: Vec<Item>,
) -> Result<Answer> {
    let (model, call) = (MODELS.get(model)?, CALLS.get(call)?);
    Ok(model.shared.generate(&Thread, &call.ticket, asked, items)?)
}

/// Begins a stream.
pub(crate) fn stream(model: i64, call: i64, asked: RequestJson, items: Vec<Item>) -> Result<()> {
    let (model, call) = (MODELS.get(model)?, CALLS.get(call)?);
    let already = || Fault::usage("the call has a stream already");
    if call.stream.get().is_some() {
        return Err(already().into());
    }
    let stream = Stream::open(&Thread, &model.shared, &call.ticket, asked, items)?;
    // Where another thread was faster, this one ends as it is dropped.
    call.stream.set(stream).map_err(|_| already().into())
}

/// The next piece of a stream.
pub(crate) fn next(call: i64) -> Result<Option<String>> {
    let call = CALLS.get(call)?;
    let none = || Fault::usage("the call has no stream");
    Ok(call.stream.get().ok_or_else(none)?.next(&Thread)?)
}

/// The answer of a stream that has ended.
pub(crate) fn result(call: i64) -> Result<Option<Answer>> {
    let call = CALLS.get(call)?;
    Ok(call.stream.get().map(Stream::result).transpose()?.flatten())
}

pub(crate) fn embed(
    model: i64,
    call: i64,
    texts: Vec<String>,
    role: &str,
    truncate: bool,
) -> Result<Vectors> {
    let (model, call) = (MODELS.get(model)?, CALLS.get(call)?);
    Ok(model.shared.embed(&Thread, &call.ticket, texts, role, truncate)?)
}

pub(crate) fn transcribe(
    model: i64,
    call: i64,
    audio: Item,
    max_new: Option<usize>,
    times: Times,
    vad: Option<String>,
) -> Result<Transcript> {
    let (model, call) = (MODELS.get(model)?, CALLS.get(call)?);
    Ok(model.shared.transcribe(&Thread, &call.ticket, audio, max_new, times, vad)?)
}
